"""Warm gloo ranks for the matrix: processes that run one job after the other, each under a process group of its own.

``tests.ranks`` forks fresh processes for every job, which is what a test of a crash wants. Here hundreds of short
jobs follow each other, and a job that fails or hangs is the exception (measured on two cores: 0.05 s for an empty
job of four ranks, 0.7 s with fresh ones; 1.1 s against 2.3 s for training on four and restoring on two).
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import collective_utils, comm

from tests.forks import context
from tests.ranks import RankFailed, _received, _send

MAX_RANKS = 5
_LAST_WORDS_S = 2.0
"""How long the other ranks may take to say what they know, once one has failed."""


class Worker:
    """One process that waits for jobs."""

    def __init__(self, stack: Path) -> None:
        self.pipe, theirs = context.Pipe()
        self._stack = stack
        self.process: BaseProcess = context.Process(target=_worker_main, args=(theirs, self._stack), daemon=True)
        self.process.start()
        theirs.close()

    def answer(self, wait_s: float) -> tuple[bool, Any]:
        """Whether the job went well, and what it returned or what it died of."""
        if not self.pipe.poll(max(0.0, wait_s)):
            return False, "did not finish in time"
        try:
            ok, value = _received(self.pipe)
        except (EOFError, ConnectionResetError):
            return False, "died"
        return ok, value if ok else f"raised:\n{value}"

    def stack(self) -> str:
        """Where all of its threads stand, in a job or between two, from the file that it has opened for it."""
        if self.process.pid is None or not self.process.is_alive() or not self._stack.exists():
            return ""
        try:
            os.kill(self.process.pid, signal.SIGUSR1)
        except ProcessLookupError:  # it has ended since
            return ""
        time.sleep(0.2)  # nothing says when it is written, and it only serves a message
        return self._stack.read_text()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Up to five ranks, started when they are first needed; those of a failed job are replaced.

    A process serves one rank only: torch caches its place in a mesh by the ranks in that, and would go on with it.
    """

    def __init__(self) -> None:
        self._workers: dict[int, Worker] = {}
        """By rank."""
        self._scratch = Path(tempfile.mkdtemp(prefix="pool-"))
        """Stays until all ranks have ended: torch's file store touches its file once more when it is collected, and
        waits for minutes where the folder is gone."""
        self._numbers = itertools.count()

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 120.0) -> list[Any]:
        """Call an importable ``function(*args)`` on ``world`` ranks; what each of them returned.

        Raises:
            RankFailed: a rank raised, died, took too long, or left other constants to the jobs of later tests; the next
                job finds fresh ranks.
        """
        return self._run(world, False, function, args, timeout_s)

    def prepare(self, world: int, function: Callable[[], Any]) -> None:
        """Call a function that sets constants of the package for all later jobs. For a pool of one test alone."""
        self._run(world, True, function, (), 120.0)

    def _run(
        self, world: int, prepares: bool, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float
    ) -> list[Any]:
        assert 1 <= world <= MAX_RANKS
        for rank in range(world):
            if rank not in self._workers:
                self._workers[rank] = Worker(self._scratch / f"stack-{next(self._numbers)}")
        workers, store = [self._workers[rank] for rank in range(world)], self._scratch / f"store-{next(self._numbers)}"
        try:
            for rank, worker in enumerate(workers):
                worker.pipe.send((rank, world, store, prepares, function, args))
            return _collect(workers, time.monotonic() + timeout_s)
        except BaseException:
            # The others may hang in a collective that will never be complete.
            for rank in range(world):
                self._workers.pop(rank).stop()
            raise

    def close(self) -> None:
        while self._workers:
            self._workers.popitem()[1].stop()
        shutil.rmtree(self._scratch, ignore_errors=True)


def _collect(workers: list[Worker], deadline: float) -> list[Any]:
    """What every rank returned; raises with what all of those say that failed."""
    results, reasons = [], []
    for rank, worker in enumerate(workers):
        left = deadline - time.monotonic()
        ok, value = worker.answer(min(left, _LAST_WORDS_S) if reasons else left)
        results.append(value)
        if not ok:
            reasons.append(f"rank {rank} {value}\n{worker.stack()}")
    if reasons:
        raise RankFailed("\n".join(reasons))
    return results


def _worker_main(pipe: Connection, stack: Path) -> None:
    faulthandler.register(signal.SIGUSR1, file=stack.open("w"), all_threads=True)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    try:
        while True:
            try:
                job = pipe.recv()
            except EOFError:
                break  # the tests have ended
            try:
                _send(pipe, (True, _run(*job)))
            except BaseException:
                _send(pipe, (False, traceback.format_exc()))
                break
            gc.collect()  # hooks and modules of a job are cycles, and hold its tables
    finally:
        pipe.close()
        os._exit(0)


def _run(
    rank: int, world: int, store: Path, prepares: bool, function: Callable[..., Any], args: tuple[Any, ...]
) -> Any:
    """One job: nothing of the one before may show in it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    # TorchRec's globals: the groups of table-row-wise and grid plans, and whether a first DMP has asked rank 0.
    comm._INTRA_PG = comm._CROSS_PG = None
    collective_utils._INITIALIZED = False
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    before = _constants()
    value = function(*args)
    left = {name: now for name, now in _constants().items() if before.get(name, now) != now}
    assert prepares or not left, f"the job has left other constants to the jobs of later tests: {left}"
    dist.barrier()
    dist.destroy_process_group()
    return value


def _constants() -> dict[str, int | float]:
    """Numbers in the modules of the package that are written as constants."""
    return {
        f"{name}.{key}": getattr(module, key)
        for name, module in list(sys.modules.items())
        if name.startswith("torchrec_stream_ckpt")
        for key in _names_of_constants(name)
    }


@functools.cache
def _names_of_constants(module: str) -> list[str]:
    """Looked for once: a hundred jobs have them in common."""
    return [key for key, value in vars(sys.modules[module]).items() if key.isupper() and isinstance(value, int | float)]
