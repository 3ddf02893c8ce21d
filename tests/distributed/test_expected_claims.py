"""The claim at the end of a restore is told to the log at its beginning: a Kafka client connects meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import jobs, ranks
from tests.model import PLAN_2, trainer
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamConfig

pytestmark = pytest.mark.distributed

CALLS = ("expect_append", "read", "append_control")


def _train(settings: StreamConfig) -> None:
    job = trainer(PLAN_2)
    with jobs.attach(job, settings) as checkpointer:
        checkpointer.restore()
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)


def _noting(calls: list[str], name: str, does: Callable[..., Any]) -> Callable[..., Any]:
    def noting(*args: Any, **named: Any) -> Any:
        calls.append(name)
        return does(*args, **named)

    return noting


def _restore(settings: StreamConfig) -> tuple[int, list[str]]:
    """What a rank asks of the log until the restore has returned."""
    job = trainer(PLAN_2)
    calls: list[str] = []
    with pytest.MonkeyPatch.context() as patch, jobs.attach(job, settings, paranoid=False) as checkpointer:
        for name in CALLS:
            patch.setattr(FileLog, name, _noting(calls, name, getattr(FileLog, name)))
        assert checkpointer.restore() is not None
        return dist.get_rank(), list(dict.fromkeys(calls))


def test_rank_0_alone_says_that_it_will_claim_before_rows_are_read(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}")
    ranks.run(2, _train, settings)
    assert dict(ranks.run(2, _restore, settings)) == {0: list(CALLS), 1: ["read"]}
