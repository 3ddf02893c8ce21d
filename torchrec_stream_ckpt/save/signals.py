"""SIGTERM and SIGUSR1 while a checkpointer is open: handlers that set a flag, and what the training thread reads of it.

SIGTERM asks for a marker and the end of the job, SIGUSR1 for a marker alone. Two signals of a kind that come before an
answer are one. A handler takes no lock, writes nothing and logs nothing: it may run between any two bytecodes. After
the flag it calls the handler that stood before it.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.signal_safe import SafeEvent

log = logging.getLogger(__name__)

STOP, MARK = signal.SIGTERM, signal.SIGUSR1
GRACE_S = 5.0
"""How much later than ``signal_s`` an answer may come before the watching thread says that there is none."""
_TICK_S = 1.0

Seen = dict[signal.Signals, int]
"""How often each signal had come at some moment."""


@dataclass(slots=True)
class _Came:
    """Of one signal."""

    times: int = 0
    """How often it came; the handler's."""
    at_s: float = 0.0
    """When the first one came that has no answer, on the monotonic clock; the handler's."""
    answered: int = 0
    """How many have an answer; the training thread's."""
    heard_s: float | None = None
    """The first step boundary after it; the training thread's."""
    told: bool = False
    """That there was no answer in time was said; the watching thread's."""

    @property
    def pending(self) -> bool:
        return self.times != self.answered

    def come(self) -> None:
        """(handler)"""
        if self.times == self.answered:
            self.at_s = time.monotonic()
        self.times += 1

    def answer(self, times: int) -> None:
        self.at_s = time.monotonic()  # of one that has come meanwhile
        self.answered, self.heard_s, self.told = times, None, False


class Signals:
    """What signals have asked of this rank.

    Args:
        on_signal: ``"mark"``, or anything else: nothing is installed, and nothing is ever asked.
        signal_s: How long the answer to a signal may take.
    """

    def __init__(self, on_signal: str | None, signal_s: float) -> None:
        self.on = on_signal == "mark"
        self.signal_s = signal_s
        self._came = {STOP: _Came(), MARK: _Came()}
        self._before: dict[int, Any] = {}
        self._aside = False
        """The handlers do as those before them would have done."""
        self._handler: _Handler | None = None
        self.removed = False
        """True if it has ended."""
        self._ending = SafeEvent()

    def check(self) -> None:
        """Refuse what can install no handlers.

        Raises:
            ConfigError: this is not the main thread, or a handler stands there that could not be put back.
        """
        if not self.on:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "on_signal needs the main thread: Python installs handlers of signals there alone, and this is "
                f"{threading.current_thread().name}",
                hint="make the StreamCheckpointer on the main thread, or leave on_signal out",
            )
        for number in self._came:
            if signal.getsignal(number) is None:
                raise ConfigError(
                    f"{number.name} has a handler that was not installed by Python, and could not be put back",
                    hint="install it after the StreamCheckpointer was made, or leave on_signal out",
                )

    def install(self) -> None:
        """(main thread) Handle the signals from here on, until :meth:`remove`."""
        if not self.on:
            return
        self._before = {int(number): signal.getsignal(number) for number in self._came}
        self._handler = _Handler(weakref.ref(self), self._before)
        for number in self._came:
            signal.signal(number, self._handler)
        threading.Thread(
            target=_watch, args=(weakref.ref(self), self._ending), name="stream-ckpt-signals", daemon=True
        ).start()

    def remove(self) -> None:
        """Put back the handlers that stood before; where another one stands by now, ours passes on to them."""
        self._ending.set()
        self._aside = self.removed = True
        if self._handler is None or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) is self._handler:
                while isinstance(before, _Handler) and before.is_over:
                    before = before.before[number]
                signal.signal(number, before)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Within, signals do what they would do without us: a spare that waits has nothing to mark."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    # The training thread.

    def pending(self, number: signal.Signals) -> bool:
        """Return whether it has come and has no answer yet."""
        return self._came[number].pending

    def seen(self) -> Seen:
        """Note what has come so far: what is done from here on is an answer to it."""
        return {number: came.times for number, came in self._came.items()}

    def answered(self, number: signal.Signals, seen: Seen) -> bool:
        """Note that what had come of it has its answer; returns whether there was anything."""
        came = self._came[number]
        if seen[number] == came.answered:
            return False
        came.answer(seen[number])
        return True

    def boundary(self) -> None:
        """(each step boundary) From the first one after a signal on, its time runs."""
        for came in self._came.values():
            if came.pending and came.heard_s is None:
                came.heard_s = time.monotonic()

    def waited_s(self, number: signal.Signals) -> float:
        """For how long it waits for an answer, since the first step boundary after it; 0.0: it does not."""
        heard_s = self._came[number].heard_s
        return time.monotonic() - heard_s if heard_s is not None else 0.0

    @property
    def names(self) -> str:
        """Those that have no answer yet."""
        return " and ".join(number.name for number, came in self._came.items() if came.pending)

    # The thread that watches.

    def _tick(self) -> None:
        for number, came in self._came.items():
            late_s = time.monotonic() - came.at_s
            if not came.pending or came.told or late_s <= self.signal_s + GRACE_S:
                continue
            came.told = True
            why = "has come to no step boundary since" if came.heard_s is None else "waits for the other ranks"
            log.warning(
                "%s came %.0f s ago, and this rank %s: there is no marker for it yet. It is cut once the rank goes on, "
                "if the process is still there",
                number.name,
                late_s,
                why,
            )


class _Handler:
    """What is installed; it keeps nothing alive but what stood before it. That may be one of ours, too."""

    def __init__(self, of: weakref.ref[Signals], before: dict[int, Any]) -> None:
        self._of = of
        self.before = before
        self._process = os.getpid()

    @property
    def is_over(self) -> bool:
        """Its checkpointer is closed or gone."""
        signals = self._of()
        return signals is None or signals.removed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Set the flag of each of ours, and call what stood before them.

        Of checkpointers that are closed or gone, in a forked process, or in a spare: as if they were not there.
        """
        handler: Any = self
        taken = False
        while isinstance(handler, _Handler):
            taken = handler._takes(number) or taken
            handler = handler.before[number]
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL and not taken:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _takes(self, number: int) -> bool:
        signals = self._of()
        if signals is None or signals._aside or os.getpid() != self._process:
            return False
        signals._came[signal.Signals(number)].come()
        return True


def _watch(of: weakref.ref[Signals], ending: threading.Event) -> None:
    """A thread of its own: says what the training thread cannot say, as it does not come to a step boundary."""
    while not ending.wait(_TICK_S):
        signals = of()
        if signals is None:
            return
        signals._tick()
        del signals
