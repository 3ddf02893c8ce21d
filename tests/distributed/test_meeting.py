"""The dense part is not data parallel on one rank: named at once, and on every rank that has come."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist

from tests import ranks
from tests.model import PLAN_2, trainer
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import UnsupportedError

pytestmark = pytest.mark.distributed


def attach(folder: Path, late: list[int]) -> str:
    job = trainer(PLAN_2)
    if dist.get_rank() in late:
        job.dmp._ddp_wrapped = False  # as init_data_parallel=False leaves it
    settings = StreamConfig(uri=f"file://{folder}", commit_timeout_s=300)
    with pytest.raises(UnsupportedError) as caught:
        StreamCheckpointer(job.dmp, job.optimizer, config=settings)
    job.dmp._ddp_wrapped = True
    dist.barrier()
    StreamCheckpointer(job.dmp, job.optimizer, config=settings).close()
    return str(caught.value)


@pytest.mark.parametrize("late", [[0], [1], [0, 1]])
def test_a_rank_that_is_not_data_parallel_is_named_on_all_ranks(late: list[int], tmp_path: Path) -> None:
    said = ranks.run(2, attach, tmp_path, late)
    for rank, each in enumerate(said):
        assert "the dense part is not data parallel yet" in each
        assert f"rank={rank if rank in late else late[0]}" in each
        assert "call dmp.init_data_parallel() on all ranks first" in each
