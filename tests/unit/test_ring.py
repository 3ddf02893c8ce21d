"""Buffers that rows are encoded into, and that are sent from."""

from __future__ import annotations

import threading

import pytest

from tests.builders import JOB
from tests.parts import FrameBuffer, FrameRing
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.frame import MAX_FRAME_BYTES, Header, Kind

WAIT_S = 20.0


@pytest.fixture
def ring() -> FrameRing:
    return FrameRing(4 * MAX_FRAME_BYTES, 2 * MAX_FRAME_BYTES)


def taken(ring: FrameRing, count: int, *, extra: bool = False) -> list[FrameBuffer | None]:
    return [ring.acquire(extra=extra) for _ in range(count)]


def test_the_ring_is_bounded(ring: FrameRing) -> None:
    assert ring.capacity == 4
    buffers = taken(ring, 5)
    assert [buffer is not None for buffer in buffers] == [True] * 4 + [False]
    assert buffers[0] is not None
    ring.release(buffers[0])
    assert ring.acquire() is buffers[0]


def test_a_marker_may_take_from_its_budget_and_gives_it_back(ring: FrameRing) -> None:
    held = taken(ring, 4)
    assert None not in held
    extra = taken(ring, 3, extra=True)
    assert [buffer is not None and not buffer.pooled for buffer in extra] == [True, True, False]
    assert extra[0] is not None
    ring.release(extra[0])
    assert ring.acquire() is None
    assert ring.acquire(extra=True) is not None


def test_a_buffer_that_its_owner_drops_is_not_missed(ring: FrameRing) -> None:
    held = taken(ring, 6, extra=True)
    assert None not in held
    assert not ring.has_room
    held.clear()  # an exception has stopped whoever was filling them
    assert ring.has_room
    assert ring.used_bytes == 0
    assert None not in taken(ring, 4)


def test_a_ring_has_room_for_two_frames_at_least() -> None:
    assert FrameRing(1, 0).capacity == 2


def test_waiting_for_a_buffer_ends_when_one_comes_back(ring: FrameRing) -> None:
    buffers = taken(ring, 4)
    got: list[FrameBuffer | None] = []
    waiter = threading.Thread(target=lambda: got.append(ring.acquire(wait_s=WAIT_S)))
    waiter.start()
    assert buffers[2] is not None
    ring.release(buffers[2])
    waiter.join(WAIT_S)
    assert got == [buffers[2]]


def test_waiting_for_a_buffer_is_bounded(ring: FrameRing) -> None:
    held = taken(ring, 4)
    assert None not in held
    assert ring.acquire(wait_s=0.01) is None


def test_a_released_buffer_forgets_its_frame(ring: FrameRing) -> None:
    buffer = ring.acquire()
    assert buffer is not None
    buffer.put_json(Header(Kind.MARK, JOB, 1), b"{}")
    buffer.ready = lambda: None
    ring.release(buffer)
    assert (buffer.header, buffer.ready) == (None, None)


def test_json_that_outgrows_a_frame_is_refused(ring: FrameRing) -> None:
    buffer = ring.acquire()
    assert buffer is not None
    with pytest.raises(UnsupportedError, match="HELLO of 1000000 bytes does not fit a frame"):
        buffer.put_json(Header(Kind.HELLO, JOB, 1), b" " * 1_000_000)


@pytest.mark.parametrize("padded", [False, True])
def test_a_full_ring_uses_as_much_as_it_has(padded: bool) -> None:
    ring = FrameRing(2 * MAX_FRAME_BYTES, 0, padded=padded)
    held = [ring.acquire(), ring.acquire()]
    assert None not in held
    assert ring.acquire() is None
    assert ring.used_bytes == ring.ring_bytes == 2 * MAX_FRAME_BYTES
    assert (ring.held_bytes > ring.used_bytes) is padded
