"""Attach and close: what they leave on a job, on its copies and in its process, and lookups that are under way."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import ranks
from tests.jobs import attach
from tests.model import OPTIMIZERS, PLAN_1, Trainer, batch, differences, trainer, truth
from tests.parts import fused_kernels
from tests.pool import Pool
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]


def _restore(uri: str, optimizer: str = "rowwise") -> tuple[State, list[int]]:
    """The truth right after a restore, and what each kernel counts from."""
    job = trainer(PLAN_1, optimizer=optimizer)
    job.step()
    with attach(job, StreamConfig(uri=uri)) as checkpointer:
        assert checkpointer.restore() is not None
        return truth(job), [kernel.scalars.iteration for kernel in fused_kernels(job.dmp)]


def _attached(job: Trainer) -> dict[str, list[str]]:
    """The attributes, and the hooks by kind, of all that a checkpointer may reach."""
    things: dict[str, Any] = {f"module {name}": part for name, part in job.dmp.named_modules()}
    for lookup in job.dmp.module.ebc._lookups:
        things |= {f"lookup {name}": part for name, part in lookup.named_modules()}
    things |= {"optimizer": job.optimizer, "dense": job.dense, "fused": job.dmp.fused_optimizer}
    things |= {f"optimizer of {n}": kernel.scalars.optimizer for n, kernel in enumerate(fused_kernels(job.dmp))}
    told = {}
    for name, thing in things.items():
        hooks = {key: len(value) for key, value in vars(thing).items() if "hooks" in key and hasattr(value, "__len__")}
        told[name] = sorted([*vars(thing), *(f"{key}: {count}" for key, count in hooks.items())])
    return told


def _what_close_leaves(uri: str) -> tuple[dict[str, list[str]], dict[str, list[str]], dict[str, list[str]]]:
    job = trainer(PLAN_1)
    job.step()
    before = _attached(job)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        meanwhile = _attached(job)
    job.step()
    return before, meanwhile, _attached(job)


def test_close_leaves_nothing_on_the_model_and_on_the_optimizers(tmp_path: Path, pool: Pool) -> None:
    ((before, meanwhile, after),) = pool.run(1, _what_close_leaves, f"file://{tmp_path}")
    assert before != meanwhile
    assert before == after


def _copies(uri: str, closed: bool) -> tuple[list[str], int, list[str], bool]:
    """What a copy of a kernel does to the live job; whether it changed the copy."""
    job = trainer(PLAN_1)
    checkpointer = attach(job, StreamConfig(uri=uri, marker_every=None))
    checkpointer.restore()
    job.step()
    checkpointer.step()
    checkpointer.mark().result(60)
    if closed:
        checkpointer.close()
    before, rows = truth(job), checkpointer.stats().rows
    lookups = copy.deepcopy(nn.ModuleList(kernel.module for kernel in fused_kernels(job.dmp)))
    for kernel in lookups:
        kernel.init_embedding_weights_uniform(5.0, 6.0)
        kernel.load_state_dict(kernel.state_dict())
        bags = [0, *(1 for _ in kernel.feature_table_map)]
        offsets = torch.tensor(bags).cumsum(0)
        kernel(torch.zeros(int(offsets[-1]), dtype=torch.long), offsets).sum().backward()
    changed = all(float(weights.max()) > 4 for kernel in lookups for weights in kernel.split_embedding_weights())
    if not closed:
        checkpointer.step()
    sent = checkpointer.stats().rows - rows
    checkpointer.close()
    return differences(before, truth(job), rng=False), sent, [type(each).__name__ for each in lookups], changed


@pytest.mark.pitfall(37)
@pytest.mark.parametrize("closed", [False, True], ids=["attached", "closed"])
def test_a_deep_copy_reaches_nothing_of_the_original(closed: bool, tmp_path: Path, pool: Pool) -> None:
    ((differing, sent, kernels, changed),) = pool.run(1, _copies, f"file://{tmp_path}", closed)
    assert kernels
    assert changed
    assert (differing, sent) == ([], 0)


def _threads_and_descriptors() -> tuple[int, int]:
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def _cycles(uri: str, count: int) -> list[tuple[int, int]]:
    job = trainer(PLAN_1)
    seen = []
    for _ in range(count):
        config = StreamConfig(uri=uri, marker_every=None, head=None)
        with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job}) as checkpointer:
            checkpointer.restore()
            job.step()
            checkpointer.step()
            checkpointer.mark().result(60)
        del checkpointer
        seen.append(_threads_and_descriptors())
    return seen


@pytest.mark.parametrize("count", [12, pytest.param(200, marks=pytest.mark.slow)])
def test_attaching_again_and_again_takes_no_threads_and_no_descriptors(count: int, tmp_path: Path) -> None:
    (seen,) = ranks.run(1, _cycles, f"file://{tmp_path}", count, timeout_s=600)
    assert set(seen[3:]) == {seen[3]}, seen


def _set_step(uri: str) -> State:
    job = trainer(PLAN_1, optimizer="rmsprop")
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        checkpointer.restore()
        job.dmp.fused_optimizer.set_optimizer_step(1000)
        checkpointer.mark().result(60)
    return truth(job)


@pytest.mark.skipif(
    "rmsprop" not in OPTIMIZERS, reason="this FBGEMM has no fused optimizer on CPUs that reads the step"
)
def test_a_step_that_was_set_before_the_first_forward_is_restored(tmp_path: Path, pool: Pool) -> None:
    uri = f"file://{tmp_path}"
    (expected,) = pool.run(1, _set_step, uri)
    ((state, iterations),) = pool.run(1, _restore, uri, "rmsprop")
    assert differences(expected, state) == []
    assert set(iterations) == {1000}


def _in_flight(uri: str, way: str) -> State:
    """Lookups from before the attach get their update after it."""
    job = trainer(PLAN_1)
    job.step()
    earlier = [job.dmp(*batch(number)) for number in (50, 51)]
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        checkpointer.restore()
        checkpointer.mark().result(60)
        job.optimizer.zero_grad()
        if way == "alone":
            earlier[0].backward()
            checkpointer.step()
            earlier[1].backward()
        else:
            (earlier[0] + earlier[1] + job.dmp(*batch(52))).backward()
        job.optimizer.step()
        checkpointer.step()
        expected = truth(job)
        checkpointer.mark().result(60)
    return expected


@pytest.mark.pitfall(2)
@pytest.mark.parametrize("way", ["alone", "with a later one"])
def test_lookups_that_are_in_flight_at_attach_are_captured(way: str, tmp_path: Path, pool: Pool) -> None:
    uri = f"file://{tmp_path}"
    (expected,) = pool.run(1, _in_flight, uri, way)
    ((state, _),) = pool.run(1, _restore, uri)
    assert differences(expected, state) == []
