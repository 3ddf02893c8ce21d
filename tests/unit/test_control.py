"""The JSON payloads: what was written reads back, and anything else is CorruptionError."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB, OTHER_JOB, ROWWISE, SCHEMA, claim, commit, table, trim
from tests.golden import make
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, UnsupportedError
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark, TableScalars, Trim, parse_control
from torchrec_stream_ckpt.format.dense_files import DenseFile, DenseList
from torchrec_stream_ckpt.format.end_note import End, Note, Outcome
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, json_frame, parse_header, payload_of, seal
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.record import MAX_META_BYTES, meta_of
from torchrec_stream_ckpt.format.schema import Schema, canonical
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, StateSpec, TableShard

UNUSED = {"rank": 7, "seq": 9, "rows": 5, "table": 3, "col0": 1, "cols": 2, "schema_crc": 77, "chain": 88}


NOT_OF = [(kind, field) for kind in ("CLAIM", "COMMIT", "TRIM") for field in UNUSED]
NOT_OF += [("CLAIM", "step"), ("CLAIM", "marker"), ("TRIM", "step")]


@pytest.mark.parametrize(("kind", "field"), NOT_OF)
def test_a_record_whose_header_sets_what_its_kind_does_not_have_is_refused(kind: str, field: str) -> None:
    record = {"CLAIM": claim(2), "COMMIT": commit(1, 1), "TRIM": trim("1:1")}[kind].to_frame()
    header, payload = parse_header(record), record[HEADER_LEN:]
    setattr(header, field, UNUSED.get(field, 6))
    frame = bytearray(HEADER_LEN) + payload
    seal(header, frame)
    with pytest.raises(CorruptionError, match=rf"the header of {kind} sets {field}, which this kind does not have"):
        parse_control(bytes(frame))


WHOLE = st.integers(0, 2**64 - 1)
NUMBER = st.floats(allow_nan=False, allow_infinity=False)
HELLO = Hello(2, SCHEMA, (TableShard(0, 0, 6, 0, 2), TableShard(1, 4, 4, 0, 4)))
MARK = Mark(
    7, 640, (TableScalars(0, 0, 9, 0, 4, 100, 1.0, 0.05, 0.025), TableScalars(1, 2, 5, 4, 4, 100, 3.5, 1e-300, 0.0))
)
CLAIM = claim(2, parent=MarkerId(1, 5), world=2, partitions=3, swept=(1,), name="job", time_s=1.5)
COMMIT = commit(
    2,
    6,
    [RankEnd(0, 0, 0, 640, 3, 17, 7, 512), RankEnd(1, 1, 10, 650, 2, 18, 0, 320)],
    dense="dense/x",
    dense_files=(DenseFile(".metadata", 3, "ab" * 32),),
    store="file:///store",
)

TRIM = trim("1:5", "2:6", store="s3://bucket/job", time_s=1.5)

READERS: dict[str, Callable[[bytes], object]] = {
    "HELLO": Hello.from_json,
    "MARK": Mark.from_json,
    "CLAIM": lambda data: Claim.from_json(Header(Kind.CLAIM, JOB, 2), data),
    "COMMIT": lambda data: Commit.from_json(Header(Kind.COMMIT, JOB, 2, step=60, marker=6), data),
    "TRIM": lambda data: Trim.from_json(Header(Kind.TRIM, JOB, 2, marker=6), data),
}


def body(frame: bytes) -> bytes:
    return bytes(payload_of(parse_header(frame), frame))


GOOD: dict[str, bytes] = {
    "HELLO": HELLO.to_json(),
    "MARK": MARK.to_json(),
    "CLAIM": body(CLAIM.to_frame()),
    "COMMIT": body(COMMIT.to_frame()),
    "TRIM": body(TRIM.to_frame()),
}
KINDS = sorted(GOOD)
LISTED = replace(COMMIT, dense_files=(), dense_list=DenseList(40, 900, 4000, "ab" * 32))
GOOD["listed COMMIT"], READERS["listed COMMIT"] = body(LISTED.to_frame()), READERS["COMMIT"]


def changed(kind: str, change: Callable[[Any], object]) -> bytes:
    """A good payload with one thing wrong."""
    value = json.loads(GOOD[kind])
    change(value)
    return json.dumps(value).encode()


def test_every_payload_reads_back() -> None:
    assert Hello.from_json(HELLO.to_json()) == HELLO
    assert Mark.from_json(MARK.to_json()) == MARK
    assert parse_control(CLAIM.to_frame()) == CLAIM
    assert parse_control(COMMIT.to_frame()) == COMMIT
    assert parse_control(TRIM.to_frame()) == TRIM
    assert TRIM.id == MarkerId(2, 6)
    assert COMMIT.id == MarkerId(2, 6)


@given(WHOLE, WHOLE, st.lists(st.builds(TableScalars, *[WHOLE] * 6, *[NUMBER] * 3), max_size=4))
def test_any_mark_reads_back(rows: int, num_bytes: int, scalars: list[TableScalars]) -> None:
    mark = Mark(rows, num_bytes, tuple(scalars))
    assert Mark.from_json(mark.to_json()) == mark


@given(st.text().filter(str.isprintable), st.lists(st.builds(RankEnd, *[WHOLE] * 8), min_size=1, max_size=4), NUMBER)
def test_any_commit_reads_back(store: str, ends: list[RankEnd], time_s: float) -> None:
    ranks = tuple(replace(end, rank=rank, frames=max(2, end.frames)) for rank, end in enumerate(ends))
    one = commit(1, 1, ranks, store=store, time_s=time_s)
    assert parse_control(one.to_frame()) == one


def test_claim_without_a_parent_reads_back() -> None:
    assert parse_control(claim(1).to_frame()) == claim(1)


def test_canonical_json_has_one_spelling() -> None:
    assert canonical({"b": [1, 2.5, None], "a": "\u00fc"}) == b'{"a":"\\u00fc","b":[1,2.5,null]}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        canonical(float("nan"))


def test_schema_checksum_tells_schemas_apart() -> None:
    other = Schema((SCHEMA.tables[0], replace(SCHEMA.tables[1], dim=8)))
    assert Schema(SCHEMA.tables).crc == SCHEMA.crc != other.crc
    assert SCHEMA.index() == {"t_item": 0, "t_user": 1}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"   ",
        b"{",
        b"nonsense",
        b"null",
        b"[]",
        b"7",
        b'"text"',
        b"{}",
        b'{"rows":1}',
        b"\xff\xfe{}",
        "{}".encode("utf-16"),
        b'{"\xc3\xbc":1}',
        b"{} {}",
        b"[" * 100_000,
        b'{"a":' * 100_000,
    ],
    ids=lambda data: repr(data[:12]),
)
def test_text_that_is_no_such_payload_is_refused(kind: str, data: bytes) -> None:
    with pytest.raises(CorruptionError, match=kind):
        READERS[kind](data)


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in json.loads(GOOD[kind])])
def test_a_missing_field_is_refused(kind: str, name: str) -> None:
    with pytest.raises(CorruptionError, match=rf"{kind} has fields .*expected"):
        READERS[kind](changed(kind, lambda value: value.pop(name)))


@pytest.mark.parametrize("kind", KINDS)
def test_an_unknown_field_is_refused(kind: str) -> None:
    with pytest.raises(CorruptionError, match="has fields"):
        READERS[kind](changed(kind, lambda value: value.update(later=1)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_field_that_stands_twice_is_refused(kind: str) -> None:
    name, value = next(iter(json.loads(GOOD[kind]).items()))
    twice = b'{"%s":%s,' % (name.encode(), json.dumps(value).encode()) + GOOD[kind].lstrip(b"{")
    with pytest.raises(CorruptionError, match="an object has a duplicate name"):
        READERS[kind](twice)


WRONG = [None, True, -1, 1.5, "text", [], {}, [1], [None], [{}], {"tables": [None]}, {"tables": 1}]
OPTIONAL = {("CLAIM", "parent", "None")}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind in KINDS for name in json.loads(GOOD[kind])])
def test_a_field_of_the_wrong_type_is_refused(kind: str, name: str) -> None:
    right = json.loads(GOOD[kind])[name]
    for wrong in WRONG:
        if (kind, name, repr(wrong)) in OPTIONAL or _same_type(wrong, right):
            continue
        with pytest.raises(CorruptionError, match=rf"{kind}\.{name}|HELLO\.schema|CLAIM\.schema"):
            READERS[kind](changed(kind, lambda value, wrong=wrong: value.update({name: wrong})))


def _same_type(wrong: object, right: object) -> bool:
    """Whether ``wrong`` is legal after all: a list without records, a text, any number for a float."""
    if isinstance(right, list):
        return wrong in ([], [1])
    if isinstance(right, float):
        return type(wrong) in (int, float)
    return isinstance(right, str) and isinstance(wrong, str)


@pytest.mark.parametrize(
    "path",
    [
        ("HELLO", "shards", 0),
        ("HELLO", "schema", "tables", 0),
        ("HELLO", "schema", "tables", 1, "states", 0),
        ("MARK", "scalars", 0),
        ("COMMIT", "dense_files", 0),
        ("listed COMMIT", "dense_list"),
    ],
    ids=lambda path: ".".join(map(str, path)),
)
def test_nested_records_have_exactly_their_fields(path: tuple[Any, ...]) -> None:
    kind, *steps = path

    def inner(value: Any) -> Any:
        for step in steps:
            value = value[step]
        return value

    for name in list(inner(json.loads(GOOD[kind]))):
        for change in (
            lambda value, name=name: inner(value).pop(name),
            lambda value, name=name: inner(value).update({name: None}),
            lambda value, name=name: inner(value).update({name: {}}),
        ):
            with pytest.raises(CorruptionError):
                READERS[kind](changed(kind, change))
    with pytest.raises(CorruptionError):
        READERS[kind](changed(kind, lambda value: inner(value).update(later=1)))


@pytest.mark.parametrize(
    "wrong", [{"sha256": "AB" * 32}, {"sha256": "ab"}, {"files": 0}, {"list_bytes": 64 * 2**20 + 1}]
)
def test_a_list_of_dense_files_that_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(CorruptionError, match=r"COMMIT\.dense_list"):
        READERS["COMMIT"](changed("listed COMMIT", lambda value: value["dense_list"].update(wrong)))


def test_a_commit_has_its_dense_files_or_a_list_of_them() -> None:
    with pytest.raises(CorruptionError, match="both dense_files and dense_list"):
        parse_control(replace(LISTED, dense_files=COMMIT.dense_files).to_frame())
    with pytest.raises(CorruptionError, match="COMMIT has fields"):
        parse_control(replace(LISTED, version=1).to_frame())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "1" + "0" * 400, "1" * 5000])
def test_numbers_beyond_reason_are_refused(number: str) -> None:
    data = GOOD["CLAIM"].replace(b'"time_s":1.5', f'"time_s":{number}'.encode())
    with pytest.raises(CorruptionError, match="CLAIM is not JSON"):
        READERS["CLAIM"](data)


def test_a_whole_number_of_65_bits_is_refused() -> None:
    with pytest.raises(CorruptionError, match="more than 64 bits"):
        Mark.from_json(changed("MARK", lambda value: value.update(rows=2**64)))


@pytest.mark.parametrize("parent", ["", "1", "1:", "1:2:3", "-1:2", " 1:2", "1:2\n", "x:y"])
def test_a_parent_that_is_no_marker_is_refused(parent: str) -> None:
    with pytest.raises(CorruptionError, match=r"CLAIM\.parent"):
        READERS["CLAIM"](changed("CLAIM", lambda value: value.update(parent=parent)))


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        ("CLAIM", "job", OTHER_JOB.hex()),
        ("CLAIM", "generation", 3),
        ("COMMIT", "job", OTHER_JOB.hex()),
        ("COMMIT", "generation", 1),
        ("COMMIT", "marker", 7),
        ("COMMIT", "step", 61),
        ("TRIM", "job", OTHER_JOB.hex()),
        ("TRIM", "generation", 1),
        ("TRIM", "marker", 7),
    ],
)
def test_a_body_that_disagrees_with_its_header_is_refused(kind: str, name: str, value: object) -> None:
    with pytest.raises(CorruptionError, match=rf"{kind}\.{name} is .*, but its header has"):
        READERS[kind](changed(kind, lambda body: body.update({name: value})))


@pytest.mark.parametrize(
    "schema",
    [
        Schema((table("b"), table("a"))),
        Schema((table("a"), table("a", 9))),
        Schema((table("a", 8, 4, "float8"),)),
        Schema((table("a", 8, 4, "float32", StateSpec("m", "complex", False)),)),
    ],
    ids=["unsorted", "twice", "dtype", "dtype of a state"],
)
def test_a_schema_that_is_none_is_refused(schema: Schema) -> None:
    with pytest.raises(CorruptionError, match=r"HELLO\.schema"):
        Hello.from_json(Hello(1, schema, ()).to_json())


@pytest.mark.parametrize(
    "shard",
    [
        TableShard(2, 0, 1, 0, 1),
        TableShard(0, 0, 7, 0, 4),
        TableShard(0, 6, 1, 0, 4),
        TableShard(0, 0, 6, 0, 5),
        TableShard(1, 0, 8, 4, 1),
    ],
)
def test_a_shard_outside_its_table_is_refused(shard: TableShard) -> None:
    with pytest.raises(CorruptionError, match="is outside its table"):
        Hello.from_json(replace(HELLO, shards=(shard,)).to_json())


@pytest.mark.parametrize(
    "ranks",
    [
        (RankEnd(1, 0, 0, 1, 2, 0, 0, 0),),
        (RankEnd(0, 0, 0, 1, 2, 0, 0, 0), RankEnd(0, 0, 0, 1, 2, 0, 0, 0)),
        (RankEnd(0, 0, 0, 1, 2, 0, 0, 0), RankEnd(2, 0, 0, 1, 2, 0, 0, 0)),
        (RankEnd(0, 0, 0, 1, 1, 0, 0, 0),),
        (RankEnd(0, 0, 0, 0, 0, 0, 0, 0),),
    ],
)
@pytest.mark.parametrize("version", [1, 2])
def test_commit_without_every_rank_once_is_refused(ranks: tuple[RankEnd, ...], version: int) -> None:
    with pytest.raises(CorruptionError, match=r"COMMIT\.ranks must be 0, 1, 2"):
        parse_control(commit(1, 1, ranks, version=version).to_frame())


@pytest.mark.parametrize(
    "markers", [[], ["2:5"], ["2:6", "1:5"], ["1:4", "1:5", "2:6"], ["2:6", "2:6"], ["1:5", "2"], ["1:5", "2:6\n"]]
)
def test_trim_that_does_not_name_each_generation_once_is_refused(markers: list[str]) -> None:
    with pytest.raises(CorruptionError, match=r"TRIM\.markers"):
        READERS["TRIM"](changed("TRIM", lambda body: body.update(markers=markers)))


@pytest.mark.parametrize("store", ["", "file:///\x1b[2J", "x" * 4097])
def test_trim_without_a_printable_store_is_refused(store: str) -> None:
    with pytest.raises(CorruptionError, match=r"TRIM\.store"):
        READERS["TRIM"](changed("TRIM", lambda body: body.update(store=store)))


@pytest.mark.parametrize(("time_s", "day"), [(0.0, "1970-01-01 00:00 UTC"), (1e300, "an unknown day")])
def test_the_day_of_a_trim_is_for_people(time_s: float, day: str) -> None:
    assert parse_control(trim("1:1", time_s=time_s).to_frame()).day == day  # type: ignore[union-attr]


def test_commit_of_no_ranks_is_refused() -> None:
    with pytest.raises(CorruptionError, match=r"COMMIT\.ranks"):
        parse_control(replace(commit(1, 1), ranks=()).to_frame())


@pytest.mark.parametrize("kind", [Kind.HELLO, Kind.ROWS, Kind.MARK])
def test_data_frames_do_not_belong_in_the_control_partition(kind: Kind) -> None:
    with pytest.raises(CorruptionError, match=f"{kind.name} frame in the control partition"):
        parse_control(json_frame(Header(kind, JOB, 1), b"{}"))


def test_a_job_with_more_tables_than_a_frame_takes_is_refused_by_the_writer() -> None:
    many = Schema(tuple(table(f"module.{number:06d}", 10, 8, "float32", ROWWISE) for number in range(8000)))
    with pytest.raises(UnsupportedError, match=r"CLAIM of \d+ bytes does not fit a frame"):
        claim(1, schema=many).to_frame()


# END and NOTE: when they count, and what a record refuses to hold.


FIRST = MarkerId(1, make.MARKER)


def commit_of(marker: int = make.MARKER, generation: int = 1) -> Commit:
    return replace(make.commit(RankEnd(0, 0, 0, 10, 2, 1, 0, 0)), marker=marker, generation=generation)


def claim_of(generation: int = 1) -> Claim:
    return replace(make.claim(), generation=generation)


def test_the_last_word_counts_until_somebody_claims_a_higher_generation() -> None:
    lineage = Lineage.of([claim_of(), commit_of(), make.end_record()])
    assert lineage.ended == make.end_record()
    lineage.apply(claim_of(2))
    assert lineage.ended is None
    assert lineage.ends[1].outcome == Outcome.FAILED


def test_no_marker_counts_after_the_last_word_of_its_generation() -> None:
    lineage = Lineage.of([claim_of(), commit_of(), make.end_record(), commit_of(2)])
    assert list(lineage.commits) == [FIRST]
    assert lineage.stale == 1


@pytest.mark.parametrize("end", [replace(make.end_record(), nonce="other"), replace(make.end_record(), generation=3)])
def test_the_last_word_of_somebody_else_is_ignored(end: End) -> None:
    lineage = Lineage.of([claim_of(), commit_of(), end])
    assert lineage.ended is None
    assert lineage.stale == 1


def test_a_fenced_trainer_has_no_last_word() -> None:
    assert Lineage.of([claim_of(), claim_of(2), make.end_record()]).ends == {}


def test_later_metadata_of_a_marker_stands_over_older() -> None:
    lineage = Lineage.of(
        [claim_of(), commit_of(), make.note(), replace(make.note(), meta=meta_of({"auc": 0.9, "x": 1}))]
    )
    assert dict(lineage.meta(FIRST)) == {"auc": 0.9, "run": "nightly", "x": 1}


def test_metadata_of_a_marker_that_does_not_exist_is_ignored() -> None:
    lineage = Lineage.of([claim_of(), make.note()])
    assert lineage.notes == {}
    assert lineage.stale == 1


@pytest.mark.parametrize(
    ("meta", "why"),
    [
        ({"a b": 1}, "metadata name .* is not valid"),
        ({"": 1}, "metadata name .* is not valid"),
        ({"x": float("nan")}, "metadata x must be .*, got nan"),
        ({"x": float("inf")}, "metadata x must be .*, got inf"),
        ({"x": 2**53}, "below 2"),
        ({"x": True}, "metadata x must be .*, got True"),
        ({"x": [1]}, r"metadata x must be .*, got \[1\]"),
        ({"x": "y" * MAX_META_BYTES}, "too large"),
    ],
)
def test_metadata_that_a_record_cannot_hold_is_refused_by_name(meta: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        meta_of(meta)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda text: text.replace(b'"failed"', b'"bored"_'), "JSON"),
        (lambda text: text.replace(b'"failed"', b'"FAILED"'), "expected one of finished, preempted, failed"),
        (lambda text: text.replace(b"ValueError", b"Value\\u000a"), "not a short line"),
    ],
)
def test_a_last_word_that_no_trainer_writes_is_refused(change: Callable[[bytes], bytes], why: str) -> None:
    payload = bytes(memoryview(make.end_record().to_frame())[128:])
    header = make.end_record().header()
    with pytest.raises(CorruptionError, match=why):
        End.from_json(header, change(payload))


def test_signed_records_are_vouched_for_as_all_others() -> None:
    for record in (make.end_record(), make.note()):
        signed = make.KEY.sign(record)
        assert make.KEY.vouches_for(parse_control(signed.to_frame()))
        changed = replace(signed, time_s=0.0)
        assert isinstance(changed, End | Note)
        assert not make.KEY.vouches_for(changed)
