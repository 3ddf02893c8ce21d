"""Base of the engines that run the tasks of a materializer, and the engine that runs them in this process.

A task is a value that states what to read and what to write, by object names and positions in the log. Its output is a
function of it, so it may run twice, anywhere, or be interrupted and run again.
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
"""A task that reads fewer bytes runs at once in the submitting process: sending it to a worker costs more."""


@dataclass(frozen=True, slots=True)
class Site:
    """Resources of a task in the process that runs it."""

    log: LogReader | None
    """The log. None if it is lost; then no task reads it."""
    objects: Objects
    pool: Executor
    """Threads to read the store with."""
    tell: Callable[[int], None] = lambda _: None
    """Called with the number of bytes read. Ends the task at this point by raising."""
    scratch: Path | None = None
    """Folder for temporary files. None for ``TMPDIR``."""


class Task(Protocol[R_co]):
    """Work that any process can do."""

    @property
    def num_bytes(self) -> int:
        """Bytes that the task reads."""

    def run(self, site: Site) -> R_co:
        """Run the task.

        Raises:
            StreamCkptError: any error of its work.
        """


@dataclass(eq=False, slots=True)
class Order:
    """One submitted task."""

    task: Task[Any]
    urgent: bool
    future: Future[Any] = field(default_factory=Future)
    deaths: list[str] = field(default_factory=list)
    """Descriptions of the deaths of workers that were running this task."""


class TaskQueue:
    """Orders that wait: urgent ones first, each kind in the order in which it was added."""

    def __init__(self) -> None:
        self._urgent: deque[Order] = deque()
        self._others: deque[Order] = deque()

    def __bool__(self) -> bool:
        return bool(self._urgent or self._others)

    def put(self, order: Order) -> None:
        """Add an order after all others of its kind."""
        (self._urgent if order.urgent else self._others).append(order)

    def put_back(self, order: Order) -> None:
        """Add an order again, before all others of its kind."""
        (self._urgent if order.urgent else self._others).appendleft(order)

    def take(self) -> Order | None:
        """Remove and return the order to begin next. Skips cancelled ones. Returns None if none is left."""
        for waiting in (self._urgent, self._others):
            while waiting:
                order = waiting.popleft()
                if not order.future.cancelled():
                    return order
        return None


class Engine:
    """Runs tasks. Used by one thread. Small tasks run in this process when they are submitted.

    Args:
        name: Name of the engine, as in ``--engine``.
        here: Resources of the tasks that run in this process.
    """

    workers = 1
    """Number of tasks that run at once."""

    def __init__(self, name: str, here: Site) -> None:
        self.name = name
        self.restarts = 0
        """Number of workers that have died and been replaced."""
        self._here = here
        self._queue = TaskQueue()

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        """Begin a task, or queue it. ``urgent`` tasks begin before the others.

        Raises:
            EngineUnavailableError: the engine cannot be reached.
        """
        order = Order(task, urgent)
        if task.num_bytes < SMALL_BYTES:
            self._run(order)
        else:
            self._queue.put(order)
            try:
                self._assign()
            except BaseException:
                order.future.cancel()  # no caller receives the future
                raise
        return order.future

    def _run(self, order: Order) -> None:
        """Run one task now. Exceptions that end this process, or that were raised to stop it, pass through."""
        try:
            result = order.task.run(self._here)
        except StreamCkptError as error:
            order.future.set_exception(error)
        else:
            order.future.set_result(result)

    def _assign(self) -> None:
        """Give waiting tasks to free workers."""

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Work until one of these is done, or until the time is over.

        In this process, one task runs if none of these is done yet. The caller gets control in between, to do more
        important work. An error of a task is set on its future: its own error, or EngineUnavailableError if several
        workers in succession died of it.

        Raises:
            EngineUnavailableError: the engine cannot be reached.
        """
        if not any(future.done() for future in futures) and (order := self._queue.take()) is not None:
            self._run(order)

    def close(self) -> None:
        """End all workers at once. The next materializer repeats their unfinished tasks."""


class InProcess(Engine):
    """Runs all tasks in this process: those that are not small one by one while a caller waits.

    Args:
        site: Resources of the tasks.
    """

    def __init__(self, site: Site) -> None:
        super().__init__("local:1", site)
