"""A packed COMMIT counts as the one that is opened from it, and all of its fields are checked when it is opened."""

from __future__ import annotations

import base64
import json
import pickle
import re
import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.builders import SCHEMA
from tests.golden import make
from tests.parts import CommitKey
from tests.sampled import sampled
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format import rank_shards
from torchrec_stream_ckpt.format.control import Commit, parse_control
from torchrec_stream_ckpt.format.dense_files import DenseFile, DenseList
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, json_frame
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.packed_commit import PackedCommit, open_commit, read_record
from torchrec_stream_ckpt.format.rank_ends import COLUMNS, RankEnds
from torchrec_stream_ckpt.format.rank_shards import MAX_TEXT, RankShards
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd, TableShard

JOB = bytes(range(16))
KEY = CommitKey(bytes(range(32)))
SHA = "0123456789abcdef" * 4
ENDS = tuple(RankEnd(rank, rank, 0, 5000 + rank, 3, 2**31 + rank, 7, 512) for rank in range(5))
COMMIT = Commit(
    JOB,
    3,
    "ab" * 16,
    17,
    170,
    RankEnds.of(ENDS),
    "dense/x/g00000003-m00000017",
    (DenseFile(".metadata", 0, SHA), DenseFile("__0_0.distcp", 123, SHA)),
    1763823140.123456,
    "s3://bucket/prefix",
)

NUMBERS = st.integers(0, 2**64 - 1)
TEXTS = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12)
NAMES = st.sampled_from([".metadata", "__0_0.distcp", "a", "-", "x.y"])
FILES = st.lists(st.builds(DenseFile, NAMES, NUMBERS, st.just(SHA)), max_size=3, unique_by=lambda file: file.name)
LISTS = st.builds(DenseList, st.integers(1, 2**60), NUMBERS, st.integers(1, 2**26), st.just(SHA))
METAS = st.dictionaries(
    st.sampled_from(["loss", "a.b", "x"]), st.one_of(TEXTS, st.integers(-(2**52), 2**52), st.floats(-1e9, 1e9))
)


@st.composite
def commits(draw: st.DrawFn) -> Commit:
    """Any that a trainer can write."""
    said = draw(st.none() | LISTS)
    meta = draw(st.none() | METAS)
    commit = Commit(
        JOB,
        draw(st.integers(1, 2**32 - 1)),
        draw(TEXTS),
        draw(NUMBERS),
        draw(NUMBERS),
        RankEnds.of(ENDS[: draw(st.integers(1, 5))]),
        draw(TEXTS),
        () if said is not None else tuple(draw(FILES)),
        draw(st.floats(0, 1e16)),
        draw(TEXTS),
        meta=tuple(sorted(meta.items())) if meta is not None else None,
        dense_list=said,
    )
    return KEY.sign(commit) if draw(st.booleans()) else commit


def slowly(frame: bytes) -> Commit | None:
    try:
        record = parse_control(frame)
    except CorruptionError:
        return None
    return record if isinstance(record, Commit) else None


def packed_of(frame: bytes) -> PackedCommit | None:
    """The packed COMMIT; None if the frame is read field by field, or refused as that refuses it."""
    try:
        record = read_record(frame)
    except CorruptionError as error:
        with pytest.raises(CorruptionError, match=re.escape(error.message)):
            parse_control(frame)
        return None
    if isinstance(record, PackedCommit):
        return record
    assert record == parse_control(frame)
    return None


def agree(frame: bytes) -> bool:
    """Whether it stays packed: then it counts as what is read field by field, or is refused when it is opened."""
    packed, slow = packed_of(frame), slowly(frame)
    if packed is None:
        return False
    if slow is None:
        with pytest.raises(CorruptionError):
            packed.open()
        return True
    said = (packed.job, packed.generation, packed.marker, packed.nonce, packed.mac)
    assert said == (slow.job, slow.generation, slow.marker, slow.nonce, slow.mac)
    assert packed.open() == slow == open_commit(frame)
    assert packed.open().version == slow.version
    assert packed.frame == frame
    return True


def written(text: bytes, header: Header | None = None) -> bytes:
    """A frame with that payload, whose checksums are right."""
    return bytes(json_frame(header or COMMIT.header(), text))


def text_of(commit: Commit) -> str:
    return commit.to_frame()[HEADER_LEN:].decode("ascii").rstrip(" ")


@given(commits())
@example(replace(COMMIT, meta=(("a", ',"nonce":"'), ("nonce", "another"))))
@example(replace(COMMIT, dense=',"generation":3,"job":"', store='"mac":""'))
def test_what_a_trainer_writes_reads_the_same(commit: Commit) -> None:
    frame = commit.to_frame()
    assert agree(frame) or {*commit.nonce} & {*'"\\'}, "a nonce that JSON escapes"
    record = read_record(frame)
    assert record.signed_bytes() == commit.signed_bytes()
    assert frame == commit.to_frame()


@pytest.mark.parametrize(
    "commit",
    [
        COMMIT,
        KEY.sign(COMMIT),
        replace(COMMIT, dense_files=()),
        replace(COMMIT, meta=(("loss", 0.25), ("name", "a b"))),
        replace(COMMIT, meta=()),
        replace(COMMIT, dense_files=(), dense_list=DenseList(100, 2**40, 12_000, SHA)),
    ],
)
def test_the_usual_ones_stay_packed(commit: Commit) -> None:
    assert agree(commit.to_frame())
    assert KEY.vouches_for(read_record(commit.to_frame())) == (commit.mac != "")


@pytest.mark.parametrize("name", ["commit", "commit_signed", "commit_listed"])
def test_the_golden_ones_stay_packed(name: str) -> None:
    assert agree(make.undump((make.HERE / f"{name}.hex").read_text()))


TAMPERED = {
    "a space": lambda text: text.replace('"step":', '"step": '),
    "another order": lambda text: json.dumps(dict(reversed(json.loads(text).items())), separators=(",", ":")),
    "a name twice": lambda text: text.replace('"step":170', '"step":170,"step":170'),
    "the first name twice": lambda text: '{"dense":"y",' + text[1:],
    "a field too many": lambda text: text[:-1] + ',"zone":1}',
    "a field too few": lambda text: text.replace('"mac":"",', ""),
    "19 digits": lambda text: text.replace('"num_bytes":123', '"num_bytes":9999999999999999999'),
    "64 bits": lambda text: text.replace('"num_bytes":123', f'"num_bytes":{2**64 - 1}'),
    "65 bits": lambda text: text.replace('"num_bytes":123', f'"num_bytes":{2**64}'),
    "5000 digits": lambda text: text.replace('"num_bytes":123', f'"num_bytes":1{"0" * 5000}'),
    "below zero": lambda text: text.replace('"num_bytes":123', '"num_bytes":-123'),
    "minus zero": lambda text: text.replace('"num_bytes":123', '"num_bytes":-0'),
    "a float": lambda text: text.replace('"num_bytes":123', '"num_bytes":123.0'),
    "a leading zero": lambda text: text.replace('"num_bytes":123', '"num_bytes":0123'),
    "true": lambda text: text.replace('"num_bytes":123', '"num_bytes":true'),
    "another step": lambda text: text.replace('"step":170', '"step":171'),
    "another marker": lambda text: text.replace('"marker":17', '"marker":18'),
    "another generation": lambda text: text.replace('"generation":3', '"generation":4'),
    "another job": lambda text: text.replace(JOB.hex(), bytes(16).hex()),
    "NaN": lambda text: re.sub('"time_s":[^}]*', '"time_s":NaN', text),
    "Infinity": lambda text: re.sub('"time_s":[^}]*', '"time_s":Infinity', text),
    "1e999": lambda text: re.sub('"time_s":[^}]*', '"time_s":1e999', text),
    "1e5": lambda text: re.sub('"time_s":[^}]*', '"time_s":1e5', text),
    "a whole time": lambda text: re.sub('"time_s":[^}]*', '"time_s":17', text),
    "a time below zero": lambda text: re.sub('"time_s":[^}]*', '"time_s":-1.5', text),
    "a time with a zero too many": lambda text: re.sub('"time_s":[^}]*', '"time_s":1.50', text),
    "a time with a leading zero": lambda text: re.sub('"time_s":[^}]*', '"time_s":01.5', text),
    "a time of many digits": lambda text: re.sub('"time_s":[^}]*', '"time_s":1.1234567890123456789', text),
    "cut short": lambda text: text[:-1],
    "cut in the middle": lambda text: text[: len(text) // 2],
    "nothing": lambda text: "",
    "an array": lambda text: f"[{text}]",
    "more behind it": lambda text: text + "{}",
    "a line behind it": lambda text: text + "\n",
    "a space in front": lambda text: " " + text,
    "an escape": lambda text: text.replace("dense/x", "dense\\u002fx"),
    "a short escape": lambda text: text.replace("dense/x", "dense\\/x"),
    "a control character": lambda text: text.replace("dense/x", "dense\x01x"),
    "a tab": lambda text: text.replace("dense/x", "dense\\tx"),
    "DEL": lambda text: text.replace("dense/x", "dense\x7fx"),
    "a long place": lambda text: text.replace("dense/x", "d" * 4097),
    "the longest place": lambda text: text.replace('"store":"s3://bucket/prefix"', f'"store":"{"s" * 4096}"'),
    "a file twice": lambda text: text.replace("__0_0.distcp", ".metadata"),
    "a file named ..": lambda text: text.replace("__0_0.distcp", ".."),
    "a file named as the list": lambda text: text.replace("__0_0.distcp", ".files"),
    "a file with a slash": lambda text: text.replace("__0_0.distcp", "a/b"),
    "a hidden file": lambda text: text.replace("__0_0.distcp", ".hidden"),
    "a file without a name": lambda text: text.replace("__0_0.distcp", ""),
    "a comma too many": lambda text: text.replace("}],", "},],"),
    "a digest too short": lambda text: text.replace(SHA, SHA[1:]),
    "a digest in capitals": lambda text: text.replace(SHA, SHA.upper()),
    "a mac too short": lambda text: text.replace('"mac":""', '"mac":"ab"'),
    "a mac that is null": lambda text: text.replace('"mac":""', '"mac":null'),
    "ranks of nothing": lambda text: re.sub('"ranks":"[^"]*"', '"ranks":""', text),
    "ranks cut short": lambda text: re.sub('"ranks":"....', '"ranks":"', text),
    "ranks not padded": lambda text: text.replace("=", ""),
    "ranks with other last bits": lambda text: re.sub(
        "(.)=", lambda found: chr(ord(found[1]) + 1) + "=", text, count=1
    ),
    "ranks with a space": lambda text: text.replace('"ranks":"', '"ranks":" '),
    "a list beside files": lambda text: text.replace(
        ',"generation"', f',"dense_list":{{"files":1,"list_bytes":9,"num_bytes":9,"sha256":"{SHA}"}},"generation"'
    ),
    "meta": lambda text: text.replace(',"nonce"', ',"meta":{"a":1},"nonce"'),
    "meta out of order": lambda text: text.replace(',"nonce"', ',"meta":{"b":1,"a":1},"nonce"'),
    "meta twice": lambda text: text.replace(',"nonce"', ',"meta":{"a":1,"a":2},"nonce"'),
    "meta with a brace": lambda text: text.replace(',"nonce"', ',"meta":{"a":"}"},"nonce"'),
    "meta that ends early": lambda text: text.replace(',"nonce"', ',"meta":{"a":"x},"nonce"'),
    "meta of NaN": lambda text: text.replace(',"nonce"', ',"meta":{"a":NaN},"nonce"'),
    "meta of 1e999": lambda text: text.replace(',"nonce"', ',"meta":{"a":1e999},"nonce"'),
    "meta of 5000 digits": lambda text: text.replace(',"nonce"', f',"meta":{{"a":1{"0" * 4000}}},"nonce"'),
    "meta with a bad name": lambda text: text.replace(',"nonce"', ',"meta":{"a b":1},"nonce"'),
    "meta that is null": lambda text: text.replace(',"nonce"', ',"meta":null,"nonce"'),
    "deep meta": lambda text: text.replace(',"nonce"', f',"meta":{{"a":{"[" * 1500}{"]" * 1500}}},"nonce"'),
    "more padding": lambda text: text + " " * 200,
    "nested meta": lambda text: text.replace(',"nonce"', ',"meta":{"a":[1]},"nonce"'),
}


@pytest.mark.parametrize("how", TAMPERED)
def test_what_no_writer_makes_is_refused_at_once_or_when_it_is_opened(how: str) -> None:
    text = TAMPERED[how](text_of(COMMIT))
    assert text != text_of(COMMIT)
    agree(written(text.encode("ascii")))


@pytest.mark.parametrize(
    "how", ["another marker", "another generation", "another job", "a mac too short", "a mac that is null", "nothing"]
)
def test_fields_that_decide_are_compared_with_the_header_at_once(how: str) -> None:
    with pytest.raises(CorruptionError):
        read_record(written(TAMPERED[how](text_of(COMMIT)).encode("ascii")))


@pytest.mark.parametrize("how", TAMPERED)
def test_the_key_vouches_for_no_other_fields(how: str) -> None:
    signed = KEY.sign(COMMIT)
    text = TAMPERED[how](text_of(signed))
    if text == text_of(signed):
        return
    try:
        record = read_record(written(text.encode("ascii")))
    except CorruptionError:
        return
    assert not KEY.vouches_for(record) or (record.open() if isinstance(record, PackedCommit) else record) == signed


@given(commits(), st.data())
@settings(max_examples=sampled(300, 50))
def test_the_key_vouches_for_no_text_with_another_byte(commit: Commit, data: st.DataObject) -> None:
    frame = bytearray(KEY.sign(commit).to_frame())
    end = len(bytes(frame).rstrip(b" "))
    place = data.draw(st.integers(HEADER_LEN, end - 1))
    byte = data.draw(st.integers(0, 255).filter(lambda each: each != frame[place]))
    frame[place] = byte
    try:
        record = read_record(written(bytes(frame[HEADER_LEN:]), commit.header()))
    except CorruptionError:
        return
    assert not KEY.vouches_for(record)


@given(commits(), st.data())
@settings(max_examples=sampled(300, 50))
def test_one_byte_of_the_payload_makes_no_other_commit(commit: Commit, data: st.DataObject) -> None:
    text = bytearray(text_of(commit).encode("ascii"))
    place = data.draw(st.integers(0, len(text) - 1))
    byte = data.draw(st.sampled_from(b'0123456789.,:"{}[]\\ eE+-=/aZ_') | st.integers(0, 255))
    how = data.draw(st.sampled_from(["replace", "insert", "delete"]))
    text[place : place + (how != "insert")] = b"" if how == "delete" else bytes([byte])
    agree(written(bytes(text), commit.header()))


@given(commits(), st.integers(0, 2000))
@example(COMMIT, 0)
def test_a_frame_that_is_cut_or_longer_is_not_taken(commit: Commit, length: int) -> None:
    frame = commit.to_frame()
    for other in (frame[: min(length, len(frame) - 1)], frame + bytes(64)):
        with pytest.raises(CorruptionError):
            read_record(other)


def test_a_flipped_bit_anywhere_is_not_taken() -> None:
    frame = COMMIT.to_frame()
    for place in range(len(frame)):
        with pytest.raises(CorruptionError):
            read_record(frame[:place] + bytes([frame[place] ^ 4]) + frame[place + 1 :])


def test_other_records_are_read_as_before() -> None:
    for name in ("claim", "trim", "end", "note", "snapshot"):
        frame = make.undump((make.HERE / f"{name}.hex").read_text())
        assert read_record(frame) == parse_control(frame)


@pytest.mark.parametrize("how", ["another step", "NaN", "ranks cut short", "a digest too short"])
def test_a_wrong_field_below_right_checksums_is_named_with_its_marker_once_it_is_opened(how: str) -> None:
    claim = replace(make.claim(), job=JOB, generation=3, nonce=COMMIT.nonce)
    wrong, newer = written(TAMPERED[how](text_of(COMMIT)).encode("ascii")), replace(COMMIT, marker=18).to_frame()
    lineage = Lineage.of([claim, *(read_record(frame) for frame in (wrong, newer))])
    assert list(lineage.commits) == [MarkerId(3, 17), MarkerId(3, 18)]
    assert lineage.newest == replace(COMMIT, marker=18)
    with pytest.raises(CorruptionError, match="COMMIT") as caught:
        lineage.find(MarkerId(3, 17))
    assert caught.value.where["marker"] == MarkerId(3, 17)


# The ends of all ranks in COMMIT, packed by columns.


WIDTH = st.integers(0, 64)
VALUE = WIDTH.flatmap(lambda bits: st.integers(0, 2**bits - 1))
TWO_ENDS = (RankEnd(0, 3, 0, 640, 3, 17, 7, 512), RankEnd(1, 1, 10, 70_000, 2, 18, 0, 2**40))


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
        RankEnds.from_text(change(RankEnds.of(TWO_ENDS).to_text()))


def test_packed_ends_equal_those_that_are_not() -> None:
    assert RankEnds.of(TWO_ENDS) == TWO_ENDS
    assert RankEnds.of(TWO_ENDS) == TWO_ENDS
    assert hash(RankEnds.of(TWO_ENDS)) == hash(TWO_ENDS)
    assert RankEnds.of(TWO_ENDS) != TWO_ENDS[:1]


# The layout in CLAIM: which shards each rank holds, packed by columns and compressed.


LAYOUT = st.integers(0, 64).flatmap(lambda bits: st.integers(0, 2**bits - 1))
SHARD = st.builds(TableShard, LAYOUT, LAYOUT, LAYOUT, LAYOUT, LAYOUT)
HALVES = (
    (TableShard(0, 0, 3, 0, 4), TableShard(1, 0, 8, 0, 2)),
    (TableShard(0, 3, 3, 0, 4), TableShard(1, 0, 8, 2, 2)),
)


def packed(*ranks: tuple[TableShard, ...]) -> RankShards:
    made = RankShards.of(ranks)
    assert made is not None
    return made


def packed_text(plain: bytes, behind: bytes = b"") -> str:
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
        (packed_text(ONE) + "\n", "not base64"),
        (base64.b64encode(b"rows").decode(), "cannot be unpacked"),
        (base64.b64encode(zlib.compress(ONE)[:-4]).decode(), "cut short, or too long"),
        (packed_text(ONE, b"x"), "cut short, or too long"),
        ("A" * (MAX_TEXT + 4), f"more than {MAX_TEXT}"),
        (packed_text(bytes(2**26)), "unpacks to more than"),
        (packed_text(b""), "number of ranks"),
        (packed_text(bytes(4)), "number of ranks"),
        (packed_text(struct.pack("<I", 65_537) + bytes(4 * 65_537)), "number of ranks"),
        (packed_text(struct.pack("<I", 2**32 - 1)), "number of ranks"),
        (packed_text(ONE[:-1]), "number of shards"),
        (packed_text(ONE + b"\0"), "number of shards"),
        (packed_text(struct.pack("<II", 1, 2**20 + 1) + bytes(40)), "number of shards"),
        (packed_text(struct.pack("<III", 2, 2**32 - 1, 2**32 - 1)), "number of shards"),
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
