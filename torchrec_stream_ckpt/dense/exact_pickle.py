"""Pickle values exactly that ``pickle`` alone would change or reject.

* NumPy reads an array of the other byte order as one of this machine's byte order, with another dtype.
* A ``torch.memory_format`` cannot be pickled.

Reading their replacements needs only NumPy, torch and the standard library.
"""

from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import numpy as np
import torch

_FOREIGN = ">" if sys.byteorder == "little" else "<"

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
