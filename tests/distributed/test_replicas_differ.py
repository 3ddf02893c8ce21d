"""What ranks hold alike is compared before a marker is committed, and what differs is named on all of them."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.algorithms.model_averaging.averagers as averagers
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.distributed.tensor import DTensor

from tests import ranks, warm
from tests.command import ask
from tests.distributed.test_dense import DENSE, Job, Position, build
from tests.inside import inside
from tests.parts import Scope
from tests.pressure import steps
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.dense.dense_digests import digests
from torchrec_stream_ckpt.dense.replica_check import Held, all_same, check_same, hold
from torchrec_stream_ckpt.errors import ReplicaMismatchError, StreamCkptError

pytestmark = pytest.mark.distributed


def attach(job: Job, uri: str, *, paranoid: bool = False, **given: Any) -> StreamCheckpointer:
    settings = {name: given.pop(name) for name in list(given) if name in StreamConfig.__dataclass_fields__}
    config = StreamConfig(uri=uri, **{"marker_every": 10**6, **settings})
    optimizer = job.optimizer if job.keyed is not None else None
    return StreamCheckpointer(job.dmp, optimizer, config=config, paranoid=paranoid, **given)


class ErrorFeedback(torch.optim.SGD):
    """Keeps what its rank did not apply, as compressing optimizers do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            error = self.state[parameter].setdefault("error", torch.zeros_like(parameter))
            error.add_(parameter.grad * (1 + dist.get_rank()))
        super().step(closure)


DENSE["error feedback"] = lambda parameters, lr: ErrorFeedback(parameters, lr=lr)
DENSE["frozen"] = DENSE["adam"]


def _local(job: Job, checkpointer: StreamCheckpointer) -> None:
    """Post-local SGD between two averagings, or ``no_sync()`` with a step."""
    with job.dmp._dmp_wrapped_module.no_sync():
        steps(job, checkpointer, 2)


def _rank0_loads(job: Job, _: StreamCheckpointer) -> None:
    if dist.get_rank() == 0:
        with torch.no_grad():
            dense_layer(job).bias.add_(1)


def _last_rank_loads(job: Job, _: StreamCheckpointer) -> None:
    """One rank of three, and one bit."""
    if dist.get_rank() == dist.get_world_size() - 1:
        dense_layer(job).weight.detach().view(torch.int32)[3, 2] ^= 1


def _frozen(job: Job, _: StreamCheckpointer) -> None:
    frozen = next(each for name, each in job.dmp.named_parameters() if "frozen.weight" in name)
    with torch.no_grad():
        frozen[0, 0] += dist.get_rank()


def dense_layer(job: Job) -> nn.Linear:
    return next(each for name, each in job.dmp.named_modules() if name.endswith("bottom"))


def top_layer(job: Job) -> nn.Linear:
    return next(each for name, each in job.dmp.named_modules() if name.endswith("top"))


def nothing(*_: Any) -> None: ...


ROWS: dict[str, tuple[dict[str, Any], Callable[[Job, StreamCheckpointer], None], str]] = {
    "no_sync": ({}, _local, "model."),
    "weights of rank 0": ({}, _rank0_loads, "model.bottom.bias [8] torch.float32"),
    "one bit": ({}, _last_rank_loads, "model.bottom.weight [8, 4] torch.float32"),
    "optimizer state": (
        {"dense": "error feedback"},
        nothing,
        "optim.optimizer0.bottom.weight.error [8, 4] torch.float32",
    ),
    "frozen": ({"parts": ("dense", "frozen")}, _frozen, "a frozen parameter: model.frozen.weight [3, 3]"),
}


def _mark(checkpointer: StreamCheckpointer) -> str:
    try:
        return str(checkpointer.mark().result(60).id)
    except StreamCkptError as error:
        return f"{type(error).__name__}: {error}"


def _differ(uri: str, row: str) -> tuple[str, str, int]:
    built, differ, _ = ROWS[row]
    job = build(**built)
    checkpointer = attach(job, uri)
    steps(job, checkpointer, 2)
    differ(job, checkpointer)
    said = _mark(checkpointer)
    raised = ""
    for _ in range(40):
        try:
            checkpointer.step()
        except ReplicaMismatchError as error:
            raised = str(error)
            break
    stats = checkpointer.stats()
    checkpointer.close()
    return said, raised, stats.markers_differed


@pytest.mark.parametrize(("row", "world"), [*((row, 2) for row in ROWS), ("one bit", 3), ("no_sync", 3)])
def test_what_differs_is_named_and_raised_on_all_ranks(row: str, world: int, tmp_path: Path) -> None:
    for said, raised, count in warm.run(world, _differ, f"file://{tmp_path}", row):
        other = world - 1 if row == "one bit" else 1
        assert said.startswith(f"ReplicaMismatchError: ranks 0 and {other} hold different values of {ROWS[row][2]}")
        assert "\n  Try: " in said
        assert raised == said.removeprefix("ReplicaMismatchError: "), "the next step does not raise it"
        assert count == 1


def _seen_from_outside(uri: str) -> None:
    """``watch`` and ``doctor`` name what differs, once rank 0 has said it in the log."""
    deadline = time.monotonic() + 60
    while not (
        alerts := [each for each in ask("watch", uri, "--once", status=None)["alerts"] if each["kind"] == "refused"]
    ):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert len(alerts) == 1
    text = "markers after 1:1 were refused because ranks differ: ranks 0 and 1 hold different values of"
    assert alerts[0]["text"].startswith(text)
    (finding,) = [each for each in ask("doctor", uri, status=None) if each["check"] == "refused markers"]
    assert finding["found"].startswith(text)
    assert finding["verdict"] == "warning"


def _differ_later(uri: str) -> list[str]:
    job = build()
    checkpointer = attach(job, uri)
    steps(job, checkpointer, 1)
    said = [_mark(checkpointer)]
    if dist.get_rank() == 1:
        with torch.no_grad():
            dense_layer(job).bias.add_(1)
    for _ in range(2):
        steps(job, checkpointer, 1)
        said.append(_mark(checkpointer).split(":")[0])
    if dist.get_rank() == 0:
        _seen_from_outside(uri)
    for parameter in (*dense_layer(job).parameters(), *top_layer(job).parameters()):
        dist.broadcast(parameter.data, 0)
    for values in job.keyed.state.values():
        for value in values.values():
            dist.broadcast(value, 0)
    steps(job, checkpointer, 1)
    said.append(_mark(checkpointer))
    checkpointer.close()
    assert checkpointer.stats().markers_differed == 2
    return said


def test_a_later_difference_fails_its_markers_and_training_goes_on(tmp_path: Path) -> None:
    for said in warm.run(2, _differ_later, f"file://{tmp_path}"):
        assert said == ["1:1", "ReplicaMismatchError", "ReplicaMismatchError", "1:4"]
    assert ask("watch", f"file://{tmp_path}", "--once", status=None)["alerts"] == []


def _window(uri: str, paranoid: bool) -> list[str]:
    """Dense state of 353 words in windows of 256 bytes: a bit is found within a round, and at once if paranoid."""
    job = build(dense="momentum")
    checkpointer = attach(job, uri, proof_bytes=256, paranoid=paranoid)
    steps(job, checkpointer, 1)
    said = [_mark(checkpointer).split(":")[0]]
    if dist.get_rank() == 1:
        dense_layer(job).weight.detach().view(torch.int32)[3, 2] ^= 1
    for _ in range(4):
        checkpointer.step()
        said.append(_mark(checkpointer).split(":")[0])
    checkpointer.close()
    return said


@pytest.mark.parametrize("paranoid", [False, True])
def test_a_large_dense_state_is_compared_by_turns(paranoid: bool, tmp_path: Path) -> None:
    said, other = warm.run(2, _window, f"file://{tmp_path}", paranoid)
    assert said == other
    failed = [each == "ReplicaMismatchError" for each in said]
    assert not failed[0]
    assert all(failed[1:]) if paranoid else 0 < sum(failed) < 4


class Broken(Position):
    def state_dict(self) -> dict[str, Any]:
        raise ValueError("no position before the first batch")


class Holder(Position):
    """Has whatever value."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.held = value

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}


BAD: dict[str, tuple[Callable[[], Any], str]] = {
    "raises": (lambda: Broken(), "the state_dict() of the Stateful 'item' (Broken) fails: ValueError: no position"),
    "a module": (lambda: Holder(nn.Linear(1, 1)), "the Stateful 'item' (Holder): ['held'] is a module (Linear)"),
    "a generator": (lambda: Holder(iter(each for each in ())), "['held'] is a builtins.generator"),
    "a lambda": (lambda: Holder(lambda: None), "['held'] is test_replicas_differ.<lambda>"),
}


def _bad(uri: str, case: str) -> str:
    item = BAD[case][0]() if dist.get_rank() == 1 else Position()
    with pytest.raises(StreamCkptError) as refused:
        attach(build(), uri, stateful={"item": item})
    return str(refused.value)


@pytest.mark.parametrize("case", BAD)
def test_an_object_that_cannot_be_compared_is_refused_at_the_attach(case: str, tmp_path: Path) -> None:
    for said in warm.run(2, _bad, f"file://{tmp_path}", case):
        assert BAD[case][1] in said


def _objects(uri: str, differ: bool) -> str:
    job, rank = build(), dist.get_rank()
    name = "".join(["lo", "ss"]) if rank else "loss"
    pairs = [("a", 1.0), (name, [name, name]), ("nan", float("nan"))]
    state = dict(reversed(pairs) if rank else pairs)
    state |= {"seen": {"alpha", "beta", "gamma"}, "live": dense_layer(job).weight.detach(), "epoch": rank * differ}
    with attach(job, uri, stateful={"tracker": Holder(state)}, stateful_rank0={"run": Position(rank)}) as checkpointer:
        steps(job, checkpointer, 1)
        return _mark(checkpointer)


def test_equal_objects_that_were_built_separately_are_equal(tmp_path: Path) -> None:
    assert warm.run(3, _objects, f"file://{tmp_path}", False) == ["1:1"] * 3


def test_an_object_that_differs_is_named_with_both_values(tmp_path: Path) -> None:
    for said in warm.run(2, _objects, f"file://{tmp_path}", True):
        assert said.startswith(
            "ReplicaMismatchError: ranks 0 and 1 hold different values of the Stateful 'tracker' (Holder): "
            "['held']['epoch'] is 0 on rank 0 and 1 on rank 1"
        )
        assert "stateful_rank0" in said


def _rank0(uri: str, restoring: bool) -> tuple[str, dict[str, torch.Tensor], int, int]:
    job = build(lr=0.5 if restoring else 0.01)
    own = Position(dist.get_rank())
    with attach(job, uri, replicas="rank0", stateful={"own": own}) as checkpointer:
        said = ""
        if restoring:
            restored = checkpointer.restore()
            assert restored is not None
            said = restored.replicas
        else:
            steps(job, checkpointer, 1)
            _local(job, checkpointer)
            said = _mark(checkpointer)
        owned = sum(name.startswith(("model.", "optim.")) for name in inside(checkpointer).dense.stage())
        truth = {name: value for name, value in job.truth().items() if name.startswith(("bottom", "top"))}
        return said, truth, own.value, owned


def test_rank0_saves_one_replica_as_a_whole_and_a_restore_says_so(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    saved, restored = warm.run(2, _rank0, uri, False), warm.run(2, _rank0, uri, True)
    assert [each[0] for each in saved] == ["1:1", "1:1"]
    assert [bool(each[3]) for each in saved] == [True, False], "tensors are dealt out"
    different = [name for name, value in saved[0][1].items() if not torch.equal(value, saved[1][1][name])]
    assert different, "the replicas are equal: nothing is shown"
    for said, truth, own, _ in restored:
        assert (said, own) == ("rank0", 0)
        assert all(torch.equal(value, saved[0][1][name]) for name, value in truth.items())


def _healthy(uri: str) -> list[str]:
    said = []
    for number, parts in enumerate([("dense", "norm"), ("dense", "unused", "frozen"), ()]):
        job = build(parts)
        torch.manual_seed(40 + dist.get_rank())
        with attach(job, f"{uri}/{number}", marker_every=1, paranoid=number == 1) as checkpointer:
            steps(job, checkpointer, 4)
            said.append(_mark(checkpointer))
            assert checkpointer.stats().markers_failed == 0
    return said


@pytest.mark.parametrize("world", [1, 2, 3])
def test_healthy_jobs_lose_no_marker(world: int, tmp_path: Path) -> None:
    """Buffers and random state differ by rank."""
    for said in warm.run(world, _healthy, f"file://{tmp_path}"):
        assert len(said) == 3
        assert not any("Error" in each for each in said)


def _one_warning(uri: str) -> int:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.disable(logging.NOTSET)
    logging.getLogger("torchrec_stream_ckpt").addHandler(handler)
    with contextlib.suppress(StreamCkptError):
        job = build()
        checkpointer = attach(job, uri)
        _rank0_loads(job, checkpointer)
        steps(job, checkpointer, 1)
        for _ in range(3):
            _mark(checkpointer)
    checkpointer.close()
    logging.getLogger("torchrec_stream_ckpt").removeHandler(handler)
    logging.disable(logging.WARNING)
    return sum("hold different values" in line for line in lines)


def test_the_log_hears_of_it_once_a_minute(tmp_path: Path) -> None:
    assert warm.run(2, _one_warning, f"file://{tmp_path}") == [1, 1]


# Replicas of FSDP2 shards are compared among ranks that hold the same one; post-local SGD comes back with its step.


def _held(layer: nn.Module) -> Held:
    return hold({}, dict(layer.named_parameters()), {}, {}, (), Scope())


def _hsdp(replicas: int, shards: int) -> tuple[list[bool], str, bool]:
    """(whether ranks agree: as they are, and with a bit flipped on the last one; what is said; whether parts add up)"""
    torch.manual_seed(1)
    layer, whole = nn.Linear(5, 7), {}
    whole = {name: parameter.detach().clone() for name, parameter in layer.named_parameters()}
    fully_shard(layer, mesh=init_device_mesh("cpu", (replicas, shards), mesh_dim_names=("replicate", "shard")))
    agreed: list[bool] = []
    said = ""
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, digests(dict(layer.named_parameters())))
    adds_up = all(
        sum(part[name] for part in parts[:shards]) % 2**64 == digests({name: value})[name]
        for name, value in whole.items()
    )
    for flipped in (False, True):
        weight = layer.weight
        assert isinstance(weight, DTensor)
        if flipped and dist.get_rank() == dist.get_world_size() - 1:
            weight.to_local().detach().view(torch.int32)[-1, 0] ^= 1
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, _held(layer))
        agreed.append(all_same([each.checksums() for each in everyone]))
        try:
            check_same(everyone)
        except ReplicaMismatchError as error:
            said = error.message
    return agreed, said, adds_up


@pytest.mark.parametrize(("replicas", "shards", "pair"), [(2, 1, (0, 1)), (2, 2, (1, 3)), (3, 1, (0, 2))])
def test_a_replica_of_a_shard_that_differs_is_named(replicas: int, shards: int, pair: tuple[int, int]) -> None:
    for agreed, said, adds_up in ranks.run(replicas * shards, _hsdp, replicas, shards):
        assert agreed == [True, False]
        assert said.startswith(f"ranks {pair[0]} and {pair[1]} hold different values of weight [7, 5] torch.float32")
        assert adds_up


def _sharded(uri: str) -> str:
    job = build()
    fully_shard(job.dmp.module.bottom, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    with pytest.raises(StreamCkptError) as refused:
        attach(Job(job.dmp, job.optimizer, job.keyed), uri, replicas="rank0")
    return str(refused.value)


def _post_local(uri: str, replicas: str, restoring: bool) -> tuple[str, int, bool]:
    job = build(dense="momentum")
    inner = job.keyed._optimizer
    averager = averagers.PeriodicModelAverager(period=3, warmup_steps=1)
    job.optimizer = PostLocalSGDOptimizer(inner, averager)
    said = ""
    with attach(job, uri, replicas=replicas) as checkpointer:
        if restoring:
            assert checkpointer.restore() is not None
        else:
            steps(job, checkpointer, 1)
            with job.dmp._dmp_wrapped_module.no_sync():
                steps(job, checkpointer, 2)
            said = _mark(checkpointer)
    kept = any("momentum_buffer" in values for values in inner.state.values())
    return said, averager.step, kept


def test_post_local_sgd_is_saved_with_its_step(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    assert ranks.run(2, _post_local, uri, "rank0", False) == [("1:1", 3, True)] * 2
    assert ranks.run(2, _post_local, uri, "rank0", True) == [("", 3, True)] * 2


def test_post_local_sgd_between_two_averagings_is_refused_by_default(tmp_path: Path) -> None:
    for said, _, _ in ranks.run(2, _post_local, f"file://{tmp_path}", "same", False):
        assert said.startswith("ReplicaMismatchError: ranks 0 and 1 hold different values of")
        assert "replicas='rank0'" in said


def test_one_replica_of_a_sharded_parameter_is_refused_at_the_attach(tmp_path: Path) -> None:
    for said in ranks.run(2, _sharded, f"file://{tmp_path}"):
        assert "replicas='rank0' requires a whole replica on rank 0, but FSDP2 shards bottom." in said
