"""TorchRec's pipelines on their own streams: no changed row is missed, whichever batch is ahead."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec.distributed.train_pipeline.train_pipelines import (
    PrefetchTrainPipelineSparseDist,
    TrainPipelineBase,
    TrainPipelineFusedSparseDist,
    TrainPipelineSemiSync,
    TrainPipelineSparseDist,
)

from tests.gpu.job import Batch, Build, Job, attach, batch, covers, make, restored, truth

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 8
PREFETCHED = Build(optimizer="adam", kernel="fused_uvm_caching", more=(("prefetch_pipeline", True),))
CACHED = Build(optimizer="adam", kernel="fused_uvm_caching")
FUSED = Build(optimizer="adam")

PIPELINES: dict[str, Callable[[Job], Any]] = {
    "base": lambda job: TrainPipelineBase(job.dmp, job.optimizer, job.device),
    "sparse_dist": lambda job: TrainPipelineSparseDist(job.dmp, job.optimizer, job.device),
    "semi_sync": lambda job: TrainPipelineSemiSync(job.dmp, job.optimizer, job.device, start_batch=2),
    "prefetch": lambda job: PrefetchTrainPipelineSparseDist(job.dmp, job.optimizer, job.device),
    **{
        f"fused_sparse_dist_{stream}": lambda job, stream=stream: TrainPipelineFusedSparseDist(
            job.dmp, job.optimizer, job.device, emb_lookup_stream=stream
        )
        for stream in ("data_dist", "new", "current")
    },
}
CASES = [
    ("base", CACHED),
    ("sparse_dist", FUSED),
    ("sparse_dist", CACHED),
    ("semi_sync", FUSED),
    ("semi_sync", CACHED),
    ("prefetch", PREFETCHED),
    ("fused_sparse_dist_data_dist", FUSED),
    ("fused_sparse_dist_data_dist", CACHED),
    ("fused_sparse_dist_new", CACHED),
    ("fused_sparse_dist_current", CACHED),
]


def batches() -> Iterator[Batch]:
    """On the CPU: the pipeline moves them."""
    return iter([batch(number) for number in range(200, 200 + 2 * STEPS)])


@pytest.mark.parametrize(
    ("name", "build"),
    [
        pytest.param(name, build, id=f"{name}-{build.kernel}", marks=covers(build, pipeline=name))
        for name, build in CASES
    ],
)
def test_no_changed_row_is_missed(name: str, build: Build, device: torch.device, tmp_path: Path) -> None:
    job = make(build, device)
    with attach(job, tmp_path) as checkpointer:
        pipeline, source = PIPELINES[name](job), batches()
        for step in range(STEPS):
            pipeline.progress(source)
            checkpointer.step()
            if step % 3 == 1:
                checkpointer.mark().result(60)
        checkpointer.mark().result(60)
        expected = truth(job)
    assert restored(build, tmp_path, expected, device)[1] == []


@pytest.mark.covers(
    optimizer="adam", plan="tw", module="ebc", kernel="fused_uvm_caching", pipeline="prefetch", outcome="unverified"
)
def test_a_restore_behind_a_prefetched_batch_is_refused(device: torch.device, tmp_path: Path) -> None:
    from torchrec_stream_ckpt.errors import UnsupportedError

    job = make(PREFETCHED, device)
    with attach(job, tmp_path) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
    other = make(PREFETCHED, device)
    PIPELINES["prefetch"](other).fill_pipeline(batches())
    with attach(other, tmp_path) as checkpointer, pytest.raises(UnsupportedError, match="prefetched"):
        checkpointer.restore()
