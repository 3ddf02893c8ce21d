"""How often drains and markers come, on a clock that is set by hand."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from tests.parts import EventTime
from tests.sampled import sampled
from torchrec_stream_ckpt.ranks.vote_interval import LATEST_S, MOST_STEPS, NEVER, Spacing
from torchrec_stream_ckpt.save.pace import LONGEST_INTERVAL, Account, DrainInterval, Pace


@dataclass
class Load:
    """What things cost now, in seconds."""

    step_s: float
    drain_s: float
    cut_s: float
    """Of a cut, at its step boundary."""
    more_s: float = 0.0
    """At each of the next two boundaries, because the ring was full."""
    saving_s: float = 0.0
    """In front of the updates in between."""
    fixed_s: float = 0.0
    """Of every step boundary, whatever else it does: the vote."""


@dataclass
class Run:
    """A job of one rank whose steps cost what ``load`` says; decided as ``StreamCheckpointer.step`` does it."""

    pace: Pace = field(init=False)
    bound: float = 0.01
    drain_every: int = 1
    now_s: float = 0.0
    spent_s: float = 0.0
    training_s: float = 0.0
    markers: int = 0
    saved_s: float = 0.0
    steps: int = 0
    spaced: bool = False
    """The ranks vote only when a marker may be affordable, as the account foresees it."""
    next_vote: int = 0
    votes: int = 0

    def __post_init__(self) -> None:
        self.pace = Pace(self.drain_every, self.bound, lambda: self.now_s)

    @property
    def account(self) -> Account:
        assert self.pace.account is not None
        return self.pace.account

    def _spend(self, taken_s: float) -> None:
        self.now_s += taken_s
        self.spent_s += taken_s

    def run(self, load: Load, seconds: float) -> Run:
        """Train so long; the counts are those of this stretch."""
        self.markers, self.spent_s, self.training_s = 0, 0.0, 0.0
        end, still_open = self.now_s + seconds, 0
        while self.now_s < end:
            affordable = self._vote() and not still_open
            self.steps += 1
            self.now_s += load.step_s
            self.training_s += load.step_s
            if still_open:
                self._spend(load.saving_s)
                self.saved_s += load.saving_s
            self.pace.step(self.saved_s)
            if affordable:
                self.markers, still_open = self.markers + 1, 2 if load.more_s else 0
                with self.pace.cutting():
                    self._spend(load.cut_s)
            elif still_open:
                still_open -= 1
                with self.pace.going_on():
                    self._spend(load.more_s)
            elif self.pace.drain_due(self.steps, 0.0):
                with self.pace.draining():
                    self._spend(load.drain_s)
            self._spend(load.fixed_s)
            self.pace.stepped()
        return self

    def _vote(self) -> bool:
        """At the end of a step: whether a marker is cut at the end of the next one."""
        if self.spaced and self.steps < self.next_vote:
            return False
        self.votes += 1
        to_go = self.account.steps_to_marker()
        self.next_vote = self.steps + max(1, min(to_go, MOST_STEPS))
        return to_go == 0

    @property
    def overhead(self) -> float:
        return self.spent_s / self.training_s


CHEAP = Load(step_s=0.1, drain_s=0.001, cut_s=0.01)
SHORT_STEPS = Load(step_s=0.004, drain_s=0.001, cut_s=0.01)
DEAR = Load(step_s=0.1, drain_s=0.02, cut_s=0.3, more_s=0.05, saving_s=0.03)


@pytest.mark.parametrize("bound", [0.002, 0.01, 0.05])
def test_the_bound_holds_in_every_stretch_of_a_load_that_changes(bound: float) -> None:
    run = Run(bound=bound)
    for load in (CHEAP, SHORT_STEPS, DEAR, CHEAP, DEAR, SHORT_STEPS):
        run.run(load, sampled(2000, 400) if load is SHORT_STEPS else 2000)  # 100,000 steps in each
        # A stretch may begin with the debt of one marker that cost what nobody had expected.
        assert run.spent_s <= bound * run.training_s + 0.6
        assert run.markers > 0
    assert run.account.spent_s <= bound * run.account.training_s + 0.6


def test_markers_come_as_often_as_the_bound_allows() -> None:
    run = Run(bound=0.05, drain_every=1000)  # hardly any drains: all that is earned goes into markers
    run.run(CHEAP, 100)  # what markers cost is found out
    run.run(CHEAP, 1000)
    assert run.overhead == pytest.approx(0.05, rel=0.05)
    assert run.markers == pytest.approx(0.05 * run.training_s / CHEAP.cut_s, rel=0.1)


@pytest.mark.parametrize(("bound", "part"), [(0.01, 1 / 3), (0.05, 3 / 4)])  # of 0.05, a marker in about four steps
def test_votes_that_come_only_when_a_marker_may_be_affordable_cost_hardly_a_marker(bound: float, part: float) -> None:
    """Most votes are spared, the bound holds, and markers come nearly as often as with a vote at every step."""
    each, some = Run(bound=bound), Run(bound=bound, spaced=True)
    for load in (CHEAP, DEAR, CHEAP):
        for run in (each, some):
            run.run(load, sampled(2000, 1000))
        assert some.markers >= 0.9 * each.markers
        assert some.spent_s <= bound * some.training_s + 0.6
    assert some.votes < part * each.votes


def test_a_boundary_counts_from_where_the_call_of_the_user_begins_to_where_it_ends() -> None:
    run = Run(bound=0.05)
    run.run(CHEAP, 10)
    account = run.account
    spent_s, training_s = account.spent_s, account.training_s
    began_s = run.now_s = run.now_s + 0.1
    run.now_s += 0.02
    run.pace.step(run.saved_s, began_s)
    run.now_s += 0.03
    run.pace.stepped()
    assert account.spent_s - spent_s == pytest.approx(0.05)
    assert account.training_s - training_s == pytest.approx(0.1)


def test_a_boundary_that_is_dear_now_and_then_is_paid_over_the_steps_that_follow() -> None:
    run = Run(bound=0.01)
    plain, voting = Load(0.03, 0.001, 0.02, fixed_s=0.0001), Load(0.03, 0.001, 0.02, fixed_s=0.001)
    for _ in range(3000):
        run.run(plain, 0.26)
        run.run(voting, 0.02)
    account = run.account
    assert account.spent_s <= 0.0102 * account.training_s


def test_what_is_cheap_enough_comes_at_every_step() -> None:
    run = Run(bound=0.5, drain_every=1000)
    run.run(CHEAP, 100)
    steps = run.training_s / CHEAP.step_s
    assert run.markers > 0.9 * steps


def test_drains_leave_half_of_the_time_to_markers() -> None:
    run = Run(bound=0.01)
    run.run(DEAR, 2000)
    run.run(DEAR, sampled(20000, 10000))
    cost_s = DEAR.cut_s + 2 * (DEAR.more_s + DEAR.saving_s)
    assert run.overhead <= 0.0101
    assert run.markers >= 0.45 * 0.01 * run.training_s / cost_s


def test_a_marker_that_was_slow_by_chance_is_paid_once() -> None:
    run = Run(bound=0.05, drain_every=10**6)
    run.run(CHEAP, 100)
    run.run(Load(step_s=0.1, drain_s=0.001, cut_s=2.0), 0.3)  # one marker
    assert run.markers == 1
    owed_s = 2.0 / 0.05
    run.run(CHEAP, owed_s - 5)
    assert run.markers == 0
    run.run(CHEAP, 10)
    assert run.markers > 5


def test_time_that_no_marker_could_use_is_not_saved_up() -> None:
    run = Run(bound=0.05, drain_every=10**6)
    run.run(CHEAP, 100)
    run.now_s += 10_000  # an evaluation, or a log that was down
    run.run(CHEAP, 2)
    assert run.markers <= 2 + 2 * 0.05 / CHEAP.cut_s


def test_nothing_is_counted_before_the_first_marker() -> None:
    run = Run(bound=0.05)
    run.pace.step(0.0)
    for section in (run.pace.going_on(), run.pace.draining()):
        with section:
            run.now_s += 100
    assert run.account.marker_affordable()
    assert run.account.spent_s == 0


def test_waiting_for_a_marker_by_hand_is_neither_training_nor_spent() -> None:
    run = Run(bound=0.05, drain_every=10**6)
    run.run(CHEAP, 10)
    trained_s, spent_s = run.account.training_s, run.account.spent_s
    with run.pace.waiting():
        run.now_s += 1000
    run.pace.step(run.saved_s)
    assert run.account.spent_s == spent_s
    assert run.account.training_s - trained_s < 1


# drain_every


def test_drains_by_steps_need_no_measuring() -> None:
    pace = Pace(3, None)
    assert [step for step in range(1, 10) if pace.drain_due(step, 1.0)] == [3, 6, 9]


def test_little_that_changed_makes_drains_rarer_and_much_makes_them_denser() -> None:
    interval = DrainInterval()
    for _ in range(10):
        interval.drained(ring_filled=0.01, rows_changed=0.001)
    assert interval.steps == LONGEST_INTERVAL
    for _ in range(10):
        interval.drained(ring_filled=1.0, rows_changed=0.1)
    assert interval.steps == 1
    interval.drained(ring_filled=0.3, rows_changed=0.1)
    assert interval.steps == 1


def test_where_most_rows_change_anyway_drains_become_rarer() -> None:
    interval = DrainInterval()
    interval.drained(ring_filled=1.0, rows_changed=0.9)
    assert interval.steps == 2


def test_nothing_is_drained_while_the_log_is_behind() -> None:
    interval = DrainInterval()
    assert not interval.due(ring_used=0.8)
    assert not interval.due(ring_used=3.0)  # a marker's frames, on top of the ring
    assert interval.due(ring_used=0.2)


def test_drains_settle_at_about_half_a_ring() -> None:
    interval, since, filled = DrainInterval(), 0, []
    for _ in range(300):
        since += 1
        if interval.due(0.0):
            filled.append(since * 0.03)  # each step changes 3% of a ring
            interval.drained(since * 0.03, 0.01)
            since = 0
    assert all(1 / 8 <= share <= 1 / 2 for share in filled[5:])


@pytest.mark.parametrize("fixed_s", [0.0, 0.0003, 0.0008])
def test_the_vote_of_every_step_is_paid_first(fixed_s: float) -> None:
    job = Run().run(Load(0.1, 0.002, 0.02, fixed_s=fixed_s), 1000.0)
    assert job.overhead == pytest.approx(0.01, rel=0.05)
    assert job.markers > 0


def test_a_vote_that_takes_all_of_the_bound_leaves_a_tenth_of_it_to_markers() -> None:
    job = Run().run(Load(0.1, 0.002, 0.02, fixed_s=0.003), 1000.0)
    assert job.overhead == pytest.approx(0.03 + 0.001, rel=0.05)
    assert job.markers > 10


# How far apart votes are, as each rank proposes it.


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
