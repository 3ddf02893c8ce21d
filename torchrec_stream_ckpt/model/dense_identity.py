"""Check whether the dense part of a model and its optimizers still consist of the objects that were checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper

from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.wrappers import walk

Things = tuple[ReferenceType[Any], ...]


@dataclass(frozen=True, slots=True)
class DensePrint:
    """The objects of a dense part, by identity. Keeps none of them in memory and reads no values."""

    modules: Things
    """Every module of the model, including wrappers such as DDP."""
    parameters: Things
    names: tuple[str, ...]
    trained: tuple[tuple[bool, bool], ...]
    """For each parameter: ``requires_grad``, and whether an optimizer is applied to it in the backward."""
    stepped: Things
    """Every parameter of every dense optimizer, in order."""
    groups: tuple[int, ...]
    """Number of parameters of each param group."""

    @classmethod
    def of(
        cls, model: nn.Module, parameters: Mapping[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]
    ) -> DensePrint:
        """Record a live model, its dense parameters by name, and their optimizers."""
        groups = [group["params"] for optimizer in optimizers for group in optimizer.param_groups]
        return cls(
            tuple(map(ref, model.modules())),
            tuple(map(ref, parameters.values())),
            tuple(parameters),
            tuple((each.requires_grad, hasattr(each, "_in_backward_optimizers")) for each in parameters.values()),
            tuple(ref(each) for group in groups for each in group),
            tuple(map(len, groups)),
        )

    def is_same(self, other: DensePrint) -> bool:
        """Return whether the other record has the same objects, trained in the same way."""
        return (
            (self.names, self.trained, self.groups) == (other.names, other.trained, other.groups)
            and _are(self.modules, other.modules)
            and _are(self.parameters, other.parameters)
            and _are(self.stepped, other.stepped)
        )


def _are(these: Things, those: Things) -> bool:
    """Compare by identity: ``==`` of two weak references compares tensors by value."""
    return len(these) == len(those) and all(
        one() is other() is not None for one, other in zip(these, those, strict=True)
    )


def optimizer_parts(optimizer: torch.optim.Optimizer | None) -> list[Any]:
    """Return an optimizer and all optimizers that it wraps or combines, outermost first."""
    return list(walk(optimizer)) if optimizer is not None else []


def combined_parts(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return :func:`optimizer_parts` without wrappers that have no state of their own."""
    without = (CombinedOptimizer, KeyedOptimizerWrapper)
    return [part for part in optimizer_parts(optimizer) if type(part) not in without]


def reduced_parameters(wrapper: DistributedDataParallel, *, exactly: bool) -> set[int]:
    """Return ids of the parameters whose gradients DDP averages: those that were trained when it was built.

    Args:
        wrapper: The live wrapper.
        exactly: True to ask its reducer, which allocates memory for all gradients meanwhile. Otherwise the reducer is
            asked only if parameters of the wrapped module are frozen, or their number is not the reducer's.
    """
    ignored = wrapper.parameters_to_ignore
    mine = {id(each): each for name, each in wrapper.module.named_parameters() if name not in ignored}
    trained = {key for key, each in mine.items() if each.requires_grad}
    versions.DDP.require(wrapper)
    number = wrapper._get_ddp_logging_data().get("num_parameter_tensors")  # type: ignore[no-untyped-call]
    if not exactly and len(trained) == len(mine) == number:
        return trained
    versions.REDUCER.require(wrapper.reducer)
    buckets = wrapper.reducer._get_zeros_like_grad_buckets()
    return {id(parameter) for bucket in buckets for parameter in bucket.parameters()}
