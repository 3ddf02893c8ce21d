"""The report, looked at in a real browser: light and dark, wide and narrow, empty and large, and with evil names."""

from __future__ import annotations

import html
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.browser import Browser
from tests.builders import claim, trim
from tests.command import run
from tests.jobs_on_paper import EVIL, LONG, PaperJob, tables
from tests.parts import FileLog
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.reporting.history import Heat, read_history
from torchrec_stream_ckpt.extras.reporting.sections import MOST_BARS
from torchrec_stream_ckpt.extras.reporting.svg import ticks
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import TableSpec

PICTURES = Path(__file__).parents[2] / "build" / "report"
LARGE = 2000
SECTIONS = [
    "Markers over time",
    "Lineage",
    "Rows a marker, by table",
    "Bytes a marker, by table",
    "How often rows were sent",
    "Stall a step",
    "Restore estimate",
    "Last markers",
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as running:
        yield running


def report(root: Path, *more: str) -> Path:
    page = root.parent / "report.html"
    run("report", f"file://{root}", "--out", str(page), *more)
    return page


def write_scalars(folder: Path) -> None:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    writer = EventFileWriter(str(folder))
    for step in range(0, 600, 10):
        for name, value in (("mean", 0.8), ("max", 40.0 if step == 300 else 2.0 + step % 7)):
            summary = Summary(value=[Summary.Value(tag=f"stream_ckpt/blocked_ms_{name}", simple_value=value)])
            writer.add_event(Event(step=step, wall_time=float(step), summary=summary))
    writer.close()


@dataclass
class Seen:
    """What the browser says of one page."""

    sections: list[str]
    charts: list[str]
    """Titles."""
    text: str


def look(browser: Browser, page: Path, name: str) -> Seen:
    """Open it in every way; nothing may complain, load anything, or stick out. Pictures are kept."""
    backgrounds, pictures = {}, {}
    for width, dark in ((1000, False), (1000, True), (360, False), (360, True)):
        browser.open(page, width=width, dark=dark)
        assert browser.complaints == []
        assert browser.requests == [page.as_uri()]
        assert browser.value("document.documentElement.scrollWidth") == width
        mode = f"{width}-{'dark' if dark else 'light'}"
        backgrounds[mode] = browser.value("getComputedStyle(document.body).backgroundColor")
        pictures[mode] = browser.picture(PICTURES / f"{name}-{mode}.png")
        assert browser.value("document.querySelectorAll('script').length") == 0
    assert backgrounds["1000-light"] == backgrounds["360-light"] != backgrounds["1000-dark"] == backgrounds["360-dark"]
    assert len(set(pictures.values())) == 4
    unnamed = (
        "[...document.querySelectorAll('svg')].filter(s => s.getAttribute('role') != 'img'"
        " || !s.ariaLabelledByElements.every(e => e.textContent)).length"
    )
    assert browser.value(unnamed) == 0
    list_of = "[...document.querySelectorAll('{}')].map(e => e.textContent)"
    return Seen(
        browser.value(list_of.format("main > section > h2")),
        browser.value(list_of.format("svg > title")),
        browser.value("document.body.innerText"),
    )


def test_a_job_with_a_branch_is_drawn_whole(tmp_path: Path, browser: Browser) -> None:
    job = PaperJob(tmp_path / "log", tables("sparse.ebc.t_item", "sparse.ebc.t_user", EVIL, LONG), world=2)
    first = job.run(12)
    job.step, job.world = first[7].step, 3
    job.run(9, parent=first[7].id)
    job.say(first[2].id, {"auc": 0.75, "run": EVIL})
    job.say(first[7].id, {"auc": 0.8})
    write_scalars(tmp_path / "events")
    page = report(job.root, "--tensorboard", str(tmp_path / "events"), "--restore-mb-per-s", "50")
    seen = look(browser, page, "branch")
    sections = ["Alerts", SECTIONS[0], "What was said of markers", *SECTIONS[1:]]
    assert seen.sections == sections  # its newest marker is some years old
    assert len(seen.charts) == 8
    assert "auc: 2 markers; highest 0.8 at 1:8, lowest 0.75 at 1:3." in seen.text
    assert EVIL[:-5] in seen.text
    assert "\\x1b[31m" in seen.text
    assert LONG in seen.text
    assert "2:21" in seen.text
    assert "1: 2 ranks, 12 markers" in seen.text
    assert "2: 3 ranks, 9 markers" in seen.text
    assert "at 50 MB/s a rank" in seen.text
    assert "<script" not in page.read_text()


def test_long_names_of_tables_are_read_without_scrolling(tmp_path: Path, browser: Browser) -> None:
    """A name goes on in the next line between two of its words, and no table of tables is wider than its page."""
    names = [f"model.sparse_arch.embedding_bags.t_user_{n}_history_of_clicks_last_30_days" for n in ("id", "country")]
    job = PaperJob(tmp_path / "log", tables(*names, LONG), world=2)
    job.run(3)
    page = report(job.root)
    pieces = "[...document.querySelectorAll('.names .name, .legend li > span + span')].flatMap(e => [...e.childNodes])"
    lines = "(n => { const r = document.createRange(); r.selectNodeContents(n); return r.getClientRects().length; })"
    for width in (400, 800, 1280):
        browser.open(page, width=width)
        browser.value("document.querySelectorAll('details').forEach(each => each.open = true)")
        browser.picture(PICTURES / f"names-{width}.png")
        words = browser.value(f"{pieces}.filter(n => n.nodeType == 3).map({lines})")
        assert len(words) > 100
        assert set(words) == {1}
        assert browser.value("[...document.querySelectorAll('.names')].length") == 3
        wider = "[...document.querySelectorAll('.names')].map(t => t.parentElement)"
        assert browser.value(f"{wider}.filter(e => e.scrollWidth > e.clientWidth).length") == 0


def test_a_job_without_a_marker_says_so(tmp_path: Path, browser: Browser) -> None:
    log = FileLog(tmp_path / "log")
    log.prepare(1)
    log.append_control(claim(1, time_s=1.0).to_frame())
    log.close()
    seen = look(browser, report(tmp_path / "log"), "empty")
    assert (seen.sections, seen.charts) == (["Alerts"], [])
    assert "No marker has been committed" in seen.text
    assert "first generation 1 began" in seen.text


def test_thousands_of_markers_are_drawn_together(tmp_path: Path, browser: Browser) -> None:
    job = PaperJob(tmp_path / "log", tables(*(f"sparse.ebc.table_{number:02}" for number in range(30))))
    parent = None
    for markers in (LARGE // 2, 1, LARGE // 4, LARGE // 4 - 1):
        parent = job.run(markers, parent)[-1].id
    page = report(job.root)
    seen = look(browser, page, "large")
    assert f"{LARGE:,}\nin 4 generations" in seen.text
    assert "24 other tables" in seen.text
    assert "a bar is the mean of up to 20" in seen.text
    assert page.stat().st_size < 500_000
    bars = browser.value("new Set([...document.querySelectorAll('svg rect')].map(r => r.getAttribute('x'))).size")
    assert MOST_BARS <= bars <= 2 * MOST_BARS
    points = browser.value("[...document.querySelectorAll('polyline')].map(p => p.points.numberOfItems)")
    assert max(points) <= 301
    assert f"The newest 7 of {LARGE:,} markers were read." in report(job.root, "--last", "7").read_text()


def test_rows_by_table_and_row_are_those_that_the_log_holds(tmp_path: Path) -> None:
    job = PaperJob(tmp_path / "log", tables("a", "b", "c"), world=2)
    commits = job.run(6)
    lineage = Control(FileLog(job.root)).refresh()
    history = read_history(FileLog(job.root), lineage)
    assert list(history.intervals) == [commit.id for commit in commits]
    assert [each.is_base for each in history.intervals.values()] == [True] + [False] * 5
    assert history.intervals[commits[0].id].rows == {"a": 40, "b": 40, "c": 40}
    sent = 0
    for each in history.intervals.values():
        assert sum(each.rows.values()) == each.all_rows > 0
        assert 0 < sum(each.num_bytes.values()) < each.all_bytes
        sent += each.all_rows
    assert sent == sum(end.rows for end in commits[-1].ranks)
    assert sum(int(heat.counts.sum()) for heat in history.heat.values()) == sent
    assert {heat.sent_rows for heat in history.heat.values()} == {40}
    newest = read_history(FileLog(job.root), lineage, last=2)
    assert [newest.intervals[commit.id].rows for commit in commits[-2:]] == [
        history.intervals[commit.id].rows for commit in commits[-2:]
    ]


def test_what_the_log_lost_is_said_and_the_rest_is_drawn(tmp_path: Path) -> None:
    job = PaperJob(tmp_path / "log", tables("a", "b"))
    commits = job.run(6)
    files = [path for path in job.root.rglob("*") if path.is_file() and "control" not in path.name]
    segment = max(files, key=lambda path: path.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[commits[3].ranks[0].end + 10] ^= 1
    segment.write_bytes(data)
    history = read_history(FileLog(job.root), Control(FileLog(job.root)).refresh())
    missing = [bool(each.missing) for each in history.intervals.values()]
    assert missing == [False] * 4 + [True] * 2
    job.log.append_control(trim("1:2").to_frame())
    trimmed = read_history(FileLog(job.root), Control(FileLog(job.root)).refresh())
    reasons = [each.missing for each in trimmed.intervals.values()]
    assert reasons[:4] == ["trimmed", "trimmed", "", ""]
    assert all(reasons[4:])
    text = html.unescape(report(job.root).read_text())
    assert "The frames of 4 markers are not in the log: trimmed; " in text
    assert "not known by table" in text


def test_classes_and_the_share_of_the_hottest_rows() -> None:
    heat = Heat(TableSpec("t", 400, 4, "float32", "sgd", ()), 1, np.zeros(400, np.uint32))
    heat.add(np.arange(100))
    for _ in range(7):
        heat.add(np.arange(4))
    assert heat.classes() == [96, 0, 0, 4]
    assert (heat.most, heat.sent_rows) == (8, 100)
    assert heat.hottest_share == 32 / 128
    sample = Heat(heat.table, 4, np.zeros(100, np.uint32))
    sample.add(np.arange(100))
    assert (sample.classes(), sample.sent_rows) == ([100], 100)


@pytest.mark.parametrize(("low", "high"), [(0, 1), (0, 7), (3, 1e9), (0, 1e-4), (5, 5)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 6
    assert all(low <= tick <= high * (1 + 1e-9) for tick in found)


def test_mistakes_have_a_message(tmp_path: Path) -> None:
    PaperJob(tmp_path / "log", tables("a")).run(1)
    with pytest.raises(ConfigError, match="no scalars"):
        report(tmp_path / "log", "--tensorboard", str(tmp_path))
    for out in (str(tmp_path / "nowhere" / "x.html"), "", "/", str(tmp_path)):
        with pytest.raises(ConfigError, match="the page cannot be written"):
            report(tmp_path / "log", "--out", out)
    assert not list(tmp_path.glob(".*"))


def test_the_policy_of_the_page_lets_nothing_run_or_load(tmp_path: Path, browser: Browser) -> None:
    """Even if a name did get out of its quotes."""
    PaperJob(tmp_path / "log", tables("a")).run(1)
    page = report(tmp_path / "log")
    evil = "<script>document.title = 'taken'</script><img src='https://example.invalid/x'></main>"
    page.write_text(page.read_text().replace("</main>", evil))
    browser.open(page, width=800)
    assert "taken" not in browser.value("document.title")
    assert len(browser.complaints) == 2
