"""Tables of an inference module, unsharded: float ones as tensors, those of ``torchrec.quant`` written by rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from fbgemm_gpu.split_embedding_configs import SparseType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_inference import IntNBitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import BaseManagedCollisionEmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantEmbeddingCollection
from torchrec.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
)

from torchrec_stream_ckpt.errors import UnsupportedError
from torchrec_stream_ckpt.model.inference_ids import ServedMap, refused, served_maps
from torchrec_stream_ckpt.model.versions import COLLISION_WRAPPER, INFERENCE_KERNEL, QUANTIZED_COLLECTION

Ids = npt.NDArray[np.int64]
_BITS = {SparseType.INT8: 8, SparseType.INT4: 4, SparseType.INT2: 2}
_PLAIN = {SparseType.FP16: torch.float16, SparseType.FP32: torch.float32}
_FLOATS = ("float16", "float32")
_WHAT = "int8, int4, int2, fp16 and fp32 tables in torchrec.quant's EmbeddingBagCollection and EmbeddingCollection"
_INNER = "_embedding_module"
"""Name of the embedding collection in a managed collision module of the trainer."""
_QUANTIZED_COLLISION = (QuantManagedCollisionEmbeddingBagCollection, QuantManagedCollisionEmbeddingCollection)


@dataclass(frozen=True, slots=True)
class ServedTable:
    """One table of an inference module."""

    key: str
    """Name of its weights in the float module's state dict."""
    rows: int
    dim: int
    dtypes: tuple[str, ...]
    """Dtypes of rows that it can take over."""
    tensor: torch.Tensor | None
    """Weights of a float table; None if it is quantized."""
    quantize: Callable[[Ids, torch.Tensor], None]
    """Quantizes whole rows as ``torchrec.quant`` does, and writes them into the kernel."""


@dataclass(frozen=True, slots=True)
class ServedParts:
    """State of an inference module, by its names in the module before it was quantized."""

    tables: Mapping[str, ServedTable]
    dense: Mapping[str, torch.Tensor]
    """Parameters and buffers outside of embedding collections, to write into."""
    maps: Mapping[str, ServedMap]
    """Id maps of managed collision, by the path of the embedding collection and the table."""


class _Found:
    """Parts of an inference module that have an owner, so that their state is not dense."""

    def __init__(self) -> None:
        self.tables: dict[str, ServedTable] = {}
        self.maps: dict[str, ServedMap] = {}
        self.owned: dict[str, nn.Module] = {}

    def has(self, path: str) -> bool:
        """Return whether a path is inside of a part."""
        return any(path.startswith(f"{owner}.") or not owner for owner in self.owned)

    def add(self, path: str, module: nn.Module, tables: Iterable[ServedTable]) -> None:
        if any(module is owner for owner in self.owned.values()):
            raise refused(path, module, "it is in the module twice", "keep each collection in one place")
        self.owned[path] = module
        self.tables |= {table.key: table for table in tables}

    def add_maps(self, path: str, module: nn.Module) -> None:
        """Add the id maps of a managed collision module."""
        COLLISION_WRAPPER.require(module, module=path)
        collection: Any = module._managed_collision_collection
        where = _joined(path, "_managed_collision_collection")
        if not self.has(where):
            self.add(where, collection, ())
        self.maps |= {_joined(path, _INNER, table): each for table, each in served_maps(where, collection)}


def _joined(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def served_parts(module: nn.Module) -> ServedParts:
    """Return the state of an unsharded inference module, whose tables are float or quantized.

    Raises:
        UnsupportedError: a part of it cannot be kept up to date by rows. The error names it.
    """
    found = _Found()
    for path, each in module.named_modules(remove_duplicate=False):
        if found.has(path) or path in found.owned:
            continue
        if type(each) in (QuantEmbeddingBagCollection, QuantEmbeddingCollection):
            found.add(path, each, _quantized(path, each, path))
        elif type(each) in _QUANTIZED_COLLISION:
            found.add(path, each, _quantized(path, each, _joined(path, _INNER)))
            found.add_maps(path, each)
        elif isinstance(each, EmbeddingBagCollection | EmbeddingCollection):
            found.add(path, each, _floats(path, each))
        elif isinstance(each, BaseManagedCollisionEmbeddingCollection):
            found.add_maps(path, each)  # its embedding collection follows, float or quantized
        else:
            _refuse_others(path, each)
    return ServedParts(found.tables, _dense(module, found), found.maps)


def _dense(module: nn.Module, found: _Found) -> dict[str, torch.Tensor]:
    dense: dict[str, torch.Tensor] = {}
    for key, value in module.state_dict().items():
        if found.has(key):
            continue
        if not isinstance(value, torch.Tensor) or value.is_quantized:
            raise UnsupportedError(
                f"{key} is packed or quantized, and markers have its float values only",
                hint="quantize the embedding collections alone",
                module=key.rpartition(".")[0],
            )
        dense[key] = value
    return dense


def _refuse_others(path: str, module: nn.Module) -> None:
    """Raise UnsupportedError for a module that holds tables in a form that is not followed."""
    if isinstance(module, torch.jit.ScriptModule):
        raise refused(path, module, "it is scripted", "script a copy, and follow the module in Python")
    names = {f"{base.__module__}.{base.__qualname__}" for base in type(module).__mro__}
    if any("ManagedCollision" in name for name in names):
        raise refused(
            path,
            module,
            "it looks rows up by raw id, and belongs to no embedding collection",
            "keep it in a managed collision module over an embedding collection, or map ids before the module",
        )
    if any(name.startswith(("torchrec.distributed.", "torch.nn.parallel.distributed.")) for name in names):
        raise refused(path, module, "it is sharded or replicated", "build the module without sharding it")
    if any(name.startswith("torch._dynamo.") for name in names):
        raise refused(path, module, "it is compiled", "pass the module before torch.compile; call it compiled")
    if any(name.startswith(("torchrec.quant.", "fbgemm_gpu.")) or "FusedEmbedding" in name for name in names):
        raise refused(path, module, "the layout of its tables is not known", f"followed are float tables, and {_WHAT}")


def _floats(path: str, module: nn.Module) -> Iterator[ServedTable]:
    for key, value in module.named_parameters(prefix=path):
        name = key.rpartition(".")[0].rpartition(".")[2]
        if type(value.detach()) is not torch.Tensor or value.is_meta:
            what = "has no memory" if value.is_meta else "is sharded"
            raise refused(path, module, f"table {name} {what}", "build the module unsharded, on a device")
        dtype = str(value.dtype).removeprefix("torch.")
        yield ServedTable(key, value.shape[0], value.shape[1], (dtype,), value.detach(), _no_quantizer)


def _no_quantizer(ids: Ids, weights: torch.Tensor) -> None:
    raise AssertionError("the table is not quantized")


def _quantized(path: str, module: nn.Module, float_path: str) -> Iterator[ServedTable]:
    """Yield the tables of a quantized collection; ``float_path``: path of the trainer's float one."""
    QUANTIZED_COLLECTION.require(module, module=path)
    folder = "embedding_bags" if hasattr(module, "embedding_bags") else "embeddings"
    for configs, kernel in zip(module._key_to_tables.values(), module._emb_modules, strict=True):  # type: ignore[operator, arg-type]
        if type(kernel) is not IntNBitTableBatchedEmbeddingBagsCodegen:
            raise refused(path, module, f"its kernel is a {type(kernel).__qualname__}", f"followed are {_WHAT}")
        INFERENCE_KERNEL.require(kernel, module=path)
        for position, config in enumerate(configs):
            kind = kernel.embedding_specs[position][3]
            if (why := _why_not(kernel, position, config.name, config.num_embeddings)) is not None:
                raise refused(path, module, f"table {config.name} {why}", f"followed are {_WHAT}")
            key = _joined(float_path, folder, config.name, "weight")
            rows, dim = kernel.embedding_specs[position][1:3]
            yield ServedTable(key, rows, dim, _FLOATS, None, _QuantizedRows(kernel, position, kind).write)


def _why_not(kernel: IntNBitTableBatchedEmbeddingBagsCodegen, position: int, name: str, embeddings: int) -> str | None:
    """Return why rows of a table cannot be written; None if they can."""
    called, rows, _, kind, place = kernel.embedding_specs[position]
    if kind not in _BITS and kind not in _PLAIN:
        return f"is {kind.name}"
    if called != name:
        return f"is {called} in the kernel"
    if rows != embeddings or kernel.index_remappings_array.numel() or kernel.index_remapping_hash_table.numel():
        return "is pruned"
    if place not in (EmbeddingLocation.HOST, EmbeddingLocation.DEVICE):
        return f"is in a cache ({place.name})"
    if not kernel.weight_initialized or kernel.current_device.type == "meta":
        return "has no memory"
    if kernel.scale_bias_size_in_bytes != 4:
        return f"has {kernel.scale_bias_size_in_bytes} bytes of scale and bias a row, not 4"
    return None


@dataclass(frozen=True, slots=True)
class _QuantizedRows:
    """Writes rows of one table of a kernel."""

    kernel: IntNBitTableBatchedEmbeddingBagsCodegen
    position: int
    kind: SparseType

    def write(self, ids: Ids, weights: torch.Tensor) -> None:
        # The views are taken each time: a module that is moved to another device gets other memory.
        bytes_, scales = self.kernel.split_embedding_weights()[self.position]
        places, values = torch.from_numpy(ids).to(bytes_.device), weights.to(bytes_.device)
        if self.kind in _PLAIN:
            bytes_[places] = values.to(_PLAIN[self.kind]).contiguous().view(torch.uint8)
            return
        assert scales is not None
        # The operator that torchrec.quant calls in quantize_state_dict, for all three widths.
        rows = torch.ops.fbgemm.FloatOrHalfToFusedNBitRowwiseQuantizedSBHalf(values.contiguous(), _BITS[self.kind])
        width = scales.shape[1]
        bytes_[places], scales[places] = rows[:, :-width], rows[:, -width:]
