"""Rows that are read newest first: of each, the first chunk that has it counts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.store.catalog import Picked, Piece

Ints = npt.NDArray[np.int64]


def newest_first(pieces: Sequence[Piece], base: int = 0) -> Iterator[Picked]:
    """The segments of open pieces, given oldest first: a row's newest version is in the first one that has it.

    Args:
        pieces: What leads to a marker.
        base: The generation that sent a table whole (``Lineage.bases``): pieces of older ones do not count.
    """
    for piece in reversed(pieces):
        if piece.generation >= base:
            yield from reversed(piece.opened)


class NewestFirst:
    """Which rows of [row0, row0 + rows) newer chunks have given, each range of columns by itself.

    Args:
        row0, rows: The rows.
        cuts: How many ranges of columns come and go together.
    """

    def __init__(self, row0: int, rows: int, cuts: int = 1) -> None:
        self._row0, self._rows = row0, rows
        self._taken = np.zeros((cuts, rows), np.bool_)

    def take(self, ids: Ints, cut: int = 0) -> tuple[Ints, Ints]:
        """(places in the range, places in ``ids``) of the rows that count; from now on no older chunk gives them.

        Args:
            ids: Of one chunk, ascending; those outside of the range are left out.
            cut: Its columns.
        """
        begin, stop = np.searchsorted(ids, (self._row0, self._row0 + self._rows))
        places = ids[begin:stop] - self._row0
        fresh = np.flatnonzero(~self._taken[cut, places])
        rows = places[fresh]
        self._taken[cut, rows] = True
        return rows, fresh + begin

    @property
    def missing(self) -> int:
        """Rows that have not come with all columns."""
        return self._rows - int(self._taken.all(0).sum())
