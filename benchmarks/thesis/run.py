"""Whole runs in the shape of the thesis' tables 6.1-6.6, and recoveries as in 6.7-6.12: paired, interleaved.

    python benchmarks/thesis/run.py [--workload synthetic criteo] [--log kafka] [--epochs 60] [--quick] [--out FILE]

A run is epochs of three steps, with a checkpoint after every first, second or third epoch; it is over when its last
checkpoint is durable. ``synthetic``: 8 tables x 80,000 x 64 (``synthetic-10k``, ``-25k`` and ``-50k``: so many rows a
table), global batch 2048, 100 uniform ids a lookup (``--ids``). ``criteo``: 26 tables with the proportions of Criteo
Kaggle, a million rows x 64, global batch 2048, one Zipf id each. Row-wise Adagrad, Adam for the dense layers, one
thread a rank, gloo.

``none``         no checkpoints
``torch.save``   each rank saves its tables and states and the dense state, with fsync, while training waits
``thesis``       the thesis' own design (``design.py`` says what it is, and where it is favored)
``ours``         the log, one drain and one marker a checkpoint, a ring that holds a checkpoint; as with the thesis,
                 the state that a run begins with has been sent before the clock is started (``base`` says how long
                 that takes)

What checkpoints add is the run's time less that of ``none`` in the same round, which runs twice: the difference of the
two is the noise.

Recovery, of the newest state, into live tables: ``torch.load`` alone, with the copy that a restart needs, and mapped
with that copy (torch's fastest way); the thesis' loading service, which holds the state in memory; ours from the log of
a run with a checkpoint every three epochs, from a store and from a HEAD in shared memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[1:1] = [str(HERE.parents[level]) for level in (0, 1, 2)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Measured,
    Report,
    UnavailableError,
    arguments,
    at_least,
    check_memory,
    scratch,
    synced,
    take_turns,
    timed,
)
from data import CRITEO_ROWS, uniform_ids, zipf_ids  # noqa: E402
from design import LoadingService, Pipeline  # noqa: E402
from job import Shape, build, spread  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.log.api import open_log  # noqa: E402
from torchrec_stream_ckpt.materialize.head import HeadWriter  # noqa: E402
from torchrec_stream_ckpt.materialize.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.store.api import open_store  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402

SHAPES = {
    "synthetic": Shape((80_000,) * 8, dense_optimizer="adam"),
    "synthetic-10k": Shape((10_000,) * 8, dense_optimizer="adam"),
    "synthetic-25k": Shape((25_000,) * 8, dense_optimizer="adam"),
    "synthetic-50k": Shape((50_000,) * 8, dense_optimizer="adam"),
    "criteo": Shape(CRITEO_ROWS, dense_optimizer="adam"),
}
STEPS, BATCH = 3, 2048
EVERY = (1, 2, 3)
NONE, AGAIN, SAVE, THESIS, OURS = "none", "none again", "torch.save", "thesis", "ours"
LOAD, COPY, MAPPED, SERVICE = (
    "torch.load",
    "torch.load + copy",
    "torch.load, mmap + copy",
    "thesis, loading service",
)
FROM = {"log": "ours, log", "store": "ours, store", "head": "ours, HEAD"}
RING_BYTES = 512 << 20
QUICK_ROWS, QUICK_BATCH = 20, 64
"""With ``--quick``: one row of so many, and the global batch."""


@dataclass(frozen=True)
class Setting:
    """What the flags say of a run."""

    workload: str
    rounds: int
    epochs: int
    ids: int
    quick: bool
    bootstrap: str = ""
    """Of a broker; empty: the log is a folder."""


class Runs:
    """The variants of one rank; all of them train one job."""

    def __init__(self, setting: Setting, folder: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self.setting = setting
        shape = shape_of(setting.workload, setting.quick)
        self.job = build(shape)
        self.base_s = 0.0
        """How long the last run of ours has taken to send all that it began with."""
        self._bags = (QUICK_BATCH if setting.quick else BATCH) // world
        synthetic = setting.workload != "criteo"
        count = self._bags * (setting.ids if synthetic else 1)
        make = uniform_ids if synthetic else zipf_ids
        self._batches = [make(shape.rows, count, 1000 * rank + step) for step in range(STEPS)]
        self.shared = folder
        self._own = folder / f"rank-{rank}"
        self._own.mkdir(exist_ok=True)
        self.tables = [each for each in self.job.tensors.values() if each.dim() == 2]
        dense = {name: each for name, each in self.job.model.state_dict().items() if not hasattr(each, "local_shards")}
        self.rest = dense | {name: each for name, each in self.job.tensors.items() if each.dim() == 1}
        self._mine = [number for number in range(len(shape.rows)) if number % world == rank]
        topic = (setting.bootstrap, f"thesis-{rank}") if setting.bootstrap else None
        self._pipeline = Pipeline(self.tables, self.rest, self._own, topic)
        self._runs = 0

    def _train(self, behind_step: Callable[[int], object], behind_epoch: Callable[[int], object]) -> None:
        for epoch in range(1, self.setting.epochs + 1):
            for step in range(STEPS):
                self.job.train(self._batches[step], self._bags)
                behind_step(step)
            behind_epoch(epoch)

    def none(self) -> float:
        return slowest(lambda: self._train(lambda _: None, lambda _: None))

    def torch_save(self, every: int) -> float:
        def save(epoch: int) -> None:
            if epoch % every == 0:
                torch.save(self.job.tensors | self.rest, self.file)
                synced(self.file)

        return slowest(lambda: self._train(lambda _: None, save))

    @property
    def file(self) -> Path:
        """Of ``torch.save``."""
        return self._own / "all.pt"

    def thesis(self, every: int) -> float:
        pipeline = self._pipeline
        pipeline.begin()
        # Ids of all ranks' samples reach the owner of a table; the ids that are at hand are as many.
        mine = [[batch[number] for number in self._mine] for batch in self._batches]

        def run() -> None:
            self._train(
                lambda step: pipeline.step(mine[step]), lambda epoch: epoch % every == 0 and pipeline.checkpoint()
            )
            pipeline.finish()

        return slowest(run)

    def close(self) -> None:
        self._pipeline.close()

    def ours(self, every: int) -> float:
        """In a fresh log."""
        self._runs += 1
        dist.barrier()
        if dist.get_rank() == 0:
            for part in ("log", "store"):
                shutil.rmtree(self.shared / part, ignore_errors=True)
        dist.barrier()
        futures: list[Any] = []
        with self.attach(drain_every=1 << 30) as checkpointer:
            self.base_s = timed(lambda: checkpointer.mark().result(300))

            def run() -> None:
                mark = lambda epoch: epoch % every == 0 and futures.append(checkpointer.mark())  # noqa: E731
                self._train(lambda _: checkpointer.step(), mark)
                for future in futures:
                    future.result(300)

            return slowest(run)

    @property
    def uri(self) -> str:
        """Of the log of the newest run of ours."""
        bootstrap = self.setting.bootstrap
        return f"kafka://{bootstrap}/run-{self._runs}" if bootstrap else f"file://{self.shared}/log"

    def attach(self, head: str | None = None, drain_every: int = 1) -> StreamCheckpointer:
        config = StreamConfig(
            uri=self.uri,
            store=str(self.shared / "store"),
            marker_every=None,
            drain_every=drain_every,
            ring_bytes=RING_BYTES,
            head=head,
        )
        return StreamCheckpointer(self.job.model, self.job.optimizer, config=config)


def shape_of(workload: str, quick: bool) -> Shape:
    """The tables of a workload."""
    shape = SHAPES[workload]
    return replace(shape, rows=tuple(max(3, rows // QUICK_ROWS) for rows in shape.rows)) if quick else shape


def slowest(action: Callable[[], object]) -> float:
    """(all ranks) Seconds that the slowest rank takes."""
    dist.barrier()
    taken = torch.tensor(timed(action))
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def name(variant: str, every: int) -> str:
    return f"{variant}, every {every}"


def run_all(setting: Setting, folder: Path, head: str) -> dict[str, Measured]:
    """(all ranks) Whole runs, then recoveries of the state that one more run leaves."""
    torch.set_num_threads(1)
    runs, rounds = Runs(setting, folder), setting.rounds
    variants: dict[str, Callable[[], float]] = {NONE: runs.none, AGAIN: runs.none}
    for every in EVERY:
        variants[name(SAVE, every)] = partial(runs.torch_save, every)
        variants[name(THESIS, every)] = partial(runs.thesis, every)
        variants[name(OURS, every)] = partial(runs.ours, every)
    runs.none()
    runs.ours(1)
    found = {"runs": take_turns(variants, rounds, warm_up=0)}
    runs.close()
    runs.ours(3)
    found["base"] = Measured({OURS: [runs.base_s]})
    recoveries = Recoveries(runs)
    try:
        found["log"] = take_turns(recoveries.variants({FROM["log"]: None}), rounds + 2)
        if dist.get_rank() == 0:
            fold(runs.uri, str(folder / "store"), Path(head))
        dist.barrier()
        found["store"] = take_turns(recoveries.variants({FROM["store"]: None, FROM["head"]: head}), rounds + 2)
    finally:
        recoveries.close()
    return found


class Recoveries:
    """Of what is live now, by the ranks that have it."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        torch.save(runs.job.tensors | runs.rest, runs.file)
        torch.save(runs.rest, runs.file.with_name("rest.pt"))
        self._truth = {key: value.clone() for key, value in runs.job.tensors.items()}
        if not all(value.isfinite().all() for value in self._truth.values()):
            raise RuntimeError("training has diverged: no state can be compared with one that is not a number")
        self._service = LoadingService([table.clone() for table in runs.tables], runs.file.parent)

    def close(self) -> None:
        self._service.close()

    def variants(self, ours: dict[str, str | None]) -> dict[str, Callable[[], float]]:
        rest = self._runs.rest
        variants: dict[str, Callable[[], float]] = {
            LOAD: lambda: slowest(lambda: torch.load(self._runs.file)),
            COPY: lambda: self._checked(partial(slowest, self._copy)),
            MAPPED: lambda: self._checked(partial(slowest, partial(self._copy, mmap=True))),
            SERVICE: lambda: self._checked(lambda: slowest(lambda: self._service.restore(self._runs.tables, rest))),
        }
        return variants | {key: partial(self._checked, partial(self._ours, key, head)) for key, head in ours.items()}

    @torch.no_grad()
    def _checked(self, action: Callable[[], float]) -> float:
        for tensor in self._runs.job.tensors.values():
            tensor.zero_()
        taken = action()
        for key, tensor in self._runs.job.tensors.items():
            if not torch.equal(tensor, self._truth[key]):
                raise RuntimeError(f"{key} was restored wrongly")
        return taken

    def _copy(self, *, mmap: bool = False) -> None:
        for key, value in torch.load(self._runs.file, mmap=mmap).items():
            (self._runs.job.tensors | self._runs.rest)[key].copy_(value)

    def _ours(self, key: str, head: str | None) -> float:
        found: list[Any] = []
        with self._runs.attach(head=head) as checkpointer:
            taken = slowest(lambda: found.append(checkpointer.restore()))
        wanted = next(source for source, known in FROM.items() if known == key)
        if found[0] is None or not found[0].source.startswith(wanted):
            raise RuntimeError(f"restored {found[0]}, not from the {wanted}")
        return taken


def fold(uri: str, store: str, head: Path) -> None:
    """What a materializer does beside training."""
    log, objects, dense = open_log(uri), open_store(store), open_dense(store)
    with ThreadPoolExecutor(2) as pool:
        writer = HeadWriter(head, objects, pool)
        list(Materializer(log, objects, lambda _: dense, pool, head=writer).catch_up(Control(log).refresh()))
    if writer.marker is None:
        raise RuntimeError("HEAD was not written")


def added(measured: Measured, variant: str) -> float:
    """Seconds that the checkpoints add: median of rounds, against the mean of both runs without any."""
    times = measured.times
    return statistics.median(
        own - (one + other) / 2 for own, one, other in zip(times[variant], times[NONE], times[AGAIN], strict=True)
    )


def judge(report: Report, what: str, found: dict[str, Measured]) -> None:
    """Points and goals of one workload on some ranks."""
    runs = found["runs"]
    report.facts[f"{what}: seconds of the base"] = round(found["base"].times[OURS][0], 3)
    for every in EVERY:
        here = {NONE: NONE, AGAIN: AGAIN} | {name(variant, every): variant for variant in (SAVE, THESIS, OURS)}
        point = f"{what}, every {every}"
        report.add(point, Measured({short: runs.times[long] for long, short in here.items()}), SAVE, unit="s", scale=1)
        extra = {short: round(added(runs, long), 3) for long, short in here.items() if long not in (NONE, AGAIN)}
        report.facts[f"{point}: seconds added"] = extra
        report.goals.append(Goal.at_least(f"{point}: torch.save's run / ours", 1, report.ratio(point, OURS)))
        against = report.paired(point, THESIS, OURS)
        report.goals.append(Goal.at_least(f"{point}: the thesis' run / ours", 1, against))
        share = 100 * max(0.0, extra[OURS]) / extra[SAVE] if extra[SAVE] > 0 else None
        report.goals.append(Goal.at_most(f"{point}: added, of what torch.save adds", 10, share, "%"))
    for source in ("log", "store"):
        report.add(f"{what}, recovery, {source}", found[source], LOAD)
    for source, point in (("log", "log"), ("store", "store"), ("head", "store")):
        ratio = report.ratio(f"{what}, recovery, {point}", FROM[source])
        report.goals.append(Goal.at_least(f"{what}, recovery, {FROM[source]}: torch.load / ours", 1, ratio))


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--workload", nargs="+", choices=tuple(SHAPES), default=["synthetic", "criteo"])
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2])
    parser.add_argument("--epochs", type=at_least(3), default=60, help="of three steps (default: %(default)s)")
    parser.add_argument("--ids", type=at_least(1), default=100, help="a lookup of synthetic (default: %(default)s)")
    parser.add_argument("--log", choices=("file", "kafka"), default="file", help="of the thesis' chunks and of ours")
    parser.add_argument("--quick", action="store_true", help="small, under a minute: no figure means anything then")
    args: argparse.Namespace = parser.parse_args()
    report = Report("thesis", args)
    with contextlib.ExitStack() as stack:
        try:
            bootstrap = start_broker(stack) if args.log == "kafka" else ""
            measure_all(args, report, bootstrap)
        except UnavailableError as error:
            report.facts["not measured"] = str(error)
    report.finish()


def start_broker(stack: contextlib.ExitStack) -> str:
    """Bootstrap servers of one on loopback, which goes with the stack."""
    from torchrec_stream_ckpt.broker.kraft import Broker

    broker = Broker(stack.enter_context(scratch("thesis")) / "broker")
    try:
        bootstrap = broker.start(die_with=os.getpid()).bootstrap
    except (StreamCkptError, OSError) as error:
        raise UnavailableError(f"no broker: {error}") from None
    stack.callback(broker.stop)
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    for created in admin.create_topics([NewTopic(f"thesis-{rank}", 1, 1) for rank in range(32)]).values():
        created.result(60)
    return str(bootstrap)


def measure_all(args: argparse.Namespace, report: Report, bootstrap: str) -> None:
    epochs = min(args.epochs, 6) if args.quick else args.epochs
    for workload in args.workload:
        table_bytes = shape_of(workload, args.quick).table_bytes
        check_memory(14 * table_bytes, f"{workload}: the tables, six copies of them for the thesis, and recoveries")
        for ranks in args.ranks:
            setting = Setting(workload, args.rounds, epochs, args.ids, args.quick, bootstrap)
            with scratch("thesis") as folder, tempfile.TemporaryDirectory(prefix="thesis-", dir="/dev/shm") as head:
                found = spread(run_all, ranks, folder, setting, folder, head)
            judge(report, f"{workload}, {ranks} ranks" if ranks > 1 else f"{workload}, 1 rank", found)


if __name__ == "__main__":
    main()
