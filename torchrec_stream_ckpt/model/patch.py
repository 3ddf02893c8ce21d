"""Intercept calls of methods without hooks, on one object and on none of its copies.

Everything put on an object is removed at the end. ``copy.deepcopy`` and ``pickle`` do not copy it: a copy has the
methods of its class, and an idle hook where the object has one of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A callback for the hook lists of modules. In a copy of the module it does nothing."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[..., Any]) -> None:
        self._callback = callback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._callback(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_idle,)


def _idle(*_args: object, **_more: object) -> None:
    """Do nothing: the hook of a copy."""


class _Wrapper:
    """Replaces a method of one object."""

    __slots__ = ("_around", "_name", "_owner", "_real", "active")

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._real = getattr(owner, name)
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._real, *args, **kwargs) if self.active else self._real(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # of the copy, whose attributes do not exist yet: its class's method


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Replace each ``owner.name(*args, **kwargs)`` by ``around(real, *args, **kwargs)``. Returns the remover."""
    before = vars(owner).get(name)
    wrapper = _Wrapper(owner, name, around)

    def undo() -> None:
        wrapper.active = False  # another wrapper may wrap this one: it stays in place and does nothing
        if vars(owner).get(name) is not wrapper:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, wrapper)
    return undo


def patch(owner: Any, name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Call ``before`` with the same arguments ahead of each call of ``owner.name``. Returns the remover."""

    def around(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return real(*args, **kwargs)

    return wrap(owner, name, around)
