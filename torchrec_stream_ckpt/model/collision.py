"""Managed collision: the raw id of each row of a table, its access statistics, and the next evictions.

Rows that an eviction resets are noticed by ``FusedKernel.on_rewrite``: TorchRec passes them to the kernel first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torchrec.distributed.mc_embedding import ShardedManagedCollisionEmbeddingCollection
from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
from torchrec.distributed.mc_modules import ShardedManagedCollisionCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
)

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.compiled import unwrapped
from torchrec_stream_ckpt.model.hash_collision import HashMap, MapShard, hash_map
from torchrec_stream_ckpt.util.types import plain_name

COLLISION_WRAPPERS = (ShardedManagedCollisionEmbeddingBagCollection, ShardedManagedCollisionEmbeddingCollection)
_POLICIES = (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)

NO_ID = torch.iinfo(torch.int64).max
"""Raw id that TorchRec writes for a free row."""

COUNTERS = (
    "_current_iter",
    "_current_iter_tensor",
    "_last_eviction_iter",
    "_evicted",
    "_eviction_interval",
    "_input_history_buffer_size",
)
"""The order of the field ``counters``. The last one is a capacity, -1 before the first batch."""


class CollisionMap:
    """The id map of one table shard: rows [row0, row0+rows) of ``table``.

    Its state is a dict of 1-D int64 tensors:

    ``map_raw_ids``, ``map_rows``
        Each row of the shard with its raw id, sorted by raw id. Rows are global.
    ``map_<metadata>``
        Metadata of the eviction policy for each of them: ``counts``, ``last_access_iter``.
    ``history_ids``, ``history_<metadata>``
        The raw ids that training has seen since the last eviction.
    ``evicted_rows``
        Rows that are still to be reset in the table. Empty at a step boundary.
    ``counters``
        See ``COUNTERS``.
    """

    ROWS = "map_rows"
    """A field with one number for each row."""

    def __init__(self, table: str, module: MCHManagedCollisionModule, world: int, rank: int) -> None:
        self.table = table
        self.row0 = module._output_global_offset
        self.rows = module._zch_size
        self.interval = module._eviction_interval
        self.world = world
        self.rank = rank
        self._module = module

    @property
    def shard(self) -> MapShard:
        """Its rows."""
        return MapShard(self.row0, self.rows)

    @property
    def rows_text(self) -> str:
        """The rows, as text for errors."""
        return f"[{self.row0}, {self.row0 + self.rows})"

    @property
    def version(self) -> tuple[int, ...]:
        """Numbers that differ after any operator has written which raw id has which row."""
        tensors = (self._module._mch_sorted_raw_ids, self._module._mch_remapped_ids_mapping)
        return tuple(number for each in tensors for number in (each.data_ptr(), each._version))

    def watch(self) -> Callable[[], None]:
        """Do nothing: :attr:`version` tells all. Returns the remover."""
        return lambda: None

    def lost(self, _seen: tuple[int, ...] | None) -> npt.NDArray[np.int64] | None:
        """Return None: TorchRec sorts the whole map, so any row may have lost its raw id."""
        return None

    def owners(self, rows: npt.NDArray[np.int64] | None = None) -> npt.NDArray[np.int64]:
        """Return the raw id of each row of the shard, ``NO_ID`` for free ones. On a GPU the host waits.

        Args:
            rows: Rows of the shard to read. If None, all.
        """
        raw_ids, mapping = self._module._mch_sorted_raw_ids, self._module._mch_remapped_ids_mapping
        owners = torch.full_like(raw_ids, NO_ID).scatter_(0, mapping - self.row0, raw_ids)
        found: npt.NDArray[np.int64] = owners.cpu().numpy()
        return found if rows is None else found[rows]

    def read(self) -> dict[str, torch.Tensor]:
        """Return the current state as live views, valid until the next forward."""
        module = self._module
        seen = module._current_history_buffer_offset
        counters = [int(getattr(module, name)) for name in COUNTERS]
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        state = {
            "map_raw_ids": module._mch_sorted_raw_ids,
            "map_rows": module._mch_remapped_ids_mapping,
            "history_ids": module._history_accumulator[:seen] if seen else none,
            # Once they have been reset in the table, the list is not read again.
            "evicted_rows": module._evicted_emb_indices.long() if module._evicted else none,
            "counters": torch.tensor(counters, dtype=torch.int64, device="cpu"),
        }
        for name, in_map, in_history in module._eviction_policy.metadata_info:
            if in_map:
                state[f"map_{name}"] = module._mch_metadata[name]
            if in_history:
                state[f"history_{name}"] = module._history_metadata[name][:seen] if seen else none
        return state

    @torch.no_grad()
    def write(self, state: dict[str, torch.Tensor]) -> None:
        """Restore a state in place. ``_output_segments_tensor`` depends on the plan and is kept."""
        module = self._module
        counters = dict(zip(COUNTERS, state["counters"].tolist(), strict=True))
        module._mch_sorted_raw_ids.copy_(state["map_raw_ids"])
        module._mch_remapped_ids_mapping.copy_(state["map_rows"])
        for name, buffer in module._mch_metadata.items():
            buffer.copy_(state[f"map_{name}"])
        module._current_iter_tensor.fill_(counters["_current_iter_tensor"])
        module._current_iter = counters["_current_iter"]
        module._last_eviction_iter = counters["_last_eviction_iter"]
        module._evicted = bool(counters["_evicted"])
        module._evicted_emb_indices = state["evicted_rows"].to(module.device)
        self._write_history(state, counters["_input_history_buffer_size"])

    def _write_history(self, state: dict[str, torch.Tensor], capacity: int) -> None:
        """Allocate the history buffers.

        TorchRec does so in the first forward, with a size that depends on its batch.
        """
        module, seen = self._module, state["history_ids"].numel()
        module._input_history_buffer_size = capacity
        module._current_history_buffer_offset = seen
        if capacity < 0:
            return
        module._history_accumulator = torch.zeros(capacity, dtype=torch.int64, device=module.device)
        module._history_accumulator[:seen] = state["history_ids"]
        for name, _, in_history in module._eviction_policy.metadata_info:
            if in_history:
                buffer = torch.zeros(capacity, dtype=torch.int64, device=module.device)
                buffer[:seen] = state[f"history_{name}"]
                module.register_buffer(f"_history_{name}", buffer, persistent=False)
                module._history_metadata[name] = buffer

    def ranks_of(self, raw_ids: torch.Tensor) -> torch.Tensor:
        """(CPU) Return the rank on which each raw id is looked up, as ``RwSparseFeaturesDist`` assigns them."""
        module = self._module
        buckets = module.buckets()
        lengths, *_, places = torch.ops.fbgemm.block_bucketize_sparse_features(
            torch.tensor([raw_ids.numel()], device="cpu"),
            raw_ids,
            bucketize_pos=False,
            sequence=True,
            block_sizes=torch.tensor([-(-module.input_size() // buckets)], device="cpu"),
            total_num_blocks=torch.tensor([[buckets]], device="cpu"),
            my_size=self.world,
        )
        return torch.repeat_interleave(torch.arange(self.world, device="cpu"), lengths.long())[places.long()]

    def count_strangers(self, raw_ids: torch.Tensor) -> int:
        """(CPU) Count the raw ids that are looked up on another rank."""
        return int((self.ranks_of(raw_ids) != self.rank).sum())

    def by_priority(self, raw_ids: torch.Tensor, metadata: Mapping[str, torch.Tensor], iteration: int) -> torch.Tensor:
        """(CPU) Return positions of raw ids in the order in which the eviction policy keeps them, the best first.

        Args:
            raw_ids: The raw ids, each once. The smaller one of two with the same score comes first.
            metadata: What the policy keeps of each of them, by its names.
            iteration: The trained batches that it is compared with.
        """
        counts, last = metadata.get("counts"), metadata.get("last_access_iter")
        if counts is not None and last is not None:
            score = counts / torch.pow(iteration - last + 1, self._module._eviction_policy._decay_exponent)
        else:
            score = metadata["counts" if last is None else "last_access_iter"]
        order = torch.argsort(raw_ids)
        return order[torch.argsort(score[order], descending=True, stable=True)]


def holds_id_maps(module: nn.Module) -> bool:
    """Return whether all of its buffers belong to id maps."""
    return type(module) is ShardedManagedCollisionCollection


IdMap = CollisionMap | HashMap
"""The id map of one table shard."""


def id_maps(model: nn.Module) -> list[IdMap]:
    """Return the id maps of this rank, in a fixed order.

    Raises:
        UnsupportedError: The state of a managed collision module or an eviction policy is unknown.
    """
    maps: list[IdMap] = []
    for path, wrapper in unwrapped(model).named_modules():
        if type(wrapper) in COLLISION_WRAPPERS:
            versions.COLLISION_WRAPPER.require(wrapper, module=path)
            collection = wrapper._managed_collision_collection
            versions.COLLISION_COLLECTION.require(collection, module=path)
            inner = f"{plain_name(path)}._embedding_module".lstrip(".")
            for table, module in collection._managed_collision_modules.items():
                maps.append(_id_map(inner, table, module, collection._env))
    return maps


def _id_map(path: str, table: str, module: Any, env: Any) -> IdMap:
    if type(module) is HashZchManagedCollisionModule:
        return hash_map(f"{path}.{table}", module, path)
    if type(module) is not MCHManagedCollisionModule:
        raise UnsupportedError(
            f"the id map of {type(module).__name__} is not captured",
            hint="use MCHManagedCollisionModule or HashZchManagedCollisionModule",
            module=path,
            table=table,
        )
    versions.ID_MAP.require(module, module=path, table=table)
    if type(module._eviction_policy) not in _POLICIES:
        raise UnsupportedError(
            f"the eviction policy {type(module._eviction_policy).__name__} is not captured",
            hint="use " + ", ".join(policy.__name__ for policy in _POLICIES),
            module=path,
            table=table,
        )
    if type(module._eviction_policy) is DistanceLFU_EvictionPolicy:
        versions.DISTANCE_LFU.require(module._eviction_policy, module=path, table=table)
    return CollisionMap(f"{path}.{table}", module, env.world_size, env.rank)
