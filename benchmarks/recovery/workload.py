"""A training job as far as a checkpoint sees it: which rows each interval changes, and to which values.

Both are functions of a seed, so that every restored state can be compared bit for bit with one that no scheme had a
hand in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

Ids = npt.NDArray[np.int64]

CRITEO_KAGGLE = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
"""Distinct values of the 26 categorical features of the Criteo Kaggle data set."""

_POOL_ROWS = 1 << 18
_CHECK_ROWS = 1 << 19


@dataclass(frozen=True)
class Workload:
    """26 tables with the proportions of Criteo Kaggle, row-wise Adagrad, Zipf ids.

    Rows have linear numbers here: those of one table behind those of the table before it, as in one fused kernel.
    """

    name: str
    rows: int
    """Of all tables together."""
    dim: int
    batch: int
    intervals: int
    """Markers behind the base."""
    steps: int = 10
    """Of an interval."""
    zipf: float = 1.05
    seed: int = 7

    @cached_property
    def table_rows(self) -> tuple[int, ...]:
        scale = self.rows / sum(CRITEO_KAGGLE)
        rows = [max(min(3, full), round(full * scale)) for full in CRITEO_KAGGLE]
        rows[int(np.argmax(rows))] += self.rows - sum(rows)
        return tuple(rows)

    @cached_property
    def bases(self) -> Ids:
        """First linear row of each table, and the number of all rows."""
        return np.concatenate([[0], np.cumsum(self.table_rows)]).astype(np.int64)

    @property
    def row_bytes(self) -> int:
        """Id, weights and optimizer state."""
        return 8 + 4 * self.dim + 4

    @cached_property
    def schema(self) -> Schema:
        state = StateSpec("sum", "float32", True)
        return Schema(
            tuple(
                TableSpec(f"sparse.ebc.t_{table:02d}", rows, self.dim, "float32", "exact_rowwise_adagrad", (state,))
                for table, rows in enumerate(self.table_rows)
            )
        )

    @cached_property
    def touched(self) -> tuple[Ids, ...]:
        """Linear rows that each interval changes, ascending; interval 0 is the base: all of them."""
        chances = [_zipf(rows, self.zipf) for rows in self.table_rows]
        places = [np.random.default_rng((self.seed, table)).permutation(n) for table, n in enumerate(self.table_rows)]
        later = []
        for interval in range(1, self.intervals + 1):
            random = np.random.default_rng((self.seed, 1000 + interval))
            drawn = [
                np.unique(place[np.searchsorted(chance, random.random(self.steps * self.batch))]) + base
                for chance, place, base in zip(chances, places, self.bases[:-1], strict=True)
            ]
            later.append(np.concatenate(drawn))
        return (np.arange(self.rows, dtype=np.int64), *later)

    def by_table(self, interval: int) -> Iterator[tuple[int, Ids]]:
        """(table, its rows that the interval changes, numbered within the table)."""
        ids = self.touched[interval]
        cuts = np.searchsorted(ids, self.bases)
        for table in range(len(self.table_rows)):
            if (chosen := ids[cuts[table] : cuts[table + 1]]).size:
                yield table, chosen - self.bases[table]

    def linear(self, interval: int) -> Iterator[tuple[int, Ids]]:
        """(table, its rows that the interval changes, numbered over all tables), where there are any."""
        for table, ids in self.by_table(interval):
            yield table, ids + self.bases[table]

    def owners(self, interval: int) -> npt.NDArray[np.int32]:
        """For every row, the last interval up to ``interval`` that changed it."""
        owners = np.zeros(self.rows, np.int32)
        for number in range(1, interval + 1):
            owners[self.touched[number]] = number
        return owners


WORKLOADS = {
    "kaggle": Workload("kaggle", rows=10_000_000, dim=64, batch=2560, intervals=150),
    "deepfm": Workload("deepfm", rows=2_000_000, dim=16, batch=1024, intervals=150),
    "pnn": Workload("pnn", rows=2_000_000, dim=10, batch=1024, intervals=150),
}


def shaped(workload: Workload, **asked: int | None) -> Workload:
    """The same with other sizes, where they are given."""
    return replace(workload, **{key: value for key, value in asked.items() if value})


def _zipf(rows: int, exponent: float) -> npt.NDArray[np.float64]:
    chance = np.cumsum(np.arange(1, rows + 1, dtype=np.float64) ** -exponent)
    chance /= chance[-1]
    return chance


class Values:
    """What a row holds behind an interval that changed it: weights (n, dim) and optimizer state (n,)."""

    def __init__(self, workload: Workload) -> None:
        generator = torch.Generator().manual_seed(workload.seed)
        self._pool = torch.randn(_POOL_ROWS, workload.dim, generator=generator)

    def of(
        self, ids: Ids, interval: int | npt.NDArray[np.int32], out: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of linear rows ``ids``, last changed by ``interval`` (one number, or one a row)."""
        mixed = ids.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        mixed += np.atleast_1d(np.asarray(interval, np.uint64)) * np.uint64(0xC2B2AE3D27D4EB4F)
        mixed ^= mixed >> np.uint64(29)
        mixed *= np.uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> np.uint64(32)
        chosen = torch.from_numpy((mixed & np.uint64(_POOL_ROWS - 1)).astype(np.int64))
        weights = torch.index_select(self._pool, 0, chosen, out=out)
        # A float in [1, 2) from 23 of the bits: tells two versions of a row apart.
        bits = ((mixed >> np.uint64(40)).astype(np.uint32) & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)
        return weights, torch.from_numpy(bits.view(np.float32))


@dataclass(frozen=True)
class Tables:
    """The live tables of a job, one behind the other: what a restore writes into."""

    weights: torch.Tensor
    """Shape (rows, dim)."""
    sums: torch.Tensor
    """Row-wise Adagrad's state, shape (rows,)."""

    @classmethod
    def of(cls, workload: Workload) -> Tables:
        tables = cls(torch.empty(workload.rows, workload.dim), torch.empty(workload.rows))
        tables.poison()
        return tables

    def poison(self) -> None:
        """Put values there that no interval has written."""
        self.weights.fill_(float("nan"))
        self.sums.fill_(float("nan"))

    @property
    def num_bytes(self) -> int:
        return self.weights.nbytes + self.sums.nbytes

    def put(self, ids: torch.Tensor, weights: torch.Tensor, sums: torch.Tensor) -> None:
        self.weights.index_copy_(0, ids, weights)
        self.sums.index_copy_(0, ids, sums)


def wrong_rows(tables: Tables, workload: Workload, values: Values, interval: int) -> int:
    """How many rows differ, in any bit, from what they must be behind ``interval``."""
    owners = workload.owners(interval)
    wrong = 0
    for begin in range(0, workload.rows, _CHECK_ROWS):
        ids = np.arange(begin, min(begin + _CHECK_ROWS, workload.rows))
        weights, sums = values.of(ids, owners[begin : begin + _CHECK_ROWS])
        found = tables.weights[begin : begin + _CHECK_ROWS], tables.sums[begin : begin + _CHECK_ROWS]
        same = (found[0].view(torch.int32) == weights.view(torch.int32)).all(1)
        same &= found[1].view(torch.int32) == sums.view(torch.int32)
        wrong += int((~same).sum())
    return wrong
