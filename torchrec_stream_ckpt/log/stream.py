"""Read one rank's stream up to a marker and check everything: job, generation, seq, chain, checksums."""

from __future__ import annotations

import logging
from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.format.control import Claim, Commit, Hello, Mark
from torchrec_stream_ckpt.format.frame import Header, Kind, check_pad, data_header, payload_of
from torchrec_stream_ckpt.format.lineage import Lineage, previous_commit
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.util.types import LogSpan, RankEnd, TableShard

log = logging.getLogger(__name__)

_HINT = "restore an older marker, or use another copy of the log"
_MOST_READ_BYTES = 64 * 2**20
"""Limit of the bytes of a rank that are read for its MARK alone."""
_told: set[tuple[bytes, int]] = set()
"""(job, partition) of which this process has already logged strays."""


@dataclass(slots=True)
class Strays:
    """Records in a data partition that are not frames of its job, or not at a valid position of the stream."""

    count: int = 0
    offset: int = 0
    """Offset of the first one."""
    why: str = ""

    def add(self, offset: int, why: str) -> None:
        if not self.count:
            self.offset, self.why = offset, why
        self.count += 1

    def __str__(self) -> str:
        return (
            f"{self.count} records that do not belong to this stream, the first one at offset {self.offset}: {self.why}"
        )

    def tell(self, job: bytes, partition: int) -> None:
        """Warn, once for each partition."""
        if self.count and (job, partition) not in _told:
            _told.add((job, partition))
            log.warning(
                "partition %d of the log holds %s. They are skipped and no data is missing; find the program "
                "that writes there",
                partition,
                self,
            )


def read_stream(
    log_: LogReader,
    commit: Commit,
    end: RankEnd,
    after: RankEnd | None = None,
    strays: Strays | None = None,
    *,
    payloads: bool = False,
) -> Iterator[tuple[Header, memoryview]]:
    """Yield (header, whole frame) of the frames of one rank in ``commit``'s generation, HELLO first, MARK last.

    With ``after``, the end of an earlier marker of the same stream, yields only later frames. The first one must
    continue the chain of the MARK there.

    Headers and their chain are checked here, and with ``payloads`` the payloads' checksums, too. Without it, the caller
    checks them with :func:`checked_payload`, because a reader needs few of the payloads. Frames of other ranks and
    generations in the same partition are skipped, and frames that a producer sent twice are yielded once. Any other
    record that is not the next frame of the stream is skipped as well, and counted in ``strays``. Seq and chain prove
    at the end that nothing is missing and nothing was inserted.

    Raises:
        CorruptionError: something is missing, out of order or altered; the error gives its place.
    """
    first, chain = (after.frames, after.chain) if after is not None else (0, 0)
    seen = array("I")
    """Header checksums of the frames from ``first`` on."""
    schema_crc, misfit = None, None
    strays = strays if strays is not None else Strays()
    span = LogSpan(commit.generation, end.partition, after.end if after is not None else end.begin, end.end)
    for offset, frame in log_.read(span):
        seq = first + len(seen)
        try:
            header = data_header(frame, commit.job)
        except CorruptionError as error:
            strays.add(offset, error.message)
            continue
        if (header.generation, header.rank) != (commit.generation, end.rank):
            continue
        if header.seq < first or (header.seq < seq and seen[header.seq - first] == header.header_crc):
            continue
        if header.seq != seq or header.chain != chain:
            why = f"found seq {header.seq} after {header.chain:08x}, expected seq {seq} after {chain:08x}"
            misfit = misfit or (why, seq, offset)
            strays.add(offset, why)
            continue
        if schema_crc is None:
            schema_crc = header.schema_crc
        if header.schema_crc != schema_crc:
            raise _located(CorruptionError("the schema changes within a generation"), commit, end, seq, offset)
        if header.kind is Kind.PAD:
            check_pad(header, checked_payload(header, frame, commit, end))
        elif payloads:
            checked_payload(header, frame, commit, end)
        chain = header.header_crc
        seen.append(chain)
        yield header, frame
        if seq + 1 == end.frames:
            break
    read = first + len(seen)
    if read != end.frames or chain != end.chain or (seen and header.kind is not Kind.MARK):
        message, seq, offset = misfit or (f"found {read} of {end.frames} frames up to this marker", read, end.end)
        if strays.count > (misfit is not None):
            message = f"{message}; the partition holds {strays}"
        raise _located(CorruptionError(message), commit, end, seq, offset)
    strays.tell(commit.job, end.partition)
    if not seen:
        return
    if (header.marker, header.step) != (commit.marker, commit.step):
        message = (
            f"found the MARK of marker {header.marker} at step {header.step}, expected {commit.id} at step "
            f"{commit.step}"
        )
        raise _located(CorruptionError(message), commit, end, header.seq, end.end)


def read_hello(log_: LogReader, claim: Claim, commit: Commit, end: RankEnd) -> Hello:
    """Read the first frame of a rank: its shards, and the schema that its generation claimed."""
    header, frame = next(read_stream(log_, commit, end))
    return check_hello(header, frame, claim, commit, end)


def held_by(log_: LogReader, claim: Claim, commit: Commit, end: RankEnd) -> tuple[TableShard, ...]:
    """Return the shards of a rank in its generation, from the CLAIM, or otherwise from its HELLO in the log."""
    if claim.layout is not None and end.rank < len(claim.layout):
        return claim.layout[end.rank]
    return read_hello(log_, claim, commit, end).shards


def check_hello(header: Header, frame: memoryview, claim: Claim, commit: Commit, end: RankEnd) -> Hello:
    """Return the payload of a rank's first frame, after comparing it with the CLAIM."""
    if header.kind is not Kind.HELLO:
        raise _located(
            CorruptionError(f"the stream begins with {header.kind.name}, expected HELLO"), commit, end, 0, end.begin
        )
    hello = Hello.from_json(checked_payload(header, frame, commit, end), header.version)
    if not header.schema_crc == hello.schema.crc == claim.schema.crc:
        raise _located(CorruptionError("the schema in HELLO differs from its CLAIM"), commit, end, 0, end.begin)
    if claim.layout is not None and hello.shards not in claim.layout[end.rank : end.rank + 1]:
        raise _located(CorruptionError("the shards in HELLO differ from its CLAIM"), commit, end, 0, end.begin)
    return hello


def read_mark(header: Header, frame: memoryview, commit: Commit, end: RankEnd) -> Mark:
    """Return the payload of a MARK frame."""
    payload = checked_payload(header, frame, commit, end)
    try:
        return Mark.from_json(payload, header.version)
    except CorruptionError as error:
        raise _located(error, commit, end, header.seq, None) from None


def proof_width(log_: LogReader, lineage: Lineage, commit: Commit) -> int | None:
    """Return the width of the windows of a marker's generation. None if its log does not record it.

    Reads only the frames of rank 0 for this marker. Returns None for a generation's first marker, which may hold whole
    tables.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    if previous_commit(lineage, commit.id) is None:
        return None
    mark = _mark_in_log(log_, lineage, commit, commit.ranks[0])
    return mark.proof.width if mark is not None and mark.proof is not None else None


def newest_mark(log_: LogReader, lineage: Lineage, generation: int, rank: int = 0) -> Mark | None:
    """Read a rank's MARK at the newest marker of a generation, which holds few rows.

    Returns None if the log no longer holds it, or if it is the generation's first one, which may hold all rows, and is
    large.

    Raises:
        LogUnavailableError: the log does not answer.
    """
    newest = lineage.find(lineage.newest_of(generation))
    end = newest.ranks[rank]
    if previous_commit(lineage, newest.id) is None and end.num_bytes > _MOST_READ_BYTES:
        return None
    return _mark_in_log(log_, lineage, newest, end)


def _mark_in_log(log_: LogReader, lineage: Lineage, commit: Commit, end: RankEnd) -> Mark | None:
    previous = previous_commit(lineage, commit.id)
    try:
        *_, (header, frame) = read_stream(log_, commit, end, previous.ranks[end.rank] if previous is not None else None)
        return read_mark(header, frame, commit, end)
    except (CorruptionError, TrimmedError):  # another alert reports it
        return None


def checked_payload(header: Header, frame: memoryview, commit: Commit, end: RankEnd) -> memoryview:
    """Return the payload of a frame from :func:`read_stream`, after comparing its checksum."""
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
    known = {key: str(value) for key, value in where.items() if value is not None}
    return CorruptionError(error.message, hint=error.hint or _HINT, **known)
