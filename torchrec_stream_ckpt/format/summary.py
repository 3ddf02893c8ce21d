"""Summary: the manifests of several markers, and the fronts of their segments, in one object.

It is a copy and has no authority: a reader checks each part like the object that the part was taken from.
Specified in docs/format.md.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.parsing import CRC, checked_header, unpacked
from torchrec_stream_ckpt.util.layout import parse_manifest_name, parse_store_segment

MAGIC = b"TRSU"
VERSION = 1
HEADER_LEN = 64
MAX_UNPACKED_BYTES = 64 * 2**20
"""Limit of one summary in a reader's memory, in bytes."""

_HEADER = struct.Struct(
    "<"
    "4s"  # magic
    "H"  # version
    "H"  # header_len
    "16s"  # job
    "I"  # parts
    "I"  # body_crc: of the body, unpacked
    "Q"  # length of the body, unpacked
    "20s"  # reserved, zero
)
assert _HEADER.size + CRC.size == HEADER_LEN

_PART = struct.Struct(
    "<"
    "Q"  # length of the object
    "I"  # bytes of it that follow
    "H"  # length of its name
)


class Part(NamedTuple):
    """Beginning of an object: a whole manifest, or the bytes of a segment before its chunks."""

    num_bytes: int
    """Length of the object."""
    data: bytes


@dataclass(frozen=True, slots=True)
class Summary:
    """Parts of the objects of one job, by their names."""

    job: bytes
    parts: Mapping[str, Part]

    def to_bytes(self) -> bytes:
        """Pack the summary, sorted by name."""
        body = bytearray()
        for name, part in sorted(self.parts.items()):
            text = name.encode("ascii")
            body += _PART.pack(part.num_bytes, len(part.data), len(text)) + text + part.data
        fields = (MAGIC, VERSION, HEADER_LEN, self.job, len(self.parts), crc32c(body), len(body), bytes(20))
        header = _HEADER.pack(*fields)
        return header + CRC.pack(crc32c(header)) + zlib.compress(body, 6)

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Summary:
        """Read and check a summary.

        Raises:
            CorruptionError: it was altered, is of a newer version, or is not a summary; the error names the object.
        """
        view = memoryview(data)
        job, count, crc, length, _ = checked_header(view, _HEADER, MAGIC, VERSION, "summary", where)[3:]
        if length > MAX_UNPACKED_BYTES:
            raise CorruptionError("summary header has an impossible length", name=where)
        body = unpacked(view[HEADER_LEN:], length, "summary", name=where)
        if len(body) != length:
            raise CorruptionError("summary does not have the length in its header", name=where)
        if crc32c(body) != crc:
            raise CorruptionError("summary was altered: its checksum does not match", name=where)
        parts = dict[str, Part]()
        before = ""
        for name, part in _parts(body, where):
            if name <= before or not _is_of(job, name, part):
                raise CorruptionError(f"summary has an invalid part {name!r:.120}", name=where)
            parts[name], before = part, name
        if len(parts) != count:
            raise CorruptionError(f"summary has {len(parts)} parts, expected {count}", name=where)
        return cls(job, parts)


def part_bytes(name: str, data: Buffer) -> int:
    """Return the bytes that a part takes, unpacked."""
    return _PART.size + len(name) + len(data)


def _parts(body: bytes, where: str) -> Iterator[tuple[str, Part]]:
    at = 0
    while at < len(body):
        begin = at + _PART.size
        if begin > len(body):
            raise CorruptionError("summary ends inside a part", name=where)
        num_bytes, data_len, name_len = _PART.unpack_from(body, at)
        middle, at = begin + name_len, begin + name_len + data_len
        if at > len(body) or data_len > num_bytes:
            raise CorruptionError("summary has a part of impossible length", name=where)
        yield body[begin:middle].decode("ascii", "replace"), Part(num_bytes, body[middle:at])


def _is_of(job: bytes, name: str, part: Part) -> bool:
    """Return whether a part may be one of this job: a whole manifest, or the beginning of an interval's segment."""
    if (manifest := parse_manifest_name(name)) is not None:
        return manifest[0] == job and len(part.data) == part.num_bytes
    segment = parse_store_segment(name)
    return segment is not None and segment.job == job
