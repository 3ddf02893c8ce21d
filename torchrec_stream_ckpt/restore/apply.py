"""Execute a restore plan: rows from HEAD, the store and the log into the live tables, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TypeVar

import torch

from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.model import FusedKernel
from torchrec_stream_ckpt.proofs.seen_marks import Met
from torchrec_stream_ckpt.restore.from_log import apply_log
from torchrec_stream_ckpt.restore.from_store import apply_store
from torchrec_stream_ckpt.restore.plan import Move, RestorePlan, intersect
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.restore.views import View
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.head import Head, SliceArrays
from torchrec_stream_ckpt.util.types import TableShard

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
    met: Met | None = None,
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
    met = Met(plan.path) if met is None else met
    targets = _targets(plan, kernels, met)
    scalars = [each for each in plan.scalars if _concerns(each, plan.targets)]
    applied = 0
    for kernel in kernels:
        kernel.prepare_write()
    if plan.warm:
        assert head is not None
        applied += _apply_head(plan, head, targets)
    if plan.stored:
        assert objects is not None
        applied += apply_store(plan, objects, targets)
    rows, found = apply_log(plan, log, targets, met)
    applied += rows
    met.scalars = [*scalars, *found]
    for shard, target in targets.items():
        if plan.live is None:  # otherwise every row was already in the tables
            target.finish(plan.schema.tables[shard.table].name)
    for kernel in kernels:
        kernel.finish_write()
    if plan.views is None:
        set_scalars(plan, kernels, met.scalars)
    return applied


def _concerns(record: TableScalars, targets: Sequence[TableShard]) -> bool:
    shard = TableShard(record.table, record.row0, record.rows, record.col0, record.cols)
    return any(intersect(shard, target) is not None for target in targets)


def _targets(plan: RestorePlan, kernels: list[FusedKernel], met: Met) -> dict[TableShard, Target]:
    moves: dict[TableShard, list[Move]] = {}
    for move in plan.moves:
        moves.setdefault(move.target, []).append(move)
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
                targets[key] = Target(key, weights, states, into, merged=merged, sent=met.begin(key, plan.based_on))
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
    index, of_table = plan.index, _by_table(records)
    for kernel in kernels:
        names = ", ".join(shard.table.name for shard in kernel.held)
        sources = [record for shard in kernel.held for record in _sources(shard.table_shard(index), of_table, plan)]
        if not sources:
            sources = _likewise(kernel, records, plan)
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


def _by_table(records: Iterable[TableScalars]) -> dict[int, list[TableScalars]]:
    found: dict[int, list[TableScalars]] = {}
    for record in records:
        found.setdefault(record.table, []).append(record)
    return found


def _sources(
    shard: TableShard, records: Mapping[int, Sequence[TableScalars]], plan: RestorePlan
) -> Sequence[TableScalars]:
    """Return the records of this shard, or those of all shards of the table if the marker has no such shard."""
    if plan.views is not None and not plan.views.outcomes[shard.table].keeps_iteration:
        return []
    of_table = records.get(shard.table, [])
    if not plan.is_same(shard.table):
        return of_table
    same = [r for r in of_table if TableShard(r.table, r.row0, r.rows, r.col0, r.cols) == shard]
    return same or of_table


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
                copies.append(pool.submit(_copy, arrays, targets[part.target], part, verify=head.verify))
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
def _copy(arrays: SliceArrays, target: Target, move: Move, *, verify: bool) -> None:
    begin, end = move.row0, move.row0 + move.rows
    for section in range(len(arrays.arrays) if verify else 0):
        arrays.check(*arrays.layout.blocks_of(section, begin, end))
    weights, *states = (array[begin:end] for array in arrays.arrays)
    target.put_block(move, weights, states)
