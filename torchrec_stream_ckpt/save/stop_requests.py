"""What signals lead to, on all ranks at one step boundary: a marker, and for SIGTERM the end of the loop.

Each rank says in its vote what signals have asked of it (``save/cadence.py``), so all ranks know at the same step.
For SIGUSR1 a marker is cut as those of the cadence are: at the first boundary at which no rank has to wait. For SIGTERM
the boundary waits: for a marker in flight, the rest of the sweep, and the COMMIT, within ``signal_s`` in all.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.ranks.liveness import Roll
from torchrec_stream_ckpt.save.signals import MARK, STOP, Seen, Signals
from torchrec_stream_ckpt.save.stream import Stream
from torchrec_stream_ckpt.util.types import Committed, MarkerId

log = logging.getLogger(__name__)

LEAST_S = 5.0
"""A marker may take so long, however late the ranks have agreed on it."""
_HINT = "Try: a longer grace period of the scheduler, and signal_s with it"


class Stopping:
    """Answers to signals. On the training thread, on all ranks alike.

    Args:
        signals: Of this rank.
        team: All ranks.
        roll: Says how long other ranks may wait for this one.
        peers_s: Other ranks are waited for so much longer than for the log.
    """

    def __init__(self, signals: Signals, team: Team, roll: Roll, peers_s: float) -> None:
        self.signals = signals
        self._team = team
        self._roll = roll
        self._peers_s = peers_s
        self.by = ""
        """The signal after which the job is to end, the same on all ranks; empty: none."""

    def boundary(self, stream: Stream) -> None:
        """(each rank, at each step boundary) Give up on a signal that waits for too long; says why."""
        self.signals.boundary()
        waited_s = self.signals.waited_s(MARK)
        if waited_s <= self.signals.signal_s:
            return
        self.signals.answered(MARK, self.signals.seen())
        log.warning(
            "SIGUSR1 leads to no marker: none could be cut for %.0f s, for %s; send it again then",
            waited_s,
            "a marker is in flight" if stream.coordinator.busy else "the sweep of this or another rank goes on",
        )

    def cut(self, seen: Seen, marker: MarkerId, step: int, future: Future[Committed], *, asked: bool) -> None:
        """(all ranks) A marker was cut: the answer to each SIGUSR1 that had come before.

        Args:
            seen: What had come of signals before the cut.
            marker, step, future: The marker.
            asked: It was cut because a rank has a signal.
        """
        if not self.signals.answered(MARK, seen) and not (asked and self._team.rank == 0):
            return

        def tell(settled: Future[Committed]) -> None:
            if (error := settled.exception()) is None:
                log.info("SIGUSR1 has led to marker %s of step %d", marker, step)
            else:
                log.warning("SIGUSR1 leads to no marker, %s of step %d failed: %s", marker, step, _said(error))

        future.add_done_callback(tell)

    def stop(
        self, stream: Stream, step: int, there: Future[Committed] | None, cut: Callable[[float], Future[Committed]]
    ) -> None:
        """(all ranks) SIGTERM has come to one of them: mark this boundary, wait for the marker, and end the job.

        Args:
            stream: What this rank has open.
            step: Of the boundary.
            there: The marker that was cut at it already; None: none was.
            cut: Cuts one, in time for a moment on the monotonic clock.

        Raises:
            FencedError: on all ranks: another trainer has taken over.
            RankLostError: another rank does not come.
            CaptureMismatchError: (``paranoid``) as of ``step()``.
        """
        seen, signals = self.signals.seen(), self.signals
        self._roll.bound(signals.signal_s + self._peers_s)
        waited_s = max(self._team.gather(signals.waited_s(STOP)))
        left_s = max(LEAST_S, signals.signal_s - waited_s)
        deadline_s = time.monotonic() + left_s
        self._roll.bound(left_s + self._peers_s)
        future, why = self._begin(stream, there, cut, deadline_s)
        if future is not None:
            why = _outcome(future, deadline_s)
        self.by = STOP.name
        for number in (STOP, MARK):
            signals.answered(number, seen)
        if future is not None and not why:
            log.log(
                logging.INFO if self._team.rank else logging.WARNING,
                "SIGTERM has led to marker %s of step %d; the job is to stop",
                future.result().id,
                step,
            )
            return
        log.warning(
            "SIGTERM leads to no marker of step %d, %.0f s after this boundary knew of it: %s. The job is to stop; the "
            "newest marker is the one before%s",
            step,
            waited_s + left_s - max(0.0, deadline_s - time.monotonic()),
            why,
            f". {_HINT}" if time.monotonic() >= deadline_s else "",
        )

    def _begin(
        self,
        stream: Stream,
        there: Future[Committed] | None,
        cut: Callable[[float], Future[Committed]],
        deadline_s: float,
    ) -> tuple[Future[Committed] | None, str]:
        """(all ranks) The marker of this boundary; None, and why not, where one that was cut earlier takes too long."""
        stream.cuts.complete(deadline_s)
        settled = stream.coordinator.settle(max(0.0, deadline_s - time.monotonic()))
        if stream.coordinator.fenced is not None or stream.coordinator.lost is not None:
            there = None
        is_there = there is not None and settled and there.exception() is None
        fenced = stream.coordinator.fenced is not None
        said = self._team.gather((settled, is_there, fenced))
        if any(each for *_, each in said):
            raise stream.fenced()
        if all(each for _, each, _ in said):
            return there, ""
        if slow := [str(rank) for rank, (each, *_) in enumerate(said) if not each]:
            return None, f"a marker is still in flight on rank {', '.join(slow)}"
        return cut(deadline_s), ""

    def close(self) -> None:
        """No step boundary comes any more."""
        if not self.by and (names := self.signals.names):
            log.warning("%s came after the last step boundary: no marker was cut for it", names)


def _outcome(future: Future[Committed], deadline_s: float) -> str:
    """Why a marker is not committed at a moment on the monotonic clock; empty: it is."""
    try:
        error = future.exception(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return "it is not committed yet"
    return _said(error) if error is not None else ""


def _said(error: BaseException) -> str:
    return error.headline if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"
