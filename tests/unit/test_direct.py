"""The file log past the page cache: the same rows as through it, whatever fails in between."""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builders import JOB
from tests.parts import FileLog, FrameRing
from tests.sampled import sampled
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, check_pad, parse_header, payload_of
from torchrec_stream_ckpt.format.padding import BLOCK, BUFFER_BYTES, LEAST_BYTES, MOST_SHARE, gap
from torchrec_stream_ckpt.format.ring import Bytes
from torchrec_stream_ckpt.log import direct, file_writer, publisher
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.util.types import LogSpan

SIZES = (0, 64, 128, 4032, 4096, LEAST_BYTES, LEAST_BYTES + 3904, 500_032, 999_296, 999_872)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 3_000_000)


def at_page(size: int, shift: int = 0) -> Bytes:
    memory = np.empty(size + 2 * BLOCK, np.uint8)
    begin = -memory.ctypes.data % BLOCK + shift
    return memory[begin : begin + size]


def send(log: FileLog, history: list[tuple[Kind, int, int]], *, aligned: bool, shift: int = 0) -> Publisher:
    """Send frames of (kind, payload length, filler) and a MARK to generation 1. Returns the closed publisher."""
    ring = FrameRing(6_000_000, 0, lambda size: at_page(size, shift), padded=aligned)
    stream = Publisher(lambda at: log.open_writer(1, 0, at), ring, aligned=aligned)
    for kind, length, filler in [(Kind.HELLO, 64, 0), *history, (Kind.MARK, 64, 0)]:
        buffer = ring.acquire(wait_s=60)
        assert buffer is not None, stream.failure
        buffer.array[HEADER_LEN : HEADER_LEN + length] = filler
        buffer.header = Header(
            kind, JOB, 1, payload_len=length, schema_crc=7, table=0 if kind is Kind.ROWS else 2**32 - 1
        )
        seq = stream.submit(buffer)
    assert stream.wait_mark(seq, 60) is not None
    assert stream.close(20)
    return stream


def read(log: FileLog, stream: Publisher) -> tuple[list[tuple[Kind, bytes]], int]:
    """Return (kind, payload) of all frames but padding, and the bytes of padding. Checks chain, seq and totals."""
    found, chain, padding = [], 0, 0
    end = stream.flight.acked
    for seq, (_, frame) in enumerate(log.read(LogSpan(1, 0, 0, end.end))):
        header = parse_header(frame)
        payload = payload_of(header, frame)
        assert (header.seq, header.chain, header.schema_crc) == (seq, chain, 7)
        chain = header.header_crc
        if header.kind is Kind.PAD:
            check_pad(header, payload)
            padding += len(frame)
        else:
            found.append((header.kind, bytes(payload)))
    assert (end.frames, end.chain, end.end) == (seq + 1, chain, stream.num_bytes)
    assert found[-1][0] is Kind.MARK
    assert found[0][0] is Kind.HELLO
    return found, padding


def histories() -> Iterator[list[tuple[Kind, int, int]]]:
    for seed in range(sampled(60, 6)):
        rng = random.Random(seed)
        sizes = [rng.choice(SIZES) for _ in range(rng.randint(1, 25))]
        yield [
            (Kind.MARK if size < 4096 and rng.random() < 0.2 else Kind.ROWS, size, rng.randrange(256)) for size in sizes
        ]


def short(calls: list[int]) -> Callable[..., int]:
    real = os.pwritev

    def pwritev(fd: int, parts: list[Any], position: int) -> int:
        calls.append(position)
        if len(calls) % 3 == 1:  # the next call begins inside the frame
            return real(fd, [memoryview(parts[0])[: 7 * BLOCK]], position)
        return real(fd, parts, position)

    return pwritev


def inside_a_block(calls: list[int]) -> Callable[..., int]:
    def pwritev(fd: int, parts: list[Any], position: int) -> int:
        calls.append(position)
        head = bytes(memoryview(parts[0])[: 5 * BLOCK + 64])
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            return os.pwrite(other, head, position)
        finally:
            os.close(other)

    return pwritev


def failing(number: int, calls: list[int]) -> Callable[..., int]:
    """Fail every third call after half of its bytes, or refuse all of them."""
    real = os.pwritev

    def pwritev(fd: int, parts: list[Any], position: int) -> int:
        calls.append(position)
        if number in direct.REFUSALS:
            raise OSError(number, os.strerror(number))
        if len(calls) % 3 == 1:
            real(fd, [memoryview(parts[0])[: 9 * BLOCK]], position)
            raise OSError(number, os.strerror(number))
        return real(fd, parts, position)

    return pwritev


FAULTS: dict[str, Callable[[list[int]], Callable[..., int]] | None] = {
    "none": None,
    "short": short,
    "inside a block": inside_a_block,
    "full disk": lambda calls: failing(errno.ENOSPC, calls),
    "refused": lambda calls: failing(errno.EINVAL, calls),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_direct_and_buffered_streams_have_the_same_frames(
    fault: str, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[int] = []
    make, direct_writes = FAULTS[fault], 0
    for number, history in enumerate(histories()):
        logs = [FileLog(disk / f"{number}.{how}", direct=how == "direct") for how in ("direct", "buffered")]
        for log in logs:
            log.prepare(1)
        assert [log.takes_blocks() for log in logs] == [True, False]
        with monkeypatch.context() as patched:
            if make is not None:
                patched.setattr(os, "pwritev", make(calls))
            first = send(logs[0], history, aligned=True)
        second = send(logs[1], history, aligned=False)
        (ours, padding), (others, none) = read(logs[0], first), read(logs[1], second)
        assert ours == others
        assert none == 0
        assert padding == first.padding_bytes <= MOST_SHARE * first.num_bytes
        direct_writes += padding > 0
        assert second.writes == "buffered"
        if fault != "refused":
            assert first.writes == "direct"
    assert direct_writes
    assert fault == "none" or calls
    if fault == "refused":
        assert first.writes.endswith("refuses direct writes: Invalid argument)")


@pytest.mark.parametrize("shift", [64, 512])
def test_memory_that_is_not_at_a_page_is_written_through_the_page_cache(disk: Path, shift: int) -> None:
    log = FileLog(disk, direct=True)
    log.prepare(1)
    stream = send(log, [(Kind.ROWS, 900_032, 5)] * 3, aligned=True, shift=shift)
    assert read(log, stream)[1] == 0


def test_frames_at_blocks_go_past_the_page_cache(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log, written, real = FileLog(disk, direct=True), [], os.pwritev
    log.prepare(1)
    assert log.takes_blocks()

    def pwritev(fd: int, parts: list[memoryview], position: int) -> int:
        written.append((position, [len(part) for part in parts]))
        return real(fd, parts, position)

    monkeypatch.setattr(os, "pwritev", pwritev)
    stream = send(log, [(Kind.ROWS, 999_872, 5)] * 40, aligned=True)
    total = sum(sum(lengths) for _, lengths in written)
    assert total == 40 * BUFFER_BYTES
    assert total > 0.99 * stream.num_bytes


def test_a_gap_of_64_bytes_takes_another_block() -> None:
    gaps = [gap(position) for position in range(0, 3 * BLOCK, 64)]
    assert all((position * 64 + each) % BLOCK == 0 for position, each in enumerate(gaps))
    assert all(each == 0 or each >= HEADER_LEN for each in gaps)
    assert gap(BLOCK - 64) == BLOCK + 64


def test_memory_file_systems_are_refused_by_name() -> None:
    folder = Path("/dev/shm")
    if not folder.is_dir() or direct.file_system(folder) != "tmpfs":
        pytest.skip("there is no tmpfs")
    assert direct.refusal(folder) == "tmpfs has no disk"
