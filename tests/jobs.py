"""What the ranks of the tests run."""

from __future__ import annotations

from typing import Any

import torch

from tests.inside import inside
from tests.model import Spec, Trainer, batch, trainer, truth
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

Build = dict[str, Any]
Truths = dict[int, dict[str, torch.Tensor]]


def attach(job: Trainer, settings: StreamConfig, *, paranoid: bool = True) -> StreamCheckpointer:
    """Under the oracle: a marker at which the stream does not say what the tables hold fails the test.

    Restored jobs run in the default mode: the oracle must not be what makes a test pass.
    """
    return StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job}, paranoid=paranoid)


def train_with(spec: Spec, settings: StreamConfig, steps: int, build: Build) -> tuple[list[float], Truths]:
    """A fresh job: losses, and the truth at each step."""
    job = trainer(spec, **build)
    checkpointer = attach(job, settings)
    assert checkpointer.restore() is None
    losses, truths = go_on(job, checkpointer, steps)
    committed = checkpointer.mark().result(60)
    assert committed.step == steps
    checkpointer.close()
    return losses, truths


def restore_with(
    spec: Spec, settings: StreamConfig, marker: str | None, steps: int, build: Build
) -> tuple[dict[str, torch.Tensor], int, list[float], Truths]:
    """Another job: the state right after the restore, its step, and how it goes on."""
    job = trainer(spec, **build)
    job.step()  # a live, different state: the restore must replace all of it
    checkpointer = attach(job, settings, paranoid=False)
    plan = checkpointer.plan(marker)
    assert plan is not None
    restored = checkpointer.restore(marker)
    assert restored is not None
    assert f"marker {restored.id}, step {restored.step}" in plan.describe()
    state = truth(job)
    losses, truths = go_on(job, checkpointer, steps)
    checkpointer.close()
    return state, restored.step, losses, truths


def restore_once(
    spec: Spec, settings: StreamConfig, marker: str | None, build: Build, accept_unproved: bool = False
) -> tuple[dict[str, torch.Tensor], int, str]:
    """The state right after a restore, its step, and where its rows came from."""
    job = trainer(spec, **build)
    job.step()
    checkpointer = attach(job, settings, paranoid=False)
    restored = checkpointer.restore(marker, accept_unproved=accept_unproved)
    assert restored is not None
    state = truth(job)
    checkpointer.close()
    return state, restored.step, restored.source


def go_on(job: Trainer, checkpointer: StreamCheckpointer, steps: int) -> tuple[list[float], Truths]:
    losses, truths = [], {}
    for _ in range(steps):
        losses.append(job.step())
        checkpointer.step()
        settle(checkpointer)
        truths[job.step_number] = truth(job)
    return losses, truths


def settle(checkpointer: StreamCheckpointer) -> None:
    """(all ranks) Let the marker in flight settle, so that it is no matter of timing which steps have one."""
    inside(checkpointer).settle()


# What a loop may do between two step boundaries.


def two_forwards_before_their_backwards(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    job.optimizer.zero_grad()
    first, second = job.dmp(*batch(61)), job.dmp(*batch(62))
    (first + second).backward()
    job.optimizer.step()
    checkpointer.step()


def gradient_accumulation(job: Trainer, checkpointer: StreamCheckpointer) -> None:
    job.optimizer.zero_grad()
    for number in (63, 64, 65):
        (job.dmp(*batch(number)) / 3).backward()
    job.optimizer.step()
    checkpointer.step()
