"""The live buffers of a model: the modules that hold them, and the replacement of one by another tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parameter import is_lazy

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.collision import holds_id_maps
from torchrec_stream_ckpt.model.compiled import original, unwrapped
from torchrec_stream_ckpt.model.dense import is_rebuilt
from torchrec_stream_ckpt.model.modules import is_sharded_embedding


@dataclass(frozen=True, slots=True)
class BufferSlot:
    """The place of one buffer: a name that a module has registered, with a tensor or with None."""

    module: nn.Module
    key: str

    @property
    def value(self) -> torch.Tensor | None:
        """The live object, or None."""
        return self.module._buffers[self.key]

    @property
    def persistent(self) -> bool:
        """True if it is state in the sense of ``state_dict()``."""
        return self.key not in self.module._non_persistent_buffers_set

    def bind(self, value: torch.Tensor | None) -> None:
        """Put another object in its place."""
        self.module._buffers[self.key] = value

    def remove(self) -> None:
        """Remove the name from the module."""
        delattr(self.module, self.key)


def buffer_slots(model: nn.Module) -> dict[str, BufferSlot]:
    """Return the slots of all buffers outside of sharded tables and id maps, by their names in markers."""
    return dict(_slots(unwrapped(model), ""))


def check_buffers(model: nn.Module) -> None:
    """Reject persistent buffers with state other than their value, or without a value so far.

    Raises:
        UnsupportedError: Names the buffer and what to do.
    """
    for name, slot in buffer_slots(model).items():
        if slot.value is None or not slot.persistent:
            continue
        if is_lazy(slot.value):
            raise UnsupportedError(
                f"the buffer {name} is not initialized: its shape is unknown until the first forward",
                hint="run one forward without gradients on all ranks before you create the StreamCheckpointer",
            )
        if slot.value.requires_grad and slot.value.is_leaf:
            raise UnsupportedError(
                f"the buffer {name} has requires_grad, but markers save neither its gradient nor its optimizer state",
                hint="register it as an nn.Parameter, or call requires_grad_(False) on it",
            )


def check_writable(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Reject tensors that a restore could not write to: those that the constructor created in inference mode.

    Raises:
        UnsupportedError: Names the buffer or parameter and what to do.
    """
    buffers = {name: slot.value for name, slot in buffer_slots(model).items() if slot.persistent}
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, value in tensors.items():
            if value is not None and not is_lazy(value) and value.is_inference():
                raise UnsupportedError(
                    f"the {kind} {name} was created in inference mode, so a restore cannot write to it",
                    hint="create it under torch.no_grad() instead of torch.inference_mode()",
                )


def _slots(module: nn.Module, prefix: str, *, rebuilt: bool = True) -> Iterator[tuple[str, BufferSlot]]:
    """Yield buffer slots with names as in ``dense_view``.

    Args:
        module: Module to start from.
        prefix: Prefix of its names.
        rebuilt: True if the view replaces the parent by a new module.
    """
    if is_sharded_embedding(module) or holds_id_maps(module):
        return
    if rebuilt:
        module = original(module)
        rebuilt = is_rebuilt(module)
    for key in module._buffers:
        yield f"{prefix}{key}", BufferSlot(module, key)
    # A view of the model has a child once. A plain module's state_dict() has it under each of its names.
    for name, child in module.named_children() if rebuilt else module._modules.items():
        if child is not None:
            yield from _slots(child, f"{prefix}{name}.", rebuilt=rebuilt)


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module that a buffer's name leads to, and its key there.

    Raises:
        AttributeError: There is no such module.
    """
    *path, key = name.split(".")
    module = unwrapped(model)
    for part in path:
        inner = module if part in module._modules else original(module)
        module = inner.get_submodule(part)
    return original(module), key


def add_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Register a buffer that the model lacks. The caller must have checked :func:`has_home`."""
    module, key = _holder(model, name)
    module.register_buffer(key, value)


def has_home(model: nn.Module, name: str) -> bool:
    """Return whether the model has the module of a buffer, and nothing else under its name."""
    try:
        module, key = _holder(model, name)
    except AttributeError:
        return False
    return not hasattr(module, key)


def tell_ddp(model: nn.Module) -> None:
    """Make DDP list the buffers of its module again, as it does itself before it broadcasts them.

    An empty list stays empty: then DDP broadcasts nothing, whatever the module registers later.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            versions.DATA_PARALLEL.require(module)
            if module.modules_buffers:
                module._assign_modules_buffers()  # type: ignore[no-untyped-call]


def count_writes(tensor: torch.Tensor) -> int:
    """Return a number that each write in place by torch increments. Returns -1 if torch does not count writes."""
    return -1 if tensor.is_inference() else tensor._version
