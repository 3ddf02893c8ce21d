"""A rank that freezes, and calls that one rank makes alone: all others are told in time, and by name."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests import ranks
from tests.inside import inside
from tests.model import PLAN_2, Trainer, trainer
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.dense.rank_agreement import meet
from torchrec_stream_ckpt.errors import ConfigError, MarkerFailedError, RankLostError, StreamCkptError
from torchrec_stream_ckpt.ranks import collective
from torchrec_stream_ckpt.save.coordinator import Coordinator, CutOrder, MarkerVote

pytestmark = pytest.mark.distributed

HANG_S = 240.0
"""Against a hang alone: nothing rests on it."""
COMMIT_S = 4.0
"""How long a marker waits for a rank that does not come."""


def _attach(uri: str) -> tuple[Trainer, StreamCheckpointer]:
    job = trainer(PLAN_2)
    config = StreamConfig(uri=uri, marker_every=None, commit_timeout_s=COMMIT_S)
    return job, StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job})


def _different_calls(uri: str) -> str:
    _, checkpointer = _attach(uri)
    call = checkpointer.restore if dist.get_rank() == 0 else checkpointer.step
    with pytest.raises(ConfigError) as caught:
        call()
    with pytest.raises(ConfigError):
        checkpointer.mark()  # such ranks are in step no more
    checkpointer.close()
    return str(caught.value)


def test_ranks_in_different_calls_are_named_on_all_of_them(tmp_path: Path) -> None:
    for said in ranks.run(2, _different_calls, f"file://{tmp_path}"):
        assert said.startswith("rank 0 is in restore(), rank 1 is in step()")
        assert "make every call on all ranks, at the same step boundary" in said
    assert not (tmp_path / "control.log").exists()


def _attaches_alone(done: Path) -> str:
    meet(None, None, 30)
    if dist.get_rank() == 1:
        while not done.exists():
            time.sleep(0.05)
        return ""
    with pytest.raises(RankLostError) as caught:
        meet(None, None, 0.5)  # as a StreamCheckpointer does first of all
    done.touch()
    return str(caught.value)


def test_a_rank_that_does_not_attach_is_named(tmp_path: Path) -> None:
    said, _ = ranks.run(2, _attaches_alone, tmp_path / "done")
    assert "in StreamCheckpointer() for rank 1" in said


def _closes_alone(uri: str) -> str:
    _, checkpointer = _attach(uri)
    checkpointer.restore()
    if dist.get_rank() == 1:
        checkpointer.close()
        return ""
    with pytest.raises(StreamCkptError) as caught:
        checkpointer.mark().result(60)
    checkpointer.close(1.0)
    return str(caught.value)


def test_a_rank_that_has_closed_is_named_to_the_one_that_marks(tmp_path: Path) -> None:
    said, _ = ranks.run(2, _closes_alone, f"file://{tmp_path}")
    assert "rank 1 has closed its StreamCheckpointer" in said
    assert "gloo" not in said


def _freeze(uri: str, during: str, told: Path) -> None:
    """Rank 1 stops; rank 0 writes down what it is told."""
    job, checkpointer = _attach(uri)
    said: StreamCkptError | None = None
    if during != "restore":
        checkpointer.restore()
        job.step()
        checkpointer.step()
        with inside(checkpointer).commit_timeout(HANG_S):
            checkpointer.mark().result(HANG_S)
        checkpointer.step()  # a boundary without a marker
        future = checkpointer.mark() if during in ("future", "close") else None
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        if during == "close":
            checkpointer.close(1.0)  # its marker in flight fails later
        if during == "restore":
            checkpointer.restore()
        elif future is not None:
            future.result(60)
        else:
            checkpointer.mark().result(60)
    except StreamCkptError as error:
        said = error
    checkpointer.close(1.0)
    told.write_text(f"{type(said).__name__}: {said}")
    os._exit(0)  # the process group cannot be left with a frozen rank in it


@pytest.mark.parametrize(
    ("during", "kind"),
    [
        ("future", MarkerFailedError),
        ("close", MarkerFailedError),
        ("mark", RankLostError),
        pytest.param("restore", RankLostError, marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_freezes_is_named_and_nothing_waits_for_it_for_good(
    during: str, kind: type[Exception], tmp_path: Path
) -> None:
    told = tmp_path / "told"
    job = ranks.start(2, _freeze, f"file://{tmp_path}/log", during, told)
    try:
        job.processes[0].join(HANG_S)
        said = told.read_text()
    finally:
        job.kill()
        job.reap()
    assert said.startswith(kind.__name__)
    assert "rank 0 has waited" in said
    assert "for rank 1 (no sign of life: frozen, dead or cut off)" in said


def _freeze_at_attach(uri: str, told: Path) -> None:
    """Rank 1 stops before it makes its StreamCheckpointer; rank 0 writes down what it is told."""
    job = trainer(PLAN_2)
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    config = StreamConfig(uri=uri, marker_every=None, commit_timeout_s=1.0)
    with pytest.raises(RankLostError) as caught:
        StreamCheckpointer(job.dmp, job.optimizer, config=config)
    told.write_text(str(caught.value))
    os._exit(0)


@pytest.mark.slow
def test_a_rank_that_freezes_before_the_attach_is_named_to_the_others(tmp_path: Path) -> None:
    told = tmp_path / "told"
    job = ranks.start(2, _freeze_at_attach, f"file://{tmp_path}/log", told)
    try:
        job.processes[0].join(HANG_S)
        said = told.read_text()
    finally:
        job.kill()
        job.reap()
    assert "in StreamCheckpointer() for rank 1" in said


def _steps_after_a_close(uri: str) -> str:
    """Rank 1 closes at a boundary at which the others go on, with markers by cadence."""
    job = trainer(PLAN_2)
    config = StreamConfig(uri=uri, marker_every=1, commit_timeout_s=COMMIT_S)
    checkpointer = StreamCheckpointer(job.dmp, job.optimizer, config=config, stateful={"loader": job})
    checkpointer.restore()
    if dist.get_rank() == 1:
        checkpointer.close()
        return ""
    said = ""
    for _ in range(5):  # a step ends with the vote of the one before
        try:
            checkpointer.step()
        except StreamCkptError as error:
            said = str(error)
            break
    checkpointer.close(1.0)
    return said


def test_a_rank_that_has_closed_is_named_to_the_one_that_steps(tmp_path: Path) -> None:
    said, _ = ranks.run(2, _steps_after_a_close, f"file://{tmp_path}")
    assert "rank 1 has closed its StreamCheckpointer" in said
    assert "gloo" not in said


def _one_save_is_left_out(uri: str, left_out_by: int, pause_s: float) -> list[str]:
    """A rank gives a marker up before it saves dense state, as one does that still saves an earlier one; all go on."""
    if pause_s:
        made = collective.new_group
        collective.new_group = lambda _: made(pause_s - 3)  # gloo's own time-out, which ends a group for good
    job, checkpointer = _attach(uri)
    checkpointer.restore()
    prepare, left_out = Coordinator.prepare, []

    def once(self: Coordinator, cut: CutOrder, deadline: float) -> MarkerVote:
        if dist.get_rank() == left_out_by and cut.marker == 2:
            left_out.append(cut.marker)
            return MarkerVote(cut.marker, cut.step, "it still saves an earlier one")
        return prepare(self, cut, deadline)

    Coordinator.prepare = once  # type: ignore[method-assign]
    said = []
    for number in range(1, 5):
        job.step()
        checkpointer.step()
        late_s = COMMIT_S if number == 2 else HANG_S
        try:
            with inside(checkpointer).commit_timeout(late_s):
                said.append(str(checkpointer.mark().result(HANG_S).marker))
        except MarkerFailedError as error:
            said.append(error.message)
            time.sleep(pause_s)
    checkpointer.close()
    assert bool(left_out) == (dist.get_rank() == left_out_by)
    return said


@pytest.mark.parametrize("pause_s", [0.0, 9.0], ids=["at once", "after a pause"])
@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_save_the_same_marker_again_after_one_of_them_left_one_out(
    rank: int, pause_s: float, tmp_path: Path
) -> None:
    """DCP's collectives do not say whose they are: the other rank stayed a marker behind, for ever."""
    for said in ranks.run(2, _one_save_is_left_out, f"file://{tmp_path}", rank, pause_s):
        assert said[0] == "1"
        assert "it still saves an earlier one" in said[1]
        assert said[2:] == ["3", "4"]
