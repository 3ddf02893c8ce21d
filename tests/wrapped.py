"""Nets of tests, wrapped as users wrap theirs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv, ShardingPlan, ShardingType


def wrapped(
    net: nn.Module,
    places: Mapping[str, Any],
    sharder: Any,
    *,
    part: str = "ebc",
    wrapper: DataParallelWrapper | None = None,
) -> DistributedModelParallel:
    """(all ranks) A net on the CPU. The tables of one of its parts are where ``places`` says, in fused kernels.

    Args:
        net: The model.
        places: Table name -> what ``torchrec.distributed.sharding_plan`` has for its kind of sharding.
        sharder: Of that part.
        part: Its name in the net.
        wrapper: Of all that is no table; by default DDP.
    """
    world = dist.get_world_size()
    plan = construct_module_sharding_plan(
        net.get_submodule(part), dict(places), sharder, local_size=world, world_size=world, device_type="cpu"
    )
    for parameter in plan.values():
        if parameter.sharding_type != ShardingType.DATA_PARALLEL.value:
            parameter.compute_kernel = "fused"
    return DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan={part: plan}),
        sharders=[sharder],
        data_parallel_wrapper=wrapper,
    )
