"""Wait for new data of a bucket log: one small request for each name that could be next."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection

from torchrec_stream_ckpt.log.bucket.control_objects import ControlObjects
from torchrec_stream_ckpt.log.bucket.objects import of_log
from torchrec_stream_ckpt.util.signal_safe import SafeEvent

PERIOD_S = 0.5
"""Seconds between two probes."""
Ends = dict[int, tuple[int, int]]
"""By partition: the newest generation with rows, and the end of its stream."""


class Probe:
    """Watch of a bucket log. See :class:`Watch`.

    Args:
        control: Its control records.
        newest_ends: Returns the newest generation with rows and the end of its stream, by partition.
    """

    by = "probe"

    def __init__(self, control: ControlObjects, newest_ends: Callable[[Collection[int]], Ends]) -> None:
        self._control = control
        self._newest_ends = newest_ends
        self._next = -1
        """Number of the next control record; -1 before the first wait."""
        self._ends: Ends = {}
        self._woken = SafeEvent()

    def wait(self, timeout_s: float, partitions: Collection[int] = ()) -> bool:
        deadline = time.monotonic() + timeout_s
        while not self._woken.is_set():
            if self._is_new(partitions):
                return True
            left_s = deadline - time.monotonic()
            if left_s <= 0 or self._woken.wait(min(PERIOD_S, left_s)):
                return False
        return False

    def _is_new(self, partitions: Collection[int]) -> bool:
        """Return whether there is anything that the previous call has not seen."""
        with of_log("cannot read the bucket log"):
            following = self._control.number_after(self._next)
            ends = self._newest_ends(partitions) if partitions else {}
        is_new = following != self._next or any(self._ends.get(each) != end for each, end in ends.items())
        self._next, self._ends = following, self._ends | ends
        return is_new

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._woken.set()
