"""The bytes of the format never change: each golden file is compared whole, written and read."""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.golden import make, make_store
from tests.parts import FileLog, lineage_of, read_mark
from torchrec_stream_ckpt.errors import CorruptionError, ServingStreamError, UnsupportedError
from torchrec_stream_ckpt.format.claim_changes import TableChange, changes_of
from torchrec_stream_ckpt.format.claim_features import KNOWN, ObjectEnd
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark, parse_control
from torchrec_stream_ckpt.format.frame import Kind, check_pad, parse_header, payload_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import replicated_id
from torchrec_stream_ckpt.format.rows import RowsView, decode_rows
from torchrec_stream_ckpt.format.snapshot import Base, Snapshot, unpack
from torchrec_stream_ckpt.inner import read_stream
from torchrec_stream_ckpt.util.types import TOMBSTONE

GOOD = (
    "hello",
    "rows",
    "rows_slice",
    "ids",
    "mark",
    "claim",
    "claim_onward",
    "claim_changed",
    "hello_changed",
    "commit",
    "trim",
    "serve",
    "claim_signed",
    "commit_signed",
    "trim_signed",
    "end",
    "end_signed",
    "note",
    "note_signed",
    "snapshot",
    "snapshot_signed",
    "base",
    "pad",
    "mark_dense",
    "claim_announcing",
    "commit_objects",
)


STREAM = ("hello", "rows", "rows_slice", "ids", "mark")


def golden(name: str) -> bytes:
    return make.undump((make.HERE / f"{name}.hex").read_text())


def decode(frame: bytes) -> RowsView:
    header = parse_header(frame)
    return decode_rows(header, payload_of(header, frame), make.SCHEMA.tables[header.table])


def test_every_golden_file_is_made_by_the_code_of_today() -> None:
    on_disk = {path.stem: make.undump(path.read_text()) for path in make.HERE.glob("*.hex")}
    assert on_disk == make.all_files() | make_store.all_files()


def test_every_kind_of_frame_has_a_golden_file() -> None:
    assert {parse_header(golden(name)).kind for name in GOOD} == set(Kind)


def test_golden_hello_and_mark_read_as_written() -> None:
    hello = Hello.from_json(payload_of(parse_header(golden("hello")), golden("hello")))
    assert hello.schema == make.SCHEMA
    assert [shard.rows for shard in hello.shards] == [6, 4]
    mark = Mark.from_json(payload_of(parse_header(golden("mark")), golden("mark")))
    assert (mark.rows, mark.num_bytes) == (5, sum(len(golden(name)) for name in STREAM[:-1]))
    assert mark.scalars[1].next_learning_rate == 0.025
    assert mark.proof == make.PROOF
    assert mark.proof.numbers().tolist() == [1, 2, 3, 4, 5]
    assert [table.id for table in hello.schema.tables] == [table.id for table in make.SCHEMA.tables]


def test_a_golden_snapshot_carries_the_golden_records() -> None:
    part = parse_control(golden("snapshot"))
    assert isinstance(part, Snapshot)
    frames = b"".join(golden(name) for name in ("claim", "commit", "end", "trim", "note"))
    assert unpack([part]) == b'{"given_up":{},"stale":0,"taken":0,"unsigned":0}\n' + frames
    assert lineage_of(unpack([part])).newest == parse_control(golden("commit"))
    assert parse_control(golden("snapshot_signed")) == replace(part, mac=make.KEY.sign(part).mac)
    assert Base.from_frame(golden("base")) == Base(make.JOB, 1024)


def test_golden_control_records_read_as_written() -> None:
    assert parse_control(golden("claim")) == make.claim()
    assert parse_control(golden("claim_onward")) == make.claim_onward()
    assert parse_control(golden("trim")) == make.trim()
    assert parse_control(golden("end")) == make.end_record()
    assert parse_control(golden("note")) == make.note()
    assert parse_control(golden("serve"), serving=True) == make.serve()
    with pytest.raises(ServingStreamError):
        parse_control(golden("serve"))
    commit = parse_control(golden("commit"))
    assert isinstance(commit, Commit)
    assert commit == make.commit(commit.ranks[0])
    listed = parse_control(golden("commit_listed"))
    assert isinstance(listed, Commit)
    assert listed == make.commit_listed(commit.ranks[0])
    assert (listed.dense_count, listed.dense_bytes) == (commit.dense_count, commit.dense_bytes) == (2, 12)


def test_a_golden_claim_leaves_to_its_parents_what_is_the_same() -> None:
    lineage = Lineage.of(parse_control(golden(name)) for name in ("claim", "claim_onward"))
    first, second = lineage.claims.values()
    assert second.schema is first.schema
    assert second.layout is first.layout is not None
    assert list(second.layout) == [make.SHARDS]
    assert [record.to_frame() for record in lineage.records()] == [golden("claim"), golden("claim_onward")]
    assert b'"same_schema":%d' % make.SCHEMA.crc in golden("claim_onward")
    assert b'"same_layout":%d' % first.layout.crc in golden("claim_onward")


def test_a_golden_claim_of_a_changed_model_is_of_version_3_and_says_what_became_of_each_table() -> None:
    lineage = Lineage.of(parse_control(golden(name)) for name in ("claim", "claim_changed"))
    first, second = lineage.claims.values()
    assert (parse_header(golden("claim_changed")).version, parse_header(golden("hello_changed")).version) == (3, 3)
    assert list(changes_of(first.schema, second.schema)) == [
        (TableChange.DROPPED, make.ITEM, TOMBSTONE),
        (TableChange.RENAMED, make.USER, second.schema.tables[1]),
        (TableChange.ADDED, TOMBSTONE, make.AGE),
    ]
    assert [table.id for table in second.schema.tables] == [None, 2, 3]
    assert second.schema.index() == {"sparse.ebc.t_member": 1, "sparse.ebc.t_age": 2}
    assert [index for index, _ in second.schema.live] == [1, 2]
    assert second.changes == make.claim_changed().changes
    assert hashlib.sha256(second.changes.text.encode()).hexdigest() == second.changes.digest
    assert [record.to_frame() for record in lineage.records()] == [golden("claim"), golden("claim_changed")]
    hello = Hello.from_json(payload_of(parse_header(golden("hello_changed")), golden("hello_changed")), 3)
    assert hello.schema.is_same(second.schema)
    with pytest.raises(CorruptionError, match="must be sorted by name"):
        Hello.from_json(hello.to_json(), 2)


def test_golden_signatures_are_those_that_any_hmac_gives() -> None:
    for name in ("claim", "commit", "trim", "end", "note"):
        unsigned = bytes(payload_of(parse_header(golden(name)), golden(name))).rstrip(b" ")
        signed = parse_control(golden(f"{name}_signed"))
        text = f"torchrec_stream_ckpt {name.upper()} version 1\n".encode() + unsigned
        assert signed.mac == hmac.new(bytes(range(32)), text, "sha256").hexdigest()
        assert make.KEY.vouches_for(signed)
        assert replace(signed, mac="") == parse_control(golden(name))


def test_golden_rows_read_as_written() -> None:
    for name, arrays in {"rows": make.user_arrays(), "rows_slice": make.item_arrays()}.items():
        view = decode(golden(name))
        for found, expected in zip((view.ids, view.weights, *view.states), arrays, strict=True):
            np.testing.assert_array_equal(found, expected)


def test_golden_id_events_read_as_written() -> None:
    header = parse_header(golden("ids"))
    payload = payload_of(header, golden("ids"))
    for offset, expected in zip(header.section_offsets, make.id_events(), strict=True):
        np.testing.assert_array_equal(np.frombuffer(payload, expected.dtype, header.rows, offset), expected)


def test_golden_frames_are_one_whole_stream(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.prepare(1)
    writer = log.open_writer(1, 0, 0)
    for name in STREAM:
        writer.send(memoryview(golden(name)))
    assert len(writer.poll(60)) == len(STREAM)
    writer.close()
    commit = parse_control(golden("commit"))
    assert isinstance(commit, Commit)
    found = [(header, bytes(frame)) for header, frame in read_stream(log, commit, commit.ranks[0])]
    assert [header.kind for header, _ in found] == [Kind.HELLO, Kind.ROWS, Kind.ROWS, Kind.IDS, Kind.MARK]
    assert read_mark(found[-1][0], memoryview(found[-1][1]), commit, commit.ranks[0]).rows == 5


def test_a_trainer_stages_the_golden_rows() -> None:
    torch = pytest.importorskip("torch")
    from tests.parts import FrameBuffer, RowStager
    from torchrec_stream_ckpt.capture.staging import StreamIdentity
    from torchrec_stream_ckpt.format.frame import seal
    from torchrec_stream_ckpt.model import LocalShard

    ids, weights, momentum = map(torch.from_numpy, make.user_arrays())
    live, state = torch.zeros(4, 4), torch.zeros(4)
    live[ids], state[ids] = weights, momentum
    stager = RowStager(LocalShard(make.USER, 0, 4, 0, 4), 1, StreamIdentity(make.JOB, 1, 0, make.SCHEMA.crc))
    buffer = FrameBuffer(np.zeros(4096, np.uint8), pooled=True)
    stager.fill(buffer, ids, live, (state,), step=make.STEP, marker=make.MARKER)
    assert buffer.header is not None
    buffer.header.seq, buffer.header.chain = 1, parse_header(golden("hello")).header_crc
    seal(buffer.header, buffer.array.data)
    assert bytes(buffer.view()) == golden("rows")


SECTIONS = "sections do not match the schema"
UNKNOWN = "header has an unknown version, kind, flag or codec"
BAD = {
    "bad_empty": "frame of 0 bytes is shorter than a header",
    "bad_short_header": "frame of 127 bytes is shorter than a header",
    "bad_truncated": "frame holds 128 payload bytes, but its header has 192",
    "bad_trailing_bytes": "frame holds 256 payload bytes, but its header has 192",
    "bad_magic": "not a frame of torchrec_stream_ckpt",
    "bad_header_crc": "header checksum does not match",
    "bad_payload_crc": "payload checksum does not match",
    "bad_newer_version": "frame has format version 5, this program reads up to 4",
    "bad_version_zero": UNKNOWN,
    "bad_header_len": UNKNOWN,
    "bad_kind": UNKNOWN,
    "bad_flag": UNKNOWN,
    "bad_codec": UNKNOWN,
    "bad_reserved": UNKNOWN,
    "bad_section_count": "header has impossible lengths",
    "bad_uncounted_section": "header describes more sections than it counts",
    "bad_payload_unaligned": "header has impossible lengths",
    "bad_raw_len": "header has impossible lengths",
    "bad_payload_huge": "payload of 999936 bytes is larger than a frame may be",
    "bad_section_overlap": SECTIONS,
    "bad_section_beyond_end": SECTIONS,
    "bad_section_dtype": SECTIONS,
    "bad_section_per_row": SECTIONS,
    "bad_rows_count": SECTIONS,
    "bad_columns": "columns [1, +4) are outside dim 4",
    "bad_no_columns": "columns [0, +0) are outside dim 4",
    "bad_id_beyond_table": "a row id is outside [0, 4)",
    "bad_id_negative": "a row id is outside [0, 4)",
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_bad_bytes_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CorruptionError) as refused:
        decode(golden(name))
    assert refused.value.message == BAD[name]


RATES = "MARK.scalars: iterations or learning rates differ from those at the cut"
BAD_4 = {
    "bad_pad_holds_something": "the payload of PAD is not all zeros",
    "bad_pad_of_version_2": UNKNOWN,
    "bad_mark_of_version_3": UNKNOWN,
    "bad_mark_rate": RATES,
    "bad_mark_iteration": RATES,
    "bad_mark_entries_order": "MARK.dense_proof: entries must be sorted by id",
    "bad_mark_entries_cut": "MARK.dense_proof: entries of 40 bytes are not pairs",
    "bad_mark_entries_text": "MARK.dense_proof.entries is not base64",
    "bad_claim_announces_unknown": "CLAIM.announces has 'rounded', which this version does not support",
    "bad_claim_announces_order": "CLAIM.announces must be sorted",
    "bad_claim_announces_nothing": "CLAIM.announces must be sorted",
    "bad_claim_of_version_3": "CLAIM has fields",
}


def read_version_4(frame: bytes) -> object:
    header = parse_header(frame)
    payload = payload_of(header, frame)
    if header.kind is Kind.PAD:
        return check_pad(header, payload)
    return Mark.from_json(payload, header.version) if header.kind is Kind.MARK else parse_control(frame)


@pytest.mark.parametrize("name", sorted(BAD_4))
def test_bad_bytes_of_version_4_are_refused_with_the_reason(name: str) -> None:
    with pytest.raises(CorruptionError) as refused:
        read_version_4(golden(name))
    assert refused.value.message.startswith(BAD_4[name])


def test_golden_frames_of_version_4_read_as_written() -> None:
    for name in ("pad", "mark_dense", "claim_announcing"):
        assert parse_header(golden(name)).version == 4
        read_version_4(golden(name))
    mark = read_version_4(golden("mark_dense"))
    assert isinstance(mark, Mark)
    assert mark.dense_proof == make.dense_proof(mark.scalars)
    assert mark.dense_proof.digests()[replicated_id("rank0.random")] == 2**32
    claim = parse_control(golden("claim_announcing"))
    assert isinstance(claim, Claim)
    assert claim.announces == KNOWN == ("aligned", "dense_proof", "ids", "objects")
    assert claim.to_frame() == golden("claim_announcing")


def test_a_program_of_version_3_refuses_a_generation_at_its_claim(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_stream_ckpt.format.frame.NEWEST_VERSION", 3)
    with pytest.raises(CorruptionError, match="frame has format version 4, this program reads up to 3"):
        parse_control(golden("claim_announcing"))


def test_a_log_of_objects_is_refused_by_name_and_its_ends_are_objects_and_bytes() -> None:
    with pytest.raises(UnsupportedError, match="does not support a log of objects"):
        Lineage.of([parse_control(golden("claim_announcing"))])
    commit = parse_control(golden("commit_objects"))
    assert isinstance(commit, Commit)
    (end,) = commit.ranks
    assert (ObjectEnd.unpack(end.begin), ObjectEnd.unpack(end.end)) == (ObjectEnd(0, 0), ObjectEnd(3, 4096))
    assert ObjectEnd(2**24 - 1, 2**40 - 1).pack() == 2**64 - 1
    for beyond in (ObjectEnd(2**24, 0), ObjectEnd(0, 2**40), ObjectEnd(0, -1)):
        with pytest.raises(UnsupportedError, match="is outside the range of a log of objects"):
            beyond.pack()


def test_padding_is_read_as_any_frame_of_the_stream(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.prepare(1)
    writer = log.open_writer(1, 0, 0)
    names = (*STREAM, "pad", "mark_dense")
    for name in names:
        writer.send(memoryview(golden(name)))
    assert len(writer.poll(60)) == len(names)
    writer.close()
    first = parse_control(golden("commit"))
    assert isinstance(first, Commit)
    sent = sum(len(golden(name)) for name in names)
    end = replace(first.ranks[0], end=sent, frames=len(names), chain=parse_header(golden("mark_dense")).header_crc)
    commit = replace(first, marker=make.MARKER + 1, step=make.STEP + 1, ranks=(end,))
    kinds = [header.kind for header, _ in read_stream(log, commit, end, first.ranks[0])]
    assert kinds == [Kind.PAD, Kind.MARK]


def test_padding_that_holds_something_is_refused_in_a_stream(tmp_path: Path) -> None:
    log = FileLog(tmp_path)
    log.prepare(1)
    writer = log.open_writer(1, 0, 0)
    frames = [golden(name) for name in STREAM] + [golden("bad_pad_holds_something")]
    for frame in frames:
        writer.send(memoryview(frame))
    assert len(writer.poll(60)) == len(frames)
    writer.close()
    first = parse_control(golden("commit"))
    assert isinstance(first, Commit)
    end = replace(first.ranks[0], end=sum(map(len, frames)), frames=len(frames), chain=0)
    with pytest.raises(CorruptionError, match="the payload of PAD is not all zeros"):
        list(read_stream(log, replace(first, ranks=(end,)), end, first.ranks[0]))


def test_every_bad_file_is_tested() -> None:
    assert {name for name in make.all_files() if name.startswith("bad_")} == BAD.keys() | BAD_4.keys()
