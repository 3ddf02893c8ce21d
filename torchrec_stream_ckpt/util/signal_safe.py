"""Conditions, events and futures of the training thread: a signal handler that raises leaves none of them locked.

``with`` on a lock of the interpreter cannot be interrupted between the lock and the block. The standard library's
``Condition`` is entered and left by Python functions instead. If a handler raises inside of those, the training thread
keeps the lock forever, and every other thread waits for it. ``Event`` and ``Future`` are built on it.
"""

from __future__ import annotations

import concurrent.futures
import threading
from operator import attrgetter
from typing import TypeVar

T = TypeVar("T")


class SafeCondition(threading.Condition):
    """A condition entered and left by its lock's own functions, without a line of Python in between."""

    __enter__ = property(attrgetter("_lock.__enter__"))
    __exit__ = property(attrgetter("_lock.__exit__"))


class SafeEvent(threading.Event):
    """An event on such a condition."""

    def __init__(self) -> None:
        super().__init__()
        self._cond = SafeCondition(threading.Lock())


class SafeFuture(concurrent.futures.Future[T]):
    """A future on such a condition."""

    def __init__(self) -> None:
        super().__init__()
        self._condition = SafeCondition()
