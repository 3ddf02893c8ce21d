"""What a trainer looks at, before a COMMIT, of the generations that its own one stands on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.builders import claim, commit, trim
from tests.parts import FileLog
from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.control.ancestor_check import EACH_TIME, Older
from torchrec_stream_ckpt.util.layout import partition_dir, segment_name
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd

GENERATIONS, RANKS = 100, 4
PARENT = MarkerId(GENERATIONS, 1)


def old_job() -> Lineage:
    """Generations of one marker, each on top of the one before, offsets going on as on Kafka."""
    lineage = Lineage()
    for number in range(1, GENERATIONS + 1):
        lineage.apply(claim(number, parent=MarkerId(number - 1, 1) if number > 1 else None))
        ends = [RankEnd(rank, rank, 10 * number, 10 * number + 10, 2, 0, 0, 0) for rank in range(RANKS)]
        lineage.apply(commit(number, 1, ends))
    return lineage


def test_a_bounded_number_of_older_streams_is_looked_at_and_all_of_them_in_turn() -> None:
    lineage, older, seen, turns = old_job(), Older(), set(), 0
    every = {span for each in lineage.path(PARENT) for span in lineage.spans(each.generation, each.ranks)}
    while seen != every:
        found = older.spans(lineage, PARENT)
        assert found == older.spans(lineage, PARENT)
        assert len(found) <= EACH_TIME + 2 * RANKS
        for rank in range(RANKS):  # what a retention takes first, and what a broker loses first
            assert {LogSpan(1, rank, 10, 20), LogSpan(GENERATIONS, rank, 10 * GENERATIONS, 10 * GENERATIONS + 10)} <= {
                *found
            }
        seen |= set(found)
        older.turn()
        turns += 1
    assert turns == -(-(len(every) - 2 * RANKS) // EACH_TIME)


def test_what_was_trimmed_is_not_looked_at_any_more() -> None:
    lineage, older = old_job(), Older()
    assert older.spans(lineage, PARENT)
    lineage.apply(trim(*(f"{number}:1" for number in range(1, GENERATIONS))))
    assert {span.generation for span in older.spans(lineage, PARENT)} == {GENERATIONS}


def test_a_generation_without_a_parent_stands_on_nothing() -> None:
    assert Older().spans(old_job(), None) == ()


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    """One stream in two segments."""
    log = FileLog(tmp_path)
    log.prepare(1)
    folder = partition_dir(tmp_path, 0)
    (folder / segment_name(3, 0)).write_bytes(bytes(100))
    (folder / segment_name(3, 100)).write_bytes(bytes(50))
    return log


def test_segments_that_follow_each_other_are_found_by_name(log: FileLog, tmp_path: Path) -> None:
    for begin, end in ((0, 150), (0, 100), (20, 130), (120, 140)):
        log.check_there([LogSpan(3, 0, begin, end)])
    (partition_dir(tmp_path, 0) / segment_name(3, 0)).unlink()
    log.check_there([LogSpan(3, 0, 100, 150)])  # its front was trimmed
    with pytest.raises(CorruptionError, match="bytes 0 to 100 of the log are missing, but were committed"):
        log.check_there([LogSpan(3, 0, 0, 150)])


@pytest.mark.parametrize("length", [0, 40])
def test_a_segment_that_is_cut_is_a_lost_tail(log: FileLog, tmp_path: Path, length: int) -> None:
    with open(partition_dir(tmp_path, 0) / segment_name(3, 100), "ab") as file:
        file.truncate(length)
    with pytest.raises(StreamLostError, match=f"the log ends at byte {100 + length}"):
        log.check_there([LogSpan(3, 0, 0, 150)])
