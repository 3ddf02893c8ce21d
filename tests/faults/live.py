"""What the ranks of a tormented job run: they train until they are killed, and write down what they promise."""

from __future__ import annotations

import json
import os
import random
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import tests.model as model
from tests.inside import inside
from tests.jobs import attach
from tests.model import PLAN_2, Spec, Trainer, differences, trainer, truth
from tests.padded import pad_small_frames
from tests.parts import failpoints
from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError, StreamConfig
from torchrec_stream_ckpt.save.coordinator import Coordinator
from torchrec_stream_ckpt.util.types import Committed


@dataclass(frozen=True)
class Orders:
    """What one incarnation of the job is to do, and where it writes things down."""

    spec: Spec
    settings: StreamConfig
    truths: Path
    """``GENERATION/STEP.pt``: the whole state at each step, put aside before the step is given to the checkpointer."""
    run: Path
    """``reported``, ``failed``, ``fired``, ``settled-RANK``, ``closed-RANK``, ``progress-RANK``, ``restored.pt``."""
    fuse: str = ""
    fuse_rank: int = 0
    scale: int = 1
    """How many times the rows of tables and the samples of batches."""
    wild_clock: bool = False
    pause_s: float = 0.02
    """Between two steps: it trains on while others wait for its markers, and they need the machine, too."""
    life_s: float = 240.0
    """It lives no longer, whatever becomes of the test."""

    close_after: int = 0
    """After so many steps a marker is cut, and the checkpointer is closed with it in flight; 0: never."""
    close_s: float = 0.0
    """What ``close`` is given then."""

    keeps_all: bool = False
    """True to keep the truth of every step: a reader of rows may see any of them."""

    @property
    def memory(self) -> int:
        """How many steps the truth of a step is kept at which no marker has been cut."""
        return (50 if self.scale == 1 else 8) if not self.keeps_all else sys.maxsize


def live(orders: Orders) -> None:
    """Restore the newest marker, say what came back, then train for as long as it lasts."""
    _grow(orders.scale)
    if orders.settings.log_writes == "direct":
        pad_small_frames()
    if orders.wild_clock:
        _loosen_clock(orders.run / f"clock-{dist.get_rank()}")
    cuts = _listen(orders.run)
    job = trainer(orders.spec)
    job.step()  # another state than the marker's
    job.step_number = 0
    if not orders.close_after:
        _arm(orders)
    checkpointer = attach(job, orders.settings)
    restored = checkpointer.restore()
    if restored is not None:
        _save(orders.run / "restored.pt", {"id": str(restored.id), "step": restored.step, "state": truth(job)})
    generation = checkpointer.generation
    folder = _folder(orders, generation)
    begin, steps = time.monotonic(), []
    while time.monotonic() - begin < orders.life_s:
        time.sleep(orders.pause_s)
        trained = time.monotonic()
        job.step()
        step_s = time.monotonic() - trained
        _save(folder / f"{job.step_number}.pt", truth(job))
        dist.barrier()  # a replica may show rows of another rank as soon as that has sent them
        checkpointer.step()
        if checkpointer.generation != generation:  # the log has lost a stream, and the job goes on in another one
            generation, before = checkpointer.generation, folder / f"{job.step_number}.pt"
            folder = _folder(orders, generation)
            if dist.get_rank() == 0:
                os.link(before, folder / before.name)
        steps.append(step_s)
        if dist.get_rank() == 0 and job.step_number - orders.memory not in cuts:
            (folder / f"{job.step_number - orders.memory}.pt").unlink(missing_ok=True)
        stream = inside(checkpointer).stream
        assert stream is not None
        progress: dict[str, Any] = {
            "step": job.step_number,
            "failure": stream.publisher.failure,
            "pending": stream.publisher.pending,
        }
        progress["steps_s"] = steps[-50:]
        _replace(orders.run / f"progress-{dist.get_rank()}", json.dumps(progress).encode())
        if len(steps) == orders.close_after:
            _close(checkpointer, orders)
            return


def _arm(orders: Orders) -> None:
    if dist.get_rank() == orders.fuse_rank % dist.get_world_size():
        failpoints.arm(orders.fuse, orders.run / "fired")


def _close(checkpointer: StreamCheckpointer, orders: Orders) -> None:
    """With a marker in flight, after one that is committed; the fuse is for that one."""
    checkpointer.mark().result()
    _arm(orders)
    checkpointer.mark()
    began = time.monotonic()
    checkpointer.close(orders.close_s)
    (orders.run / f"closed-{dist.get_rank()}").write_text(f"{time.monotonic() - began}\n")


def _folder(orders: Orders, generation: int | None) -> Path:
    folder = orders.truths / str(generation)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def restore_each(settings: StreamConfig, truths: Path, markers: list[str], scale: int = 1) -> list[str]:
    """Restore one marker after the other into a live job: for each ``exact``, ``wrong: ...`` or the error."""
    _grow(scale)
    job = trainer(PLAN_2)
    return [_restore(job, settings, truths, marker) for marker in markers]


def _restore(job: Trainer, settings: StreamConfig, truths: Path, marker: str) -> str:
    job.step()  # whatever was there before, it is not the marker's state
    try:
        with closing(attach(job, settings)) as checkpointer:
            restored = checkpointer.restore(marker or None)
    except StreamCkptError as error:  # of the attach, too
        return f"{type(error).__name__}: {error}"
    if restored is None:
        return "nothing was restored"
    state = truth(job)
    expected = torch.load(truths / str(restored.generation) / f"{restored.step}.pt")
    wrong = differences(expected, state, rng=dist.get_rank() == 0)
    if not wrong and not marker:
        return f"exact {restored.id}"
    return f"wrong: {restored.id} {wrong}" if wrong else "exact"


def _grow(scale: int) -> None:
    if scale > 1 and model.TABLES[0][1] == 211:
        model.TABLES = [(name, rows * scale, dim, features) for name, rows, dim, features in model.TABLES]
        model.GLOBAL_BATCH *= scale
        model.FEATURES = [(feature, rows) for _, rows, _, features in model.TABLES for feature in features]


def _listen(run: Path) -> set[int]:
    """Every marker of this process, whoever asked for it, is written down as its future tells.

    Returns:
        The steps at which markers are cut, from now on.
    """
    cuts: set[int] = set()
    begin: Callable[..., Future[Committed]] = Coordinator.begin

    def note(began_s: float, future: Future[Committed]) -> None:
        error, took_s = future.exception(), time.monotonic() - began_s
        with open(run / f"settled-{dist.get_rank()}", "a", encoding="utf-8") as file:
            file.write(json.dumps({"took_s": took_s, "error": str(error) if error else ""}) + "\n")
        if dist.get_rank() == 0:
            name, line = ("reported", str(future.result().id)) if error is None else ("failed", repr(str(error)))
            with open(run / name, "a", encoding="utf-8") as file:
                file.write(f"{line}\n")
            with open(run / "took_s", "a", encoding="ascii") as file:
                file.write(f"{took_s}\n")

    def listening(*args: Any, **kwargs: Any) -> Future[Committed]:
        cuts.add(args[1].step)
        future = begin(*args, **kwargs)
        future.add_done_callback(partial(note, time.monotonic()))
        return future

    Coordinator.begin = listening  # type: ignore[method-assign]
    return cuts


def _loosen_clock(report: Path) -> None:
    """The wall clock jumps at every look, by up to forty days to either side."""
    real, draw = time.time, random.Random(40)
    looks = 0

    def jumping() -> float:
        nonlocal looks
        looks += 1
        report.write_text(str(looks))
        return real() + draw.uniform(-3.5e6, 3.5e6)

    time.time = jumping


def _save(path: Path, value: object) -> None:
    if dist.get_rank() == 0:
        torch.save(value, path.with_suffix(".tmp"))
        os.replace(path.with_suffix(".tmp"), path)


def _replace(path: Path, data: bytes) -> None:
    path.with_suffix(".tmp").write_bytes(data)
    os.replace(path.with_suffix(".tmp"), path)
