"""Pickle values exactly that ``pickle`` alone would change or reject.

* NumPy reads an array of the other byte order as one of this machine's byte order, with another dtype.
* A ``torch.memory_format`` cannot be pickled.

Reading their replacements needs only NumPy, torch and the standard library.

Also the pickle of a tensor as ``torch.save`` writes it, for a comparison.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from collections import OrderedDict
from functools import lru_cache
from io import BytesIO
from typing import Any

import numpy as np
import torch

_FOREIGN = ">" if sys.byteorder == "little" else "<"
_STORAGES = {
    torch.float64: torch.DoubleStorage,
    torch.float32: torch.FloatStorage,
    torch.float16: torch.HalfStorage,
    torch.bfloat16: torch.BFloat16Storage,
    torch.int64: torch.LongStorage,
    torch.int32: torch.IntStorage,
    torch.int16: torch.ShortStorage,
    torch.int8: torch.CharStorage,
    torch.uint8: torch.ByteStorage,
    torch.bool: torch.BoolStorage,
}
"""The classes know their dtypes, but each warns of its deprecation when it is asked."""

dump = pickle.dump
"""(``torch.save`` takes this module in the place of ``pickle``.)"""


class Pickler(pickle.Pickler):
    """``pickle.Pickler``, except for the kinds that this module names."""

    def reducer_override(self, value: Any) -> Any:
        """Reduce an object. Returns NotImplemented to leave it to ``pickle``.

        Raises:
            TypeError: An array of a derived class has the other byte order.
        """
        if isinstance(value, np.ndarray) and value.dtype.byteorder == _FOREIGN:
            return _array(value)
        if isinstance(value, torch.memory_format):
            return getattr, (torch, str(value).removeprefix("torch."))
        if value is torch:
            return importlib.import_module, (torch.__name__,)
        return NotImplemented


def _array(value: np.ndarray[Any, Any]) -> tuple[Any, ...]:
    if type(value) is not np.ndarray:
        raise TypeError(
            f"a {type(value).__name__} of dtype {value.dtype} would be unpickled in this machine's byte order"
        )
    columns_first = value.flags.f_contiguous and not value.flags.c_contiguous
    data = bytearray(value.tobytes("F" if columns_first else "C"))
    return np.ndarray, (value.shape, value.dtype, data, 0, None, "F" if columns_first else "C")


@lru_cache(maxsize=1024)  # an optimizer's states have the shape of their parameter
def described_tensor(size: torch.Size, dtype: torch.dtype) -> bytes | None:
    """Return what ``torch.save`` pickles of a contiguous tensor of this shape and dtype. None if it is of another kind.

    That is without its values, which are in another file of the archive.
    """
    if dtype not in _STORAGES:
        return None
    file = BytesIO()
    _Description(file, 2).dump(torch.empty(size, dtype=dtype, device="meta"))
    return file.getvalue()


class _Description(pickle.Pickler):
    """Pickles a tensor as ``torch.save`` does if the tensor has its storage for itself."""

    def reducer_override(self, value: object) -> Any:
        if not isinstance(value, torch.Tensor):
            return NotImplemented
        storage = [_STORAGES[value.dtype], "0", "cpu", value.numel()]
        size = tuple(value.size())
        return torch._utils._rebuild_tensor_v2, (storage, 0, size, value.stride(), False, OrderedDict())

    def persistent_id(self, value: object) -> tuple[Any, ...] | None:
        return ("storage", *value) if isinstance(value, list) else None
