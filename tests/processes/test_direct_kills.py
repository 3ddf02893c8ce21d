"""A writer past the page cache is killed: before, in and after each of its writes, and at each step around them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from tests.forks import status_of
from tests.padded import read, send
from tests.parts import BLOCK, FileLog
from torchrec_stream_ckpt.format.frame import Kind, check_pad, parse_header, payload_of
from torchrec_stream_ckpt.log.flight import Flight
from torchrec_stream_ckpt.util.types import LogSpan

ROWS = 999_872
FRAMES = 40
WRITES = ("before", "in", "after")
POINTS = ("stream.sent=kill@20", "segment.written=kill@2", "stream.acknowledged=kill@1", "stream.acknowledged=kill@2")


def write(folder: Path, promised: Path, how: str) -> None:
    """(process) Send frames until the end comes; write down the end of what was acknowledged, each time it moves."""
    real, done = os.pwritev, Flight.acknowledge
    acknowledged: list[int] = []

    def pwritev(fd: int, parts: list[Any], position: int) -> int:
        if acknowledged and how in WRITES:
            if how == "in":
                real(fd, [memoryview(parts[0])[: 9 * BLOCK]], position)
            elif how == "after":
                real(fd, parts, position)
            os.kill(os.getpid(), signal.SIGKILL)
        return real(fd, parts, position)

    def acknowledge(flight: Flight, acks: Any) -> None:
        done(flight, acks)
        acknowledged.append(flight.acked.end)
        with open(promised, "a", encoding="ascii") as file:
            file.write(f"{flight.acked.end} {flight.acked.frames}\n")

    with mock.patch.object(Flight, "acknowledge", acknowledge), mock.patch.object(os, "pwritev", pwritev):
        log = FileLog(folder, direct=True)
        log.prepare(1)
        send(log, [(Kind.ROWS, ROWS, filler) for filler in range(FRAMES)], aligned=True)


@pytest.mark.parametrize("case", [*WRITES, *POINTS])
def test_a_killed_writer_leaves_all_that_it_has_acknowledged_and_another_goes_on(
    case: str, disk: Path, tmp_path: Path
) -> None:
    promised = tmp_path / "promised"
    promised.touch()
    how, fuse = (case, "") if case in WRITES else ("", case)
    assert status_of(write, disk / "log", promised, how, fuse=fuse) == -signal.SIGKILL
    told = [tuple(map(int, line.split())) for line in promised.read_text().splitlines()]
    end, frames = told[-1] if told else (0, 0)
    assert told or case in POINTS[:3]
    log, chain, fillers = FileLog(disk / "log", direct=True), 0, []
    for seq, (_, frame) in enumerate(log.read(LogSpan(1, 0, 0, end))):
        header = parse_header(frame)
        payload = payload_of(header, frame)
        assert (header.seq, header.chain) == (seq, chain)
        chain = header.header_crc
        if header.kind is Kind.PAD:
            check_pad(header, payload)
        if header.kind is Kind.ROWS:
            assert len(set(payload.tobytes())) == 1
            fillers.append(payload[0])
    assert fillers == list(range(len(fillers)))
    assert frames == (seq + 1 if end else 0)
    assert log.ends(1, [0])[0] >= end
    stream = send(log, [(Kind.ROWS, ROWS, filler) for filler in range(3)], aligned=True, generation=2)
    found, _ = read(log, stream, generation=2)
    assert [payload[0] for kind, payload in found if kind is Kind.ROWS] == [0, 1, 2]
