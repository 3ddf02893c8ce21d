"""While a cut is frozen or the broker stands still, training goes on in bounded memory, and what follows is exact."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.inside import inside
from tests.model import PLAN_2, PLAN_3, differences, truth
from tests.own_broker import OwnBroker
from tests.parts import open_log
from tests.pressure import RING, ROWS, Gate, cut, everywhere, large, steps, touch_everything
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import MarkerFailedError, RankLostError
from torchrec_stream_ckpt.format.control import parse_control
from torchrec_stream_ckpt.format.lineage import Lineage

pytestmark = pytest.mark.distributed

State = dict[str, torch.Tensor]
EVERY = 5


def committed(uri: str) -> dict[str, int]:
    """Marker -> its step."""
    log = open_log(uri)
    try:
        lineage = Lineage.of(parse_control(record) for _, record in log.read_control())
    finally:
        log.close()
    return {str(marker): commit.step for marker, commit in lineage.commits.items()}


def _restore(settings: StreamConfig, markers: list[str]) -> dict[str, State]:
    """(ranks of another plan) What each marker brings back."""
    found = {}
    for marker in markers:
        job = large(PLAN_3)
        job.step()
        with StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job}) as checkpointer:
            assert checkpointer.restore(marker) is not None
            found[marker] = truth(job)
    return found


# A broker that stands still.

STEPS_A_SECOND = 5


def _signal(pid: int, number: int) -> None:
    if dist.get_rank() == 0:
        os.kill(pid, number)
    dist.barrier()


def _outage(settings: StreamConfig, pid: int, outage_s: float) -> tuple[dict[int, State], dict[str, float], str]:
    """The truth at each cut, by number; what was counted; the marker after the outage.

    The broker stands still until this many steps were made: a step that waits for it would never end.
    """
    job, truths = large(PLAN_2), {}
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job})

    def train(count: int) -> None:
        for _ in range(count):
            job.step()
            cuts = inside(checkpointer).next_marker
            checkpointer.step()
            if inside(checkpointer).next_marker > cuts:
                truths[cuts] = truth(job)

    counted: dict[str, float] = {}
    truths[checkpointer.mark().result(60).marker] = truth(job)
    ring, publisher = inside(checkpointer).ring, inside(checkpointer).publisher
    train(2 * EVERY)
    while not everywhere(checkpointer.stats().markers_committed >= 2):  # one of the cadence
        train(1)
    waits, rows, first = ring.waits, publisher.rows, job.step_number
    _signal(pid, signal.SIGSTOP)
    try:
        end = time.monotonic() + outage_s
        while not everywhere(time.monotonic() >= end and job.step_number - first >= STEPS_A_SECOND * outage_s):
            train(1)
            time.sleep(0.02)  # other processes of the test machine want to live as well
    finally:
        _signal(pid, signal.SIGCONT)
    counted |= {
        "waits": ring.waits - waits,
        "over": ring.peak_bytes - ring.limit_bytes,
    }
    train(2 * EVERY)
    marker = checkpointer.mark().result(180)
    truths[marker.marker] = truth(job)
    counted["rows"] = publisher.rows - rows
    checkpointer.close()
    return truths, counted, str(marker.id)


def _check_outage(broker: OwnBroker, tmp_path: Path, outage_s: float, commit_timeout_s: float) -> int:
    """How many markers were committed."""
    status = broker.status()
    assert status.pid is not None
    settings = StreamConfig(
        uri=status.uri("job"),
        store=f"file://{tmp_path / 'store'}",
        marker_every=EVERY,
        **{**RING, "marker_budget_bytes": 1_000_000, "commit_timeout_s": commit_timeout_s},
    )
    results = ranks.run(2, _outage, settings, status.pid, outage_s, timeout_s=outage_s + 300)
    for _, counted, _ in results:
        assert counted["waits"] == 0
        assert counted["over"] <= 0
        assert counted["rows"] < ROWS / 2  # touched rows alone: the base was not sent again
    truths, _, last = results[0]
    markers = committed(settings.uri)
    assert last in markers
    assert all(marker.startswith("1:") for marker in markers)
    for marker, state in ranks.run(3, _restore, settings, list(markers)[-3:])[0].items():
        assert differences(truths[int(marker.split(":")[1])], state, rng=False) == [], marker
    return len(markers)


@pytest.mark.kafka
def test_a_broker_that_stands_still_for_seconds_stops_no_step(victim: OwnBroker, tmp_path: Path) -> None:
    assert _check_outage(victim, tmp_path, outage_s=6.0, commit_timeout_s=60.0) >= 3


@pytest.mark.slow
@pytest.mark.kafka
def test_a_broker_that_stands_still_for_a_minute_stops_no_step(victim: OwnBroker, tmp_path: Path) -> None:
    assert _check_outage(victim, tmp_path, outage_s=60.0, commit_timeout_s=10.0) >= 3


# Ranks that die.


def _dies(uri: str, directory: Path) -> None:
    """A marker, then a cut that cannot be sent, and rank 1 is killed in the midst of it."""
    job, gate = large(PLAN_2), Gate()
    settings = StreamConfig(uri=uri, marker_every=None, **RING)
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job})
    steps(job, checkpointer, 2)
    checkpointer.mark().result(60)
    state = truth(job)
    touch_everything(job)
    gate.shut()
    future = cut(checkpointer)
    steps(job, checkpointer, 2)
    assert inside(checkpointer).cuts.open
    if dist.get_rank() == 0:
        torch.save(
            {"state": state, "saved_rows": inside(checkpointer).capture.frozen.saved_rows}, directory / "marker.pt"
        )
        (directory / "frozen").touch()
    with pytest.raises(
        (RuntimeError, RankLostError)
    ):  # the training's own collectives miss the rank, or a vote of ours
        steps(job, checkpointer, 100_000)
    checkpointer.close(6)  # half of which the rest of the cut may wait for space: then it is given up
    error = future.exception(120)
    assert isinstance(error, MarkerFailedError)
    (directory / "heard.new").write_text(str(error))
    (directory / "heard.new").rename(directory / "heard.txt")


def test_a_rank_that_dies_while_a_cut_is_frozen_leaves_the_last_marker(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'log'}"
    job = ranks.start(2, _dies, uri, tmp_path)
    try:
        job.wait_for(tmp_path / "frozen")
        job.kill([1])
        job.wait_for(tmp_path / "heard.txt")
    finally:
        job.close()
    assert "a rank was lost while the marker was decided" in (tmp_path / "heard.txt").read_text()
    assert list(committed(uri)) == ["1:1"]
    expected = torch.load(tmp_path / "marker.pt")
    assert expected["saved_rows"] > 0
    found = ranks.run(3, _restore, StreamConfig(uri=uri), ["1:1"])[0]
    assert differences(expected["state"], found["1:1"], rng=False) == []
