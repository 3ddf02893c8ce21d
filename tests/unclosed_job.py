"""A script whose processes raise with a marker in flight and never call ``close()``; prints their exit statuses.

``tests/unclosed_job.py FOLDER`` forks one process for each rank of each case. They end as the interpreter of a script
does (``Py_Exit``), which processes of ``multiprocessing`` do not.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from tests.inside import inside
from tests.model import PLAN_1, PLAN_2, trainer
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.util import interpreter_exit


def alone(ours: StreamCheckpointer) -> None:
    """The marker was just cut."""
    ours.mark()


def never_closed(ours: StreamCheckpointer) -> None:
    """No marker is in flight."""
    ours.mark().result(60)


def busy_in_torch(ours: StreamCheckpointer) -> None:
    """The dense state takes longer to save than the end of a process may take."""
    interpreter_exit.GRACE_S = 0.2

    def save(*_: object, **__: object) -> None:
        while True:
            torch.ones(200_000).sum()

    inside(ours).dense.save = save  # type: ignore[method-assign]
    ours.mark()


def one_rank_waits(ours: StreamCheckpointer) -> None:
    """Rank 1 saves dense state, and waits there for rank 0, which does not come."""
    interpreter_exit.GRACE_S = 0.5
    if dist.get_rank() == 0:
        inside(ours).dense.save = lambda *_, **__: time.sleep(60)  # type: ignore[method-assign]
    ours.mark()
    if dist.get_rank() == 0:
        time.sleep(3)


def with_a_callback(ours: StreamCheckpointer) -> None:
    """The callback of an earlier marker is inside torch."""
    ours.mark().result(60)


CASES: dict[str, tuple[int, Callable[[StreamCheckpointer], None]]] = {
    "alone": (1, alone),
    "two": (2, alone),
    "never_closed": (2, never_closed),
    "busy_in_torch": (1, busy_in_torch),
    "one_rank_waits": (2, one_rank_waits),
    "with_a_callback": (1, with_a_callback),
}


def work(*_: object) -> None:
    ends = time.monotonic() + 1
    while time.monotonic() < ends:
        torch.ones(200_000).sum()


def job(name: str, folder: Path, rank: int) -> None:
    world, run = CASES[name]
    store = dist.FileStore(str(folder / "ranks"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
    live = trainer(PLAN_1 if world == 1 else PLAN_2)
    ours = StreamCheckpointer(
        live.dmp,
        live.optimizer,
        config=StreamConfig(uri=f"file://{folder / 'log'}", marker_every=2),
        on_commit=work if run is with_a_callback else None,
    )
    for _ in range(3):
        live.step()
        ours.step()
    run(ours)
    raise RuntimeError("the error of the user")


def statuses(name: str, folder: Path) -> list[int]:
    """Exit statuses of the ranks of one job."""
    folder.mkdir()
    pids = []
    for rank in range(CASES[name][0]):
        pids.append(os.fork())
        if not pids[-1]:
            try:
                job(name, folder, rank)
            except RuntimeError:
                traceback.print_exc()
            ctypes.pythonapi.Py_Exit(1)  # what the interpreter calls after the last line of a script
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


if __name__ == "__main__":
    root = Path(sys.argv[1])
    print(json.dumps({each: statuses(each, root / each) for each in CASES}))
