"""Rows that something else than the fused update has written are captured, whichever way they were loaded."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from tests import ranks, warm
from tests.inside import inside
from tests.jobs import attach
from tests.model import PLAN_1, PLAN_2, Spec, Trainer, differences, trainer, truth
from tests.parts import fused_kernels
from tests.pool import Pool
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
WHOLE_TABLES: Spec = {name: ("tw", number % 2) for number, name in enumerate(PLAN_2)}
"""TorchRec moves these alone."""


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
    optimizer = fused_kernels(job.dmp)[0].scalars.optimizer
    state = copy.deepcopy(optimizer.state_dict())
    return lambda: optimizer.load_state_dict(state)


def one_bag(job: Trainer) -> Callable[[], object]:
    bag = job.dmp.module.ebc.embedding_bags["t_user"]
    state = _copy(bag.state_dict())
    return lambda: bag.load_state_dict(state)


def all_bags(job: Trainer) -> Callable[[], object]:
    bags = job.dmp.module.ebc.embedding_bags
    state = _copy(bags.state_dict())
    return lambda: bags.load_state_dict(state)


def lookups(job: Trainer) -> Callable[[], object]:
    every = [lookup for lookup in job.dmp.module.ebc._lookups if hasattr(lookup, "_emb_modules")]
    states = [copy.deepcopy(lookup.state_dict()) for lookup in every]
    return lambda: [lookup.load_state_dict(state) for lookup, state in zip(every, states, strict=True)]


def kernels(job: Trainer) -> Callable[[], object]:
    every = [kernel.module for kernel in fused_kernels(job.dmp)]
    states = [_copy(kernel.state_dict()) for kernel in every]
    return lambda: [kernel.load_state_dict(state) for kernel, state in zip(every, states, strict=True)]


def optimizer_that_was_not_handed_over(job: Trainer) -> Callable[[], object]:
    other = CombinedOptimizer([job.dmp.fused_optimizer])
    state = copy.deepcopy(other.state_dict())
    return lambda: other.load_state_dict(state)


def reset_parameters(job: Trainer) -> Callable[[], object]:
    return job.dmp.module.ebc.reset_parameters


def init_embedding_weights(job: Trainer) -> Callable[[], object]:
    return lambda: [kernel.module.init_embedding_weights_uniform(-1.0, 1.0) for kernel in fused_kernels(job.dmp)]


def parameters_in_place(job: Trainer) -> Callable[[], object]:
    def write() -> None:
        with torch.no_grad():
            for name, parameter in job.dmp.named_parameters():
                if "ebc" in name and "t_dp" not in name:
                    parameter.mul_(0.5)

    return write


def shards_in_place(job: Trainer) -> Callable[[], object]:
    def write() -> None:
        with torch.no_grad():
            for value in job.dmp.state_dict().values():
                for shard in value.local_shards() if isinstance(value, ShardedTensor) else []:
                    shard.tensor.mul_(2)

    return write


def optimizer_rows_in_place(job: Trainer) -> Callable[[], object]:
    def write() -> None:
        with torch.no_grad():
            for values in job.dmp.fused_optimizer.state_dict()["state"].values():
                for value in values.values():
                    for shard in value.local_shards() if isinstance(value, ShardedTensor) else []:
                        shard.tensor.add_(1)

    return write


WRITES = [
    one_bag,
    all_bags,
    lookups,
    kernels,
    optimizer_that_was_not_handed_over,
    reset_parameters,
    init_embedding_weights,
    parameters_in_place,
    shards_in_place,
    optimizer_rows_in_place,
]
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


def _restore(uri: str, plan: Spec = PLAN_2) -> State:
    job = trainer(plan)
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
    for (before, after), state in zip(done, warm.run(2, _restore, uri), strict=True):
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
    for (before, after), state in zip(done, warm.run(2, _restore, uri), strict=True):
        assert len(_changed_tables(before, after)) == 4
        assert differences(after, state) == []


def _writes(uri: str) -> dict[str, tuple[State, State]]:
    """For each way to write: the truth at the marker before it, and at the one after it."""
    job = trainer(PLAN_1)
    config = StreamConfig(uri=uri, marker_every=None)
    told: dict[str, tuple[State, State]] = {}
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job}) as checkpointer:
        for prepare in WRITES:
            write = prepare(job)
            _steps(job, [checkpointer], 1)
            checkpointer.mark().result(60)
            before = truth(job)
            write()
            after = truth(job)
            marker = checkpointer.mark().result(60)
            told[f"{marker.generation}:{marker.marker} {prepare.__name__}"] = (before, after)
    return told


def _restore_each(uri: str, markers: list[str]) -> list[State]:
    states = []
    for marker in markers:
        job = trainer(PLAN_1)
        job.step()
        with attach(job, StreamConfig(uri=uri)) as checkpointer:
            checkpointer.restore(marker)
            states.append(truth(job))
    return states


@pytest.mark.pitfall(35)
def test_what_is_written_beside_the_update_is_captured_without_a_word(tmp_path: Path, pool: Pool) -> None:
    uri = f"file://{tmp_path}"
    (told,) = pool.run(1, _writes, uri)
    assert len(told) == len(WRITES)
    (states,) = pool.run(1, _restore_each, uri, [name.split()[0] for name in told])
    for (name, (before, after)), state in zip(told.items(), states, strict=True):
        assert _changed_tables(before, after), name
        assert differences(after, state) == [], name


def _write_under_an_open_cut(uri: str) -> tuple[str, str, list[str], State]:
    """A marker that finds no room is open over steps; then somebody writes."""
    job = trainer(PLAN_1)
    config = StreamConfig(uri=uri, marker_every=3, ring_bytes=2**20, marker_budget_bytes=2**20)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)  # warm ranks are quiet
    logging.getLogger("torchrec_stream_ckpt.capture.outside_writes").addHandler(handler)
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job}) as checkpointer:
        checkpointer.mark().result(60)
        job.step()
        checkpointer.step()
        cuts, held = inside(checkpointer).cuts, inside(checkpointer).ring
        inside(checkpointer).wait_for_log()  # what it acknowledges later would make room
        buffers = list(iter(lambda: held.acquire(extra=True, wait_s=0), None))  # no room any more
        future = cuts.begin(checkpointer.steps, 2, None, lambda _drain: True)
        assert cuts.open
        shards_in_place(job)()
        for buffer in buffers:
            held.release(buffer)
        cuts.go_on()
        cuts.go_on()
        given_up = str(future.exception(60))
        inside(checkpointer).next_marker = 3
        for _ in range(2):
            shards_in_place(job)()
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
        return given_up, lines[0], lines, truth(job)


def test_a_write_under_an_open_marker_gives_it_up_and_is_named_once(tmp_path: Path, pool: Pool) -> None:
    uri = f"file://{tmp_path}"
    ((given_up, line, lines, expected),) = pool.run(1, _write_under_an_open_cut, uri)
    assert "ebc.t_user" in given_up
    assert "was written in place before all rows of the marker had been sent" in given_up
    assert "ebc.t_user" in line
    assert "load_state_dict()" in line
    assert len(lines) == len(set(lines))
    (state,) = pool.run(1, _restore_each, uri, ["1:3"])
    assert differences(expected, state[0]) == []


def _second_checkpointer(uri: str) -> tuple[str, State]:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as first:
        _steps(job, [first], 2)
        with pytest.raises(ConfigError) as caught:
            attach(job, StreamConfig(uri=f"{uri}-other", marker_every=None))
        _steps(job, [first], 1)
        first.mark().result(60)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as second:
        second.restore()
        _steps(job, [second], 1)
        second.mark().result(60)
        return str(caught.value), truth(job)


@pytest.mark.pitfall(36)
def test_a_second_checkpointer_on_the_same_tables_is_refused_by_name(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'job'}"
    done = ranks.run(2, _second_checkpointer, uri)
    for (said, expected), state in zip(done, warm.run(2, _restore, uri), strict=True):
        assert "another StreamCheckpointer already captures these tables" in said
        assert "ebc.t_" in said
        assert differences(expected, state) == []


def _replaced(uri: str) -> list[str]:
    job, other = trainer(WHOLE_TABLES), trainer({**WHOLE_TABLES, "t_user": ("tw", 1)})
    said = []
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        _steps(job, [checkpointer], 2)
        checkpointer.mark().result(60)
        plan = other.dmp.module.ebc.module_sharding_plan
        DistributedModelParallel.reshard(job.dmp, {"ebc": (0.0, {"t_user": plan["t_user"]})}, "ebc")
        dist.barrier()
        for call in (checkpointer.step, checkpointer.mark, checkpointer.step):
            with pytest.raises(UnsupportedError) as caught:
                call()
            said.append(str(caught.value))
    return said


@pytest.mark.pitfall(36)
def test_kernels_that_were_replaced_are_refused_at_the_next_boundary_and_from_then_on(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    for said in ranks.run(2, _replaced, uri):
        assert all("its kernels were replaced without dmp.reshard()" in each for each in said)
        assert all("module=ebc" in each for each in said)
    assert all(state["step"] == 2 for state in warm.run(2, _restore, uri, WHOLE_TABLES))


def _another_model(uri: str) -> str:
    job, other = trainer(PLAN_1), trainer(PLAN_1)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        _steps(job, [checkpointer], 2)
        checkpointer.mark().result(60)
        job.dmp._dmp_wrapped_module = other.dmp._dmp_wrapped_module
        job.step()
        with pytest.raises(UnsupportedError) as caught:
            checkpointer.step()
    return str(caught.value)


@pytest.mark.pitfall(36)
def test_another_model_in_the_wrapper_is_refused_at_the_next_boundary(tmp_path: Path) -> None:
    (said,) = ranks.run(1, _another_model, f"file://{tmp_path}")
    assert said.startswith("the wrapped model (dmp.module) was replaced")


def _more_tables(uri: str) -> str:
    job, other = trainer(PLAN_1), trainer(PLAN_1)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        _steps(job, [checkpointer], 2)
        checkpointer.mark().result(60)
        job.dmp.module.late = other.dmp.module.ebc
        _steps(job, [checkpointer], 1)
        with pytest.raises(UnsupportedError) as caught:
            checkpointer.mark()
    return str(caught.value)


@pytest.mark.pitfall(36)
def test_tables_that_come_after_the_attach_are_refused_at_the_next_marker(tmp_path: Path) -> None:
    (said,) = ranks.run(1, _more_tables, f"file://{tmp_path}")
    assert said.startswith("it was added after the StreamCheckpointer was created, so its tables are not captured")
    assert "module=late" in said
