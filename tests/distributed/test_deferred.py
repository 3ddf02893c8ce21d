"""A whole job that drains by counts of an earlier step boundary, as on a GPU, on a CPU: exact all the same."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from tests import jobs, warm
from tests.inside import inside
from tests.model import PLAN_2, PLAN_3, differences, trainer, truth
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.capture import attached_model
from torchrec_stream_ckpt.capture.hook import Capture

pytestmark = pytest.mark.distributed

STEPS = 13


def at_once(_device: torch.device) -> Callable[[], bool]:
    """In place of an event: the copy has been made by the next step boundary."""
    return lambda: True


def _train(uri: str, drain_every: int) -> tuple[dict[str, torch.Tensor], list[int], int]:
    """The truth at the last marker, the rows that each step has sent behind the first one, and all that were left."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(attached_model, "Capture", partial(Capture, defer=lambda _device: at_once))
        job = trainer(PLAN_2)
        settings = StreamConfig(uri=uri, marker_every=None, drain_every=drain_every, ring_bytes=3_000_000)
        with jobs.attach(job, settings) as ours:
            for _ in range(2):
                job.step()
                ours.step()
            ours.mark().result(60)
            publisher, sent = inside(ours).publisher, []
            for _ in range(STEPS):
                job.step()
                inside(ours).wait_for_log()  # a drain that finds the ring full sends later
                before = publisher.rows
                ours.step()
                sent.append(publisher.rows - before)
            before = publisher.rows
            ours.mark().result(60)
            return truth(job), sent, publisher.rows - before


def _restore(uri: str) -> dict[str, torch.Tensor]:
    job = trainer(PLAN_3)
    job.step()
    with jobs.attach(job, StreamConfig(uri=uri)) as ours:
        assert ours.restore() is not None
        return truth(job)


@pytest.mark.parametrize(("drain_every", "sends"), [(1, {2, 4, 6, 8, 10, 12}), (4, {3, 7, 11})])
def test_a_job_that_never_waits_for_its_counts_commits_what_its_tables_hold(
    drain_every: int, sends: set[int], tmp_path: Path
) -> None:
    """Counted at the boundary where a drain is due (of ``drain_every`` 4: the second one first), sent at the next."""
    uri = f"file://{tmp_path}"
    done = warm.run(2, _train, uri, drain_every)
    for _, sent, left in done:
        assert {step for step, rows in enumerate(sent, 1) if rows} == sends
        assert left
    assert differences(done[0][0], warm.run(3, _restore, uri)[0]) == []
