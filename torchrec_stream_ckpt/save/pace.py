"""Choose how often to drain and to cut, from the measured cost of drains and markers.

``drain_every="auto"``: a drain sends about half a ring. Drains are less frequent while little has changed, or while so
much changes that every drain sends most rows again. There is no drain while the log lags.

``max_overhead``: training earns a fraction of its own time as credit, and drains and markers spend it. A marker is
affordable when the cost of markers has been earned beforehand; any further cost becomes a debt. So the fraction of time
spent is bounded whatever the costs are, and markers are as frequent as the bound allows. CheckFreq (Mohan et al., FAST
2021) profiles once and keeps an interval within such a bound. Here the account is updated at every step, so it follows
a changing load. Drains get at most half of the credit, because they make no marker by themselves.

Each rank has its own account. A marker is cut when all ranks can afford it (``Cadence``), so the slowest rank decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

from torchrec_stream_ckpt.ranks.vote_interval import MOST_STEPS, NEVER

LONGEST_INTERVAL = 64
"""Maximum number of steps between two drains."""
_LITTLE, _MUCH = 1 / 8, 1 / 2
"""Fractions of the ring: a drain that sends less than the first is too early, more than the second too late."""
_MOST_ROWS = 1 / 2
"""Fraction of changed rows above which the next drain would send most of them again."""
_DRAINS_SHARE = 1 / 2
_STEPS_ON_AVERAGE = 32
_LEAST_SHARE = 1 / 10
"""Fraction of the bound that markers get at least, even if step boundaries alone take nearly all of it or more."""


class DrainInterval:
    """Drain interval for ``drain_every="auto"``, on one rank."""

    def __init__(self) -> None:
        self.steps = 1
        """Steps from one drain to the next."""
        self._since = 0

    def due(self, ring_used: float) -> bool:
        """(once per step) Return whether to drain now.

        False while the log lags; rows that stay marked are then sent once, later.

        Args:
            ring_used: Fraction of the ring that frames occupy now; above 1 if a marker uses extra memory.
        """
        self._since += 1
        return self._since >= self.steps and ring_used <= _MUCH

    def drained(self, ring_filled: float, rows_changed: float) -> None:
        """Record the result of a drain.

        Args:
            ring_filled: Bytes that it has sent, as a fraction of the ring.
            rows_changed: Fraction of all rows that had changed, whether they fit or not.
        """
        self._since = 0
        if ring_filled < _LITTLE or rows_changed > _MOST_ROWS:
            self.steps = min(2 * self.steps, LONGEST_INTERVAL)
        elif ring_filled > _MUCH:
            self.steps = max(self.steps // 2, 1)


class Account:
    """Account for ``max_overhead``, on one rank. The first marker opens it; the sweep before is not counted.

    The account counts the time of the training thread in step boundaries. The fixed cost of a boundary is paid first;
    if it exceeds the credit of one step, as with a vote, the following steps pay the rest. Drains and markers get what
    remains, at least a tenth of the bound, because no interval could reduce the fixed cost. The time to mark rows
    during an update is not counted.

    Args:
        bound: Time that may be spent, as a fraction of the time that training takes by itself.
        clock: Clock in seconds.
    """

    def __init__(self, bound: float, clock: Callable[[], float] = time.perf_counter) -> None:
        self._bound = bound
        self._clock = clock
        self._open = False
        self._training_since = self._boundary_since = clock()
        self._timed_s = self._earned_s = 0.0
        """Seconds timed within the last step boundary, and seconds earned at it."""
        self._credit_s = self._drains_credit_s = 0.0
        self._marker_s = 0.0
        """Seconds that the last marker has cost; grows while it is in progress."""
        self._marker_before_s = 0.0
        self._drain_s = 0.0
        """Seconds that the last drain has cost."""
        self._unpaid_s = 0.0
        """Seconds of fixed boundary cost that later steps must pay: a boundary with a vote costs more than others."""
        self._left_s = 0.0
        """Seconds that a step leaves for markers, as a moving average."""
        self.spent_s = self.training_s = 0.0
        """Seconds counted so far."""

    def step(self, saved_s: float, began_s: float | None = None) -> None:
        """Begin a step boundary. Time since the last call that this library did not use counts as training.

        Args:
            saved_s: Seconds that hooks have spent since then to save rows of a marker before updates.
            began_s: Begin of the boundary, by the clock; None for now.
        """
        now = self._clock() if began_s is None else began_s
        if self._open:
            self._earn(now - self._training_since - saved_s)
            self._spend_on_marker(saved_s)
        self._training_since = self._boundary_since = now
        self._timed_s = 0.0

    def stepped(self) -> None:
        """End a step boundary, and spend the time that it took in addition to drains and markers."""
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
        # Credit is capped while no marker can be cut: a burst of markers would noticeably exceed the bound.
        self._credit_s = min(self._credit_s + earned, 2 * self._marker_s)
        self._drains_credit_s = min(self._drains_credit_s + _DRAINS_SHARE * earned, 2 * self._drain_s)

    def _spend(self, spent_s: float) -> None:
        self.spent_s += spent_s
        self._credit_s -= spent_s

    def _spend_on_marker(self, spent_s: float) -> None:
        if self._open:  # false for the rest of a marker that the user requested
            self._spend(spent_s)
            self._marker_s += spent_s

    @contextmanager
    def cut(self) -> Iterator[None]:
        """Time the cut of a marker."""
        self._open = True
        self._marker_before_s, self._marker_s = self._marker_s, 0.0
        with self.going_on():
            yield

    @contextmanager
    def going_on(self) -> Iterator[None]:
        """Time the sending of further rows of the last marker."""
        with self._timed(self._spend_on_marker):
            yield

    @contextmanager
    def drain(self) -> Iterator[None]:
        """Time a drain."""
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
        """Exclude a wait that the user requested: it is neither training nor spent."""
        with self._timed(lambda _: None):
            yield

    def marker_affordable(self) -> bool:
        """Return whether training has earned the cost of all markers so far and of the next one.

        The estimate for the next marker is the cheaper of the last two, so that one slow marker is not paid twice.
        """
        return self._credit_s >= min(self._marker_s, self._marker_before_s)

    def steps_to_marker(self) -> int:
        """Estimate the steps until the next marker is affordable, from recent steps; 0 if it is affordable now."""
        if self.marker_affordable():
            return 0
        missing_s = min(self._marker_s, self._marker_before_s) - self._credit_s
        return max(1, int(min(missing_s / self._left_s, NEVER))) if self._left_s > 0 else NEVER

    @property
    def drain_affordable(self) -> bool:
        return not self._open or self._drains_credit_s >= self._drain_s


class Pace:
    """Drain interval and account of one rank; with neither, drains are at every multiple of ``drain_every`` steps.

    Args:
        drain_every: Number of steps, or ``"auto"``.
        max_overhead: See :class:`Account`; None for no bound.
        clock: Clock in seconds.
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
        """Begin a step boundary. Call this before anything else at the boundary.

        Args:
            saved_s: Seconds that hooks have spent so far to save rows of markers.
            began_s: Begin of the boundary, by the clock; None for now.
        """
        if self.account is not None:
            # Hooks that were attached again count from zero.
            self.account.step(saved_s - self._saved_s if saved_s >= self._saved_s else saved_s, began_s)
        self._saved_s = saved_s

    def stepped(self) -> None:
        """End a step boundary. Call this after everything else at the boundary."""
        if self.account is not None:
            self.account.stepped()

    def drain_due(self, step: int, ring_used: float) -> bool:
        """(once per step) Return whether to drain at this boundary; ``ring_used`` as in :meth:`DrainInterval.due`."""
        due = self._interval.due(ring_used) if self._every == "auto" else step % self._every == 0
        return due and (self.account is None or self.account.drain_affordable)

    def drained(self, ring_filled: float, rows_changed: float) -> None:
        """Record the result of a drain; see :meth:`DrainInterval.drained`."""
        self._interval.drained(ring_filled, rows_changed)

    def draining(self) -> AbstractContextManager[None]:
        return self.account.drain() if self.account is not None else nullcontext()

    def cutting(self) -> AbstractContextManager[None]:
        return self.account.cut() if self.account is not None else nullcontext()

    def going_on(self) -> AbstractContextManager[None]:
        return self.account.going_on() if self.account is not None else nullcontext()

    def waiting(self) -> AbstractContextManager[None]:
        return self.account.waiting() if self.account is not None else nullcontext()
