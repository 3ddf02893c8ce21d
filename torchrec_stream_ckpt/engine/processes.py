"""Workers that are processes on this host. They are started with the first task that is not small, and stay.

Each has a pipe of its own. A worker ends when its pipe does or when the materializer is no more, whatever killed it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from torchrec_stream_ckpt.engine.address import SiteAddress
from torchrec_stream_ckpt.engine.api import Order, Site
from torchrec_stream_ckpt.engine.dispatcher import Dispatcher
from torchrec_stream_ckpt.errors import StreamCkptError


class Processes(Dispatcher):
    """Runs tasks in processes of this host, which are spawned: a fork of a process with threads may hang.

    Args:
        here: What small tasks work with.
        source: What workers open.
        workers: How many there are.
    """

    def __init__(self, here: Site, source: SiteAddress, workers: int) -> None:
        super().__init__(f"local:{workers}", here)
        self._source = source
        self._count = workers
        self._workers: list[_Worker] = []

    @property
    def workers(self) -> int:
        return self._count

    @property
    def pids(self) -> list[int]:
        """Of the workers that run."""
        return [worker.process.pid or 0 for worker in self._workers]

    def _assign(self) -> None:
        for worker in [each for each in self._workers if not each.process.is_alive() and each.order is None]:
            self._bury(worker)
        free = [worker for worker in self._workers if worker.order is None]
        while free or len(self._workers) < self._count:
            order = self._queue.take()
            if order is None:
                return
            if not free:
                free.append(_Worker(self._source))
                self._workers.append(free[-1])
            worker = free.pop()
            worker.order = order
            try:
                worker.pipe.send(order.task)
            except OSError:  # it has just died
                self._bury(worker)

    def _poll(self, timeout_s: float) -> None:
        busy: dict[Any, _Worker] = {worker.pipe: worker for worker in self._workers if worker.order is not None}
        for pipe in wait(list(busy), timeout_s):
            worker = busy[pipe]
            try:
                result = worker.pipe.recv()
            except (EOFError, OSError):
                self._bury(worker)
                continue
            assert worker.order is not None
            order, worker.order = worker.order, None
            self._done(order, result)

    def _bury(self, worker: _Worker) -> None:
        """A worker has died."""
        self._workers.remove(worker)
        worker.process.join()
        worker.pipe.close()
        if worker.order is not None:
            code = worker.process.exitcode or 0
            self._died(worker.order, signal.Signals(-code).name if code < 0 else f"status {code}")

    def close(self) -> None:
        for worker in self._workers:
            worker.process.kill()
        for worker in self._workers:
            worker.process.join()
            worker.process.close()
            worker.pipe.close()
        self._workers.clear()


class _Worker:
    """One process, and the task that it is at."""

    def __init__(self, source: SiteAddress) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(
            target=_serve, args=(theirs, source), name="stream-ckpt-worker", daemon=True
        )
        self.process.start()
        theirs.close()
        self.order: Order | None = None


def _serve(pipe: Connection, source: SiteAddress) -> None:
    """(in a worker) Do what comes, until the materializer is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all: the materializer ends its workers
    threading.Thread(target=_end_with_parent, daemon=True).start()
    site: Site | None = None
    while True:
        try:
            task = pipe.recv()
        except (EOFError, OSError):
            return
        try:
            site = site or source.open()
            result = task.run(site)
        except StreamCkptError as error:
            result = error
        try:
            pipe.send(result)
        except OSError:
            return


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
