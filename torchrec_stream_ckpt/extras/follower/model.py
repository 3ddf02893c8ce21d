"""An inference module that follows a job: float or quantized tables, and the dense part, of one marker."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.extras.follower.followed_maps import FollowedMaps
from torchrec_stream_ckpt.extras.follower.replica import Comparisons, Replica, read_rows
from torchrec_stream_ckpt.extras.follower.unproved_blocks import proof_of
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update
from torchrec_stream_ckpt.extras.follower.whole_rows import Ids, WholeRows
from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors, read_dense
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.inner import Compared, Plane, WeightProof, served_parts
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec


def _quantize(quantize: Callable[[Ids, torch.Tensor], None], ids: Ids, weights: Array) -> None:
    """Quantize whole rows of one table, and write them."""
    quantize(ids, torch.from_numpy(np.array(weights)))


def _spec_name(key: str) -> str:
    """Return the name that a log gives the table with these weights."""
    name = TorchRecName.parse(key)
    assert name is not None
    return name.spec_name


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The module for a reader, valid while it reads: call it like the module."""

    marker: MarkerId
    """The marker of all of its rows and of its dense part."""
    step: int
    committed_s: float
    """When it was committed, by the trainer's wall clock."""
    module: torch.nn.Module
    """The followed module. Read-only."""

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.committed_s)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of the module's forward, without gradients."""
        with torch.no_grad():
            return self.module(*args, **kwargs)


class FollowedModel(Replica):
    """An inference module at the newest marker of a job. A forward sees the rows and the dense part of one marker.

    Tables of ``torchrec.quant`` are at each marker, bit for bit, as if that marker were exported and quantized from
    scratch. Managed collision modules give each raw id the row that the trainer looks up at that marker. Call
    :meth:`advance` at a suitable point, or :meth:`start` a thread.

    Args:
        module: Unsharded; its embedding collections are float ones, or ``EmbeddingBagCollection`` and
            ``EmbeddingCollection`` of ``torchrec.quant``, with or without managed collision. Its values do not matter:
            the first update replaces all.
        follower: Source of the updates, in ``markers`` mode; :meth:`close` closes it.
        prefix: Path of ``module`` in the trainer's model, if it is a part of it.
        accept_unproved: Serve rows even if they differ from their marker's proof. They are named and counted.

    Raises:
        UnsupportedError: a part of the module cannot be followed; the error names it.
        ConfigError: the follower hands out rows that no marker has.
    """

    def __init__(
        self, module: torch.nn.Module, follower: Follower, *, prefix: str = "", accept_unproved: bool = False
    ) -> None:
        if follower.mode != "markers":
            raise ConfigError("a followed module requires a follower of markers", hint="follow with mode='markers'")
        super().__init__(follower, accept_unproved=accept_unproved)
        follower.between_frames(self._gate.give_way)
        self._module = module
        self._prefix = f"{prefix}." if prefix else ""
        parts = served_parts(module)
        self._dense = {f"{self._prefix}{key}": value for key, value in parts.dense.items()}
        self._keys = {_spec_name(key): key for key in (f"{self._prefix}{each}" for each in parts.tables)}
        """Names of weights in the trainer's state dict, by ``TableSpec.name``."""
        self._tables = {_spec_name(f"{self._prefix}{key}"): table for key, table in parts.tables.items()}
        self._planes = {name: Plane(table.tensor) for name, table in self._tables.items() if table.tensor is not None}
        """Float tables."""
        self._whole: dict[str, WholeRows] = {}
        """Quantized tables of the job."""
        self._served_maps = {f"{self._prefix}{key}": each for key, each in parts.maps.items()}
        """Id maps in the module, by ``TableSpec.name``."""
        sizes = {name: each.input_hash_size for name, each in self._served_maps.items()}
        self._maps = FollowedMaps(follower, sizes)
        self._new_maps: list[Callable[[], None]] = []
        """Put the id maps of the update that is being applied into the module."""
        self._followed: dict[str, TableSpec] = {}
        """Tables of the job; others are data parallel, and so in the dense state."""
        self._state: DenseTensors | None = None
        """Dense state of the update that is being applied; None if the module needs none."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[ServedModel]:
        """Yield the module, which does not change inside the block. Keep it short: an update waits for it.

        Raises:
            ReplicaNotReadyError: nothing was loaded yet, the last update broke off half way, or rows differ from their
                marker's proof; the error names these.
        """
        with self._reading() as update:
            yield ServedModel(update.marker, update.step, update.commit.time_s, self._module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of one forward, all of one marker; raises as :meth:`reading`."""
        with self.reading() as model:
            return model(*args, **kwargs)

    # Before an update is written.

    def _prepare(self, update: Update) -> None:
        named = {table.name: table for _, table in update.schema.live if self.follower.wants(table)}
        self._check_tables(named)
        self._state = None
        self._maps.prepare(update)
        self._new_maps = [
            self._served_maps[name].changed(rows, raw_ids, partial(self._rows_of, name))
            for name, rows, raw_ids in self._maps.changed()
        ]
        replicated = self._tables.keys() - named.keys()
        if self._dense or replicated:
            state = read_dense(update.dense(), without_maps=True)
            self._check_dense(state, replicated)
            self._compare_replicated(state, proof_of(update), update.marker)
            self._state = state
        if named != self._followed:
            self._followed = named
            self._whole = {
                name: WholeRows(table, partial(_quantize, self._tables[name].quantize))
                for name, table in named.items()
                if name not in self._planes
            }

    def _rows_of(self, table: str, raw_ids: Ids) -> Ids:
        """Return the row that the trainer looks up for each raw id; raises ConfigError as a lookup."""
        return self._maps[table].rows_of(raw_ids)

    def _check_tables(self, named: dict[str, TableSpec]) -> None:
        if unmapped := sorted(self._served_maps.keys() - named.keys()):
            raise SchemaMismatchError(
                "the module looks this table up by raw id, but the followed tables lack it",
                hint="build the module with the trainer's tables, and follow all of them",
                table=unmapped[0],
            )
        unknown = sorted(named.keys() - self._tables.keys())
        if unknown:
            raise SchemaMismatchError(
                "only the job has this table, the module lacks it",
                hint="pass prefix=, the module's path in the trainer's model, or choose tables with tables=[...]",
                table=unknown[0],
            )
        for name, table in named.items():
            mine = self._tables[name]
            if (mine.rows, mine.dim) != (table.rows, table.dim) or table.dtype not in mine.dtypes:
                raise SchemaMismatchError(
                    f"the module takes rows of {' or '.join(mine.dtypes)} ({mine.rows}, {mine.dim}), but the job's are "
                    f"{table.dtype} ({table.rows}, {table.dim})",
                    hint="build the module with the same tables as the trainer's",
                    table=name,
                )

    def _check_dense(self, state: DenseTensors, replicated: set[str]) -> None:
        """Compare the entries of a marker's dense state with the module."""
        wanted = {key: tuple(value.shape) for key, value in self._dense.items()}
        for name in replicated:
            wanted[self._keys[name]] = (self._tables[name].rows, self._tables[name].dim)
        for key, shape in wanted.items():
            value = state.model.get(key)
            if not isinstance(value, torch.Tensor):
                raise SchemaMismatchError(
                    "the marker has neither rows nor dense state with this name",
                    hint="build the same model as the trainer; pass prefix= if the module is a part of it",
                    entry=key,
                )
            if tuple(value.shape) != shape:
                raise SchemaMismatchError(
                    f"the shape is {tuple(value.shape)} in the marker and {shape} in this module",
                    hint="build the module with the trainer's sizes of tables and layers",
                    entry=key,
                )
        for name in replicated:
            dtype = str(state.model[self._keys[name]].dtype).removeprefix("torch.")
            if dtype not in self._tables[name].dtypes:
                raise SchemaMismatchError(
                    f"the module takes {' or '.join(self._tables[name].dtypes)}, but the marker has {dtype}",
                    hint="build the module with the same tables as the trainer's",
                    table=name,
                )

    # Writing, inside the gate.

    def _begin(self, update: Update) -> None:
        for rows in self._whole.values():
            rows.begin()

    def _holds(self, table: TableSpec) -> bool:
        return table.name in self._followed

    def _put(self, changed: Changed) -> None:
        name = changed.table.name
        if name in self._whole:
            self._whole[name].put(changed)
        elif name in self._planes:
            self._planes[name].put(changed.ids, np.ascontiguousarray(changed.weights), changed.col0)

    def _compared(self, update: Update) -> Comparisons:
        lacking = {name: ids for name, rows in self._whole.items() if len(ids := rows.end())}
        if lacking:
            self.follower.stats.reread += sum(map(len, lacking.values()))
            for changed in update.whole(lacking):
                self._whole[changed.table.name].put(changed)
        return super()._compared(update)

    def _settle(self, update: Update, compared: Comparisons) -> None:
        self._maps.settle(update)
        for put in self._new_maps:
            put()
        self._new_maps = []
        if self._state is not None:
            for key, target in self._dense.items():
                target.copy_(self._state.model[key])
            for name in self._tables.keys() - self._followed.keys():
                self._replace(name, self._state.model[self._keys[name]])
            self._state = None
        super()._settle(update, compared)

    def _replace(self, name: str, weights: torch.Tensor) -> None:
        """Write a data-parallel table, which is part of the dense state."""
        table = self._tables[name]
        if table.tensor is not None:
            table.tensor.copy_(weights)
        else:
            table.quantize(np.arange(table.rows), weights)

    def _compare(self, proof: WeightProof, table: TableSpec) -> Compared:
        if table.name in self._whole:
            return proof.compare_sums(table, 0, table.rows, self._whole[table.name].sums_of)
        tensor = self._tables[table.name].tensor
        assert tensor is not None
        return proof.compare(table, 0, table.rows, partial(read_rows, tensor))
