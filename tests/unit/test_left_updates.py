"""Updates at which a follower's loop was left, or that broke off, when the trainer then goes on from another marker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import stores
from tests.followers import (
    LOAD,
    MARKER,
    ROLLBACK,
    ROWS,
    Replica,
    begun,
    following,
    held,
    leave,
    truth,
    wait_for,
    weights_at,
    weights_in,
)
from tests.parts import Policy, trim_log
from tests.synthetic import Image, Job
from tests.unit.read_job import flipped
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import CorruptionError, ReplicaNotReadyError, StoreUnavailableError
from torchrec_stream_ckpt.extras.follower.source import FollowedJob
from torchrec_stream_ckpt.extras.follower.updates import Changed
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.util.types import MarkerId

NEWEST = MarkerId(1, 4)
HALF_OR_WHOLE = pytest.mark.parametrize("whole", [False, True], ids=["half", "whole"])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return begun(tmp_path / "log")


@pytest.fixture
def replica(job: Job, tmp_path: Path) -> Iterator[Replica]:
    with following(job, tmp_path) as replica:
        yield replica


@pytest.fixture
def eager(job: Job, tmp_path: Path) -> Iterator[Replica]:
    with following(job, tmp_path, "rows") as replica:
        yield replica


@HALF_OR_WHOLE
def test_its_rows_do_not_stay_when_the_trainer_goes_on_from_an_older_marker(
    job: Job, replica: Replica, whole: bool
) -> None:
    older = job.commit()
    replica.catch_up()
    job.touch()
    job.commit()
    leave(replica, MARKER, whole=whole)
    job.begin(older.id)
    job.touch(1)
    marker = job.commit()
    assert replica.catch_up() == [(LOAD, "2:1")]
    assert replica.image == truth(job, marker.id)


def test_a_load_does_not_stay_when_the_trainer_goes_on_from_what_was_held(job: Job, replica: Replica) -> None:
    older = job.commit()
    job.touch()
    held = job.commit()
    replica.catch_up()
    job.begin(older.id)
    job.touch()
    job.commit()
    leave(replica, LOAD, whole=False)
    job.begin(held.id)
    job.touch(1)
    marker = job.commit()
    assert replica.catch_up() == [(LOAD, "3:1")]
    assert replica.image == truth(job, marker.id)


@HALF_OR_WHOLE
def test_rows_of_a_dead_generation_are_taken_back(job: Job, eager: Replica, whole: bool) -> None:
    parent = job.commit()
    eager.catch_up()
    job.touch()
    leave(eager, ROWS, whole=whole)
    job.begin(parent.id)
    assert eager.catch_up() == [(ROLLBACK, "1:1")]
    assert eager.image == truth(job, parent.id)


def test_rows_come_again_and_cost_nothing_at_their_marker(job: Job, eager: Replica) -> None:
    job.commit()
    eager.catch_up()
    job.touch()
    leave(eager, ROWS, whole=False)
    assert eager.catch_up() == [(ROWS, "1:1")]
    marker = job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS, MARKER]
    assert eager.image == truth(job, marker.id)


def test_tables_are_not_served_with_rows_of_a_marker_that_was_left(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = job.commit()
    sent = FollowedJob.sent

    def breaking(source: FollowedJob, sources: object) -> Iterator[Changed]:
        yield next(sent(source, sources))  # type: ignore[arg-type]
        raise StoreUnavailableError("nobody answers")

    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path)) as tables:
        tables.advance()
        job.touch()
        job.commit()
        with monkeypatch.context() as patch:
            patch.setattr(FollowedJob, "sent", breaking)
            with pytest.raises(StoreUnavailableError):
                tables.advance()
        with pytest.raises(ReplicaNotReadyError, match="interrupted"):
            held(tables)
        job.begin(older.id)
        job.touch(1)
        marker = job.commit()
        tables.advance()
        assert held(tables) == weights_at(job, marker.id)


def test_a_replica_whose_marker_was_given_up_loads_all_rows_again(job: Job, replica: Replica) -> None:
    held = job.commit()
    replica.catch_up()
    for _ in range(2):
        job.touch()
        marker = job.commit()
    expected = truth(job, marker.id)
    stores.fold(job.root, Policy(rebase=1e-9, compact="none"))  # what it holds is needed for no other marker
    trim_log(job.log, Control(job.log), marker, open_store(str(job.root)).url, given_up=[held.id])
    (update,) = [(update, replica.put(update))[0] for update in replica.follower.updates(0)]
    assert (update.kind, update.why) == (LOAD, "marker 1:1 was given up")
    assert replica.image == expected


def damage_what_lies_between(job: Job) -> Image:
    """Three more markers, of which the store has the intervals, one of them damaged, and bases; the log has none."""
    for _ in range(2):
        job.touch()
        job.commit()
    job.touch()
    marker = job.commit()
    assert marker.id == NEWEST
    expected = truth(job, NEWEST)
    stores.fold(job.root, Policy(rebase=1e-9, compact="none"))
    trim_log(job.log, Control(job.log), marker, open_store(str(job.root)).url)
    path = next(job.root.glob("segments/*/g00000001-r00001-m00000002-p000.seg"))
    path.write_bytes(flipped(path.read_bytes()))
    return expected


def test_what_cannot_be_read_between_two_markers_is_loaded_with_all_rows(job: Job, replica: Replica) -> None:
    job.commit()
    replica.catch_up()
    expected = damage_what_lies_between(job)
    with pytest.raises(CorruptionError, match="m00000002-p000"):
        replica.catch_up()
    assert replica.catch_up() == [(LOAD, str(NEWEST))]
    assert replica.image == expected


def test_a_thread_of_its_own_loads_all_rows_then(job: Job, tmp_path: Path) -> None:
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path, poll_s=0.01)) as tables:
        tables.advance()
        expected = damage_what_lies_between(job)
        tables.start()
        wait_for(lambda: tables.follower.marker == NEWEST or tables.failure is not None)
        assert tables.failure is None
        assert held(tables) == weights_in(expected)


def test_a_load_that_cannot_be_read_ends_the_thread(job: Job, tmp_path: Path) -> None:
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path, poll_s=0.01)) as tables:
        tables.advance()
        damage_what_lies_between(job)
        for path in job.root.glob("segments/*/f-*.seg"):
            path.write_bytes(flipped(path.read_bytes()))
        tables.start()
        wait_for(lambda: tables.failure is not None)
        assert isinstance(tables.failure, CorruptionError)
