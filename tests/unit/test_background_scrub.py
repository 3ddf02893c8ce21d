"""``materialize --scrub-bytes-per-s``: what lies in the store is read and mended while nothing is folded."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from tests.parts import FolderObjects, Scrubber
from tests.synthetic import Job
from tests.unit.folded_job import command, folded_job, materialize, store_of
from torchrec_stream_ckpt.cli import materialize as verb
from torchrec_stream_ckpt.cli.events import line
from torchrec_stream_ckpt.errors import StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.maintain.materialize_service import MaterializeService
from torchrec_stream_ckpt.maintain.scrub import background_scrub
from torchrec_stream_ckpt.maintain.scrub.background_scrub import BackgroundScrub
from torchrec_stream_ckpt.util.metrics import METRICS
from torchrec_stream_ckpt.util.service import Event

FAST = 10**12


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Four markers, folded."""
    job = folded_job(tmp_path / "log")
    assert materialize(job)[0] == 0
    return job


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--scrub-bytes-per-s", "0"], "'0' is not a size"),
        (["--scrub-bytes-per-s", "-20MB"], "'-20MB' is not a size"),
        (
            ["--scrub-bytes-per-s", "20MB", "--once"],
            "--scrub-bytes-per-s scrubs while the command waits, but --once does not wait",
        ),
    ],
)
def test_wrong_rates_are_refused_before_anything_is_opened(job: Job, options: list[str], said: str) -> None:
    status, events, error = command(f"file://{job.root}", "--store", str(store_of(job)), "--json", *options)
    assert (status, events) == (1, [])
    assert said in error
    assert "Try: " in error


# The parts.


def scrubber_of(job: Job) -> Scrubber:
    lineage = Control(job.log).refresh()
    return Scrubber(open_store(str(store_of(job))), lambda: lineage, "service")


def test_it_reads_no_more_than_the_rate_allows_and_ends_in_time(job: Job) -> None:
    passes: list[Scrubber] = []
    scrub = BackgroundScrub(scrubber_of(job), 20_000, passed=passes.append)
    begin, stop = time.monotonic(), threading.Event()
    while not passes:
        scrub.use(0.05, stop)
    took_s, read = time.monotonic() - begin, scrub.scrubber.counts.scrubbed_bytes
    largest = max(path.stat().st_size for path in store_of(job).rglob("*") if path.is_file())
    least_s = (read - largest) / 20_000
    assert took_s >= least_s
    assert scrub.scrubber.kept.oldest_s >= least_s, "the pass began after this test did"
    before = scrub.scrubber.counts.scrubbed_bytes
    scrub.use(0.05, stop)
    assert scrub.scrubber.counts.scrubbed_bytes == before, "it rests"


def test_after_its_rest_it_begins_anew(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    passes: list[int] = []
    scrub = BackgroundScrub(scrubber_of(job), FAST, passed=lambda each: passes.append(each.place.number))
    monkeypatch.setattr(background_scrub, "REST_S", 0.0)
    while len(passes) < 3:
        scrub.use(0.05, threading.Event())
    assert passes[:3] == [1, 2, 3]


def test_a_stop_ends_it_at_once_and_the_next_one_goes_on(job: Job) -> None:
    stop = threading.Event()
    first = BackgroundScrub(scrubber_of(job), 1.0)
    first.use(0.1, stop)
    stop.set()
    first.use(1e6, stop)
    first.close()
    read = first.scrubber.counts.scrubbed_bytes
    passes: list[Scrubber] = []
    second = BackgroundScrub(scrubber_of(job), FAST, passed=passes.append)
    while not passes:
        second.use(0.05, threading.Event())
    assert (passes[0].place.number, passes[0].place.num_bytes) == (1, read + second.scrubber.counts.scrubbed_bytes)


def test_a_store_that_is_away_is_outlasted(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    troubles: list[StreamCkptError] = []
    passes: list[Scrubber] = []
    read, away = FolderObjects.read, [True]

    def failing(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        if away[0]:
            raise StoreUnavailableError("the disk is away", hint="mend it", name=name)
        return read(self, name, begin, end)

    monkeypatch.setattr(FolderObjects, "read", failing)
    scrub = BackgroundScrub(scrubber_of(job), FAST, passed=passes.append, trouble=troubles.append)
    while len(troubles) < 2:
        scrub.use(0.05, threading.Event())
    assert {each.message for each in troubles} == {"the disk is away"}
    away[0] = False
    while not passes:
        scrub.use(0.05, threading.Event())
    assert (passes[0].place.number, scrub.scrubber.counts.scrub_damaged) == (1, 0)


def test_its_values_are_among_the_metrics_and_its_events_are_said() -> None:
    events: list[Event] = []
    service = MaterializeService(lambda: None, lambda _: None, events.append)
    values: dict[str, Any] = dict(verb.metric_values(service, None))
    assert values.keys() == METRICS.keys()
    assert [values[name] for name in ("scrubbed_bytes", "scrub_damaged", "scrub_repaired", "scrub_oldest_s")] == [0] * 4
    service.scrub_trouble(StoreUnavailableError("the disk is away", hint="mend it"))
    service.scrub_trouble(StoreUnavailableError("the disk is away", hint="mend it"))
    assert [line(each).splitlines()[0] for each in events] == ["scrub: the disk is away"], "once"
    lost = {
        "name": "dense/x",
        "marker": "1:2",
        "table": "",
        "reason": "it was altered",
        "lost": "no other place has it",
    }
    assert line(Event("damaged", lost)) == (
        "dense/x (marker 1:2) is damaged (it was altered), and lost: no other place has it"
    )
    done = {"objects": 3, "bytes": 4000, "damaged": 0, "took_s": 2.0}
    assert line(Event("scrubbed", done)) == "the whole store was read: 3 objects, 4.0 kB in 2.0 s; nothing is damaged"
