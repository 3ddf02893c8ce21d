"""Rows that no marker has: what a replica says of them, and what it does if they cannot be taken back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import pytest

from tests import builders, stores
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
    cut_tail,
    damage_chunks,
    following,
    held,
    leave,
    lost_rows,
    truth,
    weights_at,
)
from tests.parts import Update, trim_log
from tests.synthetic import Job
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import (
    CorruptionError,
    ReplicaNotReadyError,
)
from torchrec_stream_ckpt.inner import Control, Log, open_store
from torchrec_stream_ckpt.util.layout import DATA_DIR, SEGMENTS_DIR


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return begun(tmp_path / "log")


@pytest.fixture
def eager(job: Job, tmp_path: Path) -> Iterator[Replica]:
    with following(job, tmp_path, "rows") as replica:
        yield replica


def taken(replica: Replica) -> list[Update]:
    """Apply all that is there."""
    return [(replica.put(update), update)[1] for update in replica.follower.updates(0)]


# Rows that no marker has.


def test_a_marker_says_whether_newer_rows_stand_over_it(job: Job, eager: Replica) -> None:
    job.commit()
    assert [each.is_provisional for each in taken(eager)] == [False]
    job.touch()
    assert [(each.kind, each.is_provisional) for each in taken(eager)] == [(ROWS, True)]
    first = job.commit()
    assert [(each.kind, each.is_provisional) for each in taken(eager)] == [(ROWS, True), (MARKER, False)]
    assert eager.image == truth(job, first.id)
    job.touch()
    second = job.commit()
    job.touch()  # these rows come with those of the marker, and are newer
    assert [(each.kind, each.is_provisional) for each in taken(eager)] == [(ROWS, True), (MARKER, True)]
    assert eager.image != truth(job, second.id)
    job.begin(second.id)  # no marker will ever have them
    assert [(each.kind, each.is_provisional) for each in taken(eager)] == [(ROLLBACK, False)]
    assert eager.image == truth(job, second.id)


def test_frames_without_rows_make_nothing_provisional(job: Job, eager: Replica) -> None:
    job.commit()
    taken(eager)
    job.give_up()
    assert [(each.kind, each.is_provisional) for each in taken(eager)] == [(ROWS, False)]


def test_readers_are_told_of_rows_that_are_newer_than_the_marker(job: Job, tmp_path: Path) -> None:
    job.commit()
    with FollowedTables(follow(f"file://{job.root}", mode="rows", scratch=tmp_path)) as tables:
        tables.advance()
        job.touch()
        marker = job.commit()
        job.touch()
        assert [each.kind for each in tables.advance()] == [ROWS, MARKER]
        with tables.reading() as served:
            assert (served.marker, served.provisional) == (marker.id, True)
        job.begin(marker.id)
        tables.advance()
        with tables.reading() as served:
            assert (served.marker, served.provisional) == (marker.id, False)
        assert held(tables) == weights_at(job, marker.id)


def test_rows_are_seen_after_a_trim_up_to_the_marker_before_them(job: Job, eager: Replica) -> None:
    job.commit()
    eager.catch_up()
    job.touch()
    marker = job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS, MARKER]
    job.touch()
    stores.fold(job.root, STEPS)
    freed = trim_log(job.log, Control(job.log), marker, open_store(str(job.root)).url).freed
    assert freed.count > 2
    assert eager.catch_up() == [(ROWS, "1:2")]
    last = job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS, MARKER]
    with follow(f"file://{job.root}", states=True) as follower:
        late = Replica(follower)
        assert late.catch_up() == [(LOAD, str(last.id))]
    assert late.image == eager.image


def test_a_tail_without_rows_that_the_log_has_lost_is_no_lost_marker(job: Job, eager: Replica) -> None:
    marker = job.commit()
    eager.catch_up()
    job.give_up()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    cut_tail(job, marker.ranks[0].end)
    eager.catch_up()
    job.begin(marker.id)
    job.touch()
    last = job.commit()
    assert eager.catch_up()[-1] == (MARKER, "2:1")
    assert eager.image == truth(job, last.id)


def test_rows_are_not_taken_back_because_a_broker_that_is_cut_off_reports_an_older_end(
    job: Job, eager: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.commit()
    eager.catch_up()
    job.touch()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    newest, old = type(job.log).ends, job.log.ends(1, [0, 1])

    def ends(log: Log, generation: int, partitions: Collection[int], known: Mapping[int, int]) -> dict[int, int]:
        return newest(log, generation, partitions) if any(known[each] > old[each] for each in known) else old

    monkeypatch.setattr(type(job.log), "ends", ends)
    job.touch()
    marker = job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS, MARKER]
    job.touch()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    last = job.commit()
    assert [kind for kind, _ in eager.catch_up()][-1] == MARKER
    assert last.id > marker.id
    assert eager.image == truth(job, last.id)


# Rows that cannot be taken back.


def test_rows_that_cannot_be_taken_back_are_loaded_over_at_the_next_marker(
    job: Job, eager: Replica, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parent = job.commit()
    eager.catch_up()
    job.touch()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    job.begin(parent.id)
    with lost_rows(job, tmp_path / "aside"):
        assert eager.catch_up() == eager.catch_up() == []
        assert caplog.text.count(f"{AGAIN}: rows after marker 1:1 cannot be undone") == 1
    job.touch()
    marker = job.commit()
    assert [(each.kind, each.is_provisional) for each in taken(eager)] == [(LOAD, False)]
    assert eager.image == truth(job, marker.id)
    assert caplog.text.count(AGAIN) == 1
    assert eager.follower.stats.rollbacks == 0


def test_rows_that_cannot_be_taken_back_are_loaded_over_at_a_marker_that_is_there(
    job: Job, eager: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit()
    eager.catch_up()
    job.touch()
    eager.catch_up()
    for _ in range(2):
        job.touch()
        marker = job.commit()
    expected = truth(job, marker.id)
    job.give_up()  # the last segment stays
    stores.fold(job.root, BASES)
    trim_log(job.log, Control(job.log), marker, open_store(str(job.root)).url)
    for path in (job.root / SEGMENTS_DIR).rglob("g*-m0000000[12]-*"):
        path.unlink()
    assert eager.catch_up() == [(LOAD, "1:3"), (ROWS, "1:3")]
    assert eager.image == expected
    assert caplog.text.count(AGAIN) == 1


def test_what_breaks_off_while_rows_are_taken_back_is_not_served_and_loaded_over(job: Job, tmp_path: Path) -> None:
    parent = job.commit()
    with FollowedTables(follow(f"file://{job.root}", mode="rows", scratch=tmp_path, poll_s=0.01)) as tables:
        tables.advance()
        job.touch(9)
        tables.advance()
        stores.fold(job.root, STEPS)
        job.begin(parent.id)
        damage_chunks(job)
        with lost_rows(job, tmp_path / "aside"):
            with pytest.raises(CorruptionError):
                tables.advance()
            for _ in range(2):
                assert tables.advance() == []
                with pytest.raises(ReplicaNotReadyError, match="was interrupted"):
                    held(tables)
        marker = job.commit()
        (update,) = tables.advance()
        assert update.kind is LOAD
        assert "cannot be undone" in update.why
        assert held(tables) == weights_at(job, marker.id)


def test_rows_that_were_half_taken_back_are_in_no_marker_that_comes_after_all(job: Job, eager: Replica) -> None:
    end = job.commit().ranks[0].end
    eager.catch_up()
    job.touch(9)
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    whole = {path: path.read_bytes() for path in (job.root / DATA_DIR).rglob("*.seg")}
    cut_tail(job, end)
    leave(eager, ROLLBACK, whole=True)
    for path, data in whole.items():  # as after a look that was out of date
        path.write_bytes(data)
    marker = job.commit()
    assert [kind for kind, _ in eager.catch_up()][-2:] == [ROLLBACK, MARKER]
    assert eager.image == truth(job, marker.id)


def test_a_finished_job_whose_last_rows_cannot_be_taken_back_does_not_end_as_if_they_were(
    job: Job, eager: Replica, tmp_path: Path
) -> None:
    job.commit()
    eager.catch_up()
    job.touch()
    eager.catch_up()
    job.log.append_control(builders.end(1).to_frame())
    with lost_rows(job, tmp_path / "aside"):
        for _ in range(2):
            with pytest.raises(CorruptionError):
                list(eager.follower.updates(until_closed=True))
