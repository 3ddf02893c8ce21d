"""From any plan to any plan: every cell of every target has exactly one source in each generation."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.builders import ROWWISE, claim, commit, table
from tests.parts import RestorePlan, intersect, locate
from torchrec_stream_ckpt.errors import ColumnResplitError, CorruptionError, MarkerNotFoundError, SchemaMismatchError
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema, check_schema
from torchrec_stream_ckpt.restore.plan import Move, Overlaps, plan_restore
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, StateSpec, TableShard, TableSpec

PLAIN = table("a_plain", 13, 6)
ROWSTATE = table("b_rowstate", 9, 4, "float32", ROWWISE)
SCHEMA = Schema((PLAIN, ROWSTATE))
Placement = list[tuple[TableShard, ...]]
"""The shards of each rank."""


def cuts(length: int, parts: int) -> list[tuple[int, int]]:
    """(begin, length) of ``parts`` blocks, as TorchRec cuts them: the last ones may be short or empty."""
    block = -(-length // parts)
    edges = [min(block * part, length) for part in range(parts + 1)]
    return [(begin, end - begin) for begin, end in pairwise(edges) if end > begin]


@st.composite
def placements(draw: st.DrawFn, schema: Schema = SCHEMA) -> Placement:
    """Table-wise, row-wise or column-wise for each table, on 1 to 4 ranks."""
    world = draw(st.integers(1, 4))
    ranks: list[list[TableShard]] = [[] for _ in range(world)]
    for index, spec in enumerate(schema.tables):
        kind = draw(st.sampled_from(["tw", "rw", "cw"]))
        if kind == "tw":
            ranks[draw(st.integers(0, world - 1))].append(TableShard(index, 0, spec.rows, 0, spec.dim))
        elif kind == "rw":
            for rank, (row0, rows) in enumerate(cuts(spec.rows, world)):
                ranks[rank].append(TableShard(index, row0, rows, 0, spec.dim))
        else:
            parts = cuts(spec.dim, draw(st.integers(1, 4)))
            for col0, cols in parts:
                ranks[draw(st.integers(0, world - 1))].append(TableShard(index, 0, spec.rows, col0, cols))
    return [tuple(shards) for shards in ranks]


def history(
    *written: Placement, schema: Schema = SCHEMA, swept: dict[int, tuple[int, ...]] | None = None
) -> tuple[Lineage, dict[int, Placement]]:
    """A lineage with one marker a generation, each the parent of the next, and what all ranks hold."""
    lineage, shards = Lineage(), {}
    for generation, placement in enumerate(written, 1):
        parent = MarkerId(generation - 1, generation - 1) if generation > 1 else None
        more = {"swept": swept[generation]} if swept and generation in swept else {}
        lineage.apply(claim(generation, parent=parent, schema=schema, **more))
        ends = [RankEnd(rank, rank, 0, 64 * rank + 640, 2, 0, 0, 512) for rank in range(len(placement))]
        lineage.apply(commit(generation, generation, ends))
        shards[generation] = placement
    return lineage, shards


def plan(
    targets: tuple[TableShard, ...],
    *written: Placement,
    merge: bool = False,
    schema: Schema = SCHEMA,
    swept: dict[int, tuple[int, ...]] | None = None,
) -> RestorePlan:
    lineage, shards = history(*written, schema=schema, swept=swept)
    marker = MarkerId(len(written), len(written))
    return plan_restore(replace(locate(lineage, marker), shards=shards), schema, targets, merge=merge)


def covered(target: TableShard, moves: list[Move]) -> np.ndarray:
    """How many moves write each cell of a shard."""
    count = np.zeros((target.rows, target.cols), int)
    for move in moves:
        row, col = move.row0 - target.row0, move.col0 - target.col0
        assert row >= 0
        assert col >= 0
        count[row : row + move.rows, col : col + move.cols] += 1
    return count


def moves_of(found: RestorePlan, target: TableShard, generation: int) -> list[Move]:
    return [
        move
        for read in found.reads
        if read.interval.commit.generation == generation
        for move in read.moves
        if move.target == target
    ]


@given(placements(), placements(), placements())
def test_every_cell_has_one_source_in_each_generation(first: Placement, second: Placement, here: Placement) -> None:
    for shards in here:
        found = plan(shards, first, second, merge=True)
        for target in shards:
            for generation in (1, 2):
                assert (covered(target, moves_of(found, target, generation)) == 1).all()


@given(placements(), placements())
def test_moves_stay_inside_source_and_target(written: Placement, here: Placement) -> None:
    for shards in here:
        for read in plan(shards, written, merge=True).reads:
            for move in read.moves:
                for shard in (move.source, move.target):
                    assert shard.row0 <= move.row0
                    assert move.row0 + move.rows <= shard.row0 + shard.rows
                    assert shard.col0 <= move.col0
                    assert move.col0 + move.cols <= shard.col0 + shard.cols
                assert move.source in written[read.interval.end.rank]


@given(placements(), placements())
def test_only_a_changed_column_split_of_row_wise_state_is_inexact(written: Placement, here: Placement) -> None:
    sources = {(shard.col0, shard.cols) for shards in written for shard in shards if shard.table == 1}
    for shards in here:
        changed = any((shard.col0, shard.cols) not in sources for shard in shards if shard.table == 1)
        assert plan(shards, written, merge=True).merged == (frozenset({1}) if changed else frozenset())
        if changed:
            with pytest.raises(ColumnResplitError, match="changed column split of b_rowstate"):
                plan(shards, written)


@given(placements())
def test_streams_without_a_needed_row_are_not_read(written: Placement) -> None:
    (target,) = (TableShard(0, 0, 1, 0, 1),)
    found = plan((target,), written)
    assert all(read.moves for read in found.reads)
    holders = {rank for rank, shards in enumerate(written) if any(intersect(shard, target) for shard in shards)}
    assert {read.interval.end.rank for read in found.reads} == holders


@given(st.lists(st.tuples(st.integers(0, 1), *[st.integers(0, 9), st.integers(1, 6)] * 2), max_size=12), placements())
def test_overlaps_are_those_of_all_pairs_in_their_order(odd: list[tuple[int, ...]], here: Placement) -> None:
    """Also of shards that no sharder makes, which overlap each other in rows and columns."""
    sources = [TableShard(*each) for each in odd]
    for some, others in ((sources, [shard for each in here for shard in each]), (sources, sources)):
        overlaps = Overlaps(others)
        for source in some:
            assert overlaps.moves(source) == [move for each in others if (move := intersect(source, each))]


def test_shards_of_other_tables_have_nothing_in_common() -> None:
    assert intersect(TableShard(0, 0, 4, 0, 4), TableShard(1, 0, 4, 0, 4)) is None


@pytest.mark.parametrize(
    "other",
    [TableShard(0, 4, 4, 0, 4), TableShard(0, 0, 4, 4, 4), TableShard(0, 2, 0, 0, 4), TableShard(0, 0, 4, 2, 0)],
)
def test_shards_that_only_touch_have_nothing_in_common(other: TableShard) -> None:
    assert intersect(TableShard(0, 0, 4, 0, 4), other) is None


WHOLE: Placement = [(TableShard(0, 0, 13, 0, 6), TableShard(1, 0, 9, 0, 4))]


def test_generations_are_read_in_order_of_the_path() -> None:
    found = plan(WHOLE[0], WHOLE, WHOLE, WHOLE)
    assert [read.interval.commit.generation for read in found.reads] == [1, 2, 3]


def test_a_table_that_was_swept_again_is_not_read_from_before() -> None:
    found = plan(WHOLE[0], WHOLE, WHOLE, WHOLE, swept={2: (1,)})
    tables = {read.interval.commit.generation: {move.source.table for move in read.moves} for read in found.reads}
    assert tables == {1: {0}, 2: {0, 1}, 3: {0, 1}}


def test_a_generation_that_is_swept_over_is_not_read_at_all() -> None:
    found = plan(WHOLE[0], WHOLE, WHOLE, swept={2: (0, 1)})
    assert [read.interval.commit.generation for read in found.reads] == [2]


def test_sources_with_a_hole_are_refused() -> None:
    holed: Placement = [(TableShard(0, 0, 13, 0, 6), TableShard(1, 0, 5, 0, 4)), (TableShard(1, 6, 3, 0, 4),)]
    with pytest.raises(CorruptionError, match="no source holds all of this shard") as refused:
        plan(WHOLE[0], holed)
    assert refused.value.where["table"] == "b_rowstate"


def test_a_marker_that_is_not_committed_is_refused() -> None:
    lineage, shards = history(WHOLE)
    with pytest.raises(MarkerNotFoundError):
        plan_restore(replace(locate(lineage, MarkerId(1, 9)), shards=shards), SCHEMA, WHOLE[0])


def test_a_rank_that_holds_nothing_reads_nothing() -> None:
    assert plan((), WHOLE).reads == ()


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("rows", 10, "rows is 9 in the log and 10 in this model"),
        ("dim", 8, "dim is 4 in the log and 8 in this model"),
        ("dtype", "float16", "dtype is float32 in the log and float16 in this model"),
        ("optimizer", "sgd", "optimizer is adagrad in the log and sgd in this model"),
        ("states", (StateSpec("m", "float32", False),), "states is .*momentum1.* in the log and .*'m'.* in this model"),
    ],
)
def test_a_table_that_differs_is_named_with_both_values(field: str, value: object, words: str) -> None:
    here: TableSpec = replace(ROWSTATE, **{field: value})  # type: ignore[arg-type]
    with pytest.raises(SchemaMismatchError, match=words) as refused:
        check_schema(SCHEMA, Schema((PLAIN, here)))
    assert refused.value.where == {"table": "b_rowstate"}


@pytest.mark.parametrize(
    ("here", "side", "name"),
    [
        (Schema((PLAIN,)), "the log", "b_rowstate"),
        (Schema((PLAIN, ROWSTATE, table("c_new"))), "this model", "c_new"),
    ],
)
def test_a_table_that_only_one_side_has_is_named(here: Schema, side: str, name: str) -> None:
    with pytest.raises(SchemaMismatchError, match=f"only {side} has a sharded table with this name") as refused:
        check_schema(SCHEMA, here)
    assert refused.value.where == {"table": name}


def test_a_plan_refuses_another_schema() -> None:
    lineage, shards = history(WHOLE)
    route = replace(locate(lineage, MarkerId(1, 1)), shards=shards)
    with pytest.raises(SchemaMismatchError):
        plan_restore(route, Schema((PLAIN, replace(ROWSTATE, rows=99))), WHOLE[0])


def test_a_plan_prints_itself() -> None:
    halves: Placement = [
        (TableShard(0, 0, 13, 0, 6), TableShard(1, 0, 9, 0, 2)),
        (TableShard(1, 0, 9, 2, 2),),
    ]
    assert plan((TableShard(1, 0, 9, 0, 4),), halves, merge=True).describe().splitlines() == [
        "marker 1:1, step 10, written by 2 ranks",
        "  source: log",
        "  read generation 1 rank 0: 2 frames, 512 bytes, partition 0",
        "    b_rowstate rows [0, 9) columns [0, 2)",
        "  read generation 1 rank 1: 2 frames, 512 bytes, partition 1",
        "    b_rowstate rows [0, 9) columns [2, 4)",
        "  merge the row-wise state of b_rowstate: not bit-exact",
    ]
