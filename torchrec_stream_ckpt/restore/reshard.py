"""Which part of which source shard lands in which target shard: intervals, nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.types import TableShard

Columns = tuple[int, int, int]
"""A slice of a table: (table, first column, columns)."""


@dataclass(frozen=True, slots=True, order=True)
class Move:
    """Copy rows [row0, row0+rows), columns [col0, col0+cols) of ``source`` to the same place of ``target``."""

    source: TableShard
    target: TableShard
    row0: int
    rows: int
    col0: int
    cols: int

    @property
    def same_columns(self) -> bool:
        """Whether both shards hold the very same columns: then a state of one value a row is exact."""
        return (self.source.col0, self.source.cols) == (self.target.col0, self.target.cols)

    def between(self, row0: int, end: int) -> Move | None:
        """Its part with rows [row0, end); None when there is none."""
        first, last = max(self.row0, row0), min(self.row0 + self.rows, end)
        return replace(self, row0=first, rows=last - first) if first < last else None


def intersect(source: TableShard, target: TableShard) -> Move | None:
    """Return the part that the two shards have in common; None: there is none."""
    if source.table != target.table:
        return None
    row0, col0 = max(source.row0, target.row0), max(source.col0, target.col0)
    rows = min(source.row0 + source.rows, target.row0 + target.rows) - row0
    cols = min(source.col0 + source.cols, target.col0 + target.cols) - col0
    return Move(source, target, row0, rows, col0, cols) if rows > 0 and cols > 0 else None


def by_slice(moves: Iterable[Move]) -> dict[Columns, list[Move]]:
    """Moves by the slice that they come from."""
    found: dict[Columns, list[Move]] = {}
    for move in moves:
        found.setdefault((move.source.table, move.source.col0, move.source.cols), []).append(move)
    return found
