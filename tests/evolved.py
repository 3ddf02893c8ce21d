"""A job on paper whose model changes: random schemas along a lineage, and what each marker holds, by numpy alone."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from tests.builders import JOB, Stream, digest_files
from tests.synthetic import Job
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, changes_of
from torchrec_stream_ckpt.format.control import Commit, Mark
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.proof import (
    POSITIONS,
    Proof,
    Window,
    column_keys,
    digest_blocks,
    digest_rows,
    per_row_keys,
    row_keys,
    words_of,
)
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES
from torchrec_stream_ckpt.format.schema import Schema, canonical
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, StateSpec, TableShard, TableSpec

NAMES = tuple("m.t_" + letter for letter in "abcdefgh")
ROWWISE, FULL = StateSpec("momentum1", "float32", True), StateSpec("exp_avg", "float32", False)
STATES = ((), (ROWWISE,), (FULL,), (StateSpec("count", "float64", True), StateSpec("half", "float16", False)))
DTYPES = ("float32", "float16", "bfloat16", "float64")


@dataclass
class TableTruth:
    """What one table holds."""

    spec: TableSpec
    slices: list[tuple[int, int]]
    """(first column, columns) of its shards."""
    arrays: list[np.ndarray]
    """Weights, shape (rows, dim), and states: (rows, dim), or (slices, rows) where one value a row is held."""

    @classmethod
    def of(cls, spec: TableSpec, parts: int) -> TableTruth:
        cols = spec.dim // parts
        shapes = [
            ((parts, spec.rows) if per_row else (spec.rows, spec.dim), NUMPY_DTYPES[dtype])
            for dtype, per_row in ((spec.dtype, False), *((state.dtype, state.per_row) for state in spec.states))
        ]
        return cls(spec, [(part * cols, cols) for part in range(parts)], [np.zeros(*each) for each in shapes])

    def put(self, col0: int, ids: np.ndarray, values: Sequence[np.ndarray]) -> None:
        """Rows of one slice: weights and states, as they are sent."""
        for array, value in zip(self.arrays, values, strict=True):
            if value.ndim == 1:
                array[[begin for begin, _ in self.slices].index(col0), ids] = value
            else:
                array[ids, col0 : col0 + value.shape[1]] = value

    def bits(self) -> list[bytes]:
        return [array.tobytes() for array in self.arrays]


Truth = dict[int, TableTruth]
"""By index in the schema."""


def random_table(rng: np.random.Generator, name: str) -> TableSpec:
    states = STATES[rng.integers(len(STATES))]
    rows, dim = int(rng.integers(1, 150)), int(2 ** rng.integers(0, 4))
    return TableSpec(name, rows, dim, DTYPES[rng.integers(len(DTYPES))], f"o{len(states)}", states)


def random_schema(rng: np.random.Generator) -> Schema:
    """Of a first generation."""
    names = sorted(rng.choice(NAMES, int(rng.integers(2, 5)), replace=False))
    return Schema(tuple(random_table(rng, str(name)) for name in names)).named(None, JOB, 1)


def random_change(rng: np.random.Generator, parent: Schema, generation: int) -> tuple[Schema, tuple[int, ...]]:
    """A model that somebody changed: its tables, and those that are swept."""
    tables, swept = list(parent.tables), set()
    free = [name for name in NAMES if name not in parent.index()]
    rng.shuffle(free)
    for index, spec in parent.live:
        what = rng.choice(["goes on", "renamed", "rows", "dim", "states", "dtype", "mapped", "dropped"], p=CHANCES)
        if what == "renamed" and free:
            tables[index] = replace(spec, name=free.pop())
        elif what == "dropped":
            tables[index] = TOMBSTONE
            free.append(spec.name)  # an added table may have the name of a dropped one
        elif what in CHANGES:
            tables[index] = replace(CHANGES[str(what)](rng, spec), id=None)
    live = [index for index, table in enumerate(tables) if not table.dropped]
    if len(live) > 1 and rng.random() < 0.2:  # two tables change names
        one, other = (int(each) for each in rng.choice(live, 2, replace=False))
        names = tables[one].name, tables[other].name
        tables[one], tables[other] = replace(tables[one], name=names[1]), replace(tables[other], name=names[0])
    count = int(rng.integers(0 if live else 1, 3))
    tables += sorted((random_table(rng, name) for name in free[:count]), key=lambda table: table.name)
    schema = Schema(tuple(tables)).renewed(parent, JOB, generation)
    before = {table.id for table in parent.tables}
    swept = {index for index, table in schema.live if table.id not in before}
    swept |= {index for index, table in parent.live if schema.tables[index].dropped}
    return schema, tuple(sorted(swept))


CHANCES = (0.4, 0.1, 0.1, 0.1, 0.08, 0.06, 0.06, 0.1)
CHANGES = {
    "rows": lambda rng, spec: replace(spec, rows=int(rng.integers(1, 150))),
    "dim": lambda rng, spec: replace(spec, dim=int(2 ** rng.integers(0, 4))),
    "states": lambda rng, spec: replace(spec, states=STATES[rng.integers(len(STATES))], optimizer="other"),
    "dtype": lambda rng, spec: replace(spec, dtype=DTYPES[rng.integers(len(DTYPES))]),
    "mapped": lambda rng, spec: spec,
}


@dataclass
class EvolvingJob(Job):
    """Writes what trainers would have, and keeps what each marker holds."""

    truth: dict[MarkerId, Truth] = field(default_factory=dict)
    live: Truth = field(default_factory=dict)
    width: int = POSITIONS
    """Of the window that each marker proves; 0: none."""
    _position: int = 0

    def evolve(self, parent: MarkerId | None, schema: Schema, swept: Sequence[int], world: int | None = None) -> None:
        """A generation with these tables."""
        old = self.schemas[parent.generation] if parent is not None else None
        before = self.truth[parent] if parent is not None else {}
        splits, self.live = [], {}
        for index, spec in enumerate(schema.tables):
            if spec.dropped:
                splits.append(1)
            elif index in swept:
                splits.append(int(self.random.choice([parts for parts in (1, 2) if spec.dim % parts == 0])))
                self.live[index] = TableTruth.of(spec, splits[-1])
            else:
                self.live[index] = replace(copy.deepcopy(before[index]), spec=spec)
                splits.append(len(self.live[index].slices))
        changed = old is not None and any(changes_of(old, schema))
        said = ClaimChanges.of(canonical({"generation": self.generation + 1})) if changed else None
        self.begin(parent, world=world, swept=swept, splits=splits, schema=schema, changes=said)

    def first(self, schema: Schema, world: int = 2) -> None:
        self.evolve(None, schema, range(len(schema.tables)), world)

    def change(self, parent: MarkerId) -> None:
        """A generation with a random change of what its parent had."""
        schema, swept = random_change(self.random, self.schemas[parent.generation], self.generation + 1)
        self.evolve(parent, schema, swept, int(self.random.integers(1, 4)))

    def go_on(self, parent: MarkerId) -> None:
        """A generation with the tables of its parent, some of which are swept."""
        schema = self.schemas[parent.generation]
        swept = [index for index, _ in schema.live if self.random.random() < 0.15]
        self.evolve(parent, schema, swept, int(self.random.integers(1, 4)))

    def put_rows(self, stream: Stream, shard: TableShard, ids: np.ndarray) -> None:
        stream.filling = self.marker + 1
        super().put_rows(stream, shard, ids)

    def note(self, shard: TableShard, arrays: Sequence[np.ndarray]) -> None:
        self.live[shard.table].put(shard.col0, arrays[0], arrays[1:])

    def commit(self, **more: object) -> Commit:
        folder = self.root / dense_name(JOB, MarkerId(self.generation, self.marker + 1))
        folder.mkdir(parents=True)
        (folder / ".metadata").write_bytes(b"no state")
        commit = super().commit(dense_files=digest_files(folder, [".metadata"]), **more)
        self.truth[commit.id] = copy.deepcopy(self.live)
        self._position = (self._position + self.width) % POSITIONS
        return commit

    def markers(self, count: int) -> list[MarkerId]:
        """So many markers of the open generation."""
        made = []
        for _ in range(count):
            self.touch()
            made.append(self.commit().id)
        return made

    def mark(self, stream: Stream) -> None:
        proof = None
        if self.width:
            window = Window(self._position, self.width)
            digests = [each for shard in stream.shards for each in self._digests(shard, window)]
            proof = Proof.of(window, np.array(digests, np.uint64))
        text = Mark(0, sum(map(len, stream.frames)), (), proof).to_json()
        stream.json(Kind.MARK, text, marker=self.marker, step=10 * self.marker)

    def _digests(self, shard: TableShard, window: Window) -> list[int]:
        """Of one shard, as docs/format.md says: by block, then by section."""
        table, id_ = self.live[shard.table], self.schema.tables[shard.table].id
        assert id_ is not None
        position = table.slices.index((shard.col0, shard.cols))
        found = []
        for block in window.blocks(id_, shard.row0, shard.row0 + shard.rows).tolist():
            rows = np.arange(max(block * 64, shard.row0), min(block * 64 + 64, shard.row0 + shard.rows))
            for section, array in enumerate(table.arrays):
                per_row = section > 0 and table.spec.states[section - 1].per_row
                part = array[position, rows][:, None] if per_row else array[rows, shard.col0 : shard.col0 + shard.cols]
                keys = (per_row_keys if per_row else column_keys)(shard.col0, shard.cols, part.dtype.itemsize // 4 or 1)
                sums = digest_rows(words_of(np.ascontiguousarray(part)), keys, row_keys(id_, section, rows))
                found.append(int(digest_blocks(sums, np.array([len(rows)]))[0]))
        return found


def random_job(root: Path, seed: int) -> EvolvingJob:
    """Branches before and after changes, and chains of at least three of them; a dropped name may come back."""
    rng = np.random.default_rng(seed)
    job = EvolvingJob(root, seed=seed, schema=random_schema(rng), width=int(rng.choice([POSITIONS, 30_000, 0])))
    job.first(job.schema)
    tips = job.markers(3)
    at = tips[-1]
    for _ in range(3):
        job.change(at)
        tips += job.markers(int(rng.integers(1, 4)))
        at = tips[-1]
        if rng.random() < 0.5:
            job.go_on(at)
            tips += job.markers(2)
            at = tips[-1]
    for _ in range(2):
        parent = tips[rng.integers(len(tips))]
        (job.change if rng.random() < 0.5 else job.go_on)(parent)
        tips += job.markers(int(rng.integers(1, 3)))
    return job
