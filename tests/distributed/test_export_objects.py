"""Exports of a marker whose modules and optimizers keep more than tensors."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from typer.testing import CliRunner

from tests import warm
from tests.model import PLAN_1, Trainer, trainer
from tests.parts import app
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

pytestmark = pytest.mark.distributed

ARRAYS = {
    "counts": np.arange(6, dtype=np.int32).reshape(2, 3),
    "swapped": np.arange(3, dtype=np.dtype("i4").newbyteorder("S")),
    "columns": np.asfortranarray(np.ones((2, 2), np.float32)),
    "flags": np.array([True, False]),
    "names": np.array(["a", "bc"]),
    "mean": np.float64(0.25),
    "seen": np.int64(7),
}


class Extra(nn.Linear):
    """Has a state beside its parameters."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _job(extra: Any) -> Trainer:
    job = trainer(PLAN_1)
    layer = next(each for each in job.dmp.modules() if type(each) is nn.Linear)
    layer.__class__, layer.extra = Extra, extra
    return job


def _train(uri: str, extra: Any) -> None:
    job = _job(extra)
    with StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        job.step()
        first = next(iter(job.dense.state.values()))
        first["history"] = ARRAYS["counts"]
        checkpointer.step()
        checkpointer.mark().result(60)


def _load(folder: str) -> tuple[Any, Any]:
    """What plain DCP makes of an export: the extra state, and what the dense optimizer keeps beside tensors."""
    job = _job(dict.fromkeys(ARRAYS, 0))
    job.step()
    next(iter(job.dense.state.values()))["history"] = np.zeros(1)
    model, optimizer = job.dmp.state_dict(), job.optimizer.state_dict()
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder)
    (extra,) = (value for name, value in model.items() if name.endswith("_extra_state"))
    (kept,) = (each["history"] for each in optimizer["state"].values() if "history" in each)
    return extra, kept


def _equal(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(np.all(one == other))


def test_arrays_of_modules_and_optimizers_are_exported(tmp_path: Path) -> None:
    uri, target = f"file://{tmp_path / 'log'}", tmp_path / "out"
    warm.run(1, _train, uri, ARRAYS)
    done = CliRunner().invoke(
        app, ["export", uri, "--to", f"dcp://{target}", "--model-key=model", "--optimizer-key=optim"]
    )
    assert done.exit_code == 0, (done.output, done.exception)
    ((extra, kept),) = warm.run(1, _load, str(target))
    assert extra.keys() == ARRAYS.keys()
    native = {**ARRAYS, "swapped": np.arange(3, dtype=np.int32)}  # as pickles of NumPy give it back, which DCP writes
    assert [name for name in native if not _equal(extra[name], native[name])] == []
    assert _equal(kept, ARRAYS["counts"])


def test_extra_state_that_runs_code_is_refused_by_the_name_of_its_class(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'log'}"
    warm.run(1, _train, uri, {"last": deque([torch.ones(2)], 2)})
    done = CliRunner().invoke(app, ["export", uri, "--to", f"dcp://{tmp_path / 'out'}"])
    assert done.exit_code != 0
    said = str(done.exception) + done.output
    assert "the extra state of a module holds objects that run code when unpickled: collections.deque" in said
    assert "Try: return only numbers" in said
    assert not list((tmp_path / "out").glob("*")), "something was written"
