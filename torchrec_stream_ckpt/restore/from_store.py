"""Restore rows from the store: table by table, several at a time.

Of each table its base first, then what changed since, newest first, so that each row that changed is placed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import Schema
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.restore.plan import RestorePlan, StoreRead, pick
from torchrec_stream_ckpt.restore.reshard import Move
from torchrec_stream_ckpt.restore.target import Scratch, Target
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.types import TableShard

WINDOW_BYTES = 256 * 2**20
"""A table with more weights than this is cut into windows, one a thread: a chunk may concern two of them."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows [row0, row0+rows) of one target."""

    target: TableShard
    row0: int
    rows: int


def apply_store(plan: RestorePlan, objects: Objects, targets: Mapping[TableShard, Target]) -> int:
    """Write what ``plan.stored`` names into the targets.

    Memory: a chunk of each thread and, where the store is no folder, the reads in flight, of at most 16 MB each.

    Returns:
        How many row records were read.

    Raises:
        CorruptionError: the store is damaged.
    """
    lanes = torch.get_num_threads()
    ahead = max(2, objects.reads_ahead // lanes)
    reads = _by_target(plan)
    windows = sorted(_windows(plan, lanes), key=lambda window: -window.rows * window.target.cols)
    with (
        _one_thread_an_operation(),
        ThreadPoolExecutor(lanes, "stream-ckpt-restore") as pool,
        ThreadPoolExecutor(ahead * lanes, "stream-ckpt-read") as readers,
    ):

        def write(window: _Window) -> int:
            parts = [part for read in reads[window.target] if (part := _within(read, window)) is not None]
            return _write_window(plan.schema, objects, targets[window.target], parts, readers, ahead)

        return sum(pool.map(write, windows))


def _by_target(plan: RestorePlan) -> dict[TableShard, list[StoreRead]]:
    """For each target what is read for it, in the order in which it is written: the base, then newest first."""
    reads: dict[TableShard, list[StoreRead]] = {target: [] for target in plan.targets}
    base = [read for read in plan.stored if read.is_base]
    newest_first = [read for read in reversed(plan.stored) if not read.is_base]
    for read in (*base, *newest_first):
        for target, moves in groupby(sorted(read.moves, key=_target), key=_target):
            reads[target].append(replace(read, moves=tuple(moves)))
    return reads


def _target(move: Move) -> TableShard:
    return move.target


def _windows(plan: RestorePlan, lanes: int) -> Iterator[_Window]:
    for target in plan.targets:
        count = min(lanes, 1 + 4 * target.rows * target.cols // WINDOW_BYTES)
        height = max(1, -(-target.rows // count))
        for row0 in range(target.row0, target.row0 + target.rows, height):
            yield _Window(target, row0, min(height, target.row0 + target.rows - row0))


@torch.no_grad()
def _write_window(
    schema: Schema, objects: Objects, target: Target, parts: Sequence[StoreRead], readers: Executor, ahead: int
) -> int:
    by_segment = {part.picked.ref.name: part for part in parts}
    scratch, rows = Scratch(), 0
    for picked, entry, data in read_chunks(objects, [part.picked for part in parts], readers, ahead):
        part = by_segment[picked.ref.name]
        chunk = decode_chunk(entry, data, schema, picked.ref.name)
        for move in part.moves:
            if (move.source.col0, move.source.cols) == (entry.col0, entry.cols):
                if part.is_base:
                    target.put(move, chunk)
                else:
                    target.fill(move, chunk, scratch)
        rows += len(chunk.ids)
        failpoint("restore.chunk")
    return rows


def _within(read: StoreRead, window: _Window) -> StoreRead | None:
    """What of a read concerns the window; None: nothing."""
    end = window.row0 + window.rows
    moves = tuple(part for move in read.moves if (part := move.between(window.row0, end)) is not None)
    picked = pick(read.picked, moves)
    return StoreRead(picked, moves, read.is_base) if len(picked.chunks) else None


@contextmanager
def _one_thread_an_operation() -> Iterator[None]:
    """The threads are ours: each runs its operations by itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
