"""How a call that needs the log or the store takes their absence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Patience(Protocol):
    """Runs an action: once, or until log and store answer."""

    def __call__(self, action: Callable[[], T]) -> T: ...


def at_once(action: Callable[[], T]) -> T:
    """Run ``action`` once; what is away is an error."""
    return action()
