"""Scrubs whose segments and dense files are read on several threads."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.faults.disks import CannotMount, fill, small_disk
from tests.parts import FolderObjects, Scrubber
from tests.processes.test_scrub_kills import read_names
from tests.synthetic import Job
from tests.unit.folded_job import lineage_of, store_of
from tests.unit.scrubbed_job import check_markers, harm, invoke, name_of, one, scrub, scrubbed_job
from torchrec_stream_ckpt.errors import StoreUnavailableError
from torchrec_stream_ckpt.inner import open_store
from torchrec_stream_ckpt.maintain.scrub import scrubber
from torchrec_stream_ckpt.maintain.scrub.background_scrub import BackgroundScrub
from torchrec_stream_ckpt.maintain.scrub.scrub_reader import SegmentPart

THREAD = "scrubs"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    """Six markers with dense state beside the log, and in a store of its own with bases."""
    return scrubbed_job(tmp_path / "log")


@pytest.fixture
def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(scrubber.AHEAD, THREAD)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """By object, the threads that read it."""
    found: dict[str, set[str]] = {}
    read = FolderObjects.read

    def reading(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        found.setdefault(name, set()).add(threading.current_thread().name.partition("_")[0])
        return read(self, name, begin, end)

    monkeypatch.setattr(FolderObjects, "read", reading)
    return found


def test_threads_read_all_that_one_thread_reads_and_the_scrub_pays_for_it(
    job: Job, threads: ThreadPoolExecutor, reads: dict[str, set[str]]
) -> None:
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    alone = Scrubber(objects, lambda: lineage, "service")
    list(alone.pieces())
    assert {each for by in reads.values() for each in by} == {threading.current_thread().name}
    reads.clear()
    made = Scrubber(objects, lambda: lineage, "command", pool=threads)
    paid = sum(made.pieces())
    assert made.counts.scrub_damaged == 0
    assert (made.place.ended, made.place.objects) == (True, alone.place.objects)
    assert (made.place.num_bytes, made.counts) == (alone.place.num_bytes, alone.counts)
    assert paid >= made.place.num_bytes
    segments = {name: by for name, by in reads.items() if name.endswith(".seg")}
    assert {each for by in segments.values() for each in by} == {THREAD}, "whole segments are for threads"
    assert len(segments) > scrubber.AHEAD


def test_damage_that_threads_find_is_repaired_and_nothing_else_is_read_twice(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = ("claim", "dense", "base", "manifest", "interval")
    paths = [one(job, kind) for kind in kinds]
    before = {path: harm(path) for path in paths}
    (gone,) = sorted(store_of(job).glob("segments/*/g00000001-r00000-m00000002-p000.seg"))
    before[gone] = harm(gone, "lost")
    read = read_names(monkeypatch)
    status, record = scrub(job, "--repair")
    assert (status, {each["state"] for each in record["damaged"]}) == (0, {"repaired"})
    assert {each["name"] for each in record["damaged"]} == {name_of(job, path) for path in before}
    counts = {name: count for name, count in Counter(read).items() if name.endswith(".seg")}
    harmed = {name_of(job, path) for path in before}
    assert counts == {name: 3 if name in harmed else 1 for name in counts}, "by a thread, to decide, and as repaired"
    assert all(path.read_bytes() == data for path, data in before.items())
    check_markers(job)


def test_threads_read_no_more_than_the_rate_allows(
    job: Job, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch, reads: dict[str, set[str]]
) -> None:
    monkeypatch.setattr(scrubber, "FAST_BYTES_PER_S", 0)
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    rate = sum(entry.num_bytes for entry in objects.list("segments/")) / 2
    passes: list[Scrubber] = []
    made = Scrubber(objects, lambda: lineage, "service", pool=threads, bytes_per_s=rate)
    background = BackgroundScrub(made, rate, passed=passes.append)
    begin, largest = time.monotonic(), max(entry.num_bytes for entry in objects.list(""))
    while not passes:
        background.use(0.05, threading.Event())
        assert made.counts.scrubbed_bytes - largest <= rate * (time.monotonic() - begin)
    assert made.place.ended
    assert any(THREAD in by for by in reads.values())


def test_a_low_rate_is_left_to_the_calling_thread(
    job: Job, threads: ThreadPoolExecutor, reads: dict[str, set[str]]
) -> None:
    lineage = lineage_of(job)
    made = Scrubber(open_store(str(store_of(job))), lambda: lineage, "service", pool=threads, bytes_per_s=20e6)
    list(made.pieces())
    assert made.place.ended
    assert {each for by in reads.values() for each in by} == {threading.current_thread().name}


def test_a_scrub_that_ends_early_ends_the_reads_of_its_threads_and_the_next_one_goes_on(
    job: Job, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads stand in their first piece when the scrub ends: none of them begins a second one."""
    objects, lineage = open_store(str(store_of(job))), lineage_of(job)
    part, ended, pieces = SegmentPart.read, threading.Event(), Counter[str]()

    def reading(self: SegmentPart, *arguments: object) -> object:
        for piece in part(self, *arguments):  # type: ignore[arg-type]
            if threading.current_thread().name.startswith(THREAD):
                pieces[self.ref.name] += 1
                ended.wait()
            yield piece

    monkeypatch.setattr(SegmentPart, "read", reading)
    background = BackgroundScrub(Scrubber(objects, lambda: lineage, "service", pool=threads), 1e12)
    while len(pieces) < 2:
        background.use(0.05, threading.Event())
    background.close()
    ended.set()
    threads.shutdown()
    assert set(pieces.values()) == {1}
    made = Scrubber(objects, lambda: lineage, "service")
    list(made.pieces())
    assert (made.place.number, made.place.ended, made.counts.scrub_damaged) == (1, True, 0)


def test_a_disk_that_is_full_while_a_scrub_repairs_is_named_and_the_next_one_repairs(job: Job, tmp_path: Path) -> None:
    """Threads find the damage, the scrub cannot write: what is damaged stays as it is."""
    disk = tmp_path / "disk"
    try:
        with small_disk(disk, 4 * 2**20):
            store = shutil.copytree(store_of(job), disk / "store")
            (path,) = (store / one(job, kind).relative_to(store_of(job)) for kind in ("base",))
            whole = harm(path)
            harmed, ballast = path.read_bytes(), fill(disk, 0)
            command = (f"file://{job.root}", "--store", str(store), "--repair", "--anew")
            with pytest.raises(StoreUnavailableError, match="No space left") as told:
                invoke(*command)
            assert "stream-ckpt gc" in told.value.hint
            assert path.read_bytes() == harmed
            ballast.unlink()
            assert "1 were damaged, 1 of them repaired" in invoke(*command).stdout
            assert path.read_bytes() == whole
    except CannotMount as error:
        pytest.skip(str(error))
