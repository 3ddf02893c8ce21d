"""A job that suffers: its incarnations, and what must hold after each of them."""

from __future__ import annotations

import json
import random
import signal
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

from tests import ranks
from tests.faults.board import Board, Row
from tests.faults.live import Orders, live, restore_each
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, Spec, differences
from tests.parts import Verifier, open_log, shorten_control
from tests.s3.server import S3Server
from torchrec_stream_ckpt import MarkerId, StreamCkptError, StreamConfig
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control, Log
from torchrec_stream_ckpt.log.api import options_for
from torchrec_stream_ckpt.store.dense import open_dense

TEAMS = [(2, PLAN_2), (3, PLAN_3), (1, PLAN_1), (2, PLAN_2_OTHER)]
PATIENCE_S = 300.0
"""What has not come by then hangs: no bound that anybody promises."""
ASKED_S = 0.8
"""Between two questions to a log or a broker, each of which makes a client of its own: 0.03 s of CPU and more."""
PEERS_S = 25.0
"""What docs/guarantees.md adds to ``commit_timeout_s`` for a marker's future (P16)."""


@dataclass
class Form:
    """How much is to be done, and where."""

    directory: Path
    board: Board
    full: bool = False
    seed: int = 20
    bootstrap: str = ""
    """A broker that all may use and nobody may hurt."""
    log_writes: Literal["buffered", "direct"] = "buffered"
    """How logs in files are written."""
    server: S3Server | None = None
    """A server of buckets that all may use and nobody may hurt."""

    def draw(self, salt: str) -> random.Random:
        return random.Random(f"{self.seed} {salt}")

    def folder(self, name: str) -> Path:
        """A new one."""
        path = self.directory / f"{name}-{sum(1 for _ in self.directory.iterdir())}"
        path.mkdir()
        return path


@dataclass
class Incarnation:
    """One life of the job."""

    job: ranks.Job
    run: Path
    before: Lineage
    """What was committed when it started."""

    def wait(
        self,
        what: str,
        done: Callable[[], Any],
        timeout_s: float = PATIENCE_S,
        *,
        may_die: bool = False,
        every_s: float = 0.05,
    ) -> None:
        """Until ``done()``; a rank that ends before is an error, unless it may. What asks a broker asks less often."""
        deadline = time.monotonic() + timeout_s
        while not done():
            if not may_die and any(not process.is_alive() for process in self.job.processes) and not done():
                self.job.join(5)
                raise AssertionError(f"a rank ended before: {what}")
            assert time.monotonic() < deadline, f"did not come within {timeout_s:.0f} s: {what}"
            time.sleep(every_s)

    def lines(self, name: str) -> list[str]:
        """Whole lines of one of its files."""
        path = self.run / name
        return path.read_text().split("\n")[:-1] if path.exists() else []

    def reported(self) -> list[MarkerId]:
        """Markers whose futures said that they are committed, on rank 0."""
        return [MarkerId.parse(line) for line in self.lines("reported")]

    def progress(self, rank: int = 0) -> dict[str, Any]:
        path = self.run / f"progress-{rank}"
        found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"step": -1, "failure": None}
        return found

    def await_reports(self, more: int) -> None:
        """Wait for this many more reported markers."""
        wanted = len(self.reported()) + more
        self.wait(f"{more} more markers", lambda: len(self.reported()) >= wanted)

    def await_steps(self, more: int) -> None:
        wanted = self.progress()["step"] + more
        self.wait(f"{more} more steps", lambda: self.progress()["step"] >= wanted)

    def pid(self, rank: int) -> int:
        pid = self.job.processes[rank].pid
        assert pid is not None
        return pid

    def kill(self) -> int:
        """SIGKILL of all ranks; how many of them ended by it."""
        self.job.kill()
        for process in self.job.processes:
            process.join()
        killed = sum(process.exitcode == -signal.SIGKILL for process in self.job.processes)
        self.job.close()
        return killed


@dataclass
class Subject:
    """One job over all of its incarnations. Give every fault its row of the board."""

    settings: StreamConfig
    directory: Path
    scale: int = 1
    namespace: Path | tuple[Path, ...] | None = None
    """The network namespace of the host that its ranks live on; of several hosts, each has ranks in turn."""
    runs: int = 0
    reported: dict[MarkerId, Row] = field(default_factory=dict)
    """Every marker that was reported as committed or seen so, and the row that it counts for."""
    compared: set[MarkerId] = field(default_factory=set)
    _last: Row | None = None
    """The fault after which the next incarnation restores."""

    @contextmanager
    def living(self, row: Row, fuse: str = "", fuse_rank: int = 0, **how: Any) -> Iterator[Incarnation]:
        """Start the job; after the block it is dead, and what it left is examined."""
        incarnation = self.start(fuse, fuse_rank, **how)
        try:
            yield incarnation
        finally:
            incarnation.kill()
        self.examine(row, incarnation)

    def start(
        self, fuse: str = "", fuse_rank: int = 0, team: tuple[int, Spec] | None = None, **how: Any
    ) -> Incarnation:
        world, orders = self.orders(fuse, fuse_rank, team, **how)
        before = self.lineage()
        return Incarnation(ranks.start(world, live, orders, namespace=self.namespace), orders.run, before)

    def orders(
        self, fuse: str = "", fuse_rank: int = 0, team: tuple[int, Spec] | None = None, **how: Any
    ) -> tuple[int, Orders]:
        """World size and orders of the next incarnation."""
        world, spec = team or TEAMS[self.runs % len(TEAMS)]
        self.runs += 1
        run = self.directory / f"run-{self.runs}"
        run.mkdir()
        return world, Orders(spec, self.settings, self.truths, run, fuse, fuse_rank, self.scale, **how)

    @property
    def truths(self) -> Path:
        return self.directory / "truths"

    def lineage(self) -> Lineage:
        with opened(self.settings) as log:
            return Control(log).refresh()

    def examine(self, row: Row, incarnation: Incarnation) -> None:
        """What a dead incarnation restored, reported and left in the log."""
        before, after = incarnation.before, self.lineage()
        self._examine_restored(self._last or row, incarnation)
        self._last = row
        for marker in [*before.commits, *incarnation.reported()]:
            if marker not in after.commits:
                row.lose(f"{marker} was committed and is not in the log any more")
        dense = open_dense(self.settings.store_url, self.settings.store_options)
        new = [commit for marker, commit in after.commits.items() if marker not in before.commits]
        with opened(self.settings) as log:
            reader = Verifier(log, after)
            reader.read(new)  # each byte once for all of them
            for commit in new:
                self.reported.setdefault(commit.id, row)
                errors: tuple[StreamCkptError, ...]
                try:
                    errors = reader.verdict(commit, dense).damage
                except StreamCkptError as error:
                    errors = (error,)
                for each in errors:
                    row.lose(f"{commit.id}: {each}")

    def _examine_restored(self, row: Row, incarnation: Incarnation) -> None:
        """The newest marker that was committed before it, bit for bit."""
        path = incarnation.run / "restored.pt"
        if not path.exists():
            return
        found, newest = torch.load(path), incarnation.before.newest
        if newest is None or found["id"] != str(newest.id):
            row.err(f"{found['id']} was restored, the newest is {newest.id if newest else 'none'}")
            return
        expected = torch.load(self.truths / str(newest.id.generation) / f"{found['step']}.pt")
        self.judge(row, newest.id, differences(expected, found["state"]))

    def judge(self, row: Row, marker: MarkerId, wrong: list[str]) -> None:
        """A marker came back."""
        if wrong:
            row.err(f"{marker} differs: {wrong}")
        else:
            row.compared += 1
        self.compared.add(marker)

    def compare_all(self, draw: random.Random, most: int | None = None) -> None:
        """Restore the markers that no incarnation has restored, of whatever generation: all, or ``most`` of them.

        Of each row at least one.
        """
        rest = sorted(self.reported.keys() - self.compared)
        draw.shuffle(rest)
        if most is not None:
            first = {self.reported[marker].fault: marker for marker in rest}
            seen = {self.reported[marker].fault for marker in self.compared}
            needed = [marker for fault, marker in first.items() if fault not in seen]
            rest = [*needed, *[marker for marker in rest if marker not in needed][: max(0, most - len(needed))]]
        if not rest:
            return
        names = [str(marker) for marker in rest]
        timeout_s = 60.0 + 10 * len(names)
        given = (self.settings, self.truths, names, self.scale)
        said = ranks.run(2, restore_each, *given, timeout_s=timeout_s, namespace=self.namespace)
        for marker, verdicts in zip(rest, zip(*said, strict=True), strict=True):
            bad = [verdict for verdict in verdicts if verdict != "exact"]
            if bad and not any(verdict.startswith("wrong") for verdict in bad):
                self.reported[marker].lose(f"{marker}: {bad[0]}")
            else:
                self.judge(self.reported[marker], marker, bad)


@contextmanager
def opened(settings: StreamConfig) -> Iterator[Log]:
    """The log of a job; of two tiers the inner one."""
    log = open_log(settings.uris[0], options_for(settings.uris[0], settings.kafka_options, settings.store_options))
    try:
        yield log
    finally:
        log.close()


def shorten_twice(settings: StreamConfig) -> int:
    """Replace the control records of a living job by snapshots, until all that are there now are deleted.

    The second snapshot, which needs newer records, deletes what the first one covers. Returns the first number left.
    """
    with opened(settings) as log:
        control = Control(log)
        control.refresh()
        wanted, deadline = control.last, time.monotonic() + PATIENCE_S
        while (base := shorten_control(log, control, at_once=True).base) < wanted:
            assert time.monotonic() < deadline, "no newer record came"
            time.sleep(0.05)
        return base


def file_job(form: Form, name: str, **settings: Any) -> Subject:
    """A job on a file log; a marker every third step."""
    directory = form.folder(name)
    usual = {"marker_every": 3, "sweep_bytes": 3_000, "log_writes": form.log_writes}
    config = StreamConfig(uri=f"file://{directory / 'log'}", **usual | settings)
    return Subject(config, directory)


def kafka_job(form: Form, name: str, bootstrap: str = "", **settings: Any) -> Subject:
    """The same on Kafka, with its dense state in a folder."""
    directory = form.folder(name)
    uri = f"kafka://{bootstrap or form.bootstrap}/{directory.name}"
    store = f"file://{directory / 'store'}"
    config = StreamConfig(uri=uri, store=store, **{"marker_every": 3, "sweep_bytes": 3_000} | settings)
    return Subject(config, directory)


def bucket_job(form: Form, name: str, endpoint: str = "", **settings: Any) -> Subject:
    """The same in a bucket, which holds everything.

    Args:
        form: What is to be done, and where.
        name: Of the job.
        endpoint: By default the server's own; or that of a proxy.
        settings: Of the job.
    """
    assert form.server is not None
    uri = f"s3://{form.server.bucket}/{uuid.uuid4().hex}/{name}"
    options = form.server.options(config_kwargs=json.dumps(CLIENT), endpoint_url=endpoint or form.server.endpoint)
    usual = {"marker_every": 3, "sweep_bytes": 3_000, "store_options": options}
    return Subject(StreamConfig(uri=uri, **usual | settings), form.folder(name))


CLIENT = {"connect_timeout": 5, "read_timeout": 3, "retries": {"mode": "standard", "max_attempts": 3}}
"""Patience of clients of a bucket: a test does not wait for a minute."""
