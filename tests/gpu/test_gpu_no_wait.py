"""The step path queues work on the device and never waits for it: torch is told to raise where the host would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tests.gpu.job import Build, attach, covers, make, restored, truth
from tests.inside import inside

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")


@contextmanager
def waits_are_errors() -> Iterator[None]:
    """What torch itself lets the host wait for raises inside; what FBGEMM calls past torch is not seen."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "build", [pytest.param(Build(kernel=kernel), id=kernel, marks=covers(Build(kernel=kernel))) for kernel in KERNELS]
)
def test_a_step_boundary_that_drains_makes_the_host_wait_for_nothing(
    build: Build, device: torch.device, tmp_path: Path
) -> None:
    """Needs one CUDA device; no marker may be cut, and no sweep be left, while waits are errors.

    The device is idle at each boundary, so counts have arrived at the next one and every other step sends rows. The
    pinned memory of the ring has been made by the first marker.
    """
    job = make(build, device)
    with attach(job, tmp_path, drain_every=1) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        publisher, sent = inside(checkpointer).publisher, []
        for _ in range(6):
            job.step()
            torch.cuda.synchronize()
            before = publisher.rows
            with waits_are_errors():
                checkpointer.step()
            sent.append(publisher.rows - before)
        assert not inside(checkpointer).stranded  # a drain that raises is logged
        assert [rows > 0 for rows in sent] == 3 * [False, True]
        checkpointer.mark().result(60)
        expected = truth(job)
    assert restored(build, tmp_path, expected, device)[1] == []
