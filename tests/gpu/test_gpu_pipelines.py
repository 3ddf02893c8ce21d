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
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

STEPS = 8
PREFETCHED = Build(optimizer="adam", kernel="fused_uvm_caching", more=(("prefetch_pipeline", True),))
CACHED = Build(optimizer="adam", kernel="fused_uvm_caching")
FUSED = Build(optimizer="adam")
AHEAD = {"TrainPipelineSemiSync": 1}
"""Lookups whose updates are still to come at a step boundary: a restored job makes them again, and counts them then."""

PIPELINES: dict[str, Callable[[Job], Any]] = {
    "TrainPipelineBase": lambda job: TrainPipelineBase(job.dmp, job.optimizer, job.device),
    "TrainPipelineSparseDist": lambda job: TrainPipelineSparseDist(job.dmp, job.optimizer, job.device),
    "TrainPipelineSemiSync": lambda job: TrainPipelineSemiSync(job.dmp, job.optimizer, job.device, start_batch=2),
    "PrefetchTrainPipelineSparseDist": lambda job: PrefetchTrainPipelineSparseDist(job.dmp, job.optimizer, job.device),
    **{
        f"TrainPipelineFusedSparseDist, lookup on stream {stream}": lambda job, stream=stream: (
            TrainPipelineFusedSparseDist(job.dmp, job.optimizer, job.device, emb_lookup_stream=stream)
        )
        for stream in ("data_dist", "new", "current")
    },
}
CASES = [
    ("TrainPipelineBase", CACHED),
    ("TrainPipelineSparseDist", FUSED),
    ("TrainPipelineSparseDist", CACHED),
    ("TrainPipelineSemiSync", FUSED),
    ("PrefetchTrainPipelineSparseDist", PREFETCHED),
    ("TrainPipelineFusedSparseDist, lookup on stream data_dist", FUSED),
    ("TrainPipelineFusedSparseDist, lookup on stream data_dist", CACHED),
    ("TrainPipelineFusedSparseDist, lookup on stream new", CACHED),
    ("TrainPipelineFusedSparseDist, lookup on stream current", CACHED),
]


def batches() -> Iterator[Batch]:
    """On the CPU: the pipeline moves them."""
    return iter([batch(number) for number in range(200, 200 + 2 * STEPS)])


@pytest.mark.pitfall(2, 9, 10)
@pytest.mark.parametrize(
    ("name", "build"),
    [
        pytest.param(
            name,
            build,
            id=f"{name}-{build.kernel}".replace(", lookup on stream ", "-"),
            marks=covers(build, pipeline=name),
        )
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
    ahead = AHEAD.get(name, 0)
    expected |= {entry: value - ahead for entry, value in expected.items() if entry.endswith(".iter")}
    assert restored(build, tmp_path, expected, device)[1] == []


@covers(
    CACHED,
    pipeline="TrainPipelineSemiSync",
    outcome="refused",
    why="`another batch was looked up between a lookup and its update`",
)
def test_a_lookup_ahead_of_an_update_is_refused_where_it_gives_the_slots_of_a_cache_away(
    device: torch.device, tmp_path: Path
) -> None:
    job = make(CACHED, device)
    with attach(job, tmp_path):
        pipeline, source = PIPELINES["TrainPipelineSemiSync"](job), batches()
        pipeline.progress(source)
        pipeline.progress(source)  # the first lookup that is ahead
        with pytest.raises(UnsupportedError, match="another batch was looked up between a lookup and its update"):
            pipeline.progress(source)


@covers(
    PREFETCHED,
    pipeline="PrefetchTrainPipelineSparseDist, restore after a prefetched batch",
    outcome="refused",
    why="`restore() would replace rows that a pipeline has prefetched`",
)
def test_a_restore_behind_a_prefetched_batch_is_refused(device: torch.device, tmp_path: Path) -> None:
    job = make(PREFETCHED, device)
    with attach(job, tmp_path) as checkpointer:
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
    other = make(PREFETCHED, device)
    PIPELINES["PrefetchTrainPipelineSparseDist"](other).progress(batches())  # the next batch stays prefetched
    with attach(other, tmp_path) as checkpointer, pytest.raises(UnsupportedError, match="prefetched"):
        checkpointer.restore()
