"""A log that takes a COMMIT and does not answer, as a hung disk or a cut-off broker: no rank is left waiting."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests import ranks
from tests.inside import inside
from tests.model import PLAN_2, trainer
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import CommitUnknownError, MarkerFailedError
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.save import coordinator

pytestmark = pytest.mark.distributed

HANG_S = 120.0
"""Against a hang alone: nothing rests on it."""


def _hangs_in_a_commit(uri: str) -> list[str]:
    """What the futures of markers 2 and 3 say while the log hangs; marker 4 is committed."""
    coordinator.PHASE_S = 3.0
    job, answers, append = trainer(PLAN_2), threading.Event(), FileLog.append_control
    answers.set()

    def hang(log: FileLog, *args: Any, **options: Any) -> int:
        answers.wait()
        return append(log, *args, **options)

    FileLog.append_control = hang  # type: ignore[method-assign]
    config = StreamConfig(uri=uri, marker_every=None, commit_timeout_s=3.0)
    with StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job}) as checkpointer:
        checkpointer.restore()

        def mark() -> Any:
            job.step()
            checkpointer.step()
            return checkpointer.mark()

        with inside(checkpointer).commit_timeout(HANG_S):
            mark().result(HANG_S)
        answers.clear()
        said = []
        for kind in (CommitUnknownError, MarkerFailedError):
            with pytest.raises(kind) as caught:
                mark().result(HANG_S)
            said.append(str(caught.value))
        dist.barrier()
        answers.set()
        with inside(checkpointer).commit_timeout(HANG_S):
            assert mark().result(HANG_S).marker == 4
    return said


def test_all_ranks_hear_in_time_that_the_log_does_not_answer_and_go_on_once_it_does(tmp_path: Path) -> None:
    first, second = ranks.run(2, _hangs_in_a_commit, f"file://{tmp_path}/log", timeout_s=3 * HANG_S)
    assert first == second
    unknown, failed = first
    assert unknown.startswith("COMMIT: the log or the store has not answered for 1")
    assert f"; the log waits for the disk, or the lock, of {tmp_path}/log/control.log" in unknown
    assert "has still not answered for an earlier marker" in failed
    assert "run stream-ckpt list once the log answers again" in unknown
    commits = Control(FileLog(tmp_path / "log")).refresh().commits
    assert [marker.marker for marker in commits] == [1, 2, 4]  # what nobody knew of is there; the next was never sent
