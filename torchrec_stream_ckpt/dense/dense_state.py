"""The dense state of a marker: all state of the job except fused shards, saved by torch's own DCP.

================================  ============================================================
``model.<name>``                  parameters, data-parallel tables included; replicas once
``optim.<key>.<name>.<s>``        tensor ``s`` that a dense optimizer keeps for a parameter
``nested.<key>.<n>``              any other tensor in the state of a dense optimizer
``grad.<name>``                   a gradient that the next optimizer step reads (``gradients.py``);
                                  a sparse one is ``grad_indices.<name>``, ``grad_values.<name>``
``rank<r>.optimizers``            JSON: the rest of that state, as ``optimizer_state.py`` describes
``rank<r>.fused``                 JSON: hyperparameters of the fused kernels, by table
``rank<r>.buffer_kinds``          JSON: shape and dtype of buffers, at the attach and now
``shared.<name>``                 one blob per ``Stateful`` that serves all ranks, of rank 0
``rank<r>.schedule.<name>``       one blob per schedule over groups of fused tables, by names
``shared.replicas``               JSON: ``"rank0"`` if replicas may differ, and all is rank 0's
``rank<r>.<name>``                random state, buffers and per-rank ``Stateful`` of rank r
``collision.<table>.<row0>``      the id map of one table shard (managed collision)
``shared.imported``               exists if the marker was imported from a checkpoint of DCP:
                                  then buffers are with the parameters, dense optimizers all
                                  below ``optim.imported``, and there is nothing else
================================  ============================================================

Older markers have ``shared.optimizers`` instead of the two JSON entries: classes and param groups, as a pickle.
Non-tensor values of an optimizer are below ``optim`` there. DCP's own metadata and the blobs are pickles. COMMIT holds
the SHA-256 of every file, and no file is opened before its digest has been compared.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.dense import optimizer_state, tree
from torchrec_stream_ckpt.dense.data_parallel import check_places
from torchrec_stream_ckpt.dense.dcp import blob, come_together, flat, json_blob, save_together
from torchrec_stream_ckpt.dense.dense_loader import DenseLoader
from torchrec_stream_ckpt.dense.dense_prover import DenseTurns, ProvedEntries, differing, prove
from torchrec_stream_ckpt.dense.extra_state import WRAPPERS, buffers_blob, model_state
from torchrec_stream_ckpt.dense.hyperparameters import fused_values
from torchrec_stream_ckpt.dense.id_maps import PREFIX, read_pieces
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.dense.random_state import random_state
from torchrec_stream_ckpt.dense.replica_check import Held, Scope, hold
from torchrec_stream_ckpt.dense.replicas import CopyMemory, owners
from torchrec_stream_ckpt.dense.saved_dense import REPLICAS
from torchrec_stream_ckpt.dense.schedules import State
from torchrec_stream_ckpt.dense.stateful_objects import blob_of, state_of, stateful_title, title_of
from torchrec_stream_ckpt.errors import CaptureMismatchError, UnsupportedError
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.model import wrapper_parameters, wrapper_states
from torchrec_stream_ckpt.util.types import MarkerId

_WROTE_PAST = (
    "remove dense_copy='lazy' if something writes it through .data or NumPy between a cut and a step; otherwise "
)


@dataclass(frozen=True, slots=True)
class _Taken:
    """The dense state of one rank at a step boundary."""

    parameters: Mapping[str, nn.Parameter]
    alike: Mapping[str, torch.Tensor]
    """Tensors that are equal on all ranks."""
    mine: Mapping[str, torch.Tensor]
    """The part of ``alike`` that this rank saves."""
    apart: dict[str, Any]
    """Values of which each rank holds a part: sharded parameters, id maps."""
    places: Mapping[str, str]
    """Places of the optimizers' state, for messages."""
    blobs: dict[str, torch.Tensor]
    """All other state, as bytes."""
    objects: Mapping[str, Any]
    """Title -> state of each object that is the same on all ranks."""


class DenseState:
    """Saves and loads the dense state of one job.

    Args:
        live: The objects of this rank.
        group: A separate gloo group, never the one that training uses.
        lazy: True if large tensors are copied after the cut (``StreamConfig.dense_copy``).

    Raises:
        UnsupportedError: ``lazy`` is set, and a parameter is on a GPU.
    """

    def __init__(self, live: LiveDense, group: dist.ProcessGroup, *, lazy: bool = False) -> None:
        if lazy:
            _check_on_cpu(live.view())
        self.live = live
        self.loader = DenseLoader(live)
        self._group = group
        self._rank = dist.get_rank()
        self._copies = CopyMemory(lazy=lazy)
        self._lazy = lazy
        self.saver = Worker("stream-ckpt-dense")
        """Thread for DCP's own collectives: if a rank is missing there, that must not delay the vote. There is one
        thread for all generations of the job. With two threads on one group, each would take part in the other's
        collectives."""
        self.saving: Future[Any] | None = None
        """The current save, or the last one."""
        self._bytes: dict[str, torch.Tensor] = {}
        """State that the last :meth:`stage` took as bytes."""
        self._counted: list[tuple[float, ...]] = []
        """The kernels' own state at that time. MARK holds it."""
        self.held = Held()
        """Result of the last :meth:`stage` on this rank for the state that must be equal on all ranks."""
        self._staged: _Taken | None = None
        """State that :meth:`stage` took, until it is proved."""
        self._compared: Mapping[str, int] = {}
        """(``paranoid``, lazy copies) Digests that the copy is compared with before it counts as saved."""

    def watch(self) -> None:
        """Observe optimizer steps, until :meth:`end`. A lazy copy ends before they write."""
        self.live.watch(self._settle if self._lazy else None)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it is called within a compiled step
    def _settle(self) -> None:
        self._copies.late.settle()

    def stage(self, scope: Scope | None = None) -> dict[str, Any]:
        """(training thread) Return a copy of this rank's part of the current dense state. Local: no collectives.

        The copy belongs to this marker until the next call. If it is lazy, it is complete after :meth:`finish_copy`. Of
        the state that is equal on all ranks, a rank copies only the part that it will save. On a GPU the host waits for
        the whole device: buffers and id maps may be written on other streams.

        Args:
            scope: Part of the state that is compared between ranks. If None, all of it.
        """
        taken = self._staged = self._take()
        self.live.buffers.say_passing()
        scope = (scope or Scope()) if dist.get_world_size() > 1 and not self.live.one_replica else None
        frozen = [f"model.{name}" for name, each in taken.parameters.items() if not each.requires_grad]
        self.held = hold(taken.alike, taken.apart, taken.objects, taken.places, frozen, scope)
        staged: dict[str, Any] = BlockingAsyncStager().stage(taken.apart) if taken.apart else {}
        check_places(taken.apart)
        check_places(staged)
        self._bytes, self._counted = taken.blobs, self._counts()
        return {**staged, **self._copies.copy(taken.mine), **taken.blobs}

    def prove(self, turns: DenseTurns, *, compare: bool = False) -> ProvedEntries:
        """(training thread) Return digests of the state that :meth:`stage` just copied, computed from the live tensors.

        Local.

        Args:
            turns: Chooses the entries that this marker proves.
            compare: True if :meth:`save` must compare the copy with them. It always compares a lazy copy.
        """
        assert self._staged is not None
        taken, self._staged = self._staged, None
        proved = prove({**taken.mine, **taken.apart}, taken.blobs, turns, self.held.entries)
        self._compared = proved.digests if compare or self._lazy else {}
        return proved

    def has_changed(self) -> bool:
        """(training thread) Return whether a marker would differ, apart from rows, from the last :meth:`stage`.

        Local. Parts of sharded parameters and id maps are not compared: if this rank holds some, returns True.
        """
        if self._counted != self._counts():
            return True
        taken = self._take()
        same_bytes = self._bytes.keys() == taken.blobs.keys() and all(
            torch.equal(self._bytes[name], value) for name, value in taken.blobs.items()
        )
        return not same_bytes or bool(taken.apart) or not self._copies.holds(taken.mine)

    def _counts(self) -> list[tuple[float, ...]]:
        """Return for each kernel: trained batches, largest count, and its learning rates."""
        scalars = [(kernel.scalars, kernel.lookups.in_flight) for kernel in self.live.kernels]
        return [
            (each.iteration - in_flight, each.max_counter, each.learning_rate, each.next_learning_rate)
            for each, in_flight in scalars
        ]

    def _take(self) -> _Taken:
        """Return the current dense state with the live tensors."""
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()
        fused = fused_values(self.live.kernels)
        view = self.live.checked_view()
        parameters = dict(view.named_parameters())
        model = model_state(view)
        dense = {f"model.{name}": value for name, value in model.items() if name in parameters}
        taken = optimizer_state.take(self.live.optimizers, parameters, wrapper_parameters(self.live.optimizer))
        gradients = self.live.gradients.take(parameters)
        alike, apart = _split({**dense, **taken.tensors, **gradients.tensors})
        world = 1 if self.live.one_replica else dist.get_world_size()
        owner = owners(alike, world, taken.tree["parameters"])
        buffers = {name: value for name, value in model.items() if name not in parameters} | self.live.buffers.tensors()
        wrappers = wrapper_states(self.live.optimizer)
        shared = {name: state_of(name, self.live.shared[name]) for name in self._taken_here()}
        schedules = {name: schedule.state() for name, schedule in self.live.schedules.items()}
        compared = {title_of(name, item): shared[name] for name, item in self.live.compared.items() if name in shared}
        blobs = {
            **self._blobs(view, buffers, shared, wrappers, schedules),
            f"rank{self._rank}.optimizers": json_blob({**taken.tree, "gradients": gradients.tree}),
            f"rank{self._rank}.fused": json_blob(tree.encode(fused, "hyperparameters", tree.no_tensor)),
        }
        return _Taken(
            parameters,
            alike,
            {entry: tensor for entry, tensor in alike.items() if owner[entry] == self._rank},
            {**apart, **flat(PREFIX, read_pieces(self.live.id_maps))},
            {**taken.places, **gradients.places},
            blobs,
            {WRAPPERS: wrappers, **compared, **self._steps_of(schedules)},
        )

    def _steps_of(self, schedules: Mapping[str, State]) -> dict[str, Any]:
        """Return title -> the common part (its step) of each torch schedule, without the values per group."""
        live = {} if self.live.one_replica else self.live.schedules
        return {each.title: schedules[name]["common"] for name, each in live.items() if each.steps_alike}

    def _taken_here(self) -> Mapping[str, Any]:
        """Return shared objects whose state this rank takes, to save it or to compare it."""
        return self.live.shared if self._rank == 0 else self.live.compared

    def _blobs(
        self,
        view: nn.Module,
        buffers: dict[str, Any],
        shared: Mapping[str, Any],
        wrappers: list[Any],
        schedules: Mapping[str, State],
    ) -> dict[str, Any]:
        """Encode state that is not a tensor of the model or of an optimizer."""
        state: dict[str, Any] = {
            f"rank{self._rank}.random": blob(random_state()),
            f"rank{self._rank}.buffers": buffers_blob(view, buffers),
            f"rank{self._rank}.buffer_kinds": json_blob(self.live.buffers.record().as_json()),
        }
        for name, schedule in schedules.items():
            state[f"rank{self._rank}.schedule.{name}"] = blob_of(self.live.schedules[name].state_title, schedule)
        for name, item in self.live.per_rank.items():
            state[f"rank{self._rank}.stateful.{name}"] = blob_of(stateful_title(name, item), state_of(name, item))
        if self._rank == 0:
            state["shared.seed"] = blob(torch.initial_seed())
            state["shared.wrappers"] = blob_of(WRAPPERS, wrappers)
            if self.live.one_replica:
                state[REPLICAS] = json_blob("rank0")
            for name, item in self.live.shared.items():
                state[f"shared.stateful.{name}"] = blob_of(stateful_title(name, item), shared[name])
        return state

    def finish_copy(self) -> str:
        """(commit thread) Complete a lazy copy. Returns why it is not the state of the cut; empty if nothing was found.

        Call it before :meth:`save`, and again before the marker counts: a write that was going on during the copy may
        be counted only then.
        """
        try:
            self._copies.late.finish()
        except Exception as error:  # the other ranks must get it
            return f"dense state was not copied: {type(error).__name__}: {error}"
        if changed := self._copies.late.changed():
            return (
                f"{changed} was written between the cut and the next optimizer step, which dense_copy='lazy' does not "
                "allow; write it before step() or mark(), or remove dense_copy"
            )
        return ""

    def save(
        self, staged: dict[str, Any], path: Path, marker: MarkerId, *, direct: bool = False
    ) -> tuple[DenseFile, ...]:
        """(all ranks, commit thread) Write the result of :meth:`stage`. Collective.

        Args:
            staged: The result.
            path: Directory of the files.
            marker: The marker.
            direct: True to use direct writes.

        Returns:
            The files that this rank wrote, now durable.

        Raises:
            MarkerFailedError: The other ranks have given this marker up.
            CaptureMismatchError: The copy differs from the proof.
        """
        self._staged = None  # left over if the marker was not proved
        come_together(marker, self._group)
        files = save_together(staged, path, self._group, direct=direct)
        if changed := list(differing(staged, self._compared)):
            raise CaptureMismatchError(
                f"the saved copy of {changed[0]} differs from the live tensor at the cut",
                hint=f"{_WROTE_PAST}test this host's memory" if self._lazy else "test this host's memory",
                marker=marker,
                rank=self._rank,
            )
        return files

    def end(self) -> None:
        """End saving: release the thread, the group and the hooks."""
        self._settle()
        self.live.unwatch()
        self.saver.close()
        del self._group


def _check_on_cpu(view: nn.Module) -> None:
    for name, parameter in view.named_parameters():
        if parameter.is_cuda:
            raise UnsupportedError(
                f"dense_copy='lazy' is for dense parameters on the CPU, but {name} is on {parameter.device}",
                hint="remove dense_copy",
            )


def _split(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Return (plain tensors, the rest). Plain tensors are replicas; a DTensor is a different part on each rank."""
    apart = {name: value for name, value in state.items() if isinstance(value, DTensor)}
    return {name: value for name, value in state.items() if name not in apart}, apart
