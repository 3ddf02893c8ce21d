"""DeepFreeze's weak scaling: what checkpoints add to a job whose ranks have the same work each, on more and more ranks.

    python benchmarks/dense/weak.py [--ranks 1 2 3 4] [--megabytes 100] [--rounds 5] [--quick] [--out FILE.json]

Dense layers under DDP, as in ``run.py``, with one batch a rank: ``--steps`` steps, a checkpoint after every ``--every``
of them. All variants of ``run.py``, and ``none``, twice, whose difference is the noise. Two points for each number of
ranks, both of the slowest rank:

``blocked``   how long one checkpoint keeps training from going on, the mean of a run
``run``       the whole run until its last checkpoint is durable; less that of ``none`` it is the runtime overhead
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[1:1] = [str(HERE.parents[level]) for level in (0, 1, 2)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
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
from job import Job, Shape, build, spread  # noqa: E402
from run import OURS, ROWS, SAVE, SHARDED, SINGLE, slowest  # noqa: E402
from veloc import Veloc, dealt  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

NONE, AGAIN = "none", "none again"
WAIT_S = 600.0


class Runs:
    """The variants on one rank."""

    def __init__(self, args: argparse.Namespace, folder: Path, memory: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        self._args, self._folder, self._rank = args, folder, rank
        self._job: Job = build(Shape((ROWS,), 16, dense_bytes=args.megabytes * 1_000_000))
        self._dense = [(name, each) for name, each in self._job.model.state_dict().items() if "top" in name]
        parts = {SINGLE: self._dense if rank == 0 else [], SHARDED: dealt(self._dense, world)[rank]}
        self._velocs = {
            name: Veloc(part, memory / f"{name}-{rank}", folder / f"{name}-{rank}") for name, part in parts.items()
        }
        self._checkpointer: StreamCheckpointer | None = None
        self._logs = 0
        self.blocked: dict[str, list[float]] = {}
        """By variant: seconds that one checkpoint took of the slowest rank, in each run the mean."""

    def run(self, variant: str) -> float:
        """Seconds of the whole run."""
        pending: list[Any] = []
        blocked: list[float] = []
        with contextlib.ExitStack() as stack:
            checkpoint = self._checkpoint(variant, pending, stack)

            def train() -> None:
                for step in range(1, self._args.steps + 1):
                    self._job.train([torch.randint(0, ROWS, (self._args.batch,))], bags=self._args.batch)
                    if self._checkpointer is not None:
                        self._checkpointer.step()
                    if checkpoint is not None and step % self._args.every == 0:
                        blocked.append(timed(checkpoint))
                for each in pending:
                    each.result(WAIT_S)

            taken = slowest(train)
        self._checkpointer = None
        mean = torch.tensor(sum(blocked) / max(1, len(blocked)))
        dist.all_reduce(mean, dist.ReduceOp.MAX)
        if blocked:
            self.blocked.setdefault(variant, []).append(float(mean))
        return taken

    def _checkpoint(self, variant: str, pending: list[Any], stack: contextlib.ExitStack) -> Callable[[], object] | None:
        if variant in (NONE, AGAIN):
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
            return lambda: pending.append(self._checkpointer.mark())  # type: ignore[union-attr]
        return partial(self._veloc, variant, pending)

    def _save(self) -> None:
        if self._rank == 0:
            path = self._folder / "dense.pt"
            torch.save(dict(self._dense), path)
            synced(path)
        dist.barrier()

    def _veloc(self, variant: str, pending: list[Any]) -> None:
        if pending:
            pending[-1].result(WAIT_S)  # its scratch file is flushed: it may be written again
        pending.append(self._velocs[variant].checkpoint())
        dist.barrier()

    def close(self) -> None:
        for veloc in self._velocs.values():
            veloc.close()


def measure(args: argparse.Namespace, folder: Path, memory: str) -> tuple[Measured, Measured]:
    """(all ranks) Of the runs, and of what one checkpoint blocked in them."""
    torch.set_num_threads(1)
    with contextlib.closing(Runs(args, folder, Path(memory))) as runs:
        variants = {name: partial(runs.run, name) for name in (NONE, AGAIN, SAVE, SINGLE, SHARDED, OURS)}
        found = take_turns(variants, args.rounds, warm_up=1)
        return found, Measured({name: times[1:] for name, times in runs.blocked.items()})


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[1, 2, 3, 4])
    for name, default in (("megabytes", 100), ("steps", 20), ("every", 5), ("batch", 64)):
        parser.add_argument(f"--{name}", type=at_least(1), default=default)
    parser.add_argument("--quick", action="store_true", help="small sizes; no figure means anything then")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(megabytes=2, steps=4, every=2, rounds=1, ranks=[1, 2])
        args = parser.parse_args()
    report = Report("dense", args, script="weak.py")
    for ranks in args.ranks:
        name = f"weak scaling, {args.megabytes} MB, {ranks} rank{'s' * (ranks > 1)}"
        try:
            check_memory(int(1e6 * args.megabytes * (ranks * 4 + 3)), f"{name}: as in run.py")
        except UnavailableError as error:
            report.facts[f"{name} is not measured"] = str(error)
            continue
        with scratch("dense") as folder, tempfile.TemporaryDirectory(prefix="dense-", dir="/dev/shm") as memory:
            runs, blocked = spread(measure, ranks, folder, args, folder, memory)
        report.add(f"{name}, run", runs, NONE, unit="s", scale=1)
        report.add(f"{name}, blocked", blocked, SAVE)
    report.finish()


if __name__ == "__main__":
    main()
