"""One table-batched embedding kernel (TBE) as the capture sees it: rows, states, scalars, and when they change."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.optim.fused import FusedOptimizer as FusedModuleOptimizer

from torchrec_stream_ckpt.adapter.lookups import FusedUpdate, Key, Lookup, Lookups
from torchrec_stream_ckpt.adapter.optimizers import (
    FusedOptimizer,
    hyperparameters,
    row_states,
    set_hyperparameters,
)
from torchrec_stream_ckpt.adapter.patch import patch, wrap
from torchrec_stream_ckpt.adapter.slots import CacheSlots
from torchrec_stream_ckpt.adapter.streams import StreamOrder
from torchrec_stream_ckpt.adapter.written import Versions
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
        self._cache_bases = self._first_cache_rows() if self._cached else {}
        self._slots = CacheSlots(locked=tbe.prefetch_pipeline) if self._cached else None
        self._order = StreamOrder(self.device)
        self._versions = Versions(
            tbe, [(rows, *states) for rows, states in zip(self.weights(), self.states(), strict=True)]
        )
        self._lookups = Lookups(tbe, count=kind.reads_iteration)

    @property
    def module(self) -> nn.Module:
        """The kernel itself, to tell it from others."""
        module: nn.Module = self._tbe
        return module

    def _first_cache_rows(self) -> dict[int, int]:
        """For each shard that a feature looks up, the number by which the cache knows its first row; -1: not cached."""
        return dict(zip(self.feature_shards, self._tbe.cache_hash_size_cumsum.tolist()[:-1], strict=True))

    def reading(self) -> AbstractContextManager[None]:
        """(GPU) Rows and masks of this kernel are read inside, on the current stream: see :class:`StreamOrder`."""
        return self._order.reading()

    def writing(self) -> None:
        """(GPU) Something outside the hooks of this class is about to change rows on the current stream."""
        self._order.writing()

    def weights(self) -> list[torch.Tensor]:
        """Live views, one a shard, shape (rows, cols). Under UVM caching a cached row is newer than its view.

        Raises:
            UnsupportedError: the tables are not on their device now: memory stashing has moved them to the host.
        """
        for buffer in (self._tbe.weights_dev, self._tbe.weights_host, self._tbe.weights_uvm):
            if buffer.numel() and (
                buffer.is_cuda != (self.device.type == "cuda") or not buffer.untyped_storage().size()
            ):
                raise UnsupportedError(
                    "there are no tables to read: memory stashing has freed them between a forward and its backward",
                    hint="call step() and mark() behind the backward",
                    tables=",".join(shard.table.name for shard in self.shards),
                )
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
        base = self._cache_bases.get(shard, -1)
        if base < 0 or not rows.numel():
            return values
        tbe = self._tbe
        # -1 where the cache does not hold a row; else the cache row, whose first columns are those of the table.
        slots = torch.ops.fbgemm.lxu_cache_lookup(rows + base, tbe.lxu_cache_state, tbe.total_cache_hash_size)
        cached = tbe.lxu_cache_weights.index_select(0, slots.clamp(min=0).long())[:, : values.shape[1]]
        return torch.where((slots >= 0).unsqueeze(1), cached, values)

    def flush(self) -> None:
        """Write cached rows back, so that ``weights()`` holds the newest value of every row.

        The device's random state stays: FBGEMM has drawn from it to round rows that are rounded already.
        """
        if self._cached:
            self._order.settle()
            random = torch.cuda.get_rng_state(self.device)
            self._tbe.flush()
            torch.cuda.set_rng_state(random, self.device)

    def prepare_write(self) -> None:
        """Rows are about to be written into ``weights()``: no cached row may cover them afterwards.

        Raises:
            UnsupportedError: a pipeline has moved rows of its next batch into the cache already.
        """
        self._order.settle()
        if self._cached:
            if self._tbe.lxu_cache_locations_list:
                raise UnsupportedError(
                    "a batch has been prefetched into the UVM cache, whose rows are about to be replaced",
                    hint="call restore() before the pipeline takes its first batch",
                    tables=",".join(shard.table.name for shard in self.shards),
                )
            self._tbe.flush()
            self._tbe.reset_cache_states()

    def finish_write(self) -> None:
        """Rows were written: whichever stream looks them up next finds them."""
        self._order.settle()

    def on_update(
        self, before: Callable[[FusedUpdate], None], after: Callable[[Lookup, Key], None], unseen: Callable[[], None]
    ) -> Callable[[], None]:
        """Call ``before`` and ``after`` around the fused update of every forward, as ``Lookups`` says.

        Returns:
            The remover.
        """
        self._order.settle()  # what was queued before, no hook has seen
        guard = self._guard if self._slots is not None else None
        hooked = self._lookups.on_update(before, after, unseen, self._order.writing, guard)
        # Moves rows in and out of the cache, inside a forward or ahead of it on a pipeline's prefetch stream.
        undo = patch(self._tbe, "_prefetch", self._fetching) if self._cached else None

        def remove() -> None:
            hooked()
            if undo is not None:
                undo()

        return remove

    def written(self) -> set[int]:
        """Shards that something has written in place since ``writes_marked``, or ``expect_writes``; of a tensor that
        holds several tables, all of them. The kernel's own update, and its copies to and from a cache, are none."""
        return self._versions.changed()

    def writes_marked(self) -> None:
        """What ``written`` has returned last need not be returned again."""
        self._versions.told()

    def expect_writes(self) -> None:
        """Writes in place so far are known."""
        self._versions.rebase()

    def _fetching(self, *_args: object, **_more: object) -> None:
        """Rows are about to move in and out of the cache."""
        assert self._slots is not None
        self._slots.fetched()
        self._order.writing()

    def _guard(self) -> Callable[[], None]:
        """A forward has ended: what to call before its update."""
        assert self._slots is not None
        tables = ",".join(shard.table.name for shard in self.shards)
        return partial(self._slots.check, self._slots.looked_up(), tables)

    def on_rewrite(self, callback: Callable[[torch.Tensor | None], None]) -> Callable[[], None]:
        """Call ``callback`` when the kernel is about to rewrite rows outside its update; returns the remover.

        It gets the linear rows, or None where any row may change: a moving average over whole tables, the swap of
        an ensemble, new random weights.
        """

        def rewriting(rows: torch.Tensor | None) -> None:
            self._order.writing()
            callback(rows)

        def averaging(mode: Mapping[str, float]) -> None:
            if self.iteration % int(mode["step_ema"]) == 0 and self.iteration >= int(mode["step_start"]):
                rewriting(None)

        def swapping(mode: Mapping[str, float]) -> None:
            if self.iteration % int(mode["step_ema"]) == 0 or self.iteration % int(mode["step_swap"]) == 0:
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
            # Its length is said: to learn it the host would wait for a GPU.
            rewriting(rows + first_rows[tables].repeat_interleave(ends.diff(), output_size=rows.numel()))
            reset(pruned_indices, pruned_indices_offsets, logical_table_ids, buffer_ids)
            self.expect_writes()

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
        """(GPU) Rows in the kernel's linear row space; ids that lie in no table become its row count."""
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
        """Forward passes that the kernel has counted; before its first one, what ``set_optimizer_step`` said."""
        return int(self._tbe.iter_cpu.item()) or int(self._tbe.iter.item())

    @property
    def in_flight(self) -> int:
        """Lookups that a restored pipeline makes again, where their number matters to the updates; else 0."""
        return self._lookups.in_flight

    @property
    def max_counter(self) -> float:
        """What counter-based regularization has seen at most; 1 where it is not used."""
        counter = self._counter()
        return float(counter.item()) if counter is not None else 1.0

    def _counter(self) -> torch.Tensor | None:
        """Adam with a bias correction for each row has none."""
        counter: torch.Tensor | None = getattr(self._tbe, "max_counter", None)
        return counter

    @property
    def learning_rate(self) -> float:
        """What the kernel uses now."""
        return float(self._tbe.get_learning_rate())

    @property
    def next_learning_rate(self) -> float:
        """What the fused optimizer's param group says: the kernel takes it over at the next ``step``."""
        return float(self.optimizer.param_groups[0]["lr"])

    @property
    def hyperparameters(self) -> dict[str, float]:
        """Numbers that the update reads, such as ``eps`` and ``weight_decay``; without the learning rate."""
        return hyperparameters(self._tbe)

    def set_hyperparameters(self, values: Mapping[str, float]) -> None:
        """Put back what ``hyperparameters`` said."""
        set_hyperparameters(self._tbe, values)

    def set_scalars(self, iteration: int, max_counter: float, learning_rate: float, next_learning_rate: float) -> None:
        """Put back what the properties of these names said."""
        # set_optimizer_step() sets `iter` only, while the kernels count on in `iter_cpu`.
        self._tbe.iter.fill_(iteration)
        self._tbe.iter_cpu.fill_(iteration)
        self._lookups.forget()
        counter = self._counter()
        if counter is not None:
            counter.fill_(max_counter)
        self._tbe.set_learning_rate(learning_rate)
        self.optimizer.param_groups[0]["lr"] = next_learning_rate
