"""Which marker is read, and from where: the one that is named, or the newest that is whole.

``find`` chooses for a restore, for the planner and for a spare that begins. Whoever knows the marker (an export,
``verify``, a follower, a spare that goes on) asks ``locate`` alone, and then the route.

What one restore has found to be damaged: what is read around, what is read elsewhere, what is passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import replace

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
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.locate import damage_of, ends_early, load_catalog, locate, warm
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import OUTER, Place, Tiers, TierState
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.control.loss_check import check_whole
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.verdicts import take_back_if_possible
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import parse_uri

MAX_FALLBACK = 3


class Damaged:
    """What was found while markers were looked for and read. What is passed over is known on rank 0 alone.

    Args:
        most: How many markers may be passed over.
    """

    def __init__(self, most: int = MAX_FALLBACK) -> None:
        self._most = most
        self._errors: dict[MarkerId, CorruptionError] = {}
        """Markers that a restore without a name has passed over: damaged wherever they could be read."""
        self._segments: dict[bool, dict[str, CorruptionError]] = {False: {}, True: {}}
        """Segments of the inner tier's store and of the outer one's, by name: both have the same names."""
        self.places: dict[tuple[MarkerId, Place], CorruptionError] = {}
        """Where a marker turned out to be damaged while it was read."""

    def anew(self) -> Damaged:
        """For the next restore: what was damaged may be whole again, a materializer repairs it under the same name."""
        return Damaged(self._most)

    @property
    def passed(self) -> tuple[MarkerId, ...]:
        """The markers that were passed over, newest first."""
        return tuple(self._errors)

    def segments(self, place: Place) -> Mapping[str, CorruptionError]:
        """Return the segments, by name, that are read around in the store of a place."""
        return self._segments[place.reads_outer_store]

    def forget(self, passed: Container[MarkerId]) -> None:
        """Take back what was passed over, but for these."""
        self._errors = {marker: error for marker, error in self._errors.items() if marker in passed}

    @property
    def said(self) -> tuple[str, ...]:
        """Each marker with its reason."""
        return tuple(f"{marker}: {error.headline}" for marker, error in self._errors.items())

    def elsewhere(self, route: Route, error: CorruptionError, *, may_pass: bool = False) -> None:
        """Note that a marker is damaged where it was read: the next look reads around that, or elsewhere.

        Args:
            route: To the marker.
            error: What is damaged.
            may_pass: Whether an older marker will do.

        Raises:
            CorruptionError: ``error`` itself, where no other place has the rows.
        """
        name, place = route.segment_of(error), (route.marker, route.place)
        if name is not None and name not in self.segments(route.place):
            log.warning("marker %s is read around a damaged segment of the store: %s", route.marker, error.headline)
            self._segments[route.place.reads_outer_store][name] = error
        elif may_pass or (not route.place.outer_alone and place not in self.places):
            self.places[place] = error
        else:
            raise error

    def over(self, marker: MarkerId, error: CorruptionError) -> None:
        """Note that ``marker`` cannot be restored.

        Raises:
            CorruptionError: no further marker may be passed over.
        """
        self._errors[marker] = error
        if len(self._errors) > self._most:
            raise self.exhausted()
        log.warning("marker %s is damaged, falling back to the one before: %s", marker, error.headline)

    def exhausted(self) -> CorruptionError:
        """Return an error that says what is wrong with the newest one, and with which older ones."""
        (newest, error), *others = self._errors.items()
        older = {"older": "; ".join(f"{marker}: {each.message}" for marker, each in others)} if others else {}
        hint = "bring back what is missing; stream-ckpt verify --all tells which markers are whole: restore one by name"
        if error.hint and not others:
            hint = error.hint
        return type(error)(error.message, hint=hint, **{**error.where, "marker": str(newest), **older})


log = logging.getLogger(__name__)

LOOKS = 3
"""How often a job is looked at whose markers go while it is looked at."""
_ELSEWHERE = (CorruptionError, TrimmedError, MarkerNotFoundError, LogUnavailableError, StoreUnavailableError)

OpenHead = Callable[[bytes], HeadState | None]
"""What the HEAD on this host holds of a job, if anything."""
CheckDense = Callable[[Job, Commit], None]
"""Compares the dense state of a marker, which lies in the store of this job; raises as :func:`verify_dense_state`."""


def no_head(_: bytes) -> HeadState | None:
    """Return None: for readers that use no HEAD."""
    return None


def verify_all(job: Job, commit: Commit) -> None:
    """Compare every byte of a marker's dense state: for those who will load all of it."""
    verify_dense_state(job.dense, commit)


def find(
    job: Job | Tiers,
    marker: MarkerId | None,
    head: OpenHead = no_head,
    damaged: Damaged | None = None,
    check_dense: CheckDense = verify_all,
) -> Route | None:
    """(rank 0) Find ``marker``, or the newest one that is whole as far as dense state, names and directories tell.

    Of a job with tiers, on the nearest one that has it. What is given up or trimmed meanwhile is looked for again.

    Args:
        job: Its log, or both of its logs.
        marker: Which one; None for the newest.
        head: What HEAD holds.
        damaged: What was found out so far; what is passed over now is added.
        check_dense: What is compared of the dense state before a marker is chosen.

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
            _see_nothing_is_lost(job.outer, marker)
            return None
        job.outer.control.check_copy()
        if job.inner is not None:
            job.inner.control.check_copy()
            _say_what_is_lost(job.inner, job.outer, state)
        look = Search(state, job, head, damaged, check_dense)
        try:
            route = look.choose(marker)
            if number == LOOKS or damaged.passed == before or not look.is_stale():
                return route
        except (CorruptionError, TrimmedError, MarkerNotFoundError) as error:
            if number == LOOKS or not look.is_stale():
                raise
            log.info("markers were given up meanwhile, the job is looked at again: %s", error.headline)
        damaged.forget(before)
    raise AssertionError


def _see_nothing_is_lost(outer: Job, marker: MarkerId | None) -> None:
    """No generation was ever claimed."""
    check_whole(outer.log, outer.control, parse_uri(outer.uri), outer.objects)
    if marker is not None:
        raise MarkerNotFoundError("there is no log", hint="check the URI, or start the job first", uri=outer.uri)


def _say_what_is_lost(inner: Job, outer: Job, state: TierState) -> None:
    """Never in silence: markers that only the inner tier had, or has and does not offer."""
    if not state.outer.commits:
        return
    if not state.inner.claims:
        log.warning(
            "the inner log %s is empty: markers that had not been copied to %s are lost, nobody can tell how many",
            inner.uri,
            outer.uri,
        )
    elif not state.owns(state.generation):
        log.warning(
            "the inner log %s was not written by generation %d, the newest one: it ran on another node, or its log is "
            "gone; what it had not copied to %s is not available here",
            inner.uri,
            state.generation,
            outer.uri,
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
    """Return numbers that grow when anything is given up or trimmed."""
    return tuple(len(said) for each in (state.inner, state.outer) for said in (each.trims, each.given_up))


def verify_dense_state(dense: DenseStore, commit: Commit, check: Callable[[Commit], None] | None = None) -> None:
    """Compare the dense state of a marker with its digests, or as ``check`` does.

    Raises:
        CorruptionError: a file is missing or altered.
        ConfigError: one is missing, and the COMMIT names another store than this one.
        StoreUnavailableError: the store does not answer.
    """
    try:
        (check or dense.verify)(commit)
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
        job: Its log, or both of its logs.
        head: What HEAD holds.
        damaged, check_dense: As of :func:`find`.
    """

    def __init__(
        self,
        state: TierState,
        job: Job | Tiers,
        head: OpenHead = no_head,
        damaged: Damaged | None = None,
        check_dense: CheckDense = verify_all,
    ) -> None:
        self._state = state
        self._job = job
        self._head = head
        self._check_dense = check_dense
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
                "every committed marker was given up", hint="name another store", store=OUTER.dense(self._job).url
            )
        return None

    def is_stale(self) -> bool:
        """Return whether anything was given up or trimmed since: what was not whole may be so elsewhere."""
        with suppress(StreamCkptError):  # what was found is what is said
            catalogs = (each for each in self._catalogs.values() if each is not None)
            return _gone(TierState.read(self._job)) != self._gone or any(
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
                if isinstance(error, CorruptionError):
                    self._take_back(place, self._state.lineage(place).job, [error])
        if named:
            raise self._not_there(marker, failures)
        self._pass_over(marker, failures)
        return None

    def _at(self, marker: MarkerId, place: Place) -> Route:
        """The marker from one place."""
        lineage, data = self._state.lineage(place), place.log(self._job)
        commit, catalog = lineage.find(marker), self._catalog(lineage, place)
        if catalog is not None and catalog.is_dropped(commit):
            catalog.check_offered(marker)
        self._check_dense(place.nearest(self._job), commit)
        head = warm(self._head(lineage.job), lineage, marker)
        damaged = self._damaged.segments(place)
        found = list(damaged.values())
        route = locate(lineage, marker, catalog, head=head, damaged=damaged, told=found.append)
        self._take_back(place, lineage.job, found)
        try:
            route.check(data)
            route.check_own(data)
            return replace(route.complete(data), place=place, newest_generation=self._state.generation)
        except (TrimmedError, CorruptionError) as error:
            if catalog is None or not ends_early(catalog, route):
                raise
            damage = damage_of(catalog, lineage, marker, damaged)
            raise damage or error from None  # that of the store comes first: without it the log would not be asked

    def _take_back(self, place: Place, job: bytes, errors: list[CorruptionError]) -> None:
        """Nobody is to delete other copies in favor of what is damaged."""
        if errors:
            take_back_if_possible(place.objects(self._job), job, errors)

    def _catalog(self, lineage: Lineage, place: Place) -> Catalog | None:
        objects = place.objects(self._job)
        if objects.url not in self._catalogs:
            self._catalogs[objects.url] = load_catalog(objects, lineage)
        catalog = self._catalogs[objects.url]
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
