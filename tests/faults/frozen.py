"""A rank is frozen in the middle of a call, or the broker in the middle of a commit: the others are told, by name."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path

from tests.faults.board import Row
from tests.faults.brokers import victim
from tests.faults.proxy import probe
from tests.faults.subject import PEERS_S, Form, Incarnation, file_job, kafka_job
from tests.faults.survivors import goes_on_or_ends, said_by, stopped
from tests.model import PLAN_2

TIMEOUT_S = 5.0
"""``commit_timeout_s`` of these jobs."""
CLOSE_S = 5.0
"""What ``close`` is given."""
CLOSE_MORE_S = 15.0
"""Beside which docs/guarantees.md promises a few seconds (P16)."""
TEAM = (2, PLAN_2)

IN_MARKER = [
    ("cut.agreed", 1),
    ("votes.gathered", 0),
    ("cut.drained", 1),
    ("mark.submitted", 1),
    ("dense.part", 1),
    ("mark.durable", 1),
    ("commit.append", 0),
    ("commit.appended", 0),
]
"""Points of a marker, and the rank of two that is frozen there."""
IN_RESTORE = [
    ("restore.rows", 1),
    ("restore.dense", 0),
    ("restore.planned", 1),
    ("restore.frame", 0),
    ("claim.append", 0),
]
IN_CLOSE = [("mark.durable", 1), ("votes.gathered", 0)]


def ranks_freeze_in_markers(form: Form) -> None:
    """The future fails on the other rank, by the name of the frozen one; afterwards all go on, or end by name."""
    subject = file_job(form, "frozen", commit_timeout_s=TIMEOUT_S)
    for point, frozen in IN_MARKER if form.full else IN_MARKER[:2]:
        row = form.board.row(f"SIGSTOP of a rank in a marker, at {point}, then SIGCONT, files")
        row.injected += 1
        with subject.living(row, f"{point}=stop@2", frozen, team=TEAM, life_s=1200.0) as job:
            await_frozen(job, row, frozen)
            error, took_s = await_failure(job, 1 - frozen)
            named(row, error, frozen)
            row.timed("the future of a marker", took_s, TIMEOUT_S + PEERS_S)
            job.job.signal(signal.SIGCONT, [frozen])
            went_on = goes_on_or_ends(job, row)
        row.remark = f"the future failed after {took_s:.0f} s; the job {'went on' if went_on else 'ended by name'}"
    subject.compare_all(form.draw("frozen markers"), None if form.full else 2)


def ranks_freeze_in_restores(form: Form) -> None:
    """``restore()`` raises on the other rank, by the name of the frozen one, which ends too when it wakes up."""
    subject = file_job(form, "restoring", commit_timeout_s=TIMEOUT_S)
    first = form.board.row(f"SIGSTOP of a rank in restore(), at {IN_RESTORE[0][0]}, files")
    with subject.living(first, team=TEAM) as job:
        job.await_reports(2)
    for point, frozen in IN_RESTORE if form.full else IN_RESTORE[:1]:
        row = form.board.row(f"SIGSTOP of a rank in restore(), at {point}, files")
        row.injected += 1
        with subject.living(row, f"{point}=stop@1", frozen, team=TEAM) as job:
            await_frozen(job, row, frozen)
            began, other = time.monotonic(), job.job.processes[1 - frozen]
            job.wait("the other rank ends", lambda other=other: not other.is_alive(), may_die=True)
            took_s = time.monotonic() - began
            named(row, said_by(job, 1 - frozen), frozen)
            row.timed("restore()", took_s, TIMEOUT_S + PEERS_S)
            row.remark = f"the other rank ended after {took_s:.0f} s"
            _ends_too(job, row, frozen)
    subject.compare_all(form.draw("frozen restores"))


def ranks_freeze_in_closes(form: Form) -> None:
    """``close()`` ends on the other rank, whose marker in flight fails."""
    subject = file_job(form, "closing", commit_timeout_s=2 * TIMEOUT_S, marker_every=None)
    for point, frozen in IN_CLOSE if form.full else IN_CLOSE[:1]:
        row = form.board.row(f"SIGSTOP of a rank in close(), at {point} of the marker in flight, files")
        row.injected += 1
        how = {"close_after": 2, "close_s": CLOSE_S}
        with subject.living(row, f"{point}=stop@1", frozen, team=TEAM, **how) as job:
            await_frozen(job, row, frozen)
            other = 1 - frozen
            job.wait("close() of the other rank", lambda other=other: job.lines(f"closed-{other}"), may_die=True)
            took_s = float(job.lines(f"closed-{other}")[0])
            row.timed("close()", took_s, CLOSE_S + CLOSE_MORE_S)
            error, _ = await_failure(job, other)
            named(row, error, frozen)
            row.remark = f"close({CLOSE_S:.0f}) took {took_s:.1f} s: {error.splitlines()[0]}"
            _ends_too(job, row, frozen)
    subject.compare_all(form.draw("frozen closes"))


def broker_freezes_in_commits(form: Form) -> None:
    """Rank 0 stands before its COMMIT while the broker is stopped: all ranks are told, and go on once it answers."""
    row = form.board.row("SIGSTOP of the broker in the middle of a commit, then SIGCONT")
    longest_s, said = 0.0, ""
    with victim(form) as broker:
        subject = kafka_job(form, "commit", broker.bootstrap, commit_timeout_s=TIMEOUT_S)
        for _ in range(3 if form.full else 1):
            row.injected += 1
            with subject.living(row, "commit.append=stop@2", 0, team=TEAM, life_s=1200.0) as job:
                job.wait("the stop before COMMIT", lambda job=job: job.lines("fired") and stopped(job.pid(0)))
                before = [len(job.lines(f"settled-{rank}")) for rank in range(2)]
                broker.signal(signal.SIGSTOP)
                job.job.signal(signal.SIGCONT, [0])
                for rank in range(2):
                    error, took_s = await_failure(job, rank, before[rank])
                    longest_s, said = max(longest_s, took_s), error
                    row.timed("the future of a marker", took_s, TIMEOUT_S + PEERS_S)
                    if "the log" not in error and broker.bootstrap not in error:
                        row.err(f"rank {rank} names neither the log nor its broker: {error}")
                row.fired += probe(broker.port) == "silence"
                broker.signal(signal.SIGCONT)
                job.await_reports(1)
        row.remark = f"the longest future took {longest_s:.0f} s: {said.splitlines()[0]}"
        subject.compare_all(form.draw("frozen broker"), None if form.full else 2)


def await_frozen(job: Incarnation, row: Row, rank: int) -> None:
    """Until the point was reached, and the process stands still: that is the evidence."""
    job.wait("the point", lambda: job.lines("fired"))
    job.wait("the rank to stand still", lambda: stopped(job.pid(rank)))
    row.fired += 1


def await_failure(job: Incarnation, rank: int, since: int = 0) -> tuple[str, float]:
    """The error of the first future that has failed on a rank, and how long it took."""

    def failed() -> list[tuple[str, float]]:
        settled = map(json.loads, job.lines(f"settled-{rank}")[since:])
        return [(each["error"], each["took_s"]) for each in settled if each["error"]]

    job.wait(f"a future of rank {rank} fails", failed, may_die=True)
    return failed()[0]


def named(row: Row, said: str, rank: int) -> None:
    """The error must name the rank that was waited for."""
    if not re.search(rf"\brank {rank}\b", said):
        row.err(f"the error does not name rank {rank}: {said!r}")


def _ends_too(job: Incarnation, row: Row, frozen: int) -> None:
    """The frozen rank wakes up: it must end, and may not have gone on alone."""
    committed = _commits(job.run)
    job.job.signal(signal.SIGCONT, [frozen])
    job.wait("the frozen rank ends", lambda: not job.job.processes[frozen].is_alive(), may_die=True)
    if _commits(job.run) != committed:
        row.err(f"rank {frozen} committed without the other one")


def _commits(run: Path) -> str:
    path = run / "reported"
    return path.read_text() if path.exists() else ""
