"""What runs the tasks of a materializer: the interface, and the engine that runs them in this process.

A task is a value: it says what to read and what to write, by names of objects and places in the log. What it writes is
a function of it, so it may run twice, anywhere, or half and then again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.store.api import Objects

R_co = TypeVar("R_co", covariant=True)

SMALL_BYTES = 64 * 2**20
"""A task that reads less runs in the process that asks for it, at once: to start others and to tell them costs more."""


@dataclass(frozen=True, slots=True)
class Site:
    """What a task works with, in the process that runs it."""

    log: LogReader | None
    """None: it is gone, and no task asks for it."""
    objects: Objects
    pool: Executor
    """Threads to read the store with."""
    tell: Callable[[int], None] = lambda _: None
    """Called with bytes that were read; ends the task where it stands by raising."""
    scratch: Path | None = None
    """Where temporary files are made; None: ``TMPDIR``."""


class Task(Protocol[R_co]):
    """Work that any process can do."""

    @property
    def num_bytes(self) -> int:
        """Bytes that it reads."""

    def run(self, site: Site) -> R_co:
        """Do it.

        Raises:
            StreamCkptError: as of whatever it does.
        """


@dataclass(eq=False, slots=True)
class Order:
    """One task that was submitted."""

    task: Task[Any]
    urgent: bool
    future: Future[Any] = field(default_factory=Future)
    deaths: list[str] = field(default_factory=list)
    """How the workers ended that were to do it."""


class TaskQueue:
    """Orders that wait: urgent ones come first, each kind in the order in which it was put."""

    def __init__(self) -> None:
        self._urgent: deque[Order] = deque()
        self._others: deque[Order] = deque()

    def __bool__(self) -> bool:
        return bool(self._urgent or self._others)

    def put(self, order: Order) -> None:
        """It waits, after all of its kind."""
        (self._urgent if order.urgent else self._others).append(order)

    def put_back(self, order: Order) -> None:
        """It waits again, before all of its kind."""
        (self._urgent if order.urgent else self._others).appendleft(order)

    def take(self) -> Order | None:
        """The order that is to begin next, which waits no longer; None: none is left. Passes over cancelled ones."""
        for waiting in (self._urgent, self._others):
            while waiting:
                order = waiting.popleft()
                if not order.future.cancelled():
                    return order
        return None


class Engine(Protocol):
    """Runs tasks. Used by one thread."""

    @property
    def name(self) -> str:
        """As ``--engine`` names it."""

    @property
    def workers(self) -> int:
        """Tasks that run at once."""

    @property
    def restarts(self) -> int:
        """Workers that died and were replaced so far."""

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        """Begin a task, or note it for later; ``urgent`` ones begin before the others."""

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Go on until one of these is done, or until the time is over.

        An error of a task stands in its future: its own, or EngineUnavailableError if worker after worker died of it.

        Raises:
            EngineUnavailableError: the engine cannot be reached.
        """

    def close(self) -> None:
        """End all workers, at once: what they were doing is done again by the next materializer."""


class InProcess:
    """Runs tasks in this process: small ones when they are submitted, others one by one while somebody waits.

    Args:
        site: What tasks work with.
    """

    def __init__(self, site: Site) -> None:
        self.name = "local:1"
        self.workers = 1
        self.restarts = 0
        self._site = site
        self._queue = TaskQueue()

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        """As ``Engine.submit``."""
        order = Order(task, urgent)
        if task.num_bytes < SMALL_BYTES:
            self.run(order)
        else:
            self._queue.put(order)
        return order.future

    def run(self, order: Order) -> None:
        """Run one task now. What ends this process, or was told to stop, passes through."""
        try:
            result = order.task.run(self._site)
        except StreamCkptError as error:
            order.future.set_exception(error)
        else:
            order.future.set_result(result)

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Run one task, if none of these is done yet: a caller that has something better to do is asked in between."""
        if not any(future.done() for future in futures) and (order := self._queue.take()) is not None:
            self.run(order)

    def close(self) -> None:
        """There is nothing to end."""
