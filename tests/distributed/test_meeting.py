"""Ranks that come to the attach in different ways: named at once, and on every rank that has come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import jobs, ranks
from tests.model import PLAN_2, trainer
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError

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
        assert "DMP has not made the dense part data parallel" in each
        assert f"rank={rank if rank in late else late[0]}" in each
        assert "call dmp.init_data_parallel() on all ranks first" in each


class Count:
    """A Stateful."""

    def __init__(self) -> None:
        self.value = dist.get_rank()

    def state_dict(self) -> dict[str, int]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.value = state["value"]


SETTINGS: dict[str, tuple[dict[str, Any], str]] = {
    "replicas": ({"replicas": "rank0"}, "replicas is 'same' on rank 0 and 'rank0' on rank 1"),
    "marker_every": ({"marker_every": 2}, "marker_every is 100 on rank 0 and 2 on rank 1"),
    "on_signal": ({"on_signal": "mark"}, "on_signal is None on rank 0 and 'mark' on rank 1"),
    "two": ({"fresh": True, "proof_bytes": 64}, "proof_bytes is 4194304 on rank 0 and 64 on rank 1; fresh is False on"),
    "paranoid": ({}, "paranoid is False on rank 0 and True on rank 1"),
}
HANDED_OVER: dict[str, tuple[tuple[str | None, str | None], str]] = {
    "one rank": (("stateful", None), "'x' is in stateful on rank 0 and not passed on rank 1"),
    "the other rank": ((None, "stateful"), "'x' is not passed on rank 0 and in stateful on rank 1"),
    "two kinds": (("stateful", "stateful_per_rank"), "'x' is in stateful on rank 0 and in stateful_per_rank on rank 1"),
    "rank0 alone": (("stateful_rank0", "stateful"), "'x' is in stateful_rank0 on rank 0 and in stateful on rank 1"),
    "rank0 on one": ((None, "stateful_rank0"), "'x' is not passed on rank 0 and in stateful_rank0 on rank 1"),
}


def differ(folder: Path) -> dict[str, str]:
    """What each case is refused with; the attach after them is not."""
    job, rank, said = trainer(PLAN_2), dist.get_rank(), {}
    for case, (more, _) in SETTINGS.items():
        settings = StreamConfig(uri=f"file://{folder}", **(more if rank == 1 else {}))
        with pytest.raises(ConfigError) as caught:
            StreamCheckpointer(job.dmp, job.optimizer, config=settings, paranoid=case == "paranoid" and rank == 1)
        said[case] = str(caught.value)
    settings = StreamConfig(uri=f"file://{folder}")
    for case, (kinds, _) in HANDED_OVER.items():
        kind = kinds[rank]
        given: dict[str, Any] = {kind: {"x": Count()}} if kind is not None else {}
        with pytest.raises(ConfigError) as caught:
            StreamCheckpointer(job.dmp, job.optimizer, config=settings, **given)
        said[case] = str(caught.value)
    StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful_per_rank={"x": Count()}).close()
    return said


def test_what_ranks_were_given_otherwise_is_named_on_all_of_them(tmp_path: Path) -> None:
    for said in ranks.run(2, differ, tmp_path):
        for case, (_, text) in {**SETTINGS, **HANDED_OVER}.items():
            assert text in said[case]
            assert "\n  Try: " in said[case]


# The claim at the end of a restore is told to the log at its beginning: a Kafka client connects meanwhile.


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
