"""Restore rows from the store, several parts of the tables at a time.

The oldest piece is written completely, then the newer ones in their order: writing a row takes no longer than finding
out that a newer piece has it (``benchmarks/recovery``, death_index).

If the store is a directory, runs of rows are read directly into the tables and checked there: rows that are adjacent in
a chunk of a base are adjacent in the table as well. Reading them through a memory map would cost page faults and a
second pass over memory, which takes twice the time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from threading import Lock

import numpy as np
import numpy.typing as npt
import torch
from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import aligned
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, chunk_layout, decode_chunk, entries_of, slices_of
from torchrec_stream_ckpt.proofs.seen_marks import blocks_of
from torchrec_stream_ckpt.restore.plan import Columns, Move, RestorePlan, by_slice, pick
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.store.api import Objects, ReadsInto
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import TableShard

THREADS_AT_LEAST = 4
"""Minimum number of threads, so that a disk has more than one request at a time."""


def read_runs(
    plan: RestorePlan, objects: ReadsInto, targets: Mapping[TableShard, Target]
) -> tuple[int, tuple[Piece, ...]]:
    """Write those rows of the base that can be read directly into the targets. Call this before other store reads.

    Returns:
        Number of row records that were written, and the pieces that are left to read.

    Raises:
        CorruptionError: the store is damaged.
    """
    runs: list[tuple[str, ChunkEntry, Move]] = []
    moves = by_slice(plan.cold)
    alone = _alone([picked for piece in plan.stored if piece.start is None for picked in piece.opened])

    def take(picked: Picked) -> Picked:
        taken = list(_runs(picked.only(alone[picked.ref.name]), moves, targets))
        runs.extend((picked.ref.name, entry, move) for _, entry, move in taken)
        return picked.only(~np.isin(picked.chunks, [number for number, _, _ in taken]))

    left = [piece.only(take) if piece.start is None else piece for piece in plan.stored]

    def copy(run: tuple[str, ChunkEntry, Move]) -> int:
        name, entry, move = run
        _copy(objects, plan.schema, name, entry, targets[move.target], move)
        return entry.rows

    with ThreadPoolExecutor(max(THREADS_AT_LEAST, torch.get_num_threads()), "stream-ckpt-restore") as pool:
        return sum(pool.map(copy, runs)), tuple(piece for piece in left if piece.opened)


def _alone(base: Sequence[Picked]) -> dict[str, npt.NDArray[np.bool_]]:
    """Find the chunks of the base whose id ranges overlap no other chunk; by segment.

    Parts of an interval may each hold a version of a row, and the last one counts, so those are written in their order.
    """
    if not base:
        return {}
    entries = np.concatenate([each.entries for each in base])
    order = np.lexsort(tuple(entries[name] for name in ("first", "cols", "col0", "table")))
    entries, shared = entries[order], np.zeros(len(order), np.bool_)
    for place in slices_of(entries).values():
        first, last, here = entries["first"][place], entries["last"][place], shared[place]
        here[1:] |= first[1:] <= np.maximum.accumulate(last)[:-1]
        here[:-1] |= first[1:] <= last[:-1]
    alone = np.empty_like(shared)
    alone[order] = ~shared
    ends = np.cumsum([len(each.chunks) for each in base])
    return dict(zip((each.ref.name for each in base), np.split(alone, ends[:-1]), strict=True))


def _runs(
    picked: Picked, moves: Mapping[Columns, Sequence[Move]], targets: Mapping[TableShard, Target]
) -> Iterator[tuple[int, ChunkEntry, Move]]:
    """Yield (number in the directory, entry, move) of chunks whose rows are also adjacent in one target."""
    for number, entry in zip(picked.chunks.tolist(), entries_of(picked.entries), strict=True):
        if entry.last - entry.first + 1 != entry.rows:
            continue
        wanted = [
            move
            for move in moves.get((entry.table, entry.col0, entry.cols), ())
            if move.row0 <= entry.last and entry.first < move.row0 + move.rows
        ]
        if len(wanted) == 1 and targets[wanted[0].target].takes_run(wanted[0], entry.first, entry.rows):
            yield number, entry, wanted[0]


def _copy(objects: ReadsInto, schema: Schema, name: str, entry: ChunkEntry, target: Target, move: Move) -> None:
    """Read one chunk and compare it with its checksum; ids go to a separate buffer, rows directly into the target."""
    layout = chunk_layout(entry, schema, name)
    ids = np.empty(entry.rows, np.int64)
    sections = [ids.view(np.uint8).data, *target.run(entry.first, entry.rows)]
    assert [len(each) for each in sections] == [entry.rows * section.row_bytes for section in layout.sections]
    buffers = [each for section in sections for each in (section, _padding(len(section)))]
    objects.read_into(name, entry.offset, buffers)
    crc = 0
    for buffer in buffers:
        crc = crc32c(buffer, crc)
    if crc != entry.crc:
        raise CorruptionError("chunk's checksum does not match", name=name, offset=str(entry.offset))
    if not np.array_equal(ids, np.arange(entry.first, entry.last + 1)):
        raise CorruptionError("chunk's ids differ from its directory entry", name=name, offset=str(entry.offset))
    target.note_run(move, entry.first, entry.rows)


def _padding(num_bytes: int) -> memoryview:
    return memoryview(bytearray(aligned(num_bytes) - num_bytes))


WINDOW_BYTES = 256 * 2**20
"""Size of the weights above which a table is split into windows, one for each thread.

A chunk may have rows of two windows.
"""

_lock = Lock()
_running: list[int] = []
"""Torch's threads per operation before the restore; one entry for each restore that now runs in this process."""


@dataclass(frozen=True, slots=True)
class _Window:
    """Window of rows [row0, row0+rows) of one target."""

    target: TableShard
    row0: int
    rows: int

    @property
    def cells(self) -> int:
        return self.rows * self.target.cols


def apply_store(plan: RestorePlan, objects: Objects, targets: Mapping[TableShard, Target]) -> int:
    """Write the rows of ``plan.stored`` into the targets.

    Memory: one chunk for each thread. If the store is not a directory, also the reads in flight, of at most 16 MB each:
    ``reads_ahead`` of them, or two for each thread if that is more.

    Returns:
        Number of row records that were written.

    Raises:
        CorruptionError: the store is damaged. No thread writes any more, and the targets are partly written.
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
            # If one lane fails, this stops the readers, and the other lanes at their next read.
            return straight + sum(each.result() for each in as_completed(placing))


def _lanes(plan: RestorePlan, threads: int) -> list[list[_Window]]:
    """Divide all rows of all targets among threads by the bytes to read for them; each gets adjacent windows."""
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
        height = max(1, -(-(last - first) // count)) * BLOCK_ROWS  # no block belongs to two threads
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
    """Return the parts of some moves that are inside these windows, which are given by target."""
    return tuple(
        part
        for move in moves
        for window in mine.get(move.target, ())
        if (part := move.between(window.row0, window.row0 + window.rows)) is not None
    )


@contextmanager
def _one_thread_an_operation() -> Iterator[int]:
    """Set torch to one thread per operation, because the restore has its own threads; yields the previous number.

    In torch, a new thread starts with the number that was set last in any thread. So each of the restores that run at
    the same time sets the original number again, whichever ends last.
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
