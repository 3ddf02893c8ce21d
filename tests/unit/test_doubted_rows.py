"""Rows that log and store have lost stay unserved over branches, changes of the model, trims and broken loads."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.builders import JOB, table, trim
from tests.parts import FollowedJob, Picked, Policy, Update, UpdateKind
from tests.stores import fold
from tests.unit.test_followed_proofs import LOST, LosingJob, followed, is_true, lose
from tests.unit.test_proof_checker import SCHEMA
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.errors import CorruptionError, ProofMismatchError, ReplicaNotReadyError
from torchrec_stream_ckpt.extras.follower.serve import ServingWriter
from torchrec_stream_ckpt.extras.follower.source import Delivered
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry
from torchrec_stream_ckpt.inner import MarkerRows
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, TableSpec

IN_DOUBT = r"t_a weights rows \[64, 128\) \(proved by 1:2"
BAD = MarkerId(1, 2)
TWINS = Schema((replace(table("t_a", 700, 4), id=3), replace(table("t_b", 700, 4), id=9)))
"""Tables that differ in nothing but their names."""


def begun(folder: Path, schema: Schema = SCHEMA) -> LosingJob:
    job = LosingJob(folder / "log", schema=schema, width=POSITIONS)
    job.first(schema)
    job.markers(1)
    return job


@pytest.fixture
def job(tmp_path: Path) -> LosingJob:
    return begun(tmp_path)


@pytest.fixture
def tables(job: LosingJob, tmp_path: Path) -> Iterator[FollowedTables]:
    with followed(job, tmp_path) as tables:
        tables.advance()
        yield tables


def commit(job: LosingJob, *ids: int) -> MarkerId:
    """A marker that sends rows of t_a, and proves one block of 65,536."""
    job.width = 1
    job.send(np.array(ids or [300]))
    return job.commit().id


def lose_and_find_out(job: LosingJob, tables: FollowedTables) -> None:
    """A marker of which log and store lack rows, until the replica has loaded all rows in vain."""
    lose(job)
    for _ in range(2):
        refused(tables)


def refused(tables: FollowedTables, match: str = IN_DOUBT) -> None:
    with pytest.raises(ProofMismatchError, match=match):
        tables.advance()
    with pytest.raises(ReplicaNotReadyError, match=r"t_a weights rows \[64, 128\)"), tables.reading():
        pass


def sent_again(job: LosingJob, tables: FollowedTables) -> None:
    commit(job, *range(64, 128))
    tables.advance()
    assert is_true(job, tables)


@pytest.mark.parametrize("settled", ["sent", "sent in part", "proved", "an update that broke off"])
def test_what_newer_rows_or_a_proof_have_settled_is_doubted_again_on_a_branch_from_before_them(
    job: LosingJob, tables: FollowedTables, settled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All rows are loaded again then, the wrong ones with them, and the branch's first marker proves others."""
    before = job.live[0].arrays[0][LOST].copy()
    lose_and_find_out(job, tables)
    if settled == "proved":
        job.live[0].arrays[0][LOST] = before
        job.commit()
    else:
        commit(job, *range(64, 100 if settled == "sent in part" else 128))
    if settled == "an update that broke off":
        break_off(tables, monkeypatch)
    elif settled == "sent in part":
        refused(tables)
    else:
        tables.advance()
        assert is_true(job, tables)
    job.go_on(BAD)
    for ids in ([300], range(100, 128)):
        commit(job, *ids)
        refused(tables)
    sent_again(job, tables)


def break_off(tables: FollowedTables, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next update is left when all of its rows have been placed."""
    with monkeypatch.context() as patched:
        patched.setattr(FollowedTables, "_check", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            tables.advance()


@pytest.mark.parametrize("trimmed", [False, True], ids=["", "whose COMMIT was trimmed"])
def test_what_was_settled_stays_so_when_all_rows_are_loaded_again_on_the_same_branch(
    job: LosingJob, tables: FollowedTables, trimmed: bool
) -> None:
    lose_and_find_out(job, tables)
    sent_again(job, tables)
    for _ in range(2):
        commit(job)
    tables.advance()
    if trimmed:
        job.log.append_control(trim("1:4", given_up=(BAD, MarkerId(1, 3))).to_frame())
    commit(job)
    tables.follower.load_anew("the test wants it")
    (update,) = tables.advance()
    assert update.kind is UpdateKind.LOAD
    assert is_true(job, tables)


# A newer marker, which proves other rows, comes between the marker that proved them wrong and the load.


def test_the_marker_that_proved_rows_is_loaded_before_newer_ones(
    job: LosingJob, tables: FollowedTables, caplog: pytest.LogCaptureFixture
) -> None:
    lose(job)
    refused(tables)
    commit(job)
    refused(tables)
    assert tables.follower.marker == MarkerId(1, 3)
    assert "nothing is served: 1 block" in caplog.text  # what the load of 1:2 has found
    commit(job)
    refused(tables)
    sent_again(job, tables)
    assert tables.follower.stats.reloads == 1


def test_what_was_wrong_in_the_replica_alone_is_served_after_that_load(
    job: LosingJob, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.send(np.array([0, 300]))
    job.commit()
    with monkeypatch.context() as patched:
        patched.setattr("torchrec_stream_ckpt.restore.target.Plane.put", lambda *_: None)
        with pytest.raises(ProofMismatchError):
            tables.advance()
    commit(job, 500)
    load, marker = tables.advance()
    assert (load.kind, load.marker, marker.kind, marker.marker) == (
        UpdateKind.LOAD,
        BAD,
        UpdateKind.MARKER,
        MarkerId(1, 3),
    )
    assert is_true(job, tables)
    job.go_on(MarkerId(1, 1))
    commit(job, 500)
    tables.advance()
    assert is_true(job, tables)  # log and store had these rows: there is nothing to doubt on a branch


def unreadable(monkeypatch: pytest.MonkeyPatch, marker: MarkerId, *, late: bool) -> None:
    """All rows of a marker cannot be read: that shows before the first one, or after them."""
    whole = FollowedJob.whole

    @contextlib.contextmanager
    def failing(source: FollowedJob, lineage: Lineage, commit: Commit) -> Iterator[Delivered]:
        if commit.id == marker and not late:
            raise CorruptionError("damaged for the test")
        with whole(source, lineage, commit) as given:
            yield replace(given, changes=partly(given.changes)) if commit.id == marker else given

    def partly(changes: Callable[[], Iterator[object]]) -> Callable[[], Iterator[object]]:
        def some() -> Iterator[object]:
            yield from changes()
            raise CorruptionError("damaged for the test")

        return some

    monkeypatch.setattr(FollowedJob, "whole", failing)


@pytest.mark.parametrize("late", [False, True])
def test_rows_stay_in_doubt_if_that_marker_cannot_be_loaded_any_more(
    job: LosingJob, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    lose(job)
    refused(tables)
    commit(job)
    unreadable(monkeypatch, BAD, late=late)
    if late:
        with pytest.raises(CorruptionError, match="damaged for the test"):
            tables.advance()
    refused(tables)
    assert tables.follower.marker == MarkerId(1, 3)
    sent_again(job, tables)


def test_a_thread_goes_on_to_the_newest_marker_if_that_one_breaks_off(
    job: LosingJob, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(job)
    refused(tables)
    commit(job)
    unreadable(monkeypatch, BAD, late=True)
    tables.start()
    deadline = time.monotonic() + 60
    while tables.follower.marker != MarkerId(1, 3):
        assert time.monotonic() < deadline
        assert tables.failure is None
        time.sleep(0.01)
    with pytest.raises(ReplicaNotReadyError, match=r"t_a weights rows \[64, 128\)"), tables.reading():
        pass


@pytest.mark.parametrize("gone", ["given up", "on an abandoned branch"])
def test_rows_stay_in_doubt_if_that_marker_is_gone(job: LosingJob, tables: FollowedTables, gone: str) -> None:
    lose(job)
    refused(tables)
    if gone == "given up":
        commit(job)
        job.log.append_control(trim("1:3", given_up=(BAD,)).to_frame())
    else:
        job.go_on(MarkerId(1, 1))
        commit(job)
    refused(tables)
    commit(job, *range(64, 100))
    refused(tables)
    commit(job, *range(64, 128))
    tables.advance()
    assert is_true(job, tables)


def test_that_marker_is_tried_again_after_newer_ones_could_not_be_loaded_either(
    job: LosingJob, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another store is mounted for a while."""
    lose(job)
    refused(tables)
    commit(job)
    with monkeypatch.context() as patched:
        for marker in (BAD, MarkerId(1, 3)):
            unreadable(patched, marker, late=False)
        for _ in range(2):
            with pytest.raises(CorruptionError, match="damaged for the test"):
                tables.advance()
    load, _ = take(tables)
    assert load.marker == BAD


def take(tables: FollowedTables) -> list[Update]:
    """What is applied, though nothing is served then."""
    applied: list[Update] = []
    with pytest.MonkeyPatch.context() as patched:
        apply = FollowedTables._apply
        patched.setattr(FollowedTables, "_apply", lambda self, update: (applied.append(update), apply(self, update))[1])
        refused(tables)
    return applied


def test_an_unreadable_newest_marker_is_an_error_as_ever(
    job: LosingJob, tables: FollowedTables, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose(job)
    refused(tables)
    unreadable(monkeypatch, BAD, late=True)
    for _ in range(2):
        with pytest.raises(CorruptionError, match="damaged for the test"):
            tables.advance()


# The model changes.


def changed(job: LosingJob, edit: Callable[[list[TableSpec]], object]) -> None:
    """A generation on top of the marker that has lost rows, with other tables."""
    parent = job.schemas[BAD.generation]
    specs = list(parent.tables)
    edit(specs)
    schema = Schema(tuple(specs)).renewed(parent, JOB, job.generation + 1)
    before = {spec.id for spec in parent.tables}
    swept = {index for index, spec in schema.live if spec.id not in before}
    swept |= {index for index, _ in parent.live if schema.tables[index].dropped}
    job.evolve(BAD, schema, tuple(sorted(swept)), 2)
    commit(job) if not schema.tables[0].dropped and schema.tables[0].rows > 300 else job.commit()


def test_a_table_that_is_renamed_keeps_its_doubts(job: LosingJob, tables: FollowedTables) -> None:
    lose_and_find_out(job, tables)
    changed(job, lambda specs: specs.__setitem__(0, replace(specs[0], name="t_c")))
    with pytest.raises(ProofMismatchError, match=r"t_c weights rows \[64, 128\) \(proved by 1:2"):
        tables.advance()
    sent_again(job, tables)


def test_a_table_that_is_wanted_no_longer_hinders_nothing_until_it_is_wanted_again(
    job: LosingJob, tmp_path: Path
) -> None:
    with FollowedTables(follow(f"file://{job.root}", tables=["t_*"], scratch=tmp_path, poll_s=0.01)) as tables:
        tables.advance()
        lose_and_find_out(job, tables)
        changed(job, lambda specs: specs.__setitem__(0, replace(specs[0], name="u_a")))
        tables.advance()
        job.width = POSITIONS
        job.live[0].arrays[0][LOST] += 1
        job.commit()  # proves the block, which nobody compares
        tables.advance()
        assert tables.follower.stats.doubted == 0
        parent = job.schemas[job.generation]
        specs = [replace(parent.tables[0], name="t_a"), *parent.tables[1:]]
        job.evolve(max(job.truth), Schema(tuple(specs)).renewed(parent, JOB, job.generation + 1), (), 2)
        commit(job)
        refused(tables, r"t_a weights rows \[64, 128\) \(proved by 2:2")


def test_doubts_go_with_the_table_where_two_tables_change_names(tmp_path: Path) -> None:
    job = begun(tmp_path, TWINS)
    with followed(job, tmp_path) as tables:
        tables.advance()
        lose_and_find_out(job, tables)

        def swap(specs: list[TableSpec]) -> None:
            specs[:] = [replace(specs[0], name="t_b"), replace(specs[1], name="t_a")]

        changed(job, swap)
        for ids in (range(64, 128), [300]):
            with pytest.raises(ProofMismatchError, match=r"t_b weights rows \[64, 128\) \(proved by 1:2"):
                tables.advance()
            for stream in job.streams:
                for shard in stream.shards:
                    mine = np.array([each for each in ids if shard.row0 <= each < shard.row0 + shard.rows])
                    if shard.table == 1 and len(mine):  # t_a now
                        job.put_rows(stream, shard, mine)
            job.flush()
            job.commit()
        with pytest.raises(ProofMismatchError, match=r"t_b weights rows \[64, 128\) \(proved by 1:2"):
            tables.advance()
        sent_again(job, tables)  # index 0, t_b now


@pytest.mark.parametrize("other", [TOMBSTONE, replace(SCHEMA.tables[0], dim=8, id=None)], ids=["dropped", "wider"])
def test_a_branch_that_brings_a_table_back_brings_its_doubts_back(
    job: LosingJob, tables: FollowedTables, other: TableSpec
) -> None:
    lose_and_find_out(job, tables)
    changed(job, lambda specs: specs.__setitem__(0, other))
    tables.advance()
    assert is_true(job, tables)
    job.evolve(BAD, job.schemas[1], (), 2)
    commit(job)
    refused(tables)
    sent_again(job, tables)


def shorter(specs: list[TableSpec]) -> None:
    specs[0] = replace(specs[0], rows=100, id=None)


def added_again(specs: list[TableSpec]) -> None:
    specs.append(replace(specs[0], id=None))
    specs[0] = TOMBSTONE


@pytest.mark.parametrize("edit", [shorter, added_again])
def test_another_table_of_the_same_name_inherits_no_doubts(
    job: LosingJob, tables: FollowedTables, edit: Callable[[list[TableSpec]], None]
) -> None:
    lose_and_find_out(job, tables)
    changed(job, edit)
    tables.advance()
    assert is_true(job, tables)


# A replica that starts compares what it loads with the proofs of older markers, as a restore does.


LOST_TEXT = r"t_a weights rows \[64, 128\) \(proved by 1:2"


@pytest.fixture
def losing(tmp_path: Path) -> LosingJob:
    """Its marker 1:2 proves rows that were never sent, and the next two prove one block of 65,536."""
    made = begun(tmp_path)
    lose(made)
    commit(made)
    commit(made, 301)
    return made


def in_the_log(losing: LosingJob) -> None: ...


def in_the_store(losing: LosingJob) -> None:
    fold(losing.root, Policy(compact="none"))


def in_both(losing: LosingJob) -> None:
    fold(losing.root, Policy(compact="none"))
    commit(losing, 302)


PLACES = (in_the_log, in_the_store, in_both)


@pytest.mark.parametrize("place", PLACES)
def test_a_replica_that_starts_serves_no_rows_that_an_older_marker_proved_otherwise(
    losing: LosingJob, tmp_path: Path, place: Callable[[LosingJob], None]
) -> None:
    place(losing)
    for _ in range(2):  # it is stopped, and starts anew
        with followed(losing, tmp_path) as tables:
            for _ in range(2):
                with pytest.raises(ProofMismatchError, match=LOST_TEXT):
                    tables.advance()
            assert tables.follower.stats.doubted == 1
    with followed(losing, tmp_path) as tables:
        with pytest.raises(ProofMismatchError, match=LOST_TEXT):
            tables.advance()
        commit(losing, *range(64, 128))
        tables.advance()
        assert is_true(losing, tables)
    with followed(losing, tmp_path) as tables:  # what was sent since is not compared with the older proof
        tables.advance()
        assert is_true(losing, tables)


def test_a_newer_proof_of_the_rows_is_the_one_that_counts(losing: LosingJob, tmp_path: Path) -> None:
    losing.live[0].arrays[0][LOST] = losing.truth[MarkerId(1, 1)][0].arrays[0][LOST]
    losing.width = POSITIONS
    losing.commit()
    commit(losing)
    with followed(losing, tmp_path) as tables:
        tables.advance()
        assert is_true(losing, tables)


def test_proofs_of_a_marker_that_the_trainer_went_back_behind_count_for_nothing(
    losing: LosingJob, tmp_path: Path
) -> None:
    losing.go_on(MarkerId(1, 1))
    commit(losing)
    with followed(losing, tmp_path) as tables:
        tables.advance()
        assert is_true(losing, tables)


def test_a_publisher_that_starts_publishes_no_such_rows(losing: LosingJob, tmp_path: Path) -> None:
    with follow(f"file://{losing.root}", scratch=tmp_path) as replica:
        updates = replica.updates(0)
        update = next(updates)
        out = ServingWriter(f"file://{tmp_path / 'out'}", "bf16")
        with pytest.raises(ProofMismatchError, match=LOST_TEXT):
            out.put(update)
        out.close()


def test_no_more_of_the_store_is_read_than_two_rounds_of_markers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks, read = MarkerRows.chunks, []

    def counted(rows: MarkerRows, picked: Picked) -> Iterator[tuple[ChunkEntry, RowsView]]:
        read.append(picked.ref.name)
        return chunks(rows, picked)

    monkeypatch.setattr(MarkerRows, "chunks", counted)

    def reads(markers: int) -> int:
        losing = begun(tmp_path / str(markers))
        losing.width = POSITIONS // 4
        for number in range(markers):
            losing.send(np.array([number]))
            losing.commit()
        fold(losing.root, Policy(compact="none"))
        with follow(f"file://{losing.root}", scratch=tmp_path) as replica:
            updates = replica.updates(0)
            update = next(updates)
            before = len(read)
            assert len(list(update.older_proofs())) == 3
            return len(read) - before

    assert 0 < reads(12) == reads(24)
