"""Execute a restore plan: rows from the log into the live tables, in place."""

from __future__ import annotations

import warnings
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from typing import TypeVar

import numpy as np
import torch

from torchrec_stream_ckpt.adapter import FusedKernel
from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.rows import Array, RowsView, decode_rows
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.restore.plan import RestorePlan, StreamRead
from torchrec_stream_ckpt.restore.reshard import Move, intersect
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.head import Head, SliceArrays
from torchrec_stream_ckpt.store.reader import read_chunks
from torchrec_stream_ckpt.types import TableShard, TableSpec

T = TypeVar("T")

READERS = 4
"""Threads that read the store and compare checksums, ahead of the one that writes."""
HEAD_READERS = 4
"""Threads that copy from HEAD."""
PART_CELLS = 2**27
"""Values that one of them copies at once."""


@dataclass(frozen=True, slots=True)
class StoreSource:
    """A store to restore from."""

    objects: Objects
    scalars: tuple[TableScalars, ...]
    """Of all ranks at the plan's reach."""


class _Target:
    """One live shard, and which of its cells have arrived."""

    def __init__(
        self,
        shard: TableShard,
        weights: torch.Tensor,
        states: tuple[torch.Tensor, ...],
        moves: Sequence[Move],
        *,
        merged: bool,
    ) -> None:
        self._shard = shard
        self._weights = weights
        self._states = states
        self._merged = merged
        self._cuts = sorted({edge for move in moves for edge in (move.col0, move.col0 + move.cols)})
        """Columns between two cuts always arrive together."""
        self._arrived = torch.zeros(max(1, len(self._cuts) - 1), shard.rows, dtype=torch.bool)
        self._newer = torch.zeros_like(self._arrived)
        """Cells that a newer piece of the store has given."""
        self._pieces: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def write(self, move: Move, ids: torch.Tensor, weights: torch.Tensor, states: list[torch.Tensor]) -> int:
        """Put the rows of one frame that this move takes; returns how many."""
        chosen = ((ids >= move.row0) & (ids < move.row0 + move.rows)).nonzero().flatten()
        if not chosen.numel():
            return 0
        if chosen.numel() < ids.numel():
            ids, weights = ids.index_select(0, chosen), weights.index_select(0, chosen)
            states = [state.index_select(0, chosen) for state in states]
        self._put_rows(move, ids - self._shard.row0, weights, states)
        return int(ids.numel())

    def fill(
        self, move: Move, ids: torch.Tensor, weights: torch.Tensor, states: list[torch.Tensor], *, is_base: bool
    ) -> int:
        """Put the rows of one chunk, whose ids ascend: of the base all, of other pieces those not given by a newer one.

        Pieces come newest first, but the base before all others.
        """
        begin, stop = (int(x) for x in torch.searchsorted(ids, torch.tensor([move.row0, move.row0 + move.rows])))
        if begin == stop:
            return 0
        local = ids[begin:stop] - self._shard.row0
        weights, states = weights[begin:stop], [state[begin:stop] for state in states]
        if is_base:
            self._put_rows(move, local, weights, states)
            return stop - begin
        rows = 0
        for cut in range(bisect_left(self._cuts, move.col0), bisect_left(self._cuts, move.col0 + move.cols)):
            col0, cols = self._cuts[cut], self._cuts[cut + 1] - self._cuts[cut]
            part = Move(move.source, move.target, move.row0, move.rows, col0, cols)
            newer = self._newer[cut]
            fresh = (~newer.index_select(0, local)).nonzero().flatten()
            if fresh.numel() == local.numel():
                self._put_rows(part, local, weights, states)
            elif fresh.numel():
                chosen = [state.index_select(0, fresh) for state in states]
                self._put_rows(part, local.index_select(0, fresh), weights.index_select(0, fresh), chosen)
            newer.index_fill_(0, local, True)
            rows = max(rows, fresh.numel())
        return rows

    def _put_rows(self, move: Move, local: torch.Tensor, weights: torch.Tensor, states: list[torch.Tensor]) -> None:
        """Write rows of the shard, by their place in it, and note that they have arrived."""
        count = local.numel()
        first = int(local[0])
        if int(local[-1]) - first + 1 == count and (count < 2 or bool((local[1:] > local[:-1]).all())):
            self.put_block(move, slice(first, first + count), weights, states)
            return
        rows = local.to(self._weights.device)
        self._put(self._weights, rows, weights, move)
        for position, (target, source) in enumerate(zip(self._states, states, strict=True)):
            if target.dim() == 2:
                self._put(target, rows, source, move)
            elif self._merged:
                self._piece(move)[position].index_copy_(0, local, source.double())
            else:
                target.index_copy_(0, rows, source.to(target.device))
        self._arrived[self._between(move)].index_fill_(1, local, True)

    def put_block(self, move: Move, rows: slice, weights: torch.Tensor, states: Sequence[torch.Tensor]) -> None:
        """Write rows that lie side by side, by their place in the shard, and note that they have arrived.

        Safe from several threads for different rows, once :meth:`prepare` was called for the move.
        """
        self._put(self._weights, rows, weights, move)
        for position, (target, source) in enumerate(zip(self._states, states, strict=True)):
            if target.dim() == 2:
                self._put(target, rows, source, move)
            elif self._merged:
                self._piece(move)[position][rows].copy_(source)
            else:
                copy_rows(target[rows], source)
        self._arrived[self._between(move), rows] = True

    def rows_of(self, move: Move) -> slice:
        """The rows of a move, by their place in the shard."""
        return slice(move.row0 - self._shard.row0, move.row0 - self._shard.row0 + move.rows)

    def prepare(self, move: Move) -> None:
        """Rows of ``move`` are about to be put."""
        if self._merged:
            self._piece(move)

    def _between(self, move: Move) -> slice:
        """The cuts that a move's columns lie between."""
        return slice(bisect_left(self._cuts, move.col0), bisect_left(self._cuts, move.col0 + move.cols))

    def _put(self, target: torch.Tensor, rows: torch.Tensor | slice, source: torch.Tensor, move: Move) -> None:
        here, there = move.col0 - self._shard.col0, move.col0 - move.source.col0
        values = source[:, there : there + move.cols]
        if isinstance(rows, slice):
            copy_rows(target[rows, here : here + move.cols], values)
        else:
            target[:, here : here + move.cols].index_copy_(0, rows, values.to(target.device))

    def _piece(self, move: Move) -> tuple[torch.Tensor, ...]:
        """Row-wise state as one column shard of the source has it, kept apart until all have arrived."""
        key = (move.col0, move.cols)
        if key not in self._pieces:
            self._pieces[key] = tuple(torch.zeros(self._shard.rows, dtype=torch.float64) for _ in self._states)
        return self._pieces[key]

    def finish(self, table: str) -> None:
        """Check that every cell has come, then merge row-wise state where the plan says so.

        Row-wise Adagrad keeps, for each column shard, the sum over steps of the mean of g^2 over the
        shard's own columns. The mean of the sources, weighted by the columns that each of them gives, is
        what one shard would hold for the same gradients; a split copies the value (docs/guarantees.md).
        """
        if not bool(self._arrived.all()):
            shard, missing = self._shard, int((~self._arrived.all(0)).sum())
            raise CorruptionError(
                f"{missing} rows of this shard are not in the log", table=table, row0=shard.row0, col0=shard.col0
            )
        for position, target in enumerate(self._states):
            if self._merged and target.dim() == 1:
                # All sources have one column split: a generation that changed it has sent the table whole.
                assert sum(cols for _, cols in self._pieces) == self._shard.cols
                mean = torch.zeros(self._shard.rows, dtype=torch.float64)
                for (_, cols), piece in self._pieces.items():
                    mean += piece[position] * (cols / self._shard.cols)
                target.copy_(mean)


def copy_rows(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a block of rows. On a CPU by numpy: it moves large blocks past the caches, and takes no other thread."""
    if target.device.type != "cpu" or target.dtype != source.dtype:
        target.copy_(source)
    else:
        np.copyto(_array(target), _array(source))


def _array(tensor: torch.Tensor) -> Array:
    """The same memory; numpy has no bfloat16, and only its bits matter here."""
    array: Array = (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
    return array


@torch.no_grad()
def apply_rows(
    log: Log,
    plan: RestorePlan,
    kernels: list[FusedKernel],
    store: StoreSource | None = None,
    head: Head | None = None,
) -> int:
    """Write every row that the plan names into the live tables, and set the kernels' own state.

    The tables are half written when this raises: such a job must not train on.

    Args:
        log: Where ``plan.reads`` are.
        plan: What to write.
        kernels: The live tables.
        store: Where ``plan.stored`` is, and the scalars of its reach; None if the plan has none.
        head: Where ``plan.warm`` is; None if the plan has none.

    Returns:
        How many row records this rank applied.

    Raises:
        HeadDamagedError: HEAD does not hold what was written there.
        CorruptionError: the log or the store is damaged or incomplete.
        SchemaMismatchError: the plan puts tables with different learning rates into one kernel.
    """
    with warnings.catch_warnings():
        # Frames and chunks are views of files that nobody writes to.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return _apply_rows(log, plan, kernels, store, head)


def _apply_rows(
    log: Log, plan: RestorePlan, kernels: list[FusedKernel], store: StoreSource | None, head: Head | None
) -> int:
    targets = _targets(plan, kernels)
    scalars: list[TableScalars] = []
    applied = 0
    for kernel in kernels:
        kernel.prepare_write()
    if plan.warm:
        assert head is not None
        applied += _apply_head(head, plan, targets)
    if store is not None:
        applied += _apply_store(plan, store, targets)
        if plan.reach == plan.marker:
            scalars += [each for each in store.scalars if _concerns(each, plan.targets)]
    for read in plan.reads:
        for header, frame in read_stream(log, read.commit, read.end, read.after):
            if header.kind is Kind.ROWS:
                applied += _apply_frame(plan, read, header, frame, targets)
                failpoint("restore.frame")
            elif header.seq == read.end.frames - 1 and read.commit.id == plan.marker:
                scalars += read_mark(header, frame, read.commit, read.end).scalars
    for shard, target in targets.items():
        target.finish(plan.schema.tables[shard.table].name)
    for kernel in kernels:
        kernel.finish_write()
    _set_scalars(plan, kernels, scalars)
    return applied


def _apply_store(plan: RestorePlan, store: StoreSource, targets: Mapping[TableShard, _Target]) -> int:
    """The base straight, then the other pieces, newest first."""
    base = [read for read in plan.stored if read.is_base]
    newest_first = [read for read in reversed(plan.stored) if not read.is_base]
    moves = {id(read.picked): read for read in (*base, *newest_first)}
    applied = 0
    with ThreadPoolExecutor(READERS, thread_name_prefix="stream-ckpt-read") as pool:
        for picked, entry, data in read_chunks(store.objects, [read.picked for read in (*base, *newest_first)], pool):
            read = moves[id(picked)]
            table = plan.schema.tables[int(entry["table"])]
            rows = decode_chunk(entry, data, plan.schema, picked.ref.name)
            ids, weights, *states = _row_tensors(rows, table)
            for move in read.moves:
                source = move.source
                if (source.table, source.col0, source.cols) == (entry["table"], entry["col0"], entry["cols"]):
                    applied += targets[move.target].fill(move, ids, weights, states, is_base=read.is_base)
            failpoint("restore.chunk")
    return applied


def _apply_head(head: Head, plan: RestorePlan, targets: Mapping[TableShard, _Target]) -> int:
    """Copy what the plan takes from HEAD, by several threads; returns how many rows."""
    slices = {(each.table, each.col0): each for each in head.state.slices}
    with ThreadPoolExecutor(HEAD_READERS, thread_name_prefix="stream-ckpt-head") as pool:
        futures = []
        for place, moves in groupby(sorted(plan.warm), lambda move: (move.source.table, move.source.col0)):
            # Only its parts hold a map: the thread that is the last to use it gives it back, while others copy.
            arrays = head.arrays(slices[place], plan.schema)
            for move in moves:
                targets[move.target].prepare(move)
                for part in _parts(plan.warm, move):
                    futures.append(pool.submit(_copy_part, head.verify, arrays, plan, targets[move.target], part))
        del arrays
        for future in futures:
            future.result()
    return sum(move.rows for move in plan.warm)


def _parts(moves: Sequence[Move], move: Move) -> Iterator[Move]:
    """``move`` cut by rows: enough parts for all threads, but large ones, which a processor copies faster."""
    cells = sum(each.rows * each.cols for each in moves)
    count = min(max(1, round(move.rows * move.cols / min(cells / HEAD_READERS, PART_CELLS))), move.rows)
    edges = [move.row0 + part * move.rows // count for part in range(count + 1)]
    return (replace(move, row0=begin, rows=end - begin) for begin, end in pairwise(edges))


@torch.no_grad()
def _copy_part(verify: bool, arrays: SliceArrays, plan: RestorePlan, target: _Target, move: Move) -> None:
    """Compare the blocks that hold the rows of a move with their checksums, then copy them."""
    begin, stop = move.row0, move.row0 + move.rows
    for section in range(len(arrays.arrays) if verify else 0):
        arrays.check(*arrays.layout.blocks_of(section, begin, stop))
    tensors = _tensors(arrays.arrays, plan.schema.tables[move.source.table])
    weights, *states = (tensor[begin:stop] for tensor in tensors)
    target.put_block(move, target.rows_of(move), weights, states)
    failpoint("restore.head")


def _concerns(record: TableScalars, targets: Sequence[TableShard]) -> bool:
    shard = TableShard(record.table, record.row0, record.rows, record.col0, record.cols)
    return any(intersect(shard, target) is not None for target in targets)


def _targets(plan: RestorePlan, kernels: list[FusedKernel]) -> dict[TableShard, _Target]:
    index = plan.schema.index()
    moves = plan.moves
    targets = {}
    for kernel in kernels:
        for shard, weights, states in zip(kernel.shards, kernel.weights(), kernel.states(), strict=True):
            key = TableShard(index[shard.table.name], shard.row0, shard.rows, shard.col0, shard.cols)
            if key in plan.targets:
                mine = [move for move in moves if move.target == key]
                targets[key] = _Target(key, weights, states, mine, merged=key.table in plan.merged)
    return targets


def _apply_frame(
    plan: RestorePlan, read: StreamRead, header: Header, frame: memoryview, targets: Mapping[TableShard, _Target]
) -> int:
    columns = (header.table, header.col0, header.cols)
    moves = [move for move in read.moves if (move.source.table, move.source.col0, move.source.cols) == columns]
    if not moves:
        return 0
    table = plan.schema.tables[header.table]
    rows = decode_rows(header, checked_payload(header, frame, read.commit, read.end), table)
    ids, weights, *states = _row_tensors(rows, table)
    return sum(targets[move.target].write(move, ids, weights, states) for move in moves)


def _row_tensors(rows: RowsView, table: TableSpec) -> list[torch.Tensor]:
    """Ids, weights and states as tensors of the same memory, which nobody writes to."""
    return [torch.from_numpy(rows.ids), *_tensors((rows.weights, *rows.states), table)]


def _tensors(arrays: Sequence[Array], table: TableSpec) -> list[torch.Tensor]:
    """Weights and states likewise."""
    dtypes = (table.dtype, *(state.dtype for state in table.states))
    return [_tensor(array, dtype) for array, dtype in zip(arrays, dtypes, strict=True)]


def _tensor(array: Array, dtype: str) -> torch.Tensor:
    tensor = torch.from_numpy(array)
    return tensor.view(torch.bfloat16) if dtype == "bfloat16" else tensor


def _set_scalars(plan: RestorePlan, kernels: list[FusedKernel], records: Sequence[TableScalars]) -> None:
    """Give each kernel the state of those whose rows it has got."""
    index = plan.schema.index()
    for kernel in kernels:
        shards = [shard for shard in kernel.shards if shard.rows and shard.cols]
        names = ", ".join(shard.table.name for shard in shards)
        sources = [
            record
            for shard in shards
            for record in _sources(
                TableShard(index[shard.table.name], shard.row0, shard.rows, shard.col0, shard.cols), records
            )
        ]
        if not sources:
            continue
        rate, next_rate = _agreed(
            "learning rate", names, ((each.learning_rate, each.next_learning_rate) for each in sources)
        )
        iterations = [each.iteration for each in sources]
        kernel.set_scalars(
            _agreed("iteration count", names, iterations) if kernel.reads_iteration else max(iterations),
            max(each.max_counter for each in sources),
            rate,
            next_rate,
        )


def _sources(shard: TableShard, records: Sequence[TableScalars]) -> list[TableScalars]:
    """What was recorded for this very shard; where the marker has no such one, for all shards of the table."""
    of_table = [record for record in records if record.table == shard.table]
    same = [r for r in of_table if TableShard(r.table, r.row0, r.rows, r.col0, r.cols) == shard]
    return same or of_table


def _agreed(what: str, tables: str, values: Iterable[T]) -> T:
    """The one value that all tables of a kernel had."""
    first, *others = dict.fromkeys(values)
    if others:
        raise SchemaMismatchError(
            f"the marker has more than one {what} for tables that share a kernel under this plan: {first}, {others[0]}",
            hint="place tables of different settings apart, or restore a marker at which all ranks had the same one",
            tables=tables,
        )
    return first
