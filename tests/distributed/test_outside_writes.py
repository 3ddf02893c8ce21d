"""Rows that something else than the fused update has written are captured, whichever way they were loaded."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests import ranks
from tests.jobs import attach
from tests.model import PLAN_2, Trainer, differences, trainer, truth
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.adapter import fused_kernels

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]


def _copy(state: Any) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in state.items()}


def dmp(job: Trainer) -> Callable[[], object]:
    state = _copy(job.dmp.state_dict())
    return lambda: job.dmp.load_state_dict(state)


def wrapped_module(job: Trainer) -> Callable[[], object]:
    state = _copy(job.dmp.module.state_dict())
    return lambda: job.dmp.module.load_state_dict(state)


def sharded_module(job: Trainer) -> Callable[[], object]:
    state = _copy(job.dmp.module.ebc.state_dict())
    return lambda: job.dmp.module.ebc.load_state_dict(state)


def fused_optimizer(job: Trainer) -> Callable[[], object]:
    state = copy.deepcopy(job.dmp.fused_optimizer.state_dict())
    return lambda: job.dmp.fused_optimizer.load_state_dict(state)


def whole_optimizer(job: Trainer) -> Callable[[], object]:
    state = copy.deepcopy(job.optimizer.state_dict())
    return lambda: job.optimizer.load_state_dict(state)


def fused_optimizer_of_one_kernel(job: Trainer) -> Callable[[], object]:
    optimizer = fused_kernels(job.dmp)[0].optimizer
    state = copy.deepcopy(optimizer.state_dict())
    return lambda: optimizer.load_state_dict(state)


LOADS = [dmp, wrapped_module, sharded_module, fused_optimizer, whole_optimizer, fused_optimizer_of_one_kernel]


def _steps(job: Trainer, checkpointers: list[StreamCheckpointer], count: int) -> None:
    for _ in range(count):
        job.step()
        for checkpointer in checkpointers:
            checkpointer.step()


def _load(uri: str, name: str) -> tuple[State, State]:
    """The truth at the base marker, and behind a load of an older state."""
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        _steps(job, [checkpointer], 2)
        (prepare,) = (prepare for prepare in LOADS if prepare.__name__ == name)
        load = prepare(job)
        _steps(job, [checkpointer], 4)
        checkpointer.mark().result(60)
        before = truth(job)
        load()
        after = truth(job)
        checkpointer.mark().result(60)
    return before, after


def _restore(uri: str) -> State:
    job = trainer(PLAN_2)
    job.step()
    with attach(job, StreamConfig(uri=uri)) as checkpointer:
        assert checkpointer.restore() is not None
        return truth(job)


def _changed_tables(before: State, after: State) -> set[str]:
    return {name for name in differences(before, after) if "t_dp" not in name and "ebc" in name}


@pytest.mark.parametrize("name", [load.__name__ for load in LOADS])
def test_a_load_is_captured(name: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    done = ranks.run(2, _load, uri, name)
    for (before, after), state in zip(done, ranks.run(2, _restore, uri), strict=True):
        assert _changed_tables(before, after)
        assert differences(after, state) == []


def _in_place(uri: str) -> tuple[State, State]:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        _steps(job, [checkpointer], 2)
        checkpointer.mark().result(60)
        before = truth(job)
        with torch.no_grad():
            for value in job.dmp.state_dict().values():
                for shard in value.local_shards() if isinstance(value, ShardedTensor) else []:
                    shard.tensor.mul_(2)
        checkpointer.mark_all()
        after = truth(job)
        checkpointer.mark().result(60)
    return before, after


def test_writes_in_place_are_captured_once_they_are_said(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    done = ranks.run(2, _in_place, uri)
    for (before, after), state in zip(done, ranks.run(2, _restore, uri), strict=True):
        assert len(_changed_tables(before, after)) == 4
        assert differences(after, state) == []


def _two_streams(first: str, second: str, name: str) -> State:
    """Two checkpointers on one job; the one that was attached first is closed."""
    job = trainer(PLAN_2)
    a = attach(job, StreamConfig(uri=first, marker_every=None))
    b = attach(job, StreamConfig(uri=second, marker_every=None))
    _steps(job, [a, b], 2)
    (prepare,) = (prepare for prepare in LOADS if prepare.__name__ == name)
    load = prepare(job)
    _steps(job, [a, b], 3)
    a.mark().result(60)
    b.mark().result(60)
    a.close()
    load()
    state = truth(job)
    b.mark().result(60)
    b.close()
    return state


@pytest.mark.parametrize("name", ["dmp", "fused_optimizer"])
def test_closing_one_of_two_streams_leaves_the_other_one_its_ears(name: str, tmp_path: Path) -> None:
    first, second = f"file://{tmp_path / 'a'}", f"file://{tmp_path / 'b'}"
    done = ranks.run(2, _two_streams, first, second, name)
    for expected, state in zip(done, ranks.run(2, _restore, second), strict=True):
        assert differences(expected, state) == []
