"""Reading and writing the control partition: the lineage as of now, claims, commits, trims."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count, takewhile
from pathlib import Path
from typing import TypeVar

from crc32c import crc32c

from torchrec_stream_ckpt.control.copies import RECENT, Copies
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    FencedError,
    LogUnavailableError,
    MarkerFailedError,
    PrunedError,
)
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.commits import Place
from torchrec_stream_ckpt.format.control import Claim, Commit, ControlRecord, Serve, Trim, parse_control
from torchrec_stream_ckpt.format.folding import Folded, fold, is_snapshot
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.mac import CommitKey
from torchrec_stream_ckpt.format.packed_commit import PackedCommit, read_record
from torchrec_stream_ckpt.format.snapshot import Snapshot
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)

T = TypeVar("T")

_RETRY_S = 0.5
_ATTEMPTS = 5
"""To read what is left, while somebody deletes more of it."""
_HINT = (
    "bring the control log back from a copy; or move it aside, and let it be put back from its second copy: "
    "stream-ckpt recover URI --store URL; where the log's rows are gone, too, into a new log: "
    "stream-ckpt recover NEW_URI --store URL"
)
_READ_BACK_S = 10.0
_CRC_BITS = 32


class Control:
    """The folded control partition of one log, read forward as it grows.

    Args:
        log_: The log.
        key_file: The commit key: with it, records are signed, and only records that it vouches for count.
        serving: Take a serving stream, too: its rows are lossy.
        copies: Where the records are kept a second time, and the URI of the log; None: nowhere.
        spare: Hold in memory only the newest COMMIT of each generation, and read the others again when they are needed.
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
        self._serving = serving
        self._key = CommitKey.load(key_file) if key_file is not None else None
        self._folded = Folded()
        self._last = -1
        self._next = 0
        """Where reading goes on: behind the last record."""
        self._lock = threading.Lock()
        self.copies = self._copies(*copies) if copies is not None else None

    @property
    def signs(self) -> bool:
        """Whether there is a commit key."""
        return self._key is not None

    @property
    def lineage(self) -> Lineage:
        """The control partition as it was when somebody last read it here."""
        return self._folded.lineage

    @property
    def last(self) -> int:
        """Offset of what was read last; -1 where nothing was."""
        return self._last

    def refresh(self) -> Lineage:
        """Everything that the control partition says now. Safe to call from several threads.

        Raises:
            CorruptionError: a record is damaged; nothing else says which markers exist.
            ConfigError: there are records, and the commit key vouches for none of them.
        """
        with self._lock:
            try:
                self._read_on()
            except CorruptionError as error:
                raise type(error)(error.message, hint=error.hint or _HINT, **error.where) from None
        lineage = self.lineage
        if lineage.unsigned and not lineage.claims:
            raise ConfigError(
                f"this log has {lineage.unsigned} control records, and none is signed with this commit key",
                hint="give the key that the job began with; a job that began without one goes on without one",
            )
        return lineage

    def _read_on(self) -> None:
        if self._last < 0:
            self._begin()
            return
        try:
            for offset, record in self._log.read_control(self._next, garbage=self.signs):
                if offset > self._last:
                    counts = not is_snapshot(record) and self._apply(self._folded, offset, record, spare=self._spare)
                    self._passed(offset, record)
                    if self.copies is not None:
                        self.copies.heard(offset, record, counts=counts, snapshot=is_snapshot(record))
        except PrunedError:  # what this one had not read is gone, and a snapshot says it
            self._begin()

    def _reread(self, start: int) -> Iterator[tuple[int, bytes]]:
        return self._log.read_control(start, garbage=self.signs)

    def _copies(self, objects: Objects, uri: str) -> Copies:
        return Copies(objects, uri, self._log.incarnation, self._reread, self.fold_again)

    def check_copy(self) -> None:
        """(rank 0) See whether the second copy knows of records that the control partition has no longer.

        Raises:
            CorruptionError: it does: the tail of the control partition was lost.
            StoreUnavailableError: the store does not answer.
        """
        if (lost := self.lost_tail()) is not None:
            raise lost

    def lost_tail(self, copies: tuple[Objects, str] | None = None) -> CorruptionError | None:
        """What the second copy knows that the control partition has no longer; None for nothing.

        Args:
            copies: Where it is, and the URI of the log; None: where this one keeps it.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        kept = self._copies(*copies) if copies is not None else self.copies
        lineage = self.refresh()
        if kept is None or not lineage.claims or not (beyond := kept.beyond(lineage.job, self._last)):
            return None
        lineage = self.refresh()  # a trainer may have appended and copied them since
        genuine = (self.genuine(each, lineage.job) for each in beyond)
        lost = [record for record in genuine if record is not None and not lineage.knows(record)]
        if not lost:
            return None
        markers = [record.id for record in lost if isinstance(record, Commit)]
        there = lineage.newest.id if lineage.newest is not None else "no marker"
        newer = f"{len(markers)} of them markers, up to {markers[-1]}" if markers else "none of them of a marker"
        return CorruptionError(
            f"the log has lost the end of its control partition: it ends at {there}, and the second copy has "
            f"{len(lost)} newer records, {newer}",
            hint=f"put them back: stream-ckpt recover {kept.uri} --store {kept.url}"
            + (" --commit-key-file FILE" if self.signs else ""),
        )

    def genuine(self, record: bytes, job: bytes | None = None) -> ControlRecord | None:
        """A record as it was copied, unless it is damaged, of another job, or the key does not vouch for it."""
        try:
            parsed = parse_control(record, serving=True)
        except CorruptionError:
            return None
        genuine = self._key is None or self._key.vouches_for(parsed)
        return parsed if genuine and job in (None, parsed.job) else None

    def close(self, timeout_s: float = 5.0) -> None:
        """Let the second copy take what it lacks, for so long."""
        if self.copies is not None:
            self.copies.close(timeout_s)

    def _copy(self) -> None:
        if self.copies is not None:
            self.copies.later()

    def _passed(self, offset: int, record: bytes) -> None:
        self._last, self._next = offset, self._log.control_next(offset, record)

    def _begin(self) -> None:
        """Read all that is left, from the newest snapshot on."""
        self._last, last = -1, (-1, b"")
        recent: deque[tuple[int, bytes]] = deque(maxlen=RECENT)
        start, before = 0, -1

        def read(base: int) -> Folded:
            def noted() -> Iterator[tuple[int, bytes]]:
                nonlocal last, start, before
                recent.clear()
                start, before = base, base - 1
                for each in self._log.read_control(base, garbage=self.signs):
                    last = each
                    if not is_snapshot(each[1]):
                        before = recent[0][0] if len(recent) == RECENT else before
                        recent.append(each)
                    yield each

            return self._fold(noted(), base, spare=self._spare)

        folded = self._whole(read)
        folded.lineage.commits.fetch = self._fetch  # before another thread sees it
        self._folded = folded
        if last[0] >= 0:
            self._passed(*last)
        if self.copies is not None:
            self.copies.begin(start, before)
            for offset, record in recent:
                self.copies.heard(offset, record, counts=self._counts(record))

    def _counts(self, record: bytes) -> bool:
        parsed = self.genuine(record)
        return parsed is not None and self.lineage.knows(parsed)

    def _whole(self, read: Callable[[int], T]) -> T:
        """What ``read`` makes of the partition from its base on, while others may delete more of it."""
        for attempt in count(1):
            try:
                return read(self._log.control_base())
            except PrunedError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError

    def _fold(self, records: Iterable[tuple[int, bytes]], base: int, *, spare: bool = False) -> Folded:
        apply = partial(self._apply, spare=spare)
        return fold(records, base, apply, self.snapshot_part, serving=self._serving)

    def _fetch(self, places: Mapping[MarkerId, Place]) -> dict[MarkerId, bytes]:
        """The COMMITs that stand there.

        Raises:
            MarkerNotFoundError: one was given up since, and what it stood in is gone.
            CorruptionError: another record stands there now.
            LogUnavailableError: the log does not answer.
        """
        wanted = {place >> _CRC_BITS: marker for marker, place in places.items()}
        last, found = max(wanted), dict[MarkerId, bytes]()
        with suppress(PrunedError):  # what was deleted is in a snapshot
            for offset, record in self._log.read_control(min(wanted), garbage=self.signs):
                if offset in wanted and _place(offset, crc32c(record)) == places[wanted[offset]]:
                    found[wanted[offset]] = record
                if offset >= last:
                    break
        missing = places.keys() - found.keys()
        return found | self._fetch_anew({marker: places[marker] for marker in missing}) if missing else found

    def _fetch_anew(self, places: Mapping[MarkerId, Place]) -> dict[MarkerId, bytes]:
        """The same, from whatever says it now."""
        lineage = self.fold_again().lineage
        found = {}
        for marker, place in places.items():
            if marker in lineage.given_up:
                lineage.find(marker)  # since this one read on
            frame = lineage.commits[marker].to_frame() if marker in lineage.commits else b""
            if _place(place >> _CRC_BITS, crc32c(frame)) != place:
                raise CorruptionError(
                    "the control partition holds another COMMIT of a marker than was read from it, or none",
                    hint=_HINT,
                    marker=marker,
                    control_offset=place >> _CRC_BITS,
                )
            found[marker] = frame
        return found

    def fold_again(self, upto: int | None = None) -> Folded:
        """The control partition read anew, as far as the record at offset ``upto``; this one stays as it is."""

        def read(base: int) -> Folded:
            records = self._log.read_control(base, garbage=self.signs)
            return self._fold(takewhile(lambda each: upto is None or each[0] <= upto, records), base)

        return self._whole(read)

    def raw(self) -> list[tuple[int, bytes]]:
        """(offset, record) of all that is left."""
        return self._whole(lambda base: list(self._log.read_control(base, garbage=self.signs)))

    def append_snapshot(self, part: Snapshot) -> None:
        """Append one part of a snapshot; raises as :meth:`Log.append_control`."""
        self._log.append_control((self._key.sign(part) if self._key else part).to_frame(), garbage=self.signs)

    def _apply(self, folded: Folded, offset: int, record: bytes, *, spare: bool) -> bool:
        """Fold one record; whether it counts."""
        lineage, crc = folded.lineage, crc32c(record)
        parsed, stale = self._accept(lineage, record, offset), lineage.stale
        if parsed is not None:
            lineage.apply(parsed, _place(offset, crc) if spare and isinstance(parsed, PackedCommit) else None)
        folded.upto, folded.crc = offset, crc
        return parsed is not None and lineage.stale == stale

    def _accept(self, lineage: Lineage, record: bytes, offset: int) -> ControlRecord | PackedCommit | None:
        """The record, or None if there is a key that does not vouch for it."""
        if self._key is None:
            return read_record(record, offset, serving=self._serving)
        try:
            parsed, why = read_record(record, offset, serving=True), "it is not signed with the commit key"
        except CorruptionError as error:
            parsed, why = None, error.headline
        if parsed is not None and not isinstance(parsed, Serve) and self._key.vouches_for(parsed):
            return parsed
        level = logging.DEBUG if lineage.unsigned else logging.WARNING
        log.log(level, "the control record at offset %d is ignored: %s", offset, why)
        lineage.disregard(_generation_of(record))
        return None

    def snapshot_part(self, record: bytes) -> Snapshot | None:
        """A part of a snapshot of this very log, if it is whole and there is no key, or one that vouches for it."""
        try:
            part = parse_control(record)
        except CorruptionError as error:
            log.warning("a part of a control snapshot is passed over: %s", error.headline)
            return None
        if not isinstance(part, Snapshot) or (self._key is not None and not self._key.vouches_for(part)):
            return None
        now = self._log.incarnation()
        return part if now is not None and part.incarnation == now.id else None

    def append(self, record: Claim) -> None:
        """Append a record of another log: with its signature, or with a new one if it has lost it."""
        sign = self._key is not None and not record.mac
        self._log.append_control(
            (self._key.sign(record) if self._key and sign else record).to_frame(), garbage=self.signs
        )

    def claim(self, claim: Claim) -> None:
        """Open a generation.

        Raises:
            FencedError: somebody else was first.
        """
        failpoint("claim.append")
        frame = (self._key.sign(claim) if self._key else claim).to_frame()
        offset = self._log.append_control(frame, garbage=self.signs)
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
        """As ``refresh``, that record included: a broker that is cut off from its peers does not know of it."""
        deadline = time.monotonic() + _READ_BACK_S
        while True:
            lineage = self.refresh()
            if self._last >= offset:
                return lineage
            if time.monotonic() > deadline:
                raise LogUnavailableError(
                    f"the log took a CLAIM at offset {offset}, and shows its records only up to {self._last}",
                    hint="see whether a broker is cut off from the others; then try again",
                )
            time.sleep(0.2)

    def commit(self, commit: Commit, timeout_s: float, abandoned: threading.Event) -> None:
        """Make a marker exist, and be sure of it.

        Raises:
            FencedError: a higher generation has been claimed.
            MarkerFailedError: the log takes nothing, and the marker is surely not there.
            CommitUnknownError: it was sent, and nobody answered until the time was up.
        """
        deadline = time.monotonic() + timeout_s
        frame = (self._key.sign(commit) if self._key else commit).to_frame()
        sent, unanswered, failure = False, "", "it was appended and does not count"
        while True:
            try:
                if self._is_there(commit):
                    self._copy()
                    return
                failpoint("commit.append")
                self._log.append_control(frame, garbage=self.signs)
                failpoint("commit.appended")
                sent = True
                if self._is_there(commit):
                    self._copy()
                    return
            except CommitUnknownError as error:
                sent, unanswered = True, error.headline
            except LogUnavailableError as error:
                failure = error.headline
            if time.monotonic() > deadline or abandoned.wait(_RETRY_S):
                raise self._gave_up(commit, sent, unanswered or failure)

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
        reach = self.refresh().reach
        if any(reach.get(each.generation, each) < each or each.generation not in reach for each in trim.markers):
            raise CorruptionError("the TRIM was appended and does not count", marker=trim.id)
        self._copy()

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


def _place(offset: int, crc: int) -> Place:
    """Where a COMMIT stands, and which one it is."""
    return offset << _CRC_BITS | crc


def _generation_of(record: bytes) -> int:
    """What the header says, 0 if it is none."""
    try:
        return parse_header(record).generation
    except CorruptionError:
        return 0
