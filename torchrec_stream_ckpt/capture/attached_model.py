"""A model with our hooks attached: the rows that this rank holds, and the capture of changes to them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from functools import partial

import torch
from torch import nn

from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.capture.oracle import Oracle
from torchrec_stream_ckpt.capture.shards import (
    check_held_once,
    check_rows_fit,
    local_shards,
    local_tables,
    merge_schema,
)
from torchrec_stream_ckpt.format.claim_changes import same_tables
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import (
    KernelGuard,
    ReplicatedTables,
    check_free,
    claim,
    dense_optimizers,
    fused_kernels,
    id_maps,
    watch_outside_writes,
)
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.util.types import TableShard, grouped

log = logging.getLogger(__name__)


class Attached:
    """The model of one rank. Read by the constructor and hooked by :meth:`hook`; both are repeated after a reshard.

    Args:
        model: The sharded model.
        optimizer: The optimizer that the job steps.
        team: All ranks.
        paranoid: True if an oracle follows the stream.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer | None, team: Team, *, paranoid: bool
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._team = team
        self._paranoid = paranoid
        self.describe()

    def describe(self, order: Schema | None = None) -> None:
        """(all ranks) Read which rows this rank holds, and the schema of all ranks.

        Args:
            order: A lineage's schema with the same tables, which defines their indices. If None, tables are sorted by
                name.
        """
        self.kernels = self._team.together(lambda: fused_kernels(self._model))
        self._team.together(lambda: check_rows_fit(self.kernels))
        maps = self._team.together(lambda: id_maps(self._model))
        said = self._team.gather((local_tables(self.kernels), bool(maps)))
        self.has_id_maps = any(has for _, has in said)
        """True if a rank has id maps (managed collision)."""
        found = merge_schema([tables for tables, _ in said])
        same = same_tables(order, found) if order is not None else None
        self._number(same if same is not None else found)

    def _number(self, schema: Schema) -> None:
        self.schema = schema
        """The tables, by their index in frames."""
        self.shards = self.shards_in(schema)
        shards = self._team.gather(self.shards)
        check_held_once(shards, schema)
        self.layout = RankShards.of(shards) if self._team.rank == 0 else None
        """(rank 0) The shards of each rank."""

    def shards_in(self, schema: Schema) -> tuple[TableShard, ...]:
        """Return this rank's shards, with the table indices of a schema that has the model's tables."""
        return local_shards(self.kernels, schema)

    def adopt(self, schema: Schema) -> None:
        """(all ranks) Use the table indices of ``schema``, which has the same tables, from now on.

        A lineage numbers its tables once, even if they are renamed later. Call this before a generation is opened.
        """
        self._number(schema)
        self.capture.number(schema)
        if self.oracle is not None:
            self.oracle.number(schema)

    def hook(self, reshard: Callable[[Callable[[], float]], float]) -> None:
        """(all ranks) Hook the kernels in their current state, and all code that changes rows outside of them.

        Args:
            reshard: Replaces ``dmp.reshard()``. Its argument is the function that moves the rows.
        """
        self._team.together(lambda: check_free(self.kernels))
        self.standing = KernelGuard(self._model)
        self.capture = Capture(self.kernels, self.schema)
        self.oracle = Oracle(self.kernels, self.schema) if self._paranoid else None
        self._unwatch = watch_outside_writes(self._model, self._optimizer, self.capture.outside.before_load, reshard)
        self._free_kernels = claim(self.kernels)
        if self.device.type == "cuda" and self._team.world > 1 and self._team.rank == 0:
            log.warning(
                "tables on %d GPUs, but tested on one GPU only (docs/guarantees.md); paranoid=True checks each marker",
                self._team.world,
            )

    def unhook(self) -> None:
        """Remove all hooks from the model and the optimizers."""
        self._unwatch()
        self.capture.close()
        self._free_kernels()

    def begin(self, swept: Collection[int]) -> None:
        """(all ranks) Start the next generation from the current rows. Tables in ``swept`` are sent whole."""
        self.capture.begin()
        if self.oracle is not None:
            self._team.together(partial(self.oracle.begin, swept))

    @property
    def device(self) -> torch.device:
        """Device of the tables."""
        return self.kernels[0].device if self.kernels else torch.device("cpu")

    @property
    def tables(self) -> range:
        """The indices of all tables, including dropped ones."""
        return range(len(self.schema.tables))

    def replicated(self) -> ReplicatedTables:
        """Return the tables that every rank holds whole."""
        return ReplicatedTables(self._model, dense_optimizers(self._optimizer))

    def column_splits(self) -> dict[int, set[tuple[int, int]]]:
        """(all ranks) Return table -> the column ranges of its shards on all ranks."""
        shards = (shard for held in self._team.gather(self.shards) for shard in held)
        splits = grouped((shard.table, (shard.col0, shard.cols)) for shard in shards)
        return {table: set(found) for table, found in splits.items()}
