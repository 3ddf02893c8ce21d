"""Spares of a job whose model changes: one of the old model ends and fences nobody, one of the new model takes over."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests import ranks, warm, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, THREE, TWO
from tests.distributed.test_standby import wait_for
from tests.evolving import restored
from tests.inside import inside
from tests.laps import config
from tests.model import differences
from tests.parts import FileLog
from tests.zoo import MARK
from tests.zoo_models import Model, Plan
from torchrec_stream_ckpt import StreamConfig, Takeover
from torchrec_stream_ckpt.errors import SchemaMismatchError, StoreUnavailableError
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.save.generation_end import Ending
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed


def claim_only(settings: StreamConfig) -> None:
    """A trainer of the changed model that ends before its first marker."""
    with zoo.attach(zoo.build(NEW, TWO), settings, paranoid=False) as checkpointer:
        assert checkpointer.restore(changes=CHANGES) is not None


def killed(play: Callable[..., Any], *args: Any) -> Any:
    """What a trainer does that has no last word: a spare waits for none of those that finish."""
    Ending.say = lambda *_: None  # type: ignore[method-assign]
    return play(*args)


def change(settings: StreamConfig, *, marks: bool) -> None:
    """Restore the job into the new model."""
    if marks:
        ranks.run(2, killed, restored, NEW, TWO, settings, None, CHANGES, EVENTS)
    else:
        ranks.run(2, killed, claim_only, settings)


def stand_by(
    model: Model, plan: Plan, settings: StreamConfig, takeover: Takeover, folder: Path
) -> SchemaMismatchError | tuple[Any, ...]:
    """A spare: why it ended; or what it held when it took over, and at a marker of its own."""
    job = zoo.build(model, plan)
    job.step = 900
    zoo.train(job)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        session = inside(checkpointer).session
        load = session.newest_rows

        def loading() -> Any:
            found = load()
            (folder / "loaded").touch()
            return found

        session.newest_rows = loading  # type: ignore[method-assign]
        try:
            found = checkpointer.standby(takeover)
        except SchemaMismatchError as error:
            return error
        state = zoo.truth(job)
        zoo.play(job, checkpointer, ("train", MARK))
        return found, state, job.marks


def newest(settings: StreamConfig) -> int:
    return Control(FileLog(Path(settings.uri.removeprefix("file://")))).refresh().newest_generation


@pytest.mark.parametrize("marks", [False, True], ids=["claimed", "committed"])
@pytest.mark.parametrize("told", [False, True], ids=["silence", "trigger"])
def test_a_spare_that_holds_the_old_model_ends_and_fences_nobody(*, told: bool, marks: bool, tmp_path: Path) -> None:
    """Before a takeover can be due, and where it is due at once."""
    settings, trigger = config(tmp_path / "log"), tmp_path / "now"
    ranks.run(2, killed, zoo.start, OLD, TWO, settings, EVENTS)
    if told:
        change(settings, marks=marks)
        trigger.touch()
    takeover = Takeover(after_s=None, trigger=trigger, poll_s=0.05)
    spare = ranks.start(2, stand_by, OLD, TWO, settings, takeover, tmp_path)
    try:
        if not told:
            wait_for((tmp_path / "loaded").exists, spare)
            change(settings, marks=marks)
        for error in spare.join():
            assert isinstance(error, SchemaMismatchError)
            if told and marks:
                assert "in Python:\nchanges = Changes(" in str(error)
            else:
                assert "the trainer's model differs from this spare's" in error.message
                assert error.hint == "restart the spare with the trainer's model"
                assert "generation=2" in str(error)
    finally:
        spare.close()
    assert newest(settings) == 2
    ranks.run(2, killed, restored, NEW, TWO, settings, None, CHANGES, ("train", MARK))


def test_a_spare_of_the_new_model_does_not_fence_a_trainer_that_went_back_to_the_old_one(tmp_path: Path) -> None:
    settings, trigger = config(tmp_path / "log"), tmp_path / "now"
    ranks.run(2, killed, zoo.start, OLD, TWO, settings, EVENTS)
    ranks.run(2, killed, restored, NEW, TWO, settings, None, CHANGES, ("train", MARK))
    spare = ranks.start(
        1, stand_by, NEW, ALONE, settings, Takeover(after_s=None, trigger=trigger, poll_s=0.05), tmp_path
    )
    try:
        wait_for((tmp_path / "loaded").exists, spare)
        ranks.run(2, killed, zoo.resume, OLD, TWO, settings, "1:2", ())  # it ends before its first marker
        trigger.touch()
        (error,) = spare.join()
    finally:
        spare.close()
    assert isinstance(error, SchemaMismatchError)
    assert "with changes, or from a marker before a change" in error.message
    assert newest(settings) == 3


def stand_by_in_vain(settings: StreamConfig, takeover: Takeover) -> tuple[list[int], str]:
    """A spare that is due at once, and whose store does not answer at first: generations that it has seen meanwhile."""
    job, seen = zoo.build(OLD, ALONE), list[int]()
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        session = inside(checkpointer).session
        load = session.newest_rows

        def loading() -> Any:
            seen.append(newest(settings))
            if len(seen) < 4:
                raise StoreUnavailableError("the store does not answer")
            return load()

        session.newest_rows = loading  # type: ignore[method-assign]
        found = checkpointer.standby(takeover)
        assert found is not None
        return seen, str(found.id)


def test_a_spare_that_could_not_load_a_marker_fences_nobody(tmp_path: Path) -> None:
    settings, trigger = config(tmp_path / "log"), tmp_path / "now"
    ranks.run(2, killed, zoo.start, OLD, TWO, settings, EVENTS)
    trigger.touch()
    (seen, marker), *_ = ranks.run(1, stand_by_in_vain, settings, Takeover(trigger=trigger, poll_s=0.01))
    assert (seen, marker) == ([1, 1, 1, 1], "1:2")


def claims_alone(settings: StreamConfig) -> None:
    """A trainer of the new model that has committed nothing."""
    with zoo.attach(zoo.build(NEW, ALONE), settings, paranoid=False) as checkpointer:
        checkpointer.step()


def test_a_spare_of_another_model_does_not_fence_a_trainer_without_a_marker(tmp_path: Path) -> None:
    settings, trigger = config(tmp_path / "log"), tmp_path / "now"
    ranks.run(1, claims_alone, settings)
    trigger.touch()
    (error,) = ranks.run(1, stand_by, OLD, ALONE, settings, Takeover(trigger=trigger, poll_s=0.05), tmp_path)
    assert isinstance(error, SchemaMismatchError)
    assert newest(settings) == 1


def test_a_spare_of_the_new_model_takes_over_a_job_that_has_changed(tmp_path: Path) -> None:
    settings = config(tmp_path / "log")
    ranks.run(2, killed, zoo.start, OLD, TWO, settings, EVENTS)
    said = ranks.run(2, killed, restored, NEW, TWO, settings, None, CHANGES, ("train", MARK))
    spare = ranks.start(
        3, stand_by, NEW, THREE, settings, Takeover(after_s=None, trigger=tmp_path / "now", poll_s=0.05), tmp_path
    )
    try:
        wait_for((tmp_path / "loaded").exists, spare)
        again = ranks.run(2, killed, zoo.resume, NEW, TWO, settings, None, EVENTS)
        (tmp_path / "now").touch()
        found = spare.join()
    finally:
        spare.close()
    last = max(again[0][1], key=MarkerId.parse)
    assert said[0][2].keys() == {"2:3"}
    for rank, (taken, state, marks) in enumerate(found):
        expected = again[min(rank, 1)][1][last]
        assert str(taken.id) == last
        assert differences(expected, state, rng=rank < 2) == []
        (mark,) = marks
        (there, _), *_ = warm.run(1, zoo.resume, NEW, ALONE, settings, mark, ())
        assert differences(marks[mark], there, rng=rank == 0) == []
    assert newest(settings) > 4
