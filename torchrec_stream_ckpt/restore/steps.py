"""What has to be read for markers, and what of it stands on what: a tree."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterable, Iterator, Mapping
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.interval import Interval, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.route.strides import Strides
from torchrec_stream_ckpt.store.catalog import Catalog, Piece
from torchrec_stream_ckpt.types import MarkerId


@dataclass(frozen=True, slots=True)
class Step:
    """What is read at once: the interval of the log, or the piece of the store, that ends at a marker."""

    marker: MarkerId
    stored: bool


class Steps:
    """The steps of all markers of a job.

    Args:
        lineage: The control partition.
        catalog: The store that serves some of them; None for the log alone.
    """

    def __init__(self, lineage: Lineage, catalog: Catalog | None) -> None:
        self._lineage, self._catalog = lineage, catalog
        self._strides = Strides(lineage, catalog)
        self.reach = self._strides.reach
        self.previous: dict[MarkerId, MarkerId | None] = {}
        """What each marker stands on."""
        newest: dict[int, MarkerId] = {}
        for marker in lineage.commits:
            self.previous[marker] = newest.get(marker.generation, lineage.claims[marker.generation].parent)
            newest[marker.generation] = marker

    def to(self, marker: MarkerId) -> Step:
        """The last one."""
        return Step(marker, self._strides.serves(marker))

    def tree(self, markers: Iterable[MarkerId]) -> dict[Step | None, list[Step]]:
        """Return the steps that stand on each step, and on nothing; the one that most others need is first."""
        found: dict[Step | None, list[Step]] = {}
        known: set[Step] = set()
        for marker in markers:
            for step in self.steps(marker, known):
                known.add(step)
                found.setdefault(self.before(step), []).append(step)
        weight: dict[Step, int] = {}
        for step in reversed(list(_downward(found))):
            weight[step] = 1 + sum(weight[each] for each in found.get(step, ()))
        for steps in found.values():
            steps.sort(key=lambda step: -weight[step])
        return found

    def within(self, step: Step) -> Iterator[MarkerId]:
        """Markers that a piece of the store leads past, the newest first; none where it holds every row."""
        start, at = self._strides.start(step.marker), self.previous[step.marker]
        while start is not None and at is not None and at != start:
            yield at
            at = self.previous[at]

    def before(self, step: Step) -> Step | None:
        """Return the step on which an interval of the log, or a piece of the store, stands."""
        if step.stored:
            start = self._strides.start(step.marker)
            return Step(start, True) if start is not None else None
        previous = self.previous[step.marker]
        return self.to(previous) if previous is not None else None

    def steps(self, marker: MarkerId, known: Container[Step]) -> list[Step]:
        """Return the steps that lead to ``marker`` from the last one that is known, the newest first."""
        steps: list[Step] = []
        at: Step | None = self.to(marker)
        while at is not None and at not in known:
            steps.append(at)
            at = self.before(at)
        return steps

    def size_of(self, step: Step) -> int:
        """Bytes, as far as names and COMMITs tell."""
        if step.stored:
            with contextlib.suppress(CorruptionError):  # it is said when it is read
                return sum(ref.num_bytes for ref in self.piece(step).segments)
            return 0
        return sum(interval.num_bytes for interval in self.intervals(step))

    def intervals(self, step: Step) -> Iterator[Interval]:
        """Yield what each rank sent for a step of the log."""
        marker, previous = step.marker, self.previous[step.marker]
        before = previous if previous is not None and previous.generation == marker.generation else None
        commit = self._lineage.find(marker)
        claim = self._lineage.claims[marker.generation]
        return intervals_of(claim, commit, self._lineage.find(before) if before is not None else None)

    def piece(self, step: Step) -> Piece:
        """Return the piece of the store for a step; raises CorruptionError."""
        assert self._catalog is not None
        return self._catalog.piece(self._strides.start(step.marker), self._lineage.find(step.marker))


def _downward(tree: Mapping[Step | None, list[Step]]) -> Iterator[Step]:
    """All steps, each after the one that it stands on."""
    wanted = list(tree.get(None, ()))
    while wanted:
        step = wanted.pop()
        yield step
        wanted += tree.get(step, ())
