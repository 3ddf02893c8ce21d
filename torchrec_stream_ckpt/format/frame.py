"""Frame codec: a 128-byte header and its payload. The byte layout is specified in docs/format.md.

A frame is self-contained, never split and never pickled. The codec knows no transport: it takes and returns bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Any, TypeAlias

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError
from torchrec_stream_ckpt.native.kernel import checksum

Buffer: TypeAlias = bytes | bytearray | memoryview

MAGIC = b"TRSC"
VERSION = 2
"""Version of a frame that needs no newer one. Every version up to :data:`NEWEST_VERSION` is readable."""
CHANGED_VERSION = 3
"""Version of a HELLO, CLAIM or SERVE with a changed schema."""
NEWEST_VERSION = 4
"""Version of a CLAIM that announces features, of a MARK with digests of dense state, and of padding."""
HEADER_LEN = 128
ALIGNMENT = 64
MAX_FRAME_BYTES = 1_000_000  # one Kafka record under the default broker limit, header included
MAX_SECTIONS = 8
NO_TABLE = 0xFFFFFFFF
CODEC_NONE = 0
PER_ROW = 0x80  # bit of a section's dtype code: one value per row instead of one per column


class Kind(IntEnum):
    """Kind of a frame. The numbers are on disk: never changed, never reused."""

    HELLO = 1  # first frame of a rank in a generation: schema and shards
    ROWS = 2  # rows of one table shard, with their optimizer state
    MARK = 3  # this rank has sent all rows that belong to a marker
    IDS = 4  # raw ids that were assigned to rows of one table shard, or evicted from them
    PAD = 5  # zeros, so that the next frame begins at a multiple of a block
    CLAIM = 16  # control: a trainer opens a generation
    COMMIT = 17  # control: a marker exists
    TRIM = 18  # control: log data up to a marker may be deleted; a store holds it
    SERVE = 19  # control: CLAIM of a serving stream, whose rows are lossy; no restore may use them
    END = 20  # control: last record of a generation, from its trainer
    NOTE = 21  # control: metadata of a marker, added later
    SNAPSHOT = 22  # control: a part of the folded control partition up to an offset
    BASE = 23  # first in a control file that was cut: the offset of the record after it


_OLDEST = (1, 2)
_VERSIONS: dict[Kind, tuple[int, ...]] = {
    Kind.HELLO: (1, 2, CHANGED_VERSION),
    Kind.MARK: (1, 2, NEWEST_VERSION),
    Kind.IDS: (2,),
    Kind.PAD: (NEWEST_VERSION,),
    Kind.CLAIM: (1, 2, CHANGED_VERSION, NEWEST_VERSION),
    Kind.SERVE: (1, 2, CHANGED_VERSION),
    Kind.END: (2,),
    Kind.NOTE: (2,),
    Kind.SNAPSHOT: (2,),
    Kind.BASE: (2,),
}
"""Valid versions of a kind. Kinds that are not listed have versions 1 and 2."""

DATA_KINDS = frozenset({Kind.HELLO, Kind.ROWS, Kind.MARK, Kind.IDS, Kind.PAD})
"""Kinds of frames in a data partition. All others are control records."""

_NO_ROWS = ("rows", "col0", "cols", "dtypes")
_NO_STREAM = (*_NO_ROWS, "rank", "seq", "schema_crc", "chain")
UNUSED_FIELDS: dict[Kind, tuple[str, ...]] = {
    Kind.HELLO: (*_NO_ROWS, "marker"),
    Kind.MARK: _NO_ROWS,
    Kind.IDS: ("col0", "cols"),
    Kind.PAD: (*_NO_ROWS, "step", "marker"),
    Kind.CLAIM: (*_NO_STREAM, "step", "marker"),
    Kind.SERVE: (*_NO_STREAM, "step", "marker"),
    Kind.COMMIT: _NO_STREAM,
    Kind.TRIM: (*_NO_STREAM, "step"),
    Kind.NOTE: (*_NO_STREAM, "step"),
    Kind.END: (*_NO_STREAM, "marker"),
    Kind.SNAPSHOT: (*_NO_STREAM, "step", "marker"),
    Kind.BASE: (*_NO_STREAM, "generation", "step", "marker"),
}
"""Header fields that have no meaning for a kind, and are 0 there."""
_WITH_TABLE = frozenset({Kind.ROWS, Kind.IDS})
_KINDS = {
    int(kind): (kind, _VERSIONS.get(kind, _OLDEST), UNUSED_FIELDS.get(kind, ()), kind in _WITH_TABLE) for kind in Kind
}
"""Properties above by kind number. They are looked up once per frame that is read, because an enum is slow to hash."""
_NO_KIND: tuple[None, tuple[int, ...], tuple[str, ...], bool] = (None, (), (), False)

# The numbers are on disk: never changed, never reused.
DTYPE_CODES = {
    "float32": 1,
    "float16": 2,
    "bfloat16": 3,
    "float64": 4,
    "int32": 5,
    "int64": 6,
    "uint8": 7,
}
DTYPE_BYTES = {
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}

_HEADER = struct.Struct(
    "<"
    "4s"  # magic
    "H"  # version
    "H"  # header_len
    "B"  # kind
    "B"  # flags, all zero
    "B"  # codec
    "B"  # num_sections
    "I"  # rank
    "16s"  # job
    "I"  # generation
    "I"  # table
    "Q"  # seq
    "Q"  # step
    "Q"  # marker
    "I"  # rows
    "I"  # col0
    "I"  # cols
    "I"  # schema_crc
    "8s"  # dtypes, one byte per section, padded with zeros
    "8H"  # section offsets from the payload's first byte, in units of 64 bytes
    "I"  # payload_len
    "I"  # raw_len, length before the codec
    "I"  # payload_crc
    "I"  # chain: header_crc of this rank's previous frame
    "I"  # reserved, zero
)
_CRC = struct.Struct("<I")
_NO_OFFSETS = (0,) * MAX_SECTIONS
assert _HEADER.size + _CRC.size == HEADER_LEN
_COMMIT = struct.Struct("<16s 88x I 16x I")
"""Header fields that give the length of a COMMIT and show that its header is undamaged."""
_COMMIT_FRONT = struct.pack("<4sHHBBBBI", MAGIC, VERSION, HEADER_LEN, Kind.COMMIT, 0, CODEC_NONE, 0, 0)


def aligned(num_bytes: int) -> int:
    """Return the smallest multiple of 64 that is at least ``num_bytes``."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(slots=True)
class Header:
    """Fields of a frame's header. Lengths in bytes, offsets relative to the payload."""

    kind: Kind
    job: bytes
    generation: int
    rank: int = 0
    seq: int = 0
    step: int = 0
    marker: int = 0
    table: int = NO_TABLE
    rows: int = 0
    col0: int = 0
    cols: int = 0
    schema_crc: int = 0
    dtypes: tuple[int, ...] = ()
    section_offsets: tuple[int, ...] = ()
    payload_len: int = 0
    payload_crc: int = 0
    chain: int = 0
    version: int = VERSION
    header_crc: int = 0
    """Checksum of the header, set by :meth:`pack_into` and :func:`parse_header`."""

    def pack_into(self, frame: bytearray | memoryview) -> None:
        """Write the header, 128 bytes, to the beginning of ``frame`` and keep its checksum."""
        _HEADER.pack_into(
            frame,
            0,
            MAGIC,
            self.version,
            HEADER_LEN,
            self.kind,
            0,
            CODEC_NONE,
            len(self.dtypes),
            self.rank,
            self.job,
            self.generation,
            self.table,
            self.seq,
            self.step,
            self.marker,
            self.rows,
            self.col0,
            self.cols,
            self.schema_crc,
            bytes(self.dtypes),
            *_in_units(self.section_offsets),
            self.payload_len,
            self.payload_len,
            self.payload_crc,
            self.chain,
            0,
        )
        self.header_crc = crc32c(memoryview(frame)[: _HEADER.size])
        _CRC.pack_into(frame, _HEADER.size, self.header_crc)

    def place(self) -> dict[str, Any]:
        """Return coordinates for an error message."""
        return {"generation": self.generation, "rank": self.rank, "seq": self.seq}


@lru_cache(maxsize=4096)
def _in_units(offsets: tuple[int, ...]) -> tuple[int, ...]:
    """Return all eight section offsets as in a header."""
    return (*(offset // ALIGNMENT for offset in offsets), *_NO_OFFSETS[len(offsets) :])


def parse_header(data: Buffer) -> Header:
    """Read and check a header.

    Raises:
        CorruptionError: the bytes are not our header, or have a newer version, a bad checksum or impossible lengths.
            The message says which.
    """
    if len(data) < HEADER_LEN:
        raise CorruptionError(f"frame of {len(data)} bytes is shorter than a header")
    magic, version, header_len, kind, flags, codec, count, rank, job, *rest = _HEADER.unpack_from(data, 0)
    if magic != MAGIC:
        raise CorruptionError(
            "not a frame of torchrec_stream_ckpt", hint="check that this log or topic belongs to the job"
        )
    if version > NEWEST_VERSION:
        raise CorruptionError(
            f"frame has format version {version}, this program reads up to {NEWEST_VERSION}",
            hint="upgrade torchrec_stream_ckpt on the reading side",
        )
    (crc,) = _CRC.unpack_from(data, _HEADER.size)
    if crc32c(memoryview(data)[: _HEADER.size]) != crc:
        raise CorruptionError("header checksum does not match")
    generation, table, seq, step, marker, rows, col0, cols, schema_crc, dtypes, *tail = rest
    offsets, (payload_len, raw_len, payload_crc, chain, reserved) = tail[:8], tail[8:]
    named, versions, unused, has_table = _KINDS.get(kind, _NO_KIND)
    known = version in versions and header_len == HEADER_LEN and not flags and codec == CODEC_NONE and not reserved
    if named is None or not known:
        raise CorruptionError("header has an unknown version, kind, flag or codec")
    if not generation and kind < Kind.CLAIM:
        raise CorruptionError(f"the header of {named.name} has generation 0, expected 1 or more")
    if count > MAX_SECTIONS or payload_len % ALIGNMENT or raw_len != payload_len:
        raise CorruptionError("header has impossible lengths")
    if any(dtypes[count:]) or any(offsets[count:]):
        raise CorruptionError("header describes more sections than it counts")
    if payload_len > MAX_FRAME_BYTES - HEADER_LEN:
        raise CorruptionError(f"payload of {payload_len} bytes is larger than a frame may be")
    header = Header(
        kind=named,
        job=job,
        generation=generation,
        rank=rank,
        seq=seq,
        step=step,
        marker=marker,
        table=table,
        rows=rows,
        col0=col0,
        cols=cols,
        schema_crc=schema_crc,
        dtypes=tuple(dtypes[:count]),
        section_offsets=tuple([offset * ALIGNMENT for offset in offsets[:count]]),
        payload_len=payload_len,
        payload_crc=payload_crc,
        chain=chain,
        version=version,
        header_crc=crc,
    )
    used = [name for name in unused if getattr(header, name)]
    if table != NO_TABLE and not has_table:
        used.append("table")
    if used:
        raise CorruptionError(f"the header of {named.name} sets {', '.join(used)}, which this kind does not have")
    return header


def commit_payload_len(data: Buffer, at: int) -> int | None:
    """Return the payload length of the COMMIT whose header begins at ``at``. None unless it is one, undamaged."""
    front, length, crc = _COMMIT.unpack_from(data, at)
    if front != _COMMIT_FRONT or length > MAX_FRAME_BYTES - HEADER_LEN or crc32c(data[at : at + HEADER_LEN - 4]) != crc:
        return None
    return int(length)


def seal(header: Header, frame: bytearray | memoryview, payload_crc: int | None = None) -> None:
    """Finish a frame whose payload begins at byte 128: write its header, with the checksum of the payload.

    Args:
        header: The header.
        frame: The frame.
        payload_crc: Checksum of the payload. If None, it is computed.
    """
    if payload_crc is None:
        payload_crc = checksum(memoryview(frame)[HEADER_LEN : HEADER_LEN + header.payload_len])
    header.payload_crc = payload_crc
    header.pack_into(frame)


def payload_of(header: Header, frame: Buffer) -> memoryview:
    """Return the payload of a whole frame, checked against the header's length and checksum."""
    payload = memoryview(frame)[HEADER_LEN:]
    if len(payload) != header.payload_len:
        raise CorruptionError(
            f"frame holds {len(payload)} payload bytes, but its header has {header.payload_len}",
            **header.place(),
        )
    if checksum(payload) != header.payload_crc:
        raise CorruptionError("payload checksum does not match", **header.place())
    return payload


def seal_pad(header: Header, frame: memoryview) -> None:
    """Make memory a frame of zeros. The header is of kind PAD and has its length."""
    payload = frame[HEADER_LEN:]
    assert len(payload) == header.payload_len
    payload[:] = bytes(len(payload))
    seal(header, frame, _crc_of_zeros(len(payload)))


@lru_cache(maxsize=128)
def _crc_of_zeros(num_bytes: int) -> int:
    return checksum(memoryview(bytes(num_bytes)))


def check_pad(header: Header, payload: memoryview) -> None:
    """Refuse padding that is not all zeros.

    Raises:
        CorruptionError: a byte is not zero.
    """
    if payload.tobytes().count(0) != len(payload):
        raise CorruptionError("the payload of PAD is not all zeros", **header.place())


def json_frame(header: Header, text: bytes) -> bytearray:
    """Make a sealed frame whose payload is JSON, padded with spaces to the alignment."""
    header.payload_len = aligned(len(text))
    if HEADER_LEN + header.payload_len > MAX_FRAME_BYTES:
        raise UnsupportedError(
            f"{header.kind.name} of {len(text)} bytes does not fit a frame: too many tables or ranks"
        )
    frame = bytearray(HEADER_LEN) + text + b" " * (header.payload_len - len(text))
    seal(header, frame)
    return frame


def data_header(frame: Buffer, job: bytes) -> Header:
    """Return the header of a record in a data partition of ``job``.

    Raises:
        CorruptionError: the record is a stray; the error gives the reason.
    """
    header = parse_header(frame)
    if header.job != job:
        raise CorruptionError("frame of another job")
    if header.kind not in DATA_KINDS:
        raise CorruptionError(f"{header.kind.name} is not a frame of a data partition")
    return header
