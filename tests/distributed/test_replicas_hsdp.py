"""Replicas of FSDP2 shards are compared among ranks that hold the same one; post-local SGD comes back with its step."""

from __future__ import annotations

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

from tests import ranks
from tests.distributed.test_dense import Job, build
from tests.distributed.test_replicas_differ import _mark, attach, steps
from torchrec_stream_ckpt.dense.dense_digests import digests
from torchrec_stream_ckpt.dense.replica_check import Held, Scope, all_same, check_same, hold
from torchrec_stream_ckpt.errors import ReplicaMismatchError, StreamCkptError

pytestmark = pytest.mark.distributed


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
