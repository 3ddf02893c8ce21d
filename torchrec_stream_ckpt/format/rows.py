"""Payloads of ROWS frames (ids, weights, then one section for each optimizer state) and of IDS frames.

Sections are raw little-endian arrays, each at a multiple of 64 bytes. Ids are global rows of the
logical table, so a reader needs no plan of the writer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import (
    DTYPE_BYTES,
    DTYPE_CODES,
    HEADER_LEN,
    MAX_FRAME_BYTES,
    MAX_SECTIONS,
    PER_ROW,
    Header,
    aligned,
)
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

Array = npt.NDArray[np.generic]

# numpy has no bfloat16, so its bits are sent as uint16.
NUMPY_DTYPES: dict[str, str] = {
    "float32": "<f4",
    "float16": "<f2",
    "bfloat16": "<u2",
    "float64": "<f8",
    "int32": "<i4",
    "int64": "<i8",
    "uint8": "|u1",
}


def distinct(ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ids in ascending order, each once.

    ``np.unique`` of NumPy 2.3 and later hashes them: 23 ms for 200,000, which are sorted in 0.8 (AMD EPYC).
    """
    ordered = np.sort(ids)
    is_first = np.ones(len(ordered), np.bool_)
    is_first[1:] = ordered[1:] != ordered[:-1]
    return ordered[is_first]


@dataclass(frozen=True, slots=True)
class Section:
    """One array of a ROWS payload: ``width`` values of ``dtype`` for each row."""

    dtype: str
    per_row: bool
    width: int

    @property
    def row_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype] * self.width

    @property
    def code(self) -> int:
        return DTYPE_CODES[self.dtype] | (PER_ROW if self.per_row else 0)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Layout of the rows of one table shard in a payload."""

    sections: tuple[Section, ...]
    max_rows: int
    """Maximum number of rows in one frame."""
    codes: tuple[int, ...] = field(init=False)
    """The dtype code of each section."""
    widths: tuple[int, ...] = field(init=False)
    """Bytes of a row in each section."""

    def __post_init__(self) -> None:
        # For a small frame, Python's overhead dominates. So values that are constant for a table are computed once.
        object.__setattr__(self, "codes", tuple(section.code for section in self.sections))
        object.__setattr__(self, "widths", tuple(section.row_bytes for section in self.sections))

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all sections."""
        return sum(self.widths)

    @classmethod
    @lru_cache(maxsize=4096)
    def of(cls, table: TableSpec, cols: int) -> RowLayout:
        """Return the layout of a slice of ``cols`` columns of ``table``.

        Raises:
            ValueError: there are more sections than a frame can have, or one row is larger than a frame.
        """

        def width(state: StateSpec) -> int:
            return 1 if state.per_row else cols

        sections = (
            Section("int64", True, 1),
            Section(table.dtype, False, cols),
            *(Section(state.dtype, state.per_row, width(state)) for state in table.states),
        )
        room = MAX_FRAME_BYTES - HEADER_LEN - (len(sections) + 1) * 64
        max_rows = room // sum(section.row_bytes for section in sections)
        if len(sections) > MAX_SECTIONS:
            raise ValueError(
                f"{len(table.states)} optimizer states do not fit a frame, which has space for {MAX_SECTIONS - 2}"
            )
        if max_rows < 1:
            raise ValueError(f"one row of {cols} columns does not fit a frame of {MAX_FRAME_BYTES} bytes")
        return cls(sections, max_rows)

    def offsets(self, rows: int) -> tuple[tuple[int, ...], int]:
        """Return (offset of each section from the payload's first byte, length of the payload)."""
        return _offsets(self.widths, rows)


@lru_cache(maxsize=4096)
def _offsets(widths: tuple[int, ...], rows: int) -> tuple[tuple[int, ...], int]:
    """Compute section offsets. Cached by widths, because hashing a layout takes longer than this computation."""
    offsets, position = [], 0
    for row_bytes in widths:
        offsets.append(position)
        position += aligned(rows * row_bytes)
    return tuple(offsets), position


@dataclass(frozen=True, slots=True)
class RowsView:
    """Decoded rows. The arrays are views of the frame's bytes and valid only as long as those are."""

    ids: npt.NDArray[np.int64]
    """Global row ids, shape (rows,), in no promised order, no id twice."""
    weights: Array
    """Shape (rows, cols)."""
    states: tuple[Array, ...]
    """States in the schema's order. Shape (rows,) for a state with one value per row, otherwise (rows, cols)."""
    offsets: tuple[int, ...] | None = field(default=None, init=False, compare=False)
    """Bytes from the first id to the first byte of each array, if all are views of one payload. Asking an array for its
    address takes longer than copying a few rows. Not an argument: ``dataclasses.replace`` must not keep it."""


def decode_rows(header: Header, payload: memoryview, table: TableSpec) -> RowsView:
    """View the sections of a ROWS payload, after checking every length against the schema.

    Raises:
        CorruptionError: sections do not fit the header or the schema, or an id is outside the table.
    """
    if header.cols < 1 or header.col0 + header.cols > table.dim:
        raise _corrupt(f"columns [{header.col0}, +{header.cols}) are outside dim {table.dim}", header, table)
    try:
        layout = RowLayout.of(table, header.cols)
    except ValueError as error:
        raise _corrupt(str(error), header, table) from None
    offsets, length = layout.offsets(header.rows)
    if header.dtypes != layout.codes or header.section_offsets != offsets or length != len(payload):
        raise _corrupt("sections do not match the schema", header, table)
    view = _view(layout, header.rows, payload, offsets)
    # As unsigned numbers, negative ids are larger than any table.
    if header.rows and largest(view.ids.view(np.uint64)) >= table.rows:
        raise _corrupt(f"a row id is outside [0, {table.rows})", header, table)
    return view


def largest(numbers: npt.NDArray[Any]) -> int:
    """Return the largest of at least one number. For a small array this takes a fifth of the time of ``max``."""
    return int(numbers.item(numbers.argmax()))


def _corrupt(what: str, header: Header, table: TableSpec) -> CorruptionError:
    return CorruptionError(what, **header.place(), table=table.name)


def view_rows(layout: RowLayout, rows: int, payload: memoryview) -> RowsView:
    """View the sections of a payload whose length has been checked."""
    return _view(layout, rows, payload, layout.offsets(rows)[0])


def _view(layout: RowLayout, rows: int, payload: memoryview, offsets: tuple[int, ...]) -> RowsView:
    arrays = []
    for section, offset in zip(layout.sections, offsets, strict=True):
        array = np.frombuffer(payload, NUMPY_DTYPES[section.dtype], rows * section.width, offset)
        arrays.append(array if section.per_row else array.reshape(rows, section.width))
    view = RowsView(arrays[0], arrays[1], tuple(arrays[2:]))
    object.__setattr__(view, "offsets", offsets)
    return view


ASSIGNED = 1
"""From here on the row belongs to the raw id."""
EVICTED = 2
"""The raw id has no row any more."""
NO_ID = int(np.iinfo(np.int64).max)
"""TorchRec's raw id of a free row. No event has it."""

_ID_SECTIONS = (Section("int64", True, 1), Section("int64", True, 1), Section("uint8", True, 1))
ID_LAYOUT = RowLayout(
    _ID_SECTIONS,
    (MAX_FRAME_BYTES - HEADER_LEN - MAX_SECTIONS * 64) // sum(section.row_bytes for section in _ID_SECTIONS),
)
"""Layout of the payload of an IDS frame: rows, raw ids, events."""


@dataclass(frozen=True, slots=True)
class IdEvents:
    """Events of one frame, in order. Views of the frame's bytes, valid only as long as those are."""

    rows: npt.NDArray[np.int64]
    """Rows of the logical table, shape (n,)."""
    raw_ids: npt.NDArray[np.int64]
    kinds: npt.NDArray[np.uint8]
    """:data:`ASSIGNED` or :data:`EVICTED`, each."""


def put_events(
    header: Header,
    memory: npt.NDArray[np.uint8],
    rows: npt.NDArray[np.int64],
    raw_ids: npt.NDArray[np.int64],
    kind: int,
) -> None:
    """Write events of one kind as the payload of a frame, and describe them in its header.

    Args:
        header: Header of kind IDS with its table; gets the fields of the payload.
        memory: Memory of the frame, at least :func:`events_frame_bytes`.
        rows: Rows of the logical table, at most ``ID_LAYOUT.max_rows``.
        raw_ids: Their raw ids.
        kind: Kind of all of them.
    """
    count = len(rows)
    offsets, length = ID_LAYOUT.offsets(count)
    kinds = np.full(count, kind, np.uint8)
    for offset, values in zip(offsets, (rows.astype("<i8"), raw_ids.astype("<i8"), kinds), strict=True):
        memory[HEADER_LEN + offset :][: values.nbytes] = values.view(np.uint8)
    header.rows, header.dtypes = count, ID_LAYOUT.codes
    header.section_offsets, header.payload_len = offsets, length


def events_frame_bytes(count: int) -> int:
    """Return the size of a frame of ``count`` events, in bytes."""
    return HEADER_LEN + ID_LAYOUT.offsets(count)[1]


def decode_events(header: Header, payload: memoryview, tables: Sequence[TableSpec]) -> IdEvents:
    """View the sections of an IDS payload, after checking every length and value.

    Args:
        header: Header of the frame.
        payload: Its payload, the checksum compared.
        tables: Tables of its schema.

    Raises:
        CorruptionError: there is no such table, sections do not fit the header, a row is outside the table, an event is
            unknown, or a raw id is that of free rows.
    """
    if header.table >= len(tables):
        raise CorruptionError(f"table number {header.table} is not in the schema", **header.place())
    table = tables[header.table]
    offsets, length = ID_LAYOUT.offsets(header.rows)
    if header.dtypes != ID_LAYOUT.codes or header.section_offsets != offsets or length != len(payload):
        raise CorruptionError("sections are not rows, raw ids and events", **header.place(), table=table.name)
    rows, raw_ids = (np.frombuffer(payload, "<i8", header.rows, offset) for offset in offsets[:2])
    kinds = np.frombuffer(payload, np.uint8, header.rows, offsets[2])
    why = ""
    if header.rows and largest(rows.view(np.uint64)) >= table.rows:
        why = f"a row of an event is outside [0, {table.rows})"
    elif not np.isin(kinds, (ASSIGNED, EVICTED)).all():
        why = f"an event is {int(kinds[~np.isin(kinds, (ASSIGNED, EVICTED))][0])}, expected 1 or 2"
    elif (raw_ids == NO_ID).any():
        why = f"an event has raw id {NO_ID}, which free rows have"
    if why:
        raise CorruptionError(why, **header.place(), table=table.name)
    return IdEvents(rows, raw_ids, kinds)
