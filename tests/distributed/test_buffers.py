"""Buffers that training has changed come back on the live modules, also in a process that has never stepped."""

from __future__ import annotations

from typing import Any

import pytest
from torch.nn.parallel import DistributedDataParallel

from tests import warm
from tests.buffers_job import CASES, BufferJob, attach, build, held

pytestmark = pytest.mark.distributed

ALL = list(CASES)
STEPS = 3


def _go_on(job: BufferJob, checkpointer: Any, steps: int = 2) -> tuple[list[float], dict[str, Any]]:
    losses = []
    for _ in range(steps):
        losses.append(job.step())
        checkpointer.step()
    return losses, job.truth()


def _train(uri: str) -> tuple[dict[int, dict[str, Any]], list[float], dict[str, Any]]:
    """The truth at markers of several steps, and what follows the last of them."""
    job, truths = build(ALL), {}
    with attach(job, uri) as checkpointer:
        for step in range(STEPS + 1):
            if step:
                job.step()
                checkpointer.step()
            checkpointer.mark().result(60)
            truths[step] = job.truth()
        return truths, *_go_on(job, checkpointer)


def _resume(uri: str, step: int, stepped: int) -> tuple[dict[str, Any], list[str], list[float], dict[str, Any]]:
    """The truth after a restore, buffers whose object was replaced or that DDP does not list, and what follows."""
    job = build(ALL)
    with attach(job, uri) as checkpointer:
        for _ in range(stepped):
            job.step()
        before = {f"{path}{key}": value for path, key, value in held(job.dmp)}
        assert checkpointer.restore((1, step + 1)) is not None
        job.number = step
        truth, lost = job.truth(), []
        listed = {
            id(each)
            for module in job.dmp.modules()
            if isinstance(module, DistributedDataParallel)
            for each in module.modules_buffers
        }
        for path, key, value in held(job.dmp):
            known = before.get(f"{path}{key}")
            if known is not None and value is not None and known is not value:
                lost.append(f"{path}{key}")
            assert value is None or id(value) in listed, f"{path}{key}"
        return truth, lost, *_go_on(job, checkpointer)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[Any]]:
    uri = f"file://{tmp_path_factory.mktemp('buffers')}"
    return uri, warm.run(2, _train, uri)


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize(("step", "stepped"), [(0, 0), (1, 0), (3, 0), (0, 3), (3, 2)])
def test_buffers_that_training_changed_come_back_on_the_live_modules(
    trained: tuple[str, list[Any]], world: int, step: int, stepped: int
) -> None:
    uri, jobs = trained
    for rank, (truth, lost, losses, later) in enumerate(warm.run(world, _resume, uri, step, stepped)):
        truths, losses_then, later_then = jobs[rank if rank < 2 else 0]
        assert _unequal(truths[step], truth) == []
        # Two names of one tensor that become two need a second object.
        assert {name.rpartition(".")[2] for name in lost} <= {"becomes_one", "becomes_one_more"}
        if world == 2 and step == STEPS:
            assert losses == losses_then
            assert _unequal(later_then, later) == []


def _unequal(one: dict[str, Any], other: dict[str, Any]) -> list[Any]:
    different = [name for name in {**one, **other} if one.get(name, "-") != other.get(name, "-")]
    return [(name, one.get(name, "-"), other.get(name, "-")) for name in different]
