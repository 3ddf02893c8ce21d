"""A merge reads each byte of what it merges once, whatever windows and runs, and writes the bytes it always wrote."""

from __future__ import annotations

import errno
import hashlib
import os
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests import builders, stores, synthetic
from tests.parts import FolderObjects, GcRules, Picked, Piece, Policy, Retention, collect, locate, reader
from tests.parts import fold as fold_module
from tests.parts import merge as merge_module
from tests.parts import segment as segment_module
from tests.sampled import sampled
from tests.synthetic import ROWWISE, WIDE, Job
from tests.unit.folded_job import made_once
from tests.unit.test_fold import check, fold, history, lineage_of
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, ScratchUnavailableError, StoreUnavailableError
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Catalog, Objects, TableReader, open_rows, open_store
from torchrec_stream_ckpt.maintain import merge_plan, run_merging
from torchrec_stream_ckpt.maintain.compactor import spans
from torchrec_stream_ckpt.maintain.merge import merge, merge_share, plan_merge
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.read import rows as rows_module
from torchrec_stream_ckpt.store import runs
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec

ROWS = 4000
SPREAD = Schema((builders.table("t", ROWS, 8, "float32", StateSpec("momentum1", "float32", True)),))


class Counting(FolderObjects):
    """Counts the bytes that it hands out."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.read_bytes: Counter[str] = Counter()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        found = super().read(name, begin, end)
        self.read_bytes[name] += len(found)
        return found

    def of(self, names: Iterator[str]) -> int:
        return sum(self.read_bytes[name] for name in names)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments, chunks and windows as small as in a table of gigabytes, by its measure."""
    for module in (fold_module, merge_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 16_000)
    monkeypatch.setattr(segment_module, "CHUNK_BYTES", 4_000)
    monkeypatch.setattr(run_merging, "PASS_BYTES", 8_000)
    monkeypatch.setattr(rows_module, "WINDOW_BYTES", 5_000)
    monkeypatch.setattr(reader, "GAP_BYTES", 0)


@pytest.fixture
def spread(tmp_path: Path, small: None) -> Job:
    return spread_job(tmp_path / "log")


@made_once
def spread_job(root: Path) -> Job:
    """A table, and then 30 intervals of a few rows from all over it: each lies in one or two chunks."""
    job = Job(root, world=1, schema=SPREAD)
    job.begin()
    job.commit()
    for _ in range(30):
        stream = job.streams[0]
        job.put_rows(stream, stream.shards[0], np.sort(job.random.choice(ROWS, 100, replace=False)))
        job.flush()
        job.commit()
    fold(job, open_store(str(root.parent / "store")), Policy(rebase=0, compact="none"))
    return job


def pieces_of(job: Job, objects: Objects) -> tuple[Piece, ...]:
    lineage = lineage_of(job)
    return Catalog.load(objects, lineage.job).cover(lineage.chain(max(lineage.commits)))


def merged(job: Job, objects: Objects, scratch: Path | None = None) -> dict[str, bytes]:
    """The bytes of a base of everything."""
    with ThreadPoolExecutor(2) as pool:
        found = merge(objects, lineage_of(job), pieces_of(job, objects), pool, scratch=scratch)
    return {ref.name: bytes(objects.read(ref.name)) for ref in found.segments}


@pytest.mark.parametrize("fan_in", [2, 5, 64])
def test_a_merge_reads_each_byte_once_and_what_it_wrote_once(
    tmp_path: Path, spread: Job, fan_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_merging, "FAN_IN", fan_in)
    objects, scratch = Counting(tmp_path / "store"), tmp_path / "scratch"
    scratch.mkdir()
    passed: list[int] = []
    with ThreadPoolExecutor(2) as pool:
        found = merge(objects, lineage_of(spread), pieces_of(spread, objects), pool, passed.append, scratch)
    pieces = pieces_of(spread, stores.open_store(str(tmp_path / "store")))
    assert len(found.segments) > 10, "many windows"
    intervals = [ref for piece in pieces_of_intervals(spread) for ref in piece.segments]
    num_bytes = sum(ref.num_bytes for ref in intervals)
    assert num_bytes <= objects.of(ref.name for ref in intervals) <= 1.1 * num_bytes
    written = sum(ref.num_bytes for ref in found.segments)
    assert objects.of(ref.name for ref in found.segments) <= 1.1 * written
    levels = {64: 1, 5: 3, 2: 6}[fan_in]
    assert sum(passed) <= levels * num_bytes, "each pass reads each byte once at most"
    assert (sum(passed) > 1.1 * num_bytes) == (fan_in < 31), "and passes there were, where there are too many runs"
    assert pieces[0].start is None
    assert not list(scratch.iterdir()), "what a pass has written is gone"


def pieces_of_intervals(job: Job) -> tuple[Piece, ...]:
    """The cover without folds."""
    lineage = lineage_of(job)
    catalog = Catalog.load(open_store(str(job.root.parent / "store")), lineage.job)
    catalog.folds = frozenset()
    return catalog.cover(lineage.chain(max(lineage.commits)))


@pytest.mark.parametrize("fan_in", sampled([2, 3, 7], [2, 7]))
def test_a_merge_in_passes_writes_what_one_pass_writes(
    tmp_path: Path, spread: Job, fan_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = merged(spread, open_store(str(tmp_path / "store")))
    for entry in list(open_store(str(tmp_path / "store")).list("folds/")):
        open_store(str(tmp_path / "store")).delete(entry.name)
    monkeypatch.setattr(run_merging, "FAN_IN", fan_in)
    assert merged(spread, open_store(str(tmp_path / "store"))) == wanted


FILED = {
    (Policy(rebase=1e-9, compact="none"), 8): "d5c5f64f063158ce289c7ac3baed556c2754a8cde89a61b8233dc513254207b9",
    (Policy(rebase=0, compact="span16"), 8): "974b9413d1b4c3179b12266ca6c4202984d56812eefa7b805e8584d2b7b9f183",
    (Policy(rebase=1e-9, compact="none"), 10**9): "ff694e73924851e745f8076a8e5840cefe111ff11799461c45870925729cfff5",
    (Policy(rebase=0, compact="span16"), 10**9): "461a3e04ec0be75b6e7ab2d54e9b8102f212d27031b81604a6376f34880fe002",
}
"""SHA-256 of all folds of a history of branches, column splits and ranks: in blocks of 8 windows, and in one block, as
earlier releases wrote them."""


RUNS = [(*each, fan_in) for each in FILED for fan_in in (2, 64)]
"""Policy, block, and how many runs are read at once."""


@pytest.mark.parametrize(("policy", "block", "fan_in"), sampled(RUNS, [RUNS[at] for at in (0, 3, 5, 6)]), ids=str)
def test_the_bytes_of_folds_are_those_of_earlier_releases(
    tmp_path: Path, policy: Policy, block: int, fan_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (merge_module, merge_plan):
        monkeypatch.setattr(module, "WINDOWS_OF_BLOCK", block)
    for module in (fold_module, merge_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", 2000)
    monkeypatch.setattr(run_merging, "FAN_IN", fan_in)
    job, objects, digest = history(tmp_path / "log"), open_store(str(tmp_path / "store")), hashlib.sha256()
    fold(job, objects, policy)
    for name in sorted(entry.name for entry in objects.list("")):
        if name.startswith("folds/") or "/f-" in name:
            digest.update(name.encode() + bytes(objects.read(name)))
    assert digest.hexdigest() == FILED[policy, block]


@pytest.mark.parametrize("fan_in", [4, 64])
def test_tasks_of_any_number_and_in_any_order_write_the_same_bytes(
    tmp_path: Path, spread: Job, fan_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    objects, lineage, cover = open_store(str(tmp_path / "store")), lineage_of(spread), pieces_of_intervals(spread)
    wanted, at_once = merged(spread, objects), []
    monkeypatch.setattr(run_merging, "FAN_IN", fan_in)
    monkeypatch.setattr(merge_plan, "_READ_TWICE", 100.0)
    with ThreadPoolExecutor(2) as pool:
        for task_bytes in (1, 150_000):
            for name in wanted:
                objects.delete(name)
            merging = plan_merge(objects, lineage, cover, pool, task_bytes=task_bytes)
            done = {task: merge_share(objects, task, pool) for task in reversed(merging.tasks)}
            found = merging.finish(objects, [done[task] for task in merging.tasks], pool)
            assert {ref.name: bytes(objects.read(ref.name)) for ref in found.segments} == wanted
            at_once.append(len(merging.tasks))
    assert at_once[0] > at_once[1] > 1


def test_bits_that_flip_on_the_way_through_the_scratch_folder_never_reach_a_fold(
    tmp_path: Path, spread: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Flipping(RowSorter):
        def add(self, table: int, col0: int, cols: int, rows: RowsView) -> None:
            weights = rows.weights.copy()
            weights.view(np.uint32)[0, 0] ^= 1
            super().add(table, col0, cols, RowsView(rows.ids, weights, rows.states))

    monkeypatch.setattr(run_merging, "FAN_IN", 4)
    monkeypatch.setattr(run_merging, "RowSorter", Flipping)
    objects = open_store(str(tmp_path / "store"))
    with pytest.raises(CorruptionError, match="were read back, or their bits differ"):
        merged(spread, objects)
    assert Catalog.load(objects, synthetic.JOB).folds == frozenset()


def test_without_room_for_temporary_files_a_merge_says_which_folder(
    tmp_path: Path, spread: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_merging, "FAN_IN", 4)
    with pytest.raises(StoreUnavailableError, match="temporary files") as told:
        merged(spread, open_store(str(tmp_path / "store")), scratch=tmp_path / "none")
    assert told.value.where["path"] == tmp_path / "none"


def test_a_full_disk_of_temporary_files_is_not_said_of_the_store(
    tmp_path: Path, spread: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_merging, "FAN_IN", 4)
    scratch, objects = tmp_path / "scratch", open_store(str(tmp_path / "store"))
    scratch.mkdir()
    fill_up(scratch, monkeypatch)
    with pytest.raises(ScratchUnavailableError, match=r"temporary files: .*No space left on device") as told:
        merged(spread, objects, scratch=scratch)
    assert str(told.value.where["path"]).startswith(str(scratch))
    assert "TMPDIR" in told.value.hint
    assert "gc" not in told.value.hint, "to delete markers makes no room there"
    assert not list(scratch.iterdir())


def fill_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk of one folder takes nothing more."""
    writev = os.writev

    def write(fd: int, parts: Sequence[Any]) -> int:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_relative_to(folder):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return writev(fd, parts)

    monkeypatch.setattr(os, "writev", write)


def test_a_temporary_file_that_somebody_deletes_is_not_said_of_the_store(
    tmp_path: Path, spread: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_merging, "FAN_IN", 4)
    scratch, lost = tmp_path / "scratch", list[Path]()
    scratch.mkdir()

    def lose(_: int) -> None:
        for path in list(scratch.rglob("*.seg"))[: 1 - len(lost)]:
            path.unlink()
            lost.append(path)

    objects = open_store(str(tmp_path / "store"))
    pieces = pieces_of(spread, objects)
    with ThreadPoolExecutor(2) as pool, pytest.raises(ScratchUnavailableError, match="a temporary file is gone"):
        merge(objects, lineage_of(spread), pieces, pool, lose, scratch)
    assert lost


def test_temporary_files_go_as_soon_as_they_are_read(
    tmp_path: Path, spread: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stayed up to the end of a merge: those of all passes, and of all tables."""
    monkeypatch.setattr(run_merging, "FAN_IN", 2)
    scratch, most = tmp_path / "scratch", [0]
    scratch.mkdir()

    def look(_: int) -> None:
        most[0] = max(most[0], sum(path.stat().st_size for path in scratch.rglob("*.seg")))

    with ThreadPoolExecutor(2) as pool:
        objects = open_store(str(tmp_path / "store"))
        pieces = pieces_of(spread, objects)
        merge(objects, lineage_of(spread), pieces, pool, look, scratch)
    rows = sum(ref.num_bytes for piece in pieces_of_intervals(spread) if piece.start for ref in piece.segments)
    assert 0 < most[0] <= 1.7 * rows, "what a pass reads and what it writes; 6 passes write each row"


def test_gc_deletes_what_it_can_while_nothing_can_be_merged(
    tmp_path: Path, spread: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It ended at the first merge, run after run, and deleted nothing ever."""
    monkeypatch.setattr(run_merging, "FAN_IN", 4)
    objects, lineage, rules = open_store(str(tmp_path / "store")), lineage_of(spread), Retention(then_every=15)
    full = tmp_path / "full"
    full.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(full))
    fill_up(full, monkeypatch)
    with ThreadPoolExecutor(2) as pool:
        done = collect(objects, lineage, lineage.job, GcRules(retention=rules, grace_s=0.0, compact=True), pool)
    assert done.dropping
    assert done.unmerged
    assert not done.spans
    assert "No space left on device" in done.describe()
    assert "Try: make room there" in done.describe()
    monkeypatch.undo()
    monkeypatch.setattr(run_merging, "FAN_IN", 4)
    with ThreadPoolExecutor(2) as pool:
        again = collect(objects, lineage, lineage.job, GcRules(retention=rules, grace_s=0.0, compact=True), pool)
    assert (again.unmerged, bool(again.spans), bool(again.now)) == ((), True, True)


@pytest.mark.parametrize("fan_in", [2, 64])
def test_a_table_is_read_once_by_windows(
    tmp_path: Path, spread: Job, fan_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_merging, "FAN_IN", fan_in)
    objects, lineage = Counting(tmp_path / "store"), lineage_of(spread)
    newest = max(lineage.commits)
    route = locate(lineage, newest, Catalog.load(objects, lineage.job))
    num_bytes = sum(piece.num_bytes for piece in route.pieces)
    objects.read_bytes.clear()
    with open_rows(spread.log, lineage, newest, objects, tmp_path) as found:
        table = TableReader(found, 0)
        windows = [table.read(row0, rows) for row0, rows in table.windows()]
    assert len(windows) > 20
    assert objects.read_bytes.total() <= 1.2 * num_bytes, "each chunk once, and what stands before the chunks"
    whole = synthetic.image_of_log(spread.log, lineage, newest)
    image = synthetic.Image(SPREAD)
    image.put(
        0,
        0,
        RowsView(
            np.arange(ROWS),
            np.concatenate([each.weights for each in windows]),
            (np.concatenate([each.states[0][0] for each in windows]),),
        ),
    )
    assert image == whole
    assert not list(tmp_path.glob(".stream-ckpt-*"))


def test_windows_may_go_back_and_leave_rows_out(tmp_path: Path, spread: Job) -> None:
    lineage = lineage_of(spread)
    with open_rows(spread.log, lineage, max(lineage.commits), open_store(str(tmp_path / "store")), tmp_path) as found:
        whole = TableReader(found, 0).read(0, ROWS).weights
        table = TableReader(found, 0)
        for row0, rows in [(0, 50), (25, 100), (3000, 1000), (10, 5), (15, 3985), (0, 1), (3999, 1), (3999, 1)]:
            np.testing.assert_array_equal(table.read(row0, rows).weights, whole[row0 : row0 + rows])


@pytest.mark.parametrize("how", ["fails", "is not used up"])
def test_the_window_after_one_that_ended_early_has_all_rows(tmp_path: Path, spread: Job, how: str) -> None:
    """Chunks that reach into the next window were not kept: older versions of their rows came in their place."""
    objects, lineage = open_store(str(tmp_path / "store")), lineage_of(spread)
    broken = [False]
    with ThreadPoolExecutor(2) as pool:
        pieces = reader.open_pieces(objects, pieces_of_intervals(spread), synthetic.JOB, pool)
        newest = [each for piece in reversed(pieces) for each in piece.opened]

        def read(picked: Iterable[Picked]) -> Iterator[Any]:
            for number, each in enumerate(reader.read_chunks(objects, picked, pool)):
                if broken[0] and number == 3:
                    raise StoreUnavailableError("away")
                yield each

        def versions(begin: int) -> dict[int, int]:
            found: dict[int, int] = {}
            for given in table.window(begin, begin + 500):
                for row in given.view.ids.tolist():
                    if begin <= row < begin + 500:
                        found.setdefault(row, given.place)
            return found

        table = runs.Runs(newest, lineage.claims[1].schema, read)
        wanted = [versions(begin) for begin in (1000, 1500)]
        table = runs.Runs(newest, lineage.claims[1].schema, read)
        versions(500)
        broken[0] = how == "fails"
        if how == "fails":
            with pytest.raises(StoreUnavailableError):
                versions(1000)
        else:
            next(table.window(1000, 1500))
        broken[0] = False
        assert [versions(begin) for begin in (1500, 1000)][::-1] == wanted


def test_chunks_that_are_open_at_once_are_counted_by_columns(tmp_path: Path, spread: Job) -> None:
    objects = open_store(str(tmp_path / "store"))
    with ThreadPoolExecutor(2) as pool:
        opened = [each for piece in reader.open_pieces(objects, pieces_of(spread, objects), synthetic.JOB, pool)
                  for each in piece.opened]  # fmt: skip
        columns = runs.columns_of(opened)
        assert columns == {(0, 8)}
        assert runs.open_at_once(opened, runs.cuts_of(columns)) == 31
        with closing(run_merging.ScratchRuns(objects, pool)) as scratch:
            run_merging.FAN_IN, kept = 4, run_merging.FAN_IN
            try:
                few = scratch.narrowed(SPREAD, opened[::-1], 0)
            finally:
                run_merging.FAN_IN = kept
            assert runs.open_at_once(few, [0, 8]) <= 4
            assert few[-1].ref == opened[0].ref, "the table itself, the oldest, was left where it is"


# Bases and spans say what the intervals below them say.


POLICIES = {
    "bases": Policy(rebase=1e-9, compact="none"),
    "some bases": Policy(rebase=0.7, compact="none"),
    "spans": Policy(rebase=0, compact="span16"),
    "both": Policy(rebase=2.0, compact="span4"),
}
LARGE_PARTS = sampled(list(POLICIES), ["both"])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "log", seed=3)


@pytest.mark.parametrize(
    ("policy", "part_bytes"), [*((each, 2000) for each in POLICIES), *((each, 2**20) for each in LARGE_PARTS)]
)
def test_every_marker_is_the_same_over_bases_and_spans(
    tmp_path: Path, policy: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fold_module, merge_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", part_bytes)
    catalog = Catalog.load(check(history(tmp_path / "log"), POLICIES[policy]), synthetic.JOB)
    starts = {start for start, _ in catalog.folds}
    assert (None in starts) == (POLICIES[policy].rebase > 0)
    assert bool(starts - {None}) == (POLICIES[policy].radix > 0)


def test_long_spans_stand_on_short_ones(job: Job) -> None:
    job.begin(world=1)
    for _ in range(17):
        job.touch(1)
        job.commit()
    catalog, lineage = Catalog.load(check(job, Policy(rebase=0, compact="span4")), synthetic.JOB), lineage_of(job)
    ends = {(start.marker if start else None, end.marker) for start, end in catalog.folds}
    assert ends == {(1, 5), (5, 9), (9, 13), (13, 17), (1, 17)}
    cover = catalog.cover(lineage.chain(MarkerId(1, 17)))
    assert [piece.start for piece in cover] == [None, MarkerId(1, 1)]


def test_a_new_base_comes_when_what_came_since_is_larger(job: Job) -> None:
    job.begin()
    job.commit()
    objects, policy = store_of(job), Policy(rebase=1.5, compact="none")
    for _ in range(6):
        for stream in job.streams:
            for shard in stream.shards:  # every row of every table
                job.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + shard.rows))
        job.flush()
        job.commit()
        fold(job, objects, policy)
    bases = sorted(end.marker for start, end in Catalog.load(objects, synthetic.JOB).folds if start is None)
    assert bases == [3, 5, 7], "one interval is about as large as the base"


def test_rows_of_a_table_that_was_sent_whole_since_are_left_out(job: Job) -> None:
    job.begin()
    job.touch(10)
    parent = job.commit()
    job.begin(parent.id, swept=[ROWWISE])
    job.commit()
    objects = store_of(job)
    fold(job, objects, Policy(rebase=1e-9, compact="none"))
    base = Catalog.load(objects, synthetic.JOB).fold(None, MarkerId(2, 1))
    assert sum(ref.rows for ref in base.segments) == sum(table.rows for table in synthetic.SCHEMA.tables)


def test_row_wise_state_under_two_column_splits_without_a_sweep_is_refused(job: Job) -> None:
    job.begin()
    parent = job.commit()
    job.begin(parent.id, splits=[1, 2, 1])
    job.touch(20)
    job.commit()
    objects = store_of(job)
    with pytest.raises(CorruptionError, match="two different column splits") as told:
        fold(job, objects, Policy(rebase=1e-9, compact="none"))
    assert set(told.value.where) == {"segment", "table"}, "it is whole: what has a name or a path is mended"
    assert Catalog.load(objects, synthetic.JOB).folds == frozenset()


@pytest.mark.parametrize("table", [ROWWISE, WIDE])
def test_columns_between_those_that_were_sent_have_no_rows_in_a_span(job: Job, table: int) -> None:
    """Some column shards of a table were written to, as by a load of one of them, and not those between."""
    job.begin(splits=[1, 4, 4])
    job.commit()
    for _ in range(4):
        for stream in job.streams:
            for shard in stream.shards:
                if shard.table == table and shard.col0 in (0, 6):
                    job.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + 5))
        job.flush()
        job.commit()
    catalog = Catalog.load(check(job, Policy(rebase=0, compact="span4")), synthetic.JOB)
    assert [(start, end) for start, end in catalog.folds] == [(MarkerId(1, 1), MarkerId(1, 5))]


@pytest.mark.parametrize(("place", "wanted"), [(0, []), (1, []), (16, [16]), (32, [16]), (256, [16, 256]), (257, [])])
def test_where_spans_end(place: int, wanted: list[int]) -> None:
    assert list(spans(place, 16)) == wanted


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="rebase must not be negative"):
        Policy(rebase=-1, compact="none")
    with pytest.raises(ConfigError, match="compact must be"):
        Policy(compact="all")  # type: ignore[arg-type]


def store_of(job: Job) -> Objects:
    return open_store(str(job.root.parent / "store"))
