"""Retry policies for an unreachable log or store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class Patience(Protocol):
    """Runs an action, once or until the log and the store answer."""

    def __call__(self, action: Callable[[], T]) -> T: ...


def at_once(action: Callable[[], T]) -> T:
    """Run ``action`` once; an unreachable log or store is an error."""
    return action()
