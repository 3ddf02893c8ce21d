"""Embedded log: append-only files in one folder, no server.

Every generation writes separate segment files, so no two trainers ever write one file. A segment's name
contains the offset of its first byte. A segment counts only up to the first byte of the next one, so a torn
tail of a dead or failed writer is never read and never has to be cut.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import uuid
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from shlex import quote

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.log.api import DataWriter, Finding, Freed, Incarnation, Rows, TrimRange, check_ranks
from torchrec_stream_ckpt.log.control_file import ControlFile
from torchrec_stream_ckpt.log.direct import refusal
from torchrec_stream_ckpt.log.disk import examine_folder, explained
from torchrec_stream_ckpt.log.file_writer import FileWriter
from torchrec_stream_ckpt.log.segments import (
    SegmentNames,
    before,
    frames,
    has_in_turn,
    newest_segment,
    partition_dirs,
    pieces,
    segments,
    size_of,
    unlink,
)
from torchrec_stream_ckpt.log.watch import Watch, watch_folder
from torchrec_stream_ckpt.util.durable import fsync_dir, make_dirs, nearest_folder, write_synced
from torchrec_stream_ckpt.util.layout import (
    CONTROL_FILE,
    DATA_DIR,
    IDENTITY_FILE,
    partition_dir,
)
from torchrec_stream_ckpt.util.types import LogSpan, MarkPlace
from torchrec_stream_ckpt.util.uris import FileUri, LogUri

log = logging.getLogger(__name__)

_MOST_STREAMS = 2**16
"""Limit of streams whose last place is remembered."""
_IDENTITY = re.compile(rb"[0-9a-f]{32}")


class FileLog:
    """A log in a folder. On several nodes the folder must be on a shared file system."""

    def __init__(self, root: Path, *, direct: bool = False) -> None:
        self.uri: LogUri = FileUri(root)
        self._root = root
        self._direct = direct
        self._control = ControlFile(root)
        self._names = SegmentNames()
        self._folders: dict[int, str] = {}
        """Folders by partition, cached because making a path tens of thousands of times takes longer than the disk."""
        self._reached: dict[tuple[int, int], int] = {}
        """Start of the last segment that was needed, for streams (generation, partition) that have several."""
        self._begun: set[tuple[int, int]] = set()
        """Streams (generation, partition) that were opened by this object. Their existing segments are its own."""

    def prepare(
        self, partitions: int, identity: str | None = None, *, claimed: Incarnation | None = None
    ) -> Incarnation:
        check_ranks(partitions)
        if claimed is not None and partitions <= claimed.partitions:
            now = self.incarnation()
            if now is not None and now.id == claimed.id and now.partitions >= claimed.partitions:
                return now
        with explained("cannot create the file log", self._root):
            if identity is None and not (self._root / IDENTITY_FILE).exists():
                _check_new(self._root)
            make_dirs(self._root / DATA_DIR)
            for partition in range(partitions):
                partition_dir(self._root, partition).mkdir(exist_ok=True)
            fsync_dir(self._root / DATA_DIR)
            _write_identity(self._root, identity or uuid.uuid4().hex)
            fsync_dir(self._root)
        incarnation = self.incarnation()
        assert incarnation is not None
        return incarnation

    def takes_blocks(self) -> bool:
        if not self._direct:
            return False
        with explained("cannot write the file log", self._root):
            reason = refusal(nearest_folder(self._root))
        if reason:
            log.info("frames are written through the page cache, which takes more CPU time: %s", reason)
        return not reason

    def preflight(self) -> None:
        self.incarnation()

    def incarnation(self) -> Incarnation | None:
        with explained("cannot read the file log", self._root):
            try:
                identity = (self._root / IDENTITY_FILE).read_bytes()
                partitions = sum(1 for _ in partition_dirs(self._root))
            except FileNotFoundError:
                _check_new(self._root)
                return None
        if not _IDENTITY.fullmatch(identity):
            hint = "restore the file from a copy of the log: every CLAIM holds its text as the incarnation"
            raise CorruptionError("the file log's identity is damaged", hint=hint, path=self._root / IDENTITY_FILE)
        return Incarnation(identity.decode(), partitions)

    def newest_rows(self, ends: Mapping[int, int] | None = None) -> Rows | None:
        newest = newest_segment(self._root)
        return Rows(newest[0], "the file log holds", CONTROL_FILE, str(newest[1])) if newest is not None else None

    def examine(self) -> Iterator[Finding]:
        there = nearest_folder(self._root)
        if there != self._root:
            yield Finding("log: folder", f"{self._root} does not exist; {there} is examined instead")
        yield from examine_folder("log", there)
        if os.access(there, os.W_OK | os.X_OK):
            with explained("cannot write the file log", there):
                reason = refusal(there)
            # Not a warning: a log in such a folder is as safe, and costs what it did before there were direct writes.
            yield Finding("log: direct writes", f"no: {reason}; frames go through the page cache" if reason else "yes")

    def open_writer(self, generation: int, partition: int, resume_at: int, *, again: bool = False) -> DataWriter:
        again = again or resume_at > 0 or (generation, partition) in self._begun
        self._begun.add((generation, partition))
        return FileWriter(partition_dir(self._root, partition), generation, resume_at, again=again, direct=self._direct)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        for path, base, begin, end in pieces(self._root, span, self._names):
            for offset, frame in frames(path, begin - base, end - base):
                yield base + offset, frame

    def ends(self, generation: int, partitions: Collection[int], known: Mapping[int, int] = {}) -> dict[int, int]:
        folders = {partition: partition_dir(self._root, partition) for partition in partitions}
        return {
            partition: max((end for _, _, end in segments(folder, generation)), default=0) if folder.is_dir() else 0
            for partition, folder in folders.items()
        }

    def watch(self) -> Watch:
        return watch_folder(self._root)

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        for span in spans:
            folder = self._folders.get(span.partition)
            if folder is None:
                folder = self._folders[span.partition] = str(partition_dir(self._root, span.partition))
            if not self._has_in_turn(folder, span):
                pieces(self._root, span, self._names)

    def _has_in_turn(self, folder: str, span: LogSpan) -> bool:
        """Return whether adjacent segments hold a span. The search starts at the last known segment."""
        stream = span.generation, span.partition
        known = self._reached.get(stream, 0)
        found = has_in_turn(folder, span, known if known <= span.begin else 0) if span.begin < span.end else 0
        if found:
            if len(self._reached) >= _MOST_STREAMS:
                self._reached.clear()
            self._reached[stream] = found
        return found is not None

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """Check nothing. Each generation has separate segments, and a writer does not continue in one that was cut."""

    def place(self, span: LogSpan) -> tuple[str, int]:
        folder = partition_dir(self._root, span.partition)
        for path, base, end in segments(folder, span.generation, self._names):
            if base <= span.begin < end:
                return str(path), span.begin - base
        return str(folder), span.begin

    def trim(self, range_: TrimRange, *, dry_run: bool = False) -> Freed:
        """Delete whole segments, oldest first, so that a kill in between leaves a missing front, never a hole."""
        ends = range_.ends()
        sizes: list[int] = []
        with explained("cannot trim the log", self._root):
            for folder in sorted(partition_dirs(self._root)):
                doomed = list(before(folder, ends, range_.dead))
                if doomed and not os.access(folder, os.W_OK | os.X_OK):
                    raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
                sizes += [size for path in doomed if (size := unlink(path, dry_run=dry_run)) is not None]
                if doomed and not dry_run:
                    fsync_dir(folder)
        return Freed("segments", len(sizes), sum(sizes))

    def expect_append(self) -> None:
        """Do nothing: there is nothing to prepare."""

    def append_control(self, record: bytes, *, garbage: bool = False) -> int:
        """Append a record, as :meth:`ControlFile.append`."""
        return self._control.append(record, garbage=garbage)

    def waits_for(self) -> str:
        return f"the disk, or the lock, of {self._root / CONTROL_FILE}"

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Read records, as :meth:`ControlFile.read`."""
        return self._control.read(start, garbage=garbage)

    def control_base(self) -> int:
        """Return the first offset, as :meth:`ControlFile.base`."""
        return self._control.base()

    def control_next(self, offset: int, record: bytes) -> int:
        """Return the next offset, as :meth:`ControlFile.following`."""
        return self._control.following(offset, record)

    def prune_control(self, base: int) -> None:
        """Delete the front, as :meth:`ControlFile.prune`."""
        self._control.prune(base)

    def close(self) -> None:
        pass


def _write_identity(root: Path, identity: str) -> None:
    """Write the identity. The first writer wins: the name appears with its content, or not at all.

    If the name exists, its content was synced before it got that name. The caller syncs the folder in either case,
    because the writer may not have done so yet.
    """
    if (root / IDENTITY_FILE).exists():
        return
    scratch = root / f"{IDENTITY_FILE}.{uuid.uuid4().hex}"
    write_synced(scratch, identity.encode("ascii"))
    with contextlib.suppress(FileExistsError):
        os.link(scratch, root / IDENTITY_FILE)
    scratch.unlink()


def _check_new(root: Path) -> None:
    """Check that a log without identity is empty. The identity is written first, so otherwise it was lost."""
    lost = "control records" if size_of(root / CONTROL_FILE) else "rows" if newest_segment(root) else ""
    if lost and not (root / IDENTITY_FILE).exists():  # no other process has created the log meanwhile
        raise CorruptionError(
            f"the file log holds {lost}, but its identity file is missing",
            hint="restore the file from a copy of the log, or recover the log: "
            f"stream-ckpt recover {quote(f'file://{root}')} --store URL",
            path=root / IDENTITY_FILE,
        )
