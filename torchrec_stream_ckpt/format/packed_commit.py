"""COMMIT as this library writes it: checked by one expression when it is read, taken apart when a field is read.

A log of a thousand generations has tens of thousands of COMMITs, and a reader looks at few of them. To read a COMMIT
field by field takes four times as long as to see that it is whole. So one whose bytes are exactly those that its writer
makes (canonical JSON, in a frame of the current version) is checked at once, and kept as it is. Whatever differs in any
way goes through :func:`parse_control`, which says what is wrong. Both ways refuse the same bytes, and read the same.

A list of the newest markers needs no more of the others than their names. It reads them at a *glance*: both checksums,
and what decides whether a COMMIT counts. Its other fields are checked when it is opened.

A manifest as this library writes it: checked by one expression when it is read, and not made again to be compared.

A plan reads the manifests of all markers that lead to one. To read a manifest item by item takes four times as long as
to see that it is whole. So one whose bytes are exactly those that its writer makes (canonical JSON, with a COMMIT as
:mod:`packed_commit` takes it) is checked at once. Whatever differs in any way goes through
:meth:`Manifest.from_bytes`, which says what is wrong. Both ways refuse the same bytes, and read the same.
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
"""The header of a COMMIT: what is the same in all of them in one piece each, and what is not."""
assert _HEAD.size == HEADER_LEN
_ENDS = struct.Struct("<16s 88x I 16x I")
"""What tells of a COMMIT how long it is, and that its header is undamaged."""
assert _ENDS.size == HEADER_LEN
_FRONT = struct.pack("<4sHHBBBBI", MAGIC, VERSION, HEADER_LEN, Kind.COMMIT, 0, CODEC_NONE, 0, 0)
_NO_TABLE_NOR_SEQ = struct.pack("<IQ", NO_TABLE, 0)
_NO_ROWS, _NO_CHAIN = bytes(40), bytes(8)

NUMBER = "(?:0|[1-9][0-9]{0,18})"
"""Below 10^19, so of 64 bits."""
_TEXT = r"[ !#-\[\]-~]"
"""A character of a string that stands for itself: printable ASCII, without what ends or escapes."""
_SHA256 = "[0-9a-f]{64}"
_NAME = r"(?:\.metadata|[A-Za-z0-9_-][A-Za-z0-9_.-]{0,254})"
"""Name of a dense file, as DCP writes it. Other names that begin with a dot are looked at one by one."""
_FILE = rf'\{{"name":"{_NAME}","num_bytes":{NUMBER},"sha256":"{_SHA256}"\}}'
_LIST = rf'\{{"files":[1-9][0-9]{{0,17}},"list_bytes":[1-9][0-9]{{0,6}},"num_bytes":{NUMBER},"sha256":"{_SHA256}"\}}'
BASE64 = "[A-Za-z0-9+/]+(?:[AQgw]==|[AEIMQUYcgkosw048]=)?"
"""Canonical: no bit is set that stands for nothing. Whole where its length is a multiple of four."""
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
"""What stands before and after the nonce. No field after it can hold either."""
_EACH_FILE = re.compile(rb'\{"name":"([^"]*)","num_bytes":([0-9]*),"sha256":"([^"]*)"\}')


class CommitHead(NamedTuple):
    """What the header of a COMMIT says."""

    job: bytes
    generation: int
    step: int
    marker: int
    payload_len: int
    payload_crc: int


def head_of(data: Buffer) -> CommitHead | None:
    """Read the header that bytes begin with; None unless it is that of a COMMIT of the current version, and whole."""
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
    """Length of the payload of the COMMIT whose header begins at ``at``; None unless that is one, and undamaged.

    Whether it says what a COMMIT may say is seen when it is read: :func:`read_record`.
    """
    front, length, crc = _ENDS.unpack_from(data, at)
    if front != _FRONT or length > MAX_FRAME_BYTES - HEADER_LEN or crc32c(data[at : at + HEADER_LEN - 4]) != crc:
        return None
    return int(length)


@dataclass(slots=True)
class PackedCommit:
    """A COMMIT that was not taken apart. A value: only the reader that made it changes it."""

    job: bytes
    generation: int
    marker: int
    nonce: str
    frame: bytes
    """The whole frame, as the log has it."""

    KIND = Kind.COMMIT

    @property
    def mac(self) -> str:
        """The HMAC; empty without one. Of a COMMIT that was checked."""
        return _match(self.frame)["mac"].decode("ascii")

    def signed_bytes(self) -> bytes:
        """Return the bytes that the HMAC covers: all fields but itself. Of a COMMIT that was checked."""
        match = _match(self.frame)
        begin, end = match.span("mac")
        return signed_front(Kind.COMMIT) + self.frame[HEADER_LEN:begin] + self.frame[end : match.end("time") + 1]

    def open(self) -> Commit:
        """All of its fields."""
        return open_commit(self.frame)


def pack_commit(frame: Buffer) -> PackedCommit | None:
    """Check a COMMIT; None for whatever differs from what its writer makes, or is no COMMIT."""
    checked = _check(frame)
    if checked is None:
        return None
    head, match = checked
    return PackedCommit(head.job, head.generation, head.marker, match["nonce"].decode("ascii"), match.string)


def _check(frame: Buffer) -> tuple[CommitHead, re.Match[bytes]] | None:
    """Header and fields of a COMMIT; None as of :func:`pack_commit`."""
    head = head_of(frame)
    if head is None or len(frame) != HEADER_LEN + head.payload_len:
        return None
    match = _PAYLOAD.fullmatch(bytes(frame), HEADER_LEN)
    if match is None or crc32c(memoryview(frame)[HEADER_LEN:]) != head.payload_crc:
        return None
    if head.payload_len != aligned(match.end("time") + 1 - HEADER_LEN):
        return None  # more padding than a writer's
    _, _, files, generation, job, _, marker, meta, _, ranks, step, _, time_s = match.groups()
    if (int(generation), int(marker), int(step)) != (head.generation, head.marker, head.step):
        return None
    if job.decode("ascii") != head.job.hex() or repr(float(time_s)) != time_s.decode("ascii"):
        return None
    if not _each_once(files) or not _is_meta(meta) or not _are_ends(ranks):
        return None
    return head, match


def glance_at(frame: Buffer) -> PackedCommit | None:
    """A COMMIT whose checksums are right and whose other fields nobody has checked; None for whatever else this is."""
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
    """All fields of a COMMIT, each checked.

    Raises:
        CorruptionError: one is not what it has to be.
    """
    commit = written_commit(frame)
    if commit is None:
        read = parse_control(frame)
        assert isinstance(read, Commit)
        return read
    return commit


def written_commit(frame: Buffer) -> Commit | None:
    """All fields of a COMMIT, each checked; None as of :func:`pack_commit`."""
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
    """Parse a frame as :func:`parse_control` does; a COMMIT in exactly its writer's bytes stays packed.

    Args:
        frame: The record.
        offset: Where it stands, for errors.
        serving: Take the SERVE of a serving stream, too.
        glance: Leave the fields of a COMMIT to whoever opens it.
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
    """Return whether this holds the ends of all ranks; nearly always the first bytes tell."""
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
    """Return whether this is metadata as it is written, or none."""
    if text is None:
        return True
    try:
        return canonical(dict(_meta(text))) == text
    except (ValueError, RecursionError, ConfigError):
        return False


def _meta(text: bytes) -> Meta:
    return meta_of(json.loads(text))


_GENERATION, _MARKER = "(?:0|[1-9][0-9]{0,8})", "(?:0|[1-9][0-9]{0,17})"
"""As :meth:`MarkerId.parse` takes them."""
_OBJECT = "[A-Za-z0-9/._-]{1,400}"
"""Of a segment: which one it has to be is compared later."""
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
    """Read and check one; raises as :meth:`Manifest.from_bytes`."""
    found = written_manifest(data)
    return found if found is not None else Manifest.from_bytes(data, where)


def written_manifest(data: Buffer) -> Manifest | None:
    """Read a manifest that is exactly as its writer makes it; None for every other one, and for what is none."""
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
    """The segments of a rank; none if one is not what it has to be."""
    refs = []
    for part, (front_bytes, header_crc, name, num_bytes, rows) in enumerate(_EACH_REF.findall(text)):
        ref = SegmentRef(name.decode("ascii"), int(num_bytes), int(front_bytes), int(header_crc), int(rows))
        expected = StoreSegment(commit.job, commit.id, rank, part).name
        if ref.name != expected or not SEGMENT_HEADER_LEN <= ref.front_bytes <= ref.num_bytes:
            return ()
        refs.append(ref)
    return tuple(refs)
