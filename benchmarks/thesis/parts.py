"""The thesis' tables 4.1, 4.2 and 4.4: what its parts cost, beside ours.

    python benchmarks/thesis/parts.py [--workload synthetic] [--rounds 7] [--fsync with without] [--quick]
        [--out FILE.json]

``4.1``  what streaming adds to the optimizer: backward and ``optimizer.step()`` of a step, as rows are updated in the
         backward here; ``thesis`` queues the step's ids (``design.py``), ``ours`` marks them and sends the rows,
         ``ours, marks alone`` sends none
``4.2``  handing one item to whoever sends it, in microseconds: a step's ids of one table by ``multiprocessing.Queue``
         and by the thesis' Quick Queue; ours is ``submit`` of a frame of rows
``4.4``  the state without embeddings, against all of it: by ``torch.save``, and ours, how long a marker after one step
         blocks training, without an fsync of anybody's; the point ``table 4.4, durable`` has the same until the disk
         has everything

One rank, the shapes of ``run.py``.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
    DURABLE,
    WITH_FSYNC,
    Report,
    Room,
    add_fsync,
    arguments,
    at_least,
    fresh_processes,
    parse,
    scratch,
    synced,
    take_turns,
    timed,
    with_room,
)
from data import uniform_ids, zipf_ids  # noqa: E402
from design import END, IDS, Pipeline, QuickQueue, raw, received  # noqa: E402
from job import Job, build, features, join_group  # noqa: E402
from setting import BATCH, QUICK_BATCH, SHAPES, shape_of  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.format.frame import Header, Kind  # noqa: E402
from torchrec_stream_ckpt.format.ring import FrameRing  # noqa: E402
from torchrec_stream_ckpt.format.rows import RowLayout  # noqa: E402
from torchrec_stream_ckpt.log.api import open_log  # noqa: E402
from torchrec_stream_ckpt.log.publisher import Publisher  # noqa: E402
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec  # noqa: E402

ITEMS = 200
"""Puts that are timed together."""
WAIT_S = 300.0


def attach(job: Job, folder: Path, drain_every: int) -> StreamCheckpointer:
    """With all rows sent once."""
    config = StreamConfig(uri=f"file://{folder}", marker_every=None, drain_every=drain_every, head=None)
    checkpointer = StreamCheckpointer(job.model, job.optimizer, config=config)
    checkpointer.mark().result(WAIT_S)
    return checkpointer


def update(job: Job, ids: list[torch.Tensor], bags: int, after: Callable[[], object]) -> float:
    """Seconds of the backward, the optimizer and what comes after it; the forward is not timed."""
    job.optimizer.zero_grad()
    loss = job.model(features(job.shape, ids, bags))

    def run() -> None:
        loss.backward()
        job.optimizer.step()
        after()

    return timed(run)


def table_41(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], float]]:
    """Each variant trains a job of its own, so that no other's hooks are in it."""
    shape, bags = shape_of(args.workload, args.quick), QUICK_BATCH if args.quick else BATCH
    criteo = args.workload == "criteo"
    ids = (zipf_ids if criteo else uniform_ids)(shape.rows, bags * (1 if criteo else args.ids), 0)
    plain, streamed, marked = (build(shape) for _ in range(3))
    sends, marks = attach(streamed, folder / "sends", 1), attach(marked, folder / "marks", 1 << 30)
    tables = [each for each in plain.tensors.values() if each.dim() == 2]
    pipeline = Pipeline(tables, {}, folder, slots=1)
    pipeline.begin()
    args.closing.callback(sends.close)
    args.closing.callback(marks.close)
    args.closing.callback(pipeline.close)
    bare = partial(update, plain, ids, bags, lambda: None)
    return {
        "none": bare,
        "none again": bare,
        "thesis": partial(update, plain, ids, bags, lambda: pipeline.step(ids)),
        "ours": partial(update, streamed, ids, bags, sends.step),
        "ours, marks alone": partial(update, marked, ids, bags, marks.step),
    }


def table_42(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], float]]:
    """Seconds a put, the mean of ``ITEMS`` of them."""
    context = fresh_processes()
    item = torch.randint(0, 80_000, (QUICK_BATCH if args.quick else BATCH,))
    theirs, quick = context.Queue(), QuickQueue(context)
    readers = [
        context.Process(target=drain_queue, args=(theirs,), daemon=True),
        context.Process(target=drain_quick, args=(quick.reader,), daemon=True),
    ]
    for reader in readers:
        reader.start()
    spec = TableSpec("t", 1_000_000, 64, "float32", "exact_rowwise_adagrad", (StateSpec("sum", "float32", True),))
    layout = RowLayout.of(spec, spec.dim)
    offsets, length = layout.offsets(layout.max_rows)
    codes = tuple(section.code for section in layout.sections)
    log = open_log(f"file://{folder / 'frames'}")
    log.prepare(1)
    ring = FrameRing(ITEMS << 20, 0, lambda size: np.zeros(size, np.uint8))
    publisher = Publisher(lambda resume_at: log.open_writer(1, 0, resume_at), ring)

    def puts(put: Callable[[], object]) -> float:
        return timed(lambda: [put() for _ in range(ITEMS)]) / ITEMS

    def submits() -> float:
        buffers: list[Any] = []
        for _ in range(ITEMS):
            buffers.append(ring.acquire(wait_s=WAIT_S))
            buffers[-1].header = Header(
                *(Kind.ROWS, bytes(16), 1),
                table=0,
                rows=layout.max_rows,
                cols=64,
                dtypes=codes,
                section_offsets=offsets,
                payload_len=length,
            )
        return timed(lambda: [publisher.submit(buffer) for buffer in buffers]) / ITEMS

    def close() -> None:
        theirs.put(None)
        quick.put(END)
        quick.close()
        publisher.close(10)
        for reader in readers:
            reader.join()

    args.closing.callback(close)
    return {
        "multiprocessing.Queue": lambda: puts(lambda: theirs.put(item)),
        "Quick Queue": lambda: puts(lambda: quick.put(IDS, [raw(item)])),
        "ours, submit": submits,
    }


def drain_queue(queue: Any) -> None:
    while queue.get() is not None:
        pass


def drain_quick(reader: Any) -> None:
    for _ in received(reader):
        pass


def table_44(args: argparse.Namespace, folder: Path) -> dict[str, Callable[[], float]]:
    job = build(shape_of(args.workload, args.quick))
    ids = zipf_ids(job.shape.rows, QUICK_BATCH if args.quick else BATCH, 0)
    dense = {key: each for key, each in job.model.state_dict().items() if not hasattr(each, "local_shards")}
    checkpointer = attach(job, folder / "blocked", 1 << 30)
    args.closing.callback(checkpointer.close)

    def save(name: str, state: dict[str, torch.Tensor], *, fsync: bool) -> float:
        def write() -> None:
            torch.save(state, folder / name)
            if fsync:
                synced(folder / name)

        return timed(write)

    def mark(*, fsync: bool) -> float:
        job.train(ids, len(ids[0]))
        checkpointer.step()
        futures: list[Any] = []
        taken = timed(lambda: futures.append(checkpointer.mark()))
        rest = timed(lambda: futures[0].result(WAIT_S))
        return taken + rest if fsync else taken

    variants: dict[str, Callable[[], float]] = {}
    for fsync in (mode == WITH_FSYNC for mode in args.fsync):
        ending = DURABLE if fsync else ""
        variants |= {
            f"torch.save, all{ending}": partial(save, "all.pt", job.tensors | dense, fsync=fsync),
            f"torch.save, without embeddings{ending}": partial(save, "dense.pt", dense, fsync=fsync),
            f"ours, a marker{ending}": partial(mark, fsync=fsync),
        }
    return variants


TABLES = {
    "4.1": (table_41, "none", "ms", 1e3),
    "4.2": (table_42, "multiprocessing.Queue", "us", 1e6),
    "4.4": (table_44, "torch.save, all", "ms", 1e3),
}


def rooms(args: argparse.Namespace) -> dict[str, Room]:
    """Of each table, by the name of its point."""
    shape, turns = shape_of(args.workload, args.quick), args.rounds + 1
    size, bags = shape.table_bytes, QUICK_BATCH if args.quick else BATCH
    lookups = 8 * len(shape.rows) * bags * (1 if args.workload == "criteo" else args.ids)
    frames, process = ITEMS << 20, 3 << 29
    found = {
        "4.1": Room(
            "three jobs, a copy of the tables, what a backward sorts; a log of all rows, twice, and of each step's",
            process + 4 * size + 12 * lookups,
            (1 << 28) + (2 + turns) * size,
            shared=size,
        ),
        "4.2": Room("a ring, two readers; its frames once a round", 3 * process + frames, turns * frames),
        "4.4": Room(
            "a job and a marker; its state in a file, and its log",
            process + 2 * size,
            (1 << 28) + 2 * size + turns * len(args.fsync) * min(size, 272 * len(shape.rows) * bags),
        ),
    }
    return {f"table {name}": found[name] for name in args.tables}


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--workload", choices=SHAPES, default="synthetic")
    parser.add_argument("--ids", type=at_least(1), default=100, help="of each lookup, but for criteo")
    parser.add_argument("--tables", nargs="+", choices=TABLES, default=list(TABLES))
    add_fsync(parser)
    args = parse(parser, rounds=1, ids=4)
    torch.set_num_threads(1)
    report = Report("thesis", args, script="parts.py")
    rows = with_room(report, rooms(args))
    with scratch("thesis") as folder:
        join_group(folder, 0, 1)
        for point in rows:
            name = point.removeprefix("table ")
            make, base, unit, scale = TABLES[name]
            (own := folder / name).mkdir()
            with contextlib.ExitStack() as args.closing:
                found = take_turns(make(args, own), args.rounds, int(not args.quick))
            for each, measured in zip((point, point + DURABLE), found.split(DURABLE), strict=True):
                if measured.times:
                    report.add(each, measured, base, unit=unit, scale=scale)
        dist.destroy_process_group()
    report.finish()


if __name__ == "__main__":
    main()
