"""Read rows of one generation after a committed marker, as the log receives them. No COMMIT vouches for them yet."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.frame import Header, Kind, check_pad, data_header, payload_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import IdEvents, RowsView, decode_events, decode_rows, distinct
from torchrec_stream_ckpt.inner import Log
from torchrec_stream_ckpt.util.types import LogSpan, grouped

BATCH_BYTES = 64 * 2**20
"""Most bytes of frames that one :meth:`Tail.read` hands out."""

Rows = tuple[int, int, RowsView]
"""Table, first column, rows."""


@dataclass(slots=True)
class _Stream:
    """Read position in one rank's stream."""

    partition: int
    offset: int
    """Offset at which reading continues: of a frame that was read, or of the first one that was not."""
    seq: int
    """Sequence number of the next frame."""
    chain: int
    has_read: bool = False
    """True if a frame at ``offset`` was read."""
    marks: dict[int, int] = field(default_factory=dict)
    """seq -> header_crc of each MARK that was read."""
    sent: list[tuple[int, int, npt.NDArray[np.int64]]] = field(default_factory=list)
    """(seq, table, ids) of rows that no marker has, and of rows that have got or lost a raw id since."""


class Tail:
    """Reads the log after a marker. A frame counts once it is complete; a torn frame is read again later.

    Args:
        log: The job's log.
        claim: CLAIM of the generation.
        at: A committed marker of it.
        between: Called after each frame that is read.
    """

    def __init__(self, log: Log, claim: Claim, at: Commit, between: Callable[[], None] = lambda: None) -> None:
        self._between = between
        self._log = log
        self._claim = claim
        self.at = at
        """The newest marker that it has reached, or where it began."""
        self._streams = {end.rank: _Stream(end.partition, end.end, end.frames, end.chain) for end in at.ranks}
        self._pending: list[tuple[int, Header, RowsView | IdEvents | None]] = []
        self._offsets: dict[int, int] = {}
        self._given: dict[tuple[int, int, int], tuple[int, npt.NDArray[np.int64]]] = {}
        """Rows that were read and not taken, some of which may have been applied: (table, ids) by rank, seq and
        header_crc of their frame."""
        self.has_more = False
        """True if the log had more rows than the last :meth:`read` has handed out."""
        self.is_undone = False
        """True if the rows that it has handed out are being undone: some may already have the marker's values. It then
        reaches no marker."""

    @property
    def partitions(self) -> frozenset[int]:
        """Partitions of the log that it reads."""
        return frozenset(stream.partition for stream in self._streams.values())

    @property
    def is_fresh(self) -> bool:
        """True if it has handed out nothing after its marker."""
        return not self._given and not any(stream.has_read for stream in self._streams.values())

    def is_over(self, lineage: Lineage) -> bool:
        """Return whether the generation has ended, or a newer one has been claimed: it will commit nothing more."""
        generation = self._claim.generation
        return lineage.newest_generation != generation or generation in lineage.ends

    def reaches(self, commit: Commit) -> bool:
        """Return whether this tail has handed out all rows of a marker, and they are the ones that it commits."""
        is_mine = commit.generation == self._claim.generation and not self._given and not self.is_undone
        return is_mine and all(self._streams[end.rank].marks.get(end.frames - 1) == end.chain for end in commit.ranks)

    def committed(self, commit: Commit) -> None:
        """Note that a marker that this tail reaches exists: its rows are no longer provisional."""
        self.at = commit
        tops = dict(sorted((end.partition, end.end) for end in commit.ranks))  # the highest end of each partition
        for end in commit.ranks:
            stream = self._streams[end.rank]
            stream.sent = [each for each in stream.sent if each[0] >= end.frames]
            stream.marks = {seq: crc for seq, crc in stream.marks.items() if seq >= end.frames}
            if stream.offset < tops[end.partition]:  # at a frame of the marker, which a trim may delete from now on
                stream.offset, stream.has_read = tops[end.partition], False

    def tables_after(self, commit: Commit) -> set[int]:
        """Return the tables of which rows newer than a marker of this generation were handed out."""
        frames = {end.rank: end.frames for end in commit.ranks}
        found = {each[1] for rank, stream in self._streams.items() for each in stream.sent if each[0] >= frames[rank]}
        return found | {table for (rank, seq, _), (table, _) in self._given.items() if seq >= frames[rank]}

    def provisional(self) -> dict[int, npt.NDArray[np.int64]]:
        """Return the rows that were handed out and that no marker has, by table; each once."""
        taken = ((table, ids) for stream in self._streams.values() for _, table, ids in stream.sent)
        found = grouped((*taken, *self._given.values()))
        return {table: distinct(np.concatenate(ids)) for table, ids in found.items()}

    def read(self, upto: Commit | None = None) -> list[Rows]:
        """Return the rows that have arrived since those that were :meth:`taken`, in order.

        They are returned again until they are taken.

        Args:
            upto: A committed marker whose rows are needed.

        Raises:
            StreamLostError: rows that were read are no longer in the log.
            CorruptionError: frames are out of order, or of another schema.
            LogUnavailableError: the log does not answer.
        """
        self._pending, self._offsets, self.has_more = [], {}, False
        partitions = {stream.partition for stream in self._streams.values()}
        ends = self._log.ends(self._claim.generation, partitions, self._known_ends(upto))
        for partition in sorted(partitions):
            mine = {rank: stream for rank, stream in self._streams.items() if stream.partition == partition}
            begin = min(stream.offset for stream in mine.values())
            self._check_end(partition, mine, ends[partition])
            if ends[partition] > begin:
                self._read_partition(LogSpan(self._claim.generation, partition, begin, ends[partition]), mine)
        self._given |= {
            (rank, header.seq, header.header_crc): (header.table, _rows_of(content))
            for rank, header, content in self._pending
            if content is not None
        }
        return [(header.table, header.col0, view) for _, header, view in self._pending if isinstance(view, RowsView)]

    @property
    def id_events(self) -> list[tuple[Header, IdEvents]]:
        """Id events that the last :meth:`read` has found, with their headers, in the order of each rank's stream."""
        return [(header, events) for _, header, events in self._pending if isinstance(events, IdEvents)]

    def _known_ends(self, upto: Commit | None) -> dict[int, int]:
        """Return the end that each partition has had, judging by the rows that were read and by a marker."""
        known = {end.partition: end.end for end in upto.ranks} if upto is not None else {}
        for each in self._streams.values():
            known[each.partition] = max(each.offset + each.has_read, known.get(each.partition, 0))
        return known

    def _check_end(self, partition: int, streams: Mapping[int, _Stream], end: int) -> None:
        """Check that the rows that were read still exist: a log that has lost its tail may later grow past it with
        other data."""
        reach = max(stream.offset for stream in streams.values())
        if end < reach or (end == reach and any(stream.has_read for stream in streams.values())):
            raise StreamLostError(
                f"the log ends at offset {end} but was read up to {reach}, so its end was lost",
                hint="continue following without the lost rows, or load the replica again",
                generation=self._claim.generation,
                partition=partition,
            )

    @property
    def has_read(self) -> bool:
        """True if the last :meth:`read` has found frames, of rows or not."""
        return bool(self._pending)

    def taken(self) -> None:
        """Note that the rows of the last :meth:`read` are applied."""
        for rank, header, view in self._pending:
            stream = self._streams[rank]
            stream.seq, stream.chain = header.seq + 1, header.header_crc
            if view is not None:
                stream.sent.append((header.seq, header.table, _rows_of(view).copy()))
                self._given.pop((rank, header.seq, header.header_crc), None)
            elif header.kind is Kind.MARK:
                stream.marks[header.seq] = header.header_crc
        for stream in self._streams.values():
            reached = self._offsets.get(stream.partition, -1)
            stream.offset, stream.has_read = max(stream.offset, reached), stream.has_read or reached >= 0
        self._pending, self._offsets = [], {}

    def _read_partition(self, span: LogSpan, streams: dict[int, _Stream]) -> None:
        state = {rank: (stream.seq, stream.chain) for rank, stream in streams.items()}
        taken = 0
        try:
            for offset, frame in self._log.read(span):
                self._offsets[span.partition] = offset
                header = self._header_of(frame)
                if header is None or (header.generation, header.rank in state) != (self._claim.generation, True):
                    continue
                seq, chain = state[header.rank]
                if header.seq < seq:
                    continue
                self._check(header, seq, chain)
                view = self._decode(header, frame)
                state[header.rank] = (seq + 1, header.header_crc)
                self._pending.append((header.rank, header, view))
                taken += len(frame)
                self._between()
                if taken >= BATCH_BYTES:
                    self.has_more = True
                    break
        except _OutOfOrderError:
            raise
        except CorruptionError:
            # A frame that is being written looks like a damaged one. No marker that a reader applies can end after a
            # damaged frame: reading that marker reports the place.
            return

    def _header_of(self, frame: memoryview) -> Header | None:
        """Return the header of a frame; None for a record that is not a frame of this job. A gap in seq reveals a
        missing frame."""
        try:
            return data_header(frame, self._claim.job)
        except CorruptionError:
            return None

    def _decode(self, header: Header, frame: memoryview) -> RowsView | IdEvents | None:
        payload = payload_of(header, frame)
        if header.kind is Kind.IDS:
            return decode_events(header, payload, self._claim.schema.tables)
        if header.kind is Kind.PAD:
            check_pad(header, payload)
        if header.kind is not Kind.ROWS:
            return None
        if header.table >= len(self._claim.schema.tables):
            raise _OutOfOrderError(f"table number {header.table} is not in the schema", **header.place())
        return decode_rows(header, payload, self._claim.schema.tables[header.table])

    def _check(self, header: Header, seq: int, chain: int) -> None:
        claim = self._claim
        if header.schema_crc != claim.schema.crc:
            raise _OutOfOrderError("the frame belongs to another schema", **header.place())
        if header.seq != seq or header.chain != chain:
            raise _OutOfOrderError(
                f"found seq {header.seq} after {header.chain:08x}, expected seq {seq} after {chain:08x}",
                **header.place(),
            )


def _rows_of(content: RowsView | IdEvents) -> npt.NDArray[np.int64]:
    return content.ids if isinstance(content, RowsView) else content.rows


class _OutOfOrderError(CorruptionError):
    """An error that a half-written frame cannot cause."""
