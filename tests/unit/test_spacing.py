"""How far apart votes are, as each rank proposes it."""

from __future__ import annotations

import pytest

from torchrec_stream_ckpt.ranks.vote_interval import LATEST_S, MOST_STEPS, NEVER, Spacing
from torchrec_stream_ckpt.save.event_time import EventTime


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def paced(step_s: float, *, alone: bool = False) -> Spacing:
    """After two votes, five steps apart."""
    clock = Clock()
    spacing = Spacing(alone=alone, clock=clock)
    spacing.voting(10)
    clock.now_s += 5 * step_s
    spacing.voting(15)
    return spacing


@pytest.mark.parametrize(
    ("step_s", "longest"), [(0.0, MOST_STEPS), (0.001, MOST_STEPS), (0.1, LATEST_S / 0.1), (0.9, 1), (20.0, 1)]
)
def test_a_rank_is_heard_after_a_second_or_32_steps(step_s: float, longest: int) -> None:
    assert paced(step_s).longest == longest


def test_votes_come_closer_where_steps_become_slow() -> None:
    clock = Clock()
    spacing, step, spans = Spacing(alone=False, clock=clock), 0, []
    for step_s in (0.01, 0.01, 0.19, 0.19, 0.01, 0.01):
        spacing.voting(step)
        spans.append(spacing.longest)
        step += spans[-1]
        clock.now_s += spans[-1] * step_s
    assert spans == [1, MOST_STEPS, MOST_STEPS, 5, 5, MOST_STEPS]


def test_the_first_vote_after_an_unknown_pace_is_at_the_next_step() -> None:
    assert Spacing(alone=False).longest == 1


def test_a_single_rank_votes_at_every_step() -> None:
    spacing = paced(0.001, alone=True)
    assert (spacing.longest, [spacing.poll() for _ in range(3)]) == (1, [1, 1, 1])


def test_what_may_come_at_any_moment_is_asked_for_less_and_less_often() -> None:
    spacing = paced(0.05)
    assert [spacing.poll() for _ in range(7)] == [1, 2, 4, 8, 16, 20, 20]
    spacing.restart()
    assert spacing.poll() == 1


def test_seconds_are_steps_at_the_last_pace_and_none_too_many() -> None:
    spacing = paced(0.1)
    assert [spacing.steps_in(seconds) for seconds in (0.01, 0.1001, 0.55, 1e30)] == [1, 1, 5, NEVER]


@pytest.mark.parametrize("step_s", [0.003, 0.007, 0.025, 0.04])
def test_a_marker_by_seconds_is_cut_at_the_first_boundary_after_them(step_s: float) -> None:
    """A vote at each boundary is read at the next one."""
    clock, every_s = Clock(), 0.5
    spacing, step, cuts, wanted, last_s = Spacing(alone=True, clock=clock), 0, [], False, clock.now_s
    while len(cuts) < 20:
        if wanted:
            cuts.append(clock.now_s - last_s)
            last_s = clock.now_s
        spacing.voting(step)
        wanted = spacing.is_last_before(every_s - (clock.now_s - last_s), 0.1 * every_s)
        step, clock.now_s = step + 1, clock.now_s + step_s
    assert all(every_s - 1e-6 <= each <= every_s + step_s + 1e-6 for each in cuts)


def test_a_step_that_was_slow_makes_no_marker_early() -> None:
    spacing = paced(60.0)
    assert [spacing.is_last_before(seconds, 3.0) for seconds in (30.0, 3.1, 2.9, 0.0, -1.0)] == [
        False,
        False,
        *[True] * 3,
    ]


def test_event_time_is_steps_at_the_pace_of_the_watermark() -> None:
    rank = EventTime(100.0)
    assert rank.steps_to_go(1) == 1  # nobody has said the time
    rank.stand_on(1000.0)
    rank.reach(1001.0)
    assert rank.steps_to_go(1) == 1  # the pace is not known
    rank.reach(1011.0)
    assert rank.steps_to_go(6) == 44  # 2 s a step, 89 s to go
    assert rank.steps_to_go(8) == NEVER  # the watermark stands still
    rank.reach(1100.0)
    assert rank.steps_to_go(9) == 1
