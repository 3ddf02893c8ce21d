"""Common base of engines with workers: a queue of tasks, and retries for workers that die."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torchrec_stream_ckpt.errors import EngineUnavailableError, StreamCkptError
from torchrec_stream_ckpt.maintain.engine.api import Engine, Order
from torchrec_stream_ckpt.maintain.engine.parcel import Parcel, SiteAddress, failed, packed

MAX_DEATHS = 3
"""A task is given up if this many workers in a row died of it."""
ENDED = "status"
"""Prefix of the description of a worker's end if no signal has killed it."""
_LOOK = "look for out-of-memory kills on their hosts; give them more memory, or run fewer at once"
_READ = "read what they have printed: nothing has killed them"


class Dispatcher(Engine, ABC):
    """Hands tasks that are not small to workers."""

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            self._assign()
            if any(future.done() for future in futures) or (left := until - time.monotonic()) <= 0:
                return
            self._poll(left)

    def _packed(self, source: SiteAddress, order: Order) -> Parcel | None:
        """Pack a task. If it cannot be packed, it ends with an error, and this is None."""
        try:
            return packed(source, order.task)
        except Exception as error:
            self._done(order, failed(order.task, error))
            return None

    def _done(self, order: Order, result: object) -> None:
        """Finish a task with a worker's answer: the result, or an error, which is a value too."""
        if isinstance(result, EngineUnavailableError):
            result.where["engine"] = self.name
        if isinstance(result, StreamCkptError):
            self._fail(order, result)
        elif not order.future.cancelled():
            order.future.set_result(result)

    @staticmethod
    def _fail(order: Order, error: StreamCkptError) -> None:
        """End a task with an error. Does nothing if the task was cancelled."""
        if not order.future.cancelled():
            order.future.set_exception(error)

    def _died(self, order: Order, how: str) -> None:
        """Handle the death of a task's worker: another worker runs the task, unless too many have died."""
        self.restarts += 1
        order.deaths.append(how)
        if len(order.deaths) < MAX_DEATHS:
            self._queue.put_back(order)
        else:
            said = f"{MAX_DEATHS} workers in a row have died at one task ({order.task}): {', '.join(order.deaths)}"
            ended = all(each.startswith(ENDED) for each in order.deaths)
            hint = _READ if ended else _LOOK
            self._fail(order, EngineUnavailableError(said, hint=hint, engine=self.name))

    def _give_up(self, error: StreamCkptError) -> None:
        """End all waiting tasks with an error, because none can run now."""
        while (order := self._queue.take()) is not None:
            order.future.set_exception(error)

    @abstractmethod
    def _poll(self, timeout_s: float) -> None:
        """Receive answers of workers, or wait for ``timeout_s``."""
