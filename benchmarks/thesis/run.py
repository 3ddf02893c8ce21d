"""Whole runs in the shape of the thesis' tables 6.1-6.6, and recoveries as in 6.7-6.12: paired, interleaved.

    python benchmarks/thesis/run.py [--workload synthetic criteo] [--log kafka] [--epochs N] [--quick] [--out FILE]

A run is epochs, with a checkpoint after every first, second or third one; it is over when its last checkpoint is
durable. ``synthetic``: 8 tables x 80,000 x 64, global batch 2048, 100 uniform ids a lookup (``--ids``), epochs of three
steps; ``synthetic-10k``, ``-25k`` and ``-50k`` have the thesis' data sizes, which are samples of an epoch: 5, 13 and 25
steps over the same tables. ``criteo``: 26 tables with the proportions of Criteo Kaggle, a million rows x 64, the same
batch, one Zipf id each. Row-wise Adagrad (the thesis: SGD, which has no state), Adam for the dense layers, one thread a
rank, gloo.

``none``         no checkpoints
``torch.save``   each rank saves its tables and states and the dense state, with fsync, while training waits
``thesis``       the thesis' own design (``design.py`` says what it is, and where it is favored)
``ours``         a buffered log, one drain and one marker a checkpoint, a ring that holds a checkpoint; as with the
                 thesis, the state that a run begins with has been sent before the clock is started (``base`` says how
                 long that takes)
``ours, direct`` (with ``--direct``) the same with direct writes of the log, as by default

The point ``every 1, without fsync`` has all of them with no fsync at all, in the same rounds. With ``--each-step`` the
point ``every 1, each step`` has the thesis and ours as they stream the rows of each step; in the others both drain once
a checkpoint. What checkpoints add is the run's time less that of ``none`` in the same round, which runs twice: the
difference of the two is the noise.

Recovery, of the newest state, into the live tables of fresh processes, which load once; the page cache is warm, then
cold: ``torch.load`` alone, with the copy that a restart needs, and mapped with that copy (torch's fastest way); the
thesis' loading service, which holds the state in memory; ours from the log of a run with a checkpoint every three
epochs, from a store and from a HEAD in shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import recoveries  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from brokers import set_fsync, start_broker  # noqa: E402
from cache import COLD, STATES  # noqa: E402
from common import (  # noqa: E402
    UNSYNCED,
    WITH_FSYNC,
    WITHOUT_FSYNC,
    Goal,
    Measured,
    Report,
    UnavailableError,
    add_fsync,
    arguments,
    at_least,
    check_disk,
    check_memory,
    parse,
    scratch,
    synced,
    take_turns,
    timed,
    without_fsync,
)
from data import uniform_ids, zipf_ids  # noqa: E402
from design import Pipeline  # noqa: E402
from job import build, slowest, spread  # noqa: E402
from recoveries import FROM, LOAD  # noqa: E402
from setting import SHAPES, Setting, State, attach, batches, shape_of  # noqa: E402

EVERY = (1, 2, 3)
NONE, AGAIN, SAVE, THESIS, OURS = "none", "none again", "torch.save", "thesis", "ours"
DIRECT = "ours, direct"
STREAMED = ", each step"


class Runs:
    """The variants of one rank; all of them train one job."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.setting = setting
        shape = shape_of(setting.workload, setting.quick)
        self.job = build(shape)
        self.base_s = 0.0
        """How long the last run of ours has taken to send all that it began with."""
        self._bags = [max(1, samples // world) for samples in batches(setting.workload, setting.quick)]
        synthetic = setting.workload != "criteo"
        ids = setting.ids if synthetic else 1
        make = uniform_ids if synthetic else zipf_ids
        self._batches = [make(shape.rows, bags * ids, 1000 * rank + step) for step, bags in enumerate(self._bags)]
        self.shared = folder
        self._own = folder / f"rank-{rank}"
        self._own.mkdir(exist_ok=True)
        self._state = State.of(self.job)
        self._mine = [number for number in range(len(shape.rows)) if number % world == rank]
        self._name = f"{setting.workload}-{world}"
        """Of this job's topics: a broker meets all of them."""
        topic = (setting.bootstrap, f"thesis-{self._name}-{rank}") if setting.bootstrap else None
        tables = list(self._state.tables.values())
        self._pipeline = Pipeline(tables, self._state.rest, self._own, topic, live=setting.each_step)
        self._runs = 0
        self._broker_syncs: bool | None = None

    def _train(self, behind_step: Callable[[int], object], behind_epoch: Callable[[int], object]) -> None:
        for epoch in range(1, self.setting.epochs + 1):
            for step, bags in enumerate(self._bags):
                self.job.train(self._batches[step], bags)
                behind_step(step)
            behind_epoch(epoch)

    def none(self) -> float:
        return slowest(lambda: self._train(lambda _: None, lambda _: None))

    def torch_save(self, every: int, fsync: bool = True) -> float:
        path = self._own / "all.pt"

        def save(epoch: int) -> None:
            if epoch % every == 0:
                torch.save(self.job.tensors | self._state.rest, path)
                if fsync:
                    synced(path)

        return slowest(lambda: self._train(lambda _: None, save))

    def thesis(self, every: int, fsync: bool = True, *, streamed: bool = False) -> float:
        pipeline = self._pipeline
        behind_step = pipeline.stream if streamed else pipeline.step
        mark = pipeline.mark if streamed else pipeline.checkpoint
        self._have_broker_sync(fsync)
        pipeline.begin(fsync=fsync)
        # Ids of all ranks' samples reach the owner of a table; the ids that are at hand are as many.
        mine = [[batch[number] for number in self._mine] for batch in self._batches]

        def run() -> None:
            self._train(lambda step: behind_step(mine[step]), lambda epoch: epoch % every == 0 and mark())
            pipeline.finish()

        return slowest(run)

    def close(self) -> None:
        """All runs are over, and their state is what recoveries bring back."""
        self._pipeline.close()
        (self._own / "chunks").unlink(missing_ok=True)
        self.ours(3)
        recoveries.save(self.job, self._own)
        dist.barrier()

    def ours(self, every: int, fsync: bool = True, *, drain_every: int = 1 << 30, direct: bool = False) -> float:
        """In a fresh log."""
        dist.barrier()
        if dist.get_rank() == 0:
            self._forget()
        self._runs += 1
        self._have_broker_sync(fsync)
        futures: list[Any] = []
        waits = contextlib.nullcontext() if fsync else without_fsync()
        store, how = self.shared / "store", "direct" if direct else "buffered"
        with waits, attach(self.job, self.uri, store, drain_every=drain_every, log_writes=how) as checkpointer:
            self.base_s = timed(lambda: checkpointer.mark().result(300))

            def run() -> None:
                mark = lambda epoch: epoch % every == 0 and futures.append(checkpointer.mark())  # noqa: E731
                self._train(lambda _: checkpointer.step(), mark)
                for future in futures:
                    future.result(300)

            return slowest(run)

    def _have_broker_sync(self, fsync: bool) -> None:
        """(all ranks) Or leave it to the kernel, as brokers do."""
        if self.setting.bootstrap and fsync != self._broker_syncs and dist.get_rank() == 0:
            set_fsync(self.setting.bootstrap, fsync)
        self._broker_syncs = fsync
        dist.barrier()

    def _forget(self) -> None:
        """The log of the run before."""
        for part in ("log", "store"):
            shutil.rmtree(self.shared / part, ignore_errors=True)
        if self.setting.bootstrap and self._runs:
            from confluent_kafka.admin import AdminClient

            admin = AdminClient({"bootstrap.servers": self.setting.bootstrap})
            mine = re.compile(rf"{self._name}-run-{self._runs}(?!\d)")
            old = [topic for topic in admin.list_topics().topics if mine.match(topic)]
            for deleted in admin.delete_topics(old).values():
                deleted.result(60)

    @property
    def uri(self) -> str:
        """Of the log of the newest run of ours."""
        bootstrap = self.setting.bootstrap
        return f"kafka://{bootstrap}/{self._name}-run-{self._runs}" if bootstrap else f"file://{self.shared}/log"


def name(variant: str, every: int, fsync: bool = True) -> str:
    return f"{variant}, every {every}" + ("" if fsync else UNSYNCED)


def run_all(setting: Setting, folder: Path, head: str) -> tuple[dict[str, Measured], str]:
    """(all ranks) Whole runs, and everything that recoveries of one more run need; the log's URI."""
    torch.set_num_threads(1)
    runs = Runs(setting, folder)
    variants: dict[str, Callable[[], float]] = {NONE: runs.none, AGAIN: runs.none}
    for every, fsync in cadences(setting):
        variants[name(SAVE, every, fsync)] = partial(runs.torch_save, every, fsync)
        variants[name(THESIS, every, fsync)] = partial(runs.thesis, every, fsync)
        variants[name(OURS, every, fsync)] = partial(runs.ours, every, fsync)
        if setting.direct:
            variants[name(DIRECT, every, fsync)] = partial(runs.ours, every, fsync, direct=True)
    if setting.each_step:
        variants[THESIS + STREAMED] = partial(runs.thesis, 1, streamed=True)
        variants[OURS + STREAMED] = partial(runs.ours, 1, drain_every=1)
        if setting.direct:
            variants[DIRECT + STREAMED] = partial(runs.ours, 1, drain_every=1, direct=True)
    runs.none()
    runs.ours(1)
    found = {"runs": take_turns(variants, setting.rounds, warm_up=0)}
    runs.close()
    found["base"] = Measured({OURS: [runs.base_s]})
    if dist.get_rank() == 0:
        recoveries.fold(runs.uri, folder, Path(head))
    dist.barrier()
    return found, runs.uri


def cadences(setting: Setting) -> list[tuple[int, bool]]:
    """Checkpoints every N epochs, with fsync or without: without it only the most frequent ones."""
    found = [(every, True) for every in setting.every if WITH_FSYNC in setting.fsync]
    return found + [(1, False)] * (WITHOUT_FSYNC in setting.fsync)


def added(measured: Measured, variant: str) -> float:
    """Seconds that the checkpoints add: median of rounds, against the mean of both runs without any."""
    times = measured.times
    return statistics.median(
        own - (one + other) / 2 for own, one, other in zip(times[variant], times[NONE], times[AGAIN], strict=True)
    )


def judge(report: Report, what: str, setting: Setting, found: dict[str, Measured]) -> None:
    """Points and goals of one workload on some ranks."""
    runs = found["runs"]
    report.facts[f"{what}: seconds of the base"] = round(found["base"].times[OURS][0], 3)
    for every, fsync in cadences(setting):
        own = (SAVE, THESIS, OURS, *([DIRECT] if setting.direct else []))
        here = {NONE: NONE, AGAIN: AGAIN} | {name(variant, every, fsync): variant for variant in own}
        point = f"{what}, every {every}" + ("" if fsync else UNSYNCED)
        report.add(point, Measured({short: runs.times[long] for long, short in here.items()}), SAVE, unit="s", scale=1)
        extra = {short: round(added(runs, long), 3) for long, short in here.items() if long not in (NONE, AGAIN)}
        report.facts[f"{point}: seconds added"] = extra
        for ours in own[2:]:
            of = f"{point}: " if ours == OURS else f"{point}, direct: "
            report.goals.append(Goal.at_least(f"{of}torch.save's run / ours", 1, report.ratio(point, ours)))
            against = report.paired(point, THESIS, ours)
            report.goals.append(Goal.at_least(f"{of}the thesis' run / ours", 1, against))
            share = 100 * max(0.0, extra[ours]) / extra[SAVE] if extra[SAVE] > 0 else None
            report.goals.append(Goal.at_most(f"{of}added, of what torch.save adds", 10, share, "%"))
    if setting.each_step:
        here = {NONE: NONE, AGAIN: AGAIN, name(SAVE, 1): SAVE, THESIS + STREAMED: THESIS, OURS + STREAMED: OURS}
        if setting.direct:
            here[DIRECT + STREAMED] = DIRECT
        point = f"{what}, every 1{STREAMED}"
        report.add(point, Measured({short: runs.times[long] for long, short in here.items()}), SAVE, unit="s", scale=1)
        extra = {here[long]: round(added(runs, long), 3) for long in list(here)[2:]}
        report.facts[f"{point}: seconds added"] = extra
    for state in STATES if STATES[0] in found else ():
        point = f"{what}, recovery" + (f", {COLD}" if state == COLD else "")
        report.add(point, found[state], LOAD)
        for base in (recoveries.COPY, recoveries.MAPPED, recoveries.SERVICE):
            for own in FROM.values():
                ratio = report.paired(point, base, own)
                report.goals.append(Goal.at_least(f"{point}, {own}: {base} / ours", 1, ratio))


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--workload", nargs="+", choices=tuple(SHAPES), default=["synthetic", "criteo"])
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--epochs", type=at_least(3), help="of a run (default: 60 of criteo, 6 of the others)")
    parser.add_argument("--ids", type=at_least(1), default=100, help="a lookup of synthetic (default: %(default)s)")
    parser.add_argument("--log", choices=("file", "kafka"), default="file", help="of the thesis' chunks and of ours")
    parser.add_argument("--each-step", action="store_true", help="also stream each step, a checkpoint every epoch")
    parser.add_argument("--direct", action="store_true", help="also time ours with direct writes of the log")
    parser.add_argument("--every", type=int, nargs="+", choices=EVERY, default=list(EVERY), help="epochs a checkpoint")
    parser.add_argument("--runs-only", action="store_true", help="no recoveries")
    add_fsync(parser)
    args: argparse.Namespace = parse(parser, workload=["synthetic"], ranks=[1], rounds=1, epochs=6)
    if args.each_step and WITH_FSYNC not in args.fsync:
        parser.error("--each-step has points with fsync alone. Try: --fsync with")
    report = Report("thesis", args)
    with contextlib.ExitStack() as stack:
        try:
            bootstrap = start_broker("thesis", stack) if args.log == "kafka" else ""
            measure_all(args, report, bootstrap)
        except UnavailableError as error:
            report.facts["not measured"] = str(error)
    report.finish()


def measure_all(args: argparse.Namespace, report: Report, bootstrap: str) -> None:
    for workload in args.workload:
        epochs = args.epochs or (60 if workload == "criteo" else 6)
        table_bytes = shape_of(workload, args.quick).table_bytes
        ids = args.ids * len(SHAPES[workload].rows) * 8 if workload != "criteo" else 0
        epoch_bytes = 2 * ids * sum(batches(workload, args.quick))
        needed = (2 << 30) + 14 * table_bytes + epoch_bytes
        check_memory(needed, f"{workload}: the tables, six copies of them, an epoch's ids, and recoveries")
        # A run's chunks and a run's log lie side by side; a broker deletes those of the runs before a minute late.
        # With --each-step an epoch's chunks hold nearly all rows once a step.
        steps = len(batches(workload, args.quick)) if args.each_step else 1
        runs = (4 if bootstrap else 2) * epochs * steps
        check_disk((1 << 28) + (8 + runs) * table_bytes, f"{workload}: two runs of {epochs} checkpoints")
        check_disk((1 << 24) + 2 * table_bytes, f"{workload}: its HEAD in /dev/shm", Path("/dev/shm"))
        for ranks in args.ranks:
            setting = Setting(
                workload,
                args.rounds,
                epochs,
                args.ids,
                args.quick,
                tuple(args.fsync),
                bootstrap,
                args.each_step,
                tuple(args.every),
                args.direct,
            )
            with scratch("thesis") as base, tempfile.TemporaryDirectory(prefix="thesis-", dir="/dev/shm") as memory:
                folder, head = base / "job", f"{memory}/head"
                for each in (folder, Path(head)):
                    each.mkdir()
                found, uri = spread(run_all, ranks, base, setting, folder, head)
                if not args.runs_only:
                    found |= recoveries.measure(setting, ranks, base, folder, uri, head)
            judge(report, f"{workload}, {ranks} ranks" if ranks > 1 else f"{workload}, 1 rank", setting, found)


if __name__ == "__main__":
    main()
