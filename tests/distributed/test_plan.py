"""What ``stream-ckpt plan`` says beforehand, and what a job of the recipe then sends."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from tests import warm
from tests.inside import inside
from tests.parts import app
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

pytestmark = pytest.mark.distributed

FLAGS = ["--synthetic", "small", "--batch_size", "128", "--embedding_dim", "32", "--sharding", "row_wise"]
ARCHES = ["--dense_arch_layer_sizes", "32,32", "--over_arch_layer_sizes", "32,1"]
STEPS = 8


def train(uri: str, drain_every: int) -> None:
    """A marker behind the sweep and one after some steps. Every drain finds an empty ring: as many as were planned."""
    recipe = importlib.import_module("torchrec_stream_ckpt.recipes.train_dlrm")
    flags = recipe.parse_args([*FLAGS, *ARCHES])
    loader = recipe.open_loader(flags, torch.distributed.get_rank(), torch.distributed.get_world_size())
    model, optimizer, _ = recipe.build(flags, torch.device("cpu"), loader)
    config = StreamConfig(uri=uri, drain_every=drain_every, marker_every=None)
    checkpointer = StreamCheckpointer(model, optimizer, config=config)
    checkpointer.restore()
    batches = iter(loader)
    for step in range(2 * STEPS):
        if step == STEPS:
            checkpointer.mark().result(60)
        optimizer.zero_grad()
        loss, _ = model(next(batches))
        loss.backward()
        optimizer.step()
        checkpointer.step()
        inside(checkpointer).wait_for_log(60)
    checkpointer.mark().result(60)
    checkpointer.close()


def run(*arguments: str) -> Any:
    done = CliRunner().invoke(app, [*arguments, "--json"])
    assert done.exit_code == 0, (done.output, done.exception)
    return json.loads(done.stdout)


@pytest.mark.parametrize(("world", "drain_every"), [(1, 1), (2, 4)])
def test_a_job_sends_what_was_planned(world: int, drain_every: int, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    warm.run(world, train, uri, drain_every)
    first, last = run("list", uri)["markers"]
    assert (first["step"], last["step"]) == (STEPS, 2 * STEPS)
    sent, rows = last["bytes"] - first["bytes"], last["rows"] - first["rows"]
    planned = run(
        *("plan", "--tables", "8", "--rows", "5000", "--dim", "32", "--batch-size", "128", "--ids", "4"),
        *("--steps-per-second", "1", "--drain-every", str(drain_every), "--ranks", str(world), "--log", "file"),
    )
    assert planned["stream_bytes_per_s"] * STEPS == pytest.approx(sent, rel=0.1)
    assert planned["rows_per_s"] * STEPS == pytest.approx(rows, rel=0.1)

    seen = run("plan", uri, "--drain-every", str(drain_every))
    apart_s = last["time_s"] - first["time_s"]
    assert seen["rows_per_s"] == pytest.approx(rows / apart_s)
    assert seen["stream_bytes_per_s"] == pytest.approx(sent / apart_s, rel=0.1)
    workload = seen["workload"]
    assert workload["ranks"] == world
    assert workload["steps_per_s"] == pytest.approx(STEPS / apart_s)
    assert workload["marker_s"] == pytest.approx(apart_s)
    assert workload["dense_bytes"] > 10_000
    assert [table["rows"] for table in workload["tables"]] == [5000] * 8
