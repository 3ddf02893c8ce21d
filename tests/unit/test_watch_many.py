"""Several jobs in one view: a line each, and no job that is away hides another one."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.builders import end
from tests.jobs_on_paper import PaperJob, tables
from tests.parts import FileLog, app
from torchrec_stream_ckpt.cli.options import JobOptions
from torchrec_stream_ckpt.cli.watch_many import Watched, view


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[PaperJob, PaperJob]:
    ads, feed = (PaperJob(tmp_path / name, tables("a"), world=2) for name in ("ads", "feed"))
    ads.run(3)
    feed.run(5)
    return ads, feed


def watch(*arguments: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["watch", *arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_each_job_has_a_line_and_one_that_is_not_there_says_so(jobs: tuple[PaperJob, PaperJob], tmp_path: Path) -> None:
    ads, feed = (f"file://{each.root}" for each in jobs)
    code, said, _ = watch(ads, "--also", feed, "--also", f"file://{tmp_path}/none", "--once")
    assert code == 1
    lines = [row.split() for row in said.splitlines()]
    assert [row[:2] for row in lines if row and row[0] in ("ads", "feed", "none")] == [
        ["ads", "1:3"],
        ["feed", "1:5"],
        ["none", "-"],
    ]
    assert "ads: late: " in said  # written years ago
    assert "none: unavailable: there is no log" in said
    code, said, _ = watch(ads, "--also", feed, "--once", "--json")
    assert code == 1
    assert [(each["uri"], each["newest"]["marker"], each["trouble"]) for each in json.loads(said)] == [
        (ads, "1:3", ""),
        (feed, "1:5", ""),
    ]


def test_jobs_of_one_name_have_their_whole_uris(tmp_path: Path) -> None:
    there = [f"file://{tmp_path}/{folder}/log" for folder in ("a", "b")]
    _, said, _ = watch(there[0], "--also", there[1], "--once", "--json")
    assert [each["uri"] for each in json.loads(said)] == there
    _, said, _ = watch(there[0], "--also", there[1], "--once")
    assert all(f"{uri}: unavailable" in said for uri in there)


def test_an_alert_of_any_job_ends_it_if_that_is_asked_for(jobs: tuple[PaperJob, PaperJob]) -> None:
    ads, feed = (f"file://{each.root}" for each in jobs)
    code, said, told = watch(ads, "--also", feed, "--interval", "0.1", "--fail-on-alert")
    assert code == 1
    assert "Alert: ads: late: " in told or "Alert: feed: late: " in told
    assert "marker 1:3, step" in said or "marker 1:5, step" in said


def test_finished_jobs_end_it(jobs: tuple[PaperJob, PaperJob]) -> None:
    for job in jobs:
        log = FileLog(job.root)
        log.append_control(end(1, outcome="finished").to_frame())
        log.close()
    ads, feed = (f"file://{each.root}" for each in jobs)
    code, said, _ = watch(ads, "--also", feed, "--interval", "0.1", "--fail-on-alert")
    assert code == 0
    assert "finished" in said


def test_a_job_is_waited_for_while_others_are_seen(tmp_path: Path) -> None:
    late = Watched("late", JobOptions(uri=f"file://{tmp_path}/late"), None)
    stop = threading.Event()
    thread = threading.Thread(target=late.follow, args=(0.05, stop))
    thread.start()
    try:
        deadline = time.monotonic() + 60
        while "no log" not in late.trouble and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "there is no log" in late.trouble
        PaperJob(tmp_path / "late", tables("a")).run(2)
        while (late.seen is None or late.seen.newest is None) and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert late.seen is not None
    assert late.seen.newest is not None
    assert (str(late.seen.newest.marker), late.trouble) == ("1:2", "")
    for width in (60, 80, 120):
        screen = Console(width=width, record=True)
        screen.print(view([late], time.time()))
        assert max(map(len, screen.export_text().splitlines())) <= width
