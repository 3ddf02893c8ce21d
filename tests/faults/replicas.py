"""Followers of a job whose log is three brokers: each state that a reader finds is compared with what was trained."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from tests import ranks
from tests.command import run
from tests.faults.board import Row
from tests.faults.sites import LIFE_S, Site
from tests.faults.subject import PATIENCE_S, Subject
from tests.model import TABLES
from tests.parts import FollowMode
from torchrec_stream_ckpt import FollowedTables, MarkerId, StreamConfig, follow
from torchrec_stream_ckpt.errors import ReplicaNotReadyError
from torchrec_stream_ckpt.format.lineage import Lineage

MODES: tuple[FollowMode, ...] = ("rows", "markers")
PARTS = [
    ("t_user", slice(None)),
    ("t_item", slice(None)),
    ("t_wide", slice(0, 16)),
    ("t_wide", slice(16, 32)),
    ("t_small", slice(None)),
]
"""Columns of a row that one rank sends at once, under PLAN_2: other columns of the row may come earlier or later."""
ALWAYS = (0, 4)
"""Parts of which every step trains rows, one of each rank."""
_ENDS = np.cumsum([0, *(rows for name, _ in PARTS for known, rows, _, _ in TABLES if known == name)])
PLACES = [slice(*ends) for ends in pairwise(_ENDS)]
"""Where the rows of each part are among all."""
_LOOK_S = 0.05
Sums: TypeAlias = npt.NDArray[np.uint64]
"""A number for each row of all parts: equal rows have equal ones."""
_FACTORS = np.random.default_rng(7).integers(1, 2**63, 64, dtype=np.uint64) | np.uint64(1)


def sums_of(tables: Mapping[str, torch.Tensor]) -> Sums:
    parts = [tables[name][:, columns].contiguous().numpy().view(np.uint32) for name, columns in PARTS]
    return np.concatenate([(each * _FACTORS[: each.shape[1]]).sum(1) for each in parts])


@dataclass(frozen=True)
class Seen:
    """Sums that a reader has found, and the time of the first such look."""

    at_s: float
    marker: MarkerId
    step: int
    provisional: bool
    sums: Sums


@dataclass
class Report:
    """All that the reader of one follower has to say."""

    seen: list[Seen] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    """How many of these there were when the follower started."""
    said: list[tuple[float, str]] = field(default_factory=list)
    """Times and messages of the log."""


def serve(settings: StreamConfig, mode: FollowMode, folder: Path) -> Report:
    """(the one rank of a follower's host) Follow, and read again and again, until told to stop."""
    report, again, stop = Report(), folder / "again", folder / "stop"
    _listen(report)
    while not stop.exists():
        followed = follow(str(settings.uri), store=str(settings.store), mode=mode, outage_s=LIFE_S)
        with FollowedTables(followed) as tables:
            tables.start()
            report.starts.append(len(report.seen))
            again.unlink(missing_ok=True)
            while not (stop.exists() or again.exists()):
                time.sleep(_LOOK_S)
                if tables.failure is not None:
                    raise tables.failure
                _read(tables, report, folder)
    return report


def _listen(report: Report) -> None:
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: report.said.append((record.created, record.getMessage()))  # type: ignore[method-assign]
    logging.getLogger("torchrec_stream_ckpt").addHandler(handler)


def _read(tables: FollowedTables, report: Report, folder: Path) -> None:
    with suppress(ReplicaNotReadyError), tables.reading() as served:
        named = {name.rpartition(".")[2]: tensor for name, tensor in served.tables.items()}
        found = Seen(time.time(), served.marker, served.step, served.provisional, sums_of(named))
        last = report.seen[-1] if report.seen else None
        if last is None or (found.marker, found.provisional) != (last.marker, last.provisional):
            (folder / "new").write_text(f"{found.marker} {'provisional' if found.provisional else 'exact'}")
            os.replace(folder / "new", folder / "served")
        elif np.array_equal(found.sums, last.sums):
            return
        report.seen.append(found)


@dataclass
class Generation:
    """Truth of a generation: its steps, when each one ended, and all rows after it, a line for each."""

    steps: npt.NDArray[np.int64]
    ends_s: npt.NDArray[np.float64]
    lines: Sums

    @classmethod
    def read(cls, truths: Path, number: int) -> Generation:
        files = sorted((truths / str(number)).glob("*.pt"), key=lambda path: int(path.stem))
        states = (torch.load(path) for path in files)
        lines = [
            sums_of({name: each[f"model.ebc.embedding_bags.{name}.weight"] for name, *_ in TABLES[:-1]})
            for each in states
        ]
        ends_s = np.array([path.stat().st_mtime for path in files])
        return cls(np.array([int(path.stem) for path in files]), ends_s, np.stack(lines))

    def age_s(self, at_s: float, oldest: npt.NDArray[np.int64]) -> float:
        """How long ago the first step ended that has trained rows of which none is there; 0 if all are."""
        reached = min(int(oldest[PLACES[part]].max()) for part in ALWAYS)
        return at_s - self.ends_s[reached + 1] if reached + 1 < len(self.ends_s) else 0.0

    def lacking(self, sums: Sums, oldest: npt.NDArray[np.int64]) -> list[int]:
        """Move each row on to the next step after which it was as it is now. Returns those that were so after none."""
        lacking = []
        for row in np.flatnonzero(self.lines[oldest, np.arange(len(sums))] != sums):
            found = np.flatnonzero(self.lines[oldest[row] :, row] == sums[row])
            oldest[row] += found[0] if len(found) else 0
            lacking += [] if len(found) else [int(row)]
        return lacking


def judged(report: Report, truths: Path, lineage: Lineage) -> Iterator[tuple[Seen, float, str]]:
    """All that a reader has found, how old the state before it was then, and what is wrong with it."""
    generations: dict[int, Generation] = {}
    last: Seen | None = None
    oldest = np.empty(0, np.int64)  # the line of each row: of the first step after which it may have been as it is
    for position, seen in enumerate(report.seen):
        number, age_s, wrong = seen.marker.generation, 0.0, ""
        if last is not None:
            age_s = generations[last.marker.generation].age_s(seen.at_s, oldest)
        if number not in generations:
            generations[number] = Generation.read(truths, number)
        if position in report.starts or (last is not None and last.marker.generation != number):
            last = None
        trained = generations[number]
        base = int(np.searchsorted(trained.steps, seen.step))
        oldest = np.maximum(oldest, base) if last is not None else np.full(len(seen.sums), base)
        lacking = trained.lacking(seen.sums, oldest)
        if not seen.provisional and not np.array_equal(trained.lines[base], seen.sums):
            wrong = f"what is served as marker {seen.marker} is not step {seen.step}"
        elif last is not None and seen.marker < last.marker:
            wrong = f"marker {seen.marker} is served after {last.marker}"
        elif lacking and not seen.provisional:  # newer rows were taken back
            oldest[:] = base
            named = any("undone" in text and abs(at_s - seen.at_s) < 1 for at_s, text in report.said)
            if number == lineage.newest_generation or not named:
                wrong = f"rows after marker {seen.marker} were taken back, and its trainer lives, or nothing is logged"
        elif lacking:
            lines = trained.lines
            older = [row for row in lacking if seen.sums[row] in lines[:, row]]
            wrong = f"after marker {seen.marker} {len(older)} rows are older than before, "
            wrong += f"{len(lacking) - len(older)} are of no step"
        yield seen, age_s, wrong
        last = seen


@dataclass
class Replicas:
    """Followers of one job on their host, one of each mode, and the faults that they live through."""

    subject: Subject
    jobs: dict[FollowMode, ranks.Job] = field(default_factory=dict)
    windows: list[tuple[float, Row]] = field(default_factory=list)
    """When each fault began, and its row."""

    def start(self, site: Site, mode: FollowMode) -> None:
        folder = folder_of(self.subject, mode)
        folder.mkdir(parents=True)
        given = (self.subject.settings, mode, folder)
        self.jobs[mode] = ranks.start(1, serve, *given, namespace=site.network["follower"].namespace)

    def begin(self, row: Row) -> None:
        self.windows.append((time.time(), row))

    def wait(self, what: str, done: Callable[[str], bool]) -> None:
        """Until what each follower serves is as wanted: a marker, and whether exact."""
        deadline = time.monotonic() + PATIENCE_S
        for mode, job in self.jobs.items():
            while not done(served_by(self.subject, mode)):
                if not job.processes[0].is_alive():
                    job.join(5)
                assert time.monotonic() < deadline, f"the follower of {mode} does not serve {what}"
                time.sleep(0.05)

    def await_marker(self, marker: MarkerId) -> None:
        self.wait(str(marker), lambda served: bool(served) and MarkerId.parse(served.split()[0]) >= marker)

    def end(self) -> None:
        """The trainer is gone for good: all serve the newest marker, and whatever they served was trained."""
        settings = self.subject.settings
        run("fence", str(settings.uri), "--store", str(settings.store), "--yes")
        lineage = self.subject.lineage()
        assert lineage.newest is not None
        newest = f"{lineage.newest.id} exact"
        self.wait(newest, lambda served: served == newest)
        for mode, job in self.jobs.items():
            (folder_of(self.subject, mode) / "stop").touch()
            self._judge(mode, job.join(60)[0], lineage)

    def _judge(self, mode: FollowMode, report: Report, lineage: Lineage) -> None:
        ages, counts = Counter[str](), Counter[str]()
        for seen, age_s, wrong in judged(report, self.subject.truths, lineage):
            row = next((row for begin, row in reversed(self.windows) if begin <= seen.at_s), self.windows[0][1])
            ages[row.fault] = max(ages[row.fault], age_s)
            counts[row.fault] += 1
            if wrong:
                row.err(f"{mode}: {wrong}")
        for row in {row.fault: row for _, row in self.windows}.values():
            said = f"{mode} {ages[row.fault]:.0f} s old ({counts[row.fault]} seen)"
            row.remark = "; ".join(filter(None, (row.remark, said)))


def folder_of(subject: Subject, mode: FollowMode) -> Path:
    return subject.directory / "followers" / mode


def served_by(subject: Subject, mode: FollowMode) -> str:
    """The marker that is served, and whether exact; empty before the first one."""
    path = folder_of(subject, mode) / "served"
    return path.read_text() if path.exists() else ""


def all_serve(subject: Subject, marker: MarkerId) -> bool:
    """Return whether all followers have reached a marker."""
    served = [served_by(subject, mode) for mode in MODES]
    return all(each and MarkerId.parse(each.split()[0]) >= marker for each in served)


@contextmanager
def following(site: Site, subject: Subject) -> Iterator[Replicas]:
    """Followers of a job that need not have begun; they end with the block."""
    replicas = Replicas(subject)
    try:
        for mode in MODES:
            replicas.start(site, mode)
        yield replicas
    finally:
        for job in replicas.jobs.values():
            job.close()
