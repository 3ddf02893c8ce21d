"""Writes on a GPU: torch's versions show those beside the update, and FBGEMM's own kernels leave the versions alone."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
import torch

from tests.gpu.job import OPTIMIZERS, Build, Job, attach, covers, make, restored, run, truth
from tests.inside import inside

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")


def versions(job: Job) -> dict[str, int]:
    """Of all tensors with rows of tables; the cache is no table."""
    found: dict[str, int] = {}
    for number, group in enumerate(job.groups()):
        kernel = group.emb_module
        named = (*kernel.named_parameters(recurse=False), *kernel.named_buffers(recurse=False))
        rows = ("weights_", "momentum", "row_counter", "prev_iter")
        found |= {f"{number}.{name}": tensor._version for name, tensor in named if name.startswith(rows)}
    return found


@pytest.mark.pitfall(35)
@pytest.mark.parametrize(
    "build",
    [Build(optimizer=name, kernel=kernel) for name in OPTIMIZERS if name != "lars_sgd" for kernel in KERNELS],
    ids=lambda build: f"{build.optimizer}-{build.kernel}",
)
def test_fused_updates_and_cache_copies_leave_the_versions_of_tables_alone(build: Build, device: torch.device) -> None:
    """A forward moves rows into the cache and others out of it; a flush writes the rest back."""
    job = make(build, device)
    before = versions(job)
    assert any(".weights_" in name for name in before)
    for _ in range(4):
        job.step()
        for group in job.groups():
            group.emb_module.flush()
    assert versions(job) == before


@pytest.mark.parametrize("build", [Build(kernel=kernel) for kernel in KERNELS], ids=lambda build: build.kernel)
def test_steps_send_only_the_rows_that_they_touch(
    build: Build, device: torch.device, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    job = make(build, device)
    with attach(job, tmp_path, drain_every=1) as checkpointer:
        run(job, checkpointer, 1)
        checkpointer.mark().result(60)
        publisher = inside(checkpointer).publisher
        before = publisher.rows
        with caplog.at_level(logging.WARNING):
            job.step()
            checkpointer.mark().result(60)
        touched = {(name, int(value)) for name, value in _looked_up(job)}
        assert publisher.rows - before == len(touched)
    assert not [record for record in caplog.records if "outside" in record.message]


def _looked_up(job: Job) -> list[tuple[str, int]]:
    sparse = job.batch(job.number).sparse
    table = {"also_item": "item"}
    return [
        (table.get(name, name), int(value))
        for name, jagged in sparse.to_dict().items()
        for value in jagged.values().tolist()
    ]


@pytest.mark.pitfall(35)
@pytest.mark.parametrize(
    "build",
    [pytest.param(build, id=build.kernel, marks=covers(build)) for build in (Build(), Build(kernel="fused_uvm"))],
)
def test_a_write_in_place_is_seen_on_a_gpu(build: Build, device: torch.device, tmp_path: Path) -> None:
    job = make(build, device)
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 2)
        checkpointer.mark().result(60)
        with torch.no_grad():
            for group in job.groups():
                for weights in group.emb_module.split_embedding_weights():
                    weights.mul_(2)
        checkpointer.mark().result(60)
        expected = truth(job)
    assert restored(build, tmp_path, expected, device)[1] == []
