"""Find the pieces of a store that lead to the markers of a job, once for all markers of a generation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.store.catalog import Catalog, Piece, follow
from torchrec_stream_ckpt.util.types import MarkerId


@dataclass(frozen=True, slots=True)
class _WholeWay:
    """Path to the newest marker of a generation, or of one based on it; paths to older markers are parts of it."""

    chain: list[Commit]
    places: dict[MarkerId, int]
    strides: Mapping[MarkerId, MarkerId | None]


class Strides:
    """Results of ``Catalog.strides`` for all markers of a job.

    Args:
        lineage: Lineage of the control partition.
        catalog: Catalog of the store; None if there is nothing in it.
    """

    def __init__(self, lineage: Lineage, catalog: Catalog | None) -> None:
        self._lineage = lineage
        self._catalog = catalog
        self._ways: dict[int, _WholeWay] = {}
        """Paths by generation. Generations that are based on each other's newest markers share one."""

    def _way(self, marker: MarkerId) -> _WholeWay:
        if marker.generation not in self._ways:
            # A caller that asks for only one generation needs no COMMITs of later ones.
            tip = self._tip(marker.generation) if self._ways else marker.generation
            newest = self._lineage.newest_of(tip)
            chain = self._lineage.chain(newest)
            places = {commit.id: place for place, commit in enumerate(chain)}
            strides = self._catalog.strides(chain) if self._catalog is not None else {}
            way = _WholeWay(chain, places, strides)
            for each in self._lineage.way(newest):
                if each == self._lineage.newest_of(each.generation):
                    self._ways.setdefault(each.generation, way)
        return self._ways[marker.generation]

    def _tip(self, generation: int) -> int:
        """Return the last generation in the chain of those based on each other's newest markers, from this one on."""
        while generation in self._children:
            generation = self._children[generation]
        return generation

    @cached_property
    def _children(self) -> dict[int, int]:
        """For each generation, a later one with markers that is based on its newest marker."""
        newest = {marker.generation: marker for marker in self._lineage.commits}
        parents = ((each, self._lineage.claims[each].parent) for each in newest)
        return {
            parent.generation: each
            for each, parent in parents
            if parent is not None and newest.get(parent.generation) == parent
        }

    def chain(self, marker: MarkerId) -> list[Commit]:
        """Return ``Lineage.chain``, without a scan of all commits each time."""
        way = self._way(marker)
        return way.chain[: way.places[marker] + 1]

    def rows(self, start: MarkerId | None, end: MarkerId) -> frozenset[MarkerId]:
        """Return the markers of (start, end], or all up to ``end`` if ``start`` does not lead there."""
        way = self._way(end)
        first = way.places[start] + 1 if start is not None and start in way.places else 0
        return frozenset(commit.id for commit in way.chain[first : way.places[end] + 1])

    # Markers that pieces lead to.

    def start(self, marker: MarkerId) -> MarkerId | None:
        """Return the start of the longest piece that ends at ``marker``, to which pieces must lead."""
        return self._way(marker).strides[marker]

    def serves(self, marker: MarkerId) -> bool:
        """Return whether pieces lead to ``marker``, and the store has its manifest."""
        return self._catalog is not None and marker in self._catalog.markers and marker in self._way(marker).strides

    def reach(self, marker: MarkerId) -> MarkerId | None:
        """Return the newest marker on the path to ``marker`` that the store serves; None if it serves none."""
        if self._catalog is None:
            return None
        way, known = self._way(marker), self._catalog.markers
        older = (way.chain[place].id for place in range(way.places[marker], -1, -1))
        return next((each for each in older if each in known and each in way.strides), None)

    def cover(self, marker: MarkerId) -> tuple[Piece, ...]:
        """Return ``Catalog.cover`` of the path to ``marker``."""
        way, reach = self._way(marker), self.reach(marker)
        if self._catalog is None or reach is None:
            return ()
        commits = self._lineage.commits
        steps = follow(way.strides, reach)
        self._catalog.read_ahead(steps)
        return tuple(self._catalog.piece(start, commits[end]) for start, end in steps)
