"""The seal of a cut: the training thread has put its last row into the ring, and the commit thread waits for that."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CommitUnknownError, StreamCkptError
from torchrec_stream_ckpt.signal_safe import SafeEvent


@dataclass(frozen=True, slots=True)
class Sealed:
    """A MARK that was submitted after all rows of its cut."""

    mark_seq: int
    """Seq of this rank's MARK."""
    rows: int
    """Row records that this rank has submitted up to it."""
    num_bytes: int
    """Bytes of frames that this rank has submitted up to it."""


class Seal:
    """This rank's part of one cut: sealed or given up, whichever comes first; never both. Safe on any thread."""

    def __init__(self) -> None:
        self._decided = SafeEvent()
        self._lock = threading.Lock()
        self._sealed: Sealed | None = None
        self._reason = ""

    def close(self, sealed: Sealed) -> bool:
        """Seal the cut: its MARK is in the ring. Returns False if it was given up before."""
        with self._lock:
            if not self._decided.is_set():
                self._sealed = sealed
                self._decided.set()
            return self._sealed is not None

    def fail(self, reason: str) -> bool:
        """Give the cut up, unless it has been sealed; returns whether it is given up."""
        with self._lock:
            if not self._decided.is_set():
                self._reason = reason
                self._decided.set()
            return self._sealed is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the decision; returns False if none came in time."""
        return self._decided.wait(timeout_s)

    @property
    def sealed(self) -> Sealed | None:
        """The seal; None if the cut is given up or not decided."""
        return self._sealed

    @property
    def failed(self) -> bool:
        return self._decided.is_set() and self._sealed is None

    @property
    def reason(self) -> str:
        """Why the cut was given up; empty if it was not."""
        return self._reason


def unheard(error: Exception, marker: int, generation: int, rank: int) -> CommitUnknownError:
    """Make the error of a marker that was put to COMMIT, where the ranks could not tell each other the outcome.

    Args:
        error: Why they could not.
        marker, generation: The marker.
        rank: This one; rank 0 knows that the marker is committed.
    """
    said = error.message if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"
    if rank == 0:
        what = f"the marker is committed, but the other ranks have not heard of it: {said}"
        hint = "restore() finds it; stream-ckpt list shows it"
    else:
        what = f"a rank was lost while the marker was decided: {said}"
        hint = "stream-ckpt list tells whether it was committed"
    return CommitUnknownError(what, hint=hint, generation=generation, marker=marker, rank=rank)
