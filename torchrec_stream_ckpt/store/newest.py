"""Rows in newest-first order. The first chunk that has a row counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.store.catalog import Picked, Piece

Ints = npt.NDArray[np.int64]
_NOTHING: Ints = np.empty(0, np.int64)


class TableChunks:
    """Chunks of open pieces, sorted by table: those of one table are found without a look at the others.

    Args:
        pieces: Pieces that lead to a marker, oldest first.
    """

    def __init__(self, pieces: Sequence[Piece]) -> None:
        self._segments = [each for piece in pieces for each in piece.opened]
        self._generations = np.array([piece.generation for piece in pieces for _ in piece.opened], np.int64)
        tables = [each.entries["table"] for each in self._segments]
        of_table = np.concatenate([_NOTHING, *tables]).astype(np.int64)
        segment = np.repeat(np.arange(len(tables)), [len(each) for each in tables])
        chunks = np.concatenate([_NOTHING, *(each.chunks for each in self._segments)])
        order = np.argsort(of_table, kind="stable")
        self._tables, self._segment, self._chunks = of_table[order], segment[order], chunks[order]

    def of(self, bases: Mapping[int, int]) -> list[Picked]:
        """Return the chunks of some tables, the oldest segment first.

        Args:
            bases: For each of the tables, the generation that sent it whole (``Lineage.bases``), or 0. Pieces of older
                ones do not count.
        """
        found = np.concatenate([_NOTHING, *(self._places(table, base) for table, base in bases.items())])
        found = found[np.lexsort((self._chunks[found], self._segment[found]))]
        segment, chunks = self._segment[found], self._chunks[found]
        firsts = np.flatnonzero(np.diff(segment, prepend=-1)).tolist()
        return [
            replace(self._segments[segment[first]], chunks=chunks[first:end])
            for first, end in pairwise((*firsts, len(chunks)))
        ]

    def _places(self, table: int, base: int) -> Ints:
        first, end = np.searchsorted(self._tables, (table, table + 1)).tolist()
        places = np.arange(first, end)
        return places[self._generations[self._segment[first:end]] >= base]


class NewestFirst:
    """Rows of [row0, row0 + rows) that newer chunks have given, tracked separately for each range of columns.

    Args:
        row0, rows: The rows.
        cuts: Number of ranges of columns, each of which is always given together.
    """

    def __init__(self, row0: int, rows: int, cuts: int = 1) -> None:
        self._row0, self._rows = row0, rows
        self._taken = np.zeros((cuts, rows), np.bool_)

    def take(self, ids: Ints, cut: int = 0) -> tuple[Ints, Ints]:
        """Return (places in the range, places in ``ids``) of the rows that count. Older chunks no longer give them.

        Args:
            ids: Ids of one chunk, ascending. Those outside of the range are ignored.
            cut: Index of its range of columns.
        """
        begin, stop = np.searchsorted(ids, (self._row0, self._row0 + self._rows))
        places = ids[begin:stop] - self._row0
        fresh = np.flatnonzero(~self._taken[cut, places])
        rows = places[fresh]
        self._taken[cut, rows] = True
        return rows, fresh + begin

    @property
    def missing(self) -> int:
        """Number of rows that were not given with all columns."""
        return self._rows - int(self._taken.all(0).sum())
