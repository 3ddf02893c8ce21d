"""One rank dies and the others live; a trainer that was thought dead wakes up; a clock that jumps."""

from __future__ import annotations

import re
import signal
import time

from tests import ranks
from tests.faults.board import Row
from tests.faults.live import live
from tests.faults.subject import (
    PEERS_S,
    Form,
    Incarnation,
    Subject,
    bucket_job,
    file_job,
    kafka_job,
    shorten_twice,
)
from tests.model import PLAN_2, PLAN_2_OTHER, PLAN_3
from tests.packed import unpacked

ONE_RANK = [(2, PLAN_2, 1), (3, PLAN_3, 0), (3, PLAN_3, 2), (2, PLAN_2_OTHER, 0)]
"""World size, plan, and the rank that dies."""


def one_rank_dies(form: Form) -> None:
    """The others end with an error within a bound, and a restart has every committed marker."""
    subject = file_job(form, "one-rank", commit_timeout_s=20.0)
    row = form.board.row("SIGKILL of one rank while the others live, files")
    draw = form.draw("one rank")
    for world, plan, victim in ONE_RANK * 3 if form.full else ONE_RANK[1:3]:
        row.injected += 1
        with subject.living(row, team=(world, plan)) as incarnation:
            incarnation.await_reports(draw.randint(1, 2))
            incarnation.job.kill([victim])
            others = [each for rank, each in enumerate(incarnation.job.processes) if rank != victim]
            ended = [not each.is_alive() for each in others]
            incarnation.wait(
                "the others end", lambda others=others: not any(each.is_alive() for each in others), may_die=True
            )
            said = [said_by(incarnation, rank) for rank in range(world) if rank != victim]
            row.fired += incarnation.job.processes[victim].exitcode == -signal.SIGKILL and not all(ended)
            for text in said:
                if "Error" not in text:
                    row.err(f"a rank without its peer said {text!r}")
    subject.compare_all(draw, None if form.full else 2)


def said_by(incarnation: Incarnation, rank: int) -> str:
    """How a rank ended by itself: what it raised."""
    pipe = incarnation.job.pipes[rank]
    if not pipe.poll(1):
        return ""
    ok, value = unpacked(pipe.recv_bytes())
    raised = [line for line in str(value).splitlines() if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return "it returned" if ok else raised[-1] if raised else str(value)


FREEZE_S = 40.0
"""Longer than a marker's future may take (P16)."""
FREEZE_TIMEOUT_S = 5.0
"""``commit_timeout_s`` of that job."""


def one_rank_freezes(form: Form) -> None:
    """SIGSTOP of one rank for longer than a marker may take, then SIGCONT: the job goes on, or all end by name."""
    subject = file_job(form, "frozen", commit_timeout_s=FREEZE_TIMEOUT_S)
    row = form.board.row("SIGSTOP of one rank for 40 s, then SIGCONT, files")
    draw, went_on = form.draw("frozen"), 0
    for world, plan, victim in ONE_RANK if form.full else ONE_RANK[:1]:
        row.injected += 1
        with subject.living(row, team=(world, plan), life_s=600.0) as job:
            job.await_reports(draw.randint(1, 2))
            time.sleep(draw.uniform(0.0, 0.5))
            job.job.signal(signal.SIGSTOP, [victim])
            before, settled = job.reported(), len(job.lines("took_s"))
            time.sleep(FREEZE_S)
            row.fired += len(job.reported()) <= len(before) + 1  # one may have been on its way
            job.job.signal(signal.SIGCONT, [victim])
            went_on += goes_on_or_ends(job, row)
            if victim:
                check_bounds(job, row, settled, FREEZE_TIMEOUT_S)
    row.remark = f"the job went on by itself {went_on} times of {row.injected}"
    subject.compare_all(draw, None if form.full else 2)


def goes_on_or_ends(job: Incarnation, row: Row) -> bool:
    """Whether two more markers are committed; otherwise all ranks must have ended, each with an error."""
    known, processes = len(job.reported()), job.job.processes

    def living() -> int:
        return sum(each.is_alive() for each in processes)

    job.wait("markers go on, or ranks end", lambda: len(job.reported()) > known + 1 or not living(), may_die=True)
    if living() == len(processes):
        return True
    job.wait("all ranks end", lambda: not living(), may_die=True)
    for rank in range(len(processes)):
        if "Error" not in (text := said_by(job, rank)):
            row.err(f"rank {rank} ended without a name: {text!r}")
    return False


def check_bounds(job: Incarnation, row: Row, since: int, commit_timeout_s: float) -> None:
    """No future has taken longer than is promised, by the count of futures that had settled before."""
    for took in map(float, job.lines("took_s")[since:]):
        row.timed("the future of a marker", took, commit_timeout_s + PEERS_S)


def zombies_on_files(form: Form) -> None:
    """A stopped trainer wakes up beside its successor, file log."""
    _zombies(form, file_job(form, "zombie"), "files", 6 if form.full else 1)


def zombies_on_kafka(form: Form) -> None:
    """A stopped trainer wakes up beside its successor, Kafka."""
    _zombies(form, kafka_job(form, "zombie"), "kafka", 6 if form.full else 1)


def zombies_on_bucket(form: Form) -> None:
    """A stopped trainer wakes up beside its successor, in a bucket, whose control records were shortened meanwhile."""
    if form.full:
        _zombies(form, bucket_job(form, "zombie"), "bucket", 3)
    _zombies(form, bucket_job(form, "zombie"), "bucket", 3 if form.full else 1, shorten=True)


def _zombies(form: Form, subject: Subject, where: str, times: int, *, shorten: bool = False) -> None:
    """Rank 0 of the old trainer is stopped before its COMMIT: it has looked, and nobody had taken over.

    Args:
        form: How much is to be done.
        subject: The job.
        where: Its kind of log.
        times: How often.
        shorten: Whether the control records are shortened before it wakes up, so that its record's name is free.
    """
    new_trainer = "new trainer, control records shortened" if shorten else "new trainer"
    row = form.board.row(f"zombie: SIGSTOP before COMMIT, {new_trainer}, SIGCONT, {where}")
    draw, stale = form.draw("zombie"), 0
    for _ in range(times):
        row.injected += 1
        old = subject.start("commit.append=stop@2", 0, team=(2, PLAN_2))
        try:
            old.wait("the stop before COMMIT", lambda old=old: old.lines("fired"))
            old.wait("rank 0 to stand still", lambda old=old: stopped(old.pid(0)))
            old.job.signal(signal.SIGSTOP)
            reported, generation = old.reported(), subject.lineage().newest_generation
            with subject.living(row, team=(3, PLAN_3)) as new:
                new.await_reports(1)
                if shorten:
                    shorten_twice(subject.settings)
                before = subject.lineage().stale
                old.job.signal(signal.SIGCONT)
                processes = old.job.processes
                old.wait("the end of the zombie", lambda p=processes: not any(e.is_alive() for e in p), may_die=True)
                said = [said_by(old, rank) for rank in range(2)]
                new.await_reports(1)  # the successor is not disturbed
            after = subject.lineage()
            stale += after.stale - before
            row.fired += after.stale > before
            for text in said:
                if "FencedError" not in text:
                    row.err(f"a zombie ended with {text!r}")
            late = [marker for marker in old.reported() if marker not in reported]
            if late or any(m.generation == generation and m not in reported for m in after.commits):
                row.err(f"a fenced trainer's markers count: {late}")
        finally:
            old.kill()
        subject.examine(row, old)
    row.remark = f"{stale} stale records in the control log, none counts; all ranks ended with FencedError"
    subject.compare_all(draw, None if form.full else 2)


def zombie_with_the_lock(form: Form) -> None:
    """It was stopped while it held the control log's lock: its successor is told so, and goes on once it is gone."""
    subject = file_job(form, "lock")
    row = form.board.row("zombie: SIGSTOP with the control log's lock held, files")
    row.injected += 1
    old = subject.start("control.written=stop@3", 0, team=(2, PLAN_2))
    try:
        old.wait("the stop under the lock", lambda: old.lines("fired"))
        old.wait("rank 0 to stand still", lambda: stopped(old.pid(0)))
        world, orders = subject.orders(team=(2, PLAN_2))
        try:
            ranks.start(world, live, orders).join(90)
        except ranks.RankFailed as failure:
            row.fired += "end the other trainer that holds the lock" in str(failure)
    finally:
        old.kill()
    subject.examine(row, old)
    with subject.living(row) as new:
        new.await_reports(1)
    subject.compare_all(form.draw("lock"))


def stopped(pid: int) -> bool:
    """Whether a process stands still by SIGSTOP."""
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def clock_jumps(form: Form) -> None:
    """The wall clock of every rank jumps by weeks at every look."""
    subject = file_job(form, "clock")
    row = form.board.row("clock jumps of up to 40 days, both ways, files")
    looks = 0
    for _ in range(4 if form.full else 1):
        row.injected += 1
        with subject.living(row, wild_clock=True) as incarnation:
            incarnation.await_reports(2)
            clocks = [incarnation.run / f"clock-{rank}" for rank in range(len(incarnation.job.processes))]
            seen = sum(int(clock.read_text() or 0) for clock in clocks if clock.exists())
            row.fired += seen > 0
            looks += seen
    row.remark = f"{looks} looks at it"
    subject.compare_all(form.draw("clock"), None if form.full else 2)
