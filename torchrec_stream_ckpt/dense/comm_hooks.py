"""Communication hooks of DDP: a hook with state is rejected by name unless that state is handed over.

A hook keeps state in its state argument, in the object whose method it is, in its closure, in default arguments, in
arguments of a ``partial``, or in attributes of the function. Functions among these are examined as well. State in a
global variable cannot be detected.
"""

from __future__ import annotations

import dis
import enum
import logging
from collections.abc import Iterable, Iterator
from functools import cache, partial
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import comm_hooks

_VALUES = (type(None), bool, int, float, complex, str, bytes, enum.Enum, torch.dtype, torch.device)
"""Kinds that no hook can write to."""
_OF_THE_JOB = (type, ModuleType, dist.ProcessGroup, DeviceMesh, dist.ReduceOp, dist.ReduceOp.RedOpType, logging.Logger)
"""Kinds that belong to the job and not to a hook's state."""
_AROUND = (torch.no_grad, torch.enable_grad, torch.set_grad_enabled, torch.inference_mode, torch.autocast)
"""Kinds of decorators that keep nothing from one call to the next."""
_PLAIN = (*_VALUES, *_OF_THE_JOB, *_AROUND)
_OF_DDP = ("_AllreduceUpcastHookState",)
"""States that DDP itself registers for mixed precision: streams and settings."""


def check_comm_hooks(model: nn.Module, handed: Iterable[object]) -> None:
    """Reject hooks with a state that is not in any marker.

    Args:
        model: The live model.
        handed: The user's stateful objects. The state of a hook is one of them, or an attribute of one.

    Raises:
        UnsupportedError: Names the hook and its state.
    """
    objects = (value for item in handed for value in (item, *getattr(item, "__dict__", {}).values()))
    held = {id(value) for value in objects if not isinstance(value, _PLAIN)}
    for path, name, hook, argument in comm_hooks(model):
        for state, where in (*_states(argument, model, held), *_states(hook, model, held)):
            if id(state) in held or type(state).__name__ in _OF_DDP:
                continue
            kind = type(state).__name__
            raise UnsupportedError(
                f"the DDP communication hook {name} keeps a {kind}{where and f' ({where})'}, which markers do not save",
                hint="register a hook without a state (allreduce_hook, fp16_compress_hook, bf16_compress_hook), or "
                f"pass stateful_per_rank={{'hook': ...}}, an object with state_dict() and load_state_dict() that holds "
                f"the {kind} as an attribute",
                module=path,
            )


def _states(root: Any, model: nn.Module, held: set[int]) -> Iterator[tuple[Any, str]]:
    """Yield objects that a hook, or its state argument, keeps from one step to the next, and where if it is deeper."""
    seen: set[int] = set()
    todo = [(root, "")]
    while todo:
        value, where = todo.pop()
        if id(value) in seen or id(value) in held or (where and _is_part_of(model, value)):
            continue
        seen.add(id(value))
        if isinstance(value, FunctionType):
            variables = _variables(value)
            yield from (
                (variables.get(each), f"closure variable {each!r}") for each in sorted(_rebound(value.__code__))
            )
        inside = _inside(value, where)
        if inside is None:
            yield value, where
        else:
            todo += inside


def _inside(value: Any, where: str) -> list[tuple[Any, str]] | None:
    """Return the objects that ``value`` refers to, and where. Returns None if the object itself is a state."""
    if isinstance(value, _PLAIN):
        return []
    if isinstance(value, tuple | frozenset):
        return [(each, where) for each in value]
    if isinstance(value, MethodType):
        return [(value.__self__, where), (value.__func__, where)]
    if isinstance(value, BuiltinFunctionType):
        return [(value.__self__, where)]
    if isinstance(value, partial):
        found = [(value.func, where), *((each, f"argument {n} of a partial") for n, each in enumerate(value.args))]
        found += [(each, f"argument {key!r} of a partial") for key, each in value.keywords.items()]
        return found + [(each, f"attribute {key!r} of a partial") for key, each in vars(value).items()]
    if isinstance(value, FunctionType):
        name = value.__name__
        found = [(each, f"closure variable {key!r}") for key, each in _variables(value).items()]
        found += [(each, f"a default argument of {name}") for each in value.__defaults__ or ()]
        found += [(each, f"default argument {key!r} of {name}") for key, each in (value.__kwdefaults__ or {}).items()]
        return found + [(each, f"attribute {key!r} of {name}") for key, each in vars(value).items()]
    return None


def _is_part_of(model: nn.Module, value: Any) -> bool:
    """Return whether a marker holds ``value`` with the model."""
    parts: Iterable[Any] = ()
    if isinstance(value, nn.Module):
        parts = model.modules()
    elif isinstance(value, nn.Parameter):
        parts = model.parameters()
    return any(value is part for part in parts)


def _variables(function: FunctionType) -> dict[str, Any]:
    """Return the variables of the closure that have a value."""
    found = {}
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # not yet assigned
            continue
    return found


@cache
def _rebound(code: CodeType) -> frozenset[str]:
    """Return the variables of the closure that a function, or one within it, assigns: ``nonlocal``."""
    stored = {each.argval for each in dis.get_instructions(code) if each.opname in ("STORE_DEREF", "DELETE_DEREF")}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            stored |= _rebound(inner)
    return frozenset(stored.intersection(code.co_freevars))
