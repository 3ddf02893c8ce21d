"""Repeat the checks of the attach at every cut if the dense part has changed.

Modules, parameters and optimizers are compared by identity. If some were added, removed, replaced or unfrozen, all
checks run again: either a marker holds them exactly, or they are rejected by name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from torchrec_stream_ckpt.dense import optimizer_state
from torchrec_stream_ckpt.dense.data_parallel import check_derived_places, check_fully_sharded, check_replicas
from torchrec_stream_ckpt.dense.optimizer_memory import check_attributes
from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import (
    DensePrint,
    check_buffers,
    check_dense,
    check_writable,
    combined_parts,
    has_own_state_dict,
    optimizer_parts,
    wrapper_parameters,
    wrapper_states,
)


class DenseGuard:
    """The checked dense part of one rank.

    Args:
        model: The live model.
        optimizer: The optimizer that the job has handed over.
        optimizers: The dense optimizers in it, by name.
        view: The dense part of the model.

    Raises:
        UnsupportedError: The model or an optimizer holds something that cannot be captured exactly.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        optimizers: Mapping[str, torch.optim.Optimizer],
        view: nn.Module,
    ) -> None:
        self._model, self._optimizer, self._optimizers = model, optimizer, dict(optimizers)
        self._parts = optimizer_parts(optimizer)
        self._known = frozenset(map(id, self._parts))
        self._others: WeakSet[torch.optim.Optimizer] = WeakSet()
        """Optimizers that have stepped and were not handed over. Deleted optimizers have no state to lose."""
        parameters = dict(view.named_parameters())
        check_buffers(model)
        self._check_all(view, since_attach=False)
        check_writable(model, parameters)
        self._print = DensePrint.of(model, parameters, self._optimizers.values())
        check_attributes(self._optimizers, {id(parameter): name for name, parameter in parameters.items()})
        optimizer_state.take(self._optimizers, parameters, wrapper_parameters(optimizer))
        wrapper_states(optimizer)

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """Note that an optimizer of this process has made a step, whether it was handed over or not.

        The parts of a CombinedOptimizer are noted: after ``DMP.reshard``, TorchRec needs a new one around the existing
        dense optimizers. If those of one that was handed over have changed, :meth:`check` rejects that.
        """
        if id(optimizer) not in self._known:
            self._others.update(each for each in combined_parts(optimizer) if id(each) not in self._known)

    def check(self, view: nn.Module) -> None:
        """(each cut) Compare the dense part with the checked one. Local, reads no values.

        Raises:
            UnsupportedError: It has changed so that a marker would not hold all of it. Names the change.
        """
        self._check_parts()
        check_buffers(self._model)
        parameters = dict(view.named_parameters())
        now = DensePrint.of(self._model, parameters, self._optimizers.values())
        if not now.is_same(self._print):
            self._check_all(view, since_attach=True)
            self._print = now
        names = {id(parameter): name for name, parameter in parameters.items()}
        check_attributes(self._optimizers, names)
        self._check_others(names)

    def _check_all(self, view: nn.Module, *, since_attach: bool) -> None:
        check_fully_sharded(self._model)
        check_dense(self._model, self._optimizers)
        check_replicas(self._model, view, since_attach=since_attach)
        check_derived_places(view)

    def _check_parts(self) -> None:
        parts = optimizer_parts(self._optimizer)
        if len(parts) == len(self._parts) and all(one is other for one, other in zip(parts, self._parts, strict=True)):
            return
        there, here = (", ".join(type(part).__name__ for part in each) for each in (self._parts, parts))
        raise UnsupportedError(
            f"the optimizers passed to StreamCheckpointer changed after the attach, from {there} to {here}",
            hint="call mark() and close() before you change them, then create a StreamCheckpointer with the new ones",
        )

    def _check_others(self, names: Mapping[int, str]) -> None:
        for other in list(self._others):
            held = (id(parameter) for group in other.param_groups for parameter in group["params"])
            name = next((names[key] for key in held if key in names), None)
            if name is not None and not self._is_saved_with(other):
                raise UnsupportedError(
                    f"{type(other).__name__} steps {name}, but was not passed to StreamCheckpointer",
                    hint="pass a CombinedOptimizer of all optimizers to StreamCheckpointer; delete this one if it "
                    "is no longer needed",
                )

    def _is_saved_with(self, other: Any) -> bool:
        """Return whether a dense optimizer shares the state of ``other``, or wraps it and saves it with its own."""
        return any(
            other.state is each.state
            or (has_own_state_dict(each) and any(value is other for value in vars(each).values()))
            for each in self._optimizers.values()
        )
