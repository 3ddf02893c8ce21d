"""A cut that does not fit the ring stays open over steps: the update that overwrites its rows sends them first."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.job import Build, covers, make, truth
from tests.inside import inside
from tests.model import differences
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

KERNELS = ("fused", "fused_uvm", "fused_uvm_caching")
STEPS = 24


@pytest.mark.parametrize(
    "build",
    [
        pytest.param(Build(kernel=kernel), id=kernel, marks=covers(Build(kernel=kernel), pipeline="plain: an open cut"))
        for kernel in KERNELS
    ],
)
def test_rows_of_an_open_cut_are_sent_before_an_update_writes_them(
    build: Build, device: torch.device, tmp_path: Path
) -> None:
    """Three tables want three frames, and the ring has two."""
    config = StreamConfig(uri=f"file://{tmp_path}", marker_every=4, ring_bytes=2_000_000, drain_every=1000)
    job = make(build, device)
    at: dict[int, dict[str, torch.Tensor]] = {}
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job}) as checkpointer:
        step = 0
        while step < STEPS or checkpointer.stats().markers_committed < 2:
            step += 1
            job.step()
            at[step] = truth(job)
            checkpointer.step()
        saved = inside(checkpointer).capture.frozen.saved_rows
    assert saved > 0
    other = make(build, device)
    other.step()
    with StreamCheckpointer(other.dmp, other.optimizer, config=config, stateful={"loader": other}) as checkpointer:
        restored = checkpointer.restore()
        assert restored is not None
        assert restored.step > 4
        assert differences(at[restored.step], truth(other)) == []
