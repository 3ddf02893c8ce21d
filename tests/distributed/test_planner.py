"""A restart on another number of ranks, under a plan that TorchRec's planner makes: never refused, and exact."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology

from tests import jobs, ranks, stores, warm
from tests.model import OPTIMIZERS, PLAN_2, Net, Spec, differences
from torchrec_stream_ckpt import StreamConfig, planner_constraints
from torchrec_stream_ckpt.util.layout import DATA_DIR

pytestmark = pytest.mark.distributed

MINE = {"t_dp": ParameterConstraints(sharding_types=["data_parallel"])}
SHARDED = {name: ParameterConstraints(sharding_types=["table_wise", "row_wise", "column_wise"]) for name in PLAN_2}
SHORT = {"table_wise": "tw", "row_wise": "rw", "column_wise": "cw", "table_column_wise": "cw", "data_parallel": "dp"}
"""On one host, where an older planner takes ``table_column_wise``, it deals out columns as ``column_wise`` does."""


Constraints = dict[str, ParameterConstraints]


def make_plan(constraints: Constraints) -> Spec:
    """What the planner makes of the test's model, on as many ranks as there are."""
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": OPTIMIZERS["rowwise"]})
    topology = Topology(world_size=dist.get_world_size(), compute_device="cpu")
    planner = EmbeddingShardingPlanner(topology=topology, constraints=constraints)
    plan = planner.collective_plan(Net(), [sharder], dist.group.WORLD).plan["ebc"]
    where = {"tw": lambda ranks: ranks[0], "cw": lambda ranks: ranks}
    return {
        name: (
            SHORT[sharding.sharding_type],
            where.get(SHORT[sharding.sharding_type], lambda _: None)(sharding.ranks),
        )
        for name, sharding in plan.items()
    }


def restore(settings: StreamConfig, constraints: Constraints | None = None) -> tuple[Spec, dict[str, torch.Tensor]]:
    if constraints is None and dist.get_rank() == 0:
        constraints = planner_constraints(settings, base=MINE)
    spec = make_plan(constraints or {})  # rank 0's word counts
    state, *_ = jobs.restore_once(spec, settings, None, {})
    return spec, state


def test_a_planned_restart_keeps_column_splits_and_is_exact(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}", marker_every=None)
    truths = warm.run(2, jobs.train_with, PLAN_2, settings, 3, {})[0][1]
    with pytest.raises(ranks.RankFailed, match="cannot change between data-parallel and sharded"):
        ranks.run(3, restore, settings, MINE)  # the planner left alone
    with pytest.raises(ranks.RankFailed, match=r"ColumnResplitError: .* column split of ebc\.t_wide"):
        ranks.run(3, restore, settings, {**SHARDED, **MINE})
    for world in (3, 1):
        for spec, state in ranks.run(world, restore, settings):
            assert spec["t_wide"][0] == "cw"
            assert len(spec["t_wide"][1]) == 2
            assert differences(truths[3], state, rng=False) == []


def test_a_store_that_serves_alone_knows_the_splits_too(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}", marker_every=None)
    warm.run(2, jobs.train_with, PLAN_2, settings, 1, {})
    from_log = planner_constraints(settings, "1:1")
    assert stores.fold(tmp_path)
    shutil.rmtree(tmp_path / DATA_DIR)
    assert planner_constraints(settings) == from_log
    assert {name: each.min_partition for name, each in from_log.items()} == {
        "t_item": None,
        "t_small": None,
        "t_user": None,
        "t_wide": 16,
    }
