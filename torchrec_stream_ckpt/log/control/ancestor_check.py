"""What a generation stands on in the log: the streams of those that lead to its parent."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd

EACH_TIME = 128
"""Streams of older generations that are looked at before one COMMIT."""


class Older:
    """The streams of older generations, of which a COMMIT has some looked at: all in turn.

    A job that has been restarted a thousand times stands on a thousand generations. To look at all their streams before
    each COMMIT would cost more with each restart. Looked at each time are, of each partition, the stream that begins
    first and the one that ends last: what a retention takes first, and what a broker loses first.
    """

    def __init__(self) -> None:
        self._known: tuple[MarkerId | None, dict[int, MarkerId]] | None = None
        """The parent, and what was trimmed, when the streams were found."""
        self._edges: tuple[LogSpan, ...] = ()
        self._rest: tuple[LogSpan, ...] = ()
        self._newest: tuple[tuple[int, RankEnd], ...] = ()
        self._next = 0

    def spans(self, lineage: Lineage, parent: MarkerId | None) -> tuple[LogSpan, ...]:
        """Return the spans to look at this time, less what was trimmed on purpose. The same until :meth:`turn`."""
        self._find(lineage, parent)
        return self._edges + self._rest[self._next : self._next + EACH_TIME]

    def newest(self, lineage: Lineage, parent: MarkerId | None) -> tuple[tuple[int, RankEnd], ...]:
        """(generation, end) of the newest stream in each partition that is not trimmed. Older ones were looked at when
        a generation first stood on them."""
        self._find(lineage, parent)
        return self._newest

    def turn(self) -> None:
        """They are there: next time come others."""
        self._next += EACH_TIME
        if self._next >= len(self._rest):
            self._next = 0

    def _find(self, lineage: Lineage, parent: MarkerId | None) -> None:
        """All streams up to ``parent``, once, and again after a trim."""
        reach = lineage.trims.reach
        if self._known == (parent, reach):
            return
        spans: list[LogSpan] = []
        newest: dict[int, tuple[int, RankEnd]] = {}
        for commit in lineage.path(parent) if parent is not None else ():
            mine = lineage.spans(commit.generation, commit.ranks, reach)
            kept = {(span.partition, span.end) for span in mine}
            spans += mine
            newest |= {
                end.partition: (commit.generation, end) for end in commit.ranks if (end.partition, end.end) in kept
            }
        self._split(spans)
        self._newest = tuple(newest.values())
        self._known = (parent, reach)

    def _split(self, spans: Iterable[LogSpan]) -> None:
        first: dict[int, LogSpan] = {}
        last: dict[int, LogSpan] = {}
        spans = sorted(spans, key=lambda span: (span.partition, span.generation, span.begin))
        for span in spans:
            first.setdefault(span.partition, span)
            newest = last.setdefault(span.partition, span)
            if (span.generation, span.end) > (newest.generation, newest.end):
                last[span.partition] = span
        edges = dict.fromkeys((*first.values(), *last.values()))
        self._edges = tuple(edges)
        self._rest = tuple(span for span in spans if span not in edges)
        self._next = 0
