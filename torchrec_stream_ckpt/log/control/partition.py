"""Reading and writing of the control partition: current lineage, claims, commits, trims."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from pathlib import Path
from shlex import quote
from typing import TypeVar

from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    FencedError,
    LogUnavailableError,
    MarkerFailedError,
    PrunedError,
    located,
)
from torchrec_stream_ckpt.format.control import Claim, Commit, Trim
from torchrec_stream_ckpt.format.end_note import End, Note
from torchrec_stream_ckpt.format.folding import Folded, is_snapshot
from torchrec_stream_ckpt.format.lineage import Lineage, knows
from torchrec_stream_ckpt.format.mac import CommitKey, Record
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.control.copies import RECENT, Copies
from torchrec_stream_ckpt.log.control.reading import Records
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.uris import KafkaUri, LogUri

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.5
_READ_BACK_S = 10.0


class Control:
    """The folded control partition of one log, read forward as it grows.

    Args:
        log_: The log.
        key_file: File with the commit key. With it, records are signed, and only records with a valid signature count.
        serving: Whether to accept a serving stream, too, whose rows are lossy.
        copies: Store of the second copy of the records, and the URI of the log. None if there is no copy.
        spare: Whether to hold in memory only the newest COMMIT of each generation and read the others when needed.
    """

    def __init__(
        self,
        log_: Log,
        key_file: Path | str | None = None,
        *,
        serving: bool = False,
        copies: tuple[Objects, str] | None = None,
        spare: bool = False,
    ) -> None:
        self._log = log_
        self._spare = spare
        key = CommitKey.load(key_file) if key_file is not None else None
        self.records = Records(log_, key, _hint(log_.uri, copies), serving=serving)
        self.signs = key is not None
        """True if there is a commit key."""
        self._folded = Folded()
        self.last = -1
        """Offset of the last record read. -1 if none was."""
        self._next = 0
        """Offset at which to continue reading, after the last record."""
        self._lock = threading.Lock()
        self.copies = self._copies(*copies) if copies is not None else None

    def require_key(self, claims: Iterable[Claim], message: str) -> None:
        """Raise ConfigError with this message if a CLAIM is signed, but there is no key here."""
        if any(claim.mac for claim in claims) and not self.signs:
            raise ConfigError(message, hint="pass the key with --commit-key-file FILE")

    @property
    def lineage(self) -> Lineage:
        """The control partition as of the last read by this object."""
        return self._folded.lineage

    def refresh(self, last: int | None = None) -> Lineage:
        """Read new records and return the current lineage. Safe to call from several threads.

        Args:
            last: Offset of a record. If it is found, none after it is asked for: no later record changes its effect.

        Raises:
            CorruptionError: a record is damaged; nothing else says which markers exist.
            ConfigError: there are records, and the commit key vouches for none of them.
        """
        with self._lock, located(self.records.hint):
            self._read_on(last)
        lineage = self.lineage
        if lineage.unsigned and not lineage.claims:
            raise ConfigError(
                f"none of the {lineage.unsigned} control records of this log is signed with this commit key",
                hint="pass the key that the job began with, or no key if it began without one",
            )
        return lineage

    def _read_on(self, last: int | None) -> None:
        if self.last < 0:
            self._begin()
            return
        try:
            for offset, record in self.records.read(self._next):
                if offset > self.last:
                    counts = not is_snapshot(record) and self.records.apply(
                        self._folded, offset, record, spare=self._spare
                    )
                    self._passed(offset, record)
                    if self.copies is not None:
                        self.copies.heard(offset, record, counts=counts, snapshot=is_snapshot(record))
                if offset == last:
                    break
        except PrunedError:  # unread records were deleted, and a snapshot has them
            self._begin()

    def _copies(self, objects: Objects, uri: str) -> Copies:
        return Copies(objects, uri, self._log.incarnation, self.records.read, self.records.fold_again)

    def check_copy(self) -> None:
        """(rank 0) Check whether the second copy has records that the control partition has lost.

        Raises:
            CorruptionError: it has: the tail of the control partition was lost.
            StoreUnavailableError: the store does not answer.
        """
        if (lost := self.lost_tail()) is not None:
            raise lost

    def lost_tail(self, copies: tuple[Objects, str] | None = None) -> CorruptionError | None:
        """Return an error if the second copy has records that the control partition has lost. Otherwise returns None.

        Args:
            copies: Store of the copy, and the URI of the log. None for this object's own copy.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        kept = self._copies(*copies) if copies is not None else self.copies
        lineage = self.refresh()
        if kept is None or not lineage.claims or not (beyond := kept.beyond(lineage.job, self.last)):
            return None
        lineage = self.refresh()  # a trainer may have appended and copied them since
        genuine = (self.records.genuine(each, lineage.job) for each in beyond)
        lost = [record for record in genuine if record is not None and not knows(lineage, record)]
        if not lost:
            return None
        markers = [record.id for record in lost if isinstance(record, Commit)]
        there = lineage.newest.id if lineage.newest is not None else "no marker"
        newer = f"{len(markers)} of them markers, up to {markers[-1]}" if markers else "none of them a marker"
        return CorruptionError(
            f"the end of the log's control partition was lost: it ends at {there}, but the second copy has "
            f"{len(lost)} newer records, {newer}",
            hint=f"recover them: stream-ckpt recover {quote(kept.uri)} --store {quote(kept.url)}"
            + (" --commit-key-file FILE" if self.signs else ""),
        )

    def copied(self, first: int, last: int) -> list[tuple[int, bytes]]:
        """Return the records of a range of offsets that the second copy has: those that count, without snapshots.

        Raises:
            PrunedError: the control partition was shortened, so it is not known which ones counted.
            CorruptionError: a record is damaged.
        """
        folded, found = Folded(), []
        for offset, record in self.records.read(0):
            if offset > last:
                break
            counts = not is_snapshot(record) and self.records.apply(folded, offset, record, spare=False)
            if counts and offset >= first:
                found.append((offset, record))
        return found

    def close(self, timeout_s: float = 5.0) -> None:
        """Give the second copy at most ``timeout_s`` to complete."""
        if self.copies is not None:
            self.copies.close(timeout_s)

    def _copy(self) -> None:
        if self.copies is not None:
            self.copies.later()

    def _passed(self, offset: int, record: bytes) -> None:
        self.last, self._next = offset, self._log.control_next(offset, record)

    def _begin(self) -> None:
        """Read all remaining records, starting at the newest snapshot."""
        self.last, last = -1, (-1, b"")
        recent: deque[tuple[int, bytes]] = deque(maxlen=RECENT)
        counts: deque[tuple[int, bool]] = deque(maxlen=RECENT)
        start, before, copied = 0, -1, self.copies is not None

        def read(base: int) -> Folded:
            def noted() -> Iterator[tuple[int, bytes]]:
                nonlocal last, start, before
                recent.clear()
                counts.clear()
                start, before = base, base - 1
                for last in self.records.read(base):
                    if copied and not is_snapshot(last[1]):
                        before = recent[0][0] if len(recent) == RECENT else before
                        recent.append(last)
                    yield last

            return self.records.fold(noted(), base, spare=self._spare, applied=lambda *each: counts.append(each))

        folded = self.records.whole(read)
        folded.lineage.commits.fetch = self.records.fetch  # before another thread can see it
        self._folded = folded
        if last[0] >= 0:
            self._passed(*last)
        if self.copies is not None:
            self.copies.begin(start, before)
            known = dict(counts)  # records that a snapshot covers were not folded by themselves
            for offset, record in recent:
                own = known.get(offset)
                self.copies.heard(offset, record, counts=self._counts(record) if own is None else own)

    def _counts(self, record: bytes) -> bool:
        parsed = self.records.genuine(record)
        return parsed is not None and knows(self.lineage, parsed)

    def append(self, record: Record) -> None:
        """Append a record of another log, or a part of a snapshot. If it has no signature, it is signed.

        Raises as :meth:`Log.append_control`.
        """
        self._append(record.to_frame() if record.mac else self.records.frame_of(record))

    def _append(self, frame: bytes) -> int:
        return self._log.append_control(frame, garbage=self.signs)

    def claim(self, claim: Claim) -> None:
        """Open a generation.

        Raises:
            FencedError: another process was first.
        """
        failpoint("claim.append")
        offset = self._append(self.records.frame_of(claim))
        failpoint("claim.appended")
        winner = self._refresh_to(offset).claims.get(claim.generation)
        if winner is None or winner.nonce != claim.nonce:
            raise FencedError(
                f"another trainer claimed generation {claim.generation} of this job at the same time",
                hint="only one trainer may run a job; stop one, or give it another URI",
                generation=claim.generation,
            )
        self._copy()

    def _refresh_to(self, offset: int) -> Lineage:
        """Refresh until the record at ``offset`` is included. A broker that is cut off from its peers lacks it."""
        deadline = time.monotonic() + _READ_BACK_S
        while True:
            lineage = self.refresh(offset)
            if self.last >= offset:
                return lineage
            if time.monotonic() > deadline:
                raise LogUnavailableError(
                    f"the log accepted a CLAIM at offset {offset}, but shows its records only up to {self.last}",
                    hint="check whether a broker is cut off from the others; then try again",
                )
            time.sleep(0.2)

    def commit(self, commit: Commit, timeout_s: float, abandoned: threading.Event) -> None:
        """Make a marker exist, and verify it.

        Raises:
            FencedError: a higher generation has been claimed.
            MarkerFailedError: the log accepts nothing, and the marker certainly does not exist.
            CommitUnknownError: the record was sent, and there was no answer in time.
        """
        deadline = time.monotonic() + timeout_s
        frame = self.records.frame_of(commit)
        sent, unanswered, failure = False, "", "it was appended but has no effect"
        while True:
            try:
                if self._is_there(commit):
                    self._copy()
                    return
                failpoint("commit.append")
                offset = self._append(frame)
                failpoint("commit.appended")
                sent = True
                if self._is_there(commit, offset):
                    self._copy()
                    return
            except CommitUnknownError as error:
                sent, unanswered = True, error.headline
            except LogUnavailableError as error:
                failure = error.headline
            if time.monotonic() > deadline or abandoned.wait(_RETRY_S):
                raise _gave_up(commit, sent, unanswered or failure)

    def end(self, end: End) -> None:
        """Record how a generation ended. Its writer has no marker in flight. Void once a higher generation is claimed.

        Raises:
            LogUnavailableError: the record was not appended.
            CommitUnknownError: it is unknown whether it was appended.
        """
        failpoint("end.append")
        self._append(self.records.frame_of(end))
        failpoint("end.appended")
        self.refresh()
        self._copy()

    def trim(self, trim: Trim) -> None:
        """Announce to all readers and trainers which data may be deleted. It may be deleted after this call.

        Raises:
            LogUnavailableError: the record was not appended.
            CommitUnknownError: it is unknown whether it was appended.
            CorruptionError: it was appended and does not count.
        """
        failpoint("trim.append")
        self._append(self.records.frame_of(trim))
        failpoint("trim.appended")
        reach = self.refresh().trims.reach
        if any(reach.get(each.generation, each) < each or each.generation not in reach for each in trim.markers):
            raise CorruptionError("the TRIM was appended but has no effect", marker=trim.id)
        self._copy()

    def note(self, note: Note, timeout_s: float) -> None:
        """Add metadata to a committed marker, and verify it. A second record with the same metadata changes nothing.

        Raises:
            MarkerNotFoundError: the marker is not committed, or was given up.
            LogUnavailableError: the log accepts nothing, and the record certainly does not exist.
            CommitUnknownError: the record was sent, and there was no answer in time.
        """
        deadline = time.monotonic() + timeout_s
        frame = self.records.frame_of(note)
        while True:
            try:
                self.refresh().find(note.id)
                failpoint("note.append")
                self._append(frame)
                failpoint("note.appended")
                self.refresh()
                self._copy()
                return
            except (CommitUnknownError, LogUnavailableError):
                if time.monotonic() + _RETRY_S > deadline:
                    raise
                time.sleep(_RETRY_S)

    def _is_there(self, commit: Commit, last: int | None = None) -> bool:
        """Return whether the marker exists, read from the log. Raises FencedError if it can no longer be created.

        Args:
            commit: Record of the marker.
            last: Same as in :meth:`refresh`.
        """
        lineage = self.refresh(last)
        if commit.id in lineage.commits and lineage.claims[commit.generation].nonce == commit.nonce:
            return True
        if lineage.newest_generation != commit.generation:
            by_operator = not lineage.claims[lineage.newest_generation].world
            raise FencedError(
                "an operator has ended this trainer"
                if by_operator
                else f"generation {lineage.newest_generation} has taken over this job",
                hint="stop this trainer; a new job restores the newest marker" if by_operator else "",
                generation=commit.generation,
                marker=commit.marker,
            )
        return False


def _gave_up(commit: Commit, sent: bool, failure: str) -> CommitUnknownError | MarkerFailedError:
    kind = CommitUnknownError if sent else MarkerFailedError
    said = "it is unknown whether it arrived" if sent else "the log has not accepted it"
    return kind(
        f"COMMIT: {said} ({failure})",
        hint="run stream-ckpt list once the log answers again",
        generation=commit.generation,
        marker=commit.marker,
    )


def _hint(uri: LogUri, copies: tuple[Objects, str] | None) -> str:
    """Return the hint for a damaged control record."""
    store = (
        quote(copies[0].url)
        if copies is not None
        else f"{quote(str(uri))}, or the store that the job names"
        if not isinstance(uri, KafkaUri)
        else "URL"
    )
    return (
        f"restore the control partition from a copy; or {uri.aside}, and recover it from its second copy: "
        f"stream-ckpt recover {quote(str(uri))} --store {store}; if the log's rows are lost too, recover into a new "
        f"log: stream-ckpt recover NEW_URI --store {store}"
    )
