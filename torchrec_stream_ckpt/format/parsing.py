"""Checks that the readers of several formats share: of headers, strings of base64 and compressed bytes."""

from __future__ import annotations

import base64
import struct
import zlib
from typing import Any

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer

CRC = struct.Struct("<I")
"""Follows a header: the CRC32C of its bytes."""


def checked_header(
    data: Buffer, header: struct.Struct, magic: bytes, version: int, what: str, where: str
) -> tuple[Any, ...]:
    """Return the fields of a header. The first are its magic, version and length with its checksum, the last is zero.

    Raises:
        CorruptionError: it is short, altered, of another format or a newer version; ``what`` and ``where`` name it.
    """
    if len(data) < header.size + CRC.size:
        raise CorruptionError(f"{what} of {len(data)} bytes is shorter than its header", name=where)
    fields = header.unpack_from(data)
    if fields[0] != magic:
        raise CorruptionError(f"not a {what} of torchrec_stream_ckpt", name=where)
    if fields[1] > version:
        raise CorruptionError(
            f"{what} has format version {fields[1]}, this program reads up to {version}",
            hint="upgrade torchrec_stream_ckpt on the reading side",
            name=where,
        )
    if crc32c(memoryview(data)[: header.size]) != CRC.unpack_from(data, header.size)[0]:
        raise CorruptionError(f"{what} header's checksum does not match", name=where)
    if fields[1] < 1 or fields[2] != header.size + CRC.size or any(fields[-1]):
        raise CorruptionError(f"{what} header has an unknown version, kind or flag", name=where)
    return fields


def from_base64(text: str, what: str) -> bytes:
    """Decode a string of canonical base64.

    Raises:
        CorruptionError: it is not canonical base64; ``what`` names it.
    """
    try:
        packed = base64.b64decode(text, validate=True)
    except ValueError as error:
        raise CorruptionError(f"{what} is not base64: {error}") from None
    if base64.b64encode(packed).decode("ascii") != text:
        raise CorruptionError(f"{what} is not canonical base64")
    return packed


def unpacked(packed: Buffer, most_bytes: int, what: str, **where: Any) -> bytes:
    """Return what zlib has packed. Allocates at most one byte more than ``most_bytes``.

    Raises:
        CorruptionError: it cannot be unpacked, or is longer; ``what`` names it.
    """
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(packed, most_bytes + 1)
    except zlib.error as error:
        raise CorruptionError(f"{what} cannot be unpacked: {error}", **where) from None
    if len(plain) > most_bytes:
        raise CorruptionError(f"{what} unpacks to more than {most_bytes} bytes", **where)
    if not unpacker.eof or unpacker.unused_data:
        raise CorruptionError(f"{what} is cut short, or too long", **where)
    return plain
