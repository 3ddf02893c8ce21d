"""Gradients of dense parameters: their changes, the calls that clear them, and those that belong to one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakMethod, ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.patch import wrap

Remover = Callable[[], None]


@dataclass(frozen=True, slots=True)
class GradientVersion:
    """One gradient at one moment: the tensor, and its count of writes. Reads no values."""

    tensor: ReferenceType[torch.Tensor]
    version: int

    @classmethod
    def of(cls, parameter: torch.Tensor) -> GradientVersion | None:
        """Record the gradient of a parameter, without keeping it in memory. Returns None if it has none."""
        gradient = _holder(parameter).grad
        return cls(ref(gradient), _written(gradient)) if gradient is not None else None

    def is_now(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter still has that gradient, not written since."""
        gradient = _holder(parameter).grad
        return gradient is not None and self.tensor() is gradient and self.version == _written(gradient)


def _written(gradient: Any) -> int:
    """Return how often a gradient was written in place. FSDP2 writes to the part that this rank holds."""
    if not hasattr(gradient, "to_local"):
        return int(gradient._version)
    with torch.no_grad():
        return int(gradient.to_local()._version)


def _holder(parameter: torch.Tensor) -> torch.Tensor:
    """Return the tensor that has the gradient: data-parallel tables are slices of one parameter."""
    if not isinstance(parameter, TableBatchedEmbeddingSlice):
        return parameter
    versions.TABLE_SLICE.require(parameter)
    held: torch.Tensor = parameter._original_tensor
    return held


def set_gradient(parameter: torch.Tensor, value: torch.Tensor | None) -> None:
    """Set the gradient of a parameter, in place if it has a similar one: DDP may refer to the tensor."""
    live = parameter.grad
    if value is None:
        parameter.grad = None
    elif live is not None and live.layout is value.layout is torch.strided and live.dtype == value.dtype:
        live.detach().copy_(value)
    else:
        holder = _holder(parameter)
        if holder is not parameter:
            holder.grad = torch.zeros_like(holder)
        parameter.grad = value.to(parameter.device)


def watch_steps(begins: Callable[[Any], None], ends: Callable[[Any], None]) -> Remover:
    """Call ``begins(optimizer)`` before each step of any torch optimizer of this process, and ``ends`` after it.

    A step that calls the step of its base class is reported twice, one within the other. Both callbacks are bound
    methods. The hooks do not keep their objects in memory.

    Returns:
        A function that removes both hooks.
    """
    methods = WeakMethod(begins), WeakMethod(ends)

    def call(method: WeakMethod[Callable[[Any], None]], optimizer: Any) -> None:
        if (live := method()) is not None:
            live(optimizer)

    before = register_optimizer_step_pre_hook(lambda optimizer, _args, _kwargs: call(methods[0], optimizer))
    after = register_optimizer_step_post_hook(lambda optimizer, _args, _kwargs: call(methods[1], optimizer))

    def remove() -> None:
        before.remove()
        after.remove()

    return remove


def watch_zero_grad(owner: Any, cleared: Callable[[], None]) -> Remover:
    """Call ``cleared()`` after each ``owner.zero_grad()`` of an optimizer or module. Returns the remover."""

    def around(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        cleared()
        return result

    return wrap(owner, "zero_grad", around)


def watch_no_sync(wrapper: DistributedDataParallel, entered: Callable[[], None]) -> Remover:
    """Call ``entered()`` before each ``wrapper.no_sync()``. Returns the remover."""

    def around(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        entered()
        return real(*args, **kwargs)

    return wrap(wrapper, "no_sync", around)


def unreduced(modules: Iterable[Any]) -> Iterator[nn.Parameter]:
    """Yield the parameters of FSDP2 modules whose gradient this rank has accumulated and not reduced over the ranks."""
    for module in modules:
        versions.FSDP_MODULE.require(module)
        for group in _groups(module._get_fsdp_state()):
            versions.FSDP_GROUP.require(group)
            partly_reduced = group._partial_reduce_output is not None
            for each in group.fsdp_params:
                whole = getattr(each, "_unsharded_param", None)
                if (
                    partly_reduced
                    or each.unsharded_accumulated_grad is not None
                    or (whole is not None and whole.grad is not None)
                ):
                    yield each.sharded_param


def _groups(state: Any) -> list[Any]:
    """Return the parameter groups of one FSDP2 module: several since torch 2.14, at most one before."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    versions.FSDP_STATE.require(state)
    return [state._fsdp_param_group] if state._fsdp_param_group is not None else []
