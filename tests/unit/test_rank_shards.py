"""The layout in CLAIM: which shards each rank holds, packed by columns and compressed."""

import base64
import pickle
import re
import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import SCHEMA
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format import rank_shards
from torchrec_stream_ckpt.format.rank_shards import MAX_TEXT, RankShards
from torchrec_stream_ckpt.util.types import TableShard

VALUE = st.integers(0, 64).flatmap(lambda bits: st.integers(0, 2**bits - 1))
SHARD = st.builds(TableShard, VALUE, VALUE, VALUE, VALUE, VALUE)
HALVES = (
    (TableShard(0, 0, 3, 0, 4), TableShard(1, 0, 8, 0, 2)),
    (TableShard(0, 3, 3, 0, 4), TableShard(1, 0, 8, 2, 2)),
)


def packed(*ranks: tuple[TableShard, ...]) -> RankShards:
    made = RankShards.of(ranks)
    assert made is not None
    return made


def text_of(plain: bytes, behind: bytes = b"") -> str:
    return base64.b64encode(zlib.compress(plain) + behind).decode("ascii")


@given(st.lists(st.lists(SHARD, max_size=5), min_size=1, max_size=5))
def test_any_layout_comes_back(ranks: list[list[TableShard]]) -> None:
    expected = [tuple(shards) for shards in ranks]
    made = packed(*expected)
    read = RankShards.from_text(made.to_text())
    assert list(read) == expected == [read[rank] for rank in range(len(read))]
    assert read[-1] == expected[-1]
    assert read[1:] == tuple(expected[1:])
    assert (read, read.crc, hash(read)) == (made, made.crc, hash(made))
    assert pickle.loads(pickle.dumps(read)) == made


def test_a_layout_that_somebody_else_compressed_is_the_same() -> None:
    made = packed(*HALVES)
    plain = zlib.decompress(base64.b64decode(made.to_text()))
    other = RankShards.from_text(base64.b64encode(zlib.compress(plain, 0)).decode("ascii"))
    assert other.to_text() != made.to_text()
    assert (other, other.crc) == (made, made.crc)
    assert made != packed(*HALVES[::-1])
    assert made != list(HALVES)


def test_a_thousand_tables_on_64_ranks_take_few_kilobytes() -> None:
    rows = [10_007 * table + 12_345 for table in range(1000)]
    by_rows = [tuple(TableShard(t, r * (n // 64), n // 64, 0, 64) for t, n in enumerate(rows)) for r in range(64)]
    whole = [tuple(TableShard(t, 0, rows[t], 0, 64) for t in range(r, 1000, 64)) for r in range(64)]
    assert len(packed(*by_rows).to_text()) < 24_000
    assert len(packed(*whole).to_text()) < 8_000


def test_what_a_claim_cannot_take_is_not_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    assert RankShards.of([]) is None
    monkeypatch.setattr(rank_shards, "MAX_SHARDS", 3)
    assert RankShards.of(HALVES) is None
    monkeypatch.setattr(rank_shards, "MAX_SHARDS", 4)
    assert RankShards.of(HALVES) == packed(*HALVES)
    monkeypatch.setattr(rank_shards, "MAX_TEXT", len(packed(*HALVES).to_text()) - 1)
    assert RankShards.of(HALVES) is None


ONE = struct.pack("<II", 1, 1) + bytes(40)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("?", "not base64"),
        (text_of(ONE) + "\n", "not base64"),
        (base64.b64encode(b"rows").decode(), "cannot be unpacked"),
        (base64.b64encode(zlib.compress(ONE)[:-4]).decode(), "cut short, or too long"),
        (text_of(ONE, b"x"), "cut short, or too long"),
        ("A" * (MAX_TEXT + 4), f"more than {MAX_TEXT}"),
        (text_of(bytes(2**26)), "unpacks to more than"),
        (text_of(b""), "number of ranks"),
        (text_of(bytes(4)), "number of ranks"),
        (text_of(struct.pack("<I", 65_537) + bytes(4 * 65_537)), "number of ranks"),
        (text_of(struct.pack("<I", 2**32 - 1)), "number of ranks"),
        (text_of(ONE[:-1]), "number of shards"),
        (text_of(ONE + b"\0"), "number of shards"),
        (text_of(struct.pack("<II", 1, 2**20 + 1) + bytes(40)), "number of shards"),
        (text_of(struct.pack("<III", 2, 2**32 - 1, 2**32 - 1)), "number of shards"),
    ],
)
def test_what_is_no_layout_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(CorruptionError, match=f"CLAIM.layout .*{re.escape(words)}"):
        RankShards.from_text(text)


def test_base64_that_is_not_canonical_is_refused() -> None:
    text = next(text for n in range(1, 9) if (text := packed(*HALVES[:1] * n).to_text()).endswith("="))
    last = text.rstrip("=")[-1]
    other = text.replace(f"{last}=", f"{chr(ord(last) + 1)}=")
    assert base64.b64decode(other) == base64.b64decode(text)
    with pytest.raises(CorruptionError, match="not canonical base64"):
        RankShards.from_text(other)


@pytest.mark.parametrize(
    "shard",
    [
        TableShard(2, 0, 1, 0, 1),
        TableShard(2**64 - 1, 0, 1, 0, 1),
        TableShard(0, 0, 7, 0, 4),
        TableShard(0, 6, 1, 0, 4),
        TableShard(0, 0, 6, 1, 4),
        TableShard(0, 2**64 - 1, 2, 0, 4),
        TableShard(0, 0, 6, 2**64 - 4, 4),
        TableShard(0, 1, 2**64 - 1, 0, 4),
    ],
)
def test_a_shard_outside_its_table_is_named(shard: TableShard) -> None:
    packed(*HALVES).check(SCHEMA)
    with pytest.raises(CorruptionError, match=re.escape(f"{shard} is outside its table")):
        packed(*HALVES, (shard,)).check(SCHEMA)


def test_a_layout_without_shards_fits_a_schema_without_tables() -> None:
    bare = type(SCHEMA)(())
    packed((), ()).check(bare)
    with pytest.raises(CorruptionError, match="outside"):
        packed((TableShard(0, 0, 0, 0, 0),)).check(bare)
