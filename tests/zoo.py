"""Training of the models of ``tests.zoo_models``, in all its ways, and the truth about them by plain code."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests.model import assemble
from tests.packed import gathered
from tests.zoo_models import GLOBAL_BATCH, MAX_LENGTH, Job, Model, Part, Plan, build
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

warnings.filterwarnings("ignore")


@dataclass(frozen=True)
class Column:
    """One feature of this rank's slice of a batch."""

    ids: torch.Tensor
    lengths: torch.Tensor
    weights: torch.Tensor
    bags: torch.Tensor
    """The bag of each sample; with a batch size of its own, a feature has fewer bags than samples."""


def batch(model: Model, number: int, *, starved: str = "none") -> tuple[list[KeyedJaggedTensor], torch.Tensor]:
    """This rank's slice of global batch ``number``, by part; ``starved`` ranks (none | first | all) get no ids."""
    rank, world = dist.get_rank(), dist.get_world_size()
    generator = torch.Generator().manual_seed(1000 + number)
    target = torch.randn(GLOBAL_BATCH, generator=generator)
    low, high = rank * GLOBAL_BATCH // world, (rank + 1) * GLOBAL_BATCH // world
    empty = starved == "all" or (starved == "first" and rank == 0)
    columns = {
        feature: _column(model, rows, _bags(model, position, (low, high), generator), generator, empty=empty)
        for position, (feature, rows) in enumerate(model.rows().items())
    }
    return [_sparse(model, part, columns) for part in model.parts], target[low:high]


def _bags(model: Model, position: int, samples: tuple[int, int], generator: torch.Generator) -> torch.Tensor:
    """The global bag of each of this rank's samples, for the feature at ``position``."""
    shuffled = torch.randint(0, GLOBAL_BATCH, (GLOBAL_BATCH,), generator=generator)[slice(*samples)]
    own = torch.arange(*samples)
    return {"": own, "even": samples[0] + (own - samples[0]) % (1 + position % 3), "ragged": shuffled}[model.vbe]


def _column(model: Model, rows: int, bags: torch.Tensor, generator: torch.Generator, *, empty: bool) -> Column:
    length = torch.randint(0, MAX_LENGTH + 1, (GLOBAL_BATCH,), generator=generator)
    ids = (torch.rand(GLOBAL_BATCH, MAX_LENGTH, generator=generator) ** 3 * rows).long().clamp_(max=rows - 1)
    ids[:, 1] = ids[:, 0]  # an id that is repeated inside a bag
    weights = torch.rand(GLOBAL_BATCH, MAX_LENGTH, generator=generator)
    distinct, bags = bags.unique(return_inverse=True)
    lengths = torch.zeros_like(distinct) if empty else length[distinct]
    there = torch.arange(MAX_LENGTH) < lengths.unsqueeze(1)
    kind = torch.int32 if model.int32 else torch.int64
    return Column(ids[distinct][there].to(kind), lengths.to(kind), weights[distinct][there], bags)


def _sparse(model: Model, part: Part, columns: dict[str, Column]) -> KeyedJaggedTensor:
    """The features of one part; new tensors, for feature processors and kernels write into them."""
    names = list(dict.fromkeys(feature for table in part.tables for feature in table.features))
    chosen = [columns[name] for name in names]
    return KeyedJaggedTensor(
        keys=names,
        values=torch.cat([column.ids for column in chosen]),
        lengths=torch.cat([column.lengths for column in chosen]),
        weights=torch.cat([column.weights for column in chosen]) if part.kind == "weighted" else None,
        stride_per_key_per_rank=[[column.lengths.numel()] for column in chosen] if model.vbe else None,
        inverse_indices=(names, torch.stack([column.bags for column in chosen])) if model.vbe else None,
    )


# What happens between two markers.


def _loss(job: Job, number: int, **how: Any) -> torch.Tensor:
    return job.dmp(*batch(job.model, number, **how))


def _learn(job: Job, losses: list[torch.Tensor]) -> None:
    for loss in losses:
        loss.backward()
    job.optimizer.step()


def train(job: Job) -> None:
    job.optimizer.zero_grad()
    _learn(job, [_loss(job, job.step)])


def evaluate(job: Job) -> None:
    job.dmp.eval()
    with torch.no_grad():
        _loss(job, job.step)
    job.dmp.train()


def no_grad(job: Job) -> None:
    with torch.no_grad():
        _loss(job, job.step)


def skip_backward(job: Job) -> None:
    _loss(job, job.step)


def two_forwards(job: Job) -> None:
    job.optimizer.zero_grad()
    _learn(job, [_loss(job, job.step) + _loss(job, 5000 + job.step)])


def accumulate(job: Job) -> None:
    job.optimizer.zero_grad()
    for number in (job.step, 6000 + job.step):
        (_loss(job, number) / 2).backward()
    job.optimizer.step()


def again(job: Job) -> None:
    """The batch of the step before: the same rows stay hot."""
    job.optimizer.zero_grad()
    _learn(job, [_loss(job, job.step - 1)])


def empty(job: Job) -> None:
    job.optimizer.zero_grad()
    _learn(job, [_loss(job, job.step, starved="all")])


def empty_on_first(job: Job) -> None:
    job.optimizer.zero_grad()
    _learn(job, [_loss(job, job.step, starved="first")])


def schedule(job: Job) -> None:
    """A learning rate of this step."""
    for group in job.optimizer.param_groups:
        group["lr"] = 0.1 / (1 + job.step)
    train(job)


EVENTS: dict[str, Callable[[Job], None]] = {
    event.__name__: event
    for event in (
        train,
        evaluate,
        no_grad,
        skip_backward,
        two_forwards,
        accumulate,
        again,
        empty,
        empty_on_first,
        schedule,
    )
}
MARK = "mark"


def play(job: Job, checkpointer: StreamCheckpointer, events: tuple[str, ...]) -> None:
    """Go on with these events, each one a step, and note the truth at each ``mark``; two in a row have one between."""
    for before, event in pairwise(("", *events)):
        if event == MARK:
            if before == MARK:
                checkpointer.step()  # a boundary has one marker
            committed = checkpointer.mark().result(60)
            job.marks[str(committed.id)] = truth(job)
        else:
            job.step += 1
            EVENTS[event](job)
            checkpointer.step()


# The truth.


def truth(job: Job) -> dict[str, torch.Tensor]:
    """The whole state of the live job by plain TorchRec and FBGEMM code; the same on every rank, but for ``rng``.

    Full tables come from the DMP's own state dict. Fused states come from the kernels: TorchRec lays a state of one
    value a row out by column shard, in an order of its own, so here it is kept as ``...columns 0:16`` by its rows.
    """
    state: dict[str, torch.Tensor] = {}
    sharded: dict[str, ShardedTensor] = {}
    for name, value in job.dmp.state_dict().items():
        if isinstance(value, ShardedTensor):
            sharded[f"model.{name}"] = value
        else:
            state[f"model.{name}"] = value.clone()
    state |= assemble(sharded)
    state |= _fused_states(job)
    names = {id(parameter): name for name, parameter in job.dmp.named_parameters()}
    for parameter, values in job.dense.state.items():
        for key, value in values.items():
            state[f"dense.{names[id(parameter)]}.{key}"] = torch.as_tensor(value).clone()
    state["rng"] = torch.get_rng_state()
    state["step"] = torch.tensor(job.step)
    return state


def _fused_states(job: Job) -> dict[str, torch.Tensor]:
    """Optimizer rows of all ranks, and the counters of the kernels that hold a table, table by table."""
    full: dict[str, torch.Tensor] = {}
    scalars: dict[str, set[tuple[float, ...]]] = {}
    for name, size, row0, col0, rows, counters in chain.from_iterable(gathered(list(_local_states(job)))):
        scalars.setdefault(name.removeprefix("fused."), set()).add(counters)
        if rows is not None:
            key = name if rows.dim() == 2 else f"{name} columns {col0}:{col0 + size[1]}"
            whole = full.setdefault(key, torch.full(_shape(rows, size), float("nan"), dtype=rows.dtype))
            whole[row0 : row0 + rows.shape[0], *([slice(col0, col0 + rows.shape[1])] if rows.dim() == 2 else [])] = rows
    return full | {f"counters.{table}": torch.tensor(sorted(found)) for table, found in scalars.items()}


def _shape(rows: torch.Tensor, size: tuple[int, int, int]) -> tuple[int, ...]:
    return (size[0], size[2]) if rows.dim() == 2 else (size[0],)


def _local_states(job: Job) -> Iterator[tuple[str, tuple[int, int, int], int, int, torch.Tensor | None, Any]]:
    """(name, (rows of the table, columns of the shard, columns of the table), row, column, values, counters)."""
    for number in range(len(job.model.parts)):
        module: Any = job.dmp.module.get_submodule(f"part{number}")
        for lookup in module._lookups:
            for kernel in getattr(lookup, "_emb_modules", ()):
                tbe = kernel.emb_module
                rate, counted = float(tbe.get_learning_rate()), int(tbe.iter_cpu)
                counters = (int(tbe.iter), counted, float(tbe.max_counter), rate)
                states = [()] * len(tbe.embedding_specs) if part_has_no_state(job) else tbe.split_optimizer_states()
                for config, tensors in zip(kernel.config.embedding_tables, states, strict=True):
                    row0, col0 = config.local_metadata.shard_offsets
                    name = f"fused.part{number}.{config.name}"
                    if not config.local_rows:
                        continue
                    size = (config.num_embeddings, config.local_cols, config.embedding_dim)
                    yield name, size, row0, col0, None, counters
                    for position, tensor in enumerate(tensors):
                        yield f"{name}.{position}", size, row0, col0, tensor.clone(), counters


def part_has_no_state(job: Job) -> bool:
    return job.model.optimizer == "sgd"


# What the ranks run.

Marks = dict[str, dict[str, torch.Tensor]]


def attach(job: Job, settings: StreamConfig, *, paranoid: bool = True) -> StreamCheckpointer:
    """As ``tests.jobs`` does: a fresh job under the oracle, a restored one in the default mode."""
    return StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job}, paranoid=paranoid)


def start(model: Model, plan: Plan, settings: StreamConfig, events: tuple[str, ...]) -> Marks:
    """A fresh job: the truth at each of its markers."""
    job = build(model, plan)
    with attach(job, settings) as checkpointer:
        assert checkpointer.restore() is None
        play(job, checkpointer, events)
    return job.marks


def resume(
    model: Model, plan: Plan, settings: StreamConfig, marker: str | None, events: tuple[str, ...]
) -> tuple[dict[str, torch.Tensor], Marks]:
    """Another job: the truth right after it has restored a marker, and at the markers that it sets from there on."""
    job = build(model, plan)
    job.step = 900
    train(job)  # a live, different state: the restore must replace all of it
    with attach(job, settings, paranoid=False) as checkpointer:
        assert checkpointer.restore(marker) is not None
        restored = truth(job)
        play(job, checkpointer, events)
    return restored, job.marks


def resume_each(
    model: Model, plan: Plan, settings: StreamConfig, markers: tuple[str | None, ...], events: tuple[str, ...]
) -> tuple[list[dict[str, torch.Tensor]], Marks]:
    """``resume`` from each marker, one job after the other; the last one goes on with ``events``."""
    restored = [resume(model, plan, settings, marker, ())[0] for marker in markers[:-1]]
    last, marks = resume(model, plan, settings, markers[-1], events)
    return [*restored, last], marks


def losses(model: Model, plan: Plan, settings: StreamConfig, marker: str | None, steps: int) -> list[float]:
    """Global losses of the next ``steps`` training steps behind ``marker``; None: of a fresh job, which marks last."""
    job = build(model, plan)
    with attach(job, settings) as checkpointer:
        if marker is not None:
            checkpointer.restore(marker)
        found = []
        for _ in range(steps):
            job.step += 1
            job.optimizer.zero_grad()
            loss = _loss(job, job.step)
            _learn(job, [loss])
            checkpointer.step()
            total = loss.detach().clone()
            dist.all_reduce(total)
            found.append(float(total) / dist.get_world_size())
        checkpointer.mark().result(60)
    return found


def only_train(model: Model, plan: Plan) -> None:
    """Some steps, nothing attached."""
    job = build(model, plan)
    for job.step in range(3):
        train(job)
