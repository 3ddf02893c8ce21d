"""Read only some rows of chunks: those of the blocks that one proof covers.

Such blocks are spread over a whole table, so the chunks that contain one would be most of a store. Parts of a chunk
have no checksum of their own. So a reader compares the rows with a proof, and reads chunks whole if they do not fit.

Requests follow from objects and their bytes, not from chunks and sections. Wanted chunks within ``SMALL_BYTES`` are one
request. Otherwise the chunks within ``RANGE_BYTES`` are read in two passes, first ids, then rows. In each pass, parts
closer than ``GAP_BYTES`` are one request.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, Ints, Window
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array, RowLayout, RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, check_chunk, chunk_layout, decode_chunk, entries_of
from torchrec_stream_ckpt.store.api import Readable
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.store.reader import AHEAD, GAP_BYTES, RANGE_BYTES

SMALL_BYTES = 2**20
"""Up to this many bytes of an object are read by one request, however many of them are wanted."""
_WHOLE_SHARE = 0.5
"""If more than this share of a chunk is wanted, it is read whole, with its checksum."""

Span = tuple[int, int]
"""Bytes [begin, end) of an object."""
Places = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows of one chunk that belong to the blocks of a window."""

    table: int
    col0: int
    cols: int
    rows: RowsView


@dataclass(frozen=True, slots=True)
class WindowRead:
    """Chunks of one segment that were read together."""

    chunks: tuple[WindowRows, ...]
    """Chunks that have rows of the window, in their order."""
    num_bytes: int
    """Number of bytes read."""


def read_window(
    objects: Readable,
    picked: Iterable[Picked],
    schema: Schema,
    ids: Sequence[int | None],
    window: Window,
    pool: Executor,
    *,
    whole: bool = False,
) -> Iterator[WindowRead]:
    """Yield the rows of all chunks that belong to blocks of a window, chunk by chunk in their order.

    Args:
        objects: The store.
        picked: Chunks to search. Chunks of tables without an id are skipped.
        schema: Schema of their generation.
        ids: Ids of the tables, by their index, as the window uses them. An older generation may not have assigned any.
        window: Blocks to read.
        pool: Threads that read, ahead of the caller.
        whole: Whether to read each of these chunks whole, and compare its checksum.

    Raises:
        CorruptionError: a segment is missing, shorter, or (as far as it was read whole) altered.
        StoreUnavailableError: the store does not answer.
    """
    pending: deque[Future[WindowRead]] = deque()
    wanted = _groups(picked, ids, window)
    read = partial(_read, objects, schema, whole)
    try:
        while True:
            while len(pending) < AHEAD and (following := next(wanted, None)) is not None:
                pending.append(pool.submit(read, *following))
            if not pending:
                return
            yield pending.popleft().result()
    finally:
        for future in pending:
            future.cancel()


def _groups(
    picked: Iterable[Picked], ids: Sequence[int | None], window: Window
) -> Iterator[tuple[str, list[tuple[ChunkEntry, Ints]]]]:
    """Yield (segment, its chunks within ``RANGE_BYTES`` that may hold rows of the window, each with the blocks)."""
    for each in picked:
        group: list[tuple[ChunkEntry, Ints]] = []
        for entry in entries_of(each.entries):
            id_ = ids[entry.table] if entry.table < len(ids) else None
            if id_ is None or not len(blocks := window.blocks(id_, entry.first, entry.last + 1)):
                continue
            if group and entry.offset + entry.num_bytes - group[0][0].offset > RANGE_BYTES:
                yield each.ref.name, group
                group = []
            group.append((entry, blocks))
        if group:
            yield each.ref.name, group


def _read(
    objects: Readable, schema: Schema, whole: bool, name: str, group: Sequence[tuple[ChunkEntry, Ints]]
) -> WindowRead:
    """Read a group. With ``whole``, all of its chunks are read whole."""
    chunks = [_Sought(entry, blocks, chunk_layout(entry, schema, name), name) for entry, blocks in group]
    source = _Ranges(objects, name)
    first, last = group[0][0], group[-1][0]
    if whole or last.offset + last.num_bytes - first.offset <= SMALL_BYTES:
        source.fetch(chunk.whole for chunk in chunks)
        found = [chunk.rows_of_whole(source, schema) for chunk in chunks]
    else:
        source.fetch(chunk.ids_span for chunk in chunks if not chunk.is_gapless)
        chosen = [(chunk, *chunk.places(source)) for chunk in chunks]
        chosen = [each for each in chosen if len(each[2])]
        source.fetch(span for chunk, _, places in chosen for span in chunk.spans(places))
        found = [
            chunk.rows_of_whole(source, schema) if chunk.is_wanted_whole(places) else chunk.rows(source, ids, places)
            for chunk, ids, places in chosen
        ]
    return WindowRead(tuple(rows for rows in found if rows is not None), source.num_bytes)


class _Ranges:
    """Parts of one object. Each fetch replaces the parts that were fetched before."""

    def __init__(self, objects: Readable, name: str) -> None:
        self._objects, self._name = objects, name
        self._begins: list[int] = []
        self._parts: list[memoryview] = []
        self.num_bytes = 0
        """Total bytes read so far."""

    def fetch(self, spans: Iterable[Span]) -> None:
        """Read spans. Close spans are read by one request."""
        merged: list[Span] = []
        for begin, end in sorted(spans):
            if merged and begin - merged[-1][1] <= GAP_BYTES and end - merged[-1][0] <= RANGE_BYTES:
                merged[-1] = merged[-1][0], max(end, merged[-1][1])
            else:
                merged.append((begin, end))
        self._begins = [begin for begin, _ in merged]
        self._parts = [self._objects.read(self._name, begin, end) for begin, end in merged]
        self.num_bytes += sum(end - begin for begin, end in merged)

    def get(self, span: Span) -> memoryview:
        """Return the bytes of one of the spans that were fetched last."""
        number = bisect_right(self._begins, span[0]) - 1
        begin = self._begins[number]
        return self._parts[number][span[0] - begin : span[1] - begin]


@dataclass(frozen=True, slots=True)
class _Sought:
    """One chunk, and the blocks to find in it."""

    entry: ChunkEntry
    blocks: Ints
    layout: RowLayout
    name: str

    @property
    def whole(self) -> Span:
        return self.entry.offset, self.entry.offset + self.entry.num_bytes

    @property
    def is_gapless(self) -> bool:
        """True if its ids are consecutive. They are not read in this case."""
        return self.entry.last - self.entry.first + 1 == self.entry.rows

    @property
    def ids_span(self) -> Span:
        begin = self.entry.offset + self.layout.offsets(self.entry.rows)[0][0]
        return begin, begin + 8 * self.entry.rows

    def places(self, source: _Ranges) -> tuple[Ints, Places]:
        """Return (all ids, positions of the blocks' ids among them).

        Raises:
            CorruptionError: the ids are not those that the directory names.
        """
        entry = self.entry
        if self.is_gapless:
            ids = np.arange(entry.first, entry.last + 1, dtype=np.int64)
        else:
            ids = np.frombuffer(source.get(self.ids_span), "<i8")
            if not (entry.first == ids[0] and ids[-1] == entry.last) or not bool((ids[1:] > ids[:-1]).all()):
                place = {"name": self.name, "offset": str(entry.offset)}
                raise CorruptionError("chunk's ids differ from its directory entry", **place)
        return ids, self._among(ids)

    def _among(self, ids: Ints) -> Places:
        of_rows = ids // BLOCK_ROWS
        blocks = self.blocks
        return np.flatnonzero(blocks[np.minimum(np.searchsorted(blocks, of_rows), len(blocks) - 1)] == of_rows)

    def is_wanted_whole(self, places: Places) -> bool:
        return len(places) > _WHOLE_SHARE * self.entry.rows

    def spans(self, places: Places) -> Iterator[Span]:
        """Yield the spans to read for some rows."""
        if self.is_wanted_whole(places):
            yield self.whole
            return
        for begin, row_bytes in self._sections():
            for first, last in _runs(places, row_bytes):
                yield begin + int(places[first]) * row_bytes, begin + (int(places[last - 1]) + 1) * row_bytes

    def _sections(self) -> Iterator[tuple[int, int]]:
        """Yield (first byte, bytes of a row) of weights and states."""
        offsets, _ = self.layout.offsets(self.entry.rows)
        for section, offset in zip(self.layout.sections[1:], offsets[1:], strict=True):
            yield self.entry.offset + offset, section.row_bytes

    def rows(self, source: _Ranges, ids: Ints, places: Places) -> WindowRows:
        """Return rows by their places, from their spans."""
        arrays: list[Array] = []
        for section, (begin, row_bytes) in zip(self.layout.sections[1:], self._sections(), strict=True):
            parts = []
            for run in _runs(places, row_bytes):
                of_run = places[slice(*run)]
                first, last = int(of_run[0]), int(of_run[-1])
                data = source.get((begin + first * row_bytes, begin + (last + 1) * row_bytes))
                part = np.frombuffer(data, NUMPY_DTYPES[section.dtype]).reshape(last + 1 - first, section.width)
                parts.append(part[of_run - first])
            array = np.concatenate(parts)
            arrays.append(array[:, 0] if section.per_row else array)
        return self._given(RowsView(ids[places], arrays[0], tuple(arrays[1:])))

    def rows_of_whole(self, source: _Ranges, schema: Schema) -> WindowRows | None:
        """Return the blocks' rows from the whole chunk, after comparing its checksum. None if it has no such rows."""
        data = source.get(self.whole)
        check_chunk(self.entry, data, self.name)
        view = decode_chunk(self.entry, data, schema, self.name)
        places = self._among(view.ids)
        if not len(places):
            return None
        states = tuple(state[places] for state in view.states)
        return self._given(RowsView(view.ids[places], view.weights[places], states))

    def _given(self, rows: RowsView) -> WindowRows:
        return WindowRows(self.entry.table, self.entry.col0, self.entry.cols, rows)


def _runs(places: Places, row_bytes: int) -> Sequence[tuple[int, int]]:
    """Return ranges of ``places`` that are read together, because a request costs more than a small gap."""
    breaks = np.flatnonzero(np.diff(places) * row_bytes > GAP_BYTES) + 1
    edges = [0, *breaks.tolist(), len(places)]
    return list(pairwise(edges))
