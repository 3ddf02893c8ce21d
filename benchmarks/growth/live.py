"""A trainer of one rank with many of something, and what each of its calls costs: built and trained in one process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axes import Sizes
from common import without_fsync
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import column_wise, table_wise
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.wrapped import wrapped
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

Measure = Callable[[str, Callable[[], Any]], Any]
"""Takes the name of a call, and makes it."""


@dataclass(frozen=True)
class Shape:
    """How many of each a job has."""

    tables: int = 2
    features: int = 1
    """Features of each table."""
    rows: int = 8
    columns: int = 4
    parts: int = 1
    """Column shards of each table."""
    tensors: int = 2
    stateful: int = 1
    markers: int = 1
    """Markers before the measured one."""


@dataclass(frozen=True)
class LiveAxis:
    """One thing of a live job that grows, all else small."""

    what: str
    shape: Callable[[int], Shape]
    small: Sizes
    full: Sizes


class Counter:
    """A stateful object of the job."""

    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Net(nn.Module):
    """Tables, and dense parameters that are multiplied with what is looked up."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        tables = [
            EmbeddingBagConfig(
                name=f"t{number:05d}",
                num_embeddings=shape.rows,
                embedding_dim=shape.columns,
                feature_names=[f"f{number:05d}_{each:04d}" for each in range(shape.features)],
            )
            for number in range(shape.tables)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.ParameterList(nn.Parameter(torch.ones(2)) for _ in range(shape.tensors))

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        looked_up = self.ebc(features).values().sum()
        return looked_up * torch.stack([each.sum() for each in self.over]).mean()


class Live:
    """A trainer: built, and able to do one step."""

    def __init__(self, shape: Shape) -> None:
        torch.manual_seed(3)
        net = Net(shape)
        sharder = EmbeddingBagCollectionSharder(
            fused_params={"optimizer": EmbOptimType.EXACT_ADAGRAD, "learning_rate": 0.1}
        )
        place = table_wise(rank=0) if shape.parts == 1 else column_wise(ranks=[0] * shape.parts)
        names = [f"t{number:05d}" for number in range(shape.tables)]
        self.model = wrapped(net, dict.fromkeys(names, place), sharder)
        dense = dict(in_backward_optimizer_filter(self.model.named_parameters()))
        adam = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
        self.optimizer = CombinedOptimizer([self.model.fused_optimizer, adam])
        self.stateful = {f"object_{number:05d}": Counter() for number in range(shape.stateful)}
        keys = [f"f{table:05d}_{each:04d}" for table in range(shape.tables) for each in range(shape.features)]
        ones = torch.ones(len(keys), dtype=torch.int64)
        self._batch = KeyedJaggedTensor(keys, ones, lengths=ones)

    def train(self) -> None:
        self.optimizer.zero_grad()
        self.model(self._batch).backward()
        self.optimizer.step()

    def attach(self, uri: str) -> StreamCheckpointer:
        config = StreamConfig(uri=uri, marker_every=None, ring_bytes=2**22, marker_budget_bytes=2**22)
        return StreamCheckpointer(self.model, self.optimizer, config=config, stateful=self.stateful)


def job_of(shape: Shape, measure: Measure) -> None:
    """Run a job to a marker, and a second one that goes on from it; ``measure`` makes each of their calls."""
    with tempfile.TemporaryDirectory() as folder, without_fsync():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.FileStore(f"{folder}/ranks", 1))
        try:
            uri = f"file://{Path(folder) / 'log'}"
            job = Live(shape)
            ckpt = measure("attach", lambda: job.attach(uri))
            measure("restore, nothing there", ckpt.restore)
            job.train()
            measure("first step", ckpt.step)
            for _ in range(shape.markers):
                job.train()
                ckpt.step()
                ckpt.mark().result(300)
            job.train()
            measure("step", ckpt.step)
            job.train()
            ckpt.step()
            measure("drain, mark and commit", lambda: ckpt.mark().result(300))
            measure("close", ckpt.close)
            other = Live(shape)
            ckpt = measure("attach to a marker", lambda: other.attach(uri))
            measure("plan", ckpt.plan)
            measure("restore", ckpt.restore)
            other.train()
            ckpt.step()
            ckpt.close()
        finally:
            dist.destroy_process_group()


LIVE_CALLS = (
    "attach",
    "restore, nothing there",
    "first step",
    "step",
    "drain, mark and commit",
    "close",
    "attach to a marker",
    "plan",
    "restore",
)
LIVE = {
    "live tables": LiveAxis("tables of a trainer", lambda n: Shape(tables=n), (10, 20, 40), (300, 600, 1200)),
    "features": LiveAxis("features of each table", lambda n: Shape(features=n), (10, 20, 40), (250, 500, 1000)),
    "live column shards": LiveAxis(
        "column shards of a table", lambda n: Shape(tables=1, columns=4 * n, parts=n), (4, 8, 16), (64, 128, 256)
    ),
    "live rows": LiveAxis(
        "rows of a table of 4 columns",
        lambda n: Shape(tables=1, rows=n),
        (1000, 2000, 4000),
        (1_000_000, 2_000_000, 4_000_000),
    ),
    "dense tensors": LiveAxis("dense tensors", lambda n: Shape(tensors=n), (20, 40, 80), (1000, 2000, 4000)),
    "stateful objects": LiveAxis("stateful objects", lambda n: Shape(stateful=n), (10, 20, 40), (500, 1000, 2000)),
    "live markers": LiveAxis("markers before", lambda n: Shape(markers=n), (4, 8, 16), (50, 100, 200)),
    "live markers x tables": LiveAxis(
        "markers x tables, as many of each",
        lambda n: Shape(tables=math.isqrt(n), markers=math.isqrt(n)),
        (16, 64, 256),
        (256, 1024, 4096),
    ),
}
