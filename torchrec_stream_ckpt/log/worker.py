"""A thread for what another one must not wait for."""

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
    """Runs calls one after the other on a daemon thread: unlike an executor's, it keeps no process from ending.

    When the interpreter ends, the calls that were submitted may finish within ``interpreter_exit.GRACE_S``.

    Args:
        name: Of the thread.
        at_exit: Method that is called once the interpreter ends, before that wait, if its object is still there: gives
            up calls that cannot finish any more.
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
        """Run ``call(*args)`` after all that was submitted before; returns its future, which fails after a close."""
        future: Future[T] = SafeFuture()
        future.set_running_or_notify_cancel()
        if self._closed:
            future.set_exception(RuntimeError(f"{self._name} was closed"))
            return future

        def run() -> None:
            try:
                result = call(*args)
            except BaseException as error:  # whoever asks the future hears of it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._newest = weakref.ref(future)
        self._calls.put(run)
        return future

    def close(self) -> None:
        """Let the thread end after what was submitted. Does not wait."""
        self._closed = True
        self._calls.put(None)

    def _is_idle(self) -> bool:
        newest = self._newest() if self._newest is not None else None
        return newest is None or newest.done()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None and not stopping.is_set():
            call()
            del call  # and what it holds: the next one may be long in coming


def _nothing() -> None:
    pass
