"""The job that is killed: ``recipes/train_dlrm.py`` on two ranks, and what each rank writes down of it.

Processes are forks of a server that has imported torch and TorchRec, so that a start takes a second; each is killed by
a real SIGKILL.
"""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import fresh_processes

from torchrec_stream_ckpt.script import free_port

WORLD = 2
TIMEOUT_S = 180.0
LOSS = struct.Struct("<qfd")
"""Step, loss of this rank, Unix time."""
LOADED, STOPS = "loaded.jsonl", "stops.json"


class StuckError(Exception):
    """The job does not go on by itself; says what its ranks have printed last."""


def job_flags(rows: int) -> list[str]:
    """Clicks like Criteo's: a dense part of 13 numbers, 26 tables of one id a sample."""
    tables = ",".join(str(max(rows // (1 + number), 50)) for number in range(26))
    return [
        *("--num_embeddings_per_feature", tables, "--embedding_dim", "16", "--ids_per_lookup", "1"),
        *("--dense_arch_layer_sizes", "64,16", "--over_arch_layer_sizes", "64,1", "--learning_rate", "0.05"),
        *("--batch_size", "256", "--sharding", "mixed", "--epochs", "1", "--limit_train_batches", "10000000"),
        *("--log_every", "1000000"),
    ]


def record_loss(folder: Path, step: int, loss: torch.Tensor) -> None:
    """Append the step and this rank's loss: one write, which a SIGKILL does not tear."""
    path = folder / f"losses-{os.environ['RANK']}.bin"
    with path.open("ab", buffering=0) as file:
        file.write(LOSS.pack(step, float(loss), time.time()))


def losses(folder: Path, rank: int) -> list[tuple[int, bytes]]:
    """Each step that this rank has trained, in that order, with the bits of its loss; a step again after each loss
    of it."""
    path = folder / f"losses-{rank}.bin"
    data = path.read_bytes() if path.exists() else b""
    whole = len(data) // LOSS.size * LOSS.size
    return [(LOSS.unpack_from(data, at)[0], data[at + 8 : at + 12]) for at in range(0, whole, LOSS.size)]


def times(folder: Path) -> list[tuple[int, float]]:
    """Each step that rank 0 has trained, in that order, and when it had ended."""
    data = (folder / "losses-0.bin").read_bytes()
    return [(step, at) for step, _, at in LOSS.iter_unpack(data[: len(data) // LOSS.size * LOSS.size])]


def last_step(folder: Path) -> int:
    """The newest step that rank 0 has written down; 0 before the first one."""
    path = folder / "losses-0.bin"
    size = path.stat().st_size // LOSS.size if path.exists() else 0
    if not size:
        return 0
    with path.open("rb") as file:
        file.seek((size - 1) * LOSS.size)
        return int(LOSS.unpack(file.read(LOSS.size))[0])


def stops(folder: Path) -> list[int]:
    """The steps at whose end the whole job is kept; it ends after the last one. Empty until the driver has decided."""
    path = folder / STOPS
    return json.loads(path.read_text()) if path.exists() else []


def at_end_of(step: int, folder: Path, whole_job: Callable[[], dict[str, Any] | None]) -> bool:
    """(all ranks) Keep the whole job if this is a stop; whether it is the last one.

    The driver writes the stops many steps ahead, so that no rank passes one before it has read them.
    """
    wanted = stops(folder)
    if step in wanted and (truth := whole_job()) is not None:
        torch.save(truth, folder / "whole.tmp")
        (folder / "whole.tmp").rename(folder / f"whole-{step}.pt")
    return bool(wanted) and step >= wanted[-1]


def ours(flags: list[str], folder: Path) -> None:
    """(rank) Train with streaming checkpoints until the last stop."""
    from torchrec_stream_ckpt.recipes.proof import StepEvent, gather, train

    def on_step(event: StepEvent) -> None:
        if event.loss is None:
            note_load(folder, event.step)
        else:
            record_loss(folder, event.step, event.loss)
        if at_end_of(event.step, folder, lambda: gather(event)):
            raise SystemExit(0)

    train(flags, on_step)


def note_load(folder: Path, step: int) -> None:
    """The job stands at ``step``, before it trains; rank 0 writes it down."""
    if os.environ["RANK"] != "0":
        return
    with (folder / LOADED).open("a") as file:
        file.write(json.dumps({"step": step, "time_s": time.time()}) + "\n")


def loads(folder: Path) -> list[dict[str, float]]:
    path = folder / LOADED
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_whole(path: Path, text: str) -> None:
    path.with_suffix(".tmp").write_text(text)
    path.with_suffix(".tmp").rename(path)


def _enter(environment: dict[str, str], output: Path, body: Callable[..., None], *args: Any) -> None:
    """A process of the job: its output goes to a file."""
    os.environ |= environment
    torch.set_num_threads(1)
    for stream in (1, 2):
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND), stream)
    body(*args)


class Processes:
    """What runs at present: ranks of one attempt, or a service. Nothing outlives :meth:`kill`."""

    def __init__(self, folder: Path, name: str, number: int, body: Callable[..., None], *args: Any) -> None:
        self.output = folder / f"{name}.out"
        port = free_port()
        shared = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        shared |= {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        self.processes = [
            fresh_processes().Process(
                target=_enter,
                args=({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, self.output, body, *args),
                daemon=True,
            )
            for rank in range(number)
        ]
        for process in self.processes:
            process.start()

    @property
    def codes(self) -> list[int | None]:
        return [process.exitcode for process in self.processes]

    def kill(self, only: int | None = None) -> None:
        """SIGKILL all of them, or one; the others of a killed rank are given up to ten seconds to end by
        themselves."""
        if only is not None:
            self.processes[only].kill()
            self.processes[only].join()
            for process in self.processes:
                process.join(10)
        for process in self.processes:
            process.kill()
        for process in self.processes:
            process.join()

    def wait(self, done: Callable[[], bool]) -> None:
        """Until ``done``.

        Raises:
            StuckError: a process has failed before, or it takes more than ``TIMEOUT_S``.
        """
        deadline = time.monotonic() + TIMEOUT_S
        while not done():
            if any(self.codes) or time.monotonic() > deadline:
                said = self.output.read_text()[-3000:] if self.output.exists() else ""
                raise StuckError(f"exit codes {self.codes} after at most {TIMEOUT_S:g} s:\n{said}")
            time.sleep(0.005)
