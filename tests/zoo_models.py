"""Any TorchRec model that the matrix needs, built from a plain description, and the truth about it by plain code.

Everything a rank does is a pure function of the description and the step: initial tables, batches, events. So the
same model can be built under any plan and any number of ranks.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.fp_embeddingbag import FeatureProcessedEmbeddingBagCollectionSharder
from torchrec.distributed.fused_embeddingbag import FusedEmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    data_parallel,
    grid_shard,
    row_wise,
    table_row_wise,
    table_wise,
)
from torchrec.distributed.types import ParameterSharding, ShardingEnv, ShardingPlan, ShardingType
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.model import available

warnings.filterwarnings("ignore")

GLOBAL_BATCH = 12
MAX_LENGTH = 3

OPTIMIZERS = available(
    {
        "sgd": "EXACT_SGD",
        "adagrad": "EXACT_ADAGRAD",
        "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
        "emainplace_rowwise_adagrad": "EMAINPLACE_ROWWISE_ADAGRAD",
        "rowwise_rmsprop_ar": "ROWWISE_RMSPROP_AR",
    }
)
"""All that FBGEMM runs on a CPU."""
POINTWISE = ("sgd", "adagrad")
IN_FUSED_MODULES = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise_adagrad": RowWiseAdagrad}
"""What a FusedEmbeddingBagCollection takes for them."""


@dataclass(frozen=True)
class Table:
    name: str
    rows: int
    dim: int
    features: tuple[str, ...]
    pooling: str = "sum"
    dtype: str = "fp32"


@dataclass(frozen=True)
class Part:
    """One embedding module."""

    kind: str
    """ebc | fused (EBC) | weighted (EBC) | ec | fp (position weights, one collection) | fp_dict (one a feature)."""
    tables: tuple[Table, ...]

    def outputs(self) -> Iterator[tuple[str, Table]]:
        """(key in the module's output, table), in the order of the tables."""
        features = [feature for table in self.tables for feature in table.features]
        for table in self.tables:
            for feature in table.features:
                yield (f"{feature}@{table.name}" if features.count(feature) > 1 else feature), table


@dataclass(frozen=True)
class Model:
    parts: tuple[Part, ...]
    optimizer: str
    fused: tuple[tuple[str, Any], ...] = ()
    """More arguments of the fused kernels."""
    int32: bool = False
    """Whether ids are int32, in the batches and in the kernels."""
    vbe: str = ""
    """Whether each feature has a batch size of its own, its distinct bags: ``even`` on all ranks, or ``ragged``."""
    dedup: bool = False
    """Whether an EmbeddingCollection looks each id up once."""

    def rows(self) -> dict[str, int]:
        """Feature -> ids that all of its tables have."""
        rows: dict[str, int] = {}
        for part in self.parts:
            for table in part.tables:
                rows |= {feature: min(table.rows, rows.get(feature, table.rows)) for feature in table.features}
        return rows


@dataclass(frozen=True)
class Place:
    """Where a table lies."""

    family: str
    """tw | rw | cw | uneven | twcw | twrw | grid | dp"""
    where: tuple[int, ...] = ()
    """tw: its rank. cw, twcw: a rank for each column shard. uneven: columns on rank 0, 1, ... twrw, grid: hosts."""


@dataclass(frozen=True)
class Plan:
    world: int
    host: int
    """Ranks on one host."""
    places: tuple[Place, ...]
    """One a table, the parts one behind the other."""


class Net(nn.Module):
    """Embedding modules ``part0``, ``part1``, ... and one linear head for each of their outputs."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model
        self.heads = nn.ModuleDict()
        for number, part in enumerate(model.parts):
            self.add_module(f"part{number}", _embeddings(part, model.optimizer))
            for key, table in part.outputs():
                self.heads[f"{number}_{key}"] = nn.Linear(table.dim, 1)

    def forward(self, sparse: list[KeyedJaggedTensor], target: torch.Tensor) -> torch.Tensor:
        loss = torch.zeros(())
        for number, part in enumerate(self.model.parts):
            embedded = self.get_submodule(f"part{number}")(sparse[number])
            for key, _ in part.outputs():
                head = self.heads[f"{number}_{key}"]
                if part.kind == "ec":
                    loss = loss + torch.tanh(head(embedded[key].values().float())).sum() / GLOBAL_BATCH
                else:
                    loss = loss + (torch.tanh(head(embedded[key].float()).squeeze(1)) * target).mean()
        return loss


def _embeddings(part: Part, optimizer: str) -> nn.Module:
    if part.kind == "ec":
        tables = [
            EmbeddingConfig(
                name=t.name,
                num_embeddings=t.rows,
                embedding_dim=t.dim,
                feature_names=list(t.features),
                data_type=DataType[t.dtype.upper()],
            )
            for t in part.tables
        ]
        return EmbeddingCollection(tables=tables, device=torch.device("meta"))
    bags = [
        EmbeddingBagConfig(
            name=t.name,
            num_embeddings=t.rows,
            embedding_dim=t.dim,
            feature_names=list(t.features),
            pooling=PoolingType[t.pooling.upper()],
            data_type=DataType[t.dtype.upper()],
        )
        for t in part.tables
    ]
    if part.kind == "fused":
        rates = {"lr": 0.1, "eps": 1e-6} if optimizer != "sgd" else {"lr": 0.1}
        meta = torch.device("meta")
        return FusedEmbeddingBagCollection(bags, IN_FUSED_MODULES[optimizer], rates, device=meta)
    weighted = part.kind != "ebc"
    ebc = EmbeddingBagCollection(tables=bags, device=torch.device("meta"), is_weighted=weighted)
    lengths = {feature: MAX_LENGTH for table in part.tables for feature in table.features}
    if part.kind == "fp":
        return FeatureProcessedEmbeddingBagCollection(ebc, PositionWeightedModuleCollection(lengths))
    if part.kind == "fp_dict":
        return FeatureProcessedEmbeddingBagCollection(
            ebc, {name: PositionWeightedModule(length) for name, length in lengths.items()}
        )
    return ebc


# Building a job.


@dataclass
class Job:
    """A live job on one rank."""

    model: Model
    dmp: DistributedModelParallel
    optimizer: CombinedOptimizer
    dense: torch.optim.Optimizer
    step: int = 0
    marks: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Marker -> the truth there."""

    # A Stateful: the position of this job's loader.

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = state["step"]


def build(model: Model, plan: Plan) -> Job:
    """Build a job with the same initial tables for every plan."""
    assert plan.world == dist.get_world_size()
    os.environ["LOCAL_WORLD_SIZE"] = str(plan.host)
    torch.manual_seed(7)
    net = Net(model)
    places = iter(plan.places)
    sharders = _sharders(model)
    plans = {
        f"part{number}": _module_plan(net.get_submodule(f"part{number}"), part, places, plan, sharders[_class(part)])
        for number, part in enumerate(model.parts)
    }
    dmp = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan(plan=plans),
        sharders=list(sharders.values()),
    )
    _fill(dmp)
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), partial(torch.optim.Adam, lr=0.01)
    )
    torch.manual_seed(100 + dist.get_rank())
    return Job(model, dmp, CombinedOptimizer([dmp.fused_optimizer, dense]), dense._optimizer)


def _class(part: Part) -> str:
    return {"ec": "ec", "fp": "fp", "fp_dict": "fp", "fused": "fused"}.get(part.kind, "ebc")


def _sharders(model: Model) -> dict[str, Any]:
    fused: dict[str, Any] = {"optimizer": OPTIMIZERS[model.optimizer], "learning_rate": 0.1, "eps": 1e-6}
    if model.int32:
        fused |= {"embedding_table_index_type": torch.int32, "embedding_table_offset_type": torch.int32}
    if model.optimizer == "emainplace_rowwise_adagrad":
        fused["emainplace_mode"] = EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.25)
    fused |= dict(model.fused)
    bags = partial(EmbeddingBagCollectionSharder, fused_params=fused)
    return {
        "ebc": bags(),
        "fused": FusedEmbeddingBagCollectionSharder(),
        "ec": EmbeddingCollectionSharder(fused_params=fused, use_index_dedup=model.dedup),
        "fp": FeatureProcessedEmbeddingBagCollectionSharder(ebc_sharder=bags()),
    }


def _module_plan(module: nn.Module, part: Part, places: Iterator[Place], plan: Plan, sharder: Any) -> Any:
    where = {table.name: next(places) for table in part.tables}
    module_plan = construct_module_sharding_plan(
        module,
        per_param_sharding={name: _generator(place) for name, place in where.items()},
        sharder=sharder,
        local_size=plan.host,
        world_size=plan.world,
        device_type="cpu",
    )
    for name, sharding in module_plan.items():
        assert isinstance(sharding, ParameterSharding)
        if where[name].family != "dp":
            sharding.compute_kernel = "fused"
        if where[name].family == "twcw":
            # TorchRec has no generator for it: the column shards of one table on the ranks of one host.
            sharding.sharding_type = ShardingType.TABLE_COLUMN_WISE.value
    return module_plan


def _generator(place: Place) -> Callable[..., ParameterSharding]:
    generators: dict[str, Callable[[], Any]] = {
        "tw": lambda: table_wise(rank=place.where[0]),
        "rw": row_wise,
        "cw": lambda: column_wise(ranks=list(place.where)),
        "uneven": lambda: column_wise(size_per_rank=list(place.where)),
        "twcw": lambda: column_wise(ranks=list(place.where)),
        "twrw": lambda: table_row_wise(host_index=place.where[0]),
        "grid": lambda: grid_shard(host_indexes=list(place.where)),
        "dp": data_parallel,
    }
    return generators[place.family]()


@torch.no_grad()
def _fill(dmp: DistributedModelParallel) -> None:
    """Initial values that depend on names and global positions only."""
    for name, value in dmp.state_dict().items():
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        full = (torch.rand(value.size(), generator=generator) - 0.5) * 0.4
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                offsets, sizes = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                shard.tensor.copy_(full[tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))])
        else:
            value.copy_(full)


# Batches.
