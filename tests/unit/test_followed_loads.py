"""Loads and updates that break off, and markers that were given up: what readers see is what was sent."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import builders, stores
from tests.evolved import EvolvingJob, random_schema
from tests.followers import (
    AGAIN,
    BASES,
    LOAD,
    MARKER,
    ROLLBACK,
    ROWS,
    STEPS,
    Replica,
    begun,
    damage_chunks,
    following,
    held,
    leave,
    lose_frames,
    truth,
    wait_for,
    weights_at,
    weights_in,
)
from tests.parts import Changed, FollowedJob, FollowMode, Policy, trim_log
from tests.synthetic import Image, Job
from tests.unit.read_job import flipped
from tests.unit.test_followed_proofs import is_true
from tests.unit.test_proof_checker import SCHEMA as PROVED
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import (
    CorruptionError,
    MarkerNotFoundError,
    ReplicaNotReadyError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.util.layout import DATA_DIR
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return begun(tmp_path / "log")


@pytest.fixture
def replica(job: Job, tmp_path: Path) -> Iterator[Replica]:
    with following(job, tmp_path) as replica:
        yield replica


# A load that broke off.


@pytest.mark.parametrize("first", ["load", "marker"])
def test_a_load_that_broke_off_comes_again_as_a_load_wherever_the_trainer_goes(
    job: Job, replica: Replica, first: str
) -> None:
    older = job.commit()
    if first == "load":
        job.touch()
        at = job.commit()
        replica.catch_up()
        job.begin(older.id)
        job.touch(9)
        job.commit()
        leave(replica, LOAD, whole=True)
    else:
        at = older
        replica.catch_up()
        job.touch(9)
        job.commit()
        leave(replica, MARKER, whole=True)
    for _ in range(3):  # each time from the marker that it holds: nothing abandoned is on that way
        job.begin(at.id)
        job.touch(1)
        marker = job.commit()
        leave(replica, LOAD, whole=False)
    assert replica.catch_up() == [(LOAD, str(marker.id))]
    assert replica.image == truth(job, marker.id)


def break_off(monkeypatch: pytest.MonkeyPatch, method: str, rows: int, times: int) -> None:
    """Rows come, then the store does not answer."""
    whole, failures = getattr(FollowedJob, method), iter([True] * times)

    def breaking(source: FollowedJob, given: object) -> Iterator[Changed]:
        for number, changed in enumerate(whole(source, given)):
            if number == rows and next(failures, False):
                raise StoreUnavailableError("nobody answers")
            yield changed

    monkeypatch.setattr(FollowedJob, method, breaking)


def by_the_store(monkeypatch: pytest.MonkeyPatch, times: int) -> type[Exception]:
    break_off(monkeypatch, "_windows", 1, times)
    return StoreUnavailableError


def by_the_consumer(monkeypatch: pytest.MonkeyPatch, times: int) -> type[Exception]:
    put, calls = FollowedTables._put, iter(2 * times * [False, True])

    def failing(tables: FollowedTables, changed: Changed) -> None:
        if next(calls, False):
            raise ZeroDivisionError("the replica's own")
        put(tables, changed)

    monkeypatch.setattr(FollowedTables, "_put", failing)
    return ZeroDivisionError


@pytest.mark.parametrize("breaks", [by_the_store, by_the_consumer])
def test_tables_whose_load_broke_off_twice_hold_the_marker_row_for_row(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, breaks: Callable[[pytest.MonkeyPatch, int], type]
) -> None:
    older = job.commit()
    job.touch()
    at = job.commit()
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path)) as tables:
        tables.advance()
        for parent in (older, at):
            job.begin(parent.id)
            job.touch(9 if parent is older else 1)
            marker = job.commit()
            with monkeypatch.context() as patch:
                error = breaks(patch, 1)
                with pytest.raises(error):
                    tables.advance()
            with pytest.raises(ReplicaNotReadyError, match="was interrupted"):
                held(tables)
        (update,) = tables.advance()
        assert update.kind is LOAD
        assert "1:2 is on an abandoned branch" in update.why
        assert held(tables) == weights_at(job, marker.id)
        with (
            FollowedTables(follow(f"file://{job.root}", scratch=tmp_path)) as fresh,
            tables.reading() as served,
        ):
            fresh.advance()
            with fresh.reading() as reference:
                for name, tensor in reference.tables.items():
                    assert torch.equal(served.tables[name].view(torch.uint8), tensor.view(torch.uint8))


def test_tables_of_a_changed_model_that_broke_off_are_not_taken_for_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = EvolvingJob(tmp_path / "log", schema=PROVED, width=0)
    job.first(PROVED)
    at = job.markers(1)[-1]
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path)) as tables:
        tables.advance()
        schema = Schema((*PROVED.tables, builders.table("t_new", 30, 4)))
        job.evolve(at, schema.renewed(job.schema, builders.JOB, 2), [2])
        job.markers(1)
        with monkeypatch.context() as patch:
            break_off(patch, "_windows", 1, 1)
            with pytest.raises(StoreUnavailableError):
                tables.advance()
        job.go_on(at)
        job.markers(1)
        with monkeypatch.context() as patch:
            break_off(patch, "_windows", 1, 1)
            with pytest.raises(StoreUnavailableError):
                tables.advance()
        tables.advance()
        assert is_true(job, tables)


@pytest.mark.parametrize("by_itself", [False, True], ids=["advance", "thread"])
def test_what_has_changed_and_is_damaged_is_read_from_a_newer_base(
    job: Job, tmp_path: Path, caplog: pytest.LogCaptureFixture, by_itself: bool
) -> None:
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path, poll_s=0.01)) as tables:
        tables.advance()
        for _ in range(3):
            job.touch()
            marker = job.commit()
        expected = weights_at(job, marker.id)
        stores.fold(job.root, BASES)
        trim_log(job.log, Control(job.log), marker, open_store(str(job.root)).url)
        lose_frames(job)
        damage_chunks(job, "g*-m0000000[23]-*")
        if by_itself:
            tables.start()
            wait_for(lambda: tables.follower.marker == marker.id or tables.failure is not None)
            assert tables.failure is None
        else:
            with pytest.raises(CorruptionError):
                tables.advance()
            (update,) = tables.advance()
            assert (update.kind, update.marker) == (LOAD, marker.id)
        assert held(tables) == expected
    assert caplog.text.count(f"{AGAIN}: the changed rows cannot be read") == 1


class Breaking:
    """Breaks updates off, at random places, while it is told to."""

    def __init__(self, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
        self._rng = rng
        self.on = False
        for method in ("_windows", "sent", "_picked"):
            monkeypatch.setattr(FollowedJob, method, self._broken(getattr(FollowedJob, method)))

    def _broken(self, whole: Callable[..., Iterator[Changed]]) -> Callable[..., Iterator[Changed]]:
        def changes(*given: object) -> Iterator[Changed]:
            for changed in whole(*given):
                yield changed
                if self.on and self._rng.random() < 0.4:
                    raise StoreUnavailableError("nobody answers")

        return changes


CHANCES = {"touch": 0.25, "commit": 0.25, "branch": 0.3, "change": 0.1, "trim": 0.1}
"""What happens next, and how likely that is."""


def is_live(job: EvolvingJob, tables: FollowedTables) -> bool:
    """Whether a reader sees all that the trainer has sent so far."""
    with tables.reading() as served:
        return all(
            served.tables[table.spec.name].contiguous().view(torch.uint8).numpy().tobytes() == table.arrays[0].tobytes()
            for table in job.live.values()
        )


@pytest.mark.parametrize("mode", ["markers", "rows"])
@pytest.mark.parametrize("seed", [13, 18, 29, 55, 56])
def test_what_readers_see_is_what_was_sent_whatever_broke_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: FollowMode, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    job = EvolvingJob(tmp_path / "log", seed=seed, schema=random_schema(rng), width=0)
    job.first(job.schema)
    tips, breaking, seen = job.markers(1), Breaking(rng, monkeypatch), 0
    with FollowedTables(follow(f"file://{job.root}", mode=mode, scratch=tmp_path)) as tables:
        for _ in range(40):
            what = rng.choice(list(CHANCES), p=list(CHANCES.values()))
            if what == "touch":
                job.touch()
            elif what == "commit":
                tips += job.markers(1)
            elif what in ("branch", "change"):
                parent = tips[-1 - int(rng.integers(min(4, len(tips))))]
                (job.go_on if what == "branch" else job.change)(parent)
                tips += job.markers(int(rng.integers(2)))
            elif what == "trim":
                stores.fold(job.root, STEPS)
                marker = Control(job.log).refresh().commits[tips[-1]]
                trim_log(job.log, Control(job.log), marker, open_store(str(job.root)).url)
            breaking.on = rng.random() < 0.6
            with contextlib.suppress(StoreUnavailableError):
                tables.advance()
            with contextlib.suppress(ReplicaNotReadyError):
                with tables.reading() as served:
                    is_provisional = served.provisional
                assert is_provisional or is_true(job, tables)
                seen += 1
            if not breaking.on:
                assert tables.follower.marker == tips[-1]
                assert not (mode == "rows" and tips[-1].generation == job.generation) or is_live(job, tables)
    assert seen > 10


# Markers that were given up.


def lose_marker(job: Job) -> MarkerId:
    """A marker whose rows the log has lost, and that the materializer passes over."""
    there = set((job.root / DATA_DIR).rglob("*.seg"))
    job.touch()
    lost = job.commit()
    for path in set((job.root / DATA_DIR).rglob("*.seg")) - there:
        path.unlink()
    passed: list[MarkerId] = []
    stores.fold(job.root, STEPS, passed=passed)
    assert passed == [lost.id]
    return lost.id


def test_a_newest_marker_that_was_given_up_is_passed_over_by_name(
    job: Job, replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    older = job.commit()
    stores.fold(job.root, STEPS)
    replica.catch_up()
    lost = lose_marker(job)
    assert replica.catch_up() == replica.catch_up() == []
    assert caplog.text.count(f"marker {lost} is passed over: marker {lost} was given up") == 1
    assert replica.image == truth(job, older.id)
    job.begin(older.id)
    job.touch()
    marker = job.commit()
    assert replica.catch_up() == [(MARKER, "2:1")]
    assert replica.image == truth(job, marker.id)


def test_a_replica_goes_to_the_newest_marker_that_was_not_given_up(job: Job, replica: Replica) -> None:
    job.commit()
    replica.catch_up()
    job.touch()
    marker = job.commit()
    stores.fold(job.root, STEPS)
    lose_marker(job)
    assert replica.catch_up() == [(MARKER, "1:2")]
    assert replica.image == truth(job, marker.id)
    assert replica.follower.stats.newest == MarkerId(1, 3)


def test_a_replica_in_the_middle_of_a_marker_that_was_given_up_goes_back_to_the_one_that_it_held(
    job: Job, replica: Replica
) -> None:
    older = job.commit()
    stores.fold(job.root, STEPS)
    replica.catch_up()
    there = set((job.root / DATA_DIR).rglob("*.seg"))
    job.touch()
    job.commit()
    leave(replica, MARKER, whole=True)
    for path in set((job.root / DATA_DIR).rglob("*.seg")) - there:
        path.unlink()
    stores.fold(job.root, STEPS, passed=[])
    assert replica.catch_up() == [(LOAD, "1:1")]
    assert replica.image == truth(job, older.id)


def test_a_job_whose_markers_were_all_given_up_is_told_so(job: Job, replica: Replica) -> None:
    job.commit()
    lose_frames(job)
    stores.fold(job.root, STEPS, passed=[])
    with pytest.raises(MarkerNotFoundError, match="every committed marker was given up"):
        replica.catch_up()


# Updates at which a follower's loop was left, or that broke off, when the trainer then goes on from another marker.


NEWEST = MarkerId(1, 4)
HALF_OR_WHOLE = pytest.mark.parametrize("whole", [False, True], ids=["half", "whole"])


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

    def breaking(*given: Any) -> Iterator[Changed]:
        yield next(sent(*given))
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
