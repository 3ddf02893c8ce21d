"""Background thread for calls that another thread must not wait for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from torchrec_stream_ckpt.util.interpreter_exit import end_at_exit, stopping
from torchrec_stream_ckpt.util.signal_safe import SafeFuture

T = TypeVar("T")


class Worker:
    """Runs calls one after the other on a daemon thread. Unlike an executor, it does not keep the process from exiting.

    When the interpreter exits, submitted calls may finish within ``interpreter_exit.GRACE_S``.

    Args:
        name: Name of the thread.
        at_exit: Method that is called when the interpreter exits, before that wait, if its object still exists. It
            gives up calls that can no longer finish.
    """

    def __init__(self, name: str, at_exit: Callable[[], object] | None = None) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._name, self._closed = name, False
        self._newest: weakref.ref[Future[Any]] | None = None
        thread = threading.Thread(target=self._run, name=name, daemon=True)
        thread.start()
        method = weakref.WeakMethod(at_exit) if at_exit is not None else lambda: None
        end_at_exit(thread, self.close, is_idle=self._is_idle, give_up=lambda: (method() or _nothing)())

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run ``call(*args)`` after all earlier calls. Returns its future, which fails after a close."""
        future: Future[T] = SafeFuture()
        future.set_running_or_notify_cancel()
        if self._closed:
            future.set_exception(RuntimeError(f"{self._name} was closed"))
            return future

        def run() -> None:
            try:
                result = call(*args)
            except BaseException as error:  # the future's owner gets the exception
                future.set_exception(error)
            else:
                future.set_result(result)

        self._newest = weakref.ref(future)
        self._calls.put(run)
        return future

    def close(self) -> None:
        """End the thread after all submitted calls. Does not wait."""
        self._closed = True
        self._calls.put(None)

    def _is_idle(self) -> bool:
        newest = self._newest() if self._newest is not None else None
        return newest is None or newest.done()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not stopping.is_set():
            call()
            del call  # and its references, because the next call may be far off


def _nothing() -> None:
    pass
