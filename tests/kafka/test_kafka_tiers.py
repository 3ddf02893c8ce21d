"""Two tiers with a real broker: it stops for a while, a relay catches up, a restart here reads nothing there."""

from __future__ import annotations

import os
import shutil
import signal
import uuid
from pathlib import Path
from typing import Any

import pytest

from tests import jobs, ranks
from tests.inside import inside
from tests.jobs import Truths, attach
from tests.model import PLAN_2, PLAN_3, Spec, differences, trainer, truth
from tests.own_broker import OwnBroker
from tests.parts import open_tiers, state_of
from tests.tiered import config
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.util.types import LogSpan

pytestmark = [pytest.mark.kafka, pytest.mark.distributed]

STEPS = 8


def train_through_an_outage(spec: Spec, settings: StreamConfig, broker: int) -> tuple[Truths, list[int]]:
    """The broker stands still from step 3 until step 6 is over: truth, markers that the inner tier had then."""
    job = trainer(spec)
    checkpointer = attach(job, settings)
    assert checkpointer.restore() is None
    truths: Truths = {}
    committed: list[int] = []
    for step in range(1, STEPS + 1):
        if step in (3, 7) and os.environ["RANK"] == "0":
            os.kill(broker, signal.SIGSTOP if step == 3 else signal.SIGCONT)
        job.step()
        checkpointer.step()
        checkpointer.mark().result(60)
        truths[job.step_number] = truth(job)
        if step == 6:
            committed = [marker.marker for marker in inside(checkpointer).tier.control.refresh().commits]
    checkpointer.close()
    return truths, committed


def no_read(span: LogSpan) -> Any:
    raise AssertionError(f"rows were read from the outer tier: {span}")


def restore_without_reading_the_outer_tier(spec: Spec, settings: StreamConfig) -> tuple[dict[str, Any], int, str]:
    job = trainer(spec)
    job.step()
    checkpointer = attach(job, settings)
    inside(checkpointer).outer_tier.log.read = no_read  # type: ignore[method-assign]
    restored = checkpointer.restore()
    assert restored is not None
    state = truth(job)
    checkpointer.close()
    return state, restored.step, restored.source


def test_training_goes_on_through_an_outage_and_the_relay_catches_up(victim: OwnBroker, tmp_path: Path) -> None:
    status = victim.status()
    assert status.pid is not None
    inner = tmp_path / "inner"
    settings = config(
        inner, status.uri(f"job-{uuid.uuid4().hex[:8]}"), marker_every=None, store=str(tmp_path / "store")
    )
    results = ranks.run(2, train_through_an_outage, PLAN_2, settings, status.pid)
    truths = [each for each, _ in results]
    assert results[0][1] == [1, 2, 3, 4, 5, 6], "while the broker stood still"
    tiers = open_tiers(settings)
    assert state_of(tiers)["outer_newest"] == f"1:{STEPS}"
    for found in ranks.run(2, restore_without_reading_the_outer_tier, PLAN_2, settings):
        check(found, truths[0], STEPS, "inner: log")
    shutil.rmtree(inner)
    for rank, found in enumerate(ranks.run(3, jobs.restore_once, PLAN_3, settings, None, {})):
        check(found, truths[0], STEPS, "outer: log", rng=rank == 0)
    for found in ranks.run(2, jobs.restore_once, PLAN_2, settings, "1:4", {})[:1]:
        check(found, truths[0], 4, "outer: log")
    victim.stop()
    with pytest.raises(ranks.RankFailed, match=LogUnavailableError.__name__):
        ranks.run(2, jobs.restore_once, PLAN_2, settings, None, {})


def check(found: tuple[dict[str, Any], int, str], truths: Truths, step: int, source: str, *, rng: bool = False) -> None:
    state, at, where = found
    assert (at, where) == (step, source)
    assert differences(truths[step], state, rng=rng) == []
