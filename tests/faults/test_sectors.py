"""Direct writes on real disks, with sectors of 512 and of 4096 bytes, that become full in the middle of a batch."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.faults.disks import CannotMount, fill, real_disk
from tests.padded import read, send
from tests.parts import FileLog
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.log.publisher import Publisher


@pytest.mark.parametrize("sector", [512, 4096])
def test_a_disk_that_is_full_in_a_batch_takes_all_frames_once_there_is_room(sector: int, tmp_path: Path) -> None:
    folder = tmp_path / "disk"
    try:
        with real_disk(folder, 96 * 2**20, sector):
            log = FileLog(folder / "log", direct=True)
            log.prepare(1)
            assert log.takes_blocks()
            ballast = fill(folder, 5_500_000)
            done: list[Publisher] = []
            frames = [(Kind.ROWS, 999_872, filler) for filler in range(24)]
            sender = threading.Thread(target=lambda: done.append(send(log, frames, aligned=True)))
            sender.start()
            deadline = time.monotonic() + 60
            while sum(path.stat().st_size for path in folder.rglob("*.seg")) < 4_000_000:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            time.sleep(0.3)
            assert sender.is_alive()
            ballast.unlink()
            sender.join(60)
            (stream,) = done
            found, padding = read(log, stream)
            assert [payload[0] for kind, payload in found if kind is Kind.ROWS] == list(range(24))
            assert padding
            assert stream.writes == "direct"
    except CannotMount as error:
        pytest.skip(str(error))
