"""Data of streams in a bucket: objects of whole frames, each named by the offset of its first byte.

An object is created once and never changes. The objects of a stream are found by their lengths: the one at offset p
ends where the next one begins. An object elsewhere is a leftover of a writer that died, whose frames were sent again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.log.bucket.objects import numbered
from torchrec_stream_ckpt.log.segments import split_frames
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.util.layout import bucket_stream
from torchrec_stream_ckpt.util.types import LogSpan

READS_AHEAD = 4
"""Objects of a span that are read at the same time."""


@dataclass(frozen=True, slots=True)
class DataObject:
    """An object of a stream."""

    name: str
    begin: int
    end: int


def object_name(generation: int, partition: int, offset: int) -> str:
    return f"{bucket_stream(generation, partition)}/{offset:020d}"


def sizes_of(objects: Objects, generation: int, partition: int) -> dict[int, int]:
    """Return the lengths of a stream's objects by the offset of their first byte, in order. Leftovers are included."""
    return {begin: size for begin, size in numbered(objects, bucket_stream(generation, partition)).items() if size}


def walk(objects: Objects, stream: tuple[int, int], begin: int, sizes: Mapping[int, int]) -> Iterator[DataObject]:
    """Yield the adjacent objects from offset ``begin`` on. Names are tried, too, because a listing may lag.

    Args:
        objects: Objects of the log.
        stream: Generation and partition.
        begin: Offset of the first object.
        sizes: Lengths of listed objects, by offset.
    """
    while True:
        name = object_name(*stream, begin)
        size = sizes.get(begin) or objects.size(name)
        if not size:
            return
        yield DataObject(name, begin, begin + size)
        begin += size


def pieces(objects: Objects, span: LogSpan, sizes: Mapping[int, int]) -> list[DataObject]:
    """Return the objects that hold a span.

    Raises:
        StreamLostError: they end before the span does.
        CorruptionError: another part of it is missing.
    """
    stream = span.generation, span.partition
    if span.begin >= span.end:
        return []
    first = span.begin if span.begin in sizes else _holder(objects, stream, span.begin, sizes)
    found, position = [], span.begin
    if first is not None:
        for piece in walk(objects, stream, first, sizes):
            found.append(piece)
            position = piece.end
            if position >= span.end:
                return found
    later = [offset for offset in sizes if position < offset < span.end]
    where = {"generation": span.generation, "store": objects.url, "name": object_name(*stream, position)}
    hint = "restore an older marker, or restore the missing object from a copy"
    if later:
        raise CorruptionError(
            f"bytes {position} to {min(later)} of the log are missing, but were committed: no object has them",
            hint=hint,
            **where,
        )
    if not found and any(offset >= span.end for offset in sizes):
        raise CorruptionError(
            f"bytes {position} to {span.end} of the log are missing, but were committed: no object has them",
            hint=hint,
            **where,
        )
    raise StreamLostError(
        f"the log ends at byte {position}, but was committed up to byte {span.end}", hint=hint, **where
    )


def _holder(objects: Objects, stream: tuple[int, int], offset: int, sizes: Mapping[int, int]) -> int | None:
    """Return the beginning of the object that holds an offset within it. Returns None if no object holds it."""
    for piece in walk(objects, stream, min(sizes), sizes) if sizes else ():
        if piece.begin <= offset < piece.end:
            return piece.begin
        if piece.begin > offset:
            break  # other objects before it are leftovers, or deleted like it
    return offset if objects.size(object_name(*stream, offset)) else None  # a listing may lag


def read_frames(objects: Objects, span: LogSpan, found: list[DataObject]) -> Iterator[tuple[int, memoryview]]:
    """Yield (offset, frame) of the frames of a span, from the objects that hold it. Reads a few objects ahead."""
    ahead: deque[tuple[DataObject, Future[memoryview]]] = deque()
    left = deque(found)
    with ThreadPoolExecutor(READS_AHEAD, "stream-ckpt-bucket-read") as pool:
        try:
            while left or ahead:
                while left and len(ahead) < READS_AHEAD:
                    piece = left.popleft()
                    begin, end = max(piece.begin, span.begin), min(piece.end, span.end)
                    whole = (begin, end) == (piece.begin, piece.end)
                    part = () if whole else (begin - piece.begin, end - piece.begin)
                    ahead.append((piece, pool.submit(objects.read, piece.name, *part)))
                piece, future = ahead.popleft()
                data = future.result()
                begin = max(piece.begin, span.begin)
                if len(data) != min(piece.end, span.end) - begin:
                    raise CorruptionError(
                        f"the object has {len(data)} bytes, but had {piece.end - piece.begin} when it was listed",
                        store=objects.url,
                        name=piece.name,
                    )
                where = {"store": objects.url, "name": piece.name}
                for position, frame in split_frames(data, 0, len(data), f"{len(data)} bytes end", **where):
                    yield begin + position, frame
        finally:
            for _, future in ahead:
                future.cancel()
