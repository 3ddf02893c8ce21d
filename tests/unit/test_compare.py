"""What readers of any plan can check of what markers of any plan proved, on tables and markers made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.proved_job import (
    COL_CUTS,
    ROW_CUTS,
    ROWS,
    SCHEMA,
    TABLES,
    Job,
    Values,
    blocks,
    deal,
    digests_of,
    grid,
)
from tests.sampled import sampled
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Proof, Window
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.compare import Check, Tally, shared_blocks
from torchrec_stream_ckpt.proofs.seen_marks import NEVER, Circle, Marks, agree, blocks_of
from torchrec_stream_ckpt.proofs.unproved import name_blocks
from torchrec_stream_ckpt.util.types import MarkerId, TableShard, TableSpec


@dataclass
class Outcome:
    tally: Tally
    path: Path
    circle: Circle
    checked: set[tuple[int, int, int]]
    """(table, block, section)."""

    @property
    def differing(self) -> set[tuple[int, int, int]]:
        return {(each.table, each.block, each.section) for each in self.tally.named}


def compare(job: Job, readers: Sequence[tuple[TableShard, ...]], values: Values) -> Outcome:
    """What some readers find who hold ``values``; each has met only the MARKs of ranks that it reads from."""
    path, checks = job.path, []
    met = [Marks() for _ in readers]
    for place, said in enumerate(job.marks):
        for rank, proof in enumerate(said):
            for marks, shards in zip(met, readers, strict=True):
                if any(overlap(mine, theirs) for mine in shards for theirs in job.ranks[rank]):
                    marks.add(place, rank, job.ranks[rank], proof)
    circle = Circle(agree((marks.windows() for marks in met), max(marks.floor for marks in met)))
    for marks, shards in zip(met, readers, strict=True):
        check = Check(SCHEMA, path, marks, circle, {shard: sent_blocks(job, shard) for shard in shards})
        check.expect()
        for shard in shards:
            mine = check.blocks_of(TABLES[shard.table].id or 0, shard.row0, shard.row0 + shard.rows)
            check.found(shard.table, mine, digests_of(values, shard, mine))
        checks.append(check)
    shared = shared_blocks(SCHEMA, readers)
    total = sum((check.tally(shared) for check in checks), Tally())
    for table, numbers in shared.items():
        parts = [check.part(table, numbers) for check in checks]
        sums = [np.sum([part[number] for part in parts], 0, np.uint64) for number in range(2)]
        total = sum((check.close(table, numbers, *sums) for check in checks), total)
    checked = {
        (table, found.begin + int(row), int(section))
        for check in checks
        for table, found in check.tables.items()
        for row, section in np.argwhere(found.open & (found.cells[:, None] > 0)).tolist()
    }
    return Outcome(total, path, circle, checked)


def sent_blocks(job: Job, shard: TableShard) -> np.ndarray:
    first, last = blocks_of(shard)
    sent = [
        job.sent[shard.table][max(block * 64, shard.row0) : min(block * 64 + 64, shard.row0 + shard.rows)].max()
        for block in range(first, last)
    ]
    return np.array(sent, np.int32)


def overlap(one: TableShard, other: TableShard) -> bool:
    return (
        one.table == other.table
        and one.row0 < other.row0 + other.rows
        and other.row0 < one.row0 + one.rows
        and one.col0 < other.col0 + other.cols
        and other.col0 < one.col0 + one.cols
    )


def provable(job: Job, *, states: bool) -> set[tuple[int, int, int]]:
    """What markers have proved, in plain words: the newest one with the block is no older than its rows."""
    found = set()
    for table, spec in enumerate(TABLES):
        windows = [set(blocks(window, spec.id or 0).tolist()) for window in job.windows]
        for block in range(-(-ROWS // 64)):
            proofs = [place for place, each in enumerate(windows) if all(job.marks[place]) and block in each]
            if proofs and proofs[-1] >= job.sent[table][block * 64 : block * 64 + 64].max():
                found |= {(table, block, 0)}
                if states or not spec.has_row_state:
                    found |= {(table, block, 1)}
    return found


@settings(max_examples=sampled(30, 15))
@given(data=st.data(), rows=ROW_CUTS, cols=COL_CUTS, to_rows=ROW_CUTS, to_cols=COL_CUTS, same=st.booleans())
def test_what_is_proved_is_checked_and_what_is_changed_is_found_under_any_plans(
    data: st.DataObject, rows: list[int], cols: list[int], to_rows: list[int], to_cols: list[int], same: bool
) -> None:
    ranks, readers = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    job = Job(deal(grid(rows, cols), ranks, data.draw(st.integers(0, 99))))
    for number in range(data.draw(st.integers(1, 5))):
        job.train(data.draw(st.lists(st.integers(0, ROWS - 1), max_size=3)), number + 1)
        job.mark(data.draw(st.integers(POSITIONS // 8, POSITIONS)))
    to_cols = cols if same else to_cols
    held = deal(grid(to_rows, to_cols), readers, data.draw(st.integers(0, 99)))
    outcome = compare(job, held, job.values)
    assert outcome.tally.count == 0
    same_slices = set(cols) == set(to_cols)
    full = {each for each in provable(job, states=True) if each in outcome.checked or same_slices}
    assert provable(job, states=False) <= outcome.checked
    assert outcome.checked == full
    table, row = data.draw(st.integers(0, 1)), data.draw(st.integers(0, ROWS - 1))
    section = data.draw(st.integers(0, 1))
    values = {key: [array.copy() for array in arrays] for key, arrays in job.values.items()}
    changed = values[table][section]
    changed.view(f"u{changed.itemsize}")[row] ^= 1
    place = (table, row // BLOCK_ROWS, section)
    assert compare(job, held, values).differing == ({place} & outcome.checked)


def test_the_share_of_rows_counts_weights_and_states_apart() -> None:
    whole = [tuple(grid([], []))]
    job = Job(whole)
    job.train(range(ROWS), 1)
    job.mark(POSITIONS)
    assert compare(job, whole, job.values).tally.share == 1.0
    split = compare(job, [tuple(grid([], [4]))], job.values)
    assert split.tally.share == 0.75  # the row-wise state of one of two tables belongs to other columns
    job.train(range(64), 2)
    job.mark(1)
    outcome = compare(job, whole, job.values)
    assert outcome.tally.share == pytest.approx(1 - 64 / ROWS, abs=64 / ROWS)


def test_a_marker_with_a_rank_without_a_proof_proves_nothing() -> None:
    job = Job(deal(grid([250], []), 2, 1))
    job.mark(POSITIONS, without=1)
    assert compare(job, [tuple(grid([], []))], job.values).tally.share == 0
    job.mark(POSITIONS)
    assert compare(job, job.ranks, job.values).tally.share == 1


def test_what_differs_is_named_with_the_marker_that_proved_it_and_the_one_before() -> None:
    whole = tuple(grid([], []))
    job = Job([whole])
    for _ in range(3):
        job.mark(POSITIONS)
    job.values[1][1][450] += 1
    outcome = compare(job, [whole], job.values)
    unproved = name_blocks(outcome.tally, SCHEMA, outcome.path, outcome.circle)
    assert unproved is not None
    assert [str(block) for block in unproved.blocks] == ["b s rows [448, 500) (proved by 1:3, before it by 1:2)"]
    assert unproved.rows(SCHEMA) == (("b", 448, 500),)
    error = unproved.error(MarkerId(1, 3))
    assert error.where == {
        "marker": MarkerId(1, 3),
        "table": "b",
        "state": "s",
        "rows": "448-499",
        "proved": MarkerId(1, 3),
        "proved_before": MarkerId(1, 2),
    }


def test_a_table_that_has_another_id_now_is_not_compared_with_the_proof_of_the_old_one() -> None:
    job = Job([tuple(grid([], []))])
    job.mark(POSITIONS)
    job.mark(1)
    ids = {1: (7, 5), 2: (7, TABLES[1].id)}  # b was another table
    path = Path((MarkerId(1, 1), MarkerId(2, 2)), ((), ()), ids, {1: (2, 2), 2: (2, 2)})
    marks = Marks()
    marks.add(0, 0, job.ranks[0], job.marks[0][0])
    check = Check(SCHEMA, path, marks, Circle(agree([marks.windows()], 0)), dict.fromkeys(job.ranks[0], np.zeros(8)))
    assert check.tables[0].open.all()
    assert not check.tables[1].open.any()


def test_rows_of_which_nobody_knows_when_they_were_sent_are_not_checked() -> None:
    job = Job([tuple(grid([], []))])
    job.mark(POSITIONS)
    marks = Marks()
    marks.add(0, 0, job.ranks[0], job.marks[0][0])
    circle = Circle(agree([marks.windows()], 0))
    sent = {shard: np.full(8, NEVER, np.int32) for shard in job.ranks[0]}
    check = Check(SCHEMA, job.path, marks, circle, sent)
    check.expect()
    assert check.tally({}).share == 0


def test_only_the_newest_rounds_of_marks_are_kept() -> None:
    marks, window = Marks(), Window(0, POSITIONS // 4)
    for place in range(50):
        marks.add(place, 0, (), Proof.of(window, np.empty(0, np.uint64)))
        window = Window(window.next, window.width)
    kept = marks.windows()
    assert sorted(kept) == list(range(42, 50))
    assert marks.floor == 42
    assert (Circle(agree([kept], marks.floor)).newest(3, 0, 2000) >= 46).all()


@pytest.mark.parametrize("change", [-1, 1])
def test_a_proof_with_more_or_fewer_digests_than_blocks_is_refused(change: int) -> None:
    job = Job([tuple(grid([], []))])
    job.mark(POSITIONS)
    proof = job.marks[0][0]
    assert proof is not None
    numbers = proof.numbers()
    bad = numbers[:-1] if change < 0 else np.append(numbers, np.uint64(1))
    job.marks[0][0] = Proof.of(proof.window, bad)
    with pytest.raises(CorruptionError, match="digests"):
        compare(job, job.ranks, job.values)


def test_many_blocks_that_differ_are_counted_and_their_tables_sent_again_whole() -> None:
    big = Schema((TableSpec("t", 64 * 1500, 1, "float32", "sgd", (), id=1),))
    shard = TableShard(0, 0, 64 * 1500, 0, 1)
    path, marks = Path((MarkerId(1, 1),), ((),), {1: (1,)}, {1: (1,)}), Marks()
    marks.add(0, 0, (shard,), Proof.of(Window(0, POSITIONS), np.ones(1500, np.uint64)))
    circle = Circle(agree([marks.windows()], 0))
    check = Check(big, path, marks, circle, {shard: np.zeros(1500, np.int32)})
    check.expect()
    unproved = name_blocks(check.tally({}), big, path, circle)
    assert unproved is not None
    assert (unproved.count, len(unproved.blocks)) == (1500, 1000)
    assert unproved.rows(big) == (("t", 0, 64 * 1500),)
    assert "and 1492 more" in unproved.error(MarkerId(1, 1)).message
