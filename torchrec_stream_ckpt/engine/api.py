"""What runs the tasks of a materializer: the interface, and the engine that runs them in this process.

A task is a value: it says what to read and what to write, by names of objects and places in the log. What it writes is
a function of it, so it may run twice, anywhere, or half and then again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
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

    log: LogReader
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

    def run(self, place: Site) -> R_co:
        """Do it.

        Raises:
            StreamCkptError: as of whatever it does.
        """


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
        place: What tasks work with.
    """

    def __init__(self, place: Site) -> None:
        self.name = "local:1"
        self.workers = 1
        self.restarts = 0
        self._place = place
        self._waiting: tuple[deque[tuple[Task[Any], Future[Any]]], ...] = (deque(), deque())
        """Urgent tasks, and others."""

    def submit(self, task: Task[Any], *, urgent: bool = False) -> Future[Any]:
        """As ``Engine.submit``."""
        future: Future[Any] = Future()
        if task.num_bytes < SMALL_BYTES:
            self.run(task, future)
        else:
            self._waiting[not urgent].append((task, future))
        return future

    def run(self, task: Task[Any], future: Future[Any]) -> None:
        """Run one task now. What ends this process, or was told to stop, passes through."""
        try:
            result = task.run(self._place)
        except StreamCkptError as error:
            future.set_exception(error)
        else:
            future.set_result(result)

    def wait(self, futures: Sequence[Future[Any]], timeout_s: float) -> None:
        """Run one task, if none of these is done yet: a caller that has something better to do is asked in between."""
        if any(future.done() for future in futures):
            return
        for waiting in self._waiting:
            while waiting:
                task, future = waiting.popleft()
                if not future.cancelled():
                    self.run(task, future)
                    return

    def close(self) -> None:
        """There is nothing to end."""
