"""What runs and recoveries share: the workloads, the settings of a run, how ours is attached."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
from data import CRITEO_ROWS
from job import Job, Shape

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

SYNTHETIC = Shape((80_000,) * 8, dense_optimizer="adam")
SAMPLES = {"synthetic-10k": 10_000, "synthetic-25k": 25_000, "synthetic-50k": 50_000}
"""The thesis' data sizes: samples of an epoch, over the same tables (DLRM's --data-size)."""
SHAPES = {
    "synthetic": SYNTHETIC,
    **dict.fromkeys(SAMPLES, SYNTHETIC),
    "criteo": Shape(CRITEO_ROWS, dense_optimizer="adam"),
}
STEPS = 3
"""Of an epoch of the other workloads."""
BATCH, QUICK_BATCH = 2048, 64
RING_BYTES = 512 << 20
QUICK_ROWS = 20
"""With ``--quick``: one row of so many."""


@dataclass(frozen=True)
class Setting:
    """What the flags say of a run."""

    workload: str
    rounds: int
    epochs: int
    ids: int
    quick: bool
    fsync: tuple[str, ...]
    bootstrap: str = ""
    """Of a broker; empty: the log is a folder."""
    each_step: bool = False
    """Whether both sides are also timed as they stream each step."""
    every: tuple[int, ...] = (1, 2, 3)
    """Epochs between two checkpoints, one for each point."""
    direct: bool = False
    """True if ours is also timed with direct writes of the log."""


@dataclass(frozen=True)
class State:
    """What a job has, by name."""

    tables: dict[str, torch.Tensor]
    rest: dict[str, torch.Tensor]
    """Optimizer states and dense state."""

    @classmethod
    def of(cls, job: Job) -> State:
        tables = {name: each for name, each in job.tensors.items() if each.dim() == 2}
        dense = {name: each for name, each in job.model.state_dict().items() if not hasattr(each, "local_shards")}
        return cls(tables, dense | {name: each for name, each in job.tensors.items() if each.dim() == 1})


def batches(workload: str, quick: bool) -> list[int]:
    """Samples of each step of an epoch, over all ranks; the last one has what is left, as in DLRM."""
    batch = QUICK_BATCH if quick else BATCH
    samples = SAMPLES.get(workload, STEPS * BATCH) * batch // BATCH
    return [min(batch, samples - begin) for begin in range(0, samples, batch)]


def shape_of(workload: str, quick: bool) -> Shape:
    """The tables of a workload."""
    shape = SHAPES[workload]
    return replace(shape, rows=tuple(max(3, rows // QUICK_ROWS) for rows in shape.rows)) if quick else shape


def attach(
    job: Job,
    uri: str,
    store: Path,
    *,
    head: str | None = None,
    drain_every: int = 1,
    log_writes: Literal["buffered", "direct"] = "buffered",
) -> StreamCheckpointer:
    config = StreamConfig(
        uri=uri,
        store=str(store),
        marker_every=None,
        drain_every=drain_every,
        ring_bytes=RING_BYTES,
        head=head,
        log_writes=log_writes,
    )
    return StreamCheckpointer(job.model, job.optimizer, config=config)
