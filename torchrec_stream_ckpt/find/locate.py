"""Where the bytes of a marker are: in HEAD, the store and the log. Reads around damage in the store."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import compress
from types import MappingProxyType

from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, follow
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.store.reader import load_front, load_told, open_pieces
from torchrec_stream_ckpt.store.summaries import by_summaries
from torchrec_stream_ckpt.util.types import MarkerId

_READERS = 128
"""Manifests and directories that are read at once: small objects, each of which costs a round trip."""
_FEW = 64
"""The same where summaries have most of them."""
NONE: Mapping[str, CorruptionError] = MappingProxyType({})

log = logging.getLogger(__name__)


def load_catalog(objects: Objects | None, lineage: Lineage) -> Catalog | None:
    """The store's contents of the job; None if the job has written nothing there.

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


def locate(
    lineage: Lineage,
    marker: MarkerId,
    catalog: Catalog | None = None,
    *,
    since: MarkerId | None = None,
    head: HeadState | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
    told: Callable[[CorruptionError], None] = lambda _: None,
    summaries: bool = True,
) -> Route:
    """Where the bytes of ``marker`` are: what HEAD and the store give, as far as their directories tell, and that the
    log has to give the rest. Whether the log has it, :meth:`Route.check` says.

    What is damaged in the store is left out, with a warning: of a damaged fold the pieces that it was made of are read,
    and the store ends before an interval that is damaged, for the log may still have it. A HEAD is left out where the
    store alone leads further.

    Args:
        lineage: The control partition.
        marker: A committed marker.
        catalog: What the store holds; None for nothing.
        since: A marker on the path that the reader has: only what is newer comes from the store.
        head: A HEAD on the path: the same.
        damaged: Segments of the store that are known to be damaged.
        told: Called with the first thing on the way that is damaged, if it is read around.
        summaries: Take from summaries what they hold of manifests and directories; once anything is found to be
            damaged, all is read from the objects.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or given up.
        StoreUnavailableError: it does not answer.
    """
    cold = Route(lineage, lineage.find(marker), since)
    route = replace(cold, head=head, told={head.marker: head.notes}) if head is not None else cold
    if catalog is None:
        return route
    catalog.check_offered(marker)
    route = _by_summaries(catalog, route, summaries and not damaged) or _around_damage(catalog, route, damaged, told)
    if head is None:
        return route
    chain = lineage.chain(marker)
    strides, ids = catalog.strides(chain), [commit.id for commit in chain]
    beyond = ids[ids.index(route.stored or head.marker) + 1 :]
    if not any(each in catalog.markers and each in strides for each in beyond):
        return route
    # The pieces after HEAD may be gone: gc deletes those that a base replaces.
    cold = _around_damage(catalog, cold, damaged, told)
    if cold.stored not in beyond:
        return route
    log.info("HEAD is not used: it leads to marker %s, the store without it to %s", route.stored, cold.stored)
    return cold


def damage_of(
    catalog: Catalog | None, lineage: Lineage, marker: MarkerId, damaged: Mapping[str, CorruptionError] = NONE
) -> CorruptionError | None:
    """Why the store does not serve a marker that it should, as far as directories tell and is known."""
    return _with_store(catalog, Route(lineage, lineage.find(marker)), damaged)[1] if catalog is not None else None


def _by_summaries(catalog: Catalog, route: Route, wanted: bool) -> Route | None:
    """As :func:`_with_store`, with what summaries hold; None where they hold too little, or anything does not fit."""
    if not wanted:
        return None
    with ThreadPoolExecutor(_FEW) as pool:
        summarized = by_summaries(catalog, _tail(route), route.reach, pool)
    if summarized is None:
        return None
    found, error = _with_store(summarized, route, NONE, _FEW)
    if error is not None:
        log.info("summaries are not used, the objects are read: %s", error.headline)
        return None
    return replace(found, summarized=True)


def _around_damage(
    catalog: Catalog,
    route: Route,
    damaged: Mapping[str, CorruptionError],
    told: Callable[[CorruptionError], None],
) -> Route:
    """As :func:`_with_store`, but around what is damaged, as far along the path as that leads."""
    found, error = _with_store(catalog, route, damaged)
    if error is None:
        return found
    told(error)
    intact = _intact(catalog, route, damaged)
    found, _ = _with_store(intact, route, damaged)
    if not found.pieces:
        log.warning("the store cannot serve marker %s, the log is read: %s", route.marker, error.headline)
        return route
    count = len(catalog.folds - intact.folds) + len(catalog.markers - intact.markers)
    way = f"{len(found.pieces)} pieces give the rows up to {found.stored}"
    log.warning("the store is read around %d damaged folds or intervals: %s; %s", count, error.headline, way)
    return found


def _with_store(
    catalog: Catalog, route: Route, damaged: Mapping[str, CorruptionError], readers: int = _READERS
) -> tuple[Route, CorruptionError | None]:
    """(``route`` with the store's pieces after those of the reader or HEAD, why they cannot be read)."""
    try:
        tail = _tail(route)
        with ThreadPoolExecutor(readers) as pool:
            cover = catalog.cover(tail, route.reach, pool)
            if not cover:
                return route, None
            pieces = open_pieces(catalog.fronts, cover, catalog.job, pool)
            told = load_told(catalog, pieces, tail, pool)
            found = replace(route, pieces=pieces, told={**told, **route.told})
    except CorruptionError as error:
        return route, error
    bad = next((each.ref.name for each in found.segments if each.ref.name in damaged), None)
    return (found, None) if bad is None else (route, damaged[bad])


def instead_of_log(
    error: StreamCkptError, catalog: Catalog | None, route: Route, damaged: Mapping[str, CorruptionError] = NONE
) -> StreamCkptError:
    """The error to raise where the log does not give what ``route`` asks of it.

    Args:
        error: Why the log does not.
        catalog: What the store holds.
        route: As :func:`locate` has found it.
        damaged: Segments of the store that are known to be damaged, the newest find last.

    Returns:
        What is damaged in the store, if the log is asked only because of that; otherwise ``error``.
    """
    if catalog is None or not ends_early(catalog, route):
        return error
    newest = next(reversed([*damaged.values()]), None)
    damage = newest or _with_store(catalog, Route(route.lineage, route.commit, route.since), damaged)[1]
    return lost(damage, route.marker, error) if damage is not None else error


def ends_early(catalog: Catalog, route: Route) -> bool:
    """Return whether the store gives less of a route than its names say: what is damaged there has no other way."""
    cold = Route(route.lineage, route.commit, route.since)
    tail = _tail(cold)
    strides = catalog.strides(tail, cold.reach)
    reach = next((each.id for each in reversed(tail) if each.id in strides and each.id in catalog.markers), None)
    return reach is not None and reach != route.stored


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


def _intact(catalog: Catalog, route: Route, damaged: Mapping[str, CorruptionError]) -> Catalog:
    """``catalog`` without what is damaged on the way to a marker: folds, and intervals with their markers.

    Only pieces that are read are looked at: where one is damaged, those that lead around it come next.
    """
    tail, since, whole = _tail(route), route.reach, set[str]()
    commits = {commit.id: commit for commit in tail}
    with ThreadPoolExecutor(_READERS) as pool:  # a store may take its time for each of them
        while True:
            strides = catalog.strides(tail, since)
            reach = next(
                (each.id for each in reversed(tail) if each.id in strides and each.id in catalog.markers), None
            )
            if reach is None:
                return catalog
            steps = follow(strides, reach, since)
            refs = [partial(_refs_of, catalog, start, commits[end]) for start, end in steps]
            refs.append(partial(_last_of, catalog, commits[reach]))
            bad = list(pool.map(partial(_is_damaged, catalog, damaged, whole), refs))
            if not any(bad):
                return catalog
            away = set(compress(steps, bad))
            ends = {end for start, end in away - catalog.folds} | ({reach} if bad[-1] else set())
            catalog = replace(catalog, folds=catalog.folds - away, markers=catalog.markers - ends)


def _tail(route: Route) -> list[Commit]:
    """The pieces on the way to a marker after those that HEAD or the reader has."""
    chain, reach = route.lineage.chain(route.marker), route.reach
    return chain[[commit.id for commit in chain].index(reach) + 1 :] if reach is not None else chain


def _refs_of(catalog: Catalog, start: MarkerId | None, end: Commit) -> Sequence[SegmentRef]:
    """Find the segments of a fold, or otherwise of an interval; raises also if it is of another history."""
    return catalog.piece(start, end).segments


def _last_of(catalog: Catalog, reach: Commit) -> Sequence[SegmentRef]:
    """Find the segments in which the ranks say what they held at the marker that the store leads to."""
    return catalog.check(reach).last


def _is_damaged(
    catalog: Catalog,
    damaged: Mapping[str, CorruptionError],
    whole: set[str],
    refs: Callable[[], Sequence[SegmentRef]],
) -> bool:
    """Return whether segments cannot be read, as far as directories tell and is known; adds the others to ``whole``."""
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
