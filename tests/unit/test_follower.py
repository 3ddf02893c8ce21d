"""A follower's updates, applied one after the other, are the marker's tables, bit for bit."""

from __future__ import annotations

import itertools
import os
import resource
import shutil
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tests import builders, stores
from tests.followers import (
    LOAD,
    MARKER,
    ROLLBACK,
    ROWS,
    Replica,
    begun,
    cut_tail,
    following,
    lose_frames,
    truth,
)
from tests.parts import FollowedJob, FollowMode, Policy, trim_log
from tests.synthetic import SCHEMA, Job
from torchrec_stream_ckpt import Follower, follow
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    MarkerNotFoundError,
    SchemaMismatchError,
    StreamLostError,
)
from torchrec_stream_ckpt.extras.follower import tail
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control, Log, open_store
from torchrec_stream_ckpt.log import watch
from torchrec_stream_ckpt.util.layout import DATA_DIR, SEGMENTS_DIR
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return begun(tmp_path / "log")


@pytest.fixture
def replica(job: Job, tmp_path: Path) -> Iterator[Replica]:
    with following(job, tmp_path) as replica:
        yield replica


def log_of(follower: Follower) -> Log:
    return follower._source.job.log


def test_each_marker_is_reached_by_what_changed_alone(job: Job, replica: Replica) -> None:
    first = job.commit()
    assert replica.catch_up() == [(LOAD, "1:1")]
    assert replica.image == truth(job, first.id)
    for number in (2, 3):
        job.touch(1)
        before = replica.follower.stats.rows
        marker = job.commit()
        assert replica.catch_up() == [(MARKER, f"1:{number}")]
        assert replica.image == truth(job, marker.id)
        assert 0 < replica.follower.stats.rows - before < 2 * sum(table.rows for table in SCHEMA.tables)
    assert replica.catch_up() == []


def test_rows_that_no_marker_has_are_not_seen(job: Job, replica: Replica) -> None:
    first = job.commit()
    replica.catch_up()
    job.touch()
    job.give_up()
    assert replica.catch_up() == []
    assert replica.image == truth(job, first.id)


def test_who_is_behind_goes_to_the_newest_marker_at_once(job: Job, replica: Replica) -> None:
    job.commit()
    replica.catch_up()
    for _ in range(3):
        job.touch()
        marker = job.commit()
    assert replica.catch_up() == [(MARKER, "1:4")]
    assert replica.image == truth(job, marker.id)


def test_a_restarted_trainer_is_followed_under_another_world_size_and_column_split(tmp_path: Path) -> None:
    job = Job(tmp_path / "log")
    job.begin(splits=[1, 1, 2])
    parent = job.commit()
    with follow(f"file://{job.root}", scratch=tmp_path) as follower:
        replica = Replica(follower)
        replica.catch_up()
        job.touch()  # never committed: what the next generation does not stand on
        job.begin(parent.id, world=3, splits=[2, 1, 4])
        job.touch()
        marker = job.commit()
        assert replica.catch_up() == [(MARKER, "2:1")]
    weights = {key: array for key, array in truth(job, marker.id).arrays.items() if key[1] == 0}
    assert {key: array.tobytes() for key, array in replica.image.arrays.items()} == {
        key: array.tobytes() for key, array in weights.items()
    }


def test_tables_that_a_generation_sends_whole_are_taken_whole(job: Job, replica: Replica) -> None:
    parent = job.commit()
    replica.catch_up()
    job.begin(parent.id, swept=[1])
    job.touch()
    marker = job.commit()
    assert replica.catch_up() == [(MARKER, "2:1")]
    assert replica.image == truth(job, marker.id)


def test_a_branch_from_an_older_marker_loads_all_rows_again(job: Job, replica: Replica) -> None:
    older = job.commit()
    job.touch()
    job.commit()
    replica.catch_up()
    job.begin(older.id)
    assert replica.catch_up() == []
    job.touch()
    marker = job.commit()
    (update,) = [(update, replica.put(update))[0] for update in replica.follower.updates(0)]
    assert update.kind is LOAD
    assert "1:2 is on an abandoned branch" in update.why
    assert replica.image == truth(job, marker.id)
    assert replica.follower.stats.reloads == 1


def test_what_was_left_half_way_comes_again(job: Job, replica: Replica) -> None:
    job.commit()
    replica.catch_up()
    job.touch()
    marker = job.commit()
    for update in replica.follower.updates(0):
        next(iter(update.changes()))
        break
    assert replica.follower.marker == MarkerId(1, 1)
    assert replica.catch_up() == [(MARKER, "1:2")]
    assert replica.image == truth(job, marker.id)


def test_the_store_serves_what_was_trimmed(job: Job, replica: Replica, tmp_path: Path) -> None:
    job.commit()
    replica.catch_up()
    for _ in range(2):
        job.touch()
        marker = job.commit()
    expected = truth(job, marker.id)
    stores.fold(job.root, Policy(rebase=0, compact="none"))
    objects = open_store(str(job.root))
    trim_log(job.log, Control(job.log), marker, objects.url)
    lose_frames(job)
    assert replica.catch_up() == [(MARKER, "1:3")]
    assert replica.image == expected
    # A new one has nothing but the store to begin with.
    with follow(f"file://{job.root}", states=True, scratch=tmp_path) as follower:
        late = Replica(follower)
        assert late.catch_up() == [(LOAD, "1:3")]
        assert late.image == expected


def test_a_trim_that_overtook_it_and_a_store_without_the_steps_between_load_all_again(
    job: Job, replica: Replica, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit()
    replica.catch_up()
    for _ in range(3):
        job.touch()
        marker = job.commit()
    expected = truth(job, marker.id)
    stores.fold(job.root, Policy(rebase=1e-9, compact="none"))
    trim_log(job.log, Control(job.log), marker, open_store(str(job.root)).url)
    lose_frames(job)
    for path in (job.root / SEGMENTS_DIR).rglob("g*-m0000000[23]-*"):
        path.unlink()  # the intervals that a base has made needless
    assert replica.catch_up() == [(LOAD, "1:4")]
    assert replica.image == expected
    assert "all rows are loaded again" in caplog.text


def test_only_the_tables_that_are_asked_for_are_read(job: Job, tmp_path: Path) -> None:
    job.commit()
    job.touch()
    with follow(f"file://{job.root}", tables=["t_w*"], scratch=tmp_path) as follower:
        assert {each.table.name for update in follower.updates(0) for each in update.changes()} == {"t_wide"}
    with (
        follow(f"file://{job.root}", tables=["no_*"], scratch=tmp_path) as follower,
        pytest.raises(ConfigError, match=r"no table matches no_\*"),
    ):
        list(follower.updates(0))


def test_other_tables_are_refused(job: Job, replica: Replica) -> None:
    job.commit()
    replica.catch_up()
    other = Job(job.root, schema=Schema((builders.table("t_new", 10, 4),)), generation=1)
    other.begin()
    other.commit()
    with pytest.raises(SchemaMismatchError):
        replica.catch_up()


def test_a_log_that_was_made_again_is_refused(job: Job, replica: Replica) -> None:
    job.commit()
    replica.catch_up()
    shutil.rmtree(job.root)
    again = Job(job.root)
    again.begin()
    again.commit()
    with pytest.raises(CorruptionError, match="deleted or recreated"):
        replica.catch_up()


def test_a_place_without_a_log_is_refused_by_name(tmp_path: Path) -> None:
    with follow(f"file://{tmp_path}/nothing") as follower, pytest.raises(MarkerNotFoundError) as refused:
        list(follower.updates(0))
    assert refused.value.message == "there is no log here"
    assert str(refused.value.where["uri"]) == f"file://{tmp_path}/nothing"


def test_without_a_marker_there_is_nothing_to_follow(job: Job, replica: Replica) -> None:
    with pytest.raises(MarkerNotFoundError, match="this job has no committed marker"):
        replica.catch_up()
    assert list(replica.follower.updates(0.05)) == []
    marker = job.commit()
    assert next(replica.follower.updates(5)).marker == marker.id


@pytest.mark.parametrize("local", [True, False])
def test_news_wakes_a_follower_and_where_events_do_not_reach_it_polls(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: bool
) -> None:
    monkeypatch.setattr(watch, "is_local", lambda _: local)
    job.commit()
    with follow(f"file://{job.root}", mode="rows", scratch=tmp_path, poll_s=0.02) as follower:
        replica = Replica(follower)
        replica.catch_up()
        assert list(follower.updates(0.5)) == []
        looks = follower.stats.looks
        assert list(follower.updates(0.5)) == []
        idle = follower.stats.looks - looks
        wakeups = follower.stats.wakeups
        job.touch()
        assert [update.kind for update in itertools.islice(follower.updates(60), 1)] == [ROWS]
    assert follower.stats.woken_by == ("inotify" if local else "poll")
    if local:
        assert idle <= 3  # one at each end, and none by the clock
        assert follower.stats.wakeups - wakeups <= 2
    else:
        assert idle > 3
        assert follower.stats.wakeups == 0


@pytest.mark.parametrize("mode", ["markers", "rows"])
@pytest.mark.parametrize("local", [True, False])
def test_between_an_update_and_the_next_news_nobody_looks(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mode: FollowMode, local: bool
) -> None:
    monkeypatch.setattr(watch, "is_local", lambda _: local)
    job.commit()
    events: list[str] = []

    def noted(name: str, kind: type, method: str) -> None:
        real = getattr(kind, method)

        def call(*arguments: Any) -> Any:
            events.append(name)
            return real(*arguments)

        monkeypatch.setattr(kind, method, call)

    noted("look", FollowedJob, "look")
    noted("wait", watch.FolderWatch, "wait")
    noted("wait", watch.Polled, "wait")
    with follow(f"file://{job.root}", mode=mode, scratch=tmp_path, poll_s=0.02) as follower:
        for update in follower.updates(60):
            events.append(update.kind)
            if events.count(MARKER) == 3:
                break
            if update.kind in (LOAD, MARKER):
                job.touch()
                job.commit()
    following = [after for before, after in itertools.pairwise(events) if before in (ROWS, MARKER)]
    assert set(following) <= ({"wait", ROWS, MARKER} if local else {"look", ROWS, MARKER})
    assert ("wait" if local else "look") in following


def test_rows_that_one_update_does_not_hold_are_looked_for_at_once(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tail, "BATCH_BYTES", 1)
    job.commit()
    with following(job, tmp_path, "rows") as replica:
        replica.catch_up()
        assert list(replica.follower.updates(0.2)) == []
        job.touch()
        wakeups = replica.follower.stats.wakeups
        came = [update.kind for update in replica.follower.updates(0.2) if not replica.put(update)]
        assert came == [ROWS] * 3  # a frame of each rank
        assert replica.follower.stats.wakeups <= wakeups + 2


def test_a_follower_that_waits_for_news_is_stopped_at_once(job: Job, tmp_path: Path) -> None:
    job.commit()
    with follow(f"file://{job.root}", scratch=tmp_path, poll_s=1e6) as follower:
        came: list[MarkerId] = []
        thread = threading.Thread(target=lambda: came.extend(update.marker for update in follower.updates()))
        thread.start()
        while follower.stats.woken_by == "":
            time.sleep(0.01)
        marker = job.commit()
        while follower.stats.marker != marker.id:  # poll_s has not passed: the COMMIT has woken it
            time.sleep(0.01)
        follower.stop()
        thread.join(60)
        assert not thread.is_alive()
    assert came == [MarkerId(1, 1), marker.id]


def test_an_outage_is_outlasted_for_a_while(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    job.commit()
    with follow(f"file://{job.root}", scratch=tmp_path, poll_s=0.01, outage_s=30) as follower:
        replica = Replica(follower)
        replica.catch_up()
        read, failures = job.log.read_control, iter([True, True, False])

        def failing(start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
            if next(failures, False):
                raise LogUnavailableError("nobody answers")
            return read(start, garbage=garbage)

        monkeypatch.setattr(log_of(follower), "read_control", failing)
        job.touch()
        marker = job.commit()
        update = next(follower.updates(30))
        assert update.marker == marker.id
        assert follower.stats.outages == 1
    assert "nobody answers" in caplog.text


def test_an_outage_that_lasts_is_raised(job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job.commit()

    def failing(start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        raise LogUnavailableError("nobody answers")

    with follow(f"file://{job.root}", scratch=tmp_path, poll_s=0.01, outage_s=0.05) as follower:
        monkeypatch.setattr(log_of(follower), "read_control", failing)
        with pytest.raises(LogUnavailableError, match="nobody answers"):
            list(follower.updates())


def test_the_age_is_that_of_the_applied_marker(job: Job, replica: Replica) -> None:
    assert replica.follower.stats.age_s == float("inf")
    job.commit(time_s=0.0)
    replica.catch_up()
    assert replica.follower.stats.age_s > 1e9
    assert replica.follower.stats.marker == MarkerId(1, 1)
    assert replica.follower.stats.rows_per_s > 0


# Rows that no marker has.


@pytest.fixture
def eager(job: Job, tmp_path: Path) -> Iterator[Replica]:
    with following(job, tmp_path, "rows") as replica:
        yield replica


def test_rows_are_seen_before_their_marker_which_then_costs_nothing(job: Job, eager: Replica) -> None:
    job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [LOAD]
    job.touch()
    assert eager.catch_up() == [(ROWS, "1:1")]
    rows, image = eager.follower.stats.rows, eager.image.copy()
    marker = job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS, MARKER]  # the MARK frames, which hold no rows
    assert eager.follower.stats.rows == rows
    assert eager.image == image == truth(job, marker.id)


def test_rows_after_the_last_word_of_a_trainer_are_taken_back_and_a_finished_job_ends_its_followers(
    job: Job, eager: Replica
) -> None:
    parent = job.commit()
    eager.catch_up()
    job.touch()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    job.log.append_control(builders.end(1, "preempted").to_frame())
    assert eager.catch_up() == [(ROLLBACK, "1:1")]
    assert eager.image == truth(job, parent.id)
    ended = eager.follower.stats.ended
    assert ended is not None
    assert ended.outcome == "preempted"
    job.begin(parent.id)
    job.touch()
    marker = job.commit()
    job.log.append_control(builders.end(2).to_frame())
    for update in eager.follower.updates(until_closed=True):
        eager.put(update)
    assert eager.image == truth(job, marker.id)


def test_rows_of_a_dead_generation_are_taken_back(job: Job, eager: Replica) -> None:
    parent = job.commit()
    eager.catch_up()
    job.touch()
    job.give_up()
    job.touch()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    assert eager.image != truth(job, parent.id)
    job.begin(parent.id)
    assert eager.catch_up() == [(ROLLBACK, "1:1")]
    assert eager.image == truth(job, parent.id)
    job.touch()
    marker = job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [MARKER]
    job.touch()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    assert truth(job, marker.id) != eager.image


def test_rows_that_the_log_has_lost_are_taken_back(job: Job, eager: Replica) -> None:
    end = job.commit().ranks[0].end
    eager.catch_up()
    job.touch()
    assert [kind for kind, _ in eager.catch_up()] == [ROWS]
    cut_tail(job, end)
    # What rank 1 has sent is there, and comes again.
    assert eager.catch_up() == [(ROLLBACK, "1:1"), (ROWS, "1:1")]
    # The trainer goes on in another generation.
    job.begin(MarkerId(1, 1))
    assert eager.catch_up() == [(ROLLBACK, "1:1")]
    assert eager.image == truth(job, MarkerId(1, 1))
    job.touch()
    marker = job.commit()
    assert [kind for kind, _ in eager.catch_up()] == [MARKER]
    assert eager.image == truth(job, marker.id)


def test_a_marker_that_the_log_has_lost_is_named_to_a_replica_that_holds_it(job: Job, eager: Replica) -> None:
    end = job.commit().ranks[0].end
    eager.catch_up()
    cut_tail(job, end - 1)
    with pytest.raises(StreamLostError, match="so its end was lost"):
        eager.catch_up()


def test_a_marker_and_the_end_of_its_generation_in_one_look(job: Job, eager: Replica) -> None:
    job.commit()
    eager.catch_up()
    job.touch()
    eager.catch_up()
    job.touch()
    last = job.commit()
    job.touch()
    job.begin(last.id)
    came = eager.catch_up()
    assert came[-1] == (ROLLBACK, "1:2")
    assert (MARKER, "1:2") in came
    assert eager.image == truth(job, last.id)


def test_a_torn_frame_is_waited_for(job: Job, eager: Replica) -> None:
    job.commit()
    eager.catch_up()
    job.touch()
    segment = sorted((job.root / DATA_DIR / "p00001").iterdir())[-1]
    whole = segment.read_bytes()
    segment.write_bytes(whole[:-100])
    eager.catch_up()
    segment.write_bytes(whole)
    eager.catch_up()
    marker = job.commit()
    eager.catch_up()
    assert eager.image == truth(job, marker.id)


def test_a_frame_that_was_sent_twice_comes_once(job: Job, eager: Replica) -> None:
    job.commit()
    eager.catch_up()
    job.flush(twice=True)
    job.touch()
    eager.catch_up()
    marker = job.commit()
    eager.catch_up()
    assert eager.image == truth(job, marker.id)


def test_a_process_with_many_open_files_can_wait_for_news(job: Job, tmp_path: Path) -> None:
    kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (kept[1], kept[1]))
    try:
        with ExitStack() as files:
            for _ in range(1100):
                files.enter_context(Path(os.devnull).open())
            job.commit()
            with follow(f"file://{job.root}", scratch=tmp_path) as follower:
                assert [update.marker for update in follower.updates(0.1)] == [MarkerId(1, 1)]
                assert follower.stats.woken_by == "inotify"
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, kept)
