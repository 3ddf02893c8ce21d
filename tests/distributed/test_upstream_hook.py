"""What TorchRec's public hook names is not what its kernels change: docs/upstream/after_update_hook.md."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad

from tests import ranks

pytestmark = pytest.mark.distributed


def _named_and_changed() -> dict[str, tuple[set[int], set[int]]]:
    ebc = EmbeddingBagCollection(
        tables=[EmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=8, feature_names=["f"])],
        device=torch.device("meta"),
    )
    apply_optimizer_in_backward(Adagrad, ebc.parameters(), {"lr": 0.1})
    sharder = EmbeddingBagCollectionSharder()
    kinds = {"t": table_wise(rank=0, compute_kernel="fused")}
    plan = construct_module_sharding_plan(ebc, kinds, sharder, local_size=1, world_size=1, device_type="cpu")
    model = DistributedModelParallel(
        torch.nn.Sequential(ebc), device=torch.device("cpu"), plan=ShardingPlan({"0": plan}), sharders=[sharder]
    )
    named: set[int] = set()
    model.module[0].register_post_lookup_tracker_fn(lambda ids, *_: named.update(ids.values().tolist()))
    (sharded,) = (value for value in model.state_dict().values() if hasattr(value, "local_shards"))
    weight = sharded.local_shards()[0].tensor

    def loss(ids: list[int]) -> torch.Tensor:
        batch = KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))
        return ((model(batch)["f"] - 1) ** 2).mean()

    def case(act: Callable[[], object]) -> tuple[set[int], set[int]]:
        named.clear()
        before = weight.clone()
        act()
        return set(named), set((weight != before).any(1).nonzero().flatten().tolist())

    held: list[torch.Tensor] = []
    return {
        "a step": case(lambda: loss([1, 2, 3]).backward()),
        "a forward alone": case(lambda: loss([4, 5, 6])),
        "a forward now": case(lambda: held.append(loss([8, 9]))),
        "its backward later": case(lambda: held[0].backward()),
    }


def test_torchrecs_hook_names_lookups_and_not_updates() -> None:
    (found,) = ranks.run(1, _named_and_changed)
    assert found == {
        "a step": ({1, 2, 3}, {1, 2, 3}),
        "a forward alone": ({4, 5, 6}, set()),
        "a forward now": ({8, 9}, set()),
        "its backward later": (set(), {8, 9}),
    }
