"""docs/format.md says what the code does: its tables and its example are compared, so it cannot drift."""

from __future__ import annotations

import hashlib
import json
import re
import zlib
from dataclasses import fields
from pathlib import Path

import pytest

from tests.golden import make, make_store
from tests.parts import Reading, ScrubPlace, segment
from torchrec_stream_ckpt.format import (
    claim_changes,
    claim_features,
    control,
    dense_files,
    end_note,
    frame,
    manifest,
    notes,
    schema,
    snapshot,
    summary,
)
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Proof, ReplicatedProof
from torchrec_stream_ckpt.format.readings import MAX_DAMAGED, Comparison, ReadUnit
from torchrec_stream_ckpt.maintain.fold import SEGMENT_BYTES
from torchrec_stream_ckpt.maintain.merge_plan import WINDOWS_OF_BLOCK
from torchrec_stream_ckpt.maintain.scrub.readings import COUNTS_FOR_S
from torchrec_stream_ckpt.util import layout
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, StateSpec, TableShard, TableSpec
from torchrec_stream_ckpt.util.uris import KafkaUri

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def section(title: str) -> str:
    """What stands under a heading, up to the next one."""
    (found,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", DOC, re.M | re.S)
    return found


def cells(title: str) -> list[list[str]]:
    """The body of the table under a heading."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


def fields_of(title: str) -> set[str]:
    """Names in the first column of a table. Fields of one meaning share a row, with commas between them."""
    names = [name for row in cells(title) for name in row[0].split(", ")]
    assert len(names) == len(set(names))
    return set(names)


def test_every_announcement_is_documented() -> None:
    assert [row[0] for row in cells("announcements")] == list(claim_features.KNOWN)


def test_header_table_is_the_layout_of_the_code() -> None:
    expected, offset = [], 0
    for size, name, _ in make.HEADER_FIELDS:
        expected.append([str(offset), str(size), name])
        offset += size
    assert [row[:3] for row in cells("The frame header")] == expected
    assert offset == frame.HEADER_LEN


@pytest.mark.parametrize("name", ["rank", "generation", "table", "seq", "step", "marker", "rows", "col0", "cols"])
def test_header_table_says_where_the_code_puts_a_field(name: str) -> None:
    (at, size) = next((int(row[0]), int(row[1])) for row in cells("The frame header") if row[2] == name)
    header = frame.Header(frame.Kind.ROWS, bytes(16), 0, table=0)
    before, after = bytearray(128), bytearray(128)
    header.pack_into(before)
    setattr(header, name, 256**size - 1)
    header.pack_into(after)
    changed = {position for position in range(124) if before[position] != after[position]}
    assert changed == set(range(at, at + size))


def test_kinds_and_dtypes_are_those_of_the_code() -> None:
    assert {row[1]: int(row[0]) for row in cells("Kinds")} == {kind.name: kind.value for kind in frame.Kind}
    dtypes = cells("Dtype codes")
    assert {row[1]: int(row[0]) for row in dtypes} == frame.DTYPE_CODES
    assert {row[1]: int(row[2]) for row in dtypes} == frame.DTYPE_BYTES


@pytest.mark.parametrize(
    ("title", "record"),
    [
        ("HELLO", control.Hello),
        ("MARK", control.Mark),
        ("CLAIM", control.Claim),
        ("COMMIT", control.Commit),
        ("TRIM", control.Trim),
        ("END", end_note.End),
        ("NOTE", end_note.Note),
        ("SNAPSHOT", snapshot.Snapshot),
        ("BASE", snapshot.Base),
        ("schema", schema.Schema),
        ("table", TableSpec),
        ("changes", claim_changes.ClaimChanges),
        ("state", StateSpec),
        ("shard", TableShard),
        ("scalars", control.TableScalars),
        ("proof", Proof),
        ("replicated", ReplicatedProof),
        ("dense proof", DenseProof),
        ("rank end", RankEnd),
        ("dense file", dense_files.DenseFile),
        ("dense list", dense_files.DenseList),
        ("Notes", notes.Notes),
        ("Manifest", manifest.Manifest),
        ("Fold", manifest.Fold),
        ("Segment in a manifest or fold", manifest.SegmentRef),
        ("Dropped", manifest.Dropped),
        ("Garbage", manifest.Garbage),
        ("Pin", manifest.Pin),
        ("Verdict", manifest.Verdict),
        ("Rows of a verdict", manifest.TableRows),
    ],
)
def test_every_field_of_a_json_payload_is_documented(title: str, record: type) -> None:
    assert fields_of(title) == {item.name for item in fields(record)} - {"version"}


@pytest.mark.parametrize("name", ["manifest", "fold", "dropped", "garbage", "pin", "verdict"])
def test_every_field_that_a_json_object_of_a_store_has_is_documented(name: str) -> None:
    raw = json.loads(make_store.objects()["garbage_2" if name == "garbage" else name])
    assert fields_of("JSON objects") == raw.keys()
    assert fields_of(name.capitalize()) == raw["body"].keys()
    assert f"`{name}`" in section("JSON objects")


def test_segment_tables_are_the_layout_of_the_code() -> None:
    expected, offset = [], 0
    for size, name, _ in make_store.HEADER_FIELDS:
        expected.append([str(offset), str(size), name])
        offset += size
    assert [row[:3] for row in cells("The segment")] == expected
    assert offset == segment.HEADER_LEN
    fields_ = segment.ENTRY.fields or {}
    entry = [[str(place), str(kind.itemsize), name] for name, (kind, place, *_) in fields_.items()]
    assert [row[:3] for row in cells("A directory entry")] == entry
    for kind in segment.SegmentKind:
        assert f"{kind.value}: {kind.name}" in section("The segment")


def test_segment_header_says_what_the_table_means() -> None:
    data = make_store.objects()["segment"]
    front = segment.parse_front(data, "golden")
    values = {
        row[2]: int.from_bytes(data[int(row[0]) : int(row[0]) + int(row[1])], "little") for row in cells("The segment")
    }
    assert (values["generation"], values["marker"]) == (front.id.marker.generation, front.id.marker.marker)
    assert (values["kind"], values["last"], values["rank"], values["part"]) == (front.id.kind, 1, 0, 0)
    assert (values["chunks"], values["notes_len"]) == (len(front.directory), len(front.notes))
    assert (values["num_bytes"], values["rows"]) == (front.num_bytes, front.rows) == (len(data), 5)
    assert (values["schema_crc"], values["header_crc"]) == (front.schema_crc, front.header_crc)


def test_names_of_a_store_are_those_that_the_code_makes() -> None:
    marker, before = MarkerId(3, 48), MarkerId(2, 32)
    fold, base = layout.FoldName(make.JOB, marker, before), layout.FoldName(make.JOB, marker, None)
    made = [
        layout.STORE_FILE,
        layout.claim_name(make.JOB, 3),
        layout.StoreSegment(make.JOB, marker, 7, 1).name,
        layout.manifest_name(make.JOB, marker),
        fold.name,
        base.name,
        base.segment_name(1),
        layout.dropped_name(make.JOB, marker),
        layout.pin_name(make.JOB, marker),
        layout.pin_name(make.JOB, marker, "X"),
        layout.attempt_name(make.JOB, marker, "5f" * 8),
        layout.reached_name(make.JOB, marker, 2),
        layout.verdict_name(make.JOB, marker, 0x1A),
        Comparison(make.JOB, marker, "store", 0x1A, 512, 209, 3, 5).name,
        layout.garbage_name(make.JOB, 5, 0x1A),
        layout.probe_name(make.JOB, "5f" * 8),
        layout.damaged_name("NAME"),
        layout.scrub_place_name(make.JOB, "command", 42),
        layout.reading_name(make.JOB, 5, 0x1A),
        layout.SummaryName(make.JOB, before, marker, 16, 0x1A).name,
        layout.dense_file_name(make.JOB, marker, "NAME"),
        layout.CopyName(make.JOB, "0a1b2c3d", 2, 128, 4096, 0x1A).name,
        layout.place_name(KafkaUri("broker:9092", "NAME"), make.JOB),
    ]
    numbers = {
        "WHO-cC-pP-wW-dD-tT": "store-c0000001a-p00512-w00209-d000003-t0000000000000005",
        "gG1-mM1-to-gG-mM-nN-C": "g00000002-m00000032-to-g00000003-m00000048-n00000016-0000001a",
        "mM-A": "m00000048-" + "5f" * 8,
        "gG-mM1": "g00000002-m00000032",
        "JOB": make.JOB.hex(),
        "gG": "g00000003",
        "mM": "m00000048",
    }
    numbers |= {
        "rR": "r00007",
        "pP": "p001",
        "SAME": "root",
        "tT-C": "t0000000000000005-0000001a",
        "L-eE-O1-O2-C": f"0a1b2c3d-e0002-{128:020d}-{4096:020d}-0000001a",
        "places/H": "places/" + hashlib.sha256(b"kafka job NAME").hexdigest()[:32],
        "-CRC": "-0000001a",
        "W-B": "5f" * 8 + "-00000042",
        "WHO-B": "command-00000042",
        "-eN": "-e00000002",
        "now-A": "now-" + "5f" * 8,
    }
    documented = []
    for name, *_ in cells("Names"):
        for short, long in numbers.items():
            name = name.replace(short, long)
        documented.append(name)
    assert documented == made


def test_the_header_of_a_summary_is_the_layout_of_the_code() -> None:
    expected, offset = [], 0
    for size, name in make_store.SUMMARY_FIELDS:
        expected.append([str(offset), str(size), name])
        offset += size
    assert [row[:3] for row in cells("Summaries")] == expected
    assert offset == summary.HEADER_LEN
    data = make_store.objects()["summary"]
    at = {row[2]: int(row[0]) for row in cells("Summaries")}
    assert int.from_bytes(data[at["parts"] :][:4], "little") == 2
    assert int.from_bytes(data[at["body_len"] :][:8], "little") == len(zlib.decompress(data[offset:]))
    assert data[at["job"] :][:16] == make.JOB
    assert f"{summary.MAX_UNPACKED_BYTES:,} bytes" in section("Summaries")


def test_the_fields_of_what_was_read_are_documented() -> None:
    assert [row[0] for row in cells("Readings")] == [each.name for each in fields(Reading)]
    assert [row[0] for row in cells("Unit of a reading")] == [each.name for each in fields(ReadUnit)]
    assert f"at most {COUNTS_FOR_S / 86400:.0f} days" in section("Unit of a reading")


def test_the_fields_of_where_a_scrub_stands_are_documented() -> None:
    assert [row[0] for row in cells("Progress of a scrub")] == [each.name for each in fields(ScrubPlace)]
    assert f"at most {MAX_DAMAGED} names" in section("Progress of a scrub")


def test_where_segments_are_cut_is_documented() -> None:
    assert f"CHUNK_BYTES = {segment.CHUNK_BYTES:,}" in section("Chunks")
    assert f"SEGMENT_BYTES = {SEGMENT_BYTES:,}" in section("Chunks")
    assert section("Chunks").count(f"{SEGMENT_BYTES // 2:,}") == 2
    assert f"*Block* K is the eight windows from {WINDOWS_OF_BLOCK}K on" in section("Chunks")
    limits = {row[0]: row[1] for row in cells("Limits")}
    assert limits["chunk"] == f"{segment.MAX_CHUNK_BYTES:,} bytes"


def worked(title: str) -> tuple[str, bytes]:
    """An example of the page, and the bytes that it shows."""
    (example,) = re.findall(r"^```\n(.*?)\n```$", section(title), re.M | re.S)
    data = b""
    for line in example.splitlines():
        assert int(line[:6], 16) == len(data)
        shown = line[8:55].strip()
        data += bytes(int(shown[5:])) if shown.startswith("00 x ") else bytes.fromhex(shown)
    return example, data


def test_worked_segment_is_the_golden_one() -> None:
    example, data = worked("A worked segment")
    assert example == make_store.worked_example()
    golden = make.undump((make.HERE / "segment.hex").read_text())
    assert golden.startswith(data)
    assert f"begin at byte {segment.parse_front(golden, 'golden').front_bytes}." in section("A worked segment")


def test_a_window_is_what_the_page_says() -> None:
    assert f"rows [{BLOCK_ROWS}b, {BLOCK_ROWS}b + {BLOCK_ROWS})" in section("The proof")
    assert f"modulo {POSITIONS:,}" in section("The proof")


def test_limits_are_those_of_the_code() -> None:
    assert f"at most {frame.MAX_FRAME_BYTES:,} bytes" in section("Overview and conventions")
    largest = (frame.MAX_FRAME_BYTES - frame.HEADER_LEN) // frame.ALIGNMENT * frame.ALIGNMENT
    limits = {row[0]: row[1] for row in cells("Limits")}
    assert limits["frame"] == f"{frame.MAX_FRAME_BYTES:,} bytes"
    assert limits["payload"] == f"{largest:,} bytes"
    assert limits["sections"] == str(frame.MAX_SECTIONS)


def test_worked_example_is_the_golden_frame() -> None:
    example, data = worked("A worked example")
    assert example == make.worked_example()
    assert data == make.undump((make.HERE / "rows.hex").read_text())
