"""Warn about schedules whose state is not in the markers, or is one step behind there."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from torchrec_stream_ckpt.dense.stateful_objects import Stateful, state_of

log = logging.getLogger(__name__)

_LATE_STEPS = 3
"""A schedule that moves once an epoch also moves between two steps of the job, but not several times in a row."""
_KINDS = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)


@dataclass
class _Watched:
    """A schedule that markers hold, and its positions at the last events."""

    name: str
    schedule: Any
    begun: int | None = None
    """At the attach or the restore. None once an optimizer has stepped since."""
    at_step: int | None = None
    """At the end of the first step of the job since an optimizer stepped."""
    at_cut: int | None = None
    """At the first cut since an optimizer stepped. None if there was none."""
    leads: bool = False
    """True if the loop steps it before the optimizer: it moves between two steps of the job, and markers are right."""
    late_steps: int = 0
    missed: bool = False
    """True if one of the steps in ``late_steps`` came after a marker was cut."""

    def optimizer_stepped(self) -> bool:
        """Return whether it is time to report that the schedule is stepped after the step of the job."""
        now = _position(self.schedule)
        if self.begun is not None:
            self.leads, self.begun = self.begun != now, None
        at_step, at_cut, self.at_step, self.at_cut = self.at_step, self.at_cut, None, None
        if at_step is None or self.leads:
            return False
        if at_step == now:
            self.late_steps, self.missed = 0, False
            return False
        self.late_steps += 1
        self.missed = self.missed or at_cut not in (None, now)
        return self.late_steps >= _LATE_STEPS and self.missed


class ScheduleWatch:
    """Looks for schedules that were not handed over, and for schedules that are stepped too late.

    Each is reported once, by rank 0. Neither is an error: a schedule may be constant, or rebuilt by the script.

    Args:
        optimizer: The optimizer that the job has handed over.
        stateful: The user's objects with their names.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, stateful: Iterable[tuple[str, Stateful]]) -> None:
        self._optimizer, self._stateful = optimizer, list(stateful)
        self._watched = [_Watched(name, item) for name, item in self._stateful if isinstance(item, _KINDS)]
        self._looked = self._late = False
        self._rates: list[Any] | None = None
        """Learning rates at the first cut."""
        self._found: list[weakref.ref[Any]] | None = None
        """Schedules at the attach, where the search, of 0.2 us for each object of Python, delays no step."""
        if self._scheduled() and dist.get_rank() == 0:
            self._found = [weakref.ref(each) for each in _schedules_of(self._groups())]
        self.begin()

    def begin(self) -> None:
        """(attach, restore) Note the positions from which the loop goes on."""
        for each in self._watched:
            each.begun = _position(each.schedule)

    def cut(self) -> None:
        """(each cut) Note the positions that the marker holds, and report schedules that were not handed over."""
        if not self._looked and dist.get_rank() == 0:
            self._look()
        for each in self._watched:
            if each.at_cut is None:
                each.at_cut = _position(each.schedule)

    def step_ended(self) -> None:
        """Note the positions at the end of a step of the job.

        With gradient accumulation several steps of the job may end before the optimizer steps: the first one counts.
        """
        for each in self._watched:
            if each.at_step is None:
                each.at_step = _position(each.schedule)

    def optimizer_stepped(self) -> None:
        """Report schedules that move between the end of a step of the job, with a marker, and the optimizer's step."""
        late = [each.name for each in self._watched if each.optimizer_stepped()]
        if late and not self._late and dist.get_rank() == 0:
            self._late = True
            log.warning(
                "the schedule %r is stepped after StreamCheckpointer.step(): markers hold it one step behind. "
                "Try: call its step() first",
                late[0],
            )

    def _groups(self) -> Iterable[Mapping[str, Any]]:
        groups: Iterable[Mapping[str, Any]] = getattr(self._optimizer, "param_groups", ())
        return groups

    def _scheduled(self) -> bool:
        """Return whether a schedule has left its mark: all but ``ReduceLROnPlateau`` do, when they are made."""
        return any("initial_lr" in group for group in self._groups())

    def _look(self) -> None:
        """Look once for schedules of the optimizer, after the first sign that it has one."""
        rates = [rate for group in self._groups() if isinstance(rate := group.get("lr"), float)]
        scheduled = self._scheduled()
        if self._rates is None:
            self._rates = rates
        if not scheduled and rates == self._rates:
            return
        self._looked = True
        handed = _with_parts(item for _, item in self._stateful if isinstance(item, _KINDS))
        found = _schedules_of(self._groups()) if self._found is None else [ref() for ref in self._found]
        missing = _outermost(each for each in found if each is not None and id(each) not in handed)
        if any(_saves_schedule(name, item) for name, item in self._stateful):
            self._watched += [_Watched(type(each).__name__, each) for each in missing]
        elif missing or (scheduled and not handed):
            kinds = ", ".join(sorted(type(each).__name__ for each in missing))
            log.warning(
                "a learning rate schedule%s controls the optimizer and is not in `stateful`: after a restart it begins "
                "again. Try: pass stateful={'schedule': schedule}",
                f" ({kinds})" if kinds else "",
            )


def _schedules_of(groups: Iterable[Mapping[str, Any]]) -> list[Any]:
    """Return the live schedules over any of these param groups, whichever wrapper of the optimizer they were given.

    The optimizer does not know its schedules, so they are found as instances of their classes.
    """
    known = {id(group) for group in groups}
    kinds: set[type] = set()
    above: list[type] = list(_KINDS)
    while above:
        kind = above.pop()
        kinds.add(kind)
        above += kind.__subclasses__()
    live = [each for each in gc.get_referrers(*kinds) if type(each) in kinds]
    return [each for each in live if any(id(group) in known for group in _groups_of(each))]


def _groups_of(schedule: Any) -> Iterable[Mapping[str, Any]]:
    groups: Iterable[Mapping[str, Any]] = getattr(getattr(schedule, "optimizer", None), "param_groups", ())
    return groups


def _with_parts(schedules: Iterable[Any]) -> set[int]:
    """Return the identities of schedules and of those that they are made of."""
    known: set[int] = set()
    for each in schedules:
        known |= {id(each)} | _with_parts(getattr(each, "_schedulers", ()))
    return known


def _outermost(schedules: Iterable[Any]) -> list[Any]:
    """Return the schedules that are not a part of another one."""
    every = list(schedules)
    parts = _with_parts(part for each in every for part in getattr(each, "_schedulers", ()))
    return [each for each in every if id(each) not in parts]


def _position(schedule: Any) -> int:
    """Return the number of steps of a schedule; a ``ChainedScheduler`` does not count them itself."""
    while not hasattr(schedule, "last_epoch"):
        parts = getattr(schedule, "_schedulers", ())
        if not parts:  # a class of the user's that keeps them elsewhere
            return 0
        schedule = parts[0]
    return int(schedule.last_epoch)


def _saves_schedule(name: str, item: Stateful) -> bool:
    """Return whether an object that is not a schedule saves the state of one."""
    return not isinstance(item, _KINDS) and _mentions(state_of(name, item), "last_epoch")


def _mentions(state: Any, key: str) -> bool:
    """Return whether a mapping in ``state``, which may contain itself, has this key."""
    left, seen = [state], dict[int, Any]()
    while left:
        each = left.pop()
        if not isinstance(each, (Mapping, list, tuple)) or id(each) in seen:
            continue
        if isinstance(each, Mapping) and key in each:
            return True
        seen[id(each)] = each  # kept, so that no other object gets its id
        left += each.values() if isinstance(each, Mapping) else each
    return False
