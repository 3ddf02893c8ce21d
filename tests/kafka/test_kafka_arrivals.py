"""A follower reads the records that have ended its wait: each is fetched once, by a client that stays."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import confluent_kafka as ck
import pytest

from tests.builders import Stream
from tests.kafka.test_kafka_follow import apply
from tests.own_broker import OwnBroker
from tests.parts import FollowMode, Update, UpdateKind, open_log
from tests.synthetic import SCHEMA, Image, Job, image_of_log
from torchrec_stream_ckpt import follow
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Control, Log
from torchrec_stream_ckpt.log.kafka import arrivals
from torchrec_stream_ckpt.log.kafka.settings import FETCH_WAIT_S
from torchrec_stream_ckpt.log.watch import Watch
from torchrec_stream_ckpt.util.types import LogSpan, MarkPlace

pytestmark = pytest.mark.kafka


@pytest.fixture
def uri(bootstrap: str) -> str:
    return f"kafka://{bootstrap}/arrivals-{uuid.uuid4().hex}"


class Client(ck.Consumer):
    """A consumer that says what it was asked for, and may fail."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.asked: list[int] = []
        self.fails = False

    def consume(self, count: int, timeout: float) -> Any:
        self.asked.append(count)
        if self.fails:
            raise ck.KafkaException(ck.KafkaError(ck.KafkaError._TRANSPORT))
        return super().consume(count, timeout=timeout)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Client]:
    """The consumers that were made."""
    found: list[Client] = []

    def make(settings: dict[str, Any]) -> Client:
        found.append(Client(settings))
        return found[-1]

    monkeypatch.setattr(ck, "Consumer", make)
    return found


class Writing:
    """Writes records to partitions of a log."""

    def __init__(self, uri: str, partitions: int) -> None:
        self.log: Log = open_log(uri)
        self.log.prepare(partitions)
        self._writers = [self.log.open_writer(1, partition, 0) for partition in range(partitions)]

    def write(self, partition: int, *numbers: int) -> list[tuple[int, bytes]]:
        """Write records. Returns (offset, record) of each, once all are durable."""
        return self.put(partition, [bytes([number]) * 100 for number in numbers])

    def put(self, partition: int, records: list[bytes]) -> list[tuple[int, bytes]]:
        acks: list[Any] = []
        for each in records:
            self._writers[partition].send(memoryview(each))
        while len(acks) < len(records):
            acks += self._writers[partition].poll(0.2)
        return [(ack.offset, each) for ack, each in zip(acks, records, strict=True)]

    def close(self) -> None:
        for each in self._writers:
            each.close()
        self.log.close()


@pytest.fixture
def writing(uri: str) -> Iterator[Writing]:
    writing = Writing(uri, 2)
    yield writing
    writing.close()


@dataclass
class Watched:
    """A log, and its watch."""

    log: Log
    watch: Watch


@pytest.fixture
def watched(uri: str) -> Iterator[Watched]:
    log = open_log(uri)
    watch = log.watch()
    yield Watched(log, watch)
    watch.close()
    log.close()


def read(log: Log, partition: int, begin: int) -> list[tuple[int, bytes]]:
    end = log.ends(1, [partition])[partition]
    return [(offset, bytes(each)) for offset, each in log.read(LogSpan(1, partition, begin, end))]


def test_records_are_read_by_the_client_that_waited_for_them(
    writing: Writing, watched: Watched, made: list[Client]
) -> None:
    log, watch = watched.log, watched.watch
    old = writing.write(0, 1, 2)
    assert watch.wait(60, [0, 1])
    assert read(log, 0, 0) == old
    assert len(made) == 2  # records before the wait: by another client
    for number in (10, 20, 30):
        new, others = writing.write(0, number, number + 1), writing.write(1, number)
        assert watch.wait(60, [0, 1])
        last = old[-1:] if number > 10 else []  # where a reader of a stream continues, if it was read here
        assert read(log, 0, last[0][0] if last else new[0][0]) == last + new
        assert read(log, 1, others[0][0]) == others
        old = new
    offset = writing.log.append_control(b"record")
    assert watch.wait(60, [0, 1])
    assert list(log.read_control(offset)) == [(offset, b"record")]
    assert len(made) == 2
    while watch.wait(0.3, [0, 1]):
        pass


def test_another_thread_reads_the_same_records_by_its_own_client(
    writing: Writing, watched: Watched, made: list[Client]
) -> None:
    log, watch = watched.log, watched.watch
    assert watch.wait(60, [0])
    new = writing.write(0, *range(5))
    assert watch.wait(60, [0])
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(read(log, 0, new[0][0])))
    thread.start()
    thread.join()
    assert (found, len(made)) == ([new], 2)
    assert read(log, 0, new[0][0]) == new
    assert len(made) == 2


def test_a_read_that_is_broken_off_goes_on_where_it_was(writing: Writing, watched: Watched, made: list[Client]) -> None:
    log, watch = watched.log, watched.watch
    assert watch.wait(60, [1])
    new = writing.write(0, *range(40))
    reading = log.read(LogSpan(1, 0, 0, 40))
    some = [bytes(next(reading)[1]) for _ in range(3)]
    del reading
    assert some == [each for _, each in new[:3]]
    assert read(log, 0, 2) == new[2:]  # from the last one on that was read
    later = writing.write(0, 50, 51)
    assert read(log, 0, 40) == later
    assert len(made) == 2  # one waits, one reads
    assert read(log, 0, 7) == new[7:] + later
    assert len(made) == 3


def test_a_client_of_a_reader_that_does_not_wait_fetches_nothing_between_reads(
    writing: Writing, watched: Watched, made: list[Client]
) -> None:
    log, watch = watched.log, watched.watch
    old = writing.write(0, 1, 2)
    assert read(log, 0, 0) == old
    assert made[0].assignment() == []
    time.sleep(2 * FETCH_WAIT_S)
    new = writing.write(0, 3, 4)
    assert read(log, 0, 1) == old[1:] + new
    assert len(made) == 1
    watch.close()
    log.close()
    with pytest.raises(RuntimeError, match="closed"):
        made[0].assignment()


def test_a_client_that_fails_after_it_was_kept_is_replaced(
    writing: Writing, watched: Watched, made: list[Client]
) -> None:
    log, watch = watched.log, watched.watch
    assert watch.wait(60, [1])
    writing.write(0, *range(3))
    assert len(read(log, 0, 0)) == 3
    made[1].fails = True
    later = writing.write(0, 7, 8)
    assert read(log, 0, 3) == later
    assert len(made) == 3


def test_records_are_read_although_the_client_that_waits_has_failed(
    writing: Writing, watched: Watched, made: list[Client]
) -> None:
    log, watch = watched.log, watched.watch
    assert watch.wait(60, [0])
    made[0].fails = True
    assert watch.wait(60, [0])  # not the whole time: the reader has to look
    new = writing.write(0, *range(3))
    assert read(log, 0, 0) == new
    assert watch.wait(60, [0])  # by another client, from the end on
    later = writing.write(0, 7)
    assert watch.wait(60, [0])
    assert read(log, 0, later[0][0]) == later
    assert len(made) == 3


def test_reads_of_one_partition_may_alternate(writing: Writing, watched: Watched) -> None:
    log, watch = watched.log, watched.watch
    assert watch.wait(60, [0])
    new = writing.write(0, *range(10))
    assert watch.wait(60, [0])
    reading = log.read(LogSpan(1, 0, 0, 10))
    first = [(offset, bytes(each)) for offset, each in islice(reading, 3)]
    assert read(log, 0, 2) == new[2:]
    assert first + [(offset, bytes(each)) for offset, each in reading] == new
    later = writing.write(0, *range(10))
    reading = log.read(LogSpan(1, 0, 10, 20))
    first = [(offset, bytes(each)) for offset, each in islice(reading, 3)]
    watch.close()
    assert first + [(offset, bytes(each)) for offset, each in reading] == later
    log.close()


def test_records_that_the_broker_has_lost_since_they_arrived_are_not_read(victim: OwnBroker) -> None:
    writing, log = Writing(victim.uri, 1), open_log(victim.uri)
    watch = log.watch()
    assert watch.wait(60, [0])
    writing.write(0, 1)
    size = victim.segment("job.data-0").stat().st_size
    writing.write(0, 2, 3)
    while watch.wait(1, [0]):  # until all have arrived
        pass
    victim.cut("job.data-0", lambda _: size)
    writing.close()
    writing = Writing(victim.uri, 1)
    new = writing.write(0, 4, 5)
    assert new[0][0] == 1
    assert read(log, 0, 1) == new
    watch.close()
    log.close()
    writing.close()


def put(update: Update, image: Image) -> None:
    for each in update.changes():
        image.put(SCHEMA.tables.index(each.table), each.col0, RowsView(each.ids, each.weights, each.states))


@pytest.mark.parametrize("mode", ["markers", "rows"])
@pytest.mark.parametrize("held_bytes", [arrivals.HELD_BYTES, 0])
def test_updates_that_are_waited_for_make_no_client_each(
    mode: FollowMode, held_bytes: int, uri: str, tmp_path: Path, made: list[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arrivals, "HELD_BYTES", held_bytes)
    log = open_log(uri)
    job = Job(tmp_path, log=log, world=1)
    job.begin()
    job.commit()
    image, counts = Image(SCHEMA), []
    with follow(uri, mode=mode, states=True, scratch=tmp_path) as follower:
        assert apply(follower, image) == [UpdateKind.LOAD]
        job.touch()
        marker = job.commit()
        for update in follower.updates(60.0):
            put(update, image)
            if update.kind is UpdateKind.MARKER:
                counts.append(len(made))
                if len(counts) == 9:
                    break
                job.touch()
                marker = job.commit()
    assert image == image_of_log(log, Control(log).refresh(), marker.id)
    if held_bytes:
        assert counts[-1] == counts[2]  # the first ones make clients that stay
    log.close()


def test_a_mark_is_looked_up_without_a_wait_for_others(writing: Writing, uri: str, made: list[Client]) -> None:
    """A client waits until it has as many records as it was asked for."""
    places = []
    for partition in (0, 1):
        stream = Stream(partition)
        stream.mark(1)
        end = writing.put(partition, stream.frames)[-1][0] + 1
        places.append(MarkPlace(1, partition, end, parse_header(stream.frames[-1]).header_crc))
    log = open_log(uri)
    log.check_marks(places)
    assert made[0].asked[0] == max(made[0].asked) == 2
    log.close()
