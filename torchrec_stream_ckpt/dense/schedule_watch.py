"""Warn about schedules whose state is not in the markers, or is one step behind there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import lr_scheduler

from torchrec_stream_ckpt.dense.stateful_objects import Stateful, state_of

log = logging.getLogger(__name__)

_LATE_STEPS = 3
"""A schedule that moves once an epoch also moves between two steps of the job, but not several times in a row."""
_KINDS = (lr_scheduler.LRScheduler, lr_scheduler.ReduceLROnPlateau)


class ScheduleWatch:
    """Looks for schedules that were not handed over, and for schedules that are stepped too late.

    Each is reported once, by rank 0. Neither is an error: a schedule may be constant, or rebuilt by the script.

    Args:
        optimizer: The optimizer that the job has handed over.
        stateful: The user's objects with their names.
    """

    def __init__(self, optimizer: torch.optim.Optimizer | None, stateful: Iterable[tuple[str, Stateful]]) -> None:
        self._optimizer, self._stateful = optimizer, list(stateful)
        self._schedules = [(name, item) for name, item in self._stateful if isinstance(item, _KINDS)]
        self._looked = False
        self._at_step: list[int] | None = None
        """Steps of the schedules at the end of the last step of the job. None once an optimizer has stepped since."""
        self._late_steps = 0

    def cut(self) -> None:
        """(each cut) Report a schedule that was not handed over. Looks only at the first cut."""
        if self._looked:
            return
        self._looked = True
        groups = getattr(self._optimizer, "param_groups", ())
        if not any("initial_lr" in group for group in groups) or dist.get_rank() != 0:
            return
        if not any(_has_schedule(name, item) for name, item in self._stateful):
            log.warning(
                "a learning rate schedule controls the optimizer and is not in `stateful`: after a restart it begins "
                "again. Try: pass stateful={'schedule': schedule}"
            )

    def step_ended(self) -> None:
        """Note the positions of the schedules at the end of a step of the job."""
        self._at_step = self._positions()

    def optimizer_stepped(self) -> None:
        """Report schedules that have moved between the end of the last step of the job and this optimizer step."""
        if self._at_step is None or self._late_steps >= _LATE_STEPS:
            return
        before, self._at_step = self._at_step, None
        moved = zip(self._schedules, before, self._positions(), strict=True)
        late = [name for (name, _), old, new in moved if old != new]
        self._late_steps = self._late_steps + 1 if late else 0
        if self._late_steps == _LATE_STEPS and dist.get_rank() == 0:
            log.warning(
                "the schedule %r is stepped after StreamCheckpointer.step(): markers hold it one step behind. "
                "Try: call its step() first",
                late[0],
            )

    def _positions(self) -> list[int]:
        return [_position(item) for _, item in self._schedules]


def _position(schedule: Any) -> int:
    """Return the number of steps of a schedule; a ``ChainedScheduler`` does not count them itself."""
    while not hasattr(schedule, "last_epoch"):
        schedule = schedule._schedulers[0]
    return int(schedule.last_epoch)


def _has_schedule(name: str, item: Stateful) -> bool:
    """Return whether an object is a schedule or saves the state of one."""
    return isinstance(item, _KINDS) or _mentions(state_of(name, item), "last_epoch")


def _mentions(state: Any, key: str) -> bool:
    if isinstance(state, Mapping):
        return key in state or any(_mentions(value, key) for value in state.values())
    return isinstance(state, (list, tuple)) and any(_mentions(value, key) for value in state)
