"""One collective call at a time: a call that starts inside another one is rejected, on any thread."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from functools import partial, wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar, cast

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.ranks.liveness import Liveness

P = ParamSpec("P")
T = TypeVar("T")


class _Call:
    """Exists as long as a collective call."""

    def __init__(self, name: str) -> None:
        self.name = name


class Calls:
    """Guards the collective calls of one object. None starts inside another: it would find rows and cuts half done.

    Args:
        roll: Reports to the other ranks which call this one is in.
    """

    def __init__(self, roll: Liveness) -> None:
        self._roll = roll
        self._process = os.getpid()
        self._now: dict[str, weakref.ref[_Call]] = {}
        """The call that is running."""

    @property
    def in_fork(self) -> bool:
        """True if this process was forked from the one that created the object."""
        return os.getpid() != self._process

    def check_none(self, name: str) -> None:
        """Reject ``name`` while a call is running."""
        if (held := self._now.get("now")) is not None and (running := held()) is not None:
            raise _inside(name, running)

    def make(self, name: str, call: Callable[[], T]) -> T:
        """Run ``call`` under its name, which waiting ranks report.

        Raises:
            ConfigError: Another call is running, or this is a fork.
        """
        if self.in_fork:
            raise ConfigError(
                f"{name} was called in a fork of the process that created this StreamCheckpointer",
                hint="call it in the trainer process: a fork has none of its threads and connections",
            )
        mine = _Call(name)
        running: _Call | None = None
        try:
            running = self._now.setdefault("now", weakref.ref(mine))()  # one step, for all threads
            if running is None:  # an interrupted call that could not record its end
                self._now["now"], running = weakref.ref(mine), mine
            if running is not mine:
                raise _inside(name, running)
            with self._roll.call(name):
                return call()
        finally:
            if (held := self._now.get("now")) is not None and held() is mine:
                del self._now["now"]
            running = None
            del mine  # a traceback keeps this frame: it must not keep the call running


class Guarded(Protocol):
    """An object with collective methods."""

    _calls: Calls


G = TypeVar("G", bound=Guarded)
Method = Callable[Concatenate[G, P], T]


def collective(name: str) -> Callable[[Method[G, P, T]], Method[G, P, T]]:
    """Guard a method that all ranks call by the ``Calls`` of its object."""

    def named(method: Method[G, P, T]) -> Method[G, P, T]:
        @wraps(method)
        def call(self: G, *args: P.args, **kwargs: P.kwargs) -> T:
            return self._calls.make(name, partial(method, self, *args, **kwargs))

        return cast("Method[G, P, T]", call)

    return named


def _inside(name: str, running: _Call) -> ConfigError:
    return ConfigError(
        f"{name} was called while {running.name} was running, on this thread or another one",
        hint="make one call after the other, on one thread; in a signal handler or a hook, set a flag, and make the "
        "call at the loop's next step boundary",
    )
