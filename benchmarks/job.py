"""A small TorchRec job for the cases: tables of one size, row-wise Adagrad, dense layers of any size."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from at_hand import have_at_hand
from cache import prepare
from common import start_ranks, timed
from device import join
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

warnings.filterwarnings("ignore")


@dataclass(frozen=True)
class Shape:
    """Of a job."""

    rows: tuple[int, ...]
    """Of each table."""
    dim: int = 64
    dense_bytes: int = 0
    """Parameters of the dense layers, roughly; they are float32."""
    dense_share: float = 0.0
    """Share of the dense bytes in one parameter, roughly; 0 makes all layers equal."""
    sharding: str = "table_wise"
    """Or ``row_wise``, over all ranks."""
    dense_optimizer: str = "sgd"
    device: str = "cpu"
    """Or ``cuda``: of each rank the GPU of its number."""

    @property
    def features(self) -> list[str]:
        return [f"f{number}" for number in range(len(self.rows))]

    @property
    def table_bytes(self) -> int:
        """Of all tables and their optimizer states."""
        return sum(self.rows) * 4 * (self.dim + 1)


class Net(nn.Module):
    """Dense layers on an EmbeddingBagCollection."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{n:02d}", num_embeddings=rows, embedding_dim=shape.dim, feature_names=[f"f{n}"])
            for n, rows in enumerate(shape.rows)
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.features = shape.features
        width = len(configs) * shape.dim
        side = 1024
        large = round(shape.dense_bytes * shape.dense_share / (4 * 2 * side))
        rest = round(shape.dense_bytes * (1 - shape.dense_share) / (4 * side * side))
        layers: list[nn.Module] = [nn.Linear(side, side) for _ in range(rest)]
        if large:  # two: in and out again
            layers += [nn.Linear(side, 2 * large), nn.Linear(2 * large, 1)]
        self.top = nn.Sequential(nn.Linear(width, side if layers else 16), *layers)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        found = self.ebc(ids)
        loss: torch.Tensor = self.top(torch.cat([found[name] for name in self.features], 1)).square().mean()
        return loss


@dataclass
class Job:
    """A live job, and all tensors of its tables here: views of what it trains."""

    shape: Shape
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def train(self, ids: list[torch.Tensor], bags: int = 1) -> torch.Tensor:
        """One step, on ids of each table; every ``len(ids[n]) / bags`` of them make a bag. Returns this rank's loss."""
        self.optimizer.zero_grad()
        loss: torch.Tensor = self.model(features(self.shape, ids, bags).to(torch.device(self.shape.device)))
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def sharded(self) -> dict[str, Any]:
        """Tables and optimizer states as TorchRec hands them out: sharded tensors, by name."""
        found = {**self.model.state_dict(), **states(self.model.fused_optimizer.state_dict()["state"])}
        return {name: value for name, value in found.items() if hasattr(value, "local_shards")}


def features(shape: Shape, ids: list[torch.Tensor], bags: int) -> KeyedJaggedTensor:
    """The ids of one step, in bags of one size a table."""
    lengths = [torch.full((bags,), len(each) // bags, dtype=torch.int32) for each in ids]
    return KeyedJaggedTensor(shape.features, torch.cat(ids), lengths=torch.cat(lengths))


def states(by_table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {f"optim.{name}": value for found in by_table.values() for name, value in found.items()}


def build(shape: Shape) -> Job:
    """(all ranks) A job whose first state is the same on every run."""
    torch.manual_seed(0)
    net, device = Net(shape), torch.device(shape.device)
    world = dist.get_world_size()
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    makers: dict[str, Callable[[int], Any]] = {
        "table_wise": lambda number: table_wise(rank=number % world, compute_kernel="fused"),
        "row_wise": lambda _: row_wise(compute_kernel="fused"),
    }
    placement = {f"t{number:02d}": makers[shape.sharding](number) for number in range(len(shape.rows))}
    plan = construct_module_sharding_plan(net.ebc, placement, sharder, world, world, device.type)
    model = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=device,
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    dense_optimizers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "sgd": lambda params: torch.optim.SGD(params, lr=0.01),
        "adam": lambda params: torch.optim.Adam(params, lr=0.001),
    }
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), dense_optimizers[shape.dense_optimizer]
    )
    job = Job(shape, model, CombinedOptimizer([model.fused_optimizer, dense]))
    for name, value in job.sharded().items():
        job.tensors |= {f"{name}.{number}": shard.tensor for number, shard in enumerate(value.local_shards())}
    return job


def join_group(folder: Path, rank: int, world: int, device: str = "cpu") -> None:
    """Make this process a rank."""
    join(device, folder / f"group-{world}", rank, world)


def spread(body: Callable[..., Any], world: int, folder: Path, *args: Any, device: str = "cpu") -> Any:
    """Run ``body(*args)`` on ``world`` fresh ranks of one group; what rank 0 returns."""
    (folder / f"group-{world}").unlink(missing_ok=True)
    return start_ranks(_rank, world, body, world, folder, device, args)


def first(
    body: Callable[..., float], world: int, folder: Path, state: str, places: Sequence[Path], *args: Any, **where: str
) -> float:
    """What ``body(*args)`` returns in processes that have allocated nothing before, as those of a restart have not.

    Args:
        body: (all ranks) Seconds of one load.
        world: Ranks.
        folder: For the group's file.
        state: ``WARM`` or ``COLD``: whether the page cache holds what lies in ``places``.
        places: Files and folders that are read.
        args: For ``body``.
        where: ``device``.
    """
    prepare(state, *places)
    return float(spread(body, world, folder, *args, **where))


def slowest(action: Callable[[], object], memory: int = 0) -> float:
    """(all ranks) Seconds that the slowest rank takes, with so many bytes of free memory at hand for each of them."""
    have_at_hand(memory)
    dist.barrier()
    return largest(timed(action))


def largest(value: float) -> float:
    """(all ranks) The largest of their values."""
    found = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found)


def _rank(rank: int, body: Callable[..., Any], world: int, folder: Path, device: str, args: tuple[Any, ...]) -> Any:
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // world))
    join_group(folder, rank, world, device)
    result = body(*args)
    dist.barrier()
    dist.destroy_process_group()
    return result
