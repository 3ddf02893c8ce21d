"""Scrub a store while a materializer waits, a piece at a time, so that folding is not delayed.

:class:`Allowance` limits how fast a reader may read, in bytes per second, on average and at any moment.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Generator

from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.maintain.scrub.scrubber import Scrubber


class Allowance:
    """Rate limit that decides when a reader may continue. Used by one thread.

    Args:
        bytes_per_s: Bytes that may be read per second. None for no limit.
        saved_s: Seconds of unused allowance that may be used later.
        clock: Returns seconds.
    """

    def __init__(
        self, bytes_per_s: float | None, saved_s: float = 0.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._bytes_per_s = bytes_per_s
        self._saved_s = saved_s
        self._clock = clock
        self._free_s = clock()
        """Time at which the allowance covers everything that was read."""

    def spend(self, num_bytes: int) -> None:
        """Account for bytes that were read."""
        if self._bytes_per_s is not None:
            self._free_s = max(self._free_s, self._clock() - self._saved_s) + num_bytes / self._bytes_per_s

    @property
    def wait_s(self) -> float:
        """Seconds until more may be read."""
        return max(0.0, self._free_s - self._clock())


REST_S = 3600.0
"""Minimum seconds between the beginnings of two passes, so that a small store is not listed again and again."""
REST_AFTER_TROUBLE_S = (1.0, 60.0)
"""Seconds of rest after a store or a log did not answer: the first time, and at most after several times."""
SAVED_S = 10.0
"""Seconds of unused allowance, at most, that are saved while the materializer folds."""


class BackgroundScrub:
    """Scrubs whenever the calling thread gives it time. Used by that thread alone.

    Args:
        scrubber: Reads and repairs.
        bytes_per_s: Bytes that it may read per second.
        passed: Called when a pass has read everything.
        trouble: Called when a store or a log does not answer. The scrub tries again the next time.
    """

    def __init__(
        self,
        scrubber: Scrubber,
        bytes_per_s: float,
        passed: Callable[[Scrubber], None] = lambda _: None,
        trouble: Callable[[StreamCkptError], None] = lambda _: None,
    ) -> None:
        self.scrubber = scrubber
        self._allowance = Allowance(bytes_per_s, SAVED_S)
        self._passed = passed
        self._trouble = trouble
        self._pieces: Generator[int] | None = None
        self._rest_s, self._rests_until = 0.0, 0.0

    def use(self, seconds: float, stop: threading.Event) -> None:
        """Scrub for ``seconds``, or until ``stop``. Waits while nothing may be read."""
        until = time.monotonic() + seconds
        try:
            while not stop.is_set() and time.monotonic() < until and self._is_due():
                if wait_s := self._allowance.wait_s:
                    stop.wait(min(wait_s, until - time.monotonic()))
                else:
                    self._read()
        except StreamCkptError as error:
            self._pieces = None  # the next one continues at the saved place
            self._rest_s = min(max(REST_AFTER_TROUBLE_S[0], 2 * self._rest_s), REST_AFTER_TROUBLE_S[1])
            self._rests_until = time.monotonic() + self._rest_s
            self._trouble(error)
        stop.wait(max(0.0, until - time.monotonic()))

    def close(self) -> None:
        """Save the place of the scrub, and end its threads' reads."""
        if self._pieces is not None:
            self._pieces.close()
            with contextlib.suppress(StreamCkptError):  # a few seconds of reading are repeated then
                self.scrubber.kept.save()

    def _is_due(self) -> bool:
        """Return whether there is something to read now."""
        if time.monotonic() < self._rests_until:
            return False
        place = self.scrubber.place
        return self._pieces is not None or not place.ended or not 0 <= time.time() - place.begun_s < REST_S

    def _read(self) -> None:
        if self._pieces is None:
            self._pieces = self.scrubber.pieces()
        num_bytes = next(self._pieces, None)
        if num_bytes is None:
            self._pieces = None
            self._passed(self.scrubber)
        else:
            self._rest_s = 0.0
            self._allowance.spend(num_bytes)
