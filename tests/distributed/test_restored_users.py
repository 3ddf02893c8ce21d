"""What the user's objects do to tables while they are loaded is part of what follows the restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests.model import PLAN_1, Trainer, differences, trainer, truth
from tests.pool import Pool
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed


class Averaged:
    """An object that puts other rows into the tables when it is loaded, as a helper of averaged weights does."""

    def __init__(self, job: Trainer, way: str) -> None:
        self.job = job
        self.way = way
        self.checkpointer: StreamCheckpointer | None = None
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"weights": "of the tables"}

    def load_state_dict(self, _state: dict[str, Any]) -> None:
        self.loads += 1
        if self.way == "changes nothing":
            return
        state = self.job.dmp.state_dict()
        with torch.no_grad():
            for name, value in state.items():
                if isinstance(value, ShardedTensor) and "t_dp" not in name:
                    for shard in value.local_shards():
                        shard.tensor.data.add_(1.0)  # `.data` keeps the version: only the call below tells
        if self.way == "loads the model":
            self.job.dmp.load_state_dict(state)
        else:
            assert self.checkpointer is not None
            self.checkpointer.mark_all()


def _attach(uri: str, way: str, *, paranoid: bool) -> tuple[Trainer, Averaged, StreamCheckpointer]:
    job = trainer(PLAN_1)
    job.step()  # a live, different state
    averaged = Averaged(job, way)
    handed = {"loader": job, "averaged": averaged}
    config = StreamConfig(uri=uri, marker_every=None)
    averaged.checkpointer = StreamCheckpointer(
        job.dmp, job.optimizer, config=config, stateful=handed, paranoid=paranoid
    )
    return job, averaged, averaged.checkpointer


def _three_lives(uri: str, way: str, paranoid: bool) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor], int]:
    """The truth at a marker after a restore in which an object changed rows, and what comes back of it."""
    job, _, checkpointer = _attach(uri, way, paranoid=paranoid)
    with checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
    job, averaged, checkpointer = _attach(uri, way, paranoid=paranoid)
    with checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        expected = truth(job)
        checkpointer.mark().result(60)
    job, _, checkpointer = _attach(uri, "changes nothing", paranoid=False)
    with checkpointer:
        assert checkpointer.restore() is not None
        return expected, truth(job), averaged.loads


@pytest.mark.parametrize("paranoid", [False, True], ids=["default", "paranoid"])
@pytest.mark.parametrize("way", ["loads the model", "writes by hand"])
def test_rows_that_an_object_changes_while_it_is_loaded_are_captured(
    way: str, paranoid: bool, tmp_path: Path, pool: Pool
) -> None:
    ((expected, found, loads),) = pool.run(1, _three_lives, f"file://{tmp_path}", way, paranoid)
    assert loads == 1
    assert differences(expected, found) == []


class Unsaveable(Averaged):
    def state_dict(self) -> dict[str, Any]:
        return {"schedule": lambda step: step}


def _attach_unsaveable(uri: str) -> str:
    job = trainer(PLAN_1)
    config = StreamConfig(uri=uri, marker_every=None)
    handed = {"averages": Unsaveable(job, "changes nothing")}
    with pytest.raises(UnsupportedError) as caught:
        StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful=handed)
    return str(caught.value)


def test_an_object_that_cannot_be_pickled_is_refused_by_its_name(tmp_path: Path, pool: Pool) -> None:
    (said,) = pool.run(1, _attach_unsaveable, f"file://{tmp_path}")
    assert "the state_dict() of the Stateful 'averages' (Unsaveable) cannot be pickled" in said
    assert "keep only numbers, text, tensors, lists and dicts in it" in said
