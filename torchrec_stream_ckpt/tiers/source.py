"""From which tier a marker is restored: the nearest one that has it whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.control.lost import check_whole
from torchrec_stream_ckpt.errors import (
    CorruptionError,
    LogUnavailableError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamCkptError,
    TrimmedError,
)
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.log.api import Incarnation, LogReader
from torchrec_stream_ckpt.route.find import choose
from torchrec_stream_ckpt.route.held import NONE
from torchrec_stream_ckpt.route.passed import Passed
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.tiers.state import MIXED, TierState
from torchrec_stream_ckpt.tiers.tier import Tiers
from torchrec_stream_ckpt.types import LogSpan, MarkerId
from torchrec_stream_ckpt.uris import parse_uri

log = logging.getLogger(__name__)

_TRY_ELSEWHERE = (CorruptionError, TrimmedError, MarkerNotFoundError, LogUnavailableError, StoreUnavailableError)


@dataclass(frozen=True, slots=True)
class Source:
    """What one rank reads a marker from."""

    log: LogReader
    objects: Objects
    dense: DenseStore


@dataclass(frozen=True, slots=True)
class Place:
    """Which tiers give a marker. A value: rank 0 tells it to all ranks."""

    outer_upto: int
    """Generations up to this one are read from the outer log, the others from the inner one."""
    outer_alone: bool = False
    """Everything is, dense state too."""

    def __str__(self) -> str:
        if self.outer_alone:
            return "outer"
        return "inner + outer" if self.outer_upto else "inner"

    def source(self, tiers: Tiers) -> Source:
        """(each rank) What to read from."""
        inner, outer = tiers.inner, tiers.outer
        if self.outer_alone:
            return Source(outer.log, outer.objects, outer.dense)
        if self.outer_upto:
            return Source(MixedLog(inner.log, outer.log, self.outer_upto), outer.objects, inner.dense)
        return Source(inner.log, inner.objects, inner.dense)


OUTER = Place(0, outer_alone=True)


@dataclass(frozen=True, slots=True)
class Found:
    """A marker, and where it is."""

    choice: Route
    place: Place
    generation: int
    """The newest one that was claimed then."""


@dataclass(frozen=True, slots=True)
class MixedLog:
    """Both logs as one, for reading: a generation is on one of them."""

    inner: LogReader
    outer: LogReader
    outer_upto: int

    def incarnation(self) -> Incarnation | None:
        """What :meth:`TierState.mixed` says of generations that were written to these very logs."""
        return Incarnation(MIXED, 0)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        return self._log_of(span).read(span)

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        for each in (self.inner, self.outer):
            mine = [span for span in spans if self._log_of(span) is each]
            if mine:
                each.check_there(mine)

    def place(self, span: LogSpan) -> tuple[str, int]:
        return self._log_of(span).place(span)

    def _log_of(self, span: LogSpan) -> LogReader:
        return self.outer if span.generation <= self.outer_upto else self.inner


def look_up(
    tiers: Tiers,
    marker: MarkerId | None,
    head: Callable[[bytes], HeadState | None],
    *,
    places: Mapping[tuple[MarkerId, Place], CorruptionError] | None = None,
    passed: Passed | None = None,
    damaged: Mapping[str, CorruptionError] = NONE,
) -> Found | None:
    """(rank 0) Find ``marker``, or the newest one that is whole, on the nearest tier that has it.

    Args:
        tiers: Both logs.
        marker: Which one; None for the newest.
        head: What the HEAD on this host holds of a job.
        places: Where markers turned out to be damaged while they were read.
        passed: (without ``marker``) What was passed over so far; what is now is added.
        damaged: Segments of stores that turned out to be damaged.

    Returns:
        None when nothing was ever committed.

    Raises:
        MarkerNotFoundError: it was never committed, or given up.
        CorruptionError: no tier has it whole, or too many newer ones are damaged.
        LogUnavailableError, StoreUnavailableError: a tier does not answer that might have it.
    """
    places, passed = places or {}, Passed() if passed is None else passed
    state = TierState.read(tiers)
    if not state.outer.claims:
        outer = tiers.outer
        check_whole(outer.log, outer.control, parse_uri(outer.uri), outer.objects)
        if marker is not None:
            raise MarkerNotFoundError("there is no log yet", hint="check the URIs", uri=tiers.outer.uri)
        return None
    tiers.outer.control.check_copy()
    tiers.inner.control.check_copy()
    _say_what_is_lost(tiers, state)
    wanted = [marker] if marker is not None else _newest_first(state)
    for candidate in wanted:
        if candidate in passed:
            continue
        failures: list[StreamCkptError] = []
        for place in _places(state, candidate):
            try:
                if (damage := places.get((candidate, place))) is not None:
                    raise damage
                found = _at(tiers, state, candidate, place, head, damaged)
                return replace(found, choice=replace(found.choice, skipped=passed.said))
            except _TRY_ELSEWHERE as error:
                log.warning("the %s tier cannot give marker %s: %s", place, candidate, error.headline)
                failures.append(error)
        if marker is not None:
            raise _not_there(state, marker, failures)
        _pass_over(candidate, failures, passed)
    if passed:
        raise passed.exhausted()
    return None


def _newest_first(state: TierState) -> list[MarkerId]:
    """All markers that may be the newest one that is whole."""
    return [commit.id for commit in (*reversed(state.unrelayed), *reversed(state.outer.commits.values()))]


def _places(state: TierState, marker: MarkerId) -> Iterator[Place]:
    """Where to look for a marker, the best first.

    All that the inner log has of it, then only its own generation: what is before it is on both; then the outer log.
    """
    if state.commit(marker) is not None:
        parent = state.inner.claims[marker.generation].parent
        most = parent.generation if parent is not None else 0
        for outer_upto in dict.fromkeys((state.outer_upto(marker), most)):
            if outer_upto is not None:
                yield Place(outer_upto)
    if marker in state.outer.commits:
        yield OUTER


def _pass_over(marker: MarkerId, failures: list[StreamCkptError], passed: Passed) -> None:
    """Only proved damage leads to an older marker; one that was given up is none that was offered.

    Raises:
        LogUnavailableError, StoreUnavailableError, TrimmedError: nobody can tell whether the marker is whole.
        CorruptionError: too many are damaged.
    """
    for error in failures:
        if isinstance(error, (LogUnavailableError, StoreUnavailableError)):
            raise error
    damage = [error for error in failures if isinstance(error, CorruptionError)]
    trimmed = [error for error in failures if isinstance(error, TrimmedError)]
    if damage:
        passed.over(marker, damage[0])
    elif trimmed:
        raise trimmed[0]


def _at(
    tiers: Tiers,
    state: TierState,
    marker: MarkerId,
    place: Place,
    head: Callable[[bytes], HeadState | None],
    damaged: Mapping[str, CorruptionError],
) -> Found:
    """The marker from one place."""
    source, outer_upto = place.source(tiers), place.outer_upto
    lineage = state.outer if place.outer_alone else state.mixed(outer_upto) if outer_upto else state.inner
    upto = outer_upto or None
    choice = choose(source.log, lineage, source.dense, marker, source.objects, head, upto, damaged=damaged)
    assert choice is not None
    return Found(choice, place, state.generation)


def _not_there(state: TierState, marker: MarkerId, failures: list[StreamCkptError]) -> StreamCkptError:
    if marker in state.outer.commits:
        return failures[-1]  # of the outer tier
    if failures:
        return type(failures[0])(
            f"only the inner tier has marker {marker}, and not whole: {failures[0].message}",
            hint="choose one that the outer tier has: stream-ckpt list OUTER",
            **failures[0].where,
        )
    try:
        state.outer.find(marker)
    except MarkerNotFoundError as error:
        return error
    raise AssertionError


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
