"""A small TorchRec job for tests: model, plans, batches, and the truth about it by plain torch code."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    data_parallel,
    row_wise,
    table_wise,
)
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.packed import gathered
from tests.wrapped import wrapped

warnings.filterwarnings("ignore")


def available(kinds: dict[str, str]) -> dict[str, EmbOptimType]:
    """Those of the fused optimizers that this FBGEMM has: ROWWISE_RMSPROP_AR is new in 1.9."""
    return {name: EmbOptimType[kind] for name, kind in kinds.items() if kind in EmbOptimType.__members__}


OPTIMIZERS = available(
    {
        "rowwise": "EXACT_ROWWISE_ADAGRAD",
        "adagrad": "EXACT_ADAGRAD",
        "sgd": "EXACT_SGD",
        "ema": "EMAINPLACE_ROWWISE_ADAGRAD",
        "rmsprop": "ROWWISE_RMSPROP_AR",
    }
)
GLOBAL_BATCH = 12

# name, rows, dim, features
TABLES = [
    ("t_user", 211, 16, ["user"]),
    ("t_item", 307, 16, ["item", "also_item"]),
    ("t_wide", 150, 32, ["wide"]),
    ("t_small", 13, 8, ["small"]),
    ("t_dp", 20, 16, ["dp"]),
]
FEATURES = [(feature, rows) for _, rows, _, features in TABLES for feature in features]

Spec = dict[str, tuple[str, Any]]
"""Plan of a job: table -> ("tw", rank) | ("rw", None) | ("cw", ranks) | ("dp", None)."""


class Net(nn.Module):
    """Two dense towers around an EmbeddingBagCollection; embeddings are regrouped by name."""

    def __init__(self, dtype: DataType = DataType.FP32, dropout: float = 0.1) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(
                name=name, num_embeddings=rows, embedding_dim=dim, feature_names=features, data_type=dtype
            )
            for name, rows, dim, features in TABLES
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        width = sum(dim * len(features) for _, _, dim, features in TABLES)
        self.bottom = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 8), nn.Dropout(dropout))
        self.top = nn.Sequential(nn.Linear(width + 8, 16), nn.ReLU(), nn.Linear(16, 1))

    def forward(self, dense: torch.Tensor, sparse: KeyedJaggedTensor, label: torch.Tensor) -> torch.Tensor:
        embedded = self.ebc(sparse)
        columns = [embedded[feature].float() for feature, _ in FEATURES]
        logits = self.top(torch.cat([self.bottom(dense), *columns], 1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, label)


@dataclass
class Trainer:
    """A live job on one rank."""

    dmp: DistributedModelParallel
    optimizer: CombinedOptimizer
    dense: torch.optim.Optimizer
    step_number: int = 0

    def step(self) -> float:
        """Train one global batch; the mean loss over all ranks."""
        self.step_number += 1
        self.optimizer.zero_grad()
        loss = self.dmp(*batch(self.step_number))
        loss.backward()
        self.optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return float(total) / dist.get_world_size()

    # A Stateful: the position of this job's loader.

    def state_dict(self) -> dict[str, Any]:
        return {"step_number": self.step_number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step_number = state["step_number"]


def trainer(
    spec: Spec,
    optimizer: str = "rowwise",
    dense: str = "adam",
    dtype: str = "fp32",
    dropout: float = 0.1,
    net: type[Net] = Net,
    wrapper: DataParallelWrapper | None = None,
    **fused: Any,
) -> Trainer:
    """Build a job with the same initial state for every plan and world size."""
    torch.manual_seed(7)
    module = net(DataType[dtype.upper()], dropout)
    params: dict[str, Any] = {"optimizer": OPTIMIZERS[optimizer], "learning_rate": 0.1, "eps": 1e-6, **fused}
    sharder = EmbeddingBagCollectionSharder(fused_params=params)
    makers = {
        "tw": lambda arg: table_wise(rank=arg),
        "rw": lambda _: row_wise(),
        "cw": lambda arg: column_wise(ranks=arg),
        "dp": lambda _: data_parallel(),
    }
    places = {name: makers[kind](arg) for name, (kind, arg) in spec.items()}
    dmp = wrapped(module, places, sharder, wrapper=wrapper)
    with torch.no_grad():
        for name, value in dmp.state_dict().items():
            shards = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
            for shard in shards:
                generator = torch.Generator().manual_seed(len(name))
                values = (torch.rand(shard.shape, generator=generator) - 0.5) * 0.2
                if isinstance(shard, DTensor):
                    values = distribute_tensor(values, shard.device_mesh, shard.placements)
                shard.copy_(values)
    parameters = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    makers_dense = {
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05),
    }
    keyed = KeyedOptimizerWrapper(parameters, makers_dense[dense])
    torch.manual_seed(100 + dist.get_rank())
    return Trainer(dmp, CombinedOptimizer([dmp.fused_optimizer, keyed]), keyed._optimizer)


def batch(step: int) -> tuple[torch.Tensor, KeyedJaggedTensor, torch.Tensor]:
    """This rank's slice of global batch ``step``: a pure function of the step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 + step)
    dense = torch.randn(GLOBAL_BATCH, 4, generator=generator)
    label = (torch.rand(GLOBAL_BATCH, generator=generator) > 0.5).float()
    low, high = rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world
    values, lengths = [], []
    for _, rows in FEATURES:
        length = torch.randint(0, 4, (GLOBAL_BATCH,), generator=generator)
        ids = (torch.rand(int(length.sum()), generator=generator) ** 3 * rows).long().clamp_(max=rows - 1)
        ends = torch.cat([torch.zeros(1, dtype=torch.long), length.cumsum(0)])
        values.append(ids[ends[low] : ends[high]])
        lengths.append(length[low:high])
    sparse = KeyedJaggedTensor(
        keys=[feature for feature, _ in FEATURES], values=torch.cat(values), lengths=torch.cat(lengths)
    )
    return dense[low:high], sparse, label[low:high]


def truth(job: Trainer) -> dict[str, torch.Tensor]:
    """The whole state of the live job by plain TorchRec and torch code: full tables, states, dense, random state.

    The same on every rank, but for ``rng``, which is this rank's own.
    """
    state: dict[str, torch.Tensor] = {}
    sharded: dict[str, ShardedTensor] = {}
    for name, value in job.dmp.state_dict().items():
        if isinstance(value, ShardedTensor):
            sharded[f"model.{name}"] = value
        else:
            state[f"model.{name}"] = _whole(value)
    for name, values in job.dmp.fused_optimizer.state_dict()["state"].items():
        sharded |= {f"fused.{name}.{key}": value for key, value in values.items() if isinstance(value, ShardedTensor)}
    state |= assemble(sharded)
    names = {id(parameter): name for name, parameter in job.dmp.named_parameters()}
    for parameter, values in job.dense.state.items():
        if id(parameter) not in names:
            continue  # where TorchRec's warm-up keeps its iteration
        for key, value in values.items():
            state[f"dense.{names[id(parameter)]}.{key}"] = _whole(value)
    state["rng"] = torch.get_rng_state()
    state["step"] = torch.tensor(job.step_number)
    return state


def _whole(value: Any) -> torch.Tensor:
    """A copy, of all of it where FSDP2 has sharded it."""
    return value.full_tensor().clone() if isinstance(value, DTensor) else torch.as_tensor(value).clone()


def assemble(sharded: dict[str, ShardedTensor]) -> dict[str, torch.Tensor]:
    """The full logical tensors on every rank; a rank need not know a table that it holds no part of."""
    local = {
        name: (
            tuple(value.size()),
            [(shard.metadata.shard_offsets, shard.tensor.detach()) for shard in value.local_shards()],
        )
        for name, value in sharded.items()
    }
    full: dict[str, torch.Tensor] = {}
    for pieces in gathered(local):
        for name, (size, shards) in pieces.items():
            for offsets, tensor in shards:
                if name not in full:
                    nowhere = float("nan") if tensor.is_floating_point() else -(2**31)
                    full[name] = torch.full(size, nowhere, dtype=tensor.dtype)
                full[name][tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))] = tensor
    return full


def differences(expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor], *, rng: bool = True) -> list[str]:
    """Names of what is not bitwise equal."""
    keys = expected.keys() | found.keys()
    return sorted(
        key
        for key in keys
        if (key != "rng" or rng)
        and (key not in expected or key not in found or not _same_bits(expected[key], found[key]))
    )


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """``torch.equal``, where a NaN is also equal to itself."""
    same_kind = left.shape == right.shape and left.dtype == right.dtype
    return same_kind and torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


PLAN_2: Spec = {
    "t_user": ("tw", 0),
    "t_item": ("rw", None),
    "t_wide": ("cw", [0, 1]),
    "t_small": ("tw", 1),
    "t_dp": ("dp", None),
}
PLAN_2_OTHER: Spec = {**PLAN_2, "t_user": ("rw", None), "t_item": ("tw", 1), "t_wide": ("cw", [1, 0])}
PLAN_3: Spec = {
    "t_user": ("rw", None),
    "t_item": ("tw", 2),
    "t_wide": ("cw", [2, 1]),
    "t_small": ("tw", 0),
    "t_dp": ("dp", None),
}
PLAN_3_OTHER: Spec = {**PLAN_3, "t_user": ("tw", 1), "t_item": ("rw", None), "t_small": ("rw", None)}
PLAN_1: Spec = {
    "t_user": ("tw", 0),
    "t_item": ("rw", None),
    "t_wide": ("cw", [0, 0]),
    "t_small": ("tw", 0),
    "t_dp": ("dp", None),
}
