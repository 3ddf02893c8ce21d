"""A thread for what another one must not wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from torchrec_stream_ckpt.signal_safe import SafeFuture

T = TypeVar("T")


class Worker:
    """Runs calls one after the other on a daemon thread: unlike an executor's, it keeps no process from ending."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, call: Callable[..., T], *args: Any) -> Future[T]:
        """Run ``call(*args)`` after all that was submitted before; returns its future."""
        future: Future[T] = SafeFuture()
        future.set_running_or_notify_cancel()

        def run() -> None:
            try:
                result = call(*args)
            except BaseException as error:  # whoever asks the future hears of it
                future.set_exception(error)
            else:
                future.set_result(result)

        self._calls.put(run)
        return future

    def close(self) -> None:
        """Let the thread end after what was submitted. Does not wait."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call  # and what it holds: the next one may be long in coming
