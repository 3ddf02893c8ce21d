"""A job whose dirty set is several times larger than its ring, and a file log that can be told to take nothing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from typing import Any

import torch
import torch.distributed as dist

from tests import model
from tests.inside import inside
from tests.model import Trainer, trainer
from tests.parts import Ack
from torchrec_stream_ckpt import StreamCheckpointer
from torchrec_stream_ckpt.log.file_writer import FileWriter
from torchrec_stream_ckpt.save import coordinator

ROWS = 40_000
RING_BYTES = 2_000_000
RING = {"ring_bytes": RING_BYTES, "marker_budget_bytes": 10_000_000, "commit_timeout_s": 60.0}
WAIT_S = 60.0


def large(spec: model.Spec, **build: Any) -> Trainer:
    """Two tables of ``ROWS`` rows; batches touch their first few hundred."""
    model.TABLES[:2] = [("t_user", ROWS, 16, ["user"]), ("t_item", ROWS, 16, ["item", "also_item"])]
    return trainer(spec, **build)


class Gate:
    """The file logs of this process: while the gate is shut, they take frames and acknowledge none."""

    def __init__(self) -> None:
        self._opened = threading.Event()
        self._opened.set()
        self.shut, self.open = self._opened.clear, self._opened.set
        real = FileWriter.poll

        def poll(writer: FileWriter, timeout_s: float) -> list[Ack]:
            return real(writer, timeout_s) if self._opened.wait(timeout_s) else []

        FileWriter.poll = poll  # type: ignore[method-assign]


class Agreed:
    """When the commit thread of this rank has heard of all ranks that they cut one marker.

    Before that, a rank that gives its part up may say so there and then; after it, only by a vote at a step boundary.
    """

    def __init__(self) -> None:
        self._heard = threading.Event()
        self.clear = self._heard.clear
        real = coordinator.failpoint

        def failpoint(name: str) -> None:
            if name == "cut.agreed":
                self._heard.set()
            real(name)

        coordinator.failpoint = failpoint  # type: ignore[attr-defined]

    def wait(self) -> None:
        assert self._heard.wait(WAIT_S)


def steps(job: Trainer, checkpointer: StreamCheckpointer, count: int) -> None:
    for _ in range(count):
        job.step()
        checkpointer.step()


def touch_everything(job: Trainer) -> None:
    """Every row of every table is to be sent again."""
    job.dmp.load_state_dict(job.dmp.state_dict())


def cut(checkpointer: StreamCheckpointer) -> Future[Any]:
    """As the cadence does: at this boundary, without waiting for space."""
    inside(checkpointer).coordinator.settle(WAIT_S)  # the thread of the last marker ends a moment after its future
    return inside(checkpointer).cut()


def everywhere(fact: bool) -> bool:
    """Whether it is so on all ranks: they must agree, or they part ways."""
    flag = torch.tensor(int(fact))
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag)


def steps_until_done(job: Trainer, checkpointer: StreamCheckpointer, future: Future[Any]) -> int:
    """Train until the marker has settled on all ranks; how many steps it took."""
    deadline, count = time.monotonic() + WAIT_S, 0
    while not everywhere(future.done()):
        assert time.monotonic() < deadline
        steps(job, checkpointer, 1)
        count += 1
    return count
