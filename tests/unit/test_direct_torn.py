"""Torn tails of a log past the page cache: cut at each block, or with a block that never reached the disk."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.padded import at_page, send
from tests.parts import BLOCK, FileLog
from tests.sampled import sampled
from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError
from torchrec_stream_ckpt.format.frame import Kind, check_pad, parse_header, payload_of
from torchrec_stream_ckpt.util.layout import segment_name
from torchrec_stream_ckpt.util.types import LogSpan

SECTOR = 512
ROWS = 299_904
BATCH = [(Kind.ROWS, ROWS, 7), (Kind.ROWS, ROWS, 8)]


@dataclass
class Dead:
    """A log whose writer has died. The last batch was written, and nothing says so."""

    log: FileLog
    path: Path
    marked: int
    """End of the MARK before the last batch."""
    frames: list[bytes]
    end: int

    def read(self, end: int) -> list[bytes]:
        """Frames up to an offset, all checked as readers check them."""
        found = []
        for _, frame in FileLog(self.log.uri.directory).read(LogSpan(1, 0, 0, end)):  # type: ignore[union-attr]
            header = parse_header(frame)
            payload = payload_of(header, frame)
            if header.kind is Kind.PAD:
                check_pad(header, payload)
            found.append(bytes(frame))
        return found

    @property
    def whole(self) -> list[bytes]:
        """Frames up to the MARK."""
        ends = np.cumsum([len(frame) for frame in self.frames])
        return self.frames[: int(np.searchsorted(ends, self.marked)) + 1]


@pytest.fixture
def dead(disk: Path) -> Dead:
    log = FileLog(disk / "log", direct=True)
    log.prepare(1)
    # Enough before, so that padding of the batch stays below its share.
    before = [(Kind.ROWS, 999_872, filler) for filler in range(2)]
    stream = send(log, [*before, (Kind.MARK, 64, 0), *BATCH], aligned=True)
    assert stream.writes == "direct"
    frames = [bytes(frame) for _, frame in log.read(LogSpan(1, 0, 0, stream.flight.acked.end))]
    kinds = [parse_header(frame).kind for frame in frames]
    assert kinds.count(Kind.PAD) >= 3
    marked = sum(len(frame) for frame in frames[: kinds.index(Kind.MARK) + 1])
    path = disk / "log" / "data" / "p00000" / segment_name(1, 0)
    return Dead(log, path, marked, frames, stream.flight.acked.end)


def test_a_tail_that_is_cut_at_any_sector_is_never_read_and_costs_nothing_before_it(dead: Dead) -> None:
    first = -(-dead.marked // SECTOR) * SECTOR
    cuts = range(first, dead.end, sampled(SECTOR, 4 * SECTOR))
    assert len(cuts) > 250
    for cut in reversed(cuts):
        os.truncate(dead.path, cut)
        assert dead.read(dead.marked) == dead.whole
        with pytest.raises(StreamCkptError, match="the log ends at byte"):
            dead.read(dead.end)


def test_a_tail_that_is_cut_before_the_marker_loses_it_by_name(dead: Dead) -> None:
    for cut in range(dead.marked // BLOCK * BLOCK, 0, -sampled(8, 64) * BLOCK):
        os.truncate(dead.path, cut)
        with pytest.raises(StreamCkptError, match="the log ends at byte"):
            dead.read(dead.marked)


@pytest.mark.parametrize("block", [SECTOR, BLOCK])
def test_a_block_that_never_reached_the_disk_is_found(dead: Dead, block: int) -> None:
    data = dead.path.read_bytes()
    damaged = 0
    for begin in range(-(-dead.marked // block) * block, dead.end, block * sampled(1, 8 if block == SECTOR else 1)):
        lost = data[begin : begin + block]
        with open(dead.path, "r+b") as file:
            os.pwrite(file.fileno(), bytes(len(lost)), begin)
            assert dead.read(dead.marked) == dead.whole
            if any(lost):
                damaged += 1
                with pytest.raises(CorruptionError):
                    dead.read(dead.end)
            else:  # the zeros of padding
                assert dead.read(dead.end) == dead.frames
            os.pwrite(file.fileno(), lost, begin)
    assert damaged > 100
    assert dead.read(dead.end) == dead.frames


def test_a_writer_that_resumes_before_a_torn_tail_sends_all_of_it_again(dead: Dead) -> None:
    rest, at = [], len(dead.whole)
    while at < len(dead.frames):  # each frame with its padding, in memory at a page, as the ring has it
        more = at + 1 < len(dead.frames) and parse_header(dead.frames[at + 1]).kind is Kind.PAD
        parts = dead.frames[at : at + 1 + more]
        memory = at_page(sum(map(len, parts)))
        memory[:] = np.frombuffer(b"".join(parts), np.uint8)
        rest.append(memory.data)
        at += len(parts)
    again = dead.path.with_name(segment_name(1, dead.marked))
    for cut in range(dead.end // BLOCK * BLOCK, dead.marked, -sampled(1, 4) * BLOCK):
        os.truncate(dead.path, cut)
        writer = FileLog(dead.path.parents[2], direct=True).open_writer(1, 0, dead.marked, again=True)
        for part in rest:
            writer.send(part)
        acks = 0
        while acks < len(rest):
            acks += len(writer.poll(1))
        assert writer.how == "direct"
        writer.close()
        assert dead.read(dead.end) == dead.frames
        again.unlink()
    shutil.rmtree(dead.path.parent)
