"""COMMITs that are kept as they are in the log, and parsed when they are first used.

A log of a thousand generations has tens of thousands of COMMITs, and a reader uses few of them. Until one is opened,
only its checksums and the fields that decide whether it counts are read: job, generation, marker, nonce and HMAC.
:func:`parse_control`, which opens it, checks all fields.
"""

from __future__ import annotations

from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit, ControlRecord, parse_control
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Buffer, Header, Kind, parse_header, payload_of
from torchrec_stream_ckpt.format.record import signed_front


@dataclass(slots=True)
class PackedCommit:
    """A COMMIT whose other fields were not parsed. An immutable value: only the reader that made it changes it."""

    job: bytes
    generation: int
    marker: int
    nonce: str
    mac: str
    """HMAC. Empty if the COMMIT is not signed."""
    frame: bytes
    """The whole frame as in the log."""

    KIND = Kind.COMMIT

    @classmethod
    def of(cls, header: Header, frame: bytes) -> PackedCommit | None:
        """Find the deciding fields in canonical JSON, by the names around them. Returns None for other text.

        No string of JSON contains these names: its quotes are escaped.
        """
        front = b',"generation":%d,"job":"%s","mac":"' % (header.generation, header.job.hex().encode("ascii"))
        mac, has_marker, rest = frame.partition(front)[2].partition(b'","marker":%d,' % header.marker)
        nonce, has_ranks, _ = rest.rpartition(b'"nonce":"')[2].partition(b'","ranks":"')
        said = mac + nonce
        if not (has_marker and has_ranks and len(mac) in (0, 64) and said.isascii()) or b'"' in said or b"\\" in said:
            return None
        return cls(header.job, header.generation, header.marker, nonce.decode("ascii"), mac.decode("ascii"), frame)

    def signed_bytes(self) -> bytes:
        """Return the bytes that the HMAC covers: all fields except the HMAC."""
        signed = self.frame[HEADER_LEN:].rstrip(b" ").replace(b'"mac":"%s"' % self.mac.encode("ascii"), b'"mac":""', 1)
        return signed_front(Kind.COMMIT) + signed

    def open(self) -> Commit:
        """Parse all fields.

        Raises:
            CorruptionError: a field is invalid.
        """
        return open_commit(self.frame)


def open_commit(frame: bytes) -> Commit:
    """Return all fields of a COMMIT, each checked; raises as :meth:`PackedCommit.open`."""
    commit = parse_control(frame)
    assert isinstance(commit, Commit)
    return commit


def read_record(frame: Buffer, offset: int | None = None, *, serving: bool = False) -> ControlRecord | PackedCommit:
    """Parse a frame as :func:`parse_control` does, but leave a COMMIT packed."""
    try:
        header = parse_header(frame)
        if header.kind is Kind.COMMIT:
            payload_of(header, frame)
            if (packed := PackedCommit.of(header, bytes(frame))) is not None:
                return packed
    except CorruptionError:
        pass  # parsed below, for the error with its offset
    return parse_control(frame, offset, serving=serving)
