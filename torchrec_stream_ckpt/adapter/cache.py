"""(GPU) The UVM cache of a kernel: a cached row is newer than its table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from torchrec_stream_ckpt.adapter.patch import patch
from torchrec_stream_ckpt.adapter.slots import CacheSlots
from torchrec_stream_ckpt.adapter.streams import StreamOrder
from torchrec_stream_ckpt.errors import UnsupportedError


class UvmCache:
    """Rows of one kernel's tables that lie in its cache.

    Args:
        tbe: The kernel, which has a cache.
        feature_shards: For each feature of the kernel, the index of its shard.
        order: Told of what moves rows in and out.
        tables: Names of the kernel's tables, for errors.
    """

    def __init__(
        self,
        tbe: SplitTableBatchedEmbeddingBagsCodegen,
        feature_shards: Sequence[int],
        order: StreamOrder,
        tables: str,
    ) -> None:
        self._tbe = tbe
        self._order = order
        self._tables = tables
        self._bases = dict(zip(feature_shards, tbe.cache_hash_size_cumsum.tolist()[:-1], strict=True))
        """For each shard that a feature looks up, the number by which the cache knows its first row; -1: not cached."""
        self._slots = CacheSlots(locked=tbe.prefetch_pipeline)

    def newest(self, shard: int, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Weights of local ``rows``: the cache's where it holds the row, otherwise ``values``, those of the table."""
        base = self._bases.get(shard, -1)
        if base < 0 or not rows.numel():
            return values
        tbe = self._tbe
        # -1 where the cache does not hold a row; otherwise the cache row, whose first columns are those of the table.
        slots = torch.ops.fbgemm.lxu_cache_lookup(rows + base, tbe.lxu_cache_state, tbe.total_cache_hash_size)
        cached = tbe.lxu_cache_weights.index_select(0, slots.clamp(min=0).long())[:, : values.shape[1]]
        return torch.where((slots >= 0).unsqueeze(1), cached, values)

    def flush(self) -> None:
        """Write cached rows back into the tables.

        The device's random state stays: FBGEMM has drawn from it to round rows that are rounded already.
        """
        device = torch.device(self._tbe.current_device)
        random = torch.cuda.get_rng_state(device)
        self._tbe.flush()
        torch.cuda.set_rng_state(random, device)

    def clear(self) -> None:
        """Write cached rows back and empty the cache.

        Raises:
            UnsupportedError: a pipeline has moved rows of its next batch into the cache already.
        """
        if self._tbe.lxu_cache_locations_list:
            raise UnsupportedError(
                "a batch has been prefetched into the UVM cache, whose rows are about to be replaced",
                hint="call restore() before the pipeline takes its first batch",
                tables=self._tables,
            )
        self._tbe.flush()
        self._tbe.reset_cache_states()

    def guard(self) -> Callable[[], None]:
        """A forward has ended; returns what to call before its update, which refuses slots that were given away."""
        return partial(self._slots.check, self._slots.looked_up(), self._tables)

    def watch_fetches(self) -> Callable[[], None]:
        """Notice rows that move in and out, in a forward or ahead of it on a prefetch stream; returns the remover."""

        def fetching(*_args: object, **_more: object) -> None:
            self._slots.fetched()
            self._order.writing()

        return patch(self._tbe, "_prefetch", fetching)
