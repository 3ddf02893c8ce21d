"""What verbs print on a narrow terminal, into a pipe, in a script."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from tests.command import finish
from tests.jobs_on_paper import PaperJob, tables
from tests.parts import app
from tests.stores import History
from torchrec_stream_ckpt.cli.common import short_names
from torchrec_stream_ckpt.cli.events import line
from torchrec_stream_ckpt.errors import ConfigError, MarkerNotFoundError
from torchrec_stream_ckpt.format.end_note import End, Outcome
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.service import Event
from torchrec_stream_ckpt.util.units import clock

PREFIX = "model.sparse_arch.embedding_bag_collection.t_category_"
NAMES = [f"{PREFIX}{number}" for number in range(8)]
DATE = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d "


@pytest.fixture
def job(tmp_path: Path) -> PaperJob:
    """Three markers of eight tables whose names differ at the very end."""
    made = PaperJob(tmp_path / "log", tables(*NAMES))
    made.run(3)
    return made


def invoke(*arguments: object, columns: int = 80) -> Any:
    return finish(*arguments, columns=columns)


def run(*arguments: object, columns: int = 80) -> str:
    done = invoke(*arguments, columns=columns)
    assert done.exit_code == 0, done.output
    return str(done.stdout)


@pytest.mark.parametrize("arguments", [("show",), ("diff", "1:1", "1:3", "--sent")])
def test_tables_are_told_apart_at_80_columns(job: PaperJob, arguments: tuple[str, ...]) -> None:
    verb, *rest = arguments
    said = run(verb, f"file://{job.root}", *rest)
    assert f"each table's name begins with {PREFIX}" in said
    rows = [line.split()[1] for line in said.splitlines() if re.match(r"│ \d ", line)]
    assert rows[:8] == [str(number) for number in range(8)]
    assert max(len(line) for line in said.splitlines() if line.startswith(("┃", "│"))) <= 80


def test_what_is_alike_is_taken_off_where_names_do_not_fit_and_at_a_separator_alone() -> None:
    console = Console(width=80, file=sys.stderr)
    assert short_names(console, ["t_cat_0", "t_cat_1"]) == ["t_cat_0", "t_cat_1"]
    assert short_names(console, [f"{'x' * 40}_10", f"{'x' * 40}_11"]) == ["10", "11"]
    assert short_names(console, ["a" * 40, "a" * 41]) == ["a" * 40, "a" * 41]
    assert short_names(console, [f"{'y' * 40}"]) == ["y" * 40]


def test_names_without_a_common_begin_are_cut_in_the_middle_unless_two_would_look_the_same() -> None:
    console = Console(width=60, file=sys.stderr)
    long = [f"{each * 20}_{each * 20}" for each in "abc"]
    assert short_names(console, long) == [f"{each * 8}...{each * 9}" for each in "abc"]
    alike = ["x" * 30 + middle + "y" * 30 for middle in "12"]
    assert short_names(console, ["z", *alike]) == ["z", *alike]


def test_tables_are_as_wide_as_they_are_asked_to_be(job: PaperJob, monkeypatch: pytest.MonkeyPatch) -> None:
    uri = f"file://{job.root}"
    wide = run("show", uri, "--width", "300")
    assert all(name in wide for name in NAMES)
    assert run("--width", "300", "show", uri).count(PREFIX) == len(NAMES)
    monkeypatch.setenv("STREAM_CKPT_WIDTH", "300")
    assert run("show", uri).count(PREFIX) == len(NAMES)
    assert run("show", uri, "--width", "80").count(PREFIX) == 1


def test_a_reader_that_ends_early_gets_no_traceback(job: PaperJob) -> None:
    command = f"'{sys.executable}' -m torchrec_stream_ckpt list file://{job.root} --json | true"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=500, check=True)
    assert "Traceback" not in done.stderr


def test_dates_are_shown_where_there_is_room_and_always_of_a_marker(job: PaperJob) -> None:
    uri = f"file://{job.root}"
    assert re.search(f"committed at {DATE[:-1]}", run("show", uri))
    assert re.search(DATE, run("list", uri, columns=120))
    assert len(re.findall(DATE[:-1], run("list", uri, columns=80))) == 2  # the first one's and the last one's, below


def test_lines_of_services_begin_with_the_time(job: PaperJob) -> None:
    said = invoke("materialize", f"file://{job.root}", "--once").stderr.splitlines()
    assert said
    assert all(re.match(DATE, line) for line in said if not line.startswith(" "))
    assert re.match(DATE, invoke("follow", f"file://{job.root}", "--once").stderr)


def test_a_reason_that_many_markers_share_is_said_once(job: PaperJob, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)
    said = run("list", f"file://{job.root}", "--store", "s3://bucket/job", columns=200)
    assert said.count("s3fs") <= 2  # what is missing, and how to bring it
    assert said.count("no, see (1) below") == 3


@pytest.fixture
def kept(tmp_path: Path) -> History:
    """Three markers with dense state, in a log that is its own store."""
    made = History(tmp_path / "kept")
    made.generation(1, [1, 2, 3])
    return made


@pytest.mark.parametrize("arguments", [("list",), ("list", "--json"), ("list", "--tree"), ("show",)])
def test_a_store_that_holds_nothing_of_the_job_is_said_once(
    kept: History, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    verb, *rest = arguments
    (tmp_path / "other").mkdir()
    for wrong in (tmp_path / "other", tmp_path / "nowhere"):
        with pytest.raises(MarkerNotFoundError, match="the store holds nothing of this job") as error:
            run(verb, f"file://{kept.root}", "--store", wrong, *rest)
        assert str(wrong) in error.value.headline
        assert f"the job keeps its markers in file://{kept.root}" in error.value.hint


def test_a_store_that_has_lost_dense_state_alone_is_not_called_another_jobs(kept: History, tmp_path: Path) -> None:
    uri, store = f"file://{kept.root}", tmp_path / "store"
    run("materialize", uri, "--store", store, "--once")
    shutil.rmtree(store / "dense")
    rows = json.loads(run("list", uri, "--store", store, "--json"))["markers"]
    assert [row["restorable"] for row in rows] == [False] * 3
    assert all("dense state" in row["reason"] for row in rows)


@pytest.mark.parametrize("verb", ["show", "verify"])
def test_a_marker_is_named_after_the_uri_or_by_its_option(kept: History, verb: str) -> None:
    uri = f"file://{kept.root}"
    named, by_option, newest = (
        run(verb, uri, *rest, "--json") for rest in (("1:2",), ("--marker", "1:2"), ("latest",))
    )
    assert named == by_option != newest
    assert newest == run(verb, uri, "--json")
    with pytest.raises(ConfigError, match="MARKER was given twice"):
        run(verb, uri, "1:2", "--marker", "1:2")


def test_nothing_is_cut_in_a_pipe(tmp_path: Path) -> None:
    optimizer = "exact_adagrad_with_a_name_that_is_longer_than_its_column"
    schema = Schema(tuple(replace(each, optimizer=optimizer) for each in tables(*NAMES).tables))
    made = PaperJob(tmp_path / "log", schema)
    made.run(1)
    command = [sys.executable, "-m", "torchrec_stream_ckpt", "show", f"file://{made.root}"]
    environment = {key: value for key, value in os.environ.items() if key != "COLUMNS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500, check=True)
    assert done.stdout.count(optimizer) == len(NAMES)
    assert all(name in done.stdout for name in NAMES)
    narrow = run("show", f"file://{made.root}", columns=60)
    assert "…" not in narrow  # the cell goes on in the next line


def test_markers_that_a_stopped_materializer_leaves_are_not_missing() -> None:
    said = line(Event("stop", {"markers": 3, "lag_markers": 2}))
    assert said == "stopped: 3 markers folded, 2 not yet folded"


def test_a_relay_without_an_outer_log_says_what_makes_one(job: PaperJob, tmp_path: Path) -> None:
    with pytest.raises(MarkerNotFoundError, match="OUTER has no log") as error:
        run("relay", f"file://{job.root}", f"file://{tmp_path}/outer", "--once")
    assert "--stream_ckpt INNER --stream_ckpt OUTER" in error.value.hint


def test_no_bar_is_drawn_where_stderr_is_no_terminal(job: PaperJob) -> None:
    done = invoke("report", f"file://{job.root}", "--out", job.root / "page.html")
    assert (done.exit_code, done.stderr) == (0, "")


def test_a_fence_without_a_terminal_names_yes_and_asks_nothing(job: PaperJob) -> None:
    done = CliRunner().invoke(app, ["fence", f"file://{job.root}"], input="y\n")
    assert isinstance(done.exception, ConfigError)
    assert "there is no terminal" in done.exception.message
    assert "--yes" in done.exception.hint
    assert done.output == ""
    assert "generation 1 is fenced by generation 2" in run("fence", f"file://{job.root}", "--yes")


def test_the_folder_of_an_export_is_a_path(job: PaperJob, tmp_path: Path) -> None:
    said = run("export", f"file://{job.root}", "--to", f"safetensors://{tmp_path}/out", columns=300)
    assert f"in {tmp_path}/out (safetensors)" in said
    assert "://" not in said


def test_a_plan_for_a_file_log_has_no_brokers(job: PaperJob) -> None:
    assert "brokers" not in run("plan", f"file://{job.root}", "--all", columns=200)
    assert "brokers" in run("plan", f"file://{job.root}", "--all", "--log", "kafka", columns=200)


def test_a_trim_says_bytes_as_people_do(job: PaperJob) -> None:
    uri, store = f"file://{job.root}", str(job.root)
    run("materialize", uri, "--once")
    assert re.search(
        r"would delete \d+ segments, [\d.]+ k?B of the log", run("trim", uri, "--store", store, "--dry-run")
    )


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """The command in a process of its own, before there is a job."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torchrec_stream_ckpt", "watch", f"file://{tmp_path}/log", "--interval", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_watch_waits_for_a_job_that_has_not_begun(tmp_path: Path, watching: subprocess.Popen[str]) -> None:
    assert watching.stderr is not None
    assert watching.stdout is not None
    assert watching.stderr.readline().startswith("waiting for the job: there is no log here")
    job = PaperJob(tmp_path / "log", tables("a"))
    job.time_s = time.time()
    job.run(1, seconds=0.0)
    said = watching.stdout.readline()
    while "marker 1:1, step 10" not in said:  # it may look before the COMMIT
        assert "ALERT" not in said
        said = watching.stdout.readline()


def test_a_look_that_finds_an_alert_ends_with_1(tmp_path: Path) -> None:
    job = PaperJob(tmp_path / "log", tables("a"))
    job.time_s = time.time() - 10
    job.run(2, seconds=5.0)
    assert invoke("watch", f"file://{job.root}", "--once").exit_code == 0
    late = PaperJob(tmp_path / "late", tables("a"))
    late.time_s = time.time() - 10_000
    late.run(2, seconds=5.0)
    done = invoke("watch", f"file://{late.root}", "--once")
    assert (done.exit_code, "late: no marker for" in done.stdout) == (1, True)
    assert clock(time.time())[:10] in done.stdout
    failing = invoke("watch", f"file://{late.root}", "--fail-on-alert", "--interval", "0.1")
    assert failing.exit_code == 1
    assert failing.stderr.startswith("Alert: late: no marker for")


def test_a_watch_for_alerts_ends_with_a_job_that_is_finished(kept: History) -> None:
    claim = kept.lineage.claims[1]
    end = End(claim.job, 1, claim.nonce, 30, Outcome.FINISHED, "", time.time())
    kept.log.append_control(end.to_frame())
    done = invoke("watch", f"file://{kept.root}", "--fail-on-alert", "--interval", "0.1")
    assert (done.exit_code, "finished at step 30" in done.stdout) == (0, True)
