"""FBGEMM's operators for a GPU in Python, and a UVM cache before the tables of a CPU kernel."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from tests.played import cuda

WAYS = 32
"""Slots of one set."""


def linearize_cache_indices(
    cumsum: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    bag_starts: torch.Tensor | None = None,
    max_bags: int = -1,
) -> torch.Tensor:
    """Rows of the space that ``cumsum`` spans, a number a feature; its end for ids and features that lie nowhere."""
    cuda.calls["linearize_cache_indices" + ", VBE" * (bag_starts is not None)] += 1
    features = cumsum.numel() - 1
    if bag_starts is None:
        bags = (offsets.numel() - 1) // features
        bag_starts = torch.arange(features + 1) * bags
    bounds = offsets[bag_starts.long()]
    feature = torch.searchsorted(bounds[1:-1].contiguous(), torch.arange(indices.numel()).to(bounds.dtype), right=True)
    first = cumsum[feature]
    return torch.where((first < 0) | (indices < 0), cumsum[-1], indices.long() + first)


def lxu_cache_lookup(rows: torch.Tensor, state: torch.Tensor, invalid: int) -> torch.Tensor:
    """For each row its slot, or -1."""
    cuda.calls["lxu_cache_lookup"] += 1
    assert state.dim() == 2
    assert rows.dtype == torch.int64
    slots = {row: slot for slot, row in enumerate(state.flatten().tolist()) if row >= 0}
    return torch.tensor([-1 if row == invalid else slots.get(row, -1) for row in rows.tolist()], dtype=torch.int32)


class Cache:
    """Holds rows of a kernel between an update and the next forward; the table has NaN for them meanwhile.

    The kernel of the CPU knows of no cache: what it is about to read or write is written back first.
    """

    def __init__(self, tbe: SplitTableBatchedEmbeddingBagsCodegen, sets: int, dtype: torch.dtype) -> None:
        self._tbe = tbe
        self._bases = [0, *accumulate(spec[0] for spec in tbe.embedding_specs)]
        self._chosen = random.Random(5)
        width = max(spec[1] for spec in tbe.embedding_specs)
        tbe.lxu_cache_weights = torch.full((sets * WAYS, width), float("nan"), dtype=dtype)
        tbe.lxu_cache_state = torch.full((sets, WAYS), -1, dtype=torch.int64)
        tbe.cache_hash_size_cumsum = torch.tensor([*(self._bases[t] for t in tbe.feature_table_map), self._bases[-1]])
        del tbe.total_cache_hash_size
        self._set("total_cache_hash_size", self._bases[-1])
        self._set("flush", self.flush)
        self._set("reset_cache_states", lambda: tbe.lxu_cache_state.fill_(-1))
        self._set("_prefetch", self._prefetch)
        tbe.register_forward_pre_hook(self._before_forward)
        tbe.register_forward_hook(self._behind_forward)

    def _set(self, name: str, value: Any) -> None:
        """An attribute of the module, past its buffers."""
        object.__setattr__(self._tbe, name, value)

    def _row(self, linear: int) -> torch.Tensor:
        """As a kernel writes it: past the version of the table."""
        table = next(t for t, (begin, end) in enumerate(pairwise(self._bases)) if begin <= linear < end)
        return self._tbe.split_embedding_weights()[table].data[linear - self._bases[table]]

    @torch.no_grad()
    def flush(self) -> None:
        """Write cached rows back; as FBGEMM before 1.0 it draws from the device's random state."""
        cuda.calls["flush"] += 1
        cuda.draw()
        for slot, linear in enumerate(self._tbe.lxu_cache_state.flatten().tolist()):
            if linear >= 0:
                row = self._row(linear)
                row.copy_(self._tbe.lxu_cache_weights[slot, : row.numel()])

    @torch.no_grad()
    def _fill(self) -> None:
        """Move rows in: of all tables, those that were just updated and others."""
        cuda.calls["cache filled"] += 1
        slots = self._tbe.lxu_cache_state.view(-1)
        rows = self._bases[-1]
        for slot, linear in enumerate(self._chosen.sample(range(rows), min(rows, slots.numel()) - 6)):
            row = self._row(linear)
            self._tbe.lxu_cache_weights[slot, : row.numel()] = row
            row.fill_(float("nan"))
            slots[slot] = linear

    def _write_back(self) -> None:
        self.flush()
        self._tbe.lxu_cache_state.fill_(-1)

    def _prefetch(self, *_batch: Any, **_more: Any) -> None:
        """A batch whose rows are in the cache now, until its forward takes what was noted of it here."""
        self._tbe.timesteps_prefetched.append(self._tbe.timestep)
        self._tbe.lxu_cache_locations_list.append(self._tbe.lxu_cache_locations_empty)

    def _before_forward(self, *_call: Any) -> None:
        self._write_back()

    def _behind_forward(self, _tbe: Any, _args: Any, output: torch.Tensor) -> None:
        if output.grad_fn is not None:
            output.grad_fn.register_prehook(lambda *_grads: self._write_back())
            output.grad_fn.register_hook(lambda *_grads: self._fill())


def play(patch: pytest.MonkeyPatch) -> None:
    """Kernels say that they are on the device; a cache is played where a load factor asks for one."""
    for operator in (linearize_cache_indices, lxu_cache_lookup):
        patch.setattr(torch.ops.fbgemm, operator.__name__, operator)
    real = SplitTableBatchedEmbeddingBagsCodegen.__init__

    def made(tbe: SplitTableBatchedEmbeddingBagsCodegen, *args: Any, **more: Any) -> None:
        load = more.get("cache_load_factor")
        real(tbe, *args, **more)
        tbe.current_device = cuda.DEVICE
        if load is not None:
            rows = sum(spec[0] for spec in tbe.embedding_specs)
            precision = more.get("cache_precision") or tbe.weights_precision
            Cache(tbe, max(1, round(rows * load / WAYS)), precision.as_dtype())

    patch.setattr(SplitTableBatchedEmbeddingBagsCodegen, "__init__", made)
