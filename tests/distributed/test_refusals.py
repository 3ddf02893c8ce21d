"""What cannot be captured or restored exactly is refused, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.optim.keyed import OptimizerWrapper

import tests.model as model
from tests import ranks
from tests.jobs import attach
from tests.model import PLAN_2, trainer
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import (
    ConfigError,
    LogUnavailableError,
    SchemaMismatchError,
    StreamCkptError,
    UnsupportedError,
)

pytestmark = pytest.mark.distributed


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
