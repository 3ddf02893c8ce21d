"""A marker of 1,024 ranks: each of its objects is asked for once, side by side, by no more threads than is said."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.command import run
from tests.jobs_on_paper import PaperJob, tables
from tests.parts import (
    Entry,
    FolderObjects,
    GcRules,
    Manifest,
    Materializer,
    Policy,
    ReadBack,
    check_synced,
    collect,
    locate,
    open_dense,
)
from torchrec_stream_ckpt.cli import materialize as cli
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.route import _READERS
from torchrec_stream_ckpt.format import notes
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, Control, Holdings, Route
from torchrec_stream_ckpt.maintain.compactor import Compact
from torchrec_stream_ckpt.util.layout import SEGMENTS_DIR
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

RANKS, THREADS, TOGETHER = 1024, 16, 8
OLD, NEW = MarkerId(1, 1), MarkerId(2, 2)


class Far(FolderObjects):
    """Answers what is asked of segments once ``together`` of them are asked for, and counts."""

    def __init__(self, root: Path, together: int = TOGETHER) -> None:
        super().__init__(root)
        self.requests: Counter[tuple[str, str]] = Counter()
        """By what is asked, and of which object."""
        self.most = self._now = 0
        self._lock = threading.Lock()
        self._together = threading.Barrier(together)

    def _asked(self, what: str, name: str) -> None:
        with self._lock:
            self.requests[what, name] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        if name.endswith(".seg"):
            self._together.wait(timeout=60)
        with self._lock:
            self._now -= 1

    def taken(self) -> dict[str, int]:
        """Requests since the last call, by what is asked of which kind of object; of segments, none twice."""
        with self._lock:
            found, self.requests = self.requests, Counter()
        assert [name for (_, name), count in found.items() if count > 1 and name.endswith(".seg")] == []
        summed = Counter[str]()
        for (what, name), count in found.items():
            summed[f"{what} {name.split('/')[0]}"] += count
        return dict(summed)

    def size(self, name: str) -> int | None:
        self._asked("size", name)
        return super().size(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        self._asked("read", name)
        return super().read(name, begin, end)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._asked("list", prefix)
        return super().list(prefix)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._asked("put", name)
        super().put(name, parts)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._asked("put", name)
        return super().create(name, parts)

    def delete(self, name: str) -> None:
        self._asked("delete", name)
        super().delete(name)


class Case:
    """A job of two generations, each with one marker that stands alone, folded by one process."""

    def __init__(self, root: Path) -> None:
        job = PaperJob(root / "log", tables("t", rows=RANKS, dim=4), world=RANKS)
        job.run(1)
        job.run(1)
        self.job, self.root, self.lineage = job, root, Control(job.log).refresh()
        self.objects, self.pool = Far(root / "store"), ThreadPoolExecutor(THREADS)
        self.folded = list(self._fold())

    def _fold(self) -> Iterator[dict[str, int]]:
        dense = open_dense(str(self.root))
        policy = Policy(rebase=0, compact="none")
        for _ in Materializer(self.job.log, self.objects, lambda _: dense, self.pool, policy).catch_up(self.lineage):
            yield self.objects.taken()


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    case = Case(tmp_path_factory.mktemp("thousand"))
    yield case
    case.pool.shutdown()


@pytest.fixture
def objects(case: Case) -> Far:
    case.objects.taken()
    case.objects.most = 0
    return case.objects


def few(requests: dict[str, int], most: int) -> bool:
    """Whether no more is asked of all that is no segment."""
    return sum(count for what, count in requests.items() if not what.endswith(f" {SEGMENTS_DIR}")) <= most


def of_segments(requests: dict[str, int]) -> dict[str, int]:
    return {what.split()[0]: count for what, count in requests.items() if what.endswith(f" {SEGMENTS_DIR}")}


def test_it_is_folded_with_one_look_and_one_put_a_rank(case: Case) -> None:
    for requests in case.folded:
        found = of_segments(requests)
        assert found.pop("list", 1) == 1, "whether a store without STORE is empty"
        assert found == {"size": RANKS, "put": RANKS}
        assert few(requests, 12)


def test_the_command_asks_for_as_many_at_once_as_are_worth_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = PaperJob(tmp_path / "log", tables("t", rows=32, dim=4), world=16)
    job.run(1)
    objects = Far(tmp_path / "store", together=16)
    objects.reads_ahead = 16
    monkeypatch.setattr(cli, "open_store", lambda *_: objects)
    plain = ("--engine", "local:1", "--rebase", "0", "--compact", "none", "--no-check-proofs")
    log, store = f"file://{tmp_path}/log", ("--store", objects.url)
    run("materialize", log, *store, "--once", *plain)
    assert of_segments(objects.taken()) == {"size": 16, "put": 16, "list": 1}


def test_it_is_listed_without_a_request_of_any_rank(case: Case, objects: Far) -> None:
    catalog = Catalog.of_job(objects, case.lineage)
    assert catalog is not None
    assert catalog.markers == {OLD, NEW}
    requests = objects.taken()
    assert of_segments(requests) == {}
    assert few(requests, 5)


def test_a_restore_is_planned_with_one_read_a_rank(case: Case, objects: Far) -> None:
    route = locate(case.lineage, NEW, Catalog.of_job(objects, case.lineage))
    assert (route.stored, len(route.segments), len(route.notes)) == (NEW, RANKS, RANKS)
    requests = objects.taken()
    assert of_segments(requests) == {"read": RANKS}
    assert few(requests, 6)
    assert objects.most <= _READERS


def test_that_it_is_there_is_told_by_one_listing(case: Case, objects: Far) -> None:
    assert not Holdings.load(objects, case.lineage).look(NEW).damage
    requests = objects.taken()
    assert of_segments(requests) == {"list": 1}
    assert few(requests, 10)


def test_a_trim_reads_each_segment_once_whole(case: Case, objects: Far) -> None:
    holdings = Holdings.load(objects, case.lineage)
    read_back = ReadBack(objects, case.lineage.job, case.pool, {})
    objects.taken()
    synced = check_synced(holdings, None, case.pool, read_back)
    assert (synced.markers, synced.segments) == (2, 2 * RANKS)
    requests = objects.taken()
    assert of_segments(requests) == {"read": 2 * RANKS}
    assert few(requests, 2)
    assert objects.most <= THREADS


def test_gc_deletes_each_segment_of_one_that_is_given_up_and_reads_none_of_it(case: Case, objects: Far) -> None:
    rules = GcRules(grace_s=0, give_up={OLD: "of no use"})
    found: Counter[str] = Counter()
    for _ in range(2):  # what is found by one run goes with the next
        collect(objects, case.lineage, case.lineage.job, rules, case.pool)
        requests = objects.taken()
        found.update(of_segments(requests))
        assert few(requests, RANKS // 4)
    assert (found["delete"], found["read"]) == (RANKS, 0)
    assert objects.most <= THREADS
    assert locate(case.lineage, NEW, Catalog.of_job(objects, case.lineage)).stored == NEW


# A marker of many ranks: how many requests the materializer makes of its store, and how many at once.


SOME_RANKS, FEW_THREADS = 48, 8


class Counted(FolderObjects):
    """Counts requests by what is asked of which kind of object; looks at segments wait until ``together`` are made."""

    def __init__(self, root: Path, together: int = 1) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()
        self._together = threading.Barrier(together)

    def _count(self, what: str, name: str) -> None:
        self.requests[f"{what} {name.split('/')[0]}"] += 1  # under the lock of the interpreter

    def size(self, name: str) -> int | None:
        self._count("size", name)
        if name.startswith("segments/"):
            self._together.wait(timeout=60)
        return super().size(name)

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        self._count("read", name)
        return super().read(name, begin, end)

    def list(self, prefix: str) -> Iterator[Entry]:
        self._count("list", prefix)
        return super().list(prefix)

    def put(self, name: str, parts: Sequence[Buffer]) -> None:
        self._count("put", name)
        super().put(name, parts)

    def create(self, name: str, parts: Sequence[Buffer]) -> bool:
        self._count("put", name)
        return super().create(name, parts)


def job_of(root: Path) -> tuple[PaperJob, Lineage]:
    job = PaperJob(root / "log", tables("t", rows=SOME_RANKS, dim=4), world=SOME_RANKS)
    job.run(3)
    return job, Control(job.log).refresh()


def folded(job: PaperJob, lineage: Lineage, objects: Counted, root: Path, markers: int) -> list[Counter[str]]:
    """Requests of each of the first markers."""
    found, before = [], Counter[str]()
    with ThreadPoolExecutor(FEW_THREADS) as pool:
        materializer = Materializer(
            job.log, objects, lambda _: open_dense(str(root)), pool, Policy(rebase=0, compact="none")
        )
        for _ in zip(range(markers), materializer.catch_up(lineage), strict=False):
            found.append(objects.requests - before)
            before = objects.requests.copy()
    return found


def test_a_marker_of_n_ranks_takes_n_looks_and_n_puts_and_a_few_more(tmp_path: Path) -> None:
    job, lineage = job_of(tmp_path)
    first, second, third = folded(job, lineage, Counted(tmp_path / "store"), tmp_path, 3)
    assert {each["size segments"] for each in (first, third)} == {SOME_RANKS}, "is it there: once for each rank"
    assert {each["put segments"] for each in (first, second, third)} == {SOME_RANKS}
    assert first["read segments"] == third["read segments"] == 0
    # What a rank holds is asked once a generation: where its segment of the marker before begins.
    assert second["size segments"] == 2 * SOME_RANKS
    assert second["read segments"] == SOME_RANKS
    rest = sum(third.values()) - 2 * SOME_RANKS
    assert rest <= 8, f"whatever the ranks are: {third}"


def test_the_segments_of_all_ranks_are_looked_at_side_by_side(tmp_path: Path) -> None:
    """With k threads, the N looks of a marker take N / k times as long as one: each waits for k - 1 others here."""
    job, lineage = job_of(tmp_path)
    (found,) = folded(job, lineage, Counted(tmp_path / "store", together=FEW_THREADS), tmp_path, 1)
    assert found["size segments"] == SOME_RANKS


def test_nothing_is_written_any_more_once_a_damaged_rank_was_reported(tmp_path: Path) -> None:
    job, lineage = job_of(tmp_path)
    (last,) = (tmp_path / "log").glob(f"data/p{SOME_RANKS - 1:05d}/*.seg")
    data = bytearray(last.read_bytes())
    data[len(data) // 6] ^= 1
    last.write_bytes(data)
    objects = Counted(tmp_path / "store")
    with ThreadPoolExecutor(FEW_THREADS) as pool:
        dense = open_dense(str(tmp_path))
        policy = Policy(rebase=0, compact="none")
        with pytest.raises(CorruptionError):
            list(Materializer(job.log, objects, lambda _: dense, pool, policy).catch_up(lineage))
        reported = objects.requests["put segments"]
    assert objects.requests["put segments"] == reported < SOME_RANKS
    assert objects.requests["put manifests"] == 0


def test_the_segments_of_all_ranks_are_written_side_by_side(tmp_path: Path) -> None:
    """With k threads, the N puts of a marker take N / k times as long as one."""
    job, lineage = job_of(tmp_path)
    objects = Counted(tmp_path / "store")
    together, put = threading.Barrier(FEW_THREADS), objects.put

    def late(name: str, parts: Sequence[Buffer]) -> None:
        if name.startswith("segments/"):
            together.wait(timeout=60)
        put(name, parts)

    objects.put = late  # type: ignore[method-assign]
    (found,) = folded(job, lineage, objects, tmp_path, 1)
    assert found["put segments"] == SOME_RANKS


def test_what_another_process_has_folded_is_read_with_two_requests_each(tmp_path: Path) -> None:
    job, lineage = job_of(tmp_path)
    folded(job, lineage, Counted(tmp_path / "store"), tmp_path, 1)
    for path in (tmp_path / "store" / "manifests").rglob("*.json"):
        path.unlink()
    (again,) = folded(job, lineage, Counted(tmp_path / "store", together=FEW_THREADS), tmp_path, 1)
    assert again["size segments"] == again["read segments"] == SOME_RANKS
    assert again["put segments"] == 0


# A plan asks a store for what it needs side by side, and for each object once.


MARKERS = 80
DELAY_S = 0.02


class FarFolder(FolderObjects):
    """Answers late, and knows how many requests it had to answer, and how many at once."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.requests: Counter[str] = Counter()
        self.most = self._now = 0
        self._lock = threading.Lock()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        with self._lock:
            self.requests[name] += 1
            self._now += 1
            self.most = max(self.most, self._now)
        time.sleep(DELAY_S)
        with self._lock:
            self._now -= 1
        return super().read(name, begin, end)

    def list(self, prefix: str) -> Iterator[Entry]:
        self.requests["a list"] += 1
        return super().list(prefix)


def materialized(root: Path, policy: Policy, *, summarized: bool = False) -> Lineage:
    """A store, without its summaries unless they are wanted."""
    job = PaperJob(root / "log", tables("t", rows=20, dim=4))
    job.run(MARKERS)
    lineage, objects = Control(job.log).refresh(), FolderObjects(root / "store")
    with ThreadPoolExecutor(2) as pool:
        materializer = Materializer(job.log, objects, lambda _: open_dense(str(root)), pool, policy)
        assert len(list(materializer.catch_up(lineage))) == MARKERS
    if not summarized:
        shutil.rmtree(root / "store" / "summaries")
    return lineage


def planned(objects: FarFolder, lineage: Lineage) -> Route:
    catalog = Catalog.of_job(objects, lineage)
    assert catalog is not None
    found = locate(lineage, max(lineage.commits), catalog)
    assert found.stored == max(lineage.commits)
    return found


@pytest.mark.parametrize(("compact", "pieces"), [("none", MARKERS), ("span4", 8), ("span16", 20)])
def test_manifests_and_directories_are_read_side_by_side(tmp_path: Path, compact: Compact, pieces: int) -> None:
    lineage, objects = materialized(tmp_path, Policy(rebase=0, compact=compact)), FarFolder(tmp_path / "store")
    found = planned(objects, lineage)
    assert len(found.pieces) <= pieces
    assert objects.most >= 20, "and not one after the other"
    kinds = Counter(name.split("/")[0] for name in objects.requests)
    assert kinds["manifests"] + kinds["folds"] + kinds["segments"] <= 2 * MARKERS + 2 * pieces
    twice = [name for name, count in objects.requests.items() if count > 1 and name.startswith(("manifests", "folds"))]
    assert twice == []


@pytest.mark.parametrize(("compact", "pieces"), [("none", MARKERS), ("span4", 8)])
def test_a_summary_takes_the_place_of_two_requests_a_marker(tmp_path: Path, compact: Compact, pieces: int) -> None:
    policy = Policy(rebase=0, compact=compact)
    lineage, objects = materialized(tmp_path, policy, summarized=True), FarFolder(tmp_path / "store")
    assert len(planned(objects, lineage).pieces) <= pieces
    kinds = Counter(name.split("/")[0] for name in objects.requests)
    assert kinds["summaries"] == 1
    assert kinds["manifests"] <= MARKERS - 64
    assert kinds["segments"] <= MARKERS - 64 + pieces
    assert sum(objects.requests.values()) <= 2 * (MARKERS - 64) + 2 * (pieces if compact != "none" else 0) + 8


def test_a_plan_reads_each_manifest_and_each_list_of_shards_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted: of a thousand markers, what is done for each is the time of a plan."""
    lineage, objects = (
        materialized(tmp_path, Policy(rebase=0, compact="none"), summarized=True),
        FarFolder(tmp_path / "store"),
    )
    read: list[str] = []
    from_bytes = Manifest.from_bytes
    monkeypatch.setattr(Manifest, "from_bytes", lambda data, where: read.append(where) or from_bytes(data, where))
    notes.parse_shards.cache_clear()
    route = planned(objects, lineage)
    assert len(route.told) == MARKERS
    assert len(read) == len(set(read)) == MARKERS
    assert notes.parse_shards.cache_info().misses == 1, "the shards of a generation are read once for each rank"


def test_what_ranks_said_at_markers_within_folds_is_read_but_for_what_is_damaged(tmp_path: Path) -> None:
    lineage = materialized(tmp_path, Policy(rebase=0, compact="span16"))
    whole = dict(planned(FarFolder(tmp_path / "store"), lineage).told)
    assert len(whole) == MARKERS
    (store,) = (tmp_path / "store" / "manifests").iterdir()
    gone, cut = MarkerId(1, 7), MarkerId(1, 9)
    (store / "g00000001-m00000007.json").unlink()
    (segment,) = (tmp_path / "store" / "segments").glob("*/g00000001-r00000-m00000009-p000.seg")
    segment.write_bytes(segment.read_bytes()[:140])
    found = dict(planned(FarFolder(tmp_path / "store"), lineage).told)
    assert found == {marker: notes for marker, notes in whole.items() if marker not in (gone, cut)}
