"""Fold a control partition, starting at its newest snapshot, and make such snapshots.

A snapshot is a pure function of the records up to an offset: every process that folds the same prefix makes the
same bytes. It holds, byte for byte, the records that still have an effect, and the few numbers that are in no record.
"""

from __future__ import annotations

import json
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import ControlRecord, Trim
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind, parse_header
from torchrec_stream_ckpt.format.lineage import Lineage, count_trim
from torchrec_stream_ckpt.format.packed_commit import PackedCommit, read_record
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.format.snapshot import Parts, Snapshot, pack, unpack
from torchrec_stream_ckpt.util.types import MarkerId, grouped

log = logging.getLogger(__name__)

_AHEAD_BYTES = 2**22
"""Limit of records that a reader holds back, because a snapshot may make it unnecessary to fold them."""
_GENERATION = re.compile(r"[0-9]{1,10}")
_SNAPSHOT = bytes([Kind.SNAPSHOT])
"""Header byte of the kind. Most other records are recognized by it without reading the rest."""
_NUMBERS = {"stale", "unsigned", "taken", "given_up"}


@dataclass(slots=True)
class Folded:
    """A control partition folded up to some record."""

    lineage: Lineage = field(default_factory=Lineage)
    upto: int = -1
    """Offset of the last record that was folded."""
    crc: int = 0
    """CRC32C of that record."""


def body_of(lineage: Lineage) -> bytes:
    """Encode a lineage as the body of a snapshot: a line of JSON, then frames, one after the other."""
    given_up = grouped((str(marker.generation), marker.marker) for marker in sorted(lineage.given_up))
    numbers = {"stale": lineage.stale, "unsigned": lineage.unsigned, "taken": lineage.taken, "given_up": given_up}
    return canonical(numbers) + b"\n" + b"".join(record.to_frame() for record in lineage.records())


def lineage_of(body: bytes, *, serving: bool = False) -> Lineage:
    """Decode the lineage in the body of a snapshot.

    Raises:
        CorruptionError: the body is not a valid lineage.
    """
    line, _, frames = body.partition(b"\n")
    numbers = _numbers(line)
    given_up = (
        MarkerId(int(generation), marker) for generation, each in numbers.pop("given_up").items() for marker in each
    )
    stale = numbers.pop("stale")
    lineage = Lineage(given_up=set(given_up), **numbers)
    for record in _records(frames, serving=serving):
        if isinstance(record, Trim):
            count_trim(lineage, record)  # markers that its rule asks for may have been given up since
        else:
            lineage.apply(record)
    if lineage.stale:
        raise CorruptionError("a SNAPSHOT holds records that have no effect")
    lineage.stale = stale
    return lineage


def snapshot_of(folded: Folded, incarnation: str) -> list[Snapshot]:
    """Return the unsigned records of a snapshot of a folded partition.

    Raises:
        UnsupportedError: it is larger than a reader accepts.
    """
    lineage = folded.lineage
    return pack(body_of(lineage), lineage.job, lineage.newest_generation, incarnation, folded.upto, folded.crc)


def _numbers(line: bytes) -> dict[str, Any]:
    try:
        numbers = json.loads(line.decode("ascii"))
        whole = [numbers[name] for name in ("stale", "unsigned", "taken")]
        given_up = [each for markers in numbers["given_up"].values() for each in markers]
        known = numbers.keys() == _NUMBERS and all(map(_GENERATION.fullmatch, numbers["given_up"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        known, whole, given_up = False, [], []
    if not known or any(type(each) is not int or not 0 <= each < 2**64 for each in [*whole, *given_up]):
        raise CorruptionError("the numbers at the start of a SNAPSHOT are missing or invalid")
    return dict(numbers)


def _records(frames: bytes, *, serving: bool) -> Iterator[ControlRecord | PackedCommit]:
    view, position = memoryview(frames), 0
    while position < len(view):
        end = position + HEADER_LEN + parse_header(view[position : position + HEADER_LEN]).payload_len
        record = read_record(view[position:end], serving=serving)
        if isinstance(record, Snapshot):
            raise CorruptionError("a SNAPSHOT contains another SNAPSHOT")
        yield record
        position = end


def fold(
    records: Iterable[tuple[int, bytes]],
    base: int,
    apply: Callable[[Folded, int, bytes], object],
    take: Callable[[bytes], Snapshot | None],
    *,
    serving: bool = False,
) -> Folded:
    """Fold the remaining control partition, starting at the newest intact snapshot.

    Args:
        records: (offset, record) of all remaining records, from ``base`` on.
        base: Offset of the first remaining record. If not 0, the earlier records were deleted and a snapshot must cover
            them.
        apply: Folds one record that is not a SNAPSHOT.
        take: Reads one SNAPSHOT. Returns None for one that does not count.
        serving: Whether the reader accepts the lossy rows of a serving stream.

    Raises:
        CorruptionError: no intact snapshot covers the records before ``base``; or a record is damaged, or not at the
            offset that a snapshot says.
    """
    folded, ahead, parts = Folded() if not base else None, _Ahead(), Parts()
    for each in records:
        if is_snapshot(each[1]):
            part = take(each[1])
            whole = parts.add(part) if part is not None and part.upto >= base else None
            if whole is not None and (folded is None or whole[0].upto > folded.upto) and ahead.stands(whole[0], base):
                folded = _folded_in(whole, each[0], serving=serving) or folded
                ahead.forget(folded)
            continue
        ahead.add(each)
        while folded is not None and ahead.num_bytes > _AHEAD_BYTES:
            apply(folded, *ahead.pop())
    if folded is None:
        raise CorruptionError(
            f"the control partition begins at offset {base}, but has no intact snapshot of the records before it",
            hint="recover it from its second copy, or restore it from a copy of the log; or rebuild the log from its "
            "store, in an empty place: stream-ckpt recover",
        )
    while ahead.records:
        apply(folded, *ahead.pop())
    return folded


@dataclass(slots=True)
class _Ahead:
    """Records that were read but not yet folded."""

    records: deque[tuple[int, bytes]] = field(default_factory=deque)
    num_bytes: int = 0

    def add(self, record: tuple[int, bytes]) -> None:
        self.records.append(record)
        self.num_bytes += len(record[1])

    def pop(self) -> tuple[int, bytes]:
        record = self.records.popleft()
        self.num_bytes -= len(record[1])
        return record

    def stands(self, part: Snapshot, base: int) -> bool:
        """Return whether the last record that a snapshot covers is the one at that offset.

        Raises:
            CorruptionError: it is not, and the records before ``base`` are known only from snapshots.
        """
        if crc32c(next((record for offset, record in self.records if offset == part.upto), b"")) == part.crc:
            return True
        said = f"a control snapshot does not match the record at offset {part.upto}"
        if base:
            raise CorruptionError(
                f"{said}: it was made from another control partition",
                hint="recover the control partition from its second copy, or restore it from a copy of the log",
                control_offset=part.upto,
            )
        log.warning("%s; skipping it because all records exist", said)
        return False

    def forget(self, folded: Folded | None) -> None:
        while folded is not None and self.records and self.records[0][0] <= folded.upto:
            self.pop()


def is_snapshot(record: bytes) -> bool:
    """Return whether a record's header marks it as part of a snapshot. If the header is damaged, returns False."""
    if record[8:9] != _SNAPSHOT:
        return False
    try:
        return parse_header(record).kind is Kind.SNAPSHOT
    except CorruptionError:
        return False


def _folded_in(parts: list[Snapshot], offset: int, *, serving: bool) -> Folded | None:
    try:
        return Folded(lineage_of(unpack(parts), serving=serving), parts[0].upto, parts[0].crc)
    except CorruptionError as error:
        log.warning("skipping the control snapshot that ends at offset %d: %s", offset, error.headline)
        return None
