"""What a reader of all markers compares with their proofs, over branches and other column slices, on frames by hand."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.builders import JOB, claim, commit
from tests.proved_job import COL_CUTS, DIM, ROW_CUTS, ROWS, SCHEMA, TABLES, Frame, Job, blocks, deal, frame, grid
from tests.sampled import sampled
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.inner import Unproved
from torchrec_stream_ckpt.proofs.ledger import Ledger
from torchrec_stream_ckpt.proofs.seen_marks import RankReport
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

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


def provable(node: Node) -> tuple[int, int]:
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
        sure, possible = provable(node)
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
