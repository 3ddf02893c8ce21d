"""Communication hooks of DDP: one with a state is refused by name, or its state is handed over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, post_localSGD_hook, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from tests import warm
from tests.model import PLAN_2, Trainer, trainer
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed


class Local:
    """Counts of a user's own hook."""

    def __init__(self) -> None:
        self.steps = 0

    def hook(self, _: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        self.steps += 1
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    hook.__annotations__.clear()  # DDP compares them, and takes no text


class HandedOver:
    """The state of post-local SGD, as a Stateful."""

    def __init__(self, state: post_localSGD_hook.PostLocalSGDState) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return {"iter": self.state.iter}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.iter = state["iter"]


def power(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(dist.group.WORLD), powerSGD_hook.powerSGD_hook)


def wrapped(ddp: DistributedDataParallel) -> None:
    hook = default_hooks.fp16_compress_wrapper(powerSGD_hook.powerSGD_hook)
    ddp.register_comm_hook(powerSGD_hook.PowerSGDState(dist.group.WORLD), hook)


def own(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, Local().hook)


def plain(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)


def grouped(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(dist.group.WORLD, default_hooks.fp16_compress_hook)


def _replicated(job: Trainer) -> DistributedDataParallel:
    found = (each for each in job.dmp.modules() if isinstance(each, DistributedDataParallel))
    (ddp,) = (each for each in found if hasattr(each.module, "top"))
    return ddp


def attach(folder: Path, register: Callable[[DistributedDataParallel], None]) -> str:
    job = trainer(PLAN_2)
    register(_replicated(job))
    try:
        checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=f"file://{folder}"))
    except UnsupportedError as error:
        return str(error)
    job.step()
    checkpointer.step()
    checkpointer.mark().result(60)
    checkpointer.close()
    return ""


@pytest.mark.parametrize(
    ("register", "said"),
    [
        (power, "hook powerSGD_hook keeps a PowerSGDState, which is in no marker"),
        (wrapped, "keeps a PowerSGDState, which is in no marker"),
        (own, "hook Local.hook keeps a Local, which is in no marker"),
    ],
)
def test_a_hook_with_a_state_is_refused_by_name(
    register: Callable[[DistributedDataParallel], None], said: str, tmp_path: Path
) -> None:
    for found in warm.run(2, attach, tmp_path, register):
        assert said in found
        assert "stateful_per_rank=" in found
    assert not (tmp_path / "control.log").exists()


@pytest.mark.parametrize("register", [plain, grouped])
def test_a_hook_without_a_state_is_captured(
    register: Callable[[DistributedDataParallel], None], tmp_path: Path
) -> None:
    assert warm.run(2, attach, tmp_path, register) == ["", ""]


def post_local(folder: Path, train: int) -> int:
    """Train, mark, and restore where there is a marker; what the hook has counted."""
    job = trainer(PLAN_2)
    state = post_localSGD_hook.PostLocalSGDState(dist.group.WORLD, dist.group.WORLD, start_localSGD_iter=100)
    _replicated(job).register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
    settings = StreamConfig(uri=f"file://{folder}")
    handed = {"hook": HandedOver(state)}
    with StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful_per_rank=handed) as checkpointer:
        checkpointer.restore()
        for _ in range(train):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
    return state.iter


def test_the_state_of_a_hook_that_is_handed_over_comes_back(tmp_path: Path) -> None:
    counted = warm.run(2, post_local, tmp_path, 3)
    assert counted[0] > 0
    assert warm.run(2, post_local, tmp_path, 0) == counted
