"""Read segments: their directories, and ranges of their chunks, some ahead of what is being used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.control import TableScalars
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.manifest import Notes, SegmentRef
from torchrec_stream_ckpt.format.segment import Front, check_chunk, parse_front
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Cover
from torchrec_stream_ckpt.types import MarkerId, TableShard

RANGE_BYTES = 16 * 2**20
"""What one read asks for at most."""
GAP_BYTES = 128 * 1024
"""Chunks closer than this are read together: a request costs more than so many bytes."""
AHEAD = 8
"""Reads in flight."""


@dataclass(frozen=True, slots=True)
class Picked:
    """Chunks of one segment, by their numbers in its directory, ascending."""

    ref: SegmentRef
    front: Front
    chunks: npt.NDArray[np.int64]

    @property
    def num_bytes(self) -> int:
        return int(self.front.directory["num_bytes"][self.chunks].sum())


@dataclass(frozen=True, slots=True)
class HeldPiece:
    """A piece of a cover, its directories read."""

    generation: int
    """The one that it ends in."""
    segments: tuple[Picked, ...]
    """All chunks of each."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a HEAD and a store have on the path to a marker: all rows up to ``reach``."""

    reach: MarkerId
    pieces: tuple[HeldPiece, ...]
    """Oldest first; without a HEAD, the first one holds every row."""
    scalars: tuple[TableScalars, ...]
    """Of all ranks at ``reach``."""
    shards: tuple[tuple[TableShard, ...], ...]
    """Of each rank in the generation of ``reach``."""
    head: HeadState | None = None
    """The HEAD that the pieces lie behind."""


def load_held(objects: Objects, catalog: Catalog, cover: Cover, pool: Executor, head: HeadState | None = None) -> Held:
    """Read the directories of a cover, which begins behind ``head`` if there is one.

    Raises:
        CorruptionError: a segment is gone or altered; names it.
        StoreUnavailableError: the store does not answer.
    """
    refs = [ref for piece in cover.pieces for ref in piece.segments]
    fronts = iter(load_fronts(objects, refs, catalog.job, pool))
    pieces = tuple(
        HeldPiece(
            piece.end.generation,
            tuple(
                Picked(ref, front, np.arange(len(front.directory)))
                for ref, front in zip(piece.segments, islice(fronts, len(piece.segments)), strict=True)
            ),
        )
        for piece in cover.pieces
    )
    notes = load_notes(objects, catalog, cover.reach, pool)
    scalars = tuple(record for each in notes for record in each.mark.scalars)
    return Held(cover.reach, pieces, scalars, tuple(each.shards for each in notes), head)


def load_notes(objects: Objects, catalog: Catalog, marker: MarkerId, pool: Executor) -> tuple[Notes, ...]:
    """What each rank said at a marker that is in the store; raises as :func:`load_held`."""
    last = [refs[-1] for refs in catalog.manifest(marker).segments]
    fronts = load_fronts(objects, last, catalog.job, pool)
    return tuple(Notes.from_json(front.notes, ref.name) for ref, front in zip(last, fronts, strict=True))


def load_front(objects: Objects, ref: SegmentRef, job: bytes) -> Front:
    """What stands in front of a segment's chunks, held against what its manifest says.

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


def read_chunks(
    objects: Objects, picked: Sequence[Picked], pool: Executor, ahead: int = AHEAD
) -> Iterator[tuple[Picked, np.void, memoryview]]:
    """(segment, directory entry, bytes) of all chunks, segment by segment; their checksums have been compared.

    Args:
        objects: The store.
        picked: What to read.
        pool: Threads that read and compare, ahead of the caller.
        ahead: How many reads of at most ``RANGE_BYTES``.

    Raises:
        CorruptionError: a segment is gone, shorter or altered.
        StoreUnavailableError: the store does not answer.
    """
    pending: deque[tuple[Picked, npt.NDArray[np.int64], Future[memoryview]]] = deque()
    wanted = ((each, run) for each in picked for run in _runs(each))
    try:
        while True:
            while len(pending) < ahead and (following := next(wanted, None)) is not None:
                each, run = following
                pending.append((each, run, pool.submit(_read_run, objects, each, run)))
            if not pending:
                return
            each, run, future = pending.popleft()
            data = future.result()
            for entry, chunk in _split(each, run, data):
                yield each, entry, chunk
    finally:
        for _, _, future in pending:
            future.cancel()


def _runs(picked: Picked) -> Iterator[npt.NDArray[np.int64]]:
    """Chunks that are read together."""
    offsets = picked.front.directory["offset"][picked.chunks].astype(np.int64)
    ends = offsets + picked.front.directory["num_bytes"][picked.chunks]
    begin = 0
    for place in range(1, len(offsets) + 1):
        if (
            place == len(offsets)
            or offsets[place] - ends[place - 1] > GAP_BYTES
            or ends[place] - offsets[begin] > RANGE_BYTES
        ):
            yield picked.chunks[begin:place]
            begin = place


def _read_run(objects: Objects, picked: Picked, run: npt.NDArray[np.int64]) -> memoryview:
    directory = picked.front.directory
    end = int(directory["offset"][run[-1]]) + int(directory["num_bytes"][run[-1]])
    data = objects.read(picked.ref.name, int(directory["offset"][run[0]]), end)
    for entry, chunk in _split(picked, run, data):
        check_chunk(entry, chunk, picked.ref.name)
    return data


def _split(picked: Picked, run: npt.NDArray[np.int64], data: memoryview) -> Iterator[tuple[np.void, memoryview]]:
    """The chunks of one read."""
    directory = picked.front.directory
    begin = int(directory["offset"][run[0]])
    for number in run:
        entry = directory[number]
        offset = int(entry["offset"]) - begin
        yield entry, data[offset : offset + int(entry["num_bytes"])]
