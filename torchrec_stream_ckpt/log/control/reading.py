"""Records of a control partition: decide which of them count, fold them into a lineage, and sign new ones."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import count, takewhile
from typing import TypeVar

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, PrunedError
from torchrec_stream_ckpt.format.commits import Place
from torchrec_stream_ckpt.format.control import ControlRecord, Serve, parse_control, parse_if_whole
from torchrec_stream_ckpt.format.folding import Folded, fold
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.mac import CommitKey, Record
from torchrec_stream_ckpt.format.packed_commit import PackedCommit, read_record
from torchrec_stream_ckpt.format.snapshot import Snapshot
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)

T = TypeVar("T")

_ATTEMPTS = 5
"""Attempts to read the remaining records while another process deletes more of them."""
_CRC_BITS = 32


class Records:
    """Records of one control partition, read again at each call. Keeps none in memory.

    Args:
        log_: The log.
        key: Commit key. With it, only records with a valid signature count.
        hint: Hint for errors about a damaged record.
        serving: Whether to accept a serving stream, too.
    """

    def __init__(self, log_: Log, key: CommitKey | None, hint: str, *, serving: bool) -> None:
        self._log = log_
        self._key = key
        self._serving = serving
        self.hint = hint
        self.signs = key is not None
        """True if there is a commit key."""

    def read(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, record) of all records from offset ``start``. With a commit key, yields garbage as well."""
        return self._log.read_control(start, garbage=self.signs)

    def frame_of(self, record: Record) -> bytes:
        """Return the frame of a new record to append, signed if there is a commit key."""
        return (self._key.sign(record) if self._key else record).to_frame()

    def genuine(self, record: bytes, job: bytes | None = None) -> ControlRecord | None:
        """Parse a copied record. Returns None if it is damaged, of another job, or not vouched for by the key."""
        found = parse_if_whole(record)
        if found is None or not (self._key is None or self._key.vouches_for(found)):
            return None
        return found if job in (None, found.job) else None

    def whole(self, read: Callable[[int], T]) -> T:
        """Return the result of ``read`` for the partition from its base on, while others may delete more of it."""
        for attempt in count(1):
            try:
                return read(self._log.control_base())
            except PrunedError:
                if attempt == _ATTEMPTS:
                    raise
        raise AssertionError

    def fold(
        self,
        records: Iterable[tuple[int, bytes]],
        base: int,
        *,
        spare: bool = False,
        applied: Callable[[int, bool], object] = lambda *_: None,
    ) -> Folded:
        """Fold the records from ``base`` on.

        Args:
            records: (offset, record) of each.
            base: Offset of the first remaining record.
            spare: Same as in :class:`Control`.
            applied: Called with the offset of each record that was folded by itself, and whether it counts.
        """

        def apply(folded: Folded, offset: int, record: bytes) -> None:
            applied(offset, self.apply(folded, offset, record, spare=spare))

        return fold(records, base, apply, self.snapshot_part, serving=self._serving)

    def fetch(self, places: Mapping[MarkerId, Place]) -> dict[MarkerId, bytes]:
        """Read the COMMITs at the given places.

        Raises:
            MarkerNotFoundError: a COMMIT was given up since, and the record that contained it was deleted.
            CorruptionError: another record is at its place now.
            LogUnavailableError: the log does not answer.
        """
        wanted = {place >> _CRC_BITS: marker for marker, place in places.items()}
        last, found = max(wanted), dict[MarkerId, bytes]()
        with suppress(PrunedError):  # deleted records are in a snapshot
            for offset, record in self.read(min(wanted)):
                if offset in wanted and place_of(offset, crc32c(record)) == places[wanted[offset]]:
                    found[wanted[offset]] = record
                if offset >= last:
                    break
        missing = places.keys() - found.keys()
        return found | self._fetch_anew({marker: places[marker] for marker in missing}) if missing else found

    def _fetch_anew(self, places: Mapping[MarkerId, Place]) -> dict[MarkerId, bytes]:
        """Return COMMITs as :meth:`fetch`, from the records that contain them now."""
        lineage = self.fold_again().lineage
        found = {}
        for marker, place in places.items():
            if marker in lineage.given_up:
                lineage.find(marker)  # raises: it was given up after this object's last read
            frame = lineage.commits[marker].to_frame() if marker in lineage.commits else b""
            if place_of(place >> _CRC_BITS, crc32c(frame)) != place:
                raise CorruptionError(
                    "the COMMIT of a marker in the control partition was replaced or deleted after it was read",
                    hint=self.hint,
                    marker=marker,
                    control_offset=place >> _CRC_BITS,
                )
            found[marker] = frame
        return found

    def fold_again(self, upto: int | None = None) -> Folded:
        """Read the control partition again, up to the record at offset ``upto``. This object does not change."""

        def read(base: int) -> Folded:
            records = self.read(base)
            return self.fold(takewhile(lambda each: upto is None or each[0] <= upto, records), base)

        return self.whole(read)

    def raw(self) -> list[tuple[int, bytes]]:
        """Return (offset, record) of all remaining records."""
        return self.whole(lambda base: list(self.read(base)))

    def apply(self, folded: Folded, offset: int, record: bytes, *, spare: bool) -> bool:
        """Fold one record. Returns True if it counts."""
        lineage, crc = folded.lineage, crc32c(record)
        parsed, stale = self._accept(lineage, record, offset), lineage.stale
        if parsed is not None:
            lineage.apply(parsed, place_of(offset, crc) if spare and isinstance(parsed, PackedCommit) else None)
        folded.upto, folded.crc = offset, crc
        return parsed is not None and lineage.stale == stale

    def _accept(self, lineage: Lineage, record: bytes, offset: int) -> ControlRecord | PackedCommit | None:
        """Parse a record. Returns None if there is a key that does not vouch for it."""
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
        """Parse a part of a snapshot. Returns None if it is damaged, of another log, or not vouched for by the key."""
        try:
            part = parse_control(record)
        except CorruptionError as error:
            log.warning("a part of a control snapshot is skipped: %s", error.headline)
            return None
        if not isinstance(part, Snapshot) or (self._key is not None and not self._key.vouches_for(part)):
            return None
        now = self._log.incarnation()
        return part if now is not None and part.incarnation == now.id else None


def place_of(offset: int, crc: int) -> Place:
    """Encode the place of a COMMIT, with its checksum as identity."""
    return offset << _CRC_BITS | crc


def _generation_of(record: bytes) -> int:
    """Read the generation in a header. Returns 0 if it is not a header."""
    try:
        return parse_header(record).generation
    except CorruptionError:
        return 0
