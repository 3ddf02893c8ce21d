"""Locate the bytes of a marker in HEAD, the store and the log, and read around damage in the store."""

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
"""Number of manifests and directories to read in parallel: small objects, each of which costs a round trip."""
_FEW = 64
"""Number of parallel reads if summaries have most of them."""
NONE: Mapping[str, CorruptionError] = MappingProxyType({})

log = logging.getLogger(__name__)


def load_catalog(objects: Objects | None, lineage: Lineage) -> Catalog | None:
    """Load the catalog of a job from its store. Returns None if the job has written nothing there.

    Raises:
        StoreUnavailableError: it does not answer.
        UnsupportedError: the store has a newer format.
    """
    if objects is None or not lineage.claims or not check_store(objects):
        return None
    return Catalog.load(objects, lineage.job)


def warm(head: HeadState | None, lineage: Lineage, marker: MarkerId) -> HeadState | None:
    """Return ``head`` if its marker is on the path to ``marker`` and is the same as in the log, otherwise None."""
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
    """Locate the bytes of ``marker``: in HEAD and the store, judging by their directories, and the rest in the log.

    :meth:`Route.check` tells whether the log has the rest. Damaged objects in the store are not used, and a warning is
    logged. For a damaged fold, the pieces that it was made of are read instead. If an interval is damaged, the route
    uses the store only up to it, because the log may still have the interval. HEAD is not used if the store alone leads
    further.

    Args:
        lineage: The control partition.
        marker: A committed marker.
        catalog: Catalog of the store; None if there is nothing in it.
        since: A marker on the path that the reader has; only newer rows come from the store.
        head: A HEAD on the path; likewise, only newer rows come from the store.
        damaged: Segments of the store that are known to be damaged.
        told: Called with the error of the first damaged object on the path, if the route avoids it.
        summaries: Use summaries of manifests and directories. After any damage is found, everything is read from the
            objects.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or was given up.
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
    log.info("HEAD is not used: it leads to marker %s, the store alone to %s", route.stored, cold.stored)
    return cold


def damage_of(
    catalog: Catalog | None, lineage: Lineage, marker: MarkerId, damaged: Mapping[str, CorruptionError] = NONE
) -> CorruptionError | None:
    """Return the damage that keeps the store from serving a marker, judging by directories.

    Returns None if the store can serve it.

    ``damaged`` adds damage that is already known.
    """
    return _with_store(catalog, Route(lineage, lineage.find(marker)), damaged)[1] if catalog is not None else None


def _by_summaries(catalog: Catalog, route: Route, wanted: bool) -> Route | None:
    """Run :func:`_with_store` on summaries; returns None if they are incomplete or inconsistent."""
    if not wanted:
        return None
    with ThreadPoolExecutor(_FEW) as pool:
        summarized = by_summaries(catalog, _tail(route), route.reach, pool)
    if summarized is None:
        return None
    found, error = _with_store(summarized, route, NONE, _FEW)
    if error is not None:
        log.info("summaries cannot be used; reading the objects: %s", error.headline)
        return None
    return replace(found, summarized=True)


def _around_damage(
    catalog: Catalog,
    route: Route,
    damaged: Mapping[str, CorruptionError],
    told: Callable[[CorruptionError], None],
) -> Route:
    """Run :func:`_with_store`, but avoid damaged objects, and go as far along the path as is possible without them."""
    found, error = _with_store(catalog, route, damaged)
    if error is None:
        return found
    told(error)
    intact = _intact(catalog, route, damaged)
    found, _ = _with_store(intact, route, damaged)
    if not found.pieces:
        log.warning("the store cannot provide marker %s; reading the log: %s", route.marker, error.headline)
        return route
    count = len(catalog.folds - intact.folds) + len(catalog.markers - intact.markers)
    way = f"{len(found.pieces)} pieces hold the rows up to {found.stored}"
    log.warning("reading the store without %d damaged folds or intervals: %s; %s", count, error.headline, way)
    return found


def _with_store(
    catalog: Catalog, route: Route, damaged: Mapping[str, CorruptionError], readers: int = _READERS
) -> tuple[Route, CorruptionError | None]:
    """Return (``route`` with the store's pieces after the rows of the reader or HEAD, why they cannot be read)."""
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
    """Return the error to raise if the log does not have the rows that ``route`` needs.

    Args:
        error: The error of the log.
        catalog: Catalog of the store.
        route: The route from :func:`locate`.
        damaged: Segments of the store that are known to be damaged, in the order in which they were found.

    Returns:
        The damage in the store, if that is the only reason to read the log; otherwise ``error``.
    """
    if catalog is None or not ends_early(catalog, route):
        return error
    newest = next(reversed([*damaged.values()]), None)
    damage = newest or _with_store(catalog, Route(route.lineage, route.commit, route.since), damaged)[1]
    return lost(damage, route.marker, error) if damage is not None else error


def ends_early(catalog: Catalog, route: Route) -> bool:
    """Return whether the store gives less of a route than its object names promise, due to unavoidable damage."""
    cold = Route(route.lineage, route.commit, route.since)
    tail = _tail(cold)
    strides = catalog.strides(tail, cold.reach)
    reach = next((each.id for each in reversed(tail) if each.id in strides and each.id in catalog.markers), None)
    return reach is not None and reach != route.stored


def lost(error: CorruptionError, marker: MarkerId, elsewhere: StreamCkptError | None = None) -> CorruptionError:
    """Return ``error`` with a hint; it is about an object of the store whose rows ``marker`` can get nowhere else.

    Args:
        error: The error that a read raised.
        marker: The marker that needs the rows.
        elsewhere: The error of the other source of the rows.
    """
    hint = error.hint or "restore this object from a copy, or restore another marker: stream-ckpt verify --all URI"
    where = {"marker": str(marker), **error.where} | ({"elsewhere": elsewhere.message} if elsewhere else {})
    return type(error)(error.message, hint=hint, **where)


def _intact(catalog: Catalog, route: Route, damaged: Mapping[str, CorruptionError]) -> Catalog:
    """Return ``catalog`` without damaged objects on the path to a marker: folds, and intervals with their markers.

    Only pieces that would be read are checked. If one is damaged, the pieces that avoid it are checked next.
    """
    tail, since, whole = _tail(route), route.reach, set[str]()
    commits = {commit.id: commit for commit in tail}
    with ThreadPoolExecutor(_READERS) as pool:  # each check may be slow
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
    """Return the COMMITs on the path to a marker after those that HEAD or the reader has."""
    chain, reach = route.lineage.chain(route.marker), route.reach
    return chain[[commit.id for commit in chain].index(reach) + 1 :] if reach is not None else chain


def _refs_of(catalog: Catalog, start: MarkerId | None, end: Commit) -> Sequence[SegmentRef]:
    """Find the segments of a fold, or otherwise of an interval; also raises if it belongs to another history."""
    return catalog.piece(start, end).segments


def _last_of(catalog: Catalog, reach: Commit) -> Sequence[SegmentRef]:
    """Find the segments with the ranks' lists of shards at the marker up to which the store has all rows."""
    return catalog.check(reach).last


def _is_damaged(
    catalog: Catalog,
    damaged: Mapping[str, CorruptionError],
    whole: set[str],
    refs: Callable[[], Sequence[SegmentRef]],
) -> bool:
    """Return whether segments are damaged, judging by directories and known damage; adds intact ones to ``whole``."""
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
