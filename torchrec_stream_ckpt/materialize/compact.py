"""Merge what lies between two markers that are kept, so that what only those between them needed can go."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchrec_stream_ckpt.route.holdings import Holdings
from torchrec_stream_ckpt.store.catalog import Piece
from torchrec_stream_ckpt.types import MarkerId


@dataclass(frozen=True, slots=True)
class Span:
    """A fold to be written: all rows that changed in (start, end]."""

    start: MarkerId | None
    """None: a base."""
    end: MarkerId
    pieces: tuple[Piece, ...]
    """What it is made of."""

    @property
    def num_bytes(self) -> int:
        """Bytes to be read; at most so many are written."""
        return sum(piece.num_bytes for piece in self.pieces)

    def __str__(self) -> str:
        return f"{self.start or 'the root'} to {self.end}"


def plan_spans(holdings: Holdings, anchors: Iterable[MarkerId]) -> Iterator[Span]:
    """The folds that let go of all markers between ``anchors``, on each one's way from the root.

    None crosses a base, which would have to be written anew; a base itself is written anew when what came since is
    larger.

    Args:
        holdings: What is there.
        anchors: Markers that must stay restorable. Those that are not whole are left as they are.
    """
    stays = frozenset(anchors)
    for end in sorted(stays):
        holding = holdings.look(end)
        if holding.reach != end:
            continue
        chain = holdings.strides.chain(end)
        places = {commit.id: place for place, commit in enumerate(chain)}
        base, *rest = holding.pieces
        others = [marker for marker in stays if marker in places and marker != end]
        before = max(others, key=places.__getitem__, default=None)
        if before is None and sum(piece.num_bytes for piece in rest) > base.num_bytes:
            yield Span(None, end, holding.pieces)
            continue
        start = base.end if before is None or places[before] < places[base.end] else before
        tail = chain[places[start] + 1 :]
        cover = holdings.catalog.cover(tail, start)
        if len(cover) > 1 and cover[-1].end == end and not holdings.damage(cover):
            yield Span(start, end, cover)
