"""Warm gloo ranks for the matrix: processes that run one job after the other, each under a process group of its own.

``tests.ranks`` forks fresh processes for every job, which is what a test of a crash wants. Here hundreds of short
jobs follow each other, and none of them is meant to fail.
"""

from __future__ import annotations

import gc
import io
import logging
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import comm

from tests.ranks import RankFailed, _context, _send

MAX_RANKS = 4


class Worker:
    """One process that waits for jobs."""

    def __init__(self) -> None:
        self.pipe, theirs = _context.Pipe()
        self.process: BaseProcess = _context.Process(target=_worker_main, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


class Pool:
    """Up to four ranks, started when they are first needed; those of a failed job are replaced."""

    def __init__(self) -> None:
        self._workers: list[Worker] = []
        self.started = 0
        """Processes started so far, replacements included."""

    def run(self, world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
        """Call an importable ``function(*args)`` on ``world`` ranks; what each of them returned.

        Raises:
            RankFailed: a rank raised, died, or took too long; the next job finds fresh ranks.
        """
        assert 1 <= world <= MAX_RANKS
        while len(self._workers) < world:
            self._workers.append(Worker())
            self.started += 1
        scratch = tempfile.mkdtemp(prefix="pool-")
        try:
            for rank, worker in enumerate(self._workers[:world]):
                worker.pipe.send((rank, world, scratch, function, args))
            return _collect(self._workers[:world], time.monotonic() + timeout_s)
        except BaseException:
            # The others may hang in a collective that will never be complete.
            for worker in self._workers[:world]:
                worker.stop()
            del self._workers[:world]
            raise
        finally:
            shutil.rmtree(scratch, ignore_errors=True)

    def close(self) -> None:
        while self._workers:
            self._workers.pop().stop()


def _collect(workers: list[Worker], deadline: float) -> list[Any]:
    results = []
    for rank, worker in enumerate(workers):
        if not worker.pipe.poll(max(0.0, deadline - time.monotonic())):
            raise RankFailed(f"rank {rank} did not finish in time")
        try:
            ok, value = torch.load(io.BytesIO(worker.pipe.recv_bytes()), weights_only=False)
        except (EOFError, ConnectionResetError):
            raise RankFailed(f"rank {rank} died") from None
        if not ok:
            raise RankFailed(f"rank {rank} raised:\n{value}")
        results.append(value)
    return results


def _worker_main(pipe: Connection) -> None:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    gc.freeze()  # what has been imported is no garbage: collecting takes half a second otherwise
    try:
        while True:
            try:
                rank, world, scratch, function, args = pipe.recv()
            except EOFError:
                break  # the tests have ended
            try:
                _send(pipe, (True, _run(rank, world, scratch, function, args)))
            except BaseException:
                _send(pipe, (False, traceback.format_exc()))
                break
            gc.collect()  # hooks and modules of a job are cycles, and hold its tables
    finally:
        pipe.close()
        os._exit(0)


def _run(rank: int, world: int, scratch: str, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """One job: nothing of the one before may show in it."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=world)
    try:
        value = function(*args)
        dist.barrier()
    finally:
        # TorchRec keeps the groups of table-row-wise and grid plans in two globals.
        comm._INTRA_PG = comm._CROSS_PG = None
    dist.destroy_process_group()
    return value
