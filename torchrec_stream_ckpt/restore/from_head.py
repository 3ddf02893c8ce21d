"""Restore rows from a HEAD in this host's memory: copied by several threads, block checksums compared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import groupby, pairwise

import torch

from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.restore.reshard import Move
from torchrec_stream_ckpt.restore.target import Target
from torchrec_stream_ckpt.store.head import Head, SliceArrays
from torchrec_stream_ckpt.types import TableShard

THREADS = 4
PART_CELLS = 2**27
"""Values that a thread copies at once."""


def apply_head(plan: RestorePlan, head: Head, targets: Mapping[TableShard, Target]) -> int:
    """Write what ``plan.warm`` names into the targets; before anything else is.

    Returns:
        How many rows were copied.

    Raises:
        HeadDamagedError: HEAD does not hold what was written there.
    """
    slices = {(each.table, each.col0): each for each in head.state.slices}
    with ThreadPoolExecutor(THREADS, "stream-ckpt-head") as pool:
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
    count = min(max(1, round(move.rows * move.cols / min(cells / THREADS, PART_CELLS))), move.rows)
    edges = [move.row0 + part * move.rows // count for part in range(count + 1)]
    return (replace(move, row0=begin, rows=end - begin) for begin, end in pairwise(edges))


@torch.no_grad()
def _copy(arrays: SliceArrays, target: Target, move: Move, *, verify: bool) -> None:
    begin, end = move.row0, move.row0 + move.rows
    for section in range(len(arrays.arrays) if verify else 0):
        arrays.check(*arrays.layout.blocks_of(section, begin, end))
    weights, *states = (array[begin:end] for array in arrays.arrays)
    target.put_block(move, weights, states)
