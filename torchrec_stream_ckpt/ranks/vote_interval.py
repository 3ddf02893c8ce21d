"""Number of steps that the ranks train from one vote to the next.

A vote costs each rank a fraction of a millisecond. So each rank states in it for how long it needs no other vote, and
the next vote comes once the first rank needs it. Messages of a rank meanwhile wait for that vote: for about
``LATEST_S``, measured at the pace since the last vote, and for ``MOST_STEPS`` steps at most, whatever the pace becomes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

LATEST_S = 1.0
"""Longest time between two votes, approximately, if votes come without a request."""
MOST_STEPS = 32
"""Most steps between two votes."""
NEVER = 2**62
"""No vote until a cut, or until something is due."""


class Spacing:
    """The vote interval of one rank. It is a proposal: the least of all proposals determines the next vote.

    Args:
        alone: True if there is no other rank: a vote costs nothing, and comes at every step.
        clock: Clock in seconds.
    """

    def __init__(self, *, alone: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._alone = alone
        self._clock = clock
        self._voted: tuple[int, float] | None = None
        """Step and time of the last vote."""
        self._step_s = LATEST_S
        self._polls = 1

    def voting(self, step: int) -> None:
        """(at each vote, first) Measure the pace since the last one."""
        now = self._clock()
        if self._voted is not None and step > self._voted[0]:
            self._step_s = max(1e-6, (now - self._voted[1]) / (step - self._voted[0]))
        self._voted = step, now

    @property
    def longest(self) -> int:
        """Most steps until the next vote."""
        return 1 if self._alone else max(1, min(MOST_STEPS, int(LATEST_S / self._step_s)))

    def steps_in(self, seconds: float) -> int:
        """Return the steps that end before ``seconds`` have passed, at the pace since the last vote. At least 1."""
        return max(1, int(min(seconds / self._step_s, NEVER)))

    def is_last_before(self, seconds: float, most_s: float) -> bool:
        """Return whether no step ends before ``seconds`` have passed, at the pace since the last vote.

        Args:
            seconds: The time from now on.
            most_s: Longest time for which that pace counts: one slow step says little about the next one.
        """
        return seconds <= min(self._step_s, most_s)

    def poll(self) -> int:
        """Return 1, 2, 4...

        steps from one vote to the next, up to the longest: something may have changed at any moment.
        """
        steps = min(self._polls, self.longest)
        self._polls = 2 * steps
        return steps

    def restart(self) -> None:
        """Poll from 1 again."""
        self._polls = 1
