"""Tables of a replica as plain torch tensors."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.errors import ConfigError, ReplicaNotReadyError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.extras.follower.followed_maps import FollowedMaps
from torchrec_stream_ckpt.extras.follower.replica import INTERRUPTED, Comparisons, Replica, read_rows
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update
from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors, read_dense
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName
from torchrec_stream_ckpt.format.rows import NO_ID, Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Compared, Plane, WeightProof
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

_SLICE_BYTES = 2**18
"""Weights that are written while readers wait, if updates are applied in slices."""
_SWITCH_S = 0.5e-3
"""Time for which a reader may wait until the interpreter takes its lock from the thread that applies updates."""


@dataclass(frozen=True, slots=True)
class Served:
    """View of the tables for a reader, valid while it reads."""

    marker: MarkerId
    """The newest marker that is wholly applied."""
    step: int
    committed_s: float
    """When it was committed, by the trainer's wall clock."""
    provisional: bool
    """(``rows`` mode) True if some rows are newer than the marker."""
    tables: Mapping[str, torch.Tensor]
    """Weights by ``TableSpec.name``, shape (rows that are held, dim). Read-only."""
    mixed: bool = False
    """(``slices``) True if some rows are already those of the next update, which was not compared with its proof."""

    @property
    def age_s(self) -> float:
        return max(0.0, time.time() - self.committed_s)


def _parts(changed: Changed) -> Iterator[Changed]:
    """Cut changed rows into slices."""
    height = max(1, _SLICE_BYTES // max(1, changed.weights[:1].nbytes))
    for begin in range(0, len(changed.ids), height):
        end = begin + height
        yield replace(changed, ids=changed.ids[begin:end], weights=changed.weights[begin:end])


class FollowedTables(Replica):
    """The tables of a replica: weights only, as the job's logical tables or as a block of their rows.

    Call :meth:`advance` at a suitable point, or :meth:`start` a thread; read within :meth:`reading`.

    Args:
        follower: Source of the updates; :meth:`close` closes it.
        into: Tensors to write, by table name (``TableSpec.name``, such as ``sparse.ebc.t_user``), for instance
            :func:`weights_of` a module; None: new ones on ``device``.
        shard: (number, count): hold block ``number`` of ``count`` of the rows of each table.
        device: Device of new tensors. Tested on a CPU and on one H100.
        accept_unproved: Serve rows even if they differ from their marker's proof. They are named and counted.
        slices: Apply updates in slices of 256 KiB, so that a reader waits for one slice and not for an update. While
            an update is applied, readers see rows of two markers (``Served.mixed``). Sets the switch interval of the
            interpreter to 0.5 ms, if it is longer.
        input_hash_sizes: Tables with managed collision that :meth:`lookup` answers for, by ``TableSpec.name``, and
            ``input_hash_size`` of their modules: it decides which row an unknown raw id has, and is not in a marker.
            Their id maps are read from the dense state of a marker when all rows are loaded. From there on the stream
            says what changes; ``rows`` mode requires a trainer that sends these changes, and in ``markers`` mode the
            maps of any other one are read at each marker. Requires whole tables, and no slices.

    Raises:
        ConfigError: the options contradict each other.
    """

    def __init__(
        self,
        follower: Follower,
        into: Mapping[str, torch.Tensor] | None = None,
        *,
        shard: tuple[int, int] = (0, 1),
        device: torch.device | str = "cpu",
        accept_unproved: bool = False,
        slices: bool = False,
        input_hash_sizes: Mapping[str, int] | None = None,
    ) -> None:
        number, count = shard
        if not 0 <= number < count:
            raise ConfigError(f"shard {number} of {count} does not exist", hint="count shards from 0")
        if input_hash_sizes and (slices or count > 1):
            raise ConfigError(
                "raw ids are looked up in whole tables, and between whole updates only",
                hint="omit slices and shard, or omit input_hash_sizes",
            )
        for name, size in (input_hash_sizes or {}).items():
            if not 0 <= size < 2**63:
                raise ConfigError(f"input_hash_size {size} is not within [0, 2**63)", table=name)
        super().__init__(follower, accept_unproved=accept_unproved)
        self._maps = FollowedMaps(follower, input_hash_sizes or {})
        self._into = dict(into) if into is not None else None
        self._shard = shard
        self._device = torch.device(device)
        places = [each.device for each in self._into.values()] if self._into is not None else [self._device]
        if all(each.type == "cpu" for each in places):
            follower.take_repeats()
        self._tensors: dict[str, torch.Tensor] = {}
        self._planes: dict[str, Plane] = {}
        self._schema: Schema | None = None
        """Schema that the tensors match."""
        self._others: dict[str, torch.Tensor] | None = None
        """Tensors that replace these with the next update; None if these fit."""
        self._slices = slices
        self._mixed = False
        if slices:
            sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH_S))
            follower.between_frames(self._gate.give_way)

    def rows_of(self, table: TableSpec) -> tuple[int, int]:
        """Return (first row, rows) of the part of a table that is held."""
        number, count = self._shard
        first, last = (table.rows * each // count for each in (number, number + 1))
        return first, last - first

    @contextlib.contextmanager
    def reading(self) -> Iterator[Served]:
        """Yield the tables, which do not change inside the block. Keep it short: an update waits for it.

        Raises:
            ReplicaNotReadyError: nothing was loaded yet, the last update broke off half way, or rows differ from their
                marker's proof; the error names these.
        """
        with self._reading() as update:
            commit = update.commit
            yield Served(commit.id, commit.step, commit.time_s, update.is_provisional, self._tensors, self._mixed)

    def lookup(self, table: str, raw_ids: torch.Tensor) -> torch.Tensor:
        """Return the weights that TorchRec looks up for raw ids, all of one update.

        In ``rows`` mode an update may be newer than a marker. A raw id that has got its row since the last cut is
        unknown until the next one; one that has lost its row is unknown as soon as newer values of the row arrive.

        Args:
            table: One of ``input_hash_sizes``.
            raw_ids: int64, shape (n,), as the module's ``input_hash_func`` returns them, if it has one. An id that the
                update does not know gets the last row of the shard that it is sent to, as in TorchRec.

        Returns:
            A copy, shape (n, dim), on the device of the table.

        Raises:
            ConfigError: the table is not one of ``input_hash_sizes``; these are not such ids; one of them is sent to a
                shard without rows, where TorchRec fails, too; or one is the greatest int64, TorchRec's mark of a free
                row, and it is not known which one TorchRec looks up (in ``rows`` mode it never is).
            ReplicaNotReadyError: as :meth:`reading`.
        """
        if table not in self._maps:
            raise ConfigError(
                "the raw ids of this table are not followed",
                hint="name it in input_hash_sizes; without managed collision, index reading().tables by row",
                table=table,
            )
        if raw_ids.dtype != torch.int64 or raw_ids.dim() != 1:
            raise ConfigError(
                f"raw ids are {raw_ids.dtype} {tuple(raw_ids.shape)}", hint="pass int64 of shape (n,)", table=table
            )
        wanted = raw_ids.cpu().numpy()
        with self.reading() as served, torch.no_grad():
            weights, id_map = served.tables[table], self._maps[table]
            if self.follower.mode == "rows" and id_map.hashed is None and (wanted == NO_ID).any():
                raise ConfigError(
                    f"raw id {NO_ID} is TorchRec's mark of free rows, and between markers it is not known which are "
                    "free",
                    hint="omit it, or follow with mode='markers'",
                    table=table,
                )
            rows = torch.from_numpy(id_map.rows_of(wanted))
            return weights.index_select(0, rows.to(weights.device))

    def dense(self) -> DenseTensors:
        """Return the dense state of the applied marker, without id maps of managed collision.

        Its files are opened only now. Call it on the thread of ``advance``.

        Raises:
            ReplicaNotReadyError: no marker was loaded yet.
            ProofMismatchError: a replicated table differs from the marker's proof.
            ConfigError, CorruptionError, StoreUnavailableError: as :meth:`Update.dense`.
        """
        if self._newest is None:
            raise ReplicaNotReadyError("the replica has not loaded a marker", hint="call advance() first")
        dense = read_dense(self._newest.dense(), without_maps=True)
        self._compare_replicated(dense, self._proof, self._newest.marker)
        return dense

    # Writing.

    def _holds(self, table: TableSpec) -> bool:
        return table.name in self._planes

    def _prepare(self, update: Update) -> None:
        self._others = self._others_for(update.schema)
        self._maps.prepare(update)

    def _settle(self, update: Update, compared: Comparisons) -> None:
        self._maps.settle(update)
        super()._settle(update, compared)

    def _apply(self, update: Update) -> None:
        if self._slices and self._others is None and self._newest is not None and not self._half:
            self._apply_in_slices(update)
        else:
            super()._apply(update)

    def _begin(self, update: Update) -> None:
        if self._others is not None:
            self._tensors = self._others
            self._planes = {name: Plane(tensor) for name, tensor in self._tensors.items()}
            self._schema = update.schema

    def _apply_in_slices(self, update: Update) -> None:
        """Apply an update while readers read between its slices. If it fails, nothing is served until the next load."""
        try:
            with self._gate.writing():
                self._mixed = True
                self._keep_doubts(update)
            with torch.no_grad():
                for changed in update.changes():
                    for part in _parts(self._held(changed)):
                        with self._gate.writing():
                            self._put_noted(part, update)
                        self._gate.give_way()
                found = self._compared(update)
            with self._gate.writing():
                self._settle(update, found)
                self._mixed = False
        except BaseException:
            with self._gate.writing():
                self._half, self._mixed = self._half or INTERRUPTED, False
            raise

    def _compare(self, proof: WeightProof, table: TableSpec) -> Compared:
        """Compare those blocks of one table that are held whole."""
        first, rows = self.rows_of(table)
        tensor = self._tensors[table.name]

        def read(ids: npt.NDArray[np.int64]) -> Array:
            if self._slices:
                self._gate.give_way()
            return read_rows(tensor, ids - first)

        return proof.compare(table, first, rows, read)

    def _held(self, changed: Changed) -> Changed:
        first, rows = self.rows_of(changed.table)
        ids, weights = changed.ids, changed.weights
        if rows == changed.table.rows and weights.flags.c_contiguous:
            return changed
        if rows < changed.table.rows:
            mine = np.flatnonzero((ids >= first) & (ids < first + rows))
            ids, weights = ids[mine], weights[mine]
        return replace(changed, ids=ids, weights=np.ascontiguousarray(weights))

    def _put(self, changed: Changed) -> None:
        plane = self._planes.get(changed.table.name)
        if plane is not None and len(changed.ids):
            plane.put(changed.ids - self.rows_of(changed.table)[0], changed.weights, changed.col0)

    def _others_for(self, schema: Schema) -> dict[str, torch.Tensor] | None:
        """Return tensors for the first tables, or for those of a changed model; None if the existing ones fit."""
        named = {table.name: table for _, table in schema.live if self.follower.wants(table)}
        if self._schema is not None and named.items() <= {each.name: each for _, each in self._schema.live}.items():
            return None if named.keys() == self._planes.keys() else {name: self._tensors[name] for name in named}
        if self._into is not None:
            self._check_given(self._into, named)
            return dict(self._into)
        shapes = {name: (self.rows_of(table)[1], table.dim) for name, table in named.items()}
        return {
            name: torch.empty(shapes[name], dtype=_dtype(table), device=self._device) for name, table in named.items()
        }

    def _check_given(self, given: Mapping[str, torch.Tensor], named: Mapping[str, TableSpec]) -> None:
        unknown = sorted(given.keys() ^ named.keys())
        if unknown:
            side = "the tensors that were given have" if unknown[0] in given else "the job has"
            raise SchemaMismatchError(
                f"only {side} this table",
                hint="name tables by module path and table, or choose tables with tables=[...]",
                table=unknown[0],
            )
        for name, tensor in given.items():
            wanted = (self.rows_of(named[name])[1], named[name].dim)
            if tuple(tensor.shape) != wanted or tensor.dtype != _dtype(named[name]):
                raise SchemaMismatchError(
                    f"the tensor is {tensor.dtype} {tuple(tensor.shape)}, but the job's rows are {_dtype(named[name])} "
                    f"{wanted}",
                    hint="build the replica's model with the same tables as the trainer's",
                    table=name,
                )


def _dtype(table: TableSpec) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, table.dtype)
    return dtype


def weights_of(module: torch.nn.Module, prefix: str = "") -> dict[str, torch.Tensor]:
    """Return the weights of all embedding collections in an unsharded module, by the names that tables have in a log.

    Args:
        module: Built as the trainer's model was, before sharding.
        prefix: Path of ``module`` in that model, if it is a part of it.

    Raises:
        ConfigError: it has quantized tables only.
    """
    found: dict[str, torch.Tensor] = {}
    for key, parameter in module.named_parameters(prefix=prefix):
        name = TorchRecName.parse(key)
        if name is not None:
            found[name.spec_name] = parameter.detach()
    quantized = [each for each in module.modules() if type(each).__module__.startswith("torchrec.quant")]
    if quantized and not found:
        raise ConfigError(
            f"the module holds no float tables: {len(quantized)} quantized collections were found",
            hint="follow it with FollowedModel, or let FollowedTables make float tensors: omit into",
        )
    return found


def load_dense(module: torch.nn.Module, dense: DenseTensors) -> None:
    """Put a marker's dense parameters and buffers into an unsharded module whose tables are followed.

    Raises:
        SchemaMismatchError: the marker lacks an entry of the module, or has another shape for it.
    """
    state: dict[str, Any] = module.state_dict()
    with torch.no_grad():
        for key, target in state.items():
            if key in dense.model:
                value = dense.model[key]
                if value.shape != target.shape:
                    raise SchemaMismatchError(
                        f"the shape is {tuple(value.shape)} in the marker and {tuple(target.shape)} in this model",
                        hint="build the model with the trainer's sizes of tables and layers",
                        entry=key,
                    )
                target.copy_(value)
            elif TorchRecName.parse(key) is None:
                raise SchemaMismatchError(
                    "the marker has no dense state with this name",
                    hint="build the same model as the trainer",
                    entry=key,
                )
