"""Publisher: the thread that sends frames from the step path to the log.

The training thread submits frames and never waits for the log. The
publisher's thread numbers, chains and checksums the frames, sends them to the log and keeps each one
until the log has acknowledged it. If a writer fails, another one is opened and all unacknowledged frames are
sent again under the same seq; readers drop those that they have seen. If the log has lost acknowledged frames,
the stream is over, because nothing after them could be restored.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from torchrec_stream_ckpt.errors import LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, NEWEST_VERSION, Header, Kind
from torchrec_stream_ckpt.format.padding import BLOCK, LEAST_BYTES, MOST_SHARE, gap
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.log.api import DataWriter
from torchrec_stream_ckpt.log.flight import Flight, StreamEnd
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.signal_safe import SafeCondition, SafeEvent

log = logging.getLogger(__name__)

_MOST_REASONS = 10
"""Reasons that are logged in one outage, at most."""
IDLE_S = 5.0
"""Seconds between two looks at the log while there is nothing to send: a client may have to renew its login."""
_POLL_S = 0.02
_MAX_BATCH = 64
_ENOUGH = 16
_PAUSE_S = 0.01
"""Rows are sent once this many frames are queued, or no frame was queued for this many seconds."""
_BACKOFF_S = (0.1, 5.0)
_SILENT_S = 5.0
"""Seconds without a due acknowledgment after which the log counts as failing. It may never report an error."""
_DEAF_S = 15.0
"""Seconds after which another writer is opened. The old one may hang on a broker that is cut off without knowing it."""


class _Totals(NamedTuple):
    """Totals of all frames submitted up to and including one frame."""

    frames: int = 0
    rows: int = 0
    num_bytes: int = 0
    padding_bytes: int = 0


def _pad_header(frame: Header, num_bytes: int) -> Header:
    """Return the header of padding of ``num_bytes`` in the stream of ``frame``, without its seq."""
    header = Header(Kind.PAD, frame.job, frame.generation, frame.rank, version=NEWEST_VERSION)
    header.schema_crc, header.payload_len = frame.schema_crc, num_bytes - HEADER_LEN
    return header


class Publisher:
    """Sends one rank's frames in order. ``submit``, ``wait`` and ``close`` are for other threads.

    Args:
        open_writer: Opens the log's writer. The argument is the end of the acknowledged bytes.
        ring: Ring that buffers are returned to.
        aligned: Pad large frames to blocks, so that the log can use direct writes. The generation's CLAIM
            must announce it.
    """

    def __init__(self, open_writer: Callable[[int], DataWriter], ring: FrameRing, *, aligned: bool = False) -> None:
        self._open_writer = open_writer
        self._ring = ring
        self.failure: str | None = None
        self._logged: set[str] = set()
        """Reasons of this outage that were logged, without their numbers."""
        """Reason why the log does not accept frames at the moment. None if it does."""
        self.lost: StreamLostError | None = None
        """Set once acknowledged frames are lost. The stream is then over, and submitted frames are dropped."""
        self._aligned = aligned
        self._origin: int | None = 0
        """Offset from which blocks count. None while the log does not use direct writes."""
        self.writes = ""
        """Way in which the log writes, in words. Empty until it is open."""
        self._queue: deque[tuple[FrameBuffer, _Totals]] = deque()
        self._unqueued = _Totals()
        """Totals up to the last frame that has left the queue, or was dropped."""
        self._enough = min(_ENOUGH, ring.capacity // 2)
        self._due = False
        """True if the queued frames are to be sent at once."""
        self._resting = False
        """True while the thread waits for the first frame."""
        self._queued_s = 0.0
        self._heard_s = 0.0
        """Time when the log last acknowledged a frame, or had none to acknowledge."""
        self._told_s = 0.0
        """Time of the last report of whom the log waits for."""
        self._changed = SafeCondition()
        self.flight = Flight(ring, self._changed)
        """Unacknowledged frames, and the acknowledged position of the stream."""
        self._closing = False
        self._abandoned = SafeEvent()
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stream-ckpt-publisher", daemon=True)
        self._thread.start()

    def submit(self, buffer: FrameBuffer) -> int:
        """Queue a frame whose header and payload are set. Returns its seq. Never waits for the log.

        The first frame after a rest wakes the publisher, which then waits until no more come. A few more frames of
        rows do not wake it: it would take the interpreter and memory bandwidth from the training thread while the next
        frame is gathered (docs/performance.md). A MARK does.
        """
        header = buffer.header
        assert header is not None
        with self._changed:
            if self.lost is None:
                self._check()
            if self.lost is None and self._aligned:
                self._pad(buffer, header)
            frames, rows, num_bytes, padding = self._totals()
            header.seq = frames
            if self.lost is not None:
                self._unqueued = _Totals(frames + 1, rows, num_bytes, padding)
                self._ring.release(buffer)
                return frames
            padding += buffer.num_bytes - buffer.frame_bytes
            if buffer.pad is not None:
                buffer.pad.seq = frames + 1
            records = header.rows if header.kind is Kind.ROWS else 0
            totals = _Totals(buffer.last.seq + 1, rows + records, num_bytes + buffer.num_bytes, padding)
            # One append makes all changes, so an exception on the training thread leaves no seq missing or doubled.
            self._queue.append((buffer, totals))
            self._queued_s = time.monotonic()
            if header.kind not in (Kind.ROWS, Kind.IDS) or len(self._queue) >= self._enough:
                self._due = True
                self._changed.notify_all()
            elif self._resting:
                self._changed.notify_all()
            return frames

    def _pad(self, buffer: FrameBuffer, header: Header) -> None:
        """Pad a large frame: before it to the next block, and in its own memory up to the end of a block."""
        origin, totals = self._origin, self._totals()
        buffer.pad = None
        own = buffer.frame_bytes
        if origin is None or header.kind is not Kind.ROWS or own < LEAST_BYTES or buffer.address % BLOCK:
            return
        lead, tail = gap(totals.num_bytes - origin), gap(own)
        most = MOST_SHARE * (totals.num_bytes + lead + own + tail)
        if own + tail > len(buffer.array) or totals.padding_bytes + lead + tail > most:
            return
        if lead:
            between = FrameBuffer(np.zeros(lead, np.uint8), pooled=False, header=_pad_header(header, lead))
            between.last.seq = totals.frames
            after = _Totals(totals.frames + 1, totals.rows, totals.num_bytes + lead, totals.padding_bytes + lead)
            self._queue.append((between, after))
        buffer.pad = _pad_header(header, tail) if tail else None

    def _totals(self) -> _Totals:
        try:
            return self._queue[-1][1]
        except IndexError:  # the frame has left the queue, and _unqueued was set before
            return self._unqueued

    @property
    def rows(self) -> int:
        """Row records submitted."""
        return self._totals().rows

    @property
    def num_bytes(self) -> int:
        """Bytes of frames submitted."""
        return self._totals().num_bytes

    def wait_mark(self, seq: int, timeout_s: float) -> StreamEnd | None:
        """Wait until the MARK frame ``seq`` is durable. Returns the stream's end after it, or None after a timeout.

        Raises:
            StreamLostError: the stream is over.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            marks = self.flight.marks
            while seq not in marks:
                self._check()
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._changed.wait(remaining)
            end = marks[seq]
            for known in [known for known in marks if known <= seq]:
                del marks[known]
            return end

    def _check(self) -> None:
        if self.lost is not None:
            raise self.lost
        if self._crash is not None:
            raise RuntimeError("the publisher thread has died") from self._crash
        if self._closing:
            raise LogUnavailableError("the stream is closed")

    @property
    def pending(self) -> int:
        """Number of unacknowledged frames."""
        return self._totals().frames - self.flight.acked.frames

    @property
    def padding_bytes(self) -> int:
        """Bytes of padding among ``num_bytes``."""
        return self._totals().padding_bytes

    @property
    def backlog(self) -> tuple[int, int]:
        """(frames, bytes of frames) that are not acknowledged."""
        with self._changed:
            totals = self._totals()
            return totals.frames - self.flight.acked.frames, totals.num_bytes - self.flight.acked_bytes

    def close(self, timeout_s: float) -> bool:
        """Send queued frames for at most ``timeout_s``. Returns True if everything was acknowledged."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._abandoned.set()
        return self.pending == 0

    def discard(self, why: StreamLostError, timeout_s: float) -> None:
        """End the stream here as lost, and return unacknowledged buffers to the ring. No reader will restore them."""
        with self._changed:
            self.lost = self.lost or why
            self._abandoned.set()
            self._changed.notify_all()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            return  # its writer still reads these buffers
        for buffer in (*self.flight.buffers, *(buffer for buffer, _ in self._queue)):
            self._ring.release(buffer)
        self._unqueued = self._totals()
        self.flight.buffers.clear()
        self._queue.clear()

    # On the publisher's thread.

    def _run(self) -> None:
        writer: DataWriter | None = None
        backoff_s = _BACKOFF_S[0]
        try:
            while not self._finished():
                try:
                    if writer is None:
                        writer = self._reopen()
                    if self._pump(writer):
                        backoff_s = _BACKOFF_S[0]
                except LogUnavailableError as error:
                    self._fail(error.headline)
                    if writer is not None:
                        writer.close()
                        writer = None
                    self._abandoned.wait(backoff_s)
                    backoff_s = min(2 * backoff_s, _BACKOFF_S[1])
        except StreamLostError as error:
            log.warning("this stream has ended: %s", error.headline)
            with self._changed:
                self.lost = self.lost or error
                self._changed.notify_all()
        except BaseException as error:
            log.exception("the publisher thread has died")
            with self._changed:
                self._crash = error
                self._changed.notify_all()
        finally:
            if writer is not None:
                writer.close()

    def _fail(self, why: str) -> None:
        """Note that the log accepts no frames. Each reason is logged once per outage, whatever its numbers."""
        reason = re.sub(r"[0-9]+", "", why)
        if reason not in self._logged and len(self._logged) < _MOST_REASONS:
            self._logged.add(reason)
            log.warning("the log accepts no frames; they are kept and will be sent again: %s", why)
        self.failure = why

    def _finished(self) -> bool:
        return self._abandoned.is_set() or (self._closing and not self._queue and not self.flight.buffers)

    def _reopen(self) -> DataWriter:
        """Open a fresh writer and send all unacknowledged frames to it."""
        writer = self._open_writer(self.flight.acked.end)
        self._heard_s = time.monotonic()
        self._note_writer(writer)
        try:
            self.flight.send_again(writer)
        except BaseException:
            writer.close()
            raise
        return writer

    def _note_writer(self, writer: DataWriter) -> None:
        self._origin, self.writes = writer.origin, writer.how

    def _pump(self, writer: DataWriter) -> bool:
        """Send queued frames and process acknowledgments. Returns True if there were any."""
        if not self.flight.buffers:
            self._await_frames()
            self._heard_s = time.monotonic()
        for _ in range(min(len(self._queue), _MAX_BATCH)):
            buffer, self._unqueued = self._queue[0]
            self._queue.popleft()
            self.flight.send(buffer, writer)
        acks = writer.poll(0.0 if self._queue else _POLL_S)
        self._note_writer(writer)
        if acks:
            failpoint("stream.acknowledged")
            self._heard_s = time.monotonic()
            self.flight.acknowledge(acks)
            self._note_answer()
        elif self.flight.buffers:
            self._note_silence(writer)
        return bool(acks)

    def _note_answer(self) -> None:
        """Note that the log has acknowledged frames."""
        if self.failure is not None:
            log.warning("the log accepts frames again")
            self.failure = None
            self._logged.clear()
        with self._changed:
            self._changed.notify_all()

    def _note_silence(self, writer: DataWriter) -> None:
        now = time.monotonic()
        if now - max(self._heard_s, self._told_s) > _SILENT_S:
            self._fail(f"no frame was acknowledged for {now - self._heard_s:.0f} s: waiting for {writer.waits_for()}")
            self._told_s = time.monotonic()
        if now - self._heard_s > _DEAF_S:
            raise LogUnavailableError(self.failure or "no frame was acknowledged")

    def _await_frames(self) -> None:
        """Wait for frames, and then until they are due."""
        with self._changed:
            if not self._queue and not self._closing and not self._abandoned.is_set():
                self._resting = True
                self._changed.wait(IDLE_S)
                self._resting = False
            while self._queue and not (self._due or self._closing):
                pause = self._queued_s + _PAUSE_S - time.monotonic()
                if pause <= 0:
                    break
                self._changed.wait(pause)
            self._due = False
