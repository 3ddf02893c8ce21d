"""A small TorchRec job on one GPU, what it is made of, and the truth about it by plain TorchRec and FBGEMM code.

Nothing here needs a GPU but ``device``: with ``torch.device("cpu")`` the same job runs on a CPU, as far as FBGEMM
has the kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    GlobalWeightDecayDefinition,
    UserEnabledConfigDefinition,
    WeightDecayMode,
)
from torch import nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import DataType, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection, EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from tests.model import differences
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

BATCH = 64
MAX_LENGTH = 4
DIM = 16

# name, rows, dim, features. One dim is smaller: a row of the UVM cache is as wide as the widest table.
TABLES = [
    ("t_user", 257, DIM, ["user"]),
    ("t_item", 401, DIM, ["item", "also_item"]),
    ("t_small", 13, 8, ["small"]),
]
FEATURES = [(feature, rows, dim) for _, rows, dim, features in TABLES for feature in features]

DECAY = {"weight_decay": 0.01}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "sgd": {"optimizer": EmbOptimType.EXACT_SGD},
    "adagrad": {"optimizer": EmbOptimType.EXACT_ADAGRAD},
    "rowwise_adagrad": {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD},
    "rowwise_adagrad_l2": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.L2,
        **DECAY,
    },
    "rowwise_adagrad_decouple": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.DECOUPLE,
        **DECAY,
    },
    "rowwise_adagrad_counter": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=CounterWeightDecayMode.DECOUPLE, counter_halflife=4, max_counter_update_freq=2
        ),
        **DECAY,
    },
    "rowwise_adagrad_cowclip": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.COWCLIP,
        "cowclip_regularization": CowClipDefinition(
            counter_weight_decay_mode=CounterWeightDecayMode.L2,
            counter_halflife=4,
            weight_norm_coefficient=1.0,
            lower_bound=0.01,
        ),
        **DECAY,
    },
    "rowwise_adagrad_decouple_global": {
        "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        "weight_decay_mode": WeightDecayMode.DECOUPLE_GLOBAL,
        "global_weight_decay": GlobalWeightDecayDefinition(start_iter=2, lower_bound=0.0),
        **DECAY,
    },
    "adam": {"optimizer": EmbOptimType.ADAM},
    "adam_rowwise_bias_correction": {
        "optimizer": EmbOptimType.ADAM,
        "extra_optimizer_config": UserEnabledConfigDefinition(use_rowwise_bias_correction=True),
    },
    "partial_rowwise_adam": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_ADAM},
    "lamb": {"optimizer": EmbOptimType.LAMB},
    "partial_rowwise_lamb": {"optimizer": EmbOptimType.PARTIAL_ROWWISE_LAMB},
    "lars_sgd": {"optimizer": EmbOptimType.LARS_SGD},
}
DENSE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.01),
    "adam_fused": lambda parameters: torch.optim.Adam(parameters, lr=0.01, fused=True),
    "adam_capturable": lambda parameters: torch.optim.Adam(parameters, lr=0.01, capturable=True),
    "adamw_fused": lambda parameters: torch.optim.AdamW(parameters, lr=0.01, fused=True, amsgrad=True),
    "sgd_fused": lambda parameters: torch.optim.SGD(parameters, lr=0.01, momentum=0.9, fused=True),
}
ON_CPU = ("sgd", "adagrad", "rowwise_adagrad")
"""Those that a CPU job can restore."""


@dataclass(frozen=True, kw_only=True)
class Build:
    """What a job is made of."""

    optimizer: str = "rowwise_adagrad"
    kernel: str = "fused"
    """fused | fused_uvm | fused_uvm_caching, or one that is refused."""
    dtype: str = "fp32"
    module: str = "ebc"
    """ebc | ec"""
    vbe: bool = False
    """Whether each feature has a batch size of its own (its distinct bags)."""
    dense: str = "adam"
    """Optimizer of the dense part."""
    more: tuple[tuple[str, Any], ...] = ()
    """More arguments of the fused kernel."""

    def fused_params(self) -> dict[str, Any]:
        """What TorchRec hands to the fused kernel."""
        params: dict[str, Any] = {"learning_rate": 0.1, **OPTIMIZERS[self.optimizer]}
        if self.optimizer != "sgd":
            params["eps"] = 1e-6
        if self.kernel == "fused_uvm_caching":
            params["cache_load_factor"] = 0.1  # 96 rows for some 250 that a batch looks up: dirty ones are evicted
        return {**params, **dict(self.more)}


@dataclass(frozen=True)
class Batch(Pipelineable):
    """What TorchRec's pipelines want of a batch."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    label: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(
            self.dense.to(device, non_blocking=non_blocking),
            self.sparse.to(device, non_blocking=non_blocking),
            self.label.to(device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: Any) -> None:
        for part in (self.dense, self.sparse, self.label):
            part.record_stream(stream)


class Net(nn.Module):
    """One embedding module and one linear layer; batch in, (loss, logits) out, as pipelines call it."""

    def __init__(self, build: Build) -> None:
        super().__init__()
        self._bags = build.module == "ebc"
        self.embeddings = _bags(build) if self._bags else _sequences(build)
        width = sum(dim for _, _, dim in FEATURES) if self._bags else 0
        self.top = nn.Linear(4 + width, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embeddings(batch.sparse)
        if self._bags:
            columns = [embedded[feature].float() for feature, _, _ in FEATURES]
            logits = self.top(torch.cat([batch.dense, *columns], 1)).squeeze(1)
            return nn.functional.binary_cross_entropy_with_logits(logits, batch.label), logits.detach()
        logits = self.top(batch.dense).squeeze(1)
        loss = nn.functional.binary_cross_entropy_with_logits(logits, batch.label)
        for feature, _, _ in FEATURES:
            loss = loss + torch.tanh(embedded[feature].values().float()).sum() / BATCH
        return loss, logits.detach()


def _bags(build: Build) -> EmbeddingBagCollection:
    kind = DataType[build.dtype.upper()]
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=names, data_type=kind)
            for name, rows, dim, names in TABLES
        ],
        device=torch.device("meta"),
    )


def _sequences(build: Build) -> EmbeddingCollection:
    """All tables of a collection have one dim."""
    kind = DataType[build.dtype.upper()]
    return EmbeddingCollection(
        tables=[
            EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=DIM, feature_names=names, data_type=kind)
            for name, rows, _, names in TABLES
        ],
        device=torch.device("meta"),
    )


@dataclass
class Job:
    """A live job of one rank."""

    build: Build
    device: torch.device
    dmp: DistributedModelParallel
    optimizer: CombinedOptimizer
    dense: torch.optim.Optimizer
    number: int = 0

    def step(self) -> float:
        """Train the next batch."""
        self.number += 1
        self.optimizer.zero_grad()
        loss, _ = self.dmp(self.batch(self.number))
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def batch(self, number: int) -> Batch:
        return batch(number, vbe=self.build.vbe).to(self.device)

    # A Stateful: the position of this job's loader.

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]

    def groups(self) -> Iterator[Any]:
        """TorchRec's groups of tables, one a kernel: ``config`` and ``emb_module``."""
        for lookup in self.dmp.module.embeddings._lookups:
            yield from lookup._emb_modules


def open_group(directory: Path) -> None:
    """Make this process the one rank of a job."""
    dist.init_process_group("gloo", init_method=f"file://{directory}/store", rank=0, world_size=1)


@cache
def _group(kind: str) -> dist.ProcessGroup:
    """For the models of one kind of device."""
    return dist.new_group(backend="nccl" if kind == "cuda" else "gloo")


def sharding(build: Build, net: Net, device: torch.device) -> tuple[ShardingPlan, Any]:
    """The plan and the sharder of a job of one rank. Pure: needs no GPU for one."""
    sharder_type = EmbeddingBagCollectionSharder if build.module == "ebc" else EmbeddingCollectionSharder
    sharder = sharder_type(fused_params=build.fused_params())
    plan = construct_module_sharding_plan(
        net.embeddings,
        per_param_sharding={name: table_wise(rank=0) for name, *_ in TABLES},
        sharder=sharder,
        local_size=1,
        world_size=1,
        device_type=device.type,
    )
    for parameter in plan.values():
        parameter.compute_kernel = build.kernel
    return ShardingPlan(plan={"embeddings": plan}), sharder


def make(build: Build, device: torch.device) -> Job:
    """Build a job; its initial state depends on ``build`` alone."""
    torch.manual_seed(7)
    net = Net(build)
    plan, sharder = sharding(build, net, device)
    dmp = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(_group(device.type)),
        device=device,
        plan=plan,
        sharders=[sharder],
    )
    _fill(dmp)
    parameters = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    keyed = KeyedOptimizerWrapper(parameters, DENSE[build.dense])
    torch.manual_seed(100)
    return Job(build, device, dmp, CombinedOptimizer([dmp.fused_optimizer, keyed]), keyed._optimizer)


@torch.no_grad()
def _fill(dmp: DistributedModelParallel) -> None:
    for position, value in enumerate(dmp.state_dict().values()):
        shards = [shard.tensor for shard in value.local_shards()] if isinstance(value, ShardedTensor) else [value]
        for shard in shards:
            generator = torch.Generator().manual_seed(position)
            shard.copy_((torch.rand(shard.shape, generator=generator) - 0.5) * 0.2)


def batch(number: int, *, vbe: bool = False) -> Batch:
    """Batch ``number``, on the CPU: a pure function of the number."""
    generator = torch.Generator().manual_seed(1000 + number)
    dense = torch.randn(BATCH, 4, generator=generator)
    label = (torch.rand(BATCH, generator=generator) > 0.5).float()
    values, lengths, bags, strides = [], [], [], []
    for _, rows, _ in FEATURES:
        bag = torch.arange(BATCH)
        if vbe:
            distinct, bag = torch.randint(0, BATCH, (BATCH,), generator=generator).unique(return_inverse=True)
            strides.append([distinct.numel()])
        length = torch.randint(0, MAX_LENGTH + 1, (strides[-1][0] if vbe else BATCH,), generator=generator)
        values.append((torch.rand(int(length.sum()), generator=generator) ** 2 * rows).long().clamp_(max=rows - 1))
        lengths.append(length)
        bags.append(bag)
    names = [feature for feature, _, _ in FEATURES]
    sparse = KeyedJaggedTensor(
        keys=names,
        values=torch.cat(values),
        lengths=torch.cat(lengths),
        stride_per_key_per_rank=strides if vbe else None,
        inverse_indices=(names, torch.stack(bags)) if vbe else None,
    )
    return Batch(dense, sparse, label)


def raw(group: Any, chosen: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and offsets as the kernel of ``group`` gets them, to prefetch a batch by hand."""
    names = [feature for table in group.config.embedding_tables for feature in table.feature_names]
    ordered = chosen.sparse.permute([chosen.sparse.keys().index(name) for name in names])
    return ordered.values(), ordered.offsets()


def attach(job: Job, directory: Path, **settings: Any) -> StreamCheckpointer:
    config = StreamConfig(uri=f"file://{directory}", marker_every=None, **settings)
    return StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job})


def run(job: Job, checkpointer: StreamCheckpointer, steps: int) -> None:
    for _ in range(steps):
        job.step()
        checkpointer.step()


def truth(job: Job) -> dict[str, torch.Tensor]:
    """All state of a job, on the CPU. Writes cached rows back: call it behind what is tested, not in front."""
    if job.device.type == "cuda":
        torch.cuda.synchronize()
    state: dict[str, torch.Tensor] = {"number": torch.tensor(job.number), "rng.cpu": torch.get_rng_state()}
    if job.device.type == "cuda":
        state["rng.cuda"] = torch.cuda.get_rng_state()
    for group in job.groups():
        kernel = group.emb_module
        kernel.flush()
        weights = kernel.split_embedding_weights()
        states = kernel.split_optimizer_states() or [[]] * len(weights)
        for table, weight, rows in zip(group.config.embedding_tables, weights, states, strict=True):
            state[f"{table.name}.weight"] = weight
            state |= {f"{table.name}.state{position}": value for position, value in enumerate(rows)}
            state[f"{table.name}.iter"] = kernel.iter_cpu
            state[f"{table.name}.lr"] = kernel.learning_rate_tensor
    sharded = {f"embeddings.{key}" for key in job.dmp.module.embeddings.state_dict()}
    state |= {name: value for name, value in job.dmp.module.state_dict().items() if name not in sharded}
    names = {id(parameter): name for name, parameter in job.dmp.named_parameters()}
    for parameter, values in job.dense.state.items():
        state |= {f"dense.{names[id(parameter)]}.{key}": torch.as_tensor(value) for key, value in values.items()}
    return {name: value.detach().cpu().clone() for name, value in state.items()}


def restored(
    build: Build, directory: Path, expected: dict[str, torch.Tensor], device: torch.device
) -> tuple[Job, list[str]]:
    """A fresh job that has restored the newest marker, and the names of what is not bitwise ``expected``.

    Random state of a device that only one of the two jobs uses is not compared.
    """
    job = make(build, device)
    job.step()  # a live, different state: the restore must replace all of it
    with attach(job, directory) as checkpointer:
        assert checkpointer.restore() is not None
        found = truth(job)
    expected, found = (
        {name: value for name, value in state.items() if name in other or not name.startswith("rng.")}
        for state, other in ((expected, found), (found, expected))
    )
    return job, differences(expected, found)


MODULES = {"ebc": "EmbeddingBagCollection", "ec": "EmbeddingCollection"}
KERNELS = {"key_value": "key-value (SSD)"}


def covers(build: Build, *, pipeline: str = "plain", outcome: str = "exact", why: str = "") -> pytest.MarkDecorator:
    """The cell of docs/coverage.md that a test shows."""
    params = build.fused_params()
    parts = [params["optimizer"].name]
    if "weight_decay_mode" in params:
        parts.append(f"weight decay {params['weight_decay_mode'].name}")
    if "extra_optimizer_config" in params:
        parts.append("bias correction for each row")
    if "stochastic_rounding" in params:
        parts.append("stochastic rounding")
    return pytest.mark.covers(
        optimizer=", ".join(parts),
        kernel=f"{KERNELS.get(build.kernel, build.kernel)} on an H100, {build.dtype}",
        plan="table-wise",
        module=MODULES[build.module] + ", VBE" * build.vbe,
        pipeline=pipeline,
        outcome=outcome,
        why=why,
    )
