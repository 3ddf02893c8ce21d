"""Ids that the cases train on."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

_KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Distinct values of the 26 categorical features of the Criteo Kaggle data set."""

CRITEO_ROWS = tuple(max(min(rows, 3), round(rows * 1_000_000 / sum(_KAGGLE))) for rows in _KAGGLE)
"""A million rows in the same proportions."""


def uniform_ids(rows: tuple[int, ...], count: int, seed: int) -> list[torch.Tensor]:
    """``count`` ids of each table."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, each, (count,), generator=generator) for each in rows]


def zipf_ids(rows: tuple[int, ...], count: int, seed: int, exponent: float = 1.05) -> list[torch.Tensor]:
    """The same, a few rows far more often than others; which ones they are is scattered over the table."""
    found = []
    for table, each in enumerate(rows):
        uniform = np.random.default_rng((seed, table)).random(count)
        ranks = np.searchsorted(_zipf(each, exponent), uniform).clip(max=each - 1)
        found.append(torch.from_numpy(_places(each, table)[ranks]))
    return found


@lru_cache(maxsize=64)
def _zipf(rows: int, exponent: float) -> npt.NDArray[np.float64]:
    chance = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    chance /= chance[-1]
    return chance


@lru_cache(maxsize=64)
def _places(rows: int, table: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng((7, table)).permutation(rows)
