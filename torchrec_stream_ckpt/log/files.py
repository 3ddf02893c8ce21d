"""The embedded log: append-only files in one folder, no server.

Every generation writes its own segment files, so no two trainers ever write one file. A segment's name
holds the offset of its first byte; it counts only up to the first byte of the next segment, so a torn
tail that a dead or failed writer left is never read and never has to be cut.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from itertools import pairwise, zip_longest
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
from torchrec_stream_ckpt.log.api import Ack, DataWriter, Finding, Freed, Incarnation, Rows, TrimRange
from torchrec_stream_ckpt.log.control_file import ControlEnd, prune, read_front, records
from torchrec_stream_ckpt.log.disk import examine_folder, files_left
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.types import LogSpan, MarkPlace

SEGMENT_BYTES = 256 * 2**20
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
            raise _unavailable("cannot make the file log", self._root, error) from None
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
            raise _unavailable("cannot read the file log", self._root, error) from None
        if not _IDENTITY.fullmatch(identity):
            hint = "bring the file back from a copy of the log: its text stands in every CLAIM as the incarnation"
            raise CorruptionError("the file log's identity is damaged", hint=hint, path=self._root / IDENTITY_FILE)
        return Incarnation(identity.decode(), partitions)

    def _check_new(self) -> None:
        """The identity is written first: what has control records or rows, and no identity, has lost it."""
        lost = "control records" if _size(self._root / CONTROL_FILE) else "rows" if self.newest_rows() else ""
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
            raise _unavailable("cannot read the file log", self._root, error) from None
        return Rows(newest[0], "the file log holds", CONTROL_FILE, str(newest[1])) if newest is not None else None

    def examine(self) -> Iterator[Finding]:
        return examine_folder("log", self._root)

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> DataWriter:
        again = again or resume_at > 0 or (generation, partition) in self._begun
        self._begun.add((generation, partition))
        return FileWriter(partition_dir(self._root, partition), generation, resume_at, again=again)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        for path, base, begin, end in self._pieces(span):
            for offset, frame in _frames(path, begin - base, end - base):
                yield base + offset, frame

    def _pieces(self, span: LogSpan) -> list[tuple[Path, int, int, int]]:
        """(path, first byte, begin, end) of the segments that hold a span, which must be there as a whole."""
        folder = partition_dir(self._root, span.partition)
        pieces = [
            (path, base, max(base, span.begin), min(end, span.end))
            for path, base, end in ([] if self._has_lost(folder) else _segments(folder, span.generation))
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
            partition: max((end for _, _, end in _segments(folder, generation)), default=0) if folder.is_dir() else 0
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
        for path, base, end in _segments(folder, span.generation):
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
                doomed = list(_before(folder, ends, range_.dead))
                if doomed and not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                sizes += [size for path in doomed if (size := _unlink(path, dry_run=dry_run)) is not None]
                if doomed and not dry_run:
                    fsync_dir(folder)
        except OSError as error:
            raise _unavailable("cannot trim the log", self._root, error) from None
        return Freed("segments", len(sizes), sum(sizes))

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        path = self._root / CONTROL_FILE
        try:
            with held(self._root / CONTROL_LOCK, timeout_s=LOCK_TIMEOUT_S), open(path, "ab") as file:
                return self._append_locked(path, file.fileno(), record, garbage=garbage)
        except OSError as error:
            raise _unavailable("cannot append to the control log", path, error) from None

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
            raise _unavailable("cannot read the control log", path, error) from None

    def control_next(self, offset: int, record: bytes) -> int:
        return offset + len(record) if _is_record(record) else offset

    def prune_control(self, base: int) -> None:
        """A new file takes the place of the old one under the lock: who appends opens it by its name, lock in hand."""
        path = self._root / CONTROL_FILE
        try:
            with held(self._root / CONTROL_LOCK, timeout_s=LOCK_TIMEOUT_S):
                prune(path, base)
        except OSError as error:
            raise _unavailable("cannot shorten the control log", path, error) from None

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        return self._records(start, ControlEnd(start), garbage=garbage)

    def _records(self, start: int, end: ControlEnd, *, garbage: bool) -> Iterator[tuple[int, bytes]]:
        path = self._root / CONTROL_FILE
        try:
            yield from records(path, start, end, garbage=garbage)
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unavailable("cannot read the control log", path, error) from None

    def close(self) -> None:
        pass


class FileWriter:
    """Appends frames to one rank's segments, and makes them durable behind the next ones that are written.

    One sync runs at a time, on a thread of its own; the next one covers all that was written meanwhile.
    """

    def __init__(self, folder: Path, generation: int, resume_at: int, *, again: bool) -> None:
        self._folder = folder
        self._generation = generation
        self._end = resume_at
        self._base = resume_at
        """First byte of the segment that is open."""
        self._sent: list[memoryview] = []
        self._written: list[Ack] = []
        """Frames that no sync covers yet."""
        self._syncing: tuple[Future[None], list[Ack]] | None = None
        self._fd = -1
        self._room = 0
        if again:
            self._forget_beyond()
        self._roll(os.O_TRUNC if again else os.O_EXCL)
        self._syncer = Worker("stream-ckpt-sync")  # last: no thread is left where there is no writer

    def _forget_beyond(self) -> None:
        """A relay goes on behind what was committed: a segment further on would hide what is sent again in front of it.

        Newest first: a kill in between leaves no hole.
        """
        if not self._folder.is_dir():
            return
        try:
            beyond = [path for path, base, _ in _segments(self._folder, self._generation) if base > self._end]
            for path in reversed(beyond):
                path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            raise _unavailable("cannot clear a partition", self._folder, error) from None

    def _roll(self, how: int = os.O_EXCL) -> None:
        """Begin a segment. One that is there already is not touched, unless this stream goes on in front of it: then it
        holds only what its writer could not acknowledge, and that is sent again."""
        path = self._folder / segment_name(self._generation, self._end)
        self._close_segment()
        try:
            self._folder.mkdir(exist_ok=True)
            self._check_acknowledged()
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o666)
            fsync_dir(self._folder)
        except FileExistsError:
            raise StreamLostError(
                f"a segment of generation {self._generation} is there already: it is another writer's, and stays",
                hint="only one trainer may run a job; stop one, or give it another URI",
                path=path,
            ) from None
        except OSError as error:
            self._close_segment()
            raise _unavailable("cannot open a segment", path, error) from None
        self._base, self._room = self._end, SEGMENT_BYTES

    def _check_acknowledged(self) -> None:
        """What was acknowledged before must still be there: else no later marker can be restored.

        Segments at the front may have been trimmed; a commit asks whether they were.
        """
        segments = list(_segments(self._folder, self._generation))
        reach = segments[0][1] if segments else 0
        for _, base, end in segments:
            reach = max(reach, end) if base <= reach else reach
        if reach < self._end:
            # Without any segment, it is the folder that is away: it may come back.
            raise (StreamLostError if segments else LogUnavailableError)(
                f"acknowledged bytes [{reach}, {self._end}) of this generation are gone",
                hint="they were deleted under a running job: bring them back, or start a new job",
                path=self._folder,
            )

    def send(self, frame: memoryview) -> None:
        self._sent.append(frame)

    def poll(self, timeout_s: float) -> list[Ack]:
        try:
            acks = self._write() if self._sent else []
            self._sync()
            acks += self._synced(0.0 if acks else timeout_s)
            self._sync()
        except OSError as error:
            raise _unavailable("cannot write the stream", self._folder, error) from None
        return acks

    def _write(self) -> list[Ack]:
        """Append what was sent; returns what became durable at the end of a segment."""
        acks = []
        if self._room <= 0:
            while self._written or self._syncing:
                self._sync()
                acks += self._synced(None)
            self._roll()
        self._check_length()
        write_all(self._fd, self._sent)
        failpoint("segment.written")
        for frame in self._sent:
            self._written.append(Ack(self._end, self._end + len(frame)))
            self._end += len(frame)
            self._room -= len(frame)
        self._sent.clear()
        return acks

    def _check_length(self) -> None:
        """What was written is still there: to write on behind it would leave a hole that reads as zeros."""
        size = os.fstat(self._fd).st_size
        if size < self._end - self._base:
            raise StreamLostError(
                f"the segment was cut to {size} bytes under its writer, which had written {self._end - self._base}",
                hint="find out what else writes to the log's folder",
                path=self._folder / segment_name(self._generation, self._base),
            )

    def _sync(self) -> None:
        """Begin to make durable what was written, unless a sync is under way."""
        if self._written and self._syncing is None:
            self._syncing = self._syncer.submit(os.fdatasync, self._fd), self._written
            self._written = []

    def _synced(self, timeout_s: float | None) -> list[Ack]:
        """What the sync under way has made durable; waits so long for it, None: until it is over."""
        if self._syncing is None:
            return []
        future, acks = self._syncing
        if not wait([future], timeout_s).done:
            return []
        self._syncing = None
        future.result()
        if os.fstat(self._fd).st_nlink == 0:
            raise LogUnavailableError("the segment was deleted under its writer", path=self._folder)
        return acks

    def waits_for(self) -> str:
        return f"the disk of {self._folder}"

    def close(self) -> None:
        if self._syncing is not None:
            wait([self._syncing[0]])  # the descriptor may be another file's as soon as it is closed
        self._syncer.close()
        self._close_segment()

    def _close_segment(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _is_record(data: bytes) -> bool:
    """Whether these bytes are a record, and not a piece of garbage."""
    try:
        return len(data) == HEADER_LEN + parse_header(data).payload_len
    except CorruptionError:
        return False


def _segments(folder: Path, generation: int) -> Iterator[tuple[Path, int, int]]:
    """(path, first byte, end) of a generation's segments, in order; each ends where the next one begins."""
    try:
        names = [(parsed[1], name) for name in os.listdir(folder) if (parsed := parse_segment(name))]
        mine = [
            (base, folder / name, size)
            for base, name in sorted(names)
            if parse_segment(name) == (generation, base) and (size := _size(folder / name)) is not None
        ]
    except OSError as error:
        raise _unavailable("cannot read a partition", folder, error) from None
    following = [base for base, _, _ in mine[1:]]
    for (base, path, size), limit in zip_longest(mine, following):
        yield path, base, base + size if limit is None else min(base + size, limit)


def _size(path: Path) -> int | None:
    """Size in bytes; None when a trim has just taken the file away."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def _before(folder: Path, ends: Mapping[tuple[int, int], int], dead: Collection[int]) -> Iterator[Path]:
    """The segments of one partition that nobody needs, oldest first.

    The last one of a generation that lives stays: its writer may be appending to it.
    """
    partition = int(folder.name[1:])
    generations = {parsed[0] for name in os.listdir(folder) if (parsed := parse_segment(name))}
    for generation in sorted(generations):
        segments = list(_segments(folder, generation))
        if generation in dead:
            yield from (path for path, _, _ in segments)
        else:
            end = ends.get((generation, partition), 0)
            yield from (path for (path, _, _), (_, limit, _) in pairwise(segments) if limit <= end)


def _unlink(path: Path, *, dry_run: bool) -> int | None:
    """Size of the file that was, or would be, deleted; None when another trim was first."""
    size = _size(path)
    if size is None or dry_run:
        return size
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    failpoint("trim.deleted")
    return size


def _frames(path: Path, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """(position, frame) of the frames in bytes [begin, end) of one segment."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) if size else memoryview(b"")
    except OSError as error:
        raise _unavailable("cannot read a segment", path, error) from None
    position = begin
    while position < end:
        try:
            header = parse_header(view[position : position + HEADER_LEN])
        except CorruptionError as error:
            raise CorruptionError(error.message, hint=error.hint, path=path, offset=position) from None
        stop = position + HEADER_LEN + header.payload_len
        if stop > min(size, end):
            raise CorruptionError(
                f"segment of {size} bytes ends inside a frame", path=path, offset=position, **header.place()
            )
        yield position, view[position:stop]
        position = stop


def _unavailable(what: str, path: Path, error: OSError) -> LogUnavailableError:
    hints = {
        errno.ENOSPC: "free space on that file system",
        errno.EACCES: "run as the owner of the folder and of its lock file, or check their modes",
        errno.EROFS: "the file system is read-only: mount it writable, or choose another folder",
        errno.ENOENT: "check the path; nothing was written there yet, or it was deleted",
        errno.ETIMEDOUT: "another trainer holds the lock: if it is stopped or hangs, end it",
    }
    hint = hints.get(error.errno or 0, "check the disk and the path")
    if error.errno == errno.ENOSPC and not files_left(path):
        return LogUnavailableError(
            f"{what}: no inodes are left",
            hint="delete files on that file system: it has bytes, and no inodes",
            path=path,
        )
    if error.errno == errno.EEXIST and path.is_symlink() and not path.exists():
        where = os.readlink(path)
        return LogUnavailableError(
            f"{what}: it is a link to {where}, which is not there", hint=f"make {where}", path=path
        )
    return LogUnavailableError(f"{what}: {error.strerror}", hint=hint, path=path)
