"""A small job with two towers, one of which only some batches use, and loops that clear gradients in every order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DataParallelWrapper, DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.dense_job import copied
from tests.wrapped import wrapped

ROWS, BATCH = 23, 6
USED = (1, 2, 4, 7)
"""Batches that use the second tower."""


class Net(nn.Module):
    def __init__(self, *, sparse: bool = False) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="t", num_embeddings=ROWS, embedding_dim=8, feature_names=["f"])
        self.ebc = EmbeddingBagCollection(device=torch.device("meta"), tables=[table])
        self.over = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 1))
        self.side = nn.EmbeddingBag(ROWS, 1, sparse=True, mode="sum") if sparse else nn.Linear(8, 1)

    def forward(self, features: KeyedJaggedTensor, number: int) -> torch.Tensor:
        embedded = self.ebc(features).values()
        output = self.over(embedded)
        if number in USED or isinstance(self.side, nn.EmbeddingBag):  # DDP wants a sparse gradient of each batch
            ids = features.values().reshape(-1, 1)
            output = output + self.side(ids if isinstance(self.side, nn.EmbeddingBag) else embedded)
        return ((output - 1) ** 2).mean()


class Towers(DataParallelWrapper):
    """DDP around the towers. TorchRec's own keeps gradients in DDP's buckets, where they stay the same tensors."""

    def __init__(self, bucket_views: bool) -> None:
        self._bucket_views = bucket_views

    def wrap(self, dmp: DistributedModelParallel, env: ShardingEnv, device: torch.device) -> None:
        module = dmp.module
        tables = [name for name, _ in module.named_parameters() if name.startswith("ebc")]
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, tables)
        views, unused = self._bucket_views, True
        dmp._dmp_wrapped_module = DistributedDataParallel(
            module, gradient_as_bucket_view=views, find_unused_parameters=unused, broadcast_buffers=False
        )


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "Adam": lambda parameters: torch.optim.Adam(parameters, lr=0.05, weight_decay=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.05),
    "LBFGS": lambda parameters: torch.optim.LBFGS(parameters, lr=0.05, max_iter=2),
}


@dataclass
class Job:
    """A live job on one rank. It is the Stateful of its own position and scaler."""

    dmp: DistributedModelParallel
    optimizer: torch.optim.Optimizer
    number: int = 0
    scaler: torch.amp.GradScaler = field(
        default_factory=lambda: torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    )

    @property
    def towers(self) -> dict[str, nn.Parameter]:
        return {name: each for name, each in self.dmp.module.named_parameters() if "ebc" not in name}

    def loss(self) -> torch.Tensor:
        rank = dist.get_rank()
        generator = torch.Generator().manual_seed(100 * self.number + rank)
        values = torch.randint(0, ROWS, (BATCH,), generator=generator)
        lengths = torch.ones(BATCH, dtype=torch.long)
        return self.dmp(KeyedJaggedTensor(keys=["f"], values=values, lengths=lengths), self.number)

    def truth(self) -> dict[str, Any]:
        """Weights and states of the towers, and which gradients there are."""
        names = {id(parameter): name for name, parameter in self.towers.items()}
        state = {names.get(id(key), key): value for key, value in self.optimizer.state.items()}
        weights = {name: parameter.detach() for name, parameter in self.towers.items()}
        there = [name for name, parameter in self.towers.items() if parameter.grad is not None]
        return copied({"state": state, "weights": weights, "gradients": there})

    def state_dict(self) -> dict[str, Any]:
        return {"number": self.number, "scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.number = state["number"]
        self.scaler.load_state_dict(state["scaler"])


def build(optimizer: str, *, sparse: bool = False, bucket_views: bool = True, seed: int = 5) -> Job:
    torch.manual_seed(seed)
    params = {"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1}
    sharder = EmbeddingBagCollectionSharder(fused_params=params)
    dmp = wrapped(Net(sparse=sparse), {"t": row_wise()}, sharder, wrapper=Towers(bucket_views))
    job = Job(dmp, torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0))
    job.optimizer = OPTIMIZERS[optimizer](list(job.towers.values()))
    return job


# Loops: each function is one micro-batch, after which the user calls step().


def accumulate(job: Job, batches: int = 2) -> None:
    (job.loss() / batches).backward()
    if job.number % batches == 0:
        job.optimizer.step()
        job.optimizer.zero_grad()


def accumulate_three(job: Job) -> None:
    accumulate(job, 3)


def accumulate_and_clear_at_the_top(job: Job) -> None:
    if job.number % 2 == 1:
        job.optimizer.zero_grad()
    job.loss().backward()
    if job.number % 2 == 0:
        job.optimizer.step()


def none_at_the_top(job: Job) -> None:
    job.optimizer.zero_grad()
    job.loss().backward()
    job.optimizer.step()


def none_at_the_end(job: Job) -> None:
    job.loss().backward()
    job.optimizer.step()
    job.optimizer.zero_grad()


def none_between_forward_and_backward(job: Job) -> None:
    loss = job.loss()
    job.optimizer.zero_grad()
    loss.backward()
    job.optimizer.step()


def zeros_at_the_top(job: Job) -> None:
    job.optimizer.zero_grad(set_to_none=False)
    job.loss().backward()
    job.optimizer.step()


def zeros_at_the_end(job: Job) -> None:
    job.loss().backward()
    job.optimizer.step()
    job.optimizer.zero_grad(set_to_none=False)


def zeros_of_the_model(job: Job) -> None:
    job.dmp.zero_grad(set_to_none=False)
    job.loss().backward()
    job.optimizer.step()


def never_cleared(job: Job) -> None:
    job.loss().backward()
    job.optimizer.step()


def one_tower_never_cleared(job: Job) -> None:
    for parameter in job.dmp.module.over.parameters():
        parameter.grad = None
    never_cleared(job)


def cleared_every_third_time(job: Job) -> None:
    if job.number % 3 == 0:
        job.optimizer.zero_grad()
    never_cleared(job)


def zeroed_by_hand(job: Job) -> None:
    for parameter in job.towers.values():
        if parameter.grad is not None:
            parameter.grad.zero_()
    never_cleared(job)


def clipped(job: Job) -> None:
    job.optimizer.zero_grad(set_to_none=False)
    job.loss().backward()
    nn.utils.clip_grad_norm_(job.towers.values(), 0.5)
    job.optimizer.step()


def scaled(job: Job) -> None:
    """A loss that is not finite at batch 3: the scaler skips that step."""
    job.optimizer.zero_grad()
    loss = job.loss() * (float("inf") if job.number == 3 else 1.0)
    job.scaler.scale(loss).backward()
    job.scaler.step(job.optimizer)
    job.scaler.update()


def scaled_and_accumulated(job: Job) -> None:
    job.scaler.scale(job.loss()).backward()
    if job.number % 2 == 0:
        job.scaler.unscale_(job.optimizer)
        job.scaler.step(job.optimizer)
        job.scaler.update()
        job.optimizer.zero_grad(set_to_none=False)


def closures(job: Job) -> None:
    def closure() -> torch.Tensor:
        job.optimizer.zero_grad()
        loss = job.loss()
        loss.backward()
        return loss

    job.optimizer.step(closure)


Loop = Callable[[Job], None]
