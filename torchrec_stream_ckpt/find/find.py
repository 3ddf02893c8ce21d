"""Choose the marker to read (the requested one, or the newest intact one) and where to read it from.

:func:`find` chooses for a restore, for the planner and for a spare at its start. A caller that knows the marker (an
export, ``verify``, a follower, a spare that continues) calls ``locate`` only, and then checks the route.

:class:`Damaged` records the damage that one restore has found: segments to read around, markers to read elsewhere, and
markers to skip.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Container, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace

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
from torchrec_stream_ckpt.find.job import Job, Named, lost_marker, wanted
from torchrec_stream_ckpt.find.route import Route, damage_of, ends_early, lacking, locate, warm
from torchrec_stream_ckpt.find.tiers import OUTER, Place, Tiers, TierState, named
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.control.loss_check import check_whole
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.store.identity import is_about_format
from torchrec_stream_ckpt.store.verdicts import take_back_if_possible
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import parse_uri

MAX_FALLBACK = 3


class Damaged:
    """Damage that was found while markers were searched and read. Only rank 0 knows the markers that were skipped.

    Args:
        most: Maximum number of markers that may be skipped.
    """

    def __init__(self, most: int = MAX_FALLBACK) -> None:
        self._most = most
        self._errors: dict[MarkerId, CorruptionError] = {}
        """Markers that a restore without a named marker has skipped, because they are damaged in every place."""
        self._segments: dict[bool, dict[str, CorruptionError]] = {False: {}, True: {}}
        """Damaged segments by name, for the inner store (False) and the outer one (True), which have the same names."""
        self.places: dict[tuple[MarkerId, Place], CorruptionError] = {}
        """Markers and places for which damage was found while the marker was read."""

    def anew(self) -> Damaged:
        """Return an empty record for the next restore; a materializer may have repaired objects under the same name."""
        return Damaged(self._most)

    @property
    def passed(self) -> tuple[MarkerId, ...]:
        """Markers that were skipped, newest first."""
        return tuple(self._errors)

    def segments(self, place: Place) -> Mapping[str, CorruptionError]:
        """Return the damaged segments, by name, to read around in the store of a place."""
        return self._segments[place.reads_outer_store]

    def forget(self, passed: Container[MarkerId]) -> None:
        """Forget all skipped markers except these."""
        self._errors = {marker: error for marker, error in self._errors.items() if marker in passed}

    @property
    def said(self) -> tuple[str, ...]:
        """Skipped markers, each with its reason."""
        return tuple(f"{marker}: {error.headline}" for marker, error in self._errors.items())

    def elsewhere(self, route: Route, error: CorruptionError, *, may_pass: bool = False) -> None:
        """Record that a marker is damaged where it was read.

        The next search reads around the damage, or in another place.

        Args:
            route: Route to the marker.
            error: Error that describes the damage.
            may_pass: Whether an older marker is acceptable.

        Raises:
            CorruptionError: ``error`` itself, if no other place has the rows.
        """
        name, place = route.segment_of(error), (route.marker, route.place)
        if name is not None and name not in self.segments(route.place):
            log.warning("reading marker %s without a damaged segment of the store: %s", route.marker, error.headline)
            self._segments[route.place.reads_outer_store][name] = error
        elif may_pass or (not route.place.outer_alone and place not in self.places):
            self.places[place] = error
        else:
            raise error

    def over(self, marker: MarkerId, error: CorruptionError) -> None:
        """Record that ``marker`` cannot be restored.

        Raises:
            CorruptionError: no further marker may be skipped.
        """
        self._errors[marker] = error
        if len(self._errors) > self._most:
            raise self.exhausted()
        log.warning("marker %s is damaged; falling back to the previous one: %s", marker, error)

    def exhausted(self) -> CorruptionError:
        """Return an error with the damage of the newest skipped marker, and of the older ones."""
        (newest, error), *others = self._errors.items()
        older = {"older": "; ".join(f"{marker}: {each.message}" for marker, each in others)} if others else {}
        hint = (
            "restore the missing objects from a copy, or restore an intact marker by name: stream-ckpt verify --all "
            "lists them"
        )
        if error.hint and not others:
            hint = error.hint
        return type(error)(error.message, hint=hint, **{**error.where, "marker": str(newest), **older})


log = logging.getLogger(__name__)

LOOKS = 3
"""Number of attempts if markers of the job are deleted during the search."""
_ELSEWHERE = (CorruptionError, TrimmedError, MarkerNotFoundError, LogUnavailableError, StoreUnavailableError)

OpenHead = Callable[[bytes], HeadState | None]
"""Opens the HEAD of a job on this host. Returns None if this host has no HEAD."""
CheckDense = Callable[[Job, Commit], None]
"""Compares the dense state of a marker in the store of this job; raises as :func:`verify_dense_state`."""


def no_head(_: bytes) -> HeadState | None:
    """Return None, for readers that use no HEAD."""
    return None


def verify_all(job: Job, commit: Commit) -> None:
    """Compare every byte of a marker's dense state, for readers that will load all of it."""
    verify_dense_state(job.dense, commit)


def find(
    job: Job | Tiers,
    name: Named,
    head: OpenHead = no_head,
    damaged: Damaged | None = None,
    check_dense: CheckDense = verify_all,
) -> Route | None:
    """(rank 0) Find a marker, or the newest one that is intact, judging by dense state, names and directories.

    In a job with tiers, the nearest tier that has the marker is used. If markers are given up or the log is trimmed
    during the search, it is repeated.

    Args:
        job: The job's log, or both of its logs.
        name: The marker, in any form that users name it; None for the newest.
        head: Opens HEAD.
        damaged: Known damage; markers that are skipped now are added.
        check_dense: Compares the dense state before a marker is chosen.

    Returns:
        The route; None if no marker was ever committed.

    Raises:
        MarkerNotFoundError: it was never committed, or was given up; or no marker is named, and all were given up.
        ConfigError: the name has no known form; or the dense state is in another store.
        CorruptionError: the marker is damaged in every place, or too many newer ones are damaged, or the log is lost.
        LogUnavailableError, StoreUnavailableError: a log or store that may have the marker does not answer.
        TrimmedError: the log was trimmed, and the marker needs the trimmed part.
        UnsupportedError: the store has a newer format.
    """
    marker = named(job, wanted(name))
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
            look.check_known()
            if number == LOOKS or damaged.passed == before or not look.is_stale():
                return route
        except (CorruptionError, TrimmedError, MarkerNotFoundError) as error:
            if number == LOOKS or not look.is_stale():
                raise
            log.info("markers were given up during the search; reading the job again: %s", error.headline)
        damaged.forget(before)
    raise AssertionError


def _see_nothing_is_lost(outer: Job, marker: MarkerId | None) -> None:
    """Check that a log without generations was not lost; raises MarkerNotFoundError if a marker is named."""
    check_whole(outer.log, outer.control, parse_uri(outer.uri), outer.objects)
    if marker is not None:
        raise MarkerNotFoundError("there is no log", hint="check the URI, or start the job first", uri=outer.uri)


def _say_what_is_lost(inner: Job, outer: Job, state: TierState) -> None:
    """Log markers that only the inner tier had, or that only it has and that are not offered."""
    if not state.outer.commits:
        return
    if not state.inner.claims:
        log.warning(
            "the inner log %s is empty: an unknown number of markers that were not yet copied to %s is lost",
            inner.uri,
            outer.uri,
        )
    elif not state.owns(state.generation):
        log.warning(
            "the inner log %s was not written by generation %d, the newest one: it ran on another node, or its "
            "log was deleted; data that it had not copied to %s is not available here",
            inner.uri,
            state.generation,
            outer.uri,
        )
    if state.abandoned:
        first, last = state.abandoned[0], state.abandoned[-1]
        log.info(
            "%d markers that only the inner log has (%s to %s) are on an abandoned branch: they can be restored "
            "by name",
            len(state.abandoned),
            first,
            last,
        )


def _gone(state: TierState) -> tuple[int, ...]:
    """Return counters that grow if anything is given up or trimmed."""
    return tuple(len(said) for each in (state.inner, state.outer) for said in (each.trims, each.given_up))


def verify_dense_state(dense: DenseStore, commit: Commit, check: Callable[[Commit], None] | None = None) -> None:
    """Compare the dense state of a marker with its digests, or as ``check`` does.

    Raises:
        CorruptionError: a file is missing or altered.
        ConfigError: a file is missing, and the COMMIT names another store.
        StoreUnavailableError: the store does not answer.
    """
    try:
        (check or dense.verify)(commit)
    except MissingObjectError as error:
        if commit.store in ("", dense.url):
            raise
        raise ConfigError(
            f"the dense state of marker {commit.id} was saved to {commit.store}, and is missing from "
            f"{dense.url}: {error.message}",
            hint=f"pass the marker's store (store={commit.store!r}), or restore an older marker by name",
            **error.where,
        ) from None


@dataclass(slots=True)
class Search:
    """Search in one snapshot of a job's logs, with the contents of its stores. Arguments are those of :func:`find`."""

    state: TierState
    """Control partitions of the logs."""
    job: Job | Tiers
    head: OpenHead = no_head
    damaged: Damaged = field(default_factory=Damaged)
    check_dense: CheckDense = verify_all
    _catalogs: dict[str, Catalog | None] = field(default_factory=dict)
    """Catalogs of the stores that were read, by URL."""
    _gone: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        self._gone = _gone(self.state)

    def choose(self, marker: MarkerId | None) -> Route | None:
        """Find a marker like :func:`find`, in this snapshot."""
        state, damaged = self.state, self.damaged
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
                "every committed marker was given up", hint="name another store", store=OUTER.dense(self.job).url
            )
        return None

    def check_known(self) -> None:
        """Check that the log has the markers of the store, if this job has one tier. Lists nothing again.

        Raises:
            CorruptionError: the log has lost a marker, which no second copy has; the error names the command that
                restores it.
        """
        outer = self.job.outer
        for catalog in self._catalogs.values():
            if catalog is None or self.job.inner is not None:
                continue
            if (error := lost_marker(catalog, outer.log, outer.control, outer.uri)) is not None:
                raise error

    def is_stale(self) -> bool:
        """Return whether anything was given up or trimmed since: an incomplete marker may be complete elsewhere."""
        with suppress(StreamCkptError):  # the error of the search itself is raised, not this one
            catalogs = (each for each in self._catalogs.values() if each is not None)
            return _gone(TierState.read(self.job)) != self._gone or any(
                Catalog.load(each.objects, each.job).dropped != each.dropped for each in catalogs
            )
        return False

    def _anywhere(self, marker: MarkerId, *, named: bool) -> Route | None:
        """Return the route from the best place that has the marker intact. None if an unnamed marker is skipped."""
        failures: list[StreamCkptError] = []
        for place in self.state.places(marker):
            try:
                if (damage := self.damaged.places.get((marker, place))) is not None:
                    raise damage
                return self._at(marker, place)
            except _ELSEWHERE as error:
                if self.state.inner.claims:
                    log.warning("the %s tier cannot provide marker %s: %s", place, marker, error.headline)
                failures.append(error)
                if isinstance(error, CorruptionError):
                    self._take_back(place, self.state.lineage(place).job, [error])
        if named:
            raise self._not_there(marker, failures)
        self._pass_over(marker, failures)
        return None

    def _at(self, marker: MarkerId, place: Place) -> Route:
        """Return the route to a marker from one place."""
        lineage, data = self.state.lineage(place), place.log(self.job)
        commit, catalog = lineage.find(marker), self._catalog(lineage, place)
        if catalog is not None and catalog.is_dropped(commit):
            catalog.check_offered(marker)
        self.check_dense(place.nearest(self.job), commit)
        head = warm(self.head(lineage.job), lineage, marker)
        damaged = self.damaged.segments(place)
        found = list(damaged.values())
        route = locate(lineage, marker, catalog, head=head, damaged=damaged, told=found.append)
        self._take_back(place, lineage.job, found)
        try:
            route.check(data)
            route.check_own(data)
            return replace(route.complete(data), place=place, newest_generation=self.state.generation)
        except (TrimmedError, CorruptionError) as error:
            if catalog is None or not ends_early(catalog, route):
                raise lacking(error, place.objects(self.job)) from None
            damage = damage_of(catalog, lineage, marker, damaged)
            raise damage or error from None  # the store's error takes precedence: without it the log would not be read

    def _take_back(self, place: Place, job: bytes, errors: list[CorruptionError]) -> None:
        """Withdraw verifications of damaged objects, so that no process deletes other copies in favor of them."""
        if errors:
            take_back_if_possible(place.objects(self.job), job, errors)

    def _catalog(self, lineage: Lineage, place: Place) -> Catalog | None:
        objects = place.objects(self.job)
        if objects.url not in self._catalogs:
            self._catalogs[objects.url] = Catalog.of_job(objects, lineage)
        return place.offered(self._catalogs[objects.url])

    def _pass_over(self, marker: MarkerId, failures: list[StreamCkptError]) -> None:
        """Skip a marker that was given up or is proved to be damaged; raise for any other failure.

        Raises:
            LogUnavailableError, StoreUnavailableError, TrimmedError: it is unknown whether the marker is intact.
            MissingObjectError: the store lacks its format, so it serves no marker.
            OtherLogError: no older marker can be read either.
            CorruptionError: too many markers are damaged.
        """
        for error in failures:
            if isinstance(error, (LogUnavailableError, StoreUnavailableError)) or is_about_format(error):
                raise error
        damage = [error for error in failures if isinstance(error, CorruptionError)]
        trimmed = [error for error in failures if isinstance(error, TrimmedError)]
        if isinstance(failures[-1], OtherLogError):
            raise failures[-1]
        if damage:
            self.damaged.over(marker, damage[0])
        elif trimmed:
            raise trimmed[0]

    def _not_there(self, marker: MarkerId, failures: list[StreamCkptError]) -> StreamCkptError:
        if marker in self.state.outer.commits:
            return failures[-1]  # the error of the outer tier
        if failures:
            return type(failures[0])(
                f"marker {marker} exists only in the inner tier, and is damaged there: {failures[0].message}",
                hint="choose a marker of the outer tier: stream-ckpt list OUTER",
                **failures[0].where,
            )
        try:
            self.state.outer.find(marker)
        except MarkerNotFoundError as error:
            return error
        raise AssertionError
