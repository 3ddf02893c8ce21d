"""Reading and writing the control partition: the lineage as of now, claims, commits, trims."""

from __future__ import annotations

import logging
import threading
import time
from pathlib import Path

from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    FencedError,
    LogUnavailableError,
    MarkerFailedError,
)
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import Claim, Commit, ControlRecord, Serve, Trim, parse_control
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.mac import CommitKey
from torchrec_stream_ckpt.log.api import Log

log = logging.getLogger(__name__)

_RETRY_S = 0.5


class Control:
    """The folded control partition of one log, read forward as it grows.

    Args:
        log_: The log.
        key_file: The commit key: with it, records are signed, and only records that it vouches for count.
        serving: Take a serving stream, too: its rows are lossy.
    """

    def __init__(self, log_: Log, key_file: Path | str | None = None, *, serving: bool = False) -> None:
        self._log = log_
        self._serving = serving
        self._key = CommitKey.load(key_file) if key_file is not None else None
        self._lineage = Lineage()
        self._last = -1
        self._lock = threading.Lock()

    @property
    def signs(self) -> bool:
        """Whether there is a commit key."""
        return self._key is not None

    @property
    def lineage(self) -> Lineage:
        """The control partition as it was when somebody last read it here."""
        return self._lineage

    def refresh(self) -> Lineage:
        """Everything that the control partition says now. Safe to call from several threads.

        Raises:
            CorruptionError: a record is damaged.
            ConfigError: there are records, and the commit key vouches for none of them.
        """
        with self._lock:
            self._read_on()
        if self._lineage.unsigned and not self._lineage.claims:
            raise ConfigError(
                f"this log has {self._lineage.unsigned} control records, and none is signed with this commit key",
                hint="give the key that the job began with; a job that began without one goes on without one",
            )
        return self._lineage

    def _read_on(self) -> None:
        for offset, record in self._log.read_control(max(self._last, 0), garbage=self.signs):
            if offset > self._last:
                parsed = self._accept(record, offset)
                if parsed is not None:
                    self._lineage.apply(parsed)
                self._last = offset

    def _accept(self, record: bytes, offset: int) -> ControlRecord | None:
        """The record, or None if there is a key that does not vouch for it."""
        if self._key is None:
            return parse_control(record, offset, serving=self._serving)
        try:
            parsed, why = parse_control(record, offset, serving=True), "it is not signed with the commit key"
        except CorruptionError as error:
            parsed, why = None, error.headline
        if parsed is not None and not isinstance(parsed, Serve) and self._key.vouches_for(parsed):
            return parsed
        level = logging.DEBUG if self._lineage.unsigned else logging.WARNING
        log.log(level, "the control record at offset %d is ignored: %s", offset, why)
        self._lineage.disregard(_generation_of(record))
        return None

    def claim(self, claim: Claim) -> None:
        """Open a generation.

        Raises:
            FencedError: somebody else was first.
        """
        failpoint("claim.append")
        self._log.append_control((self._key.sign(claim) if self._key else claim).to_frame(), garbage=self.signs)
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
        frame = (self._key.sign(commit) if self._key else commit).to_frame()
        sent, failure = False, "it was appended and does not count"
        while True:
            try:
                if self._is_there(commit):
                    return
                failpoint("commit.append")
                self._log.append_control(frame, garbage=self.signs)
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

    def trim(self, trim: Trim) -> None:
        """Say for all readers and trainers what may be gone from here on; behind this call it may be deleted.

        Raises:
            LogUnavailableError: it is not there.
            CommitUnknownError: nobody knows.
            CorruptionError: it is there and does not count.
        """
        failpoint("trim.append")
        self._log.append_control((self._key.sign(trim) if self._key else trim).to_frame(), garbage=self.signs)
        failpoint("trim.appended")
        if all(each.nonce != trim.nonce for each in self.refresh().trims):
            raise CorruptionError("the TRIM was appended and does not count", marker=trim.id)

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


def _generation_of(record: bytes) -> int:
    """What the header says, 0 if it is none."""
    try:
        return parse_header(record).generation
    except CorruptionError:
        return 0
