"""A scrub that is killed, or asked to end, goes on at its place."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.forks import command, context, status_of
from tests.parts import main
from tests.synthetic import JOB, Job
from tests.unit.folded_job import store_of
from tests.unit.scrubbed_job import KINDS, harm, name_of, one, scrub, scrubbed_job
from torchrec_stream_ckpt.maintain.scrub import scrubber
from torchrec_stream_ckpt.maintain.scrub.scrub_reader import Part, SegmentPart

POINTS = ("scrub.read", "scrub.place")
"""Where a process may die."""


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers with dense state beside the log, and in a store of its own with bases."""
    return scrubbed_job(tmp_path / "log")


def test_a_scrub_that_was_killed_goes_on_where_it_was(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    early, late = store_of(job) / "claims" / JOB.hex() / "g00000001", sorted(store_of(job).glob(KINDS["interval"]))[-1]
    harm(early)
    harm(late)
    whole = scrub(job, "--anew")[1]
    for fuse in ("scrub.read=kill@9", "scrub.place=kill@5", "scrub.read=kill@3"):
        killed(job, fuse)
    read = read_names(monkeypatch)
    status, record = scrub(job)
    assert status == 1
    assert {each["name"] for each in record["damaged"]} == {name_of(job, early), name_of(job, late)}
    assert record["pass"] == whole["pass"] + 1
    assert len(set(read)) < whole["objects"], "what was read before the kills is not read again"
    assert name_of(job, early) in read, "but for what was damaged"


def killed(job: Job, fuse: str) -> None:
    """Run the command in a process of its own until it is killed at a point."""
    report = job.root.parent / "fired"
    report.unlink(missing_ok=True)
    assert status_of(_scrub, job.root, store_of(job), fuse=fuse, report=report) == -signal.SIGKILL
    assert report.exists()


def _scrub(root: Path, store: Path) -> None:
    scrubber.SAVE_S = 0.0  # each object is a place
    command("scrub", f"file://{root}", "--store", str(store))


def read_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of objects that are read from now on, on any thread, but for those that name others."""
    names: list[str] = []
    read, whole = scrubber.ScrubReader.read, scrubber.read_whole

    def reading(self: scrubber.ScrubReader, name: str) -> Any:
        names.append(name)
        return read(self, name)

    def reading_whole(objects: Any, part: Part, ended: Any) -> int | None:
        names.append(part.ref.name if isinstance(part, SegmentPart) else part.name)
        return whole(objects, part, ended)

    monkeypatch.setattr(scrubber.ScrubReader, "read", reading)
    monkeypatch.setattr(scrubber, "read_whole", reading_whole)
    return names


def test_a_repair_that_was_killed_is_done_by_the_next_scrub(job: Job) -> None:
    path = one(job, "base")
    whole = harm(path)
    report = job.root.parent / "fired"
    given = ("scrub", f"file://{job.root}", "--store", str(store_of(job)), "--repair")
    status = status_of(command, *given, fuse="repair.aside=kill@1", report=report)
    assert (status, report.read_text()) == (-signal.SIGKILL, "repair.aside\n")
    assert scrub(job, "--repair")[0] == 0
    assert path.read_bytes() == whole


def test_a_signal_ends_a_scrub_at_its_place_and_says_so(job: Job) -> None:
    output = job.root.parent / "output"
    process = context.Process(target=_slowly, args=(str(job.root), str(store_of(job)), output))
    process.start()
    deadline = time.monotonic() + 120
    while not list(store_of(job).glob("scrub/*/command-*")):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    said = output.read_text()
    assert process.exitcode == 1, said
    assert "ended early" in said
    assert "the same command continues from here" in said
    status, record = scrub(job)
    assert (status, record["pass"], record["ended"]) == (0, 1, True)


def _slowly(root: str, store: str, output: Path) -> None:
    scrubber.SAVE_S = 0.0
    fd = os.open(output, os.O_WRONLY | os.O_CREAT)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    sys.argv = ["stream-ckpt", "scrub", f"file://{root}", "--store", store, "--bytes-per-s", "1kB"]
    main()
