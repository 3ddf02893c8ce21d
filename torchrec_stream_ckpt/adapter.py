"""The only module that touches private API of TorchRec and FBGEMM.

What is used, and where it was read (torchrec 1.9.2, fbgemm 1.9.0; the same names exist in 1.6):

=====================================================  ==========================================
``ShardedEmbeddingBagCollection._lookups[k]``          one lookup a sharding type
``..._emb_modules[j].config.embedding_tables[i]``      i-th table of the j-th kernel: shard offsets, local sizes
``..._emb_modules[j].fused_optimizer``                 the param group that sets the kernel's learning rate
``SplitTableBatchedEmbeddingBagsCodegen._indices``     ids of the last forward, behind the bounds check
``..._offsets``, ``_vbe_B_offsets``                    their bounds by feature; the latter only with VBE
``...feature_table_map``, ``hash_size_cumsum``         feature to table, and to linear rows
``...iter``, ``iter_cpu``, ``learning_rate_tensor``    state of the kernel that no state_dict holds
=====================================================  ==========================================
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen,
    WeightDecayMode,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel, DMPCollection
from torchrec.distributed.types import ShardedModule
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.types import StateSpec, TableSpec

log = logging.getLogger(__name__)

TESTED_TORCHREC = ("1.9",)

# Fused optimizers whose touched rows have been tested against a full comparison, and their states:
# name in get_optimizer_state(), and whether it holds one value a row.
OPTIMIZERS: dict[EmbOptimType, tuple[tuple[str, bool], ...]] = {
    EmbOptimType.EXACT_SGD: (),
    EmbOptimType.EXACT_ADAGRAD: (("sum", False),),
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: (("sum", True),),
}
_WEIGHT_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_LOCATIONS = (EmbeddingLocation.HOST, EmbeddingLocation.DEVICE)
_DECAYS = (WeightDecayMode.NONE, WeightDecayMode.L2, WeightDecayMode.DECOUPLE)


@dataclass(frozen=True, slots=True)
class LocalShard:
    """One table shard inside a kernel: rows [row0, row0+rows), columns [col0, col0+cols) of ``table``."""

    table: TableSpec
    row0: int
    rows: int
    col0: int
    cols: int


@dataclass(frozen=True, slots=True)
class Lookup:
    """The ids of one forward of one kernel, bound while later forwards overwrite the kernel's attributes."""

    indices: torch.Tensor
    """Local rows, behind the bounds check, ordered by feature."""
    offsets: torch.Tensor
    """Where the ids of each bag begin, features one behind the other, all with the same number of bags."""


class FusedKernel:
    """One table-batched embedding kernel (TBE) and the table shards that it holds."""

    def __init__(
        self, tbe: SplitTableBatchedEmbeddingBagsCodegen, shards: tuple[LocalShard, ...], optimizer: FusedOptimizer
    ) -> None:
        self._tbe = tbe
        self.optimizer = optimizer
        self.shards = shards
        self.device: torch.device = torch.device(tbe.current_device)
        self.feature_shards: tuple[int, ...] = tuple(tbe.feature_table_map)
        """For each feature of the kernel, the index of its shard."""

    def weights(self) -> list[torch.Tensor]:
        """Live views, one a shard, shape (rows, cols)."""
        return list(self._tbe.split_embedding_weights())

    def states(self) -> list[tuple[torch.Tensor, ...]]:
        """Live views of the optimizer states, one tuple a shard, in the schema's order."""
        if not any(shard.table.states for shard in self.shards):
            return [() for _ in self.shards]
        states = self._tbe.get_optimizer_state()
        return [
            tuple(state[spec.name] for spec in shard.table.states)
            for shard, state in zip(self.shards, states, strict=True)
        ]

    def on_update(self, callback: Callable[[Lookup], None]) -> Callable[[], None]:
        """Call ``callback`` whenever the fused update of a forward has been applied; returns the remover.

        The call runs on the autograd thread, right behind the kernel (on its stream on a GPU). A forward
        without a backward calls nothing.
        """

        def forward_hook(tbe: SplitTableBatchedEmbeddingBagsCodegen, _args: object, output: torch.Tensor) -> None:
            node = output.grad_fn
            if node is None:
                return
            if "LookupFunction" not in node.name():
                raise UnsupportedError(
                    f"the output of the fused kernel comes from {node.name()}, not from its lookup",
                    hint="use the versions of torchrec and fbgemm that the README names",
                )
            if tbe._vbe_B_offsets is not None:
                raise UnsupportedError(
                    "batch sizes that vary by feature (VBE) are not captured yet",
                    hint="train without stride_per_key_per_rank",
                    tables=",".join(shard.table.name for shard in self.shards),
                )
            lookup = Lookup(tbe._indices, tbe._offsets)
            node.register_hook(lambda *_grads: callback(lookup))

        handle: RemovableHandle = self._tbe.register_forward_hook(forward_hook, prepend=True)
        return handle.remove

    def linear_rows(self, lookup: Lookup) -> torch.Tensor:
        """(GPU) Rows in the kernel's linear row space; ids that the kernel ignores become its row count."""
        rows: torch.Tensor = torch.ops.fbgemm.linearize_cache_indices(
            self._tbe.hash_size_cumsum, lookup.indices, lookup.offsets, None, -1
        )
        return rows

    @property
    def iteration(self) -> int:
        return int(self._tbe.iter_cpu.item())

    @property
    def learning_rate(self) -> float:
        """What the kernel uses now."""
        return float(self._tbe.get_learning_rate())

    @property
    def next_learning_rate(self) -> float:
        """What the fused optimizer's param group says: the kernel takes it over at the next ``step``."""
        return float(self.optimizer.param_groups[0]["lr"])

    def set_scalars(self, iteration: int, learning_rate: float, next_learning_rate: float) -> None:
        # set_optimizer_step() sets `iter` only, while the kernels count on in `iter_cpu`.
        self._tbe.iter.fill_(iteration)
        self._tbe.iter_cpu.fill_(iteration)
        self._tbe.set_learning_rate(learning_rate)
        self.optimizer.param_groups[0]["lr"] = next_learning_rate


def fused_kernels(dmp: DistributedModelParallel) -> list[FusedKernel]:
    """All fused kernels of this rank, in a fixed order.

    Raises:
        UnsupportedError: the model holds a module, kernel or optimizer that cannot be captured exactly yet.
    """
    _check_versions()
    if not isinstance(dmp, DistributedModelParallel):
        raise UnsupportedError(f"{type(dmp).__name__} is no DistributedModelParallel", hint="wrap the model in DMP")
    if isinstance(dmp, DMPCollection):
        raise UnsupportedError(
            "2D parallelism (DMPCollection) is not captured yet", hint="use DistributedModelParallel"
        )
    kernels = []
    for path, module in sharded_modules(dmp):
        if type(module) is not ShardedEmbeddingBagCollection:
            raise UnsupportedError(
                f"{type(module).__name__} is not captured yet", hint="shard an EmbeddingBagCollection", module=path
            )
        for lookup in module._lookups:
            if not isinstance(lookup, DistributedDataParallel):
                kernels += [_kernel(path, embedding) for embedding in lookup._emb_modules]
    return kernels


def sharded_modules(dmp: DistributedModelParallel) -> Iterator[tuple[str, Any]]:
    """(path in the wrapped model, module) of every sharded module that is inside no other one."""
    found = ""
    for path, module in dmp.module.named_modules():
        if isinstance(module, ShardedModule) and not (found and path.startswith(f"{found}.")):
            found = path
            yield path, module


def _kernel(path: str, embedding: Any) -> FusedKernel:
    """Check one kernel and describe its shards."""
    tables = [table.name for table in embedding.config.embedding_tables]
    where = {"module": path, "tables": ",".join(tables)}
    tbe = embedding.emb_module
    if type(tbe) is not SplitTableBatchedEmbeddingBagsCodegen:
        raise UnsupportedError(
            f"the kernel {type(tbe).__name__} of sharded tables is not captured",
            hint="ask for compute_kernel='fused' in the sharding plan or the planner's constraints",
            **where,
        )
    _check_kernel(tbe, where)
    specs = OPTIMIZERS[tbe.optimizer]
    states = tbe.get_optimizer_state() if specs else [{}] * len(tables)
    shards = []
    for config, state in zip(embedding.config.embedding_tables, states, strict=True):
        row0, col0 = config.local_metadata.shard_offsets
        spec = TableSpec(
            name=f"{path}.{config.name}",
            rows=config.num_embeddings,
            dim=config.embedding_dim,
            dtype=_dtype_name(tbe.weights_precision.as_dtype()),
            optimizer=tbe.optimizer.name.lower(),
            states=tuple(StateSpec(name, _dtype_name(state[name].dtype), per_row) for name, per_row in specs),
        )
        shards.append(LocalShard(spec, row0, config.local_rows, col0, config.local_cols))
    return FusedKernel(tbe, tuple(shards), embedding.fused_optimizer)


def _check_kernel(tbe: SplitTableBatchedEmbeddingBagsCodegen, where: dict[str, str]) -> None:
    if tbe.optimizer not in OPTIMIZERS:
        known = ", ".join(optimizer.name for optimizer in OPTIMIZERS)
        raise UnsupportedError(
            f"the fused optimizer {tbe.optimizer.name} is not captured yet", hint=f"use one of {known}", **where
        )
    if tbe.weight_decay_mode not in _DECAYS:
        raise UnsupportedError(f"weight decay mode {tbe.weight_decay_mode.name} is not captured yet", **where)
    if tbe.weights_precision.as_dtype() not in _WEIGHT_DTYPES:
        raise UnsupportedError(f"weights in {tbe.weights_precision.name} are not captured yet", **where)
    locations = {EmbeddingLocation(spec[2]) for spec in tbe.embedding_specs}
    if not locations <= set(_LOCATIONS):
        names = ", ".join(sorted(location.name for location in locations))
        raise UnsupportedError(f"tables in {names} memory are not captured yet", **where)


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _check_versions() -> None:
    """Say it once when the private API was tested with other versions."""
    try:
        found = version("torchrec")
    except PackageNotFoundError:
        return
    if not found.startswith(TESTED_TORCHREC):
        log.warning("torchrec %s is untested here, tested are %s", found, ", ".join(TESTED_TORCHREC))


def watch_outside_writes(
    dmp: DistributedModelParallel, optimizer: torch.optim.Optimizer | None, on_all_changed: Callable[[], None]
) -> Callable[[], None]:
    """Notice what changes rows outside the fused update; returns the remover.

    Loading a state dict, of the model, of a sharded module or of a fused optimizer, calls ``on_all_changed``.
    ``reshard`` is refused. Tensors that are written in place are not seen: no API tells.
    """

    def loading(*_args: object) -> None:
        on_all_changed()

    handles = [module.register_load_state_dict_pre_hook(loading) for _, module in sharded_modules(dmp)]
    # A combined optimizer writes into the states of its parts by itself: each one that can be called is watched.
    optimizers = {id(part): part for root in (dmp.fused_optimizer, optimizer) for part in _parts(root)}
    patched = [_patch(part, "load_state_dict", on_all_changed) for part in optimizers.values()]
    patched.append(_patch(dmp, "reshard", _refuse_reshard))

    def remove() -> None:
        for handle in handles:
            handle.remove()
        for undo in patched:
            undo()

    return remove


def _parts(optimizer: Any) -> Iterator[Any]:
    """An optimizer and all that it combines."""
    if optimizer is not None:
        yield optimizer
    if isinstance(optimizer, CombinedOptimizer):
        for _, child in optimizer.optimizers:
            yield from _parts(child)


def _patch(owner: Any, name: str, before: Callable[[], None]) -> Callable[[], None]:
    """Call ``before`` in front of each call of ``owner.name``, until the returned remover is called."""
    real, active = getattr(owner, name), True

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if active:
            before()
        return real(*args, **kwargs)

    def undo() -> None:
        nonlocal active
        active = False  # another wrapper may stand on this one: it stays where it is, and does nothing

    setattr(owner, name, wrapper)
    return undo


def _refuse_reshard() -> None:
    raise UnsupportedError(
        "DMP.reshard() under streaming is not handled yet",
        hint="mark(), close(), and restore in a new job with the other plan",
    )


def dense_view(dmp: DistributedModelParallel) -> nn.Module:
    """A throw-away module that shares everything of the model that is no fused shard, under the same names.

    ``torch.distributed.checkpoint.state_dict`` works on it where it raises on a DMP. Data-parallel tables
    are in it.
    """
    return _view(dmp.module)


def _view(module: nn.Module) -> nn.Module:
    if isinstance(module, ShardedModule):
        return _data_parallel_tables(module)
    if not any(isinstance(child, ShardedModule) for child in module.modules()):
        return module
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        raise UnsupportedError(
            f"{type(module).__name__} has extra state and holds a sharded module: this is not captured yet",
            hint="hand its state over as a Stateful, or move it to a child without embeddings",
        )
    view = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        view.register_parameter(name, parameter)
    for name, buffer in module.named_buffers(recurse=False):
        view.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for name, child in module.named_children():
        view.add_module(name, _view(child))
    return view


def _data_parallel_tables(module: Any) -> nn.Module:
    """The tables of a sharded module that are replicated: their lookups stand under DDP."""
    replicated = {
        table.name
        for lookup in module._lookups
        if isinstance(lookup, DistributedDataParallel)
        for embedding in lookup.module._emb_modules
        for table in embedding.config.embedding_tables
    }
    view = nn.Module()
    for name, parameter in module.named_parameters():
        *path, leaf = name.split(".")
        if path and path[-1] in replicated:
            holder = view
            for part in path:
                if part not in dict(holder.named_children()):
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.register_parameter(leaf, parameter)
    return view


def check_dense(dmp: DistributedModelParallel, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Every dense parameter that is trained must be synchronized by DMP and stepped by a known optimizer.

    Raises:
        UnsupportedError: names the parameter and what to do.
    """
    view = dense_view(dmp)
    names = {id(parameter): name for name, parameter in view.named_parameters()}
    stepped = {
        id(parameter)
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for kind, optimizer in optimizers.items():
        for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
            if id(parameter) not in names:
                raise UnsupportedError(
                    f"the dense {type(optimizer).__name__} ({kind}) holds a parameter of shape "
                    f"{tuple(parameter.shape)} that is a fused table or is not in the model",
                    hint="build it from in_backward_optimizer_filter(model.named_parameters())",
                )
    for name, parameter in view.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UnsupportedError(f"the dense parameter {name} is updated in the backward: this is not captured yet")
        if parameter.requires_grad and id(parameter) not in stepped:
            raise UnsupportedError(
                f"the dense parameter {name} is trained by no optimizer that was handed over",
                hint="pass the optimizer of the dense part, or set requires_grad_(False) on what is not trained",
            )
    if stepped and not dmp._ddp_wrapped:
        raise UnsupportedError("the dense part is not data parallel yet", hint="call dmp.init_data_parallel() first")


def dense_optimizers(optimizer: torch.optim.Optimizer | None) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of the dense parameters, by a name that does not depend on the plan.

    Raises:
        UnsupportedError: a wrapper whose own state we do not know.
    """
    return {
        f"optimizer{position}": leaf
        for position, leaf in enumerate(_dense_leaves(optimizer) if optimizer is not None else ())
    }


def _dense_leaves(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    if isinstance(optimizer, CombinedOptimizer):
        for _, child in optimizer.optimizers:
            yield from _dense_leaves(child)
    elif isinstance(optimizer, EmbeddingFusedOptimizer) or (
        isinstance(optimizer, FusedOptimizer) and not optimizer.params
    ):
        return
    elif type(optimizer) is KeyedOptimizerWrapper:
        yield optimizer._optimizer
    elif isinstance(optimizer, KeyedOptimizer):
        raise UnsupportedError(
            f"the optimizer {type(optimizer).__name__} has state that is not captured yet",
            hint="pass a torch.optim optimizer, KeyedOptimizerWrapper or CombinedOptimizer of those",
        )
    else:
        yield optimizer
