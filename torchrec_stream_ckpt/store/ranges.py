"""Read some rows of chunks, and not the rest: those of the blocks that one proof speaks of.

Such blocks are spread over a whole table: chunks that hold one would be most of a store. What is read of a chunk has no
checksum of its own. So a reader compares the rows with a proof, and reads chunks whole where they do not fit.
"""

from __future__ import annotations

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
from torchrec_stream_ckpt.store.reader import AHEAD, GAP_BYTES

_WHOLE_SHARE = 0.5
"""A chunk of which more than this share is wanted is read whole, with its checksum."""


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows of one chunk that belong to the blocks of a window."""

    table: int
    col0: int
    cols: int
    rows: RowsView
    num_bytes: int
    """What was read for them."""


def read_window(
    objects: Readable,
    picked: Iterable[Picked],
    schema: Schema,
    ids: Sequence[int | None],
    window: Window,
    pool: Executor,
    *,
    whole: bool = False,
) -> Iterator[WindowRows]:
    """The rows of all chunks that belong to blocks of a window, chunk by chunk in their order.

    Args:
        objects: The store.
        picked: What to look in: chunks of tables without an id are passed over.
        schema: Of their generation.
        ids: Of the tables, by their index, as the window means them: an older generation may not have given any.
        window: Which blocks.
        pool: Threads that read, ahead of the caller.
        whole: Read each of these chunks whole, and compare its checksum.

    Raises:
        CorruptionError: a segment is gone, shorter, or (as far as it was read whole) altered.
        StoreUnavailableError: the store does not answer.
    """
    pending: deque[Future[WindowRows | None]] = deque()
    wanted = _wanted(picked, ids, window)
    read = partial(_read, objects, schema, whole)
    try:
        while True:
            while len(pending) < AHEAD and (following := next(wanted, None)) is not None:
                pending.append(pool.submit(read, *following))
            if not pending:
                return
            if (found := pending.popleft().result()) is not None:
                yield found
    finally:
        for future in pending:
            future.cancel()


def _wanted(
    picked: Iterable[Picked], ids: Sequence[int | None], window: Window
) -> Iterator[tuple[Picked, ChunkEntry, Ints]]:
    """Each chunk that may hold rows of the window, and the blocks."""
    for each in picked:
        for entry in entries_of(each.entries):
            id_ = ids[entry.table] if entry.table < len(ids) else None
            if id_ is not None and len(blocks := window.blocks(id_, entry.first, entry.last + 1)):
                yield each, entry, blocks


def _read(
    objects: Readable, schema: Schema, whole: bool, picked: Picked, entry: ChunkEntry, blocks: Ints
) -> WindowRows | None:
    layout = chunk_layout(entry, schema, picked.ref.name)
    if not whole:
        source = _Ranges(objects, picked.ref.name, entry)
        ids = _ids(source, layout, entry)
        places = _places(ids, blocks)
        if not len(places):
            return None
        if len(places) <= _WHOLE_SHARE * entry.rows:
            return WindowRows(
                entry.table, entry.col0, entry.cols, _view(source, layout, entry, ids, places), source.num_bytes
            )
    data = objects.read(picked.ref.name, entry.offset, entry.offset + entry.num_bytes)
    check_chunk(entry, data, picked.ref.name)
    view = decode_chunk(entry, data, schema, picked.ref.name)
    places = _places(view.ids, blocks)
    if not len(places):
        return None
    states = tuple(state[places] for state in view.states)
    rows = RowsView(view.ids[places], view.weights[places], states)
    return WindowRows(entry.table, entry.col0, entry.cols, rows, len(data))


class _Ranges:
    """Parts of one chunk."""

    def __init__(self, objects: Readable, name: str, entry: ChunkEntry) -> None:
        self._objects, self._name, self._entry = objects, name, entry
        self.num_bytes = 0
        """Read so far."""

    def read(self, begin: int, end: int) -> memoryview:
        """Bytes [begin, end) of the chunk."""
        offset = self._entry.offset
        self.num_bytes += end - begin
        return self._objects.read(self._name, offset + begin, offset + end)

    def error(self) -> CorruptionError:
        place = {"name": self._name, "offset": str(self._entry.offset)}
        return CorruptionError("chunk's ids are not those that the directory names", **place)


def _ids(source: _Ranges, layout: RowLayout, entry: ChunkEntry) -> Ints:
    """All ids of a chunk: they are not read where they follow each other without a gap."""
    if entry.last - entry.first + 1 == entry.rows:
        return np.arange(entry.first, entry.last + 1, dtype=np.int64)
    begin = layout.offsets(entry.rows)[0][0]
    ids = np.frombuffer(source.read(begin, begin + 8 * entry.rows), "<i8")
    if not (entry.first == ids[0] and ids[-1] == entry.last) or not bool((ids[1:] > ids[:-1]).all()):
        raise source.error()
    return ids


def _places(ids: Ints, blocks: Ints) -> npt.NDArray[np.intp]:
    """Where rows of these blocks stand among ascending ids."""
    of_rows = ids // BLOCK_ROWS
    return np.flatnonzero(blocks[np.minimum(np.searchsorted(blocks, of_rows), len(blocks) - 1)] == of_rows)


def _view(source: _Ranges, layout: RowLayout, entry: ChunkEntry, ids: Ints, places: npt.NDArray[np.intp]) -> RowsView:
    """Rows of a chunk by their places in it."""
    offsets, _ = layout.offsets(entry.rows)
    arrays: list[Array] = []
    for section, offset in zip(layout.sections[1:], offsets[1:], strict=True):
        parts = []
        for begin, end in _runs(places, section.row_bytes):
            first, last = int(places[begin]), int(places[end - 1])
            data = source.read(offset + first * section.row_bytes, offset + (last + 1) * section.row_bytes)
            part = np.frombuffer(data, NUMPY_DTYPES[section.dtype]).reshape(last + 1 - first, section.width)
            parts.append(part[places[begin:end] - first])
        array = np.concatenate(parts)
        arrays.append(array[:, 0] if section.per_row else array)
    return RowsView(ids[places], arrays[0], tuple(arrays[1:]))


def _runs(places: npt.NDArray[np.intp], row_bytes: int) -> Sequence[tuple[int, int]]:
    """Ranges of ``places`` that are read together: a request costs more than a gap."""
    breaks = np.flatnonzero(np.diff(places) * row_bytes > GAP_BYTES) + 1
    edges = [0, *breaks.tolist(), len(places)]
    return list(pairwise(edges))
