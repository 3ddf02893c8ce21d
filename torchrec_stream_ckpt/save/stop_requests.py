"""Respond to signals on all ranks at one step boundary: with a marker and, for SIGTERM, the end of the loop.

Each rank reports pending signals in its vote (``save/cadence.py``), so all ranks know at the same step. For SIGUSR1, a
marker is cut like those of the cadence, at the first boundary at which no rank has to wait. For SIGTERM, the boundary
waits for a marker in flight, the rest of the sweep, and the COMMIT, within ``signal_s`` in total.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from concurrent.futures import Future

from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.ranks.liveness import Liveness
from torchrec_stream_ckpt.save.signals import MARK, STOP, Seen, Signals
from torchrec_stream_ckpt.save.stream import Stream
from torchrec_stream_ckpt.util.types import Committed, MarkerId

log = logging.getLogger(__name__)

LEAST_S = 5.0
"""Seconds that a marker may take at least, however late the ranks have agreed on it."""
_HINT = "Try: set a longer grace period in the scheduler, and raise signal_s with it"


class Stopping:
    """Responds to signals. Runs on the training thread of all ranks.

    Args:
        signals: Signals of this rank.
        team: All ranks.
        roll: Tells other ranks how long they may wait for this one.
        peers_s: Seconds that a wait for other ranks is longer than one for the log.
    """

    def __init__(self, signals: Signals, team: Team, roll: Liveness, peers_s: float) -> None:
        self.signals = signals
        self._team = team
        self._roll = roll
        self._peers_s = peers_s
        self.by = ""
        """Signal after which the job must end, the same on all ranks. Empty before such a signal."""

    def boundary(self, stream: Stream) -> None:
        """(each rank, at each step boundary) Give up on a signal that has waited for too long, and log the reason."""
        self.signals.boundary()
        waited_s = self.signals.waited_s(MARK)
        if waited_s <= self.signals.signal_s:
            return
        self.signals.answered(MARK, self.signals.seen())
        log.warning(
            "SIGUSR1 produced no marker: none could be cut for %.0f s because %s; send it again later",
            waited_s,
            "a marker is in flight" if stream.coordinator.busy else "the sweep of this or another rank is not done",
        )

    def cut(self, seen: Seen, marker: MarkerId, step: int, future: Future[Committed], *, asked: bool) -> None:
        """(all ranks) Record that a marker was cut, which answers each earlier SIGUSR1.

        Args:
            seen: Number of signals of each kind before the cut.
            marker, step, future: The marker.
            asked: Whether it was cut because a rank has a signal.
        """
        if not self.signals.answered(MARK, seen) and not (asked and self._team.rank == 0):
            return

        def tell(settled: Future[Committed]) -> None:
            if (error := settled.exception()) is None:
                log.info("SIGUSR1 produced marker %s of step %d", marker, step)
            else:
                log.warning("SIGUSR1 produced no marker: %s of step %d failed: %s", marker, step, _said(error))

        future.add_done_callback(tell)

    def stop(
        self, stream: Stream, step: int, there: Future[Committed] | None, cut: Callable[[float], Future[Committed]]
    ) -> None:
        """(all ranks) Respond to a SIGTERM on any rank: mark this boundary, wait for the marker, and end the job.

        Args:
            stream: The open stream of this rank.
            step: Step of the boundary.
            there: The marker that was already cut at this boundary. None if no marker was cut.
            cut: Cuts a marker; its argument is a deadline on the monotonic clock.

        Raises:
            FencedError: (on all ranks) another trainer has taken over.
            RankLostError: another rank does not respond.
            CaptureMismatchError: (``paranoid``) as in ``step()``.
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
                "SIGTERM produced marker %s of step %d; the job should stop",
                future.result().id,
                step,
            )
            return
        log.warning(
            "SIGTERM produced no marker of step %d, %.0f s after this step boundary saw it: %s. The job should "
            "stop; the newest marker is the previous one%s",
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
        """(all ranks) Return the marker of this boundary, or None and the reason if an earlier one takes too long."""
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
        """Log signals that arrived after the last step boundary."""
        if not self.by and (names := self.signals.names):
            log.warning("%s arrived after the last step boundary: no marker was cut for it", names)


def _outcome(future: Future[Committed], deadline_s: float) -> str:
    """Return why a marker is not committed by a deadline on the monotonic clock; empty if it is committed."""
    try:
        error = future.exception(max(0.0, deadline_s - time.monotonic()))
    except TimeoutError:
        return "it is not committed yet"
    return _said(error) if error is not None else ""


def _said(error: BaseException) -> str:
    return error.headline if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"
