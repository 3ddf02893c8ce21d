"""A trainer with many of something, and what each of its calls costs: one rank, or two of which one has no table."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from axis import Axis
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
from torchrec_stream_ckpt import Changes, StreamCheckpointer, StreamConfig

PROOF_BYTES: int = next(field.default for field in fields(StreamConfig) if field.name == "proof_bytes")
"""Default of the setting."""
RING_BYTES = 2**22
"""Ring of a trainer, and budget of its markers."""
Measure = Callable[[str, Callable[[], Any]], Any]
"""Takes the name of a call, and makes it."""


@dataclass(frozen=True)
class Shape:
    """How many of each a job has."""

    tables: int = 2
    features: int = 1
    """Features of each table."""
    rows: int = 8
    columns: int = 8
    parts: int = 1
    """Column shards of each table."""
    holder: int = 0
    """The rank that has all tables."""
    tensors: int = 2
    elements: int = 2
    """Elements of each dense tensor."""
    stateful: int = 1
    markers: int = 1
    """Markers before the measured one."""
    world: int = 1

    def resharded(self) -> Shape:
        """The same model under another plan: other column shards, on another rank if there is one."""
        return replace(self, parts=2 if self.parts == 1 else 1, holder=0)

    def evolved(self) -> Shape:
        """A row more in each table, and a table more."""
        return replace(self, tables=self.tables + 1, rows=self.rows + 1)

    def changes(self) -> Changes:
        """What :meth:`evolved` changes."""
        return Changes(
            added=(f"ebc.{name_of(self.tables)}",),
            rows={f"ebc.{name_of(number)}": self.rows + 1 for number in range(self.tables)},
        )

    def bound_bytes(self) -> int:
        """Memory of one rank by the sum in docs/guarantees.md (P5)."""
        row_bytes = 4 * self.columns * 2  # the weight and Adagrad's state
        rows, kernels = self.tables * self.rows, max(1, self.parts)
        proved = min(9 * PROOF_BYTES // 8, rows * row_bytes)
        dense = 4 * self.elements * (3 * self.tensors + 1)  # parameters and Adam's two states, and one tensor again
        return (
            2 * RING_BYTES
            + 3 * rows * kernels
            + 8 * rows
            + dense
            + proved
            + 8 * (proved // row_bytes)
            + (self.markers + 1) * (1500 + 25 * self.world)
            + 40_000 * self.tensors
            + 20_000 * self.tables
            + 13_000 * self.stateful
        )


def name_of(table: int) -> str:
    return f"t{table:05d}"


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
                name=name_of(number),
                num_embeddings=shape.rows,
                embedding_dim=shape.columns,
                feature_names=[f"f{number:05d}_{each:04d}" for each in range(shape.features)],
            )
            for number in range(shape.tables)
        ]
        self.ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
        self.over = nn.ParameterList(nn.Parameter(torch.ones(shape.elements)) for _ in range(shape.tensors))

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
        whole = shape.parts == 1
        place = table_wise(rank=shape.holder) if whole else column_wise(ranks=[shape.holder] * shape.parts)
        names = [name_of(number) for number in range(shape.tables)]
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
        config = StreamConfig(
            uri=uri,
            marker_every=None,
            drain_every=2,
            ring_bytes=RING_BYTES,
            marker_budget_bytes=RING_BYTES,
        )
        return StreamCheckpointer(self.model, self.optimizer, config=config, stateful=self.stateful)


def job_of(shape: Shape, folder: Path, rank: int, measure: Measure) -> None:
    """(each rank) Run a job to a marker, and others from it; ``measure`` makes each of their calls.

    Args:
        shape: How many of each.
        folder: Empty folder that all ranks see.
        rank: This one.
        measure: Makes a call.
    """
    with without_fsync():
        dist.init_process_group(
            "gloo", rank=rank, world_size=shape.world, store=dist.FileStore(str(folder / "ranks"), shape.world)
        )
        try:
            uri = f"file://{folder / 'log'}"
            _trained(shape, uri, measure)
            _continued(shape, uri, measure)
        finally:
            dist.destroy_process_group()


def _trained(shape: Shape, uri: str, measure: Measure) -> None:
    job = Live(shape)
    ckpt = measure("attach", lambda: job.attach(uri))
    measure("restore, nothing there", ckpt.restore)
    job.train()
    measure("first step", ckpt.step)
    measure("markers before", lambda: _mark(job, ckpt, shape.markers))
    while not ckpt.steps % 2:
        job.train()
        ckpt.step()
    job.train()
    measure("drain", ckpt.step)
    job.train()
    measure("step", ckpt.step)
    marker = measure("mark", ckpt.mark)
    measure("commit", lambda: marker.result(300))
    measure("close", ckpt.close)


def _mark(job: Live, ckpt: StreamCheckpointer, count: int) -> None:
    """So many steps and markers. The first marker makes memory that later ones use again."""
    for _ in range(count):
        job.train()
        ckpt.step()
        ckpt.mark().result(300)


def _continued(shape: Shape, uri: str, measure: Measure) -> None:
    """From the marker: with the same plan, with another one, and with another model."""
    resharded = Live(shape.resharded()).attach(uri)
    measure("restore, another plan", resharded.restore)
    resharded.close()
    other = Live(shape)
    ckpt = measure("attach to a marker", lambda: other.attach(uri))
    measure("plan", ckpt.plan)
    measure("restore", ckpt.restore)
    other.train()
    ckpt.step()
    ckpt.close()
    evolved = Live(shape.evolved()).attach(uri)
    measure("restore, another model", lambda: evolved.restore(changes=shape.changes()))
    evolved.close()


LIVE_CALLS = (
    "attach",
    "restore, nothing there",
    "first step",
    "markers before",
    "drain",
    "step",
    "mark",
    "commit",
    "close",
    "restore, another plan",
    "attach to a marker",
    "plan",
    "restore",
    "restore, another model",
)
TRAINING = LIVE_CALLS[:9]
"""Calls of the first trainer."""


def _live(what: str, shape: Callable[[int], Shape], small: int, far: int, ratio: int = 2) -> Axis:
    return Axis(what, shape, small, far, ratio, kind="trainer")


LIVE = {
    "live tables": _live("tables of a trainer", lambda n: Shape(tables=n), 40, 600),
    "live tables of one rank": _live(
        "tables of a trainer, all on one of two ranks", lambda n: Shape(tables=n, world=2, holder=1), 40, 400
    ),
    "features": _live("features of each table", lambda n: Shape(features=n), 40, 500),
    "live column shards": _live("column shards of a table", lambda n: Shape(tables=1, columns=4 * n, parts=n), 16, 128),
    "live rows": _live("rows of a table of 8 columns", lambda n: Shape(tables=1, rows=n), 4000, 2_000_000),
    "dense tensors": _live("dense tensors", lambda n: Shape(tensors=n), 80, 2000),
    "dense bytes": _live("bytes of each of two dense tensors", lambda n: Shape(elements=n // 4), 4096, 2**26),
    "stateful objects": _live("stateful objects", lambda n: Shape(stateful=n), 40, 2000),
    "live markers": _live("markers before", lambda n: Shape(markers=n), 16, 100),
    "live markers x tables": _live(
        "markers x tables, as many of each",
        lambda n: Shape(tables=math.isqrt(n), markers=math.isqrt(n)),
        256,
        1024,
        4,
    ),
}
