"""A sink holds exactly the raw ids of the marker that it names, and never the value of a row's old owner."""

from __future__ import annotations

import shutil
import tracemalloc
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
import pytest

from tests import builders
from tests.followers import LOAD, MARKER, lose_frames
from tests.mapped_job import ENDS, FREE, ONE, PLAIN, SCHEMA, TWO, Dump, MappedJob
from tests.parts import Changed, Feed, Policy, Update, UpdateKind
from tests.stores import fold
from torchrec_stream_ckpt import follow
from torchrec_stream_ckpt.errors import SinkUnavailableError
from torchrec_stream_ckpt.extras.follower.sink import Written
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.read import sent_rows
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec


class KilledError(Exception):
    """In place of SIGKILL: nothing of the feed runs after it."""


class Shelf:
    """A sink in memory that outlives its feeds. After each call it shows its rows to ``watch``."""

    reads_back = True

    def __init__(self) -> None:
        self.rows: Dump = {}
        self.stored = ""
        self.watch: Callable[[Dump], None] = lambda rows: None
        self.before: Callable[[], None] = lambda: None
        """Called before each call that writes rows."""
        self.calls = 0
        self.most_rows = 0

    def position(self) -> str:
        return self.stored

    def begin(self, update: Update, mapped: Collection[str]) -> None:
        self.before()
        self.stored = "" if update.kind is UpdateKind.LOAD else f"{self.stored}>{update.marker}"
        self.mapped = set(mapped)

    def put(self, changed: Changed) -> None:
        self._count(len(changed.ids))
        table = self.rows.setdefault(changed.table.name, {})
        assert changed.weights.shape[1] == changed.table.dim
        assert FREE not in changed.ids
        table.update(zip(changed.ids.tolist(), (row.tobytes() for row in changed.weights), strict=True))
        self.watch(self.rows)

    def delete(self, table: TableSpec, raw_ids: np.ndarray) -> None:
        self._count(len(raw_ids))
        for raw_id in raw_ids.tolist():
            self.rows.get(table.name, {}).pop(raw_id, None)
        self.watch(self.rows)

    def _count(self, rows: int) -> None:
        self.before()
        self.calls, self.most_rows = self.calls + 1, max(self.most_rows, rows)

    def held(self, table: TableSpec) -> Iterator[np.ndarray]:
        keys = np.array(list(self.rows.get(table.name, {})), np.int64)
        yield from np.array_split(keys, 3)

    def read(self, table: TableSpec, ids: np.ndarray) -> np.ndarray:
        missing = b"\xff" * table.dim * np.dtype(NUMPY_DTYPES[table.dtype]).itemsize
        data = b"".join(self.rows[table.name].get(key, missing) for key in ids.tolist())
        return np.frombuffer(data, NUMPY_DTYPES[table.dtype]).reshape(len(ids), table.dim)

    def done(self, update: Update) -> None:
        self.stored = update.position

    def close(self) -> None: ...


def fed(job: MappedJob, shelf: Shelf, **more: object) -> list[Written]:
    """What one process of a feed writes."""
    with follow(f"file://{job.root}", poll_s=0.05, scratch=job.root.parent, **more) as follower:  # type: ignore[arg-type]
        return list(Feed(follower, shelf).updates(0))


def never_an_old_owners(job: MappedJob) -> Callable[[Dump], None]:
    """A check of what readers see: for each key a value that it had at a marker."""

    known: dict[tuple[str, int], set[bytes]] = {}
    seen: set[MarkerId] = set()

    def watch(rows: Dump) -> None:
        for marker in job.truths.keys() - seen:
            seen.add(marker)
            for name in (ONE, TWO):
                for key, value in job.truths[marker][name].items():
                    known.setdefault((name, key), set()).add(value)
        for name in (ONE, TWO):
            for key, value in rows.get(name, {}).items():
                assert value in known.get((name, key), ()), (name, key)

    return watch


def begun(folder: Path, seed: int = 0, world: int = 4, announces: tuple[str, ...] | None = None) -> MappedJob:
    job = MappedJob(folder, seed=seed, world=world, announces=announces)
    job.begin()
    job.churn(40)
    job.commit()
    return job


def is_true(job: MappedJob, shelf: Shelf) -> bool:
    newest = list(job.truths)[-1]
    assert shelf.stored.startswith(f"{newest}@")
    assert ">" not in shelf.stored
    return {name: rows for name, rows in shelf.rows.items() if rows} == {
        name: rows for name, rows in job.truths[newest].items() if rows
    }


@pytest.mark.parametrize("announces", [None, ("ids",)])
@pytest.mark.parametrize("seed", range(4))
def test_random_jobs_that_restart_rewind_and_evict_under_feeds_that_die(
    tmp_path: Path, seed: int, announces: tuple[str, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old versions of rows come first, as in updates that memory does not hold. With id events there is one rank: raw
    ids of this job move between rows of different ranks, and TorchRec's do not."""
    monkeypatch.setattr(sent_rows, "HELD_BYTES", 700)
    first, *others = (4, 3, 5, 4, 3, 5) if announces is None else (1,) * 6
    job, shelf, rng = begun(tmp_path / "log", seed, first, announces), Shelf(), np.random.default_rng(seed)
    shelf.watch = never_an_old_owners(job)
    worlds = iter(others)
    loads = changes = killed = tombstones = 0
    for number in range(15):
        for _ in range(int(rng.integers(1, 3))):
            for _ in range(int(rng.integers(1, 4))):
                job.churn()
                job.touch(2)
            job.commit()
        if number % 5 == 4:
            markers = [each for each in job.truths if each.generation == job.generation]
            parent = markers[-1] if number % 2 else markers[int(rng.integers(len(markers)))]
            job.begin(parent, world=next(worlds))
            job.churn()
            job.commit()
        left = [int(rng.integers(12))] if rng.random() < 0.5 else [10**9]

        def die(left: list[int] = left) -> None:
            left[0] -= 1
            if left[0] < 0:
                raise KilledError

        shelf.before = die
        try:
            written = fed(job, shelf)
        except KilledError:
            killed += 1
            continue
        assert is_true(job, shelf), number
        loads += written[0].update.kind is LOAD
        changes += written[0].update.kind is MARKER
        tombstones += sum(sum(each.tombstones.values()) for each in written)
    shelf.before = lambda: None
    fed(job, shelf)
    assert is_true(job, shelf)
    assert loads > 0
    assert min(killed, changes) > 3
    assert tombstones > 20


def test_tombstones_are_the_raw_ids_that_the_marker_lost_and_reassigned_rows_are_sent(tmp_path: Path) -> None:
    job, shelf = MappedJob(tmp_path / "log"), Shelf()
    job.begin()
    job.owners[ONE][:4] = [ENDS[0], 7, 8, ENDS[-1]]
    job.commit()
    fed(job, shelf)
    assert set(shelf.rows[ONE]) == {ENDS[0], 7, 8, ENDS[-1]}
    assert TWO not in shelf.rows
    assert set(shelf.rows[PLAIN]) == set(range(25))
    # Row 0 is reassigned and its bytes stay; 7 moves to row 50; 8 and the greatest one change places.
    job.owners[ONE][[0, 1, 2, 3, 50]] = [9, FREE, ENDS[-1], 8, 7]
    job.commit()
    (written,) = fed(job, shelf)
    assert written.update.kind is MARKER
    assert dict(written.tombstones) == {ONE: 1}
    assert dict(written.rows) == {ONE: 4}
    assert is_true(job, shelf)
    job.owners[ONE][:] = FREE
    job.commit()
    (written,) = fed(job, shelf)
    assert dict(written.tombstones) == {ONE: 4}
    assert dict(written.rows) == {}
    assert shelf.rows[ONE] == {}
    assert is_true(job, shelf)


def test_a_log_that_was_trimmed_and_a_map_that_is_gone(tmp_path: Path) -> None:
    """The rows in between come from the store. Without the ids that the sink holds, all rows are loaded."""
    job, shelf = begun(tmp_path / "log"), Shelf()
    held = job.commit()
    fed(job, shelf)
    for _ in range(2):
        job.churn()
        job.commit()
    fold(job.root, Policy(rebase=0, compact="none"))
    lose_frames(job)
    (written,) = fed(job, shelf)
    assert written.update.kind is MARKER
    assert is_true(job, shelf)
    shelf.stored = f"{held.id}@{held.nonce}>1:3"  # as if it had died at an older marker
    shelf.rows[ONE][12345] = b"stray of a marker that is gone"
    shutil.rmtree(job.root / held.dense)
    (written,) = fed(job, shelf)
    assert written.update.kind is LOAD
    assert "id maps of marker 1:2, which the sink holds, cannot be read" in written.update.why
    assert written.tombstones[ONE] == 1
    assert is_true(job, shelf)


def test_a_sink_that_is_away_gets_everything_once_it_is_back(tmp_path: Path) -> None:
    """Each attempt breaks off at another place, and the job goes on meanwhile."""
    job, shelf = begun(tmp_path / "log"), Shelf()
    shelf.watch = never_an_old_owners(job)
    with follow(f"file://{job.root}", poll_s=0.01, scratch=tmp_path) as follower:
        feed = Feed(follower, shelf)
        assert len(list(feed.updates(0))) == 1
        at = [0]

        def away() -> None:
            if at[0] > 0:
                at[0] -= 1
            elif at[0] == 0 and attempts:
                at[0] = attempts.pop()
                job.churn()
                job.commit()
                raise SinkUnavailableError("the shelf does not answer", sink="shelf")

        attempts = [9, 0, 4, 2, 1, 7, 3]
        shelf.before = away
        job.churn()
        job.commit()
        written = list(feed.updates(1.0))
        assert not attempts
        assert {each.update.kind for each in written} == {MARKER}
        assert is_true(job, shelf)
        assert follower.stats.outages >= 1
        assert follower.stats.tombstones >= sum(sum(each.tombstones.values()) for each in written)
        shelf.before = lambda: None
        job.churn()
        job.commit()
        list(feed.updates(0))
        assert is_true(job, shelf)
    shelf.watch = lambda rows: None
    shelf.stored, shelf.rows = "", {ONE: {55555: b"of another log"}}  # another one in its place
    assert [each.update.kind for each in fed(job, shelf)] == [LOAD]
    assert is_true(job, shelf)


def test_work_is_that_of_the_changed_rows_and_a_call_never_holds_more_than_a_window(tmp_path: Path) -> None:
    """At ten times the table the same calls, in which at most as many rows as were sent."""
    seen = []
    for rows in (600, 6_000):
        tables = tuple(each for each in SCHEMA.tables if each.name != TWO)
        schema = type(SCHEMA)(tuple(type(each)(**{**_fields(each), "rows": rows}) for each in tables))
        job, shelf = MappedJob(tmp_path / str(rows), schema=schema, world=1), Shelf()
        job.owners = {ONE: np.arange(1000, 1000 + rows)}
        job.begin()
        job.commit()
        fed(job, shelf)
        shelf.calls = shelf.most_rows = 0
        job.owners[ONE][:25] += 10**6
        job.send(ONE, range(40))
        job.commit()
        (written,) = fed(job, shelf)
        assert (dict(written.rows), dict(written.tombstones)) == ({ONE: 40}, {ONE: 25})
        assert is_true(job, shelf)
        seen.append((shelf.calls, shelf.most_rows))
    assert seen[0] == seen[1]


def _fields(table: TableSpec) -> dict[str, object]:
    return {name: getattr(table, name) for name in table.__slots__}


def test_a_raw_id_that_moves_back_after_an_update_broke_off_has_its_row_again(tmp_path: Path) -> None:
    """No byte of any row changes: only the broken update has written another row under it."""
    job, shelf = MappedJob(tmp_path / "log"), Shelf()
    job.begin()
    job.owners[ONE][:2] = [7, 8]
    job.commit()
    fed(job, shelf)
    job.owners[ONE][[0, 5]] = [FREE, 7]
    job.commit()

    def die(rows: Dump) -> None:
        raise KilledError

    shelf.watch = die
    with pytest.raises(KilledError):
        fed(job, shelf)
    assert shelf.rows[ONE][7] == job.truths[MarkerId(1, 2)][ONE][7]
    shelf.watch = lambda rows: None
    job.owners[ONE][[0, 5]] = [7, FREE]
    job.commit()
    assert [each.update.kind for each in fed(job, shelf)] == [MARKER]
    assert is_true(job, shelf)


def test_id_events_make_work_that_of_the_changed_ids_whatever_the_size_of_the_map(tmp_path: Path) -> None:
    """At 32 times the rows, the same memory is taken for the same changes, and no dense state is opened."""
    taken = []
    for rows in (1_000, 32_000):
        schema = Schema((builders.table(ONE, rows, 4), builders.table(PLAIN, 25, 4)))
        job, shelf = MappedJob(tmp_path / str(rows), schema=schema, world=1, announces=("ids",)), Shelf()
        job.owners = {ONE: np.arange(1000, 1000 + rows)}
        job.begin()
        job.commit()
        with follow(f"file://{job.root}", scratch=tmp_path) as follower:
            feed = Feed(follower, shelf)
            assert [each.update.kind for each in feed.updates(0)] == [LOAD]
            for _ in range(2):
                job.owners[ONE][:25] += 10**6
                job.send(ONE, range(40))
                commit = job.commit()
                shutil.rmtree(job.root / commit.dense)
                tracemalloc.start()
                (written,) = feed.updates(0)
                peak = tracemalloc.get_traced_memory()[1]
                tracemalloc.stop()
                assert (dict(written.rows), dict(written.tombstones)) == ({ONE: 40}, {ONE: 25})
                assert is_true(job, shelf)
        taken.append(peak)
    assert taken[1] < 1.5 * taken[0]


def test_id_events_that_contradict_the_map_lead_to_a_load(tmp_path: Path) -> None:
    job, shelf = begun(tmp_path / "log", world=1, announces=("ids",)), Shelf()
    with follow(f"file://{job.root}", scratch=tmp_path) as follower:
        feed = Feed(follower, shelf)
        list(feed.updates(0))
        job.sent[ONE][:] = np.roll(job.sent[ONE], 1)
        job.commit()
        (written,) = feed.updates(0)
        assert written.update.kind is LOAD
        assert "id events contradict the id map: raw id" in written.update.why
        assert is_true(job, shelf)


@pytest.mark.parametrize("announces", [None, ("ids",)])
def test_feeds_that_died_on_the_way_to_two_markers_leave_no_raw_id_out(
    tmp_path: Path, announces: tuple[str, ...] | None
) -> None:
    """The first one has deleted raw id 7, which the marker after the next has again; none of its bytes changes."""
    job, shelf = MappedJob(tmp_path / "log", world=1, announces=announces), Shelf()
    job.begin()
    job.owners[ONE][:2] = [7, 8]
    job.commit()
    fed(job, shelf)
    for row, watched in ((9, True), (7, False)):
        job.owners[ONE][0] = row
        job.commit()

        def die(rows: Dump, watched: bool = watched) -> None:
            if not watched or 7 not in rows[ONE]:
                raise KilledError

        shelf.watch = die
        with pytest.raises(KilledError):
            fed(job, shelf)
        if not watched:
            assert shelf.stored.endswith(">1:2>1:3")
    shelf.watch = lambda rows: None
    job.touch(1)
    job.commit()
    assert [each.update.kind for each in fed(job, shelf)] == [MARKER]
    assert is_true(job, shelf)
