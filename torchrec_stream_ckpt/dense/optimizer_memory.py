"""Memory that tensors in an optimizer's state share with attributes of the optimizer."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.errors import UnsupportedError

_CONTAINERS = (list, tuple, deque, set, frozenset)
_CAPTURED = ("state", "param_groups")


def check_attributes(optimizers: Mapping[str, torch.optim.Optimizer], names: Mapping[int, str]) -> None:
    """(each cut) Reject state that shares memory with an attribute of its optimizer. Local, reads no values.

    A restored state tensor has separate memory: writes of the optimizer through its attribute would not reach it.

    Args:
        optimizers: The dense optimizers.
        names: Names of the parameters, by identity.

    Raises:
        UnsupportedError: Names the state and the attribute.
    """
    for key, optimizer in optimizers.items():
        if attributes := _attributes(optimizer):
            for holder, values in optimizer.state.items():
                for place, value in values.items() if isinstance(values, dict) else (("", values),):
                    shared = next((attributes[each] for each in _storages(value) if each in attributes), None)
                    if shared is not None:
                        _refuse(
                            f"{type(optimizer).__name__} ({key})", names.get(id(holder), str(holder)), place, shared
                        )


def _refuse(title: str, name: str, place: Any, attribute: str) -> None:
    raise UnsupportedError(
        f"the {title}: state {place!r} of {name} shares memory with the optimizer's attribute {attribute!r}, which a "
        "restore would not preserve",
        hint="keep each state in a separate tensor, or all of it in the attribute and return it from state_dict()",
    )


def _attributes(optimizer: torch.optim.Optimizer) -> dict[int, str]:
    """Return storage -> attribute that holds a tensor with it, itself or in a container. Parameters do not count."""
    parameters: set[int] | None = None
    found = {}
    for name, value in vars(optimizer).items():
        if name in _CAPTURED:
            continue
        for each in (value, *_children(value)):
            if isinstance(each, torch.Tensor):
                if parameters is None:
                    parameters = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
                if id(each) not in parameters:
                    found.update(dict.fromkeys(_storages(each), name))
    return found


def _storages(value: Any) -> Iterator[int]:
    """Yield addresses of the storages of all tensors in a value. Empty tensors have none."""
    for tensor in _tensors_in(value):
        if tensor.layout is torch.strided and not tensor.is_meta:
            address = tensor.untyped_storage().data_ptr()
            if address:
                yield address


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield all tensors in nested values. For a sharded tensor, yield its local part."""
    if isinstance(value, torch.Tensor):  # most states are a plain tensor
        yield value.to_local() if isinstance(value, DTensor) else value
        return
    seen, todo = set(), [value]
    while todo:
        each = todo.pop()
        if isinstance(each, torch.Tensor):
            yield each.to_local() if isinstance(each, DTensor) else each
        elif id(each) not in seen:
            seen.add(id(each))  # a state may contain itself, which is rejected by name elsewhere
            todo += _children(each)


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, _CONTAINERS) else ()
