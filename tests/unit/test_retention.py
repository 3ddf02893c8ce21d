"""What a retention keeps: never less than it must, and never again what it gave up."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.parts import Retention
from tests.sampled import sampled
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.maintain.gc.retention import Candidate, Decision
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import parse_duration

HOUR = 3600.0

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
