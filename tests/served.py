"""Inference modules for tests: float ones with given weights, and the same quantized by TorchRec itself."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.ao.quantization import PlaceholderObserver, QConfig
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, dtype_to_data_type
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    LFU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantBags
from torchrec.quant.embedding_modules import EmbeddingCollection as QuantRows
from torchrec.quant.embedding_modules import (
    QuantManagedCollisionEmbeddingBagCollection,
    QuantManagedCollisionEmbeddingCollection,
    quantize_state_dict,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.zoo_models import Model, Net

WIDTHS = {
    "int8": torch.qint8,
    "int4": torch.quint4x2,
    "int2": torch.quint2x4,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
HALF = DataType.FP16


class Small:
    """A generator whose bytes are small numbers, whatever dtype they are read as."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random

    def bytes(self, count: int) -> bytes:
        # Words of 16 bits without their top exponent bits: as float16 and as float32 between -2 and 2.
        return (self._random.integers(0, 1 << 16, -(-count // 2), np.uint16) & 0xBFFF).tobytes()[:count]


class SmallValues:
    """Mixin for jobs on paper: values as a trainer has them, and not any bits."""

    random: Any

    def put_rows(self, *args: Any) -> None:
        kept, self.random = self.random, Small(self.random)
        try:
            super().put_rows(*args)  # type: ignore[misc]
        finally:
            self.random = kept


def refusals(cases: Iterable[tuple[str, nn.Module, str]], named: Mapping[str, str]) -> list[Any]:
    """Parameters of a test: modules that a ``FollowedModel`` refuses, and what it says.

    Args:
        cases: Name, module, and a pattern of the error.
        named: Names of cases for docs/coverage.md. The others have no cell there.
    """
    found = []
    for name, module, said in cases:
        marks = []
        if name in named:
            why = f"`{said.partition('.*')[0].rpartition(': ')[2]}`"
            marks.append(
                pytest.mark.covers(module=f"served by a FollowedModel: {named[name]}", outcome="refused", why=why)
            )
        found.append(pytest.param(module, said, id=name, marks=marks))
    return found


def collection(kind: str, weights: dict[str, torch.Tensor]) -> nn.Module:
    """A float collection with these tables, a feature for each of them."""
    shapes = {name: {"num_embeddings": w.shape[0], "embedding_dim": w.shape[1]} for name, w in weights.items()}
    types = {name: HALF if w.dtype == torch.float16 else DataType.FP32 for name, w in weights.items()}
    made: nn.Module
    if kind == "ec":
        made = EmbeddingCollection(
            tables=[
                EmbeddingConfig(name=name, feature_names=[f"f_{name}"], data_type=types[name], **shape)
                for name, shape in shapes.items()
            ]
        )
    else:
        made = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(name=name, feature_names=[f"f_{name}"], data_type=types[name], **shape)
                for name, shape in shapes.items()
            ]
        )
    with torch.no_grad():
        for key, value in made.state_dict().items():
            value.view(torch.uint8).copy_(weights[key.split(".")[-2]].view(torch.uint8))
    return made


def collision(
    kind: str, weights: dict[str, torch.Tensor], modules: dict[str, ManagedCollisionModule] | None = None
) -> nn.Module:
    """A float managed collision module with these tables; without ``modules``, over maps without a raw id."""
    inner: Any = collection(kind, weights)
    modules = modules or {
        name: MCHManagedCollisionModule(len(each), torch.device("cpu"), LFU_EvictionPolicy(), 3)
        for name, each in weights.items()
    }
    if kind == "ec":
        maps = ManagedCollisionCollection(modules, inner.embedding_configs())
        return ManagedCollisionEmbeddingCollection(inner, maps, return_remapped_features=True).eval()
    maps = ManagedCollisionCollection(modules, inner.embedding_bag_configs())
    return ManagedCollisionEmbeddingBagCollection(inner, maps, return_remapped_features=True).eval()


def quantized(module: nn.Module, width: str) -> nn.Module:
    """The same collection, quantized from scratch."""
    config = QConfig(
        activation=PlaceholderObserver.with_args(dtype=torch.float),
        weight=PlaceholderObserver.with_args(dtype=WIDTHS[width]),
    )
    module.qconfig = config  # type: ignore[assignment]
    if not isinstance(module, BaseManagedCollisionEmbeddingCollection):
        return (QuantRows if isinstance(module, EmbeddingCollection) else QuantBags).from_float(module)
    inner: Any = module._embedding_module
    is_bag = isinstance(inner, EmbeddingBagCollection)
    # TorchRec takes over the weights if they were quantized before.
    inner._table_name_to_quantized_weights = {}
    configs = inner.embedding_bag_configs() if is_bag else inner.embedding_configs()
    types = {each.name: dtype_to_data_type(WIDTHS[width]) for each in configs}
    quantize_state_dict(inner, inner._table_name_to_quantized_weights, types)
    made: Any = QuantManagedCollisionEmbeddingBagCollection if is_bag else QuantManagedCollisionEmbeddingCollection
    return made.from_float(module).eval()


def quantize_parts(model: nn.Module, width: str) -> nn.Module:
    """Quantize all collections of a model in place; ``float``: none."""
    if width != "float":
        for name, child in list(model.named_children()):
            if isinstance(
                child, EmbeddingCollection | EmbeddingBagCollection | BaseManagedCollisionEmbeddingCollection
            ):
                setattr(model, name, quantized(child, width))
    return model


def bits(module: nn.Module) -> dict[str, bytes]:
    """All of a module's state, kernels of quantized tables without their padding."""
    state: dict[str, bytes] = {}
    for path, each in module.named_modules():
        for number, kernel in enumerate(getattr(each, "_emb_modules", ())):
            for position, parts in enumerate(kernel.split_embedding_weights()):
                state[f"{path}.{number}.{position}"] = b"".join(p.numpy().tobytes() for p in parts if p is not None)
    owned = tuple(path for path, each in module.named_modules() if hasattr(each, "_emb_modules"))
    for key, value in module.state_dict().items():
        if not key.startswith(tuple(f"{path}." for path in owned)):
            state[key] = value.contiguous().view(torch.uint8).numpy().tobytes() if value.dim() else str(value).encode()
    return state


def all_rows(weights: dict[str, torch.Tensor]) -> KeyedJaggedTensor:
    """A batch with one bag of one id for each row of the smallest table, and so the last rows of none."""
    count = min(len(each) for each in weights.values())
    ids = torch.arange(count)
    return KeyedJaggedTensor(
        [f"f_{name}" for name in weights], ids.repeat(len(weights)), lengths=torch.ones(count * len(weights)).long()
    )


def inference_module(model: Model, width: str, truth: dict[str, torch.Tensor] | None = None) -> nn.Module:
    """The trainer's model, unsharded and quantized, with the trainer's state or another one."""
    net = Net(model)
    for name, child in list(net.named_children()):
        if name != "heads":
            setattr(net, name, child.to_empty(device="cpu"))
    with torch.no_grad():
        for key, value in net.state_dict().items():
            value.copy_(truth[f"model.{key}"] if truth is not None else torch.full_like(value, 3.0))
    return quantize_parts(net, width).eval()
