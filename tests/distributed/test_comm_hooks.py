"""Communication hooks of DDP: one with a state is refused by name, or its state is handed over."""

from __future__ import annotations

import functools
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


def _feedback(error: dict[int, torch.Tensor]) -> Callable[[Any, Any], Any]:
    """16-bit gradients; the rounding error is added to the next ones."""

    def feedback(_, bucket):  # type: ignore[no-untyped-def]  # DDP compares annotations
        gradient = bucket.buffer() + error.get(bucket.index(), 0.0)
        short = gradient.to(torch.bfloat16).to(gradient.dtype)
        error[bucket.index()] = gradient - short
        bucket.buffer().copy_(short)
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    return feedback


def closure(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, _feedback({}))


def deep_closure(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.bf16_compress_wrapper(_feedback({})))


def counting(ddp: DistributedDataParallel) -> None:
    steps = 0

    def count(_, bucket):  # type: ignore[no-untyped-def]
        def done(future):  # type: ignore[no-untyped-def]
            nonlocal steps
            steps += 1
            return future.value()[0]

        return default_hooks.allreduce_hook(dist.group.WORLD, bucket).then(done)

    ddp.register_comm_hook(None, count)


def defaulted(ddp: DistributedDataParallel) -> None:
    def remember(_, bucket, *, seen=[]):  # type: ignore[no-untyped-def]  # noqa: B006
        seen.append(bucket.index())
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)

    ddp.register_comm_hook(None, remember)


def attributes(ddp: DistributedDataParallel) -> None:
    hook: Any = _plain_closure(ddp)
    hook.error = torch.zeros(3)
    ddp.register_comm_hook(None, hook)


def partly(ddp: DistributedDataParallel) -> None:
    hook: Any = functools.partial(lambda seen, _, bucket: default_hooks.allreduce_hook(dist.group.WORLD, bucket), [])
    hook.__qualname__ = hook.__name__ = "partly"
    ddp.register_comm_hook(None, hook)


class Called:
    """A hook that is an object."""

    __qualname__ = "Called"

    def __init__(self) -> None:
        self.__qualname__ = self.__name__ = "Called"
        self.steps = 0

    def __call__(self, _, bucket):  # type: ignore[no-untyped-def]
        self.steps += 1
        return default_hooks.allreduce_hook(dist.group.WORLD, bucket)


def called(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, Called())


def _plain_closure(ddp: DistributedDataParallel) -> Callable[[Any, Any], Any]:
    group, dtype, scales, wire = dist.group.WORLD, torch.float32, (1.0, "all"), default_hooks.allreduce_hook

    @torch.no_grad()
    def plain_closure(_, bucket, scale=scales[0]):  # type: ignore[no-untyped-def]
        assert ddp.training
        assert scales
        bucket.buffer().to(dtype).mul_(scale)
        return wire(group, bucket)

    return plain_closure


def healthy_closure(ddp: DistributedDataParallel) -> None:
    ddp.register_comm_hook(None, default_hooks.fp16_compress_wrapper(_plain_closure(ddp)))


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
        (power, "hook powerSGD_hook keeps a PowerSGDState, which markers do not save"),
        (wrapped, "keeps a PowerSGDState, which markers do not save"),
        (own, "hook Local.hook keeps a Local, which markers do not save"),
        (closure, "feedback keeps a dict (closure variable 'error'), which markers do not save"),
        (deep_closure, "keeps a dict (closure variable 'error'), which markers do not save"),
        (counting, "count keeps a int (closure variable 'steps'), which markers do not save"),
        (defaulted, "remember keeps a list (default argument 'seen' of remember), which markers do not save"),
        (attributes, "keeps a Tensor (attribute 'error' of plain_closure), which markers do not save"),
        (partly, "hook partly keeps a list (argument 0 of a partial), which markers do not save"),
        (called, "hook Called keeps a Called, which markers do not save"),
    ],
)
def test_a_hook_with_a_state_is_refused_by_name(
    register: Callable[[DistributedDataParallel], None], said: str, tmp_path: Path
) -> None:
    for found in warm.run(2, attach, tmp_path, register):
        assert said in found
        assert "stateful_per_rank=" in found
    assert not (tmp_path / "control.log").exists()


@pytest.mark.parametrize("register", [plain, grouped, healthy_closure])
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


class Errors:
    """The dict in the closure of a hook, as a Stateful."""

    def __init__(self) -> None:
        self.error: dict[int, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"error": {key: value.clone() for key, value in self.error.items()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.error.clear()
        self.error.update(state["error"])


def fed_back(folder: Path, train: int) -> float:
    job, errors = trainer(PLAN_2), Errors()
    _replicated(job).register_comm_hook(None, _feedback(errors.error))
    settings = StreamConfig(uri=f"file://{folder}")
    with StreamCheckpointer(
        job.dmp, job.optimizer, config=settings, stateful_per_rank={"hook": errors}
    ) as checkpointer:
        checkpointer.restore()
        for _ in range(train):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
    return sum(each.abs().sum().item() for each in errors.error.values())


def test_a_closure_that_is_handed_over_comes_back(tmp_path: Path) -> None:
    kept = warm.run(2, fed_back, tmp_path, 3)
    assert kept[0] > 0
    assert warm.run(2, fed_back, tmp_path, 0) == kept
