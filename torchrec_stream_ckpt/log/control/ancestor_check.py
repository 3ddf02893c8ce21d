"""Streams in the log that a generation depends on: those of the generations that lead to its parent."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd

EACH_TIME = 128
"""Streams of older generations that are checked before one COMMIT."""


class Older:
    """Streams of older generations. Each COMMIT checks some of them, all in turn.

    A job that has been restarted a thousand times depends on a thousand generations. Checking all their streams before
    each COMMIT would cost more with each restart. In each partition, the stream that begins first and the one that ends
    last are checked each time: retention deletes the former first, and a failing broker loses the latter first.
    """

    def __init__(self) -> None:
        self._known: tuple[MarkerId | None, dict[int, MarkerId]] | None = None
        """The parent, and the trims at the time when the streams were found."""
        self._edges: tuple[LogSpan, ...] = ()
        self._rest: tuple[LogSpan, ...] = ()
        self._newest: tuple[tuple[int, RankEnd], ...] = ()
        self._next = 0

    def spans(self, lineage: Lineage, parent: MarkerId | None) -> tuple[LogSpan, ...]:
        """Return the spans to check this time, without trimmed ones. The result is the same until :meth:`turn`."""
        self._find(lineage, parent)
        return self._edges + self._rest[self._next : self._next + EACH_TIME]

    def newest(self, lineage: Lineage, parent: MarkerId | None) -> tuple[tuple[int, RankEnd], ...]:
        """Return (generation, end) of the newest stream in each partition that is not trimmed.

        Older streams were checked when a generation first depended on them.
        """
        self._find(lineage, parent)
        return self._newest

    def turn(self) -> None:
        """Advance to the next spans, after the current ones were found intact."""
        self._next += EACH_TIME
        if self._next >= len(self._rest):
            self._next = 0

    def _find(self, lineage: Lineage, parent: MarkerId | None) -> None:
        """Find all streams up to ``parent``, once, and again after a trim."""
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
