"""Dense optimizers whose step counters live on the GPU, and the dense part under NCCL and DDP."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

from tests.gpu.job import DENSE, Build, attach, make, restored, run, truth
from tests.model import differences

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]


@pytest.mark.parametrize("dense", DENSE)
def test_a_dense_optimizer_goes_on_bitwise(dense: str, device: torch.device, tmp_path: Path) -> None:
    build = Build(dense=dense)
    job = make(build, device)
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 3)
        checkpointer.mark().result(60)
    expected = truth(job)
    again, wrong = restored(build, tmp_path, expected, device)
    assert wrong == []
    assert {type(value) for state in again.dense.state.values() for value in state.values()} == {torch.Tensor}
    for one, other in zip(job.dense.state.values(), again.dense.state.values(), strict=True):
        assert {key: value.device for key, value in one.items()} == {key: value.device for key, value in other.items()}
    assert [again.step() for _ in range(3)] == [job.step() for _ in range(3)]
    assert [name for name in differences(truth(job), truth(again)) if not name.startswith("rng.")] == []


def test_gradients_that_are_views_of_the_buckets_of_ddp_are_no_state(device: torch.device, tmp_path: Path) -> None:
    """TorchRec asks DDP for such gradients; they belong to the step, and the restored job makes its own."""
    job = make(Build(), device)
    (wrapped,) = (each for each in job.dmp.modules() if isinstance(each, DistributedDataParallel))
    assert wrapped.gradient_as_bucket_view
    with attach(job, tmp_path) as checkpointer:
        run(job, checkpointer, 3)
        assert all(parameter.grad is not None for parameter in job.dmp.module.top.parameters())
        checkpointer.mark().result(60)
    expected = truth(job)
    again, wrong = restored(Build(), tmp_path, expected, device)
    assert wrong == []
    assert [again.step() for _ in range(3)] == [job.step() for _ in range(3)]
