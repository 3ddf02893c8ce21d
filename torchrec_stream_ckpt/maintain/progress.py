"""What a materializer does now and has done since it started."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True)
class Counts:
    """What a materializer has done since it started. Bytes as read and as written, markers whole."""

    markers: int = 0
    frames_bytes: int = 0
    segment_bytes: int = 0
    fold_bytes_read: int = 0
    fold_bytes: int = 0
    dense_bytes: int = 0
    proofs: int = 0
    """Markers whose proofs were compared with the store."""
    proof_bytes: int = 0
    """Rows that were read for that."""
    repairs: int = 0
    """Damaged objects of the store that were repaired."""


class Progress:
    """Written by the parts of one materializer, read by any thread.

    Args:
        going_on: Called again and again; ends the work where it stands by raising.
    """

    def __init__(self, going_on: Callable[[], None] = lambda: None) -> None:
        self.going_on = going_on
        self.counts = Counts()
        self.doing = "starting"
        """For people."""

    def count_frames(self, num_bytes: int) -> None:
        """Bytes of the log were folded."""
        self.counts.frames_bytes += num_bytes
        self.going_on()

    def tell(self, num_bytes: int) -> None:
        """A task that runs in this process has read bytes, which are counted when it is done."""
        self.going_on()

    def count_proved(self, num_bytes: int) -> None:
        """Bytes of the store were read to compare them with a proof."""
        self.counts.proof_bytes += num_bytes
        self.going_on()

    def count_merged(self, num_bytes: int) -> None:
        """Bytes of the store were read for a fold."""
        self.counts.fold_bytes_read += num_bytes
        self.going_on()
