"""Trimming on a real broker, where one partition holds the frames of many generations."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.builders import Stream, claim, commit
from tests.parts import Ack, Freed, body_of, locate, open_log, shorten_control, trim_log
from torchrec_stream_ckpt.errors import CorruptionError, PrunedError, TrimmedError
from torchrec_stream_ckpt.format.folding import is_snapshot
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.inner import Control, Log, read_stream
from torchrec_stream_ckpt.log.kafka.log import KafkaLog
from torchrec_stream_ckpt.save.generation import Generation
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

pytestmark = pytest.mark.kafka

STORE = "s3://bucket/job"


@pytest.fixture
def log(bootstrap: str) -> Iterator[Log]:
    log = open_log(f"kafka://{bootstrap}/job-{uuid.uuid4().hex}")
    log.prepare(2)
    yield log
    log.close()


class Partition:
    """Writes whole streams of several generations into partition 0, one behind the other."""

    def __init__(self, log: Log) -> None:
        self.log = log
        incarnation = log.incarnation()
        assert incarnation is not None
        self._incarnation = incarnation.id
        self._writer = log.open_writer(1, 0, 0)  # where frames go does not depend on their generation
        self._streams: dict[int, tuple[Stream, int]] = {}

    def claim(self, generation: int, parent: str = "") -> None:
        above = MarkerId.parse(parent) if parent else None
        self.log.append_control(claim(generation, parent=above, incarnation=self._incarnation).to_frame())
        stream = Stream(generation=generation)
        self._streams[generation] = (stream, self._write(stream.frames) - 1)

    def rows(self, generation: int) -> None:
        stream, _ = self._streams[generation]
        self._write([stream.rows(range(8))])

    def mark(self, generation: int, marker: int) -> None:
        """Rows, a MARK and its COMMIT: two offsets."""
        stream, begin = self._streams[generation]
        end = self._write([stream.rows(range(8), marker), stream.mark(marker)])
        self.log.append_control(commit(generation, marker, [stream.end(begin, end)]).to_frame())

    def _write(self, frames: list[bytes]) -> int:
        """Offset behind the frames."""
        for frame in frames:
            self._writer.send(memoryview(frame))
        acks: list[Ack] = []
        deadline = time.monotonic() + 20
        while len(acks) < len(frames):
            assert time.monotonic() < deadline
            acks += self._writer.poll(0.2)
        return acks[-1].end

    def close(self) -> None:
        self._writer.close()


def readable(log: Log, marker: str) -> bool:
    """Whether the log alone brings the marker back; trimmed data is never called missing."""
    lineage = Control(log).refresh()
    try:
        route = locate(lineage, MarkerId.parse(marker))
        route.check_trimmed(log)
    except TrimmedError:
        return False
    route.complete(log)
    for ancestor in lineage.path(MarkerId.parse(marker)):
        for end in ancestor.ranks:
            assert sum(1 for _ in read_stream(log, ancestor, end)) == end.frames
    return True


def test_a_partition_is_trimmed_up_to_the_first_offset_that_anybody_needs(log: Log, tmp_path: Path) -> None:
    partition = Partition(log)
    partition.claim(1)  # offset 0
    partition.mark(1, 1)  # 1, 2
    partition.mark(1, 2)  # 3, 4
    partition.claim(2, "1:1")  # 5: a branch
    partition.mark(2, 2)  # 6, 7
    partition.claim(3, "1:2")  # 8
    partition.rows(1)  # 9: from a trainer that is fenced and does not know it
    partition.rows(3)  # 10: generation 3 never commits
    partition.claim(4, "1:2")  # 11
    partition.mark(4, 3)  # 12, 13
    partition.mark(4, 4)  # 14, 15
    control = Control(log)
    lineage = control.refresh()

    def trim(marker: str, *others: str) -> Freed:
        first, *more = (lineage.find(MarkerId.parse(name)) for name in (marker, *others))
        planned = trim_log(log, control, first, STORE, others=more, dry_run=True).freed
        assert trim_log(log, control, first, STORE, others=more).freed == planned
        return planned

    markers = ["1:1", "1:2", "2:2", "4:3", "4:4"]
    assert [readable(log, marker) for marker in markers] == [True] * 5
    # Generation 2 is needed from offset 5 on, and its parent's rows are in the store.
    assert trim("4:3") == Freed("records", 5, None)
    assert [readable(log, marker) for marker in markers] == [False] * 5
    assert trim("4:3") == Freed("records", 0, None)
    log.check_there(lineage.spans(2, lineage.find(MarkerId(2, 2)).ranks))
    # Once the branch is in the store, all goes up to 4:3, with what the dead ones sent in between.
    assert trim("4:3", "2:2") == Freed("records", 9, None)
    trainer = Generation(log, control, lineage.claims[4], None, 0, 0, tmp_path, "")  # type: ignore[arg-type]
    partition.mark(4, 5)
    partition.close()
    newest = control.refresh().find(MarkerId(4, 5))
    trainer.check_log(6, newest.ranks)
    (tail,) = control.refresh().spans(4, newest.ranks)
    assert [parse_header(frame).seq for _, frame in log.read(tail)] == [3, 4, 5, 6]
    # What was not trimmed on purpose is missed as ever.
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    name, brokers = str(log.uri.data_topic), log.uri.brokers  # type: ignore[attr-defined]
    admin = AdminClient({"bootstrap.servers": brokers})
    for deleted in admin.delete_records([TopicPartition(name, 0, 15)]).values():
        deleted.result(20)
    with pytest.raises(CorruptionError, match="rows from offset 14 on are required, but the log begins at 15"):
        trainer.check_log(7, newest.ranks)
    with pytest.raises(CorruptionError, match="rows from offset 14 on are required"):
        locate(control.refresh(), MarkerId(4, 5)).check_trimmed(log)


# Snapshots of the control topic on a real broker: what they say goes; a topic without them is refused by name.


@pytest.fixture
def uri(bootstrap: str) -> str:
    return f"kafka://{bootstrap}/job-{uuid.uuid4().hex}"


@pytest.fixture
def shortened(uri: str) -> Iterator[Log]:
    shortened = open_log(uri)
    shortened.prepare(1)
    yield shortened
    shortened.close()


def markers(control: Control) -> list[int]:
    return [marker.marker for marker in control.refresh().commits]


def test_the_control_topic_is_cut_up_to_the_second_newest_snapshot(shortened: Log, uri: str) -> None:
    shortened.append_control(claim(1).to_frame())
    sleeper, watcher = Control(shortened), Control(shortened)
    sleeper.refresh()
    for number in range(1, 7):
        offset = shortened.append_control(commit(1, number).to_frame())
        if number % 2 == 0:
            shorten_control(shortened, Control(shortened), at_once=True)
        assert markers(watcher) == list(range(1, number + 1))
    assert (
        shortened.control_base() == offset - 3
    )  # 1:4, the last that the second-newest covers; a snapshot and 1:5 follow
    with pytest.raises(PrunedError, match="the control topic begins at offset"):
        shortened.read_control(0)
    shortened.append_control(commit(1, 7).to_frame())
    again = open_log(uri)
    assert markers(Control(again)) == markers(sleeper) == markers(watcher) == [1, 2, 3, 4, 5, 6, 7]
    assert body_of(sleeper.lineage) == body_of(watcher.lineage)
    (newest, _) = [each for each in again.read_control(again.control_base()) if is_snapshot(each[1])][-1]
    shortened.prune_control(newest + 1)  # somebody else deletes more than he may
    with pytest.raises(CorruptionError, match="has no intact snapshot of the records before it"):
        Control(again).refresh()
    again.close()


class Overtaken(KafkaLog):
    """A log whose front is deleted after a read of the control topic was begun, and before its first record came."""

    def __init__(self, uri: KafkaUri, base: int) -> None:
        super().__init__(uri, {})
        self._until: int | None = base

    def read_control(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        records = super().read_control(start, garbage=garbage)
        if self._until is not None:
            self.prune_control(self._until)
            self._until = None
        return records


def test_a_read_that_a_deletion_overtakes_is_begun_anew(shortened: Log, uri: str) -> None:
    shortened.append_control(claim(1).to_frame())
    covered = shortened.append_control(commit(1, 1).to_frame())
    shorten_control(shortened, Control(shortened), at_once=True)
    shortened.append_control(commit(1, 2).to_frame())
    parsed = parse_uri(uri)
    assert isinstance(parsed, KafkaUri)
    overtaken = Overtaken(parsed, covered)
    assert markers(Control(overtaken)) == [1, 2]
    assert overtaken.control_base() == covered
    overtaken.close()
