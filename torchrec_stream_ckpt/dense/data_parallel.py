"""Data parallelism of the dense part: DDP's replicas and FSDP2's shards are captured, all others rejected by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import reduced_parameters, sharded_embeddings


def at_rest(module: nn.Module) -> None:
    """Reshard FSDP2 modules.

    A forward without a backward leaves the root gathered, in parameters of another identity.
    """
    for child in module.modules():
        if isinstance(child, FSDPModule):
            child.reshard()


def check_fully_sharded(model: nn.Module) -> None:
    """Reject FSDP1, which does not load at a new world size, and FSDP2 around embeddings.

    Other FSDP2 modules are accepted.

    Raises:
        UnsupportedError: Names the module.
    """
    for path, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            raise UnsupportedError(
                "FullyShardedDataParallel (FSDP1) is not captured: its state loads only on the same number of ranks",
                hint="use fully_shard (FSDP2) in a DataParallelWrapper, or DDP",
                module=path,
            )
    for path, module in sharded_embeddings(model):
        if isinstance(module, FSDPModule) or any(isinstance(each, DTensor) for each in module.parameters()):
            raise UnsupportedError(
                "fully_shard() was applied to tables of a sharded module",
                hint="exclude sharded modules, or pass their parameters as ignored_params",
                module=path,
            )


def check_replicas(model: nn.Module, view: nn.Module, *, since_attach: bool = False) -> None:
    """Reject parameters that neither DDP nor FSDP2 keeps equal: one copy of each is saved for all ranks.

    Args:
        model: The live model.
        view: Its dense part.
        since_attach: True if the model has changed since it was checked. DDP does not average the gradients of a layer
            that was frozen when DDP was built.

    Raises:
        UnsupportedError: Names the parameter.
    """
    if dist.get_world_size() == 1:
        return
    replicated = {
        parameter
        for wrapper in model.modules()
        if isinstance(wrapper, DistributedDataParallel)
        for parameter in reduced_parameters(wrapper, exactly=since_attach)
    }
    for _, module in sharded_embeddings(model):
        replicated |= {id(table) for table in module.parameters()}  # TorchRec puts its data-parallel lookups under DDP
    for name, parameter in view.named_parameters():
        if parameter.requires_grad and id(parameter) not in replicated and not isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"the dense parameter {name} is in neither DDP nor FSDP2, so its values may differ between ranks",
                hint="let DMP's DataParallelWrapper wrap every parameter; without DMP, wrap the dense layers in "
                "DistributedDataParallel, or call fully_shard on them; build DDP after you unfreeze parameters",
            )


def check_whole(view: nn.Module) -> None:
    """Reject sharded parameters: one rank's replica can only be saved if a rank has it whole.

    Raises:
        UnsupportedError: Names a parameter that is sharded.
    """
    for name, parameter in view.named_parameters():
        if isinstance(parameter, DTensor):
            raise UnsupportedError(
                f"replicas='rank0' requires a whole replica on rank 0, but FSDP2 shards {name}",
                hint="omit replicas, or wrap the dense layers in DDP",
            )


def check_derived_places(view: nn.Module) -> None:
    """Reject sharded parameters whose copies, for torch, lie in another place: see :func:`check_places`.

    Raises:
        UnsupportedError: Names a parameter.
    """
    for name, parameter in view.named_parameters():
        if isinstance(parameter, DTensor):
            for each in (parameter, parameter.detach(), torch.empty_like(parameter)):  # as state_dict() and staging do
                check_places({name: each})


def check_places(tensors: Mapping[str, Any]) -> None:
    """Reject DTensors of which torch places this rank's part where another rank has its own.

    Torch caches results of operators by the ranks of a mesh, with the mesh of the first call. After a process has
    joined a second process group under another rank, they still have its first place.

    Raises:
        UnsupportedError: Names a tensor.
    """
    right: set[int] = set()
    for name, tensor in tensors.items():
        if not isinstance(tensor, DTensor) or id(tensor.device_mesh) in right:
            continue
        mesh, rank = tensor.device_mesh, dist.get_rank()
        there = mesh.get_coordinate()
        here = (mesh.mesh == rank).nonzero().tolist()
        if (list(there) if there is not None else None) != (here[0] if here else None):
            raise UnsupportedError(
                f"torch places rank {rank}'s part of {name} at {there} of its mesh, where another rank has its part: "
                "this process had another rank in an earlier process group, and torch has cached that place",
                hint="start a new process for each job with FSDP2 whose ranks differ",
            )
        right.add(id(mesh))
