"""End our background threads before the interpreter does.

At its end, the interpreter kills a daemon thread as soon as the thread asks for the interpreter's lock. A thread inside
torch asks for it in a C++ destructor. Being killed there ends the whole process with SIGABRT, and hides the user's
traceback and exit status. So these threads are ended in ``atexit``: after all threads of the user, and while ours can
still run.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

GRACE_S = 5.0
"""Time for threads to finish their work: a marker in flight is committed or given up within it."""
_STOP_S = 1.0
"""Time to wait after that for interrupted threads."""
_POLL_S = 0.005


@dataclass(frozen=True, slots=True)
class _Background:
    """A thread that ends before the interpreter."""

    thread: threading.Thread
    is_idle: Callable[[], bool]
    end: Callable[[], object]
    give_up: Callable[[], object]


_running: list[_Background] = []
_lock = threading.Lock()
stopping = threading.Event()
"""Set once the interpreter ends and no background thread may start new work."""


def end_at_exit(
    thread: threading.Thread,
    end: Callable[[], object],
    *,
    is_idle: Callable[[], bool] = lambda: True,
    give_up: Callable[[], object] = lambda: None,
) -> None:
    """End a started daemon thread before the interpreter ends.

    The callables are kept until the thread has ended, and are called on the main thread.

    Args:
        thread: The thread.
        end: Asks it to end, without waiting.
        is_idle: Returns whether it has nothing to finish.
        give_up: Called first: gives up work that can no longer be finished.
    """
    with _lock:
        _running[:] = [other for other in _running if other.thread.is_alive()]
        _running.append(_Background(thread, is_idle, end, give_up))


def _end_threads() -> None:
    """(main thread, at the end of the interpreter) End all threads, within ``GRACE_S + _STOP_S``."""
    background = [each for each in _running if each.thread.is_alive()]
    deadline = time.monotonic() + GRACE_S
    for each in background:
        each.give_up()
    while not all(each.is_idle() for each in background) and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    for each in background:
        each.end()
    for each in background:
        each.thread.join(max(0.1, deadline - time.monotonic()) if each.is_idle() else 0.0)
    stopping.set()
    late = [each.thread for each in background if each.thread.is_alive()]
    for thread in late:
        _interrupt(thread)
    deadline = time.monotonic() + _STOP_S
    for thread in late:  # a thread that waits in gloo for another rank stays there and is harmless
        thread.join(max(0.0, deadline - time.monotonic()))


def _interrupt(thread: threading.Thread) -> None:
    """Raise SystemExit in a thread at its next line of Python."""
    if thread.ident is not None:
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(SystemExit))


def _forget() -> None:
    """(in a fork) Forget the threads, which are the parent's."""
    global _lock
    _lock = threading.Lock()
    _running.clear()


atexit.register(_end_threads)
os.register_at_fork(after_in_child=_forget)
