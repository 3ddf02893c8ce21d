"""Gradients of dense parameters: their changes, the calls that clear them, and those that belong to one rank alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import compress, repeat
from operator import attrgetter, is_not
from typing import Any, Protocol
from weakref import ref

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.patch import wrap

Remover = Callable[[], None]
_GRADIENT, _WRITES = attrgetter("grad"), attrgetter("_version")
_PLAIN = frozenset((torch.Tensor, nn.Parameter))
"""Kinds of parameters and gradients that these two describe."""


class GradientNote:
    """The gradients of some parameters at one moment: the tensors, and their counts of writes. Reads no values.

    An optimizer takes one at each step and each ``zero_grad()``. So C loops pass over the parameters, apart from those
    of data-parallel tables and FSDP2. No gradient is kept in memory.
    """

    __slots__ = ("_noted",)

    def __init__(self, parameters: Iterable[torch.Tensor] = ()) -> None:
        every = [*parameters]
        plain = _PLAIN.issuperset(map(type, every))
        gradients = [*map(_GRADIENT, every if plain else map(_holder, every))]
        present = [*map(is_not, gradients, repeat(None))]
        held = [*compress(gradients, present)]
        written = map(_WRITES if plain and _PLAIN.issuperset(map(type, held)) else _written, held)
        notes = zip(map(ref, held), written, strict=True)
        self._noted = dict(zip(compress(map(id, every), present), notes, strict=True))

    def __bool__(self) -> bool:
        return bool(self._noted)

    def is_now(self, parameter: torch.Tensor) -> bool:
        """Return whether the parameter still has the gradient that was noted, not written since."""
        gradient = _holder(parameter).grad
        tensor, writes = self._noted.get(id(parameter), (None, 0))
        return tensor is not None and gradient is not None and tensor() is gradient and writes == _written(gradient)


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


class StepObserver(Protocol):
    """Is called before and after each step of any torch optimizer of this process."""

    def begins(self, optimizer: Any) -> None: ...

    def stepped(self, optimizer: Any) -> None: ...


def watch_steps(observer: StepObserver) -> Remover:
    """Call an observer until the returned function removes its hooks. They do not keep it in memory.

    A step that calls the step of its base class is reported twice, one within the other.
    """
    live = ref(observer)

    def before(optimizer: Any, _args: object, _kwargs: object) -> None:
        if (observer := live()) is not None:
            observer.begins(optimizer)

    def after(optimizer: Any, _args: object, _kwargs: object) -> None:
        if (observer := live()) is not None:
            observer.stepped(optimizer)

    handles = register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)

    def remove() -> None:
        for handle in handles:
            handle.remove()

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
