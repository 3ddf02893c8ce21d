"""Handle SIGTERM and SIGUSR1 while a checkpointer is open: handlers set flags, which the training thread reads.

SIGTERM requests a marker and the end of the job, SIGUSR1 only a marker. Several signals of a kind before an answer
count as one. A handler takes no lock, writes nothing and logs nothing, because it may run between any two bytecodes.
After it has set the flag, it calls the previously installed handler.
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
"""Seconds after ``signal_s`` before the watching thread reports that a signal has no answer."""
_TICK_S = 1.0

Seen = dict[signal.Signals, int]
"""Number of signals of each kind that had arrived at some moment."""


@dataclass(slots=True)
class _Came:
    """State of one kind of signal."""

    times: int = 0
    """Number of signals; written by the handler."""
    at_s: float = 0.0
    """Arrival of the first unanswered signal, on the monotonic clock; written by the handler."""
    answered: int = 0
    """Number of answered signals; written by the training thread."""
    heard_s: float | None = None
    """Time of the first step boundary after the signal; written by the training thread."""
    told: bool = False
    """True if a missing answer was reported; written by the watching thread."""

    @property
    def pending(self) -> bool:
        return self.times != self.answered

    def come(self) -> None:
        """(handler) Record a signal."""
        if self.times == self.answered:
            self.at_s = time.monotonic()
        self.times += 1

    def answer(self, times: int) -> None:
        self.at_s = time.monotonic()  # for a signal that has arrived in the meantime
        self.answered, self.heard_s, self.told = times, None, False


class Signals:
    """Signals that this rank has received.

    Args:
        on_signal: ``"mark"`` to install handlers. With any other value, none are installed and no signal is recorded.
        signal_s: Seconds that the answer to a signal may take.
    """

    def __init__(self, on_signal: str | None, signal_s: float) -> None:
        self.on = on_signal == "mark"
        self.signal_s = signal_s
        self._came = {STOP: _Came(), MARK: _Came()}
        self._before: dict[int, Any] = {}
        self._aside = False
        """True if the handlers only do what the previous handlers would do."""
        self._handler: _Handler | None = None
        self.removed = False
        """True after :meth:`remove`."""
        self._ending = SafeEvent()

    def check(self) -> None:
        """Refuse a process or thread in which handlers cannot be installed.

        Raises:
            ConfigError: this is not the main thread, or a handler is installed that could not be restored.
        """
        if not self.on:
            return
        if threading.current_thread() is not threading.main_thread():
            raise ConfigError(
                "on_signal requires the main thread, where Python installs signal handlers, but this is "
                f"{threading.current_thread().name}",
                hint="create the StreamCheckpointer on the main thread, or omit on_signal",
            )
        for number in self._came:
            if signal.getsignal(number) is None:
                raise ConfigError(
                    f"{number.name} has a handler that Python did not install and cannot put back",
                    hint="install it after creating the StreamCheckpointer, or omit on_signal",
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
        """Restore the previous handlers. If another one was installed since, ours stays and calls the previous ones."""
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
        """Within this context, signals act as if we had no handlers: a spare that waits has nothing to mark."""
        before, self._aside = self._aside, True
        try:
            yield
        finally:
            self._aside = before

    # The training thread.

    def pending(self, number: signal.Signals) -> bool:
        """Return whether a signal of this kind has arrived and has no answer yet."""
        return self._came[number].pending

    def seen(self) -> Seen:
        """Return the numbers of signals so far, to pass to :meth:`answered` after the answer."""
        return {number: came.times for number, came in self._came.items()}

    def answered(self, number: signal.Signals, seen: Seen) -> bool:
        """Record that the signals of this kind in ``seen`` are answered; returns whether any were unanswered."""
        came = self._came[number]
        if seen[number] == came.answered:
            return False
        came.answer(seen[number])
        return True

    def boundary(self) -> None:
        """(each step boundary) Start the clock of signals that have arrived since the last step boundary."""
        for came in self._came.values():
            if came.pending and came.heard_s is None:
                came.heard_s = time.monotonic()

    def waited_s(self, number: signal.Signals) -> float:
        """Return the seconds since the first step boundary after an unanswered signal. 0.0 before that boundary."""
        heard_s = self._came[number].heard_s
        return time.monotonic() - heard_s if heard_s is not None else 0.0

    @property
    def names(self) -> str:
        """Names of the signals that have no answer yet."""
        return " and ".join(number.name for number, came in self._came.items() if came.pending)

    # The watching thread.

    def _tick(self) -> None:
        for number, came in self._came.items():
            late_s = time.monotonic() - came.at_s
            if not came.pending or came.told or late_s <= self.signal_s + GRACE_S:
                continue
            came.told = True
            why = "has not reached a step boundary since" if came.heard_s is None else "waits for the other ranks"
            log.warning(
                "%s arrived %.0f s ago, but this rank %s: no marker was cut for it yet. It is cut once the rank "
                "continues, if the process is still running",
                number.name,
                late_s,
                why,
            )


class _Handler:
    """Installed handler. It keeps only the previous handlers alive, which may also be of this class."""

    def __init__(self, of: weakref.ref[Signals], before: dict[int, Any]) -> None:
        self._of = of
        self.before = before
        self._process = os.getpid()

    @property
    def is_over(self) -> bool:
        """True if its checkpointer is closed or was deleted."""
        signals = self._of()
        return signals is None or signals.removed

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Set the flag of each of our handlers in the chain, and call the handler before them.

        A handler is skipped if its checkpointer is closed or deleted, in a forked process, or in a spare that waits.
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
    """Watch for late answers on a separate thread, because the training thread may not reach a step boundary."""
    while not ending.wait(_TICK_S):
        signals = of()
        if signals is None:
            return
        signals._tick()
        del signals
