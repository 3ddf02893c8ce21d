"""A segment of the store: a directory, then chunks of rows. The byte layout is specified in docs/format.md.

A chunk is the payload of a ROWS frame whose ids ascend. No id occurs twice in a segment. The codec knows no store: it
takes and returns bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import ALIGNMENT, MAX_SECTIONS, Buffer, aligned
from torchrec_stream_ckpt.format.parsing import CRC, checked_header
from torchrec_stream_ckpt.format.rows import RowLayout, RowsView, view_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.native.kernel import checksum
from torchrec_stream_ckpt.util.types import MarkerId

MAGIC = b"TRSS"
VERSION = 3
"""Newest version. Writers use 3 for notes with a dense proof, 2 with only a proof, otherwise 1, for older readers."""
HEADER_LEN = 128

_HEADER = struct.Struct(
    "<"
    "4s"  # magic
    "H"  # version
    "H"  # header_len
    "B"  # kind
    "B"  # last: 1 in the last part
    "H"  # reserved, zero
    "16s"  # job
    "I"  # generation
    "I"  # rank
    "Q"  # marker
    "I"  # part
    "I"  # chunks
    "I"  # notes_len
    "I"  # directory_crc: of the directory and the notes
    "Q"  # length of the segment
    "Q"  # rows
    "I"  # schema_crc
    "I"  # chain: header_crc of the MARK that ends the interval; 0 in a fold
    "40s"  # reserved, zero
)
assert _HEADER.size + CRC.size == HEADER_LEN

ENTRY = np.dtype(
    [
        ("table", "<u4"),
        ("col0", "<u4"),
        ("cols", "<u4"),
        ("rows", "<u4"),
        ("first", "<i8"),  # smallest id
        ("last", "<i8"),  # largest id
        ("offset", "<u8"),  # from the segment's first byte
        ("num_bytes", "<u4"),
        ("crc", "<u4"),  # of the chunk
    ]
)
"""One entry of the directory, 48 bytes."""
assert ENTRY.itemsize == 48

Directory = npt.NDArray[np.void]
"""Entries of :data:`ENTRY`, in the order of the chunks."""

CHUNK_BYTES = 4 * 2**20
"""Target size of a chunk: it has as many rows as fit, but at least one.

This is part of the format: all writers of a segment cut it at the same places.
"""

MAX_CHUNK_BYTES = CHUNK_BYTES + MAX_SECTIONS * ALIGNMENT
"""Largest chunk that a reader has to hold: its rows and the padding of its sections."""


class ChunkEntry(NamedTuple):
    """One entry of a directory, as plain numbers; see :data:`ENTRY`."""

    table: int
    col0: int
    cols: int
    rows: int
    first: int
    last: int
    offset: int
    num_bytes: int
    crc: int


def entries_of(directory: Directory) -> list[ChunkEntry]:
    """Return all entries at once, because an array is slow to return single ones."""
    return [ChunkEntry._make(values) for values in directory.tolist()]


def slices_of(directory: Directory) -> dict[tuple[int, int, int], slice]:
    """Return a mapping from (table, col0, cols) to the range of its chunks, which are adjacent."""
    columns = directory[["table", "col0", "cols"]]
    names = columns.dtype.names or ()
    changes = np.logical_or.reduce([columns[name][1:] != columns[name][:-1] for name in names])
    edges = [0, *(np.flatnonzero(changes) + 1).tolist(), len(directory)]
    begins = edges[:-1] if len(directory) else []
    return {place: slice(*edge) for place, edge in zip(columns[begins].tolist(), pairwise(edges), strict=False)}


def chunk_rows(layout: RowLayout) -> int:
    """Return the rows of a full chunk."""
    return max(1, CHUNK_BYTES // layout.row_bytes)


class SegmentKind(IntEnum):
    """Kind of a segment. The numbers are on disk: never changed, never reused."""

    INTERVAL = 1  # frames that one rank sent between two markers
    FOLD = 2  # the newest rows of several intervals


@dataclass(frozen=True, slots=True)
class SegmentId:
    """Identity of a segment. In a fold, ``marker`` is the one that it leads to, and ``rank`` is 0."""

    kind: SegmentKind
    job: bytes
    marker: MarkerId
    rank: int
    part: int
    chain: int = 0
    """``RankEnd.chain`` of the interval. Distinguishes histories that share a job and a marker's name. 0 in a fold."""


@dataclass(frozen=True, slots=True)
class Front:
    """Front of a segment: everything before its chunks."""

    id: SegmentId
    last: bool
    """True if no further part follows."""
    num_bytes: int
    """Length of the whole segment."""
    rows: int
    schema_crc: int
    directory: Directory
    notes: bytes
    """JSON. Empty in all parts except the last part of an interval."""
    header_crc: int

    @property
    def front_bytes(self) -> int:
        """Length of the front. The first chunk begins there."""
        return front_length(len(self.directory), len(self.notes))


def front_length(chunks: int, notes_bytes: int) -> int:
    """Return the number of bytes before the first chunk."""
    return aligned(HEADER_LEN + chunks * ENTRY.itemsize + notes_bytes)


def pack_front(
    segment: SegmentId, *, last: bool, schema_crc: int, directory: Directory, notes: bytes = b"", version: int = 1
) -> tuple[bytes, int]:
    """Encode the front. Returns (bytes before the chunks, checksum of the header).

    Args:
        segment: Identity of the segment.
        last: Whether no further part follows.
        schema_crc: Checksum of the schema of its generation.
        directory: Its chunks. Offsets count from the segment's first byte.
        notes: JSON for the last part.
        version: 2 if a proof is among the notes, 3 if a dense proof is.
    """
    described = directory.tobytes() + notes
    end = int(directory["offset"][-1]) + int(directory["num_bytes"][-1]) if len(directory) else 0
    front = front_length(len(directory), len(notes))
    header = _HEADER.pack(
        MAGIC,
        version,
        HEADER_LEN,
        segment.kind,
        last,
        0,
        segment.job,
        segment.marker.generation,
        segment.rank,
        segment.marker.marker,
        segment.part,
        len(directory),
        len(notes),
        crc32c(described),
        max(end, front),
        int(directory["rows"].sum()),
        schema_crc,
        segment.chain,
        bytes(40),
    )
    crc = crc32c(header)
    packed = header + CRC.pack(crc) + described
    return packed + bytes(front - len(packed)), crc


def front_bytes_of(header: Buffer, where: str) -> int:
    """Return the number of bytes before the first chunk, from the first 128 bytes; raises as :func:`parse_front`."""
    chunks, notes_len = _parse_header(header, where)[11:13]
    return front_length(chunks, notes_len)


def parse_front(data: Buffer, where: str) -> Front:
    """Read and check the front. ``data`` may be longer.

    Raises:
        CorruptionError: the bytes are not ours, or have a newer version, a bad checksum or impossible lengths.
    """
    front = _parse_front(data, where)
    if not _are_sound([front]):
        raise CorruptionError("segment directory has impossible entries", name=where)
    return front


def parse_fronts(parts: Sequence[tuple[Buffer, str]]) -> list[Front]:
    """Read many fronts as :func:`parse_front`. Checking all directories at once takes hardly longer than one."""
    fronts = [_parse_front(data, where) for data, where in parts]
    return fronts if _are_sound(fronts) else [parse_front(data, where) for data, where in parts]


def _parse_front(data: Buffer, where: str) -> Front:
    """Parse the front, without checking the entries of its directory."""
    fields = _parse_header(data, where)
    kind, last, _, job, generation, rank, marker, part, chunks, notes_len, directory_crc, *rest = fields[3:]
    num_bytes, rows, schema_crc, chain, _ = rest
    end = HEADER_LEN + chunks * ENTRY.itemsize
    if len(data) < end + notes_len:
        raise CorruptionError("segment ends inside its directory", name=where)
    if crc32c(memoryview(data)[HEADER_LEN : end + notes_len]) != directory_crc:
        raise CorruptionError("segment directory's checksum does not match", name=where)
    if bool(notes_len) != (bool(last) and kind == SegmentKind.INTERVAL):
        raise CorruptionError("segment has unexpected notes, or lacks required ones", name=where)
    directory = np.frombuffer(data, ENTRY, chunks, HEADER_LEN)
    segment = SegmentId(SegmentKind(kind), job, MarkerId(generation, marker), rank, part, chain)
    notes = bytes(memoryview(data)[end : end + notes_len])
    (crc,) = CRC.unpack_from(data, _HEADER.size)
    return Front(segment, bool(last), num_bytes, rows, schema_crc, directory, notes, crc)


def _parse_header(data: Buffer, where: str) -> tuple[Any, ...]:
    """Return the fields of the header, checked."""
    fields = checked_header(data, _HEADER, MAGIC, VERSION, "segment", where)
    kind, last, pad = fields[3:6]
    if last not in (0, 1) or pad or kind not in SegmentKind._value2member_map_:
        raise CorruptionError("segment header has an unknown version, kind or flag", name=where)
    return fields


def _are_sound(fronts: Sequence[Front]) -> bool:
    """Return whether each directory is consistent: chunks without gaps, no id twice, and the right number of ids.

    Numbers are added only after they are known to be in range, because sums of 64 bits would wrap.
    """
    if not fronts:
        return True
    counts = np.array([len(each.directory) for each in fronts], np.int64)
    ends_at = counts.cumsum()
    begins, lasts = (ends_at - counts)[counts > 0], ends_at[counts > 0] - 1
    front_bytes = np.array([each.front_bytes for each in fronts], np.int64)
    directory = np.frombuffer(b"".join([each.directory.data for each in fronts]), ENTRY)
    offsets, lengths = directory["offset"].astype(np.int64), directory["num_bytes"].astype(np.int64)
    # If the first offset is right, so are all sums. A wrong offset differs from the value it is compared with.
    ends = offsets + lengths
    first, last, rows = directory["first"], directory["last"], directory["rows"].astype(np.int64)
    follows = np.empty_like(offsets)
    follows[1:] = ends[:-1]
    follows[begins] = front_bytes[counts > 0]
    num_bytes = front_bytes.copy()
    num_bytes[counts > 0] = ends[lasts]
    total = np.concatenate([[0], rows.cumsum()])
    held = total[ends_at] - total[ends_at - counts]
    return (
        bool((lengths > 0).all() and (lengths <= MAX_CHUNK_BYTES).all() and (lengths % ALIGNMENT == 0).all())
        and bool((rows > 0).all() and (first >= 0).all() and (last >= first).all())
        and bool((last - first >= rows - 1).all())
        and np.array_equal(offsets, follows)
        and num_bytes.tolist() == [each.num_bytes for each in fronts]
        and held.tolist() == [each.rows for each in fronts]
        and _ascend(directory, begins)
    )


def _ascend(directory: Directory, begins: npt.NDArray[np.int64]) -> bool:
    """Return whether chunks are sorted by table, columns and ids, and no two chunks of one slice can share an id.

    Args:
        directory: Directories, one after the other.
        begins: Index at which each non-empty directory begins.
    """
    above, below = directory[:-1], directory[1:]
    rises = below["first"] > above["last"]
    for name in ("cols", "col0", "table"):
        rises = (below[name] > above[name]) | ((below[name] == above[name]) & rises)
    rises[begins[1:] - 1] = True  # the previous chunk belongs to another segment
    return bool(rises.all())


@dataclass(frozen=True, slots=True)
class Chunk:
    """Rows to be written: the parts of one chunk, and the values for its directory entry."""

    table: int
    col0: int
    cols: int
    ids: npt.NDArray[np.int64]
    payload: Buffer


def lay_out(
    segment: SegmentId, chunks: Sequence[Chunk], *, last: bool, schema_crc: int, notes: bytes = b"", version: int = 1
) -> tuple[list[Buffer], int, int]:
    """Lay out a segment. Returns (its bytes in parts, length of the first part, checksum of its header)."""
    offset = front_length(len(chunks), len(notes))
    entries = []
    for chunk in chunks:
        first, final = int(chunk.ids[0]), int(chunk.ids[-1])
        place = (chunk.table, chunk.col0, chunk.cols, len(chunk.ids), first, final, offset)
        entries.append((*place, len(chunk.payload), crc32c(chunk.payload)))
        offset += len(chunk.payload)
    directory = np.array(entries, ENTRY)
    front, crc = pack_front(
        segment, last=last, schema_crc=schema_crc, directory=directory, notes=notes, version=version
    )
    return [front, *(chunk.payload for chunk in chunks)], len(front), crc


def check_tables(front: Front, schema: Schema, where: str) -> None:
    """Check that the tables of a segment are those of ``schema``.

    Raises:
        CorruptionError: the segment has other tables, or columns that its table does not have.
    """
    if front.schema_crc not in (schema.crc, schema.unnamed.crc):
        raise CorruptionError("segment's schema differs from the CLAIM of its generation", name=where)
    for table, col0, cols in slices_of(front.directory):
        if table >= len(schema.tables) or not 0 < cols <= schema.tables[table].dim - col0:
            raise CorruptionError(
                f"segment has columns [{col0}, +{cols}) of table {table}, which are not in the schema", name=where
            )


def check_chunk(entry: ChunkEntry, data: memoryview, where: str) -> None:
    """Compare a chunk with its checksum.

    Raises:
        CorruptionError: its bytes are not those that were written.
    """
    if len(data) != entry.num_bytes or checksum(data) != entry.crc:
        raise CorruptionError("chunk's checksum does not match", name=where, offset=str(entry.offset))


def decode_chunk(entry: ChunkEntry, data: memoryview, schema: Schema, where: str) -> RowsView:
    """View the rows of a chunk whose checksum has been compared, after checking its lengths and its ids.

    Raises:
        CorruptionError: it does not fit the schema or its directory.
    """
    layout = chunk_layout(entry, schema, where)
    place = {"name": where, "offset": str(entry.offset)}
    if len(data) != entry.num_bytes:
        raise CorruptionError("chunk's length does not match its rows", **place)
    view = view_rows(layout, entry.rows, data)
    ids = view.ids
    if not (entry.first == ids[0] and ids[-1] == entry.last) or not bool((ids[1:] > ids[:-1]).all()):
        raise CorruptionError("chunk's ids differ from its directory entry", **place)
    return view


def chunk_layout(entry: ChunkEntry, schema: Schema, where: str) -> RowLayout:
    """Return the layout of a chunk, after checking its entry against the schema.

    Raises:
        CorruptionError: the entry does not fit.
    """
    place = {"name": where, "offset": str(entry.offset)}
    if entry.table >= len(schema.tables):
        raise CorruptionError(f"table {entry.table} is not in the schema", **place)
    table = schema.tables[entry.table]
    if not 0 < entry.cols <= table.dim - entry.col0:
        raise CorruptionError(f"columns [{entry.col0}, +{entry.cols}) are outside dim {table.dim}", **place)
    try:
        layout = RowLayout.of(table, entry.cols)
    except ValueError as error:
        raise CorruptionError(str(error), **place) from None
    if layout.offsets(entry.rows)[1] != entry.num_bytes:
        raise CorruptionError("chunk's length does not match its rows", **place)
    if not 0 <= entry.first <= entry.last < table.rows:
        raise CorruptionError("chunk's ids differ from its directory entry", **place)
    return layout
