"""Restore rows from the store, several parts of the tables at a time.

The oldest piece as it is, then what changed since, in its order: a row is placed as fast as one finds out that a newer
piece has it (``benchmarks/recovery``, death_index).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock

import torch

from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.proofs.met import blocks_of
from torchrec_stream_ckpt.restore.plan import RestorePlan, pick
from torchrec_stream_ckpt.restore.reshard import Move, by_slice
from torchrec_stream_ckpt.restore.straight import read_runs
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.store.api import Objects, ReadsInto
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.types import TableShard

WINDOW_BYTES = 256 * 2**20
"""A table with more weights than this is cut into windows, one a thread: a chunk may concern two of them."""

_lock = Lock()
_running: list[int] = []
"""For each restore of this process that places rows now, how many threads torch had for one operation before."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Rows [row0, row0+rows) of one target."""

    target: TableShard
    row0: int
    rows: int

    @property
    def cells(self) -> int:
        return self.rows * self.target.cols


def apply_store(plan: RestorePlan, objects: Objects, targets: Mapping[TableShard, Target]) -> int:
    """Write what ``plan.stored`` names into the targets.

    Memory: a chunk of each thread and, where the store is no folder, the reads in flight, of at most 16 MB each:
    ``reads_ahead`` of them, or two for each thread if these are more.

    Returns:
        How many row records were written.

    Raises:
        CorruptionError: the store is damaged. No thread writes any more, and the targets are half written.
    """
    straight = 0
    if isinstance(objects, ReadsInto):
        straight, rest = read_runs(plan, objects, targets)
        plan = replace(plan, stored=rest)
    with _one_thread_an_operation() as threads:
        lanes = _lanes(plan, threads)
        ahead = max(2, objects.reads_ahead // max(1, len(lanes)))
        with (
            ThreadPoolExecutor(max(1, len(lanes)), "stream-ckpt-restore") as pool,
            ThreadPoolExecutor(ahead * max(1, len(lanes)), "stream-ckpt-read") as readers,
        ):
            placing = [pool.submit(_write, plan, objects, targets, readers, ahead, lane) for lane in lanes]
            # If one fails, this ends the readers, and the other lanes with their next read.
            return straight + sum(each.result() for each in as_completed(placing))


def _lanes(plan: RestorePlan, threads: int) -> list[list[_Window]]:
    """All rows of all targets, dealt out by what is read for them; windows of one thread lie side by side."""
    windows = sorted(_windows(plan, threads), key=lambda window: (window.target.table, window.row0))
    num_bytes, cells = Counter[int](), Counter[int]()
    for picked in (picked for piece in plan.stored for picked in piece.opened):
        entries = picked.entries
        for table, length in zip(entries["table"].tolist(), entries["num_bytes"].tolist(), strict=True):
            num_bytes[table] += length
    for window in windows:
        cells[window.target.table] += window.cells
    work = [(1 + num_bytes[each.target.table]) * each.cells / cells[each.target.table] for each in windows]
    lanes, total = [list[_Window]() for _ in range(threads)], sum(work)
    for window, mine, until in zip(windows, work, accumulate(work), strict=True):
        lanes[min(threads - 1, int(threads * (until - mine / 2) / total))].append(window)
    return [lane for lane in lanes if lane]


def _windows(plan: RestorePlan, threads: int) -> Iterator[_Window]:
    for target in plan.targets:
        count = min(threads, 1 + 4 * target.rows * target.cols // WINDOW_BYTES)
        first, last = blocks_of(target)
        height = max(1, -(-(last - first) // count)) * BLOCK_ROWS  # no block is of two threads
        for edge in range(first * BLOCK_ROWS, last * BLOCK_ROWS, height):
            row0, end = max(edge, target.row0), min(edge + height, target.row0 + target.rows)
            if row0 < end:
                yield _Window(target, row0, end - row0)


@torch.no_grad()
def _write(
    plan: RestorePlan,
    objects: Objects,
    targets: Mapping[TableShard, Target],
    readers: Executor,
    ahead: int,
    windows: Sequence[_Window],
) -> int:
    """Write the rows of one thread's windows."""
    mine: dict[TableShard, list[_Window]] = {}
    for window in windows:
        mine.setdefault(window.target, []).append(window)
    moves = by_slice(_within(mine, plan.cold))
    reads = [piece.only(lambda picked: pick(picked, moves)) for piece in plan.stored]
    wanted = [picked for piece in reads for picked in piece.opened]
    sent = {picked.ref.name: plan.path.place(piece.end) for piece in reads if piece.start for picked in piece.opened}
    rows = 0
    for picked, entry, data in read_chunks(objects, wanted, readers, ahead):
        chunk = decode_chunk(entry, data, plan.schema, picked.ref.name)
        for move in moves.get((entry.table, entry.col0, entry.cols), ()):
            rows += targets[move.target].put_sorted(move, chunk, sent.get(picked.ref.name))
        failpoint("restore.chunk")
    return rows


def _within(mine: Mapping[TableShard, Sequence[_Window]], moves: Sequence[Move]) -> tuple[Move, ...]:
    """What of some moves concerns these windows, given by target."""
    return tuple(
        part
        for move in moves
        for window in mine.get(move.target, ())
        if (part := move.between(window.row0, window.row0 + window.rows)) is not None
    )


@contextmanager
def _one_thread_an_operation() -> Iterator[int]:
    """The threads are ours: each runs its operations by itself. Gives how many torch has for one otherwise.

    Torch gives a new thread what was set last in any other one. So what it had is put back by all restores that run at
    once, whichever ends last.
    """
    with _lock:
        threads = max(torch.get_num_threads(), *_running, 1)
        _running.append(threads)
        torch.set_num_threads(1)
    try:
        yield threads
    finally:
        with _lock:
            _running.remove(threads)
            torch.set_num_threads(threads)
