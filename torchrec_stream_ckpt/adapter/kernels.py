"""One table-batched embedding kernel (TBE) as the capture sees it: rows, states, scalars, and when they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import accumulate

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch.utils.hooks import RemovableHandle
from torchrec.optim.fused import FusedOptimizer as FusedModuleOptimizer

from torchrec_stream_ckpt.adapter.optimizers import FusedOptimizer, row_states
from torchrec_stream_ckpt.adapter.patch import patch
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.types import TableSpec


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One table shard inside a kernel: rows [row0, row0+rows), columns [col0, col0+cols) of ``table``."""

    table: TableSpec
    row0: int
    rows: int
    col0: int
    cols: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """The ids of one forward of one kernel, bound while later forwards overwrite the kernel's attributes."""

    indices: torch.Tensor
    """Local rows, behind the bounds check, ordered by feature."""
    offsets: torch.Tensor
    """Where the ids of each bag begin, and where the last ones end; features one behind the other."""
    bag_starts: torch.Tensor | None = None
    """First bag of each feature, and the number of bags; None: all features have the same number of bags."""
    max_bags: int = -1
    """With ``bag_starts``: the largest number of bags of a feature."""


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
        self.optimizer = optimizer
        self._kind = kind
        self.shards = shards
        self.bases: tuple[int, ...] = (0, *accumulate(shard.rows for shard in shards))
        """Linear row of each shard's first row, and the total."""
        self.device: torch.device = torch.device(tbe.current_device)
        self.feature_shards: tuple[int, ...] = tuple(tbe.feature_table_map)
        """For each feature of the kernel, the index of its shard."""
        self._cached = bool(tbe.lxu_cache_weights.numel())

    def weights(self) -> list[torch.Tensor]:
        """Live views, one a shard, shape (rows, cols). Under UVM caching a cached row is newer than its view."""
        return list(self._tbe.split_embedding_weights())

    def states(self) -> list[tuple[torch.Tensor, ...]]:
        """Live views of the optimizer states, one tuple a shard, in the schema's order; never cached."""
        return row_states(self._tbe, self._kind.states)

    def newest(self, shard: int, rows: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """(GPU) Gathered weights of ``rows``, with what the UVM cache holds of them put over it.

        Args:
            shard: Index of the shard.
            rows: Local rows, int64, on the device.
            values: What ``weights()[shard]`` has for them, shape (len(rows), cols).
        """
        if not self._cached or not rows.numel():
            return values
        tbe = self._tbe
        feature = self.feature_shards.index(shard)
        slots = torch.ops.fbgemm.lxu_cache_lookup(
            rows + tbe.cache_hash_size_cumsum[feature], tbe.lxu_cache_state, tbe.total_cache_hash_size
        )
        cached = tbe.lxu_cache_weights.index_select(0, slots.clamp(min=0).long())[:, : values.shape[1]]
        return torch.where((slots >= 0).unsqueeze(1), cached, values)

    def flush(self) -> None:
        """Write cached rows back, so that ``weights()`` holds the newest value of every row."""
        if self._cached:
            self._tbe.flush()

    def prepare_write(self) -> None:
        """Rows are about to be written into ``weights()``: no cached row may cover them afterwards."""
        if self._cached:
            self._tbe.flush()
            self._tbe.reset_cache_states()

    def on_update(self, before: Callable[[Lookup], None], after: Callable[[Lookup], None]) -> Callable[[], None]:
        """Call ``before`` and ``after`` around the fused update of every forward; returns the remover.

        Both calls run on the autograd thread, right around the kernel (on its stream on a GPU). A forward
        without a backward calls nothing.
        """

        def forward_hook(tbe: SplitTableBatchedEmbeddingBagsCodegen, _args: object, output: torch.Tensor) -> None:
            node = output.grad_fn
            if node is None:
                return
            if "LookupFunction" not in node.name():
                raise UnsupportedError(
                    f"the output of the fused kernel comes from {node.name()}, not from its lookup",
                    hint="use the versions of torchrec and fbgemm that the README names",
                )
            lookup = Lookup(tbe._indices, tbe._offsets, tbe._vbe_B_offsets, int(tbe._vbe_max_B))
            node.register_prehook(lambda *_grads: before(lookup))
            node.register_hook(lambda *_grads: after(lookup))

        handle: RemovableHandle = self._tbe.register_forward_hook(forward_hook, prepend=True)
        return handle.remove

    def on_rewrite(self, callback: Callable[[torch.Tensor | None], None]) -> Callable[[], None]:
        """Call ``callback`` when the kernel is about to rewrite rows outside its update; returns the remover.

        It gets the linear rows, or None where any row may change: a moving average over whole tables, the swap of
        an ensemble, new random weights.
        """

        def averaging(mode: Mapping[str, float]) -> None:
            if self.iteration % int(mode["step_ema"]) == 0 and self.iteration >= int(mode["step_start"]):
                callback(None)

        def swapping(mode: Mapping[str, float]) -> None:
            if self.iteration % int(mode["step_ema"]) == 0 or self.iteration % int(mode["step_swap"]) == 0:
                callback(None)

        def resetting(
            pruned_indices: torch.Tensor,
            pruned_indices_offsets: torch.Tensor,
            logical_table_ids: torch.Tensor,
            buffer_ids: torch.Tensor,
        ) -> None:
            for position, shard in enumerate(logical_table_ids.tolist()):
                begin, end = pruned_indices_offsets[position : position + 2].tolist()
                callback(pruned_indices[begin:end].long() + self.bases[shard])

        undo = [
            patch(self._tbe, "ema_inplace", averaging),
            patch(self._tbe, "ensemble_and_swap", swapping),
            patch(self._tbe, "reset_embedding_weight_momentum", resetting),
            patch(self._tbe, "init_embedding_weights_uniform", lambda *_args, **_more: callback(None)),
        ]

        def remove() -> None:
            for each in undo:
                each()

        return remove

    def linear_rows(self, lookup: Lookup) -> torch.Tensor:
        """(GPU) Rows in the kernel's linear row space; ids that the kernel ignores become its row count."""
        rows: torch.Tensor = torch.ops.fbgemm.linearize_cache_indices(
            self._tbe.hash_size_cumsum, lookup.indices, lookup.offsets, lookup.bag_starts, lookup.max_bags
        )
        return rows

    @property
    def reads_iteration(self) -> bool:
        """Whether an update depends on ``iteration``."""
        return self._kind.reads_iteration

    @property
    def iteration(self) -> int:
        """Forward passes that the kernel has counted."""
        return int(self._tbe.iter_cpu.item())

    @property
    def max_counter(self) -> float:
        """What counter-based regularization has seen at most; 1 where it is not used."""
        return float(self._tbe.max_counter.item())

    @property
    def learning_rate(self) -> float:
        """What the kernel uses now."""
        return float(self._tbe.get_learning_rate())

    @property
    def next_learning_rate(self) -> float:
        """What the fused optimizer's param group says: the kernel takes it over at the next ``step``."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_scalars(self, iteration: int, max_counter: float, learning_rate: float, next_learning_rate: float) -> None:
        """Put back what the properties of these names said."""
        # set_optimizer_step() sets `iter` only, while the kernels count on in `iter_cpu`.
        self._tbe.iter.fill_(iteration)
        self._tbe.iter_cpu.fill_(iteration)
        self._tbe.max_counter.fill_(max_counter)
        self._tbe.set_learning_rate(learning_rate)
        self.optimizer.param_groups[0]["lr"] = next_learning_rate
