"""Writer of one rank in a log folder: separate segments, made durable on a separate thread."""

from __future__ import annotations

import contextlib
import logging
import os
from concurrent.futures import Future, wait
from pathlib import Path

from torchrec_stream_ckpt.errors import LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.format.padding import BLOCK
from torchrec_stream_ckpt.log.api import Ack
from torchrec_stream_ckpt.log.direct import BUFFERED, DIRECT, REFUSALS, in_memory, refused, runs, write_blocks
from torchrec_stream_ckpt.log.disk import explained, file_system, unavailable
from torchrec_stream_ckpt.log.segments import segments
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.util.durable import fsync_dir, write_all
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import segment_name

log = logging.getLogger(__name__)

SEGMENT_BYTES = 256 * 2**20
_LONGEST = 1.25
"""Length of a segment, in SEGMENT_BYTES, up to which its end waits for a block. Blocks count from its beginning."""


class FileWriter:
    """Appends frames to one rank's segments, and makes them durable while the next ones are written.

    One sync runs at a time, on a separate thread. The next one covers all frames written meanwhile.

    Args:
        folder: The partition.
        generation: Generation of the stream.
        resume_at: Offset of the first frame.
        again: True if the stream may have segments already.
        direct: Bypass the page cache for whole blocks, if the file system can.
    """

    def __init__(self, folder: Path, generation: int, resume_at: int, *, again: bool, direct: bool = False) -> None:
        self._folder = folder
        self._generation = generation
        self._end = resume_at
        self._base = resume_at
        """First offset of the open segment."""
        self._sent: list[memoryview] = []
        self._written: list[Ack] = []
        """Frames that no sync covers yet."""
        self._syncing: tuple[Future[None], list[Ack]] | None = None
        self._fd = -1
        self._direct_fd = -1
        """The same segment, opened for direct writes. -1 without them."""
        self._direct = direct
        self.how = DIRECT if direct else BUFFERED
        self._room = 0
        if again:
            self._forget_beyond()
        self._roll(os.O_TRUNC if again else os.O_EXCL)
        self._syncer = Worker("stream-ckpt-sync")  # last, so that no thread remains if the constructor fails

    def _forget_beyond(self) -> None:
        """Delete segments after the position at which a relay resumes. They would hide frames that are sent again.

        Newest first, so that a kill in between leaves no hole.
        """
        if not self._folder.is_dir():
            return
        with explained("cannot clear a partition", self._folder), contextlib.suppress(FileNotFoundError):
            beyond = [path for path, base, _ in segments(self._folder, self._generation) if base > self._end]
            for path in reversed(beyond):
                path.unlink()

    def _roll(self, how: int = os.O_EXCL) -> None:
        """Begin a segment. An existing one is left untouched, unless this stream resumes before it.

        In that case it contains only frames that its writer could not get acknowledged, and these are sent again.
        """
        path = self._folder / segment_name(self._generation, self._end)
        self._close_segment()
        try:
            self._folder.mkdir(exist_ok=True)
            self._check_acknowledged()
            self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | how | os.O_CLOEXEC, 0o666)
            fsync_dir(self._folder)
            self._open_direct(path)
        except FileExistsError:
            raise StreamLostError(
                f"a segment of generation {self._generation} already exists, written by another program",
                hint="only one trainer may run a job; stop one, or give it another URI",
                path=path,
            ) from None
        except OSError as error:
            self._close_segment()
            raise unavailable("cannot open a segment", path, error) from None
        self._base, self._room = self._end, SEGMENT_BYTES

    def _open_direct(self, path: Path) -> None:
        if not self._direct:
            return
        if reason := in_memory(self._folder):
            self._write_buffered(reason)
            return
        try:
            self._direct_fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in REFUSALS:
                raise
            self._refuse_direct(error)

    def _refuse_direct(self, error: OSError) -> None:
        """Write through the page cache from here on. The log is the same; training gets less of the processor."""
        reason = refused(file_system(self._folder), error)
        log.warning("frames are written through the page cache, which takes more CPU time: %s", reason)
        self._write_buffered(reason)

    def _write_buffered(self, reason: str) -> None:
        self._direct, self.how = False, f"{BUFFERED} ({reason})"
        if self._direct_fd >= 0:
            os.close(self._direct_fd)
            self._direct_fd = -1

    @property
    def origin(self) -> int | None:
        """Offset from which blocks count for direct writes. None if there are no such writes."""
        return self._base if self._direct else None

    def _check_acknowledged(self) -> None:
        """Check that acknowledged bytes still exist. Otherwise no later marker can be restored.

        Segments at the front may have been trimmed. A commit checks whether they were.
        """
        mine = list(segments(self._folder, self._generation))
        reach = mine[0][1] if mine else 0
        for _, base, end in mine:
            reach = max(reach, end) if base <= reach else reach
        if reach < self._end:
            # Without any segment, the folder itself is missing and may be mounted again.
            raise (StreamLostError if mine else LogUnavailableError)(
                f"acknowledged bytes [{reach}, {self._end}) of this generation are missing",
                hint="restore them from a copy, or start a new job: they were deleted while the job ran",
                path=self._folder,
            )

    def send(self, frame: memoryview) -> None:
        self._sent.append(frame)

    def poll(self, timeout_s: float) -> list[Ack]:
        with explained("cannot write the stream", self._folder):
            acks = self._write() if self._sent else []
            self._sync()
            acks += self._synced(0.0 if acks else timeout_s)
            self._sync()
        return acks

    def _write(self) -> list[Ack]:
        """Append the sent frames. Returns those that became durable at the end of a segment."""
        acks = []
        if self._room <= 0 and self._may_end():
            while self._written or self._syncing:
                self._sync()
                acks += self._synced(None)
            self._roll()
        self._check_length()
        self._append(self._sent)
        failpoint("segment.written")
        for frame in self._sent:
            self._written.append(Ack(self._end, self._end + len(frame)))
            self._end += len(frame)
            self._room -= len(frame)
        self._sent.clear()
        return acks

    def _may_end(self) -> bool:
        """Return whether the segment may end here. With direct writes, the next one should begin at a block, too.

        Otherwise frames in the queue, which were padded for this one, would not lie at blocks of the next.
        """
        written = self._end - self._base
        return not self._direct or written % BLOCK == 0 or written >= _LONGEST * SEGMENT_BYTES

    def _append(self, parts: list[memoryview]) -> None:
        """Write all bytes of the frames, with direct writes if possible."""
        if not self._direct:
            write_all(self._fd, parts)
            return
        position = self._end - self._base
        for whole_blocks, run in runs(parts, position):
            rest, refusal = run, None
            if whole_blocks and self._direct:
                try:
                    rest = write_blocks(self._direct_fd, run, position)
                except OSError as error:
                    if error.errno not in REFUSALS:
                        raise
                    refusal = error
            num_bytes = sum(map(len, run))
            os.lseek(self._fd, position + num_bytes - sum(map(len, rest)), os.SEEK_SET)
            write_all(self._fd, rest)  # raises the error if it is not one of direct writes alone
            if refusal is not None:
                self._refuse_direct(refusal)
            position += num_bytes

    def _check_length(self) -> None:
        """Check that written bytes still exist. A write after missing bytes would leave a hole that reads as zeros."""
        size = os.fstat(self._fd).st_size
        if size < self._end - self._base:
            raise StreamLostError(
                f"the segment has {size} bytes, but its writer had written {self._end - self._base}: it was cut",
                hint="find out which other program writes to the log's folder",
                path=self._folder / segment_name(self._generation, self._base),
            )

    def _sync(self) -> None:
        """Start a sync of the written frames, unless one is running."""
        if self._written and self._syncing is None:
            self._syncing = self._syncer.submit(os.fdatasync, self._fd), self._written
            self._written = []

    def _synced(self, timeout_s: float | None) -> list[Ack]:
        """Return the frames that the running sync has made durable. Waits up to ``timeout_s``, without limit if
        None."""
        if self._syncing is None:
            return []
        future, acks = self._syncing
        if not wait([future], timeout_s).done:
            return []
        self._syncing = None
        future.result()
        if os.fstat(self._fd).st_nlink == 0:
            raise LogUnavailableError(
                "the segment was deleted while its writer had it open",
                hint="find out which program deletes files of the log's folder; to free space use stream-ckpt trim",
                path=self._folder,
            )
        return acks

    def waits_for(self) -> str:
        return f"the disk of {self._folder}"

    def close(self) -> None:
        if self._syncing is not None:
            wait([self._syncing[0]])  # once it is closed, the descriptor may belong to another file
        self._syncer.close()
        self._close_segment()

    def _close_segment(self) -> None:
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                os.close(fd)
        self._fd = self._direct_fd = -1
