"""Keep the outer tier up to date with the inner one until stopped, and wait out outages."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    FencedError,
    LogUnavailableError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.inner import Relay, Tiers
from torchrec_stream_ckpt.util.service import Event, Service, Stopped
from torchrec_stream_ckpt.util.types import MarkerId

FIRST_RETRY_S = 0.5
LAST_RETRY_S = 15.0
FENCE_EVERY_S = 5.0
"""Seconds between two checks of the outer log for a claim of another trainer, if there is nothing to copy."""
_TRANSIENT = (LogUnavailableError, StoreUnavailableError, CommitUnknownError)


class RelayService(Service):
    """A relay that follows its inner log.

    Args:
        tiers: Both logs.
        report: Takes events, on the thread of :meth:`run`.
        last_call: Returns whether no more data will come. The relay then copies what exists, the newest marker in any
            case, and ends.
        linger_s: How long the relay continues after the last call.
    """

    def __init__(
        self,
        tiers: Tiers,
        report: Callable[[Event], None],
        last_call: Callable[[], bool] = lambda: False,
        linger_s: float = 60.0,
    ) -> None:
        super().__init__(report, _TRANSIENT, (FIRST_RETRY_S, LAST_RETRY_S))
        self._tiers = tiers
        self._last_call = last_call
        self._linger_s = linger_s
        self.passed = 0
        """Number of markers that were passed over."""
        self._relay = Relay(tiers, self.going_on, self._pass_over)
        self._deadline: float | None = None
        self._seen: MarkerId | None = None
        self._looked_s = float("-inf")

    def _is_last(self) -> bool:
        if self._deadline is None and self._last_call():
            self._deadline = time.monotonic() + self._linger_s
        return self._deadline is not None

    def going_on(self) -> None:
        super().going_on()
        if self._is_last() and self._deadline is not None and time.monotonic() > self._deadline:
            raise Stopped

    def _wait(self, seconds: float) -> None:
        """Sleep, unless a last call is pending."""
        until = time.monotonic() + seconds
        while time.monotonic() < until and not self._stop.wait(min(0.2, seconds)):
            self.going_on()
            if self._deadline is not None:
                return

    def _round(self, *, once: bool, last: bool) -> None:
        """Copy all that exists now.

        Raises:
            MarkerNotFoundError: (``once``) there is no inner log.
            FencedError: another trainer owns the job; the claim was copied to the inner log.
        """
        if self._tiers.inner.log.incarnation() is None:
            if once:
                raise MarkerNotFoundError("there is no log here", hint="check the URI", uri=self._tiers.inner.uri)
            return
        newest = self._tiers.inner.control.refresh().newest
        now = newest.id if newest is not None else None
        if now == self._seen and not last and time.monotonic() - self._looked_s < FENCE_EVERY_S:
            return
        try:
            self._copy(everything=last)
        except FencedError:
            # A COMMIT has detected it: the next pass copies the other trainer's claim to the inner log.
            self._copy(everything=False)
            raise
        self._seen, self._looked_s = now, time.monotonic()

    def _copy(self, *, everything: bool) -> None:
        begin = time.monotonic()
        for commit in self._relay.catch_up(everything=everything):
            fields = {"marker": str(commit.id), "step": commit.step, "took_s": round(time.monotonic() - begin, 3)}
            self.report(Event("marker", fields | self._totals()))
            begin = time.monotonic()

    def _pass_over(self, commit: Commit, error: StreamCkptError) -> None:
        self.passed += 1
        self.report(Event("passed", {"marker": str(commit.id), "message": error.headline, "hint": error.advice}))

    def _totals(self) -> dict[str, Any]:
        return {"frames_bytes": self._relay.frames_bytes, "dense_bytes": self._relay.dense_bytes}

    def _close(self) -> None:
        self._relay.close()


def state_of(tiers: Tiers) -> dict[str, Any]:
    """Return how far the outer tier lags, for people and programs."""
    state = Relay(tiers).state()
    lag = Relay.lag(state)
    outer = state.outer.newest
    inner = state.unrelayed[-1] if state.unrelayed else None
    return {
        "inner": tiers.inner.uri,
        "outer": tiers.outer.uri,
        "generation": state.generation,
        "fenced": bool(state.inner.claims) and not state.owns(state.generation),
        "inner_newest": str(inner.id) if inner is not None else None,
        "outer_newest": str(outer.id) if outer is not None else None,
        "lag_markers": lag.markers,
        "lag_bytes": lag.num_bytes,
        "lag_s": round(lag.seconds, 3),
        "abandoned": len(state.abandoned),
    }
