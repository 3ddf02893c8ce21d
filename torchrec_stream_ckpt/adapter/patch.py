"""Notice calls of methods that have no hook of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> Callable[[], None]:
    """Call ``around(real, *args, **kwargs)`` in place of each ``owner.name(*args, **kwargs)``; returns the remover."""
    real, active = getattr(owner, name), True

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(real, *args, **kwargs) if active else real(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False  # another wrapper may stand on this one: it stays where it is, and does nothing

    setattr(owner, name, wrapper)
    return undo


def patch(owner: Any, name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Call ``before`` with the same arguments in front of each call of ``owner.name``; returns the remover."""

    def around(real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        before(*args, **kwargs)
        return real(*args, **kwargs)

    return wrap(owner, name, around)
