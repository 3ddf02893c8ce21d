"""Walk a sharded model: return every fused kernel, or raise an error that names what cannot be captured."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.fp_embeddingbag import ShardedFeatureProcessedEmbeddingBagCollection
from torchrec.distributed.fused_embeddingbag import ShardedFusedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardedModule
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.collision import COLLISION_WRAPPERS, holds_id_maps
from torchrec_stream_ckpt.model.compiled import unwrapped
from torchrec_stream_ckpt.model.kernels import FusedKernel, LocalShard
from torchrec_stream_ckpt.model.optimizers import OPTIMIZERS, FusedOptimizer, describe, row_states
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec, plain_name

_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_EMBEDDINGS = (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection, ShardedFusedEmbeddingBagCollection)
_WRAPPERS = (ShardedFeatureProcessedEmbeddingBagCollection, *COLLISION_WRAPPERS)


def is_sharded_embedding(module: nn.Module) -> bool:
    """Return whether it holds tables itself. Wrappers around such a module do not."""
    return type(module) in _EMBEDDINGS


def is_replicated(lookup: nn.Module) -> bool:
    """Return whether the tables of this lookup are under DDP: they are dense state."""
    return isinstance(lookup, DistributedDataParallel)


def sharded_embeddings(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield (path in the unwrapped model, module) of every sharded module that holds tables.

    Raises:
        UnsupportedError: A sharded module is of another kind.
    """
    for path, module in unwrapped(model).named_modules():
        if is_sharded_embedding(module):
            yield plain_name(path), module
        elif isinstance(module, ShardedModule) and not (type(module) in _WRAPPERS or holds_id_maps(module)):
            raise UnsupportedError(
                f"{type(module).__name__} is not captured",
                hint="shard EmbeddingBagCollection, FusedEmbeddingBagCollection or EmbeddingCollection",
                module=path,
            )


def fused_kernels(model: nn.Module) -> list[FusedKernel]:
    """Return all fused kernels of this rank, in a fixed order.

    Raises:
        UnsupportedError: The model holds a module, kernel or optimizer that cannot be captured exactly, or a hook point
            of the capture no longer exists in TorchRec or FBGEMM.
    """
    versions.check_versions()
    versions.TORCH.require(torch)
    versions.BINDINGS.require(torch._C)
    versions.VARIABLE.require(torch.autograd.Variable)
    versions.OPTIMIZER_WRAPPER.require(KeyedOptimizerWrapper)
    versions.WARM_UP.require(WarmupOptimizer)
    versions.CLIPPING.require(GradientClippingOptimizer)
    _check_model(model)
    return [kernel for path, module in sharded_embeddings(model) for kernel in _kernels(path, module)]


def _check_model(model: nn.Module) -> None:
    """Check that it is a DMP, or a model processed by ``shard_modules``, in DDP or not."""
    if isinstance(model, DMPCollection):
        raise UnsupportedError(
            "2D parallelism (DMPCollection) is not captured: sync() rewrites rows on all replicas",
            hint="use DistributedModelParallel",
        )
    if isinstance(model, DistributedModelParallel):
        versions.DMP.require(model)
        return
    parts = dict(model.named_modules()) if isinstance(model, nn.Module) else {}
    for path, part in parts.items():
        if isinstance(part, DistributedModelParallel):
            raise UnsupportedError(
                f"{type(model).__name__} contains a {type(part).__name__}", hint="pass that module instead", module=path
            )
    if not any(isinstance(part, ShardedModule) for part in parts.values()):
        raise UnsupportedError(
            f"{type(model).__name__} is not a DistributedModelParallel and has no module sharded by shard_modules()",
            hint="wrap the model in DMP, or pass the model returned by shard_modules()",
        )
    versions.MODEL.require(model)


def _kernels(path: str, module: Any) -> Iterator[FusedKernel]:
    """Yield the fused kernels of one sharded module.

    A lookup under DDP holds replicated tables, which are dense state.
    """
    versions.SHARDED_MODULE.require(module, module=path)
    for lookup in module._lookups:
        replicated = is_replicated(lookup)
        versions.LOOKUP.require(lookup.module if replicated else lookup, module=path)
        if replicated and type(module) is ShardedFusedEmbeddingBagCollection:
            raise UnsupportedError(
                "data-parallel tables of a FusedEmbeddingBagCollection are not captured: the state of their optimizer "
                "is inside DDP",
                hint="use another sharding type for these tables, or use EmbeddingBagCollection",
                module=path,
            )
        if not replicated:
            yield from (kernel_of(path, embedding) for embedding in lookup._emb_modules)


def kernel_of(path: str, embedding: Any) -> FusedKernel:
    """Check one kernel and describe its shards."""
    versions.GROUP.require(embedding, module=path)
    tables = [table.name for table in embedding.config.embedding_tables]
    where = {"module": path, "tables": ",".join(tables)}
    tbe = embedding.emb_module
    if type(tbe) is not SplitTableBatchedEmbeddingBagsCodegen:
        raise UnsupportedError(
            f"the kernel {type(tbe).__name__} of sharded tables is not captured",
            hint="set compute_kernel='fused' in the sharding plan or the planner's constraints",
            **where,
        )
    _check_hook_points(embedding, where)
    kind = check_kernel(tbe, where)
    states = row_states(tbe, kind.states)
    shards = []
    for config, state in zip(embedding.config.embedding_tables, states, strict=True):
        row0, col0 = config.local_metadata.shard_offsets
        spec = TableSpec(
            name=f"{path}.{config.name}",
            rows=config.num_embeddings,
            dim=config.embedding_dim,
            dtype=_dtype_name(tbe.weights_precision.as_dtype()),
            optimizer=tbe.optimizer.name.lower(),
            states=tuple(
                StateSpec(name, _dtype_name(rows.dtype), per_row=rows.dim() == 1)
                for name, rows in zip(kind.states, state, strict=True)
            ),
        )
        shards.append(LocalShard(spec, row0, config.local_rows, col0, config.local_cols))
    return FusedKernel(tbe, tuple(shards), embedding.fused_optimizer, kind)


def _check_hook_points(embedding: Any, where: dict[str, str]) -> None:
    """Check all hook points that the capture of one kernel needs."""
    versions.FUSED_GROUP.require(embedding, **where)
    for table in embedding.config.embedding_tables:
        versions.TABLE.require(table, **where)
    versions.KERNEL.require(embedding.emb_module, **where)
    if _on_gpu(embedding.emb_module):
        versions.CUDA_OPERATORS.require(torch.ops.fbgemm, **where)


def check_kernel(tbe: SplitTableBatchedEmbeddingBagsCodegen, where: dict[str, str]) -> FusedOptimizer:
    """Return the states of its optimizer. Raises if rows of this kernel could not be captured exactly."""
    kind = describe(tbe)
    if kind is None:
        known = ", ".join(optimizer.name for optimizer in OPTIMIZERS)
        raise UnsupportedError(
            f"the fused optimizer {tbe.optimizer.name} is not captured", hint=f"use one of {known}", **where
        )
    if tbe.weights_precision.as_dtype() not in _WEIGHT_DTYPES:
        raise UnsupportedError(
            f"weights in {tbe.weights_precision.name} are not captured", hint="use FP32, FP16 or BF16", **where
        )
    if tbe.weights_precision is SparseType.BF16 and _on_gpu(tbe):
        raise UnsupportedError(
            "weights in BF16 are not captured on a GPU, because FBGEMM cannot train them there",
            hint="use FP32 or FP16",
            **where,
        )
    if tbe.lxu_cache_weights.numel():
        if tbe.lxu_cache_weights.dtype != tbe.weights_precision.as_dtype():
            raise UnsupportedError(
                f"the UVM cache is {tbe.lxu_cache_weights.dtype} but the weights are {tbe.weights_precision.name}, so "
                "rows are rounded when they are written back",
                hint="set cache_precision to the precision of the weights",
                **where,
            )
        if tbe.lxu_cache_state.shape[1] == 1:
            raise UnsupportedError(
                "a direct-mapped UVM cache is not captured", hint="use a set-associative cache", **where
            )
    return kind


def _on_gpu(tbe: SplitTableBatchedEmbeddingBagsCodegen) -> bool:
    return torch.device(tbe.current_device).type == "cuda"


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
