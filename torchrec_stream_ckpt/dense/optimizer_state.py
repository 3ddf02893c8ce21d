"""The state of the dense optimizers: taken unchanged, restored in place.

A saved optimizer consists of its param groups, all of ``optimizer.state`` (under parameters and under other keys), and,
if its class overrides ``state_dict()``, the result of that. Tensors are separate entries. The rest is JSON
(``tree.py``) of each rank, because ranks may differ in it: LBFGS keeps the loss of its rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt.dense.data_parallel import check_places
from torchrec_stream_ckpt.dense.dcp import Entries, read_json
from torchrec_stream_ckpt.dense.tree import decode, encode
from torchrec_stream_ckpt.errors import SchemaMismatchError, UnsupportedError
from torchrec_stream_ckpt.format.entry_digests import NESTED
from torchrec_stream_ckpt.model import has_own_state_dict, named_states

Optimizers = Mapping[str, torch.optim.Optimizer]
"""Optimizers by a name that does not depend on the plan."""


@dataclass(frozen=True, slots=True)
class LiveState:
    """The current state of all dense optimizers of this rank. Nothing is copied."""

    tensors: dict[str, torch.Tensor]
    """Tensors by entry. Equal on all ranks, except parts of a sharded parameter."""
    places: dict[str, str]
    """Entry -> place of its tensor, for people."""
    tree: dict[str, Any]
    """JSON: the rest, with the entries of the tensors."""


@dataclass(slots=True)
class OptimizerState:
    """The state of one dense optimizer in a marker."""

    kind: str
    """Name of its class."""
    groups: list[dict[str, Any]]
    """Its param groups. ``params`` are names."""
    state: dict[str, Any]
    """State by parameter."""
    other: dict[Any, Any] = field(default_factory=dict)
    """Values in ``optimizer.state`` under keys that are not parameters."""
    own: Any = None
    """Result of an overridden ``state_dict()``. None if its class has none."""


class _Tensors:
    """Entries for the tensors of the optimizers: one for each tensor, however many places it has."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.parameters: dict[str, str] = {}
        """Entry -> the parameter whose state it is."""
        self.places: dict[str, str] = {}
        self._parameters = parameters
        self._entries: dict[int, str] = {}
        """Entries by identity of the tensor: ``tensors`` keeps them alive."""

    def keep(self, tensor: torch.Tensor, place: str, key: str, parameter: str = "", state: str = "") -> str:
        """Return the entry of ``tensor``. ``state`` is set if the tensor is right below a parameter, under a name."""
        if id(tensor) not in self._entries:
            self._check(tensor, place, parameter)
            entry = f"optim.{key}.{parameter}.{state}" if state else f"{NESTED}.{key}.{len(self.tensors)}"
            self._entries[id(tensor)] = entry
            self.tensors[entry] = tensor
            if not state:
                self.places[entry] = place
            if parameter:
                self.parameters[entry] = parameter
        return self._entries[id(tensor)]

    def _check(self, tensor: torch.Tensor, place: str, parameter: str) -> None:
        live = self._parameters.get(parameter)
        plain = type(tensor) in (torch.Tensor, nn.Parameter)
        if isinstance(live, DTensor):
            like = isinstance(tensor, DTensor) and tensor.shape == live.shape
            if not like and not (plain and tensor.dim() == 0):
                raise UnsupportedError(
                    f"{place} is not captured: {parameter} is sharded, but the layout of this tensor is unknown",
                    hint="use DDP with this optimizer, or an optimizer whose states are sharded like their parameters",
                )
        elif not plain or tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
            kind = f"{type(tensor).__name__}, {tensor.layout}, {tensor.dtype}, on {tensor.device}"
            raise UnsupportedError(
                f"{place} is a tensor of an unsupported kind ({kind})",
                hint="keep only plain dense tensors in the optimizer's state",
            )


def take(
    optimizers: Optimizers, parameters: Mapping[str, nn.Parameter], apart: Collection[torch.Tensor] = ()
) -> LiveState:
    """Return the current state of the dense optimizers.

    Args:
        optimizers: All optimizers of this rank.
        parameters: The dense parameters of the model.
        apart: Parameters that are not the model's, whose state is saved elsewhere.

    Raises:
        UnsupportedError: Something in it cannot be saved. Names the place.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    tensors = _Tensors(parameters)
    ours = {id(parameter) for parameter in apart}
    trees = {key: _tree(key, optimizer, names, ours, tensors) for key, optimizer in optimizers.items()}
    return LiveState(tensors.tensors, tensors.places, {"optimizers": trees, "parameters": tensors.parameters})


def named_tensors(optimizers: Optimizers, parameters: Mapping[str, nn.Parameter]) -> dict[str, torch.Tensor]:
    """Return live tensors that are right below a parameter, by their entries.

    Args:
        optimizers, parameters: As in :func:`take`.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    return {
        f"optim.{key}.{names[id(holder)]}.{state}": tensor
        for key, optimizer in optimizers.items()
        for holder, values in optimizer.state.items()
        if id(holder) in names
        for state, tensor in named_states(values).items()
    }


def _tree(
    key: str, optimizer: torch.optim.Optimizer, names: Mapping[int, str], apart: set[int], tensors: _Tensors
) -> dict[str, Any]:
    title = f"the {type(optimizer).__name__} ({key})"

    def keep(tensor: torch.Tensor, place: str) -> str:
        return tensors.keep(tensor, place, key)

    state: list[list[Any]] = []
    other: dict[Any, Any] = {}
    for holder, values in optimizer.state.items():
        if not isinstance(holder, torch.Tensor):
            other[holder] = values
        elif id(holder) in names:
            name = names[id(holder)]
            state.append([name, _below_parameter(values, f"{title}: state of {name}", key, name, tensors)])
        elif id(holder) not in apart:
            raise UnsupportedError(
                f"{title} keeps state for a tensor of shape {tuple(holder.shape)} that is not a parameter of the model",
                hint="build it from in_backward_optimizer_filter(model.named_parameters())",
            )
    return {
        "class": type(optimizer).__name__,
        "param_groups": encode(named_groups(optimizer, names), f"{title}: param_groups", keep),
        "state": state,
        "other": encode(other, f"{title}: state", keep),
        "own": encode(_own_state(optimizer, title), f"{title}: state_dict()", keep),
    }


def named_groups(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the param groups of ``optimizer`` with names instead of parameters, without those of id maps.

    TorchRec's hash ZCH keeps raw ids in a parameter, which has no gradient.
    """
    return [
        {**group, "params": [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]}
        for group in optimizer.param_groups
    ]


def _below_parameter(values: Any, place: str, key: str, name: str, tensors: _Tensors) -> Any:
    """Return the tree of one parameter's state."""
    for state, value in named_states(values).items():
        tensors.keep(value, f"{place}[{state!r}]", key, name, state)
    return encode(values, place, lambda tensor, where: tensors.keep(tensor, where, key, name))


def _own_state(optimizer: torch.optim.Optimizer, title: str) -> Any:
    if not has_own_state_dict(optimizer):
        return None
    try:
        return optimizer.state_dict()
    except Exception as error:
        raise UnsupportedError(
            f"{title}: its state_dict() fails: {type(error).__name__}: {error}",
            hint="use an optimizer whose state_dict() works on each rank alone",
        ) from error


def find_tensors(
    tree: Mapping[str, Any], entries: Entries, parameters: Mapping[str, nn.Parameter], *, whole: bool
) -> dict[str, torch.Tensor]:
    """Return empty tensors for the tensors of a tree, by entry.

    Args:
        tree: Tree of the marker.
        entries: Entries of the marker.
        parameters: Parameters of this job, by their names in the marker.
        whole: True if this job must have all parameters of the tree.

    Raises:
        SchemaMismatchError: It lacks a parameter, or the marker lacks an entry.
    """
    room = {}
    for entry in sorted(_mentioned(tree["optimizers"])):
        name = tree["parameters"].get(entry, "")
        if whole and name and name not in parameters:
            raise SchemaMismatchError(f"'{entry}' is in the marker's dense state but not in this job")
        saved = entries.get(entry)
        if not isinstance(saved, TensorStorageMetadata):
            raise SchemaMismatchError(f"'{entry}' is missing from the marker")
        room[entry] = empty_like(saved, parameters.get(name))
    return room


def missing_tensors(tree: Mapping[str, Any], entries: Entries) -> list[str]:
    """Return the tensors of a tree that the marker does not hold."""
    there = (name for name, saved in entries.items() if isinstance(saved, TensorStorageMetadata))
    return sorted(_mentioned(tree["optimizers"]).difference(there))


def _mentioned(tree: Any) -> set[str]:
    """Return the entries of all tensors in a tree."""
    if isinstance(tree, dict) and tree.keys() == {"tensor"} and isinstance(tree["tensor"], str):
        return {tree["tensor"]}
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ()
    return {entry for child in children for entry in _mentioned(child)}


def empty_like(saved: TensorStorageMetadata, parameter: nn.Parameter | None) -> torch.Tensor:
    """Return an empty tensor for one of the marker, sharded as ``parameter`` if that is sharded.

    Raises:
        UnsupportedError: Torch places this rank's part where another rank has its own.
    """
    dtype = saved.properties.dtype
    if parameter is not None and isinstance(parameter.data, DTensor) and saved.size == parameter.size():
        room = torch.empty_like(parameter.data, dtype=dtype)
        check_places({"a tensor of an optimizer": room})
        return room
    return torch.empty(saved.size, dtype=dtype, device="cpu")


def read(
    tree: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]
) -> dict[str, OptimizerState]:
    """Return the optimizers of a tree. Nested tensors are moved to the device of their parameter."""
    placed = dict(tensors)
    for entry, name in tree["parameters"].items():
        if entry.startswith(f"{NESTED}.") and name in parameters:
            placed[entry] = placed[entry].to(parameters[name].device)
    tensor = placed.__getitem__
    return {
        key: OptimizerState(
            saved["class"],
            decode(saved["param_groups"], tensor),
            {name: decode(values, tensor) for name, values in saved["state"]},
            decode(saved["other"], tensor),
            decode(saved["own"], tensor),
        )
        for key, saved in tree["optimizers"].items()
    }


def read_saved(entries: Mapping[str, torch.Tensor], name: str) -> dict[str, OptimizerState]:
    """Return the optimizers of the tree in an entry of the dense state, on the CPU."""
    return read(read_json(entries[name], name), entries, {})


def outline(tree: Mapping[str, Any]) -> dict[str, OptimizerState]:
    """Return the optimizers of a tree, with an empty tensor instead of each of theirs."""
    return read(tree, dict.fromkeys(_mentioned(tree["optimizers"]), torch.empty(0)), {})


def check(optimizers: Optimizers, saved: Mapping[str, OptimizerState], names: Mapping[int, str]) -> None:
    """Compare number, classes and parameter groups.

    The order of the parameters is free, because state is matched by name.

    Raises:
        SchemaMismatchError: Names the difference, with both values. Also raised if an optimizer keeps state for all its
            parameters together, which depends on their order.
    """
    if saved.keys() != optimizers.keys():
        raise SchemaMismatchError(
            f"the marker has {len(saved)} dense optimizers, but this job has {len(optimizers)}",
            hint="pass as many optimizers as the job that wrote the marker",
        )
    for key, optimizer in optimizers.items():
        if saved[key].kind != type(optimizer).__name__:
            raise SchemaMismatchError(
                f"dense {key} is {saved[key].kind} in the marker and {type(optimizer).__name__} in this job",
                hint="use the marker's class of optimizer",
            )
        here = [group["params"] for group in named_groups(optimizer, names)]
        there = [group["params"] for group in saved[key].groups]
        if list(map(sorted, here)) != list(map(sorted, there)):
            raise SchemaMismatchError(
                f"dense {key}: {_other_group(there, here)}",
                hint="use the marker's param groups, in the same order",
            )
        if here != there and _keeps_together(optimizer, saved[key]):
            fresh = {name: "fresh" for group in here for name in group}
            raise SchemaMismatchError(
                f"dense {key}: {_other_order(there, here)}, and {saved[key].kind} keeps one state for all of them",
                hint="keep the order, or reset its state: "
                f"restore(changes=Changes(dense=DenseChanges(optimizer={fresh!r})))",
            )


def _other_group(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> str:
    """Describe which parameter groups differ, and by which parameters."""
    if len(there) != len(here):
        return f"it has {len(there)} parameter groups in the marker and {len(here)} in this job"
    number = next(n for n, (old, new) in enumerate(zip(there, here, strict=True)) if sorted(old) != sorted(new))
    old, new = set(there[number]), set(here[number])
    sides = (("the marker", old - new), ("this job", new - old))
    said = [f"only {side} has {_some(names)}" for side, names in sides if names]
    return f"in parameter group {number}, " + "; ".join(said or ["a parameter occurs twice"])


def _some(names: Iterable[str]) -> str:
    first = sorted(names)
    more = f" and {len(first) - 3} more" if len(first) > 3 else ""
    return ", ".join(map(repr, first[:3])) + more


def _other_order(there: Sequence[Sequence[str]], here: Sequence[Sequence[str]]) -> str:
    """Describe the first parameters with a different order."""
    return next(
        f"parameter {place} of group {group} is {old!r} in the marker and {new!r} in this job"
        for group, pair in enumerate(zip(there, here, strict=True))
        for place, (old, new) in enumerate(zip(*pair, strict=True))
        if old != new
    )


def _keeps_together(optimizer: torch.optim.Optimizer, saved: OptimizerState) -> bool:
    """Return whether there is state that belongs to no single parameter. LBFGS keeps its state below its first one."""
    return saved.own is not None or bool(saved.other) or isinstance(optimizer, torch.optim.LBFGS)


def matched(
    optimizers: Optimizers,
    saved: Mapping[str, OptimizerState],
    states: Mapping[str, Mapping[str, tuple[str, str]]],
    groups: Mapping[str, Sequence[int | None]],
    names: Mapping[int, str],
) -> dict[str, OptimizerState]:
    """Match a marker's optimizers with those of a changed model, by the names of this one.

    Args:
        optimizers: The live optimizers.
        saved: The optimizers of the marker.
        states: Optimizer -> parameter whose state continues -> optimizer and parameter in the marker.
        groups: Optimizer -> for each of its param groups, the group of the marker whose settings it takes, or None to
            keep its own.
        names: Names of the live parameters, by identity.

    Raises:
        SchemaMismatchError: An optimizer keeps state for all its parameters together, and not all of them continue.
    """
    return {
        key: _matched(key, optimizer, saved, states.get(key, {}), groups[key], names)
        for key, optimizer in optimizers.items()
    }


def _matched(
    key: str,
    optimizer: torch.optim.Optimizer,
    saved: Mapping[str, OptimizerState],
    states: Mapping[str, tuple[str, str]],
    groups: Sequence[int | None],
    names: Mapping[int, str],
) -> OptimizerState:
    here, there = named_groups(optimizer, names), saved.get(key)
    found = [
        {**(there.groups[place] if there is not None and place is not None else group), "params": group["params"]}
        for place, group in zip(groups, here, strict=True)
    ]
    state = {
        name: saved[old].state[parameter] for name, (old, parameter) in states.items() if parameter in saved[old].state
    }
    result = OptimizerState(type(optimizer).__name__, found, state)
    for old in {old for old, _ in states.values()}:
        together = _keeps_together(optimizer, saved[old])
        all_here = [name for group in here for name in group["params"]]
        same = old == key and list(groups) == list(range(len(saved[old].groups)))
        same = same and [states.get(name) for name in all_here] == [
            (key, name) for group in saved[old].groups for name in group["params"]
        ]
        if together and not same:
            raise SchemaMismatchError(
                f"dense {key}: {saved[old].kind} keeps one state for all its parameters, which cannot be split",
                hint="declare the state of each of its parameters fresh: "
                'DenseChanges(optimizer={NAME: "fresh"}), or keep its parameters as they were',
            )
        if together:
            result.other, result.own = saved[old].other, saved[old].own
    return result


def put_back(
    optimizer: torch.optim.Optimizer,
    parameters: Mapping[str, nn.Parameter],
    saved: OptimizerState,
    fresh: Collection[str] = (),
) -> None:
    """Restore the state in place: wrappers and schedules refer to the optimizer's own state and groups.

    Args:
        optimizer: The live optimizer.
        parameters: Parameters of the model.
        saved: State to restore, by the names of the model.
        fresh: Parameters that keep their state in the optimizer.
    """
    before = {id(parameter): values for parameter, values in optimizer.state.items()}
    if saved.own is not None:
        _load_own(optimizer, saved.own)
    optimizer.state.clear()
    for name in fresh:
        if id(parameters[name]) in before:
            optimizer.state[parameters[name]] = before[id(parameters[name])]
    counted_there = {
        name for group in saved.groups if group.get("fused") or group.get("capturable") for name in group["params"]
    }
    for name, values in saved.state.items():
        parameter, known = parameters[name], before.get(id(parameters[name]))
        for key, value in values.items() if isinstance(values, dict) else ():
            if isinstance(value, torch.Tensor):
                live = known.get(key) if isinstance(known, dict) else None
                values[key] = _on_device(value, key, live, parameter, counted_there=name in counted_there)
        optimizer.state[parameter] = values
    for other, values in saved.other.items():
        optimizer.state[other] = values
    for group, values in zip(optimizer.param_groups, saved.groups, strict=True):
        group.update({key: _beside(value, group.get(key)) for key, value in values.items() if key != "params"})


def _load_own(optimizer: torch.optim.Optimizer, saved: Any) -> None:
    """Load the result of its ``state_dict()``. Keep the state and group objects, which torch's own part replaces."""
    state, groups = optimizer.state, optimizer.param_groups
    optimizer.load_state_dict(saved)
    if optimizer.state is not state or optimizer.param_groups is not groups:
        optimizer.__dict__.update(state=state, param_groups=groups)


def _beside(value: Any, live: Any) -> Any:
    """Move a learning rate that is a tensor to the device of the live one."""
    both = isinstance(value, torch.Tensor) and isinstance(live, torch.Tensor)
    return value.to(live.device) if both else value


def _on_device(
    value: torch.Tensor, key: Any, known: Any, parameter: nn.Parameter, *, counted_there: bool
) -> torch.Tensor:
    """Move a state to the device where the optimizer had it, or otherwise to that of the parameter.

    A step counter is on the CPU. In a group that is fused or capturable (``counted_there``), it is with the parameter.
    """
    if key == "step" and counted_there:
        return value.to(parameter.device)
    if isinstance(known, torch.Tensor):
        return value.to(known.device)
    return value if key == "step" else value.to(parameter.device)
