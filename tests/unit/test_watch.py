"""The live view: what it says of a job, what alarms it, and how it looks at two widths."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from tests.builders import claim, end
from tests.command import call, run
from tests.jobs_on_paper import EVIL, PaperJob, tables
from tests.parts import FileLog
from tests.stores import lose_rows
from torchrec_stream_ckpt.cli.common import open_job
from torchrec_stream_ckpt.cli.options import JobOptions
from torchrec_stream_ckpt.cli.watch import Watcher
from torchrec_stream_ckpt.cli.watch_many import Watched
from torchrec_stream_ckpt.cli.watch_many import view as view_many
from torchrec_stream_ckpt.cli.watching import facts, line, view
from torchrec_stream_ckpt.extras.reporting.job_status import Ended, Look, look
from torchrec_stream_ckpt.format.proof import Window
from torchrec_stream_ckpt.inner import Control, Job
from torchrec_stream_ckpt.util.types import MarkerId

RATE = 1e6
"""Bytes a second that a rank restores."""


@pytest.fixture
def job(tmp_path: Path) -> PaperJob:
    """Six markers by two ranks, and from the fourth one on three more by three ranks."""
    job = PaperJob(tmp_path / "log", tables("a", "b"), world=2)
    first = job.run(6)
    job.step, job.world = first[3].step, 3
    job.run(3, parent=first[3].id)
    return job


def seen(job: PaperJob, since_s: float = 5.0, gap: str = "") -> Look:
    """The job, so long behind its last marker."""
    return look(Control(FileLog(job.root)).refresh(), None, RATE, job.time_s + since_s, gap)


def kinds(look: Look) -> list[str]:
    return [alert.kind for alert in look.alerts]


def watch(*arguments: str) -> str:
    done = call("watch", *arguments)
    if "--json" in arguments:
        assert done.exit_code == bool(json.loads(done.stdout)["alerts"]), done.output
    else:
        assert done.exit_code == ("alerts" in done.stdout), done.output
    return done.stdout


def test_what_is_said_is_what_the_commits_say(job: PaperJob) -> None:
    now = seen(job)
    commits = Control(FileLog(job.root)).refresh().commits
    newest, before, parent = (commits[MarkerId(*name)] for name in ((2, 9), (2, 8), (1, 4)))
    sent = [sum(end.num_bytes for end in commit.ranks) for commit in (newest, before, parent)]
    assert (now.generation, now.world, now.markers) == (2, 3, 9)
    assert now.newest is not None
    assert (now.newest.marker, now.newest.step, now.newest.steps, now.newest.took_s) == (MarkerId(2, 9), 70, 10, 20.0)
    assert now.newest.num_bytes == sent[0] - sent[1]
    assert (now.loss_s, now.interval_s, now.steps_per_s) == (5.0, 20.0, 0.5)
    assert now.restore is not None
    assert (now.restore.source, now.restore.num_bytes) == ("log", sent[0] + sent[2])
    assert now.restore.seconds == pytest.approx((sent[0] + sent[2]) / 3 / RATE)
    assert [each.end for each in now.ranks] == [end.end for end in newest.ranks]
    assert sum(each.num_bytes for each in now.ranks) == now.newest.num_bytes
    assert now.recent[2].steps == 10  # from its parent's step, not from nothing
    assert now.alerts == ()


def test_a_job_that_is_late_alarms_and_one_that_is_not_does_not(job: PaperJob) -> None:
    assert kinds(seen(job, since_s=59.0)) == []
    late = seen(job, since_s=61.0)
    assert late.alerts[0].text == "no marker for 1.0 min, after one every 20 s"
    assert kinds(late) == ["late"]


def test_a_fence_a_silent_start_and_a_gap_alarm(job: PaperJob) -> None:
    assert kinds(seen(job, gap="rank 1 of marker 2:9 is gone")) == ["gap"]
    job.log.append_control(claim(3, parent=MarkerId(2, 9), schema=job.schema, time_s=job.time_s).to_frame())
    assert kinds(seen(job, since_s=599.0)) == []
    assert kinds(seen(job, since_s=601.0)) == ["first"]
    job.log.append_control(claim(4, parent=MarkerId(2, 9), schema=job.schema, world=0).to_frame())
    assert kinds(seen(job)) == ["fenced"]


def pictured(look: Look) -> str:
    console = Console(width=200)
    with console.capture() as captured:
        console.print(view("file:///job", look, 200))
    return captured.get()


@pytest.mark.parametrize(
    ("outcome", "soon", "later"),
    [("finished", [], []), ("preempted", [], ["preempted"]), ("failed", ["failed"], ["failed"])],
)
def test_a_trainer_that_has_said_how_it_ended_is_not_late(
    outcome: str, soon: list[str], later: list[str], job: PaperJob
) -> None:
    job.log.append_control(end(2, outcome, reason="Why", time_s=job.time_s).to_frame())
    now, then = seen(job, since_s=70.0), seen(job, since_s=700.0)
    assert (kinds(now), kinds(then)) == (soon, later)
    assert f"{outcome} at step 70 (Why), 1.2 min ago" in pictured(now)
    assert line(now).endswith(f"; {outcome} at step 70 (Why), 1.2 min ago")
    assert now.ended is not None
    assert watch(f"file://{job.root}", "--once", "--json").count(f'"outcome": "{outcome}"') == 1
    job.log.append_control(claim(3, parent=MarkerId(2, 9), schema=job.schema, time_s=job.time_s + 70).to_frame())
    assert (seen(job, since_s=80.0).ended, kinds(seen(job, since_s=80.0))) == (None, [])


def test_rows_that_are_lost_between_two_looks_alarm(job: PaperJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrec_stream_ckpt.cli.watch._GAP_EVERY_S", -1.0)
    with open_job(Job.open(f"file://{job.root}"), warn=False) as opened:
        watcher = Watcher(opened, 1e9)
        assert "gap" not in kinds(watcher.look())
        lose_rows(job.root)
        assert "gap" in kinds(watcher.look())


def test_the_store_that_the_materializer_writes_is_taken_into_account(job: PaperJob) -> None:
    uri = f"file://{job.root}"
    without = json.loads(watch(uri, "--once", "--json"))
    run("materialize", uri, "--once")
    held = json.loads(watch(uri, "--once", "--json"))
    assert (without["backlog"], without["restore"]["source"]) == (None, "log")
    assert (held["backlog"]["markers"], held["restore"]["source"]) == (0, "store")
    job.run(1, parent=MarkerId(2, 9))
    behind = json.loads(watch(uri, "--once", "--json"))
    assert (behind["backlog"]["markers"], behind["restore"]["source"]) == (1, "store + log")
    assert behind["backlog"]["num_bytes"] == behind["newest"]["num_bytes"] > 0
    assert [alert["kind"] for alert in behind["alerts"]] == ["lag"]  # of the new generation no distance is known yet


def test_how_much_is_proved_is_known_from_the_second_marker_on(tmp_path: Path) -> None:
    job = PaperJob(tmp_path / "log", tables("a"), window=Window(0, 20_000))
    job.run(1)
    assert json.loads(watch(f"file://{job.root}", "--once", "--json"))["proved"] is None
    job.run(3, parent=MarkerId(1, 1))
    uri = f"file://{job.root}"
    some = json.loads(watch(uri, "--once", "--json"))["proved"]
    assert some == {"round_markers": 4, "share": pytest.approx(60_000 / 65_536), "oldest_markers": 2}
    assert "92%, a round has 4" in watch(uri, "--once")
    job.run(6, parent=MarkerId(2, 4))
    assert json.loads(watch(uri, "--once", "--json"))["proved"] == {"round_markers": 4, "share": 1, "oldest_markers": 3}
    assert "all, 3 markers old" in watch(uri, "--once")


def test_a_job_without_proofs_says_nothing_of_them(job: PaperJob) -> None:
    assert json.loads(watch(f"file://{job.root}", "--once", "--json"))["proved"] is None


def test_what_was_said_of_markers_is_shown(job: PaperJob) -> None:
    job.say(MarkerId(1, 2), {"auc": 0.7})
    assert "said last" in watch(f"file://{job.root}", "--once")
    assert "; auc" not in line(seen(job))
    job.say(MarkerId(2, 9), {"auc": 0.8, "run": EVIL})
    shown = watch(f"file://{job.root}", "--once")
    assert "2:9: auc=0.8, run=" in shown
    assert "\x1b" not in shown
    assert "; auc=0.8, run=" in line(seen(job))
    record = json.loads(watch(f"file://{job.root}", "--once", "--json"))
    assert record["newest"]["meta"] == {"auc": 0.8, "run": EVIL}


def test_json_names_are_stable(job: PaperJob) -> None:
    record = json.loads(watch(f"file://{job.root}", "--once", "--json"))
    assert list(record) == [
        "uri",
        "time_s",
        "generation",
        "world",
        "newest",
        "recent",
        "markers",
        "ranks",
        "steps_per_s",
        "interval_s",
        "loss_s",
        "restore",
        "proved",
        "backlog",
        "alerts",
        "ended",
        "compared",
        "followers",
    ]
    assert record["newest"]["marker"] == "2:9"


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize("height", [16, 24, 50])
def test_the_picture_fits_the_terminal(job: PaperJob, width: int, height: int) -> None:
    now = seen(job, since_s=3600.0)
    console = Console(width=width, height=height)
    with console.capture() as capture:
        console.print(view(f"file:///jobs/{EVIL}", now, width, height))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= width
    assert len(lines) <= height
    text = "\n".join(lines)
    assert "late: no marker for 1.0 h" in text
    assert "2:9, step 70" in text
    assert "\x1b" not in text
    head = next(row for row in lines if "after" in row and "late: " not in row)
    assert ("position" in head) == (width == 120)


def test_many_ranks_are_summed_up(tmp_path: Path) -> None:
    job = PaperJob(tmp_path / "log", tables("a", "b"), world=20)
    job.run(2)
    console = Console(width=120)
    with console.capture() as capture:
        console.print(view("file:///x", seen(job), 120, 40))
    assert "+12" in capture.get()


def test_a_line_says_the_same(job: PaperJob) -> None:
    now = seen(job)
    assert "marker 2:9, step 70, 5.0 s ago; " in line(now)
    assert "; 0.50 steps/s; restore " in line(now)
    assert line(replace(now, newest=None)).endswith("generation 2: no marker yet")


@pytest.fixture
def watching(job: PaperJob) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, its output a pipe."""
    program = "from torchrec_stream_ckpt.cli.main import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", program, "watch", f"file://{job.root}", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_without_a_terminal_it_prints_what_is_new(job: PaperJob, watching: subprocess.Popen[str]) -> None:
    assert watching.stdout is not None
    assert "marker 2:9, step 70" in watching.stdout.readline()
    assert watching.stdout.readline().startswith("ALERT late: ")
    job.time_s = time.time()
    job.run(1, parent=MarkerId(2, 9), seconds=0.0)
    said = ""
    while not ("marker 3:10, step 80" in said and "over: late\n" in said):  # it may look between CLAIM and COMMIT, too
        said += watching.stdout.readline()
        assert len(said.splitlines()) <= 3


def test_the_loss_is_said_in_words_and_a_finished_job_has_none(job: PaperJob) -> None:
    def loss(now: Look) -> str:
        return dict(facts(now)).get("loss") or dict(facts(now))["if it dies now"]

    now = seen(job, since_s=60.0)
    assert loss(now) == "1.0 min are lost"
    assert now.newest is not None
    ended = Ended("finished", "", now.newest.step, now.time_s)
    assert loss(replace(now, ended=ended)) == "nothing to lose"
    assert loss(replace(now, ended=replace(ended, step=now.newest.step + 12))) == "lost: 12 steps after it"
    assert loss(replace(now, newest=None, loss_s=None)) == "all is lost"


def test_the_line_of_a_finished_job_counts_no_loss(job: PaperJob) -> None:
    def line_of(now: Look) -> list[str]:
        watched = Watched("ads", JobOptions(uri=f"file://{job.root}"), None)
        watched.seen, watched.trouble = now, ""
        screen = Console(width=120, record=True)
        screen.print(view_many([watched], now.time_s))
        return screen.export_text().splitlines()[-1].split()

    now = seen(job, since_s=60.0)
    assert now.newest is not None
    assert line_of(now)[3:5] == ["1.0", "min"]
    ended = Ended("finished", "", now.newest.step, now.time_s)
    assert line_of(replace(now, ended=ended))[3] == "nothing"
    assert line_of(replace(now, ended=replace(ended, step=now.newest.step + 12)))[3:5] == ["12", "steps"]


# Several jobs in one view: a line each, and no job that is away hides another one.


@pytest.fixture
def jobs(tmp_path: Path) -> tuple[PaperJob, PaperJob]:
    ads, feed = (PaperJob(tmp_path / name, tables("a"), world=2) for name in ("ads", "feed"))
    ads.run(3)
    feed.run(5)
    return ads, feed


def watch_all(*arguments: str) -> tuple[int, str, str]:
    done = call("watch", *arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), done.exception
    return done.exit_code, done.stdout, done.stderr


def test_each_job_has_a_line_and_one_that_is_not_there_says_so(jobs: tuple[PaperJob, PaperJob], tmp_path: Path) -> None:
    ads, feed = (f"file://{each.root}" for each in jobs)
    code, said, _ = watch_all(ads, "--also", feed, "--also", f"file://{tmp_path}/none", "--once")
    assert code == 1
    lines = [row.split() for row in said.splitlines()]
    assert [row[:2] for row in lines if row and row[0] in ("ads", "feed", "none")] == [
        ["ads", "1:3"],
        ["feed", "1:5"],
        ["none", "-"],
    ]
    assert "ads: late: " in said  # written years ago
    assert "none: unavailable: there is no log" in said
    code, said, _ = watch_all(ads, "--also", feed, "--once", "--json")
    assert code == 1
    assert [(each["uri"], each["newest"]["marker"], each["trouble"]) for each in json.loads(said)] == [
        (ads, "1:3", ""),
        (feed, "1:5", ""),
    ]


def test_jobs_of_one_name_have_their_whole_uris(tmp_path: Path) -> None:
    there = [f"file://{tmp_path}/{folder}/log" for folder in ("a", "b")]
    _, said, _ = watch_all(there[0], "--also", there[1], "--once", "--json")
    assert [each["uri"] for each in json.loads(said)] == there
    _, said, _ = watch_all(there[0], "--also", there[1], "--once")
    assert all(f"{uri}: unavailable" in said for uri in there)


def test_an_alert_of_any_job_ends_it_if_that_is_asked_for(jobs: tuple[PaperJob, PaperJob]) -> None:
    ads, feed = (f"file://{each.root}" for each in jobs)
    code, said, told = watch_all(ads, "--also", feed, "--interval", "0.1", "--fail-on-alert")
    assert code == 1
    assert "Alert: ads: late: " in told or "Alert: feed: late: " in told
    assert "marker 1:3, step" in said or "marker 1:5, step" in said


def test_finished_jobs_end_it(jobs: tuple[PaperJob, PaperJob]) -> None:
    for job in jobs:
        log = FileLog(job.root)
        log.append_control(end(1, outcome="finished").to_frame())
        log.close()
    ads, feed = (f"file://{each.root}" for each in jobs)
    code, said, _ = watch_all(ads, "--also", feed, "--interval", "0.1", "--fail-on-alert")
    assert code == 0
    assert "finished" in said


def test_a_job_is_waited_for_while_others_are_seen(tmp_path: Path) -> None:
    late = Watched("late", JobOptions(uri=f"file://{tmp_path}/late"), None)
    stop = threading.Event()
    thread = threading.Thread(target=late.follow, args=(0.05, stop))
    thread.start()

    def newest() -> str | None:
        return str(late.seen.newest.marker) if late.seen and late.seen.newest else None

    try:
        deadline = time.monotonic() + 60
        while "no log" not in late.trouble and time.monotonic() < deadline:
            time.sleep(0.01)
        assert "there is no log" in late.trouble
        PaperJob(tmp_path / "late", tables("a")).run(2)
        while newest() != "1:2" and time.monotonic() < deadline:
            time.sleep(0.01)
    finally:
        stop.set()
        thread.join()
    assert (newest(), late.trouble) == ("1:2", "")
    for width in (60, 80, 120):
        screen = Console(width=width, record=True)
        screen.print(view_many([late], time.time()))
        assert max(map(len, screen.export_text().splitlines())) <= width
