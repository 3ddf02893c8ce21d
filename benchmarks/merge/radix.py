"""What spans of each radix write, and what a restore of any marker then reads: counted in rows, by their ids.

The rules are those of ``Compactor``; nothing is timed and no row has a value.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.maintain.compactor import spans

Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Piece:
    start: int
    end: int
    ids: Ids


@dataclass(frozen=True, slots=True)
class Read:
    """What one marker's restore reads."""

    marker: int
    delta_rows: int
    """Beside its base."""
    rows: int
    pieces: int


@dataclass(slots=True)
class Layout:
    """A store under one policy, after all intervals.

    Args:
        radix: Of spans; 0: none.
        rebase: As ``Policy.rebase``.
    """

    radix: int
    rebase: float
    written: int = 0
    """Rows of intervals, spans and bases after the first base."""
    merged: int = 0
    """Rows that merges have read."""
    folds: int = 0

    def replay(self, touched: Sequence[Ids]) -> Iterator[Read]:
        """Yields what a restore of each marker reads; ``touched[0]`` is the first base."""
        cover = [_Piece(-1, 0, touched[0])]
        for marker, ids in enumerate(touched[1:], 1):
            cover.append(_Piece(marker - 1, marker, ids))
            self.written += len(ids)
            for length in spans(marker, self.radix) if self.radix else ():
                place = next((place for place, each in enumerate(cover) if each.start == marker - length), None)
                if place:
                    self._merge(cover, place)
            base, *rest = cover
            if self.rebase and sum(len(each.ids) for each in rest) > self.rebase * len(base.ids):
                self._merge(cover, 0)
            delta = sum(len(each.ids) for each in cover[1:])
            yield Read(marker, delta, delta + len(cover[0].ids), len(cover))

    def _merge(self, cover: list[_Piece], place: int) -> None:
        pieces = cover[place:]
        if len(pieces) < 2:
            return
        ids = np.unique(np.concatenate([each.ids for each in pieces]))
        self.merged += sum(len(each.ids) for each in pieces)
        self.written += len(ids)
        self.folds += 1
        cover[place:] = [_Piece(pieces[0].start, pieces[-1].end, ids)]
