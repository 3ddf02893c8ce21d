"""A model that ``shard_modules`` has sharded, without DistributedModelParallel."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.shard import shard_modules
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D, ShardingPlan, ShardingType
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests.jobs import attach
from tests.laps import differing_tables
from tests.model import (
    OPTIMIZERS,
    PLAN_1,
    PLAN_2,
    PLAN_3,
    TABLES,
    Net,
    Spec,
    Trainer,
    batch,
    differences,
    trainer,
    truth,
)
from tests.pool import Pool
from torchrec_stream_ckpt import FollowedTables, StreamCheckpointer, StreamConfig, follow
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
PLANS = {1: PLAN_1, 2: PLAN_2, 3: PLAN_3}


@dataclass
class Bare:
    """What the truth asks of a model, answered without DMP."""

    outer: nn.Module
    """What trains, and what the checkpointer is given."""
    net: nn.Module

    def __call__(self, *batch: Any) -> Any:
        return self.outer(*batch)

    def state_dict(self) -> dict[str, Any]:
        return self.net.state_dict()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self.net.named_parameters()

    @property
    def fused(self) -> KeyedOptimizer:
        return cast(Any, self.net).ebc.fused_optimizer

    @property
    def fused_optimizer(self) -> CombinedOptimizer:
        return CombinedOptimizer([("ebc", self.fused)])


def _sharded(spec: Spec, optimizer: str, env: ShardingEnv | None = None) -> nn.Module:
    """The model of the other tests with its collection sharded in place."""
    torch.manual_seed(7)
    net = Net()
    params = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.1, "eps": 1e-6}
    sharder = EmbeddingBagCollectionSharder(fused_params=params)
    makers: dict[str, Any] = {
        "tw": lambda rank: table_wise(rank=rank),
        "rw": lambda _: row_wise(),
        "cw": lambda ranks: column_wise(ranks=ranks),
        "dp": lambda _: data_parallel(),
    }
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        net.ebc,
        per_param_sharding={name: makers[kind](where) for name, (kind, where) in spec.items()},
        sharder=sharder,
        local_size=world,
        world_size=world,
        device_type="cpu",
    )
    for parameter in plan.values():
        if parameter.sharding_type != ShardingType.DATA_PARALLEL.value:
            parameter.compute_kernel = "fused"
    return shard_modules(
        net, env=env, device=torch.device("cpu"), plan=ShardingPlan(plan={"ebc": plan}), sharders=[sharder]
    )


def _in_ddp(net: nn.Module) -> nn.Module:
    tables = [f"ebc.{name}" for name, _ in cast(Any, net).ebc.named_parameters()]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(net, tables)
    return DistributedDataParallel(net)


def _parts_in_ddp(net: nn.Module) -> nn.Module:
    for name in ("bottom", "top"):
        net.register_module(name, DistributedDataParallel(net.get_submodule(name)))
    return net


def _in_fsdp2(net: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net, mesh=mesh, ignored_params=set(cast(Any, net).ebc.parameters()))
    return net


AROUND = {"alone": lambda net: net, "ddp": _in_ddp, "parts in ddp": _parts_in_ddp, "fsdp2": _in_fsdp2}


def _job(around: str, optimizer: str = "rowwise") -> Trainer:
    """The same job under every ``around``; ``dmp`` is the usual one."""
    spec = PLANS[dist.get_world_size()]
    if around == "dmp":
        return trainer(spec, optimizer)
    net = _sharded(spec, optimizer)
    outer = AROUND[around](net)
    bare = Bare(outer, net)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(net.named_parameters())), lambda each: torch.optim.Adam(each, lr=0.01)
    )
    torch.manual_seed(100 + dist.get_rank())
    both = CombinedOptimizer([bare.fused_optimizer, dense])
    return Trainer(cast(DistributedModelParallel, bare), both, dense._optimizer)


def _attach(job: Trainer, uri: str, *, paranoid: bool = True) -> StreamCheckpointer:
    settings = StreamConfig(uri=uri, marker_every=None)
    if isinstance(job.dmp, DistributedModelParallel):
        return attach(job, settings, paranoid=paranoid)
    outer = cast(Bare, job.dmp).outer
    return StreamCheckpointer(outer, job.optimizer, config=settings, stateful={"loader": job}, paranoid=paranoid)


def _train(around: str, uri: str, optimizer: str) -> State:
    job = _job(around, optimizer)
    with _attach(job, uri) as checkpointer:
        for _ in range(4):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
        return truth(job)


def _restore(around: str, uri: str, optimizer: str) -> tuple[State, int, State]:
    """What a job has right after the restore, and a marker of its own later."""
    job = _job(around, optimizer)
    job.step()
    with _attach(job, uri, paranoid=False) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        back = truth(job)
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        return back, restored.step, truth(job)


CASES = [
    ("ddp", "rowwise", [(1, "alone"), (3, "ddp"), (2, "dmp")]),
    ("dmp", "adagrad", [(3, "ddp"), (1, "alone")]),
    ("parts in ddp", "sgd", [(1, "parts in ddp")]),
    ("fsdp2", "adagrad", [(3, "fsdp2"), (2, "ddp")]),
]
CELL = {"kernel": "fused", "pipeline": "plain", "served": "tables"}


@pytest.mark.covers(**CELL, module="EmbeddingBagCollection, shard_modules without DMP, alone on one rank")
@pytest.mark.covers(**CELL, module="EmbeddingBagCollection, shard_modules without DMP, in DDP")
@pytest.mark.covers(**CELL, module="EmbeddingBagCollection, shard_modules without DMP, in FSDP2")
@pytest.mark.parametrize(("source", "optimizer", "targets"), CASES)
def test_a_model_sharded_without_dmp_comes_back_bit_for_bit(
    source: str, optimizer: str, targets: list[tuple[int, str]], tmp_path: Path, pool: Pool
) -> None:
    """Tables, their states, dense layers and their optimizer, on other ranks and plans, in DMP and without it."""
    uri = f"file://{tmp_path}"
    expected = pool.run(2, _train, source, uri, optimizer)[0]
    assert any(name.startswith("dense.top") for name in expected)
    step = 4
    with FollowedTables(follow(uri)) as tables:
        for world, around in targets:
            found = pool.run(world, _restore, around, uri, optimizer)
            for state, at, _ in found:
                assert at == step
                assert differences(expected, state, rng=False) == []
            expected, step = found[0][2], step + 1
            tables.advance()
            assert differing_tables(tables, {str(tables.stats.marker): expected}) == []


def _outside(uri: str) -> State:
    """Tables and states that are loaded beside the fused update, by every way that there is without DMP."""
    job = _job("ddp")
    bare = cast(Bare, job.dmp)
    with _attach(job, uri) as checkpointer:
        job.step()
        checkpointer.step()
        model = {name: copy.deepcopy(value) for name, value in bare.net.state_dict().items()}
        fused = copy.deepcopy(bare.fused.state_dict())
        for load in (
            lambda: bare.net.load_state_dict(model),
            lambda: bare.fused.load_state_dict(fused),
            lambda: CombinedOptimizer([("", bare.fused)]).load_state_dict(fused),
        ):
            job.step()
            checkpointer.step()
            load()
            checkpointer.mark().result(60)  # the oracle compares
        return truth(job)


@pytest.mark.pitfall(35)
def test_what_is_loaded_without_dmp_is_in_the_next_marker(tmp_path: Path, pool: Pool) -> None:
    uri = f"file://{tmp_path}"
    expected = pool.run(2, _outside, uri)[0]
    for state, _, _ in pool.run(3, _restore, "ddp", uri, "rowwise"):
        assert differences(expected, state, rng=False) == []


class Holder(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


def _refusals(uri: str) -> dict[str, str]:
    said: dict[str, str] = {}

    def expect(name: str, model: nn.Module, optimizer: Any = None) -> None:
        with pytest.raises(UnsupportedError) as caught:
            StreamCheckpointer(model, optimizer, config=StreamConfig(uri=uri))
        said[name] = str(caught.value)

    expect("not sharded", nn.Linear(2, 2))
    job = _job("dmp")
    expect("holds a DMP", Holder(job.dmp), job.optimizer)
    alone = _job("alone")
    expect("not replicated", cast(Bare, alone.dmp).outer, alone.optimizer)
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    everyone = dist.distributed_c10d._get_default_group()
    env = ShardingEnv2D(mesh["shard"].get_group(), mesh["replicate"].get_group(), everyone, mesh)
    here: Spec = {name: ("tw", dist.get_rank()) for name, *_ in TABLES}
    expect("groups", _in_ddp(_sharded(here, "rowwise", env)))

    job = _job("ddp")
    bare = cast(Bare, job.dmp)
    with _attach(job, uri) as checkpointer:
        job.step()
        checkpointer.step()
        net: Any = bare.net
        kept, net.ebc._lookups = net.ebc._lookups, list(net.ebc._lookups)
        with pytest.raises(UnsupportedError) as caught:
            checkpointer.step()
        said["moved"] = str(caught.value)
        net.ebc._lookups = kept
    return said


@pytest.mark.covers(
    module="shard_modules without DMP, dense layers in neither DDP nor FSDP2, on several ranks",
    outcome="refused",
    why="`the dense parameter ... is in neither DDP nor FSDP2`",
)
@pytest.mark.covers(
    module="sharded within groups of ranks",
    outcome="refused",
    why="`several ranks hold the same rows: the model is sharded within groups of ranks, not over all ranks`",
)
def test_what_cannot_be_captured_without_dmp_is_refused_by_name(tmp_path: Path, pool: Pool) -> None:
    for said in pool.run(2, _refusals, f"file://{tmp_path}"):
        assert (
            "Linear is not a DistributedModelParallel and has no module sharded by shard_modules()"
            in said["not sharded"]
        )
        assert "Holder contains a DistributedModelParallel [module=inner]" in said["holds a DMP"]
        assert "the dense parameter bottom.0.weight is in neither DDP nor FSDP2" in said["not replicated"]
        assert "without DMP, wrap the dense layers in DistributedDataParallel" in said["not replicated"]
        assert "several ranks hold the same rows" in said["groups"]
        assert "[table=ebc.t_dp, ranks=0,1]" in said["groups"]
        assert "its kernels were replaced" in said["moved"]


def _only_the_collection(uri: str, restore: bool) -> State:
    """``shard_modules`` of a collection returns the sharded collection itself."""
    tables = cast(EmbeddingBagCollection, Net().ebc)
    params = {"optimizer": OPTIMIZERS["rowwise"], "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused_params=params)
    world = dist.get_world_size()
    places = {name: row_wise() for name, *_ in TABLES}
    plan = construct_module_sharding_plan(
        tables, per_param_sharding=places, sharder=sharder, local_size=world, world_size=world, device_type="cpu"
    )
    for parameter in plan.values():
        parameter.compute_kernel = "fused"
    plans = ShardingPlan(plan={"": plan})
    model: Any = shard_modules(tables, device=torch.device("cpu"), plan=plans, sharders=[sharder])
    with StreamCheckpointer(model, config=StreamConfig(uri=uri, marker_every=None), stateful={}) as checkpointer:
        if restore:
            assert checkpointer.restore() is not None
        else:
            model(batch(1)[1]).values().square().sum().backward()
            checkpointer.step()
            checkpointer.mark().result(60)
        state: State = truth(Trainer(model, None, torch.optim.SGD([torch.zeros(1)])))  # type: ignore[arg-type]
        return state


def test_a_bare_sharded_collection_comes_back_on_other_ranks(tmp_path: Path, pool: Pool) -> None:
    uri = f"file://{tmp_path}"
    expected = pool.run(2, _only_the_collection, uri, False)[0]
    for state in pool.run(3, _only_the_collection, uri, True):
        assert differences(expected, state, rng=False) == []
