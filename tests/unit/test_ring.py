"""Buffers that rows are encoded into, and that are sent from."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from crc32c import crc32c

from tests.builders import JOB
from tests.inside import masks_of, sender_of
from tests.parts import Drain, FrameBuffer, FrameRing, RowStager
from tests.unit.captured_job import ROWS as TOUCHED
from tests.unit.captured_job import Job
from torchrec_stream_ckpt.capture import staging
from torchrec_stream_ckpt.capture import touched as sweep_module
from torchrec_stream_ckpt.capture.sender import KernelRows
from torchrec_stream_ckpt.capture.staging import StreamIdentity
from torchrec_stream_ckpt.capture.touched import MaskSweep
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAX_FRAME_BYTES, Header, Kind
from torchrec_stream_ckpt.model import LocalShard
from torchrec_stream_ckpt.native.kernel import describe
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

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


# Rows gathered into frames: by the native kernel, or small frames by numpy and large ones by torch; the same bytes.


ROWS, DIM, ROW0 = 50, 8, 100


def filled(weights: torch.Tensor, sums: torch.Tensor, rows: list[int]) -> tuple[bytes, ...]:
    """Ids, weights and states of a frame with ``rows``, as bytes without padding."""
    dtype = str(weights.dtype).removeprefix("torch.")
    spec = TableSpec("t", 1000, DIM, dtype, "exact_rowwise_adagrad", (StateSpec("sum", "float32", True),))
    stager = RowStager(LocalShard(spec, ROW0, ROWS, 0, DIM), 0, StreamIdentity(bytes(16), 1, 0, 0))
    buffer = FrameBuffer(np.full(stager.frame_bytes(len(rows)), 0xAA, np.uint8), pooled=False)
    picked = torch.tensor(rows, dtype=torch.int64)
    stager.fill(buffer, picked, weights, (sums,), step=1, marker=1)
    assert buffer.header is not None
    lengths = (8 * len(rows), weights.element_size() * DIM * len(rows), 4 * len(rows))
    begins = [HEADER_LEN + offset for offset in buffer.header.section_offsets]
    return tuple(buffer.array[b : b + n].tobytes() for b, n in zip(begins, lengths, strict=True))


@pytest.mark.parametrize("rows", [[], [49], [3, 0, 49, 7], [7, 8, 9], [1, 3, 2, 4], [4, 3], list(range(ROWS))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("whole", [True, False], ids=["contiguous", "strided"])
def test_small_and_large_frames_have_the_same_bytes(
    rows: list[int], dtype: torch.dtype, whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = torch.rand(ROWS, 2 * DIM).to(dtype)[:, ::2]
    weights = weights.contiguous() if whole else weights
    sums = torch.rand(ROWS)
    by_kernel = filled(weights, sums, rows)
    monkeypatch.setattr(staging, "kernel", lambda: None)
    small = filled(weights, sums, rows)
    assert small == by_kernel
    monkeypatch.setattr(staging, "SMALL", -1)
    assert small == filled(weights, sums, rows)
    ids = np.array(rows, np.int64)
    assert small[0] == (ids + ROW0).tobytes()
    assert small[1] == weights[ids].contiguous().view(torch.uint8).numpy().tobytes()
    assert small[2] == sums[ids].numpy().tobytes()


@pytest.mark.parametrize("way", ["kernel", "small", "large"])
@pytest.mark.parametrize("rows", [[0, -1], [0, ROWS], [-1, 0], [-2, -1], [ROWS - 1, ROWS], [ROWS, ROWS + 1]])
def test_a_row_outside_the_shard_is_no_row_of_it(rows: list[int], way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if way != "kernel":
        monkeypatch.setattr(staging, "kernel", lambda: None)
    monkeypatch.setattr(staging, "SMALL", -1 if way == "large" else staging.SMALL)
    with pytest.raises(IndexError):
        filled(torch.rand(ROWS, DIM), torch.rand(ROWS), rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_of_the_gather_is_that_of_the_payload(dtype: torch.dtype) -> None:
    if staging.kernel() is None:
        pytest.skip(f"native kernel: {describe()}")
    dtype_name = str(dtype).removeprefix("torch.")
    spec = TableSpec("t", 1000, DIM, dtype_name, "exact_rowwise_adagrad", (StateSpec("sum", "float32", True),))
    stager = RowStager(LocalShard(spec, ROW0, ROWS, 0, DIM), 0, StreamIdentity(bytes(16), 1, 0, 0))
    buffer = FrameBuffer(np.full(stager.frame_bytes(ROWS), 0xAA, np.uint8), pooled=False)
    for rows in ([3, 1, 2], list(range(ROWS)), []):  # one buffer again and again, as the ring hands it out
        stager.fill(buffer, torch.tensor(rows, dtype=torch.int64), torch.rand(ROWS, DIM).to(dtype), (torch.rand(ROWS),),
                    step=1, marker=1)  # fmt: skip
        assert buffer.header is not None
        assert buffer.payload_crc == crc32c(buffer.view()[HEADER_LEN:])
    buffer.put_json(buffer.header, b"{}")
    assert buffer.payload_crc is None


def test_a_tensor_that_has_moved_is_read_at_its_new_place() -> None:
    """A stager keeps addresses between frames; an optimizer or a resize may replace the memory."""
    spec = TableSpec("t", 1000, DIM, "float32", "exact_rowwise_adagrad", (StateSpec("sum", "float32", True),))
    stager = RowStager(LocalShard(spec, ROW0, ROWS, 0, DIM), 0, StreamIdentity(bytes(16), 1, 0, 0))
    buffer = FrameBuffer(np.zeros(stager.frame_bytes(2), np.uint8), pooled=False)
    kept = []
    for _ in range(3):
        weights, sums = torch.rand(ROWS, DIM), torch.rand(ROWS)
        kept.append((weights, sums))
        stager.fill(buffer, torch.tensor([7, 9]), weights, (sums,), step=1, marker=1)
        assert buffer.header is not None
        begin = HEADER_LEN + buffer.header.section_offsets[1]
        assert buffer.array[begin : begin + 8 * DIM].tobytes() == weights[[7, 9]].numpy().tobytes()


# A sweep sends each row once, looks at no row twice, and sends no frames of single rows.


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("scan_rows", [1, 4, 2**16])
def test_a_sweep_by_a_mask_goes_on_after_what_was_sent(
    limit: int, scan_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some of a window finds no space; a drain sends rows before the sweep comes to them."""
    monkeypatch.setattr(sweep_module, "_SCAN_ROWS", scan_rows)
    rng, sweep = random.Random(limit), MaskSweep((0, 5, 5, 12, 30))
    assert sweep.left == 0
    assert sweep.window(limit).rows.numel() == 0
    sweep.again([0, 1, 3])
    wanted, seen = {*range(5), *range(12, 30)}, []
    while sweep.left:
        rows = sweep.window(limit).rows
        count = max(1, rows.numel() // 2) if rows.numel() else 0
        before = sweep.left
        sweep.sent(rows, count)
        seen += rows[:count].tolist()
        assert rows.numel() <= limit
        assert sweep.left == 30 - seen[-1] - 1 or not count
        assert not count or sweep.left < before
        drained = rng.sample(sorted(wanted - {*seen}), min(2, len(wanted - {*seen})))
        sweep.drained(torch.tensor(drained, dtype=torch.int64))
        wanted -= {*drained}
    assert seen == sorted(wanted)


class Counting(MaskSweep):
    """Counts how often it is looked at."""

    windows = 0

    def window(self, limit: int) -> KernelRows:
        self.windows += 1
        return super().window(limit)


def test_what_is_left_of_a_budget_is_not_sent_row_by_row() -> None:
    """It would be a frame a row, and a look at the mask for each row that was sent before."""
    job = Job()
    mask = masks_of(job.capture)[0]
    mask.sweep = sweep = Counting(mask.bases)
    sweep.again([0, 1])
    job.taken.clear()
    row_bytes = sender_of(job.capture).row_bytes(0)
    for budget, rows in ((5 * row_bytes + row_bytes - 1, 5), (1, 1), (2 * row_bytes, 2)):
        before, looked = sweep.left, sweep.windows
        assert job.capture.sweep(Drain(1, 1), budget)
        assert (before - sweep.left, sweep.windows - looked) == (rows, 1)
        job.log_takes(9)
    assert sweep.left == sum(TOUCHED) - 8
