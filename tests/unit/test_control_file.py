"""The control log of a file log: torn tails, damage, failing disks, and turns of its appenders."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.parts import FileLog, control_file
from tests.stores import History
from tests.unit.file_log import RECORDS
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    CorruptionError,
    LogUnavailableError,
)
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.frame import HEADER_LEN
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.layout import CONTROL_FILE


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    log = FileLog(tmp_path)
    log.prepare(2)
    return log


def control(log: FileLog) -> list[bytes]:
    return [record for _, record in log.read_control()]


def append(log: FileLog, records: list[bytes]) -> list[int]:
    return [log.append_control(record) for record in records]


def test_control_records_come_back_at_their_offsets(log: FileLog) -> None:
    offsets = append(log, RECORDS)
    assert list(log.read_control()) == list(zip(offsets, RECORDS, strict=True))
    assert list(log.read_control(offsets[1])) == list(zip(offsets[1:], RECORDS[1:], strict=True))


def test_an_append_reads_no_more_of_a_longer_log(log: FileLog) -> None:
    """Only the record at the front, and what was appended since."""

    def read_by_appends() -> int:
        before = num_bytes_read()
        append(log, RECORDS[1:2] * 20)
        return num_bytes_read() - before

    append(log, RECORDS[:2])
    few = read_by_appends()
    append(log, RECORDS[1:2] * 200)
    assert read_by_appends() < 2 * few


def num_bytes_read() -> int:
    """What this process has read by system calls."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_a_log_without_control_records_reads_empty(log: FileLog) -> None:
    assert control(log) == []


TAILS = [*range(1, len(RECORDS[2]), 61), 127, 128, 129, len(RECORDS[2]) - 1]


@pytest.mark.parametrize("length", TAILS)
def test_a_torn_control_tail_is_ignored_and_cut_by_the_next_appender(log: FileLog, tmp_path: Path, length: int) -> None:
    append(log, RECORDS[:2])
    with open(tmp_path / "control.log", "ab") as file:
        file.write(RECORDS[2][:length])
    assert control(log) == RECORDS[:2]
    log.append_control(RECORDS[2])
    assert control(log) == RECORDS
    assert (tmp_path / "control.log").read_bytes() == b"".join(RECORDS)


@pytest.mark.parametrize("length", [1, 127, 128, 5000])
def test_a_control_tail_that_was_never_written_is_ignored(log: FileLog, tmp_path: Path, length: int) -> None:
    append(log, RECORDS[:2])
    os.truncate(tmp_path / "control.log", (tmp_path / "control.log").stat().st_size + length)
    assert control(log) == RECORDS[:2]
    log.append_control(RECORDS[2])
    assert control(log) == RECORDS


@pytest.mark.parametrize("record", range(3))
def test_a_flipped_control_header_is_refused_by_readers_and_appenders(
    log: FileLog, tmp_path: Path, record: int
) -> None:
    offsets = append(log, RECORDS)
    data = bytearray((tmp_path / "control.log").read_bytes())
    data[offsets[record] + 40] ^= 1
    (tmp_path / "control.log").write_bytes(data)
    with pytest.raises(CorruptionError, match="header checksum does not match") as refused:
        control(log)
    assert refused.value.where == {"path": tmp_path / "control.log", "offset": offsets[record]}
    with pytest.raises(CorruptionError):
        FileLog(tmp_path).append_control(RECORDS[0])
    assert (tmp_path / "control.log").read_bytes() == data


def _failing_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make the next call of ``os.<name>`` fail, and the later ones work."""
    real = getattr(os, name)

    def fail(*_: Any) -> None:
        monkeypatch.setattr(os, name, real)
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, name, fail)


@pytest.mark.parametrize("call", ["writev", "fdatasync"])
def test_a_control_record_that_was_not_synced_is_taken_back(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    append(log, RECORDS[:1])
    _failing_once(monkeypatch, call)
    with pytest.raises(LogUnavailableError, match="cannot append to the control log: Input/output error"):
        log.append_control(RECORDS[1])
    assert (tmp_path / "control.log").read_bytes() == RECORDS[0]
    append(log, RECORDS[1:])
    assert control(log) == RECORDS


def test_a_control_log_that_lost_records_is_not_filled_with_zeros(log: FileLog, tmp_path: Path) -> None:
    append(log, RECORDS[:2])
    log.append_control(RECORDS[2])  # it has read the first two by now
    (tmp_path / "control.log").write_bytes(RECORDS[0])
    with pytest.raises(LogUnavailableError, match="control log"):
        log.append_control(RECORDS[2])
    assert (tmp_path / "control.log").read_bytes() == RECORDS[0]


def test_half_a_control_record_is_taken_back(log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    append(log, RECORDS[:1])

    def full(fd: int, buffers: list[memoryview]) -> int:
        if os.fstat(fd).st_size > len(RECORDS[0]):
            raise OSError(errno.ENOSPC, "No space left on device")
        return os.write(fd, bytes(buffers[0][:100]))

    monkeypatch.setattr(os, "writev", full)
    with pytest.raises(LogUnavailableError, match="No space left") as refused:
        log.append_control(RECORDS[1])
    assert refused.value.hint == "free space on that file system"
    assert (tmp_path / "control.log").read_bytes() == RECORDS[0]


def test_whether_a_control_record_that_cannot_be_taken_back_is_there_is_unknown(
    log: FileLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    append(log, RECORDS[:1])
    _failing_once(monkeypatch, "fdatasync")
    _failing_once(monkeypatch, "ftruncate")
    with pytest.raises(CommitUnknownError, match="nor remove the partial record: Input/output error"):
        log.append_control(RECORDS[1])


def test_a_tail_that_is_longer_than_any_record_is_not_torn_and_takes_no_memory(log: FileLog, tmp_path: Path) -> None:
    append(log, RECORDS[:2])
    path = tmp_path / "control.log"
    end = path.stat().st_size
    os.truncate(path, 2**40)  # sparse
    tracemalloc.start()
    try:
        for call in (lambda: control(log), lambda: log.append_control(RECORDS[2])):
            with pytest.raises(CorruptionError, match="not a frame") as refused:
                call()
            assert refused.value.where == {"path": path, "offset": end}
        assert tracemalloc.get_traced_memory()[1] < 10 * 2**20
    finally:
        tracemalloc.stop()


GARBAGE = {
    "bytes": b"\xee" * 200,
    "a page of magic": b"TRSC" * 1024,
    "a damaged record": RECORDS[1][:60] + b"\xff" + RECORDS[1][61:],
    "a damaged payload": RECORDS[1][:-1] + b"\xff",
    "a header without its payload": RECORDS[1][:128],
    "more than a record": bytes(1_500_000) + b"x",
}


@pytest.mark.parametrize("garbage", GARBAGE)
def test_garbage_is_passed_over_where_a_commit_key_tells_what_counts(
    log: FileLog, tmp_path: Path, garbage: str
) -> None:
    (first,) = append(log, RECORDS[:1])
    begin = (tmp_path / "control.log").stat().st_size
    with open(tmp_path / "control.log", "ab") as file:
        file.write(GARBAGE[garbage] + RECORDS[1] + GARBAGE[garbage])
    found = list(log.read_control(garbage=True))
    assert [record for _, record in found if record in RECORDS] == RECORDS[:2]
    assert found[1][0] == begin
    end = log.append_control(RECORDS[2], garbage=True)
    # From any record on, and by a log that has not read the garbage yet.
    for reader, start in ((log, first), (FileLog(tmp_path), begin), (FileLog(tmp_path), end)):
        again = list(reader.read_control(start, garbage=True))
        assert again[-1] == (end, RECORDS[2])
    with pytest.raises(CorruptionError):
        [parse_control(record) for record in control(log)]


def test_zeros_in_the_middle_are_no_torn_tail(log: FileLog, tmp_path: Path) -> None:
    append(log, RECORDS[:1])
    with open(tmp_path / "control.log", "ab") as file:
        file.write(bytes(256) + RECORDS[1])
    with pytest.raises(CorruptionError, match="not a frame"):
        control(log)


def test_a_link_to_nowhere_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(LogUnavailableError, match=r"a link to .*nowhere, which does not exist") as refused:
        FileLog(tmp_path / "link").prepare(1)
    assert refused.value.hint == f"create {tmp_path / 'nowhere'}"


@pytest.mark.parametrize(("inodes", "told"), [(0, "no inodes are left"), (7, "No space left on device")])
def test_a_disk_without_inodes_is_told_from_one_without_room(
    log: FileLog, monkeypatch: pytest.MonkeyPatch, inodes: int, told: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "writev", full)
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_files=100, f_favail=inodes))
    with pytest.raises(LogUnavailableError, match=told) as refused:
        log.append_control(RECORDS[0])
    assert ("inodes" in refused.value.hint) == (not inodes)


def test_appenders_take_turns(log: FileLog) -> None:
    threads = [threading.Thread(target=append, args=(log, RECORDS * 3)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = control(log)
    assert len(found) == 36
    assert all(found.count(record) == 12 for record in RECORDS)


def test_a_lock_that_is_never_given_back_ends_the_wait(
    log: FileLog, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_file, "LOCK_TIMEOUT_S", 0.0)
    with open(tmp_path / "control.lock", "ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        who = f"cannot append to the control log: locked for 0 s by process {os.getpid()}"
        with pytest.raises(LogUnavailableError, match=who) as caught:
            log.append_control(RECORDS[0])
    assert "end the other trainer that holds the lock" in str(caught.value)
    assert control(log) == []


# Damage of the control log: it is refused with its place, and with what to do.


@pytest.mark.parametrize(
    ("number", "offset", "hint"),
    [
        (0, 3, "check that this log or topic belongs to the job"),
        (1, 3, "stream-ckpt recover file://{folder} --store file://{folder}"),
        (1, 40, "stream-ckpt recover NEW_URI --store file://{folder}"),
        (1, HEADER_LEN + 5, "move {folder}/control.log aside"),
    ],
)
def test_a_changed_byte_of_the_control_log_is_refused_with_what_to_do(
    tmp_path: Path, number: int, offset: int, hint: str
) -> None:
    history = History(tmp_path)
    history.generation(1, range(1, 4))
    path = tmp_path / CONTROL_FILE
    records = [at for at, _ in history.log.read_control()]
    data = bytearray(path.read_bytes())
    data[records[number] + offset] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError) as refused:
        Control(FileLog(tmp_path)).refresh()
    where = refused.value.where
    assert str(where.get("offset", where.get("control_offset"))) == str(records[number])
    assert hint.format(folder=tmp_path) in refused.value.hint
