"""A plan asks a store for what it needs side by side, and for each object once."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.jobs_on_paper import PaperJob, tables
from tests.parts import Entry, FolderObjects, Manifest, Materializer, Policy, locate, open_dense
from torchrec_stream_ckpt.format import notes
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.inner import Catalog, Control, Route
from torchrec_stream_ckpt.maintain.compactor import Compact
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.usefixtures("no_syncs")

MARKERS = 80
DELAY_S = 0.02


class Far(FolderObjects):
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


def folded(root: Path, policy: Policy, *, summarized: bool = False) -> Lineage:
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


def planned(objects: Far, lineage: Lineage) -> Route:
    catalog = Catalog.of_job(objects, lineage)
    assert catalog is not None
    found = locate(lineage, max(lineage.commits), catalog)
    assert found.stored == max(lineage.commits)
    return found


@pytest.mark.parametrize(("compact", "pieces"), [("none", MARKERS), ("span4", 8), ("span16", 20)])
def test_manifests_and_directories_are_read_side_by_side(tmp_path: Path, compact: Compact, pieces: int) -> None:
    lineage, objects = folded(tmp_path, Policy(rebase=0, compact=compact)), Far(tmp_path / "store")
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
    lineage, objects = folded(tmp_path, policy, summarized=True), Far(tmp_path / "store")
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
    lineage, objects = folded(tmp_path, Policy(rebase=0, compact="none"), summarized=True), Far(tmp_path / "store")
    read: list[str] = []
    from_bytes = Manifest.from_bytes
    monkeypatch.setattr(Manifest, "from_bytes", lambda data, where: read.append(where) or from_bytes(data, where))
    notes.parse_shards.cache_clear()
    route = planned(objects, lineage)
    assert len(route.told) == MARKERS
    assert len(read) == len(set(read)) == MARKERS
    assert notes.parse_shards.cache_info().misses == 1, "the shards of a generation are read once for each rank"


def test_what_ranks_said_at_markers_within_folds_is_read_but_for_what_is_damaged(tmp_path: Path) -> None:
    lineage = folded(tmp_path, Policy(rebase=0, compact="span16"))
    whole = dict(planned(Far(tmp_path / "store"), lineage).told)
    assert len(whole) == MARKERS
    (store,) = (tmp_path / "store" / "manifests").iterdir()
    gone, cut = MarkerId(1, 7), MarkerId(1, 9)
    (store / "g00000001-m00000007.json").unlink()
    (segment,) = (tmp_path / "store" / "segments").glob("*/g00000001-r00000-m00000009-p000.seg")
    segment.write_bytes(segment.read_bytes()[:140])
    found = dict(planned(Far(tmp_path / "store"), lineage).told)
    assert found == {marker: notes for marker, notes in whole.items() if marker not in (gone, cut)}
