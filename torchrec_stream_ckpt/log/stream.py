"""Read one rank's stream up to a marker and check everything: job, generation, seq, chain, checksums."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark
from torchrec_stream_ckpt.format.frame import Header, Kind, parse_header, payload_of
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.types import LogSpan, RankEnd

_HINT = "restore an older marker, or another copy of the log"


def read_stream(
    log: LogReader, commit: Commit, end: RankEnd, after: RankEnd | None = None
) -> Iterator[tuple[Header, memoryview]]:
    """(header, whole frame) of the frames of one rank in ``commit``'s generation, HELLO first, MARK last.

    With ``after``, the end of an earlier marker of the same stream, only what is behind it: its first frame must
    follow on the MARK there.

    Headers and their chain are checked here; the payload's checksum is the caller's, with
    ``payload_of``, because a reader needs few of the payloads. Frames of other ranks and generations in
    the same partition are passed over; frames that a producer sent twice come once.

    Raises:
        CorruptionError: something is missing, out of order, altered or of another job; says where.
    """
    first, chain = (after.frames, after.chain) if after is not None else (0, 0)
    seen = array("I")
    """Header checksums of the frames from ``first`` on."""
    schema_crc = None
    span = LogSpan(commit.generation, end.partition, after.end if after is not None else end.begin, end.end)
    for offset, frame in log.read(span):
        seq = first + len(seen)
        try:
            header = parse_header(frame)
        except CorruptionError as error:
            raise _located(error, commit, end, seq, offset) from None
        if header.job != commit.job:
            raise _located(CorruptionError("frame of another job"), commit, end, seq, offset)
        if (header.generation, header.rank) != (commit.generation, end.rank):
            continue
        if header.seq < first or (header.seq < seq and seen[header.seq - first] == header.header_crc):
            continue
        if header.seq != seq or header.chain != chain:
            message = f"found seq {header.seq} behind {header.chain:08x}, expected seq {seq} behind {chain:08x}"
            raise _located(CorruptionError(message), commit, end, seq, offset)
        if schema_crc is None:
            schema_crc = header.schema_crc
        if header.schema_crc != schema_crc:
            raise _located(CorruptionError("the schema changes inside a generation"), commit, end, seq, offset)
        chain = header.header_crc
        seen.append(chain)
        yield header, frame
        if seq + 1 == end.frames:
            break
    read = first + len(seen)
    if read != end.frames or chain != end.chain or (seen and header.kind is not Kind.MARK):
        message = f"{read} of {end.frames} frames lead to this marker"
        raise _located(CorruptionError(message), commit, end, read, end.end)
    if not seen:
        return
    if (header.marker, header.step) != (commit.marker, commit.step):
        message = f"MARK is of marker {header.marker} at step {header.step}, not of {commit.id} at step {commit.step}"
        raise _located(CorruptionError(message), commit, end, header.seq, end.end)


def read_hello(log: LogReader, claim: Claim, commit: Commit, end: RankEnd) -> Hello:
    """The first frame of a rank: its shards, and the schema that its generation claimed."""
    header, frame = next(read_stream(log, commit, end))
    if header.kind is not Kind.HELLO:
        raise _located(CorruptionError(f"begins with {header.kind.name}"), commit, end, 0, end.begin)
    hello = Hello.from_json(checked_payload(header, frame, commit, end), header.version)
    if not header.schema_crc == hello.schema.crc == claim.schema.crc:
        raise _located(CorruptionError("HELLO has another schema than its CLAIM"), commit, end, 0, end.begin)
    return hello


def read_mark(header: Header, frame: memoryview, commit: Commit, end: RankEnd) -> Mark:
    """The payload of a MARK frame."""
    return Mark.from_json(checked_payload(header, frame, commit, end), header.version)


def checked_payload(header: Header, frame: memoryview, commit: Commit, end: RankEnd) -> memoryview:
    """The payload of a frame of :func:`read_stream`, its checksum compared."""
    try:
        return payload_of(header, frame)
    except CorruptionError as error:
        raise _located(error, commit, end, header.seq, None) from None


def _located(error: CorruptionError, commit: Commit, end: RankEnd, seq: int, offset: int | None) -> CorruptionError:
    where: dict[str, object] = {
        "generation": commit.generation,
        "rank": end.rank,
        "seq": seq,
        "partition": end.partition,
        "offset": offset,
        **error.where,
    }
    return CorruptionError(error.message, hint=error.hint or _HINT, **{key: str(value) for key, value in where.items()})
