"""``close()`` meets a marker inside COMMIT: the future says what the log says, and the call ends in time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import ranks
from tests.inside import inside
from tests.model import PLAN_2, trainer
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import CommitUnknownError, MarkerFailedError, StreamCkptError
from torchrec_stream_ckpt.inner import Control

pytestmark = pytest.mark.distributed

SLOW_S = 3.0


def close(folder: Path, where: str, timeout_s: float) -> tuple[float, str]:
    """Close while COMMIT is slow; how long that took, and what became of the marker."""
    job = trainer(PLAN_2)
    settings = StreamConfig(uri=f"file://{folder}", marker_every=None)
    ours = StreamCheckpointer(job.dmp, job.optimizer, config=settings)
    job.step()
    ours.step()
    if dist.get_rank() == 0:
        control = inside(ours).tier.control
        append = control._append

        def slow(frame: Any) -> Any:
            if where == "before":
                time.sleep(SLOW_S)
            found = append(frame)
            if where == "after":
                time.sleep(SLOW_S)
            return found

        control._append = slow  # type: ignore[method-assign, assignment]
    future = ours.mark()
    time.sleep(1)  # the commit thread is in COMMIT
    dist.barrier()
    began = time.monotonic()
    ours.close(timeout_s)
    took = time.monotonic() - began
    try:
        error = future.exception(30)
    except TimeoutError:
        return took, "never settles"
    time.sleep(SLOW_S)
    if error is None:
        return took, "committed"
    assert isinstance(error, StreamCkptError), error
    return took, f"{type(error).__name__}: {error}"


@pytest.mark.parametrize("where", ["before", "after"])
def test_close_waits_for_the_outcome_within_its_bound(where: str, tmp_path: Path) -> None:
    for took, said in ranks.run(2, close, tmp_path, where, 60.0):
        assert said == "committed"
        assert took < 30
    assert Control(FileLog(tmp_path)).refresh().newest is not None


@pytest.mark.parametrize("where", ["before", "after"])
def test_a_close_that_gives_up_reports_no_marker_as_failed_that_is_there(where: str, tmp_path: Path) -> None:
    (_, first), (_, second) = ranks.run(2, close, tmp_path, where, 0.2)
    is_there = Control(FileLog(tmp_path)).refresh().newest is not None
    for said in (first, second):
        assert said != "never settles"
        if is_there:
            assert said == "committed" or said.startswith(CommitUnknownError.__name__), said
        else:
            assert said.startswith((MarkerFailedError.__name__, CommitUnknownError.__name__)), said
