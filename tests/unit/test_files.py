"""The file log: torn tails are hidden, damage is said, segments follow one another without a gap."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import Stream, write
from tests.parts import FileLog, file_writer
from tests.unit.file_log import RECORDS
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    StreamLostError,
)
from torchrec_stream_ckpt.log import segments as log_segments
from torchrec_stream_ckpt.log.file_writer import FileWriter
from torchrec_stream_ckpt.util.layout import MAX_PARTITIONS, partition_dir, segment_name
from torchrec_stream_ckpt.util.types import LogSpan


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    log = FileLog(tmp_path)
    log.prepare(2)
    return log


@pytest.fixture
def frames() -> list[bytes]:
    stream = Stream()
    for number in range(5):
        stream.rows([number])
    return stream.frames


def read(log: FileLog, begin: int, end: int, *, generation: int = 1, partition: int = 0) -> list[bytes]:
    return [bytes(frame) for _, frame in log.read(LogSpan(generation, partition, begin, end))]


def segments(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "data" / "p00000").iterdir())


def test_segments_roll_and_read_as_one(
    log: FileLog, tmp_path: Path, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 600)
    writer = log.open_writer(1, 0, 0)
    for frame in frames:
        writer.send(memoryview(frame))
        writer.poll(5)
    writer.close()
    bases = [0, len(b"".join(frames[:2])), len(b"".join(frames[:4]))]
    assert segments(tmp_path) == [segment_name(1, base) for base in bases]
    end = len(b"".join(frames))
    assert read(log, 0, end) == frames
    assert read(log, bases[1], bases[2]) == frames[2:4]


class Refusing(mmap.mmap):
    """A mapping on a kernel without large pages."""

    def madvise(self, *_: int) -> None:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


@pytest.mark.parametrize("kind", [mmap.mmap, Refusing])
def test_a_long_span_is_read_with_large_pages_and_without(
    kind: type[mmap.mmap], log: FileLog, tmp_path: Path, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_segments, "_LARGE_BYTES", 1)
    monkeypatch.setattr("mmap.mmap", kind)
    write(log, frames)
    assert read(log, 0, sum(map(len, frames))) == frames
    assert read(log, len(frames[0]), sum(map(len, frames[:3]))) == frames[1:3]


def write_with_a_hole(log: FileLog, frames: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """Write each frame into a segment of its own, and delete the second one."""
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 1)
    writer = log.open_writer(1, 0, 0)
    for frame in frames:
        writer.send(memoryview(frame))
        writer.poll(5)
    writer.close()
    (log.uri.directory / "data" / "p00000" / segment_name(1, len(frames[0]))).unlink()


def test_a_missing_segment_in_the_middle_is_refused(
    log: FileLog, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_with_a_hole(log, frames, monkeypatch)
    with pytest.raises(CorruptionError, match=f"bytes {len(frames[0])} to .* of the log are missing"):
        read(log, 0, sum(map(len, frames)))


def test_a_writer_that_resumes_hides_the_torn_tail_of_the_one_before(
    log: FileLog, tmp_path: Path, frames: list[bytes]
) -> None:
    acks = write(log, frames[:3])
    first = tmp_path / "data" / "p00000" / segment_name(1, 0)
    with open(first, "ab") as file:
        file.write(frames[3][:100])
    write(log, frames[3:], at=acks[-1].end)
    assert segments(tmp_path) == [segment_name(1, 0), segment_name(1, acks[-1].end)]
    assert read(log, 0, sum(map(len, frames))) == frames


def test_what_was_never_acknowledged_is_written_over(log: FileLog, tmp_path: Path, frames: list[bytes]) -> None:
    write(log, frames)
    acks = write(log, frames[:2], at=0)
    assert segments(tmp_path) == [segment_name(1, 0)]
    assert (tmp_path / "data" / "p00000" / segment_name(1, 0)).stat().st_size == acks[-1].end
    assert read(log, 0, acks[-1].end) == frames[:2]


def test_generations_do_not_share_segments(log: FileLog, tmp_path: Path, frames: list[bytes]) -> None:
    write(log, frames[:2])
    write(log, frames[2:], generation=2)
    assert read(log, 0, len(b"".join(frames[:2]))) == frames[:2]
    assert read(log, 0, len(b"".join(frames[2:])), generation=2) == frames[2:]
    assert segments(tmp_path) == [segment_name(1, 0), segment_name(2, 0)]


def test_files_of_other_names_are_no_segments(log: FileLog, tmp_path: Path, frames: list[bytes]) -> None:
    acks = write(log, frames)
    for name in ("notes.txt", f"{segment_name(1, 0)}.bak", "g1-0.seg"):
        (tmp_path / "data" / "p00000" / name).write_bytes(b"junk")
    assert read(log, 0, acks[-1].end) == frames


def test_a_segment_cut_short_is_refused(log: FileLog, tmp_path: Path, frames: list[bytes]) -> None:
    acks = write(log, frames)
    path = tmp_path / "data" / "p00000" / segment_name(1, 0)
    os.truncate(path, acks[-1].end - 10)
    with pytest.raises(
        CorruptionError, match=f"the log ends at byte {acks[-1].end - 10}, but was committed up to byte {acks[-1].end}"
    ):
        read(log, 0, acks[-1].end)


def test_a_span_that_ends_inside_a_frame_is_refused(log: FileLog, frames: list[bytes]) -> None:
    acks = write(log, frames)
    with pytest.raises(CorruptionError):
        read(log, 0, acks[-1].end - 64)
    with pytest.raises(CorruptionError):
        read(log, 64, acks[-1].end)


def test_many_frames_in_one_poll_are_all_written(log: FileLog, frames: list[bytes]) -> None:
    many = frames * 300
    acks = write(log, many)
    assert len(acks) == len(many)
    assert read(log, 0, acks[-1].end) == many


def test_there_is_no_log_before_it_is_prepared(tmp_path: Path) -> None:
    assert FileLog(tmp_path / "nowhere").incarnation() is None


def test_whoever_comes_first_names_the_log(tmp_path: Path) -> None:
    found: list[str] = []
    gate = threading.Barrier(8)

    def prepare() -> None:
        gate.wait()
        found.append(FileLog(tmp_path / "log").prepare(2).id)

    threads = [threading.Thread(target=prepare) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 8
    assert len(set(found)) == 1
    assert sorted(path.name for path in (tmp_path / "log").iterdir()) == ["LOG", "data"]


def test_a_claim_on_a_log_that_exists_writes_no_file_and_syncs_its_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever made it may not have synced the names yet. The content of the identity was synced before its name."""
    synced: Counter[str] = Counter()
    monkeypatch.setattr(os, "fsync", lambda fd: synced.update([Path(os.readlink(f"/proc/self/fd/{fd}")).name]))
    first = FileLog(tmp_path / "log").prepare(2)
    assert sum(synced.values()) > 2
    synced.clear()
    assert FileLog(tmp_path / "log").prepare(2) == first
    assert synced == {"data": 1, "log": 1}


def test_a_log_that_a_claim_names_is_not_synced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CLAIM is appended after the names are durable. Anything else than the log that it names is prepared."""
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", synced.append)
    log = FileLog(tmp_path / "log")
    first = log.prepare(2)
    synced.clear()
    assert log.prepare(2, claimed=first) == log.prepare(1, claimed=first) == first
    assert not synced
    other = replace(first, id="0" * 32)
    assert log.prepare(2, claimed=other) == first
    assert len(synced) == 2
    synced.clear()
    assert log.prepare(3, claimed=first).partitions == 3
    assert synced
    synced.clear()
    partition_dir(tmp_path / "log", 1).rmdir()
    partition_dir(tmp_path / "log", 2).rmdir()
    assert log.prepare(2, claimed=first) == first
    assert synced
    assert partition_dir(tmp_path / "log", 1).is_dir()


def test_a_log_made_again_is_another_one(tmp_path: Path) -> None:
    first = FileLog(tmp_path / "a").prepare(1)
    second = FileLog(tmp_path / "b").prepare(1)
    assert first.id != second.id


def test_a_log_grows_and_never_shrinks(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    assert [log.prepare(partitions).partitions for partitions in (2, 4, 1)] == [2, 4, 4]


def test_more_partitions_than_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="ranks are too many"):
        FileLog(tmp_path).prepare(MAX_PARTITIONS + 1)


def test_a_folder_that_is_gone_says_so(tmp_path: Path) -> None:
    with pytest.raises(LogUnavailableError, match="cannot read a partition: No such file") as refused:
        read(FileLog(tmp_path / "gone"), 0, 1)
    assert refused.value.hint == "check the path: nothing was written there yet, or it was deleted"
    with pytest.raises(LogUnavailableError, match="cannot append to the control log: No such file"):
        FileLog(tmp_path / "gone").append_control(RECORDS[0])


def test_a_file_in_the_place_of_the_folder_says_so(tmp_path: Path) -> None:
    (tmp_path / "log").write_text("a file")
    with pytest.raises(LogUnavailableError, match="cannot create the file log"):
        FileLog(tmp_path / "log").prepare(1)


def test_a_full_disk_fails_the_writer_and_nothing_is_acknowledged(
    log: FileLog, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = log.open_writer(1, 0, 0)
    writer.send(memoryview(frames[0]))

    def full(*_: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(LogUnavailableError, match="cannot write the stream: No space left") as refused:
        writer.poll(5)
    assert refused.value.hint == "free space on that file system"
    writer.close()


def test_a_segment_that_is_deleted_under_its_writer_fails_it(log: FileLog, tmp_path: Path, frames: list[bytes]) -> None:
    writer = log.open_writer(1, 0, 0)
    writer.send(memoryview(frames[0]))
    assert len(writer.poll(5)) == 1
    (tmp_path / "data" / "p00000" / segment_name(1, 0)).unlink()
    writer.send(memoryview(frames[1]))
    with pytest.raises(LogUnavailableError, match="the segment was deleted while its writer had it open") as refused:
        writer.poll(5)
    assert refused.value.where == {"path": tmp_path / "data" / "p00000"}
    writer.close()


@pytest.mark.parametrize("left", ["nothing", "no folder", "a part"])
def test_a_writer_does_not_go_on_behind_acknowledged_bytes_that_are_gone(
    log: FileLog, tmp_path: Path, frames: list[bytes], left: str
) -> None:
    end = write(log, frames[:3])[-1].end
    folder = tmp_path / "data" / "p00000"
    segment = folder / segment_name(1, 0)
    if left == "a part":
        os.truncate(segment, end - 1)
    else:
        segment.unlink()
    if left == "no folder":
        folder.rmdir()
    reach = end - 1 if left == "a part" else 0
    # A folder that is empty may be one that is not mounted: it is tried again. Bytes that are gone do not come back.
    with pytest.raises(
        StreamLostError if left == "a part" else LogUnavailableError,
        match=rf"acknowledged bytes \[{reach}, {end}\) of this generation are missing",
    ):
        log.open_writer(1, 0, end)
    assert segments(tmp_path) == ([segment.name] if left == "a part" else [])


def test_a_writer_does_not_go_on_behind_a_hole_in_the_middle(
    log: FileLog, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_with_a_hole(log, frames[:3], monkeypatch)
    end = sum(map(len, frames[:3]))
    with pytest.raises(StreamLostError, match=rf"acknowledged bytes \[{len(frames[0])}, {end}\)"):
        log.open_writer(1, 0, end)


@pytest.mark.parametrize("left", [0, 100])
def test_a_writer_does_not_write_on_over_a_segment_that_was_cut_short(
    log: FileLog, tmp_path: Path, frames: list[bytes], left: int
) -> None:
    writer = log.open_writer(1, 0, 0)
    writer.send(memoryview(frames[0]))
    assert len(writer.poll(5)) == 1
    segment = tmp_path / "data" / "p00000" / segment_name(1, 0)
    os.truncate(segment, left)
    writer.send(memoryview(frames[1]))
    with pytest.raises(StreamLostError, match=f"the segment has {left} bytes, but its writer") as refused:
        writer.poll(5)
    assert refused.value.where == {"path": segment}
    writer.close()
    assert segment.stat().st_size == left


def test_a_writer_that_cannot_be_opened_keeps_no_file_open(log: FileLog, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(file_writer, "fsync_dir", fail)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        with pytest.raises(LogUnavailableError, match="cannot open a segment: Input/output error"):
            log.open_writer(1, 0, 0)
    assert len(os.listdir("/proc/self/fd")) == before


def test_short_writes_are_finished(log: FileLog, frames: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    def short(fd: int, buffers: list[memoryview]) -> int:
        return os.write(fd, bytes(buffers[0][:7]))

    monkeypatch.setattr(os, "writev", short)
    acks = write(log, frames[:2])
    assert read(log, 0, acks[-1].end) == frames[:2]


def test_frames_are_written_while_those_before_them_are_synced(
    log: FileLog, tmp_path: Path, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, syncing, go_on, synced = os.fdatasync, threading.Event(), threading.Event(), []

    def slow(fd: int) -> None:
        size = os.fstat(fd).st_size
        syncing.set()
        assert go_on.wait(120)
        sync(fd)
        synced.append(size)

    monkeypatch.setattr(os, "fdatasync", slow)
    writer = log.open_writer(1, 0, 0)
    writer.send(memoryview(frames[0]))
    assert writer.poll(0) == []
    assert syncing.wait(120)
    for frame in frames[1:]:
        writer.send(memoryview(frame))
        assert writer.poll(0) == []
    segment = tmp_path / "data" / "p00000" / segment_name(1, 0)
    assert segment.read_bytes() == b"".join(frames)
    go_on.set()
    acks = writer.poll(20)
    assert [ack.end for ack in acks] == [len(frames[0])], "what was written behind the begin of a sync is not in it"
    acks += writer.poll(20)
    assert [ack.end - ack.offset for ack in acks] == [len(frame) for frame in frames]
    assert synced == [len(frames[0]), len(b"".join(frames))], "one sync for all that was written meanwhile"
    writer.close()


def test_a_sync_that_fails_acknowledges_nothing(
    log: FileLog, frames: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "fdatasync", fails)
    writer = log.open_writer(1, 0, 0)
    writer.send(memoryview(frames[0]))
    with pytest.raises(LogUnavailableError, match="cannot write the stream: Input/output error"):
        writer.poll(20)
    writer.close()


def test_a_poll_with_nothing_sent_acknowledges_nothing(log: FileLog) -> None:
    writer = log.open_writer(1, 0, 0)
    assert isinstance(writer, FileWriter)
    assert writer.poll(5) == []
    writer.close()
    writer.close()


@pytest.mark.parametrize("identity", [b"", b"\xff" * 32, b"g" * 32, b"0" * 31, b"0" * 32 + b"\n"])
def test_a_damaged_identity_is_refused(identity: bytes, tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.prepare(1)
    (tmp_path / "LOG").write_bytes(identity)
    with pytest.raises(CorruptionError, match="identity is damaged") as caught:
        log.incarnation()
    assert str(tmp_path / "LOG") in str(caught.value)


def test_a_log_that_has_lost_its_identity_is_no_new_one(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    assert log.incarnation() is None
    log.prepare(1)
    log.append_control(RECORDS[0])
    (tmp_path / "LOG").unlink()
    with pytest.raises(CorruptionError, match="its identity file is missing") as caught:
        log.incarnation()
    assert str(tmp_path / "LOG") in str(caught.value)
