"""Execute a restore plan: rows from the log into the live tables, in place."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import torch

from torchrec_stream_ckpt.adapter import FusedKernel
from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.rows import Array, decode_rows
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.stream import checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.restore.plan import RestorePlan, StreamRead
from torchrec_stream_ckpt.restore.reshard import Move
from torchrec_stream_ckpt.types import TableShard

T = TypeVar("T")


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
        self._pieces: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    def write(self, move: Move, ids: torch.Tensor, weights: torch.Tensor, states: list[torch.Tensor]) -> int:
        """Put the rows of one frame that this move takes; returns how many."""
        chosen = ((ids >= move.row0) & (ids < move.row0 + move.rows)).nonzero().flatten()
        if not chosen.numel():
            return 0
        if chosen.numel() < ids.numel():
            ids, weights = ids.index_select(0, chosen), weights.index_select(0, chosen)
            states = [state.index_select(0, chosen) for state in states]
        local = ids - self._shard.row0
        rows = local.to(self._weights.device)
        self._put(self._weights, rows, weights, move)
        for position, (target, source) in enumerate(zip(self._states, states, strict=True)):
            if target.dim() == 2:
                self._put(target, rows, source, move)
            elif self._merged:
                self._piece(move)[position].index_copy_(0, local, source.double())
            else:
                target.index_copy_(0, rows, source.to(target.device))
        first, last = bisect_left(self._cuts, move.col0), bisect_left(self._cuts, move.col0 + move.cols)
        self._arrived[first:last].index_fill_(1, local, True)
        return int(local.numel())

    def _put(self, target: torch.Tensor, rows: torch.Tensor, source: torch.Tensor, move: Move) -> None:
        here, there = move.col0 - self._shard.col0, move.col0 - move.source.col0
        values = source[:, there : there + move.cols].to(target.device)
        target[:, here : here + move.cols].index_copy_(0, rows, values)

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
        missing = int((~self._arrived.all(0)).sum())
        if missing:
            shard = self._shard
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


@torch.no_grad()
def apply_rows(log: Log, plan: RestorePlan, kernels: list[FusedKernel]) -> int:
    """Write every row that the plan names into the live tables, and set the kernels' own state.

    The tables are half written when this raises: such a job must not train on.

    Returns:
        How many row records this rank applied.

    Raises:
        CorruptionError: the log is damaged or incomplete.
        SchemaMismatchError: the plan puts tables with different learning rates into one kernel.
    """
    targets = _targets(plan, kernels)
    scalars: list[TableScalars] = []
    applied = 0
    for kernel in kernels:
        kernel.prepare_write()
    for read in plan.reads:
        for header, frame in read_stream(log, read.commit, read.end):
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


def _targets(plan: RestorePlan, kernels: list[FusedKernel]) -> dict[TableShard, _Target]:
    index = plan.schema.index()
    moves = [move for read in plan.reads for move in read.moves]
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
    if frame.readonly:
        frame = memoryview(bytearray(frame))  # torch takes no read-only memory
    table = plan.schema.tables[header.table]
    rows = decode_rows(header, checked_payload(header, frame, read.commit, read.end), table)
    weights = _tensor(rows.weights, table.dtype)
    states = [_tensor(array, spec.dtype) for array, spec in zip(rows.states, table.states, strict=True)]
    ids = torch.from_numpy(rows.ids)
    return sum(targets[move.target].write(move, ids, weights, states) for move in moves)


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
