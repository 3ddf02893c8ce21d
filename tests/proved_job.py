"""Tables whose every row is known, the markers that prove them, and the frames that bring them: made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from torchrec_stream_ckpt.find.route import Path
from torchrec_stream_ckpt.format.proof import (
    Digests,
    Ints,
    Proof,
    Window,
    column_keys,
    digest_blocks,
    digest_rows,
    per_row_keys,
    row_keys,
    words_of,
)
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.seen_marks import blocks_of
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableShard, TableSpec

ROWS, DIM = 500, 8
TABLES = (
    TableSpec("a", ROWS, DIM, "float32", "adam", (StateSpec("m", "float32", per_row=False),), id=7),
    TableSpec("b", ROWS, DIM, "float16", "rowwise", (StateSpec("s", "float64", per_row=True),), id=2**52 + 3),
)
SCHEMA = Schema(TABLES)

ROW_CUTS = st.lists(st.integers(1, ROWS - 1), max_size=3)
COL_CUTS = st.lists(st.integers(1, DIM - 1), max_size=2)

Values = dict[int, list[np.ndarray]]
"""By table: weights and states."""


def digests_of(values: Values, shard: TableShard, blocks: Ints) -> Digests:
    """Digests of one shard's part of some blocks, by the functions that the format's own tests prove."""
    table = TABLES[shard.table]
    assert table.id is not None
    sections = []
    for section, array in enumerate(values[shard.table]):
        per_row = array.ndim == 1
        part = array[:, None] if per_row else array[:, shard.col0 : shard.col0 + shard.cols]
        keys = (per_row_keys if per_row else column_keys)(shard.col0, shard.cols, part.dtype.itemsize // 4 or 1)
        found = []
        for block in blocks.tolist():
            begin, end = max(block * 64, shard.row0), min(block * 64 + 64, shard.row0 + shard.rows)
            per = digest_rows(words_of(part[begin:end]), keys, row_keys(table.id, section, np.arange(begin, end)))
            found.append(digest_blocks(per, np.array([end - begin]))[0])
        sections.append(np.array(found, np.uint64))
    return np.stack(sections, 1)


def new_values(seed: int) -> Values:
    rng = np.random.default_rng(seed)
    a = [rng.random((ROWS, DIM), np.float32) for _ in range(2)]
    return {0: a, 1: [rng.random((ROWS, DIM), np.float32).astype(np.float16), rng.random(ROWS)]}


def grid(row_cuts: Sequence[int], col_cuts: Sequence[int]) -> list[TableShard]:
    """Both tables, cut at the same places."""
    rows, cols = sorted({0, ROWS, *row_cuts}), sorted({0, DIM, *col_cuts})
    return [
        TableShard(table, top, bottom - top, left, right - left)
        for table in range(2)
        for top, bottom in pairwise(rows)
        for left, right in pairwise(cols)
    ]


def deal(shards: Sequence[TableShard], ranks: int, seed: int) -> list[tuple[TableShard, ...]]:
    owner = np.random.default_rng(seed).integers(0, ranks, len(shards))
    return [tuple(shard for shard, who in zip(shards, owner, strict=True) if who == rank) for rank in range(ranks)]


@dataclass
class Job:
    """Live tables, and what their markers said."""

    ranks: list[tuple[TableShard, ...]]
    values: Values = field(default_factory=lambda: new_values(0))
    windows: list[Window] = field(default_factory=list)
    marks: list[list[Proof | None]] = field(default_factory=list)
    sent: dict[int, np.ndarray] = field(default_factory=lambda: {t: np.zeros(ROWS, np.int32) for t in (0, 1)})
    """By table and row: the marker that sent it last."""

    def train(self, rows: Sequence[int], seed: int) -> None:
        """Rows change, and are sent for the marker to come."""
        fresh, place = new_values(seed), len(self.marks)
        for table in range(2):
            for array, new in zip(self.values[table], fresh[table], strict=True):
                array[list(rows)] = new[list(rows)]
            self.sent[table][list(rows)] = place

    def mark(self, width: int, without: int | None = None) -> None:
        window = Window(self.windows[-1].next if self.windows else 0, width)
        said: list[Proof | None] = []
        for rank, shards in enumerate(self.ranks):
            numbers = []
            for shard in shards:
                begin, end = blocks_of(shard)
                of_table = blocks(window, TABLES[shard.table].id or 0)
                here = of_table[(of_table >= begin) & (of_table < end)]
                numbers.append(digests_of(self.values, shard, here).ravel())
            flat = np.concatenate([np.empty(0, np.uint64), *numbers])
            said.append(Proof.of(window, flat) if rank != without else None)
        self.windows.append(window)
        self.marks.append(said)

    @property
    def path(self) -> Path:
        chain = tuple(MarkerId(1, number + 1) for number in range(len(self.marks)))
        ids, sections = tuple(table.id for table in TABLES), tuple(1 + len(table.states) for table in TABLES)
        return Path(chain, tuple((0,) for _ in chain), {1: ids}, {1: sections})


@cache
def blocks(window: Window, table_id: int) -> Ints:
    """Of a whole table."""
    return window.blocks(table_id, 0, ROWS)


Frame = tuple[TableShard, RowsView, int]


def frame(job: Job, shard: TableShard, rows: Sequence[int], place: int) -> Frame:
    """What a rank sends of its shard."""
    ids = np.array([row for row in rows if shard.row0 <= row < shard.row0 + shard.rows], np.int64)
    columns = slice(shard.col0, shard.col0 + shard.cols)
    weights, state = (a[ids] if a.ndim == 1 else a[ids, columns].copy() for a in job.values[shard.table])
    return shard, RowsView(ids, weights, (state,)), place
