"""Reading and writing the control partition: the lineage as of now, claims, commits."""

from __future__ import annotations

import threading
import time

from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    FencedError,
    LogUnavailableError,
    MarkerFailedError,
)
from torchrec_stream_ckpt.format.control import Claim, Commit, parse_control
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Log

_RETRY_S = 0.5


class Control:
    """The folded control partition of one log, read forward as it grows."""

    def __init__(self, log: Log) -> None:
        self._log = log
        self._lineage = Lineage()
        self._last = -1

    def refresh(self) -> Lineage:
        """Everything that the control partition says now."""
        for offset, record in self._log.read_control(max(self._last, 0)):
            if offset > self._last:
                self._lineage.apply(parse_control(record, offset))
                self._last = offset
        return self._lineage

    def claim(self, claim: Claim) -> None:
        """Open a generation.

        Raises:
            FencedError: somebody else was first.
        """
        self._log.append_control(claim.to_frame())
        winner = self.refresh().claims.get(claim.generation)
        if winner is None or winner.nonce != claim.nonce:
            raise FencedError(
                f"another trainer claimed generation {claim.generation} of this job at the same time",
                hint="only one trainer may run a job; stop one, or give it another URI",
                generation=claim.generation,
            )

    def commit(self, commit: Commit, timeout_s: float, abandoned: threading.Event) -> None:
        """Make a marker exist, and be sure of it.

        Raises:
            FencedError: a higher generation has been claimed.
            MarkerFailedError: the log takes nothing, and the marker is surely not there.
            CommitUnknownError: it was sent, and nobody answered until the time was up.
        """
        deadline = time.monotonic() + timeout_s
        sent = False
        while True:
            try:
                self._check_fence(commit)
                if commit.id in self._lineage.commits:
                    return
                self._log.append_control(commit.to_frame())
            except (CommitUnknownError, LogUnavailableError) as error:
                sent = sent or isinstance(error, CommitUnknownError)
                if time.monotonic() > deadline or abandoned.is_set():
                    raise self._gave_up(commit, sent, error) from error
                abandoned.wait(_RETRY_S)

    def _check_fence(self, commit: Commit) -> None:
        lineage = self.refresh()
        owner = lineage.claims[commit.generation]
        if commit.id in lineage.commits and owner.nonce == commit.nonce:
            return
        if lineage.newest_generation != commit.generation:
            raise FencedError(
                f"generation {lineage.newest_generation} has taken over this job",
                hint="another trainer restored it: stop this one",
                generation=commit.generation,
                marker=commit.marker,
            )

    @staticmethod
    def _gave_up(commit: Commit, sent: bool, error: Exception) -> CommitUnknownError | MarkerFailedError:
        kind = CommitUnknownError if sent else MarkerFailedError
        said = "nobody answered whether it arrived" if sent else "the log cannot be reached"
        return kind(
            f"COMMIT: {said} ({getattr(error, 'headline', error)})",
            hint="stream-ckpt list tells, once the log answers again",
            generation=commit.generation,
            marker=commit.marker,
        )
