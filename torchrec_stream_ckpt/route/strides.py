"""Which pieces of a store lead to the markers of a job: found once for all markers of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.store.catalog import Catalog, Piece, follow
from torchrec_stream_ckpt.types import MarkerId


@dataclass(frozen=True, slots=True)
class _WholeWay:
    """The way to the newest marker of a generation, on which the ways to its older ones lie."""

    chain: list[Commit]
    places: dict[MarkerId, int]
    strides: Mapping[MarkerId, MarkerId | None]


class Strides:
    """``Catalog.strides`` of all markers of a job.

    Args:
        lineage: The control partition.
        catalog: What the store holds; None for nothing.
    """

    def __init__(self, lineage: Lineage, catalog: Catalog | None) -> None:
        self._lineage = lineage
        self._catalog = catalog
        self._ways: dict[int, _WholeWay] = {}

    def _way(self, marker: MarkerId) -> _WholeWay:
        if marker.generation not in self._ways:
            chain = self._lineage.chain(self._lineage.newest_of(marker.generation))
            places = {commit.id: place for place, commit in enumerate(chain)}
            strides = self._catalog.strides(chain) if self._catalog is not None else {}
            self._ways[marker.generation] = _WholeWay(chain, places, strides)
        return self._ways[marker.generation]

    def chain(self, marker: MarkerId) -> list[Commit]:
        """``Lineage.chain``, without looking through all commits each time."""
        way = self._way(marker)
        return way.chain[: way.places[marker] + 1]

    def start(self, marker: MarkerId) -> MarkerId | None:
        """Where the longest piece that ends at ``marker`` begins; pieces lead to it."""
        return self._way(marker).strides[marker]

    def serves(self, marker: MarkerId) -> bool:
        """Whether pieces lead to ``marker``, and the store has its manifest."""
        return self._catalog is not None and marker in self._catalog.markers and marker in self._way(marker).strides

    def reach(self, marker: MarkerId) -> MarkerId | None:
        """The newest marker on the way to ``marker`` that the store serves; None: it serves none."""
        if self._catalog is None:
            return None
        way, known = self._way(marker), self._catalog.markers
        older = (way.chain[place].id for place in range(way.places[marker], -1, -1))
        return next((each for each in older if each in known and each in way.strides), None)

    def cover(self, marker: MarkerId) -> tuple[Piece, ...]:
        """``Catalog.cover`` of the way to ``marker``."""
        way, reach = self._way(marker), self.reach(marker)
        if self._catalog is None or reach is None:
            return ()
        commits = self._lineage.commits
        return tuple(self._catalog.piece(start, commits[end]) for start, end in follow(way.strides, reach))
