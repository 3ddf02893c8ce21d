"""Call a user's callback for committed markers on a separate thread; a slow or failing callback fails no marker."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from torchrec_stream_ckpt.errors import MarkerFailedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.record import Meta
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.util.signal_safe import SafeCondition
from torchrec_stream_ckpt.util.types import MarkerReport

log = logging.getLogger(__name__)

OnCommit = Callable[[MarkerReport], object]

MOST_WAITING = 64
"""Maximum number of markers that wait for the callback.

At this number no marker is cut, so memory is bounded and the callback gets every marker.
"""


class Announcer:
    """(rank 0) Calls the user's callback, marker by marker.

    Args:
        on_commit: The user's callback. None if the user gave no callback.
    """

    def __init__(self, on_commit: OnCommit | None) -> None:
        self._on_commit = on_commit
        self._worker = Worker("stream-ckpt-on-commit") if on_commit is not None else None
        self._waiting = 0
        self._changed = SafeCondition()
        self._before: Commit | None = None
        """Newest marker that was reported, to calculate the rows and bytes of the next one."""

    @property
    def is_behind(self) -> bool:
        """True if no marker may be cut until the callback returns."""
        return self._waiting >= MOST_WAITING

    def committed(self, commit: Commit) -> None:
        """(outcome thread) Report a committed marker."""
        if self._worker is None:
            return
        before, self._before = self._before, commit
        if before is not None and before.generation != commit.generation:
            before = None
        self._tell(_report(commit, before, commit.meta or ()))

    def noted(self, commit: Commit, before: Commit | None, meta: Meta) -> None:
        """(training thread) Report metadata that was added to a marker; ``meta`` is all of its metadata."""
        self._tell(_report(commit, before, meta))

    def _tell(self, report: MarkerReport) -> None:
        if self._worker is None:
            return
        with self._changed:
            self._waiting += 1
        self._worker.submit(self._call, report)

    def _call(self, report: MarkerReport) -> None:
        assert self._on_commit is not None
        try:
            self._on_commit(report)
        except Exception:  # the callback is the user's code, and not part of the marker
            log.exception("on_commit raised for marker %s, which stays committed; training continues", report.id)
        finally:
            with self._changed:
                self._waiting -= 1
                self._changed.notify_all()

    def make_room(self, timeout_s: float) -> None:
        """(training thread) Wait until a marker may be cut.

        Raises:
            MarkerFailedError: the callback did not return in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self.is_behind, timeout_s):
                raise MarkerFailedError(
                    f"on_commit has not returned for {timeout_s:.0f} s, and {self._waiting} markers wait for it",
                    hint="set a timeout for each call that on_commit makes",
                )

    def close(self, timeout_s: float) -> None:
        """Wait up to ``timeout_s`` for the callback to get all committed markers; log how many it did not finish."""
        if self._worker is None:
            return
        deadline = time.monotonic() + timeout_s
        with self._changed:
            self._changed.wait_for(lambda: not self._waiting, max(0.0, deadline - time.monotonic()))
            left = self._waiting
        self._worker.close()
        if left:
            log.warning("closed before on_commit returned for %d committed markers", left)


def _report(commit: Commit, before: Commit | None, meta: Meta) -> MarkerReport:
    return MarkerReport(
        commit.generation,
        commit.marker,
        commit.step,
        commit.time_s,
        dict(meta),
        commit.rows - (before.rows if before is not None else 0),
        commit.num_bytes - (before.num_bytes if before is not None else 0),
        commit.dense_bytes,
    )
