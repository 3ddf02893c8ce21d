"""Buffers of the dense model: their state at the attach, and the restore of a marker's buffers into the live modules.

Training may give a buffer another dtype or shape, replace it, make it None or a tensor, or let two names share memory.
A marker holds each buffer as it is at the cut, and the buffer that this job's constructor created. With the latter, a
restore can distinguish a buffer that training has changed, which is restored in any form, from a changed model, which
is rejected.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from torchrec_stream_ckpt.dense.buffer_memory import copy_into, is_alike, place, together
from torchrec_stream_ckpt.dense.entry_matching import dense_entry
from torchrec_stream_ckpt.evolve.model_schema import NO_TENSOR, DenseEntry
from torchrec_stream_ckpt.model import BufferSlot, add_buffer, buffer_slots, count_writes, has_home, tell_ddp

log = logging.getLogger(__name__)

Values = Mapping[str, torch.Tensor | None]
"""Buffers by name. None for a registered buffer without a tensor."""
Kinds = dict[str, DenseEntry]
"""Shape and dtype of buffers, by name."""

_first: weakref.WeakKeyDictionary[nn.Module, Kinds] = weakref.WeakKeyDictionary()
"""Buffers of modules at their first attach, by their keys: a module that is attached again has been trained since."""


@dataclass(frozen=True, slots=True)
class BufferRecord:
    """Record of the buffers of one rank in a marker, in addition to their values."""

    attached: Kinds
    """Buffers as they were when the model was attached."""
    now: Kinds
    """Buffers as they were at the cut, including those that are None."""
    twins: Mapping[str, str]
    """Name -> an earlier name of the same tensor."""
    on_cpu: Collection[str]
    """Buffers on the CPU in a job whose parameters were on a device."""

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        kinds = {
            key: {name: [list(each.shape), each.dtype] for name, each in found.items()}
            for key, found in (("attached", self.attached), ("now", self.now))
        }
        return {**kinds, "twins": dict(self.twins), "on_cpu": list(self.on_cpu)}

    def renamed(self, names: Mapping[str, str]) -> BufferRecord:
        """Return the record of some of the buffers, under other names."""
        attached, now = ({names[key]: each[key] for key in each if key in names} for each in (self.attached, self.now))
        twins = {names[key]: names[other] for key, other in self.twins.items() if key in names and other in names}
        return BufferRecord(attached, now, twins, [names[key] for key in self.on_cpu if key in names])

    @staticmethod
    def of(saved: Mapping[str, Any]) -> BufferRecord:
        """Read the values that :meth:`as_json` returned."""
        attached, now = (
            {name: DenseEntry(name, tuple(shape), dtype) for name, (shape, dtype) in saved[key].items()}
            for key in ("attached", "now")
        )
        return BufferRecord(attached, now, saved["twins"], saved["on_cpu"])


@dataclass(frozen=True, slots=True)
class _Passing:
    """A non-persistent buffer as it was at the attach."""

    held: weakref.ref[torch.Tensor] | None
    writes: int

    @staticmethod
    def of(value: torch.Tensor | None) -> _Passing:
        return _Passing(None, 0) if value is None else _Passing(weakref.ref(value), count_writes(value))

    def is_still(self, value: torch.Tensor | None) -> bool:
        held = self.held() if self.held is not None else None
        return held is value and (value is None or count_writes(value) == self.writes)


class LiveBuffers:
    """The buffers of the dense model on this rank, without those of sharded tables and of id maps.

    Args:
        model: The live model. Its current buffers count as those that its constructor created.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        slots = buffer_slots(model)
        for module in {id(slot.module): slot.module for slot in slots.values()}.values():
            if module not in _first:
                mine = [slot for slot in slots.values() if slot.module is module and slot.persistent]
                _first[module] = {slot.key: _kind(slot.key, slot.value) for slot in mine}
        self.attached: Kinds = {
            name: DenseEntry(name, kind.shape, kind.dtype)
            for name, slot in slots.items()
            if (kind := _first[slot.module].get(slot.key)) is not None
        }
        """The persistent buffers as they were when the model was first attached."""
        self._passing = {name: _Passing.of(slot.value) for name, slot in slots.items() if not slot.persistent}
        self._said = False

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the live persistent buffers, without those that are None."""
        return {
            name: slot.value if is_lazy(slot.value) else slot.value.detach()
            for name, slot in self._slots().items()
            if slot.value is not None
        }

    def _slots(self) -> dict[str, BufferSlot]:
        return {name: slot for name, slot in buffer_slots(self._model).items() if slot.persistent}

    def record(self) -> BufferRecord:
        """Return the record of the buffers for a marker."""
        slots = self._slots()
        twins = _twins({name: slot.value for name, slot in slots.items() if slot.value is not None})
        apart = self._home().type != "cpu"
        on_cpu = [name for name, slot in slots.items() if apart and slot.value is not None and slot.value.is_cpu]
        return BufferRecord(
            self.attached, {name: _kind(name, slot.value) for name, slot in slots.items()}, twins, on_cpu
        )

    def say_passing(self) -> None:
        """Log once which non-persistent buffers have changed since the attach: no marker holds them."""
        if self._said or not self._passing:
            return
        slots = buffer_slots(self._model)
        changed = [
            name
            for name, then in self._passing.items()
            if name in slots and not slots[name].persistent and not then.is_still(slots[name].value)
        ]
        if changed:
            self._said = True
            log.warning(
                "non-persistent buffers have changed since the attach, and markers do not save them: %s; register "
                "them with persistent=True if a restored job needs them",
                ", ".join(changed),
            )

    def _can_take(self, name: str) -> bool:
        """Return whether the module of a buffer that training registered exists."""
        return name in buffer_slots(self._model) or has_home(self._model, name)

    def _is_twin(self, name: str, others: Collection[str]) -> bool:
        """Return whether a live buffer is the same tensor as one of ``others``."""
        slots = self._slots()
        value = slots[name].value if name in slots else None
        return value is not None and any(other in slots and slots[other].value is value for other in others)

    def compare(
        self, values: Mapping[str, DenseEntry], record: BufferRecord | None
    ) -> tuple[list[DenseEntry], list[DenseEntry]]:
        """Pair the buffers of a marker with the live ones.

        A buffer that will be restored has the same entry on both sides.

        A live buffer is compared as it was at the attach: with the marker's buffer at its attach or, if that differs,
        with the marker's value. A marker without a record is compared by its values.

        Args:
            values: The marker's buffers, if it has no record of them.
            record: The marker's record of them.

        Returns:
            Entries of the marker, and entries of this job.
        """
        now, then = (record.now, record.attached) if record is not None else (values, values)
        pairs = []
        for name in dict.fromkeys((*self.attached, *then, *now)):
            kinds = self.attached.get(name), then.get(name), now.get(name)
            pairs.append(self._pair(name, *kinds, then if record is None else ()))
        there, here = ([pair[side] for pair in pairs] for side in (0, 1))
        return [each for each in there if each is not None], [each for each in here if each is not None]

    def _pair(
        self,
        name: str,
        here: DenseEntry | None,
        then: DenseEntry | None,
        now: DenseEntry | None,
        unrecorded: Collection[str],
    ) -> tuple[DenseEntry | None, DenseEntry | None]:
        if here is not None and here in (then, now):
            return here, here
        if here is not None and then is not None:
            return then, here
        if here is not None:
            return None, None if here.dtype == NO_TENSOR or self._is_twin(name, unrecorded) else here
        if then is None and self._can_take(name):  # training registered it
            return None, None
        lost = now if then is None or (then.dtype == NO_TENSOR and now is not None) else then
        return None if lost is None or lost.dtype == NO_TENSOR else lost, None

    @torch.no_grad()
    def put(self, values: Values, record: BufferRecord | None, removed: Iterable[str] = ()) -> None:
        """Put buffers of a marker into the live modules: bits, dtype, shape, strides, presence and shared memory.

        Live objects are kept if torch lets them take the new value: DDP and other modules may refer to them.

        Args:
            values: Buffers by their names in this job.
            record: The marker's record of them, by their names in this job.
            removed: Buffers that training had removed.
        """
        slots = self._slots()
        for name in removed:
            if name in slots:
                slots.pop(name).remove()
        for name, value in values.items():
            if value is None and name in slots:
                slots[name].bind(None)
        home, on_cpu = self._home(), record.on_cpu if record is not None else ()
        tensors = {name: value for name, value in values.items() if value is not None}
        live = {name: slot.value for name, slot in slots.items() if name in tensors and slot.value is not None}
        cpu = torch.device("cpu")
        devices = {name: live[name].device if name in live else cpu if name in on_cpu else home for name in tensors}
        placed = place(tensors, devices)
        twins = record.twins if record is not None else _twins(live)
        for names in together(placed, live):
            if not self._copied(names, live, placed, twins):
                self._replace(names, slots, placed, twins)
        tell_ddp(self._model)

    def _copied(
        self,
        names: list[str],
        live: Mapping[str, torch.Tensor],
        placed: Mapping[str, torch.Tensor],
        twins: Mapping[str, str],
    ) -> bool:
        """Copy in place if live buffers are of the same kind, and share memory as those of the marker did."""
        if not is_alike(names, live, placed) or _twins({name: live[name] for name in names}) != {
            name: other for name, other in twins.items() if name in names and other in names
        }:
            return False
        try:
            for name in names:
                copy_into(live[name], placed[name])
        except RuntimeError:  # an inference tensor cannot be written
            return False
        return True

    def _replace(
        self,
        names: list[str],
        slots: Mapping[str, BufferSlot],
        placed: Mapping[str, torch.Tensor],
        twins: Mapping[str, str],
    ) -> None:
        """Give the live objects the marker's memory. If no object is free, the slot gets a new one."""
        objects: dict[str, torch.Tensor] = {}
        used: set[int] = set()
        for name in names:
            leader = twins.get(name, name)
            if leader not in objects:
                known = slots[name].value if name in slots else None
                free = known is not None and id(known) not in used
                objects[leader] = _take_over(known, placed[name]) if known is not None and free else placed[name]
                used.add(id(objects[leader]))
            if name not in slots:
                add_buffer(self._model, name, objects[leader])
            elif slots[name].value is not objects[leader]:
                slots[name].bind(objects[leader])

    def _home(self) -> torch.device:
        """Return the device of the dense parameters."""
        first = next((each for each in self._model.parameters() if not each.is_meta), None)
        return first.device if first is not None else torch.device("cpu")


def _kind(name: str, value: torch.Tensor | None) -> DenseEntry:
    if value is None:
        return DenseEntry(name, (), NO_TENSOR)
    return DenseEntry(name, (), "uninitialized") if is_lazy(value) else dense_entry(name, value)


def _twins(live: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """Return name -> an earlier name of the same tensor."""
    first: dict[int, str] = {}
    known = {name: first.setdefault(id(value), name) for name, value in live.items()}
    return {name: other for name, other in known.items() if name != other}


def _take_over(live: torch.Tensor, saved: torch.Tensor) -> torch.Tensor:
    """Return the live object with the saved one's value, or the saved one if the live one cannot take it."""
    try:
        live.data = saved
    except (RuntimeError, TypeError, ValueError):
        return saved
    return live
