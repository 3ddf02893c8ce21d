"""What placing each row once would save a restore: by flags that are set newest first, and by a stored death index.

Both ways read the same increments newest first. One asks, and sets, one flag a row. The other is handed, for free,
which rows of each increment are alive at the marker: no index has to be read, and none to be kept. So the difference is
the most that an index could save. Naive increments, one behind the other with every superseded row, are timed beside.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from baselines import Naive
from cache import warm
from files import Maps, Piece, checks, in_windows, place_pieces, whole_rows
from workload import Ids, Tables

_BLOCK_ROWS = 4096  # between two places at once: fits a cache


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
        lambda: place_pieces(pieces, tables),
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
    return Saved(*times, sum(piece.rows for piece in pieces), sum(len(rows) for rows in alive))


def _restore(newest_first: Sequence[Piece], tables: Tables, alive: Sequence[Ids] | None) -> None:
    """Like ``place_pieces``, each row once."""
    maps = Maps(tables.weights.shape[1])
    maps.fetch(newest_first)
    weights, sums = whole_rows(tables)
    with ThreadPoolExecutor(1) as checker:
        ready = checks(maps, newest_first, checker)
        views = [maps.arrays(piece) for piece in newest_first]

        def place(begin: int, end: int) -> None:
            taken = np.zeros(end - begin, np.bool_)
            for number, ((ids, new_weights, new_sums), check) in enumerate(zip(views, ready, strict=True)):
                check.result()
                low, high = np.searchsorted(ids, (begin, end))
                fresh = (
                    _fresh(taken, ids[low:high] - begin, low) if alive is None else _between(alive[number], low, high)
                )
                for block in range(0, len(fresh), _BLOCK_ROWS):
                    chosen = fresh[block : block + _BLOCK_ROWS]
                    weights[ids[chosen]] = new_weights[chosen]
                    sums[ids[chosen]] = new_sums[chosen]

        in_windows(place, newest_first, tables)


def _fresh(taken: npt.NDArray[np.bool_], places: Ids, low: int) -> Ids:
    """Rows of a piece, counted from ``low``, that no newer piece has given; they are given now."""
    fresh = np.flatnonzero(~taken[places])
    taken[places[fresh]] = True
    return fresh + low


def _between(alive: Ids, low: int, high: int) -> Ids:
    begin, end = np.searchsorted(alive, (low, high))
    return alive[begin:end]


def _alive(newest_first: Sequence[Piece], tables: Tables) -> list[Ids]:
    maps = Maps(tables.weights.shape[1])
    taken = np.zeros(tables.sums.numel(), np.bool_)
    return [_fresh(taken, maps.arrays(piece)[0], 0) for piece in newest_first]
