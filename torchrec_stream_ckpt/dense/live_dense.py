"""The live dense state of one rank: all state of the job except fused shards, as training holds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import starmap

import torch
from torch import nn

from torchrec_stream_ckpt.dense import optimizer_state
from torchrec_stream_ckpt.dense.buffers import LiveBuffers
from torchrec_stream_ckpt.dense.comm_hooks import check_comm_hooks
from torchrec_stream_ckpt.dense.data_parallel import at_rest, check_whole
from torchrec_stream_ckpt.dense.dense_guard import DenseGuard
from torchrec_stream_ckpt.dense.entry_matching import PER_RANK, dense_entry, optimizer_entry
from torchrec_stream_ckpt.dense.extra_state import WRAPPERS, model_state, try_extra_state
from torchrec_stream_ckpt.dense.gradients import Gradients
from torchrec_stream_ckpt.dense.schedule_watch import ScheduleWatch
from torchrec_stream_ckpt.dense.schedules import NamedSchedule
from torchrec_stream_ckpt.dense.stateful_objects import Stateful, check_given, try_blob_of, try_states
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.evolve.model_schema import NO_TENSOR, DenseEntry, DenseOptimizer
from torchrec_stream_ckpt.model import (
    FusedKernel,
    MapShard,
    dense_optimizers,
    dense_view,
    id_maps,
    watch_steps,
    wrapper_states,
)


class LiveDense:
    """The objects that hold the dense state of one rank.

    Args:
        model: The live model.
        optimizer: The optimizer that the job steps: a torch optimizer, or TorchRec's wrappers around some.
        shared: Objects whose state is the same on all ranks (a loader that counts samples, a schedule).
        per_rank: Objects with a separate state on every rank.
        kernels: The fused kernels.
        rank0: Objects whose state on rank 0 serves all ranks, whatever their state on the others.
        one_replica: True if rank 0's replica is saved, and may differ from those of other ranks.

    Raises:
        UnsupportedError: The model or an optimizer holds something that cannot be captured exactly.
        ConfigError: An object cannot be saved as a Stateful.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        shared: Mapping[str, Stateful],
        per_rank: Mapping[str, Stateful],
        kernels: Sequence[FusedKernel],
        rank0: Mapping[str, Stateful] | None = None,
        one_replica: bool = False,
    ) -> None:
        check_given({"stateful": shared, "stateful_rank0": rank0 or {}, "stateful_per_rank": per_rank})
        self.model = model
        self.optimizer = optimizer
        self.optimizers = dense_optimizers(optimizer)
        """The optimizers of the dense parameters, by a name that does not depend on the plan."""
        self.id_maps = id_maps(model)
        schedules = ((name, NamedSchedule.of(name, item)) for name, item in shared.items())
        self.schedules = {name: schedule for name, schedule in schedules if schedule is not None}
        """Shared objects whose state depends on the plan: schedules over groups of fused tables."""
        self.compared = {} if one_replica else {name: shared[name] for name in shared if name not in self.schedules}
        """Shared objects that are the same on all ranks."""
        self.shared = {name: shared[name] for name in shared if name not in self.schedules} | dict(rank0 or {})
        """All objects whose state on rank 0 is saved."""
        self.one_replica = one_replica
        self.per_rank = dict(per_rank)
        self.kernels = kernels
        """Replaced after a reshard, which builds new ones."""
        self._check_hooks()
        for name in shared.keys() & (rank0 or {}).keys():
            raise ConfigError(
                f"'{name}' is in both stateful and stateful_rank0",
                hint="keep it in stateful if all ranks have the same state, otherwise in stateful_rank0",
            )
        if one_replica:
            check_whole(self.view())
        self.buffers = LiveBuffers(model)
        self._guard = DenseGuard(model, optimizer, self.optimizers, self.view())
        self.gradients = Gradients(model, self.optimizers)
        given = (*shared.items(), *(rank0 or {}).items(), *per_rank.items())
        self.schedule_watch = ScheduleWatch(optimizer, given)
        self._before_step: Callable[[], None] | None = None
        self._unwatch: list[Callable[[], None]] = []
        try_states(self.shared, self.compared, self.per_rank)
        self._try_rest()

    def _try_rest(self) -> None:
        """Take the non-tensor state of markers once, except the user's objects.

        Raises:
            UnsupportedError: No marker could hold it. Names it.
        """
        view = self.view()
        try_extra_state(view, model_state(view))
        try_blob_of(WRAPPERS, wrapper_states(self.optimizer))
        for schedule in self.schedules.values():
            try_blob_of(schedule.state_title, schedule.state())

    def watch(self, before_step: Callable[[], None] | None) -> None:
        """Observe optimizer steps, handed over or not, calls that clear gradients, and evictions of raw ids, until
        :meth:`unwatch`.

        Args:
            before_step: Called before each of these steps, on its thread. None if nothing waits for them.
        """
        self._before_step = before_step
        self.gradients.watch()
        self._unwatch = [watch_steps(self), *(each.watch() for each in self.id_maps)]

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """(before each step of an optimizer of this process) Note that the step has begun."""
        if self._before_step is not None:
            self._before_step()
        self.gradients.begins(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """(after each step of an optimizer of this process) Note that the step has ended."""
        self._guard.stepped(optimizer)
        self.schedule_watch.optimizer_stepped()
        self.gradients.stepped(optimizer)

    def unwatch(self) -> None:
        """Remove the hooks of :meth:`watch`."""
        self.gradients.unwatch()
        for remove in self._unwatch:
            remove()
        self._unwatch = []
        self._before_step = None

    def checked_view(self) -> nn.Module:
        """(each cut) Return :meth:`view`, after the checks of the attach.

        Raises:
            UnsupportedError: The dense part has changed so that a marker would not hold all of it. Names the change.
        """
        view = self.view()
        self._check_hooks()
        self._guard.check(view)
        self.schedule_watch.cut()
        return view

    def _check_hooks(self) -> None:
        check_comm_hooks(self.model, (*self.shared.values(), *self.per_rank.values()))

    @property
    def handed_over(self) -> tuple[Stateful, ...]:
        """The user's objects."""
        return (*self.shared.values(), *self.per_rank.values())

    def view(self) -> nn.Module:
        """Return a module of the dense parameters and buffers, by the names that markers give them."""
        at_rest(self.model)
        return dense_view(self.model)

    @property
    def handed(self) -> tuple[str, ...]:
        """Names of the objects that serve all ranks, including schedules."""
        return (*self.shared, *self.schedules)

    @property
    def collisions(self) -> dict[str, MapShard]:
        """Fused tables with an id map of managed collision on this rank, and its rows."""
        return {each.table: each.shard for each in self.id_maps}

    def described(self) -> tuple[tuple[DenseEntry, ...], tuple[DenseOptimizer, ...], tuple[str, ...]]:
        """Return parameters and buffers, dense optimizers, and names of the user's objects, for a :class:`ModelSchema`.

        Buffers are as they were at the attach.
        """
        parameters, rest = self.entries()
        buffers = (each for each in self.buffers.attached.values() if each.dtype != NO_TENSOR)
        return (*parameters, *buffers, *rest), self.optimizers_named, self.stateful_named

    def entries(self) -> tuple[list[DenseEntry], list[DenseEntry]]:
        """Return the parameters, and the rest of ``state_dict()`` without the buffers, such as extra state."""
        view = self.view()
        parameters = dict(view.named_parameters()).keys()
        held = {**self.buffers.attached, **self.buffers.tensors()}.keys()
        found = list(starmap(dense_entry, view.state_dict().items()))
        rest = [each for each in found if each.name not in parameters and each.name not in held]
        return [each for each in found if each.name in parameters], rest

    @property
    def stateful_named(self) -> tuple[str, ...]:
        """Names of the user's objects, as a :class:`ModelSchema` has them."""
        return (*self.handed, *(f"{PER_RANK}{name}" for name in self.per_rank))

    @property
    def optimizers_named(self) -> tuple[DenseOptimizer, ...]:
        """The dense optimizers: their classes, and the names of their parameters."""
        names = names_of(self.view())
        return tuple(
            optimizer_entry(key, type(each).__name__, optimizer_state.named_groups(each, names))
            for key, each in self.optimizers.items()
        )


def names_of(view: nn.Module) -> dict[int, str]:
    """Return the names of the parameters of a view, by identity."""
    return {id(parameter): name for name, parameter in view.named_parameters()}
