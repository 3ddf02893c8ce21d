"""Second copy of a control partition: small objects, each with some records exactly as in the log.

An object is a sequence of entries: the record's offset (8 bytes, little-endian), then the record. All objects of one
epoch are of one control partition, ordered by their offsets. A record may be in several of them. Only the newest epoch
counts: its first object is put with all records that counted at that time, so it lacks nothing of the previous one.

Also the recovery of marker notes from this copy, for a log that is lost.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, MissingObjectError, located
from torchrec_stream_ckpt.format.control import parse_control, parse_if_whole
from torchrec_stream_ckpt.format.end_note import Note
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Buffer, parse_header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.store.api import Objects, names_in
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.util.layout import RECORDS_DIR, CopyName, parse_copy_name

_ATTEMPTS = 5
_OFFSET = struct.Struct("<Q")

Entry = tuple[int, bytes]
"""(offset, record)."""


@dataclass(frozen=True, slots=True)
class Copied:
    """Objects of one log's copy, as of one listing. No object is read for it."""

    objects: Objects
    job: bytes
    log: str
    epoch: int
    """Newest epoch. 0 if nothing was copied."""
    names: tuple[CopyName, ...]
    """Objects of that epoch, by the offset of their first record."""
    older: tuple[CopyName, ...]
    """Objects of older epochs, which are no longer needed."""

    @classmethod
    def load(cls, objects: Objects, job: bytes, log: str) -> Copied:
        """List the current objects for one log.

        Raises:
            UnsupportedError: the store is of a newer format.
            StoreUnavailableError: it does not answer.
        """
        check_store(objects)
        found = [name for name in copy_names(objects, job) if name.log == log]
        epoch = max((name.epoch for name in found), default=0)
        newest = tuple(name for name in found if name.epoch == epoch)
        return cls(objects, job, log, epoch, newest, tuple(name for name in found if name.epoch < epoch))

    @property
    def last(self) -> int:
        """Offset of the last record that was copied. -1 if none was."""
        return max((name.last for name in self.names), default=-1)

    def read(self, after: int = -1) -> Iterator[Entry]:
        """Yield the records after an offset, in order and each once. Damaged ones are omitted.

        Raises:
            MissingObjectError: an object was merged into another one since the listing.
            StoreUnavailableError: the store does not answer.
        """
        for names in self._overlapping(after):
            found = dict(entry for name in names for entry in parse_entries(self.objects.read(name.name)))
            yield from ((offset, found[offset]) for offset in sorted(found) if offset > after)

    def _overlapping(self, after: int) -> Iterator[list[CopyName]]:
        """Yield the objects with records after an offset. Those that may have the same records are grouped."""
        together: list[CopyName] = []
        for name in (each for each in self.names if each.last > after):
            if together and name.first > max(each.last for each in together):
                yield together
                together = []
            together.append(name)
        if together:
            yield together


def read_copy(objects: Objects, job: bytes, log: str, after: int = -1, copied: Copied | None = None) -> list[Entry]:
    """List and read the records, again if another process merges objects meanwhile; raises as :class:`Copied`.

    Args:
        objects, job, log: Same as in :meth:`Copied.load`.
        after: Only records after this offset.
        copied: A listing that was just made, to be used first.
    """
    for _ in range(_ATTEMPTS):
        with contextlib.suppress(MissingObjectError):
            listed, copied = copied or Copied.load(objects, job, log), None
            return list(listed.read(after))
    return list(Copied.load(objects, job, log).read(after))


def copied_logs(objects: Objects, job: bytes) -> list[str]:
    """Return the logs that have copies."""
    return sorted({name.log for name in copy_names(objects, job)})


def copy_names(objects: Objects, job: bytes) -> list[CopyName]:
    """List all objects of a job's copies: of each log and epoch."""
    return sorted(names_in(objects, RECORDS_DIR, job, parse_copy_name))


def put_copy(
    objects: Objects,
    job: bytes,
    log: str,
    epoch: int,
    entries: Sequence[Entry],
    *,
    at: tuple[int, int] | None = None,
) -> CopyName:
    """Put records into one object. Durable on return.

    Args:
        objects: The store.
        job: Job of the records.
        log: Identity of their log.
        epoch: Epoch of its control partition.
        entries: The records.
        at: Offset and CRC32C of the record up to which they cover everything. None for the last one of ``entries``.

    Raises:
        StoreUnavailableError: it was not written.
    """
    last, record = entries[-1]
    last, crc = at or (last, crc32c(record))
    name = CopyName(job, log, epoch, min(entries[0][0], last), last, crc)
    objects.put(name.name, parts_of(entries))
    return name


def parts_of(entries: Sequence[Entry]) -> list[bytes]:
    """Return the bytes of an object with these records."""
    return [part for offset, each in entries for part in (_OFFSET.pack(offset), each)]


def check_copy(objects: Objects, name: CopyName) -> int:
    """Read one object whole. Returns its bytes.

    Raises:
        CorruptionError: it is damaged.
        MissingObjectError: it was merged into another one since it was listed.
        StoreUnavailableError: the store does not answer.
    """
    data = objects.read(name.name)
    entries = list(parse_entries(data))
    if sum(map(len, parts_of(entries))) != len(data):
        raise CorruptionError("a control record of the second copy has no end", name=name.name)
    offsets = [offset for offset, _ in entries]
    numbered = list(range(name.first, name.first + len(offsets)))  # in the first object of an epoch
    if offsets != numbered and (
        offsets != sorted(set(offsets)) or (offsets[0], offsets[-1]) != (name.first, name.last)
    ):
        raise CorruptionError("offsets of control records do not match the name of their object", name=name.name)
    for offset, record in entries:
        with located(name=name.name, offset=offset):
            parse_control(record, serving=True)
    return len(data)


def damaged_copies(objects: Objects, job: bytes) -> list[CorruptionError]:
    """Read all copies of a job's control records. Returns an error for each damaged object.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    found = []
    for name in copy_names(objects, job):
        try:
            check_copy(objects, name)
        except MissingObjectError:
            continue
        except CorruptionError as error:
            found.append(error)
    return found


def parse_entries(data: Buffer) -> Iterator[Entry]:
    """Yield the records of one object, up to the first whose end is unknown."""
    view, position = memoryview(data), 0
    while position + _OFFSET.size + HEADER_LEN <= len(view):
        (offset,) = _OFFSET.unpack_from(view, position)
        begin = position + _OFFSET.size
        try:
            end = begin + HEADER_LEN + parse_header(view[begin : begin + HEADER_LEN]).payload_len
        except CorruptionError:
            return
        if end > len(view):
            return
        yield offset, bytes(view[begin:end])
        position = end


def with_notes(lineage: Lineage, objects: Objects) -> Lineage:
    """Add the metadata from NOTEs to a lineage that was built from manifests. Damaged records are ignored.

    Raises:
        StoreUnavailableError: the store does not answer.
    """
    job = lineage.job
    logs = [
        [found for _, record in read_copy(objects, job, log) if (found := parse_if_whole(record)) is not None]
        for log in copied_logs(objects, job)
    ]
    # A log that was recovered into another one continued there.
    for records in sorted(logs, key=lambda records: max((each.generation for each in records), default=0)):
        for record in records:
            if isinstance(record, Note) and record.id in lineage.commits:
                lineage.apply(record)
    return lineage
