"""The live buffers of a model: which modules hold them, and how another tensor takes the place of one."""

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
        """True if it is state, as ``state_dict()`` understands it."""
        return self.key not in self.module._non_persistent_buffers_set

    def bind(self, value: torch.Tensor | None) -> None:
        """Put another object in its place."""
        self.module._buffers[self.key] = value

    def remove(self) -> None:
        """Let the module forget the name."""
        delattr(self.module, self.key)


def buffer_slots(model: nn.Module) -> dict[str, BufferSlot]:
    """Return the slots of all buffers outside of sharded tables and id maps, by the names that a marker gives them."""
    return dict(_slots(unwrapped(model), ""))


def check_buffers(model: nn.Module) -> None:
    """Refuse persistent buffers whose state is more than their value, or that have none yet.

    Raises:
        UnsupportedError: names the buffer and what to do.
    """
    for name, slot in buffer_slots(model).items():
        if slot.value is None or not slot.persistent:
            continue
        if is_lazy(slot.value):
            raise UnsupportedError(
                f"the buffer {name} is not initialized yet: its shape comes with the first forward",
                hint="run one forward without gradients on all ranks before you make the StreamCheckpointer",
            )
        if slot.value.requires_grad and slot.value.is_leaf:
            raise UnsupportedError(
                f"the buffer {name} has requires_grad: its gradient and its state in an optimizer are in no marker",
                hint="register it as an nn.Parameter, or call requires_grad_(False) on it",
            )


def check_writable(model: nn.Module, parameters: Mapping[str, torch.Tensor]) -> None:
    """Refuse what a restore could not write into: tensors that the constructor has made in inference mode.

    Raises:
        UnsupportedError: names the buffer or parameter and what to do.
    """
    buffers = {name: slot.value for name, slot in buffer_slots(model).items() if slot.persistent}
    for kind, tensors in (("parameter", parameters), ("buffer", buffers)):
        for name, value in tensors.items():
            if value is not None and not is_lazy(value) and value.is_inference():
                raise UnsupportedError(
                    f"the {kind} {name} was made in inference mode, where alone torch writes to it",
                    hint="make it under torch.no_grad() instead of torch.inference_mode()",
                )


def _slots(module: nn.Module, prefix: str, *, rebuilt: bool = True) -> Iterator[tuple[str, BufferSlot]]:
    """As ``dense_view`` names them.

    Args:
        module: Where to begin.
        prefix: Of its names.
        rebuilt: Whether the view has a module of its own in place of its parent.
    """
    if is_sharded_embedding(module) or holds_id_maps(module):
        return
    if rebuilt:
        module = original(module)
        rebuilt = is_rebuilt(module)
    for key in module._buffers:
        yield f"{prefix}{key}", BufferSlot(module, key)
    # A view of the model has a child once, a plain module's state_dict() under each of its names.
    for name, child in module.named_children() if rebuilt else module._modules.items():
        if child is not None:
            yield from _slots(child, f"{prefix}{name}.", rebuilt=rebuilt)


def _holder(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that a buffer's name leads to, and its key there.

    Raises:
        AttributeError: there is no such module.
    """
    *path, key = name.split(".")
    module = unwrapped(model)
    for part in path:
        inner = module if part in module._modules else original(module)
        module = inner.get_submodule(part)
    return original(module), key


def add_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    """Register a buffer that the model lacks; :func:`has_home` has been asked."""
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
    """Let DDP list the buffers of its module again, as it does itself before it broadcasts them.

    An empty list stays empty: DDP broadcasts nothing then, whatever the module registers later.
    """
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            versions.DATA_PARALLEL.require(module)
            if module.modules_buffers:
                module._assign_modules_buffers()  # type: ignore[no-untyped-call]


def count_writes(tensor: torch.Tensor) -> int:
    """Return a number that each write in place by torch raises; -1 where torch counts none."""
    return -1 if tensor.is_inference() else tensor._version
