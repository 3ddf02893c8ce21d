"""The dense state of a marker: all of the job that is no fused shard, saved by torch's own DCP.

================================  ============================================================
``model.<name>``                  parameters, data-parallel tables included; replicas once
``optim.<key>.<name>.<s>``        tensor ``s`` that a dense optimizer keeps for a parameter
``nested.<key>.<n>``              any other tensor in the state of a dense optimizer
``rank<r>.optimizers``            JSON: all else of that state, as ``optimizer_state.py`` says
``rank<r>.fused``                 JSON: hyperparameters of the fused kernels, by table
``shared.<name>``                 one blob a ``Stateful`` that serves all ranks, of rank 0
``rank<r>.<name>``                random state, buffers and per-rank ``Stateful`` of rank r
``collision.<table>.<row0>``      the id map of one table shard (managed collision)
``shared.imported``               says that the marker was imported from a checkpoint of DCP:
                                  then buffers are with the parameters, dense optimizers all
                                  below ``optim.imported``, and there is nothing else
================================  ============================================================

Older markers have ``shared.optimizers`` in place of the two JSON entries: classes and param groups, a pickle; what an
optimizer kept beside tensors stands there below ``optim``. DCP's own metadata and the blobs are pickles: COMMIT holds
the SHA-256 of every file, and nothing is opened before it has been compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_stream_ckpt.adapter import (
    FusedKernel,
    check_dense,
    check_wrappers,
    dense_optimizers,
    dense_view,
    id_maps,
    load_wrapper_states,
    wrapper_parameters,
    wrapper_states,
)
from torchrec_stream_ckpt.commit import optimizer_state, tree
from torchrec_stream_ckpt.commit.data_parallel import at_rest, check_fully_sharded, check_replicas
from torchrec_stream_ckpt.commit.dcp import (
    Entries,
    blob,
    come_together,
    empty_blob,
    flat,
    json_blob,
    load_here,
    read_json,
    save_together,
    unblob,
)
from torchrec_stream_ckpt.commit.hyperparameters import fused_values, given, set_fused_values, told
from torchrec_stream_ckpt.commit.id_maps import PREFIX, State, empty_pieces, merge_pieces, read_pieces
from torchrec_stream_ckpt.commit.optimizer_state import OptimizerState, empty_like
from torchrec_stream_ckpt.commit.random_state import random_state, seed_new_rank, set_random_state
from torchrec_stream_ckpt.commit.replicas import CopyMemory, listing, owners
from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError, UnsupportedError
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """What the user hands over: a loader, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


class DenseState:
    """Saves and loads the dense state of one job.

    Args:
        dmp: The live model.
        optimizer: What the job steps: a torch optimizer, or TorchRec's wrappers around some.
        shared: Objects whose state on rank 0 serves all ranks (a loader that counts samples, a schedule).
        per_rank: Objects that have a state of their own on every rank.
        kernels: The fused kernels.
        group: A gloo group of our own: never the one that training uses.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        optimizer: torch.optim.Optimizer | None,
        shared: Mapping[str, Stateful],
        per_rank: Mapping[str, Stateful],
        kernels: Sequence[FusedKernel],
        group: dist.ProcessGroup,
    ) -> None:
        self._dmp = dmp
        self._optimizer = optimizer
        self._optimizers = dense_optimizers(optimizer)
        self._id_maps = id_maps(dmp)
        self._shared = dict(shared)
        self._per_rank = dict(per_rank)
        self.kernels = kernels
        """To be set anew when a reshard has built others."""
        self._group = group
        self._rank = dist.get_rank()
        self._copies = CopyMemory()
        self.saver = Worker("stream-ckpt-dense")
        """For DCP's own collectives: a rank that does not come to them must not hold the vote up. One thread, whatever
        generation the job goes on in: two on one group would take part in each other's."""
        self.saving: Future[Any] | None = None
        """What it does, or did last."""
        self.listing: tuple[str, ...] = ()
        """What the last :meth:`stage` has found on this rank of what all ranks must hold alike."""
        for name, item in {**self._shared, **self._per_rank}.items():
            if not isinstance(item, Stateful):
                raise ConfigError(f"'{name}' ({type(item).__name__}) has no state_dict() and load_state_dict()")
            if "." in name or not name:
                raise ConfigError(f"'{name}' is no name for a Stateful", hint="use letters, digits and '_'")
        check_fully_sharded(dmp)
        check_dense(dmp, self._optimizers)
        check_replicas(dmp, self._view())
        self._given = given(kernels, self._optimizers)

    def stage(self) -> dict[str, Any]:
        """(training thread) This rank's part of the dense state as it is now, copied. Local: no collectives.

        The copy is this marker's until the next call. Of what all ranks hold alike, a rank copies what it will save.
        On a GPU the host waits for the whole device: buffers and id maps may be written on other streams.
        """
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        fused = fused_values(self.kernels)
        view = self._view()
        parameters = dict(view.named_parameters())
        model = view.state_dict()
        dense = {f"model.{name}": value for name, value in model.items() if name in parameters}
        taken = optimizer_state.take(self._optimizers, parameters, wrapper_parameters(self._optimizer))
        alike, apart = _split({**dense, **taken.tensors})
        world = dist.get_world_size()
        frozen = [
            f"model.{name}" for name, parameter in parameters.items() if world > 1 and not parameter.requires_grad
        ]
        self.listing = listing(alike, taken.places, frozen)
        owner = owners(alike, world)
        mine = {entry: tensor for entry, tensor in alike.items() if owner[entry] == self._rank}
        own: dict[str, Any] = {**apart, **flat(PREFIX, read_pieces(self._id_maps))}
        staged: dict[str, Any] = BlockingAsyncStager().stage(own) if own else {}
        buffers = {name: value for name, value in model.items() if name not in parameters}
        return {
            **staged,
            **self._copies.copy(mine),
            **self._blobs(buffers),
            f"rank{self._rank}.optimizers": json_blob(taken.tree),
            f"rank{self._rank}.fused": json_blob(tree.encode(fused, "hyperparameters", tree.no_tensor)),
        }

    def _blobs(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """What is no tensor of the model or of an optimizer, as bytes of their own."""
        state: dict[str, Any] = {
            f"rank{self._rank}.random": blob(random_state()),
            f"rank{self._rank}.buffers": blob(buffers),
        }
        for name, item in self._per_rank.items():
            state[f"rank{self._rank}.stateful.{name}"] = _blob_of(name, item)
        if self._rank == 0:
            state["shared.seed"] = blob(torch.initial_seed())
            state["shared.wrappers"] = blob(wrapper_states(self._optimizer))
            for name, item in self._shared.items():
                state[f"shared.stateful.{name}"] = _blob_of(name, item)
        return state

    def save(self, staged: dict[str, Any], path: Path, marker: MarkerId) -> None:
        """(all ranks, commit thread) Write what :meth:`stage` returned; returns when it is durable. Collective.

        Raises:
            MarkerFailedError: the other ranks have given this marker up.
        """
        come_together(marker, self._group)
        save_together(staged, path, self._group)

    def end(self) -> None:
        """Nothing is saved any more: let go of the thread and the group."""
        self.saver.close()
        del self._group

    def check(self, path: Path, world: int) -> None:
        """Refuse a marker that does not fit this job, before anything is written. Local.

        Compared are id maps, the parameters of the model by name, shape and dtype, and the names of the user's
        objects. What optimizers keep is compared when it is read, by :meth:`load`.

        Args:
            path: Of its dense files.
            world: How many ranks wrote it.

        Raises:
            SchemaMismatchError: names the entry, or the table and the rows there and here.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        reader = FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        self._read_id_maps(reader)
        if "shared.imported" in entries:
            _check_entries(self._imported(), entries)
            return
        self._check_world(world)
        _check_stateful(entries, "shared", self._shared)
        _check_stateful(entries, f"rank{self._source(world)}", self._per_rank)
        _check_entries(self._model(self._view()), entries)

    def _check_world(self, world: int) -> None:
        if self._per_rank and world != dist.get_world_size():
            raise ConfigError(
                f"{', '.join(self._per_rank)}: saved for each of {world} ranks, this job has {dist.get_world_size()}",
                hint="declare it shared, if the state of rank 0 can serve all ranks",
            )

    def _source(self, world: int) -> int:
        """The rank of the marker whose part this rank takes."""
        return self._rank if self._rank < world else 0

    @staticmethod
    def _model(view: nn.Module) -> dict[str, Any]:
        """The parameters, by their entries."""
        parameters = dict(view.named_parameters())
        return {f"model.{name}": value for name, value in view.state_dict().items() if name in parameters}

    def _imported(self) -> dict[str, Any]:
        """What an imported marker has of the model."""
        return {f"model.{name}": value for name, value in self._view().state_dict().items()}

    def load(self, path: Path, world: int) -> Callable[[], None]:
        """Load model and optimizers of a marker that ``world`` ranks wrote; its digests were compared. Local.

        Random state and buffers come back on ranks that existed then; a new rank takes the buffers of rank 0
        and random state derived from the job's seed and its rank.

        Returns:
            Loads the rest, to be called once: the user's objects, whose code may change anything, then random state.

        Raises:
            SchemaMismatchError: the dense model or an optimizer differs; names the entry and both values.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        reader = FileSystemReader(path)
        entries = reader.read_metadata().state_dict_metadata
        if "shared.imported" in entries:
            self._load_imported(reader, entries)
            return lambda: None
        self._check_world(world)
        source = self._source(world)
        blobs = self._load_blobs(reader, entries, source)
        view = self._view()
        parameters, model = dict(view.named_parameters()), self._model(view)
        _check_entries(model, entries)
        check_wrappers(self._optimizer, blobs["wrappers"])
        saved, fused = self._read_optimizers(reader, entries, source, parameters)
        optimizer_state.check(self._optimizers, saved, _names(view))
        load_here(model, reader)
        for id_map, state in zip(self._id_maps, self._read_id_maps(reader), strict=True):
            id_map.write(state)
        view.load_state_dict({**_below("model", model), **blobs["buffers"]})
        for key, optimizer in self._optimizers.items():
            optimizer_state.put_back(optimizer, parameters, saved[key])
        load_wrapper_states(self._optimizer, blobs["wrappers"])
        set_fused_values(self.kernels, fused)
        if different := told(self._given, given(self.kernels, self._optimizers)):
            log.warning("hyperparameters are those of the marker, not those that the code gives: %s", different)
        return lambda: self._load_rest(blobs, known=self._rank < world)

    def _read_optimizers(
        self, reader: FileSystemReader, entries: Entries, source: int, parameters: Mapping[str, nn.Parameter]
    ) -> tuple[dict[str, OptimizerState], list[Any]]:
        """The dense optimizers in the marker, and the fused hyperparameters of all ranks that wrote it."""
        name = f"rank{source}.optimizers"
        if name not in entries:
            return _read_older(reader, entries, parameters), []
        hyper = [entry for entry in entries if entry.startswith("rank") and entry.endswith(".fused")]
        blobs = load_here({entry: empty_blob(entries, entry) for entry in (name, *hyper)}, reader)
        saved = read_json(blobs[name])
        tensors = load_here(optimizer_state.find_tensors(saved, entries, parameters), reader)
        fused = [tree.decode(read_json(blobs[entry]), tensors.__getitem__) for entry in hyper]
        return optimizer_state.read(saved, tensors, parameters), fused

    def _load_rest(self, blobs: dict[str, Any], *, known: bool) -> None:
        """The user's objects, then random state, of which their code may have drawn."""
        for name, item in self._shared.items():
            item.load_state_dict(blobs["shared"][name])
        for name, item in self._per_rank.items():
            item.load_state_dict(blobs["per_rank"][name])
        if known:
            set_random_state(blobs["random"], blobs["seed"], self._rank)
        else:
            seed_new_rank(blobs["seed"], self._rank)

    def _load_imported(self, reader: FileSystemReader, entries: Mapping[str, Any]) -> None:
        """A marker that ``stream-ckpt import`` has made: what it does not hold stays as the job has made it."""
        view = self._view()
        parameters, names = dict(view.named_parameters()), _names(view)
        model = self._imported()
        _check_entries(model, entries)
        imported = _older_states(reader, entries, parameters).get("imported", {})
        view.load_state_dict(_below("model", load_here(model, reader)))
        for optimizer in self._optimizers.values():
            groups = optimizer_state.named_groups(optimizer, names)
            mine = {name for group in groups for name in group["params"]}
            state = {name: values for name, values in imported.items() if name in mine}
            optimizer_state.put_back(optimizer, parameters, OptimizerState(type(optimizer).__name__, groups, state))
        log.warning(
            "the marker was imported: random state, stateful objects, param groups, learning rates and the kernels' "
            "iterations stay as this job has made them"
        )

    def _view(self) -> nn.Module:
        at_rest(self._dmp)
        return dense_view(self._dmp)

    def _read_id_maps(self, reader: FileSystemReader) -> list[State]:
        if not self._id_maps:
            return []
        pieces = empty_pieces(reader.read_metadata().state_dict_metadata, self._id_maps)
        load_here(flat(PREFIX, pieces), reader)
        return merge_pieces(self._id_maps, pieces)

    def _load_blobs(self, reader: FileSystemReader, entries: Mapping[str, Any], source: int) -> dict[str, Any]:
        _check_stateful(entries, "shared", self._shared)
        _check_stateful(entries, f"rank{source}", self._per_rank)
        wanted = {"seed": "shared.seed", "random": f"rank{source}.random", "buffers": f"rank{source}.buffers"}
        if "shared.wrappers" in entries:
            wanted["wrappers"] = "shared.wrappers"
        shared = {name: f"shared.stateful.{name}" for name in self._shared}
        own = {name: f"rank{source}.stateful.{name}" for name in self._per_rank}
        names = (*wanted.values(), *shared.values(), *own.values())
        loaded = load_here({name: empty_blob(entries, name) for name in names}, reader)
        return {
            "wrappers": [],
            **{name: unblob(loaded[entry]) for name, entry in wanted.items()},
            "shared": {name: unblob(loaded[entry]) for name, entry in shared.items()},
            "per_rank": {name: unblob(loaded[entry]) for name, entry in own.items()},
        }


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(plain tensors, the rest): plain ones are replicas, a DTensor is a part of its own on each rank."""
    apart = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    return {name: value for name, value in state.items() if name not in apart}, apart


def _names(view: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in view.named_parameters()}


def _below(prefix: str, state: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(f"{prefix}."): value for name, value in state.items()}


def _check_stateful(entries: Mapping[str, Any], owner: str, here: Mapping[str, Stateful]) -> None:
    """The job must hand over the very objects whose state the marker holds."""
    prefix = f"{owner}.stateful."
    saved = {entry.removeprefix(prefix) for entry in entries if entry.startswith(prefix)}
    for name in sorted(saved ^ here.keys()):
        side = "the marker" if name in saved else "this job"
        raise SchemaMismatchError(
            f"only {side} has the state of '{name}'",
            hint="hand over the same stateful objects as the job that wrote the marker",
        )


def _read_older(
    reader: FileSystemReader, entries: Entries, parameters: Mapping[str, nn.Parameter]
) -> dict[str, OptimizerState]:
    """The dense optimizers in a marker that has no JSON of them."""
    name = "shared.optimizers"
    loaded = load_here({name: empty_blob(entries, name)}, reader)
    states = _older_states(reader, entries, parameters)
    return {
        key: OptimizerState(saved["class"], saved["param_groups"], states.get(key, {}))
        for key, saved in unblob(loaded[name]).items()
    }


def _older_states(
    reader: FileSystemReader, entries: Entries, parameters: Mapping[str, nn.Parameter]
) -> dict[str, dict[str, dict[str, Any]]]:
    """All below ``optim``: {optimizer: {parameter: {state: value}}}."""
    room: dict[str, Any] = {}
    for entry, saved in entries.items():
        if entry.startswith("optim."):
            name, _, _ = entry.split(".", 2)[2].rpartition(".")
            if name not in parameters:
                raise SchemaMismatchError(f"dense state: only the marker has '{entry}'")
            tensor = isinstance(saved, TensorStorageMetadata)
            room[entry] = empty_like(saved, parameters[name]) if tensor else None  # a plain value replaces None
    states: dict[str, dict[str, dict[str, Any]]] = {}
    for entry, value in load_here(room, reader).items():
        _, key, path = entry.split(".", 2)
        name, _, state = path.rpartition(".")
        states.setdefault(key, {}).setdefault(name, {})[state] = value
    return states


_NAMED = 8
"""Entries that an error lists at most."""


def _check_entries(wanted: Mapping[str, Any], entries: Entries) -> None:
    """Compare names, shapes and dtypes of the model before anything is written, for an error with both sides."""
    saved_names = {key for key in entries if key.startswith("model.")}
    for side, names in (("the marker", saved_names - wanted.keys()), ("this job", wanted.keys() - saved_names)):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            said = ", ".join(f"'{name}'" for name in sorted(names)[:_NAMED])
            raise SchemaMismatchError(f"dense state: only {side} has {said}{more}")
    for name, value in wanted.items():
        saved = entries[name]
        if isinstance(value, torch.Tensor) and isinstance(saved, TensorStorageMetadata):
            here, there = (tuple(value.shape), value.dtype), (tuple(saved.size), saved.properties.dtype)
            if here != there:
                raise SchemaMismatchError(f"dense state '{name}': the marker has {there}, this job has {here}")


def _blob_of(name: str, item: Stateful) -> torch.Tensor:
    state = item.state_dict()
    try:
        return blob(state)
    except Exception as error:  # whatever the objects in it raise
        raise UnsupportedError(
            f"the state_dict() of the Stateful {name!r} ({type(item).__name__}) cannot be pickled: {error}",
            hint="keep numbers, text, tensors, lists and dicts in it",
        ) from error
