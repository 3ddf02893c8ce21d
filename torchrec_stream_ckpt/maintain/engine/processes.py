"""Workers that are processes on this host. They start with the first task that is not small, and stay.

Each has its own pipe. A worker ends when its pipe is closed, or when the materializer has ended, whatever killed it.

Small tasks never reach them (``api.SMALL_BYTES``). The rest handles kills, which the standard library's pool does not:
a worker that dies fails only its own task, and another worker repeats it (a pool breaks, with all of its tasks). No
worker outlives a killed materializer (those of a pool do).
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from torchrec_stream_ckpt.errors import EngineUnavailableError
from torchrec_stream_ckpt.maintain.engine.api import Order, Site
from torchrec_stream_ckpt.maintain.engine.dispatcher import ENDED, Dispatcher
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress, opened, work

_TO_END_S = 5.0
"""Seconds that a worker that has closed its pipe may take to end by itself."""


class Processes(Dispatcher):
    """Runs tasks in processes of this host. These are spawned, because a fork of a process with threads may hang.

    Args:
        here: Resources of small tasks.
        source: Address of the log and store that workers open.
        workers: Number of processes.
    """

    def __init__(self, here: Site, source: SiteAddress, workers: int) -> None:
        super().__init__(f"local:{workers}", here)
        self._source = source
        self.workers = workers
        self._workers: list[_Worker] = []

    @property
    def pids(self) -> list[int]:
        """Process ids of the running workers."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _assign(self) -> None:
        for worker in [each for each in self._workers if not each.process.is_alive() and each.order is None]:
            self._bury(worker)
        free = [worker for worker in self._workers if worker.order is None]
        while free or len(self._workers) < self.workers:
            order = self._queue.take()
            if order is None:
                return
            if (parcel := self._packed(self._source, order)) is None:
                continue
            if not free:
                free.append(self._start(order))
            worker = free.pop()
            worker.order = order
            try:
                worker.pipe.send(parcel)
            except OSError:  # it has just died
                self._bury(worker)

    def _start(self, order: Order) -> _Worker:
        """Start another worker. If the system has no room for it, the task returns to the queue."""
        try:
            self._workers.append(_Worker())
        except OSError as error:
            self._queue.put_back(order)
            raise EngineUnavailableError(
                f"cannot start a worker: {error.strerror or error}",
                hint="raise this user's limits (ulimit -u, ulimit -n), or run fewer workers: local:N",
                engine=self.name,
            ) from None
        return self._workers[-1]

    def _poll(self, timeout_s: float) -> None:
        busy: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers if worker.order is not None}
        for pipe in wait(list(busy), timeout_s):
            worker = busy[pipe]
            try:
                answer = worker.pipe.recv_bytes()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            assert worker.order is not None
            order, worker.order = worker.order, None
            self._done(order, opened(answer, order.task))

    def _bury(self, worker: _Worker) -> None:
        """Remove a worker that has died or is about to, because it has closed its pipe."""
        self._workers.remove(worker)
        worker.pipe.close()
        worker.process.join(_TO_END_S)
        if worker.process.exitcode is None:
            worker.process.kill()
            worker.process.join()
        if worker.order is not None:
            self._died(worker.order, how_it_ended(worker.process.exitcode or 0))

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers.clear()


class _Worker:
    """One process, and its current task.

    Raises:
        OSError: the system has no room for another process.
    """

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs,), name="stream-ckpt-worker", daemon=True
        )
        try:
            self.process.start()
        except BaseException:
            self.pipe.close()
            raise
        finally:
            theirs.close()
        self.order: Order | None = None


def _serve(pipe: Connection) -> None:
    """(in a worker) Run the tasks received, until the materializer ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the materializer ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    site_of = cache(SiteAddress.open)
    while True:
        try:
            parcel = pipe.recv()
        except (EOFError, OSError):
            return
        answer = work(parcel, site_of)
        try:
            pipe.send_bytes(answer)
        except OSError:
            return


def how_it_ended(code: int) -> str:
    """Describe how a process has ended, by its exit code."""
    if code >= 0:
        return f"{ENDED} {code}"
    try:
        return signal.Signals(-code).name
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
