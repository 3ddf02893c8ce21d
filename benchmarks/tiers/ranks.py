"""SCR-Exa's question: what checkpoints add to a job on more and more ranks, with the node's own tier and without it.

    python benchmarks/tiers/ranks.py [--ranks 1 2 4] [--far file] [--outer-every 1] [--drain-every 1] [--rounds 5]
        [--logs-only] [--quick] [--fsync with without] [--out FILE.json]

A run is ``--steps`` steps with a checkpoint every ``--every``, and is over when its last checkpoint is durable:

``none``         no checkpoints; it runs twice, and the difference is the noise
``torch.save``   each rank saves its tables, states and dense state into a folder while training waits
``far``          ours: a log at the far place alone
``near, far``    ours: a folder of the node, and the far place, to which a relay copies during training every
                 ``--outer-every``-th marker (SCR-Exa's talk: every 10th); durable is the near one, and the relay has
                 ended before the next run begins

Ours drains rows every ``--drain-every`` steps: with the steps of a checkpoint it sends each changed row once for each
checkpoint, as the others save it.

The far place is a broker on loopback, or a folder (``--far file``). In the point ``N ranks`` everybody syncs, a broker
before it acknowledges. In ``N ranks, without fsync`` nobody does that a clock waits for; the relay copies into a far
folder as ever. Both are measured in the same rounds, beside the same runs of ``none``.

Every run begins from the same state and writes a training log on each rank, a line a step with the loss to its last
bit. All variants must write the same bytes; ``--logs-only`` does only that, takes no time, and needs no idle machine.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from brokers import set_fsync, start_broker  # noqa: E402
from common import (  # noqa: E402
    UNSYNCED,
    WITH_FSYNC,
    Measured,
    Report,
    Room,
    UnavailableError,
    add_fsync,
    arguments,
    at_least,
    parse,
    scratch,
    synced,
    take_turns,
    timed,
    with_room,
    without_fsync,
)
from data import zipf_ids  # noqa: E402
from job import Job, Shape, build, spread  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

NONE, AGAIN, SAVE, FAR, BOTH = "none", "none again", "torch.save", "far", "near, far"
WHOLE_RUN_S = 600.0


class Runs:
    """The variants on one rank."""

    def __init__(self, args: argparse.Namespace, folder: Path, bootstrap: str) -> None:
        self._args, self._folder, self._bootstrap = args, folder, bootstrap
        self._rank = dist.get_rank()
        self._shape = shape_of(args)
        self._ids = [zipf_ids(self._shape.rows, args.batch, 100 * self._rank + step) for step in range(args.steps)]
        self._runs = 0
        self._broker_syncs: bool | None = None
        self.digests: dict[str, list[str]] = {}
        """By variant: of the training logs of all ranks."""

    def run(self, variant: str, *, fsync: bool = True) -> float:
        """Seconds of the slowest rank."""
        self._runs += 1
        job = build(self._shape)
        folder = self._folder / f"run-{self._runs}"
        if self._rank == 0:
            folder.mkdir()
            if self._bootstrap and variant in (FAR, BOTH) and fsync != self._broker_syncs:
                set_fsync(self._bootstrap, fsync)
                self._broker_syncs = fsync
        dist.barrier()
        path = folder / f"train-{self._rank}.log"
        with nullcontext() if fsync else without_fsync(), ExitStack() as stack, open(path, "w") as log:
            after_step, finish = self._hooks(variant, job, folder, stack)
            dist.barrier()
            taken = torch.tensor(timed(lambda: self._train(job, log, after_step, finish)))
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        self._compare(variant if fsync else variant + UNSYNCED, path)
        if self._rank == 0:
            shutil.rmtree(folder)
        return float(taken)

    def _train(self, job: Job, log: Any, after_step: Callable[[int], object], finish: Callable[[], object]) -> None:
        for step, ids in enumerate(self._ids, 1):
            loss = job.train(ids, self._args.batch)
            print(f"step {step} loss {float(loss).hex()}", file=log)
            after_step(step)
        finish()

    def _hooks(
        self, variant: str, job: Job, folder: Path, stack: ExitStack
    ) -> tuple[Callable[[int], object], Callable[[], object]]:
        """What comes after each step, and at the end."""
        if variant in (NONE, AGAIN):
            return (lambda _: None), (lambda: None)
        if variant == SAVE:
            return partial(self._save, job, folder / f"all-{self._rank}.pt"), (lambda: None)
        topic = f"{dist.get_world_size()}-ranks-run-{self._runs}"  # a broker keeps those of fewer ranks, too
        far = f"kafka://{self._bootstrap}/{topic}" if self._bootstrap else f"file://{folder}/far"
        config = StreamConfig(
            uri=(f"file://{folder}/near", far) if variant == BOTH else far,
            store=str(folder / "store"),
            marker_every=self._args.every,
            drain_every=self._args.drain_every,
            outer_every=self._args.outer_every if variant == BOTH else 1,
            head=None,
        )
        checkpointer = stack.enter_context(StreamCheckpointer(job.model, job.optimizer, config=config))
        checkpointer.mark().result(WHOLE_RUN_S)  # all rows are sent once before the clock is started
        return (lambda _: checkpointer.step()), (lambda: checkpointer.mark().result(WHOLE_RUN_S))

    def _save(self, job: Job, path: Path, step: int) -> None:
        if step % self._args.every and step != self._args.steps:
            return
        dense = {key: each for key, each in job.model.state_dict().items() if not hasattr(each, "local_shards")}
        torch.save(job.tensors | dense, path)
        synced(path)
        dist.barrier()

    def _compare(self, variant: str, path: Path) -> None:
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        found: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(found, digest)
        if self.digests.setdefault(variant, found) != found or found != next(iter(self.digests.values())):
            raise RuntimeError(f"{variant}: a training log differs, {found}; before it: {self.digests}")


def measure(args: argparse.Namespace, folder: Path, bootstrap: str) -> tuple[Measured, dict[str, list[str]]]:
    """(all ranks) Times by variant, and the digests of the training logs."""
    torch.set_num_threads(1)
    runs = Runs(args, folder, bootstrap)
    variants = {name: partial(runs.run, name) for name in (NONE, AGAIN)}
    for fsync in (mode == WITH_FSYNC for mode in args.fsync):
        ending = "" if fsync else UNSYNCED
        variants |= {name + ending: partial(runs.run, name, fsync=fsync) for name in (SAVE, FAR, BOTH)}
    if args.logs_only:
        for run in variants.values():
            run()
        return Measured(), runs.digests
    return take_turns(variants, args.rounds, int(not args.quick)), runs.digests


def shape_of(args: argparse.Namespace) -> Shape:
    return Shape((args.rows,) * args.tables, args.dim, dense_optimizer="adam")


def room(args: argparse.Namespace, ranks: int) -> Room:
    """Of one number of ranks. A run's folder goes with the run, the topics of all runs stay."""
    shape = shape_of(args)
    streamed = args.steps * args.batch * args.tables * ranks * (4 * args.dim + 16)
    log = shape.table_bytes + min(streamed, (args.steps + 1) * shape.table_bytes)
    runs = (1 if args.logs_only else args.rounds + 1) * len(args.fsync)
    return Room(
        "the tables three times, ranks and a broker; a log a tier of every row once and of the rows of each step",
        memory=(1 << 30) + ranks * (3 << 28) + 3 * shape.table_bytes,
        disk=(1 << 28) + 2 * log * (1 + runs * (args.far == "kafka")) + shape.table_bytes,
    )


def named(ranks: int) -> str:
    return f"{ranks} ranks" if ranks > 1 else "1 rank"


def each_world(args: argparse.Namespace, report: Report, worlds: list[int], bootstrap: str) -> None:
    for ranks in worlds:
        with scratch("tiers") as folder:
            measured, digests = spread(measure, ranks, folder, args, folder, bootstrap)
        name = named(ranks)
        report.facts[f"{name}: SHA-256 of the training logs"] = digests
        same = len({tuple(each) for each in digests.values()}) == 1
        report.facts[f"{name}: training logs are the same bytes"] = same
        for point, found in zip((name, name + UNSYNCED), measured.split(UNSYNCED), strict=True):
            if SAVE in found.times:
                nothing = {each: measured.times[each] for each in (NONE, AGAIN)}
                report.add(point, Measured(nothing | found.times, found.unavailable), NONE, unit="s", scale=1)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 4])
    parser.add_argument("--far", choices=("kafka", "file"), default="kafka")
    sizes = {"tables": 4, "rows": 200_000, "dim": 64, "batch": 2048, "steps": 60, "every": 10}
    sizes |= {"outer-every": 1, "drain-every": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=at_least(1), default=default)
    parser.add_argument("--logs-only", action="store_true", help="compare the training logs; nothing is timed")
    add_fsync(parser)
    args = parse(parser, rows=2000, dim=8, batch=64, steps=6, every=2, rounds=1)
    report = Report("tiers", args, script="ranks.py")
    report.facts |= {
        "steps": args.steps,
        "steps a checkpoint": args.every,
        "far": args.far,
        "markers a far one": args.outer_every,
        "steps a drain": args.drain_every,
    }
    rooms = {named(ranks): room(args, ranks) for ranks in args.ranks}
    worlds = with_room(report, rooms)
    with ExitStack() as stack:
        try:
            bootstrap = start_broker("tiers", stack) if worlds and args.far == "kafka" else ""
            each_world(args, report, [ranks for ranks in args.ranks if named(ranks) in worlds], bootstrap)
        except UnavailableError as error:
            report.facts["not measured"] = str(error)
    report.finish()


if __name__ == "__main__":
    main()
