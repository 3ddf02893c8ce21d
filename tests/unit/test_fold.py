"""Intervals are folded into segments: the newest version of each row, whatever the stream went through."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests import stores, synthetic
from tests.parts import FileLog, Materializer, Policy, SegmentId, SegmentKind, lay_out, open_dense
from tests.parts import fold as fold_module
from tests.parts import merge as merge_module
from tests.synthetic import PLAIN, ROWWISE, SCHEMA, Image, Job, image_of_store, images_of_all
from tests.unit.folded_job import made_once
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import RowLayout, RowsView
from torchrec_stream_ckpt.format.segment import chunk_rows
from torchrec_stream_ckpt.inner import Catalog, Control, Objects, open_store
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.util.layout import manifest_name
from torchrec_stream_ckpt.util.types import MarkerId

NEVER = Policy(rebase=0, compact="none")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "log")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments so small that every interval takes several."""
    for module in (fold_module, merge_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 2000)


def lineage_of(job: Job) -> Lineage:
    return Control(FileLog(job.root)).refresh()


def check(job: Job, policy: Policy = NEVER, objects: Objects | None = None) -> Objects:
    """Fold the log, and compare every committed marker in the store with its definition."""
    if objects is None:
        objects = open_store(str(job.root.parent / "store"))
        fold(job, objects, policy)
    lineage = lineage_of(job)
    done = {
        commit.id: image_of_store(objects, lineage, commit.id) == image
        for commit, image in images_of_all(job.log, lineage)
    }
    assert done == dict.fromkeys(lineage.commits, True)
    return objects


def fold(job: Job, objects: Objects, policy: Policy = NEVER) -> list[MarkerId]:
    with ThreadPoolExecutor(2) as pool:
        materializer = Materializer(FileLog(job.root), objects, lambda _: open_dense(str(job.root)), pool, policy)
        return list(materializer.catch_up(lineage_of(job)))


def segments(objects: Objects, marker: str) -> list[int]:
    """Number of parts of each rank's interval."""
    catalog = Catalog.load(objects, synthetic.JOB)
    return [len(refs) for refs in catalog.manifest(MarkerId.parse(marker)).segments]


def test_the_reference_tells_markers_apart(job: Job) -> None:
    job.begin()
    job.commit()
    job.touch(1)
    job.commit()
    lineage = lineage_of(job)
    before, after = (synthetic.image_of_log(job.log, lineage, MarkerId(1, marker)) for marker in (1, 2))
    assert before == before
    assert before != after
    assert Image(SCHEMA) != after


def test_the_newest_version_wins_within_an_interval(job: Job) -> None:
    job.begin()
    job.touch(20)
    job.commit()
    job.touch(20)
    job.commit()
    assert segments(check(job), "1:2") == [1, 1]


@pytest.mark.usefixtures("small_parts")
def test_the_newest_version_wins_over_the_parts_of_an_interval(job: Job) -> None:
    job.begin()
    job.touch(20)
    job.commit()
    job.touch(20)
    job.commit()
    objects = check(job)
    assert min(segments(objects, "1:1")) > 2
    assert min(segments(objects, "1:2")) > 2


def test_ranks_come_and_go_between_generations(job: Job) -> None:
    job.begin(world=3)
    job.touch()
    first = job.commit()
    job.begin(first.id, world=1)
    job.touch()
    second = job.commit()
    job.begin(second.id, world=2)
    job.touch()
    job.commit()
    assert len(segments(check(job), "1:1")) == 3


def test_a_branch_sees_nothing_of_the_other(job: Job) -> None:
    job.begin()
    job.touch()
    first = job.commit()
    job.touch(10)
    job.commit()
    job.touch(10)  # never committed: behind the last marker of its generation
    job.begin(first.id)
    job.touch()
    second = job.commit()
    job.begin(first.id)
    job.touch()
    job.commit()
    job.begin(second.id)
    job.touch()
    job.commit()
    check(job)


def test_a_table_that_is_sent_whole_again_has_other_columns(job: Job) -> None:
    job.begin()
    job.touch(10)
    parent = job.commit()
    job.begin(parent.id, swept=[ROWWISE], splits=[1, 2, 1])
    job.touch(10)
    parent = job.commit()
    job.begin(parent.id, swept=[ROWWISE, PLAIN], splits=[2, 4, 1], world=1)
    job.touch(10)
    job.commit()
    check(job)
    check(job, objects=_folded(job, "bases", Policy(rebase=1e-9, compact="none")))


def test_columns_of_tables_without_row_wise_state_change_without_a_sweep(job: Job) -> None:
    job.begin()
    job.touch(10)
    for splits in ([2, 1, 4], [4, 1, 1], [1, 1, 2]):
        parent = job.commit()
        job.begin(parent.id, splits=splits)
        job.touch(10)
    job.commit()
    check(job)
    check(job, objects=_folded(job, "bases", Policy(rebase=1e-9, compact="none")))


def test_markers_that_were_given_up_are_part_of_the_next_interval(job: Job) -> None:
    job.begin()
    job.touch()
    job.give_up()
    job.touch()
    job.commit()
    job.touch()
    job.give_up()
    job.give_up()
    job.touch()
    job.commit()
    objects = check(job)
    assert Catalog.load(objects, synthetic.JOB).markers == {MarkerId(1, 2), MarkerId(1, 5)}


def test_frames_that_were_sent_twice_count_once(job: Job) -> None:
    job.begin()
    for _ in range(3):
        for stream in job.streams:
            ids = np.arange(stream.shards[0].row0, stream.shards[0].row0 + 5)
            stream.put(PLAIN, [ids, np.full((5, 4), job.marker + 1, np.float32)])
        job.flush(twice=True)
        job.commit()
    check(job)


def test_an_interval_without_rows_has_a_segment_without_chunks(job: Job) -> None:
    job.begin()
    job.commit()
    job.commit()
    objects = check(job)
    (front,) = (
        fold_module.parse_front(objects.read(refs[0].name), refs[0].name)
        for refs in Catalog.load(objects, synthetic.JOB).manifest(MarkerId(1, 2)).segments[:1]
    )
    assert (len(front.directory), front.rows, front.last) == (0, 0, True)
    assert front.notes


@pytest.mark.usefixtures("small_parts")
def test_two_materializers_write_the_same_bytes_side_by_side_or_not(tmp_path: Path) -> None:
    job = history(tmp_path / "log")
    policy = Policy(rebase=0.5, compact="span16")
    first = stores.contents(_folded(job, "first", policy))
    shared = open_store(str(job.root.parent / "shared"))
    both = [threading.Thread(target=fold, args=(job, shared, policy)) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join(60)
    assert stores.contents(shared) == first


def test_a_manifest_is_there_only_behind_everything_else(tmp_path: Path) -> None:
    job = history(tmp_path / "log")

    class Watched:
        """Remembers the order of puts."""

        def __init__(self, objects: Objects) -> None:
            self._objects = objects
            self.puts: list[str] = []

        def put(self, name: str, parts: list[bytes]) -> None:
            self._objects.put(name, parts)
            self.puts.append(name)

        def create(self, name: str, parts: list[bytes]) -> bool:
            created = self._objects.create(name, parts)
            self.puts.append(name)
            return created

        def __getattr__(self, name: str) -> object:
            return getattr(self._objects, name)

    watched = Watched(open_store(str(job.root.parent / "store")))
    fold(job, watched)  # type: ignore[arg-type]
    catalog = Catalog.load(watched, synthetic.JOB)  # type: ignore[arg-type]
    for marker in catalog.markers:
        place = watched.puts.index(manifest_name(synthetic.JOB, marker))
        names = {ref.name for refs in catalog.manifest(marker).segments for ref in refs}
        assert names <= set(watched.puts[:place])


@made_once
def history(root: Path) -> Job:
    """Forty markers: restarts, a branch, ranks, columns, a sweep."""
    job = Job(root, seed=3)
    job.begin()
    parents: list[MarkerId] = []
    for number in range(40):
        job.touch(2)
        parents.append(job.commit().id)
        if number == 10:
            job.begin(parents[-1], world=3, splits=[2, 1, 2])
        if number == 20:
            job.begin(parents[-4], world=1, swept=[ROWWISE], splits=[2, 2, 4])
        if number == 25:
            job.begin(parents[-1], world=2)
    return job


def _folded(job: Job, name: str, policy: Policy) -> Objects:
    objects = open_store(str(job.root.parent / name))
    fold(job, objects, policy)
    return objects


# The sorter.


def rows(ids: list[int], value: float, table: int = ROWWISE) -> RowsView:
    count, spec = len(ids), SCHEMA.tables[table]
    states = {PLAIN: (), ROWWISE: (np.full(count, value, np.float32),)}[table]
    return RowsView(np.array(ids, np.int64), np.full((count, spec.dim), value, np.float32), states)


def body(sorter: RowSorter) -> bytes:
    segment = SegmentId(SegmentKind.INTERVAL, synthetic.JOB, MarkerId(1, 1), 0, 0)
    parts, _, _ = lay_out(segment, sorter.chunks(), last=True, schema_crc=SCHEMA.crc)
    return b"".join(map(bytes, parts))


def test_what_the_sorter_held_before_does_not_show() -> None:
    def fill(sorter: RowSorter) -> bytes:
        sorter.add(ROWWISE, 0, 8, rows([5, 3, 9], 1.0))
        sorter.add(PLAIN, 0, 4, rows([7], 2.0, PLAIN))
        sorter.add(ROWWISE, 0, 8, rows([3, 4], 3.0))
        return body(sorter)

    sorter = RowSorter(SCHEMA)
    fresh = fill(sorter)
    for count in (60, 10, 1):
        sorter.add(ROWWISE, 0, 8, rows(list(range(count)), 4.0))
        sorter.chunks()
        assert fill(sorter) == fresh
    assert sorter.num_bytes == 0
    assert sorter.chunks() == []


def test_a_frame_may_be_overwritten_once_it_was_taken() -> None:
    sorter, view = RowSorter(SCHEMA), rows([1, 2], 1.0)
    sorter.add(ROWWISE, 0, 8, view)
    view.weights[:] = 9.0
    view.ids[:] = 0
    (chunk,) = sorter.chunks()
    assert list(chunk.ids) == [1, 2]
    assert 9.0 not in np.frombuffer(chunk.payload, np.float32)


def test_memory_is_kept_for_rows_like_the_last_ones_alone() -> None:
    sorter = RowSorter(SCHEMA)
    for _ in range(50):
        sorter.add(ROWWISE, 0, 8, rows(list(range(60)), 1.0))
    kept = sum(part.capacity_bytes for part in sorter.slices.values())
    assert kept <= 1.25 * 1.05 * sorter.num_bytes
    sorter.chunks()
    assert sum(part.capacity_bytes for part in sorter.slices.values()) == kept
    sorter.add(ROWWISE, 0, 8, rows([1], 1.0))
    sorter.chunks()
    assert sorter.slices == {}


def test_more_rows_than_a_chunk_takes_are_cut() -> None:
    sorter, layout = RowSorter(SCHEMA), RowLayout.of(SCHEMA.tables[ROWWISE], 8)
    ids = np.arange(chunk_rows(layout) * 2 + 1)
    values = np.ones((len(ids), 8), np.float32)
    sorter.add(ROWWISE, 0, 8, RowsView(ids, values, (values[:, 0],)))
    assert [len(chunk.ids) for chunk in sorter.chunks()] == [chunk_rows(layout), chunk_rows(layout), 1]
