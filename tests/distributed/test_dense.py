"""The dense part: every kind of state comes back bit for bit, and what does not fit is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import warm
from tests.inside import inside
from tests.model import assemble, differences
from tests.parts import dcp
from tests.starts import from_both_starts
from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import (
    ConfigError,
    MarkerFailedError,
    SchemaMismatchError,
    StreamCkptError,
    UnsupportedError,
)

pytestmark = pytest.mark.distributed

ROWS = 37
BATCH = 12


class Net(nn.Module):
    """One sharded collection, and the dense parts that a test asks for."""

    def __init__(self, parts: tuple[str, ...]) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(name=name, num_embeddings=ROWS, embedding_dim=8, feature_names=[name])
            for name in ("t_one", "t_two")
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        if "dense" in parts:
            self.bottom, self.top = nn.Linear(4, 8), nn.Linear(8, 1)
        if "unused" in parts:
            self.unused = nn.Linear(3, 3)
        if "frozen" in parts:
            self.frozen = nn.Linear(3, 3).requires_grad_(False)
        if "norm" in parts:
            self.norm = nn.BatchNorm1d(8)

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor) -> torch.Tensor:
        output = (self.ebc(sparse).values() ** 2).sum(1)
        if hasattr(self, "bottom"):
            hidden = self.bottom(dense)
            hidden = self.norm(hidden) if hasattr(self, "norm") else hidden
            output = output + self.top(torch.relu(hidden)).squeeze(1)
        return ((output - 1) ** 2).mean()


class NetWithExtraState(Net):
    def get_extra_state(self) -> dict[str, int]:
        return {"epoch": 1}

    def set_extra_state(self, state: dict[str, int]) -> None: ...


Parameters = list[torch.Tensor]
DENSE: dict[str, Callable[[Parameters, float], torch.optim.Optimizer]] = {
    "adam": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr),
    "amsgrad": lambda parameters, lr: torch.optim.Adam(parameters, lr=lr, amsgrad=True, weight_decay=lr),
    "momentum": lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9, nesterov=True),
    "two groups": lambda parameters, lr: torch.optim.AdamW(
        [{"params": parameters[:2], "lr": 2 * lr}, {"params": parameters[2:], "weight_decay": lr}], lr=lr
    ),
}


@dataclass
class Job:
    """A live job on one rank."""

    dmp: DistributedModelParallel
    optimizer: Any
    """What it steps."""
    keyed: KeyedOptimizerWrapper | None
    step_number: int = 0

    def step(self) -> float:
        self.step_number += 1
        self.optimizer.zero_grad()
        loss = self.dmp(*_batch(self.step_number))
        loss.backward()
        self.optimizer.step()
        return float(loss)

    def truth(self) -> dict[str, torch.Tensor]:
        """The state of this job by plain TorchRec and torch code; buffers are this rank's own."""
        state: dict[str, torch.Tensor] = {}
        sharded: dict[str, ShardedTensor] = {}
        for name, value in self.dmp.state_dict().items():
            if isinstance(value, ShardedTensor):
                sharded[name] = value
            else:
                state[name] = value.clone()
        for name, values in self.dmp.fused_optimizer.state_dict()["state"].items():
            sharded |= {f"{name}.{key}": value for key, value in values.items()}
        state |= assemble(sharded)
        names = {id(parameter): name for name, parameter in self.dmp.named_parameters()}
        for parameter, values in self.keyed.state.items() if self.keyed is not None else ():
            state |= {f"{names[id(parameter)]}.{key}": torch.as_tensor(value).clone() for key, value in values.items()}
        return state


def _batch(step: int) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 * step + rank)
    count = BATCH // world
    lengths = torch.ones(2 * count, dtype=torch.long)
    values = torch.randint(0, ROWS, (2 * count,), generator=generator)
    sparse = KeyedJaggedTensor(keys=["t_one", "t_two"], values=values, lengths=lengths)
    return torch.randn(count, 4, generator=generator), sparse


def build(parts: tuple[str, ...] = ("dense",), dense: str = "adam", lr: float = 0.01, kind: type[Net] = Net) -> Job:
    torch.manual_seed(3)
    net = kind(parts)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.05, "eps": 1e-6}
    )
    dmp = wrapped(
        net,
        {"t_one": table_wise(rank=0), "t_two": row_wise()},
        sharder,
        wrapper=DefaultDataParallelWrapper(find_unused_parameters="unused" in parts),
    )
    with torch.no_grad():
        for value in dmp.state_dict().values():
            for shard in value.local_shards() if isinstance(value, ShardedTensor) else []:
                shard.tensor.fill_(0.1)
    trained = {
        name: parameter
        for name, parameter in in_backward_optimizer_filter(dmp.named_parameters())
        if parameter.requires_grad
    }
    if not trained:
        return Job(dmp, dmp.fused_optimizer, None)
    keyed = KeyedOptimizerWrapper(trained, lambda parameters: DENSE[dense](parameters, lr))
    return Job(dmp, CombinedOptimizer([dmp.fused_optimizer, keyed]), keyed)


def attach(job: Job, uri: str, **stateful: Any) -> StreamCheckpointer:
    optimizer = job.optimizer if job.keyed is not None else None
    settings = StreamConfig(uri=uri, marker_every=None)
    return StreamCheckpointer(job.dmp, optimizer, config=settings, paranoid=True, **stateful)


CASES: dict[str, dict[str, Any]] = {
    "no dense part": {"parts": ()},
    "a parameter without gradient": {"parts": ("dense", "unused")},
    "frozen": {"parts": ("dense", "frozen")},
    "buffers of each rank": {"parts": ("dense", "norm")},
    "amsgrad": {"dense": "amsgrad"},
    "momentum": {"dense": "momentum"},
    "two groups": {"dense": "two groups"},
}
Course = tuple[dict[str, torch.Tensor], list[float], dict[str, torch.Tensor]]
"""The state at the marker, the losses of the steps behind it, and the state behind them."""


def _train(uri: str, case: str) -> Course:
    job = build(**CASES[case])
    with attach(job, uri) as checkpointer:
        for _ in range(3):
            job.step()
            checkpointer.step()
        checkpointer.mark().result(60)
        return _go_on(job, checkpointer)


def _resume(uri: str, case: str, stepped: bool) -> Course:
    job = build(**CASES[case], lr=0.5)
    if stepped:
        job.step_number = 70
        job.step()  # a live, different state
    with attach(job, uri) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        job.step_number = restored.step
        return _go_on(job, checkpointer)


def _go_on(job: Job, checkpointer: StreamCheckpointer) -> Course:
    state, losses = job.truth(), []
    for _ in range(2):
        losses.append(job.step())
        checkpointer.step()
    return state, losses, job.truth()


@pytest.mark.parametrize("case", CASES)
def test_dense_state_comes_back_and_goes_on_bit_for_bit(case: str, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained = warm.run(2, _train, uri, case)
    for resumed in from_both_starts(warm.run, 2, _resume, uri, case):
        for (state, losses, later), (state_2, losses_2, later_2) in zip(trained, resumed, strict=True):
            assert differences(state, state_2) == []
            assert losses == losses_2
            assert differences(later, later_2) == []
    if case == "buffers of each rank":
        assert "norm.running_mean" in differences(trained[0][0], trained[1][0])


def _wrappers(uri: str) -> None:
    for restoring in (False, True):
        job = build()
        assert job.keyed is not None
        checkpointer = attach(job, uri)
        if restoring:
            assert checkpointer.restore() is not None
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        checkpointer.close()
    assert job.keyed.state is job.keyed._optimizer.state
    assert len(job.keyed.state) == 4
    for group in job.optimizer.param_groups:
        group["lr"] = 0.0
    assert [group["lr"] for group in job.keyed._optimizer.param_groups] == [0.0]
    before = job.truth()
    job.step()
    assert differences(before, job.truth())
    assert [name for name in differences(before, job.truth()) if name.endswith(("bias", "top.weight"))] == []


def test_wrappers_of_the_dense_optimizer_still_reach_it_behind_a_restore(tmp_path: Path) -> None:
    warm.run(2, _wrappers, f"file://{tmp_path}")


@dataclass
class Position:
    """A Stateful of the user."""

    value: int = -1
    history: list[int] = field(default_factory=list)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, "history": self.history}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value, self.history = state["value"], state["history"]


def _with_stateful(uri: str) -> None:
    job = build()
    own = {"random": Position(10 + dist.get_rank(), [dist.get_rank()]), "buffers": Position(20 + dist.get_rank())}
    shared, rank0 = {"empty": Position()}, {"seed": Position(30 + dist.get_rank())}
    with attach(job, uri, stateful=shared, stateful_per_rank=own, stateful_rank0=rank0) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)


def _restore_stateful(uri: str, names: tuple[str, ...], shared_names: tuple[str, ...]) -> dict[str, Position] | str:
    own, shared = {name: Position() for name in names}, {name: Position() for name in shared_names}
    checkpointer = attach(build(), uri, stateful=shared, stateful_per_rank=own)
    try:
        assert checkpointer.restore() is not None
    except (ConfigError, SchemaMismatchError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        checkpointer.close()
    return {**own, **shared}


OWN, SHARED = ("random", "buffers"), ("seed", "empty")


@pytest.fixture(scope="module")
def with_stateful(tmp_path_factory: pytest.TempPathFactory) -> str:
    uri = f"file://{tmp_path_factory.mktemp('stateful')}"
    warm.run(2, _with_stateful, uri)
    return uri


def _loads_of_restore(uri: str, count: int) -> tuple[int, int]:
    """How often DCP parses its metadata, and how often it loads, for a job with this many stateful objects."""
    objects = {f"object {number}": Position(number) for number in range(count)}
    with attach(build(), uri, stateful=objects) as checkpointer:
        checkpointer.mark().result(60)
    back, parsed, parse = {name: Position() for name in objects}, [], FileSystemReader.read_metadata

    def counted(reader: FileSystemReader, *args: Any, **kwargs: Any) -> Any:
        parsed.append(reader)
        return parse(reader, *args, **kwargs)

    with (
        attach(build(), uri, stateful=back) as checkpointer,
        mock.patch.object(FileSystemReader, "read_metadata", counted),
        mock.patch.object(dcp, "load", wraps=dcp.load) as load,
    ):
        checkpointer.restore()
    assert back == objects
    return len(parsed), load.call_count


def test_a_restore_loads_as_often_for_many_objects_as_for_two(tmp_path: Path) -> None:
    (few,) = warm.run(1, _loads_of_restore, f"file://{tmp_path}/few", 2)
    (many,) = warm.run(1, _loads_of_restore, f"file://{tmp_path}/many", 24)
    assert many == few == (1, 0)  # plain tensors are read without DCP's planner


def test_each_rank_gets_its_own_objects_back_whatever_their_names(with_stateful: str) -> None:
    for rank, found in enumerate(warm.run(2, _restore_stateful, with_stateful, OWN, SHARED)):
        assert found == {
            "random": Position(10 + rank, [rank]),
            "buffers": Position(20 + rank),
            "seed": Position(30),
            "empty": Position(),
        }


def test_objects_of_each_rank_are_refused_by_name_on_another_number_of_ranks(with_stateful: str) -> None:
    (said,) = warm.run(1, _restore_stateful, with_stateful, OWN, SHARED)
    assert said.startswith("ConfigError: random, buffers: the marker has the state of 2 ranks, but this job has 1")


@pytest.mark.parametrize(
    ("own", "shared", "name", "side"),
    [
        (("buffers",), SHARED, "random", "the marker"),
        ((*OWN, "more"), SHARED, "more", "this job"),
        (OWN, ("seed",), "empty", "the marker"),
        (OWN, (*SHARED, "more"), "more", "this job"),
        ((), (*SHARED, *OWN), "buffers", "this job"),
    ],
)
def test_an_object_that_only_one_side_has_is_refused_by_name(
    with_stateful: str, own: tuple[str, ...], shared: tuple[str, ...], name: str, side: str
) -> None:
    for said in warm.run(2, _restore_stateful, with_stateful, own, shared):
        assert re.search(rf"stateful '(per_rank\.)?{name}': only {side} has it", said), said
        assert said.startswith("SchemaMismatchError: the marker does not match this model")


def _refusals(uri: str) -> dict[str, str]:
    said: dict[str, str] = {}

    def expect(name: str, error: type[StreamCkptError], job: Job, optimizer: Any) -> None:
        with pytest.raises(error) as caught:
            StreamCheckpointer(job.dmp, optimizer, config=StreamConfig(uri=uri))
        said[name] = str(caught.value)

    job = build()
    expect("no optimizer", UnsupportedError, job, None)
    expect("only the fused one", UnsupportedError, job, job.dmp.fused_optimizer)
    half = torch.optim.SGD(job.dmp.module.bottom.parameters(), lr=0.1)
    expect("half of it", UnsupportedError, job, half)
    extra = build(kind=NetWithExtraState)
    expect("extra state", UnsupportedError, extra, extra.optimizer)
    return said


def test_a_dense_part_that_cannot_be_captured_is_refused_by_name(tmp_path: Path) -> None:
    said = warm.run(2, _refusals, f"file://{tmp_path}")[0]
    assert "the dense parameter bottom.weight is not in any optimizer" in said["no optimizer"]
    assert "the dense parameter bottom.weight is not in any optimizer" in said["only the fused one"]
    assert "the dense parameter top.weight is not in any optimizer" in said["half of it"]
    assert "NetWithExtraState has extra state and contains a sharded module" in said["extra state"]


def _another_optimizer(uri: str) -> str:
    with attach(build(), uri) as checkpointer:
        checkpointer.mark().result(60)
    checkpointer = attach(build(dense="momentum"), uri)
    with pytest.raises(SchemaMismatchError) as caught:
        checkpointer.restore()
    checkpointer.close()
    return str(caught.value)


def test_another_class_of_dense_optimizer_is_refused_with_both_names(tmp_path: Path) -> None:
    for said in warm.run(2, _another_optimizer, f"file://{tmp_path}"):
        assert "dense 'optimizer0': SGD here, Adam in the marker" in said


def _shares(uri: str) -> tuple[set[str], tuple[str, ...]]:
    """(what this rank copies of the parameters and the states of Adam, what all ranks hold of them)"""
    job = build()
    with attach(job, uri) as checkpointer:
        job.step()
        job.step()  # from here on it is known that the loop clears its gradients
        mine = {name for name in inside(checkpointer).dense.stage() if name.startswith(("model.", "optim."))}
        return mine, inside(checkpointer).dense.held.shapes


def test_what_all_ranks_hold_alike_is_copied_once_and_by_all_of_them(tmp_path: Path) -> None:
    (first, listing), (second, same) = warm.run(2, _shares, f"file://{tmp_path}")
    assert listing == same
    assert first | second == {entry.partition(" ")[0] for entry in listing}
    assert len(listing) == 4 * (1 + 3), "four parameters, and exp_avg, exp_avg_sq and step of each"
    assert first
    assert second
    assert not first & second


def _differ(uri: str) -> str:
    """Rank 1 has lost the optimizer state of one parameter."""
    job = build()
    with attach(job, uri) as checkpointer:
        job.step()
        checkpointer.step()
        assert job.keyed is not None
        optimizer = job.keyed._optimizer
        lost = optimizer.param_groups[0]["params"][0]
        kept = optimizer.state.pop(lost) if dist.get_rank() else {}
        with pytest.raises(MarkerFailedError) as caught:
            checkpointer.mark().result(60)
        if kept:
            optimizer.state[lost] = kept
        checkpointer.mark().result(60)  # all ranks hold the same again
        return str(caught.value)


def test_ranks_that_hold_different_dense_state_fail_the_marker_by_name(tmp_path: Path) -> None:
    for said in warm.run(2, _differ, f"file://{tmp_path}"):
        assert "the dense state of ranks 0 and 1 differs: only one of them has optim.optimizer0.bottom." in said
