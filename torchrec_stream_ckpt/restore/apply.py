"""Execute a restore plan: write rows of HEAD, the store and the log into the live tables, in place.

From the store, several parts of the tables are read at a time. The oldest piece is written completely, then the newer
ones in their order: writing a row takes no longer than finding out that a newer piece has it (``benchmarks/recovery``,
death_index). If the store is a directory, runs of rows are read directly into the tables and checked there.

From the log, frames are read in order, checked by one set of threads and written by another. Each table always has the
same writing thread. The log holds a row as often as it was sent, and the last copy counts. So the frames of one table
are written in order, and those of different tables in parallel.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, groupby, pairwise
from threading import Lock
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.frame import Header, Kind, aligned
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.rows import RowsView, decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, chunk_layout, decode_chunk, entries_of, slices_of
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import check_hello, checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.native.kernel import checksum
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks, blocks_of
from torchrec_stream_ckpt.restore.plan import Columns, Move, Overlaps, RestorePlan, by_slice, pick
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.restore.views import View
from torchrec_stream_ckpt.store.api import Objects, ReadsInto
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.store.head import Head, SliceArrays
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, grouped

T = TypeVar("T")

_HEAD_THREADS = 4
_PART_CELLS = 2**27
"""Number of values that a thread copies at once."""


@torch.no_grad()
def apply_rows(
    log: LogReader,
    plan: RestorePlan,
    kernels: list[FusedKernel],
    objects: Objects | None = None,
    head: Head | None = None,
    seen: SeenMarks | None = None,
) -> int:
    """Write every row that the plan names into the live tables, and set the kernels' own state.

    If the model has changed, call :func:`set_scalars` afterwards to set the kernels' own state. A rank that reads no
    rows of a table gets that state from other ranks.

    If this raises, the tables are partly written, and the job must not continue training.

    Args:
        log: Log that holds ``plan.reads``.
        plan: The plan to execute.
        kernels: The live tables.
        objects: Store that holds ``plan.stored``; may be None if the plan reads nothing from a store.
        head: HEAD that holds ``plan.warm``; may be None if the plan reads nothing from HEAD.
        met: Collects the MARKs that are read, and for each block the newest marker that sent a row of it.

    Returns:
        Number of row records that this rank applied.

    Raises:
        HeadDamagedError: the data in HEAD differs from the data that was written there.
        CorruptionError: the log or the store is damaged or incomplete.
        SchemaMismatchError: the plan puts tables with different learning rates into one kernel.
    """
    seen = SeenMarks(plan.path) if seen is None else seen
    targets = _targets(plan, kernels, seen)
    overlaps = Overlaps(plan.targets)
    scalars = [each for each in plan.scalars if overlaps.moves(_shard_of(each))]
    applied = 0
    for kernel in kernels:
        kernel.prepare_write()
    if plan.warm:
        assert head is not None
        applied += _apply_head(plan, head, targets)
    if plan.stored:
        assert objects is not None
        applied += apply_store(plan, objects, targets)
    rows, found = apply_log(plan, log, targets, seen)
    applied += rows
    seen.scalars = [*scalars, *found]
    for shard, target in targets.items():
        if plan.live is None:  # otherwise every row was already in the tables
            target.finish(plan.schema.tables[shard.table].name)
    for kernel in kernels:
        kernel.finish_write()
    if plan.views is None:
        set_scalars(plan, kernels, seen.scalars)
    return applied


def _shard_of(record: TableScalars) -> TableShard:
    return TableShard(record.table, record.row0, record.rows, record.col0, record.cols)


def _targets(plan: RestorePlan, kernels: list[FusedKernel], seen: SeenMarks) -> dict[TableShard, Target]:
    moves = grouped((move.target, move) for move in plan.moves)
    index, wanted, targets = plan.index, set(plan.targets), {}
    for kernel in kernels:
        for shard, weights, states in zip(kernel.shards, kernel.weights(), kernel.states(), strict=True):
            live = shard.table_shard(index)
            view = plan.views.changed.get(live) if plan.views is not None else None
            key = view.shard if view is not None else live
            if key not in wanted or (view is None and not plan.is_same(live.table)):
                continue
            into, merged = moves.get(key, ()), key.table in plan.merged
            if view is not None:  # its rows are not compared with proofs: it has other blocks than the marker's
                targets[key] = _viewed(view, weights, states, into, merged=merged)
            else:
                targets[key] = Target(key, weights, states, into, merged=merged, sent=seen.begin(key, plan.based_on))
    return targets


def _viewed(
    view: View, weights: torch.Tensor, states: Sequence[torch.Tensor], moves: Sequence[Move], *, merged: bool
) -> Target:
    """Target for the part of a live shard that comes from the marker.

    It has the first columns of the shard, and either its first rows or the rows that a map selects.
    """
    rows = slice(None) if view.numbers is not None else slice(view.shard.rows)
    cols = slice(view.shard.cols)
    kept = [states[position] if position is not None else None for position in view.states]
    parts = [None if state is None else state[rows, cols] if state.dim() == 2 else state[rows] for state in kept]
    numbers, dtype = view.numbers, view.dtype
    return Target(view.shard, weights[rows, cols], parts, moves, merged=merged, numbers=numbers, dtype=dtype)


def set_scalars(plan: RestorePlan, kernels: list[FusedKernel], records: Sequence[TableScalars]) -> None:
    """Set the own state of each kernel from the records of the shards whose rows it holds.

    If the model has changed, only tables that keep the marker's optimizer count. A kernel that holds only new tables
    takes the state of all kept tables with the same optimizer, if those agree; the result does not depend on the plan.
    Any other kernel (of a table whose optimizer was switched) keeps the state that the model created.

    Args:
        plan: The plan that was executed.
        kernels: The live kernels.
        records: Records of the marker's ranks. If the model has changed, the records of all ranks.

    Raises:
        SchemaMismatchError: the plan puts tables with different states into one kernel.
    """
    index, of_shard = plan.index, _by_shard(records)
    for kernel in kernels:
        names = ", ".join(shard.table.name for shard in kernel.held)
        shards = [shard.table_shard(index) for shard in kernel.held]
        sources = _sources(shards, of_shard, plan) or _likewise(kernel, records, plan)
        if not sources:
            continue
        rate, next_rate = _agreed(
            "learning rate", names, ((each.learning_rate, each.next_learning_rate) for each in sources)
        )
        iterations = [each.iteration for each in sources]
        kernel.scalars.put_back(
            _agreed("iteration count", names, iterations) if kernel.scalars.reads_iteration else max(iterations),
            max(each.max_counter for each in sources),
            rate,
            next_rate,
        )


def _by_shard(records: Iterable[TableScalars]) -> dict[int, dict[TableShard, list[TableScalars]]]:
    """Return the records of each table, by shard."""
    found: dict[int, dict[TableShard, list[TableScalars]]] = {}
    for record in records:
        shard = TableShard(record.table, record.row0, record.rows, record.col0, record.cols)
        found.setdefault(record.table, {}).setdefault(shard, []).append(record)
    return found


def _sources(
    shards: Iterable[TableShard], records: Mapping[int, Mapping[TableShard, Sequence[TableScalars]]], plan: RestorePlan
) -> list[TableScalars]:
    """Return the records of these shards. A table of which the marker lacks a shard adds all of its records, once."""
    found: list[TableScalars] = []
    whole: set[int] = set()
    for shard in shards:
        if plan.views is not None and not plan.views.outcomes[shard.table].keeps_iteration:
            continue
        of_table = records.get(shard.table, {})
        if plan.is_same(shard.table) and shard in of_table:
            found += of_table[shard]
        elif shard.table not in whole:
            whole.add(shard.table)
            found += (record for each in of_table.values() for record in each)
    return found


def _likewise(kernel: FusedKernel, records: Sequence[TableScalars], plan: RestorePlan) -> list[TableScalars]:
    """(a changed model) Return the records of kept tables with the same optimizer as a kernel of new tables.

    Returns an empty list if the records differ. A table whose optimizer was switched is not a new table: no table has a
    step count that is valid for it.
    """
    if plan.views is None or any(plan.views.outcomes[index].source is not None for index in _indices(kernel, plan)):
        return []
    optimizers = {(shard.table.optimizer, shard.table.states) for shard in kernel.held}
    kept = {
        outcome.source
        for outcome in plan.views.outcomes.values()
        if outcome.keeps_iteration and outcome.spec and {(outcome.spec.optimizer, outcome.spec.states)} == optimizers
    }
    found = [record for record in records if record.table in kept]
    said = {(each.iteration, each.max_counter, each.learning_rate, each.next_learning_rate) for each in found}
    return found if len(said) == 1 else []


def _indices(kernel: FusedKernel, plan: RestorePlan) -> set[int]:
    return {shard.table_shard(plan.index).table for shard in kernel.held}


def _agreed(what: str, tables: str, values: Iterable[T]) -> T:
    """Return the value that all tables of a kernel have in common; raises SchemaMismatchError if they differ."""
    first, *others = dict.fromkeys(values)
    if others:
        raise SchemaMismatchError(
            f"the marker has more than one {what} for tables that share a kernel under this plan: {first}, {others[0]}",
            hint="place tables with different settings in separate kernels, or restore a marker whose ranks all had "
            "the same value",
            tables=tables,
        )
    return first


def _apply_head(plan: RestorePlan, head: Head, targets: Mapping[TableShard, Target]) -> int:
    """Write the rows of ``plan.warm`` into the targets. Call this before any other rows are written.

    Returns:
        Number of rows that were copied.

    Raises:
        HeadDamagedError: the data in HEAD differs from the data that was written there.
    """
    slices = {(each.table, each.col0): each for each in head.state.slices}
    with ThreadPoolExecutor(_HEAD_THREADS, "stream-ckpt-head") as pool:
        copies = []
        for place, moves in groupby(sorted(plan.warm), lambda move: (move.source.table, move.source.col0)):
            # Only the parts hold a reference to a map: the last thread to use it unmaps it while others still copy.
            arrays = head.arrays(slices[place], plan.schema)
            for part in (part for move in moves for part in _parts(plan.warm, move)):
                copies.append(pool.submit(_copy_of_head, arrays, targets[part.target], part, verify=head.verify))
            del arrays
        for copy in copies:
            copy.result()
    return sum(move.rows for move in plan.warm)


def _parts(moves: Sequence[Move], move: Move) -> Iterator[Move]:
    """Split ``move`` by rows into enough parts for all threads, but large ones, whose copies bypass the caches."""
    cells = sum(each.rows * each.cols for each in moves)
    count = min(max(1, round(move.rows * move.cols / min(cells / _HEAD_THREADS, _PART_CELLS))), move.rows)
    edges = [move.row0 + part * move.rows // count for part in range(count + 1)]
    return (replace(move, row0=begin, rows=end - begin) for begin, end in pairwise(edges))


@torch.no_grad()
def _copy_of_head(arrays: SliceArrays, target: Target, move: Move, *, verify: bool) -> None:
    begin, end = move.row0, move.row0 + move.rows
    for section in range(len(arrays.arrays) if verify else 0):
        arrays.check(*arrays.layout.blocks_of(section, begin, end))
    weights, *states = (array[begin:end] for array in arrays.arrays)
    target.put_block(move, weights, states)


STORE_THREADS = 4
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
        _read_chunk(objects, plan.schema, name, entry, targets[move.target], move)
        return entry.rows

    with ThreadPoolExecutor(max(STORE_THREADS, torch.get_num_threads()), "stream-ckpt-restore") as pool:
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


def _read_chunk(objects: ReadsInto, schema: Schema, name: str, entry: ChunkEntry, target: Target, move: Move) -> None:
    """Read one chunk and compare it with its checksum; ids go to a separate buffer, rows directly into the target."""
    layout = chunk_layout(entry, schema, name)
    ids = np.empty(entry.rows, np.int64)
    sections = [ids.view(np.uint8).data, *target.run(entry.first, entry.rows)]
    assert [len(each) for each in sections] == [entry.rows * section.row_bytes for section in layout.sections]
    buffers = [each for section in sections for each in (section, _padding(len(section)))]
    objects.read_into(name, entry.offset, buffers)
    crc = 0
    for buffer in buffers:
        crc = checksum(buffer, crc)
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
        lanes = split_lanes(plan, threads)
        ahead = max(2, objects.reads_ahead // max(1, len(lanes)))
        with (
            ThreadPoolExecutor(max(1, len(lanes)), "stream-ckpt-restore") as pool,
            ThreadPoolExecutor(ahead * max(1, len(lanes)), "stream-ckpt-read") as readers,
        ):
            placing = [pool.submit(_write_window, plan, objects, targets, readers, ahead, lane) for lane in lanes]
            # If one lane fails, this stops the readers, and the other lanes at their next read.
            return straight + sum(each.result() for each in as_completed(placing))


def split_lanes(plan: RestorePlan, threads: int) -> list[list[_Window]]:
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
def _write_window(
    plan: RestorePlan,
    objects: Objects,
    targets: Mapping[TableShard, Target],
    readers: Executor,
    ahead: int,
    windows: Sequence[_Window],
) -> int:
    """Write the rows of one thread's windows."""
    mine = grouped((window.target, window) for window in windows)
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


BATCH_BYTES = 8 * 2**20
BATCH_FRAMES = 64
BATCHES = 8
"""Number of batches to read ahead of the batch that is waited for."""
LOG_THREADS = 2
"""Minimum number of threads: one checks while another writes, whatever number torch uses for one operation."""


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame of rows, with the moves that take rows of it."""

    interval: Interval
    header: Header
    data: memoryview
    moves: Sequence[Move]
    place: int
    """Position in the path of the marker that the frame was sent for."""


def apply_log(
    plan: RestorePlan, log: LogReader, targets: Mapping[TableShard, Target], seen: SeenMarks
) -> tuple[int, list[TableScalars]]:
    """Write the rows of ``plan.reads`` into the targets, and add the MARKs that are read to ``seen``.

    Memory: ``BATCHES`` + 1 batches of frames if the log is not a directory.

    Returns:
        Number of row records that were written, and the kernels' own state at the plan's marker.

    Raises:
        CorruptionError: the log is damaged or incomplete.
    """
    scalars: list[TableScalars] = []
    placed: deque[Future[int]] = deque()
    applied = 0
    with ExitStack() as stack:
        threads = max(LOG_THREADS, torch.get_num_threads())
        checkers = stack.enter_context(ThreadPoolExecutor(threads, "stream-ckpt-check"))
        lanes = [stack.enter_context(ThreadPoolExecutor(1, "stream-ckpt-place")) for _ in range(threads)]
        for batch in _batches(_frames(plan, log, scalars, seen)):
            checked = checkers.submit(_checked_views, plan.schema, batch)
            for number, lane in enumerate(lanes):
                mine = [at for at, frame in enumerate(batch) if frame.header.table % threads == number]
                if mine:
                    placed.append(lane.submit(_write_frame, batch, checked, mine, targets))
            while len(placed) > BATCHES * threads:
                applied += placed.popleft().result()
        applied += sum(each.result() for each in placed)
    return applied, scalars


def _frames(plan: RestorePlan, log: LogReader, scalars: list[TableScalars], seen: SeenMarks) -> Iterator[_Frame]:
    """Yield the frames with rows for this rank, oldest first; add the kernel state in the last MARK to ``scalars``."""
    for read in plan.reads:
        interval = read.interval
        moves = by_slice(read.moves)
        for header, data in read_stream(log, interval.commit, interval.end, interval.after):
            if header.kind is Kind.ROWS:
                wanted = moves.get((header.table, header.col0, header.cols))
                if wanted:
                    yield _Frame(
                        interval, header, data, wanted, seen.path.place(MarkerId(header.generation, header.marker))
                    )
            elif header.kind is Kind.MARK and seen.path.place_of(header) is not None:
                mark = read_mark(header, data, interval.commit, interval.end)
                seen.mark(header, read.shards, mark)
                if header.seq == interval.end.frames - 1 and interval.commit.id == plan.marker:
                    scalars += mark.scalars
            elif header.kind is Kind.HELLO:
                check_hello(header, data, interval.claim, interval.commit, interval.end)


def _batches(frames: Iterator[_Frame]) -> Iterator[list[_Frame]]:
    batch: list[_Frame] = []
    num_bytes = 0
    for frame in frames:
        batch.append(frame)
        num_bytes += len(frame.data)
        if num_bytes >= BATCH_BYTES or len(batch) == BATCH_FRAMES:
            yield batch
            batch, num_bytes = [], 0
    if batch:
        yield batch


def _checked_views(schema: Schema, batch: Sequence[_Frame]) -> list[RowsView]:
    return [
        decode_rows(
            frame.header,
            checked_payload(frame.header, frame.data, frame.interval.commit, frame.interval.end),
            schema.tables[frame.header.table],
        )
        for frame in batch
    ]


@torch.no_grad()
def _write_frame(
    batch: Sequence[_Frame],
    checked: Future[list[RowsView]],
    numbers: Sequence[int],
    targets: Mapping[TableShard, Target],
) -> int:
    """Wait until a batch is checked, then write the rows of the frames of one lane."""
    rows = checked.result()
    applied = 0
    for number in numbers:
        applied += sum(
            targets[move.target].put(move, rows[number], batch[number].place) for move in batch[number].moves
        )
        failpoint("restore.frame")
    return applied
