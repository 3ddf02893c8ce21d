"""Schedules over the param groups of fused tables: saved by the names in their groups, for any plan.

A ``LambdaLR`` over ``CombinedOptimizer([dmp.fused_optimizer, dense])`` keeps lists with one value for each param group
of its rank. The groups of a rank depend on the plan. So such a list is saved as one value for each parameter in the
rank's groups, and every rank saves its own. A restore takes for each of its groups the value that the parameters in it
had, on whatever rank that was.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler

from torchrec_stream_ckpt.dense.stateful_objects import state_of, stateful_title, title_of
from torchrec_stream_ckpt.errors import SchemaMismatchError

State = dict[str, Any]
Lists = dict[str, dict[str, Any]]
"""Path of a list in a schedule's state -> {name of a parameter: value of its group}."""

_PER_GROUP = frozenset(
    {"base_lrs", "_last_lr", "last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
)
"""Entries of a schedule's state that are lists with one value for each param group.

``last_lr`` is not torch's. Schedules that keep their last rates themselves, as in facebookresearch/dlrm, use this name.
"""
_OF_GROUPS = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum")
"""Settings that schedules keep in the param groups. Dense optimizers save them; fused ones have no place for them."""
_NESTED = "_schedulers"
_SINGLE = (int, float, str, bool, type(None))
SUPPORTED = tuple(
    getattr(lr_scheduler, name)
    for name in (
        "LambdaLR",
        "MultiplicativeLR",
        "StepLR",
        "MultiStepLR",
        "ConstantLR",
        "LinearLR",
        "ExponentialLR",
        "PolynomialLR",
        "CosineAnnealingLR",
        "CosineAnnealingWarmRestarts",
        "SequentialLR",
        "ChainedScheduler",
        "OneCycleLR",
        "CyclicLR",
        "ReduceLROnPlateau",
    )
)
"""Schedules whose lists are known."""
_OWN = "per_group_state"
"""Attribute of a user's schedule: names of its other attributes that are lists with a value for each group."""


class NamedSchedule:
    """The state of one schedule, by names.

    Args:
        name: Name under which the user hands it over.
        schedule: The live schedule.
    """

    def __init__(self, name: str, schedule: Any) -> None:
        self.name = name
        self._schedule = schedule

    @classmethod
    def of(cls, name: str, item: object) -> NamedSchedule | None:
        """Return the state by names of ``item``. Returns None if it is not a schedule over an optimizer of TorchRec.

        The answer is the same on all ranks: a rank without tables has the same optimizers, with fewer groups.
        """
        if not isinstance(item, (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)):
            return None
        keyed = isinstance(getattr(getattr(item, "optimizer", None), "params", None), Mapping)
        return cls(name, item) if keyed else None

    @property
    def supported(self) -> bool:
        """True if all of its lists are known.

        If not, it can only be restored if the groups of the rank are the same.
        """
        return _known(self._schedule)

    @property
    def steps_alike(self) -> bool:
        """True if its single values are equal on all ranks. A user's class may keep values of one rank."""
        return type(self._schedule) in SUPPORTED

    @property
    def title(self) -> str:
        """Name of the schedule in messages."""
        return title_of(self.name, self._schedule)

    @property
    def state_title(self) -> str:
        """Name of its state in messages."""
        return stateful_title(self.name, self._schedule)

    def groups(self) -> list[tuple[str, ...]]:
        """Return the names in each of its param groups, sorted."""
        names = {id(member): name for name, member in self._schedule.optimizer.params.items()}
        return [
            tuple(sorted(names[id(member)] for member in group["params"] if id(member) in names))
            for group in self._schedule.optimizer.param_groups
        ]

    def state(self) -> State:
        """Return the state that this rank saves.

        ``common`` is the same on all ranks. ``lists`` are those of its groups, by name.
        """
        groups, lists = self.groups(), Lists()
        common = state_of(self.name, self._schedule)
        if self.supported:
            common = _without_lists(common, groups, "", lists, getattr(self._schedule, _OWN, ()))
            for key in _OF_GROUPS:
                held = [group.get(key) for group in self._schedule.optimizer.param_groups]
                if any(value is not None for value in held):
                    lists[f"group.{key}"] = _by_name(held, groups)
        return {"class": type(self._schedule).__name__, "groups": groups, "common": common, "lists": lists}

    def merged(self, saved: Sequence[State], source: int, *, whole: bool) -> State:
        """Return the state of the live schedule that follows from those of all ranks of a marker. Changes nothing.

        Args:
            saved: State of each rank of the marker.
            source: The rank of the marker whose common part this one takes.
            whole: True if each parameter in a group must have been in the marker.

        Raises:
            SchemaMismatchError: It is another schedule, or tables that share a group here had different values.
        """
        there, here = saved[source]["class"], type(self._schedule).__name__
        if there != here:
            raise SchemaMismatchError(
                f"the schedule '{self.name}' is {there} in the marker and {here} in this job",
                hint="use the marker's schedule class",
            )
        groups = self.groups()
        if not self._by_name(saved):
            if [tuple(group) for group in saved[source]["groups"]] != groups:
                raise SchemaMismatchError(
                    f"the schedule '{self.name}' ({here}) has lists of unknown meaning, and its param groups differ: "
                    f"{saved[source]['groups']!r:.200} in the marker, {groups!r:.200} in this job",
                    hint="restore with the marker's plan and ranks; or, for later jobs, name lists with one value per "
                    f'group in {here}.{_OWN} = ("...",)',
                )
            saved, source = [saved[source]], 0
        lists: Lists = {}
        for each in saved:
            for path, values in each["lists"].items():
                for member, value in values.items():
                    self._same(path, member, lists.setdefault(path, {}).setdefault(member, value), value)
        live = self.state()
        found = {
            path: self._of_groups(path, lists[path], live["lists"].get(path, {}), groups, whole=whole) for path in lists
        }
        state = _with_lists(saved[source]["common"], "", found)
        return {"state": state, "groups": {key: found[f"group.{key}"] for key in _OF_GROUPS if f"group.{key}" in found}}

    def _by_name(self, saved: Sequence[State]) -> bool:
        """Return whether all ranks saved their lists by name.

        Single values of a user's class may be those of one rank.
        """
        if not self.steps_alike and any(each["common"] != saved[0]["common"] for each in saved):
            return False
        return all(each["lists"] for each in saved)

    def older(self, state: State) -> State:
        """Return the input of :meth:`load`, from a marker that has the lists of rank 0 alone.

        Raises:
            SchemaMismatchError: Rank 0 had another number of param groups.
        """
        counts = {len(value) for value in _lists(state)}
        if counts - {len(self.groups())}:
            raise SchemaMismatchError(
                f"the schedule '{self.name}' was saved only on rank 0, for {max(counts)} param groups, but this "
                f"rank has {len(self.groups())}",
                hint="restore with the marker's plan and ranks",
            )
        return {"state": state, "groups": {}}

    def load(self, merged: State) -> None:
        """Load the result of :meth:`merged`."""
        self._schedule.load_state_dict(merged["state"])
        for key, values in merged["groups"].items():
            for group, value in zip(self._schedule.optimizer.param_groups, values, strict=True):
                if value is not None:
                    group[key] = value

    def _of_groups(
        self,
        path: str,
        saved: Mapping[str, Any],
        live: Mapping[str, Any],
        groups: Sequence[tuple[str, ...]],
        *,
        whole: bool,
    ) -> list[Any]:
        """Return one value for each live group: that of all parameters in it."""
        found = []
        for group in groups:
            missing = [member for member in group if member not in saved]
            if missing and whole:
                raise SchemaMismatchError(
                    f"the marker's schedule '{self.name}' has no {path} of {missing[0]}",
                    hint="build the schedule on the same optimizer as the job that wrote the marker",
                )
            values = {member: saved.get(member, live.get(member)) for member in group}
            for member in group:
                self._same(path, f"{group[0]} and {member}", values[group[0]], values[member])
            found.append(values[group[0]] if group else None)
        return found

    def _same(self, path: str, where: str, first: Any, second: Any) -> None:
        if _text(first) != _text(second):
            raise SchemaMismatchError(
                f"{where} share a param group under this plan, but have different {path} in the marker's schedule "
                f"'{self.name}': {_text(first)}, {_text(second)}",
                hint="change the plan so that tables with different rates do not share a param group",
            )


def _known(schedule: Any) -> bool:
    """Return whether all lists are known: by the class, or because all other entries of the state are single values."""
    if type(schedule) in SUPPORTED:
        return all(_known(each) for each in getattr(schedule, _NESTED, ()))
    known = _PER_GROUP | {*getattr(schedule, _OWN, ())}
    return all(key in known or isinstance(value, _SINGLE) for key, value in schedule.state_dict().items())


def _without_lists(
    state: Mapping[str, Any], groups: Sequence[tuple[str, ...]], path: str, lists: Lists, own: Collection[str] = ()
) -> State:
    """Move the lists with one value for each group into ``lists``, and replace them by None."""
    found: State = {}
    for key, value in state.items():
        if (key in _PER_GROUP or key in own) and isinstance(value, (list, tuple)) and len(value) == len(groups):
            lists[f"{path}{key}"] = _by_name(value, groups)
            found[key] = None
        elif key == _NESTED:
            found[key] = [_without_lists(each, groups, f"{path}{key}.{n}.", lists) for n, each in enumerate(value)]
        else:
            found[key] = value
    return found


def _lists(state: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield all lists with one value for each group."""
    for key, value in state.items():
        if key in _PER_GROUP and isinstance(value, (list, tuple)):
            yield value
        elif key == _NESTED:
            for each in value:
                yield from _lists(each)


def _with_lists(common: Mapping[str, Any], path: str, lists: Mapping[str, list[Any]]) -> State:
    """Undo :func:`_without_lists`, with the lists of the live groups."""
    found: State = {}
    for key, value in common.items():
        if key == _NESTED:
            found[key] = [_with_lists(each, f"{path}{key}.{number}.", lists) for number, each in enumerate(value)]
        else:
            found[key] = list(lists[f"{path}{key}"]) if f"{path}{key}" in lists else value
    return found


def _by_name(values: Sequence[Any], groups: Sequence[tuple[str, ...]]) -> dict[str, Any]:
    return {member: value for value, group in zip(values, groups, strict=True) for member in group}


def _text(value: Any) -> str:
    return repr(value.tolist() if isinstance(value, torch.Tensor) else value)
