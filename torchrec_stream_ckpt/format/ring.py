"""Memory for frames: a bounded ring of buffers between the step path and the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAX_FRAME_BYTES, Header, aligned

Bytes = npt.NDArray[np.uint8]


@dataclass(slots=True, eq=False)
class FrameBuffer:
    """Memory for one frame. Its owner is whoever holds it: drain, then publisher, then the ring again."""

    array: Bytes
    pooled: bool
    header: Header | None = None
    ready: Callable[[], None] | None = None
    """Waits until the payload is there (a copy from a device); None when it already is."""

    def view(self) -> memoryview:
        """The whole frame."""
        assert self.header is not None
        return self.array.data[: HEADER_LEN + self.header.payload_len]

    def put_json(self, header: Header, text: bytes) -> None:
        """Make this a frame with a JSON payload (HELLO, MARK)."""
        header.payload_len = aligned(len(text))
        if HEADER_LEN + header.payload_len > len(self.array):
            raise UnsupportedError(
                f"{header.kind.name} of {len(text)} bytes does not fit a frame: too many tables or ranks"
            )
        self.array[HEADER_LEN : HEADER_LEN + header.payload_len] = np.frombuffer(
            text.ljust(header.payload_len), np.uint8
        )
        self.header = header


class FrameRing:
    """A bounded set of frame buffers, reused; a marker may borrow more, up to its own budget.

    Args:
        ring_bytes: Memory of the ring.
        extra_bytes: Memory that only a marker may take on top, given back as its frames are acknowledged.
        allocate: Makes one buffer of the given number of bytes (pinned memory for a GPU).
    """

    def __init__(
        self,
        ring_bytes: int,
        extra_bytes: int,
        allocate: Callable[[int], Bytes] = lambda size: np.empty(size, np.uint8),
    ) -> None:
        self._capacity = max(2, ring_bytes // MAX_FRAME_BYTES)
        self._extra = extra_bytes // MAX_FRAME_BYTES
        self._allocate = allocate
        self._free: list[FrameBuffer] = []
        self._taken = 0
        self._extra_taken = 0
        self._changed = threading.Condition()

    def acquire(self, *, extra: bool = False, wait_s: float = 0.0) -> FrameBuffer | None:
        """A buffer, or None when there is none.

        Args:
            extra: A marker asks: it may take from its budget.
            wait_s: Wait at most so long; 0 never waits.
        """
        deadline = time.monotonic() + wait_s
        with self._changed:
            while True:
                if self._taken < self._capacity:
                    self._taken += 1
                    return self._free.pop() if self._free else FrameBuffer(self._new(), pooled=True)
                if extra and self._extra_taken < self._extra:
                    self._extra_taken += 1
                    return FrameBuffer(self._new(), pooled=False)
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    return None
                self._changed.wait(remaining)

    def _new(self) -> Bytes:
        return self._allocate(MAX_FRAME_BYTES)

    def release(self, buffer: FrameBuffer) -> None:
        with self._changed:
            if buffer.pooled:
                buffer.header, buffer.ready = None, None
                self._taken -= 1
                self._free.append(buffer)
            else:
                self._extra_taken -= 1
            self._changed.notify_all()

    @property
    def capacity(self) -> int:
        """Buffers of the ring, without the marker's budget."""
        return self._capacity

    @property
    def in_use(self) -> int:
        return self._taken + self._extra_taken
