"""What a snapshot says: any records before it, in parts whose sizes are bounded."""

from __future__ import annotations

import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import claim, commit, trim
from tests.parts import FileLog
from tests.sampled import sampled
from tests.unit.snapshot_log import JOB, RECORDS, note
from torchrec_stream_ckpt.errors import (
    CorruptionError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import ControlRecord, parse_control
from torchrec_stream_ckpt.format.folding import body_of, lineage_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.snapshot import Snapshot, pack, unpack
from torchrec_stream_ckpt.util.types import MarkerId


@given(st.lists(RECORDS, max_size=30), st.data())
@settings(max_examples=sampled(200, 40), deadline=None)
def test_a_reader_from_a_snapshot_and_the_tail_sees_what_a_reader_of_everything_sees(
    history: list[ControlRecord], data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(history)))
    history = [claim(1), *history]
    whole, early = Lineage.of(history), Lineage.of(history[: cut + 1])
    late = lineage_of(body_of(early))
    for record in history[cut + 1 :]:
        late.apply(record)
    assert body_of(late) == body_of(whole)
    for name in ("claims", "commits", "ends", "notes", "stale", "unsigned", "given_up", "next_generation"):
        assert getattr(late, name) == getattr(whole, name), name
    assert late.trims.reach == whole.trims.reach
    assert late.trims.newest == whole.trims.newest
    for number in whole.claims:
        assert late.trims.of(number) == whole.trims.of(number)
    for marker, made in whole.commits.items():
        assert late.spans(marker.generation, made.ranks) == whole.spans(marker.generation, made.ranks)
        try:
            path = whole.path(marker)
        except StreamCkptError as error:
            with pytest.raises(type(error)):
                late.path(marker)
        else:
            assert late.path(marker) == path
            assert late.bases(marker) == whole.bases(marker)


def test_what_a_trim_gives_up_is_kept_by_nobody_and_its_number_is_known() -> None:
    """A parent stays, whatever a TRIM says: a generation stands on it."""
    given_up = (MarkerId(1, 1), MarkerId(1, 2), MarkerId(1, 3))
    lineage = Lineage.of(
        [claim(1), *(commit(1, each) for each in range(1, 6)), claim(2, parent=MarkerId(1, 2)), commit(2, 6)]
    )
    lineage.apply(note(MarkerId(1, 1), loss=0.5))
    lineage.apply(trim("1:4", given_up=given_up))
    assert [str(each) for each in lineage.commits] == ["1:2", "1:4", "1:5", "2:6"]
    assert lineage.given_up == {MarkerId(1, 1), MarkerId(1, 3)}
    assert [str(each.id) for each in lineage.path(MarkerId(2, 6))] == ["1:2", "2:6"]
    lineage.apply(trim("1:3", store="file:///late"))  # of somebody who has not read on
    assert (len(lineage.trims), lineage.stale, lineage.trims.reach) == (2, 0, {1: MarkerId(1, 4)})


def test_a_trim_gives_up_nothing_but_what_lies_in_front_of_it() -> None:
    bad = trim("1:4", given_up=(MarkerId(1, 4),)).to_frame()
    with pytest.raises(CorruptionError, match=r"TRIM\.given_up must be sorted"):
        parse_control(bad)


@pytest.fixture
def log(tmp_path: Path) -> FileLog:
    made = FileLog(tmp_path / "log")
    made.prepare(1)
    made.append_control(claim(1).to_frame())
    return made


def part_of(body: bytes) -> Snapshot:
    (part,) = pack(body, JOB, 1, "log-1", 7, 0)
    return part


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parts": 257}, "SNAPSHOT is too large: part 0 of 257, 12 bytes"),
        ({"part": 1}, "SNAPSHOT is too large: part 1 of 1, 12 bytes"),
        ({"num_bytes": 2**30 + 1}, "too large"),
        ({"piece": "no base64!"}, "is not base64"),
        ({"piece": "AAAA" * 240_000}, "piece has 720000 bytes"),
        ({"piece": ""}, "piece has 0 bytes"),
        ({"digest": "00"}, r"SNAPSHOT\.digest is '00'"),
    ],
)
def test_a_part_that_declares_too_much_is_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        parse_control(replace(part_of(b"twelve bytes"), **change).to_frame())  # type: ignore[arg-type]


def test_a_snapshot_that_unpacks_to_more_than_it_declares_is_not_unpacked() -> None:
    bomb = part_of(bytes(2**26))
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError, match="a SNAPSHOT unpacks to more than 1000 bytes"):
            unpack([replace(bomb, num_bytes=1000)])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert len(unpack([bomb])) == 2**26


NUMBERS_LINE = b'{"given_up":{},"stale":0,"taken":0,"unsigned":0}\n'


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]\n",
        NUMBERS_LINE.replace(b'"stale":0', b'"stale":-1'),
        NUMBERS_LINE.replace(b'"stale":0', b'"stale":true'),
        NUMBERS_LINE.replace(b"{}", b'{"x":[1]}'),
        NUMBERS_LINE.replace(b"{}", b'{"1":1}'),
        NUMBERS_LINE.replace(b"{}", rb'{"\u00b2":[1]}'),  # a digit to some
        NUMBERS_LINE + commit(1, 1).to_frame(),  # does not count
        NUMBERS_LINE + claim(1).to_frame()[:-1],
        NUMBERS_LINE + claim(1).to_frame() + part_of(b"x").to_frame(),
    ],
)
def test_what_a_snapshot_cannot_carry_is_refused(body: bytes) -> None:
    with pytest.raises(CorruptionError):
        lineage_of(body)
