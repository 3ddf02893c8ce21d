"""The bytes of a store never change: golden objects are compared whole, written and read, and bad ones are refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from crc32c import crc32c

from tests.golden import make, make_store
from tests.golden.test_golden import STREAM
from tests.parts import (
    Dropped,
    FileLog,
    Fold,
    Garbage,
    Manifest,
    Notes,
    Piece,
    Reading,
    SegmentKind,
    decode_chunk,
    entries_of,
    parse_front,
    prepare_store,
)
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit, parse_control
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import TableRows, Verdict
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.format.segment import check_chunk, check_tables, front_bytes_of
from torchrec_stream_ckpt.format.summary import Summary
from torchrec_stream_ckpt.inner import Catalog, open_store
from torchrec_stream_ckpt.maintain.fold import fold_interval
from torchrec_stream_ckpt.maintain.merge import merge
from torchrec_stream_ckpt.util.layout import STORE_FILE, claim_name


def golden(name: str) -> bytes:
    return make.undump((make.HERE / f"{name}.hex").read_text())


def golden_commit() -> Commit:
    commit = parse_control(golden("commit"))
    assert isinstance(commit, Commit)
    return commit


def read_segment(data: bytes) -> list[RowsView]:
    """As a restore does: the front, the tables, each chunk, then the notes."""
    front = parse_front(data, "golden")
    check_tables(front, make.SCHEMA, "golden")
    views = []
    for entry in entries_of(front.directory):
        chunk = memoryview(data)[entry.offset : entry.offset + entry.num_bytes]
        check_chunk(entry, chunk, "golden")
        views.append(decode_chunk(entry, chunk, make.SCHEMA, "golden"))
    if front.notes:
        Notes.from_json(front.notes, "golden")
    return views


def write_log(directory: Path) -> FileLog:
    log = FileLog(directory)
    log.prepare(1)
    writer = log.open_writer(1, 0, 0)
    for name in STREAM:
        writer.send(memoryview(golden(name)))
    assert len(writer.poll(60)) == len(STREAM)
    writer.close()
    return log


def test_the_materializer_makes_the_golden_objects_of_the_golden_log(tmp_path: Path) -> None:
    objects, commit = open_store(str(tmp_path / "store")), golden_commit()
    refs = fold_interval(
        write_log(tmp_path / "log"), objects, Interval(make.claim(), commit, commit.ranks[0], None), None
    )
    assert bytes(objects.read(make_store.INTERVAL_NAME)) == golden("segment")
    manifest = Manifest(commit, None, (refs,))
    assert manifest.to_bytes() == golden("manifest")
    lineage = Lineage()
    lineage.apply(make.claim())
    lineage.apply(commit)
    with ThreadPoolExecutor(1) as pool:
        merge(objects, lineage, [Piece(None, commit.id, refs, commit.ranks[0].chain)], pool)
    assert bytes(objects.read(make_store.FOLD_NAME.segment_name(0))) == golden("segment_fold")
    assert bytes(objects.read(make_store.FOLD_NAME.name)) == golden("fold")


def test_golden_segments_read_as_written() -> None:
    for name, kind in {"segment": SegmentKind.INTERVAL, "segment_fold": SegmentKind.FOLD}.items():
        front = parse_front(golden(name), name)
        assert (front.id.kind, front.id.job, front.id.marker, front.rows) == (kind, make.JOB, make_store.MARKER, 5)
        assert front_bytes_of(golden(name)[:128], name) == front.front_bytes
        items, users = read_segment(golden(name))
        order = np.argsort(make.item_arrays()[0])
        for found, expected in zip((items.ids, items.weights, *items.states), make.item_arrays(), strict=True):
            np.testing.assert_array_equal(found, expected[order])
        for found, expected in zip((users.ids, users.weights, *users.states), make.user_arrays(), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_golden_notes_are_what_hello_and_mark_said() -> None:
    notes = Notes.from_json(parse_front(golden("segment"), "golden").notes, "golden")
    assert notes == make_store.notes(make.frames())
    assert not parse_front(golden("segment_fold"), "golden").notes


def test_golden_json_objects_read_as_written() -> None:
    manifest = Manifest.from_bytes(golden("manifest"), "golden")
    assert (manifest.commit, manifest.previous) == (golden_commit(), None)
    ((ref,),) = manifest.segments
    segment = golden("segment")
    assert (ref.name, ref.num_bytes, ref.rows) == (make_store.INTERVAL_NAME, len(segment), 5)
    assert ref.header_crc == int.from_bytes(segment[124:128], "little") == crc32c(segment[:124])
    fold = Fold.from_bytes(golden("fold"), "golden")
    assert (fold.job, fold.start, fold.end) == (make.JOB, None, make_store.MARKER)
    assert Dropped.from_bytes(golden("dropped"), "golden").commit == golden_commit()
    garbage = Garbage.from_bytes(golden("garbage"), "golden")
    assert garbage.names == (make_store.INTERVAL_NAME, make_store.FOLD_NAME.name)
    assert not garbage.clocks
    timed = Garbage.from_bytes(golden("garbage_2"), "golden")
    assert (timed.clocks, timed.newest, timed.idle_s) == (
        {"0a1b2c3d time:[4026531834]": 86400.5},
        make_store.MARKER,
        60.0,
    )
    reading = Reading.from_bytes(golden("reading"), "golden")
    assert (reading.clocks, [unit.name for unit in reading.units]) == ({"store": 5.25}, [make_store.FOLD_NAME.name])
    assert not reading.store
    named = Reading.from_bytes(golden("reading_2"), "golden")
    assert (named.store, named.units, named.to_bytes()) == ("s3://bucket/job", reading.units, golden("reading_2"))
    verdict = Verdict.from_bytes(golden("verdict"), "golden")
    assert (verdict.job, verdict.marker, verdict.chain) == (make.JOB, make_store.MARKER, golden_commit().ranks[0].chain)
    assert verdict.rows == (TableRows(2**53 - 1, 64, 128),)


@pytest.mark.parametrize(
    ("field", "value"),
    [("marker", None), ("chain", -1), ("rows", [{"table": 1, "begin": 5, "end": 5}]), ("rows", [7]), ("job", "00")],
)
def test_a_verdict_that_nobody_writes_is_refused(field: str, value: object) -> None:
    raw = json.loads(golden("verdict"))
    raw["body"][field] = value
    raw["crc32c"] = f"{crc32c(canonical(raw['body'])):08x}"
    with pytest.raises(CorruptionError):
        Verdict.from_bytes(canonical(raw), "golden")


def test_golden_checksums_are_those_that_any_json_gives() -> None:
    for name in ("manifest", "fold", "dropped", "garbage", "pin", "verdict"):
        raw = json.loads(golden(name))
        body = json.dumps(raw["body"], sort_keys=True, separators=(",", ":")).encode()
        assert (raw["crc32c"], raw["format"], raw["kind"]) == (f"{crc32c(body):08x}", 1, name)


def test_a_store_says_its_format_and_holds_claims_as_the_log_has_them(tmp_path: Path) -> None:
    objects = open_store(str(tmp_path))
    prepare_store(objects)
    assert bytes(objects.read(STORE_FILE)) == b'{"format": 1}'
    objects.put(claim_name(make.JOB, 1), [golden("claim")])
    assert Catalog.load(objects, make.JOB).claim(1) == make.claim()


ENTRIES = "segment directory has impossible entries"
UNKNOWN = "segment header has an unknown version, kind or flag"
NOTES = "segment has unexpected notes, or lacks required ones"
IDS = "chunk's ids differ from its directory entry"
CHUNK = "chunk's checksum does not match"
BAD_SEGMENTS = {
    "short": "segment of 127 bytes is shorter than its header",
    "cut": "segment ends inside its directory",
    "magic": "not a segment of torchrec_stream_ckpt",
    "header_crc": "segment header's checksum does not match",
    "directory_crc": "segment directory's checksum does not match",
    "newer_version": "segment has format version 4, this program reads up to 3",
    "version_zero": UNKNOWN,
    "header_len": UNKNOWN,
    "kind": UNKNOWN,
    "last": UNKNOWN,
    "reserved": UNKNOWN,
    "reserved_tail": UNKNOWN,
    "notes_in_a_part": NOTES,
    "notes_in_a_fold": NOTES,
    "num_bytes": ENTRIES,
    "rows": ENTRIES,
    "offset_huge": ENTRIES,
    "offset_gap": ENTRIES,
    "chunk_empty": ENTRIES,
    "chunk_unaligned": ENTRIES,
    "chunk_huge": ENTRIES,
    "no_rows": ENTRIES,
    "more_rows_than_ids": ENTRIES,
    "first_negative": ENTRIES,
    "last_wraps": ENTRIES,
    "order": ENTRIES,
    "schema": "segment's schema differs from the CLAIM of its generation",
    "table": "segment has columns [0, +4) of table 2, which are not in the schema",
    "columns": "segment has columns [1, +4) of table 1, which are not in the schema",
    "no_columns": "segment has columns [0, +0) of table 1, which are not in the schema",
    "chunk_crc": CHUNK,
    "chunk_cut": CHUNK,
    "chunk_length": "chunk's length does not match its rows",
    "id_twice": IDS,
    "id_beyond_table": IDS,
    "id_other": IDS,
    "notes": "notes is not JSON: Expecting ',' delimiter: line 1 column 8 (char 7)",
}
ALTERED = "manifest was altered: its checksum does not match"
NOT_OURS = "not a manifest of this store"
BAD_MANIFESTS = {
    "empty": "not JSON: Expecting value: line 1 column 1 (char 0)",
    "cut": "not JSON: Expecting ',' delimiter: line 1 column 1283 (char 1282)",
    "crc": ALTERED,
    "spaces": ALTERED,
    "repeated_name": ALTERED,
    "newer_format": "manifest has format 2, this program reads up to 1",
    "format_true": NOT_OURS,
    "kind": NOT_OURS,
    "not_finite": "not JSON: Out of range float values are not JSON compliant",
    "field": "manifest has fields ['commit', 'more', 'previous', 'segments'], "
    "expected ['commit', 'previous', 'segments']",
    "base64": "COMMIT is not base64: string argument should contain only ASCII characters",
    "commit_is_a_claim": "this object does not hold a COMMIT",
    "previous": "1:1 is not before 1:1",
    "previous_of_another_generation": "0:9 is not before 1:1",
    "ranks": "manifest does not list the segments of every rank",
    "no_segments": "an interval or fold must have segments",
    "segment_field": "segment has fields ['front_bytes', 'header_crc', 'more', 'name', 'num_bytes', 'rows'], "
    "expected ['front_bytes', 'header_crc', 'name', 'num_bytes', 'rows']",
    "segment_negative": "segment.rows is -1, expected int",
    "segment_lengths": f"{make_store.INTERVAL_NAME} has impossible lengths",
    "segment_outside": f"names 'segments/../../etc/passwd', expected {make_store.INTERVAL_NAME}",
    "segment_of_another_job": f"names 'segments/{bytes(16).hex()}/g00000001-r00000-m00000001-p000.seg', "
    f"expected {make_store.INTERVAL_NAME}",
    "segment_twice": f"names '{make_store.INTERVAL_NAME}', expected {make_store.INTERVAL_NAME.replace('p000', 'p001')}",
}
BAD_FOLDS = {
    "job": "'000102030405060708090A0B0C0D0E0F' is not a job id",
    "no_end": "None is not before None",
    "end": "'1:01' is not the canonical form of marker 1:1",
    "order": "1:1 is not before 1:1",
    "segments_of_an_interval": f"names '{make_store.INTERVAL_NAME}', expected {make_store.FOLD_NAME.segment_name(0)}",
    "no_segments": "an interval or fold must have segments",
}


@pytest.mark.parametrize("name", sorted(BAD_SEGMENTS))
def test_bad_segments_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CorruptionError) as refused:
        read_segment(golden(f"bad_segment_{name}"))
    assert (refused.value.message, refused.value.where["name"]) == (BAD_SEGMENTS[name], "golden")


@pytest.mark.parametrize("name", sorted(BAD_MANIFESTS))
def test_bad_manifests_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CorruptionError) as refused:
        Manifest.from_bytes(golden(f"bad_manifest_{name}"), "golden")
    # From Python 3.12 on, json says the number as well.
    assert refused.value.message.removesuffix(": nan") == BAD_MANIFESTS[name]
    assert refused.value.where["name"] == "golden"


@pytest.mark.parametrize("name", sorted(BAD_FOLDS))
def test_bad_folds_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CorruptionError) as refused:
        Fold.from_bytes(golden(f"bad_fold_{name}"), "golden")
    assert (refused.value.message, refused.value.where["name"]) == (BAD_FOLDS[name], "golden")


def test_every_bad_object_is_tested() -> None:
    tested = {"segment": BAD_SEGMENTS, "manifest": BAD_MANIFESTS, "fold": BAD_FOLDS, "summary": BAD_SUMMARIES}
    names = {f"bad_{kind}_{name}" for kind, bad in tested.items() for name in bad}
    assert {name for name in make_store.all_files() if name.startswith("bad_")} == names


def test_golden_summary_holds_the_manifest_and_the_directory_of_the_marker() -> None:
    found = Summary.from_bytes(golden("summary"), "golden")
    assert found.job == make.JOB
    front = front_bytes_of(golden("segment"), "golden")
    assert {name: part.data for name, part in found.parts.items()} == {
        make_store.MANIFEST_NAME: golden("manifest"),
        make_store.INTERVAL_NAME: golden("segment")[:front],
    }
    assert found.parts[make_store.INTERVAL_NAME].num_bytes == len(golden("segment"))
    assert Summary(found.job, dict(reversed(found.parts.items()))).to_bytes() == golden("summary")


BAD_SUMMARIES = {
    "magic": "not a summary",
    "newer_version": "summary has format version 2, this program reads up to 1",
    "version_zero": "unknown version",
    "header_len": "unknown version",
    "job": "invalid part",
    "count": "expected 3",
    "reserved": "unknown version",
    "header_crc": "header's checksum",
    "short": "shorter than its header",
    "body_crc": "checksum does not match",
    "longer": "length in its header",
    "shorter": "unpacks to more than",
    "huge": "impossible length",
    "trailing_bytes": "cut short, or too long",
    "not_packed": "cannot be unpacked",
    "part_cut": "impossible length",
    "part_header_cut": "ends inside a part",
    "part_huge": "impossible length",
    "part_longer_than_object": "impossible length",
    "part_order": "invalid part",
    "part_name": "invalid part",
}


@pytest.mark.parametrize("name", BAD_SUMMARIES)
def test_bad_summaries_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CorruptionError, match=BAD_SUMMARIES[name]) as caught:
        Summary.from_bytes(golden(f"bad_summary_{name}"), "some/object")
    assert caught.value.where["name"] == "some/object"
