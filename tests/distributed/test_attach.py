"""Attach and close: what they leave on a job, on its copies and in its process, and lookups that are under way."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import OptimizerWrapper

import tests.model as model
from tests import ranks, warm
from tests.jobs import attach
from tests.model import OPTIMIZERS, PLAN_1, PLAN_2, Trainer, batch, differences, trainer, truth
from tests.parts import fused_kernels
from tests.pool import Pool
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import (
    ConfigError,
    LogUnavailableError,
    SchemaMismatchError,
    StreamCkptError,
    UnsupportedError,
)

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


def _settled(known: tuple[int, int] | None) -> tuple[int, int]:
    """The least of each: the kernel may count a thread that was joined a moment longer. Looks for ten seconds, or until
    it is what is ``known``; for one if nothing is."""
    least = _threads_and_descriptors()
    deadline = time.monotonic() + (10 if known else 1)
    while least != known and time.monotonic() < deadline:
        time.sleep(0.01)
        threads, descriptors = _threads_and_descriptors()
        least = min(least[0], threads), min(least[1], descriptors)
    return least


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
        seen.append(_settled(seen[3] if len(seen) > 3 else None))
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


# What cannot be captured or restored exactly is refused, by name.


def _refusals(directory: Path) -> dict[str, str]:
    """Attach many kinds of jobs, in one process each rank: what each refusal says."""
    settings = StreamConfig(uri=f"file://{directory}")
    said: dict[str, str] = {}

    def expect(name: str, kind: type[StreamCkptError], *args: Any, **kwargs: Any) -> None:
        with pytest.raises(kind) as caught:
            StreamCheckpointer(*args, **{"config": settings, **kwargs})
        said[name] = str(caught.value)

    job = trainer(PLAN_2)
    expect("unknown wrapper", UnsupportedError, job.dmp, OptimizerWrapper(job.optimizer.optimizers[1][1]))
    fused = torch.optim.SGD(job.dmp.parameters(), lr=0.1)
    expect("fused parameter", UnsupportedError, job.dmp, fused)
    foreign = torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1)
    expect("foreign parameter", UnsupportedError, job.dmp, foreign)
    expect("no DMP", UnsupportedError, nn.Linear(2, 2))
    expect("no state_dict", ConfigError, job.dmp, job.optimizer, stateful={"loader": object()})
    expect("dense kernel", UnsupportedError, _dense_kernel())
    expect("wide row", UnsupportedError, _wide_table())
    refused = StreamConfig(uri="kafka://127.0.0.1:9/job", store=f"file://{directory}")
    expect("unreachable broker", LogUnavailableError, job.dmp, job.optimizer, config=refused)

    checkpointer = attach(job, settings)
    with pytest.raises(UnsupportedError, match="reshard"):
        job.dmp.reshard("ebc", {})
    checkpointer.close()
    return said


def _wide_table() -> DistributedModelParallel:
    tables = list(model.TABLES)
    model.TABLES[0] = ("t_user", 3, 250_000, ["user"])
    job = trainer(PLAN_2)
    model.TABLES[:] = tables
    return job.dmp


def _dense_kernel() -> DistributedModelParallel:
    job = model.Net()
    sharder = model.EmbeddingBagCollectionSharder()
    plan = construct_module_sharding_plan(
        job.ebc,
        {name: row_wise() for name, *_ in model.TABLES},
        sharder=sharder,
        local_size=dist.get_world_size(),
        world_size=dist.get_world_size(),
        device_type="cpu",
    )
    for parameter in plan.values():
        parameter.compute_kernel = "dense"
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    return DistributedModelParallel(
        job, env=env, device=torch.device("cpu"), plan=ShardingPlan(plan={"ebc": plan}), sharders=[sharder]
    )


@pytest.mark.pitfall(29)
@pytest.mark.covers(
    kernel="dense, of a sharded table",
    outcome="refused",
    why="`the kernel DenseTableBatchedEmbeddingBagsCodegen of sharded tables is not captured`",
)
def test_what_cannot_be_captured_is_refused_at_attach_by_name(tmp_path: Path) -> None:
    said = ranks.run(2, _refusals, tmp_path)[0]
    assert "the optimizer OptimizerWrapper may have state that is not captured" in said["unknown wrapper"]
    assert "pass the optimizers that OptimizerWrapper wraps, and its own counters" in said["unknown wrapper"]
    assert "SGD (optimizer0) holds the fused tables ebc.embedding_bags.t_" in said["fused parameter"]
    assert "and 1 more, which only the backward may update" in said["fused parameter"]
    assert "dict(in_backward_optimizer_filter(dmp.named_parameters()))" in said["fused parameter"]
    assert "1 parameters that are not in the model, the first of shape (3,)" in said["foreign parameter"]
    assert "Linear is not a DistributedModelParallel" in said["no DMP"]
    assert "'loader' (object)" in said["no state_dict"]
    assert "compute_kernel='fused'" in said["dense kernel"]
    assert "one row of 250000 columns does not fit a frame of 1000000 bytes [table=ebc.t_user" in said["wide row"]
    assert "127.0.0.1:9" in said["unreachable broker"]


def _train(uri: str) -> None:
    job = trainer(PLAN_2)
    with attach(job, StreamConfig(uri=uri)) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)


def _mismatches(uri: str) -> dict[str, str]:
    """Restore into jobs that differ from the one that wrote the log."""
    said: dict[str, str] = {}
    settings = StreamConfig(uri=uri)
    tables = list(model.TABLES)

    def expect(name: str, plan: model.Spec = PLAN_2, **build: Any) -> None:
        model.FEATURES[:] = [(feature, rows) for _, rows, _, features in model.TABLES for feature in features]
        job = trainer(plan, **build)
        checkpointer = attach(job, settings)
        with pytest.raises(SchemaMismatchError) as caught:
            checkpointer.restore()
        said[name] = str(caught.value)
        checkpointer.close()

    expect("optimizer", optimizer="adagrad")
    expect("dtype", dtype="fp16", dense="sgd")
    expect("dense optimizer", dense="adagrad")
    expect("data parallel", {**PLAN_2, "t_small": ("dp", None)})
    model.TABLES[0] = ("t_user", 212, 16, ["user"])
    expect("rows")
    model.TABLES[0] = ("t_user", 211, 8, ["user"])
    expect("dim")
    model.TABLES[:] = [*tables[1:]]
    expect("missing", {name: how for name, how in PLAN_2.items() if name != "t_user"})
    model.TABLES[:] = tables
    return said


def test_another_schema_is_refused_with_the_table_and_both_values(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    ranks.run(2, _train, uri)
    said = ranks.run(2, _mismatches, uri)[0]
    assert "table 'ebc.t_item': trained by exact_adagrad here, exact_rowwise_adagrad in the marker" in said["optimizer"]
    assert "table 'ebc.t_user': weights of float16 here, float32 in the marker" in said["dtype"]
    assert "table 'ebc.t_user': 212 rows here, 211 in the marker" in said["rows"]
    assert "8 columns here, 16 in the marker" in said["dim"]
    assert "only the marker has it" in said["missing"]
    assert "ebc.t_small: sharded in the marker, data-parallel in this model" in said["data parallel"]
    assert "Adagrad here, Adam in the marker" in said["dense optimizer"]


# Objects and module state that no marker could hold are refused by name: at the attach, or later at the cut.


class Keeper:
    """Has whatever value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.value = state["value"]


class Broken(Keeper):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no position")


class Extra(nn.Linear):
    """Has a state beside its parameters."""

    extra: Any = 3

    def get_extra_state(self) -> Any:
        if self.extra == "fails":
            raise OSError("no state")
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def generator() -> Any:
    return iter(each for each in ())


def _with_extra(job: Trainer, value: Any) -> dict[str, Any]:
    layer = next(each for each in job.dmp.modules() if type(each) is nn.Linear)
    layer.__class__, layer.extra = Extra, value
    return {}


def _masked() -> Any:
    return np.ma.MaskedArray([1, 2], dtype=np.dtype("i4").newbyteorder("S"))


UNSAVED = "the state_dict() of the Stateful 'item' (Keeper) cannot be pickled: cannot pickle 'generator' object"
CASES: dict[str, tuple[Callable[[Trainer], Mapping[str, Any]], str]] = {
    "stateful": (lambda _: {"stateful": {"item": Keeper(generator())}}, UNSAVED),
    "per rank": (lambda _: {"stateful_per_rank": {"item": Keeper(generator())}}, UNSAVED),
    "of rank 0": (lambda _: {"stateful_rank0": {"item": Keeper(generator())}}, UNSAVED),
    "per rank, fails": (
        lambda _: {"stateful_per_rank": {"item": Broken(0)}},
        "the state_dict() of the Stateful 'item' (Broken) fails: ValueError: no position",
    ),
    "a masked array": (
        lambda _: {"stateful_per_rank": {"item": Keeper(_masked())}},
        "the state_dict() of the Stateful 'item' (Keeper) cannot be pickled: a MaskedArray of dtype ",
    ),
    "extra state": (
        lambda job: _with_extra(job, generator()),
        "(Extra) cannot be pickled: cannot pickle 'generator' object",
    ),
    "extra state, fails": (lambda job: _with_extra(job, "fails"), "(Extra) fails: OSError: no state"),
    "a number as a name": (
        lambda _: {"stateful": {1: Keeper(0)}},
        "stateful: the name of an object must be a string, got 1 (int)",
    ),
    "no name": (lambda _: {"stateful_rank0": {"": Keeper(0)}}, "'' is not a valid name for a Stateful"),
    "a name of two lines": (
        lambda _: {"stateful_per_rank": {"a\nb": Keeper(0)}},
        "'a\\nb' is not a valid name for a Stateful",
    ),
    "one name, two objects": (
        lambda _: {"stateful": {"item": 3}, "stateful_per_rank": {"item": Keeper(0)}},
        "'item' (int) has no state_dict() and load_state_dict()",
    ),
    "a list": (lambda _: {"stateful_per_rank": [Keeper(0)]}, "stateful_per_rank must map names to objects, got list"),
    "no config": (lambda _: {"config": None}, "config must be a StreamConfig, got NoneType"),
    "a URI in place of a config": (lambda _: {"config": "file://job"}, "config must be a StreamConfig, got str"),
    "a list of optimizers": (
        lambda job: {"optimizer": [job.optimizer]},
        "list is not an optimizer of torch or TorchRec\n  Try: pass one; several: CombinedOptimizer([",
    ),
}


def _attach(job: Trainer, uri: str, given: Mapping[str, Any]) -> StreamCheckpointer:
    config = StreamConfig(uri=uri, marker_every=None)
    return StreamCheckpointer(job.dmp, **{"optimizer": job.optimizer, "config": config, **given})


def _refused(uri: str) -> dict[str, str]:
    said = {}
    for case, (make, _) in CASES.items():
        job = trainer(PLAN_1)
        try:
            _attach(job, f"{uri}/{case}", make(job)).close()
        except StreamCkptError as error:
            said[case] = str(error)
    return said


def test_what_no_marker_could_hold_is_refused_at_the_attach(tmp_path: Path) -> None:
    (said,) = warm.run(1, _refused, f"file://{tmp_path}")
    assert {case: said.get(case) for case, (_, why) in CASES.items() if why not in said.get(case, "")} == {}


def _late(uri: str) -> list[str]:
    job, said = trainer(PLAN_1), []
    _with_extra(job, 3)
    layer = next(each for each in job.dmp.modules() if type(each) is Extra)
    item = Keeper(0)
    with _attach(job, uri, {"stateful_per_rank": {"item": item}}) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        for value, extra in ((generator(), 3), (0, generator()), (0, 3)):
            item.value, layer.extra = value, extra
            try:
                said.append(str(checkpointer.mark().result(60).id))
            except StreamCkptError as error:
                said.append(str(error))
    return said


def test_what_changes_later_fails_the_marker_by_its_name(tmp_path: Path) -> None:
    (said,) = warm.run(1, _late, f"file://{tmp_path}")
    assert UNSAVED in said[0]
    assert "(Extra) cannot be pickled: cannot pickle 'generator' object" in said[1]
    assert said[2].startswith("1:")


def _on_rank_1(uri: str) -> list[str]:
    """What ranks say of an object that rank 1 alone cannot save; where rank 0's serves all, nothing."""
    job, said = trainer(PLAN_1), []
    bad = Keeper(generator()) if dist.get_rank() else Keeper(0)
    try:
        _attach(job, f"{uri}/a", {"stateful_per_rank": {"item": bad}}).close()
    except StreamCkptError as error:
        said.append(str(error))
    _attach(trainer(PLAN_1), f"{uri}/b", {"stateful_rank0": {"item": bad}}).close()
    return said


def test_an_object_of_another_rank_is_refused_on_all_ranks(tmp_path: Path) -> None:
    for said in warm.run(2, _on_rank_1, f"file://{tmp_path}"):
        assert len(said) == 1
        assert UNSAVED in said[0]


def _own_names(uri: str, begin: int) -> dict[str, int]:
    """Each rank hands over an object of its own under a name that no other rank has."""
    rank, job = dist.get_rank(), trainer(PLAN_2)
    items = {"loader": Keeper(begin + rank), f"only{rank}": Keeper(begin + 10 * rank)}
    with _attach(job, uri, {"stateful_per_rank": items}) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
    return {name: item.value for name, item in items.items()}


def test_names_per_rank_may_differ_and_each_rank_gets_its_own_back(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained, restored = warm.run(2, _own_names, uri, 100), warm.run(2, _own_names, uri, 500)
    assert restored == trained == [{"loader": 100, "only0": 100}, {"loader": 101, "only1": 110}]
