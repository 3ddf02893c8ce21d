"""SNAPSHOT: the state of the control partition up to an offset, in one or several records. Readers begin there.

:mod:`torchrec_stream_ckpt.format.folding` defines its contents. This is the record that carries a piece of it.
"""

from __future__ import annotations

import base64
import hashlib
import re
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torchrec_stream_ckpt.errors import CorruptionError, UnsupportedError
from torchrec_stream_ckpt.format.fields import Fields, PayloadRecord
from torchrec_stream_ckpt.format.frame import VERSION, Buffer, Header, Kind, json_frame, parse_header, payload_of
from torchrec_stream_ckpt.format.parsing import from_base64, unpacked
from torchrec_stream_ckpt.format.schema import canonical

PIECE_BYTES = 700_000
"""Largest number of packed bytes in one record, so that its JSON fits a frame."""
MAX_PARTS = 256
MAX_BYTES = 2**30
"""Limit of the unpacked bytes."""
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class Base:
    """First record in a control log file whose front was deleted."""

    job: bytes
    base: int
    """Offset of the first record after this one."""

    def to_frame(self) -> bytes:
        body = {"job": self.job.hex(), "base": self.base}
        return bytes(json_frame(Header(Kind.BASE, self.job, 0), canonical(body)))

    @classmethod
    def from_frame(cls, frame: Buffer) -> Base:
        """Read and check the record.

        Raises:
            CorruptionError: it is damaged.
        """
        header = parse_header(frame)
        raw = Fields(payload_of(header, frame), "BASE", cls, header.version, job=header.job.hex())
        return cls(header.job, raw.take("base", int))


@dataclass(frozen=True, slots=True)
class Snapshot(PayloadRecord):
    """One part of a snapshot of the control partition. It changes no decision that follows from other records."""

    KIND: ClassVar[Kind] = Kind.SNAPSHOT

    job: bytes
    generation: int
    """Newest generation that was claimed."""
    incarnation: str
    """Identity of the log. The offsets are meaningless in another one."""
    upto: int
    """Offset of the last record that it covers."""
    crc: int
    """CRC32C of that record."""
    part: int
    parts: int
    num_bytes: int
    """Length of the unpacked bytes of all parts."""
    digest: str
    """SHA-256 of the packed bytes of all parts, 64 hex digits."""
    piece: str
    """Packed bytes of this part, base64."""
    mac: str = ""
    version: int = field(default=VERSION, compare=False)

    @property
    def key(self) -> tuple[int, int, int, str]:
        """Key that the parts of one snapshot share."""
        return self.upto, self.parts, self.num_bytes, self.digest

    @property
    def packed(self) -> bytes:
        return base64.b64decode(self.piece)

    def check(self) -> None:
        if not _DIGEST.fullmatch(self.digest):
            raise CorruptionError(f"SNAPSHOT.digest is {self.digest!r:.80}, expected {_DIGEST.pattern}")
        if not self.part < self.parts <= MAX_PARTS or self.num_bytes > MAX_BYTES:
            raise CorruptionError(f"SNAPSHOT is too large: part {self.part} of {self.parts}, {self.num_bytes} bytes")
        length = len(from_base64(self.piece, "SNAPSHOT.piece"))
        if not 0 < length <= PIECE_BYTES:
            raise CorruptionError(f"SNAPSHOT.piece has {length} bytes")


def pack(body: bytes, job: bytes, generation: int, incarnation: str, upto: int, crc: int) -> list[Snapshot]:
    """Split ``body`` into the records that carry it.

    Raises:
        UnsupportedError: it is larger than a reader accepts.
    """
    packed = zlib.compress(body, 6)
    pieces = [packed[begin : begin + PIECE_BYTES] for begin in range(0, len(packed), PIECE_BYTES)]
    if len(pieces) > MAX_PARTS or len(body) > MAX_BYTES:
        raise UnsupportedError(f"a snapshot of the control partition is too large: {len(body)} bytes")
    digest = hashlib.sha256(packed).hexdigest()
    return [
        Snapshot(
            job,
            generation,
            incarnation,
            upto,
            crc,
            part,
            len(pieces),
            len(body),
            digest,
            base64.b64encode(piece).decode("ascii"),
        )
        for part, piece in enumerate(pieces)
    ]


def unpack(parts: Sequence[Snapshot]) -> bytes:
    """Unpack all parts of one snapshot, given in order. Allocates no more than they declare.

    Raises:
        CorruptionError: the result is not the bytes that were packed.
    """
    packed, first = b"".join(part.packed for part in parts), parts[0]
    if hashlib.sha256(packed).hexdigest() != first.digest:
        raise CorruptionError("the parts of a SNAPSHOT do not match its digest")
    body = unpacked(packed, first.num_bytes, "a SNAPSHOT")
    if len(body) != first.num_bytes:
        raise CorruptionError(f"a SNAPSHOT does not unpack to the {first.num_bytes} bytes that it declares")
    return body


class Parts:
    """Collects the parts of the snapshot that covers most, in whatever order they arrive."""

    def __init__(self) -> None:
        self._key: tuple[int, int, int, str] | None = None
        self._found: dict[int, Snapshot] = {}

    def add(self, part: Snapshot) -> list[Snapshot] | None:
        """Add a part. Returns all parts in order if this was the last missing one."""
        if self._key is None or part.key > self._key:
            self._key, self._found = part.key, {}
        if part.key != self._key or part.part in self._found:
            return None
        self._found[part.part] = part
        return [self._found[number] for number in sorted(self._found)] if len(self._found) == part.parts else None
