"""Write bases and spans beside the intervals of the store, as a policy wants them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Literal, get_args

from torchrec_stream_ckpt.errors import ConfigError, MissingObjectError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.materialize.merge import merge
from torchrec_stream_ckpt.materialize.progress import Progress
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Piece
from torchrec_stream_ckpt.types import MarkerId

Compact = Literal["none", "span2", "span4", "span8", "span16"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Policy:
    """What the materializer writes beside what the log holds."""

    rebase: float = 1.0
    """Write a new base when what came since the last one is more than so many times its bytes; 0: never."""
    compact: Compact = "span4"
    """``span4``: write, for every 4 markers, their newest rows once more, for every 4 of these again, and so on."""

    def __post_init__(self) -> None:
        if self.rebase < 0:
            raise ConfigError(f"rebase must not be negative, it is {self.rebase}", hint="0 is for never")
        if self.compact not in get_args(Compact):
            raise ConfigError(f"compact must be one of {', '.join(get_args(Compact))}, it is {self.compact!r}")

    @property
    def radix(self) -> int:
        """Markers that one span takes together, and spans that one of the next size does; 0: there are none."""
        return int(self.compact.removeprefix("span")) if self.compact != "none" else 0


@dataclass(slots=True)
class _GrowingPath:
    """The markers that lead to one, and the pieces that a restore of it would read. It grows with the path."""

    catalog: Catalog
    listed: int
    """How often the catalog had been listed, or forgotten."""
    ids: list[MarkerId]
    """From the first marker of the job on."""
    cover: list[Piece]
    """As ``Catalog.cover``."""

    @property
    def end(self) -> MarkerId:
        return self.ids[-1]

    def place_of(self, marker: MarkerId) -> int | None:
        """Of the first piece that comes after a marker; None when the marker is within a piece."""
        for place in range(len(self.cover), 0, -1):
            if self.cover[place - 1].end <= marker:
                return place if self.cover[place - 1].end == marker else None
        return None


class Compactor:
    """Merges what the store has on the path to a marker.

    A marker that follows on the last one costs no look at what is older: only the pieces that are merged are looked at.

    Args:
        objects: The store.
        pool: Threads to read it with.
        policy: Which folds are wanted.
        progress: Told of what is merged.
    """

    def __init__(self, objects: Objects, pool: Executor, policy: Policy, progress: Progress) -> None:
        self._objects = objects
        self._pool = pool
        self.policy = policy
        self._progress = progress
        self._way: _GrowingPath | None = None

    def fold(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Write folds; where gc has taken pieces away since we listed them, others lead to the same rows."""
        if not (self.policy.rebase or self.policy.radix):
            return
        try:
            self._write(lineage, catalog, commit)
        except MissingObjectError:
            catalog.refresh_within(lineage)
            self._write(lineage, catalog, commit)

    def cover(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> tuple[Piece, ...]:
        """The pieces that a restore of a marker would read; raises as ``Catalog.cover``."""
        way, self._way = self._to(lineage, catalog, commit), None
        self._way = way
        return tuple(way.cover)

    def _write(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> None:
        """Spans, then a base, as the policy wants them at this marker."""
        way, self._way = self._to(lineage, catalog, commit), None
        if not way.cover or way.cover[-1].end != commit.id:
            return
        if self.policy.radix:
            for span in spans(len(way.ids) - 1, self.policy.radix):
                # None crosses a base: it would be the longest piece that leads here, and the base would not be used.
                place = way.place_of(way.ids[-1 - span])
                if place is not None:
                    self._merge(lineage, way, place)
        base, *rest = way.cover
        if self.policy.rebase and sum(piece.num_bytes for piece in rest) > self.policy.rebase * base.num_bytes:
            self._merge(lineage, way, 0)
        self._way = way

    def _to(self, lineage: Lineage, catalog: Catalog, commit: Commit) -> _GrowingPath:
        """The way to a marker: that to the one before, and one piece more, where that is known."""
        way, before = self._way, lineage.previous(commit.id) or lineage.claims[commit.generation].parent
        if way is not None and way.catalog is catalog and way.listed == catalog.listed:
            if way.end == commit.id:
                return way
            if way.end == before and way.cover and way.cover[-1].end == before:
                way.cover.append(catalog.piece(before, commit))
                way.ids.append(commit.id)
                return way
        chain = lineage.chain(commit.id)
        return _GrowingPath(
            catalog, catalog.listed, [each.id for each in chain], list(catalog.cover(chain, pool=self._pool))
        )

    def _merge(self, lineage: Lineage, way: _GrowingPath, place: int) -> None:
        """Write the fold of the pieces from a place on; 0: a base."""
        pieces = way.cover[place:]
        if len(pieces) < 2:
            return
        progress = self._progress
        progress.doing = f"merging {len(pieces)} pieces up to marker {way.end}"
        fold = merge(self._objects, lineage, pieces, self._pool, progress.count_merged)
        progress.counts.fold_bytes += sum(ref.num_bytes for ref in fold.segments)
        way.catalog.folded(fold.start, fold.end)
        way.cover[place:] = [Piece(fold.start, fold.end, fold.segments, fold.chain)]


def spans(intervals_since_root: int, radix: int) -> Iterator[int]:
    """Lengths of the spans that end at this place of a chain, the shortest first."""
    length = radix
    while intervals_since_root and intervals_since_root % length == 0:
        yield length
        length *= radix
