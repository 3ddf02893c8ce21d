"""The JSON objects of a store: what goes in comes out, no damaged byte passes, and no forged field is believed."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import JOB, OTHER_JOB, claim, commit
from tests.parts import Dropped, Fold, Garbage, Manifest, Notes, SegmentRef
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit, Mark, TableScalars
from torchrec_stream_ckpt.format.manifest import Pin
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.format.segment import HEADER_LEN
from torchrec_stream_ckpt.util.layout import (
    FoldName,
    StoreSegment,
    dropped_name,
    garbage_name,
    is_garbage_list,
    parse_pin_name,
    pin_name,
)
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, TableShard

U32, U63 = st.integers(0, 2**32 - 1), st.integers(0, 2**63 - 1)
MARKERS = st.builds(MarkerId, st.integers(1, 10**9 - 1), st.integers(1, 10**18 - 1))


def ref(name: str, num_bytes: int = 4096, front_bytes: int = 256, header_crc: int = 7, rows: int = 3) -> SegmentRef:
    return SegmentRef(name, num_bytes, front_bytes, header_crc, rows)


@st.composite
def refs(draw: st.DrawFn, name_of: Callable[[int], str]) -> tuple[SegmentRef, ...]:
    return tuple(
        ref(name_of(part), HEADER_LEN + draw(U63), HEADER_LEN, draw(U32), draw(U63))
        for part in range(draw(st.integers(1, 4)))
    )


@st.composite
def manifests(draw: st.DrawFn) -> Manifest:
    marker = draw(MARKERS)
    world = draw(st.integers(1, 4))
    ranks = [RankEnd(rank, draw(U32), 0, draw(U63), 2, draw(U32), 0, 0) for rank in range(world)]
    before = MarkerId(marker.generation, draw(st.integers(1, marker.marker))) if draw(st.booleans()) else None
    made = commit(marker.generation, marker.marker, ranks, step=draw(U63))
    segments = (draw(refs(lambda part, rank=rank: StoreSegment(JOB, marker, rank, part).name)) for rank in range(world))
    return Manifest(made, before if before != marker else None, tuple(segments))


@st.composite
def folds(draw: st.DrawFn) -> Fold:
    start, end = sorted(draw(st.sets(MARKERS, min_size=2, max_size=2)))
    since = start if draw(st.booleans()) else None
    return Fold(JOB, since, end, draw(st.integers(0, 2**32 - 1)), draw(refs(FoldName(JOB, end, since).segment_name)))


@given(manifests())
def test_a_manifest_reads_back_as_it_was_written(manifest: Manifest) -> None:
    assert Manifest.from_bytes(manifest.to_bytes(), "m") == manifest


@given(manifests(), st.data())
def test_a_forged_text_is_refused_or_is_the_text_of_what_it_reads_as(manifest: Manifest, data: st.DataObject) -> None:
    text = manifest.to_bytes().decode("ascii")
    place = data.draw(st.integers(0, len(text) - 1))
    inserted = data.draw(st.sampled_from(["", "0", "9", "-", ".", " ", ",", '"', "[", "]", "],[", "\\", "e", "\n"]))
    forged = text[:place] + inserted + text[place + data.draw(st.integers(0, 1)) :]
    begin, end = forged.find('{"body":') + len('{"body":'), forged.find(',"crc32c":"')
    crc = f"{crc32c(forged[begin:end].encode()):08x}"
    forged = forged[: end + 11] + crc + forged[end + 19 :]
    with suppress(CorruptionError):
        assert Manifest.from_bytes(forged.encode("ascii"), "m").to_bytes() == forged.encode("ascii")


@pytest.mark.parametrize(
    "previous",
    ["0:1", "02:5", "2:05", "2:5 ", "2:5\n", "2:-1", "+2:5", "1000000000:1", "2:1000000000000000000", ""],
)
def test_a_marker_in_another_spelling_is_refused(previous: str) -> None:
    raw = json.loads(small_manifest().to_bytes())
    raw["body"]["previous"] = previous
    with pytest.raises(CorruptionError):
        Manifest.from_bytes(canonical(raw | {"crc32c": f"{crc32c(canonical(raw['body'])):08x}"}), "m")


@given(folds())
def test_a_fold_reads_back_as_it_was_written(fold: Fold) -> None:
    assert Fold.from_bytes(fold.to_bytes(), "f") == fold


@given(st.floats(0, 2.0**36, exclude_max=True), st.text(max_size=50), st.lists(st.text(max_size=50), max_size=4))
def test_what_retention_says_reads_back(time_s: float, reason: str, names: list[str]) -> None:
    drop = Dropped(commit(2, 5), MarkerId(2, 3), time_s, reason)
    assert Dropped.from_bytes(drop.to_bytes(), "d") == drop
    for garbage in (
        Garbage(time_s, tuple(names)),
        Garbage(time_s, tuple(names), {"a clock": time_s}),
        Garbage(time_s, tuple(names), {"a": 0.0, "b": time_s}, MarkerId(2, 3), time_s),
    ):
        assert Garbage.from_bytes(garbage.to_bytes(), "g") == garbage


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("clocks", {}, "garbage has invalid clocks"),
        ("clocks", [1.0], "garbage has invalid clocks"),
        ("clocks", {"a": -1.0}, "is not a time"),
        ("idle_s", "5", "is not a time"),
        ("newest", 7, "is not a string"),
    ],
)
def test_clocks_that_nobody_writes_are_refused(field: str, value: object, message: str) -> None:
    raw = json.loads(Garbage(5.0, ("a",), {"a clock": 1.0}, MarkerId(2, 3), 4.0).to_bytes())
    body = {**raw["body"], field: value}
    with pytest.raises(CorruptionError, match=message):
        Garbage.from_bytes(canonical({**raw, "body": body, "crc32c": f"{crc32c(canonical(body)):08x}"}), "g")


@given(st.lists(st.builds(TableShard, U32, U63, U63, U32, U32), max_size=3), U63, st.floats(0, 10))
def test_notes_read_back(shards: list[TableShard], iteration: int, rate: float) -> None:
    notes = Notes(tuple(shards), Mark(3, 4, (TableScalars(0, 0, 6, 0, 4, iteration, 1.0, rate, rate),)))
    assert Notes.from_json(notes.to_json(), "n") == notes


def small_manifest() -> Manifest:
    ranks = [RankEnd(rank, rank, 0, 9, 2, 5, 0, 0) for rank in range(2)]
    segments = [
        tuple(ref(StoreSegment(JOB, MarkerId(2, 7), rank, part).name) for part in range(2)) for rank in range(2)
    ]
    return Manifest(commit(2, 7, ranks), MarkerId(2, 5), tuple(segments))


def small_fold(start: MarkerId | None = None) -> Fold:
    end = MarkerId(2, 7)
    return Fold(JOB, start, end, 7, tuple(ref(FoldName(JOB, end, start).segment_name(part)) for part in range(2)))


OBJECTS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "manifest": (small_manifest().to_bytes(), lambda data: Manifest.from_bytes(data, "where")),
    "fold": (small_fold().to_bytes(), lambda data: Fold.from_bytes(data, "where")),
    "dropped": (Dropped(commit(2, 7), None, 5.0).to_bytes(), lambda data: Dropped.from_bytes(data, "where")),
    "garbage": (Garbage(5.0, ("a/b",)).to_bytes(), lambda data: Garbage.from_bytes(data, "where")),
}


@pytest.mark.parametrize("kind", OBJECTS)
def test_every_flipped_bit_is_refused(kind: str) -> None:
    good, read = OBJECTS[kind]
    for position in range(len(good)):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[position] ^= 1 << bit
            with pytest.raises(CorruptionError) as refused:
                read(bytes(damaged))
            assert refused.value.where["name"] == "where"


@pytest.mark.parametrize("kind", OBJECTS)
def test_every_truncation_and_everything_behind_is_refused(kind: str) -> None:
    good, read = OBJECTS[kind]
    for length in range(len(good)):
        with pytest.raises(CorruptionError):
            read(good[:length])
    for more in (b" ", b"\n", b"\0", b"{}"):
        with pytest.raises(CorruptionError):
            read(good + more)


@pytest.mark.parametrize("kind", OBJECTS)
def test_one_kind_is_none_of_the_others(kind: str) -> None:
    for other, (_, read) in OBJECTS.items():
        if other != kind:
            with pytest.raises(CorruptionError, match=f"not a {other} of this store"):
                read(OBJECTS[kind][0])


@pytest.mark.parametrize("kind", OBJECTS)
def test_a_newer_format_is_named_and_others_are_none(kind: str) -> None:
    good, read = OBJECTS[kind]
    raw = json.loads(good)
    newest = 2 if kind in ("garbage", "fold") else 1
    message = f"{kind} has format {newest + 1}, this program reads up to {newest}"
    with pytest.raises(CorruptionError, match=message) as refused:
        read(canonical({**raw, "format": newest + 1, "body": "anything"}))
    assert refused.value.hint == "upgrade torchrec_stream_ckpt on the reading side"
    for value in (0, -1, True, 1.0, "1", None, [1]):
        with pytest.raises(CorruptionError, match=f"not a {kind} of this store"):
            read(canonical({**raw, "format": value}))


@given(
    st.sampled_from(sorted(OBJECTS)),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
        max_leaves=6,
    ),
    st.data(),
)
def test_a_forged_field_of_any_kind_is_refused_or_read_never_a_crash(
    kind: str, value: object, data: st.DataObject
) -> None:
    good, read = OBJECTS[kind]
    raw = json.loads(good)
    raw["body"][data.draw(st.sampled_from(sorted(raw["body"])))] = value
    try:
        forged = canonical(raw | {"crc32c": f"{crc32c(canonical(raw['body'])):08x}"})
    except ValueError:  # not finite: no JSON can say it
        return
    where: object = "where"
    try:
        read(forged)
    except CorruptionError as error:
        where = error.where["name"]
    assert where == "where"


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("opening", [b"[", b'{"a":'])
@pytest.mark.parametrize("depth", [100, 300, 450, 700, 900, 990, 5_000, 200_000])
def test_deep_json_is_refused_and_takes_no_stack(kind: str, opening: bytes, depth: int) -> None:
    closing = {b"[": b"]", b'{"a":': b"}"}[opening]
    deep = opening * depth + b"1" + closing * depth
    for text in (deep, b'{"body":' + deep + b',"crc32c":"00000000","format":1,"kind":"' + kind.encode() + b'"}'):
        with pytest.raises(CorruptionError):
            OBJECTS[kind][1](text)


@pytest.mark.parametrize("depth", [100, 300, 450, 700, 900, 960, 970, 980, 990, 5_000, 200_000])
@pytest.mark.parametrize("field", ["shards", "mark", "more"])
def test_notes_too_deep_or_of_other_fields_are_refused(field: str, depth: int) -> None:
    text = Notes((), Mark(0, 0, ())).to_json()
    deep = b'{"rows":' * depth + b"1" + b"}" * depth
    raw = {"shards": b"[]", "mark": text[len(b'{"mark":') : -len(b',"shards":[]}')], field: deep}
    data = b"{" + b",".join(b'"' + name.encode() + b'":' + value for name, value in raw.items()) + b"}"
    with pytest.raises(CorruptionError) as refused:
        Notes.from_json(data, "where")
    assert refused.value.where == {"name": "where"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "notes is not JSON"),
        (b"\xff", "notes is not JSON"),
        (b"[]", "notes is not a JSON object"),
        (b'{"mark":{},"shards":[]}', "MARK has fields"),
        (b'{"mark":[],"shards":[]}', "notes.mark is"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[]}}', "notes has fields"),
        (b'{"mark":{"num_bytes":-1,"rows":0,"scalars":[]},"shards":[]}', "MARK.num_bytes is -1, expected int"),
        (b'{"mark":{"num_bytes":1e999,"rows":0,"scalars":[]},"shards":[]}', "is not finite"),
        (b'{"mark":{"num_bytes":18446744073709551616,"rows":0,"scalars":[]},"shards":[]}', "more than 64 bits"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[]},"shards":[],"shards":[]}', "an object has a duplicate name"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[]},"shards":[{"table":0}]}', "notes.shards has fields"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[]},"shards":[],"more":1}', "notes has fields"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[],"shards":[]}}', "notes has fields"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[]},"x":1,"shards":[]}', "notes has fields"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[]},"mark":1,"shards":[]}', "an object has a duplicate name"),
        (b'{"mark":{"num_bytes":0,"rows":0,"scalars":[]},"shards":[]}}', "notes is not JSON"),
        (b'{{"mark":{"num_bytes":0,"rows":0,"scalars":[]},"shards":[]}', "notes is not JSON"),
        (b',"shards":[]}', "notes is not JSON"),
    ],
)
def test_bad_notes_are_refused(data: bytes, message: str) -> None:
    with pytest.raises(CorruptionError, match=message) as refused:
        Notes.from_json(data, "where")
    assert refused.value.where == {"name": "where"}


NAMES = (
    "",
    "STORE",
    "..",
    "../../etc/passwd",
    "/etc/passwd",
    StoreSegment(OTHER_JOB, MarkerId(2, 7), 0, 0).name,
    StoreSegment(JOB, MarkerId(2, 6), 0, 0).name,
    StoreSegment(JOB, MarkerId(2, 7), 1, 0).name,
    StoreSegment(JOB, MarkerId(2, 7), 0, 1).name,
    StoreSegment(JOB, MarkerId(2, 7), 0, 0).name + "/..",
    StoreSegment(JOB, MarkerId(2, 7), 0, 0).name + "\n",
    FoldName(JOB, MarkerId(2, 7), MarkerId(2, 6)).segment_name(0),
    "x" * 100_000,
)


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_a_manifest_or_a_fold_names_its_own_segments_and_no_others(name: str) -> None:
    manifest, fold = small_manifest(), small_fold()
    (first, *more), *ranks = manifest.segments
    with pytest.raises(CorruptionError, match=r"names '.*, expected "):
        Manifest.from_bytes(replace(manifest, segments=((replace(first, name=name), *more), *ranks)).to_bytes(), "m")
    with pytest.raises(CorruptionError, match=r"names '.*, expected "):
        Fold.from_bytes(replace(fold, segments=(replace(fold.segments[0], name=name),)).to_bytes(), "f")


def test_a_segment_named_twice_is_refused() -> None:
    manifest, fold = small_manifest(), small_fold()
    (first, _), other = manifest.segments
    with pytest.raises(CorruptionError, match=r"expected .*-p001\.seg"):
        Manifest.from_bytes(replace(manifest, segments=((first, first), other)).to_bytes(), "m")
    with pytest.raises(CorruptionError, match=r"expected .*-p001\.seg"):
        Fold.from_bytes(replace(fold, segments=(fold.segments[0],) * 2).to_bytes(), "f")


@pytest.mark.parametrize(
    "lengths", [(4096, 127), (4096, 4097), (127, 127), (0, 0)], ids=lambda lengths: "-".join(map(str, lengths))
)
def test_impossible_lengths_are_refused(lengths: tuple[int, int]) -> None:
    fold = small_fold()
    wrong = replace(fold.segments[0], num_bytes=lengths[0], front_bytes=lengths[1])
    with pytest.raises(CorruptionError, match="has impossible lengths"):
        Fold.from_bytes(replace(fold, segments=(wrong,)).to_bytes(), "f")


@pytest.mark.parametrize("start", [MarkerId(2, 7), MarkerId(2, 8), MarkerId(3, 1)])
def test_a_fold_that_begins_behind_its_end_is_refused(start: MarkerId) -> None:
    with pytest.raises(CorruptionError, match=f"{start} is not before 2:7"):
        Fold.from_bytes(small_fold(start).to_bytes(), "f")


@pytest.mark.parametrize("previous", [MarkerId(2, 7), MarkerId(2, 8), MarkerId(1, 3), MarkerId(3, 1)])
def test_a_marker_that_follows_on_no_earlier_one_of_its_generation_is_refused(previous: MarkerId) -> None:
    with pytest.raises(CorruptionError, match=f"{previous} is not before 2:7"):
        Manifest.from_bytes(replace(small_manifest(), previous=previous).to_bytes(), "m")
    with pytest.raises(CorruptionError, match=f"{previous} is not before 2:7"):
        Dropped.from_bytes(Dropped(commit(2, 7), previous, 5.0).to_bytes(), "d")


def test_ranks_without_segments_and_segments_without_ranks_are_refused() -> None:
    manifest = small_manifest()
    first, second = manifest.segments
    third = (ref(StoreSegment(JOB, MarkerId(2, 7), 2, 0).name),)
    for segments in ((first,), (first, second, third), ()):
        with pytest.raises(CorruptionError, match="manifest does not list the segments of every rank"):
            Manifest.from_bytes(replace(manifest, segments=segments).to_bytes(), "m")
    with pytest.raises(CorruptionError, match="must have segments"):
        Manifest.from_bytes(replace(manifest, segments=(first, ())).to_bytes(), "m")


def test_only_a_whole_commit_stands_in_a_manifest() -> None:
    class Other:
        """Writes another frame where the COMMIT belongs."""

        def __init__(self, frame: bytes) -> None:
            self.frame = frame

        def to_frame(self) -> bytes:
            return self.frame

    good = small_manifest()
    frame = good.commit.to_frame()
    for other, message in (
        (claim(2).to_frame(), "does not hold a COMMIT"),
        (frame[:-1], "frame holds"),
        (frame[:-1] + b"!", "payload checksum does not match"),
        (b"", "frame of 0 bytes"),
    ):
        forged: Commit = Other(other)  # type: ignore[assignment]
        with pytest.raises(CorruptionError, match=message) as refused:
            Manifest.from_bytes(replace(good, commit=forged).to_bytes(), "where")
        assert refused.value.where["name"] == "where"


@pytest.mark.parametrize("time_s", [-1.0, 2.0**36, True, None, "5"])
def test_a_time_that_is_none_is_refused(time_s: object) -> None:
    with pytest.raises(CorruptionError, match="is not a time"):
        Garbage.from_bytes(Garbage(time_s, ()).to_bytes(), "g")  # type: ignore[arg-type]


def test_texts_are_texts() -> None:
    with pytest.raises(CorruptionError, match="7 is not a string"):
        Garbage.from_bytes(Garbage(5.0, (7,)).to_bytes(), "g")  # type: ignore[arg-type]
    with pytest.raises(CorruptionError, match="None is not a string"):
        Dropped.from_bytes(Dropped(commit(2, 7), None, 5.0, None).to_bytes(), "d")  # type: ignore[arg-type]


def test_a_forged_number_of_segments_takes_no_memory() -> None:
    good = json.loads(small_fold().to_bytes())
    data = canonical({**good, "body": {**good["body"], "segments": 2**63}})
    tracemalloc.start()
    try:
        with pytest.raises(CorruptionError):
            Fold.from_bytes(data, "f")
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()


def test_the_same_pin_has_the_same_bytes() -> None:
    assert Pin(5.0).to_bytes() == b'{"body":{"time_s":5.0},"crc32c":"%08x","format":1,"kind":"pin"}' % crc32c(
        b'{"time_s":5.0}'
    )


def fold_of(*parts: int) -> Fold:
    name = FoldName(JOB, MarkerId(1, 9), None)
    return Fold(JOB, None, MarkerId(1, 9), 7, tuple(ref(name.segment_name(part)) for part in parts))


def test_a_fold_that_leaves_numbers_of_parts_out_has_format_2() -> None:
    for parts, version in (((0, 1, 2), 1), ((0, 1, 8), 2), ((16,), 2)):
        data = fold_of(*parts).to_bytes()
        assert json.loads(data)["format"] == version
        assert Fold.from_bytes(data, "it") == fold_of(*parts)


def test_parts_of_a_fold_that_do_not_ascend_or_are_of_another_format_are_refused() -> None:
    for parts in ((8, 0), (8, 8)):
        with pytest.raises(CorruptionError, match=r"p008.seg', expected .*-p000.seg"):
            Fold.from_bytes(fold_of(*parts).to_bytes(), "it")
    for parts, version in (((0, 8), 1), ((0, 1), 2)):
        raw = json.loads(fold_of(*parts).to_bytes()) | {"format": version}
        with pytest.raises(CorruptionError, match="not in canonical form"):
            Fold.from_bytes(canonical(raw), "it")


# The JSON objects of a store: what was written comes back, and nothing that was altered is believed.


OWNER = claim(1).job


def segment(marker: MarkerId) -> SegmentRef:
    return SegmentRef(StoreSegment(OWNER, marker, 0, 0).name, 256, 128, 7, 3)


RECORDS: list[tuple[Any, Callable[..., Any]]] = [
    (Manifest(commit(1, 2), MarkerId(1, 1), ((segment(MarkerId(1, 2)),),)), Manifest.from_bytes),
    (Manifest(commit(1, 1), None, ((segment(MarkerId(1, 1)),),)), Manifest.from_bytes),
    (Dropped(commit(1, 2), MarkerId(1, 1), 1.5e9), Dropped.from_bytes),
    (Garbage(1.5e9, ("segments/a", "segments/b")), Garbage.from_bytes),
]


@pytest.mark.parametrize(("record", "parse"), RECORDS)
def test_what_was_written_comes_back(record: Any, parse: Callable[..., Any]) -> None:
    assert parse(record.to_bytes(), "here") == record


@pytest.mark.parametrize(("record", "parse"), RECORDS)
def test_no_byte_can_be_altered(record: Any, parse: Callable[..., Any]) -> None:
    data = record.to_bytes()
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(CorruptionError) as caught:
            parse(bytes(altered), "here")
        assert caught.value.where["name"] == "here"
    for stop in range(0, len(data), 7):
        with pytest.raises(CorruptionError):
            parse(data[:stop], "here")


@pytest.mark.parametrize(
    ("record", "parse", "message"),
    [
        (Dropped(commit(1, 2), MarkerId(1, 2), 0.0), Dropped.from_bytes, "1:2 is not before 1:2"),
        (Dropped(commit(2, 2), MarkerId(1, 1), 0.0), Dropped.from_bytes, "1:1 is not before 2:2"),
        (Dropped(commit(1, 2), None, -1.0), Dropped.from_bytes, "-1.0 is not a time"),
        (Garbage(1e99, ()), Garbage.from_bytes, "is not a time"),
        (Garbage(0.0, ()), Dropped.from_bytes, "not a dropped of this store"),
    ],
)
def test_what_makes_no_sense_is_refused(record: Any, parse: Callable[..., Any], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        parse(record.to_bytes(), "here")


def test_names_come_back_and_foreign_ones_are_none() -> None:
    marker = MarkerId(3, 17)
    assert parse_pin_name(pin_name(OWNER, marker)) == (OWNER, marker, "")
    assert parse_pin_name(pin_name(OWNER, marker, "prod.v2")) == (OWNER, marker, "prod.v2")
    assert parse_pin_name(pin_name(OWNER, marker, "9")) is None
    assert parse_pin_name(dropped_name(OWNER, marker)) is None
    assert is_garbage_list(garbage_name(OWNER, 1_771_234_567_890, 7))
    assert not is_garbage_list(f"garbage/{OWNER.hex()}/notes.json")
