"""From the step path to the log: the thread that sends frames.

The training thread submits frames and never waits for the log. The
publisher's thread numbers, chains and checksums the frames, hands them to the log and keeps each one
until the log has acknowledged it. When a writer fails, another one is opened and everything that is not
acknowledged is sent again under the same seq; readers drop what they have seen. When the log has lost what it had
acknowledged, the stream is over: nothing that follows could be restored.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from torchrec_stream_ckpt.errors import LogUnavailableError, StreamLostError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.log.api import DataWriter
from torchrec_stream_ckpt.log.flight import Flight, StreamEnd
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.signal_safe import SafeCondition, SafeEvent

log = logging.getLogger(__name__)

_IDLE_S = 0.05
_POLL_S = 0.02
_MAX_BATCH = 64
_ENOUGH = 16
_PAUSE_S = 0.01
"""Rows are sent once there are so many frames of them, or none has come for so long."""
_BACKOFF_S = (0.1, 5.0)
_SILENT_S = 5.0
"""A log that owes acknowledgements, and has given none for so long, takes no frames: it may never say so itself."""
_DEAF_S = 15.0
"""After so long another writer is opened: the old one may hang on a broker that is cut off and does not know it."""


class _Totals(NamedTuple):
    """What was submitted up to a frame, that one included."""

    frames: int = 0
    rows: int = 0
    num_bytes: int = 0


class Publisher:
    """Sends one rank's frames in order. ``submit``, ``wait`` and ``close`` are for other threads.

    Args:
        open_writer: Opens the log's writer; the argument is where acknowledged bytes end.
        ring: Where buffers go back to.
    """

    def __init__(self, open_writer: Callable[[int], DataWriter], ring: FrameRing) -> None:
        self._open_writer = open_writer
        self._ring = ring
        self.failure: str | None = None
        """Why the log does not take frames now; None while it does."""
        self.lost: StreamLostError | None = None
        """Set once what the log had acknowledged is gone: the stream is over, and what is submitted is dropped."""
        self._queue: deque[tuple[FrameBuffer, _Totals]] = deque()
        self._unqueued = _Totals()
        """Of the last frame that has left the queue, or was dropped."""
        self._enough = min(_ENOUGH, ring.capacity // 2)
        self._due = False
        """True if what is queued is to be sent at once."""
        self._queued_s = 0.0
        self._heard_s = 0.0
        """When the log last acknowledged a frame, or owed none."""
        self._told_s = 0.0
        """When it was last found out for whom it waits."""
        self._changed = SafeCondition()
        self.flight = Flight(ring, self._changed)
        """What was sent, and where the stream stands that was acknowledged."""
        self._closing = False
        self._abandoned = SafeEvent()
        self._crash: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="stream-ckpt-publisher", daemon=True)
        self._thread.start()

    def submit(self, buffer: FrameBuffer) -> int:
        """Queue a frame whose header and payload are set; returns its seq. Never waits for the log.

        A few frames of rows do not wake the publisher: while the next one is gathered it would take the interpreter
        and memory bandwidth from the training thread (docs/performance.md). A MARK does.
        """
        header = buffer.header
        assert header is not None
        with self._changed:
            if self.lost is None:
                self._check()
            frames, rows, num_bytes = self._totals()
            header.seq = frames
            if self.lost is not None:
                self._unqueued = _Totals(frames + 1, rows, num_bytes)
                self._ring.release(buffer)
                return frames
            totals = _Totals(frames + 1, rows + header.rows, num_bytes + HEADER_LEN + header.payload_len)
            # All that changes, at once: whatever is raised here on the training thread, no seq is missing or doubled.
            self._queue.append((buffer, totals))
            self._queued_s = time.monotonic()
            if header.kind is not Kind.ROWS or len(self._queue) >= self._enough:
                self._due = True
                self._changed.notify_all()
            return frames

    def _totals(self) -> _Totals:
        try:
            return self._queue[-1][1]
        except IndexError:  # it has left the queue: that was said before it did
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
        """Wait until the MARK frame ``seq`` is durable; where the stream ends behind it, or None on time-out.

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
        """Frames that are not acknowledged."""
        return self._totals().frames - self.flight.acked.frames

    @property
    def backlog(self) -> tuple[int, int]:
        """(frames, bytes of frames) that are not acknowledged."""
        with self._changed:
            totals = self._totals()
            return totals.frames - self.flight.acked.frames, totals.num_bytes - self.flight.acked_bytes

    def close(self, timeout_s: float) -> bool:
        """Send what is queued, for at most ``timeout_s``; whether everything was acknowledged."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join(timeout_s)
        self._abandoned.set()
        return self.pending == 0

    def discard(self, why: StreamLostError, timeout_s: float) -> None:
        """End the stream here, as lost, and give the ring back what was not acknowledged: no reader will restore it."""
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

    # The publisher's own thread.

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
            log.warning("this stream is over: %s", error.headline)
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
        if self.failure is None:
            log.warning("the log takes no frames now, they are kept and sent again: %s", why)
        self.failure = why

    def _finished(self) -> bool:
        return self._abandoned.is_set() or (self._closing and not self._queue and not self.flight.buffers)

    def _reopen(self) -> DataWriter:
        """A fresh writer that has been given again all that no writer has had acknowledged."""
        writer = self._open_writer(self.flight.acked.end)
        self._heard_s = time.monotonic()
        try:
            self.flight.send_again(writer)
        except BaseException:
            writer.close()
            raise
        return writer

    def _pump(self, writer: DataWriter) -> bool:
        """Send what is queued and take in acknowledgements; whether there were any."""
        if not self.flight.buffers:
            self._await_frames()
            self._heard_s = time.monotonic()
        for _ in range(min(len(self._queue), _MAX_BATCH)):
            buffer, self._unqueued = self._queue[0]
            self._queue.popleft()
            self.flight.send(buffer, writer)
        acks = writer.poll(0.0 if self._queue else _POLL_S)
        if acks:
            failpoint("stream.acknowledged")
            self._heard_s = time.monotonic()
            self.flight.acknowledge(acks)
            self._note_answer()
        elif self.flight.buffers:
            self._note_silence(writer)
        return bool(acks)

    def _note_answer(self) -> None:
        """The log has acknowledged frames."""
        if self.failure is not None:
            log.warning("the log takes frames again")
            self.failure = None
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
        """Wait a moment for frames, and then until they are due."""
        with self._changed:
            if not self._queue and not self._closing:
                self._changed.wait(_IDLE_S)
            while self._queue and not (self._due or self._closing):
                pause = self._queued_s + _PAUSE_S - time.monotonic()
                if pause <= 0:
                    break
                self._changed.wait(pause)
            self._due = False
