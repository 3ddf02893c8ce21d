"""How fast something may read: bytes a second, on average and at any moment."""

from __future__ import annotations

import time
from collections.abc import Callable


class Allowance:
    """Tells a reader when it may read on. Of one thread.

    Args:
        bytes_per_s: How much may be read; None: as much as there is.
        saved_s: What was not read in the last seconds may be read later: how many seconds of it.
        clock: Seconds.
    """

    def __init__(
        self, bytes_per_s: float | None, saved_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._saved_s = saved_s
        self._clock = clock
        self._free_s = clock()
        """When all that was read is paid for."""

    def spend(self, num_bytes: int) -> None:
        """These bytes were read."""
        if self._bytes_per_s is not None:
            self._free_s = max(self._free_s, self._clock() - self._saved_s) + num_bytes / self._bytes_per_s

    @property
    def wait_s(self) -> float:
        """Seconds until something more may be read."""
        return max(0.0, self._free_s - self._clock())
