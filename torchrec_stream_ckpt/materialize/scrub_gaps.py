"""What no listing names, and a scrub misses in a store: manifests that are gone, markers without a way to them."""

from __future__ import annotations

from collections.abc import Iterator

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.layout import dropped_name, manifest_name
from torchrec_stream_ckpt.route.strides import Strides
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.types import MarkerId


def lost_manifests(objects: Objects, lineage: Lineage, catalog: Catalog) -> Iterator[MarkerId]:
    """Find markers whose manifest is not there, between others of their generation that are.

    Args:
        objects: The store.
        lineage: The control partition.
        catalog: What the store holds.
    """
    newest = _newest(catalog)
    for marker in list(lineage.commits):
        if marker in catalog.markers | catalog.dropped or marker >= newest.get(marker.generation, marker):
            continue
        is_there = objects.size(manifest_name(catalog.job, marker)) is not None  # it came while we listed
        if not is_there and objects.size(dropped_name(catalog.job, marker)) is None:
            yield marker


def markers_without_a_way(lineage: Lineage, catalog: Catalog) -> Iterator[MarkerId]:
    """Find markers to which no pieces of the store lead. Arguments are those of :func:`lost_manifests`."""
    ways, offered = Strides(lineage, catalog), catalog.markers - catalog.dropped
    yield from (marker for marker in sorted(offered & set(lineage.commits)) if not ways.serves(marker))


def _newest(catalog: Catalog) -> dict[int, MarkerId]:
    """Find the newest marker of each generation that the store has any of."""
    return {marker.generation: marker for marker in sorted(catalog.markers)}
