"""Mix the bits of 64-bit numbers. The result is the same with every version of every library."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

GOLDEN = np.uint64(0x9E3779B97F4A7C15)
"""The odd number next to 2**64 divided by the golden ratio: its multiples are far apart."""


def mixed(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of splitmix64 (Steele, Lea and Flood 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
