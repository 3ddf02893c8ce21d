"""Every fused optimizer, table placement and dtype that a GPU has: a marker comes back bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.job import ON_CPU, OPTIMIZERS, Build, attach, covers, make, restored, run, truth
from tests.model import differences
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")
ROUNDED = (("stochastic_rounding", True),)
BUILDS = [
    *(Build(optimizer=name, kernel=kernel) for name in OPTIMIZERS if name != "lars_sgd" for kernel in KERNELS),
    *(Build(dtype="fp16", optimizer=name, kernel=kernel) for name in ("sgd", "adagrad") for kernel in KERNELS),
    Build(dtype="fp16", more=ROUNDED),
    *(Build(module="ec", optimizer=name, kernel="fused_uvm_caching") for name in ("rowwise_adagrad", "adam")),
    *(Build(vbe=True, optimizer=name, kernel=kernel) for name in ("rowwise_adagrad", "adam") for kernel in KERNELS),
]


def _name(build: Build) -> str:
    parts = (build.module, build.optimizer, build.kernel, build.dtype, "vbe" * build.vbe, "rounded" * bool(build.more))
    return "-".join(part for part in parts if part)


def _each(builds: list[Build]) -> list[object]:
    return [pytest.param(build, id=_name(build), marks=covers(build)) for build in builds]


def _markers(build: Build, directory: Path, device: torch.device) -> dict[str, torch.Tensor]:
    """A job with a base, an older and a newest marker; the truth at the newest."""
    job = make(build, device)
    with attach(job, directory) as checkpointer:
        for _ in range(3):
            run(job, checkpointer, 3)
            checkpointer.mark().result(60)
        return truth(job)


@pytest.mark.pitfall(9, 26)
@pytest.mark.parametrize("build", _each(BUILDS))
def test_a_marker_comes_back_bit_for_bit(build: Build, device: torch.device, tmp_path: Path) -> None:
    expected = _markers(build, tmp_path, device)
    assert restored(build, tmp_path, expected, device)[1] == []


UNTRAINED = "Expected tensor 'row_counter_dev' to have scalar type Float, but found Half"


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(
            build, id=_name(build), marks=covers(build, outcome="unverified", why=f"FBGEMM fails: `{UNTRAINED}`")
        )
        for build in (Build(dtype="fp16", optimizer="adam", kernel=kernel) for kernel in KERNELS)
    ],
)
def test_what_fbgemm_cannot_train_on_a_gpu(build: Build, device: torch.device) -> None:
    """Its Adam takes the row counter in the dtype of the weights, also where no bias is corrected by rows."""
    job = make(build, device)
    with pytest.raises(RuntimeError, match=UNTRAINED):
        job.step()


@pytest.mark.parametrize("build", _each([Build(optimizer=name) for name in ON_CPU]))
def test_a_marker_of_a_gpu_comes_back_on_a_cpu(build: Build, device: torch.device, tmp_path: Path) -> None:
    expected = _markers(build, tmp_path, device)
    assert restored(build, tmp_path, expected, torch.device("cpu"))[1] == []


@pytest.mark.parametrize("build", _each([Build(optimizer=name) for name in ON_CPU]))
def test_a_marker_of_a_cpu_comes_back_on_a_gpu(build: Build, device: torch.device, tmp_path: Path) -> None:
    expected = _markers(build, tmp_path, torch.device("cpu"))
    assert restored(build, tmp_path, expected, device)[1] == []


@pytest.mark.parametrize(
    "build", _each([Build(optimizer="adam"), Build(dtype="fp16", more=ROUNDED), Build(optimizer="adagrad")])
)
def test_the_continued_job_is_bitwise_the_uninterrupted_one(build: Build, device: torch.device, tmp_path: Path) -> None:
    job = make(build, device)
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 3)
        checkpointer.mark().result(60)
    expected = truth(job)
    again, wrong = restored(build, tmp_path, expected, device)
    assert wrong == []
    # Both draw from one generator of the device (dense dropout, stochastic rounding): each from the same state.
    random = torch.cuda.get_rng_state()
    losses = [job.step() for _ in range(3)]
    torch.cuda.set_rng_state(random)
    assert [again.step() for _ in range(3)] == losses
    assert [name for name in differences(truth(job), truth(again)) if not name.startswith("rng.")] == []


@pytest.mark.parametrize("build", _each([Build(kernel=kernel) for kernel in KERNELS]))
def test_drains_that_find_little_space_lose_nothing(build: Build, device: torch.device, tmp_path: Path) -> None:
    job = make(build, device)
    with attach(job, tmp_path, ring_bytes=2_000_000, sweep_bytes=4_000) as checkpointer:
        run(job, checkpointer, 10)
        checkpointer.mark().result(60)
        expected = truth(job)
    assert restored(build, tmp_path, expected, device)[1] == []


@pytest.mark.parametrize("build", _each([Build(optimizer="adam", kernel=kernel) for kernel in KERNELS]))
def test_a_drain_between_forward_and_backward_loses_nothing(build: Build, device: torch.device, tmp_path: Path) -> None:
    job = make(build, device)
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 1)
        checkpointer.mark().result(60)
        loss, _ = job.dmp(job.batch(70))
        checkpointer.step()
        loss.backward()
        checkpointer.step()
        checkpointer.mark().result(60)
        expected = truth(job)
    assert restored(build, tmp_path, expected, device)[1] == []


@pytest.mark.parametrize("build", _each([Build(optimizer="adam", kernel=kernel) for kernel in KERNELS]))
def test_the_oracle_finds_no_difference(build: Build, device: torch.device, tmp_path: Path) -> None:
    job = make(build, device)
    config = StreamConfig(uri=f"file://{tmp_path}", marker_every=None)
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, paranoid=True) as checkpointer:
        for _ in range(3):
            run(job, checkpointer, 2)
            checkpointer.mark().result(60)
