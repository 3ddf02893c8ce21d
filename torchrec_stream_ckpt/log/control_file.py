"""Records of ``control.log``, read in pieces: at most one MiB or one record of the file is in memory.

The bytes after the last whole record may be *torn*, because an appender died while it wrote. That is at most one
record, cut short or never written (zeros). Anything else that is not a record is damage, unless there is a commit key.
Then it is garbage from a writer without the key, and the reader searches for the next whole record, byte by byte.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchrec_stream_ckpt.errors import CommitUnknownError, CorruptionError, LogUnavailableError, PrunedError
from torchrec_stream_ckpt.format.frame import (
    HEADER_LEN,
    MAGIC,
    MAX_FRAME_BYTES,
    Kind,
    commit_payload_len,
    parse_header,
    payload_of,
)
from torchrec_stream_ckpt.format.snapshot import Base
from torchrec_stream_ckpt.log.disk import explained
from torchrec_stream_ckpt.util.durable import fsync_dir, write_all
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import CONTROL_FILE, CONTROL_LOCK
from torchrec_stream_ckpt.util.locks import held

LOCK_TIMEOUT_S = 30.0
_BUFFER_BYTES = 2**20


@dataclass(slots=True)
class ControlEnd:
    """End of the last record, or piece of garbage, that was read. The bytes after it are torn."""

    offset: int


@dataclass(frozen=True, slots=True)
class FileFront:
    """Start of the records in a file."""

    base: int
    """Offset of the first record."""
    num_bytes: int
    """Bytes of the BASE record. 0 in a file whose front was never cut."""

    @property
    def shift(self) -> int:
        """Difference between an offset and its position in the file."""
        return self.base - self.num_bytes


class ControlFile:
    """Appends and reads the control records of a log in a folder. Can be used from any thread.

    Args:
        root: The folder.
    """

    def __init__(self, root: Path) -> None:
        self._path = root / CONTROL_FILE
        self._lock = root / CONTROL_LOCK
        self._end = 0
        """Offset up to which the file has been read. Whole records before it are never removed from the end."""

    def append(self, record: bytes, *, garbage: bool = False) -> int:
        """Append one record; see :meth:`Log.append_control`."""
        with (
            explained("cannot append to the control log", self._path),
            held(self._lock, timeout_s=LOCK_TIMEOUT_S),
            open(self._path, "ab") as file,
        ):
            return self._append_locked(file.fileno(), record, garbage=garbage)

    def _append_locked(self, fd: int, record: bytes, *, garbage: bool) -> int:
        if not os.fstat(fd).st_size:
            fsync_dir(self._path.parent)
        offset, place = self._cut_torn_tail(fd, garbage=garbage)
        try:
            write_all(fd, [memoryview(record)])
            failpoint("control.written")
            os.fdatasync(fd)
        except OSError as error:
            # After a failed sync, the page cache may show data that never reaches the disk. So cut the record off.
            try:
                os.ftruncate(fd, place)
            except OSError:
                raise CommitUnknownError(
                    f"cannot append to the control log, nor remove the partial record: {error.strerror}",
                    hint="repair the disk, then run stream-ckpt list to see which markers exist",
                    path=self._path,
                ) from None
            raise
        if not os.path.samestat(os.fstat(fd), os.stat(self._path)):
            raise CommitUnknownError(
                "the control log was replaced while a record was appended under the lock",
                hint="check that the log's file system supports flock; the record is appended again",
                path=self._path,
            )
        return offset

    def _cut_torn_tail(self, fd: int, *, garbage: bool) -> tuple[int, int]:
        """Remove a partial record of an appender that died. Appenders hold the lock, so none is writing now.

        Returns:
            The offset of the end, and its position in the file. They differ if the front of the log was deleted.
        """
        with open(self._path, "rb") as file:
            front = read_front(file)
        self._end = max(self._end, front.base)
        if os.fstat(fd).st_size < self._end - front.shift:
            raise LogUnavailableError(
                f"the control log is shorter than the {self._end} bytes that were already read from it",
                hint="restore it from a copy, or start a new job: it was cut or deleted while the job ran",
                path=self._path,
            )
        end = ControlEnd(self._end)
        for _ in self._records(self._end, end, garbage=garbage):
            pass
        self._end = end.offset
        place = self._end - front.shift
        if os.fstat(fd).st_size != place:
            os.ftruncate(fd, place)
        return self._end, place

    def base(self) -> int:
        """Return the offset of the first remaining record. Returns 0 if there is no file."""
        with explained("cannot read the control log", self._path):
            try:
                with open(self._path, "rb") as file:
                    return read_front(file).base
            except FileNotFoundError:
                return 0

    def following(self, offset: int, record: bytes) -> int:
        """Return the offset at which to continue after a record. Garbage is read again, because its end is unknown."""
        try:
            whole = len(record) == HEADER_LEN + parse_header(record).payload_len
        except CorruptionError:
            whole = False
        return offset + len(record) if whole else offset

    def prune(self, base: int) -> None:
        """Replace the file under the lock. An appender opens it by name while it holds the lock."""
        with explained("cannot shorten the control log", self._path), held(self._lock, timeout_s=LOCK_TIMEOUT_S):
            prune(self._path, base)

    def read(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Read records from ``start`` to the current end. Yields nothing if there is no file yet."""
        return self._records(start, ControlEnd(start), garbage=garbage)

    def _records(self, start: int, end: ControlEnd, *, garbage: bool) -> Iterator[tuple[int, bytes]]:
        with explained("cannot read the control log", self._path), contextlib.suppress(FileNotFoundError):
            yield from records(self._path, start, end, garbage=garbage)


def records(path: Path, start: int, end: ControlEnd, *, garbage: bool) -> Iterator[tuple[int, bytes]]:
    """Yield (offset, record) from offset ``start`` to the current end of the file, excluding a torn tail.

    Offsets count from the first record that ever existed. A file whose front was cut records where it begins.

    Args:
        path: The file.
        start: Offset where a record, or garbage, begins.
        end: Updated to the end of everything read, before the next record is yielded.
        garbage: Whether to continue after bytes that are not a record. The first bytes of each such piece are yielded
            in place of a record.

    Raises:
        CorruptionError: (without ``garbage``) some bytes are neither a record nor a torn tail.
        PrunedError: the file begins after ``start``.
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=0) as raw, io.BufferedReader(raw, _BUFFER_BYTES) as file:
        size = os.fstat(raw.fileno()).st_size
        front = read_front(raw)  # without the buffer, which would read 1 MiB here for each record that is appended
        if start < front.base:
            raise PrunedError(f"the control log begins at offset {front.base}, not at {start}", path=path)
        position, headless, pieces = start - front.shift, False, _Pieces(file, size)
        while position < size:
            try:
                record = pieces.record_at(position)
                if record is not None and garbage:
                    payload_of(parse_header(record), record)
                whole, why = record, None
            except CorruptionError as error:
                whole, why = None, error
            if whole is not None:
                _check_head(path, whole, headless=headless)
                end.offset = position + len(whole) + front.shift
                yield position + front.shift, whole
                position += len(whole)
                continue
            following = _find_record(file, position + 1, size) if garbage else None
            if following is None and _is_torn(file, position, size):
                return
            if not garbage:
                why = why or CorruptionError("a record is longer than the file")
                hint = "" if position else why.hint  # bytes after whole records do not come from another job's log
                raise CorruptionError(why.message, hint=hint, path=path, offset=position) from None
            headless = headless or not position
            following = size if following is None else following
            end.offset = following + front.shift
            file.seek(position)
            yield position + front.shift, file.read(min(HEADER_LEN, following - position))
            position = following


class _Pieces:
    """Extracts records from large pieces of the file.

    Args:
        file: File to read.
        size: End of the file.
    """

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file, self._size = file, size
        self._piece, self._begin = b"", 0

    def record_at(self, position: int) -> bytes | None:
        """Return the record at ``position``. Returns None if the file ends inside it.

        Raises:
            CorruptionError: no record begins there.
        """
        if not self._begin <= position <= self._begin + len(self._piece) - HEADER_LEN:
            self._read(position)
        at = position - self._begin
        if len(self._piece) < at + HEADER_LEN:
            return None
        payload_len = commit_payload_len(self._piece, at)  # nearly all records are COMMITs
        if payload_len is None:
            payload_len = parse_header(self._piece[at : at + HEADER_LEN]).payload_len
        length = HEADER_LEN + payload_len
        if position + length > self._size:
            return None
        if at + length > len(self._piece):
            self._read(position)
            at = 0
        return self._piece[at : at + length]

    def _read(self, position: int) -> None:
        self._file.seek(position)
        self._piece, self._begin = self._file.read(min(_BUFFER_BYTES, self._size - position)), position


def _check_head(path: Path, record: bytes, *, headless: bool) -> None:
    """Refuse a snapshot after garbage at the beginning. It may have been a BASE, so all offsets would be wrong."""
    if headless and parse_header(record).kind is Kind.SNAPSHOT:
        raise CorruptionError(
            "the control log holds snapshots, but begins with bytes that are not a record: its first offset is lost",
            hint="recover it from its second copy, or restore it from a copy of the log",
            path=path,
        )


def read_front(file: BinaryIO) -> FileFront:
    """Read the beginning of a control log."""
    file.seek(0)
    size = os.fstat(file.fileno()).st_size
    try:
        record = _record_at(file, 0, size)
        if record is None or parse_header(record).kind is not Kind.BASE:
            return FileFront(0, 0)
    except CorruptionError:
        return FileFront(0, 0)
    return FileFront(Base.from_frame(record).base, len(record))


def prune(path: Path, base: int) -> bool:
    """(under the lock) Delete the bytes before offset ``base``. Returns False if they are already deleted.

    Raises:
        CorruptionError: no record begins there.
        OSError: the new file cannot be written. The old one is unchanged.
    """
    scratch = path.with_name(f"{path.name}.pruned")
    with open(path, "rb", buffering=_BUFFER_BYTES) as old:
        front = read_front(old)
        if base <= front.base:
            return False
        size = os.fstat(old.fileno()).st_size
        first = _record_at(old, base - front.shift, size)
        if first is None:
            raise CorruptionError(f"no record of the control log begins at offset {base}", path=path)
        old.seek(base - front.shift)
        with open(scratch, "wb") as new:  # overwrites the file of a process that was killed
            new.write(Base(parse_header(first).job, base).to_frame())
            failpoint("prune.begun")
            shutil.copyfileobj(old, new, _BUFFER_BYTES)
            new.flush()
            os.fchmod(new.fileno(), os.fstat(old.fileno()).st_mode & 0o777)
            os.fsync(new.fileno())
    failpoint("prune.written")
    os.rename(scratch, path)
    failpoint("prune.renamed")
    fsync_dir(path.parent)
    return True


def _record_at(file: BinaryIO, position: int, size: int) -> bytes | None:
    """Return the record at ``position``. Returns None if the file ends inside it.

    Raises:
        CorruptionError: no record begins there.
    """
    file.seek(position)
    head = file.read(HEADER_LEN)
    if len(head) < HEADER_LEN:
        return None
    header = parse_header(head)
    if position + HEADER_LEN + header.payload_len > size:
        return None
    return head + file.read(header.payload_len)


def _is_torn(file: BinaryIO, position: int, size: int) -> bool:
    """Return whether everything from ``position`` on can be the partial record of an appender that died."""
    if size - position > MAX_FRAME_BYTES:
        return False
    file.seek(position)
    tail = file.read(size - position)
    if len(tail) < HEADER_LEN or tail.count(0) == len(tail):
        return True
    try:
        parse_header(tail)
    except CorruptionError:
        return False
    return True


def _find_record(file: BinaryIO, begin: int, end: int) -> int | None:
    """Return the position of the first whole record in [begin, end), after comparing its checksums."""
    position = begin
    while position < end:
        file.seek(position)
        piece = file.read(min(_BUFFER_BYTES, end - position))
        found = piece.find(MAGIC)
        if found < 0:
            if position + len(piece) >= end:
                return None
            position += len(piece) - len(MAGIC) + 1
            continue
        position += found
        try:
            record = _record_at(file, position, end)
            if record is not None:
                payload_of(parse_header(record), record)
                return position
        except CorruptionError:
            pass
        position += 1
    return None
