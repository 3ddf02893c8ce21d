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
from dataclasses import dataclass
from itertools import starmap
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.adapter import (
    CollisionMap,
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
from torchrec_stream_ckpt.commit.dcp import blob, come_together, flat, json_blob, load_here, save_together
from torchrec_stream_ckpt.commit.hyperparameters import fused_values, given, set_fused_values, told
from torchrec_stream_ckpt.commit.id_maps import PREFIX, State, empty_pieces, merge_pieces, read_pieces
from torchrec_stream_ckpt.commit.match import (
    PER_RANK,
    Match,
    check_entries,
    check_names,
    check_stateful,
    dense_entry,
    optimizer_entry,
)
from torchrec_stream_ckpt.commit.optimizer_state import OptimizerState
from torchrec_stream_ckpt.commit.random_state import random_state, seed_new_rank, set_random_state
from torchrec_stream_ckpt.commit.replicas import CopyMemory, listing, owners
from torchrec_stream_ckpt.commit.saved_dense import SavedDense
from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError
from torchrec_stream_ckpt.evolve.model_schema import DenseEntry, DenseOptimizer
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.types import MarkerId

log = logging.getLogger(__name__)


@runtime_checkable
class Stateful(Protocol):
    """What the user hands over: a loader, a scheduler, a scaler."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> Any: ...


@dataclass(frozen=True, slots=True)
class _Taken:
    """The dense state of one rank at a step boundary."""

    parameters: Mapping[str, nn.Parameter]
    alike: Mapping[str, torch.Tensor]
    """What all ranks hold alike."""
    mine: Mapping[str, torch.Tensor]
    """Of that, what this rank saves."""
    apart: dict[str, Any]
    """What each rank holds a part of: sharded parameters, id maps."""
    places: Mapping[str, str]
    """Where the state of optimizers stands, for messages."""
    blobs: dict[str, torch.Tensor]
    """All that is no such tensor, as bytes."""


class DenseState:
    """Saves and loads the dense state of one job.

    Args:
        model: The live model.
        optimizer: What the job steps: a torch optimizer, or TorchRec's wrappers around some.
        shared: Objects whose state on rank 0 serves all ranks (a loader that counts samples, a schedule).
        per_rank: Objects that have a state of their own on every rank.
        kernels: The fused kernels.
        group: A gloo group of our own: never the one that training uses.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        shared: Mapping[str, Stateful],
        per_rank: Mapping[str, Stateful],
        kernels: Sequence[FusedKernel],
        group: dist.ProcessGroup,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._optimizers = dense_optimizers(optimizer)
        self._id_maps = id_maps(model)
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
        self._bytes: dict[str, torch.Tensor] = {}
        """What the last :meth:`stage` has taken as bytes."""
        self._counted: list[tuple[float, ...]] = []
        """What the kernels' own state was then; MARK holds it."""
        self.listing: tuple[str, ...] = ()
        """What the last :meth:`stage` has found on this rank of what all ranks must hold alike."""
        for name, item in {**self._shared, **self._per_rank}.items():
            if not isinstance(item, Stateful):
                raise ConfigError(f"'{name}' ({type(item).__name__}) has no state_dict() and load_state_dict()")
            if "." in name or not name:
                raise ConfigError(f"'{name}' is no name for a Stateful", hint="use letters, digits and '_'")
        check_fully_sharded(model)
        check_dense(model, self._optimizers)
        check_replicas(model, self._view())
        self._given = given(kernels, self._optimizers)

    def stage(self) -> dict[str, Any]:
        """(training thread) This rank's part of the dense state as it is now, copied. Local: no collectives.

        The copy is this marker's until the next call. Of what all ranks hold alike, a rank copies what it will save.
        On a GPU the host waits for the whole device: buffers and id maps may be written on other streams.
        """
        taken = self._take()
        world = dist.get_world_size()
        parameters = taken.parameters
        frozen = [
            f"model.{name}" for name, parameter in parameters.items() if world > 1 and not parameter.requires_grad
        ]
        self.listing = listing(taken.alike, taken.places, frozen)
        staged: dict[str, Any] = BlockingAsyncStager().stage(taken.apart) if taken.apart else {}
        self._bytes, self._counted = taken.blobs, self._counts()
        return {**staged, **self._copies.copy(taken.mine), **taken.blobs}

    def has_changed(self) -> bool:
        """(training thread) Whether a marker would hold something else now, rows apart, than at the last :meth:`stage`.

        Local. Parts of sharded parameters and id maps are not compared: where this rank holds some, the answer is yes.
        """
        if self._counted != self._counts():
            return True
        taken = self._take()
        same_bytes = self._bytes.keys() == taken.blobs.keys() and all(
            torch.equal(self._bytes[name], value) for name, value in taken.blobs.items()
        )
        return not same_bytes or bool(taken.apart) or not self._copies.holds(taken.mine)

    def _counts(self) -> list[tuple[float, ...]]:
        """Of each kernel: trained batches, largest count, and its learning rates."""
        scalars = [(kernel.scalars, kernel.lookups.in_flight) for kernel in self.kernels]
        return [
            (each.iteration - in_flight, each.max_counter, each.learning_rate, each.next_learning_rate)
            for each, in_flight in scalars
        ]

    def _take(self) -> _Taken:
        """The dense state as it is now; its tensors are the live ones."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        fused = fused_values(self.kernels)
        view = self._view()
        parameters = dict(view.named_parameters())
        model = view.state_dict()
        dense = {f"model.{name}": value for name, value in model.items() if name in parameters}
        taken = optimizer_state.take(self._optimizers, parameters, wrapper_parameters(self._optimizer))
        alike, apart = _split({**dense, **taken.tensors})
        owner = owners(alike, dist.get_world_size())
        buffers = {name: value for name, value in model.items() if name not in parameters}
        blobs = {
            **self._blobs(buffers),
            f"rank{self._rank}.optimizers": json_blob(taken.tree),
            f"rank{self._rank}.fused": json_blob(tree.encode(fused, "hyperparameters", tree.no_tensor)),
        }
        return _Taken(
            parameters,
            alike,
            {entry: tensor for entry, tensor in alike.items() if owner[entry] == self._rank},
            {**apart, **flat(PREFIX, read_pieces(self._id_maps))},
            taken.places,
            blobs,
        )

    def _blobs(self, buffers: dict[str, Any]) -> dict[str, Any]:
        """Encode what is not a tensor of the model or of an optimizer."""
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

    def described(self) -> tuple[tuple[DenseEntry, ...], tuple[DenseOptimizer, ...], tuple[str, ...]]:
        """Parameters and buffers, dense optimizers, and names of the user's objects, for a :class:`ModelSchema`."""
        stateful = (*self._shared, *(f"{PER_RANK}{name}" for name in self._per_rank))
        return tuple(starmap(dense_entry, self._view().state_dict().items())), self.optimizers_named, stateful

    @property
    def optimizers_named(self) -> tuple[DenseOptimizer, ...]:
        """The dense optimizers: their classes, and the names of their parameters."""
        names = _names(self._view())
        return tuple(
            optimizer_entry(key, type(each).__name__, optimizer_state.named_groups(each, names))
            for key, each in self._optimizers.items()
        )

    def saved(self, path: Path, world: int) -> SavedDense:
        """The dense state of a marker; its digests were compared. Local."""
        return SavedDense(path, world, self._rank)

    @property
    def collisions(self) -> frozenset[str]:
        """Fused tables with an id map of managed collision on this rank."""
        return frozenset(each.table for each in self._id_maps)

    def check(self, saved: SavedDense, match: Match | None = None) -> None:
        """Refuse a marker that does not fit this job, before anything is written. Local.

        Compared are id maps, the parameters of the model by name, shape and dtype, and the names of the user's
        objects. What optimizers keep is compared when it is read, by :meth:`load`.

        Args:
            saved: What it holds, for this rank.
            match: What of it a changed model takes; None: all, by the same names.

        Raises:
            SchemaMismatchError: names the entry, or the table and the rows there and here.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        self._read_id_maps(saved, match)
        self._check_world(saved, match)
        if match is None:
            self._check_whole(saved)

    def _check_whole(self, saved: SavedDense) -> None:
        if saved.imported:
            check_entries(self._imported(), saved.entries)
            return
        check_stateful(saved.stateful("shared"), self._shared)
        check_stateful(saved.stateful("per_rank"), self._per_rank)
        check_entries(_model(self._view()), saved.entries)

    def _check_world(self, saved: SavedDense, match: Match | None) -> None:
        per_rank = self._per_rank if match is None else match.per_rank
        if per_rank and not saved.imported and saved.world != dist.get_world_size():
            raise ConfigError(
                f"{', '.join(per_rank)}: saved for each of {saved.world} ranks, this job has {dist.get_world_size()}",
                hint="declare it shared, if the state of rank 0 can serve all ranks",
            )

    def _imported(self) -> dict[str, Any]:
        """Return what an imported marker has of the model."""
        return {f"model.{name}": value for name, value in self._view().state_dict().items()}

    def load(self, saved: SavedDense, match: Match | None = None) -> Callable[[], None]:
        """Load model and optimizers of a marker. Local.

        Random state and buffers come back on ranks that existed then; a new rank takes the buffers of rank 0
        and random state derived from the job's seed and its rank. With ``match``, what it does not name stays as it is.

        Returns:
            Loads the rest, to be called once: the user's objects, whose code may change anything, then random state.

        Raises:
            SchemaMismatchError: the dense model or an optimizer differs; names the entry and both values.
            ConfigError: a per-rank object cannot take the changed number of ranks.
        """
        if match is None:
            self._check_whole(saved)
        if saved.imported:
            self._load_imported(saved, match)
            return lambda: None
        self._check_world(saved, match)
        whole, match = match is None, match or self._all()
        blobs = saved.blobs(match.shared, match.per_rank)
        view = self._view()
        names, parameters = _names(view), dict(view.named_parameters())
        check_wrappers(self._optimizer, blobs["wrappers"])
        states, fused = saved.optimizers(match.there(parameters), whole=whole)
        if whole:
            check_names(view.state_dict().keys() - parameters.keys(), saved.buffers.keys())
            optimizer_state.check(self._optimizers, states, names)
        else:
            states = optimizer_state.matched(self._optimizers, states, match.states, match.groups, names)
        self._load_model(saved, view, match, buffers=saved.buffers)
        for key, optimizer in self._optimizers.items():
            fresh = parameters.keys() - match.states[key].keys()
            optimizer_state.put_back(optimizer, parameters, states[key], fresh)
        load_wrapper_states(self._optimizer, blobs["wrappers"])
        set_fused_values(self.kernels, [match.by_table(values) for values in fused])
        if different := told(self._given, given(self.kernels, self._optimizers)):
            log.warning("hyperparameters are those of the marker, not those that the code gives: %s", different)
        return lambda: self._load_rest(blobs, known=self._rank < saved.world)

    def _all(self) -> Match:
        """All of a marker, by the same names."""
        names = {name: name for name in self._view().state_dict()}
        states = {key: {name: (key, name) for name in names} for key in self._optimizers}
        return Match(names, states, self._shared, self._per_rank)

    def _load_model(self, saved: SavedDense, view: nn.Module, match: Match, buffers: Mapping[str, Any]) -> None:
        """Parameters, id maps and buffers; what is not matched is copied onto itself."""
        live = view.state_dict()
        of_files = {name for name in match.entries if match.entries[name] not in buffers}
        room = {f"model.{match.entries[name]}": live[name] for name in of_files}
        load_here(room, saved.reader)
        maps, states = self._read_id_maps(saved, match)
        for id_map, state in zip(maps, states, strict=True):
            id_map.write(state)
        found = {name: room[f"model.{match.entries[name]}"] for name in of_files}
        view.load_state_dict({**live, **found, **match.here(buffers)})

    def _load_rest(self, blobs: dict[str, Any], *, known: bool) -> None:
        """The user's objects, then random state, of which their code may have drawn."""
        for name, state in blobs["shared"].items():
            self._shared[name].load_state_dict(state)
        for name, state in blobs["per_rank"].items():
            self._per_rank[name].load_state_dict(state)
        if known:
            set_random_state(blobs["random"], blobs["seed"], self._rank)
        else:
            seed_new_rank(blobs["seed"], self._rank)

    def _load_imported(self, saved: SavedDense, match: Match | None) -> None:
        """A marker that ``stream-ckpt import`` has made: what it does not hold stays as the job has made it."""
        whole, match = match is None, match or self._all()
        view = self._view()
        parameters, names = dict(view.named_parameters()), _names(view)
        imported = saved.older_states(match.there(parameters), whole=whole).get("imported", {})
        self._load_model(saved, view, match, buffers={})
        for key, optimizer in self._optimizers.items():
            groups = optimizer_state.named_groups(optimizer, names)
            kept = match.states.get(key, {})
            mine = {name for group in groups for name in group["params"]}
            state = {name: imported[there] for name, (_, there) in kept.items() if name in mine and there in imported}
            there = OptimizerState(type(optimizer).__name__, groups, state)
            optimizer_state.put_back(optimizer, parameters, there, parameters.keys() - state.keys())
        log.warning(
            "the marker was imported: random state, stateful objects, param groups, learning rates and the kernels' "
            "iterations stay as this job has made them"
        )

    def _view(self) -> nn.Module:
        at_rest(self._model)
        return dense_view(self._model)

    def _read_id_maps(self, saved: SavedDense, match: Match | None) -> tuple[list[CollisionMap], list[State]]:
        """The live maps that come from a marker, and their state there."""
        come = {each.table: each.table for each in self._id_maps}
        if match is not None and match.id_maps is not None:
            come = {table: match.id_maps[table] for table in come if table in match.id_maps}
        maps = [each for each in self._id_maps if each.table in come]
        if not maps:
            return [], []
        pieces = empty_pieces(saved.entries, maps, come)
        load_here(flat(PREFIX, pieces), saved.reader)
        return maps, merge_pieces(maps, pieces, come)


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(plain tensors, the rest): plain ones are replicas, a DTensor is a part of its own on each rank."""
    apart = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    return {name: value for name, value in state.items() if name not in apart}, apart


def _model(view: nn.Module) -> dict[str, Any]:
    """The parameters, by their entries."""
    parameters = dict(view.named_parameters())
    return {f"model.{name}": value for name, value in view.state_dict().items() if name in parameters}


def _names(view: nn.Module) -> dict[int, str]:
    return {id(parameter): name for name, parameter in view.named_parameters()}


def _blob_of(name: str, item: Stateful) -> torch.Tensor:
    state = item.state_dict()
    try:
        return blob(state)
    except Exception as error:  # whatever the objects in it raise
        raise UnsupportedError(
            f"the state_dict() of the Stateful {name!r} ({type(item).__name__}) cannot be pickled: {error}",
            hint="keep numbers, text, tensors, lists and dicts in it",
        ) from error
