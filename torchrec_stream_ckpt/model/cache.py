"""(GPU) The UVM cache of a kernel: a cached row is newer than its table.

(GPU) Also checks, in a kernel with a UVM cache, whether an update still writes to the rows that its lookup named.

FBGEMM's backward writes to the cache slots that its own forward found. A lookup in between, even one without a
backward, assigns slots to other rows. The update then changes rows that no lookup named, and training itself is wrong.
``TrainPipelineSemiSync`` looks up in this way. Rows that ``prefetch_pipeline`` fetches ahead stay until their update,
but another forward is just as wrong there: the kernel's attributes, which its backward reads, are those of the last
forward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model.patch import patch
from torchrec_stream_ckpt.model.streams import StreamOrder


class CacheSlots:
    """Counts events that reassign slots of one kernel's cache.

    Args:
        locked: True if rows that are fetched ahead of a forward do not reassign the slots of earlier lookups.
    """

    def __init__(self, *, locked: bool) -> None:
        self._locked = locked
        self._given = 0

    def fetched(self) -> None:
        """Note that rows of a batch are about to move into the cache."""
        self._given += not self._locked

    def looked_up(self) -> int:
        """Note that a forward has found its slots. Returns the argument of ``check`` for its update."""
        self._given += 1
        return self._given

    def check(self, lookup: int, tables: str) -> None:
        """Check before the update of a lookup that its slots are still its own.

        Raises:
            UnsupportedError: Another lookup came in between.
        """
        if lookup != self._given:
            raise UnsupportedError(
                "another batch was looked up between a lookup and its update, so the update could write to UVM cache "
                "slots that now hold other rows",
                hint="look up each batch after the update of the previous one (no TrainPipelineSemiSync, no evaluation "
                "in between), or set compute_kernel='fused_uvm'",
                tables=tables,
            )


class UvmCache:
    """Rows of one kernel's tables that are in its cache.

    Args:
        tbe: The kernel, which has a cache.
        feature_shards: For each feature of the kernel, the index of its shard.
        order: Notified before rows move in or out.
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
        """For each shard that a feature looks up, the cache's number of its first row. -1 if it is not cached."""
        self._slots = CacheSlots(locked=tbe.prefetch_pipeline)

    def newest(self, shard: int, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """Return weights of local ``rows``: the cache's if it holds the row, otherwise the table's in ``values``."""
        base = self._bases.get(shard, -1)
        if base < 0 or not rows.numel():
            return values
        tbe = self._tbe
        # -1 if the cache does not hold a row; otherwise the cache row, whose first columns are those of the table.
        slots = torch.ops.fbgemm.lxu_cache_lookup(rows + base, tbe.lxu_cache_state, tbe.total_cache_hash_size)
        cached = tbe.lxu_cache_weights.index_select(0, slots.clamp(min=0).long())[:, : values.shape[1]]
        return torch.where((slots >= 0).unsqueeze(1), cached, values)

    def flush(self) -> None:
        """Write cached rows back into the tables.

        The device's random state is kept: FBGEMM draws from it to round rows that are rounded already.
        """
        device = torch.device(self._tbe.current_device)
        random = torch.cuda.get_rng_state(device)
        self._tbe.flush()
        torch.cuda.set_rng_state(random, device)

    def clear(self) -> None:
        """Write cached rows back and empty the cache.

        Raises:
            UnsupportedError: A pipeline has moved rows of its next batch into the cache already.
        """
        if self._tbe.lxu_cache_locations_list:
            raise UnsupportedError(
                "restore() would replace rows that a pipeline has prefetched into the UVM cache",
                hint="call restore() before the pipeline takes its first batch",
                tables=self._tables,
            )
        self._tbe.flush()
        self._tbe.reset_cache_states()

    def guard(self) -> Callable[[], None]:
        """Note the end of a forward. Returns a function to call before its update, which rejects reassigned slots."""
        return partial(self._slots.check, self._slots.looked_up(), self._tables)

    def watch_fetches(self) -> Callable[[], None]:
        """Observe rows that move in and out, in a forward or ahead of it on a prefetch stream. Returns the remover."""

        def fetching(*_args: object, **_more: object) -> None:
            self._slots.fetched()
            self._order.writing()

        return patch(self._tbe, "_prefetch", fetching)
