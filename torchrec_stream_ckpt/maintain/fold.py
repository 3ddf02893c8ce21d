"""Fold one rank's interval of the log into segments. The marker is put into the store when all ranks' segments exist.

The output is a function of the stream alone. So two processes that do the same work write the same bytes, and a killed
process begins its interval again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, wait
from dataclasses import dataclass, field

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Mark
from torchrec_stream_ckpt.format.frame import HEADER_LEN as FRAME_HEADER_LEN
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.interval import Interval
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.rows import RowsView, decode_events, decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import (
    HEADER_LEN,
    Chunk,
    Front,
    SegmentId,
    front_bytes_of,
    lay_out,
    parse_front,
)
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import check_hello, checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.write_once import put_once
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import TableShard

SEGMENT_BYTES = 128 * 2**20
"""Bytes of rows held in memory before they are written: a larger interval takes several parts. Part of the store's
format, because every process that folds the same interval must split it at the same places.
"""


FRONT_BYTES = 64 * 2**10
"""Bytes read of a segment to get its directory with one request: room for some 1,300 chunks."""


@dataclass(eq=False)
class SegmentWriter:
    """Puts the parts of one interval or fold into the store, one after the other.

    Args:
        objects: The store.
        schema: Schema of the rows.
        name: Returns the name of a part's object.
        segment: Returns the identity of a part.
        background: Thread that writes a part while other rows are gathered. None if :meth:`put` writes.
    """

    objects: Objects
    schema: Schema
    name: Callable[[int], str]
    segment: Callable[[int], SegmentId]
    background: Executor | None = None
    _writing: Future[None] | None = field(default=None, init=False)
    refs: list[SegmentRef] = field(default_factory=list, init=False)
    """Parts that are written."""

    def put(self, rows: RowSorter, *, last: bool, notes: Notes | None = None, part: int | None = None) -> None:
        """Write the rows of ``rows`` as the next part. ``rows`` must stay unchanged until the next call.

        Args:
            rows: Rows to write.
            last: Whether no part follows.
            notes: Notes to store with the last part of an interval.
            part: Number of the part. None to count parts from 0.
        """
        text = notes.to_json() if notes is not None else b""
        version = version_of(notes)
        self.finish()
        chunks, part = rows.chunks(), part if part is not None else len(self.refs)
        if self.background is None:
            self._put(part, chunks, last, text, version)
        else:
            self._writing = self.background.submit(self._put, part, chunks, last, text, version)

    def finish(self) -> tuple[SegmentRef, ...]:
        """Return all parts once they are written. Raises as :meth:`put`."""
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        return tuple(self.refs)

    def drop(self) -> None:
        """Write nothing more. Waits for a part that is being written, and ignores its result."""
        if self._writing is not None and not self._writing.cancel():
            wait([self._writing])

    def _put(self, part: int, chunks: Sequence[Chunk], last: bool, notes: bytes, version: int) -> None:
        parts, front_bytes, crc = lay_out(
            self.segment(part), chunks, last=last, schema_crc=self.schema.crc, notes=notes, version=version
        )
        failpoint("fold.segment")
        put_once(self.objects, self.name(part), parts)
        failpoint("fold.segment_put")
        front = parse_front(parts[0], self.name(part))
        self.refs.append(SegmentRef(self.name(part), front.num_bytes, front_bytes, crc, front.rows))


def version_of(notes: Notes | None) -> int:
    """Return the format version of a segment: the lowest that can have these notes."""
    if notes is None or notes.mark.proof is None:
        return 1
    return 2 if notes.mark.dense_proof is None else 3


def fold_interval(
    log: LogReader,
    objects: Objects,
    interval: Interval,
    shards: tuple[TableShard, ...] | None,
    progress: Callable[[int], None] = lambda _: None,
    seen: Callable[[Header, memoryview], None] = lambda header, payload: None,
) -> tuple[SegmentRef, ...]:
    """Read one rank's interval, check every frame and write its segments, as :func:`begin_fold` does.

    Args:
        log, objects, interval, shards, progress: As in :func:`begin_fold`.
        seen: Called with header and payload of each frame that was checked.
    """
    return begin_fold(log, objects, interval, shards, progress, seen=seen).finish()


def begin_fold(
    log: LogReader,
    objects: Objects,
    interval: Interval,
    shards: tuple[TableShard, ...] | None,
    progress: Callable[[int], None] = lambda _: None,
    background: Executor | None = None,
    *,
    seen: Callable[[Header, memoryview], None] = lambda header, payload: None,
) -> SegmentWriter:
    """Read one rank's interval, check every frame and write its segments, the last of them perhaps in the background.

    Memory: the rows of one segment twice, and one frame.

    Args:
        log: The job's log.
        objects: The store.
        interval: Interval of a committed marker.
        shards: Shards in the rank's HELLO. None at the first marker of a generation, whose interval contains it.
        progress: Called with the bytes of each frame.
        background: Threads that write the last part. None to write it before returning.
        seen: Called with header and payload of each frame that was checked.

    Returns:
        Writer whose ``finish`` returns the segments once all of them are written.

    Raises:
        CorruptionError: the log is damaged, incomplete, or of another job or schema; the error names the place.
        StoreUnavailableError: a segment was not written.
    """
    schema = interval.claim.schema
    writer = SegmentWriter(objects, schema, interval.name, interval.segment, background)
    rows = RowSorter(schema)
    frames = IntervalFrames(log, interval, shards)
    for header, payload, view in frames:
        if view is not None:
            rows.add(header.table, header.col0, header.cols, view)
            if rows.num_bytes >= SEGMENT_BYTES:
                writer.put(rows, last=False)
                writer.finish()  # the next rows reuse its memory
        seen(header, payload)
        progress(FRAME_HEADER_LEN + len(payload))
    writer.put(rows, last=True, notes=Notes(frames.shards, frames.mark))
    return writer


class IntervalFrames:
    """Frames of one rank's interval, each of them checked. Iterate over it once, to the end.

    Args:
        log: The job's log.
        interval: Interval of a committed marker.
        shards: Shards in the rank's HELLO. None at the first marker of a generation, whose interval contains it.
    """

    mark: Mark
    """(at the end) MARK of the rank."""
    shards: tuple[TableShard, ...]
    """(at the end) Shards of the rank."""

    def __init__(self, log: LogReader, interval: Interval, shards: tuple[TableShard, ...] | None) -> None:
        self._log = log
        self._interval = interval
        self._given = shards

    def __iter__(self) -> Iterator[tuple[Header, memoryview, RowsView | None]]:
        """Yield header, payload and rows of each frame, which the caller may keep; None if it has no rows.

        Raises:
            CorruptionError: the log is damaged, incomplete, or of another job or schema; the error names the place.
            LogUnavailableError: the log does not answer.
        """
        interval, shards, mark = self._interval, self._given, None
        commit, end, schema = interval.commit, interval.end, interval.claim.schema
        schema_crc = schema.crc
        for header, frame in read_stream(self._log, commit, end, interval.after):
            payload, view = checked_payload(header, frame, commit, end), None
            if header.schema_crc != schema_crc:
                raise CorruptionError(
                    "the frame's schema differs from the CLAIM of its generation",
                    **header.place(),
                    partition=end.partition,
                )
            if header.kind is Kind.ROWS:
                if header.table >= len(schema.tables):
                    raise CorruptionError(f"table {header.table} is not in the schema", **header.place())
                view = decode_rows(header, payload, schema.tables[header.table])
            elif header.kind is Kind.IDS:  # the dense state of the marker, which the store has, holds the whole map
                decode_events(header, payload, schema.tables)
            elif header.kind is Kind.HELLO:
                shards = check_hello(header, frame, interval.claim, commit, end).shards
            elif header.kind is Kind.MARK:
                mark = read_mark(header, frame, commit, end)
            yield header, payload, view
        if mark is None or shards is None:
            raise CorruptionError("the interval has no HELLO or no MARK", generation=commit.generation, rank=end.rank)
        self.mark, self.shards = mark, shards


def folded_interval(objects: Objects, interval: Interval) -> tuple[SegmentRef, ...] | None:
    """Return the segments of an interval if all of its parts exist, whichever process wrote them. None if not.

    Takes one request for a missing part, two for an existing one, and three if that has a long directory.
    """
    fronts = _fronts(objects, interval)
    return tuple(ref for ref, _ in fronts) if fronts is not None else None


def folded_shards(objects: Objects, interval: Interval) -> tuple[TableShard, ...] | None:
    """Read which shards a rank held from the last segment of an interval. Returns None if a part of it is missing.

    Requests are those of :func:`folded_interval`.
    """
    fronts = _fronts(objects, interval)
    return Notes.from_json(fronts[-1][1].notes, fronts[-1][0].name).shards if fronts is not None else None


def _fronts(objects: Objects, interval: Interval) -> list[tuple[SegmentRef, Front]] | None:
    """Return all parts of an interval, each with the bytes before its chunks. None if one is missing."""
    found: list[tuple[SegmentRef, Front]] = []
    while True:
        name = interval.name(len(found))
        num_bytes = objects.size(name)
        if num_bytes is None or num_bytes < HEADER_LEN:
            return None
        data = objects.read(name, 0, min(num_bytes, FRONT_BYTES))
        if (front_bytes := front_bytes_of(data, name)) > len(data):
            data = objects.read(name, 0, front_bytes)
        front = parse_front(data, name)
        if front.id != interval.segment(len(found)) or front.num_bytes != num_bytes:
            raise CorruptionError("segment header does not match its file name (wrong or renamed object)", name=name)
        ref = SegmentRef(name, num_bytes, front.front_bytes, front.header_crc, front.rows)
        found.append((ref, front))
        if front.last:
            return found
