"""SIGKILL of the trainer: at random moments, and at every point that is compiled into the code."""

from __future__ import annotations

import random
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

from tests.faults.board import Row
from tests.faults.subject import Form, Incarnation, Subject, bucket_job, file_job, kafka_job


@dataclass(frozen=True)
class Point:
    """One failpoint, and what a kill there must leave in the log."""

    rank: int
    commits: Callable[[int], range] | None = None
    """Pass at which it fires -> how many markers its generation may have; None: nothing is known."""
    only: str = ""
    """The log that passes it; empty: all do."""


def _none(_: int) -> range:
    return range(1)


def _before(nth: int) -> range:
    """The marker that passes here is not committed."""
    return range(nth - 1, nth)


def _after(nth: int) -> range:
    """It is."""
    return range(nth, nth + 1)


POINTS: dict[str, Point] = {
    "claim.append": Point(0, _none),
    "claim.appended": Point(0, _none),
    "hello.submitted": Point(1, _none),
    "sweep.sent": Point(1, _none),
    "restore.planned": Point(1, _none),
    "restore.frame": Point(0, _none),
    "restore.rows": Point(1, _none),
    "restore.dense": Point(0, _none),
    "drain.sent": Point(1),
    "cut.drained": Point(1, _before),
    "mark.submitted": Point(0, _before),
    "cut.agreed": Point(1, _before),
    "dense.save": Point(0, _before),
    "dense.part": Point(1, _before),
    "dense.part_written": Point(1, _before),
    "dense.metadata": Point(0, _before),
    "dense.saved": Point(1, _before),
    "mark.wait": Point(0, _before),
    "mark.durable": Point(1, _before),
    "votes.gathered": Point(0, _before),
    "commit.append": Point(0, _before),
    "commit.appended": Point(0, _after),
    "commit.told": Point(1, _after),
    "stream.sent": Point(1),
    "stream.acknowledged": Point(0),
    "stream.resent": Point(1, only="files"),
    "segment.written": Point(0, only="files"),
    # The first record is the CLAIM. What was written and not synced outlives the process, not the machine.
    "control.written": Point(0, lambda nth: range(max(0, nth - 1), nth), only="files"),
    # Before and after each put: of rows, control records and dense state.
    "store.upload": Point(1, only="bucket"),
    "store.uploaded": Point(0, only="bucket"),
}
AT_OUTAGE = "stream.resent"

# (point, at which pass; "": at a random moment). A sweep runs only before the first marker.
FILE_KILLS = [
    ("sweep.sent", 3),
    ("commit.append", 1),
    ("", 0),
    ("dense.part_written", 2),
    ("restore.frame", 4),
    ("stream.resent", 2),
    ("claim.appended", 1),
    ("commit.appended", 2),
    ("dense.metadata", 1),
    ("", 0),
]
KAFKA_KILLS = [
    ("sweep.sent", 2),
    ("votes.gathered", 2),
    ("commit.appended", 1),
    ("", 0),
]
BUCKET_KILLS = [
    ("store.uploaded", 3),
    ("commit.append", 1),
    ("", 0),
]


def kills_on_files(form: Form) -> None:
    """All ranks die, on the file log."""
    if not form.full:
        _torment(form, file_job(form, "killed"), FILE_KILLS, "files", most=3)
        return
    _torment(form, file_job(form, "killed"), long_form(form.draw("files"), "files"), "files", most=None)


def kills_on_kafka(form: Form) -> None:
    """All ranks die, on Kafka."""
    kills = long_form(form.draw("kafka"), "kafka") if form.full else KAFKA_KILLS
    _torment(form, kafka_job(form, "killed"), kills, "kafka", most=None if form.full else 2)


def kills_on_bucket(form: Form) -> None:
    """All ranks die, in a bucket."""
    kills = long_form(form.draw("bucket"), "bucket") if form.full else BUCKET_KILLS
    _torment(form, bucket_job(form, "killed"), kills, "bucket", most=None if form.full else 2)


def kills_while_drains_are_slow(form: Form) -> None:
    """Tables so large that sending them takes longer than a step."""
    subject = file_job(form, "large", marker_every=2, sweep_bytes=2**24)
    subject.scale = 800 if form.full else 300
    row = form.board.row("SIGKILL while a drain takes longer than a step, files")
    draw, steps, drains = form.draw("large"), [], []
    for _ in range(12 if form.full else 1):
        row.injected += 1
        with subject.living(row) as incarnation:
            incarnation.await_reports(1)
            incarnation.await_steps(1)
            time.sleep(draw.uniform(0.0, 0.5))
            steps += incarnation.progress()["steps_s"][1:]
            drains += [float(line) for line in incarnation.lines("took_s")]
            row.fired += _die(incarnation, None)
    subject.compare_all(draw, None if form.full else 1)
    step_s, drain_s = statistics.median(steps), statistics.median(drains)
    row.remark = f"medians: a step {1000 * step_s:.0f} ms, from cut to COMMIT {1000 * drain_s:.0f} ms"


def points_of(where: str) -> list[str]:
    """Those that a job on this kind of log passes."""
    return [name for name, point in POINTS.items() if point.only in ("", where)]


def long_form(draw: random.Random, where: str) -> list[tuple[str, int]]:
    """Every point at two passes, in random order, the sweep's first; a random moment after every third kill."""
    names = points_of(where)
    first = [("claim.append", 1), ("claim.appended", 1), ("sweep.sent", 1), ("sweep.sent", draw.randint(2, 4))]
    rest = [
        (name, 1 if name.startswith("claim") else nth)
        for name in names
        if not name.startswith("sweep")
        for nth in (1, draw.randint(2, 30 if name == "restore.frame" else 3))
        if nth == 1 or name not in ("hello.submitted", "restore.planned", "restore.rows", "restore.dense")
    ]
    draw.shuffle(rest)
    kills = [*first, ("", 0)]
    for number, kill in enumerate(rest):
        kills += [kill, ("", 0)] if number % 3 == 0 else [kill]
    return kills


def _torment(form: Form, subject: Subject, kills: list[tuple[str, int]], where: str, most: int | None) -> None:
    draw = form.draw(f"moments {where}")
    for name, nth in kills:
        row = form.board.row(f"SIGKILL {f'at {name}' if name else 'at a random moment'}, {where}")
        row.injected += 1
        point = POINTS.get(name, Point(0))
        # An outage first: what was sent is sent again when it is over.
        outage = f"segment.written=raise@{nth + 1};{name}=kill@1"
        fuse = outage if name == AT_OUTAGE else f"{name}=kill@{nth}" if name else ""
        with subject.living(row, fuse, point.rank) as incarnation:
            if name:
                row.fired += _die(incarnation, point)
            else:
                incarnation.await_reports(draw.randint(0, 2))
                incarnation.await_steps(1)
                time.sleep(draw.uniform(0.0, 0.7))
                row.fired += _die(incarnation, None)
        if point.commits is not None:
            _count_commits(row, subject, incarnation, point.commits(nth))
    subject.compare_all(draw, most)


def _die(incarnation: Incarnation, point: Point | None) -> int:
    """Kill all ranks, once one of them has died at its point if there is one; whether that is what happened."""
    if point is None:
        return int(incarnation.kill() == len(incarnation.job.processes))
    victim = incarnation.job.processes[point.rank % len(incarnation.job.processes)]
    incarnation.wait("the failpoint", lambda: not victim.is_alive(), may_die=True)
    died = victim.exitcode == -signal.SIGKILL and bool(incarnation.lines("fired"))
    if not died:
        incarnation.job.join(5)
    return int(died)


def _count_commits(row: Row, subject: Subject, incarnation: Incarnation, allowed: range) -> None:
    """How many markers the generation has that was killed."""
    new = len(subject.lineage().commits) - len(incarnation.before.commits)
    if new not in allowed:
        row.err(f"{new} markers were committed before the kill, {list(allowed)} may be")
