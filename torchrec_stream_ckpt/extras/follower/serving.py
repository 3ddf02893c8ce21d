"""Lossy rows of a serving stream: only weights, as int8 by rows or as bfloat16. Specified in docs/format.md."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind, seal
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, Array, RowLayout, RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

Encoding = Literal["int8", "bf16"]
Floats = npt.NDArray[np.float32]

_PREFIX = "serving_"
_SCALE_AND_BIAS = (StateSpec("scale", "float32", True), StateSpec("bias", "float32", True))
_EPSILON = np.float32(1e-8)
_LEVELS = np.float32(255)


def served_schema(schema: Schema, encoding: Encoding) -> Schema:
    """Return the tables of a serving stream for a trainer's tables: those that are not dropped, sorted by name."""
    states, dtype = (_SCALE_AND_BIAS, "uint8") if encoding == "int8" else ((), "bfloat16")
    optimizer = f"{_PREFIX}{encoding}"
    tables = sorted((table for _, table in schema.live), key=lambda table: table.name)
    return Schema(tuple(replace(each, dtype=dtype, optimizer=optimizer, states=states) for each in tables))


def is_served(table: TableSpec) -> bool:
    """Return whether the table is one of a serving stream."""
    return table.optimizer.startswith(_PREFIX)


def decoded_table(table: TableSpec) -> TableSpec:
    """Return the table as readers of a serving stream get it: float32, no states."""
    return replace(table, dtype="float32", optimizer=_PREFIX.rstrip("_"), states=()) if is_served(table) else table


def to_float32(table: TableSpec, weights: Array) -> Floats:
    """Convert a trainer's weights to float32, exactly.

    Raises:
        UnsupportedError: the weights are not floats.
    """
    if table.dtype == "bfloat16":
        return (weights.astype(np.uint32) << 16).view(np.float32)
    if table.dtype not in ("float32", "float16"):
        raise UnsupportedError(f"weights of {table.dtype} cannot be served", table=table.name)
    return weights.astype(np.float32)


def encode(table: TableSpec, encoding: Encoding, weights: Floats) -> list[Array]:
    """Encode weights of shape (n, dim) as the sections of a ROWS payload after its ids.

    Raises:
        UnsupportedError: a row contains a NaN or an infinity, which int8 cannot represent.
    """
    return [_to_bfloat16(weights)] if encoding == "bf16" else _to_int8(table, weights)


def _to_int8(table: TableSpec, weights: Floats) -> list[Array]:
    """Encode weights as FBGEMM's row-wise 8 bits: 256 levels between a row's least and largest value."""
    if not np.isfinite(weights).all():
        raise UnsupportedError("a row holds a NaN or an infinity", hint="serve it as bf16", table=table.name)
    bias, top = weights.min(1), weights.max(1)
    with np.errstate(over="ignore"):
        span = top - bias
    if not np.isfinite(span).all():
        raise UnsupportedError(
            "the range of a row's values is too large for 8 bits", hint="serve it as bf16", table=table.name
        )
    inverse = _LEVELS / (span + _EPSILON)
    levels = np.rint((weights - bias[:, None]) * inverse[:, None])
    return [levels.astype(np.uint8), (span / _LEVELS).astype(np.float32), bias]


def _to_bfloat16(weights: Floats) -> Array:
    """Round to the nearest value, ties to even. A NaN stays a NaN."""
    bits = np.ascontiguousarray(weights).view(np.uint32)
    rounded = ((bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(weights), ((bits >> 16) | 0x40).astype(np.uint16), rounded)


def decode(table: TableSpec, view: RowsView) -> Floats:
    """Decode rows of a serving stream to float32, shape (n, cols)."""
    if table.dtype == "bfloat16":
        return (view.weights.astype(np.uint32) << 16).view(np.float32)
    scale, bias = (np.asarray(state, np.float32)[:, None] for state in view.states)
    return view.weights.astype(np.float32) * scale + bias


def rows_frame(header: Header, table: TableSpec, arrays: list[Array]) -> bytearray:
    """Make a sealed ROWS frame of whole rows.

    Args:
        header: Header with identity and seq. The rest is filled in.
        table: Table of a serving stream.
        arrays: ids, weights, states. At most as many rows as :class:`RowLayout` allows.
    """
    layout = RowLayout.of(table, table.dim)
    offsets, length = layout.offsets(len(arrays[0]))
    frame = bytearray(HEADER_LEN + length)
    for section, offset, array in zip(layout.sections, offsets, arrays, strict=True):
        data = np.ascontiguousarray(array, NUMPY_DTYPES[section.dtype])
        begin = HEADER_LEN + offset
        frame[begin : begin + data.nbytes] = data.tobytes()
    header.kind = Kind.ROWS
    header.rows, header.cols, header.payload_len = len(arrays[0]), table.dim, length
    header.dtypes = layout.codes
    header.section_offsets = offsets
    seal(header, frame)
    return frame
