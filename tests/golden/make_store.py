"""Golden bytes of a store: what the materializer makes of the golden log, and ways in which it can be wrong.

``python tests/golden/make.py`` writes them together with those of the log.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

from crc32c import crc32c

from tests.golden import make
from tests.parts import (
    Dropped,
    Fold,
    Garbage,
    Manifest,
    Notes,
    Reading,
    SegmentId,
    SegmentKind,
    SegmentRef,
    lay_out,
    parse_front,
)
from torchrec_stream_ckpt.format.control import Commit, Hello, Mark, parse_control
from torchrec_stream_ckpt.format.frame import parse_header, payload_of
from torchrec_stream_ckpt.format.manifest import Pin, TableRows, Verdict
from torchrec_stream_ckpt.format.readings import ReadUnit
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.format.segment import ENTRY, HEADER_LEN
from torchrec_stream_ckpt.format.summary import HEADER_LEN as SUMMARY_HEADER_LEN
from torchrec_stream_ckpt.format.summary import Part, Summary
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.util.layout import FoldName, StoreSegment, manifest_name
from torchrec_stream_ckpt.util.types import MarkerId

MARKER = MarkerId(1, make.MARKER)
INTERVAL = SegmentId(SegmentKind.INTERVAL, make.JOB, MARKER, 0, 0)
FOLD = SegmentId(SegmentKind.FOLD, make.JOB, MARKER, 0, 0)
INTERVAL_NAME = StoreSegment(make.JOB, MARKER, 0, 0).name
FOLD_NAME = FoldName(make.JOB, MARKER, None)
MANIFEST_NAME = manifest_name(make.JOB, MARKER)
TIME_S = 1_700_000_300.0

# (size, name of the field, how to show it) in the order of docs/format.md.
HEADER_FIELDS = (
    (4, "magic", "ascii"),
    (2, "version", "int"),
    (2, "header_len", "int"),
    (1, "kind", "kind"),
    (1, "last", "int"),
    (2, "reserved", "int"),
    (16, "job", ""),
    (4, "generation", "int"),
    (4, "rank", "int"),
    (8, "marker", "int"),
    (4, "part", "int"),
    (4, "chunks", "int"),
    (4, "notes_len", "int"),
    (4, "directory_crc", ""),
    (8, "num_bytes", "int"),
    (8, "rows", "int"),
    (4, "schema_crc", ""),
    (4, "chain", ""),
    (40, "reserved", "int"),
    (4, "header_crc", ""),
)
SUMMARY_FIELDS = (
    (4, "magic"),
    (2, "version"),
    (2, "header_len"),
    (16, "job"),
    (4, "parts"),
    (4, "body_crc"),
    (8, "body_len"),
    (20, "reserved"),
    (4, "header_crc"),
)
ENTRY_FIELDS = tuple((ENTRY[name].itemsize, name) for name in ENTRY.names or ())


def notes(frames: dict[str, bytes]) -> Notes:
    hello = Hello.from_json(payload_of(parse_header(frames["hello"]), frames["hello"]))
    return Notes(hello.shards, Mark.from_json(payload_of(parse_header(frames["mark"]), frames["mark"])))


def segment(frames: dict[str, bytes], which: SegmentId) -> tuple[bytes, SegmentRef]:
    """The rows of the golden frames, as an interval or as a base."""
    rows = RowSorter(make.SCHEMA)
    for name in ("rows", "rows_slice"):
        header = parse_header(frames[name])
        view = decode_rows(header, payload_of(header, frames[name]), make.SCHEMA.tables[header.table])
        rows.add(header.table, header.col0, header.cols, view)
    is_interval = which.kind is SegmentKind.INTERVAL
    text = notes(frames).to_json() if is_interval else b""
    parts, front_bytes, crc = lay_out(
        which, list(rows.chunks()), last=True, schema_crc=make.SCHEMA.crc, notes=text, version=2 if text else 1
    )
    data = b"".join(bytes(part) for part in parts)
    name = INTERVAL_NAME if is_interval else FOLD_NAME.segment_name(0)
    return data, SegmentRef(name, len(data), front_bytes, crc, 5)


def objects() -> dict[str, bytes]:
    """One object of every kind; name of the golden file -> bytes."""
    frames = make.frames()
    commit = parse_control(frames["commit"])
    assert isinstance(commit, Commit)
    chain = commit.ranks[0].chain
    interval, ref = segment(frames, replace(INTERVAL, chain=chain))
    rows, fold_ref = segment(frames, FOLD)
    return {
        "segment": interval,
        "segment_fold": rows,
        "manifest": Manifest(commit, None, ((ref,),)).to_bytes(),
        "fold": Fold(make.JOB, None, MARKER, chain, (fold_ref,)).to_bytes(),
        "dropped": Dropped(commit, None, TIME_S).to_bytes(),
        "garbage": Garbage(TIME_S, (INTERVAL_NAME, FOLD_NAME.name)).to_bytes(),
        "garbage_2": Garbage(
            TIME_S, (INTERVAL_NAME,), {"0a1b2c3d time:[4026531834]": 86400.5}, MARKER, 60.0
        ).to_bytes(),
        "pin": Pin(TIME_S).to_bytes(),
        "reading": Reading(TIME_S, {"store": 5.25}, (ReadUnit(FOLD_NAME.name, 0x1A2B3C4D, 4096),)).to_bytes(),
        "reading_2": Reading(
            TIME_S, {"store s3://bucket/job": 5.25}, (ReadUnit(FOLD_NAME.name, 0x1A2B3C4D, 4096),), "s3://bucket/job"
        ).to_bytes(),
        "verdict": Verdict(make.JOB, MARKER, chain, (TableRows(2**53 - 1, 64, 128),), TIME_S).to_bytes(),
        "summary": summary(interval, ref, Manifest(commit, None, ((ref,),)).to_bytes()),
    }


def summary(interval: bytes, ref: SegmentRef, manifest: bytes) -> bytes:
    """Of the golden marker alone."""
    front = Part(ref.num_bytes, interval[: ref.front_bytes])
    return Summary(make.JOB, {MANIFEST_NAME: Part(len(manifest), manifest), INTERVAL_NAME: front}).to_bytes()


def bad_summaries(good: bytes) -> dict[str, bytes]:
    """Ways in which the golden summary can be wrong."""
    body = zlib.decompress(good[SUMMARY_HEADER_LEN:])

    def packed(body: bytes, **fields: tuple[int, bytes]) -> bytes:
        data = bytearray(good[:SUMMARY_HEADER_LEN])
        data[28:32], data[32:40] = crc32c(body).to_bytes(4, "little"), len(body).to_bytes(8, "little")
        for at, value in fields.values():
            data[at : at + len(value)] = value
        data[60:64] = crc32c(bytes(data[:60])).to_bytes(4, "little")
        return bytes(data) + zlib.compress(body, 6)

    wrong = {
        "magic": packed(body, magic=(0, b"TRSS")),
        "newer_version": packed(body, version=(4, b"\x02\0")),
        "version_zero": packed(body, version=(4, b"\0\0")),
        "header_len": packed(body, header_len=(6, b"\x3f\0")),
        "job": packed(body, job=(8, bytes(16))),
        "count": packed(body, count=(24, b"\x03\0\0\0")),
        "reserved": packed(body, reserved=(40, b"\x01")),
        "header_crc": good[:60] + bytes([good[60] ^ 1]) + good[61:],
        "short": good[:63],
        "body_crc": packed(body[:-1] + bytes([body[-1] ^ 1]), crc=(28, crc32c(body).to_bytes(4, "little"))),
        "longer": packed(body, length=(32, (len(body) + 1).to_bytes(8, "little"))),
        "shorter": packed(body, length=(32, (len(body) - 1).to_bytes(8, "little"))),
        "huge": packed(body, length=(32, (2**40).to_bytes(8, "little"))),
        "trailing_bytes": good + b"\0",
        "not_packed": good[:SUMMARY_HEADER_LEN] + body,
        "part_cut": packed(body[:-1]),
        "part_header_cut": packed(body + b"\0" * 5),
        "part_huge": packed(body[:8] + b"\xff\xff\xff\xff" + body[12:]),
        "part_longer_than_object": packed(bytes(8) + body[8:]),
        "part_order": packed(body + body),
        "part_name": packed(body.replace(b"manifests/", b"manifestz/")),
    }
    return {f"bad_summary_{name}": data for name, data in wrong.items()}


def field_at(name: str) -> int:
    """Where a field of the segment header begins."""
    sizes = [size for size, _, _ in HEADER_FIELDS]
    return sum(sizes[: [each[1] for each in HEADER_FIELDS].index(name)])


def entry_at(number: int, name: str) -> int:
    """Where a field of a directory entry begins."""
    names = [each[1] for each in ENTRY_FIELDS]
    return HEADER_LEN + ENTRY.itemsize * number + sum(size for size, _ in ENTRY_FIELDS[: names.index(name)])


def sealed(data: bytearray) -> None:
    """Make the checksums of directory and header right again, where they are whole."""
    chunks, notes_len = struct.unpack_from("<II", data, field_at("chunks"))
    described = memoryview(data)[HEADER_LEN : HEADER_LEN + chunks * ENTRY.itemsize + notes_len]
    struct.pack_into("<I", data, field_at("directory_crc"), crc32c(described))
    described.release()
    struct.pack_into("<I", data, 124, crc32c(memoryview(data)[:124]))


def put(data: bytearray, layout: str, at: int, *values: int) -> None:
    struct.pack_into(f"<{layout}", data, at, *values)
    sealed(data)


def _put_id(data: bytearray, place: int, value: int, entry: int = 1) -> None:
    """Overwrite an id of a chunk and make its checksum, and those above it, right again."""
    found = parse_front(bytes(data), "golden").directory[entry]
    begin, end = int(found["offset"]), int(found["offset"]) + int(found["num_bytes"])
    struct.pack_into("<q", data, begin + 8 * place, value)
    put(data, "I", entry_at(entry, "crc"), crc32c(memoryview(data)[begin:end]))


def _swap_entries(data: bytearray) -> None:
    """The tables' order; offsets stay where they are."""
    first, second = struct.unpack_from("<I", data, entry_at(0, "table")), entry_at(1, "table")
    struct.pack_into("<I", data, entry_at(0, "table"), 1)
    put(data, "I", second, *first)


def _shorten_chunk(data: bytearray) -> None:
    """The last chunk lacks its last section; the directory knows."""
    del data[-64:]
    (offset,) = struct.unpack_from("<Q", data, entry_at(1, "offset"))
    put(data, "II", entry_at(1, "num_bytes"), len(data) - offset, crc32c(memoryview(data)[offset:]))
    put(data, "Q", field_at("num_bytes"), len(data))


def bad_segments(good: bytes) -> dict[str, bytes]:
    """Ways in which the golden segment can be wrong, one each; all but the first five have good checksums."""
    wrong: dict[str, Callable[[bytearray], object]] = {
        "short": lambda data: data.__delitem__(slice(127, None)),
        "cut": lambda data: data.__delitem__(slice(200, None)),
        "magic": lambda data: data.__setitem__(slice(0, 4), b"TRSC"),
        "header_crc": lambda data: data.__setitem__(40, data[40] ^ 1),
        "directory_crc": lambda data: data.__setitem__(HEADER_LEN, data[HEADER_LEN] ^ 1),
        "newer_version": lambda data: put(data, "H", 4, 4),
        "version_zero": lambda data: put(data, "H", 4, 0),
        "header_len": lambda data: put(data, "H", 6, 64),
        "kind": lambda data: put(data, "B", 8, 3),
        "last": lambda data: put(data, "B", 9, 2),
        "reserved": lambda data: put(data, "H", 10, 1),
        "reserved_tail": lambda data: put(data, "B", 123, 1),
        "notes_in_a_part": lambda data: put(data, "B", 9, 0),
        "notes_in_a_fold": lambda data: put(data, "B", 8, SegmentKind.FOLD),
        "num_bytes": lambda data: put(data, "Q", field_at("num_bytes"), len(data) + 64),
        "rows": lambda data: put(data, "Q", field_at("rows"), 2**64 - 1),
        "offset_huge": lambda data: put(data, "Q", entry_at(0, "offset"), 2**64 - 64),
        "offset_gap": lambda data: put(data, "Q", entry_at(1, "offset"), len(data)),
        "chunk_empty": lambda data: put(data, "I", entry_at(1, "num_bytes"), 0),
        "chunk_unaligned": lambda data: put(data, "I", entry_at(1, "num_bytes"), 191),
        "chunk_huge": lambda data: put(data, "I", entry_at(1, "num_bytes"), 2**32 - 64),
        "no_rows": lambda data: put(data, "I", entry_at(1, "rows"), 0),
        "more_rows_than_ids": lambda data: put(data, "I", entry_at(1, "rows"), 2**32 - 1),
        "first_negative": lambda data: put(data, "q", entry_at(0, "first"), -1),
        "last_wraps": lambda data: put(data, "q", entry_at(1, "last"), -(2**63)),
        "order": _swap_entries,
        "schema": lambda data: put(data, "I", field_at("schema_crc"), 1),
        "table": lambda data: put(data, "I", entry_at(1, "table"), 2),
        "columns": lambda data: put(data, "I", entry_at(1, "col0"), 1),
        "no_columns": lambda data: put(data, "I", entry_at(1, "cols"), 0),
        "chunk_crc": lambda data: data.__setitem__(len(data) - 1, data[-1] ^ 1),
        "chunk_cut": lambda data: data.__delitem__(slice(len(data) - 64, None)),
        "chunk_length": _shorten_chunk,
        "id_twice": lambda data: _put_id(data, 1, 0, entry=0),
        "id_beyond_table": lambda data: (_put_id(data, 1, 4), put(data, "q", entry_at(1, "last"), 4)),
        "id_other": lambda data: _put_id(data, 0, 0),
        "notes": lambda data: put(data, "B", HEADER_LEN + 2 * ENTRY.itemsize, ord("[")),
    }
    files = {}
    for name, damage in wrong.items():
        data = bytearray(good)
        damage(data)
        files[f"bad_segment_{name}"] = bytes(data)
    return files


def resealed(raw: dict[str, Any]) -> bytes:
    """A JSON object of the store, its checksum made right again."""
    return canonical({**raw, "crc32c": f"{crc32c(canonical(raw['body'])):08x}"})


def altered(good: bytes, *path: str | int, value: object) -> bytes:
    """The object with another value at a place of its body, checksum included."""
    raw = json.loads(good)
    place = raw["body"]
    for step in path[:-1]:
        place = place[step]
    place[path[-1]] = value
    return resealed(raw)


def bad_manifests(good: bytes) -> dict[str, bytes]:
    """Ways in which the golden manifest can be wrong, one each; all but the first five have a good checksum."""
    raw = json.loads(good)
    ref = raw["body"]["segments"][0][0]
    claim = json.loads(altered(good, "commit", value=make.base64_of(make.frames()["claim"])))
    other = StoreSegment(bytes(16), MARKER, 0, 0).name
    wrong = {
        "empty": b"",
        "cut": good[:-1],
        "crc": good.replace(b'"rows":5', b'"rows":6'),
        "spaces": good.replace(b'"format":1', b'"format": 1'),
        "repeated_name": good.replace(b'"format":1', b'"format":1,"format":1'),
        "newer_format": canonical({**raw, "format": 2, "body": None}),
        "format_true": canonical({**raw, "format": True}),
        "kind": canonical({**raw, "kind": "fold"}),
        "not_finite": good.replace(b'"rows":5', b'"rows":NaN'),
        "field": resealed({**raw, "body": {**raw["body"], "more": 1}}),
        "base64": altered(good, "commit", value="\u00e9"),
        "commit_is_a_claim": resealed(claim),
        "previous": altered(good, "previous", value="1:1"),
        "previous_of_another_generation": altered(good, "previous", value="0:9"),
        "ranks": altered(good, "segments", value=[[ref], [{**ref, "name": StoreSegment(make.JOB, MARKER, 1, 0).name}]]),
        "no_segments": altered(good, "segments", 0, value=[]),
        "segment_field": altered(good, "segments", 0, 0, value={**ref, "more": 1}),
        "segment_negative": altered(good, "segments", 0, 0, "rows", value=-1),
        "segment_lengths": altered(good, "segments", 0, 0, "front_bytes", value=ref["num_bytes"] + 1),
        "segment_outside": altered(good, "segments", 0, 0, "name", value="segments/../../etc/passwd"),
        "segment_of_another_job": altered(good, "segments", 0, 0, "name", value=other),
        "segment_twice": altered(good, "segments", 0, value=[ref, ref]),
    }
    return {f"bad_manifest_{name}": data for name, data in wrong.items()}


def bad_folds(good: bytes) -> dict[str, bytes]:
    """Ways in which the golden fold can be wrong that a manifest cannot."""
    interval = asdict(SegmentRef(INTERVAL_NAME, 1024, 256, 0, 1))
    wrong = {
        "job": altered(good, "job", value=make.JOB.hex().upper()),
        "no_end": altered(good, "end", value=None),
        "end": altered(good, "end", value="1:01"),
        "order": altered(good, "start", value=str(MARKER)),
        "segments_of_an_interval": altered(good, "segments", value=[interval]),
        "no_segments": altered(good, "segments", value=[]),
    }
    return {f"bad_fold_{name}": data for name, data in wrong.items()}


def all_files() -> dict[str, bytes]:
    """Every golden file of the store by its name without suffix."""
    good = objects()
    bad = bad_segments(good["segment"]) | bad_manifests(good["manifest"]) | bad_folds(good["fold"])
    return good | bad | bad_summaries(good["summary"])


def worked_example() -> str:
    """Header and first directory entry of the golden segment, a line a field, as docs/format.md shows them."""
    data, at, lines = objects()["segment"], 0, []

    def line(size: int, text: str) -> None:
        nonlocal at
        piece = data[at : at + size]
        shown = f"00 x {size}" if size > 16 and not any(piece) else piece.hex(" ", 1)
        lines.append(f"{at:06x}  {shown:47}  {text}".rstrip())
        at += size

    for size, name, show in HEADER_FIELDS:
        value = int.from_bytes(data[at : at + size], "little")
        words = {"int": str(value), "ascii": "TRSS", "kind": f"{value}: INTERVAL"}
        line(size, f"{name} {words.get(show, '')}".rstrip())
    for size, name in ENTRY_FIELDS:
        value = int.from_bytes(data[at : at + size], "little")
        line(size, f"chunk 0: {name}" + ("" if name == "crc" else f" {value}"))
    return "\n".join(lines)
