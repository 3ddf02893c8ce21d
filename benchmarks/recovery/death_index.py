"""What a stored death index would save a restore, against flags that are set newest first.

Both ways read the same increments newest first and write each row once. The store keeps no index: it asks, and sets,
one flag a row. The other way is handed, for free, which rows of each increment are alive at the marker: no index has
to be read, and none to be kept. So the difference is the most that an index could save. Naive increments, one behind
the other with every superseded row, are timed beside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from baselines import Naive
from files import Gather, Maps, Piece, apply_pieces, checked
from measure import warm
from workload import Tables


@dataclass(frozen=True)
class Saved:
    """Seconds of the delta part of one marker, by round, and rows read and alive."""

    naive_s: list[float]
    flags_s: list[float]
    index_s: list[float]
    rows_read: int
    rows_alive: int


def compare(naive: Naive, interval: int, tables: Tables, rounds: int) -> Saved:
    """Restore the delta part of a marker in these ways, in turn."""
    pieces = naive.pieces(interval)
    newest_first = pieces[::-1]
    alive = _alive(newest_first, tables)
    ways = (
        lambda: apply_pieces(pieces, tables),
        lambda: _restore(newest_first, tables, None),
        lambda: _restore(newest_first, tables, alive),
    )
    times: list[list[float]] = [[] for _ in ways]
    for number in range(rounds):
        for way in range(number, number + len(ways)):
            warm(piece.path for piece in pieces)
            begin = time.perf_counter()
            ways[way % len(ways)]()
            times[way % len(ways)].append(time.perf_counter() - begin)
    return Saved(*times, sum(piece.rows for piece in pieces), sum(rows.numel() for rows in alive))


def _restore(newest_first: Sequence[Piece], tables: Tables, alive: Sequence[torch.Tensor] | None) -> None:
    maps, gather = Maps(tables.weights.shape[1]), Gather()
    maps.fetch(newest_first)
    taken = torch.zeros(tables.sums.numel(), dtype=torch.bool)
    for number, piece in enumerate(checked(maps, newest_first)):
        rows = maps.views(piece)
        fresh = _fresh(taken, rows[0]) if alive is None else alive[number]
        tables.put(*(rows if fresh.numel() == piece.rows else gather.tensors(fresh, rows)))


def _fresh(taken: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Which of the rows no newer piece has given; they are given now."""
    fresh = (~taken.index_select(0, ids)).nonzero().flatten()
    taken.index_fill_(0, ids, True)
    return fresh


def _alive(pieces: Sequence[Piece], tables: Tables) -> list[torch.Tensor]:
    maps = Maps(tables.weights.shape[1])
    taken = torch.zeros(tables.sums.numel(), dtype=torch.bool)
    return [_fresh(taken, maps.views(piece)[0]) for piece in pieces]
