"""Find the sources of the rows of a marker: HEAD, the store and the log, and read around damage in the store.

HEAD has the oldest rows, pieces of the store have the following ones, and intervals of the log have the rest. The
result is a :class:`Route`, an immutable value for restores, ``verify`` and exports. The module also defines the path
of a marker: the markers that lead to it, and the ends of their streams.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import compress
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError, StreamCkptError, TrimmedError
from torchrec_stream_ckpt.find.tiers import OUTER, Place
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.interval import Interval, generations, intervals, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage, towards
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Incarnation, LogReader
from torchrec_stream_ckpt.log.stream import read_hello
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece, Stride
from torchrec_stream_ckpt.store.identity import place_of
from torchrec_stream_ckpt.store.reader import Told, load_front, load_told, open_pieces
from torchrec_stream_ckpt.store.summaries import by_summaries
from torchrec_stream_ckpt.util.layout import SUMMARIES_DIR
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, TableShard

_REPAIR = "stream-ckpt scrub URI --store URL --repair"
"""Hint of the warnings of reading around damage in the store."""


@dataclass(frozen=True, slots=True)
class Path:
    """Committed markers that lead to one, oldest first. The *place* of a marker is its index."""

    chain: tuple[MarkerId, ...] = ()
    ends: tuple[Sequence[RankEnd], ...] = ()
    """For each marker, the ends of its ranks' streams."""
    ids: Mapping[int, tuple[int | None, ...]] = field(default_factory=dict)
    """For each generation, the ids of its tables, by index."""
    sections: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For each generation, the number of sections (weights and states) of its tables, by index."""

    @classmethod
    def to(cls, lineage: Lineage, marker: MarkerId, since: MarkerId | None = None) -> Path:
        """Make the path to ``marker``; with ``since``, which is on the path, only the markers after it."""
        commits = lineage.chain(marker)
        if since is not None:
            commits = commits[[commit.id for commit in commits].index(since) + 1 :]
        chain = tuple(commit.id for commit in commits)
        ends = tuple(commit.ranks for commit in commits)
        schemas = {each.generation: lineage.claims[each.generation].schema for each in chain}
        sections = {each: _sections(schema) for each, schema in schemas.items()}
        return cls(chain, ends, {each: _ids(schema) for each, schema in schemas.items()}, sections)

    @classmethod
    def at(cls, lineage: Lineage, marker: MarkerId) -> Path:
        """Make a path of one marker, for a reader that does not compare rows with proofs of older ones."""
        schema, generation = lineage.claims[marker.generation].schema, marker.generation
        ends = lineage.commits[marker].ranks
        return cls((marker,), (ends,), {generation: _ids(schema)}, {generation: _sections(schema)})

    def then(self, since: MarkerId, tail: Path) -> Path:
        """Return the path up to ``since``, followed by ``tail``."""
        place = self.place(since) + 1
        ids, sections = {**self.ids, **tail.ids}, {**self.sections, **tail.sections}
        return Path(self.chain[:place] + tail.chain, self.ends[:place] + tail.ends, ids, sections)

    def place(self, marker: MarkerId) -> int:
        """Return the place of ``marker``, or of the first marker that contains the rows sent for it."""
        return bisect_left(self.chain, marker)

    def place_of(self, mark: Header) -> int | None:
        """Return the place of a MARK; None if its marker was not committed, or is not on the path."""
        marker = MarkerId(mark.generation, mark.marker)
        place = self.place(marker)
        if place == len(self.chain) or self.chain[place] != marker or mark.rank >= len(self.ends[place]):
            return None
        return place if mark.header_crc == self.ends[place][mark.rank].chain else None

    def id(self, table: int) -> int | None:
        """Return the id of a table, by its index at the last marker."""
        return self.ids[self.chain[-1].generation][table]

    def same_table(self, table: int) -> npt.NDArray[np.bool_]:
        """Return one flag for each place: whether the table with this index has the same id as at the last marker."""
        last = self.id(table)
        same = {each: last is not None and ids[table : table + 1] == (last,) for each, ids in self.ids.items()}
        return np.array([same[each.generation] for each in self.chain])


def _ids(schema: Schema) -> tuple[int | None, ...]:
    return tuple(table.id for table in schema.tables)


def _sections(schema: Schema) -> tuple[int, ...]:
    return tuple(1 + len(table.states) for table in schema.tables)


Shards = Mapping[int, Sequence[tuple[TableShard, ...]]]
"""Shards of each rank, by generation; generations with the same layout share one object."""


@dataclass(frozen=True, slots=True)
class Route:
    """Sources that a reader uses to get a marker, oldest first."""

    lineage: Lineage
    """Lineage of the control partition; in a route from :meth:`complete`, only the part that leads to the marker."""
    commit: Commit
    """COMMIT of the marker."""
    since: MarkerId | None = None
    """Marker on the path whose rows the reader has. None if the reader has no rows."""
    head: HeadState | None = None
    """HEAD that has the oldest rows; None if no HEAD is used."""
    pieces: tuple[Piece, ...] = ()
    """Open pieces of the store, oldest first; without HEAD and ``since``, the first one holds every row."""
    told: Told = field(default_factory=dict)
    """Notes of the ranks at markers up to which HEAD and the store have all rows, if they were read."""
    shards: Shards = field(default_factory=dict)
    """Shards of each rank, in every generation of which the log is needed."""
    skipped: tuple[str, ...] = ()
    """Newer markers that were skipped, each with its reason."""
    place: Place = OUTER
    """Place that the marker is read from: which of the job's logs."""
    newest_generation: int = 0
    """Newest generation that was claimed when the marker was found."""
    summarized: bool = False
    """True if directories of :attr:`pieces` come from summaries; after a mismatch, the objects are read instead."""

    @property
    def marker(self) -> MarkerId:
        return self.commit.id

    @property
    def claim(self) -> Claim:
        """CLAIM of the marker's generation."""
        return self.lineage.claims[self.commit.generation]

    @property
    def schema(self) -> Schema:
        return self.claim.schema

    @property
    def bases(self) -> dict[int, int]:
        """For each table, the newest generation on the path that sent it completely; older rows do not count."""
        return self.lineage.bases(self.marker)

    @property
    def path(self) -> Path:
        """Path to this marker, after ``since``."""
        return Path.to(self.lineage, self.marker, self.since)

    @property
    def stored(self) -> MarkerId | None:
        """Marker up to which HEAD and the store have all rows; None if they have none."""
        if self.pieces:
            return self.pieces[-1].end
        return self.head.marker if self.head is not None else None

    @property
    def notes(self) -> tuple[Notes, ...]:
        """Notes of each rank at the marker :attr:`stored`."""
        return self.told[self.stored] if self.stored is not None else ()

    @property
    def segments(self) -> list[Picked]:
        """Segments to read from the store."""
        return [picked for piece in self.pieces for picked in piece.opened]

    @property
    def reach(self) -> MarkerId | None:
        """Marker up to which the log is not needed; None if all rows come from the log."""
        return self.stored or self.since

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Intervals to read from the log, in the order of the path."""
        return tuple(intervals(self.lineage, self.marker, self.reach))

    @property
    def source(self) -> str:
        """Sources of the rows, as text: ``log``, ``store`` or ``store+log``."""
        return source_of(self.marker, self.stored)

    def segment_of(self, error: StreamCkptError) -> str | None:
        """Return the segment of this route that ``error`` is about; None if it is about something else.

        If its directory may be from a summary, returns the name of the summaries, so that the next search reads the
        objects.
        """
        said = str(error.where.get("name", error.where.get("path", "")))
        name = next((each.ref.name for each in self.segments if said.endswith(each.ref.name)), None)
        return SUMMARIES_DIR if name is not None and self.summarized else name

    # Presence in the log.

    def check(self, log: LogReader) -> None:
        """Check that the log has the intervals that are needed.

        Missing parts of streams whose ends are not checked are detected when they are read.

        Raises:
            TrimmedError: they were trimmed, and a store has them.
            OtherLogError: the log was deleted and recreated under its name.
            CorruptionError: something is missing that was not trimmed.
            LogUnavailableError: the log does not answer.
        """
        self.check_trimmed(log)  # first, because a recovered log is also another log
        walked = generations(self.lineage, self.marker, self.reach)
        check_incarnation(log, self.lineage, self.marker, (each.generation for each, _ in walked))

    def check_trimmed(self, log: LogReader) -> None:
        """Check that the log still has intervals that a TRIM covers: it may delete less. Raises as :meth:`check`."""
        walked = generations(self.lineage, self.marker, self.reach)
        if any(self.lineage.trims.of(each.generation) is not None for each, _ in walked):
            check_there(log, self.lineage, self.marker, self.intervals)

    def wrote_to(self, now: Incarnation | None) -> bool:
        """Return whether the marker's own generation wrote to this log; an inner tier also takes over other markers."""
        return now is not None and now.holds_rows_of(self.claim.incarnation)

    def check_own(self, log: LogReader) -> None:
        """Check that the streams of the marker's own generation exist, judging by names and sizes.

        Streams of older generations, of which there is one for each restart, are checked when they are read.

        Raises:
            CorruptionError: a stream is missing or too short.
        """
        for marker, after in generations(self.lineage, self.marker, self.reach):
            if marker == self.marker:
                previous = self.lineage.find(after) if after is not None else None
                log.check_there([each.span for each in intervals_of(self.claim, self.commit, previous)])

    # Shards of the ranks.

    def complete(self, log: LogReader, known: Shards | None = None) -> Route:
        """Return the route with :attr:`shards`, and with only the part of the lineage that leads to its marker.

        The result can be sent to other ranks.

        Shards come from the CLAIMs. COMMITs of older generations, and HELLOs in the log, are read only if a CLAIM has
        none. Whether the HELLOs agree is checked when the streams are read.

        Args:
            log: The job's log.
            known: Shards from an earlier call, because HELLOs up to ``since`` may be trimmed.

        Raises:
            CorruptionError: a HELLO is missing in the log, or the shards in the store differ from those in the CLAIM.
        """
        known = known or {}
        found: dict[int, Sequence[tuple[TableShard, ...]]] = {}
        bare: list[MarkerId] = []
        for marker, after in generations(self.lineage, self.marker, self.reach):
            claim = self.lineage.claims[marker.generation]
            if self.stored is not None and after is not None:
                found[marker.generation] = layout_of(claim, self.notes)
            elif (layout := known.get(marker.generation) or claim.layout) is not None:
                found[marker.generation] = layout
            else:
                bare.append(marker)
        for commit in self.lineage.commits.named(bare):
            claim = self.lineage.claims[commit.generation]
            found[commit.generation] = tuple(read_hello(log, claim, commit, end).shards for end in commit.ranks)
        return replace(self, lineage=towards(self.lineage, self.marker, self.since), shards=found)

    def all_shards(self) -> Shards:
        """Return :attr:`shards`, with those of the marker's own generation even if the store has all of its rows."""
        stored, generation = self.stored, self.commit.generation
        if stored is None or stored.generation != generation or generation in self.shards:
            return self.shards
        return {**self.shards, generation: layout_of(self.claim, self.notes)}

    @property
    def own_shards(self) -> list[TableShard]:
        """Shards of the marker's ranks, from its generation's part of :attr:`shards`, otherwise from the store."""
        of_ranks = self.shards.get(self.commit.generation) or [each.shards for each in self.notes]
        return [shard for each in of_ranks for shard in each]

    def stay(self) -> Route:
        """Return the route of a reader that already has the marker."""
        return Route(self.lineage, self.commit, since=self.marker)


def check_there(log: LogReader, lineage: Lineage, marker: MarkerId, needed: Sequence[Interval]) -> None:
    """Check that the log has the intervals that lead to a marker, judging by names, sizes and ends.

    Raises:
        TrimmedError: they were trimmed, and a store has them.
        CorruptionError: something is missing that was not trimmed.
        LogUnavailableError: the log does not answer.
    """
    try:
        log.check_there([each.span for each in needed])
    except CorruptionError:
        trims = [trim for each in needed if (trim := lineage.trims.of(each.commit.generation)) is not None]
        if not trims:
            raise
        said = lineage.trims.reach
        log.check_there(
            [
                span._replace(begin=max(span.begin, each.span.begin))
                for each in needed
                for span in lineage.spans(each.commit.generation, [each.end], said)
            ]
        )
        last = trims[-1]
        raise TrimmedError(
            f"the log up to marker {last.id} was trimmed on {last.day}; the store {last.store} holds it",
            hint="name that store: store=URL, on the command line --store URL; if it belongs to the outer tier of "
            "this job, name both tiers, or only the outer one",
            marker=marker,
            store=last.store,
        ) from None


def lacks_trimmed(error: StreamCkptError, objects: Objects | None) -> bool:
    """Return whether the store that was read is the one that had the rows when the log was trimmed."""
    kept = error.where.get("store") if isinstance(error, TrimmedError) else None
    return objects is not None and kept in (objects.url, place_of(objects))


def lacking(error: StreamCkptError, objects: Objects | None) -> StreamCkptError:
    """Return the error for a reader of this store. It does not tell to read a store that was just read.

    Args:
        error: The error of the log.
        objects: The store that was read in addition to the log, if any.
    """
    if not isinstance(error, TrimmedError) or objects is None:
        return error
    message, hint = error.message, f"{error.hint}; if {objects.url} is a copy of it, complete the copy"
    if lacks_trimmed(error, objects):
        message = f"{message.partition(';')[0]}, and the store {objects.url}, which held it, lacks it now"
        hint = (
            "check whether the store is mounted and whole (a copy may have been cut short), or bring it back from "
            "another copy; until then name an older marker that stream-ckpt list shows as restorable"
        )
    return TrimmedError(message, hint=hint, **error.where)


def check_incarnation(log: LogReader, lineage: Lineage, marker: MarkerId, walked: Iterable[int]) -> None:
    """Check that the log is the same one that these generations, which lead to a marker, wrote to.

    Raises:
        OtherLogError: the log was deleted and recreated under its name.
    """
    now = log.incarnation()
    for generation in walked:
        if now is None or not now.holds_rows_of(lineage.claims[generation].incarnation):
            raise OtherLogError(
                f"the log was deleted and recreated after generation {generation} wrote to it",
                hint="put the old log back; this one does not hold its rows",
                generation=generation,
                marker=marker,
            )


def source_of(marker: MarkerId, reach: MarkerId | None) -> str:
    """Return the source of rows if a store serves up to ``reach``: ``log``, ``store`` or ``store+log``."""
    return "log" if reach is None else "store" if reach == marker else "store+log"


def layout_of(claim: Claim, notes: Sequence[Notes]) -> Sequence[tuple[TableShard, ...]]:
    """Return the shards of the ranks from the store, after a check against the CLAIM or, without it, the tables."""
    held = tuple(each.shards for each in notes)
    if claim.layout is not None and claim.layout[:] == held:
        return claim.layout
    for rank, shards in enumerate(held):
        outside = next((shard for shard in shards if not claim.schema.holds(shard)), None)
        if claim.layout is not None or outside is not None:
            raise CorruptionError(
                f"the store lists a rank's shard {outside}, which is outside its table"
                if outside is not None
                else "the store lists other shards of the ranks than the CLAIM",
                generation=claim.generation,
                rank=rank,
            )
    return held


_READERS = 128
"""Number of manifests and directories to read in parallel: small objects, each of which costs a round trip."""
_FEW = 64
"""Number of parallel reads if summaries have most of them."""
NONE: Mapping[str, CorruptionError] = MappingProxyType({})

_log = logging.getLogger(__name__)


def warm(head: HeadState | None, lineage: Lineage, marker: MarkerId) -> HeadState | None:
    """Return ``head`` if its marker is on the path to ``marker`` and is the same as in the log, otherwise None."""
    if head is None:
        return None
    if head.marker not in lineage.leading_to(marker) or lineage.find(head.marker) != head.commit:
        _log.info("HEAD is not used: it is at marker %s, which does not lead to %s", head.marker, marker)
        return None
    schema = lineage.claims[head.marker.generation].schema
    whole = {(index, column) for index, table in enumerate(schema.tables) for column in range(table.dim) if table.rows}
    found = [(table, column) for table, col0, cols in head.columns for column in range(col0, col0 + cols)]
    if head.schema_crc != schema.crc or len(found) != len(whole) or set(found) != whole:
        _log.info("HEAD is not used: it has other tables than marker %s", head.marker)
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
    tail = _tail(route)  # once: a trainer reads these COMMITs from the log
    route = _by_summaries(catalog, route, tail, summaries and not damaged) or _around_damage(
        catalog, route, tail, damaged, told
    )
    if head is None:
        return route
    chain = lineage.chain(marker)
    ids, steps = [commit.id for commit in chain], catalog.steps(chain)
    beyond = ids[ids.index(route.stored or head.marker) + 1 :]
    if not steps or steps[-1][1] not in beyond:
        return route
    # The pieces after HEAD may be gone: gc deletes those that a base replaces.
    cold = _around_damage(catalog, cold, _tail(cold), damaged, told)
    if cold.stored not in beyond:
        return route
    _log.info("HEAD is not used: it leads to marker %s, the store alone to %s", route.stored, cold.stored)
    return cold


def damage_of(
    catalog: Catalog | None, lineage: Lineage, marker: MarkerId, damaged: Mapping[str, CorruptionError] = NONE
) -> CorruptionError | None:
    """Return the damage that keeps the store from serving a marker, judging by directories.

    Returns None if the store can serve it.

    ``damaged`` adds damage that is already known.
    """
    route = Route(lineage, lineage.find(marker))
    return _with_store(catalog, route, _tail(route), damaged)[1] if catalog is not None else None


def _by_summaries(catalog: Catalog, route: Route, tail: Sequence[Commit], wanted: bool) -> Route | None:
    """Run :func:`_with_store` on summaries; returns None if they are incomplete or inconsistent."""
    if not wanted:
        return None
    with ThreadPoolExecutor(_FEW) as pool:
        summarized = by_summaries(catalog, tail, route.reach, pool)
    if summarized is None:
        return None
    found, error = _with_store(summarized, route, tail, NONE, _FEW)
    if error is not None:
        _log.info("summaries cannot be used; reading the objects: %s", error.headline)
        return None
    return replace(found, summarized=True)


def _around_damage(
    catalog: Catalog,
    route: Route,
    tail: Sequence[Commit],
    damaged: Mapping[str, CorruptionError],
    told: Callable[[CorruptionError], None],
) -> Route:
    """Run :func:`_with_store`, but avoid damaged objects, and go as far along the path as is possible without them."""
    found, error = _with_store(catalog, route, tail, damaged)
    if error is None:
        return found
    told(error)
    intact = _intact(catalog, route, tail, damaged)
    found, _ = _with_store(intact, route, tail, damaged)
    if not found.pieces:
        _log.warning(
            "the store cannot provide marker %s; reading the log: %s\n  Try: %s", route.marker, error.headline, _REPAIR
        )
        return route
    count = len(catalog.folds - intact.folds) + len(catalog.markers - intact.markers)
    way = f"{len(found.pieces)} pieces hold the rows up to {found.stored}"
    _log.warning(
        "reading the store without %d damaged folds or intervals: %s; %s\n  Try: %s",
        count,
        error.headline,
        way,
        _REPAIR,
    )
    return found


def _with_store(
    catalog: Catalog,
    route: Route,
    tail: Sequence[Commit],
    damaged: Mapping[str, CorruptionError],
    readers: int = _READERS,
) -> tuple[Route, CorruptionError | None]:
    """Return (``route`` with the store's pieces along its :func:`_tail`, why they cannot be read)."""
    try:
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
    cold = Route(route.lineage, route.commit, route.since)
    damage = newest or _with_store(catalog, cold, _tail(cold), damaged)[1]
    return lost(damage, route.marker, error) if damage is not None else error


def ends_early(catalog: Catalog, route: Route) -> bool:
    """Return whether the store gives less of a route than its object names promise, due to unavoidable damage."""
    cold = Route(route.lineage, route.commit, route.since)
    steps = catalog.steps(_tail(cold), cold.reach)
    return bool(steps) and steps[-1][1] != route.stored


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


def _intact(catalog: Catalog, route: Route, tail: Sequence[Commit], damaged: Mapping[str, CorruptionError]) -> Catalog:
    """Return ``catalog`` without damaged objects on the path to a marker: folds, and intervals with their markers.

    Only pieces that would be read are checked. If one is damaged, the pieces that avoid it are checked next.
    """
    since, whole = route.reach, set[str]()
    commits = {commit.id: commit for commit in tail}

    def is_damaged(step: Stride) -> bool:
        """Check a piece or, if both ends are the same, the segments with the shards of each rank at that marker."""
        start, end = step
        try:
            is_piece, commit = start != end, commits[end]
            for ref in catalog.piece(start, commit).segments if is_piece else catalog.check(commit).last:
                if ref.name in damaged:
                    return True
                if ref.name not in whole:
                    load_front(catalog.objects, ref, catalog.job)
                    whole.add(ref.name)
        except CorruptionError:
            return True
        return False

    with ThreadPoolExecutor(_READERS) as pool:  # each check may be slow
        while steps := catalog.steps(tail, since):
            steps.append((steps[-1][1], steps[-1][1]))
            bad = set(compress(steps, pool.map(is_damaged, steps)))
            if not bad:
                break
            ends = {end for _, end in bad - catalog.folds}
            catalog = replace(catalog, folds=catalog.folds - bad, markers=catalog.markers - ends)
    return catalog


def _tail(route: Route) -> list[Commit]:
    """Return the COMMITs on the path to a marker after those that HEAD or the reader has."""
    chain, reach = route.lineage.chain(route.marker), route.reach
    return chain[[commit.id for commit in chain].index(reach) + 1 :] if reach is not None else chain
