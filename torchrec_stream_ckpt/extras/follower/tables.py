"""Tables of a replica as plain torch tensors. A gate keeps readers from seeing half of an update."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from torchrec_stream_ckpt.errors import (
    ConfigError,
    LogUnavailableError,
    ProofMismatchError,
    ReplicaNotReadyError,
    SchemaMismatchError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.extras.follower.source import UNREADABLE
from torchrec_stream_ckpt.extras.follower.stats import values_of
from torchrec_stream_ckpt.extras.follower.unproved_blocks import Doubts, older_proofs_of, proof_of, refusal
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update, UpdateKind
from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors, read_dense
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Compared, Plane, Unproved, WeightProof, compare_replicated
from torchrec_stream_ckpt.util.interpreter_exit import end_at_exit
from torchrec_stream_ckpt.util.metrics import FOLLOWER_METRICS, labels_of, serve_metrics
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec


class Gate:
    """Many readers or one writer. A waiting writer goes before new readers, but not twice before one that waits."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._readers = 0
        self._waiting = 0
        self._owed = 0
        """Readers that have waited for a writer, and go before the next one."""
        self._writers = 0
        self._writing = False
        self._read = False
        """True if a reader has entered since the last :meth:`give_way`."""

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the gate for reading. One thread must not enter it twice: a writer may wait in between."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._writers or (self._owed > 0 and not self._writing))
                self._readers += 1
                self._read = True
            finally:
                self._waiting -= 1
                self._owed = min(max(0, self._owed - 1), self._waiting)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self._readers -= 1
                self._changed.notify_all()

    def give_way(self) -> None:
        """(the writer, outside the gate) Let the threads of readers run, if there are any.

        The interpreter takes its lock from a busy thread only after 5 ms. A thread that waits for it gets it at once
        from one that sleeps.
        """
        if self._read or self._waiting:
            self._read = False
            time.sleep(_GIVE_WAY_S)

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        with self._changed:
            self._writers += 1
            self._changed.wait_for(lambda: not self._readers and not self._writing and not self._owed)
            self._writing = True
        try:
            yield
        finally:
            with self._changed:
                self._writing = False
                self._writers -= 1
                self._owed = self._waiting
                self._changed.notify_all()


log = logging.getLogger(__name__)

_JOIN_S = 30.0
_SLICE_BYTES = 2**18
"""Weights that are written while readers wait, if updates are applied in slices."""
_GIVE_WAY_S = 20e-6
"""Shortest sleep that lets another thread begin; the kernel adds some 50 us."""


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


Differing: TypeAlias = list[tuple[TableSpec, Unproved]]
"""Tables whose held blocks differ from a proof."""


@dataclass(frozen=True, slots=True)
class _Compared:
    """Comparisons of the held weights with proofs."""

    own: tuple[WeightProof, Differing] | None
    """With the proof of the update's marker; None if it has none."""
    older: list[tuple[WeightProof, Differing]]


def _parts(changed: Changed) -> Iterator[Changed]:
    """Cut changed rows into slices."""
    height = max(1, _SLICE_BYTES // max(1, changed.weights[:1].nbytes))
    for begin in range(0, len(changed.ids), height):
        end = begin + height
        yield replace(changed, ids=changed.ids[begin:end], weights=changed.weights[begin:end])


class FollowedTables:
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
            an update is applied, readers see rows of two markers (``Served.mixed``).
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
    ) -> None:
        number, count = shard
        if not 0 <= number < count:
            raise ConfigError(f"shard {number} of {count} does not exist", hint="count shards from 0")
        if follower.resumes:
            raise ConfigError("new tables cannot continue from a position", hint="omit Follower.resume()")
        self._follower = follower
        self._into = dict(into) if into is not None else None
        self._shard = shard
        self._device = torch.device(device)
        self._gate = Gate()
        self._tensors: dict[str, torch.Tensor] = {}
        self._planes: dict[str, Plane] = {}
        self._schema: Schema | None = None
        """Schema that the tensors match."""
        self._newest: Update | None = None
        self._proof: WeightProof | None = None
        """Proof of that update."""
        self._accept = accept_unproved
        self._doubts = Doubts()
        self._half = ""
        """Why the tables are not those of a marker; empty if they are, or may be mixed."""
        self._slices = slices
        self._mixed = False
        if slices:
            follower.between_frames(self._gate.give_way)
        self._closing = contextlib.ExitStack()
        self._thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        """The error that ended the thread of :meth:`start`. Updates applied before it can still be read."""

    @property
    def follower(self) -> Follower:
        """The follower whose updates these tables apply."""
        return self._follower

    def rows_of(self, table: TableSpec) -> tuple[int, int]:
        """Return (first row, rows) of the part of a table that is held."""
        number, count = self._shard
        first, last = (table.rows * each // count for each in (number, number + 1))
        return first, last - first

    def advance(self, timeout_s: float = 0.0) -> list[Update]:
        """Apply all available updates; wait at most ``timeout_s`` for the first one.

        Readers wait while one update, or a slice of it, is applied. Raises as :meth:`Follower.updates`.

        Returns:
            The applied updates, in order. Their rows cannot be read any more.

        Raises:
            ProofMismatchError: rows differ from the marker's proof, and nothing is served. Call this again: it then
                loads all rows again, and if log and store themselves have the differing rows, it waits for newer ones.
        """
        applied = []
        for update in self._follower.updates(timeout_s, once=True):
            self._apply(update)
            applied.append(update)
        if (unproved := self._refused()) is not None and self._newest is not None:
            raise refusal(unproved, self._newest.marker)
        return applied

    def _refused(self) -> Unproved | None:
        """Return why nothing is served although an update was applied to its end; None if the tables are served."""
        return self._doubts.unproved if not self._accept else None

    def start(self) -> None:
        """Apply updates on a separate thread, until :meth:`close`; see :attr:`failure`."""
        if self._thread is not None:
            raise ConfigError("these tables are already following")
        self._thread = threading.Thread(target=self._run, name="stream-ckpt-follow", daemon=True)
        self._thread.start()
        end_at_exit(self._thread, self._follower.stop)

    def _run(self) -> None:
        try:
            self._follow()
        except BaseException as error:
            self.failure = error

    def _follow(self) -> None:
        broken_s: float | None = None
        while True:
            try:
                for update in self._follower.updates():
                    if not self._applies(update):
                        break
                    broken_s = None
                else:
                    return
            except ProofMismatchError as error:
                log.warning("%s", error.headline)  # nothing is served until all rows were loaded again
            except (LogUnavailableError, StoreUnavailableError):
                # This is an outage in the middle of an update. After an outage that the follower waited for in vain,
                # raise.
                broken_s = broken_s or time.monotonic()
                if not self._half or time.monotonic() - broken_s >= self._follower.outage_s or self._follower.pause():
                    raise

    def _applies(self, update: Update) -> bool:
        """Apply an update. Returns False if its rows cannot be read; the next one then loads all rows of a marker."""
        try:
            self._apply(update)
        except UNREADABLE as error:
            if update.kind is UpdateKind.LOAD and not self._follower.passes(update.marker):
                raise
            log.warning("an update failed before its end: %s", error.headline)
            return False
        return True

    def serve_metrics(self, port: int, host: str = "127.0.0.1") -> int:
        """Answer ``GET http://host:port/metrics`` until :meth:`close`. Returns the port; 0 chooses a free one.

        Raises:
            ConfigError: ``prometheus_client`` is not installed, or it cannot listen there.
        """
        follower = self._follower
        endpoint = serve_metrics(
            host, port, lambda: values_of(follower.stats), FOLLOWER_METRICS, labels_of(follower.uri), "port"
        )
        self._closing.callback(endpoint.close)
        return endpoint.port

    def close(self) -> None:
        """End the thread, and the follower. Applied updates can still be read."""
        self._closing.close()
        self._follower.stop()
        if self._thread is not None:
            self._thread.join(_JOIN_S)
        self._follower.close()

    def __enter__(self) -> FollowedTables:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Served]:
        """Yield the tables, which do not change inside the block. Keep it short: an update waits for it.

        Raises:
            ReplicaNotReadyError: nothing was loaded yet, the last update broke off half way, or rows differ from their
                marker's proof; the error names these.
        """
        with self._gate.reading():
            update = self._newest
            if update is None or self._half:
                raise ReplicaNotReadyError(
                    self._half or "the replica has not loaded a marker",
                    hint="call advance() again, which completes the tables"
                    if self._half
                    else "call advance() after the trainer has committed a marker",
                )
            if (unproved := self._refused()) is not None:
                why = refusal(unproved, update.marker)
                raise ReplicaNotReadyError(why.message, hint=why.hint, **why.where)
            commit = update.commit
            yield Served(commit.id, commit.step, commit.time_s, update.is_provisional, self._tensors, self._mixed)

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
        if self._proof is not None and self._proof.proof.replicated:
            held = {f"model.{name}": value for name, value in dense.model.items() if isinstance(value, torch.Tensor)}
            compared = compare_replicated(held, self._proof.proof, self._newest.marker)
            if compared.unproved is not None:
                self._follower.stats.unproved += compared.unproved.count
                error = refusal(compared.unproved, self._newest.marker)
                if not self._accept:
                    raise error
                log.warning("served as it is: %s", error.headline)
        return dense

    # Writing.

    def _apply(self, update: Update) -> None:
        others = self._others(update.schema)
        if self._slices and others is None and self._newest is not None and not self._half:
            self._apply_in_slices(update)
            return
        with self._gate.writing(), torch.no_grad():
            self._half = "an update of this replica was interrupted"
            if others is not None:
                self._tensors = others
                self._planes = {name: Plane(tensor) for name, tensor in others.items()}
                self._schema = update.schema
            self._keep_doubts(update)
            for changed in update.changes():
                self._put_noted(self._held(changed), update)
            self._settle(update, self._compared(update))

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
                self._half, self._mixed = self._half or "an update of this replica was interrupted", False
            raise

    def _keep_doubts(self, update: Update) -> None:
        self._doubts.keep(table for _, table in update.schema.live if table.name in self._planes)

    def _put_noted(self, changed: Changed, update: Update) -> None:
        self._put(changed)
        if update.kind is not UpdateKind.LOAD:  # rows of a load may be older than the proof
            self._doubts.sent(changed, update.marker)

    def _compared(self, update: Update) -> _Compared:
        """Compare the held weights with the proof of an update's marker, and with older ones."""
        proof = proof_of(update) if self._follower.mode == "markers" else None
        older = older_proofs_of(update) if self._follower.mode == "markers" else ()
        return _Compared(
            (proof, self._differing(proof, update.schema)) if proof is not None else None,
            [(each, self._differing(each, update.schema)) for each in older],
        )

    def _settle(self, update: Update, compared: _Compared) -> None:
        """Serve an update that was applied, unless its rows differ from their proof; raises as :meth:`_check`."""
        stats = self._follower.stats
        if update.kind is UpdateKind.LOAD:
            self._doubts.loaded(update.includes)
        found = stats.unproved
        self._check(update, compared.own)
        for proof, differing in compared.older:
            self._loaded(proof, differing)
        stats.doubted = len(self._doubts)
        self._newest = update
        self._half = ""
        doubted = self._doubts.unproved
        if doubted is not None and (update.kind is UpdateKind.LOAD or stats.unproved > found):
            what = "served as they are" if self._accept else "nothing is served"
            log.error("%s: %s", what, refusal(doubted, update.marker).headline)

    def _check(self, update: Update, compared: tuple[WeightProof, Differing] | None) -> None:
        """Judge the comparison of the held weights with the marker's proof.

        Raises:
            ProofMismatchError: they differ, and log and store may have other values: nothing is served, and the next
                update loads all of them.
        """
        stats, self._proof = self._follower.stats, None
        if self._follower.mode != "markers":
            return
        if compared is None:
            stats.uncompared += 1
            return
        proof, differing = compared
        self._proof = proof
        blocks = tuple(block for _, unproved in differing for block in unproved.blocks)
        stats.unproved += len(blocks)
        # If a load has not repaired a block, another load does not either.
        known = all(self._doubts.has(table, unproved.blocks) for table, unproved in differing)
        if not (update.kind is UpdateKind.LOAD or self._accept or known):
            for table, unproved in differing:  # the next load may be of a marker that proves other blocks
                self._doubts.add(table, unproved.blocks)
            stats.doubted = len(self._doubts)
            error = refusal(Unproved(len(blocks), blocks, tuple(table.name for table, _ in differing)), update.marker)
            self._half = error.message
            why = f"rows differ from the proof of marker {update.marker}"
            self._follower.load_anew(why, first=update.marker)
            raise error
        self._doubts.proved(proof, is_load=update.kind is UpdateKind.LOAD)
        for table, unproved in differing:
            self._doubts.add(table, unproved.blocks)
        stats.proofs += 1

    def _loaded(self, proof: WeightProof, differing: Differing) -> None:
        """Judge the comparison of weights that were just loaded with the proof of an older marker."""
        self._doubts.proved(proof, is_load=True)
        for table, unproved in differing:
            self._follower.stats.unproved += len(unproved.blocks)
            self._doubts.add(table, unproved.blocks)

    def _differing(self, proof: WeightProof, schema: Schema) -> Differing:
        """Return the tables whose held blocks differ from a marker's proof."""
        found = [
            (table, self._compare(proof, table).unproved) for _, table in schema.live if table.name in self._planes
        ]
        return [(table, unproved) for table, unproved in found if unproved is not None]

    def _compare(self, proof: WeightProof, table: TableSpec) -> Compared:
        """Compare those blocks of one table that are held whole."""
        first, rows = self.rows_of(table)
        tensor = self._tensors[table.name]

        def read(ids: npt.NDArray[np.int64]) -> Array:
            part = tensor.detach().index_select(0, torch.from_numpy(ids - first).to(tensor.device)).cpu()
            return (part.view(torch.int16) if part.dtype == torch.bfloat16 else part).numpy()

        return proof.compare(table, first, rows, read)

    def _held(self, changed: Changed) -> Changed:
        """Return those of some rows that are held, ready to be copied."""
        first, rows = self.rows_of(changed.table)
        ids, weights = changed.ids, changed.weights
        if rows < changed.table.rows:
            mine = np.flatnonzero((ids >= first) & (ids < first + rows))
            ids, weights = ids[mine], weights[mine]
        return replace(changed, ids=ids, weights=np.ascontiguousarray(weights))

    def _put(self, changed: Changed) -> None:
        plane = self._planes.get(changed.table.name)
        if plane is not None and len(changed.ids):
            plane.put(changed.ids - self.rows_of(changed.table)[0], changed.weights, changed.col0)

    def _others(self, schema: Schema) -> dict[str, torch.Tensor] | None:
        """Return tensors for the first tables, or for those of a changed model; None if the existing ones fit."""
        named = {table.name: table for _, table in schema.live if self._follower.wants(table)}
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
            hint="pass the module before it is quantized, or let FollowedTables make the tensors: omit into",
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
                        entry=key,
                    )
                target.copy_(value)
            elif TorchRecName.parse(key) is None:
                raise SchemaMismatchError(
                    "the marker has no dense state with this name",
                    hint="build the same model as the trainer",
                    entry=key,
                )
