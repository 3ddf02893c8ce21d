"""What every log promises, whatever its backend."""

from __future__ import annotations

import itertools
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clouds.servers import CLOUDS, CloudServer
from tests.parts import Ack, Freed, file_writer, open_log
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StreamCkptError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAX_FRAME_BYTES, Header, Kind, parse_header, payload_of, seal
from torchrec_stream_ckpt.inner import Log, open_store
from torchrec_stream_ckpt.log.api import DataWriter, TrimRange
from torchrec_stream_ckpt.log.bucket import writer as bucket_writer
from torchrec_stream_ckpt.util.types import LogSpan

JOB = uuid.UUID(int=7).bytes
ACK_TIMEOUT_S = 30.0


@dataclass
class Backend:
    """One backend under test."""

    name: str
    uri: str
    destroy: Callable[[], None]
    """Delete the log behind the back of its users."""
    options: Mapping[str, Any] | None = None

    def open(self) -> Log:
        return open_log(self.uri, self.options)


@pytest.fixture(params=["file", pytest.param("kafka", marks=pytest.mark.kafka), "bucket", *CLOUDS])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Backend:
    if request.param == "file":
        folder = tmp_path / "log"
        return Backend("file", f"file://{folder}", lambda: shutil.rmtree(folder))
    if request.param == "bucket":
        server, prefix = request.getfixturevalue("s3_server"), uuid.uuid4().hex
        folder = server.objects / server.bucket / prefix
        return Backend("bucket", f"s3://{server.bucket}/{prefix}", lambda: shutil.rmtree(folder), server.options())
    if request.param in CLOUDS:
        cloud: CloudServer = request.getfixturevalue(f"{request.param}_server")
        url, options = cloud.url(f"{uuid.uuid4().hex}/log"), cloud.options()
        return Backend("bucket", url, lambda: _delete_objects(url, options), options)
    bootstrap, job = request.getfixturevalue("bootstrap"), f"job-{uuid.uuid4().hex}"
    return Backend("kafka", f"kafka://{bootstrap}/{job}", lambda: _delete_topics(bootstrap, job))


def _delete_objects(url: str, options: Mapping[str, Any]) -> None:
    objects = open_store(url, options)
    for entry in list(objects.list("")):
        objects.delete(entry.name)
    objects.close()


def _delete_topics(bootstrap: str, job: str) -> None:
    from confluent_kafka.admin import AdminClient

    admin = AdminClient({"bootstrap.servers": bootstrap})
    for deleted in admin.delete_topics([f"{job}.data", f"{job}.control"]).values():
        deleted.result(30)


@pytest.fixture
def log(backend: Backend) -> Iterator[Log]:
    log = backend.open()
    log.prepare(2)
    yield log
    log.close()


def frame(seq: int, payload: bytes = b"", *, rank: int = 0, generation: int = 1) -> memoryview:
    """A sealed frame; its payload is filled up to the alignment."""
    payload = payload + bytes(-len(payload) % 64)
    header = Header(Kind.ROWS, JOB, generation, rank=rank, seq=seq, payload_len=len(payload))
    data = bytearray(HEADER_LEN) + payload
    seal(header, data)
    return memoryview(data)


def control_record(generation: int) -> bytes:
    """Looks like a record of the control partition; backends do not read the payload."""
    payload = (b"{%d}" % generation).ljust(64)
    header = Header(Kind.CLAIM, JOB, generation, payload_len=len(payload))
    data = bytearray(HEADER_LEN) + payload
    seal(header, data)
    return bytes(data)


def acknowledged(writer: DataWriter, count: int) -> list[Ack]:
    acks: list[Ack] = []
    deadline = time.monotonic() + ACK_TIMEOUT_S
    while len(acks) < count:
        assert time.monotonic() < deadline, f"{len(acks)} of {count} frames acknowledged"
        acks += writer.poll(0.2)
    return acks


def write(
    log: Log, frames: Sequence[memoryview], *, generation: int = 1, partition: int = 0, resume_at: int = 0
) -> list[Ack]:
    writer = log.open_writer(generation, partition, resume_at)
    for one in frames:
        writer.send(one)
    acks = acknowledged(writer, len(frames))
    writer.close()
    return acks


def span_of(acks: Sequence[Ack], *, generation: int = 1, partition: int = 0) -> LogSpan:
    return LogSpan(generation, partition, acks[0].offset, acks[-1].end)


def seqs(log: Log, span: LogSpan) -> list[int]:
    """Numbers of the frames in a span, each of them checked."""
    found = []
    for _, data in log.read(span):
        header = parse_header(data)
        payload_of(header, data)
        found.append(header.seq)
    return found


def test_frames_come_back_whole_and_in_order(log: Log) -> None:
    frames = [frame(seq, bytes([seq]) * (seq * 1000)) for seq in range(20)]
    acks = write(log, frames)
    read = [(offset, bytes(data)) for offset, data in log.read(span_of(acks))]
    assert read == [(ack.offset, bytes(data)) for ack, data in zip(acks, frames, strict=True)]


def test_ends_are_where_what_was_acknowledged_ends(log: Log) -> None:
    assert log.ends(1, [0, 1]) == {0: 0, 1: 0}
    acks = write(log, [frame(seq) for seq in range(3)])
    assert log.ends(1, [0, 1]) == {0: acks[-1].end, 1: 0}
    more = write(log, [frame(3)], resume_at=acks[-1].end)
    assert log.ends(1, {0}) == {0: more[-1].end}


def test_largest_frame_fits(log: Log) -> None:
    payload = bytes(range(256)) * ((MAX_FRAME_BYTES - HEADER_LEN) // 64 * 64 // 256)
    largest = frame(0, payload)
    acks = write(log, [largest, largest])
    assert [bytes(data) for _, data in log.read(span_of(acks))] == [bytes(largest)] * 2


def test_acknowledgements_come_in_order_of_sending(log: Log) -> None:
    acks = write(log, [frame(seq, b"x" * 5000) for seq in range(200)])
    assert all(before.end <= after.offset for before, after in itertools.pairwise(acks))
    assert all(ack.offset < ack.end for ack in acks)


def test_poll_returns_nothing_while_nothing_was_sent(log: Log) -> None:
    writer = log.open_writer(1, 0, 0)
    assert writer.poll(0.05) == []
    writer.close()


def test_part_of_a_span_can_be_read(log: Log) -> None:
    acks = write(log, [frame(seq, b"y" * 700) for seq in range(10)])
    assert seqs(log, LogSpan(1, 0, acks[3].offset, acks[6].end)) == [3, 4, 5, 6]
    assert seqs(log, LogSpan(1, 0, acks[4].offset, acks[4].offset)) == []


def test_span_beyond_the_end_is_refused(log: Log) -> None:
    acks = write(log, [frame(0), frame(1)])
    with pytest.raises(CorruptionError):
        list(log.read(LogSpan(1, 0, acks[0].offset, acks[-1].end + 1)))


def test_spans_that_are_there_are_said_to_be(log: Log) -> None:
    first = span_of(write(log, [frame(0), frame(1)]))
    second = span_of(write(log, [frame(0, rank=1)], partition=1), partition=1)
    log.check_there([first, second])
    log.check_there([])


def test_span_of_a_partition_that_is_not_there_is_refused(log: Log) -> None:
    with pytest.raises(StreamCkptError):
        list(log.read(LogSpan(1, 9, 0, 1)))


def test_partitions_do_not_mix(log: Log) -> None:
    first = write(log, [frame(seq, rank=0) for seq in range(5)], partition=0)
    second = write(log, [frame(seq, rank=1) for seq in range(10, 13)], partition=1)
    assert seqs(log, span_of(first, partition=0)) == list(range(5))
    assert seqs(log, span_of(second, partition=1)) == [10, 11, 12]


def test_generations_of_one_partition_do_not_mix(log: Log) -> None:
    old = write(log, [frame(seq, generation=1) for seq in range(4)], generation=1)
    new = write(log, [frame(seq, generation=2) for seq in range(100, 103)], generation=2)
    assert seqs(log, span_of(old, generation=1)) == [0, 1, 2, 3]
    assert seqs(log, span_of(new, generation=2)) == [100, 101, 102]


def test_reopened_writer_goes_on_behind_what_is_acknowledged(log: Log) -> None:
    first = write(log, [frame(0), frame(1)])
    second = write(log, [frame(2), frame(3)], resume_at=first[-1].end)
    assert seqs(log, LogSpan(1, 0, first[0].offset, second[-1].end)) == [0, 1, 2, 3]


def test_frames_sent_again_after_a_lost_writer_are_all_there(log: Log) -> None:
    """A log may keep the first copy too: readers drop duplicates by seq."""
    first = write(log, [frame(0), frame(1)])
    lost = log.open_writer(1, 0, first[-1].end)
    lost.send(frame(2))
    lost.close()
    second = write(log, [frame(2), frame(3)], resume_at=first[-1].end)
    found = seqs(log, LogSpan(1, 0, first[0].offset, second[-1].end))
    assert list(dict.fromkeys(found)) == [0, 1, 2, 3]
    assert len(found) <= 5


def cut(gone: Sequence[LogSpan] = (), kept: Sequence[LogSpan] = (), dead: Sequence[int] = ()) -> TrimRange:
    return TrimRange(tuple(gone), tuple(kept), frozenset(dead))


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """No MARK follows these frames, for which a log may wait."""
    monkeypatch.setattr(bucket_writer, "LINGER_S", 0.05)


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each frame of ``write_apart`` has a segment of its own, where a log has segments."""
    monkeypatch.setattr(file_writer, "SEGMENT_BYTES", 1)
    monkeypatch.setattr(bucket_writer, "OBJECT_BYTES", 1)


def write_apart(log: Log, count: int, *, generation: int = 1, partition: int = 0) -> list[Ack]:
    writer, acks = log.open_writer(generation, partition, 0), []
    for number in range(count):
        writer.send(frame(number, generation=generation, rank=partition))
        acks += acknowledged(writer, 1)
    writer.close()
    return acks


@pytest.mark.usefixtures("small_segments")
def test_a_trim_takes_what_is_gone_and_leaves_the_rest(log: Log) -> None:
    first, second = write_apart(log, 6), write_apart(log, 4, partition=1)
    middle = LogSpan(1, 0, first[0].offset, first[2].end)
    rest = LogSpan(1, 0, first[3].offset, first[-1].end)
    freed = log.trim(cut([middle], [rest, span_of(second, partition=1)]))
    assert freed.count == 3
    assert seqs(log, rest) == [3, 4, 5]
    assert seqs(log, span_of(second, partition=1)) == [0, 1, 2, 3]
    with pytest.raises(CorruptionError):
        log.check_there([middle])
    with pytest.raises(CorruptionError):
        list(log.read(span_of(first)))
    log.check_there([rest])


@pytest.mark.usefixtures("small_segments")
def test_a_dry_run_of_a_trim_says_the_same_and_deletes_nothing(log: Log) -> None:
    acks = write_apart(log, 5)
    chosen = cut([LogSpan(1, 0, acks[0].offset, acks[3].end)])
    planned = log.trim(chosen, dry_run=True)
    assert seqs(log, span_of(acks)) == [0, 1, 2, 3, 4]
    assert log.trim(chosen) == planned
    assert planned.count == 4
    with pytest.raises(CorruptionError):
        log.check_there([span_of(acks)])


@pytest.mark.usefixtures("small_segments")
def test_a_trim_that_comes_again_or_late_finds_nothing_to_do(log: Log) -> None:
    acks = write_apart(log, 5)
    chosen = cut([LogSpan(1, 0, acks[0].offset, acks[2].end)])
    freed = log.trim(chosen)
    nothing = Freed(freed.what, 0, None if freed.num_bytes is None else 0)
    assert log.trim(chosen) == log.trim(cut([LogSpan(1, 0, acks[0].offset, acks[1].end)])) == nothing
    assert log.trim(cut()) == nothing
    assert seqs(log, LogSpan(1, 0, acks[3].offset, acks[-1].end)) == [3, 4]


@pytest.mark.usefixtures("small_segments")
def test_a_trim_never_takes_what_another_generation_needs(log: Log) -> None:
    """Generations 1 and 3 are given up, 2 is not; 4 has committed nothing yet."""
    spans, at = {}, {}
    for generation in (1, 2, 3, 4):
        acks = write_apart(log, 3, generation=generation)
        spans[generation], at[generation] = span_of(acks, generation=generation), acks
    chosen = cut([spans[1], spans[3]], [spans[2]], [1])
    freed = log.trim(chosen)
    assert log.trim(chosen, dry_run=True).count == 0
    assert freed.count >= 3
    with pytest.raises(CorruptionError):
        log.check_there([spans[1]])
    for generation in (2, 4):
        assert seqs(log, spans[generation]) == [0, 1, 2]
    log.trim(cut([spans[1], spans[2], spans[3]], [], [1, 2, 3]))
    for generation in (1, 2, 3):
        with pytest.raises(CorruptionError):
            log.check_there([spans[generation]])
    assert seqs(log, spans[4]) == [0, 1, 2]


@pytest.mark.usefixtures("small_segments")
def test_a_writer_goes_on_over_a_trim(log: Log) -> None:
    acks = write_apart(log, 4)
    writer = log.open_writer(1, 0, acks[-1].end)
    log.trim(cut([LogSpan(1, 0, acks[0].offset, acks[-1].end)]))
    writer.send(frame(4))
    acks += acknowledged(writer, 1)
    writer.close()
    acks += write(log, [frame(5)], resume_at=acks[-1].end)
    assert seqs(log, LogSpan(1, 0, acks[4].offset, acks[-1].end)) == [4, 5]


def test_control_is_empty_before_the_first_record(backend: Backend) -> None:
    log = backend.open()
    assert list(log.read_control()) == []
    log.prepare(1)
    assert list(log.read_control()) == []
    log.close()


def test_control_records_come_back_in_order_with_their_offsets(log: Log) -> None:
    records = [control_record(number) for number in range(1, 6)]
    offsets = [log.append_control(record) for record in records]
    assert offsets == sorted(set(offsets))
    assert list(log.read_control()) == list(zip(offsets, records, strict=True))


def test_control_is_read_from_an_offset(log: Log) -> None:
    records = [control_record(number) for number in range(1, 5)]
    offsets = [log.append_control(record) for record in records]
    assert list(log.read_control(offsets[2])) == list(zip(offsets[2:], records[2:], strict=True))


def test_two_appenders_interleave_and_lose_nothing(backend: Backend, log: Log) -> None:
    other = backend.open()
    placed: dict[int, bytes] = {}

    def append(own: Log, base: int) -> None:
        for number in range(base, base + 15):
            record = control_record(number)
            placed[own.append_control(record)] = record

    threads = [threading.Thread(target=append, args=(own, base)) for own, base in ((log, 1), (other, 1001))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    other.close()
    assert len(placed) == 30
    assert list(log.read_control()) == sorted(placed.items())


def test_records_of_one_user_are_seen_by_another(backend: Backend, log: Log) -> None:
    other = backend.open()
    offset = log.append_control(control_record(1))
    assert list(other.read_control()) == [(offset, control_record(1))]
    other.close()


def test_a_watch_ends_its_wait_for_new_records_and_new_rows_alone(backend: Backend, log: Log) -> None:
    watch, other = log.watch(), backend.open()
    try:
        assert watch.wait(60, [0])  # the first one returns at once
        while watch.wait(0.3, [0]):  # what prepare() has made
            pass
        log.append_control(control_record(1))
        assert watch.wait(60, [0])
        while watch.wait(0.3, [0]):
            pass
        write(other, [frame(1)])
        assert watch.wait(60, [0])
        while watch.wait(0.3, [0]):
            pass
        other.append_control(control_record(2))  # between two waits
        assert watch.wait(60, [0])
        while watch.wait(0.3, [0]):
            pass
        watch.wake()
        assert not watch.wait(60, [0])
        assert watch.by == {"file": "inotify", "kafka": "fetch", "bucket": "probe"}[backend.name]
    finally:
        watch.close()
        other.close()


def test_no_log_has_no_incarnation(backend: Backend) -> None:
    log = backend.open()
    assert log.incarnation() is None
    log.close()


def test_prepare_adds_partitions_and_never_takes_away(backend: Backend, log: Log) -> None:
    acks = write(log, [frame(0)])
    before = log.incarnation()
    assert before is not None
    assert before.partitions == 2
    grown = log.prepare(4)
    assert (grown.id, grown.partitions) == (before.id, 4)
    assert log.prepare(1) == grown == log.incarnation()
    assert seqs(log, span_of(acks)) == [0]
    write(log, [frame(0)], partition=3)


def test_racing_preparers_agree(backend: Backend) -> None:
    logs = [backend.open() for _ in range(3)]
    found: list[str] = []
    threads = [threading.Thread(target=lambda own=own: found.append(own.prepare(2).id)) for own in logs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert len(set(found)) == 1


def test_incarnation_changes_when_the_log_is_deleted_and_made_again(backend: Backend, log: Log) -> None:
    before = log.incarnation()
    backend.destroy()
    deadline = time.monotonic() + 120
    while log.incarnation() is not None:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    after = log.prepare(2)
    assert before is not None
    assert after.id != before.id


def test_client_options_belong_to_kafka_and_a_stores_to_a_bucket(backend: Backend) -> None:
    if backend.name == "file":
        with pytest.raises(ConfigError):
            open_log(backend.uri, {"linger.ms": "1"})
    elif backend.name == "kafka":
        open_log(backend.uri, {"linger.ms": "1"}).close()
    else:
        with pytest.raises(ConfigError, match="the store's option 'client_kwargs' is not JSON"):
            open_log(backend.uri, {"client_kwargs": "{"})
