"""What the kernels of a changed model count: tables with optimizers of their own, in kernels of their own."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import SGD, Adagrad

from tests import ranks
from tests.inside import inside
from tests.laps import config
from torchrec_stream_ckpt import Changes, StreamCheckpointer, StreamConfig

pytestmark = pytest.mark.distributed

Kinds = dict[str, tuple[type, float]]
OLD: Kinds = {"kept": (Adagrad, 0.1), "switched": (SGD, 0.1)}
NEW: Kinds = {"kept": (Adagrad, 0.1), "switched": (Adagrad, 0.2), "added": (Adagrad, 0.3)}
TOGETHER: Kinds = {"kept": (Adagrad, 0.1), "switched": (Adagrad, 0.3), "added": (Adagrad, 0.3)}


def counted(settings: StreamConfig, kinds: Kinds, changes: Changes | None) -> dict[str, Any]:
    """(iteration, learning rate) of the kernel of each table."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=[f"f_{name}"]) for name in kinds
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    for name, (kind, rate) in kinds.items():
        apply_optimizer_in_backward(kind, ebc.embedding_bags[name].parameters(), {"lr": rate})
    module, sharder = nn.Sequential(ebc), EmbeddingBagCollectionSharder()
    constraints = {name: ParameterConstraints(["table_wise"], ["fused"]) for name in kinds}
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=planner.plan(module, [sharder]), sharders=[sharder]
    )
    with StreamCheckpointer(model, model.fused_optimizer, config=settings) as checkpointer:
        if changes is not None:
            checkpointer.restore(changes=changes)
        if changes is None:
            for kernel in inside(checkpointer).kernels:  # these optimizers count no steps on a CPU
                rate = kernel.scalars.learning_rate
                kernel.scalars.put_back(3, 1.0, rate, rate)
            checkpointer.mark().result(60)
        return {
            shard.table.name: (kernel.scalars.iteration, round(kernel.scalars.learning_rate, 6))
            for kernel in inside(checkpointer).kernels
            for shard in kernel.held
        }


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (NEW, {"0.kept": (3, 0.1), "0.switched": (0, 0.2), "0.added": (3, 0.1)}),
        (TOGETHER, {"0.kept": (3, 0.1), "0.switched": (0, 0.3), "0.added": (0, 0.3)}),
    ],
    ids=["apart", "together"],
)
def test_a_switched_optimizer_counts_from_where_the_model_is_and_a_new_table_from_where_kept_ones_are(
    kinds: Kinds, expected: dict[str, Any], tmp_path: Path
) -> None:
    run = partial(ranks.run, 1, counted, config(tmp_path))
    assert run(OLD, None)[0] == {"0.kept": (3, 0.1), "0.switched": (3, 0.1)}
    assert run(kinds, Changes(added=("0.added",), optimizer={"0.switched": "exact_adagrad"}))[0] == expected
