"""Read segments: their directories, and ranges of their chunks, some ahead of the caller."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from functools import partial
from itertools import islice
from typing import TypeVar

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.segment import ChunkEntry, Front, check_chunk, entries_of, parse_front, parse_fronts
from torchrec_stream_ckpt.store.api import Readable
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.prefetched import Summarized, side_by_side
from torchrec_stream_ckpt.util.layout import manifest_name
from torchrec_stream_ckpt.util.types import MarkerId

A = TypeVar("A")
B = TypeVar("B")

RANGE_BYTES = 16 * 2**20
"""Limit of one read, in bytes."""
GAP_BYTES = 128 * 1024
"""Chunks closer than this are read together, because a request costs more than this many bytes."""
NOTES_READS = 256
"""Limit of reads for the notes of markers whose rows are in folds."""
AHEAD = 8
"""Number of reads in flight."""


Told = Mapping[MarkerId, tuple[Notes, ...]]
"""Notes of each rank, by marker."""


def load_told(catalog: Catalog, pieces: Sequence[Piece], chain: Sequence[Commit], pool: Executor) -> Told:
    """Read the ranks' notes at the marker that open pieces lead to, and those on the way, as far as limits allow.

    Args:
        catalog: Catalog of the store.
        pieces: Open pieces.
        chain: Chain, as for ``Catalog.cover``.
        pool: Threads to read with.

    Raises:
        CorruptionError: a segment is missing or altered, or a manifest is of another history; the error names it.
        StoreUnavailableError: the store does not answer.
    """
    reach, told, commits = pieces[-1].end, _told(pieces), {commit.id: commit for commit in chain}
    catalog.check(commits[reach])
    notes = told.get(reach) or load_notes(catalog, commits[reach], pool)  # read if a fold has its rows
    return {**told, **_told_in_folds(catalog, pieces, commits, pool), reach: notes}


def _told(pieces: Sequence[Piece]) -> Told:
    """Parse the notes in the segments of intervals, whose directories were read for their rows."""
    found: dict[MarkerId, list[Notes]] = {}
    for piece in pieces:
        for picked in piece.opened:
            if picked.front.notes:
                found.setdefault(piece.end, []).append(Notes.from_json(picked.front.notes, picked.ref.name))
    return {marker: tuple(notes) for marker, notes in found.items()}


def _told_in_folds(
    catalog: Catalog, cover: Sequence[Piece], commits: Mapping[MarkerId, Commit], pool: Executor
) -> Told:
    """Read the ranks' notes at markers within folds, newest first, up to a limit that takes only a moment.

    The rows can be read without the notes. So damaged notes are omitted, and fewer rows can be proved.
    """
    folds = [piece for piece in cover if (piece.start, piece.end) in catalog.folds]
    offered = catalog.markers & commits.keys() - catalog.dropped if folds else ()
    within = [
        marker
        for piece in folds
        for marker in offered
        if marker <= piece.end and (marker > piece.start if piece.start is not None else marker == piece.end)
    ]
    wanted = sorted(set(within) - {cover[-1].end}, reverse=True)
    ranks = len(catalog.manifest(cover[-1].end).last)
    wanted = wanted[: -(-NOTES_READS // (1 + ranks))]
    name_of = partial(manifest_name, catalog.job)
    read = partial(_if_intact, catalog, lambda marker: catalog.check(commits[marker]), name_of)
    found_manifests = side_by_side(catalog.fronts, pool, read, wanted, name_of)
    manifests = zip(wanted, found_manifests, strict=True)
    last = {marker: each.last for marker, each in manifests if each is not None}
    load = partial(_if_intact, catalog, partial(_load_note, catalog), _name_of)
    refs_of_all = [ref for refs in last.values() for ref in refs]
    notes = iter(side_by_side(catalog.fronts, pool, load, refs_of_all, _name_of))
    found = {marker: [next(notes) for _ in refs] for marker, refs in last.items()}
    return {marker: tuple(note for note in each if note) for marker, each in found.items() if None not in each}


def _if_intact(catalog: Catalog, read: Callable[[A], B], name_of: Callable[[A], str], of: A) -> B | None:
    """Read one item. Returns None if it is damaged or missing. Raises if it came from a summary, to try the objects."""
    try:
        return read(of)
    except CorruptionError:
        if isinstance(catalog.fronts, Summarized) and catalog.fronts.holds(name_of(of)):
            raise
        return None


def _name_of(ref: SegmentRef) -> str:
    return ref.name


def _load_note(catalog: Catalog, ref: SegmentRef) -> Notes:
    return Notes.from_json(load_front(catalog.fronts, ref, catalog.job).notes, ref.name)


def load_notes(catalog: Catalog, commit: Commit, pool: Executor) -> tuple[Notes, ...]:
    """Read each rank's notes at a marker that is in the store; raises as :func:`load_told`."""
    last = catalog.check(commit).last
    return tuple(side_by_side(catalog.fronts, pool, partial(_load_note, catalog), last, _name_of))


def load_front(objects: Readable, ref: SegmentRef, job: bytes) -> Front:
    """Read the front of a segment, and compare it with its manifest.

    Raises:
        CorruptionError: it is missing, altered, or another one.
    """
    return check_front(objects.read(ref.name, 0, ref.front_bytes), ref, job)


def check_front(data: Buffer, ref: SegmentRef, job: bytes) -> Front:
    """Parse the front of a segment; raises as :func:`load_front`."""
    return _same(parse_front(data, ref.name), ref, job)


def _same(front: Front, ref: SegmentRef, job: bytes) -> Front:
    found = (front.header_crc, front.num_bytes, front.front_bytes, front.rows, front.id.job)
    if found != (ref.header_crc, ref.num_bytes, ref.front_bytes, ref.rows, job):
        raise CorruptionError("segment does not match its manifest entry", name=ref.name)
    return front


def load_fronts(objects: Readable, refs: Sequence[SegmentRef], job: bytes, pool: Executor) -> list[Front]:
    """Read several fronts as :func:`load_front`, concurrently, and check them together."""

    def read(ref: SegmentRef) -> tuple[Buffer, str]:
        return objects.read(ref.name, 0, ref.front_bytes), ref.name

    fronts = parse_fronts(side_by_side(objects, pool, read, refs, _name_of))
    return [_same(front, ref, job) for front, ref in zip(fronts, refs, strict=True)]


def open_pieces(objects: Readable, pieces: Sequence[Piece], job: bytes, pool: Executor) -> tuple[Piece, ...]:
    """Return the pieces with :attr:`Piece.opened`, all directories read concurrently; raises as :func:`load_front`."""
    opened = iter(open_segments(objects, [ref for piece in pieces for ref in piece.segments], job, pool))
    return tuple(
        Piece(each.start, each.end, each.segments, each.chain, tuple(islice(opened, len(each.segments))))
        for each in pieces
    )


def open_segments(objects: Readable, refs: Sequence[SegmentRef], job: bytes, pool: Executor) -> list[Picked]:
    """Return all chunks of each segment, their directories read concurrently; raises as :func:`load_front`."""
    fronts = load_fronts(objects, refs, job, pool)
    return [Picked(ref, front, np.arange(len(front.directory))) for ref, front in zip(refs, fronts, strict=True)]


def check_whole(objects: Readable, refs: Sequence[SegmentRef], job: bytes, pool: Executor) -> Iterator[int]:
    """Read segments whole, and compare everything in them with its checksums. Yields the bytes of each chunk.

    A segment of at most ``RANGE_BYTES`` takes one request.

    Raises:
        CorruptionError: a segment is missing, shorter or altered.
        StoreUnavailableError: the store does not answer.
    """
    small = [ref for ref in refs if ref.num_bytes <= RANGE_BYTES]
    for lengths in pool.map(partial(_check_small, objects, job), small):
        yield from lengths
    large = open_segments(objects, [ref for ref in refs if ref.num_bytes > RANGE_BYTES], job, pool)
    for _, _, chunk in read_chunks(objects, large, pool):
        yield len(chunk)


def _check_small(objects: Readable, job: bytes, ref: SegmentRef) -> list[int]:
    data = objects.read(ref.name, 0, ref.num_bytes)
    front = check_front(data, ref, job)
    entries = entries_of(front.directory)
    for entry in entries:
        check_chunk(entry, data[entry.offset : entry.offset + entry.num_bytes], ref.name)
    return [entry.num_bytes for entry in entries]


def read_chunks(
    objects: Readable,
    picked: Iterable[Picked],
    pool: Executor,
    ahead: int = AHEAD,
    damaged: Callable[[CorruptionError], None] | None = None,
) -> Iterator[tuple[Picked, ChunkEntry, memoryview]]:
    """Yield (segment, directory entry, bytes) of all chunks, segment by segment, after comparing their checksums.

    Args:
        objects: The store.
        picked: Chunks to read.
        pool: Threads that read and compare, ahead of the caller.
        ahead: Number of reads of at most ``RANGE_BYTES`` in flight.
        damaged: Called with the error for damaged data. Reading then continues with the next range.

    Raises:
        CorruptionError: (without ``damaged``) a segment is missing, shorter or altered.
        StoreUnavailableError: the store does not answer.
    """
    pending: deque[tuple[Picked, list[ChunkEntry], Future[memoryview]]] = deque()
    wanted = ((each, run) for each in picked for run in runs_of(entries_of(each.entries), RANGE_BYTES))
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


def runs_of(entries: Iterable[ChunkEntry], most_bytes: int) -> Iterator[list[ChunkEntry]]:
    """Yield groups of chunks that are read together, each at most ``most_bytes`` long unless one chunk is longer."""
    run: list[ChunkEntry] = []
    for entry in entries:
        end = entry.offset + entry.num_bytes
        if run and (entry.offset - run[-1].offset - run[-1].num_bytes > GAP_BYTES or end - run[0].offset > most_bytes):
            yield run
            run = []
        run.append(entry)
    if run:
        yield run


def _read_run(objects: Readable, picked: Picked, run: Sequence[ChunkEntry]) -> memoryview:
    data = objects.read(picked.ref.name, run[0].offset, run[-1].offset + run[-1].num_bytes)
    for entry in run:
        check_chunk(entry, _part(data, run, entry), picked.ref.name)
    return data


def _part(data: memoryview, run: Sequence[ChunkEntry], entry: ChunkEntry) -> memoryview:
    """Return one chunk from the bytes of a group."""
    begin = entry.offset - run[0].offset
    return data[begin : begin + entry.num_bytes]
