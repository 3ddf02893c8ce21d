"""Small jobs in the shape of public TorchRec programs, with the lines that docs/migration.md adds to each.

Each job is a function ``job(watch, uri)``: built, restored and trained to its end, or to where ``watch`` stops it.
"""

from __future__ import annotations

import itertools
import multiprocessing
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper, OptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.model import Trainer, truth
from tests.wrapped import wrapped
from torchrec_stream_ckpt import GlobalSampler, GlobalStream, StreamCheckpointer, StreamConfig, TrackedLoader

EPOCHS, SAMPLES, BATCH = 3, 24, 4
DEVICE = torch.device("cpu")


def batch_of(numbers: list[int]) -> Batch:
    """The samples of these numbers, of none too."""
    values = torch.tensor(numbers, dtype=torch.int64)
    ids = torch.cat([7 * values % 40, 3 * values % 60])
    sparse = KeyedJaggedTensor(["user", "item"], ids, lengths=torch.ones_like(ids))
    return Batch(torch.empty(len(numbers), 0), sparse, values)


def user_and_item() -> EmbeddingBagCollection:
    """Tables for the ids of a sample, of 8 columns each."""
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=8, feature_names=[name])
        for name, rows in (("user", 40), ("item", 60))
    ]
    return EmbeddingBagCollection(tables=tables, device=torch.device("meta"))


class Net(nn.Module):
    """Two tables under a dense layer; returns the loss, and the numbers of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc = user_and_item()
        self.over = nn.Sequential(nn.Linear(16, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        found = self.ebc(batch.sparse_features)
        scores = self.over(torch.cat([found["user"], found["item"]], 1))
        loss = (scores - 1).square().sum() * dist.get_world_size() / BATCH
        return loss, (loss.detach(), batch.labels)


def build() -> DistributedModelParallel:
    """The sharded model: one table on the first rank, the other one on the last."""
    torch.manual_seed(5)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    places = {"t_user": table_wise(rank=0), "t_item": table_wise(rank=dist.get_world_size() - 1)}
    return wrapped(Net(), places, EmbeddingBagCollectionSharder(fused_params=fused))


def combined(model: DistributedModelParallel) -> CombinedOptimizer:
    dense = dict(in_backward_optimizer_filter(model.named_parameters()))
    made = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=0.1))
    return CombinedOptimizer([model.fused_optimizer, made])


class Stopped(Exception):  # noqa: N818
    """The job was stopped after its marker."""


@dataclass
class Watch:
    """What a run trained, and its state where it began and where it ended."""

    stop: int | None
    losses: list[float] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    begun: dict[str, torch.Tensor] = field(default_factory=dict)
    ended: dict[str, torch.Tensor] = field(default_factory=dict)
    first: int = 0
    """Step that the run began at."""

    def restored(self, ckpt: StreamCheckpointer, model: Any, optimizer: Any) -> None:
        self._state = lambda: truth(Trainer(model, optimizer, _torch_part(optimizer)))
        self.first, self.begun = ckpt.steps, self._state()

    def step(self, ckpt: StreamCheckpointer, output: tuple[torch.Tensor, torch.Tensor]) -> None:
        """After ``ckpt.step()``."""
        loss, numbers = output
        self.losses.append(loss.item())
        self.samples.append(numbers.tolist())
        if ckpt.steps == self.stop:
            ckpt.mark().result(60)
            self.end()
            ckpt.close(outcome="failed")
            raise Stopped

    def end(self) -> None:
        self.ended = self._state()
        del self._state


def _torch_part(optimizer: Any) -> Any:
    """The optimizer of torch inside."""
    if isinstance(optimizer, CombinedOptimizer):
        optimizer = optimizer.optimizers[-1][1]
    return optimizer._optimizer if isinstance(optimizer, KeyedOptimizerWrapper) else optimizer


def run(job: str, uri: str, stop: int | None) -> Watch:
    """Start a job; it goes on from its newest marker."""
    watch = Watch(stop)
    multiprocessing.current_process()._config["daemon"] = False  # a rank may have workers
    try:
        JOBS[job](watch, StreamConfig(uri=uri, marker_every=None))
        watch.end()
    except Stopped:
        pass
    return watch


# --------------------------------------------------------------------------------- the shape of facebookresearch/dlrm


class ReadyMade(IterableDataset[Batch]):
    """Batches as they stand in a file, the part of one rank."""

    def __init__(self, rank: int, world: int) -> None:
        self.rank, self.world = rank, world

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self.rank, SAMPLES // 2, self.world):
            yield batch_of([2 * number, 2 * number + 1])


class LRPolicyScheduler(lr_scheduler.LRScheduler):
    """It warms up, decays, and then holds the last rates, of which it has a list."""

    def get_lr(self) -> list[float]:
        if self.last_epoch < 6:
            self.last_lr = [base / (1 + self.last_epoch) for base in self.base_lrs]
        return self.last_lr


def dlrm(watch: Watch, config: StreamConfig) -> None:
    """A limit on batches, a pipeline, a schedule over fused and dense groups, an evaluation after each epoch."""
    rank, world_size, epochs = dist.get_rank(), dist.get_world_size(), EPOCHS
    model = build()
    optimizer = combined(model)
    lr_scheduler = LRPolicyScheduler(optimizer)
    limit_train_batches = 4 if world_size < 3 else 3
    batches = ReadyMade(rank=0, world=1)
    stream = GlobalStream(
        batches, batch_size=1, per_rank=True, rank=rank, world=world_size, drop_last=True, collate_fn=itemgetter(0)
    )
    train_dataloader = TrackedLoader(DataLoader(stream, batch_size=None), limit=limit_train_batches)
    val_dataloader = DataLoader(ReadyMade(rank, world_size), batch_size=None)
    train_pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    val_pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    ckpt = StreamCheckpointer(
        model, optimizer, config=config, stateful={"loader": train_dataloader, "schedule": lr_scheduler}
    )
    ckpt.restore()
    watch.restored(ckpt, model, optimizer)
    for epoch in range(train_dataloader.epoch, epochs):  # noqa: B007
        model.train()
        iterator = iter(train_dataloader)
        for _ in itertools.count(1):
            try:
                output = train_pipeline.progress(iterator)
                lr_scheduler.step()
                ckpt.step()
            except StopIteration:
                break
            watch.step(ckpt, output)
        _evaluate(model, val_pipeline, val_dataloader)
    ckpt.mark().result()
    ckpt.close()


def _evaluate(model: nn.Module, pipeline: TrainPipelineSparseDist, loader: DataLoader) -> None:
    model.eval()
    iterator = itertools.islice(iter(loader), 2)
    with torch.no_grad():
        while True:
            try:
                pipeline.progress(iterator)
            except StopIteration:
                return


# ---------------------------------------------------------------------------- the shape of TorchRec's golden_training


class RandomBatches(IterableDataset[Batch]):
    """Endless; each pass has the same batches, made from the seed."""

    def __init__(self, manual_seed: int) -> None:
        generator = torch.Generator().manual_seed(manual_seed)
        self.made = [batch_of(torch.randint(0, 1000, (2,), generator=generator).tolist()) for _ in range(10)]

    def __iter__(self) -> Iterator[Batch]:
        return itertools.cycle(self.made)


def golden(watch: Watch, config: StreamConfig) -> None:
    """A number of iterations over an endless iterable, without a DataLoader; the optimizer is the dense one alone."""
    rank, num_iterations = dist.get_rank(), 12
    model = build()
    non_fused_optimizer = combined(model).optimizers[-1][1]
    train_pipeline = TrainPipelineSparseDist(model, non_fused_optimizer, DEVICE)
    train_loader = TrackedLoader(RandomBatches(manual_seed=rank), skip=True)
    ckpt = StreamCheckpointer(model, non_fused_optimizer, config=config, stateful={"loader": train_loader})
    ckpt.restore()
    watch.restored(ckpt, model, non_fused_optimizer)
    train_iterator = iter(train_loader)
    for _ in range(ckpt.steps, num_iterations):
        output = train_pipeline.progress(train_iterator)
        ckpt.step()
        watch.step(ckpt, output)
    ckpt.mark().result()
    ckpt.close()


# ----------------------------------------------------------------------------------- the shape of TorchRec's bert4rec


def bert4rec(watch: Watch, config: StreamConfig) -> None:
    """A map-style dataset in workers, an order of its own in each epoch, StepLR after each epoch."""
    rank, world_size, epochs = dist.get_rank(), dist.get_world_size(), EPOCHS
    model = build()
    optimizer = combined(model)
    lr_scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    dataset = TensorDataset(torch.arange(SAMPLES))
    train_sampler = GlobalSampler(
        dataset, batch_size=2, per_rank=True, rank=rank, world=world_size, shuffle=True, drop_last=True
    )
    train_loader = TrackedLoader(DataLoader(dataset, batch_sampler=train_sampler, num_workers=1))
    ckpt = StreamCheckpointer(
        model, optimizer, config=config, stateful={"loader": train_loader, "schedule": lr_scheduler}
    )
    ckpt.restore()
    watch.restored(ckpt, model, optimizer)
    for epoch in range(train_loader.epoch, epochs):
        assert train_loader.epoch == epoch
        loss_logs = []
        for (numbers,) in train_loader:
            optimizer.zero_grad()
            loss, output = model(batch_of(numbers.tolist()))
            loss.backward()
            optimizer.step()
            ckpt.step()
            loss_logs.append(loss.item())
            watch.step(ckpt, output)
        lr_scheduler.step()
    ckpt.mark().result()
    ckpt.close()


# ---------------------------------------------------------------------------------- the shape of TorchRec's two_tower


def two_tower(watch: Watch, config: StreamConfig) -> None:
    """Adam over all parameters, the fused ones included; a plain DataLoader; a number of iterations."""
    rank, num_iterations = dist.get_rank(), 12
    model = build()
    optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: torch.optim.Adam(params, lr=0.01),
    )
    dataloader = DataLoader(RandomBatches(manual_seed=rank), batch_size=None)
    dataloader = TrackedLoader(dataloader, skip=True)
    ckpt = StreamCheckpointer(model, optimizer, config=config, stateful={"loader": dataloader})
    ckpt.restore()
    watch.restored(ckpt, model, optimizer)
    dl_iterator = iter(dataloader)
    train_pipeline = TrainPipelineSparseDist(model, optimizer, DEVICE)
    for _ in range(ckpt.steps, num_iterations):
        output = train_pipeline.progress(dl_iterator)
        ckpt.step()
        watch.step(ckpt, output)
    ckpt.mark().result()
    ckpt.close()


# ------------------------------------------------------------------------------- a wrapper as TorchEasyRec's optimizer


class CountingOptimizer(OptimizerWrapper):
    """It accumulates gradients over ``every`` calls; its counter is in no state of its own."""

    def __init__(self, optimizer: Any, every: int) -> None:
        super().__init__(optimizer)
        self._step, self._every = 0, every

    def zero_grad(self, set_to_none: bool = False) -> None:
        if self._step % self._every == 0:
            self._optimizer.zero_grad(set_to_none=set_to_none)

    def step(self, closure: Any = None) -> None:
        self._step += 1
        if self._step % self._every == 0:
            self._optimizer.step(closure=closure)


class StepOf:
    def __init__(self, wrapper):
        self.wrapper = wrapper

    def state_dict(self):
        return {"step": self.wrapper._step}

    def load_state_dict(self, state):
        self.wrapper._step = state["step"]


def easyrec(watch: Watch, config: StreamConfig) -> None:
    """The checkpointer gets the optimizer inside, and the counter of the wrapper apart."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = combined(model)
    wrapper = CountingOptimizer(optimizer, 2)
    sampler = GlobalSampler(SAMPLES, batch_size=BATCH, rank=rank, world=world_size)
    loader = TrackedLoader(DataLoader(range(SAMPLES), batch_sampler=sampler, collate_fn=batch_of))
    ckpt = StreamCheckpointer(
        model, optimizer, config=config, stateful={"loader": loader, "optimizer_step": StepOf(wrapper)}
    )
    ckpt.restore()
    watch.restored(ckpt, model, optimizer)
    for _ in range(loader.epoch, EPOCHS):
        for batch in loader:
            wrapper.zero_grad()
            loss, output = model(batch)
            loss.backward()
            wrapper.step()
            ckpt.step()
            watch.step(ckpt, output)
    ckpt.mark().result()
    ckpt.close()


JOBS = {"dlrm": dlrm, "golden": golden, "bert4rec": bert4rec, "two_tower": two_tower, "easyrec": easyrec}
