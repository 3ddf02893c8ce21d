"""Snapshots of the control topic on a real broker: what they say goes; a topic without them is refused by name."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest

from tests.builders import claim, commit
from tests.parts import open_log
from torchrec_stream_ckpt.errors import CorruptionError, PrunedError
from torchrec_stream_ckpt.format.folding import body_of, is_snapshot
from torchrec_stream_ckpt.inner import Control, Log
from torchrec_stream_ckpt.log.control.snapshots import shorten_control
from torchrec_stream_ckpt.log.kafka.log import KafkaLog
from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri

pytestmark = pytest.mark.kafka


@pytest.fixture
def uri(bootstrap: str) -> str:
    return f"kafka://{bootstrap}/job-{uuid.uuid4().hex}"


@pytest.fixture
def log(uri: str) -> Iterator[Log]:
    log = open_log(uri)
    log.prepare(1)
    yield log
    log.close()


def markers(control: Control) -> list[int]:
    return [marker.marker for marker in control.refresh().commits]


def test_the_control_topic_is_cut_up_to_the_second_newest_snapshot(log: Log, uri: str) -> None:
    log.append_control(claim(1).to_frame())
    sleeper, watcher = Control(log), Control(log)
    sleeper.refresh()
    for number in range(1, 7):
        offset = log.append_control(commit(1, number).to_frame())
        if number % 2 == 0:
            shorten_control(log, Control(log), at_once=True)
        assert markers(watcher) == list(range(1, number + 1))
    assert log.control_base() == offset - 3  # 1:4, the last that the second-newest covers; a snapshot and 1:5 follow
    with pytest.raises(PrunedError, match="the control topic begins at offset"):
        log.read_control(0)
    log.append_control(commit(1, 7).to_frame())
    again = open_log(uri)
    assert markers(Control(again)) == markers(sleeper) == markers(watcher) == [1, 2, 3, 4, 5, 6, 7]
    assert body_of(sleeper.lineage) == body_of(watcher.lineage)
    (newest, _) = [each for each in again.read_control(again.control_base()) if is_snapshot(each[1])][-1]
    log.prune_control(newest + 1)  # somebody else deletes more than he may
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


def test_a_read_that_a_deletion_overtakes_is_begun_anew(log: Log, uri: str) -> None:
    log.append_control(claim(1).to_frame())
    covered = log.append_control(commit(1, 1).to_frame())
    shorten_control(log, Control(log), at_once=True)
    log.append_control(commit(1, 2).to_frame())
    parsed = parse_uri(uri)
    assert isinstance(parsed, KafkaUri)
    overtaken = Overtaken(parsed, covered)
    assert markers(Control(overtaken)) == [1, 2]
    assert overtaken.control_base() == covered
    overtaken.close()
