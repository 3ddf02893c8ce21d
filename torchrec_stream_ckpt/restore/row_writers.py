"""Write rows into live tensors."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.format.rows import Array

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

    @property
    def is_straight(self) -> bool:
        """True if adjacent rows of a marker can be read directly into the tensor's memory; if not, use :meth:`put`."""
        return self.array is not None and self.array.flags.c_contiguous

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
        here = np.flatnonzero(rows >= 0)
        if len(here):
            super().put(rows[here], values[here], col0)


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
