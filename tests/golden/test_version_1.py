"""Bytes of format version 1, which stay on file as they are: they are read, and records are copied byte for byte."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from tests.golden import make
from tests.parts import Dropped, FileLog, Fold, Manifest, Notes, parse_front, read_hello, read_mark
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark, Trim, parse_control
from torchrec_stream_ckpt.format.frame import Header, Kind, json_frame, parse_header, payload_of
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import read_stream

OLD = make.HERE / "v1"
STREAM = ("hello", "rows", "rows_slice", "mark")
SCHEMA = Schema(tuple(replace(table, id=None) for table in make.SCHEMA.tables))


def golden(name: str) -> bytes:
    return make.undump((OLD / f"{name}.hex").read_text())


@pytest.mark.parametrize("name", ["claim", "commit", "trim", "serve", "claim_signed", "commit_signed", "trim_signed"])
def test_a_control_record_is_copied_byte_for_byte(name: str) -> None:
    record = parse_control(golden(name), serving=True)
    assert record.version == 1
    assert record.to_frame() == golden(name)
    assert make.KEY.vouches_for(record) == name.endswith("_signed")


def test_a_stream_is_read_as_ever(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.prepare(1)
    writer = log.open_writer(1, 0, 0)
    for name in STREAM:
        writer.send(memoryview(golden(name)))
    assert len(writer.poll(60)) == len(STREAM)
    writer.close()
    claim, commit = parse_control(golden("claim")), parse_control(golden("commit"))
    assert isinstance(claim, Claim)
    assert isinstance(commit, Commit)
    assert read_hello(log, claim, commit, commit.ranks[0]).schema.crc == SCHEMA.crc
    found = list(read_stream(log, commit, commit.ranks[0]))
    assert [header.kind for header, _ in found] == [Kind.HELLO, Kind.ROWS, Kind.ROWS, Kind.MARK]
    mark = read_mark(*found[-1], commit, commit.ranks[0])
    assert (mark.rows, mark.proof) == (5, None)


def test_rows_are_those_of_the_new_version() -> None:
    for name in ("rows", "rows_slice"):
        old, new = golden(name), make.undump((make.HERE / f"{name}.hex").read_text())
        header = parse_header(old)
        assert bytes(payload_of(header, old)) == bytes(payload_of(parse_header(new), new))
        assert len(decode_rows(header, payload_of(header, old), SCHEMA.tables[header.table]).ids) == header.rows


def test_what_a_store_holds_is_read_as_ever() -> None:
    manifest, fold = Manifest.from_bytes(golden("manifest"), "m"), Fold.from_bytes(golden("fold"), "f")
    assert manifest.to_bytes() == golden("manifest")
    assert fold.to_bytes() == golden("fold")
    assert Dropped.from_bytes(golden("dropped"), "d").to_bytes() == golden("dropped")
    front = parse_front(golden("segment"), "s")
    notes = Notes.from_json(front.notes, "s")
    assert notes.mark.proof is None
    assert notes.to_json() == front.notes


@pytest.mark.parametrize(("kind", "name"), [(Kind.HELLO, "hello"), (Kind.MARK, "mark")])
def test_an_optional_field_in_a_frame_of_version_1_is_refused(kind: Kind, name: str) -> None:
    payload = payload_of(parse_header(new := make.undump((make.HERE / f"{name}.hex").read_text())), new)
    with pytest.raises(CorruptionError, match="has fields"):
        (Hello if kind is Kind.HELLO else Mark).from_json(payload, version=1)


def test_a_kind_of_version_2_in_a_frame_of_version_1_is_refused() -> None:
    frame = json_frame(Header(Kind.IDS, make.JOB, 1, version=1), b"{}")
    with pytest.raises(CorruptionError, match="unknown version, kind"):
        parse_header(frame)


def test_every_old_file_is_read_by_a_test() -> None:
    text = Path(__file__).read_text()
    unread = {path.stem for path in OLD.glob("*.hex") if not re.search(rf'"{path.stem}"', text)}
    assert unread <= {"segment_fold"}
    assert parse_front(golden("segment_fold"), "s").notes == b""
    assert isinstance(parse_control(golden("trim")), Trim)
