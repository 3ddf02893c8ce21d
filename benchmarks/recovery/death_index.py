"""What a stored death index would save a restore, against flags that are set newest first.

Both ways read the same increments newest first and write each row once. The store keeps no index: it asks, and sets,
one flag a row. The other way is handed, for free, which rows of each increment are alive at the marker: no index has to
be read, and none to be kept. So the difference is the most that an index could save.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from baselines import Naive
from files import Maps, Piece, checked
from workload import Tables


@dataclass(frozen=True)
class Saved:
    """Seconds of the delta part of one marker, by round, and rows read and alive."""

    flags_s: tuple[float, ...]
    index_s: tuple[float, ...]
    rows_read: int
    rows_alive: int

    @property
    def ratio(self) -> float:
        """Median over rounds of flags to index: 1.1 is a tenth slower."""
        return statistics.median(flags / index for flags, index in zip(self.flags_s, self.index_s, strict=True))


def compare(naive: Naive, interval: int, tables: Tables, rounds: int) -> Saved:
    """Restore the delta part of a marker in both ways, in turn."""
    pieces = naive.pieces(interval)[::-1]
    alive = _alive(pieces, tables)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for way in (0, 1) if number % 2 else (1, 0):
            begin = time.perf_counter()
            _restore(pieces, tables, alive if way else None)
            times[way].append(time.perf_counter() - begin)
    rows_read, rows_alive = sum(piece.rows for piece in pieces), sum(rows.numel() for rows in alive)
    return Saved(tuple(times[0]), tuple(times[1]), rows_read, rows_alive)


def _restore(pieces: Sequence[Piece], tables: Tables, alive: Sequence[torch.Tensor] | None) -> None:
    maps = Maps(tables.weights.shape[1])
    taken = torch.zeros(tables.sums.numel(), dtype=torch.bool)
    for number, piece in enumerate(checked(maps, pieces)):
        ids, weights, sums = maps.views(piece)
        fresh = _fresh(taken, ids) if alive is None else alive[number]
        if fresh.numel() < ids.numel():
            ids, weights, sums = (part.index_select(0, fresh) for part in (ids, weights, sums))
        tables.put(ids, weights, sums)


def _fresh(taken: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Which of the rows no newer piece has given; they are given now."""
    fresh = (~taken.index_select(0, ids)).nonzero().flatten()
    taken.index_fill_(0, ids, True)
    return fresh


def _alive(pieces: Sequence[Piece], tables: Tables) -> list[torch.Tensor]:
    maps = Maps(tables.weights.shape[1])
    taken = torch.zeros(tables.sums.numel(), dtype=torch.bool)
    return [_fresh(taken, maps.views(piece)[0]) for piece in pieces]
