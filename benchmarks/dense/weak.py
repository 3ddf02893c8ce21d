"""DeepFreeze's weak scaling: what checkpoints add to a job whose ranks have the same work each, on more and more ranks.

    python benchmarks/dense/weak.py [--ranks 1 2 4] [--megabytes 100] [--rounds 3] [--fsync with without] [--quick]
        [--out FILE.json]

Dense layers under DDP, as in ``run.py``, with one batch a rank: ``--steps`` iterations, a checkpoint after every
``--every`` of them, 15 as in the paper. All variants of ``run.py``, and ``none``, twice, whose difference is the noise.
As in the paper, no rank waits for another one at a checkpoint: in ``torch.save`` and VELOC-Single, rank 0 saves and the
others go on, until the next all-reduce. Points for each number of ranks:

``blocked``     how long a checkpoint keeps training from going on: the mean of all checkpoints and of all ranks that
                take them
``iterations``  the mean duration of the iterations that take a checkpoint and of those right after them; less that of
                all iterations of ``none`` it is the paper's runtime overhead
``run``         the whole run until its last checkpoint is complete
``durable``     how long after it begins the disk has a checkpoint on the slowest rank, while training goes on

``durable`` and ``run`` have everybody's fsync. The others have nobody's, as theirs; so has ``run, without fsync``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
    UNSYNCED,
    WITH_FSYNC,
    Measured,
    Report,
    Room,
    add_fsync,
    arguments,
    at_least,
    parse,
    scratch,
    synced,
    take_turns,
    with_room,
    without_fsync,
)
from job import Job, Shape, build, spread  # noqa: E402
from run import OURS, ROWS, SHARDED, SINGLE, slowest  # noqa: E402
from veloc import Veloc, sliced  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

NONE, AGAIN, SAVE = "none", "none again", "torch.save"
WAYS = (SAVE, SINGLE, SHARDED, OURS)
WAIT_S = 600.0


class Checkpoints:
    """Those of one run on one rank: how long each has blocked training, and how long until it was durable."""

    def __init__(self) -> None:
        self.blocked: list[float] = []
        self.durable: list[float] = []
        self._pending: list[tuple[Future[Any], threading.Event]] = []

    def take(self, checkpoint: Callable[[], Future[Any] | None]) -> None:
        """Begin one. Without a future it is durable when the call returns."""
        begin, seen = time.perf_counter(), threading.Event()

        def settled(_: object) -> None:
            self.durable.append(time.perf_counter() - begin)
            seen.set()

        future = checkpoint()
        self.blocked.append(time.perf_counter() - begin)
        if future is None:
            self.durable.append(self.blocked[-1])
        else:
            self._pending.append((future, seen))
            future.add_done_callback(settled)

    def settle_last(self) -> None:
        """Wait for the newest one."""
        for future, seen in self._pending[-1:]:
            future.result(WAIT_S)
            seen.wait(WAIT_S)

    def settle(self) -> None:
        """Wait until all are durable."""
        for future, seen in self._pending:
            future.result(WAIT_S)
            seen.wait(WAIT_S)


class Runs:
    """The variants on one rank."""

    def __init__(self, args: argparse.Namespace, folder: Path, memory: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._args, self._folder, self._rank = args, folder, rank
        self._job: Job = build(Shape((ROWS,), 16, dense_bytes=args.megabytes * 1_000_000))
        self._dense = [(name, each) for name, each in self._job.model.state_dict().items() if "top" in name]
        parts = {SINGLE: self._dense if rank == 0 else [], SHARDED: sliced(self._dense, rank, world)}
        self._velocs = {
            name: Veloc(part, memory / f"{name}-{rank}", folder / f"{name}-{rank}") for name, part in parts.items()
        }
        self._checkpointer: StreamCheckpointer | None = None
        self._logs = 0
        self.blocked: dict[str, list[float]] = {}
        """By variant: how long one checkpoint blocks a rank that takes it, of each run the mean."""
        self.durable: dict[str, list[float]] = {}
        """How long until the disk of the slowest rank has one, of each run the mean; of runs with fsync."""
        self.iterations: dict[str, list[float]] = {}
        """How long iterations take that take a checkpoint, and those right after them; of ``none`` all of them."""

    def run(self, variant: str, *, fsync: bool = True) -> float:
        """Seconds of the whole run."""
        taken, ends = Checkpoints(), list[float]()
        with contextlib.nullcontext() if fsync else without_fsync(), contextlib.ExitStack() as stack:
            checkpoint = self._checkpoint(variant, taken, stack)

            def train() -> None:
                ends.append(time.perf_counter())
                for step in range(1, self._args.steps + 1):
                    self._job.train([torch.randint(0, ROWS, (self._args.batch,))], bags=self._args.batch)
                    if self._checkpointer is not None:
                        self._checkpointer.step()
                    if checkpoint is not None and step % self._args.every == 0:
                        taken.take(checkpoint)
                    ends.append(time.perf_counter())
                taken.settle()

            whole = slowest(train)
        self._checkpointer = None
        self._note(variant, taken, ends, fsync)
        return whole

    def _note(self, variant: str, taken: Checkpoints, ends: list[float], fsync: bool) -> None:
        """(all ranks) Keep what a run has shown, the same on all ranks."""
        durations = [end - begin for begin, end in pairwise(ends)]
        if variant in (NONE, AGAIN):
            self._keep(self.iterations, variant, durations)
            return
        if fsync:
            slowest_mean = torch.tensor(sum(taken.durable) / max(1, len(taken.durable)))
            dist.all_reduce(slowest_mean, dist.ReduceOp.MAX)
            self.durable.setdefault(variant, []).append(float(slowest_mean))
            return
        every = self._args.every
        beside = (each for at in range(every, len(durations) + 1, every) for each in durations[at - 1 : at + 1])
        self._keep(self.iterations, variant, list(beside))
        self._keep(self.blocked, variant, taken.blocked)

    def _keep(self, into: dict[str, list[float]], variant: str, values: list[float]) -> None:
        """(all ranks) Add the mean over all ranks."""
        sums = torch.tensor([sum(values), float(len(values))], dtype=torch.float64)
        dist.all_reduce(sums)
        into.setdefault(variant, []).append(float(sums[0] / sums[1]))

    def _checkpoint(
        self, variant: str, taken: Checkpoints, stack: contextlib.ExitStack
    ) -> Callable[[], Future[Any] | None] | None:
        if variant in (NONE, AGAIN):
            return None
        if variant in (SAVE, SINGLE) and self._rank > 0:
            return None
        if variant == SAVE:
            return self._save
        if variant == OURS:
            self._logs += 1  # each run has a job of its own
            config = StreamConfig(uri=f"file://{self._folder}/log-{self._logs}", marker_every=None, head=None)
            self._checkpointer = stack.enter_context(
                StreamCheckpointer(self._job.model, self._job.optimizer, config=config)
            )
            self._checkpointer.mark().result(WAIT_S)
            return self._checkpointer.mark
        return partial(self._veloc, variant, taken)

    def _save(self) -> None:
        path = self._folder / "dense.pt"
        torch.save(dict(self._dense), path)
        synced(path)

    def _veloc(self, variant: str, taken: Checkpoints) -> Future[Any]:
        taken.settle_last()  # its scratch file is flushed: it may be written again
        return self._velocs[variant].checkpoint()

    def close(self) -> None:
        for veloc in self._velocs.values():
            veloc.close()


def measure(args: argparse.Namespace, folder: Path, memory: str) -> dict[str, Measured]:
    """(all ranks) By point."""
    torch.set_num_threads(1)
    with contextlib.closing(Runs(args, folder, Path(memory))) as runs:
        variants = {name: partial(runs.run, name) for name in (NONE, AGAIN)}
        for fsync in (mode == WITH_FSYNC for mode in args.fsync):
            ending = "" if fsync else UNSYNCED
            variants |= {each + ending: partial(runs.run, each, fsync=fsync) for each in WAYS}
        warm_up = int(not args.quick)
        found = take_turns(variants, args.rounds, warm_up)
        whole = dict(zip(("run", "run" + UNSYNCED), found.split(UNSYNCED), strict=True))
        nothing = {name: found.times[name] for name in (NONE, AGAIN)}
        points = {point: Measured(nothing | each.times) for point, each in whole.items() if OURS in each.times}
        of_runs = {"durable": runs.durable, "blocked": runs.blocked, "iterations": runs.iterations}
        for point, times in of_runs.items():
            if OURS in times:
                points[point] = Measured({name: each[warm_up:] for name, each in times.items()})
        return points


def room(args: argparse.Namespace, ranks: int) -> Room:
    """Of one number of ranks. Each run of ours has a log of its own, with all its checkpoints."""
    size, runs = 1_000_000 * args.megabytes, (args.rounds + 1) * len(args.fsync)
    return Room(
        "ranks with parameters, gradients, buckets and a copy each, VELOC's scratch and targets, the logs of all runs",
        memory=ranks * ((3 << 28) + 4 * size) + 3 * size,
        disk=(1 << 28) + size * (3 + runs * (1 + args.steps // args.every)),
        shared=2 * size,
    )


def main() -> None:
    parser = arguments(__doc__, rounds=6)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2])
    for name, default in (("megabytes", 100), ("steps", 31), ("every", 15), ("batch", 32)):
        parser.add_argument(f"--{name}", type=at_least(1), default=default)
    add_fsync(parser)
    args = parse(parser, megabytes=2, steps=5, every=2, rounds=1, ranks=[1, 2])
    if args.every > args.steps:
        parser.error(f"--every {args.every}: a run of --steps {args.steps} has no checkpoint: make it at most that")
    report = Report("dense", args, script="weak.py")
    names = {f"weak scaling, {args.megabytes} MB, {ranks} rank{'s' * (ranks > 1)}": ranks for ranks in args.ranks}
    for name in with_room(report, {name: room(args, ranks) for name, ranks in names.items()}):
        with scratch("dense") as folder, tempfile.TemporaryDirectory(prefix="dense-", dir="/dev/shm") as memory:
            found = spread(measure, names[name], folder, args, folder, memory)
        for point, measured in found.items():
            if point.startswith("run"):
                report.add(f"{name}, {point}", measured, NONE, unit="s", scale=1)
            else:
                report.add(f"{name}, {point}", measured, NONE if point == "iterations" else SAVE)
    report.finish()


if __name__ == "__main__":
    main()
