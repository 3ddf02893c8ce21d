"""A job that trains until it is killed, and the points at which tests kill it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemWriter

import torchrec_stream_ckpt.restore.apply as apply
from tests.jobs import attach
from tests.model import Spec, trainer, truth
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.commit.control import Control

HANG_S = 60.0

# point -> what is wrapped, the rank that hangs there, and whether it hangs before or behind the real call
POINTS: dict[str, tuple[object, str, int, str]] = {
    "sweep": (Capture, "sweep", 0, "behind"),
    "dense save": (FileSystemWriter, "write_data", 1, "before"),
    "dense metadata": (FileSystemWriter, "finish", 0, "before"),
    "between MARK and COMMIT": (Control, "commit", 0, "before"),
    "behind COMMIT": (Control, "commit", 0, "behind"),
    "behind CLAIM": (Control, "claim", 0, "behind"),
    "restore": (apply, "_apply_frame", 0, "behind"),
}


def live(spec: Spec, settings: StreamConfig, truths: Path, run: Path, point: str | None, nth: int) -> None:
    """Restore the newest marker, say what came back, then train; the truth of each step is kept aside first.

    At the ``nth`` pass of ``point`` the rank writes ``run/fired`` and stands still, to be killed there.
    """
    job = trainer(spec)
    job.step()  # another state than the marker's
    job.step_number = 0
    checkpointer = attach(job, settings)
    if point is not None:
        _arm(point, nth, run / "fired")
    restored = checkpointer.restore()
    if restored is not None:
        _write(run / "restored.pt", {"id": str(restored.id), "step": restored.step, "state": truth(job)})
    folder = truths / str(checkpointer.generation)
    folder.mkdir(exist_ok=True)
    deadline = time.monotonic() + HANG_S
    while time.monotonic() < deadline:
        job.step()
        _write(folder / f"{job.step_number}.pt", truth(job))
        checkpointer.step()
        (run / "stepping").touch()


def _write(path: Path, value: object) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def _arm(point: str, nth: int, fired: Path) -> None:
    owner, name, rank, side = POINTS[point]
    if dist.get_rank() != rank % dist.get_world_size():
        return
    real: Callable[..., Any] = getattr(owner, name)
    passes = 0

    def hang(*args: Any, **kwargs: Any) -> Any:
        nonlocal passes
        passes += 1
        if passes == nth and side == "before":
            _stand_still(fired)
        result = real(*args, **kwargs)
        if passes == nth and side == "behind":
            _stand_still(fired)
        return result

    setattr(owner, name, hang)


def _stand_still(fired: Path) -> None:
    fired.touch()
    time.sleep(HANG_S)
