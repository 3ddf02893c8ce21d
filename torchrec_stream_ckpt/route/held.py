"""What a HEAD and the store have on the path to a marker: read around what is damaged there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import compress
from types import MappingProxyType

from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, follow
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.reader import Held, load_front, load_held
from torchrec_stream_ckpt.types import MarkerId

_READERS = 16
NONE: Mapping[str, CorruptionError] = MappingProxyType({})

log = logging.getLogger(__name__)


def load_catalog(objects: Objects | None, lineage: Lineage) -> Catalog | None:
    """What the store says that it holds of the job; None if the job has written nothing there.

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

    What is damaged there is left out, with a warning: of a damaged fold the pieces that it was made of are read, and
    the store ends before an interval that is damaged, for the log may still have it. A HEAD is left out where the store
    alone leads further. None when nothing is left.

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
    """As :func:`load_all`, but around what is damaged, as far along the path as that leads."""
    held, error = _try(catalog, lineage, marker, since, head, damaged)
    if error is None:
        return held
    intact = intact_on(catalog, lineage, marker, head.marker if head is not None else since, damaged)
    held, _ = _try(intact, lineage, marker, since, head, damaged)
    if held is None:
        log.warning("the store cannot serve marker %s, the log is read: %s", marker, error.headline)
        return None
    count = len(catalog.folds - intact.folds) + len(catalog.markers - intact.markers)
    way = f"{len(held.pieces)} pieces give the rows up to {held.reach}"
    log.warning("the store is read around %d damaged folds or intervals: %s; %s", count, error.headline, way)
    return held


def _try(
    catalog: Catalog,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None,
    head: HeadState | None,
    damaged: Mapping[str, CorruptionError],
) -> tuple[Held | None, CorruptionError | None]:
    """(what there is, why it cannot be read)."""
    try:
        held = load_all(catalog, lineage, marker, since, head)
    except CorruptionError as error:
        return None, error
    name = damaged_in(damaged, held) if held is not None else None
    return (held, None) if name is None else (None, damaged[name])


def segment_of(held: Held | None, error: StreamCkptError) -> str | None:
    """The segment of the store that ``error`` is about, if it is one of these."""
    said = str(error.where.get("name", error.where.get("path", "")))
    names = (picked.ref.name for piece in (held.pieces if held else ()) for picked in piece.opened)
    return next((name for name in names if said.endswith(name)), None)


def lost(error: CorruptionError, marker: MarkerId, elsewhere: StreamCkptError | None = None) -> CorruptionError:
    """``error``, about an object of the store of whose rows nothing else leads to ``marker``, with what to do.

    Args:
        error: What reading has raised.
        marker: What needs the rows.
        elsewhere: Why the other way to them leads nowhere.
    """
    hint = error.hint or "bring this object back from a copy, or restore another marker: stream-ckpt verify --all URI"
    where = {"marker": str(marker), **error.where} | ({"elsewhere": elsewhere.message} if elsewhere else {})
    return type(error)(error.message, hint=hint, **where)


def damaged_in(damaged: Mapping[str, CorruptionError], held: Held) -> str | None:
    """A segment that is needed and known to be damaged."""
    names = (picked.ref.name for piece in held.pieces for picked in piece.opened)
    return next((name for name in names if name in damaged), None)


def intact_on(
    catalog: Catalog,
    lineage: Lineage,
    marker: MarkerId,
    since: MarkerId | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Catalog:
    """``catalog`` without what is damaged on the way to a marker: folds, and intervals with their markers.

    Only pieces that are read are looked at: where one is damaged, those that lead around it come next.
    """
    tail, whole = _tail(lineage, marker, since), set[str]()
    with ThreadPoolExecutor(_READERS) as pool:  # a store may take its time for each of them
        while True:
            strides = catalog.strides(tail, since)
            reach = next(
                (each.id for each in reversed(tail) if each.id in strides and each.id in catalog.markers), None
            )
            if reach is None:
                return catalog
            steps = follow(strides, reach, since)
            refs = [partial(_of_fold if step in catalog.folds else _of_interval, catalog, step) for step in steps]
            refs.append(partial(_notes_of, catalog, reach))
            bad = list(pool.map(partial(_is_damaged, catalog, damaged, whole), refs))
            if not any(bad):
                return catalog
            away = set(compress(steps, bad))
            ends = {end for start, end in away - catalog.folds} | ({reach} if bad[-1] else set())
            catalog = replace(catalog, folds=catalog.folds - away, markers=catalog.markers - ends)


def _tail(lineage: Lineage, marker: MarkerId, since: MarkerId | None) -> list[Commit]:
    """What comes after ``since`` on the way to a marker."""
    chain = lineage.chain(marker)
    return chain[[commit.id for commit in chain].index(since) + 1 :] if since is not None else chain


def _of_fold(catalog: Catalog, step: tuple[MarkerId | None, MarkerId]) -> Sequence[SegmentRef]:
    return catalog.fold(*step).segments


def _of_interval(catalog: Catalog, step: tuple[MarkerId | None, MarkerId]) -> Sequence[SegmentRef]:
    return [ref for refs in catalog.manifest(step[1]).segments for ref in refs]


def _notes_of(catalog: Catalog, reach: MarkerId) -> Sequence[SegmentRef]:
    """Where the ranks say what they held at the marker that the store leads to."""
    return [refs[-1] for refs in catalog.manifest(reach).segments]


def _is_damaged(
    catalog: Catalog,
    damaged: Mapping[str, CorruptionError],
    whole: set[str],
    refs: Callable[[], Sequence[SegmentRef]],
) -> bool:
    """Whether segments cannot be read, as far as directories tell and is known; adds to those that are ``whole``."""
    try:
        for ref in refs():
            if ref.name in damaged:
                return True
            if ref.name not in whole:
                load_front(catalog.objects, ref, catalog.job)
                whole.add(ref.name)
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
    since = head.marker if head is not None else since
    cover = catalog.cover(_tail(lineage, marker, since), since)
    if not cover:
        return None
    with ThreadPoolExecutor(_READERS) as pool:
        return load_held(catalog.objects, catalog, cover, pool, head)
