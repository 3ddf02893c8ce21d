"""Notice calls of methods that have no hook of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def patch(owner: Any, name: str, before: Callable[..., None]) -> Callable[[], None]:
    """Call ``before`` with the same arguments in front of each call of ``owner.name``; returns the remover."""
    real, active = getattr(owner, name), True

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if active:
            before(*args, **kwargs)
        return real(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False  # another wrapper may stand on this one: it stays where it is, and does nothing

    setattr(owner, name, wrapper)
    return undo
