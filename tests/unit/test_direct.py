"""The file log past the page cache: the same rows as through it, whatever fails in between."""

from __future__ import annotations

import errno
import os
import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.padded import at_page, file_limit, inside_a_block, read, send, short
from tests.parts import BLOCK, FileLog, file_writer
from tests.sampled import sampled
from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind
from torchrec_stream_ckpt.format.padding import BUFFER_BYTES, LEAST_BYTES, MOST_SHARE, gap
from torchrec_stream_ckpt.log import direct, publisher
from torchrec_stream_ckpt.util.layout import partition_dir

SIZES = (0, 64, 128, 4032, 4096, LEAST_BYTES, LEAST_BYTES + 3904, 500_032, 999_296, 999_872)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "_BACKOFF_S", (0.001, 0.01))
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 3_000_000)


def histories() -> Iterator[list[tuple[Kind, int, int]]]:
    for seed in range(sampled(60, 6)):
        rng = random.Random(seed)
        sizes = [rng.choice(SIZES) for _ in range(rng.randint(1, 25))]
        yield [
            (Kind.MARK if size < 4096 and rng.random() < 0.2 else Kind.ROWS, size, rng.randrange(256)) for size in sizes
        ]


def failing(number: int, calls: list[int], blocks: int = 9) -> Callable[..., int]:
    """Fail every third call after some of its blocks, or refuse all of them.

    Only the first calls: a stream that makes three calls to send again what has failed would fail at the same place.
    """
    real, begin = os.pwritev, len(calls)

    def pwritev(fd: int, parts: list[Any], position: int) -> int:
        calls.append(position)
        if number in direct.REFUSALS:
            raise OSError(number, os.strerror(number))
        if len(calls) % 3 == 1 and len(calls) - begin < 30:
            whole = at_page(sum(map(len, parts)))
            whole[:] = np.frombuffer(b"".join(parts), np.uint8)
            real(fd, [whole[: blocks * BLOCK]], position)
            raise OSError(number, os.strerror(number))
        return real(fd, parts, position)

    return pwritev


FAULTS: dict[str, Callable[[list[int]], Callable[..., int]] | None] = {
    "none": None,
    "short": short,
    "inside a block": inside_a_block,
    "full disk": lambda calls: failing(errno.ENOSPC, calls),
    "full disk, after whole frames": lambda calls: failing(errno.ENOSPC, calls, blocks=400),
    "error of the disk": lambda calls: failing(errno.EIO, calls),
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


@pytest.mark.parametrize("inside", [BLOCK, 100])
def test_a_limit_on_file_sizes_is_named_and_not_taken_for_a_refusal(
    inside: int, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ext4 gives EINVAL for a direct write over a limit that ends inside a block."""
    assert not direct.refusal(disk)
    log = FileLog(disk, direct=True)
    log.prepare(1)
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 2**30)
    with closing(log.open_writer(1, 0, 0)) as writer, file_limit(5 * BUFFER_BYTES + inside):
        for _ in range(5):
            writer.send(memoryview(at_page(BUFFER_BYTES)))
            writer.poll(60)
        writer.send(memoryview(at_page(BUFFER_BYTES)))
        with pytest.raises(LogUnavailableError, match=os.strerror(errno.EFBIG)) as told:
            writer.poll(60)
        assert writer.how == "direct"
        assert "ulimit -f" in (told.value.hint or "")
    history = [(Kind.ROWS, 999_872, 5)] * 3
    stream = send(log, history, aligned=True, generation=2)
    assert stream.writes == "direct"
    assert read(log, stream, generation=2)[1]


@pytest.mark.parametrize("inside", [0, 100])
def test_a_folder_under_a_limit_on_file_sizes_does_not_refuse_direct_writes(inside: int, disk: Path) -> None:
    with file_limit(inside), pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
        direct.refusal(disk)
    assert list(disk.iterdir()) == []


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


@pytest.fixture
def in_memory() -> Iterator[Path]:
    """A folder in memory. New kernels let a file there be opened with O_DIRECT."""
    place = Path("/dev/shm")
    if not place.is_dir() or direct.file_system(place) != "tmpfs":
        pytest.skip("there is no tmpfs")
    with tempfile.TemporaryDirectory(dir=place, prefix="direct-") as folder:
        yield Path(folder)


def test_memory_file_systems_are_refused_by_name(in_memory: Path) -> None:
    assert direct.refusal(in_memory) == "tmpfs has no disk"
    log = FileLog(in_memory, direct=True)
    log.prepare(1)
    assert not log.takes_blocks()
    stream = send(log, [(Kind.ROWS, 900_032, 5)] * 3, aligned=False)
    assert stream.writes == "buffered (tmpfs has no disk)"
    assert read(log, stream)[1] == 0
    said = [each.found for each in log.examine() if each.check == "log: direct writes"]
    assert said == ["no: tmpfs has no disk; frames go through the page cache"]


def test_a_disk_that_cannot_sync_acknowledges_nothing_and_all_is_sent_again(
    disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO from each third fdatasync: what it covered is written again, after the last frame that counts."""
    synced: list[int] = []

    def fdatasync(fd: int) -> None:
        synced.append(fd)
        if len(synced) % 3 == 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    log = FileLog(disk, direct=True)
    log.prepare(1)
    stream = send(log, [(Kind.ROWS, 999_872, filler) for filler in range(30)], aligned=True)
    found, padding = read(log, stream)
    assert [payload[0] for kind, payload in found if kind is Kind.ROWS] == list(range(30))
    assert padding
    assert stream.writes == "direct"
    assert len(synced) > 3
    assert len(list(partition_dir(disk, 0).iterdir())) > 1
