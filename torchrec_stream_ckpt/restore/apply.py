"""Execute a restore plan: rows from HEAD, the store and the log into the live tables, in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, pairwise
from typing import TypeVar

import torch

from torchrec_stream_ckpt.adapter import FusedKernel
from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.restore.from_log import apply_log
from torchrec_stream_ckpt.restore.from_store import apply_store
from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.restore.proofs import Met
from torchrec_stream_ckpt.restore.reshard import Move, intersect
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.head import Head, SliceArrays
from torchrec_stream_ckpt.types import TableShard

T = TypeVar("T")

_HEAD_THREADS = 4
_PART_CELLS = 2**27
"""Values that a thread copies at once."""


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

    The tables are half written when this raises: such a job must not train on.

    Args:
        log: Where ``plan.reads`` are.
        plan: What to write.
        kernels: The live tables.
        objects: Where ``plan.stored`` is; None if the plan has none.
        head: Where ``plan.warm`` is; None if the plan has none.
        met: Takes what the rows come with: MARKs, and which marker last sent a row of which block.

    Returns:
        How many row records this rank applied.

    Raises:
        HeadDamagedError: HEAD does not hold what was written there.
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
    scalars += found
    for shard, target in targets.items():
        if plan.live is None:  # else every row was there before
            target.finish(plan.schema.tables[shard.table].name)
    for kernel in kernels:
        kernel.finish_write()
    _set_scalars(plan, kernels, scalars)
    return applied


def _concerns(record: TableScalars, targets: Sequence[TableShard]) -> bool:
    shard = TableShard(record.table, record.row0, record.rows, record.col0, record.cols)
    return any(intersect(shard, target) is not None for target in targets)


def _targets(plan: RestorePlan, kernels: list[FusedKernel], met: Met) -> dict[TableShard, Target]:
    index = plan.schema.index()
    moves: dict[TableShard, list[Move]] = {}
    for move in plan.moves:
        moves.setdefault(move.target, []).append(move)
    targets = {}
    for kernel in kernels:
        for shard, weights, states in zip(kernel.shards, kernel.weights(), kernel.states(), strict=True):
            key = shard.table_shard(index)
            if key in plan.targets:
                sent = met.begin(key, plan.based_on)
                merged = key.table in plan.merged
                targets[key] = Target(key, weights, states, moves.get(key, ()), merged=merged, sent=sent)
    return targets


def _set_scalars(plan: RestorePlan, kernels: list[FusedKernel], records: Sequence[TableScalars]) -> None:
    """Give each kernel the state of those whose rows it has got."""
    index = plan.schema.index()
    for kernel in kernels:
        names = ", ".join(shard.table.name for shard in kernel.held)
        sources = [record for shard in kernel.held for record in _sources(shard.table_shard(index), records)]
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


def _apply_head(plan: RestorePlan, head: Head, targets: Mapping[TableShard, Target]) -> int:
    """Write what ``plan.warm`` names into the targets; before anything else is.

    Returns:
        How many rows were copied.

    Raises:
        HeadDamagedError: HEAD does not hold what was written there.
    """
    slices = {(each.table, each.col0): each for each in head.state.slices}
    with ThreadPoolExecutor(_HEAD_THREADS, "stream-ckpt-head") as pool:
        copies = []
        for place, moves in groupby(sorted(plan.warm), lambda move: (move.source.table, move.source.col0)):
            # Only its parts hold a map: the thread that is the last to use it gives it back, while others copy.
            arrays = head.arrays(slices[place], plan.schema)
            for part in (part for move in moves for part in _parts(plan.warm, move)):
                copies.append(pool.submit(_copy, arrays, targets[part.target], part, verify=head.verify))
            del arrays
        for copy in copies:
            copy.result()
    return sum(move.rows for move in plan.warm)


def _parts(moves: Sequence[Move], move: Move) -> Iterator[Move]:
    """``move`` cut by rows: enough parts for all threads, but large ones, which are copied past the caches."""
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
