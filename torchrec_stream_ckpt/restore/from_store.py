"""Restore rows from the store: table by table, several at a time.

Of each table its base first, then what changed since, newest first, so that each row that changed is placed once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial

import torch

from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.restore.plan import RestorePlan, StoreRead, pick
from torchrec_stream_ckpt.restore.target import Scratch, Target
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.types import TableShard

WINDOW_BYTES = 256 * 2**20
"""A table with more weights than this is cut into windows, one a thread: a chunk may concern two of them."""
_AHEAD = 4


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows [row0, row0+rows) of one target."""

    target: TableShard
    row0: int
    rows: int


def apply_store(plan: RestorePlan, objects: Objects, targets: Mapping[TableShard, Target]) -> int:
    """Write what ``plan.stored`` names into the targets.

    Memory: of each thread, four reads of at most 16 MB each where the store is not a folder, and a chunk.

    Returns:
        How many row records were read.

    Raises:
        CorruptionError: the store is damaged.
    """
    lanes = torch.get_num_threads()
    windows = sorted(_windows(plan, lanes), key=lambda window: -window.rows * window.target.cols)
    with (
        _one_thread_an_operation(),
        ThreadPoolExecutor(lanes, "stream-ckpt-restore") as pool,
        ThreadPoolExecutor(2 * lanes, "stream-ckpt-read") as readers,
    ):
        return sum(pool.map(partial(_apply_window, plan, objects, targets, readers), windows))


def _windows(plan: RestorePlan, lanes: int) -> Iterator[_Window]:
    for target in plan.targets:
        count = min(lanes, 1 + 4 * target.rows * target.cols // WINDOW_BYTES)
        height = max(1, -(-target.rows // count))
        for row0 in range(target.row0, target.row0 + target.rows, height):
            yield _Window(target, row0, min(height, target.row0 + target.rows - row0))


@torch.no_grad()
def _apply_window(
    plan: RestorePlan, objects: Objects, targets: Mapping[TableShard, Target], readers: Executor, window: _Window
) -> int:
    base = [read for read in plan.stored if read.is_base]
    newest_first = [read for read in reversed(plan.stored) if not read.is_base]
    parts = [part for read in (*base, *newest_first) if (part := _within(read, window)) is not None]
    by_segment = {part.picked.ref.name: part for part in parts}
    target, scratch, rows = targets[window.target], Scratch(), 0
    for picked, entry, data in read_chunks(objects, [part.picked for part in parts], readers, _AHEAD):
        part = by_segment[picked.ref.name]
        chunk = decode_chunk(entry, data, plan.schema, picked.ref.name)
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
    moves = tuple(
        replace(move, row0=row0, rows=end - row0)
        for move in read.moves
        if move.target == window.target
        and (row0 := max(move.row0, window.row0)) < (end := min(move.row0 + move.rows, window.row0 + window.rows))
    )
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
