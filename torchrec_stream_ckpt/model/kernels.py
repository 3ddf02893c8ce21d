"""One table-batched embedding kernel (TBE) as the capture uses it: rows, states, scalars, and their changes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.optim.fused import FusedOptimizer as FusedModuleOptimizer

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model.cache import UvmCache
from torchrec_stream_ckpt.model.lookups import FusedUpdate, Key, Lookup, Lookups
from torchrec_stream_ckpt.model.optimizers import FusedOptimizer, row_states
from torchrec_stream_ckpt.model.patch import patch, wrap
from torchrec_stream_ckpt.model.scalars import KernelScalars
from torchrec_stream_ckpt.model.streams import StreamOrder
from torchrec_stream_ckpt.model.tensor_versions import Versions
from torchrec_stream_ckpt.util.types import TableShard, TableSpec


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One table shard inside a kernel: rows [row0, row0+rows), columns [col0, col0+cols) of ``table``."""

    table: TableSpec
    row0: int
    rows: int
    col0: int
    cols: int

    def table_shard(self, tables: Mapping[str, int]) -> TableShard:
        """Return the shard by the index of its table in the job."""
        return TableShard(tables[self.table.name], self.row0, self.rows, self.col0, self.cols)


class FusedKernel:
    """One table-batched embedding kernel (TBE) and the table shards that it holds."""

    def __init__(
        self,
        tbe: SplitTableBatchedEmbeddingBagsCodegen,
        shards: tuple[LocalShard, ...],
        optimizer: FusedModuleOptimizer,
        kind: FusedOptimizer,
    ) -> None:
        self._tbe = tbe
        self._state_names = kind.states
        self.shards = shards
        self.tables = ",".join(shard.table.name for shard in shards)
        """Names of its tables, for errors."""
        self.held = tuple(shard for shard in shards if shard.rows and shard.cols)
        """The shards that are not empty."""
        self.bases: tuple[int, ...] = (0, *accumulate(shard.rows for shard in shards))
        """Linear row of each shard's first row, and the total."""
        self.device: torch.device = torch.device(tbe.current_device)
        self.feature_shards: tuple[int, ...] = tuple(tbe.feature_table_map)
        """For each feature of the kernel, the index of its shard."""
        self.order = StreamOrder(self.device)
        """(GPU) Order between readers of this kernel's rows and masks and the code that changes them."""
        cached = bool(tbe.lxu_cache_weights.numel())
        self._cache = UvmCache(tbe, self.feature_shards, self.order, self.tables) if cached else None
        self.versions = Versions(
            tbe, [(rows, *states) for rows, states in zip(self.weights(), self.states(), strict=True)]
        )
        """Detects shards that were written in place. The kernel's update and its cache do not count."""
        self.lookups = Lookups(tbe, count=kind.reads_iteration)
        self.scalars = KernelScalars(tbe, optimizer, self.lookups, reads_iteration=kind.reads_iteration)

    @property
    def module(self) -> nn.Module:
        """The kernel itself, to distinguish it from others."""
        module: nn.Module = self._tbe
        return module

    def weights(self) -> list[torch.Tensor]:
        """Return live views, one per shard, shape (rows, cols). With a UVM cache, a cached row is newer than its view.

        Raises:
            UnsupportedError: The tables are not on their device now: memory stashing has moved them to the host.
        """
        for buffer in (self._tbe.weights_dev, self._tbe.weights_host, self._tbe.weights_uvm):
            if buffer.numel() and (
                buffer.is_cuda != (self.device.type == "cuda") or not buffer.untyped_storage().size()
            ):
                raise UnsupportedError(
                    "the tables cannot be read: memory stashing has freed them between a forward and its backward",
                    hint="call step() and mark() after the backward",
                    tables=self.tables,
                )
        return list(self._tbe.split_embedding_weights())

    def states(self) -> list[tuple[torch.Tensor, ...]]:
        """Return live views of the optimizer states, one tuple per shard, in the schema's order.

        They are never cached.
        """
        return row_states(self._tbe, self._state_names)

    def newest(self, shard: int, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(GPU) Return gathered weights of ``rows``: the UVM cache's if it holds the row, otherwise ``values``.

        Args:
            shard: Index of the shard.
            rows: Local rows, int64, on the device.
            values: Their rows of ``weights()[shard]``, shape (len(rows), cols).
        """
        return self._cache.newest(shard, rows, values) if self._cache is not None else values

    def flush(self) -> None:
        """Write cached rows back, so that ``weights()`` holds the newest value of every row."""
        if self._cache is not None:
            self.order.settle()
            self._cache.flush()

    def prepare_write(self) -> None:
        """Prepare for a write into ``weights()``: afterwards, no cached row covers them.

        Raises:
            UnsupportedError: A pipeline has moved rows of its next batch into the cache already.
        """
        self.order.settle()
        if self._cache is not None:
            self._cache.clear()

    def finish_write(self) -> None:
        """Finish a write of rows: lookups on any stream find them."""
        self.order.settle()

    def on_update(
        self, before: Callable[[FusedUpdate], None], after: Callable[[Lookup, Key], None], unseen: Callable[[], None]
    ) -> Callable[[], None]:
        """Call ``before`` and ``after`` around the fused update of every forward, as described in ``Lookups``.

        Returns:
            The remover.
        """
        self.order.settle()  # no hook has seen the work queued before
        if self._cache is None:
            return self.lookups.on_update(before, after, unseen, self.order.writing)
        hooked = self.lookups.on_update(before, after, unseen, self.order.writing, self._cache.guard)
        unwatch = self._cache.watch_fetches()

        def remove() -> None:
            hooked()
            unwatch()

        return remove

    def on_rewrite(self, callback: Callable[[torch.Tensor | None], None]) -> Callable[[], None]:
        """Call ``callback`` before the kernel rewrites rows outside its update. Returns the remover.

        It gets the linear rows, or None if any row may change: in a moving average over whole tables, in the swap of an
        ensemble, or with new random weights.
        """

        def rewriting(rows: torch.Tensor | None) -> None:
            self.order.writing()
            callback(rows)

        def averaging(mode: Mapping[str, float]) -> None:
            iteration = self.scalars.iteration
            if iteration % int(mode["step_ema"]) == 0 and iteration >= int(mode["step_start"]):
                rewriting(None)

        def swapping(mode: Mapping[str, float]) -> None:
            iteration = self.scalars.iteration
            if iteration % int(mode["step_ema"]) == 0 or iteration % int(mode["step_swap"]) == 0:
                rewriting(None)

        def resetting(
            reset: Callable[..., None],
            pruned_indices: torch.Tensor,
            pruned_indices_offsets: torch.Tensor,
            logical_table_ids: torch.Tensor,
            buffer_ids: torch.Tensor,
        ) -> None:
            tables, ends, rows = (
                tensor.to(self.device).long() for tensor in (logical_table_ids, pruned_indices_offsets, pruned_indices)
            )
            # The length is passed: otherwise the host would wait for a GPU to get it.
            rewriting(rows + first_rows[tables].repeat_interleave(ends.diff(), output_size=rows.numel()))
            reset(pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids)
            self.versions.rebase()

        first_rows = torch.tensor(self.bases, device=self.device)
        undo = [
            patch(self._tbe, "ema_inplace", averaging),
            patch(self._tbe, "ensemble_and_swap", swapping),
            wrap(self._tbe, "reset_embedding_weight_momentum", resetting),
            patch(self._tbe, "init_embedding_weights_uniform", lambda *_args, **_more: rewriting(None)),
        ]

        def remove() -> None:
            for each in undo:
                each()

        return remove

    def linear_rows(self, lookup: Lookup) -> torch.Tensor:
        """(GPU) Return rows in the kernel's linear row space. Ids outside all tables become its row count."""
        rows: torch.Tensor = torch.ops.fbgemm.linearize_cache_indices(
            self._tbe.hash_size_cumsum, lookup.indices, lookup.offsets, lookup.bag_starts, lookup.max_bags
        )
        return rows.clamp_(max=self.bases[-1])
