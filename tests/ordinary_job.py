"""A two-tower job after TorchRec's tutorial, with workers, a schedule, an evaluation, and checkpoints by the docs."""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.programs import DEVICE, Stopped, Watch, user_and_item
from torchrec_stream_ckpt import (
    GlobalSampler,
    GlobalStream,
    StreamCheckpointer,
    StreamConfig,
    TrackedLoader,
    sample_generator,
)

EPOCHS, SAMPLES, BATCH = 3, 26, 4
"""The last batch of an epoch has two samples: on three ranks one of them has none."""
BETWEEN = 0
"""The stop that is after the first epoch, with what the loop does between two epochs."""
Sample = tuple[int, int, int]


class Ratings(Dataset[Sample]):
    """(number, user, item); the item is drawn for the sample and epoch."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> Sample:
        return int(number), 7 * number % 40, int(torch.randint(0, 60, (), generator=sample_generator(number)))


class Events(IterableDataset[Sample]):
    """The same as a stream, without the draw."""

    def __iter__(self) -> Iterator[Sample]:
        return ((number, 7 * number % 40, 3 * number % 60) for number in range(SAMPLES))


def collate(size: int, samples: list[Sample]) -> Batch:
    """A batch of these samples, filled up with samples that have no ids, and the label -1."""
    numbers, users, items = torch.tensor(samples, dtype=torch.int64).reshape(-1, 3).T
    real = torch.arange(size) < len(samples)
    sparse = KeyedJaggedTensor(["user", "item"], torch.cat([users, items]), lengths=torch.cat([real, real]).int())
    labels = torch.full((size,), -1)
    labels[: len(samples)] = numbers
    return Batch(torch.empty(size, 0), sparse, labels)


class TwoTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ebc = user_and_item()
        self.user, self.item = (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 4)) for _ in range(2))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        found = self.ebc(batch.sparse_features)
        scores = (self.user(found["user"]) * self.item(found["item"])).sum(1)
        real = batch.labels >= 0
        loss = ((scores - 1).square() * real).sum() * dist.get_world_size() / BATCH
        return loss, (loss.detach(), batch.labels[real])


def build() -> tuple[DistributedModelParallel, CombinedOptimizer]:
    from tests.wrapped import wrapped

    torch.manual_seed(5)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    places = {"t_user": table_wise(rank=dist.get_world_size() - 1), "t_item": row_wise()}
    model = wrapped(TwoTower(), places, sharder)
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    made = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, lr=0.01))
    return model, CombinedOptimizer([model.fused_optimizer, made])


@dataclass(frozen=True)
class Kind:
    """How a job loads, schedules and trains."""

    loader: str
    schedule: str
    pipeline: bool = False
    accumulate: int = 1


KINDS = {
    "workers, accumulation": Kind("sampler", "one cycle", accumulate=2),
    "stream, pipeline": Kind("stream", "sequential", pipeline=True),
    "workers, pipeline": Kind("sampler", "sequential", pipeline=True),
    "workers, pipeline, plateau": Kind("sampler", "plateau", pipeline=True),
}


def load(kind: str, rank: int, world: int) -> TrackedLoader[Batch]:
    more: dict[str, Any] = {"num_workers": 2, "prefetch_factor": 3}
    if kind == "stream":
        filled = functools.partial(collate, -(-BATCH // world))
        stream = GlobalStream(Events(), batch_size=BATCH, rank=rank, world=world, collate_fn=filled)
        return TrackedLoader(DataLoader(stream, batch_size=None, **more))
    data = Ratings()
    sampler = GlobalSampler(data, batch_size=BATCH, rank=rank, world=world, shuffle=True)
    filled = functools.partial(collate, sampler.largest_part)
    return TrackedLoader(DataLoader(data, batch_sampler=sampler, collate_fn=filled, **more))


def schedule_of(kind: str, optimizer: Any) -> Any:
    if kind == "plateau":
        return lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.5)
    if kind == "one cycle":
        return lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=40, cycle_momentum=False)
    parts = [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 4), lr_scheduler.CosineAnnealingLR(optimizer, 20)]
    return lr_scheduler.SequentialLR(optimizer, parts, [4])


def evaluate(model: nn.Module, pipeline: TrainPipelineSparseDist | None, loader: DataLoader[Any]) -> float:
    """The mean loss over all ranks. A model that a pipeline has rewritten runs in pipelines only."""
    model.eval()
    batches, loss = iter(loader), torch.zeros(())
    with torch.no_grad(), contextlib.suppress(StopIteration):
        while True:
            loss += pipeline.progress(batches)[0] if pipeline is not None else model(next(batches))[0]
    model.train()
    dist.all_reduce(loss)
    return float(loss)


def train(name: str, uri: str, stop: int | None) -> Watch:
    """Start the job; it goes on from its newest marker."""
    multiprocessing.current_process()._config["daemon"] = False  # a rank may have workers
    kind, watch = KINDS[name], Watch(stop)
    rank, world = dist.get_rank(), dist.get_world_size()
    model, optimizer = build()
    schedule, loader = schedule_of(kind.schedule, optimizer), load(kind.loader, rank, world)
    ours = GlobalSampler(SAMPLES, batch_size=6, rank=rank, world=world)
    filled = functools.partial(collate, ours.largest_part)
    evaluation = DataLoader(Ratings(), batch_sampler=ours, collate_fn=filled, generator=torch.Generator())
    config = StreamConfig(uri=uri, marker_every=None)
    held = {"loader": loader, "schedule": schedule}
    with (
        contextlib.suppress(Stopped),
        StreamCheckpointer(model, optimizer, config=config, stateful=held) as ckpt,
    ):
        ckpt.restore()
        watch.restored(ckpt, model, optimizer)
        pipeline, other = (
            TrainPipelineSparseDist(model, optimizer, DEVICE) if kind.pipeline else None for _ in range(2)
        )
        for _ in range(loader.epoch, EPOCHS):
            for output in _steps(kind, model, optimizer, pipeline, loader, ckpt):
                if kind.schedule != "plateau":
                    schedule.step()
                ckpt.step()
                watch.step(ckpt, output)
            loader.end_epoch()
            loss = evaluate(model, other, evaluation)
            if kind.schedule == "plateau":
                schedule.step(loss)
            if stop == BETWEEN:
                watch.stop = ckpt.steps
                watch.step(ckpt, output)
        ckpt.mark().result()
        watch.end()
    del loader, evaluation
    gc.collect()  # workers outlive a rank that is killed: their parent is the fork server
    return watch


def _steps(kind: Kind, model: Any, optimizer: Any, pipeline: Any, loader: Any, ckpt: StreamCheckpointer) -> Any:
    if pipeline is not None:
        batches = iter(loader)
        with contextlib.suppress(StopIteration):
            while True:
                yield pipeline.progress(batches)
        return
    for batch in loader:
        if ckpt.steps % kind.accumulate == 0:
            optimizer.zero_grad()
        loss, output = model(batch)
        loss.backward()
        if (ckpt.steps + 1) % kind.accumulate == 0:
            optimizer.step()
        yield output
