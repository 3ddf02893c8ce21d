"""What ranks said at markers, as a store keeps it: read once, and kept for folds that lead past them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.segment import Front
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.reader import NOTES_READS, load_front
from torchrec_stream_ckpt.types import MarkerId

_KEPT = 1024
"""Markers."""


class KeptNotes:
    """Notes of markers by their ids.

    Args:
        catalog: Of the store.
        lineage: The control partition: a manifest of another history is as good as damaged.
    """

    def __init__(self, catalog: Catalog, lineage: Lineage) -> None:
        self._catalog = catalog
        self._lineage = lineage
        self._kept: OrderedDict[MarkerId, tuple[Notes, ...]] = OrderedDict()
        self._read: set[MarkerId] = set()

    def of(self, marker: MarkerId, fronts: Mapping[str, Front]) -> tuple[Notes, ...]:
        """By each rank; raises CorruptionError.

        Args:
            marker: One that has a manifest.
            fronts: Of segments that are open, by name.
        """
        if marker not in self._kept:
            self._read.add(marker)
            self._kept[marker] = tuple(
                Notes.from_json((fronts.get(ref.name) or self._front(ref)).notes, ref.name)
                for ref in self._catalog.check(self._lineage.find(marker)).last
            )
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[marker]

    def _front(self, ref: SegmentRef) -> Front:
        return load_front(self._catalog.objects, ref, self._catalog.job)

    def some_of(self, markers: Iterable[MarkerId]) -> Iterator[tuple[MarkerId, tuple[Notes, ...]]]:
        """Those of the first few markers that are still kept, or can be read for the first time.

        The rows can be read without them. So what is damaged is left out: less can be proved.
        """
        there = (each for each in markers if each in self._catalog.markers and each not in self._catalog.dropped)
        for marker in islice(there, NOTES_READS):
            if marker in self._kept or marker not in self._read:
                try:
                    notes = self.of(marker, {})
                except CorruptionError:
                    continue
                yield marker, notes
