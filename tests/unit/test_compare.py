"""What readers of any plan can check of what markers of any plan proved, on tables and markers made by hand."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import JOB, claim, commit
from tests.proved_job import (
    COL_CUTS,
    DIM,
    ROW_CUTS,
    ROWS,
    SCHEMA,
    TABLES,
    Frame,
    Job,
    Values,
    blocks,
    deal,
    digests_of,
    frame,
    grid,
)
from tests.sampled import sampled
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS, POSITIONS, Proof, Window
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Unproved
from torchrec_stream_ckpt.proofs.compare import Check, Tally, shared_blocks
from torchrec_stream_ckpt.proofs.ledger import Ledger
from torchrec_stream_ckpt.proofs.seen_marks import NEVER, Circle, Marks, RankReport, agree, blocks_of
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


# What a reader of all markers compares with their proofs, over branches and other column slices, on frames by hand.


COPIES = 3
"""More than the trees of these tests need at once."""


@dataclass
class Node:
    """One marker: what was sent for it, and what was said."""

    marker: MarkerId
    job: Job
    frames: list[Frame]
    children: list[Node] = field(default_factory=list)

    def all(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            yield from child.all()


def first(rows: list[int], cols: list[int], width: int) -> Node:
    job = Job([tuple(shards) for shards in deal(grid(rows, cols), 2, 1)])
    frames = [frame(job, shard, range(ROWS), 0) for shard in all_shards(job)]
    job.mark(width)
    return Node(MarkerId(1, 1), job, frames)


def then(node: Node, generation: int, touched: list[int], width: int, cols: list[int] | None = None) -> Node:
    """The marker after one, of its generation or of another one with these column cuts."""
    job = deepcopy(node.job)
    if cols is not None:
        job.ranks = deal(grid([], cols), 2, generation)
    job.train(touched, 100 * generation + len(job.marks))
    frames = [frame(job, shard, sorted(set(touched)), 0) for shard in all_shards(job)]
    job.mark(width)
    child = Node(MarkerId(generation, len(job.marks)), job, frames)
    node.children.append(child)
    return child


def all_shards(job: Job) -> list[TableShard]:
    return [shard for shards in job.ranks for shard in shards]


def lineage_of(root: Node) -> Lineage:
    lineage = Lineage()
    parents = {child.marker: node.marker for node in root.all() for child in node.children}
    for node in sorted(root.all(), key=lambda node: node.marker):
        marker = node.marker
        if marker.generation not in lineage.claims:
            lineage.apply(claim(marker.generation, parent=parents.get(marker), schema=SCHEMA, job=JOB))
        lineage.apply(commit(marker.generation, marker.marker))
    return lineage


def outcomes(root: Node, memory_bytes: int = 2**26) -> dict[MarkerId, tuple[float, Unproved | None]]:
    ledger, found = Ledger(lineage_of(root), COPIES, memory_bytes=memory_bytes * (1 + COPIES)), {}

    def visit(node: Node, before: Node | None) -> None:
        if before is None:
            ledger.begin(SCHEMA)
        elif before.marker.generation != node.marker.generation:
            ledger.turn(SCHEMA)
        ledger.read_on()
        for shard, view, _ in node.frames:
            ledger.rows(shard.table, shard.col0, shard.cols, view)
        ledger.judge(node.marker, [RankReport(*each) for each in zip(node.job.ranks, node.job.marks[-1], strict=True)])
        compared = ledger.outcome()
        found[node.marker] = compared.share, compared.unproved
        for number, child in enumerate(node.children):
            if number + 1 < len(node.children):
                ledger.fork()
            visit(child, node)
            if number + 1 < len(node.children):
                ledger.back()

    visit(root, None)
    return found


def comparable(node: Node) -> tuple[int, int]:
    """Cells that can be compared at a marker: (at least, at most); row-wise states may belong to other columns."""
    sure = possible = 0
    job = node.job
    for table, spec in enumerate(TABLES):
        for block in range(-(-ROWS // 64)):
            proofs = [n for n, window in enumerate(job.windows) if block in blocks(window, spec.id or 0)]
            if proofs and proofs[-1] >= job.sent[table][block * 64 : block * 64 + 64].max():
                cells = DIM * (min(ROWS, block * 64 + 64) - block * 64)
                possible += 2 * cells
                sure += cells * (1 if spec.has_row_state else 2)
    return sure, possible


WIDTHS = st.integers(POSITIONS // 4, POSITIONS)
TOUCHED = st.lists(st.integers(0, ROWS - 1), max_size=3)


def grow(data: st.DataObject, *, same: bool) -> Node:
    """Three generations on one, two of them branches of the first."""
    cuts = data.draw(COL_CUTS)
    root = first(data.draw(ROW_CUTS), cuts, data.draw(WIDTHS))
    line = [root]
    for _ in range(2):
        line.append(then(line[-1], 1, data.draw(TOUCHED), data.draw(WIDTHS)))
    for generation in (2, 3, 4):
        node = line[data.draw(st.integers(0, len(line) - 1))]
        cols = cuts if same else data.draw(COL_CUTS)
        for _ in range(2):
            node = then(node, generation, data.draw(TOUCHED), data.draw(WIDTHS), cols)
        line += [node] if generation == 2 else []
    return root


@settings(max_examples=sampled(30, 15))
@given(data=st.data(), same=st.booleans())
def test_each_marker_of_a_tree_is_compared_with_what_is_proved_and_none_raises_falsely(
    data: st.DataObject, same: bool
) -> None:
    root = grow(data, same=same)
    found = outcomes(root)
    for node in root.all():
        share, unproved = found[node.marker]
        assert unproved is None
        sure, possible = comparable(node)
        cells = round(share * 4 * ROWS * DIM)
        assert sure <= cells <= possible
        assert not same or cells == possible


@settings(max_examples=sampled(30, 15))
@given(data=st.data())
def test_one_bit_of_one_row_is_found_at_the_markers_that_hold_it_and_at_no_other(data: st.DataObject) -> None:
    root = grow(data, same=True)
    nodes = [node for node in root.all() if any(len(view.ids) for _, view, _ in node.frames)]
    harmed = nodes[data.draw(st.integers(0, len(nodes) - 1))]
    frames = [each for each in harmed.frames if len(each[1].ids)]
    shard, view, _ = frames[data.draw(st.integers(0, len(frames) - 1))]
    at, section = data.draw(st.integers(0, len(view.ids) - 1)), data.draw(st.integers(0, 1))
    array = (view.weights, *view.states)[section]
    array.view(f"u{array.itemsize}")[at] ^= 1
    table, row, born = shard.table, int(view.ids[at]), len(harmed.job.marks) - 1
    id_ = TABLES[table].id or 0
    below = {node.marker for node in harmed.all()}
    found = outcomes(root)
    for node in root.all():
        job, block = node.job, row // 64
        holds = node.marker in below and job.sent[table][row] == born
        proofs = [n for n, window in enumerate(job.windows) if block in blocks(window, id_)]
        seen = proofs and proofs[-1] >= job.sent[table][block * 64 : block * 64 + 64].max()
        unproved = found[node.marker][1]
        named = (
            [(each.table, each.begin // 64, each.state != "weights") for each in unproved.blocks] if unproved else []
        )
        assert named == ([(TABLES[table].name, block, bool(section))] if holds and seen else [])


def test_a_table_whose_row_wise_state_came_in_other_columns_is_named() -> None:
    root = first([], [4], POSITIONS)
    node = then(root, 2, [3], POSITIONS, [])
    ledger = Ledger(lineage_of(root))
    ledger.begin(SCHEMA)
    for each in (root, node):
        for shard, view, _ in each.frames:
            ledger.rows(shard.table, shard.col0, shard.cols, view)
        assert ledger.uncompared == (("b",) if each is node else ())
        ledger.turn(SCHEMA)


def test_what_was_said_within_a_fold_counts_for_blocks_that_it_does_not_send() -> None:
    root = first([], [], POSITIONS)
    within = then(root, 1, [], POSITIONS)
    newest = then(within, 1, [5], 1)
    ledger = Ledger(lineage_of(root))
    ledger.begin(SCHEMA)
    for shard, view, _ in root.frames:
        ledger.rows(shard.table, shard.col0, shard.cols, view)
    ledger.read_on()
    for shard, view, _ in newest.frames:
        ledger.rows(shard.table, shard.col0, shard.cols, view)
    for node in (within, newest):
        said = [RankReport(*each) for each in zip(node.job.ranks, node.job.marks[-1], strict=True)]
        ledger.judge(node.marker, said, within=node is within)
    compared = ledger.outcome()
    assert compared.unproved is None
    assert compared.share == pytest.approx(1 - 64 / ROWS, abs=64 / ROWS)
    assert compared.share < 1


def test_memory_bounds_the_share_that_is_compared() -> None:
    root = first([], [4], POSITIONS)
    shares = [outcomes(root, num_bytes)[root.marker][0] for num_bytes in (0, 40 * ROWS, 2**26)]
    assert shares[0] == 0 < shares[1] < shares[2] == 1


def test_copies_for_branches_share_the_memory_and_the_next_ledger_takes_other_blocks() -> None:
    root = first([], [], POSITIONS)

    def compared(copies: int, rotation: int = 0) -> float:
        ledger = Ledger(lineage_of(root), copies, rotation, 9 * 2 * 2 * ROWS)  # two tables of two sections
        ledger.begin(SCHEMA)
        for shard, view, _ in root.frames:
            ledger.rows(shard.table, shard.col0, shard.cols, view)
        ledger.judge(root.marker, [RankReport(*each) for each in zip(root.job.ranks, root.job.marks[-1], strict=True)])
        return ledger.outcome().checked

    whole = compared(0)
    assert whole > compared(1) > compared(3) > 0
    assert compared(1) + compared(1, 1) >= whole, "the other half"


@pytest.mark.parametrize("change", [-1, 1])
def test_the_marker_that_proved_it_and_the_one_before_are_named(change: int) -> None:
    root = first([], [], POSITIONS)
    node = then(root, 1, [], POSITIONS)
    for _, view, _ in root.frames:
        view.weights[450] += np.float16(change)
    _, unproved = outcomes(root)[node.marker]
    assert unproved is not None
    assert [str(each) for each in unproved.blocks] == [
        f"{name} weights rows [448, 500) (proved by 1:2, before it by 1:1)" for name in ("a", "b")
    ]
