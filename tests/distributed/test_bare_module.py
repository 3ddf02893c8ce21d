"""A model that is nothing but the sharded module: its path is the empty name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardedTensor, ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad

from tests.model import assemble, differences
from tests.pool import Pool
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

pytestmark = pytest.mark.distributed

ROWS = 60


def _job() -> DistributedModelParallel:
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=ROWS, embedding_dim=8, feature_names=[name])
        for name in ("a", "b")
    ]
    bare = EmbeddingBagCollection(tables=tables)
    apply_optimizer_in_backward(Adagrad, bare.parameters(), {"lr": 0.1})
    world = dist.get_world_size()
    places = {"t_a": row_wise(), "t_b": table_wise(rank=world - 1)}
    plan = construct_module_sharding_plan(
        bare, per_param_sharding=places, local_size=world, world_size=world, device_type="cpu"
    )
    return DistributedModelParallel(bare, device=torch.device("cpu"), plan=ShardingPlan(plan={"": plan}))


def _step(dmp: DistributedModelParallel, number: int) -> None:
    ids = torch.tensor([(7 * number + each + dist.get_rank()) % ROWS for each in range(8)])
    dmp(KeyedJaggedTensor(["a", "b"], ids, lengths=torch.ones(8, dtype=torch.long))).values().square().sum().backward()


def _truth(dmp: DistributedModelParallel) -> dict[str, torch.Tensor]:
    states = dmp.fused_optimizer.state_dict()["state"]
    state = {f"{name}.{key}": value for name, values in states.items() for key, value in values.items()}
    return assemble({k: v for k, v in (dmp.state_dict() | state).items() if isinstance(v, ShardedTensor)})


def _train(uri: str) -> dict[str, torch.Tensor]:
    dmp = _job()
    config = StreamConfig(uri=uri, marker_every=None)
    with StreamCheckpointer(dmp, dmp.fused_optimizer, config=config, stateful={}, paranoid=True) as checkpointer:
        checkpointer.restore()
        for number in range(5):
            _step(dmp, number)
            checkpointer.step()
        checkpointer.mark().result(60)
    return _truth(dmp)


def _restore(uri: str) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a job had before a restore, and after it."""
    dmp = _job()
    _step(dmp, 9)
    before = _truth(dmp)
    with StreamCheckpointer(dmp, dmp.fused_optimizer, config=StreamConfig(uri=uri), stateful={}) as checkpointer:
        assert checkpointer.restore() is not None
        return before, _truth(dmp)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_bare_module_comes_back_on_other_ranks(world: int, tmp_path: Path, pool: Pool) -> None:
    (expected, *_) = pool.run(2, _train, f"file://{tmp_path}")
    assert {"t_a", "t_b"} <= {name.split(".")[-2] for name in expected}
    for before, after in pool.run(world, _restore, f"file://{tmp_path}"):
        assert differences(expected, before)
        assert differences(expected, after) == []
