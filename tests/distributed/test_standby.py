"""A hot spare takes over from trainers that were killed, or fenced: it has their newest marker, bit for bit."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import jobs, ranks, warm, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, THREE, TWO
from tests.evolving import restored
from tests.inside import inside
from tests.laps import config
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, Spec, differences, trainer, truth
from tests.parts import FileLog
from tests.zoo import MARK
from tests.zoo_models import Model, Plan
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig, Takeover
from torchrec_stream_ckpt.errors import FencedError, SchemaMismatchError, StoreUnavailableError
from torchrec_stream_ckpt.inner import Control, Route
from torchrec_stream_ckpt.restore.session import Attempt
from torchrec_stream_ckpt.save.generation_end import Ending
from torchrec_stream_ckpt.util.layout import DATA_DIR
from torchrec_stream_ckpt.util.types import MarkerId

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


# Spares of a job whose model changes: one of the old model ends and fences nobody, one of the new model takes over.


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


def stand_by_new(
    model: Model, plan: Plan, settings: StreamConfig, takeover: Takeover, folder: Path
) -> SchemaMismatchError | tuple[Any, ...]:
    """A spare: why it ended; or what it held when it took over, and at a marker of its own."""
    job = zoo.build(model, plan)
    job.step = 900
    zoo.train(job)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:

        def loading(load: Callable[[], Any]) -> Any:
            found = load()
            (folder / "loaded").touch()
            return found

        inside(checkpointer).at_newest_rows(loading)
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
    spare = ranks.start(2, stand_by_new, OLD, TWO, settings, takeover, tmp_path)
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
        1, stand_by_new, NEW, ALONE, settings, Takeover(after_s=None, trigger=trigger, poll_s=0.05), tmp_path
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

        def loading(load: Callable[[], Any]) -> Any:
            seen.append(newest(settings))
            if len(seen) < 4:
                raise StoreUnavailableError("the store does not answer")
            return load()

        inside(checkpointer).at_newest_rows(loading)
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
    (error,) = ranks.run(1, stand_by_new, OLD, ALONE, settings, Takeover(trigger=trigger, poll_s=0.05), tmp_path)
    assert isinstance(error, SchemaMismatchError)
    assert newest(settings) == 1


def test_a_spare_of_the_new_model_takes_over_a_job_that_has_changed(tmp_path: Path) -> None:
    settings = config(tmp_path / "log")
    ranks.run(2, killed, zoo.start, OLD, TWO, settings, EVENTS)
    said = ranks.run(2, killed, restored, NEW, TWO, settings, None, CHANGES, ("train", MARK))
    spare = ranks.start(
        3,
        stand_by_new,
        NEW,
        THREE,
        settings,
        Takeover(after_s=None, trigger=tmp_path / "now", poll_s=0.05),
        tmp_path,
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
