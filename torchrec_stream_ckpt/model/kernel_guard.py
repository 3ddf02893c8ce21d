"""Check that the model still computes with the hooked kernels.

Each kernel has one capture: two would not notice each other's writes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

from torch import nn

from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError
from torchrec_stream_ckpt.model.compiled import unwrapped
from torchrec_stream_ckpt.model.kernels import FusedKernel
from torchrec_stream_ckpt.model.modules import is_replicated, sharded_embeddings

_CLAIMED: WeakSet[nn.Module] = WeakSet()


def check_free(kernels: Sequence[FusedKernel]) -> None:
    """Reject kernels that another capture has.

    Raises:
        ConfigError: Names their tables.
    """
    taken = [kernel for kernel in kernels if kernel.module in _CLAIMED]
    if taken:
        raise ConfigError(
            "another StreamCheckpointer already captures these tables",
            hint="call close() on it before you attach a new one",
            tables=",".join(kernel.tables for kernel in taken),
        )


def claim(kernels: Sequence[FusedKernel]) -> Callable[[], None]:
    """Claim free kernels, so that no other capture takes them. Returns a function that frees them again."""
    modules = [kernel.module for kernel in kernels]
    _CLAIMED.update(modules)
    return lambda: _CLAIMED.difference_update(modules)


@dataclass(frozen=True, slots=True)
class _Place:
    """The place of one object on the way from the model to a kernel."""

    module: str
    """The sharded module, for the error."""
    held: Any
    """The container that holds it: a list, or the attributes or submodules of its owner."""
    key: Any
    value: object

    def kept(self) -> bool:
        try:
            return self.held[self.key] is self.value
        except (KeyError, IndexError):
            return False


class KernelGuard:
    """The objects on the way to each hooked kernel, as they were at the attach."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._root = model, unwrapped(model)
        sharded = sharded_embeddings(model)
        self._places = [place for path, module in sharded for place in _way(self._root, path, module)]
        self._kernels = {id(kernel): kernel for _, kernel in _kernels(model)}

    def check(self) -> None:
        """Check that no kernel was replaced: the hooked kernels must be those that train.

        Raises:
            UnsupportedError: Names the sharded module, or reports that the whole model was replaced.
        """
        if unwrapped(self._model) is not self._root:
            raise UnsupportedError(
                "the wrapped model (dmp.module) was replaced, so the model that trains now is not captured",
                hint="load values into the existing model, or call close(), replace it and attach again",
            )
        for place in self._places:
            if not place.kept():
                raise UnsupportedError(
                    "its kernels were replaced without dmp.reshard(), so the kernels that train now are not captured",
                    hint="move tables with dmp.reshard(), or call close(), replace them and attach again",
                    module=place.module,
                )

    def check_all(self) -> None:
        """(each marker) Run :meth:`check`, and check that no kernel was added after the attach. Walks the model.

        Raises:
            UnsupportedError: Names the sharded module.
        """
        self.check()
        for path, kernel in _kernels(self._model):
            if id(kernel) not in self._kernels:
                raise UnsupportedError(
                    "it was added after the StreamCheckpointer was created, so its tables are not captured",
                    hint="create the StreamCheckpointer after you add all tables; call close() before you add more",
                    module=path,
                )


def _kernels(model: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield (path of the sharded module, fused kernel) of all kernels that the model has now."""
    for path, module in sharded_embeddings(model):
        lookups = (lookup for lookup in module._lookups if not is_replicated(lookup))
        yield from ((path, group.emb_module) for lookup in lookups for group in lookup._emb_modules)


def _way(root: nn.Module, path: str, module: Any) -> Iterator[_Place]:
    """Yield the places from the wrapped model to each fused kernel of one sharded module."""
    owner = root
    for name in path.split(".") if path else ():  # the model itself may be the sharded module
        child = owner.get_submodule(name)
        yield _place(path, owner, child)
        owner = child
    yield _place(path, module, module._lookups)
    for lookup in module._lookups:
        if is_replicated(lookup):
            continue
        yield _place(path, module._lookups, lookup)
        yield _place(path, lookup, lookup._emb_modules)
        for group in lookup._emb_modules:
            yield _place(path, lookup._emb_modules, group)
            yield _place(path, group, group.emb_module)


def _place(path: str, owner: Any, value: object) -> _Place:
    """Return where ``owner`` holds ``value``: found once, to be compared at every step."""
    for held in [owner] if isinstance(owner, list) else [vars(owner), owner._modules]:
        for key, each in enumerate(held) if isinstance(held, list) else held.items():
            if each is value:
                return _Place(path, held, key, value)
    raise AssertionError(f"{type(owner).__name__} does not hold {type(value).__name__}")
