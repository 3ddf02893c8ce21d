"""Followers in the live view: each by the metrics that it serves, or why it could not be read."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.command import ask, call
from tests.synthetic import Job
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.follower.stats import follower_values
from torchrec_stream_ckpt.extras.reporting.follower_status import FollowerStatus, follower_status
from torchrec_stream_ckpt.util.metrics import METRICS, serve_metrics
from torchrec_stream_ckpt.util.types import MarkerId


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path / "log")
    job.begin()
    job.commit()
    return job


@pytest.fixture
def tables(job: Job, tmp_path: Path) -> Iterator[FollowedTables]:
    with FollowedTables(follow(f"file://{job.root}", scratch=tmp_path)) as tables:
        yield tables


def test_a_follower_is_shown_with_what_it_lacks(job: Job, tables: FollowedTables) -> None:
    endpoint = f"127.0.0.1:{tables.serve_metrics(0)}"
    before = follower_status(endpoint, MarkerId(1, 1))
    assert (before.marker, before.error, before.in_words()) == (None, "", "has applied no marker yet")
    tables.advance()
    for _ in range(2):
        job.touch()
        job.commit()
    newest = MarkerId(1, 3)
    seen = follower_status(endpoint, newest)
    assert (seen.marker, seen.behind, seen.reloads, seen.doubted) == ("1:1", 2, 0, 0)
    assert seen.rows_per_s > 0
    assert seen.in_words().startswith("marker 1:1, 2 behind, ")
    tables.advance()
    assert follower_status(endpoint, newest).behind == 0
    assert follower_status(endpoint, MarkerId(2, 4)).behind is None


def test_the_lag_is_up_to_the_marker_that_is_not_applied_yet(job: Job, tmp_path: Path) -> None:
    with follow(f"file://{job.root}", scratch=tmp_path) as follower:
        assert follower_values(follower.stats)["lag_s"] == float("inf")
        assert len(list(follower.updates(0))) == 1
        assert follower_values(follower.stats)["lag_s"] == 0
        job.commit(time_s=107.5)  # the first one was committed at 0
        for update in follower.updates(0):
            assert (update.marker, follower.stats.marker) == (MarkerId(1, 2), MarkerId(1, 1))
            assert follower_values(follower.stats)["lag_s"] == 107.5
        assert follower_values(follower.stats)["lag_s"] == 0
    said = FollowerStatus("h:1", marker="1:1", behind=1, age_s=110.0, lag_s=107.5).in_words()
    assert said.startswith("marker 1:1, 1 behind (")


def test_watch_shows_followers_and_raises_an_alert_for_one_that_is_gone(job: Job, tables: FollowedTables) -> None:
    tables.advance()
    mine = f"127.0.0.1:{tables.serve_metrics(0)}"
    with socket.socket() as probe:  # a port at which nobody listens
        probe.bind(("127.0.0.1", 0))
        gone = f"127.0.0.1:{probe.getsockname()[1]}"
        words = ["watch", f"file://{job.root}", "--once", "--follower", mine, "--follower", gone]
        record = ask(*words, status=None)
        shown = call(*words)
    assert [(each["endpoint"], each["marker"], each["behind"]) for each in record["followers"]] == [
        (mine, "1:1", 0),
        (gone, None, None),
    ]
    alerts = [each["text"] for each in record["alerts"] if each["kind"] == "follower"]
    assert len(alerts) == 1
    assert alerts[0].startswith(f"{gone}: does not answer: ")
    assert f"follower {mine}" in shown.stdout
    assert "marker 1:1, 0 behind, " in shown.stdout
    assert shown.exit_code == 1


def test_an_endpoint_of_something_else_is_named() -> None:
    endpoint = serve_metrics("127.0.0.1", 0, lambda: dict.fromkeys(METRICS, 0.0), METRICS, {})
    try:
        found = follower_status(f"127.0.0.1:{endpoint.port}", None)
    finally:
        endpoint.close()
    assert "without stream_ckpt_follower_markers_total: not the metrics of a follower" in found.error


def test_a_replica_that_serves_nothing_says_so() -> None:
    found = FollowerStatus("h:1", marker="2:7", behind=None, age_s=3.0, rows_per_s=12.3, reloads=1, doubted=4)
    said = "marker 2:7, on an older generation, 3.0 s old, 12 rows/s, 1 reload, serves nothing: 4 blocks differ"
    assert found.in_words() == said


@pytest.mark.parametrize("wrong", ["9400", "host:", "host:http", "host:70000"])
def test_a_follower_is_named_by_host_and_port(wrong: str) -> None:
    with pytest.raises(ConfigError, match="a follower is named by HOST:PORT"):
        follower_status(wrong, None)


def test_followers_of_several_jobs_are_not_shown_at_once(job: Job) -> None:
    uri = f"file://{job.root}"
    done = call("watch", uri, "--also", uri, "--follower", "h:1")
    assert isinstance(done.exception, ConfigError)
