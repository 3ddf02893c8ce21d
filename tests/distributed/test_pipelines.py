"""Pipelines that fetch ahead: a marker is of the last trained batch, and a restored job trains the very next one."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import EmainplaceModeDefinition
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.streamable import Pipelineable

from tests import jobs, warm
from tests.model import FEATURES, OPTIMIZERS, PLAN_2, PLAN_3, Net, Trainer, batch, differences, trainer, truth
from tests.parts import fused_kernels
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig, TrackedLoader

pytestmark = pytest.mark.distributed

CELL = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "kernel": "fused", "module": "EmbeddingBagCollection"}
"""What docs/coverage.md calls the job of these tests."""

State = dict[str, torch.Tensor]

PASS = 6
EPOCHS = 2
MARKERS = (2, 4, 6, 8, 12)
"""Steps at which the uninterrupted job cuts a marker: inside a pass, with its end fetched, at its end, behind it."""


class Batch(Pipelineable):
    """What TorchRec's pipelines want of a batch."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.dense, self.sparse, self.label = batch(number)

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return self

    def record_stream(self, stream: Any) -> None: ...


class BatchNet(Net):
    """The model as a pipeline calls it: one batch in, (loss, output) out."""

    def forward(self, batch: Batch) -> Any:
        loss = super().forward(batch.dense, batch.sparse, batch.label)
        return loss, (loss.detach(), batch.number)


class Batches:
    """Passes of six batches: 1 to 6, 11 to 16, ...; knows its position."""

    position_of = "job"

    def __init__(self) -> None:
        self.epoch, self.next = 0, 0

    def __iter__(self) -> Iterator[Batch]:
        while self.next < PASS:
            self.next += 1
            yield Batch(10 * self.epoch + self.next)
        self.epoch, self.next = self.epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.epoch, "next": self.next}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.epoch, self.next = state["epoch"], state["next"]


class PlainLoop:
    """The loop that the pipelines replace, under their interface."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, device: torch.device) -> None:
        self.model, self.optimizer = model, optimizer

    def progress(self, source: Iterator[Batch]) -> tuple[torch.Tensor, int]:
        batch = next(source)
        self.optimizer.zero_grad()
        loss, output = self.model(batch)
        loss.backward()
        self.optimizer.step()
        return output

    def reset(self) -> None: ...


PIPELINES: dict[str, Callable[..., Any]] = {
    "plain": PlainLoop,
    "base": TrainPipelineBase,
    "sparse dist": TrainPipelineSparseDist,
}


@dataclass
class Trained:
    """What one rank has trained."""

    numbers: list[int]
    losses: list[float]
    most_in_flight: int
    truths: dict[int, State]
    """By step: at each marker, and at the end."""


def _train(job: Trainer, loader: TrackedLoader[Batch], checkpointer: StreamCheckpointer, kind: str) -> Trained:
    pipeline = PIPELINES[kind](job.dmp, job.optimizer, torch.device("cpu"))
    done = Trained([], [], 0, {})
    for _ in range(loader.epoch, EPOCHS):
        source = iter(loader)
        while True:
            try:
                loss, number = pipeline.progress(source)
            except StopIteration:
                break
            checkpointer.step()
            done.numbers.append(number)
            done.losses.append(float(loss))
            done.most_in_flight = max(done.most_in_flight, loader.in_flight)
            if checkpointer.steps in MARKERS:
                done.truths[checkpointer.steps] = truth(job)
                if checkpointer.generation == 1:
                    checkpointer.mark().result(60)
        pipeline.reset()
    if kind == "sparse dist" and done.numbers:
        assert len(pipeline._pipelined_modules) == 1
    return done


def _job() -> tuple[Trainer, TrackedLoader[Batch]]:
    job = trainer({2: PLAN_2, 3: PLAN_3}[dist.get_world_size()], net=BatchNet)
    return job, TrackedLoader(Batches())


def _attach(job: Trainer, loader: TrackedLoader[Batch], uri: str) -> StreamCheckpointer:
    settings = StreamConfig(uri=uri, marker_every=None)
    return StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": loader}, paranoid=True)


def _from_the_start(kind: str, uri: str) -> Trained:
    job, loader = _job()
    with _attach(job, loader, uri) as checkpointer:
        return _train(job, loader, checkpointer, kind)


def _restored(kind: str, uri: str, markers: list[str]) -> list[tuple[State, Trained]]:
    """One job after another, in one set of processes: the state right behind each restore, and what it trains."""
    found = []
    for marker in markers:
        job, loader = _job()
        with _attach(job, loader, uri) as checkpointer:
            assert checkpointer.restore(marker) is not None
            state = truth(job)
            found.append((state, _train(job, loader, checkpointer, kind)))
    return found


_finished: dict[str, tuple[Path, list[Trained]]] = {}


def _uninterrupted(kind: str, factory: pytest.TempPathFactory) -> tuple[Path, list[Trained]]:
    """The log of an uninterrupted job on two ranks, and what each rank trained; once for all tests."""
    if kind not in _finished:
        log = factory.mktemp("log")
        _finished[kind] = (log, warm.run(2, _from_the_start, kind, f"file://{log}"))
    return _finished[kind]


@pytest.mark.parametrize(
    ("source", "kind", "world", "markers"),
    [
        ("sparse dist", "sparse dist", 2, range(5)),
        ("sparse dist", "plain", 2, [1]),
        ("sparse dist", "sparse dist", 3, [1, 2]),
        ("base", "base", 2, [1, 2]),
        ("plain", "sparse dist", 2, [1, 2]),
    ],
)
def test_a_restored_job_trains_exactly_the_batches_that_follow(
    source: str, kind: str, world: int, markers: list[int], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    log, uninterrupted = _uninterrupted(source, tmp_path_factory)
    shutil.copytree(log, tmp_path / "log")
    names = [f"1:{number + 1}" for number in markers]
    for rank, found in enumerate(warm.run(world, _restored, kind, f"file://{tmp_path / 'log'}", names)):
        then = uninterrupted[min(rank, 1)]
        for number, (state, after) in zip(markers, found, strict=True):
            step = MARKERS[number]
            assert differences(then.truths[step], state, rng=rank < 2) == []
            assert after.numbers == then.numbers[step:]
            if world == 2:
                assert after.losses == then.losses[step:]
                for later, expected in after.truths.items():
                    assert differences(then.truths[later], expected) == []


@pytest.mark.covers(**CELL, pipeline="TrainPipelineBase, with a TrackedLoader")
@pytest.mark.covers(**CELL, pipeline="TrainPipelineSparseDist, with a TrackedLoader")
@pytest.mark.parametrize(("kind", "in_flight"), [("plain", 0), ("base", 1), ("sparse dist", 2)])
def test_every_pipeline_trains_what_the_plain_loop_trains(
    kind: str, in_flight: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    plain, piped = _uninterrupted("plain", tmp_path_factory)[1], _uninterrupted(kind, tmp_path_factory)[1]
    for done in piped:
        assert done.numbers == [1, 2, 3, 4, 5, 6, 11, 12, 13, 14, 15, 16]
        assert done.most_in_flight == in_flight
    assert [done.losses for done in piped] == [done.losses for done in plain]
    assert differences(plain[0].truths[12], piped[0].truths[12]) == []


# Orders that TorchRec's pipelines have on a GPU only, staged by hand.


class AheadNet(Net):
    """The model behind its embeddings."""

    def forward(self, dense: torch.Tensor, embedded: Any, label: torch.Tensor) -> torch.Tensor:
        columns = [embedded[feature] for feature, _ in FEATURES]
        logits = self.top(torch.cat([self.bottom(dense), *columns], 1)).squeeze(1)
        return torch.nn.functional.binary_cross_entropy_with_logits(logits, label)


Ahead = tuple[Batch, Callable[[], Any]]


def looked_up(job: Trainer, number: int) -> Ahead:
    """As TrainPipelineSemiSync: the lookup of a batch has been made before the backward of the batch before."""
    ahead = Batch(number)
    embedded = job.dmp.module.ebc(ahead.sparse)
    return ahead, lambda: embedded


def distributed(job: Trainer, number: int) -> Ahead:
    """As PrefetchTrainPipelineSparseDist: its ids are with their tables, and no more, on a CPU without a cache."""
    ahead, ebc = Batch(number), job.dmp.module.ebc
    context = ebc.create_context()
    ids = ebc.input_dist(context, ahead.sparse).wait().wait()
    return ahead, lambda: ebc.compute_and_output_dist(context, ids)


STAGED = 6
CUT = 3
PLANS = {world: {**plan, "t_dp": ("tw", 1)} for world, plan in ((2, PLAN_2), (3, PLAN_3))}
"""Without a data-parallel table: its step would rewrite what the lookup ahead needs for its backward."""


def _staged(
    job: Trainer, checkpointer: StreamCheckpointer, first: int, order: Callable[[Trainer, int], Ahead], drain: bool
) -> Iterator[float]:
    """Losses; ``drain``: nothing is in flight behind step CUT."""
    ahead = order(job, first)
    for number in range(first, STAGED + 1):
        job.optimizer.zero_grad()
        here, embedded = ahead
        loss = job.dmp(here.dense, embedded(), here.label)
        if number != CUT or not drain:
            ahead = order(job, number + 1)
        loss.backward()
        job.optimizer.step()
        job.step_number = number
        checkpointer.step()
        yield float(loss)
        if number == CUT and drain:
            ahead = order(job, number + 1)


def _iterations(job: Trainer) -> set[int]:
    return {kernel.scalars.iteration for kernel in fused_kernels(job.dmp)}


Found = tuple[State, set[int], list[float], State]
"""The truth at the marker behind step CUT, and the iterations of the kernels; losses, and the truth at the end."""


RMSPROP = {"optimizer": "rmsprop"}
EMA = {"optimizer": "ema", "emainplace_mode": EmainplaceModeDefinition(step_ema=2, step_start=0, step_ema_coef=0.25)}
"""The lookup behind step CUT is one that averages."""


def _in_flight(name: str, uris: list[str], build: dict[str, Any]) -> list[Found]:
    """An uninterrupted job whose pipeline is full at the marker, and one whose pipeline was drained for it."""
    found = []
    for uri, drain in zip(uris, (False, True), strict=True):
        job = trainer(PLANS[2], net=AheadNet, **build)
        with jobs.attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
            losses = []
            for loss in _staged(job, checkpointer, 1, ORDERS[name], drain):
                losses.append(loss)
                if len(losses) == CUT:
                    at_marker, iterations = truth(job), _iterations(job)
                    checkpointer.mark().result(60)
            found.append((at_marker, iterations, losses, truth(job)))
    return found


def _in_flight_restored(name: str, uri: str, build: dict[str, Any]) -> Found:
    job = trainer(PLANS[dist.get_world_size()], net=AheadNet, **build)
    with jobs.attach(job, StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        assert checkpointer.restore() is not None
        state, iterations = truth(job), _iterations(job)
        losses = list(_staged(job, checkpointer, CUT + 1, ORDERS[name], drain=False))
        return state, iterations, losses, truth(job)


def _but_iterations(names: list[str]) -> list[str]:
    """Iterations count what is in flight, and TorchRec keeps one a shard: compared by themselves."""
    return [name for name in names if not name.endswith(".iter")]


ORDERS = {"semi-sync": looked_up, "prefetch": distributed}


@pytest.mark.skipif(
    "rmsprop" not in OPTIMIZERS, reason="no optimizer of this FBGEMM reads its iteration in updates alone"
)
@pytest.mark.pitfall(2, 10)
@pytest.mark.covers(
    **CELL, pipeline="TrainPipelineSemiSync and PrefetchTrainPipelineSparseDist, their order staged by hand"
)
@pytest.mark.parametrize(("name", "in_flight"), [("semi-sync", 1), ("prefetch", 0)])
def test_a_marker_with_batches_in_flight_is_that_of_the_trained_ones(name: str, in_flight: int, tmp_path: Path) -> None:
    """The restored job looks its first batch up with the rows of the marker, as a pipeline does that was drained."""
    uri, drained = f"file://{tmp_path / 'full'}", f"file://{tmp_path / 'drained'}"
    uninterrupted = warm.run(2, _in_flight, name, [uri, drained], RMSPROP)
    restored = warm.run(2, _in_flight_restored, name, uri, RMSPROP)
    for (full, whole), (state, iterations, losses, later) in zip(uninterrupted, restored, strict=True):
        assert _but_iterations(differences(full[0], state)) == []
        assert full[1] == {CUT + in_flight}
        assert iterations == {CUT}
        assert losses == whole[2][CUT:]
        assert differences(whole[3], later) == []
        if not in_flight:
            assert losses == full[2][CUT:]
    state, iterations, _, _ = warm.run(3, _in_flight_restored, name, uri, RMSPROP)[0]
    assert _but_iterations(differences(uninterrupted[0][0][0], state)) == []
    assert iterations == {CUT}


@pytest.mark.covers(
    optimizer="EMAINPLACE_ROWWISE_ADAGRAD",
    kernel="fused",
    module="EmbeddingBagCollection",
    pipeline="TrainPipelineSemiSync, its order staged by hand",
    outcome="limited",
    why="the lookup in flight at the marker has averaged all rows, and the restored pipeline averages them once more: "
    "use a pipeline that looks up after the update ([guarantees.md](guarantees.md#pipelines))",
)
def test_a_lookup_in_flight_that_averages_is_in_the_marker_and_averages_again(tmp_path: Path) -> None:
    uris = [f"file://{tmp_path / name}" for name in ("full", "drained")]
    uninterrupted = warm.run(2, _in_flight, "semi-sync", uris, EMA)
    for rank, (state, _, losses, _) in enumerate(warm.run(2, _in_flight_restored, "semi-sync", uris[0], EMA)):
        full, drained = uninterrupted[rank]
        assert _but_iterations(differences(full[0], state)) == []
        assert _but_iterations(differences(full[0], drained[0]))
        assert losses != drained[2][CUT:]
    for rank, (state, _, losses, _) in enumerate(warm.run(2, _in_flight_restored, "semi-sync", uris[1], EMA)):
        assert _but_iterations(differences(uninterrupted[rank][1][0], state)) == []
        assert losses == uninterrupted[rank][1][2][CUT:]
