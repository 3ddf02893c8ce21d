"""How long a marker keeps training from going on when the dense part is large: ours against a plain save.

    python benchmarks/dense/run.py [--megabytes 100 600] [--ranks 2 4] [--rounds 5] [--out FILE.json]

Dense layers under DDP with SGD, replicas on every rank, and one small table. All ranks stand at a barrier, then:

``torch.save``   rank 0 saves the dense state dict, with fsync; the others wait at a barrier behind it
``VELOC-Single``   rank 0 copies all of it into shared memory, the others wait at a barrier; a thread flushes it
``VELOC-Sharded``  each rank does that for its part: DeepFreeze's two baselines (``veloc.py``)
``ours``         ``mark()`` on every rank; its future must resolve to a commit before the next variant runs

The time is that of the slowest rank. ``bytes written`` shows how the ranks share the work of writing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

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
from device import add_device  # noqa: E402
from job import Job, Shape, build, spread  # noqa: E402
from veloc import Veloc, dealt  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

SAVE, SINGLE, SHARDED, OURS = "torch.save, barrier", "VELOC-Single", "VELOC-Sharded", "ours"
ROWS = 10_000


def slowest(action: Callable[[], object]) -> float:
    """(all ranks) Seconds that the slowest rank takes."""
    dist.barrier()
    taken = torch.tensor(timed(action))
    dist.all_reduce(taken, dist.ReduceOp.MAX)
    return float(taken)


def save(job: Job, path: Path) -> float:
    def write() -> None:
        if dist.get_rank() == 0:
            torch.save({name: each for name, each in job.model.state_dict().items() if "top" in name}, path)
            synced(path)
        dist.barrier()

    return slowest(write)


class Velocs:
    """Both of DeepFreeze's baselines on this rank."""

    def __init__(self, job: Job, folder: Path, memory: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        state = [(name, each) for name, each in job.model.state_dict().items() if "top" in name]
        parts = {SINGLE: state if rank == 0 else [], SHARDED: dealt(state, world)[rank]}
        self._of = {
            name: Veloc(part, memory / f"{name}-{rank}", folder / f"{name}-{rank}") for name, part in parts.items()
        }

    def run(self, name: str) -> float:
        veloc = self._of[name]
        flushed: list[Any] = []

        def checkpoint() -> None:
            flushed.append(veloc.checkpoint())
            dist.barrier()

        taken = slowest(checkpoint)
        flushed[0].result(300)
        if not veloc.holds_the_state():
            raise RuntimeError(f"{name}: {veloc.target} does not hold the state")
        return taken

    def close(self) -> None:
        for veloc in self._of.values():
            veloc.close()


def mark(job: Job, checkpointer: StreamCheckpointer) -> float:
    job.train([torch.randint(0, ROWS, (64,))], bags=64)
    checkpointer.step()
    futures: list[Any] = []
    taken = slowest(lambda: futures.append(checkpointer.mark()))
    futures[0].result(300)
    dist.barrier()
    return taken


def measure(num_bytes: int, rounds: int, folder: str, memory: str, device: str) -> tuple[Measured, int]:
    """(all ranks) And how many bytes the dense state has."""
    job = build(Shape((ROWS,), 16, dense_bytes=num_bytes, device=device))
    dense = sum(each.nbytes for name, each in job.model.state_dict().items() if "top" in name)
    config = StreamConfig(uri=f"file://{folder}/log", marker_every=None, head=None)
    with (
        StreamCheckpointer(job.model, job.optimizer, config=config) as checkpointer,
        contextlib.closing(Velocs(job, Path(folder), Path(memory))) as velocs,
    ):
        variants = {
            SAVE: lambda: save(job, Path(folder) / "dense.pt"),
            SINGLE: lambda: velocs.run(SINGLE),
            SHARDED: lambda: velocs.run(SHARDED),
            OURS: lambda: mark(job, checkpointer),
        }
        return take_turns(variants, rounds), dense


def written(folder: Path) -> list[int]:
    """Bytes that each rank wrote of the newest marker's dense state."""
    newest = max((path.parent for path in folder.rglob(".metadata")), key=lambda path: path.stat().st_mtime)
    by_rank: dict[str, int] = {}
    for path in newest.glob("__*"):
        rank = path.name.split("_")[2]
        by_rank[rank] = by_rank.get(rank, 0) + path.stat().st_size
    return [by_rank[rank] for rank in sorted(by_rank, key=int)]


def point(args: argparse.Namespace, report: Report, megabytes: int, ranks: int) -> None:
    name = f"{megabytes} MB, {ranks} ranks"
    check_memory(
        int(1e6 * megabytes * (ranks * 4 + 3)), f"{name}: parameters, gradients, buckets, a copy a rank, VELOC's"
    )
    with scratch("dense") as folder, tempfile.TemporaryDirectory(prefix="dense-", dir="/dev/shm") as memory:
        what = (megabytes * 1_000_000, args.rounds, str(folder), memory, args.device)
        measured, num_bytes = spread(measure, ranks, folder, *what, device=args.device)
        report.add(name, measured, SAVE)
        report.facts[f"{name}: bytes"] = num_bytes
        report.facts[f"{name}: bytes written by each rank"] = written(folder)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--megabytes", type=at_least(1), nargs="+", default=[100, 600])
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[2, 4])
    add_device(parser)
    args = parser.parse_args()
    report = Report("dense", args)
    for megabytes in args.megabytes:
        for ranks in args.ranks:
            name = f"{megabytes} MB, {ranks} ranks"
            try:
                point(args, report, megabytes, ranks)
            except UnavailableError as error:
                report.facts[f"{name} is not measured"] = str(error)
            report.goals.append(Goal.at_least(f"{name}: times less blocked", 20, report.ratio(name, OURS)))
            against = report.paired(name, SHARDED, OURS)
            report.goals.append(Goal.at_least(f"{name}: VELOC-Sharded / ours", 1, against))
    report.finish()


if __name__ == "__main__":
    main()
