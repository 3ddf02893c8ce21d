"""Restore of the newest marker from HEAD, from the store, and torch.load of the same tables: paired, interleaved.

    python benchmarks/head/run.py [--tables 4] [--rows 1250000] [--dim 64] [--rounds 5] [--out FILE.json]

One job of one rank trains a few steps, commits a marker, and a materializer folds it into a store in a local folder,
with a HEAD in shared memory. Then each round does, in random order and once each:

``torch.load``   read a ``torch.save`` file of the same tables and optimizer states into new memory
``and copy``     the same, and copy them into the live tables: what such a restart really does
``mmap, copy``   the same with the file mapped: torch's fastest way
``store``        ``StreamCheckpointer.restore()`` of the newest marker without HEAD
``head``         the same with HEAD, checksums compared
``unverified``   the same with ``verify_head=False``

Each load is the first one of a process of its own, as after a restart, with the page cache warm and cold; a HEAD is in
memory in both. A restore is the whole call: lineage, plan, rows, dense state, and the claim of a generation. Every one
is compared with what was saved. ``ratio`` is the time of ``torch.load`` divided by a variant's, in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
from at_hand import have_at_hand  # noqa: E402
from cache import STATES  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Report,
    arguments,
    at_least,
    parse,
    refuse_small_machine,
    scratch,
    take_turns,
    timed,
)
from job import Job, Shape, build, first, spread  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.log.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.maintain.head import HeadWriter  # noqa: E402
from torchrec_stream_ckpt.maintain.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.store.api import open_store  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402

LOAD, COPY, MAPPED, STORE, HEAD = "torch.load", "and copy", "mmap, copy", "store", "head"
VARIANTS = (LOAD, COPY, MAPPED, STORE, HEAD, "unverified")
BATCH = 512


def attach(job: Job, folder: Path, head: Path | None, *, verify: bool = True) -> StreamCheckpointer:
    config = StreamConfig(
        uri=f"file://{folder / 'log'}",
        marker_every=None,
        head=str(head) if head is not None else None,
        verify_head=verify,
    )
    return StreamCheckpointer(job.model, job.optimizer, config=config)


def train(shape: Shape, steps: int, folder: Path, head: Path) -> int:
    """(one rank) Make everything that is restored from; the bytes of rows and states."""
    job = build(shape)
    with contextlib.closing(attach(job, folder, None)) as checkpointer:
        for _ in range(steps):
            job.train([torch.randint(0, rows, (BATCH,)) for rows in shape.rows], bags=BATCH)
            checkpointer.step()
        checkpointer.mark().result(600)
    torch.save(job.tensors, folder / "tables.pt")
    log, objects = FileLog(folder / "log"), open_store(str(folder / "log"))
    dense = open_dense(str(folder / "log"))
    with ThreadPoolExecutor(2) as pool:
        writer = HeadWriter(head, objects, pool)
        list(Materializer(log, objects, lambda _: dense, pool, head=writer).catch_up(Control(log).refresh()))
    assert writer.marker is not None
    return job.num_bytes


def load(shape: Shape, folder: Path, head: Path, variant: str) -> float:
    """(one rank) Seconds of one load; then the truth is read, and compared."""
    job = build(shape)
    for tensor in job.tensors.values():
        tensor.zero_()
    if variant in (STORE, HEAD, "unverified"):
        taken = restore(job, folder, None if variant == STORE else head, verify=variant == HEAD)
    else:
        have_at_hand(job.num_bytes * 5 // 4)
        taken = timed(lambda: load_file(job, folder / "tables.pt", variant))
    truth = torch.load(folder / "tables.pt", mmap=True)
    if variant != LOAD and not all(torch.equal(tensor, truth[name]) for name, tensor in job.tensors.items()):
        raise RuntimeError(f"{variant} has restored something else")
    return taken


@torch.no_grad()
def load_file(job: Job, path: Path, variant: str) -> None:
    loaded = torch.load(path, mmap=variant == MAPPED)
    if variant != LOAD:
        for name, tensor in job.tensors.items():
            tensor.copy_(loaded[name])


def restore(job: Job, folder: Path, head: Path | None, *, verify: bool) -> float:
    found: list[Any] = []
    with contextlib.closing(attach(job, folder, head, verify=verify)) as checkpointer:
        have_at_hand(job.num_bytes * 5 // 4)
        taken = timed(lambda: found.append(checkpointer.restore()))
    source = "store " if head is None else "head "
    if found[0] is None or not found[0].source.startswith(source):
        raise RuntimeError(f"restored {found[0]}, not from the {source}")
    return taken


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--tables", type=at_least(1), default=4)
    parser.add_argument("--rows", type=at_least(1), default=1_250_000)
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--steps", type=at_least(1), default=3)
    parser.add_argument("--head", type=Path, default=Path("/dev/shm"), help="where HEAD's folder is made")
    args: argparse.Namespace = parse(parser, tables=2, rows=2000, dim=8, steps=1, rounds=1)
    shape = Shape((args.rows,) * args.tables, args.dim)
    size, what = shape.table_bytes, "the tables, what is loaded, HEAD"
    refuse_small_machine("head", args, what, memory=(2 << 30) + 5 * size, disk=4 * size)
    refuse_small_machine("head", args, "HEAD", disk=5 * size // 2, folder=args.head)
    report = Report("head", args)
    with (
        scratch("head") as base,
        tempfile.TemporaryDirectory(prefix="head-", dir=args.head) as head,
    ):
        folder = base / "job"
        folder.mkdir()
        report.facts["bytes"] = spread(train, 1, base, shape, args.steps, folder, Path(head))
        for state in STATES:
            variants = {
                name: partial(first, load, 1, base, state, [folder], shape, folder, Path(head), name)
                for name in VARIANTS
            }
            report.add(state, take_turns(variants, args.rounds, warm_up=0), LOAD)
            for base_name in (COPY, MAPPED):
                against = report.paired(state, base_name, HEAD)
                report.goals.append(Goal.at_least(f"{state}: {base_name} / head", 1, against))
    report.finish()


if __name__ == "__main__":
    main()
