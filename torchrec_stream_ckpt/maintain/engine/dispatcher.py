"""What engines with workers share: what waits for a worker, and patience with workers that die."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

from torchrec_stream_ckpt.errors import EngineUnavailableError, StreamCkptError
from torchrec_stream_ckpt.maintain.engine import api
from torchrec_stream_ckpt.maintain.engine.api import InProcess, Order, Site, Task, TaskQueue
from torchrec_stream_ckpt.maintain.engine.parcel import Failed

MAX_DEATHS = 3
"""A task is given up when so many workers in a row died of it."""
ENDED = "status"
"""How the death of a worker is told that nothing has killed."""
_LOOK = "look for out-of-memory kills on their hosts; give them more memory, or run fewer at once"
_READ = "read what they have printed: nothing has killed them"


class Dispatcher(ABC):
    """Hands tasks to workers; small tasks run in this process. As of ``Engine``.

    Args:
        name: As ``--engine`` names it.
        here: What small tasks work with.
    """

    def __init__(self, name: str, here: Site) -> None:
        self.name = name
        self.restarts = 0
        self._here = InProcess(here)
        self._queue = TaskQueue()

    @property
    @abstractmethod
    def workers(self) -> int:
        """Tasks that run at once."""

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        order = Order(task, urgent)
        if task.num_bytes < api.SMALL_BYTES:
            self._here.run(order)
        else:
            self._queue.put(order)
            try:
                self._assign()
            except BaseException:
                order.future.cancel()  # nobody gets it
                raise
        return order.future

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        while True:
            self._assign()
            if any(future.done() for future in futures) or (left := until - time.monotonic()) <= 0:
                return
            self._poll(left)

    def _done(self, order: Order, result: object) -> None:
        """A worker has answered: with the result, or with an error, which is a value too."""
        if isinstance(result, Failed):
            result = EngineUnavailableError(
                f"a task failed in its worker ({order.task}): {result.why}",
                hint="read what the worker has printed; --engine local:1 does the same in one process, without workers",
                engine=self.name,
            )
        if isinstance(result, StreamCkptError):
            self._fail(order, result)
        elif not order.future.cancelled():
            order.future.set_result(result)

    @staticmethod
    def _fail(order: Order, error: StreamCkptError) -> None:
        """End a task by an error; of one that was cancelled nobody wants to know."""
        if not order.future.cancelled():
            order.future.set_exception(error)

    def _died(self, order: Order, how: str) -> None:
        """The worker of a task is no more: another one does it, unless too many have died."""
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
        """Nothing of what waits can be done now."""
        while (order := self._queue.take()) is not None:
            order.future.set_exception(error)

    @abstractmethod
    def _assign(self) -> None:
        """Give waiting tasks to workers that are free."""

    @abstractmethod
    def _poll(self, timeout_s: float) -> None:
        """Hear from workers, or wait that long."""

    @abstractmethod
    def close(self) -> None: ...
