"""Summaries of a store: copies of manifests and directories, so that a plan takes a few requests and not thousands.

A reader that plans uses them in place of the objects, and checks them in the same way. If anything does not fit, it
reads the objects. Programs that verify or delete (``verify``, scrub, gc, trim, the materializer) never read summaries
in place of the objects.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import replace

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.summary import Part, Summary
from torchrec_stream_ckpt.store.api import Objects, Readable, names_in
from torchrec_stream_ckpt.store.catalog import Catalog, ObjectCache
from torchrec_stream_ckpt.store.prefetched import Summarized
from torchrec_stream_ckpt.util.layout import SUMMARIES_DIR, SummaryName, parse_summary_name
from torchrec_stream_ckpt.util.types import MarkerId

WORTH_IT = 32
"""Summaries are used if a plan needs the manifests of at least this many markers."""
_WITHIN_FOLDS = 128
"""Number of newest markers whose notes a plan reads, even if a fold has their rows."""

log = logging.getLogger(__name__)


def list_summaries(objects: Objects, job: bytes) -> list[SummaryName]:
    """Return all summaries of a job, by their first markers."""
    return sorted(names_in(objects, SUMMARIES_DIR, job, parse_summary_name))


def load_summary(objects: Readable, name: SummaryName) -> Summary:
    """Read one summary.

    Raises:
        CorruptionError: it is missing or altered, or does not match its name.
        StoreUnavailableError: the store does not answer.
    """
    data = objects.read(name.name)
    if crc32c(data) != name.crc:
        raise CorruptionError("summary was altered: its checksum differs from its name", name=name.name)
    found = Summary.from_bytes(data, name.name)
    if found.job != name.job:
        raise CorruptionError("summary belongs to another job than its name", name=name.name)
    return found


def put_summary(objects: Objects, summary: Summary, markers: Sequence[MarkerId]) -> SummaryName:
    """Put a summary of some markers, which ascend. Durable on return."""
    data = summary.to_bytes()
    name = SummaryName(summary.job, markers[0], markers[-1], len(markers), crc32c(data))
    objects.put(name.name, [data])
    return name


def chosen(names: Iterable[SummaryName], wanted: Collection[MarkerId]) -> list[SummaryName]:
    """Return the summaries to read for some markers. Each provides at least two that none before it provides."""
    left, found = set(wanted), []
    for name in sorted(names, key=lambda each: (-each.count, each)):
        here = {marker for marker in left if name.first <= marker <= name.last}
        if len(here) > 1:
            found.append(name)
            left -= here
    return found


def by_summaries(catalog: Catalog, chain: Sequence[Commit], since: MarkerId | None, pool: Executor) -> Catalog | None:
    """Return ``catalog`` with the contents of summaries along ``chain``. Returns None if they have too little of it.

    Args:
        catalog: Catalog of the store. It alone decides which markers and folds exist.
        chain: Chain, as for ``Catalog.cover``.
        since: Marker before the chain, as for ``Catalog.cover``.
        pool: Threads to read with.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    if len(catalog.markers) < WORTH_IT:
        return None
    ends = {end for start, end in catalog.steps(chain, since) if (start, end) not in catalog.folds}
    wanted = {each.id for each in chain[-_WITHIN_FOLDS:] if each.id in catalog.markers} | ends
    if len(wanted) < WORTH_IT:
        return None
    parts: dict[str, Part] = {}
    names = chosen(list_summaries(catalog.objects, catalog.job), wanted)
    for found in pool.map(lambda name: _intact(catalog, name), names):
        parts |= found
    return replace(catalog, small=Summarized(catalog.objects, parts), kept=ObjectCache()) if parts else None


def _intact(catalog: Catalog, name: SummaryName) -> Mapping[str, Part]:
    """Read the parts in a summary. Empty if it cannot be read."""
    try:
        return load_summary(catalog.objects, name).parts
    except CorruptionError as error:
        log.info("a summary cannot be used; reading the objects: %s", error.headline)
        return {}
