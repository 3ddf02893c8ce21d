"""The callback of TorchTNT in the shape of TNT's TorchRec example: a unit around a pipeline, with a metric."""

# No `from __future__ import annotations`: TorchTNT looks at the annotation of train_step's data.

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from tests.model import differences
from tests.pool import Pool
from tests.programs import BATCH, DEVICE, EPOCHS, SAMPLES, ReadyMade, Stopped, Watch, batch_of, build, combined
from torchrec_stream_ckpt import GlobalSampler, StreamCheckpointer, StreamConfig, TrackedLoader
from torchrec_stream_ckpt.errors import ConfigError

tnt = pytest.importorskip(
    "torchrec_stream_ckpt.tnt",
    reason="torchtnt is not installed: make test-tnt installs it",
    exc_type=ImportError,
)
from torchtnt.framework.callback import Callback  # noqa: E402
from torchtnt.framework.fit import fit  # noqa: E402
from torchtnt.framework.state import State  # noqa: E402
from torchtnt.framework.unit import EvalUnit, TrainUnit  # noqa: E402

unit_state, StreamCheckpointCallback = tnt.unit_state, tnt.StreamCheckpointCallback
pytestmark = pytest.mark.distributed

STOP, AT_THE_END = 9, 0


class Mean:
    """A metric of one rank, with state."""

    def __init__(self) -> None:
        self.total, self.number = 0.0, 0

    def update(self, value: float) -> None:
        self.total, self.number = self.total + value, self.number + 1

    def state_dict(self) -> dict[str, Any]:
        return vars(self).copy()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        vars(self).update(state)


class MyUnit(TrainUnit[Iterator[Batch]], EvalUnit[Iterator[Batch]]):
    """It fetches its batches itself, through a pipeline."""

    def __init__(self, module: Any, optimizer: Any) -> None:
        super().__init__()
        self.module, self.optimizer, self.train_auroc = module, optimizer, Mean()
        self.pipeline = TrainPipelineSparseDist(module, optimizer, DEVICE)
        self.eval_pipeline = TrainPipelineSparseDist(module, optimizer, DEVICE)
        self.output: Any = None

    def train_step(self, state: State, data: Iterator[Batch]) -> None:
        self.output = self.pipeline.progress(data)
        self.train_auroc.update(self.output[0].item())

    def eval_step(self, state: State, data: Iterator[Batch]) -> None:
        self.eval_pipeline.progress(data)


class Watching(Callback):
    def __init__(self, watch: Watch, ckpt: StreamCheckpointer) -> None:
        self._watch, self._ckpt = watch, ckpt

    def on_train_start(self, state: State, unit: Any) -> None:
        self._watch.restored(self._ckpt, unit.module, unit.optimizer)

    def on_train_step_end(self, state: State, unit: Any) -> None:
        self._watch.step(self._ckpt, unit.output)

    def on_train_epoch_end(self, state: State, unit: Any) -> None:
        """After the marker of the epoch."""
        if self._watch.stop == AT_THE_END:
            self._watch.end()
            self._ckpt.close(outcome="failed")
            raise Stopped


def _run(uri: str, stop: int | None) -> Watch:
    watch, config = Watch(stop), StreamConfig(uri=uri, marker_every=None)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    model = build()
    optimizer = combined(model)
    my_unit = MyUnit(model, optimizer)
    sampler = GlobalSampler(SAMPLES, batch_size=BATCH, rank=rank, world=world_size)
    train_dataloader = TrackedLoader(DataLoader(range(SAMPLES), batch_sampler=sampler, collate_fn=batch_of))
    own = torch.Generator()  # an evaluation draws nothing from the random state of the job
    eval_dataloader = DataLoader(ReadyMade(rank, world_size), batch_size=None, generator=own)
    with pytest.raises(ConfigError, match="tracks train_auroc, which markers would not save"):
        unit_state(my_unit, model)
    held = {"loader": train_dataloader, **unit_state(my_unit, model, but=["train_auroc"])}
    ckpt = StreamCheckpointer(model, optimizer, config=config, stateful=held)
    tqdm_callback = Watching(watch, ckpt)  # any other callback
    callbacks = [StreamCheckpointCallback(ckpt), tqdm_callback]
    try:
        fit(my_unit, train_dataloader, eval_dataloader, max_epochs=EPOCHS, callbacks=callbacks)
        watch.end()
    except Stopped:
        pass
    return watch


def test_a_unit_around_a_pipeline_goes_on_within_an_epoch(tmp_path: Path, pool: Pool) -> None:
    whole = pool.run(2, _run, f"file://{tmp_path}/whole", None)
    stopped = pool.run(2, _run, f"file://{tmp_path}/job", STOP)
    shutil.copytree(tmp_path / "job", tmp_path / "wider")
    again = pool.run(2, _run, f"file://{tmp_path}/job", None)
    for through, before, after in zip(whole, stopped, again, strict=True):
        assert after.first == STOP
        assert before.losses + after.losses == through.losses
        assert before.samples + after.samples == through.samples
        assert differences(through.ended, after.ended) == []
    pool.run(2, _run, f"file://{tmp_path}/ends", AT_THE_END)
    ends = pool.run(2, _run, f"file://{tmp_path}/ends", None)
    for through, after in zip(whole, ends, strict=True):
        assert after.samples == through.samples[SAMPLES // BATCH :]
        assert differences(through.ended, after.ended) == []
    wider = pool.run(3, _run, f"file://{tmp_path}/wider", None)
    assert all(differences(stopped[0].ended, rank.begun, rng=False) == [] for rank in wider)
    trained = [n for rank in [*stopped, *wider] for numbers in rank.samples for n in numbers]
    assert sorted(trained) == sorted(n for n in range(SAMPLES) for _ in range(EPOCHS))
