"""The part of a sharded model without fused shards: dense layers, data-parallel tables, feature processors."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import EmbeddingFusedOptimizer
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardedModule
from torchrec.optim.clipping import GradientClippingOptimizer
from torchrec.optim.fused import FusedOptimizer
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.warmup import WarmupOptimizer

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model import versions
from torchrec_stream_ckpt.model.collision import holds_id_maps
from torchrec_stream_ckpt.model.compiled import is_compiled, original, unwrapped
from torchrec_stream_ckpt.model.modules import is_sharded_embedding, sharded_embeddings
from torchrec_stream_ckpt.model.wrappers import is_wrapper, walk
from torchrec_stream_ckpt.util.types import plain_name

_KNOWN = (KeyedOptimizerWrapper, WarmupOptimizer, GradientClippingOptimizer)


def dense_view(model: nn.Module) -> nn.Module:
    """Return a temporary module that shares the whole model except fused shards, under the same names.

    ``torch.distributed.checkpoint.state_dict`` works on it, but raises on a DMP. It contains data-parallel tables. Its
    names do not contain those of ``torch.compile``.
    """
    return _view(unwrapped(model))


def _view(module: nn.Module) -> nn.Module:
    if is_sharded_embedding(module):
        return _data_parallel_tables(module)
    if holds_id_maps(module):
        return nn.Module()  # they are saved by row range, not by rank
    module = original(module)
    if not is_rebuilt(module):
        return module
    if any(isinstance(child, ShardedModule) for child in module.modules()):
        _check_state_is_known(module)
    view = nn.Module()
    for name, parameter in module.named_parameters(recurse=False):
        view.register_parameter(name, parameter)
    for name, buffer in module.named_buffers(recurse=False):
        view.register_buffer(name, buffer, persistent=name not in module._non_persistent_buffers_set)
    for name, child in module.named_children():
        view.add_module(name, _view(child))
    return view


def is_rebuilt(module: nn.Module) -> bool:
    """Return whether a view replaces this module by a new one, with the same parameters and buffers."""
    compiled = False
    for child in module.modules():
        if isinstance(child, ShardedModule):
            return True
        compiled = compiled or is_compiled(child)
    return compiled and not _own_state(module)


def _check_state_is_known(module: nn.Module) -> None:
    """Reject modules whose own code saves more than parameters and buffers: a view would lose it.

    Raises:
        UnsupportedError: The module has such code. Names it.
    """
    if what := _own_state(module):
        raise UnsupportedError(
            f"{type(module).__name__} has {what[0]} and contains a sharded module, which is not captured yet",
            hint="pass its state as a Stateful, or move it to a child without embeddings",
        )


def _own_state(module: nn.Module) -> list[str]:
    """Return descriptions of code that saves state of a module in addition to parameters and buffers."""
    what = [
        f"its own {method}()"
        for method in ("_save_to_state_dict", "state_dict")
        if getattr(type(module), method) is not getattr(nn.Module, method) and not isinstance(module, ShardedModule)
    ]
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        what.append("extra state")
    if module._state_dict_hooks and not isinstance(module, ShardedModule):
        what.append("a state dict hook")
    return what


def _data_parallel_tables(module: Any) -> nn.Module:
    """Return the replicated tables of a sharded module: their lookups are under DDP."""
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


def named_states(values: Any) -> dict[str, torch.Tensor]:
    """Return the tensors right below a parameter in an optimizer's state whose keys can end an entry's name."""
    return {
        key: value
        for key, value in (values.items() if isinstance(values, dict) else ())
        if isinstance(value, torch.Tensor) and type(key) is str and key and "." not in key
    }


class ReplicatedTables:
    """The tensors of tables that all ranks hold alike: weights, and a dense optimizer's states of their rows.

    Args:
        model: The live model.
        optimizers: Its dense optimizers, by name.
    """

    def __init__(self, model: nn.Module, optimizers: Mapping[str, torch.optim.Optimizer]) -> None:
        self._optimizers = dict(optimizers)
        self._tables = {
            f"{path}.{name}" if path else name: table
            for path, module in sharded_embeddings(model)
            for name, table in _data_parallel_tables(module).named_parameters()
        }

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return live tensors by their entries in the dense state. Their shape is (rows,) or (rows, columns)."""
        found: dict[str, torch.Tensor] = {f"model.{name}": table for name, table in self._tables.items()}
        for key, optimizer in self._optimizers.items():
            for name, table in self._tables.items():
                for state, value in named_states(optimizer.state.get(table)).items():
                    if value.shape in (table.shape, table.shape[:1]):
                        found[f"optim.{key}.{name}.{state}"] = value
        return found


def check_dense(model: nn.Module, optimizers: dict[str, torch.optim.Optimizer]) -> None:
    """Check that a known optimizer steps every dense parameter that is trained.

    Raises:
        UnsupportedError: Names the parameter and what to do.
    """
    view = dense_view(model)
    names = {id(parameter): name for name, parameter in view.named_parameters()}
    stepped = {
        id(parameter)
        for optimizer in optimizers.values()
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for kind, optimizer in optimizers.items():
        _check_dense_alone(model, kind, optimizer, names.keys())
    for name, parameter in view.named_parameters():
        if hasattr(parameter, "_in_backward_optimizers"):
            raise UnsupportedError(
                f"the dense parameter {name} is updated in the backward, which is not captured yet",
                hint="apply optimizers in the backward only to tables; pass and step optimizers for dense parameters",
            )
        if parameter.requires_grad and id(parameter) not in stepped:
            if f"model.{name}" in ReplicatedTables(model, {}).tensors():
                table = name.split(".")[-2]
                raise UnsupportedError(
                    f"the plan makes the table {table} data-parallel ({name}), but it is not in any optimizer passed "
                    "to StreamCheckpointer",
                    hint=f"keep it sharded: EmbeddingShardingPlanner(constraints={{'{table}': ParameterConstraints("
                    "sharding_types=['table_wise', 'row_wise'])}); or add it to the dense optimizer",
                )
            raise UnsupportedError(
                f"the dense parameter {name} is not in any optimizer passed to StreamCheckpointer",
                hint="pass the optimizer of the dense part, or call requires_grad_(False) on frozen parameters",
            )
    check_data_parallel(model, next(iter(optimizers.values()), None))


def _check_dense_alone(model: nn.Module, kind: str, optimizer: torch.optim.Optimizer, dense: Collection[int]) -> None:
    """Check that an optimizer of dense parameters holds no other parameters, except those of id maps.

    Args:
        model: The live model.
        kind: Name of the optimizer.
        optimizer: The optimizer.
        dense: Ids of the dense parameters.
    """
    maps = (module for module in unwrapped(model).modules() if holds_id_maps(module))
    known = {id(parameter) for module in maps for parameter in module.parameters()}.union(dense)
    held = [
        parameter for group in optimizer.param_groups for parameter in group["params"] if id(parameter) not in known
    ]
    if not held:
        return
    names = {id(parameter): plain_name(name) for name, parameter in unwrapped(model).named_parameters()}
    fused = [names[id(parameter)] for parameter in held if id(parameter) in names]
    if fused:
        more = f" and {len(fused) - 3} more" if len(fused) > 3 else ""
        raise UnsupportedError(
            f"the dense {type(optimizer).__name__} ({kind}) holds the fused tables {', '.join(fused[:3])}{more}, which "
            "only the backward may update",
            hint="build it without the fused tables: KeyedOptimizerWrapper(dict(in_backward_optimizer_filter("
            f"dmp.named_parameters())), lambda params: torch.optim.{type(optimizer).__name__}(params, ...))",
        )
    raise UnsupportedError(
        f"the dense {type(optimizer).__name__} ({kind}) holds {len(held)} parameters that are not in the model, the "
        f"first of shape {tuple(held[0].shape)}",
        hint="build it after the model is sharded and wrapped, from "
        "in_backward_optimizer_filter(dmp.named_parameters())",
    )


def check_data_parallel(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
    """Check that a DMP with dense parameters that are stepped has made them data parallel.

    Raises:
        UnsupportedError: It has not.
    """
    waits = isinstance(model, DistributedModelParallel) and not getattr(model, "_ddp_wrapped", True)
    if waits and any(group["params"] for each in dense_optimizers(optimizer).values() for group in each.param_groups):
        raise UnsupportedError(
            "DMP has not made the dense part data parallel", hint="call dmp.init_data_parallel() on all ranks first"
        )


def has_own_state_dict(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``state_dict()`` may hold more than torch's own does: ``state`` and ``param_groups``."""
    versions.DENSE_OPTIMIZER.require(optimizer)
    return (
        any(
            getattr(type(optimizer), method) is not getattr(torch.optim.Optimizer, method) or method in vars(optimizer)
            for method in ("state_dict", "load_state_dict")
        )
        or len(optimizer._optimizer_state_dict_post_hooks) > 0
    )


def dense_optimizers(optimizer: torch.optim.Optimizer | None) -> dict[str, torch.optim.Optimizer]:
    """Return the optimizers of the dense parameters, by a name that does not depend on the plan.

    Raises:
        UnsupportedError: The state of a wrapper is unknown; or this is not an optimizer.
    """
    return {
        f"optimizer{position}": leaf
        for position, leaf in enumerate(_dense_leaves(optimizer) if optimizer is not None else ())
    }


def _dense_leaves(optimizer: Any) -> Iterator[torch.optim.Optimizer]:
    """Yield the torch optimizers in it. Fused ones are not part of the dense state."""
    for part in walk(optimizer):
        fused = isinstance(part, EmbeddingFusedOptimizer) or (isinstance(part, FusedOptimizer) and not part.params)
        if not isinstance(part, KeyedOptimizer):
            if not isinstance(part, torch.optim.Optimizer):
                raise UnsupportedError(
                    f"{type(part).__name__} is not an optimizer of torch or TorchRec",
                    hint="pass one; several: CombinedOptimizer([dmp.fused_optimizer, KeyedOptimizerWrapper(...)])",
                )
            if not is_wrapper(part):
                yield part
        elif not fused and not isinstance(part, CombinedOptimizer) and type(part) not in _KNOWN:
            raise UnsupportedError(
                f"the optimizer {type(part).__name__} may have state that is not captured",
                hint=f"pass the optimizers that {type(part).__name__} wraps, and its own counters as a Stateful: "
                "StreamCheckpointer(dmp, CombinedOptimizer([...]), stateful={'wrapper': ...}); known are torch.optim "
                "optimizers, KeyedOptimizerWrapper, WarmupOptimizer, GradientClippingOptimizer and CombinedOptimizer",
            )
