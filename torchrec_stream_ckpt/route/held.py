"""What a HEAD and the store have on the path to a marker: read around what is damaged there."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import MappingProxyType

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.reader import Held, load_front, load_held
from torchrec_stream_ckpt.types import MarkerId

_READERS = 16
NONE: Mapping[str, CorruptionError] = MappingProxyType({})

log = logging.getLogger(__name__)


def load_catalog(objects: Objects | None, lineage: Lineage) -> Catalog | None:
    """What the store says that it holds of the job; None when nobody has written there.

    Raises:
        StoreUnavailableError: it does not answer.
        UnsupportedError: it is of a newer format.
    """
    if objects is None or not lineage.claims or not check_store(objects):
        return None
    return Catalog.load(objects, lineage.job)


def warm(head: HeadState | None, lineage: Lineage, marker: MarkerId) -> HeadState | None:
    """``head``, if it holds a marker on the path to ``marker``, the very one that the log knows."""
    if head is None:
        return None
    if head.commit not in lineage.chain(marker):
        log.info("HEAD is not used: it is at marker %s, which does not lead to %s", head.marker, marker)
        return None
    schema = lineage.claims[head.marker.generation].schema
    whole = {(index, column) for index, table in enumerate(schema.tables) for column in range(table.dim) if table.rows}
    found = [(table, column) for table, col0, cols in head.columns for column in range(col0, col0 + cols)]
    if head.schema_crc != schema.crc or len(found) != len(whole) or set(found) != whole:
        log.info("HEAD is not used: it has other tables than marker %s", head.marker)
        return None
    return head


def hold(
    catalog: Catalog,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None = None,
    head: HeadState | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Held | None:
    """What HEAD and the store have on the path to ``marker``, as far as their directories tell.

    What is damaged there is left out, with a warning: a damaged fold where other pieces hold its rows, all of the store
    where the log may still have it. A HEAD is left out where the store alone leads further. None when nothing is left.

    Args:
        catalog: What the store holds.
        lineage: The control partition.
        marker: What shall be restored.
        since: Only what is newer than this marker on its path.
        head: A HEAD on its path: only what is newer comes from the store.
        damaged: Segments that are known to be damaged.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    held = _load_intact(catalog, lineage, marker, since, head, damaged)
    if head is None:
        return held
    held = held or of_head(head)
    chain = [commit.id for commit in lineage.chain(marker)]
    beyond, strides = chain[chain.index(held.reach) + 1 :], catalog.strides(lineage.chain(marker))
    if not any(each in catalog.markers and each in strides for each in beyond):
        return held
    # What leads on from HEAD may be gone: gc takes away what a base has made needless.
    cold = _load_intact(catalog, lineage, marker, damaged=damaged)
    if cold is None or cold.reach not in beyond:
        return held
    log.info("HEAD is not used: it leads to marker %s, the store without it to %s", held.reach, cold.reach)
    return cold


def of_head(head: HeadState) -> Held:
    """What a HEAD gives alone."""
    scalars = tuple(record for each in head.notes for record in each.mark.scalars)
    told = ((head.marker, head.notes),)
    return Held(head.marker, (), scalars, tuple(each.shards for each in head.notes), head, told)


def _load_intact(
    catalog: Catalog,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None = None,
    head: HeadState | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Held | None:
    """As :func:`load_all`, but around damaged folds: they hold nothing that their intervals do not."""
    try:
        held = load_all(catalog, lineage, marker, since, head)
        if held is None or (name := damaged_in(damaged, held)) is None:
            return held
        headline = damaged[name].headline
    except CorruptionError as error:
        headline = error.headline
    path = {commit.id for commit in lineage.chain(marker)}
    folds = frozenset(fold for fold in catalog.folds if fold[1] in path and _is_damaged(catalog, *fold, damaged))
    if folds:
        log.warning("the store is read around %d damaged folds: %s", len(folds), headline)
        return _load_intact(replace(catalog, folds=catalog.folds - folds), lineage, marker, since, head, damaged)
    log.warning("the store cannot serve marker %s, the log is read: %s", marker, headline)
    return None


def damaged_in(damaged: Mapping[str, CorruptionError], held: Held) -> str | None:
    """A segment that is needed and known to be damaged."""
    names = (picked.ref.name for piece in held.pieces for picked in piece.opened)
    return next((name for name in names if name in damaged), None)


def _is_damaged(
    catalog: Catalog, start: MarkerId | None, end: MarkerId, damaged: Mapping[str, CorruptionError]
) -> bool:
    """Whether a fold cannot be read, as far as directories tell and is known."""
    try:
        for ref in catalog.fold(start, end).segments:
            if ref.name in damaged:
                return True
            load_front(catalog.objects, ref, catalog.job)
    except CorruptionError:
        return True
    return False


def load_all(
    catalog: Catalog,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None = None,
    head: HeadState | None = None,
) -> Held | None:
    """As :func:`hold`, of the store alone; raises CorruptionError for what is damaged."""
    chain = lineage.chain(marker)
    since = head.marker if head is not None else since
    behind = [commit.id for commit in chain].index(since) + 1 if since is not None else 0
    cover = catalog.cover(chain[behind:], since)
    if cover is None:
        return None
    with ThreadPoolExecutor(_READERS) as pool:
        return load_held(catalog.objects, catalog, cover, pool, head)
