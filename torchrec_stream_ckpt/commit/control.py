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
from torchrec_stream_ckpt.failpoints import failpoint
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
        self._lock = threading.Lock()

    def refresh(self) -> Lineage:
        """Everything that the control partition says now. Safe to call from several threads."""
        with self._lock:
            self._read_on()
        return self._lineage

    def _read_on(self) -> None:
        for offset, record in self._log.read_control(max(self._last, 0)):
            if offset > self._last:
                self._lineage.apply(parse_control(record, offset))
                self._last = offset

    def claim(self, claim: Claim) -> None:
        """Open a generation.

        Raises:
            FencedError: somebody else was first.
        """
        failpoint("claim.append")
        self._log.append_control(claim.to_frame())
        failpoint("claim.appended")
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
        sent, failure = False, "it was appended and does not count"
        while True:
            try:
                if self._is_there(commit):
                    return
                failpoint("commit.append")
                self._log.append_control(commit.to_frame())
                failpoint("commit.appended")
                sent = True
                if self._is_there(commit):
                    return
            except CommitUnknownError as error:
                sent, failure = True, error.headline
            except LogUnavailableError as error:
                failure = error.headline
            if time.monotonic() > deadline or abandoned.wait(_RETRY_S):
                raise self._gave_up(commit, sent, failure)

    def _is_there(self, commit: Commit) -> bool:
        """Whether the marker exists, read from the log; raises when it cannot exist any more."""
        lineage = self.refresh()
        if commit.id in lineage.commits and lineage.claims[commit.generation].nonce == commit.nonce:
            return True
        if lineage.newest_generation != commit.generation:
            by_operator = not lineage.claims[lineage.newest_generation].world
            raise FencedError(
                "an operator has ended this trainer"
                if by_operator
                else f"generation {lineage.newest_generation} has taken over this job",
                hint="stop this one; a new job restores the newest marker"
                if by_operator
                else "another trainer restored it: stop this one",
                generation=commit.generation,
                marker=commit.marker,
            )
        return False

    @staticmethod
    def _gave_up(commit: Commit, sent: bool, failure: str) -> CommitUnknownError | MarkerFailedError:
        kind = CommitUnknownError if sent else MarkerFailedError
        said = "nobody answered whether it arrived" if sent else "the log cannot be reached"
        return kind(
            f"COMMIT: {said} ({failure})",
            hint="stream-ckpt list tells, once the log answers again",
            generation=commit.generation,
            marker=commit.marker,
        )
