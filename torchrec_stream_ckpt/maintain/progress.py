"""Progress and counts of a materializer's work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """Counts of a materializer's work since it started. Bytes count as they are read or written, markers when whole."""

    markers: int = 0
    frames_bytes: int = 0
    segment_bytes: int = 0
    fold_bytes_read: int = 0
    fold_bytes: int = 0
    dense_bytes: int = 0
    proofs: int = 0
    """Markers whose proofs were compared with the store."""
    proof_bytes: int = 0
    """Bytes of rows read to compare proofs."""
    repairs: int = 0
    """Damaged objects of the store that were repaired."""


class Progress:
    """Progress written by the parts of one materializer, and read by any thread.

    Args:
        going_on: Called repeatedly. Ends the work at that point by raising.
    """

    def __init__(self, going_on: Callable[[], None] = lambda: None) -> None:
        self.going_on = going_on
        self.counts = Counts()
        self.doing = "starting"
        """Description of the current work, for people."""

    def count_frames(self, num_bytes: int) -> None:
        """Count bytes of the log that were folded."""
        self.counts.frames_bytes += num_bytes
        self.going_on()

    def tell(self, num_bytes: int) -> None:
        """Note that a task in this process has read bytes. They are counted when the task is done."""
        self.going_on()

    def count_proved(self, num_bytes: int) -> None:
        """Count bytes of the store that were read to compare them with a proof."""
        self.counts.proof_bytes += num_bytes
        self.going_on()

    def count_merged(self, num_bytes: int) -> None:
        """Count bytes of the store that were read for a fold."""
        self.counts.fold_bytes_read += num_bytes
        self.going_on()
