"""What a retention keeps: never less than it must, and never again what it gave up."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests import stores
from tests.parts import Retention, arm, collect, pin
from tests.sampled import sampled
from tests.stores import HeldObjects, History
from tests.unit.gc_history import HOUR, check_whole, gc, names, plain, rules
from torchrec_stream_ckpt.errors import (
    ConfigError,
    MarkerNotFoundError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.manifest import Pin
from torchrec_stream_ckpt.inner import Catalog, Holdings
from torchrec_stream_ckpt.maintain.gc.retention import Candidate, Decision
from torchrec_stream_ckpt.store.pins import unpin
from torchrec_stream_ckpt.util.layout import dropped_name, pin_name
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import parse_duration

ids = st.builds(MarkerId, st.integers(1, 3), st.integers(1, 40))
candidates = st.lists(
    st.builds(Candidate, ids, st.floats(0, 1e6), st.booleans()), unique_by=lambda each: each.id, max_size=30
)
retentions = st.builds(
    Retention,
    keep_all_for=st.none() | st.floats(0, 1e6) | st.sampled_from(["0s", "15min", "24h", "2d"]),
    then_every=st.none() | st.integers(1, 7) | st.sampled_from(["3", "1h", "1d", "0.5w"]),
    newest=st.none() | st.integers(1, 5),
    pinned=st.frozensets(ids, max_size=4),
)
times = st.floats(0, 2e6)


def hourly(count: int, generation: int = 1) -> list[Candidate]:
    """Markers that were committed an hour apart, the first one at time 0."""
    return [Candidate(MarkerId(generation, number), (number - 1) * HOUR) for number in range(1, count + 1)]


def plan(retention: Retention, markers: list[Candidate], now_s: float) -> Decision:
    """What a rule says at a time, where all clocks agree."""
    return retention.plan([replace(each, age_s=now_s - each.time_s) for each in markers])


def kept(retention: Retention, markers: list[Candidate], now_s: float) -> list[int]:
    return [marker.marker for marker in plan(retention, markers, now_s).kept]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, range(1, 25)),
        ({"pinned": frozenset({MarkerId(1, 2)})}, range(1, 25)),
        ({"keep_all_for": "4h"}, [20, 21, 22, 23, 24]),
        ({"keep_all_for": 4 * HOUR, "then_every": 8}, [8, 16, 20, 21, 22, 23, 24]),
        ({"then_every": "6h"}, [1, 7, 13, 19, 24]),
        ({"newest": 2}, [23, 24]),
        ({"keep_all_for": "1h", "newest": 3, "pinned": frozenset({MarkerId(1, 5)})}, [5, 22, 23, 24]),
    ],
)
def test_the_rules_add_up(settings: dict[str, Any], expected: list[int]) -> None:
    assert kept(Retention(**settings), hourly(24), 23 * HOUR) == list(expected)


def test_what_cannot_be_restored_does_not_count_for_the_floor_and_stays_until_it_is_mended() -> None:
    markers = [replace(each, restorable=each.id.marker not in (10, 8, 2)) for each in hourly(10)]
    assert kept(Retention(newest=2), markers, 1e9) == [7, 8, 9, 10]
    assert kept(Retention(newest=1), markers, 1e9) == [9, 10]


def test_where_too_few_can_be_restored_nothing_is_given_up() -> None:
    markers = [replace(each, restorable=each.id.marker == 3) for each in hourly(5)]
    assert kept(Retention(newest=2), markers, 1e9) == [1, 2, 3, 4, 5]


def test_all_generations_are_judged_together() -> None:
    decision = Retention(newest=2).plan([*hourly(3, 2), *hourly(3, 1)])
    assert decision.kept == (MarkerId(2, 2), MarkerId(2, 3))


@given(retentions, candidates, times)
def test_each_marker_is_kept_or_dropped(retention: Retention, markers: list[Candidate], now_s: float) -> None:
    decision = plan(retention, markers, now_s)
    assert sorted(decision.kept + decision.dropped) == sorted(each.id for each in markers)
    assert list(decision.kept) == sorted(decision.kept)


@given(retentions, candidates, times)
def test_pinned_and_the_newest_are_never_dropped(retention: Retention, markers: list[Candidate], now_s: float) -> None:
    dropped = set(plan(retention, markers, now_s).dropped)
    assert not dropped & retention.pinned
    restorable = sorted(each.id for each in markers if each.restorable)
    assert not dropped & set(restorable[-(retention.newest or 1) :])


@given(retentions, candidates, times)
def test_a_second_time_drops_nothing_more(retention: Retention, markers: list[Candidate], now_s: float) -> None:
    decision = plan(retention, markers, now_s)
    left = [each for each in markers if each.id in decision.kept]
    assert plan(retention, left, now_s) == Decision(decision.kept, ())


@settings(max_examples=sampled(200, 40))
@given(retentions, candidates, candidates, times, st.floats(0, 1e6))
def test_what_was_dropped_is_never_wanted_again(
    retention: Retention, markers: list[Candidate], more: list[Candidate], now_s: float, later_s: float
) -> None:
    known = {each.id for each in markers}
    dropped = set(plan(retention, markers, now_s).dropped)
    everything = markers + [each for each in more if each.id not in known]
    assert not dropped & set(plan(retention, everything, now_s + later_s).kept)


@given(retentions, candidates, times, ids, st.integers(1, 9))
def test_a_softer_rule_keeps_no_less(
    retention: Retention, markers: list[Candidate], now_s: float, pin: MarkerId, more: int
) -> None:
    strict = set(plan(retention, markers, now_s).kept)
    softer = [
        replace(retention, pinned=retention.pinned | {pin}),
        replace(retention, newest=(retention.newest or 1) + more) if not retention.keeps_all else Retention(),
    ]
    if retention.keep_all_for is not None:
        softer.append(replace(retention, keep_all_for=parse_duration(retention.keep_all_for) + more))
    for each in softer:
        if each.then_every is None or each.keep_all_for == retention.keep_all_for:
            assert strict <= set(plan(each, markers, now_s).kept)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90", 90.0), ("90s", 90.0), ("1.5h", 5400.0), ("15min", 900.0), ("2w", 1_209_600.0), (7, 7.0)],
)
def test_durations_are_numbers_with_a_unit(text: float | str, seconds: float) -> None:
    assert parse_duration(text) == seconds


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"keep_all_for": "soon"}, "'soon' is not a duration"),
        ({"keep_all_for": "-3h"}, "'-3h' is not a duration"),
        ({"keep_all_for": -1.0}, "-1.0 is not a duration"),
        ({"keep_all_for": float("nan")}, "nan is not a duration"),
        ({"then_every": 0}, "then_every must be at least 1, got 0"),
        ({"then_every": "0"}, "then_every must be at least 1, got 0"),
        ({"then_every": "0h"}, "then_every must not be zero"),
        ({"then_every": "now and then"}, "'now and then' is not a duration"),
        ({"newest": 0}, "newest must be at least 1, got 0"),
    ],
)
def test_values_that_make_no_sense_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as refused:
        Retention(**settings)
    assert refused.value.hint


# A pin holds a marker whatever gc does meanwhile, and says so where it came too late.


def test_a_pinned_marker_stays_until_its_pin_is_gone(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    pin = pin_name(history.lineage.job, MarkerId(1, 3))
    history.objects.put(pin, [Pin(1.0).to_bytes()])
    gc(history, rules(newest=1, compact=True), pool)
    assert check_whole(history) == names("1:3", "1:6")
    history.objects.delete(pin)
    gc(history, rules(newest=1, compact=True), pool)
    assert check_whole(history) == names("1:6")


class _Pinned(HeldObjects):
    """A store in which somebody pins 1:3 right before, or right after, the moment in which gc gives it up."""

    def __init__(self, history: History, *, after: bool) -> None:
        super().__init__(stores.contents(history.objects))
        self._after, self._job = after, history.lineage.job
        self.dropped = dropped_name(self._job, MarkerId(1, 3))
        self.refused = ""

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        if name != self.dropped:
            super().put(name, parts)
            return
        if self._after:
            super().put(name, parts)
        try:
            pin(self, self._job, MarkerId(1, 3))
        except MarkerNotFoundError as error:
            self.refused = error.message
        super().put(name, parts)


def test_a_pin_that_succeeds_while_gc_gives_the_marker_up_keeps_it(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    store = _Pinned(history, after=False)
    given = rules(newest=1, compact=True)
    done = collect(store, None, history.lineage.job, given, pool, lambda: {"a host": 1e6})
    assert store.refused == ""
    assert (set(done.kept), set(done.dropping)) == (names("1:3", "1:6"), names("1:1", "1:2", "1:4", "1:5"))
    assert done.now
    for marker in collect(store, None, history.lineage.job, given, pool, lambda: {"a host": 2e6}).kept:
        assert Holdings.load(store, history.lineage).look(marker).problem == ""
        assert stores.rows_of(store, history.lineage, marker) == history.rows[marker]


def test_a_pin_that_comes_after_gc_gave_the_marker_up_fails_and_leaves_nothing(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    store = _Pinned(history, after=True)
    done = collect(store, None, history.lineage.job, rules(newest=1), pool, lambda: {"a host": 1e6})
    assert "marker 1:3 was given up by retention on" in store.refused
    assert set(done.kept) == names("1:6")
    assert not list(store.list("pins/"))


@pytest.mark.parametrize("dies", ["gc.dropped=raise@3", "gc.listed=raise@1", "gc.deleted=raise@1"])
def test_a_pin_that_succeeded_holds_where_gc_dies_right_after_it_gave_the_marker_up(
    dies: str, tmp_path: Path, pool: Executor
) -> None:
    history = plain(tmp_path)
    store = _Pinned(history, after=False)
    given = rules(HOUR if "listed" in dies else 0.0, newest=2)
    arm(dies)
    try:
        with pytest.raises(OSError, match="failpoint"):
            collect(store, None, history.lineage.job, given, pool, lambda: {"a host": 1e6})
    finally:
        arm("")
    assert store.refused == ""
    for now_s in (2e6, 3e6):
        catalog = Catalog.load(store, history.lineage.job)
        assert MarkerId(1, 3) in catalog.markers - catalog.dropped
        assert Holdings.load(store, history.lineage).look(MarkerId(1, 3)).problem == ""
        assert stores.rows_of(store, history.lineage, MarkerId(1, 3)) == history.rows[MarkerId(1, 3)]
        kept = collect(store, None, history.lineage.job, given, pool, partial(dict, {"a host": now_s})).kept
        assert set(kept) == names("1:3", "1:5", "1:6")
    unpin(store, history.lineage.job, MarkerId(1, 3))
    assert MarkerId(1, 3) in Catalog.load(store, history.lineage.job).dropped
    assert set(collect(store, None, history.lineage.job, given, pool).kept) == names("1:5", "1:6")


def test_a_pin_that_was_killed_half_way_offers_nothing_that_is_gone(tmp_path: Path, pool: Executor) -> None:
    history = plain(tmp_path)
    job, marker = history.lineage.job, MarkerId(1, 3)
    arm("pin.attempted=raise@1")
    try:
        with pytest.raises(OSError, match="failpoint"):
            pin(history.objects, job, marker)
    finally:
        arm("")
    given = rules(HOUR, newest=1, compact=True)
    assert set(gc(history, given, pool, now_s=1e6).kept) == names("1:3", "1:6"), "somebody may be about to pin it"
    gc(history, given, pool, now_s=1e6 + HOUR)
    for hour in range(2, 5):
        gc(history, given, pool, now_s=1e6 + hour * HOUR)
    assert check_whole(history) == names("1:6")
    assert not list(history.objects.list("pins/"))
    with pytest.raises(MarkerNotFoundError, match="given up by retention"):
        pin(history.objects, job, marker)


def test_a_pin_that_takes_longer_than_gc_waits_says_so(tmp_path: Path) -> None:
    history = plain(tmp_path)
    job, marker = history.lineage.job, MarkerId(1, 3)

    class Slow(HeldObjects):
        def put(self, name: str, parts: Sequence[Buffer]) -> None:
            super().put(name, parts)
            if name == pin_name(job, marker):
                for entry in self.list("pins/"):
                    if entry.name != name:
                        self.delete(entry.name)  # by a gc

    store = Slow(stores.contents(history.objects))
    with pytest.raises(StoreUnavailableError, match="marker 1:3 is no longer pinned: gc or unpin ran at the same time"):
        pin(store, job, marker)
    assert not list(store.list("pins/"))
