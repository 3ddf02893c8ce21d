"""Gradients of dense parameters between two optimizer steps: which of them a marker holds, and with which values.

==================================================  ================================================================
a gradient at the cut                               in the marker
==================================================  ================================================================
``None``                                            absent: it is restored as ``None``
zeroed by ``zero_grad(set_to_none=False)`` since    its name: it is restored as zeros
consumed by its step, and the loop has cleared it   its name: it is restored as zeros, which the loop clears before it
between all steps so far                            reads them
any other                                           its values: ``grad.<name>``
accumulated on this rank alone                      the marker is rejected
==================================================  ================================================================

A loop clears gradients if ``zero_grad()`` of the optimizer or of the model ran between two of its steps. No values are
read for the decision: a gradient is compared by identity and by its count of writes in place. A loop that clears
gradients in another way pays for a copy in each marker.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import GradientNote, unreduced, watch_no_sync, watch_zero_grad
from torchrec_stream_ckpt.util.types import grouped

log = logging.getLogger(__name__)

GRADIENT, INDICES, VALUES = "grad", "grad_indices", "grad_values"
"""Prefixes of the entries of gradients: whole ones, and the two tensors of sparse ones."""
GRADIENTS = (f"{GRADIENT}.", f"{INDICES}.", f"{VALUES}.")
_NOTHING, _PARAMETERS = GradientNote(), itemgetter("params")
_BOUNDARY = "mark at the accumulation boundary: after the optimizer's step, and before the next backward"


@dataclass(frozen=True, slots=True)
class LiveGradients:
    """The gradients that a marker holds. Nothing is copied."""

    tensors: dict[str, torch.Tensor]
    """Tensors by entry. Equal on all ranks, except parts of a sharded parameter."""
    places: dict[str, str]
    """Entry -> its description for people."""
    tree: dict[str, Any]
    """JSON. ``zeros``: names of gradients restored as zeros. ``sparse``: properties of sparse ones not in their two
    tensors."""


@dataclass(slots=True)
class _Steps:
    """The steps of one dense optimizer."""

    optimizer: torch.optim.Optimizer
    begun: bool = False
    """True if a step is running, possibly that of a derived class around that of its base class."""
    cleared: bool = False
    """True if its gradients were cleared since its last step."""
    clears: bool = False
    """True if they were cleared between two of its steps."""
    kept: bool = False
    """True if they were not cleared between two of its steps: it has read their values again."""
    assumed: bool = False
    """True if a marker since its last step assumes that their values are not read again."""
    consumed: GradientNote = _NOTHING
    """The gradients as the last step has left them."""
    zeroed: GradientNote = _NOTHING
    """The gradients that the last ``zero_grad()`` has set to zeros."""

    def parameters(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(map(_PARAMETERS, self.optimizer.param_groups))

    def end(self) -> None:
        """Note the gradients that a step has consumed."""
        if self.begun and self.consumed:
            self.clears |= self.cleared
            self.kept |= not self.cleared
            if self.assumed and self.kept:
                log.warning(
                    "%s used a gradient again without zero_grad(), unlike in its earlier steps: the marker before this "
                    "step has zeros for it. Later markers save it",
                    type(self.optimizer).__name__,
                )
        self.begun = self.cleared = self.assumed = False
        self.consumed = GradientNote(self.parameters())

    def clear(self) -> None:
        """Note that the gradients are None, or zeros."""
        self.cleared, self.zeroed = True, GradientNote(self.parameters())


class Gradients:
    """The gradients of the dense parameters of one rank.

    Args:
        model: The live model.
        optimizers: Its dense optimizers, by name.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._model = model
        self._steps = {id(optimizer): _Steps(optimizer) for optimizer in optimizers.values()}
        self._zeros = _NOTHING
        """The gradients that the last restore set to zeros."""
        self._apart: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()
        """DDP wrappers whose ``no_sync()`` was entered, and which are not known to have averaged gradients since."""
        self._removers: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Start to observe calls that clear gradients, and ``no_sync()``, until :meth:`unwatch`."""
        for steps in self._steps.values():
            if _is_torchs_own(steps.optimizer, torch.optim.Optimizer):
                self._removers.append(watch_zero_grad(steps.optimizer, steps.clear))
        if _is_torchs_own(self._model, nn.Module):
            self._removers.append(watch_zero_grad(self._model, self._clear))
        for module in self._model.modules():
            if isinstance(module, DistributedDataParallel):
                self._removers.append(watch_no_sync(module, partial(self._apart.__setitem__, module, True)))

    def unwatch(self) -> None:
        """Remove all hooks from the optimizers and the model."""
        while self._removers:
            self._removers.pop()()

    def begins(self, optimizer: torch.optim.Optimizer) -> None:
        """(before each step of an optimizer of this process) Note that the step has begun."""
        if (steps := self._steps.get(id(optimizer))) is not None:
            steps.begun = True

    def stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """(after each step of an optimizer of this process) Note that the step has ended."""
        if (steps := self._steps.get(id(optimizer))) is not None:
            steps.end()

    def take(self, parameters: Mapping[str, nn.Parameter]) -> LiveGradients:
        """(each cut) Return the gradients that a marker holds, in their current state. Local.

        Raises:
            UnsupportedError: A gradient is this rank's own, or of a kind that is not captured. Names the parameter.
        """
        self._check_reduced(parameters)
        apart = self._unsynchronized()
        holders = self._holders()
        taken = LiveGradients({}, {}, {"zeros": [], "sparse": {}})
        for name, parameter in parameters.items():
            if (gradient := parameter.grad) is None:
                continue
            if self._is_unread(parameter, gradient, holders.get(id(parameter), [])):
                _add_zeros(taken, name, gradient)
                continue
            if id(parameter) in apart:
                raise UnsupportedError(
                    f"the gradient of {name} was accumulated on this rank alone, under no_sync() of DDP", hint=_BOUNDARY
                )
            _add_values(taken, name, gradient)
        return taken

    def loaded(self, zeros: Iterable[nn.Parameter]) -> None:
        """Note that all gradients were restored: those of ``zeros`` are zeros, the others were consumed by no step."""
        for steps in self._steps.values():
            steps.consumed, steps.zeroed, steps.cleared, steps.assumed = _NOTHING, _NOTHING, False, False
        self._zeros = GradientNote(zeros)

    def _clear(self) -> None:
        """Note that the gradients of all optimizers are None, or zeros."""
        for steps in self._steps.values():
            steps.clear()

    def _holders(self) -> dict[int, list[_Steps]]:
        """Return the optimizers of each parameter."""
        return grouped((id(each), steps) for steps in self._steps.values() for each in steps.parameters())

    def _is_unread(self, parameter: nn.Parameter, gradient: torch.Tensor, holders: list[_Steps]) -> bool:
        """Return whether the values of a gradient are zeros, or will be cleared before they are read."""
        if gradient.dtype != parameter.dtype:
            return False
        if any(note.is_now(parameter) for note in (self._zeros, *(steps.zeroed for steps in holders))):
            return True
        if any(steps.kept or not steps.clears or not steps.consumed.is_now(parameter) for steps in holders):
            return False
        for steps in holders:
            steps.assumed = True
        return bool(holders)

    def _check_reduced(self, parameters: Mapping[str, nn.Parameter]) -> None:
        modules = [module for module in self._model.modules() if isinstance(module, FSDPModule)]
        own = {id(parameter) for parameter in unreduced(modules)} if modules else set()
        for name, parameter in parameters.items():
            if id(parameter) in own:
                raise UnsupportedError(
                    f"the gradient of {name} was accumulated on this rank alone: FSDP2 has not reduced it",
                    hint=_BOUNDARY,
                )

    def _unsynchronized(self) -> set[int]:
        """Return the parameters whose gradients DDP has not averaged since ``no_sync()``."""
        if dist.get_world_size() == 1:
            return set()
        found: set[int] = set()
        for wrapper in list(self._apart):
            if wrapper.require_forward_param_sync:  # its last forward with gradients was not under no_sync()
                del self._apart[wrapper]
            else:
                found |= set(map(id, wrapper.parameters()))
        return found


def _is_torchs_own(owner: Any, base: Any) -> bool:
    """Return whether ``owner.zero_grad()`` clears the same gradients as torch's own."""
    return type(owner).zero_grad is base.zero_grad and "zero_grad" not in vars(owner)


def _add_zeros(taken: LiveGradients, name: str, gradient: torch.Tensor) -> None:
    if gradient.layout is torch.sparse_coo:
        taken.tree["sparse"][name] = {"dim": gradient.sparse_dim(), "values": False, "coalesced": True}
    else:
        taken.tree["zeros"].append(name)


def _add_values(taken: LiveGradients, name: str, gradient: torch.Tensor) -> None:
    gradient = gradient.detach()
    plain = type(gradient) is torch.Tensor and not gradient.is_quantized and not gradient.is_meta
    if isinstance(gradient, DTensor):
        parts: dict[str, torch.Tensor] = {
            GRADIENT: gradient.clone()
        }  # a gradient that FSDP2 created cannot be copied by DCP's stager
    elif plain and gradient.layout is torch.strided:
        parts = {GRADIENT: gradient}
    elif plain and gradient.layout is torch.sparse_coo:
        said = {"dim": gradient.sparse_dim(), "values": True, "coalesced": gradient.is_coalesced()}
        taken.tree["sparse"][name] = said
        parts = {INDICES: gradient._indices(), VALUES: gradient._values()}
    else:
        kind = f"{type(gradient).__name__}, {gradient.layout}, {gradient.dtype}, on {gradient.device}"
        raise UnsupportedError(f"the gradient of {name} is a tensor of an unsupported kind ({kind})", hint=_BOUNDARY)
    for part, tensor in parts.items():
        taken.tensors[f"{part}.{name}"] = tensor
        taken.places[f"{part}.{name}"] = f"the gradient of {name}"
