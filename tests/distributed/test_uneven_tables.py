"""All tables of a job are on one of its ranks: the other one holds none, and a restore on one rank has all of them."""

from __future__ import annotations

import os
from pathlib import Path

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import warm
from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

TABLES = int(os.environ.get("UNEVEN_TABLES", "60"))
"""UNEVEN_TABLES sets another number, for a run by hand."""
Values = dict[str, torch.Tensor]


class Net(nn.Module):
    """Tables of three rows, under one dense weight."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=name, num_embeddings=3, embedding_dim=4, feature_names=[name]) for name in names
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.over = nn.Linear(4, 1)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        looked_up = self.ebc(features).values()
        return self.over(looked_up.reshape(-1, 4)).sum()


def job(uri: str, steps: int) -> tuple[Values, int]:
    """(every rank) Go on from the newest marker, train, and mark; the values of the tables held here, and the step."""
    names = [f"t{number:05d}" for number in range(TABLES)]
    torch.manual_seed(dist.get_rank() + 10 * steps)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    place = table_wise(rank=dist.get_world_size() - 1)
    model = wrapped(Net(names), dict.fromkeys(names, place), EmbeddingBagCollectionSharder(fused_params=fused))
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
    optimizer = CombinedOptimizer([model.fused_optimizer, adam])
    with StreamCheckpointer(model, optimizer, config=StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        checkpointer.restore()
        for step in range(steps):
            ids = torch.arange(TABLES) * (step + 1) % 3
            optimizer.zero_grad()
            model(KeyedJaggedTensor(names, ids, lengths=torch.ones(TABLES, dtype=torch.int64))).backward()
            optimizer.step()
            checkpointer.step()
        if steps:
            checkpointer.mark().result(300)
        return held(model, optimizer), checkpointer.steps


def held(model: nn.Module, optimizer: CombinedOptimizer) -> Values:
    """Weights, and rows of the fused optimizer, of the shards on this rank."""
    found: Values = {}
    state = optimizer.state_dict()["state"]
    values = {**model.state_dict(), **{f"{name}/{key}": each for name in state for key, each in state[name].items()}}
    for name, value in values.items():
        if isinstance(value, ShardedTensor):
            found |= {f"{name}/{shard.metadata.shard_offsets}": shard.tensor.clone() for shard in value.local_shards()}
    return found


def test_a_rank_without_tables_marks_and_one_rank_restores_all_of_them(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    (nothing, _), (trained, step) = warm.run(2, job, uri, 2)
    assert nothing == {}
    assert len(trained) == 2 * TABLES
    ((restored, restored_step),) = warm.run(1, job, uri, 0)
    assert restored_step == step == 2
    assert restored.keys() == trained.keys()
    assert all(torch.equal(restored[name], value) for name, value in trained.items())
