"""Which fused updates run: each one is noted before its kernel, and settled once its rows are marked.

What stops Python between the two (a signal handler that raises, another library's hook, an error in another kernel)
leaves the note there. Its rows may have changed, so the next look at the marks counts them as touched. A note
whose backward has ended is one that was left; the others are of updates that still run, on other threads.

Nothing here takes a lock: each step is one operation on a dict, or one assignment, so that an exception between any
two of them leaves all of it usable.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from torchrec_stream_ckpt.adapter import FusedUpdate, Key, Lookup
from torchrec_stream_ckpt.errors import MarkerFailedError
from torchrec_stream_ckpt.signal_safe import SafeEvent

_PATIENCE_S = 10.0
"""How long updates of other threads may take to end; they take milliseconds."""
_POLL_S = 0.0002
_RECHECK_S = 0.1


class _Hold:
    """Updates do not start while it is there, except on the thread that made it."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.over = SafeEvent()


class RunningUpdates:
    """The updates of all kernels of this rank that have begun and are not settled. For any thread."""

    def __init__(self) -> None:
        self._noted: dict[tuple[int, Key], FusedUpdate] = {}
        self._hold: _Hold | None = None

    def begin(self, position: int, update: FusedUpdate) -> None:
        """An update of the kernel at ``position`` is about to run, on this thread. Waits while updates are held."""
        while True:
            self._noted[position, update.key] = update
            hold = self._hold
            if hold is None or hold.thread == threading.get_ident():
                return
            del self._noted[position, update.key]
            hold.over.wait(_RECHECK_S)

    def settle(self, position: int, key: Key) -> None:
        """The rows of this update are marked."""
        self._noted.pop((position, key), None)

    def __len__(self) -> int:
        """Notes, of updates that run and of those that were left."""
        return len(self._noted)

    def left(self) -> list[tuple[int, Key, Lookup]]:
        """(position of the kernel, key, ids) of updates that have ended and were not settled."""
        if not self._noted:
            return []
        return [
            (position, key, update.lookup)
            for (position, key), update in self._noted.copy().items()
            if not update.running
        ]

    @contextmanager
    def still(self) -> Iterator[None]:
        """No update of another thread runs inside: waits until those that run have ended, and holds new ones.

        Raises:
            MarkerFailedError: one does not end. Nothing was held for longer than that wait.
        """
        outer = self._hold
        self._hold = hold = _Hold()
        try:
            self._wait()
            yield
        finally:
            self._hold = outer
            hold.over.set()

    def let_go(self) -> None:
        """Hold nothing any longer: an exception may have left a hold. Not inside ``still``."""
        hold, self._hold = self._hold, None
        if hold is not None:
            hold.over.set()

    def _wait(self) -> None:
        deadline = time.monotonic() + _PATIENCE_S
        while any(update.running for update in self._noted.copy().values()):
            if time.monotonic() > deadline:
                raise MarkerFailedError(
                    f"a fused update has been running for {_PATIENCE_S:.0f} s: rows cannot be read meanwhile",
                    hint="call step() and mark() outside of a backward; look at what holds that thread",
                )
            time.sleep(_POLL_S)
