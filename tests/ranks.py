"""Real gloo ranks for tests: fresh processes, forked from the server of ``tests.forks``."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from tests.faults.hosts import enter
from tests.forks import context
from tests.packed import packed, unpacked

Namespace = Path | tuple[Path, ...] | None


class RankFailed(AssertionError):  # noqa: N818
    """A rank raised, or died; carries its traceback."""


@dataclass
class Job:
    """Ranks that run ``function(*args)`` each, under one process group."""

    processes: list[BaseProcess]
    pipes: list[Connection]
    scratch: str
    results: list[Any] = field(default_factory=list)

    def kill(self, ranks: list[int] | None = None) -> None:
        """SIGKILL, all ranks or some."""
        for rank in ranks if ranks is not None else range(len(self.processes)):
            self.processes[rank].kill()  # which forgives a rank that ended by itself just before

    def signal(self, number: int, ranks: list[int] | None = None) -> None:
        """Any signal, to all ranks that still run, or to some of them."""
        for process in self.processes if ranks is None else [self.processes[rank] for rank in ranks]:
            if process.pid is not None and process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it ended between the question and the signal
                    os.kill(process.pid, number)

    def join(self, timeout_s: float = 400.0) -> list[Any]:
        """What each rank returned.

        Raises:
            RankFailed: a rank raised, was killed, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        said: dict[int, tuple[bool, Any]] = {}
        try:
            for rank in range(len(self.pipes)):
                while rank not in said:
                    self._hear(said, deadline, timeout_s)
                ok, value = said[rank]
                if not ok:
                    raise RankFailed(f"rank {rank} raised:\n{value}")
        finally:
            self.close()
        return [said[rank][1] for rank in range(len(self.pipes))]

    def _hear(self, said: dict[int, tuple[bool, Any]], deadline: float, timeout_s: float) -> None:
        """Add what ranks have to say. One that died ends the wait: others may go on for long before they miss it."""
        silent = {pipe: rank for rank, pipe in enumerate(self.pipes) if rank not in said}
        ready = wait(list(silent), max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"rank {min(silent.values())} did not finish in {timeout_s} s")
        for pipe in self.pipes:
            if pipe in ready:
                try:
                    said[silent[pipe]] = _received(pipe)
                except EOFError:
                    raise RankFailed(f"rank {silent[pipe]} died") from None

    def wait_for(self, path: Path, timeout_s: float = 300.0) -> None:
        """Wait until rank 0 has made a file.

        Raises:
            RankFailed: it has ended without, or took too long.
        """
        deadline = time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > deadline:
                raise RankFailed(f"rank 0 did not make {path.name} in {timeout_s} s")
            if self.pipes[0].poll(0.01) and not path.exists():
                try:
                    said = _received(self.pipes[0])[1]
                except EOFError:
                    said = "it died"
                raise RankFailed(f"rank 0 has ended without {path.name}:\n{said}")

    def reap(self) -> None:
        """Collect killed ranks."""
        self.close()

    def close(self) -> None:
        self.kill()
        for process in self.processes:
            process.join()
        for pipe in self.pipes:
            pipe.close()
        shutil.rmtree(self.scratch, ignore_errors=True)


def start(world: int, function: Callable[..., Any], *args: Any, namespace: Namespace = None) -> Job:
    """Start ``world`` ranks of an importable function; it is called as ``function(*args)`` on each.

    Args:
        world: How many.
        function: What they do.
        args: What they do it with.
        namespace: The network namespace that they live in, or several, which get ranks in turn; by default that of this
            machine.
    """
    scratch = tempfile.mkdtemp(prefix="ranks-")
    processes, pipes = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        mine, link = (
            (namespace, "lo") if not isinstance(namespace, tuple) else (namespace[rank % len(namespace)], "eth0")
        )
        given = (rank, world, scratch, theirs, function, args, mine, link)
        process = context.Process(target=_rank_main, args=given, daemon=True)
        process.start()
        theirs.close()
        processes.append(process)
        pipes.append(ours)
    return Job(processes, pipes, scratch)


def run(
    world: int, function: Callable[..., Any], *args: Any, timeout_s: float = 400.0, namespace: Namespace = None
) -> list[Any]:
    """Run to the end and return what each rank returned."""
    return start(world, function, *args, namespace=namespace).join(timeout_s)


def _send(pipe: Connection, value: object) -> None:
    """By value: the pipe's own pickler would hand over file descriptors that die with the rank."""
    pipe.send_bytes(packed(value))


def _received(pipe: Connection) -> tuple[bool, Any]:
    """What a rank has sent: whether it has ended well, and what it returned or raised."""
    return cast("tuple[bool, Any]", unpacked(pipe.recv_bytes()))


def _rank_main(
    rank: int,
    world: int,
    scratch: str,
    pipe: Connection,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    namespace: Path | None,
    link: str,
) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world)}
    try:
        if namespace is not None:
            enter(namespace)  # before any thread or socket of this process
            os.environ["GLOO_SOCKET_IFNAME"] = link
        dist.init_process_group("gloo", init_method=f"file://{scratch}/store", rank=rank, world_size=world)
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        _send(pipe, (True, value))
    except BaseException:
        _send(pipe, (False, traceback.format_exc()))
    finally:
        pipe.close()
        os._exit(0)
