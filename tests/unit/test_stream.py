"""Reading one rank's stream: what a producer repeats comes once, and nothing may be missing or foreign."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builders import OTHER_JOB, SCHEMA, Stream, claim, commit, write
from tests.parts import FileLog, read_hello, read_mark
from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Kind, json_frame, parse_header
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import read_stream
from torchrec_stream_ckpt.log.gaps import Gap, StreamName, check_gaps
from torchrec_stream_ckpt.log.stream import Strays, checked_payload
from torchrec_stream_ckpt.util.types import LogSpan, RankEnd


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    log = FileLog(tmp_path)
    log.prepare(1)
    return log


@pytest.fixture
def stream() -> Stream:
    """HELLO, three frames of rows, MARK."""
    stream = Stream()
    for number in range(3):
        stream.rows([number, number + 1], float(number))
    stream.mark()
    return stream


def read(log: FileLog, frames: list[bytes], end: RankEnd) -> list[int]:
    """Write frames one behind the other and read them as one rank's stream; the seqs that come."""
    if frames:
        acks = write(log, frames)
        end = replace(end, begin=acks[0].offset, end=acks[-1].end)
    return [header.seq for header, _ in read_stream(log, commit(1, 1, [end]), end)]


def test_a_whole_stream_is_read_in_order(log: FileLog, stream: Stream) -> None:
    assert read(log, stream.frames, stream.end(0, 0)) == [0, 1, 2, 3, 4]


def test_hello_and_mark_are_decoded(log: FileLog, stream: Stream) -> None:
    acks = write(log, stream.frames)
    end = stream.end(0, acks[-1].end)
    one = commit(1, 1, [end])
    assert read_hello(log, claim(1), one, end).shards == stream.shards
    header, frame = list(read_stream(log, one, end))[-1]
    assert read_mark(header, frame, one, end).num_bytes == acks[3].end


def test_frames_that_a_producer_sent_twice_come_once(log: FileLog, stream: Stream) -> None:
    first, second, third, fourth, mark = stream.frames
    again = [first, second, third, second, third, fourth, first, mark]
    assert read(log, again, stream.end(0, 0)) == [0, 1, 2, 3, 4]


def test_frames_of_other_ranks_and_generations_are_passed_over(log: FileLog, stream: Stream) -> None:
    other, older = Stream(rank=1), Stream(generation=9)
    other.rows([5])
    mixed = [other.frames[0], stream.frames[0], older.frames[0], *stream.frames[1:3], other.frames[1]]
    assert read(log, [*mixed, *stream.frames[3:]], stream.end(0, 0)) == [0, 1, 2, 3, 4]


def test_frames_behind_the_mark_are_not_read(log: FileLog, stream: Stream) -> None:
    end = stream.end(0, 0)
    stream.rows([7])
    assert read(log, stream.frames, end) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(("marker", "step"), [(2, 10), (1, 11)])
def test_a_mark_of_another_marker_or_step_is_refused(log: FileLog, marker: int, step: int) -> None:
    stream = Stream()
    stream.json(Kind.MARK, Mark(0, len(stream.frames[0]), ()).to_json(), marker=marker, step=step)
    with pytest.raises(
        CorruptionError, match=f"found the MARK of marker {marker} at step {step}, expected 1:1 at step 10"
    ):
        read(log, stream.frames, stream.end(0, 0))


@pytest.mark.parametrize("missing", range(5))
def test_a_missing_frame_is_found(log: FileLog, stream: Stream, missing: int) -> None:
    frames = stream.frames[:missing] + stream.frames[missing + 1 :]
    with pytest.raises(CorruptionError) as refused:
        read(log, frames, stream.end(0, 0))
    found = refused.value
    if missing < 4:
        assert f"found seq {missing + 1} after" in found.message
        assert f"expected seq {missing} after" in found.message
    else:
        assert found.message == "found 4 of 5 frames up to this marker"
    assert found.where["rank"] == "0"
    assert found.where["generation"] == "1"
    assert found.hint


def test_swapped_frames_are_found(log: FileLog, stream: Stream) -> None:
    hello, first, second, *rest = stream.frames
    with pytest.raises(CorruptionError, match=r"found seq 2 after .* expected seq 1 after"):
        read(log, [hello, second, first, *rest], stream.end(0, 0))


def test_another_frame_under_a_known_seq_is_passed_over(log: FileLog, stream: Stream) -> None:
    twin = Stream()
    twin.rows([3], 99.0)
    assert read(log, [*stream.frames[:2], twin.frames[1], *stream.frames[2:]], stream.end(0, 0)) == [0, 1, 2, 3, 4]


def test_another_frame_in_the_place_of_the_next_one_is_found(log: FileLog, stream: Stream) -> None:
    twin = Stream()
    twin.rows([3], 99.0)
    with pytest.raises(CorruptionError, match="found seq 1 after"):
        read(log, [stream.frames[0], twin.frames[1], *stream.frames[1:]], stream.end(0, 0))


def test_a_frame_of_another_timeline_breaks_the_chain(log: FileLog, stream: Stream) -> None:
    twin = Stream()
    twin.rows([3], 99.0)
    twin.rows([4], 98.0)
    with pytest.raises(CorruptionError, match="found seq 2 after"):
        read(log, [*stream.frames[:2], twin.frames[2], *stream.frames[3:]], stream.end(0, 0))


def test_a_stream_that_does_not_end_in_the_committed_mark_is_refused(log: FileLog, stream: Stream) -> None:
    end = stream.end(0, 0)
    with pytest.raises(CorruptionError, match="found 5 of 5 frames up to this marker"):
        read(log, stream.frames, replace(end, chain=end.chain ^ 1))


def test_a_stream_that_ends_in_rows_is_refused(log: FileLog) -> None:
    stream = Stream()
    stream.rows([1])
    with pytest.raises(CorruptionError, match="found 2 of 2 frames up to this marker"):
        read(log, stream.frames, stream.end(0, 0))


def test_fewer_frames_than_committed_are_refused(log: FileLog, stream: Stream) -> None:
    with pytest.raises(CorruptionError, match="found 5 of 6 frames up to this marker"):
        read(log, stream.frames, replace(stream.end(0, 0), frames=6))


def test_a_missing_tail_of_the_log_is_refused(log: FileLog, stream: Stream) -> None:
    acks = write(log, stream.frames[:3])
    end = stream.end(0, acks[-1].end + len(stream.frames[3]))
    with pytest.raises(
        CorruptionError, match=f"the log ends at byte {acks[-1].end}, but was committed up to byte {end.end}"
    ):
        list(read_stream(log, commit(1, 1, [end]), end))


class Records:
    """A log whose records have bounds of their own, as Kafka's have: the offset of each is its number."""

    def __init__(self, records: list[bytes]) -> None:
        self._records = records

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        numbered = enumerate(self._records[span.begin : span.end], span.begin)
        return ((number, memoryview(record)) for number, record in numbered)


def read_records(records: list[bytes], end: RankEnd, strays: Strays | None = None) -> list[int]:
    """The seqs of one rank's stream among records."""
    end = replace(end, begin=0, end=len(records))
    log: Any = Records(records)
    return [header.seq for header, _ in read_stream(log, commit(1, 1, [end]), end, strays=strays)]


def _altered(frame: bytes, at: int) -> bytes:
    return frame[:at] + bytes([frame[at] ^ 1]) + frame[at + 1 :]


def stray_records() -> dict[str, bytes]:
    """What somebody else may put into a data partition."""
    foreign = Stream(job=OTHER_JOB)
    own = Stream()
    own.rows([3], 99.0)
    return {
        "nothing": b"",
        "text": b"hello world",
        "a page": bytes(range(256)) * 16,
        "another job": foreign.frames[0],
        "a control record": claim(1).to_frame(),
        "a damaged header": _altered(own.frames[0], 40),
        "half a header": own.frames[0][:64],
        "a newer version": _altered(own.frames[0], 4),
        "another timeline": own.frames[1],
    }


PLACES = [(stray, at) for stray in stray_records() for at in (0, 2, 4) if stray != "another timeline" or at > 2]
"""A frame of another timeline in the place of the next one is refused."""


@pytest.mark.parametrize(("stray", "at"), PLACES)
def test_a_record_that_is_not_of_this_stream_is_passed_over_counted_and_told_once(
    stream: Stream, caplog: pytest.LogCaptureFixture, stray: str, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrec_stream_ckpt.log.stream._told", set())
    records = [*stream.frames[:at], stray_records()[stray], *stream.frames[at:]]
    strays = Strays()
    assert read_records(records, stream.end(0, 0), strays) == [0, 1, 2, 3, 4]
    assert (strays.count, strays.offset) == (1, at)
    read_records(records, stream.end(0, 0))
    assert len(caplog.records) == 1
    assert f"the first one at offset {at}" in caplog.text


@pytest.mark.parametrize("missing", range(5))
def test_a_record_in_the_place_of_a_frame_is_named_where_the_frame_is_missing(stream: Stream, missing: int) -> None:
    records = [*stream.frames[:missing], b"hello world", *stream.frames[missing + 1 :]]
    with pytest.raises(CorruptionError, match=f"offset {missing}: frame of 11 bytes") as refused:
        read_records(records, stream.end(0, 0))
    assert (f"expected seq {missing} after" in refused.value.message) == (missing < 4)


def test_a_frame_of_another_job_is_passed_over(log: FileLog, stream: Stream) -> None:
    foreign = Stream(job=OTHER_JOB)
    frames = [stream.frames[0], foreign.frames[0], *stream.frames[1:]]
    assert read(log, frames, stream.end(0, 0)) == [0, 1, 2, 3, 4]


def test_a_stream_of_another_job_in_its_place_is_refused(log: FileLog, stream: Stream) -> None:
    foreign = Stream(job=OTHER_JOB)
    with pytest.raises(CorruptionError, match=r"found 0 of 5 frames up to this marker; .*frame of another job"):
        read(log, foreign.frames, stream.end(0, 0))


def test_a_flipped_header_byte_says_where(log: FileLog, stream: Stream) -> None:
    frames = list(stream.frames)
    frames[2] = frames[2][:40] + bytes([frames[2][40] ^ 1]) + frames[2][41:]
    with pytest.raises(CorruptionError, match="header checksum does not match") as refused:
        read(log, frames, stream.end(0, 0))
    assert str(refused.value.where["offset"]) == str(sum(map(len, frames[:2])))


def test_a_flipped_payload_byte_is_found_by_whoever_reads_the_payload(log: FileLog, stream: Stream) -> None:
    frames = list(stream.frames)
    frames[2] = frames[2][:HEADER_LEN] + b"\xff" + frames[2][HEADER_LEN + 1 :]
    end = stream.end(0, sum(map(len, frames)))
    write(log, frames)
    one = commit(1, 1, [end])
    found = {header.seq: (header, bytes(frame)) for header, frame in read_stream(log, one, end)}
    header, frame = found[2]
    with pytest.raises(CorruptionError, match="payload checksum does not match") as refused:
        checked_payload(header, memoryview(frame), one, end)
    assert str(refused.value.where["seq"]) == "2"


def test_a_stream_that_does_not_begin_with_hello_is_refused(log: FileLog) -> None:
    stream = Stream()
    stream.frames.clear()
    stream.rows([1])
    stream.mark()
    write(log, stream.frames)
    end = stream.end(0, sum(map(len, stream.frames)))
    with pytest.raises(CorruptionError, match="begins with ROWS"):
        read_hello(log, claim(1), commit(1, 1, [end]), end)


def test_hello_must_have_the_schema_of_its_claim(log: FileLog, stream: Stream) -> None:
    end = stream.end(0, sum(map(len, stream.frames)))
    write(log, stream.frames)
    other = claim(1, schema=Schema(SCHEMA.tables[:1]))
    with pytest.raises(CorruptionError, match="the schema in HELLO differs from its CLAIM"):
        read_hello(log, other, commit(1, 1, [end]), end)


def test_the_schema_may_not_change_inside_a_generation(log: FileLog) -> None:
    stream = Stream()
    like = stream.header_of(Kind.MARK, marker=1)
    like.schema_crc ^= 1
    stream.frames.append(bytes(json_frame(like, Mark(0, 0, ()).to_json())))
    with pytest.raises(CorruptionError, match="the schema changes within a generation"):
        read(log, stream.frames, stream.end(0, 0))


def test_an_empty_span_leads_nowhere(log: FileLog, stream: Stream) -> None:
    write(log, stream.frames)
    end = stream.end(0, 0)
    with pytest.raises(CorruptionError, match="0 of 5 frames up to this marker"):
        list(read_stream(log, commit(1, 1, [end]), end))


@pytest.fixture
def two(log: FileLog) -> tuple[Stream, RankEnd, RankEnd]:
    """A stream of two markers: HELLO, rows, MARK, then two of rows, MARK; where it stood at each."""
    stream = Stream()
    stream.rows([0], 1.0)
    stream.mark(1)
    first = stream.end(0, sum(map(len, stream.frames)))
    stream.rows([1], 2.0)
    stream.rows([2], 3.0)
    stream.mark(2)
    return stream, first, stream.end(0, sum(map(len, stream.frames)))


def behind(log: FileLog, frames: list[bytes], end: RankEnd, after: RankEnd) -> list[int]:
    """Write frames and read what is behind ``after`` up to marker 1:2; the seqs that come."""
    acks = write(log, frames)
    end = replace(end, end=acks[-1].end)
    return [header.seq for header, _ in read_stream(log, commit(1, 2, [end]), end, after)]


def test_a_stream_is_read_from_behind_a_marker(log: FileLog, two: tuple[Stream, RankEnd, RankEnd]) -> None:
    stream, first, second = two
    assert behind(log, stream.frames, second, first) == [3, 4, 5]


def test_behind_the_last_marker_there_is_nothing(log: FileLog, two: tuple[Stream, RankEnd, RankEnd]) -> None:
    stream, _, second = two
    assert behind(log, stream.frames, second, second) == []
    assert list(read_stream(log, commit(1, 2, [second]), second, second)) == []


@pytest.mark.parametrize("late", [[0], [1, 2], [2], [0, 1, 2]])
@pytest.mark.parametrize("at", [3, 4, 5])
def test_what_comes_again_late_is_passed_over_behind_a_marker(
    log: FileLog, two: tuple[Stream, RankEnd, RankEnd], late: list[int], at: int
) -> None:
    stream, first, second = two
    frames = [*stream.frames[:at], *(stream.frames[seq] for seq in late), *stream.frames[at:]]
    assert behind(log, frames, second, first) == [3, 4, 5]


def test_what_comes_twice_behind_a_marker_comes_once(log: FileLog, two: tuple[Stream, RankEnd, RankEnd]) -> None:
    stream, first, second = two
    frames = stream.frames
    assert behind(log, [*frames[:5], frames[3], frames[1], frames[4], frames[5]], second, first) == [3, 4, 5]


def test_a_marker_that_was_sent_twice_leaves_its_second_mark_behind(
    log: FileLog, two: tuple[Stream, RankEnd, RankEnd]
) -> None:
    stream, first, second = two
    assert behind(log, [*stream.frames[:3], stream.frames[2], *stream.frames[3:]], second, first) == [3, 4, 5]


def test_another_frame_of_a_known_seq_behind_a_marker_is_passed_over(
    log: FileLog, two: tuple[Stream, RankEnd, RankEnd]
) -> None:
    stream, first, second = two
    twin = Stream()
    for row in (8, 9, 9):
        twin.rows([row % 8], 99.0)
    frames = [*stream.frames[:4], twin.frames[3], *stream.frames[4:]]
    assert behind(log, frames, second, first) == [3, 4, 5]


@pytest.mark.parametrize("missing", [3, 4, 5])
def test_what_is_missing_behind_a_marker_is_found(
    log: FileLog, two: tuple[Stream, RankEnd, RankEnd], missing: int
) -> None:
    stream, first, second = two
    frames = stream.frames[:missing] + stream.frames[missing + 1 :]
    expected = rf"found seq {missing + 1} after" if missing < 5 else "5 of 6 frames up to this marker"
    with pytest.raises(CorruptionError, match=expected):
        behind(log, frames, second, first)


def test_the_first_frame_must_follow_on_the_mark(log: FileLog, two: tuple[Stream, RankEnd, RankEnd]) -> None:
    stream, first, second = two
    other = replace(first, chain=first.chain ^ 1)
    with pytest.raises(CorruptionError, match=rf"found seq 3 after {first.chain:08x}, expected seq 3"):
        behind(log, stream.frames, second, other)


def test_a_marker_of_another_stream_is_no_place_to_begin(log: FileLog, two: tuple[Stream, RankEnd, RankEnd]) -> None:
    stream, first, second = two
    write(log, stream.frames)
    for wrong in (
        replace(first, frames=2),
        replace(first, frames=4),
        replace(first, end=first.end + len(stream.frames[3])),
    ):
        with pytest.raises(CorruptionError, match=r"found seq \d after"):
            list(read_stream(log, commit(1, 2, [second]), second, wrong))


def test_an_end_of_the_same_number_of_frames_but_another_mark_is_refused(
    log: FileLog, two: tuple[Stream, RankEnd, RankEnd]
) -> None:
    stream, _, second = two
    write(log, stream.frames)
    with pytest.raises(CorruptionError, match="6 of 6 frames up to this marker"):
        list(read_stream(log, commit(1, 2, [second]), second, replace(second, chain=1)))


def test_the_schema_may_not_change_behind_a_marker_either(log: FileLog) -> None:
    stream = Stream()
    stream.mark(1)
    first = stream.end(0, sum(map(len, stream.frames)))
    stream.rows([1], 2.0)
    like = stream.header_of(Kind.MARK, marker=2, step=20)
    like.schema_crc ^= 1
    stream.frames.append(bytes(json_frame(like, Mark(0, 0, ()).to_json())))
    with pytest.raises(CorruptionError, match="the schema changes within a generation"):
        behind(log, stream.frames, stream.end(0, 0), first)


# What lies between the frames of a rank, before a marker rests on it.


def gap_of(stream: Stream, seq: int, *offsets: int) -> Gap:
    """Between the frames ``seq - 1`` and ``seq``, of which this one and the next were sent by then."""
    sent = [parse_header(frame).header_crc for frame in stream.frames[seq : seq + 2]]
    return Gap(offsets[0], offsets[-1], seq, tuple(sent))


NAME = StreamName(Stream().job, 1, 0, 0)


def test_strays_between_frames_are_counted_and_frames_sent_twice_are_not(stream: Stream) -> None:
    others = [stray for name, stray in stray_records().items() if name != "another timeline"]
    mine = [stream.frames[0], stream.frames[2], Stream(rank=1).frames[0], Stream(generation=7).frames[0]]
    log: Any = Records([*stream.frames[:2], *others, *mine, *stream.frames[2:]])
    strays = Strays()
    check_gaps(log, NAME, [gap_of(stream, 2, 2, 2 + len(others) + len(mine))], strays)
    assert (strays.count, strays.offset) == (len(others), 2)


def test_a_frame_that_could_be_taken_for_the_next_one_is_refused(stream: Stream) -> None:
    twin = Stream()
    twin.rows([0, 1], 0.0)  # as the stream itself
    forged = twin.rows([5], 99.0)
    log: Any = Records([*stream.frames[:2], forged, *stream.frames[2:]])
    with pytest.raises(StreamLostError, match=r"a frame of this stream \(seq 2\)") as refused:
        check_gaps(log, NAME, [gap_of(stream, 2, 2, 3)], Strays())
    assert refused.value.where["offset"] == 2


def test_only_what_lies_in_a_gap_is_looked_at(stream: Stream) -> None:
    records = [stream.frames[0], b"one", stream.frames[1], b"two", *stream.frames[2:]]
    strays = Strays()
    log: Any = Records(records)
    check_gaps(log, NAME, [gap_of(stream, 2, 3, 4), gap_of(stream, 1, 1, 2)], strays)
    assert (strays.count, strays.offset) == (2, 1)
