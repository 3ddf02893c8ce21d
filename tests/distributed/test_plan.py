"""What ``stream-ckpt plan`` says beforehand, and what a job of the recipe then sends."""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks, warm
from tests.command import ask
from tests.inside import inside
from tests.jobs import attach
from tests.model import PLAN_1, PLAN_2, trainer
from tests.parts import GATHERS, OWN_SYNCS, SYNCS
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


@pytest.mark.parametrize(("world", "drain_every"), [(1, 1), (2, 4)])
def test_a_job_sends_what_was_planned(world: int, drain_every: int, tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    warm.run(world, train, uri, drain_every)
    first, last = ask("list", uri)["markers"]
    assert (first["step"], last["step"]) == (STEPS, 2 * STEPS)
    sent, rows = last["bytes"] - first["bytes"], last["rows"] - first["rows"]
    planned = ask(
        *("plan", "--tables", "8", "--rows", "5000", "--dim", "32", "--batch-size", "128", "--ids", "4"),
        *("--steps-per-second", "1", "--drain-every", str(drain_every), "--ranks", str(world), "--log", "file"),
    )
    assert planned["stream_bytes_per_s"] * STEPS == pytest.approx(sent, rel=0.1)
    assert planned["rows_per_s"] * STEPS == pytest.approx(rows, rel=0.1)

    seen = ask("plan", uri, "--drain-every", str(drain_every))
    apart_s = last["time_s"] - first["time_s"]
    assert seen["rows_per_s"] == pytest.approx(rows / apart_s)
    assert seen["stream_bytes_per_s"] == pytest.approx(sent / apart_s, rel=0.1)
    workload = seen["workload"]
    assert workload["ranks"] == world
    assert workload["steps_per_s"] == pytest.approx(STEPS / apart_s)
    assert workload["marker_s"] == pytest.approx(apart_s)
    assert workload["dense_bytes"] > 10_000
    assert [table["rows"] for table in workload["tables"]] == [5000] * 8


def _work_of_markers(uri: str) -> list[tuple[int, int, int]]:
    """(collectives within ``mark()``, collectives up to the COMMIT, syncs) of this rank, of each of three markers."""
    job = trainer(PLAN_1 if dist.get_world_size() == 1 else PLAN_2)
    gathers, syncs, found = [], [], []

    def counted(made: list[str], real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name != "stream-ckpt-copy":  # which no marker waits for
                made.append(real.__name__)
            return real(*args, **kwargs)

        return call

    with (
        attach(job, StreamConfig(uri=uri, marker_every=None), paranoid=False) as checkpointer,
        pytest.MonkeyPatch.context() as patch,
    ):
        for number in range(4):
            job.step()
            checkpointer.step()
            inside(checkpointer).wait_for_log(60)
            dist.barrier()
            if number == 1:  # the first marker sends every row, and compares all of the dense state
                for name in ("fsync", "fdatasync"):
                    patch.setattr(os, name, counted(syncs, getattr(os, name)))
                for name in vars(dist):
                    if name.startswith(("all_", "broadcast", "gather", "scatter", "reduce")):
                        patch.setattr(dist, name, counted(gathers, getattr(dist, name)))
            gathers.clear()
            syncs.clear()
            future = checkpointer.mark()
            at_once = len(gathers)
            future.result(60)
            found.append((at_once, len(gathers), len(syncs)))
    return found[1:]


@pytest.mark.parametrize("world", [1, 2])
def test_a_marker_makes_the_syncs_and_collectives_that_the_model_counts(world: int, tmp_path: Path) -> None:
    first, *others = ranks.run(world, _work_of_markers, f"file://{tmp_path}/log")
    assert [syncs for _, _, syncs in first] == [SYNCS] * 3
    for rank in others:
        assert [syncs for _, _, syncs in rank] == [OWN_SYNCS] * 3
    for rank in (first, *others) if world > 1 else ():
        assert [gathers for _, gathers, _ in rank] == [1 + GATHERS] * 3
