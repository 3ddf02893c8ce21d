"""Rows gathered into frames: by the native kernel, or small frames by numpy and large ones by torch; the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from crc32c import crc32c

from tests.parts import FrameBuffer
from torchrec_stream_ckpt.capture import staging
from torchrec_stream_ckpt.capture.staging import RowStager, StreamIdentity
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.model import LocalShard
from torchrec_stream_ckpt.native.kernel import describe
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

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
