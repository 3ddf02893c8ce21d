"""The ends of all ranks in COMMIT, packed by columns."""

import base64
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.rank_ends import COLUMNS, RankEnds
from torchrec_stream_ckpt.util.types import LogSpan, RankEnd

WIDTH = st.integers(0, 64)
VALUE = WIDTH.flatmap(lambda bits: st.integers(0, 2**bits - 1))
ENDS = (RankEnd(0, 3, 0, 640, 3, 17, 7, 512), RankEnd(1, 1, 10, 70_000, 2, 18, 0, 2**40))


@given(
    st.lists(st.tuples(*[VALUE] * 3, VALUE.map(lambda frames: max(frames, 2)), *[VALUE] * 3), min_size=1, max_size=9)
)
def test_any_ends_come_back(rows: list[tuple[int, ...]]) -> None:
    ends = tuple(RankEnd(rank, *row) for rank, row in enumerate(rows))
    packed = RankEnds.from_text(RankEnds.of(ends).to_text())
    assert packed == ends
    assert [packed[rank] for rank in range(len(packed))] == list(ends) == list(packed)
    assert packed[-1] == ends[-1]
    assert packed[1:] == ends[1:]
    assert packed.spans(3) == [LogSpan(3, end.partition, end.begin, end.end) for end in ends]
    for name in COLUMNS:
        assert packed.total(name) == sum(getattr(end, name) for end in ends)


def test_a_thousand_ranks_take_less_than_forty_kilobytes() -> None:
    spread = 2_654_435_761  # what differs from rank to rank, as much as a long job's streams do
    ends = [
        RankEnd(
            r,
            r,
            2**33 + r * spread % 2**31,
            2**40 + r * spread % 2**38,
            2**20 + r * spread % 2**22,
            r * spread % 2**32,
            r * spread % 2**32,
            r * spread % 2**38,
        )
        for r in range(1024)
    ]
    assert len(RankEnds.of(ends).to_text()) < 38_000


def parts(*, count: int = 2, widths: tuple[int, ...] | None = None, least: tuple[int, ...] | None = None) -> bytes:
    """The front of the string, with something wrong."""
    return struct.pack("<I7B7Q", count, *(widths or (0,) * 7), *(least or (0, 0, 9, 2, 0, 0, 0)))


@pytest.mark.parametrize(
    "packed",
    [
        b"",
        parts()[:-1],
        parts() + b"x",
        parts(count=0),
        parts(widths=(9, *[0] * 6)) + bytes(18),
        parts(widths=(1, *[0] * 6)) + bytes(1),
        parts(least=(0, 0, 9, 1, 0, 0, 0)),
        parts(widths=(8, *[0] * 6), least=(1, 0, 9, 2, 0, 0, 0)) + bytes(16),
        parts(count=2**32 - 1),
        parts(count=65_537),
    ],
    ids=[
        "empty",
        "cut",
        "more",
        "no ranks",
        "wide",
        "short",
        "no mark",
        "over 64 bits",
        "ranks without end",
        "too many ranks",
    ],
)
def test_what_is_not_such_a_string_is_refused(packed: bytes) -> None:
    with pytest.raises(CorruptionError, match=r"COMMIT\.ranks"):
        RankEnds.from_text(base64.b64encode(packed).decode())


@pytest.mark.parametrize("change", [lambda text: text + "\n", lambda text: text[:-1], lambda text: "?" + text[1:]])
def test_base64_of_another_spelling_is_refused(change) -> None:
    with pytest.raises(CorruptionError, match="base64"):
        RankEnds.from_text(change(RankEnds.of(ENDS).to_text()))


def test_packed_ends_equal_those_that_are_not() -> None:
    assert RankEnds.of(ENDS) == ENDS
    assert RankEnds.of(ENDS) == ENDS
    assert hash(RankEnds.of(ENDS)) == hash(ENDS)
    assert RankEnds.of(ENDS) != ENDS[:1]
