"""Writer of one rank in a bucket: joins frames into objects, and puts a few of them at the same time."""

from __future__ import annotations

import logging
import time
from collections import deque
from concurrent.futures import Future, wait

from torchrec_stream_ckpt.errors import CorruptionError, LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind, parse_header
from torchrec_stream_ckpt.log.api import Ack
from torchrec_stream_ckpt.log.bucket.objects import of_log, read_if_there
from torchrec_stream_ckpt.log.bucket.streams import object_name, sizes_of, walk
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.store.api import Objects

log = logging.getLogger(__name__)

OBJECT_BYTES = 8 * 2**20
"""Bytes of frames that are enough for an object."""
LINGER_S = 2.0
"""Seconds that a frame waits for more, unless a MARK follows it."""
PUTS = 3
"""Objects that are put at the same time."""


class BucketWriter:
    """Writes frames of one stream.

    An object ends after a MARK, after OBJECT_BYTES, or when its first frame has waited for LINGER_S. Of a stream that
    is resumed, the bucket may have objects after ``resume_at`` that were not acknowledged. They are never overwritten:
    the same frames are sent again, and acknowledged if the bucket has them.

    Args:
        objects: Objects of the log.
        generation: Generation of the stream.
        partition: Its partition.
        resume_at: Offset of the first frame.
        again: True if the stream may have objects already.
    """

    how = "objects"

    def __init__(self, objects: Objects, generation: int, partition: int, resume_at: int, *, again: bool) -> None:
        self._objects = objects
        self._stream = generation, partition
        self._end = resume_at
        """Offset of the next object."""
        self._pending: list[memoryview] = []
        self._pending_bytes = 0
        self._since_s = 0.0
        self._is_due = False
        self._flying: deque[tuple[Future[None], list[Ack]]] = deque()
        self._there = memoryview(b"")
        """Bytes from ``_end`` on that the bucket has already."""
        self._found: list[Ack] = []
        """Frames among them."""
        with of_log("cannot open a stream in the bucket"):
            sizes = sizes_of(objects, generation, partition)
            if again:
                self._take_over(sizes)
            elif sizes:
                raise StreamLostError(
                    f"objects of generation {generation} already exist, written by another program",
                    hint="only one trainer may run a job; stop one, or give it another URI",
                    store=objects.url,
                    name=object_name(generation, partition, min(sizes)),
                )
        self._workers = [Worker(f"stream-ckpt-put-{number}") for number in range(PUTS)]
        self._turn = 0

    @property
    def origin(self) -> int | None:
        """None: a bucket gains nothing from blocks."""
        return None

    def _take_over(self, sizes: dict[int, int]) -> None:
        """Read the objects after the position at which the stream is resumed."""
        resume_at = self._end
        if resume_at and not any(offset < resume_at for offset in sizes) and resume_at not in sizes:
            log.debug("all earlier objects of the stream were trimmed")
        elif resume_at and sizes and min(sizes) < resume_at:
            reach = max(piece.end for piece in walk(self._objects, self._stream, min(sizes), sizes))
            if reach < resume_at:
                raise StreamLostError(
                    f"acknowledged bytes [{reach}, {resume_at}) of this generation are missing",
                    hint="restore them from a copy, or start a new job: they were deleted while the job ran",
                    store=self._objects.url,
                    name=object_name(*self._stream, reach),
                )
        self._there = memoryview(
            b"".join(self._objects.read(piece.name) for piece in walk(self._objects, self._stream, resume_at, sizes))
        )

    def send(self, frame: memoryview) -> None:
        if self._there:
            self._match(frame)
            return
        if not self._pending:
            self._since_s = time.monotonic()
        self._pending.append(frame)
        self._pending_bytes += len(frame)
        self._is_due = self._is_due or _has_mark(frame)
        if self._is_due or self._pending_bytes >= OBJECT_BYTES:
            self._put()

    def _match(self, frame: memoryview) -> None:
        """Acknowledge a frame that the bucket has, because an earlier writer of the stream has put it.

        Raises:
            StreamLostError: it has other bytes there.
        """
        if self._there[: len(frame)] != frame:
            raise StreamLostError(
                "the bucket has other frames at this offset, written by another program",
                hint="only one trainer may run a job; stop one, or give it another URI",
                store=self._objects.url,
                name=object_name(*self._stream, self._end),
            )
        self._found.append(Ack(self._end, self._end + len(frame)))
        self._end += len(frame)
        self._there = self._there[len(frame) :]

    def _put(self) -> None:
        """Begin to put the pending frames as one object."""
        acks, begin = [], self._end
        for frame in self._pending:
            acks.append(Ack(self._end, self._end + len(frame)))
            self._end += len(frame)
        worker = self._workers[self._turn % PUTS]
        self._turn += 1
        self._flying.append((worker.submit(self._create, begin, self._pending), acks))
        self._pending, self._pending_bytes, self._is_due = [], 0, False

    def _create(self, begin: int, frames: list[memoryview]) -> None:
        """(a worker) Create an object, unless it was created by an earlier try whose answer was lost."""
        name = object_name(*self._stream, begin)
        if self._objects.create(name, frames):
            return
        there = read_if_there(self._objects, name)
        if there == b"":
            raise StreamLostError(
                "the bucket has an empty object at this offset, put by another program",
                hint="delete the object, and find out which program puts objects below the log's prefix",
                store=self._objects.url,
                name=name,
            )
        if there is None or there != b"".join(frames):
            raise LogUnavailableError(
                "the bucket has another object at this offset, of an earlier writer of the stream",
                hint="nothing to do: the stream is opened again",
                store=self._objects.url,
                name=name,
            )

    def poll(self, timeout_s: float) -> list[Ack]:
        if self._pending and time.monotonic() - self._since_s >= LINGER_S:
            self._put()
        acks, self._found = self._found, []
        if self._flying:
            wait([self._flying[0][0]], 0.0 if acks else timeout_s)
        elif not acks and timeout_s:
            time.sleep(timeout_s)
        with of_log("cannot write the stream"):
            while self._flying and self._flying[0][0].done():
                future, written = self._flying.popleft()
                future.result()
                acks += written
        return acks

    def waits_for(self) -> str:
        return f"the object store of {self._objects.url}"

    def close(self) -> None:
        wait([future for future, _ in self._flying])  # so that no put arrives after another writer has looked
        for worker in self._workers:
            worker.close()


def _has_mark(frame: memoryview) -> bool:
    """Return whether a marker waits for this frame."""
    try:
        return parse_header(frame[:HEADER_LEN]).kind is Kind.MARK
    except CorruptionError:
        return False
