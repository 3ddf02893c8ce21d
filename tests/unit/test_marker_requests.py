"""A marker of many ranks: how many requests the materializer makes of its store, and how many at once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.jobs_on_paper import PaperJob, tables
from tests.parts import Entry, FolderObjects, Materializer, Policy, open_dense
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Control

pytestmark = pytest.mark.usefixtures("no_syncs")

RANKS, THREADS = 48, 8


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
    job = PaperJob(root / "log", tables("t", rows=RANKS, dim=4), world=RANKS)
    job.run(3)
    return job, Control(job.log).refresh()


def folded(job: PaperJob, lineage: Lineage, objects: Counted, root: Path, markers: int) -> list[Counter[str]]:
    """Requests of each of the first markers."""
    found, before = [], Counter[str]()
    with ThreadPoolExecutor(THREADS) as pool:
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
    assert {each["size segments"] for each in (first, third)} == {RANKS}, "is it there: once for each rank"
    assert {each["put segments"] for each in (first, second, third)} == {RANKS}
    assert first["read segments"] == third["read segments"] == 0
    # What a rank holds is asked once a generation: where its segment of the marker before begins.
    assert second["size segments"] == 2 * RANKS
    assert second["read segments"] == RANKS
    rest = sum(third.values()) - 2 * RANKS
    assert rest <= 8, f"whatever the ranks are: {third}"


def test_the_segments_of_all_ranks_are_looked_at_side_by_side(tmp_path: Path) -> None:
    """With k threads, the N looks of a marker take N / k times as long as one: each waits for k - 1 others here."""
    job, lineage = job_of(tmp_path)
    (found,) = folded(job, lineage, Counted(tmp_path / "store", together=THREADS), tmp_path, 1)
    assert found["size segments"] == RANKS


def test_nothing_is_written_any_more_once_a_damaged_rank_was_reported(tmp_path: Path) -> None:
    job, lineage = job_of(tmp_path)
    (last,) = (tmp_path / "log").glob(f"data/p{RANKS - 1:05d}/*.seg")
    data = bytearray(last.read_bytes())
    data[len(data) // 6] ^= 1
    last.write_bytes(data)
    objects = Counted(tmp_path / "store")
    with ThreadPoolExecutor(THREADS) as pool:
        dense = open_dense(str(tmp_path))
        policy = Policy(rebase=0, compact="none")
        with pytest.raises(CorruptionError):
            list(Materializer(job.log, objects, lambda _: dense, pool, policy).catch_up(lineage))
        reported = objects.requests["put segments"]
    assert objects.requests["put segments"] == reported < RANKS
    assert objects.requests["put manifests"] == 0


def test_the_segments_of_all_ranks_are_written_side_by_side(tmp_path: Path) -> None:
    """With k threads, the N puts of a marker take N / k times as long as one."""
    job, lineage = job_of(tmp_path)
    objects = Counted(tmp_path / "store")
    together, put = threading.Barrier(THREADS), objects.put

    def late(name: str, parts: Sequence[Buffer]) -> None:
        if name.startswith("segments/"):
            together.wait(timeout=60)
        put(name, parts)

    objects.put = late  # type: ignore[method-assign]
    (found,) = folded(job, lineage, objects, tmp_path, 1)
    assert found["put segments"] == RANKS


def test_what_another_process_has_folded_is_read_with_two_requests_each(tmp_path: Path) -> None:
    job, lineage = job_of(tmp_path)
    folded(job, lineage, Counted(tmp_path / "store"), tmp_path, 1)
    for path in (tmp_path / "store" / "manifests").rglob("*.json"):
        path.unlink()
    (again,) = folded(job, lineage, Counted(tmp_path / "store", together=THREADS), tmp_path, 1)
    assert again["size segments"] == again["read segments"] == RANKS
    assert again["put segments"] == 0
