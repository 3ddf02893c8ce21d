"""A log that is written past the page cache: streams of frames that lie at blocks, and small tables that act large."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np

from tests.builders import JOB
from tests.parts import BLOCK, FileLog, FrameRing
from torchrec_stream_ckpt.dense import hashed_file
from torchrec_stream_ckpt.format import padding
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, check_pad, parse_header, payload_of
from torchrec_stream_ckpt.format.ring import Bytes
from torchrec_stream_ckpt.log import direct, publisher
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.util.types import LogSpan


def pad_small_frames() -> None:
    """(in this process, from here on) Frames of all sizes are padded, as often as there is room, and files of the dense
    state go past the page cache block by block."""
    small = {"LEAST_BYTES": 512, "MOST_SHARE": 0.9}
    least, pieces = {"LEAST_BYTES": 512}, {"PIECE_BYTES": BLOCK}
    for module, names in ((padding, small), (publisher, small), (direct, least), (hashed_file, pieces)):
        mock.patch.multiple(module, **names).start()


def at_page(size: int, shift: int = 0) -> Bytes:
    memory = np.empty(size + 2 * BLOCK, np.uint8)
    begin = -memory.ctypes.data % BLOCK + shift
    return memory[begin : begin + size]


def send(
    log: FileLog, history: list[tuple[Kind, int, int]], *, aligned: bool, shift: int = 0, generation: int = 1
) -> Publisher:
    """Send frames of (kind, payload length, filler) and a MARK to a generation. Returns the closed publisher."""
    ring = FrameRing(6_000_000, 0, lambda size: at_page(size, shift), padded=aligned)
    stream = Publisher(lambda at: log.open_writer(generation, 0, at), ring, aligned=aligned)
    for kind, length, filler in [(Kind.HELLO, 64, 0), *history, (Kind.MARK, 64, 0)]:
        buffer = ring.acquire(wait_s=60)
        assert buffer is not None, stream.failure
        buffer.array[HEADER_LEN : HEADER_LEN + length] = filler
        buffer.header = Header(
            kind, JOB, generation, payload_len=length, schema_crc=7, table=0 if kind is Kind.ROWS else 2**32 - 1
        )
        seq = stream.submit(buffer)
    assert stream.wait_mark(seq, 60) is not None
    assert stream.close(20)
    return stream


def read(log: FileLog, stream: Publisher, *, generation: int = 1) -> tuple[list[tuple[Kind, bytes]], int]:
    """Return (kind, payload) of all frames but padding, and the bytes of padding. Checks chain, seq and totals."""
    found, chain, padding = [], 0, 0
    end = stream.flight.acked
    for seq, (_, frame) in enumerate(log.read(LogSpan(generation, 0, 0, end.end))):
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


@contextmanager
def file_limit(num_bytes: int) -> Iterator[None]:
    """No file of this process can grow beyond a size: the kernel itself refuses the rest."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def short(calls: list[int]) -> Callable[..., int]:
    """Return an ``os.pwritev`` of which every third call ends after seven blocks. ``calls`` gets the positions."""
    real = os.pwritev

    def pwritev(fd: int, parts: list[Any], position: int) -> int:
        calls.append(position)
        if len(calls) % 3 == 1:  # the next call begins inside the frame
            return real(fd, [memoryview(parts[0])[: 7 * BLOCK]], position)
        return real(fd, parts, position)

    return pwritev


def inside_a_block(calls: list[int]) -> Callable[..., int]:
    """Return an ``os.pwritev`` of which each call ends inside a block. ``calls`` gets the positions."""

    def pwritev(fd: int, parts: list[Any], position: int) -> int:
        calls.append(position)
        head = bytes(memoryview(parts[0])[: 5 * BLOCK + 64])
        other = os.open(f"/proc/self/fd/{fd}", os.O_WRONLY)
        try:
            return os.pwrite(other, head, position)
        finally:
            os.close(other)

    return pwritev
