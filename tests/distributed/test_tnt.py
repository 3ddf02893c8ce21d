"""The callback of TorchTNT, run by the released torchtnt: `make test-tnt`."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel

from tests import ranks
from tests.model import GLOBAL_BATCH, PLAN_1, PLAN_2, PLAN_3, Trainer, batch, differences, trainer, truth
from tests.parts import FileLog
from tests.pool import Pool
from torchrec_stream_ckpt import GlobalBatches, StreamCheckpointer, StreamConfig, TrackedLoader
from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.inner import Control

tnt = pytest.importorskip(
    "torchrec_stream_ckpt.tnt",
    reason="torchtnt is not installed: make test-tnt installs it",
    exc_type=ImportError,
)
from torchtnt.framework.auto_unit import AutoUnit  # noqa: E402
from torchtnt.framework.callback import Callback  # noqa: E402
from torchtnt.framework.fit import fit  # noqa: E402
from torchtnt.framework.state import State  # noqa: E402
from torchtnt.framework.train import train  # noqa: E402
from torchtnt.framework.unit import EvalUnit, TrainUnit  # noqa: E402

pytestmark = pytest.mark.distributed

BATCHES, EPOCHS = 4, 3
PLANS = {1: PLAN_1, 2: PLAN_2, 3: PLAN_3}
Batch = tuple[Any, ...]
Truth = dict[str, torch.Tensor]


class Unit(TrainUnit[Batch], EvalUnit[Batch]):
    """A unit as TorchTNT's examples write it, with a schedule that an epoch moves on."""

    def __init__(self, dmp: DistributedModelParallel, optimizer: torch.optim.Optimizer, dense: Any, fails: int) -> None:
        super().__init__()
        self.dmp, self.optimizer, self._fails = dmp, optimizer, fails
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(dense, 0.5)

    def train_step(self, state: State, data: Batch) -> None:
        if self.train_progress.num_steps_completed == self._fails:
            raise FloatingPointError("the loss is not finite")
        self.optimizer.zero_grad()
        self.dmp(*data).backward()
        self.optimizer.step()

    def eval_step(self, state: State, data: Batch) -> None:
        self.dmp(*data)

    def on_train_epoch_end(self, state: State) -> None:
        self.schedule.step()


class Watch(Callback):
    """What the job is right after the restore, and at the end of each epoch."""

    def __init__(self, job: Trainer) -> None:
        self._job = job
        self.first: Truth = {}
        self.ends: dict[int, Truth] = {}

    def on_train_start(self, state: State, unit: Any) -> None:
        self.first = truth(self._job)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        self.ends[unit.train_progress.num_epochs_completed] = truth(self._job)


def _loader() -> TrackedLoader[Batch]:
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()

    def make(epoch: int, rows: range, size: int) -> Batch:
        return batch(epoch * BATCHES + rows.start // GLOBAL_BATCH)

    batches = GlobalBatches(make, samples=BATCHES * GLOBAL_BATCH, batch_size=GLOBAL_BATCH, rank=rank, world=world)
    return TrackedLoader(batches)


def _run(uri: str, fails: int = -1) -> tuple[str, Watch, Truth, dict[str, int], float]:
    """One start of the job: what it said, what it saw, and where it ended."""
    job = trainer(PLANS[torch.distributed.get_world_size()])
    unit, loader = Unit(job.dmp, job.optimizer, job.dense, fails), _loader()
    held = {"loader": loader, **tnt.unit_state(unit, job.dmp)}
    config = StreamConfig(uri=uri, marker_every=None)
    watch, said = Watch(job), "finished"
    ckpt = StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful=held, paranoid=True)
    callback = tnt.StreamCheckpointCallback(
        ckpt, meta=lambda _state, unit: {"epoch": unit.train_progress.num_epochs_completed}
    )
    try:
        fit(unit, loader, [batch(900)], max_epochs=EPOCHS, callbacks=[callback, watch], evaluate_every_n_epochs=1)
    except FloatingPointError as error:
        said = str(error)
    watch._job = None  # type: ignore[assignment]
    if callback.restored is not None:
        said = f"{said} from {callback.restored.id} at step {callback.restored.step}"
    return said, watch, truth(job), unit.train_progress.state_dict(), unit.schedule.get_last_lr()[0]


def test_a_failed_run_goes_on_from_the_end_of_an_epoch(tmp_path: Path, pool: Pool) -> None:
    """Bit for bit on as many ranks; on more of them the state is that of the marker, and the job ends."""
    whole = pool.run(2, _run, f"file://{tmp_path / 'whole'}")
    uri = f"file://{tmp_path / 'job'}"
    for said, watch, *_ in pool.run(2, _run, uri, 2 * BATCHES + 1):
        assert said == "the loss is not finite"
        assert differences(whole[0][1].ends[2], watch.ends[2], rng=False) == []
    assert _ended(tmp_path / "job") == ("failed", "FloatingPointError")
    copied = tmp_path / "wider"
    shutil.copytree(tmp_path / "job", copied)
    for rank, (said, watch, last, progress, rate) in enumerate(pool.run(2, _run, uri)):
        assert said == f"finished from 1:2 at step {2 * BATCHES}"
        assert differences(whole[0][1].ends[2], watch.first, rng=False) == []
        assert differences(whole[rank][2], last) == []
        assert progress == {"num_epochs_completed": 3, "num_steps_completed": 12, "num_steps_completed_in_epoch": 0}
        assert rate == whole[rank][4] == 0.01 * 0.5**3
    for said, watch, *_ in pool.run(3, _run, f"file://{copied}"):
        assert said == f"finished from 1:2 at step {2 * BATCHES}"
        assert differences(whole[0][1].ends[2], watch.first, rng=False) == []

    assert _ended(tmp_path / "job") == _ended(copied) == ("finished", "")
    lineage = Control(FileLog(tmp_path / "job")).refresh()
    said_of = {str(marker): dict(lineage.meta(marker)) for marker in lineage.commits}
    # The evaluation after the last epoch is in a marker of its own: it has moved the unit's progress on.
    assert said_of == {"1:1": {"epoch": 1}, "1:2": {"epoch": 2}, "2:3": {"epoch": 3}, "2:4": {"epoch": 3}}


class Told(Callback):
    """SIGTERM comes to one rank within the sixth batch."""

    def on_train_step_start(self, state: State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == 5 and torch.distributed.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def _told(uri: str) -> tuple[int, int]:
    """Steps of the checkpointer and of the unit."""
    job = trainer(PLANS[torch.distributed.get_world_size()])
    unit, loader = Unit(job.dmp, job.optimizer, job.dense, -1), _loader()
    held = {"loader": loader, **tnt.unit_state(unit, job.dmp)}
    config = StreamConfig(uri=uri, marker_every=None, on_signal="mark")
    ckpt = StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful=held)
    callbacks = [tnt.StreamCheckpointCallback(ckpt), Told()]
    train(unit, loader, max_epochs=1000, callbacks=callbacks)
    return ckpt.steps, unit.train_progress.num_steps_completed


def test_sigterm_ends_training_after_a_marker(tmp_path: Path) -> None:
    ((steps, trained), other) = ranks.run(2, _told, f"file://{tmp_path}")
    assert (steps, trained) == other
    assert steps == trained < 2 * BATCHES
    assert _ended(tmp_path) == ("preempted", "SIGTERM")
    lineage = Control(FileLog(tmp_path)).refresh()
    assert lineage.newest is not None
    assert lineage.newest.step == steps


def _ended(directory: Path) -> tuple[str, str]:
    end = Control(FileLog(directory)).refresh().ended
    assert end is not None
    return end.outcome, end.reason


class Auto(AutoUnit[Batch]):
    """TorchTNT trains it: it fetches a batch ahead, and updates the dense weights after each second batch."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super().__init__(module=module, device=torch.device("cpu"), gradient_accumulation_steps=2)
        self.given = optimizer

    def compute_loss(self, state: State, data: Batch) -> tuple[torch.Tensor, None]:
        return self.module(*data), None

    def configure_optimizers_and_lr_scheduler(self, module: nn.Module) -> tuple[torch.optim.Optimizer, None]:
        return self.given, None


def _accumulate(uri: str, max_steps: int, close: bool) -> tuple[Truth, Truth, int]:
    job = trainer(PLANS[torch.distributed.get_world_size()])
    unit, loader = Auto(job.dmp, job.optimizer), _loader()
    held = {"loader": loader, **tnt.unit_state(unit, job.dmp)}
    config = StreamConfig(uri=uri, marker_every=1)
    watch = Watch(job)
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful=held, paranoid=True) as ckpt:
        callback = tnt.StreamCheckpointCallback(ckpt, every_n_epochs=None, close=close)
        train(unit, loader, max_steps=max_steps, callbacks=[callback, watch])
        if not close:
            ckpt.mark().result()
        steps = ckpt.steps
    return watch.first, truth(job), steps


def test_gradient_accumulation_and_a_batch_ahead_are_exact(tmp_path: Path, pool: Pool) -> None:
    """Six batches are three steps. A marker is cut where no gradient waits, and knows the trained batches alone."""
    whole = pool.run(2, _accumulate, f"file://{tmp_path / 'whole'}", 2 * BATCHES, True)
    uri = f"file://{tmp_path / 'job'}"
    half = pool.run(2, _accumulate, uri, BATCHES + 2, False)
    rest = pool.run(2, _accumulate, uri, 2 * BATCHES, True)
    for rank in range(2):
        assert half[rank][2] == 3
        assert differences(half[rank][1], rest[rank][0]) == []
        assert rest[rank][2] == whole[rank][2] == 4
        assert differences(whole[rank][1], rest[rank][1]) == []


def _refusals(uri: str) -> dict[str, str]:
    job = trainer(PLAN_1)
    unit = Unit(job.dmp, job.optimizer, job.dense, -1)
    config = StreamConfig(uri=uri)
    said: dict[str, str] = {}
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={}) as ckpt:
        with pytest.raises(ConfigError) as caught:
            train(unit, _loader(), max_epochs=1, callbacks=[tnt.StreamCheckpointCallback(ckpt)])
        said["no progress"] = str(caught.value)
        with pytest.raises(ConfigError) as caught:
            tnt.StreamCheckpointCallback(ckpt, every_n_epochs=0)
        said["no epochs"] = str(caught.value)
    unit.metric, unit.average = job, nn.Linear(2, 2)
    with pytest.raises(ConfigError) as caught:
        tnt.unit_state(unit, job.dmp)
    said["more state"] = str(caught.value)
    said["handed over"] = ", ".join(tnt.unit_state(unit, job.dmp, but=("metric", "average")))
    held = tnt.unit_state(unit, job.dmp, but=("metric", "average"))
    for marker in (True, "7:7"):
        ckpt = StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful=held)
        callback = tnt.StreamCheckpointCallback(ckpt, restore=marker)
        if marker is True:
            train(unit, _loader(), max_epochs=1, callbacks=[callback])
            continue
        with pytest.raises(MarkerNotFoundError) as unknown:
            train(unit, _loader(), max_epochs=2, callbacks=[callback])
        said["no such marker"] = str(unknown.value)
    return said


def test_what_no_marker_would_hold_is_refused_by_name(tmp_path: Path, pool: Pool) -> None:
    (said,) = pool.run(1, _refusals, f"file://{tmp_path}")
    assert "does not save the progress of the unit" in said["no progress"]
    assert "every_n_epochs must be at least 1, got 0" in said["no epochs"]
    assert "the Unit tracks average, metric, which markers would not save" in said["more state"]
    assert said["handed over"] == "eval_progress, train_progress, schedule_schedule"
    assert "7:7" in said["no such marker"]
