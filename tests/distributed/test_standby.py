"""A hot spare takes over from trainers that were killed, or fenced: it has their newest marker, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import jobs, ranks, warm
from tests.inside import inside
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, Spec, differences, trainer, truth
from tests.parts import FileLog
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig, Takeover
from torchrec_stream_ckpt.errors import FencedError
from torchrec_stream_ckpt.inner import Control, Route
from torchrec_stream_ckpt.restore.session import Attempt
from torchrec_stream_ckpt.util.layout import DATA_DIR

pytestmark = pytest.mark.distributed


def train_on(spec: Spec, settings: StreamConfig, folder: Path) -> str:
    """Train until killed or fenced, and put the truth of each step aside."""
    job = trainer(spec)
    checkpointer = jobs.attach(job, settings)
    checkpointer.restore()
    try:
        while True:
            job.step()
            state = truth(job)  # aside before the marker of this step can exist
            path = folder / f"truth-{job.step_number}-{dist.get_rank()}.pt"
            torch.save(state, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            checkpointer.step()
            jobs.settle(checkpointer)
            time.sleep(0.05)  # a machine that has nothing but trainers on it would starve the spare
    except FencedError as error:
        return error.message


def stand_by(spec: Spec, settings: StreamConfig, folder: Path, takeover: Takeover) -> dict[str, Any]:
    """Be a spare; then two steps of its own, and a marker."""
    job = trainer(spec)
    job.step()  # another state: all of it must be replaced
    checkpointer = jobs.attach(job, settings)
    session = inside(checkpointer).session
    advance = session.advance

    def advancing(held: Attempt, behind: Route) -> int:
        rows = advance(held, behind)
        (folder / f"advanced-{behind.commit.marker}-{dist.get_rank()}").touch()
        return rows

    session.advance = advancing  # type: ignore[method-assign]
    restored = checkpointer.standby(takeover)
    assert restored is not None
    assert restored.proved == 1.0
    state = truth(job)
    job.step()
    checkpointer.step()
    job.step()
    checkpointer.step()
    committed = checkpointer.mark().result(60)
    last = truth(job)
    checkpointer.close()
    return {"restored": restored, "state": state, "committed": committed, "last": last}


def wait_for(what: Callable[[], bool], *running: ranks.Job) -> None:
    deadline = time.monotonic() + 240
    while not what():
        assert time.monotonic() < deadline
        for job in running:
            if job.pipes[0].poll(0):
                job.join(5)  # raises what it has to say
        time.sleep(0.05)


def check(found: list[dict[str, Any]], folder: Path, settings: StreamConfig) -> None:
    """Each rank of the spare has the truth that the trainer's rank put aside, and goes on."""
    for rank, one in enumerate(found):
        restored = one["restored"]
        lineage = Control(FileLog(Path(settings.uri.removeprefix("file://")))).refresh()
        assert restored.source.startswith("live 1:")
        assert restored.id == max(marker for marker in lineage.commits if marker.generation == 1)
        existed = min(rank, 1)
        expected = torch.load(folder / f"truth-{restored.step}-{existed}.pt")
        assert differences(expected, one["state"], rng=rank == existed) == []
        assert one["committed"].step == restored.step + 2
        assert one["committed"].generation == 3  # behind the fence
    again = warm.run(1, jobs.restore_once, PLAN_1, settings, str(found[0]["committed"].id), {})
    assert differences(found[0]["last"], again[0][0]) == []


@pytest.mark.parametrize(
    ("world", "spec", "after_s"),
    # The other one is told, as by whoever has killed it: a machine that is busy for seconds is no trainer that is dead.
    [(2, PLAN_2_OTHER, 10.0), (3, PLAN_3, None)],
    ids=["same world", "another world"],
)
def test_a_spare_takes_over_when_its_trainer_is_killed(
    world: int, spec: Spec, after_s: float | None, tmp_path: Path
) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=3)
    takeover = Takeover(after_s=after_s, trigger=None if after_s else tmp_path / "now", poll_s=0.05)
    spare = ranks.start(world, stand_by, spec, settings, tmp_path, takeover)
    live = ranks.start(2, train_on, PLAN_2, settings, tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("advanced-*-0"))) >= 2, spare, live)
        live.kill()
        live.reap()
        if after_s is None:
            (tmp_path / "now").touch()
        found = spare.join()
    finally:
        live.close()
        spare.close()
    check(found, tmp_path, settings)


def test_a_trainer_that_lives_is_fenced_by_the_spare_that_was_told_to_take_over(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}", marker_every=3)
    takeover = Takeover(after_s=None, trigger=tmp_path / "now", poll_s=0.05)
    spare = ranks.start(2, stand_by, PLAN_2, settings, tmp_path, takeover)
    live = ranks.start(2, train_on, PLAN_2, settings, tmp_path)
    try:
        wait_for(lambda: len(list(tmp_path.glob("advanced-*-0"))) >= 1, spare, live)
        (tmp_path / "now").touch()
        found = spare.join()
        assert all("has taken over" in said or "ended this trainer" in said for said in live.join())
    finally:
        live.close()
        spare.close()
    check(found, tmp_path, settings)


def stand_by_for_nothing(settings: StreamConfig, folder: Path) -> tuple[object, int]:
    job = trainer(PLAN_2)
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=settings, stateful={"loader": job})
    restored = checkpointer.standby(Takeover(after_s=0.1, trigger=folder / "now", poll_s=0.02))
    job.step()
    checkpointer.step()
    step = checkpointer.mark().result(60).step
    checkpointer.close()
    return restored, step


def test_a_spare_of_a_job_that_never_began_begins_it_when_it_is_told_to(tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path / 'log'}")
    spare = ranks.start(2, stand_by_for_nothing, settings, tmp_path)
    (tmp_path / "now").touch()
    assert spare.join() == [(None, 1), (None, 1)]
    assert (tmp_path / "log" / DATA_DIR).is_dir()
