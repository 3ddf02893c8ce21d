"""Memory for frames: a bounded ring of buffers between the step path and the log."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAX_FRAME_BYTES, Header, aligned
from torchrec_stream_ckpt.format.padding import BUFFER_BYTES, with_padding
from torchrec_stream_ckpt.util.signal_safe import SafeCondition

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, weakref_slot=True, eq=False)
class FrameBuffer:
    """Memory for one frame. Its holder owns it: the drain, then the publisher, then the ring again.

    If an exception stops the owner, the owner just drops it.
    """

    array: Bytes
    pooled: bool
    header: Header | None = None
    ready: Callable[[], None] | None = None
    """Waits for the payload to be complete (a copy from a device). None if it already is."""
    payload_crc: int | None = None
    """Checksum of the payload, if the gather has computed it."""
    pad: Header | None = None
    """Header of the padding that follows the frame in this memory. None if there is none."""
    address: int = field(init=False)
    """Address of the memory."""

    def __post_init__(self) -> None:
        self.address = self.array.ctypes.data

    @property
    def frame_bytes(self) -> int:
        """Length of the frame, without padding."""
        assert self.header is not None
        return HEADER_LEN + self.header.payload_len

    @property
    def num_bytes(self) -> int:
        """Length of the frame and its padding."""
        return self.frame_bytes + (HEADER_LEN + self.pad.payload_len if self.pad is not None else 0)

    @property
    def last(self) -> Header:
        """Header of the last frame in this memory: the padding's, if there is any."""
        assert self.header is not None
        return self.pad or self.header

    def view(self) -> memoryview:
        """Return a view of the whole frame and its padding."""
        return self.array.data[: self.num_bytes]

    def put_json(self, header: Header, text: bytes) -> None:
        """Make this a frame with a JSON payload (HELLO, MARK)."""
        header.payload_len = aligned(len(text))
        if HEADER_LEN + header.payload_len > min(len(self.array), MAX_FRAME_BYTES):
            raise UnsupportedError(
                f"{header.kind.name} of {len(text)} bytes does not fit a frame: too many tables or ranks"
            )
        self.array[HEADER_LEN : HEADER_LEN + header.payload_len] = np.frombuffer(
            text.ljust(header.payload_len), np.uint8
        )
        self.header, self.payload_crc = header, None


class FrameRing:
    """Bounded set of reusable frame buffers. A marker may borrow more memory, up to a separate budget.

    Args:
        ring_bytes: Memory of the ring.
        extra_bytes: Additional memory that only a marker may take. It is returned as its frames are acknowledged.
        allocate: Makes one buffer of the given number of bytes (pinned memory for a GPU).
        padded: Leave room for padding at the end of large frames.
    """

    def __init__(
        self,
        ring_bytes: int,
        extra_bytes: int,
        allocate: Callable[[int], Bytes] = lambda size: np.empty(size, np.uint8),
        *,
        padded: bool = False,
    ) -> None:
        self.capacity = max(2, ring_bytes // MAX_FRAME_BYTES)
        """Buffers of the ring, without the marker's budget."""
        self._extra_bytes = extra_bytes
        self._allocate = allocate
        self._padded = padded
        self._buffer_bytes = BUFFER_BYTES if padded else MAX_FRAME_BYTES
        self._free: list[FrameBuffer] = []
        self._out: dict[int, weakref.ref[FrameBuffer]] = {}
        """Ring buffers in use, by identity. A buffer that its owner drops leaves this dict by itself."""
        self._lent: dict[int, dict[int, weakref.ref[FrameBuffer]]] = {}
        """Buffers lent from the marker's budget, by their size. Almost all have one size, so summing is cheap."""
        self._changed = SafeCondition()
        self.waits = 0
        """Number of times that a call had to wait for space."""
        self.peak_bytes = 0
        """Largest memory that frames have taken so far, in bytes."""

    def acquire(self, *, extra: bool = False, wait_s: float = 0.0) -> FrameBuffer | None:
        """Return a buffer for any frame. Returns None if no buffer is free.

        Args:
            extra: True for a marker, which may use its budget.
            wait_s: Longest wait in seconds. 0 never waits.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                buffer = self._take() or (self._lend(MAX_FRAME_BYTES) if extra else None)
                remaining = deadline - time.monotonic()
                if buffer is not None or remaining <= 0:
                    return buffer
                self.waits += 1
                self._changed.wait(remaining)

    def borrow(self, num_bytes: int) -> FrameBuffer | None:
        """Return a buffer for a marker: ``num_bytes`` from its budget, or otherwise a ring buffer. Never waits."""
        with self._changed:
            return self._lend(num_bytes) or self._take()

    def _take(self) -> FrameBuffer | None:
        if self._taken == self.capacity:
            return None
        buffer = self._free.pop() if self._free else FrameBuffer(self._allocate(self._buffer_bytes), pooled=True)
        key = id(buffer)
        self._out[key] = weakref.ref(buffer, lambda _dropped: self._out.pop(key, None))
        self._note_peak()
        return buffer

    def _lend(self, num_bytes: int) -> FrameBuffer | None:
        if self._padded:
            num_bytes = with_padding(num_bytes)
        if self._borrowed_bytes + num_bytes > self._extra_bytes:
            return None
        buffer = FrameBuffer(self._allocate(num_bytes), pooled=False)
        key, lent = id(buffer), self._lent.setdefault(num_bytes, {})
        lent[key] = weakref.ref(buffer, lambda _dropped: lent.pop(key, None))
        self._note_peak()
        return buffer

    def _note_peak(self) -> None:
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)

    def release(self, buffer: FrameBuffer) -> None:
        with self._changed:
            if buffer.pooled:
                buffer.header, buffer.ready, buffer.payload_crc, buffer.pad = None, None, None, None
                del self._out[id(buffer)]
                self._free.append(buffer)
            else:  # padding before a frame is not the ring's
                self._lent.get(len(buffer.array), {}).pop(id(buffer), None)
            self._changed.notify_all()

    @property
    def _taken(self) -> int:
        return len(self._out)

    @property
    def _borrowed_bytes(self) -> int:
        return sum(num_bytes * len(lent) for num_bytes, lent in self._lent.copy().items())

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring, without the marker's budget and room for padding."""
        return self.capacity * MAX_FRAME_BYTES

    @property
    def used_bytes(self) -> int:
        """Memory of the frames that are in use at the moment. Those of the ring count without room for padding."""
        return self._taken * MAX_FRAME_BYTES + self._borrowed_bytes

    @property
    def limit_bytes(self) -> int:
        """Largest memory that frames may take."""
        return self.capacity * self._buffer_bytes + self._extra_bytes

    @property
    def has_room(self) -> bool:
        """True if a buffer of the ring is free at the moment."""
        return self._taken < self.capacity

    @property
    def held_bytes(self) -> int:
        """Memory of all buffers. The ring's buffers are kept once they are made."""
        return (self._taken + len(self._free)) * self._buffer_bytes + self._borrowed_bytes
