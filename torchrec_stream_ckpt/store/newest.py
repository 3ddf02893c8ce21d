"""Rows in newest-first order. The first chunk that has a row counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.store.catalog import Picked, Piece

Ints = npt.NDArray[np.int64]


def newest_first(pieces: Sequence[Piece], base: int = 0) -> Iterator[Picked]:
    """Yield the segments of open pieces, newest first. The pieces are given oldest first.

    A row's newest version is in the first segment that has it.

    Args:
        pieces: Pieces that lead to a marker.
        base: Generation that sent a table whole (``Lineage.bases``). Pieces of older ones do not count.
    """
    for piece in reversed(pieces):
        if piece.generation >= base:
            yield from reversed(piece.opened)


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
