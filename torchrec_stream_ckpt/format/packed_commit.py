"""Fast readers of COMMITs and manifests: one expression checks the bytes, and fields are parsed when they are read.

A log of a thousand generations has tens of thousands of COMMITs, and a reader uses few of them. Reading a COMMIT field
by field takes four times as long as checking that it is whole. So a COMMIT whose bytes are exactly those that its
writer makes (canonical JSON, in a frame of the current version) is checked at once and kept as it is. A COMMIT that
differs in any way goes through :func:`parse_control`, which reports what is wrong. Both ways refuse the same bytes and
read the same values.

A list of the newest markers needs only the names of the others. It reads them at a *glance*: both checksums, and the
fields that decide whether a COMMIT counts. The other fields are checked when the COMMIT is opened.

A plan reads the manifests of all markers that lead to one. Reading a manifest item by item also takes four times as
long as checking that it is whole. So a manifest whose bytes are exactly those that its writer makes (canonical JSON,
with a COMMIT as above) is checked at once and not encoded again for comparison. A manifest that differs in any way goes
through :meth:`Manifest.from_bytes`, which reports what is wrong. Both ways refuse the same bytes and read the same
values.
"""

from __future__ import annotations

import json
import re
import struct
from binascii import a2b_base64
from dataclasses import dataclass
from sys import intern
from typing import NamedTuple

from crc32c import crc32c

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.format.control import MAX_PLACE_CHARS, Commit, ControlRecord, parse_control
from torchrec_stream_ckpt.format.dense_files import DenseFile, DenseList
from torchrec_stream_ckpt.format.frame import (
    ALIGNMENT,
    CODEC_NONE,
    HEADER_LEN,
    MAGIC,
    MAX_FRAME_BYTES,
    NO_TABLE,
    VERSION,
    Buffer,
    Kind,
    aligned,
)
from torchrec_stream_ckpt.format.manifest import Manifest, SegmentRef
from torchrec_stream_ckpt.format.rank_ends import FRONT_LEN, RankEnds, check_front
from torchrec_stream_ckpt.format.record import MAX_META_BYTES, Meta, meta_of, signed_front
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.format.segment import HEADER_LEN as SEGMENT_HEADER_LEN
from torchrec_stream_ckpt.util.layout import StoreSegment
from torchrec_stream_ckpt.util.types import MarkerId

_HEAD = struct.Struct("<16s 16s I 12s QQ 40s I I I 8s I")
"""Header of a COMMIT. Consecutive fields that are the same in all of them are one piece each."""
assert _HEAD.size == HEADER_LEN
_ENDS = struct.Struct("<16s 88x I 16x I")
"""Header fields that give the length of a COMMIT and show that its header is undamaged."""
assert _ENDS.size == HEADER_LEN
_FRONT = struct.pack("<4sHHBBBBI", MAGIC, VERSION, HEADER_LEN, Kind.COMMIT, 0, CODEC_NONE, 0, 0)
_NO_TABLE_NOR_SEQ = struct.pack("<IQ", NO_TABLE, 0)
_NO_ROWS, _NO_CHAIN = bytes(40), bytes(8)

NUMBER = "(?:0|[1-9][0-9]{0,18})"
"""A number below 10^19, so it fits 64 bits."""
_TEXT = r"[ !#-\[\]-~]"
"""A character that needs no escape in a string: printable ASCII except the quote and the backslash."""
_SHA256 = "[0-9a-f]{64}"
_NAME = r"(?:\.metadata|[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254})"
"""Name of a dense file, as DCP writes it. Other names that begin with a dot are checked one by one."""
_FILE = rf'\{{"name":"{_NAME}","num_bytes":{NUMBER},"sha256":"{_SHA256}"\}}'
_LIST = rf'\{{"files":[1-9][0-9]{{0,17}},"list_bytes":[1-9][0-9]{{0,6}},"num_bytes":{NUMBER},"sha256":"{_SHA256}"\}}'
BASE64 = "[A-Za-z0-9+/]+(?:[AQgw]==|[AEIMQUYcgkosw048]=)?"
"""Canonical base64: no unused bit is set. The match is complete if its length is a multiple of four."""
_PAYLOAD = re.compile(
    (
        rf'\{{"dense":"(?P<dense>{_TEXT}{{0,{MAX_PLACE_CHARS}}})"'
        rf',"dense_files":\[(?:\],"dense_list":(?P<list>{_LIST})|(?P<files>(?:{_FILE}(?:,{_FILE})*)?)\])'
        rf',"generation":(?P<generation>{NUMBER}),"job":"(?P<job>[0-9a-f]{{32}})","mac":"(?P<mac>(?:{_SHA256})?)"'
        rf',"marker":(?P<marker>{NUMBER})(?:,"meta":(?P<meta>\{{[^{{}}\\]{{0,{MAX_META_BYTES}}}\}}))?'
        rf',"nonce":"(?P<nonce>{_TEXT}*)","ranks":"(?P<ranks>{BASE64})","step":(?P<step>{NUMBER})'
        rf',"store":"(?P<store>{_TEXT}{{0,{MAX_PLACE_CHARS}}})","time_s":(?P<time>[0-9]{{1,15}}\.[0-9]{{1,20}})\}} *'
    ).encode("ascii")
)
_FRONT_CHARS = 4 * -(-FRONT_LEN // 3)
_NONCE, _RANKS = b',"nonce":"', b'","ranks":"'
"""Bytes before and after the nonce. No field after it can contain either."""
_EACH_FILE = re.compile(rb'\{"name":"([^"]*)","num_bytes":([0-9]*),"sha256":"([^"]*)"\}')


class CommitHead(NamedTuple):
    """Fields in the header of a COMMIT."""

    job: bytes
    generation: int
    step: int
    marker: int
    payload_len: int
    payload_crc: int


def head_of(data: Buffer) -> CommitHead | None:
    """Read the header at the start of ``data``. Returns None unless it is an intact COMMIT header of this version."""
    if len(data) < HEADER_LEN:
        return None
    front, job, generation, table, step, marker, rows, length, raw, payload_crc, chain, crc = _HEAD.unpack_from(data)
    if (
        front != _FRONT
        or length != raw
        or length % ALIGNMENT
        or length > MAX_FRAME_BYTES - HEADER_LEN
        or table != _NO_TABLE_NOR_SEQ
        or rows != _NO_ROWS
        or chain != _NO_CHAIN
        or crc32c(data[: HEADER_LEN - 4]) != crc
    ):
        return None
    return CommitHead(job, generation, step, marker, length, payload_crc)


def commit_payload_len(data: Buffer, at: int) -> int | None:
    """Return the payload length of the COMMIT whose header begins at ``at``. Returns None unless it is one, undamaged.

    The contents of the COMMIT are checked when it is read: :func:`read_record`.
    """
    front, length, crc = _ENDS.unpack_from(data, at)
    if front != _FRONT or length > MAX_FRAME_BYTES - HEADER_LEN or crc32c(data[at : at + HEADER_LEN - 4]) != crc:
        return None
    return int(length)


@dataclass(slots=True)
class PackedCommit:
    """A COMMIT whose fields were not parsed. An immutable value: only the reader that made it changes it."""

    job: bytes
    generation: int
    marker: int
    nonce: str
    frame: bytes
    """The whole frame as in the log."""

    KIND = Kind.COMMIT

    @property
    def mac(self) -> str:
        """HMAC of a checked COMMIT. Empty if the COMMIT is not signed."""
        return _match(self.frame)["mac"].decode("ascii")

    def signed_bytes(self) -> bytes:
        """Return the bytes of a checked COMMIT that the HMAC covers: all fields except the HMAC."""
        match = _match(self.frame)
        begin, end = match.span("mac")
        return signed_front(Kind.COMMIT) + self.frame[HEADER_LEN:begin] + self.frame[end : match.end("time") + 1]

    def open(self) -> Commit:
        """Parse all fields."""
        return open_commit(self.frame)


def pack_commit(frame: Buffer) -> PackedCommit | None:
    """Check a COMMIT. Returns None if it is not a COMMIT or differs in any way from its writer's encoding."""
    checked = _check(frame)
    if checked is None:
        return None
    head, match = checked
    return PackedCommit(head.job, head.generation, head.marker, match["nonce"].decode("ascii"), match.string)


def _check(frame: Buffer) -> tuple[CommitHead, re.Match[bytes]] | None:
    """Return the header and the fields of a COMMIT, or None as :func:`pack_commit`."""
    head = head_of(frame)
    if head is None or len(frame) != HEADER_LEN + head.payload_len:
        return None
    match = _PAYLOAD.fullmatch(bytes(frame), HEADER_LEN)
    if match is None or crc32c(memoryview(frame)[HEADER_LEN:]) != head.payload_crc:
        return None
    if head.payload_len != aligned(match.end("time") + 1 - HEADER_LEN):
        return None  # more padding than a writer adds
    _, _, files, generation, job, _, marker, meta, _, ranks, step, _, time_s = match.groups()
    if (int(generation), int(marker), int(step)) != (head.generation, head.marker, head.step):
        return None
    if job.decode("ascii") != head.job.hex() or repr(float(time_s)) != time_s.decode("ascii"):
        return None
    if not _each_once(files) or not _is_meta(meta) or not _are_ends(ranks):
        return None
    return head, match


def glance_at(frame: Buffer) -> PackedCommit | None:
    """Return a COMMIT whose checksums are right and whose other fields are unchecked. Returns None for other frames."""
    head = head_of(frame)
    if head is None or len(frame) != HEADER_LEN + head.payload_len:
        return None
    frame = bytes(frame)
    begin = frame.rfind(_NONCE) + len(_NONCE)
    end = frame.find(b'"', begin)
    nonce = frame[begin:end]
    if not (begin > HEADER_LEN and frame.startswith(_RANKS, end) and nonce.isascii() and b"\\" not in nonce):
        return None
    if crc32c(memoryview(frame)[HEADER_LEN:]) != head.payload_crc:
        return None
    return PackedCommit(head.job, head.generation, head.marker, nonce.decode("ascii"), frame)


def open_commit(frame: bytes) -> Commit:
    """Return all fields of a COMMIT, each checked.

    Raises:
        CorruptionError: a field is invalid.
    """
    commit = written_commit(frame)
    if commit is None:
        read = parse_control(frame)
        assert isinstance(read, Commit)
        return read
    return commit


def written_commit(frame: Buffer) -> Commit | None:
    """Return all fields of a COMMIT, each checked, or None as :func:`pack_commit`."""
    checked = _check(frame)
    if checked is None:
        return None
    head, match = checked
    listed, meta = match.group("list", "meta")
    return Commit(
        job=head.job,
        generation=head.generation,
        nonce=intern(match["nonce"].decode("ascii")),
        marker=head.marker,
        step=head.step,
        ranks=RankEnds(a2b_base64(match["ranks"])),
        dense=match["dense"].decode("ascii"),
        dense_files=tuple(
            DenseFile(name.decode("ascii"), int(num_bytes), sha256.decode("ascii"))
            for name, num_bytes, sha256 in _EACH_FILE.findall(match["files"] or b"")
        ),
        time_s=float(match["time"]),
        store=intern(match["store"].decode("ascii")),
        mac=match["mac"].decode("ascii"),
        meta=_meta(meta) if meta is not None else None,
        dense_list=DenseList(**json.loads(listed)) if listed is not None else None,
    )


def read_record(
    frame: Buffer, offset: int | None = None, *, serving: bool = False, glance: bool = False
) -> ControlRecord | PackedCommit:
    """Parse a frame as :func:`parse_control` does. A COMMIT in exactly its writer's encoding stays packed.

    Args:
        frame: The record.
        offset: Offset of the record, for errors.
        serving: Whether to accept the SERVE of a serving stream, too.
        glance: Whether to leave the fields of a COMMIT unchecked until it is opened.
    """
    packed = (glance_at if glance else pack_commit)(frame)
    return packed if packed is not None else parse_control(frame, offset, serving=serving)


def _match(frame: bytes) -> re.Match[bytes]:
    match = _PAYLOAD.fullmatch(frame, HEADER_LEN)
    assert match is not None
    return match


def _each_once(files: bytes | None) -> bool:
    """Return whether no dense file is named twice."""
    if not files or files.count(b"{") == 1:
        return True
    names = [name for name, _, _ in _EACH_FILE.findall(files)]
    return len(set(names)) == len(names)


def _are_ends(text: bytes) -> bool:
    """Return whether ``text`` holds the ends of all ranks. Its first bytes nearly always decide."""
    if len(text) % 4:
        return False
    try:
        num_bytes = len(text) // 4 * 3 - text.count(b"=", -2)
        if not check_front(a2b_base64(text[:_FRONT_CHARS]), num_bytes):
            RankEnds(a2b_base64(text))
    except CorruptionError:
        return False
    return True


def _is_meta(text: bytes | None) -> bool:
    """Return whether ``text`` is metadata in its written form. True for None."""
    if text is None:
        return True
    try:
        return canonical(dict(_meta(text))) == text
    except (ValueError, RecursionError, ConfigError):
        return False


def _meta(text: bytes) -> Meta:
    return meta_of(json.loads(text))


_GENERATION, _MARKER = "(?:0|[1-9][0-9]{0,8})", "(?:0|[1-9][0-9]{0,17})"
"""Generation and marker as :meth:`MarkerId.parse` accepts them."""
_OBJECT = "[A-Za-z0-9/._-]{1,400}"
"""Name of a segment. The exact name is compared later."""
_REF = rf'\{{"front_bytes":{NUMBER},"header_crc":{NUMBER},"name":"{_OBJECT}","num_bytes":{NUMBER},"rows":{NUMBER}\}}'
_OF_RANK = rf"{_REF}(?:,{_REF})*"
_MANIFEST = re.compile(
    (
        rf'\{{"body":(?P<body>\{{"commit":"(?P<commit>{BASE64})"'
        rf',"previous":(?:null|"(?P<generation>{_GENERATION}):(?P<marker>{_MARKER})")'
        rf',"segments":\[\[(?P<segments>{_OF_RANK}(?:\],\[{_OF_RANK})*)\]\]\}})'
        r',"crc32c":"(?P<crc>[0-9a-f]{8})","format":1,"kind":"manifest"\}'
    ).encode("ascii")
)
_EACH_REF = re.compile(
    rb'\{"front_bytes":([0-9]+),"header_crc":([0-9]+),"name":"([^"]+)","num_bytes":([0-9]+),"rows":([0-9]+)\}'
)


def read_manifest(data: Buffer, where: str) -> Manifest:
    """Read and check a manifest; raises as :meth:`Manifest.from_bytes`."""
    found = written_manifest(data)
    return found if found is not None else Manifest.from_bytes(data, where)


def written_manifest(data: Buffer) -> Manifest | None:
    """Read a manifest that is exactly in its writer's encoding. Returns None for all other bytes."""
    match = _MANIFEST.fullmatch(bytes(data))
    if match is None or f"{crc32c(match['body']):08x}" != match["crc"].decode("ascii") or len(match["commit"]) % 4:
        return None
    commit = written_commit(a2b_base64(match["commit"]))
    if commit is None:
        return None
    previous = None
    if match["generation"] is not None:
        previous = MarkerId(int(match["generation"]), int(match["marker"]))
        if not (previous < commit.id and previous.generation == commit.generation):
            return None
    of_ranks = match["segments"].split(b"],[")
    if len(of_ranks) != len(commit.ranks):
        return None
    segments = tuple(_refs(commit, rank, text) for rank, text in enumerate(of_ranks))
    return Manifest(commit, previous, segments) if all(segments) else None


def _refs(commit: Commit, rank: int, text: bytes) -> tuple[SegmentRef, ...]:
    """Return the segments of a rank. Empty if one of them is invalid."""
    refs = []
    for part, (front_bytes, header_crc, name, num_bytes, rows) in enumerate(_EACH_REF.findall(text)):
        ref = SegmentRef(name.decode("ascii"), int(num_bytes), int(front_bytes), int(header_crc), int(rows))
        expected = StoreSegment(commit.job, commit.id, rank, part).name
        if ref.name != expected or not SEGMENT_HEADER_LEN <= ref.front_bytes <= ref.num_bytes:
            return ()
        refs.append(ref)
    return tuple(refs)
