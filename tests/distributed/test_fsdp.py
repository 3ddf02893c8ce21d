"""FSDP2 inside DMP: sharded parameters and optimizer state come back bit for bit, on any number of ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import ranks, warm
from tests.dense_job import Job
from tests.dense_job import Net as NetOfTables
from tests.inside import inside
from tests.jobs import attach
from tests.model import PLAN_2, PLAN_3, Net, Trainer, batch, differences, trainer, truth
from tests.starts import from_both_starts
from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.dense import dense_guard
from torchrec_stream_ckpt.errors import MarkerFailedError, StreamCkptError, UnsupportedError

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]


class NetWithBias(Net):
    """A parameter of its own beside the sharded collection: five values, which no number of ranks here divides."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.bias = nn.Parameter(torch.zeros(5))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor, label: torch.Tensor) -> torch.Tensor:
        return super().forward(dense + self.bias[:4] * self.bias[4], sparse, label)


class Root(DataParallelWrapper):
    """The whole model but for its embeddings; one tower apart."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        module: Any = dmp.module
        mesh = init_device_mesh("cpu", (env.world_size,))
        fully_shard(module.top, mesh=mesh)
        fully_shard(module, mesh=mesh, ignored_params=set(module.ebc.parameters()))


class Towers(DataParallelWrapper):
    """The two towers, each by itself; never gathered while no step runs."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        module: Any = dmp.module
        mesh = init_device_mesh("cpu", (env.world_size,))
        for tower in (module.bottom, module.top):
            fully_shard(tower, mesh=mesh, reshard_after_forward=True)


class First(DataParallelWrapper):
    """FSDP1."""

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        module: Any = dmp.module
        module.top = FullyShardedDataParallel(
            module.top, process_group=env.process_group, use_orig_params=True, device_id=torch.device("cpu")
        )


KINDS: dict[str, dict[str, Any]] = {
    "root adam": {"wrapper": Root(), "net": NetWithBias},
    "root momentum": {"wrapper": Root(), "net": NetWithBias, "dense": "momentum"},
    "towers adagrad": {"wrapper": Towers(), "dense": "adagrad"},
    "ddp adam": {"net": NetWithBias},
}


def _job(kind: str) -> Trainer:
    world = torch.distributed.get_world_size()
    return trainer({2: PLAN_2, 3: PLAN_3}[world], **KINDS[kind])


def _evaluate(job: Trainer) -> None:
    """A forward without a backward: FSDP2 leaves its root gathered."""
    job.dmp.eval()
    with torch.no_grad():
        job.dmp(*batch(50))
    job.dmp.train()


def _go_on(job: Trainer, checkpointer: StreamCheckpointer) -> tuple[list[float], State]:
    losses = []
    for _ in range(2):
        losses.append(job.step())
        checkpointer.step()
    return losses, truth(job)


def _save(kind: str, uri: str) -> tuple[State, list[float], State, set[str]]:
    """The truth at a marker that is saved while training goes on, and what follows."""
    job = _job(kind)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        for _ in range(3):
            job.step()
            checkpointer.step()
        expected = truth(job)
        _evaluate(job)
        committed = checkpointer.mark()
        losses, later = _go_on(job, checkpointer)
        committed.result(60)
    sharded = {name for name, value in job.dmp.state_dict().items() if isinstance(value, DTensor)}
    return expected, losses, later, sharded


def _restore(kinds: list[str], uri: str, stepped: bool) -> list[tuple[State, list[float], State]]:
    """Into jobs of several kinds, one after another in one set of processes."""
    found = []
    for kind in kinds:
        job = _job(kind)
        if stepped:
            job.step()
        with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
            if stepped:
                _evaluate(job)
            assert checkpointer.restore() is not None
            found.append((truth(job), *_go_on(job, checkpointer)))
    return found


CASES = [
    ("root adam", 2, {2: ["root adam"], 3: ["root adam", "ddp adam"]}),
    ("ddp adam", 2, {2: ["root adam"]}),
    ("root momentum", 3, {2: ["root momentum"]}),
    ("towers adagrad", 3, {2: ["towers adagrad"]}),
]


@pytest.mark.covers(kernel="fused", module="EmbeddingBagCollection, FSDP2 around the dense part", pipeline="plain")
@pytest.mark.parametrize(("source", "world", "targets"), CASES)
def test_sharded_dense_state_comes_back_bit_for_bit(
    source: str, world: int, targets: dict[int, list[str]], tmp_path: Path
) -> None:
    uri = f"file://{tmp_path}"
    saved = warm.run(world, _save, source, uri)
    towers = {f"{name}.{index}.{kind}" for name in ("bottom", "top") for index in (0, 2) for kind in ("weight", "bias")}
    wanted = {"root": {"bias", *towers}, "towers": towers, "ddp": set()}
    assert saved[0][3] == wanted[source.split()[0]]
    for target_world, kinds in targets.items():
        fresh, stepped = from_both_starts(warm.run, target_world, _restore, kinds, uri)
        for rank, found in (*enumerate(fresh), *enumerate(stepped)):
            expected, losses_then, later_then, _ = saved[min(rank, world - 1)]
            for kind, (state, losses, later) in zip(kinds, found, strict=True):
                assert differences(expected, state, rng=rank < world) == []
                if (kind, target_world) == (source, world):
                    assert losses == losses_then
                    assert differences(later_then, later) == []


def _sharded(state: dict[str, Any]) -> list[DTensor]:
    return [value for value in state.values() if isinstance(value, DTensor)]


def _staged(uri: str) -> tuple[int, int]:
    """How many sharded tensors of a marker's copy there are, and how many of them a later step has changed."""
    job = _job("root adam")
    with attach(job, StreamConfig(uri=uri)) as checkpointer:
        job.step()
        job.step()  # from here on it is known that the loop clears its gradients
        staged = _sharded(inside(checkpointer).dense.stage())
        before = [value.to_local().clone() for value in staged]
        job.step()
        live = _sharded(inside(checkpointer).dense.stage())
        assert any(not torch.equal(now.to_local(), then) for now, then in zip(live, before, strict=True))
        changed = [not torch.equal(copy.to_local(), then) for copy, then in zip(staged, before, strict=True)]
    return len(staged), sum(changed)


def test_a_markers_copy_is_not_touched_by_the_next_step(tmp_path: Path) -> None:
    parameters = 9
    for found in warm.run(2, _staged, f"file://{tmp_path}"):
        assert found == (3 * parameters, 0)  # weights, exp_avg, exp_avg_sq


class LocalMomentum(torch.optim.Optimizer):
    """Keeps a plain tensor for the part of a parameter that its rank holds."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
                self.state[parameter] = {"momentum": torch.ones_like(local)}


def _refusals(uri: str) -> dict[str, str]:
    said: dict[str, str] = {}

    def expect(name: str, job: Trainer) -> None:
        with pytest.raises(UnsupportedError) as caught:
            attach(job, StreamConfig(uri=uri))
        said[name] = str(caught.value)

    expect("fsdp1", trainer(PLAN_2, wrapper=First()))
    expect("left out", trainer(PLAN_2, wrapper=Towers(), net=NetWithBias))
    job = _job("towers adagrad")
    fully_shard(job.dmp.module, mesh=init_device_mesh("cpu", (2,)))
    expect("tables", job)
    job = _job("towers adagrad")
    optimizer = LocalMomentum(
        [value for value in job.dmp.parameters() if not hasattr(value, "_in_backward_optimizers")]
    )
    with StreamCheckpointer(job.dmp, optimizer, config=StreamConfig(uri=uri)) as checkpointer:
        optimizer.step()
        with pytest.raises(MarkerFailedError) as caught:
            checkpointer.mark().result(60)
    said["local state"] = str(caught.value)
    return said


@pytest.mark.covers(module="FSDP1", outcome="refused", why="`FullyShardedDataParallel (FSDP1) is not captured`")
@pytest.mark.covers(
    module="tables inside FSDP2", outcome="refused", why="`fully_shard() was applied to tables of a sharded module`"
)
def test_what_cannot_be_captured_is_refused_by_name(tmp_path: Path) -> None:
    said = warm.run(2, _refusals, f"file://{tmp_path}")[0]
    assert "FullyShardedDataParallel (FSDP1) is not captured" in said["fsdp1"]
    assert "module=_dmp_wrapped_module.top" in said["fsdp1"]
    assert "the dense parameter bias is in neither DDP nor FSDP2" in said["left out"]
    assert "fully_shard() was applied to tables of a sharded module" in said["tables"]
    place = "the LocalMomentum (optimizer0): state of bottom.0.weight['momentum'] is not captured"
    assert place in said["local state"]


class _Even(NetOfTables):
    """A tower of layers that two ranks halve: torch splits others wrongly in a process that has changed its rank."""

    def __init__(self) -> None:
        super().__init__(8)
        self.over = nn.Sequential(nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, sparse: KeyedJaggedTensor) -> torch.Tensor:
        mean: torch.Tensor = self.over(self.ebc(sparse).values()).mean(1)
        return mean


class _Over(DataParallelWrapper):
    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        module: Any = dmp.module
        fully_shard(module.over, mesh=init_device_mesh("cpu", (env.world_size,)))


def _moved(uri: str, store: str, swapped: bool) -> list[str]:
    """Train and mark a job, leave its process group, and join another one; then what an attach, a marker and a restore
    say, each without the checks before it."""
    rank, said = dist.get_rank(), []

    def job(log: str) -> tuple[Job, StreamConfig]:
        torch.manual_seed(5)
        places = {"t_one": table_wise(rank=0), "t_two": row_wise()}
        sharder = EmbeddingBagCollectionSharder(fused_params={"learning_rate": 0.1})
        dmp = wrapped(_Even(), places, sharder, wrapper=_Over())
        return Job(dmp, torch.optim.Adam(dmp.module.over.parameters())), StreamConfig(uri=log, marker_every=None)

    def tried(log: str, *, restores: bool = False) -> str:
        live, config = job(log)
        try:
            with StreamCheckpointer(live.dmp, live.optimizer, config=config) as checkpointer:
                if restores:
                    checkpointer.restore()
                live.step()
                checkpointer.step()
                checkpointer.mark().result(60)
        except StreamCkptError as error:
            return str(error)
        return ""

    said.append(tried(uri))
    dist.barrier()
    dist.destroy_process_group()
    rank = 1 - rank if swapped else rank
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    said.append(tried(f"{uri}-2"))
    with patch.object(dense_guard, "check_derived_places"):
        said += [tried(uri, restores=True), tried(f"{uri}-3")]
    return said


@pytest.mark.parametrize("swapped", [True, False], ids=["another rank", "the same rank"])
def test_a_process_that_changed_its_rank_is_refused_by_name(swapped: bool, tmp_path: Path) -> None:
    for said in ranks.run(2, _moved, f"file://{tmp_path / 'log'}", str(tmp_path / "store"), swapped):
        if not swapped:
            assert said == ["", "", "", ""]
            continue
        assert said[0] == ""
        for text, part in zip(
            said[1:], ["over.0.weight", "a tensor of an optimizer", "model.over.0.weight"], strict=True
        ):
            assert f"part of {part} at" in text
            assert "this process had another rank in an earlier process group" in text


# Gradients.


def _micro_batches(job: Trainer, checkpointer: StreamCheckpointer, count: int) -> None:
    """Accumulation over two batches: the optimizer steps after the second one."""
    for _ in range(count):
        job.step_number += 1
        job.dmp(*batch(job.step_number)).div(2).backward()
        if job.step_number % 2 == 0:
            job.optimizer.step()
            job.optimizer.zero_grad()
        checkpointer.step()


def _accumulated(kind: str, uri: str, restore: bool) -> tuple[list[str], State]:
    """Entries of gradients at the marker in the middle of an accumulation, and the truth three batches later."""
    job = _job(kind)
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        if restore:
            assert checkpointer.restore() is not None
        else:
            _micro_batches(job, checkpointer, 3)
            checkpointer.mark().result(60)
        held = [name for name, each in job.dmp.module.named_parameters() if isinstance(each.grad, DTensor)]
        _micro_batches(job, checkpointer, 3)
        return held, truth(job)


@pytest.mark.parametrize("kind", ["root adam", "towers adagrad"])
def test_a_sharded_gradient_that_is_accumulated_comes_back(kind: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    then, now = (warm.run(2, _accumulated, kind, uri, restore) for restore in (False, True))
    for (held, trained), (held_now, resumed) in zip(then, now, strict=True):
        assert len(held) >= 8
        assert held == held_now
        assert differences(trained, resumed) == []


def _not_reduced(uri: str) -> list[str]:
    said = []
    job = _job("root adam")
    modules = [module for module in job.dmp.modules() if isinstance(module, FSDPModule)]
    with attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        for number in (1, 2, 1, 2):
            for module in modules:
                module.set_requires_gradient_sync(number == 2, recurse=False)
            _micro_batches(job, checkpointer, 1)
            try:
                checkpointer.mark().result(60)
                said.append("committed")
            except MarkerFailedError as error:
                said.append(str(error))
    return said


def test_a_gradient_that_fsdp_has_not_reduced_is_refused_by_name(tmp_path: Path) -> None:
    for said in warm.run(2, _not_reduced, f"file://{tmp_path}"):
        assert said[1::2] == ["committed", "committed"]
        for text in said[::2]:
            assert "was accumulated on this rank alone: FSDP2 has not reduced it" in text
            assert "Try: mark at the accumulation boundary" in text
