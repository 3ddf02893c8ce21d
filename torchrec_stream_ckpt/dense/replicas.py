"""A copy of the state that ranks hold alike: each rank copies a part, into memory that is kept for the next marker.

Large tensors that no forward or backward changes may be copied late, while the next ones run (:class:`LateCopies`).

The ranks compare this state (``replica_check.py``), so one copy of it is saved. The choice of the rank that makes the
copy follows from names and sizes alone. So every rank comes to the same answer without asking, and the votes of a
marker compare the input of that choice.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping

import torch
from torch import nn

from torchrec_stream_ckpt.dense.gradients import GRADIENTS
from torchrec_stream_ckpt.native.kernel import kernel

Tensors = Mapping[str, torch.Tensor]
"""Tensors by entry."""
MODEL = "model."
"""Prefix of the entries of parameters."""
_LARGE_BYTES = 1 << 16
"""From this size on, a copy by the kernel is faster than by torch on one thread."""
_SAMPLED_BYTES = 1 << 14
"""A tensor that is copied late is compared with one of its elements of each such piece at the cut."""


def owners(tensors: Tensors, world: int, parameters: Mapping[str, str] | None = None) -> dict[str, int]:
    """Return the rank that saves each tensor: bytes are spread, the largest groups first.

    A parameter and its optimizer state are one group. So one rank saves all of it.

    Args:
        tensors: Tensors of which each rank holds a copy.
        world: Number of ranks.
        parameters: Entry of a tensor of an optimizer -> the parameter that it belongs to.
    """
    groups: dict[str, list[str]] = {}
    for name in sorted(tensors):
        of = (parameters or {}).get(name)
        groups.setdefault(f"{MODEL}{of}" if of is not None else name, []).append(name)
    sizes = {group: sum(tensors[name].nbytes for name in names) for group, names in groups.items()}
    load = [0] * world
    found = {}
    for group in sorted(groups, key=lambda group: (-sizes[group], group)):
        rank = load.index(min(load))
        load[rank] += sizes[group]
        found.update(dict.fromkeys(groups[group], rank))
    return found


class _LateCopy:
    """One tensor of :class:`LateCopies`, as it is at the cut.

    Args:
        name: Its entry.
        tensor: The live tensor.
        target: Memory for its copy.
    """

    def __init__(self, name: str, tensor: torch.Tensor, target: torch.Tensor) -> None:
        self.name = name
        # Another tensor on the same memory, with the same count of writes: it stays if ``parameter.data`` is replaced.
        self._tensor, self._target = tensor.detach(), target
        self._num_bytes = tensor.untyped_storage().nbytes()
        self._version = self._tensor._version
        self._sample = _sample(self._tensor).clone()
        self._lock = threading.Lock()
        self._copied = False
        self.changed = False
        """True if a write was found that came after the cut. Threads only ever set it."""

    @property
    def written(self) -> bool:
        """True if the tensor was written in place since the cut, as far as torch counts writes."""
        return self._tensor._version != self._version

    @torch.no_grad()
    def copy(self) -> None:
        """Copy the tensor unless it is copied. Waits for a copy that another thread is making."""
        with self._lock:
            if self._copied:
                return
            if self._tensor.untyped_storage().nbytes() != self._num_bytes:  # freed, or moved
                self.changed = True
            else:
                _copy(self._target, self._tensor, late=True)
                if not _same(_sample(self._target), self._sample):
                    self.changed = True
                self.look()
            self._copied = True

    def look(self) -> None:
        """Record a write, if there was one."""
        if self.written:
            self.changed = True


class LateCopies:
    """Tensors of one cut that are copied after it. Thread-safe.

    The commit thread copies them from the first one on, while training continues. A thread that is about to step an
    optimizer copies from the last one on, and so waits until none is left.

    Args:
        tensors: Tensors by entry.
        targets: Memory for the copies, by entry.
    """

    def __init__(self, tensors: Tensors, targets: Tensors) -> None:
        self._copies = [_LateCopy(name, tensor, targets[name]) for name, tensor in tensors.items()]
        self._settled = not self._copies
        """True once writes are expected: an optimizer's step follows, or nobody reads the copies."""

    def finish(self) -> None:
        """(commit thread) Copy what is not copied."""
        for each in self._copies:
            each.copy()

    def settle(self) -> None:
        """(any thread that trains, before it writes) Copy what is not copied. Later writes are allowed."""
        if self._settled:
            return
        for each in reversed(self._copies):
            each.copy()
        for each in self._copies:
            each.look()
        self._settled = True

    def changed(self) -> str:
        """Return the entry of a tensor that was written too early. Empty if no write was found."""
        for each in self._copies:
            written = each.written
            if each.changed or (written and not self._settled):  # in this order: after `settle` a write is allowed
                return each.name
        return ""


class CopyMemory:
    """Memory for copies, reused: fresh pages cost several times as much as the copy does.

    One copy at a time: the readers of the last one must be done.

    Args:
        lazy: True if large parameters, and large tensors of optimizers, are copied late.
    """

    def __init__(self, *, lazy: bool = False) -> None:
        self._kept: dict[str, torch.Tensor] = {}
        self._lazy = lazy
        self.late = LateCopies({}, {})
        """The rest of the last copy."""

    @torch.no_grad()
    def copy(self, tensors: Tensors) -> dict[str, torch.Tensor]:
        """Return copies on the CPU, as the tensors are now.

        Tensors on a GPU use pinned memory; the host waits for them once.

        Memory of names that no longer exist is freed. If this is lazy, some copies are made later, by ``late``.
        """
        self.late.settle()
        self._kept = {name: self._room(name, tensor) for name, tensor in tensors.items()}
        late = {name: each for name, each in tensors.items() if self._lazy and _may_be_late(name, each)}
        for name, tensor in tensors.items():
            if name not in late:
                _copy(self._kept[name], tensor)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            torch.cuda.current_stream(device).synchronize()
        self.late = LateCopies(late, self._kept)
        return dict(self._kept)

    def holds(self, tensors: Tensors) -> bool:
        """Return whether these tensors are, bit for bit and without an omission, those that were copied last."""
        return self._kept.keys() == tensors.keys() and all(
            _same(self._kept[name], tensor) for name, tensor in tensors.items()
        )

    def _room(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        kept = self._kept.get(name)
        if kept is not None and kept.shape == tensor.shape and kept.dtype == tensor.dtype:
            return kept
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=tensor.is_cuda)


def _may_be_late(name: str, tensor: torch.Tensor) -> bool:
    """Return whether a tensor is large, and only the step of an optimizer writes to it."""
    plain = tensor.nbytes >= _LARGE_BYTES and _is_plain(tensor) and not tensor.is_inference()
    return plain and not name.startswith(GRADIENTS)


def _sample(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view of some elements of a contiguous tensor, spread over all of it."""
    return tensor.view(-1)[:: max(1, _SAMPLED_BYTES // tensor.element_size())]


def _copy(target: torch.Tensor, tensor: torch.Tensor, *, late: bool = False) -> None:
    """Copy a tensor into memory of :class:`CopyMemory`.

    If torch has several threads, it copies with all of them, unless the copy is ``late``: then training needs them.
    """
    native = kernel() if tensor.nbytes >= _LARGE_BYTES and (late or torch.get_num_threads() == 1) else None
    if native is not None and native.copies and _is_plain(tensor):
        native.copy(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        target.copy_(tensor, non_blocking=True)


def _is_plain(tensor: torch.Tensor) -> bool:
    """Return whether the elements of a tensor lie on the CPU in row-major order, as they are."""
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device.type == "cpu"
    return plain and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg())


def _same(kept: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Compare bit for bit: a NaN equals itself, and -0.0 is not 0.0."""
    return kept.dtype == tensor.dtype and kept.shape == tensor.shape and bool(torch.equal(_bits(kept), _bits(tensor)))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
