"""A record may say any finite number as its time: no view of the job fails for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests.jobs_on_paper import PaperJob, tables
from tests.parts import app

VIEWS = (
    (("list", "--width=100"), "an unknown day"),
    (("list", "--width=80"), "an unknown day"),
    (("list", "--tree"), "d ago"),
    (("show", "--marker=2:4"), "committed at"),
    (("watch", "--once", "--width=100"), "2:4"),
    (("report", "--out=report.html"), "report.html"),
)


@pytest.mark.parametrize("times_s", [(1e308, 0.0), (-1e308, 1e308)], ids=str)
def test_each_view_shows_a_job_with_a_time_that_no_calendar_has(
    times_s: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    job = PaperJob(tmp_path / "log", tables("a"), time_s=times_s[0])
    first = job.run(2)
    job.time_s = times_s[1]
    job.run(2, parent=first[1].id)
    for (command, *options), shown in VIEWS:
        done = CliRunner().invoke(app, [command, job.root.as_uri(), *options])
        assert done.exception is None or isinstance(done.exception, SystemExit), (command, done.exception)
        output = " ".join(done.output.split())
        assert shown in output
        assert "0000000000" not in output.replace(f"{7:032x}", ""), "a length of time has a few digits"
    page = (tmp_path / "report.html").read_text()
    assert "an unknown day" in page
    assert not re.search(r'="[^" ]*(nan|inf)\b', page)
