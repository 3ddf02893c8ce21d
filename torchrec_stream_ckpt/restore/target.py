"""Targets of a restore: live shards, with the places of their rows and flags of the rows that have arrived."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.rows import Array, RowsView
from torchrec_stream_ckpt.native.kernel import Column, kernel
from torchrec_stream_ckpt.proofs.seen_marks import NEVER, blocks_of
from torchrec_stream_ckpt.proofs.seen_marks import Places as Markers
from torchrec_stream_ckpt.restore.plan import Move
from torchrec_stream_ckpt.util.types import TableShard

_BLOCK_BITS = BLOCK_ROWS.bit_length() - 1
assert 1 << _BLOCK_BITS == BLOCK_ROWS
_SOME = 32
"""Fewer rows than this are written by NumPy: a call of the kernel costs as much."""

Ints = npt.NDArray[np.int64]
Places = Ints | slice
"""Rows of a shard, counted from its first one; a slice if they are adjacent."""


class Plane:
    """Live tensor that is written by rows. On a CPU, rows are written as byte strings: twice as fast as by numbers."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.array: Array | None = None
        if not tensor.is_cuda:
            plain = tensor.detach()
            self.array = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
        self._address = self.array.ctypes.data if self.array is not None else 0

    @property
    def is_straight(self) -> bool:
        """True if adjacent rows of a marker can be read directly into the tensor's memory; if not, use :meth:`put`."""
        return self.array is not None and self.array.flags.c_contiguous

    @property
    def is_by_row(self) -> bool:
        """True if the values of each row are adjacent in memory."""
        array = self.array
        return array is not None and (array.ndim == 1 or array.shape[1] <= 1 or array.strides[1] == array.itemsize)

    def column(self, packed: Array, address: int, here: int, there: int, cols: int) -> Column | None:
        """Return the copy of rows for the kernel; requires :attr:`is_by_row`.

        Args:
            packed: The rows as they come, shape (rows,) or (rows, cols of the source).
            address: Address of ``packed``.
            here: Column of this tensor from which on they are written, if they are 2-D.
            there: Column of ``packed`` from which on they are read.
            cols: Number of columns.

        Returns:
            None if ``packed`` is not laid out by row, or has values of another size.
        """
        array = self.array
        assert array is not None
        size = array.itemsize
        if packed.ndim != array.ndim or packed.itemsize != size:
            return None
        live, source = self._address, address
        if array.ndim == 1:
            return Column(live, array.strides[0], source, packed.strides[0], size)
        if packed.shape[1] > 1 and packed.strides[1] != size:
            return None
        assert here + cols <= array.shape[1]
        assert there + cols <= packed.shape[1]
        return Column(live + here * size, array.strides[0], source + there * size, packed.strides[0], cols * size)

    def run(self, begin: int, rows: int) -> memoryview:
        """Return the memory of rows; requires :attr:`is_straight`."""
        assert self.array is not None
        return self.array[begin : begin + rows].reshape(-1).view(np.uint8).data

    def take(self, values: torch.Tensor) -> None:
        """Write one value for each row."""
        self.tensor.copy_(values)

    def put(self, places: Places, values: Array, col0: int = 0) -> None:
        """Write rows. If ``values`` is 2-D, its columns are written to the columns from ``col0`` on."""
        if self.array is not None:
            if not isinstance(places, slice) and self._put_by_kernel(places, values, col0):
                return
            part = self.array if values.ndim == 1 else self.array[:, col0 : col0 + values.shape[1]]
            if isinstance(places, slice):
                part[places] = values.view(part.dtype)
            else:
                whole_rows(part)[places] = whole_rows(values)
            return
        source = torch.from_numpy(np.array(values))
        source = (source.view(torch.bfloat16) if self.tensor.dtype == torch.bfloat16 else source).to(self.tensor.device)
        part_ = self.tensor if values.ndim == 1 else self.tensor[:, col0 : col0 + values.shape[1]]
        if isinstance(places, slice):
            part_[places] = source
        else:
            part_.index_copy_(0, torch.from_numpy(places).to(self.tensor.device), source)

    def _put_by_kernel(self, places: Ints, values: Array, col0: int) -> bool:
        """Write rows by the native kernel, as :meth:`put` does. False if it cannot: nothing was written then."""
        native = kernel()
        if native is None or len(places) < _SOME or not (self.is_by_row and places.flags.c_contiguous):
            return False
        column = self.column(values, values.ctypes.data, col0, 0, values.shape[1] if values.ndim > 1 else 1)
        if column is None:
            return False
        assert self.array is not None
        rows = len(self.array)
        written = native.place(
            places.ctypes.data, len(places), 0, rows, 0, (Column * 1)(column), (), None, _BLOCK_BITS, 0, NEVER
        )
        if written < len(places):
            raise IndexError(f"a row is not in [0, {rows})")
        return True


class RowPlane(Plane):
    """Live tensor whose rows are numbered differently from those of the marker.

    Args:
        tensor: The live tensor.
        rows: For each row of the marker's shard, its row in ``tensor``. -1 for a row without one.
    """

    def __init__(self, tensor: torch.Tensor, rows: Ints) -> None:
        super().__init__(tensor)
        self._rows = rows

    @property
    def is_straight(self) -> bool:
        return False

    def take(self, values: torch.Tensor) -> None:
        here = np.flatnonzero(self._rows >= 0)
        wanted = values[torch.from_numpy(here)].to(self.tensor)
        self.tensor.index_copy_(0, torch.from_numpy(self._rows[here]).to(self.tensor.device), wanted)

    def put(self, places: Places, values: Array, col0: int = 0) -> None:
        rows = self._rows[places]
        here = rows >= 0
        if not here.all():
            rows, values = rows[here], values[here]
        if len(rows):
            super().put(rows, values, col0)


class CastPlane:
    """Live tensor of another dtype than its incoming rows, which are rounded as torch does it.

    Args:
        plane: The live tensor.
        dtype: Dtype of the incoming rows, by its name in torch.
    """

    is_straight = False

    def __init__(self, plane: Plane, dtype: str) -> None:
        self._plane = plane
        self._dtype: torch.dtype = getattr(torch, dtype)
        self.tensor = plane.tensor

    def run(self, begin: int, rows: int) -> memoryview:
        """Never called, because the plane is not straight."""
        raise AssertionError

    def take(self, values: torch.Tensor) -> None:
        """Write one value for each row, as :meth:`Plane.take`."""
        self._plane.take(values)

    def put(self, places: Places, values: Array, col0: int = 0) -> None:
        """Cast rows, and write them as :meth:`Plane.put`."""
        source = torch.from_numpy(np.array(values, order="C"))
        source = source.view(self._dtype).to(self.tensor.dtype)
        self._plane.put(places, (source.view(torch.int16) if source.dtype == torch.bfloat16 else source).numpy(), col0)


class Unwanted:
    """Placeholder for a tensor that is not wanted: its rows are read and checked with the others, then discarded.

    Args:
        row_bytes: Size of one row, in bytes.
    """

    is_straight = True

    def __init__(self, row_bytes: int) -> None:
        self._row_bytes = row_bytes

    def run(self, begin: int, rows: int) -> memoryview:
        """Return scratch memory for rows."""
        return np.empty(rows * self._row_bytes, np.uint8).data

    def put(self, places: Places, values: Array, col0: int = 0) -> None:
        """Discard the rows."""


def whole_rows(array: Array) -> npt.NDArray[Any]:
    """Return a view of the array with each row as one value."""
    if array.ndim == 1 or not len(array):
        return array.reshape(len(array))
    return array.view(_row_type(array.shape[1] * array.itemsize))[:, 0]


@cache
def _row_type(num_bytes: int) -> np.dtype[np.void]:
    return np.dtype((np.void, num_bytes))


class Target:
    """Weights and states of one live shard that is being restored.

    Args:
        shard: The shard.
        weights: The live weights, shape (rows, cols); or ``Unwanted``.
        states: The live states, shape (rows,) or (rows, cols); None or ``Unwanted`` for states that are not wanted.
        moves: All moves into this shard.
        merged: Merge states with one value per row over column shards.
        sent: For each block with rows of the shard, the place of the newest marker that sent one of them; updated in
            place. None if it is not needed.
        numbers: For each row of the shard, its row in ``weights`` and ``states``; -1 if it has none there and need not
            arrive. None if the row numbers are the same.
        dtype: Dtype of the incoming weights, if ``weights`` has another one.
    """

    def __init__(
        self,
        shard: TableShard,
        weights: torch.Tensor | Unwanted,
        states: Sequence[torch.Tensor | Unwanted | None],
        moves: Sequence[Move],
        *,
        merged: bool,
        sent: Markers | None = None,
        numbers: Ints | None = None,
        dtype: str | None = None,
    ) -> None:
        self._shard = shard
        self._first_block, last_block = blocks_of(shard)
        self._sent = sent if sent is not None else np.full(last_block - self._first_block, -1, np.int32)
        plane = Plane if numbers is None else partial(RowPlane, rows=numbers)
        self._weights: Plane | CastPlane | Unwanted
        if isinstance(weights, Unwanted):
            self._weights = weights
        else:
            self._weights = plane(weights) if dtype is None else CastPlane(plane(weights), dtype)
        self._states = [plane(state) if isinstance(state, torch.Tensor) else state for state in states]
        self._wanted = numbers >= 0 if numbers is not None else np.True_
        self._merged = merged
        self._plain = self._plain_planes()
        self._cuts = sorted({edge for move in moves for edge in (move.col0, move.col0 + move.cols)})
        """Column boundaries of the moves: columns between two of them always arrive together."""
        self._arrived = np.zeros((max(1, len(self._cuts) - 1), shard.rows), np.bool_)
        self._flags, self._newest = self._arrived.ctypes.data, self._sent.ctypes.data
        # Row-wise state of each column shard of the source, kept separately until all shards have arrived.
        self._pieces = {(move.col0, move.cols): [np.zeros(shard.rows) for _ in states] for move in moves if merged}

    def put(self, move: Move, rows: RowsView, place: int = NEVER) -> int:
        """Write the rows of this move, replacing earlier versions; returns their number.

        Args:
            move: The move that selects rows.
            rows: Rows of a frame.
            place: Place of the marker that the frame was sent for; omit it if unknown.
        """
        written = self._place(move, rows, place)
        if written is not None:
            return written
        chosen = np.flatnonzero((rows.ids >= move.row0) & (rows.ids < move.row0 + move.rows))
        if not len(chosen):
            return 0
        if len(chosen) < len(rows.ids):
            rows = RowsView(rows.ids[chosen], rows.weights[chosen], tuple(state[chosen] for state in rows.states))
        self._put(move, _places(rows.ids - self._shard.row0), rows.weights, rows.states)
        self._note_sent(rows.ids, place)
        return len(rows.ids)

    def _note_sent(self, ids: npt.NDArray[np.int64], place: int) -> None:
        """Record the newest marker of each block; streams are read one by one, so an older one may follow a newer."""
        blocks = ids // BLOCK_ROWS - self._first_block
        self._sent[blocks] = np.maximum(self._sent[blocks], np.int32(place))

    def put_block(self, move: Move, weights: Array, states: Sequence[Array]) -> None:
        """Write all rows of a move, given in their order. Several threads may call it for different rows."""
        begin = move.row0 - self._shard.row0
        self._put(move, slice(begin, begin + move.rows), weights, states)

    def put_sorted(self, move: Move, rows: RowsView, place: int | None = None) -> int:
        """Write rows like :meth:`put`, for ascending ids. Several threads may call it for rows of different blocks.

        Args:
            move: The move that selects rows.
            rows: Rows of a chunk.
            place: Place of the marker that the chunk was sent for; None for a chunk of a base.
        """
        begin, end = _between(rows.ids, move)
        if begin == end:
            return 0
        if end - begin < len(rows.ids):
            part = slice(begin, end)
            rows = RowsView(rows.ids[part], rows.weights[part], tuple(state[part] for state in rows.states))
        written = self._place(move, rows, place)
        if written is not None:
            return written
        if place is not None:
            self._note_sent(rows.ids, place)
        local = rows.ids - self._shard.row0
        first, last = int(local[0]), int(local[-1])
        places = slice(first, last + 1) if last - first + 1 == len(local) else local
        self._put(move, places, rows.weights, rows.states)
        return end - begin

    def takes_run(self, move: Move, first: int, rows: int) -> bool:
        """Return whether rows [first, first+rows) have all columns of this shard and can be read directly into it."""
        shard = self._shard
        inside = move.row0 <= first and first + rows <= move.row0 + move.rows
        whole = move.same_columns and (move.col0, move.cols) == (shard.col0, shard.cols)
        planes = (self._weights, *self._states)
        straight = all(plane is not None and plane.is_straight for plane in planes)
        return inside and whole and not self._merged and straight

    def run(self, first: int, rows: int) -> list[memoryview]:
        """Return the memory of rows for which :meth:`takes_run` is true: weights, then states. Thread-safe."""
        begin = first - self._shard.row0
        return [plane.run(begin, rows) for plane in (self._weights, *self._states) if plane is not None]

    def note_run(self, move: Move, first: int, rows: int) -> None:
        """Record that rows have arrived through :meth:`run`."""
        begin = first - self._shard.row0
        for cut in self._columns(move):
            self._arrived[cut][begin : begin + rows] = True

    def _plain_planes(self) -> list[Plane | None] | None:
        """Return what the kernel can write into: weights, then states. None if rows need more than a copy."""
        planes: list[Plane | None] = []
        for plane in (self._weights, *self._states):
            if isinstance(plane, Unwanted) or plane is None:
                planes.append(None)
            elif type(plane) is Plane and plane.array is not None and plane.is_by_row:
                planes.append(plane)
            else:
                return None
        return None if self._merged else planes

    def _place(self, move: Move, rows: RowsView, place: int | None) -> int | None:
        """Write rows by the native kernel, as :meth:`put` does. None if it cannot: nothing was written then."""
        native, shard = kernel(), self._shard
        if native is None or self._plain is None or not (rows.ids.flags.c_contiguous and self._sent.flags.c_contiguous):
            return None
        assert shard.row0 <= move.row0
        assert move.row0 + move.rows <= shard.row0 + shard.rows
        here, there = move.col0 - shard.col0, move.col0 - move.source.col0
        begin, arrays = rows.ids.ctypes.data, (rows.weights, *rows.states)
        addresses = (
            [array.ctypes.data for array in arrays]
            if rows.offsets is None
            else [begin + offset for offset in rows.offsets[1:]]
        )
        columns = []
        for plane, packed, address in zip(self._plain, arrays, addresses, strict=True):
            if plane is not None:
                column = plane.column(packed, address, here, there, move.cols)
                if column is None:
                    return None
                columns.append(column)
        return native.place(
            begin,
            len(rows.ids),
            move.row0,
            move.rows,
            shard.row0,
            (Column * len(columns))(*columns),
            [self._flags + cut * shard.rows for cut in self._columns(move)],
            self._newest if place is not None else None,
            _BLOCK_BITS,
            self._first_block,
            place if place is not None else NEVER,
        )

    def _put(self, move: Move, places: Places, weights: Array, states: Sequence[Array]) -> None:
        """Write rows, and record that they have arrived."""
        self._write(move, places, weights, states)
        for cut in self._columns(move):
            self._arrived[cut][places] = True

    def _columns(self, move: Move) -> range:
        """Return the columns of a move as a range of indices into ``_cuts``."""
        return range(bisect_left(self._cuts, move.col0), bisect_left(self._cuts, move.col0 + move.cols))

    def _write(self, move: Move, places: Places, weights: Array, states: Sequence[Array]) -> None:
        """Write rows that have all columns of the move's source."""
        here, there = move.col0 - self._shard.col0, move.col0 - move.source.col0
        columns = slice(there, there + move.cols)
        self._weights.put(places, weights[:, columns], here)
        for position, (target, source) in enumerate(zip(self._states, states, strict=True)):
            if target is None:
                continue
            if source.ndim == 2:
                target.put(places, source[:, columns], here)
            elif self._merged:
                self._pieces[move.col0, move.cols][position][places] = source
            else:
                target.put(places, source)

    def finish(self, table: str) -> None:
        """Check that every cell of every wanted row has arrived, then merge row-wise state if the plan requires it.

        Row-wise Adagrad keeps, for each column shard, the sum over steps of the mean of g^2 over the
        shard's own columns. The mean of the sources, weighted by the number of columns from each, is the
        value that one shard would hold for the same gradients. A split copies the value (docs/guarantees.md).
        """
        missing = int((~self._arrived.all(0) & self._wanted).sum())
        if missing:
            shard = self._shard
            raise CorruptionError(
                f"{missing} rows of this shard are missing from all sources",
                table=table,
                row0=shard.row0,
                col0=shard.col0,
            )
        for position, target in enumerate(self._states):
            if self._merged and isinstance(target, Plane) and target.tensor.dim() == 1:
                # All sources have one column split: a generation that changed it has sent the table completely.
                assert sum(cols for _, cols in self._pieces) == self._shard.cols
                mean = np.zeros(self._shard.rows)
                for (_, cols), piece in self._pieces.items():
                    mean += piece[position] * (cols / self._shard.cols)
                target.take(torch.from_numpy(mean))


def _between(ids: npt.NDArray[np.int64], move: Move) -> tuple[int, int]:
    """Return the begin and end of a move's rows among ascending ids."""
    end = move.row0 + move.rows
    if ids[0] >= move.row0 and ids[-1] < end:
        return 0, len(ids)
    first, last = np.searchsorted(ids, (move.row0, end)).tolist()
    return first, last


def _places(local: npt.NDArray[np.int64]) -> Places:
    """Return a slice if the rows are adjacent, because copying a run costs less than writing single rows."""
    first, count = int(local[0]), len(local)
    is_run = int(local[-1]) - first + 1 == count and bool((local[1:] > local[:-1]).all())
    return slice(first, first + count) if is_run else local
