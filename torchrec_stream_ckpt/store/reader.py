"""Read segments: their directories, and ranges of their chunks, some ahead of what is being used."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.manifest import Notes, SegmentRef
from torchrec_stream_ckpt.format.segment import ChunkEntry, Front, check_chunk, entries_of, parse_front
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.types import MarkerId, TableShard

RANGE_BYTES = 16 * 2**20
"""What one read asks for at most."""
GAP_BYTES = 128 * 1024
"""Chunks closer than this are read together: a request costs more than this many bytes."""
NOTES_READS = 256
"""Reads for what ranks said at markers whose rows are in folds."""
AHEAD = 8
"""Reads in flight."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a HEAD and a store have on the path to a marker: all rows up to ``reach``."""

    reach: MarkerId
    pieces: tuple[Piece, ...]
    """Oldest first; without a HEAD, the first one holds every row."""
    scalars: tuple[TableScalars, ...]
    """Scalars of all ranks at ``reach``."""
    shards: tuple[tuple[TableShard, ...], ...]
    """Shards of each rank in the generation of ``reach``."""
    head: HeadState | None = None
    """The HEAD from which the pieces go on."""
    told: tuple[tuple[MarkerId, tuple[Notes, ...]], ...] = ()
    """What the ranks said at markers up to ``reach``, as far as it was read."""


def load_held(
    objects: Objects, catalog: Catalog, cover: Sequence[Piece], pool: Executor, head: HeadState | None = None
) -> Held:
    """Read the directories of a cover, which has at least one piece and begins after ``head`` if there is one.

    Raises:
        CorruptionError: a segment is gone or altered; names it.
        StoreUnavailableError: the store does not answer.
    """
    pieces, reach = open_pieces(objects, cover, catalog.job, pool), cover[-1].end
    notes = load_notes(objects, catalog, reach, pool)
    scalars = tuple(record for each in notes for record in each.mark.scalars)
    told = {reach: notes, **_told(pieces), **_told_in_folds(objects, catalog, cover, pool)}
    if head is not None:
        told[head.marker] = head.notes
    return Held(reach, pieces, scalars, tuple(each.shards for each in notes), head, tuple(told.items()))


def _told(pieces: Sequence[Piece]) -> dict[MarkerId, tuple[Notes, ...]]:
    """What stands in the segments of intervals, whose directories were read for their rows."""
    found: dict[MarkerId, list[Notes]] = {}
    for piece in pieces:
        for picked in piece.opened:
            if picked.front.notes:
                found.setdefault(piece.end, []).append(Notes.from_json(picked.front.notes, picked.ref.name))
    return {marker: tuple(notes) for marker, notes in found.items()}


def _told_in_folds(
    objects: Objects, catalog: Catalog, cover: Sequence[Piece], pool: Executor
) -> dict[MarkerId, tuple[Notes, ...]]:
    """What the ranks said at markers within folds, the newest first, and as many as are read in a moment.

    The rows can be read without it. So what is damaged is left out: less of them can be proved.
    """
    within = [
        marker
        for piece in cover
        for marker in catalog.markers - catalog.dropped
        if (piece.start, piece.end) in catalog.folds
        and marker <= piece.end
        and (marker > piece.start if piece.start is not None else marker == piece.end)
    ]
    found: dict[MarkerId, tuple[Notes, ...]] = {}
    reads = 0
    for marker in sorted(set(within) - {cover[-1].end}, reverse=True):
        if reads >= NOTES_READS:
            break
        try:
            found[marker] = load_notes(objects, catalog, marker, pool)
        except CorruptionError:
            continue
        reads += 1 + len(found[marker])
    return found


def load_notes(objects: Objects, catalog: Catalog, marker: MarkerId, pool: Executor) -> tuple[Notes, ...]:
    """What each rank said at a marker that is in the store; raises as :func:`load_held`."""
    last = [refs[-1] for refs in catalog.manifest(marker).segments]
    fronts = load_fronts(objects, last, catalog.job, pool)
    return tuple(Notes.from_json(front.notes, ref.name) for ref, front in zip(last, fronts, strict=True))


def load_front(objects: Objects, ref: SegmentRef, job: bytes) -> Front:
    """What a segment has before its chunks, compared with what its manifest says.

    Raises:
        CorruptionError: it is gone, altered, or another one.
    """
    front = parse_front(objects.read(ref.name, 0, ref.front_bytes), ref.name)
    found = (front.header_crc, front.num_bytes, front.front_bytes, front.rows, front.id.job)
    if found != (ref.header_crc, ref.num_bytes, ref.front_bytes, ref.rows, job):
        raise CorruptionError("segment is another one than its manifest says", name=ref.name)
    return front


def load_fronts(objects: Objects, refs: Sequence[SegmentRef], job: bytes, pool: Executor) -> list[Front]:
    """:func:`load_front` of several, side by side."""
    return list(pool.map(lambda ref: load_front(objects, ref, job), refs))


def open_pieces(objects: Objects, pieces: Sequence[Piece], job: bytes, pool: Executor) -> tuple[Piece, ...]:
    """The same with :attr:`Piece.opened`, all directories read side by side; raises as :func:`load_front`."""
    opened = iter(open_segments(objects, [ref for piece in pieces for ref in piece.segments], job, pool))
    return tuple(replace(piece, opened=tuple(islice(opened, len(piece.segments)))) for piece in pieces)


def open_segments(objects: Objects, refs: Sequence[SegmentRef], job: bytes, pool: Executor) -> list[Picked]:
    """All chunks of each segment, their directories read side by side; raises as :func:`load_front`."""
    fronts = load_fronts(objects, refs, job, pool)
    return [Picked(ref, front, np.arange(len(front.directory))) for ref, front in zip(refs, fronts, strict=True)]


def read_chunks(
    objects: Objects,
    picked: Sequence[Picked],
    pool: Executor,
    ahead: int = AHEAD,
    damaged: Callable[[CorruptionError], None] | None = None,
) -> Iterator[tuple[Picked, ChunkEntry, memoryview]]:
    """(segment, directory entry, bytes) of all chunks, segment by segment; their checksums have been compared.

    Args:
        objects: The store.
        picked: What to read.
        pool: Threads that read and compare, ahead of the caller.
        ahead: How many reads of at most ``RANGE_BYTES``.
        damaged: Told of what is damaged; reading goes on with the next range then.

    Raises:
        CorruptionError: (without ``damaged``) a segment is gone, shorter or altered.
        StoreUnavailableError: the store does not answer.
    """
    pending: deque[tuple[Picked, list[ChunkEntry], Future[memoryview]]] = deque()
    wanted = ((each, run) for each in picked for run in _runs(each))
    try:
        while True:
            while len(pending) < ahead and (following := next(wanted, None)) is not None:
                pending.append((*following, pool.submit(_read_run, objects, *following)))
            if not pending:
                return
            each, run, future = pending.popleft()
            try:
                data = future.result()
            except CorruptionError as error:
                if damaged is None:
                    raise
                damaged(error)
                continue
            for entry in run:
                yield each, entry, _part(data, run, entry)
    finally:
        for _, _, future in pending:
            future.cancel()


def _runs(picked: Picked) -> Iterator[list[ChunkEntry]]:
    """Chunks that are read together."""
    run: list[ChunkEntry] = []
    for entry in entries_of(picked.entries):
        end = entry.offset + entry.num_bytes
        if run and (entry.offset - run[-1].offset - run[-1].num_bytes > GAP_BYTES or end - run[0].offset > RANGE_BYTES):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _read_run(objects: Objects, picked: Picked, run: Sequence[ChunkEntry]) -> memoryview:
    data = objects.read(picked.ref.name, run[0].offset, run[-1].offset + run[-1].num_bytes)
    for entry in run:
        check_chunk(entry, _part(data, run, entry), picked.ref.name)
    return data


def _part(data: memoryview, run: Sequence[ChunkEntry], entry: ChunkEntry) -> memoryview:
    """One chunk of what was read for a run."""
    begin = entry.offset - run[0].offset
    return data[begin : begin + entry.num_bytes]
