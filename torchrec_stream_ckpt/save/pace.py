"""How often to drain and to cut, from what drains and markers turn out to cost.

``drain_every="auto"``: a drain sends about half a ring. It comes less often while little has changed, or while so much
changes that every drain sends most rows anew, and not at all while the log lags.

``max_overhead``: a part of the time that training takes by itself is earned, and drains and markers spend it. A marker
is affordable when what markers cost has been earned beforehand; what it costs beyond that is a debt. So the share of
time spent is bounded whatever the costs turn out to be, and markers come as often as that allows. CheckFreq (Mohan et
al., FAST 2021) profiles once and keeps an interval within such a bound; here the account is kept at every step, so it
follows a load that changes. Drains get at most half of what is earned: they make no marker by themselves.

Each rank keeps its own account. A marker is cut where it is affordable to all (``Cadence``): the slowest rank decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from torchrec_stream_ckpt.ranks.vote_interval import MOST_STEPS, NEVER

LONGEST_INTERVAL = 64
"""Steps between two drains at most."""
_LITTLE, _MUCH = 1 / 8, 1 / 2
"""A drain of less than this part of the ring is too early, one of more is late."""
_MOST_ROWS = 1 / 2
"""With more of the rows changed than this, the next drain would send most of them again."""
_DRAINS_SHARE = 1 / 2
_STEPS_ON_AVERAGE = 32
_LEAST_SHARE = 1 / 10
"""Of the bound, what markers get where the boundaries of steps by themselves take nearly all of it, or more."""


class DrainInterval:
    """``drain_every="auto"``, on one rank."""

    def __init__(self) -> None:
        self.steps = 1
        """From one drain to the next."""
        self._since = 0

    def due(self, ring_used: float) -> bool:
        """(once a step) Whether to drain now. Not while the log lags: what is left marked is sent once, later.

        Args:
            ring_used: Part of the ring that frames take now; a marker's may take more than the ring.
        """
        self._since += 1
        return self._since >= self.steps and ring_used <= _MUCH

    def drained(self, ring_filled: float, rows_changed: float) -> None:
        """Note what the drain found.

        Args:
            ring_filled: What it has sent, as a part of the ring.
            rows_changed: Part of all rows that had changed, whether they found space or not.
        """
        self._since = 0
        if ring_filled < _LITTLE or rows_changed > _MOST_ROWS:
            self.steps = min(2 * self.steps, LONGEST_INTERVAL)
        elif ring_filled > _MUCH:
            self.steps = max(self.steps // 2, 1)


class Account:
    """``max_overhead``, on one rank. It is opened by the first marker: the sweep before it is not counted.

    Counted is what step boundaries take of the training thread. What one takes anyway comes first, over the steps that
    follow where it was more than one has earned, as with a vote. Drains and markers get the rest, a tenth of the bound
    at least: no interval could lower the other part. The marks in the update are not counted.

    Args:
        bound: What may be spent, as a part of the time that training takes by itself.
        clock: In seconds.
    """

    def __init__(self, bound: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bound = bound
        self._clock = clock
        self._open = False
        self._training_since = self._boundary_since = clock()
        self._timed_s = self._earned_s = 0.0
        """Of the last step boundary: what was timed within it, and what was earned at it."""
        self._credit_s = self._drains_credit_s = 0.0
        self._marker_s = 0.0
        """What the last marker has cost; that of one in progress grows."""
        self._marker_before_s = 0.0
        self._drain_s = 0.0
        """What the last drain has cost."""
        self._unpaid_s = 0.0
        """Of what boundaries take by themselves, for later steps to pay: one with a vote takes more than the others."""
        self._left_s = 0.0
        """What a step leaves for markers, on average over the last ones."""
        self.spent_s = self.training_s = 0.0
        """What was counted so far."""

    def step(self, saved_s: float, began_s: float | None = None) -> None:
        """A step boundary begins: the time since the last call that was spent on nothing of ours was training.

        Args:
            saved_s: What hooks have spent since then before updates, to save rows of a marker.
            began_s: When it has begun, by the clock; None: now.
        """
        now = self._clock() if began_s is None else began_s
        if self._open:
            self._earn(now - self._training_since - saved_s)
            self._spend_on_marker(saved_s)
        self._training_since = self._boundary_since = now
        self._timed_s = 0.0

    def stepped(self) -> None:
        """The step boundary is over: what it took beside drains and markers is spent."""
        fixed_s = self._clock() - self._boundary_since - self._timed_s
        self._training_since += fixed_s
        if self._open:
            self.spent_s += fixed_s
            owed_s = self._unpaid_s + fixed_s
            payable = min(owed_s, (1 - _LEAST_SHARE) * self._earned_s)
            self._unpaid_s = min(owed_s - payable, MOST_STEPS * self._earned_s)
            self._credit_s -= payable
            self._drains_credit_s -= _DRAINS_SHARE * payable
            self._left_s += (self._earned_s - payable - self._left_s) / _STEPS_ON_AVERAGE

    def _earn(self, training_s: float) -> None:
        self.training_s += training_s
        earned = self._earned_s = self._bound * training_s
        # Not saved up while no marker can be cut: a burst of markers would break the bound where it is felt.
        self._credit_s = min(self._credit_s + earned, 2 * self._marker_s)
        self._drains_credit_s = min(self._drains_credit_s + _DRAINS_SHARE * earned, 2 * self._drain_s)

    def _spend(self, spent_s: float) -> None:
        self.spent_s += spent_s
        self._credit_s -= spent_s

    def _spend_on_marker(self, spent_s: float) -> None:
        if self._open:  # not the rest of a marker that the user asked for
            self._spend(spent_s)
            self._marker_s += spent_s

    @contextmanager
    def cut(self) -> Iterator[None]:
        """A marker is cut."""
        self._open = True
        self._marker_before_s, self._marker_s = self._marker_s, 0.0
        with self.going_on():
            yield

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """More of the last marker is sent."""
        with self._timed(self._spend_on_marker):
            yield

    @contextmanager
    def drain(self) -> Iterator[None]:
        """A drain."""
        with self._timed(self._drained):
            yield

    def _drained(self, spent_s: float) -> None:
        self._drain_s = spent_s
        if self._open:
            self._drains_credit_s -= spent_s
            self._spend(spent_s)

    @contextmanager
    def _timed(self, spend: Callable[[float], None]) -> Iterator[None]:
        begin = self._clock()
        try:
            yield
        finally:
            taken = self._clock() - begin
            self._training_since += taken
            self._timed_s += taken
            spend(taken)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """The user waits by his own will: neither training nor spent."""
        with self._timed(lambda _: None):
            yield

    def marker_affordable(self) -> bool:
        """Return whether training has paid for all markers and for the next one.

        The next one is assumed to cost what the cheaper of the last two did: one slow by chance is not paid twice.
        """
        return self._credit_s >= min(self._marker_s, self._marker_before_s)

    def steps_to_marker(self) -> int:
        """Steps until the next marker is affordable, at what the last ones have left for it; 0: it is now."""
        if self.marker_affordable():
            return 0
        missing_s = min(self._marker_s, self._marker_before_s) - self._credit_s
        return max(1, int(min(missing_s / self._left_s, NEVER))) if self._left_s > 0 else NEVER

    @property
    def drain_affordable(self) -> bool:
        return not self._open or self._drains_credit_s >= self._drain_s


class Pace:
    """Both on one rank; with neither, drains come at every multiple of ``drain_every`` steps.

    Args:
        drain_every: Steps, or ``"auto"``.
        max_overhead: See :class:`Account`; None: no bound.
        clock: In seconds.
    """

    def __init__(
        self,
        drain_every: int | Literal["auto"],
        max_overhead: float | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._every = drain_every
        self._interval = DrainInterval()
        self.account = Account(max_overhead, clock) if max_overhead is not None else None
        self._saved_s = 0.0

    def step(self, saved_s: float, began_s: float | None = None) -> None:
        """(first thing at a step boundary)

        Args:
            saved_s: What hooks have spent so far to save rows of markers.
            began_s: When the boundary has begun, by the clock; None: now.
        """
        if self.account is not None:
            # Hooks that were attached anew count from zero.
            self.account.step(saved_s - self._saved_s if saved_s >= self._saved_s else saved_s, began_s)
        self._saved_s = saved_s

    def stepped(self) -> None:
        """(last thing at a step boundary)"""
        if self.account is not None:
            self.account.stepped()

    def drain_due(self, step: int, ring_used: float) -> bool:
        """(once a step) Whether to drain at this step boundary; ``ring_used`` as in :class:`DrainInterval`."""
        due = self._interval.due(ring_used) if self._every == "auto" else step % self._every == 0
        return due and (self.account is None or self.account.drain_affordable)

    def drained(self, ring_filled: float, rows_changed: float) -> None:
        """See :class:`DrainInterval`."""
        self._interval.drained(ring_filled, rows_changed)

    def draining(self) -> AbstractContextManager[None]:
        return self.account.drain() if self.account is not None else nullcontext()

    def cutting(self) -> AbstractContextManager[None]:
        return self.account.cut() if self.account is not None else nullcontext()

    def going_on(self) -> AbstractContextManager[None]:
        return self.account.going_on() if self.account is not None else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        return self.account.waiting() if self.account is not None else nullcontext()
