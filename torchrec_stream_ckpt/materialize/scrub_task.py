"""Read parts of objects whole and compare their checksums: what a scrub hands to workers.

A task says of each part whether it is as it was written, and no more. Of a part that is not, the scrub reads the object
itself, and decides what is damaged and how it is repaired.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torchrec_stream_ckpt.engine.api import Site
from torchrec_stream_ckpt.errors import CorruptionError, StoreUnavailableError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.segment import ChunkEntry, check_chunk, entries_of
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.dense_objects import read_dense_file
from torchrec_stream_ckpt.store.reader import load_front

PIECE_BYTES = 4 * 2**20
"""What is read at once at most, but for a chunk or a directory that is longer."""


@dataclass(frozen=True, slots=True)
class SegmentPart:
    """The directory of a segment, and those of its chunks that begin in [begin, end)."""

    job: bytes
    ref: SegmentRef
    begin: int = 0
    end: int = 2**63

    @property
    def name(self) -> str:
        return self.ref.name

    @property
    def num_bytes(self) -> int:
        """About what is read, in bytes."""
        return min(self.end, self.ref.num_bytes) - self.begin

    def read(self, objects: Objects, table_name: Callable[[int], str] = str) -> Iterator[int]:
        """Read it piece by piece; yields how many bytes each had. The directory counts for the first part alone.

        Args:
            objects: The store.
            table_name: What an error calls a table, by its index.

        Raises:
            CorruptionError: it is gone or altered.
            StoreUnavailableError: the store does not answer.
        """
        ref = self.ref
        size = objects.size(ref.name)
        if size is not None and size != ref.num_bytes:
            raise CorruptionError(f"it has {size} bytes, {ref.num_bytes} were written", name=ref.name)
        front = load_front(objects, ref, self.job)
        if not self.begin:
            yield ref.front_bytes
        mine = [each for each in entries_of(front.directory) if self.begin <= each.offset < self.end]
        for run in _runs(mine):
            begin, end = run[0].offset, run[-1].offset + run[-1].num_bytes
            data = objects.read(ref.name, begin, end)
            for entry in run:
                try:
                    check_chunk(entry, data[entry.offset - begin : entry.offset - begin + entry.num_bytes], ref.name)
                except CorruptionError as error:
                    table = table_name(entry.table)
                    raise CorruptionError(error.message, name=ref.name, offset=entry.offset, table=table) from None
            yield end - begin


@dataclass(frozen=True, slots=True)
class DensePart:
    """A dense file: its digest is one of all its bytes."""

    name: str
    file: DenseFile

    @property
    def num_bytes(self) -> int:
        """What is read, in bytes."""
        return self.file.num_bytes

    def read(self, objects: Objects) -> Iterator[int]:
        """As :meth:`SegmentPart.read`."""
        return read_dense_file(objects, self.name, self.file, PIECE_BYTES)


Part = SegmentPart | DensePart


def parts_of(part: Part, most_bytes: int) -> Sequence[Part]:
    """The same in parts of at most so many bytes, as far as it can be cut: each has the chunks that begin in it."""
    if isinstance(part, DensePart) or part.num_bytes <= most_bytes:
        return (part,)
    edges = [*range(part.begin, part.begin + part.num_bytes, most_bytes), part.end]
    return [SegmentPart(part.job, part.ref, *each) for each in pairwise(edges)]


@dataclass(frozen=True, slots=True)
class ScrubTask:
    """Parts of objects, to be read one after the other."""

    parts: tuple[Part, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the parts."""
        return sum(part.num_bytes for part in self.parts)

    def __str__(self) -> str:
        return f"scrub {len(self.parts)} parts from {self.parts[0].name} on"

    def run(self, site: Site) -> tuple[int | None, ...]:
        """As of ``Task``: the bytes of each part; None: it is not as it was written, or the store does not give it."""
        found: list[int | None] = []
        for part in self.parts:
            num_bytes = 0
            try:
                for piece in part.read(site.objects):
                    num_bytes += piece
                    site.tell(piece)
            except CorruptionError:
                found.append(None)
            except StoreUnavailableError:  # it may be away: then each further part would cost a time limit
                return (*found, *[None] * (len(self.parts) - len(found)))
            else:
                found.append(num_bytes)
            failpoint("scrub.part")
        return tuple(found)


def _runs(entries: Sequence[ChunkEntry]) -> Iterator[list[ChunkEntry]]:
    """Chunks that are read together."""
    run: list[ChunkEntry] = []
    for entry in entries:
        if run and entry.offset + entry.num_bytes - run[0].offset > PIECE_BYTES:
            yield run
            run = []
        run.append(entry)
    if run:
        yield run
