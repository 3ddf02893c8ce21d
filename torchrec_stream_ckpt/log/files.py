"""The embedded log: append-only files in one folder, no server.

Every generation writes its own segment files, so no two trainers ever write one file. A segment's name
holds the offset of its first byte; it counts only up to the first byte of the next segment, so a torn
tail that a dead or failed writer left is never read and never has to be cut.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torchrec_stream_ckpt.durable import fsync_dir, make_dirs, write_all
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    StreamLostError,
)
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header
from torchrec_stream_ckpt.layout import (
    CONTROL_FILE,
    CONTROL_LOCK,
    DATA_DIR,
    IDENTITY_FILE,
    MAX_PARTITIONS,
    parse_segment,
    partition_dir,
    segment_name,
)
from torchrec_stream_ckpt.locks import held
from torchrec_stream_ckpt.log.api import DataWriter, Finding, Freed, Incarnation, Rows, TrimRange
from torchrec_stream_ckpt.log.control_file import ControlEnd, prune, read_front, records
from torchrec_stream_ckpt.log.disk import examine_folder, unavailable
from torchrec_stream_ckpt.log.file_writer import FileWriter
from torchrec_stream_ckpt.log.segments import before, frames, segments, size_of, unlink
from torchrec_stream_ckpt.types import LogSpan, MarkPlace

LOCK_TIMEOUT_S = 30.0
_IDENTITY = re.compile(rb"[0-9a-f]{32}")


class FileLog:
    """A log in a folder. On several nodes the folder must be on a shared file system."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._control_end = 0
        """Up to here the control log has been read; whole records only grow."""
        self._folders: dict[int, str] = {}
        """Of partitions that were asked for."""
        self._begun: set[tuple[int, int]] = set()
        """Streams (generation, partition) that were opened here: what is there of them is their own."""

    def prepare(self, partitions: int, identity: str | None = None) -> Incarnation:
        if partitions > MAX_PARTITIONS:
            raise ConfigError(f"{partitions} ranks are more than a log takes ({MAX_PARTITIONS})")
        try:
            if identity is None and not (self._root / IDENTITY_FILE).exists():
                self._check_new()
            make_dirs(self._root / DATA_DIR)
            for partition in range(partitions):
                partition_dir(self._root, partition).mkdir(exist_ok=True)
            fsync_dir(self._root / DATA_DIR)
            self._write_identity(identity or uuid.uuid4().hex)
            fsync_dir(self._root)
        except OSError as error:
            raise unavailable("cannot make the file log", self._root, error) from None
        incarnation = self.incarnation()
        assert incarnation is not None
        return incarnation

    def _write_identity(self, identity: str) -> None:
        """First writer wins: the name appears with its content, or not at all."""
        scratch = self._root / f"{IDENTITY_FILE}.{uuid.uuid4().hex}"
        with open(scratch, "w", encoding="ascii") as file:
            file.write(identity)
            file.flush()
            os.fsync(file.fileno())
        with contextlib.suppress(FileExistsError):
            os.link(scratch, self._root / IDENTITY_FILE)
        scratch.unlink()

    def preflight(self) -> None:
        self.incarnation()

    def incarnation(self) -> Incarnation | None:
        try:
            identity = (self._root / IDENTITY_FILE).read_bytes()
            partitions = sum(1 for _ in (self._root / DATA_DIR).glob("p?????"))
        except FileNotFoundError:
            self._check_new()
            return None
        except OSError as error:
            raise unavailable("cannot read the file log", self._root, error) from None
        if not _IDENTITY.fullmatch(identity):
            hint = "bring the file back from a copy of the log: its text stands in every CLAIM as the incarnation"
            raise CorruptionError("the file log's identity is damaged", hint=hint, path=self._root / IDENTITY_FILE)
        return Incarnation(identity.decode(), partitions)

    def _check_new(self) -> None:
        """The identity is written first: what has control records or rows, and no identity, has lost it."""
        lost = "control records" if size_of(self._root / CONTROL_FILE) else "rows" if self.newest_rows() else ""
        if lost and not (self._root / IDENTITY_FILE).exists():  # nobody has made the log meanwhile
            raise CorruptionError(
                f"the file log has lost its identity, and holds {lost}",
                hint="bring the file back from a copy of the log, or let it be written again: stream-ckpt recover "
                f"file://{self._root} --store URL",
                path=self._root / IDENTITY_FILE,
            )

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        newest: tuple[int, Path] | None = None
        try:
            for folder in (self._root / DATA_DIR).glob("p" + 5 * "[0-9]"):
                for name in os.listdir(folder):
                    parsed = parse_segment(name)
                    if parsed is not None and (newest is None or parsed[0] > newest[0]):
                        newest = parsed[0], folder / name
        except OSError as error:
            raise unavailable("cannot read the file log", self._root, error) from None
        return Rows(newest[0], "the file log holds", CONTROL_FILE, str(newest[1])) if newest is not None else None

    def examine(self) -> Iterator[Finding]:
        return examine_folder("log", self._root)

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> DataWriter:
        again = again or resume_at > 0 or (generation, partition) in self._begun
        self._begun.add((generation, partition))
        return FileWriter(partition_dir(self._root, partition), generation, resume_at, again=again)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        for path, base, begin, end in self._pieces(span):
            for offset, frame in frames(path, begin - base, end - base):
                yield base + offset, frame

    def _pieces(self, span: LogSpan) -> list[tuple[Path, int, int, int]]:
        """(path, first byte, begin, end) of the segments that hold a span, which must be there as a whole."""
        folder = partition_dir(self._root, span.partition)
        pieces = [
            (path, base, max(base, span.begin), min(end, span.end))
            for path, base, end in ([] if self._has_lost(folder) else segments(folder, span.generation))
            if base < span.end and end > span.begin
        ]
        position = span.begin
        for _, _, begin, end in pieces:
            position = end if begin <= position else position
        if position < span.end:
            cut_short = all(end < span.end for _, _, _, end in pieces)
            raise (StreamLostError if cut_short else CorruptionError)(
                f"the log ends at byte {position}, {span.end} were committed",
                hint="restore an older marker, or bring the missing segment back",
                generation=span.generation,
                path=folder,
            )
        return pieces

    def _has_lost(self, folder: Path) -> bool:
        """Whether a partition is not there although its log is."""
        try:
            folder.stat()
        except FileNotFoundError:
            return (self._root / IDENTITY_FILE).is_file()
        except OSError:  # the next one to look says what it is
            pass
        return False

    def ends(self, generation: int, partitions: Collection[int]) -> dict[int, int]:
        folders = {partition: partition_dir(self._root, partition) for partition in partitions}
        return {
            partition: max((end for _, _, end in segments(folder, generation)), default=0) if folder.is_dir() else 0
            for partition, folder in folders.items()
        }

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        for span in spans:
            if not self._stands(span):
                self._pieces(span)

    def _stands(self, span: LogSpan) -> bool:
        """Whether segments hold a span from the generation's first byte on, each where the one before ends.

        Asks for their names, and lists no folder: it holds those of all generations. Where the answer is no, they may
        still be there under other names.
        """
        base = 0
        folder = self._folders.get(span.partition)
        if folder is None:  # a job asks for tens of thousands of segments: strings, for paths take longer than the disk
            folder = self._folders[span.partition] = str(partition_dir(self._root, span.partition))
        while base < span.end:
            try:
                size = os.stat(f"{folder}/{segment_name(span.generation, base)}").st_size
            except OSError:  # whoever lists the folder says what it is
                return False
            if not size:
                return False
            base += size
        return True

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """Each generation has segments of its own, and a writer does not go on in one that was cut: nothing to see."""

    def place(self, span: LogSpan) -> tuple[str, int]:
        folder = partition_dir(self._root, span.partition)
        for path, base, end in segments(folder, span.generation):
            if base <= span.begin < end:
                return str(path), span.begin - base
        return str(folder), span.begin

    def trim(self, range_: TrimRange, *, dry_run: bool = False) -> Freed:
        """Whole segments go, oldest first: a kill in between leaves a front that is gone, never a hole."""
        ends: dict[tuple[int, int], int] = {}
        for span in range_.gone:
            key = (span.generation, span.partition)
            ends[key] = min(span.end, ends.get(key, span.end))
        sizes: list[int] = []
        try:
            for folder in sorted((self._root / DATA_DIR).glob("p" + 5 * "[0-9]")):
                doomed = list(before(folder, ends, range_.dead))
                if doomed and not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                sizes += [size for path in doomed if (size := unlink(path, dry_run=dry_run)) is not None]
                if doomed and not dry_run:
                    fsync_dir(folder)
        except OSError as error:
            raise unavailable("cannot trim the log", self._root, error) from None
        return Freed("segments", len(sizes), sum(sizes))

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        path = self._root / CONTROL_FILE
        try:
            with held(self._root / CONTROL_LOCK, timeout_s=LOCK_TIMEOUT_S), open(path, "ab") as file:
                return self._append_locked(path, file.fileno(), record, garbage=garbage)
        except OSError as error:
            raise unavailable("cannot append to the control log", path, error) from None

    def _append_locked(self, path: Path, fd: int, record: bytes, *, garbage: bool) -> int:
        if not os.fstat(fd).st_size:
            fsync_dir(self._root)
        offset, place = self._cut_torn_tail(path, fd, garbage=garbage)
        try:
            write_all(fd, [memoryview(record)])
            failpoint("control.written")
            os.fdatasync(fd)
        except OSError as error:
            # What a failed sync leaves in the page cache can be read and may never reach the disk: take it back.
            try:
                os.ftruncate(fd, place)
            except OSError:
                raise CommitUnknownError(
                    f"cannot append to the control log, nor take the record back: {error.strerror}",
                    hint="mend the disk; stream-ckpt list tells which markers exist",
                    path=path,
                ) from None
            raise
        if not os.path.samestat(os.fstat(fd), os.stat(path)):
            raise CommitUnknownError(
                "the control log was replaced while a record was appended, although the lock was held",
                hint="see that the file system of the log keeps flock; the record is appended again",
                path=path,
            )
        return offset

    def _cut_torn_tail(self, path: Path, fd: int, *, garbage: bool) -> tuple[int, int]:
        """Remove what an appender left that died in the middle of a record: it held the lock, so it is gone.

        Returns:
            The offset of the end, and its place in the file: they differ where the front of the log was deleted.
        """
        with open(path, "rb") as file:
            front = read_front(file)
        self._control_end = max(self._control_end, front.base)
        if os.fstat(fd).st_size < self._control_end - front.shift:
            raise LogUnavailableError(
                f"the control log is shorter than the {self._control_end} bytes that were read from it",
                hint="it was cut or deleted under a running job: bring it back, or start a new job",
                path=path,
            )
        end = ControlEnd(self._control_end)
        for _ in self._records(self._control_end, end, garbage=garbage):
            pass
        self._control_end = end.offset
        place = self._control_end - front.shift
        if os.fstat(fd).st_size != place:
            os.ftruncate(fd, place)
        return self._control_end, place

    def control_base(self) -> int:
        path = self._root / CONTROL_FILE
        try:
            with open(path, "rb") as file:
                return read_front(file).base
        except FileNotFoundError:
            return 0
        except OSError as error:
            raise unavailable("cannot read the control log", path, error) from None

    def control_next(self, offset: int, record: bytes) -> int:
        return offset + len(record) if _is_record(record) else offset

    def prune_control(self, base: int) -> None:
        """A new file takes the place of the old one under the lock: who appends opens it by its name, lock in hand."""
        path = self._root / CONTROL_FILE
        try:
            with held(self._root / CONTROL_LOCK, timeout_s=LOCK_TIMEOUT_S):
                prune(path, base)
        except OSError as error:
            raise unavailable("cannot shorten the control log", path, error) from None

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        return self._records(start, ControlEnd(start), garbage=garbage)

    def _records(self, start: int, end: ControlEnd, *, garbage: bool) -> Iterator[tuple[int, bytes]]:
        path = self._root / CONTROL_FILE
        try:
            yield from records(path, start, end, garbage=garbage)
        except FileNotFoundError:
            return
        except OSError as error:
            raise unavailable("cannot read the control log", path, error) from None

    def close(self) -> None:
        pass


def _is_record(data: bytes) -> bool:
    """Whether these bytes are a record, and not a piece of garbage."""
    try:
        return len(data) == HEADER_LEN + parse_header(data).payload_len
    except CorruptionError:
        return False
