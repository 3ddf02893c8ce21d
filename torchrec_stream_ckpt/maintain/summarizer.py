"""Write summaries: copies of the manifests and directories of markers, for plans over remote stores.

Each marker is copied once, when enough markers have no copy. A job therefore writes as many bytes as its manifests and
directories have, packed, however long it lives. Only objects that are whole are copied.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from functools import partial

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.manifest import Manifest, SegmentRef
from torchrec_stream_ckpt.format.summary import MAX_UNPACKED_BYTES, Part, Summary, part_bytes
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.reader import check_front
from torchrec_stream_ckpt.store.summaries import list_summaries, put_summary
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import SummaryName, manifest_name
from torchrec_stream_ckpt.util.types import MarkerId

MARKERS = 64
"""Number of markers in a summary."""
MOST_SEGMENTS = 128
"""Maximum segments of a marker in a summary.

A marker with more takes so many requests for its directories that spans are better.
"""
_A_ROUND = 4
"""Number of summaries that a round writes for markers already in the store."""


class Summarizer:
    """Writes the summaries of one store. Two at once write the same ones, or equivalent ones.

    Args:
        objects: The store.
        pool: Threads to read it with.
        progress: Updated with the work done.
    """

    def __init__(self, objects: Objects, pool: Executor, progress: Progress) -> None:
        self._objects = objects
        self._pool = pool
        self._progress = progress
        self._listed = -1
        """Number of times the catalog had been listed when the summaries were listed."""
        self._left: list[MarkerId] = []
        """Markers without a summary, in order."""

    def came(self, catalog: Catalog, marker: MarkerId) -> None:
        """Add a marker whose manifest this process has put. Raises as :meth:`write`."""
        if self._listed == catalog.listed:
            insort(self._left, marker)
        self.write(catalog, 1)

    def write(self, catalog: Catalog, most: int = _A_ROUND) -> None:
        """Write summaries of markers that have none, if there are enough of them.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        if self._listed != catalog.listed:
            names = list_summaries(self._objects, catalog.job) if len(catalog.markers) >= MARKERS else []
            self._left, self._listed = without_summary(catalog, names), catalog.listed
        for _ in range(most):
            if len(self._left) < MARKERS:
                return
            self._progress.doing = f"summing up markers {self._left[0]} to {self._left[MARKERS - 1]}"
            parts: dict[str, Part] = {}
            took, room, markers = 0, MAX_UNPACKED_BYTES // 2, list[MarkerId]()
            for marker in self._left[:MARKERS]:
                self._progress.going_on()
                found = self._parts_of(catalog, marker)
                room -= sum(part_bytes(name, part.data) for name, part in found.items())
                if room < 0 and markers:
                    break  # the next summary begins with it
                took += 1
                if found and room >= 0:
                    parts |= found
                    markers.append(marker)
            if markers:
                failpoint("materialize.summary")
                put_summary(self._objects, Summary(catalog.job, parts), markers)
                failpoint("materialize.summary_put")
            del self._left[:took]

    def _parts_of(self, catalog: Catalog, marker: MarkerId) -> Mapping[str, Part]:
        """Return a summary's parts for one marker.

        Empty if it is damaged, missing or too long. Readers then read the objects.
        """
        name = manifest_name(catalog.job, marker)
        try:
            data = bytes(self._objects.read(name))
            manifest = Manifest.from_bytes(data, name)
            if (manifest.commit.job, manifest.commit.id) != (catalog.job, marker) or len(manifest.refs) > MOST_SEGMENTS:
                return {}
            fronts = self._pool.map(partial(self._front, catalog.job), manifest.refs)
            parts = {ref.name: Part(ref.num_bytes, front) for ref, front in zip(manifest.refs, fronts, strict=True)}
        except CorruptionError:
            return {}
        return parts | {name: Part(len(data), data)}

    def _front(self, job: bytes, ref: SegmentRef) -> bytes:
        data = bytes(self._objects.read(ref.name, 0, ref.front_bytes))
        check_front(data, ref, job)
        return data


def without_summary(catalog: Catalog, names: Sequence[SummaryName]) -> list[MarkerId]:
    """Return the markers of a store that no summary covers, in order."""
    left, spans, at = [], sorted((name.first, name.last) for name in names), 0
    last: MarkerId | None = None
    for marker in sorted(catalog.markers):
        while at < len(spans) and spans[at][0] <= marker:
            last = spans[at][1] if last is None else max(last, spans[at][1])
            at += 1
        if last is None or marker > last:
            left.append(marker)
    return left


def needless(names: Sequence[SummaryName], staying: Sequence[MarkerId]) -> list[SummaryName]:
    """Return summaries not worth their bytes: most of their markers are deleted, or another summary has all of them.

    Args:
        names: Names of all summaries.
        staying: Markers that stay in the store, in order.
    """
    found: list[SummaryName] = []
    last: MarkerId | None = None
    for name in sorted(names, key=lambda each: (each.first, (-each.last.generation, -each.last.marker), each)):
        here = bisect_right(staying, name.last) - bisect_left(staying, name.first)
        if 2 * here < name.count or (last is not None and name.last <= last):
            found.append(name)
        else:
            last = name.last if last is None else max(last, name.last)
    return found
