"""Golden bytes of the format: a whole job of one rank and two tables, and ways a frame can be wrong.

Run ``python -m tests.golden.make`` only after an intended change of the format: it overwrites the files that
the tests compare with, and the worked example in docs/format.md must then follow.
Those of older versions, in folders of their own, stay as they are.
"""

from __future__ import annotations

import base64
import struct
from collections.abc import Callable
from dataclasses import astuple, replace
from pathlib import Path

import numpy as np
from crc32c import crc32c

from tests.parts import CommitKey
from torchrec_stream_ckpt.extras.follower.serving import served_schema
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.claim_features import KNOWN, ObjectEnd
from torchrec_stream_ckpt.format.claim_references import brief
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark, Serve, TableScalars, Trim
from torchrec_stream_ckpt.format.dense_files import DenseFile, listed
from torchrec_stream_ckpt.format.end_note import End, Note, Outcome
from torchrec_stream_ckpt.format.entry_digests import DenseProof, scalars_digest
from torchrec_stream_ckpt.format.folding import Folded, snapshot_of
from torchrec_stream_ckpt.format.frame import HEADER_LEN, NEWEST_VERSION, Header, Kind, json_frame, seal, seal_pad
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import Proof, ReplicatedProof, Window
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.record import meta_of
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, RowLayout, Section
from torchrec_stream_ckpt.format.schema import Schema, canonical
from torchrec_stream_ckpt.format.snapshot import Base
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, RankEnd, StateSpec, TableShard, TableSpec

HERE = Path(__file__).parent
JOB = bytes.fromhex("000102030405060708090a0b0c0d0e0f")
NONCE = "5f" * 16
INCARNATION = "1c" * 16
ADAM = (StateSpec("exp_avg", "float32", False), StateSpec("exp_avg_sq", "float32", False))
ITEM = TableSpec("sparse.ebc.t_item", 6, 2, "bfloat16", "adam", ADAM, 7_000_000_000_000_001)
ROWWISE = (StateSpec("momentum1", "float32", True),)
USER = TableSpec("sparse.ebc.t_user", 4, 4, "float32", "exact_rowwise_adagrad", ROWWISE, 2)
SCHEMA = Schema((ITEM, USER))
SHARDS = (TableShard(0, 0, 6, 1, 1), TableShard(1, 0, 4, 0, 4))
AGE = TableSpec("sparse.ebc.t_age", 3, 4, "float32", "exact_rowwise_adagrad", ROWWISE, 3)
CHANGED = Schema((TOMBSTONE, replace(USER, name="sparse.ebc.t_member"), AGE))
CHANGED_SHARDS = (TableShard(1, 0, 4, 0, 4), TableShard(2, 0, 3, 0, 4))
STEP, MARKER = 100, 1
PROOF = Proof.of(
    Window(65_000, 1_000),
    np.arange(1, 6, dtype=np.uint64),
    [ReplicatedProof.of("model.sparse.ebc.embedding_bags.t_dp.weight", 70, 4, np.arange(6, 8, dtype=np.uint64))],
)
"""Of no rows in particular."""
KEY = CommitKey(bytes(range(32)))


def rows_payload(table: TableSpec, cols: int, arrays: list[np.ndarray]) -> tuple[Header, bytearray]:
    """The part of a header that describes rows, and the frame's bytes with the header left open."""
    layout = RowLayout.of(table, cols)
    offsets, length = layout.offsets(len(arrays[0]))
    frame = bytearray(HEADER_LEN + length)
    for section, offset, array in zip(layout.sections, offsets, arrays, strict=True):
        data = np.ascontiguousarray(array, NUMPY_DTYPES[section.dtype]).tobytes()
        assert len(data) == len(arrays[0]) * section.row_bytes
        frame[HEADER_LEN + offset : HEADER_LEN + offset + len(data)] = data
    header = Header(
        Kind.ROWS,
        JOB,
        1,
        step=STEP,
        marker=MARKER,
        table=SCHEMA.index()[table.name],
        rows=len(arrays[0]),
        cols=cols,
        schema_crc=SCHEMA.crc,
        dtypes=tuple(section.code for section in layout.sections),
        section_offsets=offsets,
        payload_len=length,
    )
    return header, frame


def user_arrays() -> list[np.ndarray]:
    """Rows 1 and 3 of t_user: ids, weights, momentum1."""
    weights = np.array([[0.5, -1.0, 2.0, 0.25], [1.5, 0.0, -0.125, 8.0]], np.float32)
    return [np.array([1, 3]), weights, np.array([0.75, 3.0], np.float32)]


def item_arrays() -> list[np.ndarray]:
    """Rows 5, 0 and 2 of column 1 of t_item: ids, bits of the weights, both moments."""
    weights = np.array([[0x3F80], [0xBF00], [0x4049]], np.uint16)
    moment = np.array([[0.1], [-0.2], [0.3]], np.float32)
    return [np.array([5, 0, 2]), weights, moment, moment * moment]


def frames() -> dict[str, bytes]:
    """One frame of every kind, as rank 0 of generation 1 writes them; name -> bytes."""
    hello = Header(Kind.HELLO, JOB, 1, schema_crc=SCHEMA.crc)
    stream = {"hello": bytes(json_frame(hello, Hello(1, SCHEMA, SHARDS).to_json()))}
    previous = hello
    for name, (header, frame) in {
        "rows": rows_payload(USER, 4, user_arrays()),
        "rows_slice": rows_payload(ITEM, 1, item_arrays()),
    }.items():
        header.col0 = 1 if name == "rows_slice" else 0
        header.seq, header.chain = previous.seq + 1, previous.header_crc
        seal(header, frame)
        stream[name], previous = bytes(frame), header
    ids = Header(Kind.IDS, JOB, 1, seq=3, step=STEP, marker=MARKER, table=1, schema_crc=SCHEMA.crc)
    ids.chain = previous.header_crc
    frame = ids_frame(ids)
    seal(ids, frame)
    stream["ids"], previous = bytes(frame), ids
    num_bytes = sum(map(len, stream.values()))
    scalars = (
        TableScalars(0, 0, 6, 1, 1, 100, 1.0, 0.05, 0.05),
        TableScalars(1, 0, 4, 0, 4, 100, 1.0, 0.05, 0.025),
    )
    mark = Header(Kind.MARK, JOB, 1, seq=4, step=STEP, marker=MARKER, schema_crc=SCHEMA.crc, chain=previous.header_crc)
    stream["mark"] = bytes(json_frame(mark, Mark(5, num_bytes, scalars, PROOF).to_json()))
    end = RankEnd(0, 0, 0, num_bytes + len(stream["mark"]), 5, mark.header_crc, 5, num_bytes)
    signed = {
        "claim_signed": KEY.sign(claim()).to_frame(),
        "commit_signed": KEY.sign(commit(end)).to_frame(),
        "trim_signed": KEY.sign(trim()).to_frame(),
    }
    control = {"claim": claim().to_frame(), "commit": commit(end).to_frame(), "trim": trim().to_frame()}
    control["serve"] = serve().to_frame()
    control["commit_listed"] = commit_listed(end).to_frame()
    control["claim_onward"] = claim_onward().to_frame()
    control["claim_changed"] = claim_changed().to_frame()
    changed = Header(Kind.HELLO, JOB, 3, schema_crc=CHANGED.crc, version=Hello(1, CHANGED, ()).version)
    stream["hello_changed"] = bytes(json_frame(changed, Hello(1, CHANGED, CHANGED_SHARDS).to_json()))
    stream |= version_4(mark, scalars)
    control["claim_announcing"] = claim_announcing().to_frame()
    control["commit_objects"] = replace(commit(end), generation=4, nonce="62" * 16, ranks=(of_objects(end),)).to_frame()
    control |= {"end": end_record().to_frame(), "note": note().to_frame()}
    signed |= {"end_signed": KEY.sign(end_record()).to_frame(), "note_signed": KEY.sign(note()).to_frame()}
    (part,) = snapshot_of(folded(end), INCARNATION)
    control |= {"snapshot": part.to_frame(), "base": Base(JOB, 1024).to_frame()}
    signed["snapshot_signed"] = KEY.sign(part).to_frame()
    return stream | control | signed


def version_4(mark: Header, scalars: tuple[TableScalars, ...]) -> dict[str, bytes]:
    """What may follow on the golden MARK in a generation that announces it: padding, and a MARK with digests."""
    pad = Header(Kind.PAD, JOB, 1, seq=5, schema_crc=SCHEMA.crc, chain=mark.header_crc, version=NEWEST_VERSION)
    pad.payload_len = 64
    frame = bytearray(HEADER_LEN + pad.payload_len)
    seal_pad(pad, memoryview(frame))
    found = {"pad": bytes(frame)}
    said = Mark(5, 2_048, scalars, PROOF, dense_proof(scalars))
    header = Header(Kind.MARK, JOB, 1, seq=6, step=STEP + 1, marker=MARKER + 1, schema_crc=SCHEMA.crc)
    header.chain, header.version = pad.header_crc, said.version
    return found | {"mark_dense": bytes(json_frame(header, said.to_json()))}


def dense_proof(scalars: tuple[TableScalars, ...]) -> DenseProof:
    """Digests of no entries in particular, and the one of the scalars."""
    digests = {"model.over.weight": 2**64 - 1, "shared.seed": 1, "rank0.random": 2**32}
    return DenseProof.of(digests, scalars_digest(map(astuple, scalars)))


def of_objects(end: RankEnd) -> RankEnd:
    """The same end in a log of objects: its stream ends in byte 4096 of object 3."""
    return replace(end, begin=ObjectEnd(0, 0).pack(), end=ObjectEnd(3, 4096).pack())


def claim_announcing() -> Claim:
    """Opens a generation with all that version 4 has."""
    return brief(replace(claim(), generation=4, nonce="62" * 16, announces=KNOWN), {})


def id_events() -> list[np.ndarray]:
    """Row 3 of t_user passes from one raw id to another: evicted (2), then assigned (1)."""
    return [np.array([3, 3]), np.array([-5, 2**40]), np.array([2, 1], np.uint8)]


def ids_frame(header: Header) -> bytearray:
    """An IDS frame, unsealed: each section at a multiple of 64 bytes."""
    header.rows, header.payload_len, header.section_offsets = 2, 192, (0, 64, 128)
    header.dtypes = tuple(Section(name, True, 1).code for name in ("int64", "int64", "uint8"))
    return bytearray(HEADER_LEN) + b"".join(each.tobytes().ljust(64, b"\0") for each in id_events())


def claim() -> Claim:
    layout = RankShards.of([SHARDS])
    return Claim(JOB, 1, NONCE, "", None, 1, 1, INCARNATION, SCHEMA, (0, 1), 1_700_000_000.0, layout=layout)


def claim_onward() -> Claim:
    """The job was restarted from its marker, and nothing else is new."""
    more = {"nonce": "60" * 16, "parent": MarkerId(1, MARKER), "swept": (), "time_s": 1_700_000_300.0}
    return brief(replace(claim(), generation=2, **more), {1: claim()})  # type: ignore[arg-type]


def claim_changed() -> Claim:
    """The model has changed: t_item is gone, t_user has another name, and t_age is new."""
    more = {"nonce": "61" * 16, "parent": MarkerId(1, MARKER), "swept": (0, 2), "time_s": 1_700_000_600.0}
    layout = RankShards.of([CHANGED_SHARDS])
    said = canonical({"added": [AGE.name], "dropped": [ITEM.name], "renamed": {USER.name: "sparse.ebc.t_member"}})
    changed = replace(claim(), generation=3, schema=CHANGED, layout=layout, changes=ClaimChanges.of(said), **more)  # type: ignore[arg-type]
    return brief(changed, {1: claim()})


def commit(end: RankEnd) -> Commit:
    dense = (DenseFile(".metadata", 4, "6d" * 32), DenseFile("__0_0.distcp", 8, "0d" * 32))
    folder = dense_name(JOB, MarkerId(1, MARKER))
    return Commit(JOB, 1, NONCE, MARKER, STEP, (end,), folder, dense, 1_700_000_100.5, "", meta=meta_of({"auc": 0.75}))


def commit_listed(end: RankEnd) -> Commit:
    """The same marker, whose dense files stand in a list."""
    said, _ = listed(commit(end).dense_files)
    return replace(commit(end), dense_files=(), dense_list=said)


def serve() -> Serve:
    """Opens a serving stream of the same tables."""
    return Serve(JOB, 1, NONCE, "", None, 1, 1, INCARNATION, served_schema(SCHEMA, "int8"), (0, 1), 1_700_000_000.0)


def trim() -> Trim:
    return Trim(JOB, 1, MARKER, (MarkerId(1, MARKER),), "s3://bucket/job", NONCE, 1_700_000_200.0)


def end_record() -> End:
    """The trainer has failed after its marker."""
    return End(JOB, 1, NONCE, STEP + 7, Outcome.FAILED, "ValueError", 1_700_000_150.0)


def note() -> Note:
    """Somebody evaluated the marker."""
    return Note(JOB, 1, MARKER, meta_of({"auc": 0.801, "run": "nightly"}), NONCE, 1_700_000_160.0)


def folded(end: RankEnd) -> Folded:
    """All of these control records, one after the other."""
    records = [claim(), commit(end), trim(), end_record(), note()]
    frames = [record.to_frame() for record in records]
    return Folded(Lineage.of(records), sum(map(len, frames[:-1])), crc32c(frames[-1]))


def bad_frames(good: bytes) -> dict[str, bytes]:
    """Ways in which the golden ROWS frame can be wrong, one each; all but the first seven have good checksums."""
    wrong: dict[str, Callable[[bytearray], object]] = {
        "bad_empty": lambda frame: frame.clear(),
        "bad_short_header": lambda frame: frame.__delitem__(slice(127, None)),
        "bad_truncated": lambda frame: frame.__delitem__(slice(len(frame) - 64, None)),
        "bad_trailing_bytes": lambda frame: frame.extend(bytes(64)),
        "bad_magic": lambda frame: frame.__setitem__(slice(0, 4), b"LTX1"),
        "bad_header_crc": lambda frame: frame.__setitem__(40, frame[40] ^ 1),
        "bad_payload_crc": lambda frame: frame.__setitem__(HEADER_LEN, frame[HEADER_LEN] ^ 1),
        "bad_newer_version": lambda frame: _put(frame, "H", 4, 5),
        "bad_version_zero": lambda frame: _put(frame, "H", 4, 0),
        "bad_header_len": lambda frame: _put(frame, "H", 6, 192),
        "bad_kind": lambda frame: _put(frame, "B", 8, 99),
        "bad_flag": lambda frame: _put(frame, "B", 9, 1),
        "bad_codec": lambda frame: _put(frame, "B", 10, 1),
        "bad_reserved": lambda frame: _put(frame, "I", 120, 1),
        "bad_section_count": lambda frame: _put(frame, "B", 11, 9),
        "bad_uncounted_section": lambda frame: _put(frame, "B", 83, 1),
        "bad_payload_unaligned": lambda frame: _put(frame, "II", 104, 191, 191),
        "bad_raw_len": lambda frame: _put(frame, "I", 108, 128),
        "bad_payload_huge": lambda frame: _put(frame, "II", 104, 999_936, 999_936),
        "bad_section_overlap": lambda frame: _put(frame, "H", 90, 0),
        "bad_section_beyond_end": lambda frame: _put(frame, "H", 92, 65_535),
        "bad_section_dtype": lambda frame: _put(frame, "B", 81, 2),
        "bad_section_per_row": lambda frame: _put(frame, "B", 82, 1),
        "bad_rows_count": lambda frame: _put(frame, "I", 64, 2**32 - 1),
        "bad_columns": lambda frame: _put(frame, "I", 68, 1),
        "bad_no_columns": lambda frame: _put(frame, "I", 72, 0),
        "bad_id_beyond_table": lambda frame: _put_id(frame, 4),
        "bad_id_negative": lambda frame: _put_id(frame, -1),
    }
    frames = {}
    for name, damage in wrong.items():
        frame = bytearray(good)
        damage(frame)
        frames[name] = bytes(frame)
    return frames


def bad_version_4(good: dict[str, bytes]) -> dict[str, bytes]:
    """Ways in which frames of version 4 can be wrong, one each; all checksums are good."""
    digests = dense_proof(()).digests()
    reverse = np.array(sorted(digests.items(), reverse=True), "<u8").tobytes()
    sorted_ = np.array(sorted(digests.items()), "<u8").tobytes()
    wrong = {
        "bad_pad_holds_something": ("pad", bytes(64), bytes(63) + b"\x01"),
        "bad_pad_of_version_2": ("pad", b"", b""),
        "bad_mark_of_version_3": ("mark_dense", b"", b""),
        "bad_mark_rate": ("mark_dense", b"0.025", b"0.024"),
        "bad_mark_iteration": ("mark_dense", b'"iteration":100', b'"iteration":101'),
        "bad_mark_entries_order": ("mark_dense", base64_of(sorted_).encode(), base64_of(reverse).encode()),
        "bad_mark_entries_cut": ("mark_dense", base64_of(sorted_).encode(), base64_of(sorted_[:-8]).encode()),
        "bad_mark_entries_text": ("mark_dense", base64_of(sorted_).encode()[:8], b"--------"),
        "bad_claim_announces_unknown": ("claim_announcing", b'"aligned"', b'"rounded"'),
        "bad_claim_announces_order": ("claim_announcing", b'"aligned","dense_proof"', b'"dense_proof","aligned"'),
        "bad_claim_announces_nothing": ("claim_announcing", b'"aligned","dense_proof","ids","objects"', b""),
        "bad_claim_of_version_3": ("claim_announcing", b"", b""),
    }
    found = {}
    for name, (of, old, new) in wrong.items():
        payload = good[of][HEADER_LEN:]
        assert old in payload
        payload = payload.rstrip(b" ").replace(old, new, 1)
        frame = bytearray(good[of][:HEADER_LEN]) + payload + b" " * (-len(payload) % 64)
        version = int(name[-1]) if "_of_version_" in name else NEWEST_VERSION
        _put(frame, "H", 4, version)
        _put(frame, "III", 104, len(frame) - HEADER_LEN, len(frame) - HEADER_LEN, crc32c(frame[HEADER_LEN:]))
        found[name] = bytes(frame)
    return found


def _put(frame: bytearray, layout: str, offset: int, *values: int) -> None:
    """Overwrite header fields and make the header's checksum right again."""
    struct.pack_into(f"<{layout}", frame, offset, *values)
    struct.pack_into("<I", frame, 124, crc32c(memoryview(frame)[:124]))


def _put_id(frame: bytearray, value: int) -> None:
    """Overwrite the last id and make both checksums right again."""
    struct.pack_into("<q", frame, HEADER_LEN + 8, value)
    _put(frame, "I", 112, crc32c(memoryview(frame)[HEADER_LEN:]))


def base64_of(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def dump(data: bytes) -> str:
    """Hex text, 16 bytes a line behind the offset of the first one; a change shows in a diff."""
    lines = (f"{at:06x}  {data[at : at + 16].hex(' ', 1)}\n" for at in range(0, len(data), 16))
    return "".join(lines)


# (size, name of the field, how to show it) in the order of docs/format.md.
HEADER_FIELDS = (
    (4, "magic", "ascii"),
    (2, "version", "int"),
    (2, "header_len", "int"),
    (1, "kind", "kind"),
    (1, "flags", "int"),
    (1, "codec", "int"),
    (1, "num_sections", "int"),
    (4, "rank", "int"),
    (16, "job", ""),
    (4, "generation", "int"),
    (4, "table", "int"),
    (8, "seq", "int"),
    (8, "step", "int"),
    (8, "marker", "int"),
    (4, "rows", "int"),
    (4, "col0", "int"),
    (4, "cols", "int"),
    (4, "schema_crc", ""),
    (8, "dtypes", "int64 a row, float32 a column, float32 a row"),
    (16, "section_offsets", "0, 64, 128 in units of 64"),
    (4, "payload_len", "int"),
    (4, "raw_len", "int"),
    (4, "payload_crc", ""),
    (4, "chain", ""),
    (4, "reserved", "int"),
    (4, "header_crc", ""),
)


def worked_example() -> str:
    """The golden ROWS frame, a line a field or row, as docs/format.md shows it."""
    frame, at, lines = frames()["rows"], 0, []

    def line(size: int, text: str, *, zeros: bool = False) -> None:
        nonlocal at
        data = frame[at : at + size]
        assert not zeros or not any(data)
        shown = f"00 x {size}" if zeros else data.hex(" ", 1)
        lines.append(f"{at:06x}  {shown:47}  {text}".rstrip())
        at += size

    for size, name, show in HEADER_FIELDS:
        value = int.from_bytes(frame[at : at + size], "little")
        words = {"int": value, "ascii": frame[at : at + size].decode("ascii", "replace"), "kind": f"{value}: ROWS"}
        line(size, f"{name} {words.get(show, f'({show})' if show else '')}")
    ids, weights, momentum = user_arrays()
    for id_ in ids:
        line(8, f"id {id_}")
    line(48, "padding", zeros=True)
    for id_, row in zip(ids, weights, strict=True):
        line(16, f"weights of row {id_}: {', '.join(f'{value:g}' for value in row)}")
    line(32, "padding", zeros=True)
    for id_, value in zip(ids, momentum, strict=True):
        line(4, f"momentum1 of row {id_}: {value:g}")
    line(56, "padding", zeros=True)
    assert at == len(frame)
    return "\n".join(lines)


def undump(text: str) -> bytes:
    return b"".join(bytes.fromhex(line[8:]) for line in text.splitlines())


def all_files() -> dict[str, bytes]:
    """Every golden file of the log by its name without suffix."""
    good = frames()
    return good | bad_frames(good["rows"]) | bad_version_4(good)


def main() -> None:
    from tests.golden import make_store

    for old in HERE.glob("*.hex"):
        old.unlink()
    for name, data in (all_files() | make_store.all_files()).items():
        (HERE / f"{name}.hex").write_text(dump(data))
        print(f"{name}.hex  {len(data)} bytes{'  wrong on purpose' if name.startswith('bad_') else ''}")


if __name__ == "__main__":
    main()
