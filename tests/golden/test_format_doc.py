"""docs/format.md says what the code does: its tables and its example are compared, so it cannot drift."""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import pytest

from tests.golden import make
from torchrec_stream_ckpt.format import control, frame
from torchrec_stream_ckpt.types import RankEnd, StateSpec, TableShard, TableSpec

DOC = (Path(__file__).parents[2] / "docs" / "format.md").read_text()


def section(title: str) -> str:
    """What stands under a heading, up to the next one."""
    (found,) = re.findall(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", DOC, re.M | re.S)
    return found


def cells(title: str) -> list[list[str]]:
    """The body of the table under a heading."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip().strip("`") for cell in line.strip("|").split("|")] for line in lines[2:]]


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
        ("schema", control.Schema),
        ("table", TableSpec),
        ("state", StateSpec),
        ("shard", TableShard),
        ("scalars", control.TableScalars),
        ("rank end", RankEnd),
        ("dense file", control.DenseFile),
    ],
)
def test_every_field_of_a_json_payload_is_documented(title: str, record: type) -> None:
    assert {row[0] for row in cells(title)} == {item.name for item in fields(record)}


def test_limits_are_those_of_the_code() -> None:
    assert f"at most {frame.MAX_FRAME_BYTES:,} bytes" in section("Overview and conventions")
    largest = (frame.MAX_FRAME_BYTES - frame.HEADER_LEN) // frame.ALIGNMENT * frame.ALIGNMENT
    limits = {row[0]: row[1] for row in cells("Limits")}
    assert limits["frame"] == f"{frame.MAX_FRAME_BYTES:,} bytes"
    assert limits["payload"] == f"{largest:,} bytes"
    assert limits["sections"] == str(frame.MAX_SECTIONS)


def test_worked_example_is_the_golden_frame() -> None:
    (example,) = re.findall(r"^```\n(.*?)\n```$", section("A worked example"), re.M | re.S)
    assert example == make.worked_example()
    data = b""
    for line in example.splitlines():
        assert int(line[:6], 16) == len(data)
        shown = line[8:55].strip()
        data += bytes(int(shown[5:])) if shown.startswith("00 x ") else bytes.fromhex(shown)
    assert data == make.undump((make.HERE / "rows.hex").read_text())
