"""Where the bytes of a marker are, and whether it is whole: of one that is named, or of the newest that is.

Everybody asks here. ``find`` chooses for a restore, for the planner and for a spare that begins. Whoever knows the
marker (an export, ``verify``, a follower, a spare that goes on) asks :func:`locate` alone, and then the route.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from torchrec_stream_ckpt.control.lost import check_whole
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    MarkerNotFoundError,
    MissingObjectError,
    OtherLogError,
    StoreUnavailableError,
    StreamCkptError,
    TrimmedError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.route.damaged import Damaged
from torchrec_stream_ckpt.route.held import NONE, damaged_in, hold, load_all, load_catalog, of_head, warm
from torchrec_stream_ckpt.route.job import Job
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.route.tiers import OUTER, Place, Source, Tiers, TierState
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.types import MarkerId
from torchrec_stream_ckpt.uris import parse_uri

log = logging.getLogger(__name__)

LOOKS = 3
"""How often a job is looked at whose markers go while it is looked at."""
_ELSEWHERE = (CorruptionError, TrimmedError, MarkerNotFoundError, LogUnavailableError, StoreUnavailableError)

OpenHead = Callable[[bytes], HeadState | None]
"""What the HEAD on this host holds of a job, if anything."""


def no_head(_: bytes) -> HeadState | None:
    """For those who use none."""
    return None


def find(
    job: Job | Tiers, marker: MarkerId | None, head: OpenHead = no_head, damaged: Damaged | None = None
) -> Route | None:
    """(rank 0) Find ``marker``, or the newest one that is whole as far as dense state, names and directories tell.

    Of a job with tiers, on the nearest one that has it. What is given up or trimmed meanwhile is looked for again.

    Args:
        job: Its log, or both of its logs.
        marker: Which one; None for the newest.
        head: What HEAD holds.
        damaged: What was found out so far; what is passed over now is added.

    Returns:
        None when nothing was ever committed.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or given up; without it: all were given up.
        ConfigError: the dense state lies in another store than this one.
        CorruptionError: the marker is damaged wherever it is, or too many newer ones are, or the log is lost.
        LogUnavailableError, StoreUnavailableError: one does not answer that might have it.
        TrimmedError: the log was trimmed, and the marker needs what is gone.
        UnsupportedError: the store is of a newer format.
    """
    damaged = Damaged() if damaged is None else damaged
    before = damaged.passed
    for number in range(1, LOOKS + 1):
        state = TierState.read(job)
        if not state.outer.claims:
            _see_nothing_is_lost(job, marker)
            return None
        for each in (job.outer, job.inner) if isinstance(job, Tiers) else (job,):
            each.control.check_copy()
        if isinstance(job, Tiers):
            _say_what_is_lost(job, state)
        look = Search(state, lambda place: place.source(job), head, damaged)
        try:
            route = look.choose(marker)
            if number == LOOKS or damaged.passed == before or not look.is_stale(job):
                return route
        except (CorruptionError, TrimmedError, MarkerNotFoundError) as error:
            if number == LOOKS or not look.is_stale(job):
                raise
            log.info("markers were given up meanwhile, the job is looked at again: %s", error.headline)
        damaged.forget(before)
    raise AssertionError


def _see_nothing_is_lost(job: Job | Tiers, marker: MarkerId | None) -> None:
    """No generation was ever claimed."""
    outer = job.outer if isinstance(job, Tiers) else job
    check_whole(outer.log, outer.control, parse_uri(outer.uri), outer.objects)
    if marker is not None:
        raise MarkerNotFoundError("there is no log", hint="check the URI, or start the job first", uri=outer.uri)


def _say_what_is_lost(tiers: Tiers, state: TierState) -> None:
    """Never in silence: markers that only the inner tier had, or has and does not offer."""
    if not state.outer.commits:
        return
    if not state.inner.claims:
        log.warning(
            "the inner log %s is empty: markers that had not been copied to %s are lost, nobody can tell how many",
            tiers.inner.uri,
            tiers.outer.uri,
        )
    elif not state.owns(state.generation):
        log.warning(
            "the inner log %s was not written by generation %d, the newest one: it ran on another node, or its log is "
            "gone; what it had not copied to %s is not to be had here",
            tiers.inner.uri,
            state.generation,
            tiers.outer.uri,
        )
    if state.abandoned:
        first, last = state.abandoned[0], state.abandoned[-1]
        log.info(
            "%d markers that only the inner log has (%s to %s) are on a line that was given up: they can be restored "
            "by name",
            len(state.abandoned),
            first,
            last,
        )


def _gone(state: TierState) -> tuple[int, ...]:
    """What grows when anything is given up or trimmed."""
    return tuple(len(said) for each in (state.inner, state.outer) for said in (each.trims, each.given_up))


def locate(
    lineage: Lineage,
    marker: MarkerId,
    catalog: Catalog | None = None,
    *,
    since: MarkerId | None = None,
    head: HeadState | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Route:
    """Where the bytes of ``marker`` are: what HEAD and the store give, and that the log has to give the rest.

    Whether the log has it, :meth:`Route.check` says.

    Args:
        lineage: The control partition.
        marker: A committed marker.
        catalog: What the store holds; None for nothing.
        since: A marker on the path that the reader has.
        head: A HEAD on the path.
        damaged: Segments of the store that are known to be damaged: they are read around.

    Raises:
        MarkerNotFoundError: ``marker`` was never committed, or given up.
        StoreUnavailableError: it does not answer.
    """
    commit = lineage.find(marker)
    if catalog is None:
        return Route(lineage, commit, of_head(head) if head is not None else None, since)
    catalog.check_offered(marker)
    return Route(lineage, commit, hold(catalog, lineage, marker, since, head, damaged), since)


def damage_of(
    catalog: Catalog | None, lineage: Lineage, marker: MarkerId, damaged: Mapping[str, CorruptionError] = NONE
) -> CorruptionError | None:
    """Why the store does not serve a marker that it should, as far as directories tell and is known."""
    if catalog is None:
        return None
    try:
        held = load_all(catalog, lineage, marker)
    except CorruptionError as error:
        return error
    name = damaged_in(damaged, held) if held is not None else None
    return damaged[name] if name is not None else None


def verify_dense_state(dense: DenseStore, commit: Commit) -> None:
    """Compare the dense state of a marker with its digests.

    Raises:
        CorruptionError: a file is missing or altered.
        ConfigError: one is missing, and the COMMIT names another store than this one.
        StoreUnavailableError: the store does not answer.
    """
    try:
        dense.verify(commit)
    except MissingObjectError as error:
        if commit.store in ("", dense.url):
            raise
        raise ConfigError(
            f"marker {commit.id} keeps its dense state in the store {commit.store}, and {dense.url} does not have it: "
            f"{error.message}",
            hint=f"give the marker's store (store={commit.store!r}), or restore an older marker by name",
            **error.where,
        ) from None


class Search:
    """A job as it was read once, and what its stores hold.

    Args:
        state: What its logs say.
        source: What a place is read from.
        head: What HEAD holds.
        damaged: As of :func:`find`.
    """

    def __init__(
        self,
        state: TierState,
        source: Callable[[Place], Source],
        head: OpenHead = no_head,
        damaged: Damaged | None = None,
    ) -> None:
        self._state = state
        self._source = source
        self._head = head
        self._damaged = Damaged() if damaged is None else damaged
        self._catalogs: dict[str, Catalog | None] = {}
        """Of the stores that were asked."""
        self._gone = _gone(state)

    def choose(self, marker: MarkerId | None) -> Route | None:
        """As :func:`find`, of what was read."""
        state, damaged = self._state, self._damaged
        if marker is not None:
            return self._anywhere(marker, named=True)
        commit = None
        for commit in state.newest_first():
            if commit.id not in damaged.passed and (route := self._anywhere(commit.id, named=False)) is not None:
                return replace(route, skipped=damaged.said)
        if damaged.passed:
            raise damaged.exhausted()
        if commit is not None:
            raise MarkerNotFoundError(
                "every committed marker was given up", hint="name another store", store=self._source(OUTER).dense.url
            )
        return None

    def is_stale(self, job: Job | Tiers) -> bool:
        """Whether anything was given up or trimmed since: what was not whole may be so elsewhere."""
        with suppress(StreamCkptError):  # what was found is what is said
            catalogs = (each for each in self._catalogs.values() if each is not None)
            return _gone(TierState.read(job)) != self._gone or any(
                Catalog.load(each.objects, each.job).dropped != each.dropped for each in catalogs
            )
        return False

    def _anywhere(self, marker: MarkerId, *, named: bool) -> Route | None:
        """The marker from the best place that has it whole; None: it is passed over, and was not asked for by name."""
        failures: list[StreamCkptError] = []
        for place in self._state.places(marker):
            try:
                if (damage := self._damaged.places.get((marker, place))) is not None:
                    raise damage
                return self._at(marker, place)
            except _ELSEWHERE as error:
                if self._state.inner.claims:
                    log.warning("the %s tier cannot give marker %s: %s", place, marker, error.headline)
                failures.append(error)
        if named:
            raise self._not_there(marker, failures)
        self._pass_over(marker, failures)
        return None

    def _at(self, marker: MarkerId, place: Place) -> Route:
        """The marker from one place."""
        lineage, source = self._state.lineage(place), self._source(place)
        commit, catalog = lineage.find(marker), self._catalog(lineage, source, place)
        if catalog is not None and catalog.is_dropped(commit):
            catalog.check_offered(marker)
        verify_dense_state(source.dense, commit)
        head = warm(self._head(lineage.job), lineage, marker)
        route = locate(lineage, marker, catalog, head=head, damaged=self._damaged.segments)
        try:
            route.check(source.log)
            route.check_own(source.log)
            return replace(route.complete(source.log), place=place, newest_generation=self._state.generation)
        except (TrimmedError, CorruptionError) as error:
            damage = damage_of(catalog, lineage, marker, self._damaged.segments)
            raise damage or error from None  # that of the store comes first: without it the log would not be asked

    def _catalog(self, lineage: Lineage, source: Source, place: Place) -> Catalog | None:
        if source.objects is None:
            return None
        url = source.objects.url
        if url not in self._catalogs:
            self._catalogs[url] = load_catalog(source.objects, lineage)
        catalog = self._catalogs[url]
        return catalog.upto(place.outer_upto) if catalog is not None and place.outer_upto else catalog

    def _pass_over(self, marker: MarkerId, failures: list[StreamCkptError]) -> None:
        """Only proved damage leads to an older marker; one that was given up is none that was offered.

        Raises:
            LogUnavailableError, StoreUnavailableError, TrimmedError: whether the marker is whole is unknown.
            OtherLogError: no older one can be read either.
            CorruptionError: too many are damaged.
        """
        for error in failures:
            if isinstance(error, (LogUnavailableError, StoreUnavailableError)):
                raise error
        damage = [error for error in failures if isinstance(error, CorruptionError)]
        trimmed = [error for error in failures if isinstance(error, TrimmedError)]
        if isinstance(failures[-1], OtherLogError):
            raise failures[-1]
        if damage:
            self._damaged.over(marker, damage[0])
        elif trimmed:
            raise trimmed[0]

    def _not_there(self, marker: MarkerId, failures: list[StreamCkptError]) -> StreamCkptError:
        if marker in self._state.outer.commits:
            return failures[-1]  # of the outer tier
        if failures:
            return type(failures[0])(
                f"only the inner tier has marker {marker}, and not whole: {failures[0].message}",
                hint="choose one that the outer tier has: stream-ckpt list OUTER",
                **failures[0].where,
            )
        try:
            self._state.outer.find(marker)
        except MarkerNotFoundError as error:
            return error
        raise AssertionError
