"""Notice calls of methods that have no hook of their own, on one object and on none of its copies.

What is put on an object is taken off at the end. ``copy.deepcopy`` and ``pickle`` take none of it along: a copy has the
methods of its class, and an idle hook where the object has one of ours.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A callback for the hook lists of modules, which a copy of the module calls in vain."""

    __slots__ = ("_callback",)

    def __init__(self, callback: Callable[..., Any]) -> None:
        self._callback = callback

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._callback(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (_idle,)


def _idle(*_args: object, **_more: object) -> None:
    """The hook of a copy."""


class _Wrapper:
    """Stands for a method of one object."""

    __slots__ = ("_around", "_name", "_owner", "_real", "active")

    def __init__(self, owner: Any, name: str, around: Callable[..., Any]) -> None:
        self._owner, self._name, self._around = owner, name, around
        self._real = getattr(owner, name)
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._around(self._real, *args, **kwargs) if self.active else self._real(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._owner, self._name)  # of the copy, whose attributes are not there yet: its class's method


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call ``around(real, *args, **kwargs)`` in place of each ``owner.name(*args, **kwargs)``; returns the remover."""
    before = vars(owner).get(name)
    wrapper = _Wrapper(owner, name, around)

    def undo() -> None:
        wrapper.active = False  # another wrapper may stand on this one: it stays where it is, and does nothing
        if vars(owner).get(name) is not wrapper:
            return
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)

    setattr(owner, name, wrapper)
    return undo


def patch(owner: Any, name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Call ``before`` with the same arguments ahead of each call of ``owner.name``; returns the remover."""

    def around(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return real(*args, **kwargs)

    return wrap(owner, name, around)
