"""Read segments: their directories, and ranges of their chunks, some ahead of what is being used."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.segment import Front, parse_front
from torchrec_stream_ckpt.store.api import Objects

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
    """(segment, directory entry, bytes) of all chunks, segment by segment; the bytes are not checked yet.

    Raises:
        CorruptionError: a segment is gone or shorter.
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
            directory = each.front.directory
            begin = int(directory["offset"][run[0]])
            for number in run:
                entry = directory[number]
                offset = int(entry["offset"]) - begin
                yield each, entry, data[offset : offset + int(entry["num_bytes"])]
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
    return objects.read(picked.ref.name, int(directory["offset"][run[0]]), end)
