"""How long a marker keeps training from going on when the dense part is large: ours against a plain save.

    python benchmarks/dense/run.py [--megabytes 100 600] [--ranks 2 4] [--rounds 5] [--out FILE.json]

Dense layers under DDP with SGD, replicas on every rank, and one small table. All ranks stand at a barrier, then:

``torch.save``   rank 0 saves the dense state dict; the others wait at a barrier after it
``VELOC-Single``   rank 0 copies all of it into shared memory, the others wait at a barrier; a thread flushes it
``VELOC-Sharded``  each rank does that for its part: DeepFreeze's two baselines (``veloc.py``)
``ours``         ``mark()`` on every rank; its future must resolve to a commit before the next variant runs

Timed is what training waits for, without an fsync of anybody's; the points ``durable`` have the same variants until the
disk has everything, with everybody's fsync. The time is that of the slowest rank.
``bytes written`` shows how the ranks share the work of writing.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
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
)
from device import add_device  # noqa: E402
from job import Job, Shape, build, slowest, spread  # noqa: E402
from veloc import Veloc, sliced  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

SAVE, SINGLE, SHARDED, OURS = "torch.save, barrier", "VELOC-Single", "VELOC-Sharded", "ours"
ROWS = 10_000


def save(job: Job, path: Path, *, durable: bool) -> float:
    def write() -> None:
        if dist.get_rank() == 0:
            torch.save({name: each for name, each in job.model.state_dict().items() if "top" in name}, path)
            if durable:
                synced(path)
        dist.barrier()

    return slowest(write)


class Velocs:
    """Both of DeepFreeze's baselines on this rank."""

    def __init__(self, job: Job, folder: Path, memory: Path) -> None:
        rank, world = dist.get_rank(), dist.get_world_size()
        state = [(name, each) for name, each in job.model.state_dict().items() if "top" in name]
        parts = {SINGLE: state if rank == 0 else [], SHARDED: sliced(state, rank, world)}
        self._of = {
            name: Veloc(part, memory / f"{name}-{rank}", folder / f"{name}-{rank}") for name, part in parts.items()
        }

    def run(self, name: str, *, durable: bool) -> float:
        veloc = self._of[name]
        flushed: list[Any] = []

        def checkpoint() -> None:
            flushed.append(veloc.checkpoint())
            if durable:
                flushed[0].result(300)
            dist.barrier()

        taken = slowest(checkpoint)
        flushed[0].result(300)
        if not veloc.holds_the_state():
            raise RuntimeError(f"{name}: {veloc.target} does not hold the state")
        return taken

    def close(self) -> None:
        for veloc in self._of.values():
            veloc.close()


def mark(job: Job, checkpointer: StreamCheckpointer, *, durable: bool) -> float:
    job.train([torch.randint(0, ROWS, (64,))], bags=64)
    checkpointer.step()
    futures: list[Any] = []

    def call() -> None:
        futures.append(checkpointer.mark())
        if durable:
            futures[0].result(300)

    taken = slowest(call)
    futures[0].result(300)
    dist.barrier()
    return taken


def measure(
    num_bytes: int, rounds: int, folder: str, memory: str, device: str, fsync: list[str]
) -> tuple[dict[str, Measured], int]:
    """(all ranks) And how many bytes the dense state has."""
    job = build(Shape((ROWS,), 16, dense_bytes=num_bytes, device=device))
    dense = sum(each.nbytes for name, each in job.model.state_dict().items() if "top" in name)
    config = StreamConfig(uri=f"file://{folder}/log", marker_every=None, head=None)
    with (
        StreamCheckpointer(job.model, job.optimizer, config=config) as checkpointer,
        contextlib.closing(Velocs(job, Path(folder), Path(memory))) as velocs,
    ):
        found = {}
        for mode in fsync:
            durable = mode == WITH_FSYNC
            variants = {
                SAVE: partial(save, job, Path(folder) / "dense.pt", durable=durable),
                SINGLE: partial(velocs.run, SINGLE, durable=durable),
                SHARDED: partial(velocs.run, SHARDED, durable=durable),
                OURS: partial(mark, job, checkpointer, durable=durable),
            }
            found[mode] = take_turns(variants, rounds)
        return found, dense


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
    what = f"{name}: parameters, gradients, buckets, a copy a rank, VELOC's"
    check_memory(int(1e6 * megabytes * (ranks * 4 + 3)), what)
    check_disk(int(1e6 * megabytes * (6 + 2 * args.rounds * len(args.fsync))), what)
    check_disk(int(2e6 * megabytes), f"{name}: VELOC's", Path("/dev/shm"))
    with scratch("dense") as folder, tempfile.TemporaryDirectory(prefix="dense-", dir="/dev/shm") as memory:
        flags = (args.rounds, str(folder), memory, args.device, args.fsync)
        measured, num_bytes = spread(measure, ranks, folder, megabytes * 1_000_000, *flags, device=args.device)
        for mode, found in measured.items():
            report.add(name if mode == WITHOUT_FSYNC else f"{name}, durable", found, SAVE)
        report.facts[f"{name}: bytes"] = num_bytes
        report.facts[f"{name}: bytes written by each rank"] = written(folder)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--megabytes", type=at_least(1), nargs="+", default=[100, 600])
    parser.add_argument("--ranks", type=at_least(1), nargs="+", default=[2, 4])
    add_device(parser)
    add_fsync(parser)
    args = parse(parser, megabytes=[2], ranks=[2], rounds=1)
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
