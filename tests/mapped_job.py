"""A job on paper whose tables have id maps: raw ids come, go and move, and a dictionary knows each marker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_saver import save

from tests import builders
from tests.builders import JOB, digest_files
from tests.synthetic import Job
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.rows import ASSIGNED, EVICTED, NUMPY_DTYPES
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableShard

ONE, TWO, PLAIN = "mc._embedding_module.t_one", "mc._embedding_module.t_two", "sparse.t_plain"
SCHEMA = Schema(
    (
        builders.table(ONE, 60, 4, "float32", StateSpec("momentum1", "float32", True)),
        builders.table(TWO, 30, 8, "float16"),
        builders.table(PLAIN, 25, 4),
    )
)
FREE = 2**63 - 1
ENDS = (-(2**63), -(2**63) + 1, -1, 0, 1, 2**63 - 3, 2**63 - 2)

Dump = dict[str, dict[int, bytes]]
"""Table -> key -> weights."""


@dataclass
class MappedJob(Job):
    """Writes the id maps of each marker as trainers do: a piece of each shard in the dense state."""

    schema: Schema = SCHEMA
    owners: dict[str, np.ndarray] = field(default_factory=dict)
    """Raw id of each row, by table."""
    truths: dict[MarkerId, Dump] = field(default_factory=dict)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    at: dict[MarkerId, tuple[dict[str, np.ndarray], dict[str, np.ndarray]]] = field(default_factory=dict)
    """Owners and weights at each marker."""
    sent: dict[str, np.ndarray] = field(default_factory=dict)
    """(``announces`` has ids) Raw id of each row by the events of this generation."""

    def begin(self, parent: MarkerId | None = None, **more: object) -> None:
        if parent is not None:
            self.owners, self.weights = _copied(self.at[parent])
        else:
            mapped = [table for table in self.schema.tables if table.name.startswith("mc.")]
            self.owners = self.owners or {table.name: np.full(table.rows, FREE) for table in mapped}
            self.weights = {
                table.name: np.zeros((table.rows, table.dim), NUMPY_DTYPES[table.dtype]) for table in self.schema.tables
            }
        self.sent = {name: np.full_like(owners, FREE) for name, owners in self.owners.items()}
        super().begin(parent, **more)  # type: ignore[arg-type]

    def note(self, shard: TableShard, arrays: Sequence[np.ndarray]) -> None:
        name = self.schema.tables[shard.table].name
        self.weights[name][arrays[0], shard.col0 : shard.col0 + shard.cols] = arrays[1]

    def _rows(self, name: str) -> int:
        return self.schema.tables[self.schema.index()[name]].rows

    def live(self, name: str) -> set[int]:
        return set(self.owners[name].tolist()) - {FREE}

    def churn(self, changes: int = 8) -> None:
        """Give rows to other raw ids, free them, and let raw ids move; send about half of these rows."""
        for name in self.owners:
            owners, pool = self.owners[name], [*ENDS, *range(100, 100 + self._rows(name))]
            sent = []
            for _ in range(changes):
                row, other = self.random.integers(len(owners), size=2)
                kind = self.random.integers(4)
                if kind == 0:
                    owners[row] = FREE
                elif kind == 1:  # a raw id moves, or two change places
                    owners[[row, other]] = owners[[other, row]]
                    sent += [other] if self.random.random() < 0.5 else []
                else:
                    raw_id = pool[self.random.integers(len(pool))]
                    if raw_id not in self.live(name):
                        owners[row] = raw_id
                sent += [row] if self.random.random() < 0.5 else []
            self.send(name, sent)

    def send(self, name: str, rows: Sequence[int]) -> None:
        """New bits for some rows of a table."""
        index = self.schema.index()[name]
        for stream in self.streams:
            for shard in stream.shards:
                mine = sorted({row for row in map(int, rows) if shard.row0 <= row < shard.row0 + shard.rows})
                if shard.table == index and mine:
                    self.put_rows(stream, shard, np.array(mine))
        self.flush()

    def commit(self, **more: object) -> Commit:
        if self.announces is not None:
            self._send_events()
        marker = MarkerId(self.generation, self.marker + 1)
        name = dense_name(JOB, marker)
        folder = self.root / name
        state = {
            key: torch.from_numpy(value)
            for stream in self.streams
            for shard in stream.shards
            if (table := self.schema.tables[shard.table].name) in self.owners
            for key, value in self._map(table, shard.row0, shard.rows).items()
        }
        save(state, storage_writer=FileSystemWriter(folder), no_dist=True)
        files = digest_files(folder, sorted(path.name for path in folder.iterdir()))
        commit = super().commit(dense=name, dense_files=files, **more)
        assert commit.id == marker
        self.at[marker] = _copied((self.owners, self.weights))
        self.truths[marker] = {
            table: {
                key: rows[row].tobytes()
                for row, key in enumerate(self.owners.get(table, np.arange(len(rows))).tolist())
                if key != FREE
            }
            for table, rows in self.weights.items()
        }
        return commit

    def _send_events(self) -> None:
        """Say what has changed in the id maps, as trainers do: raw ids that have lost their rows first."""
        for stream in self.streams:
            for shard in stream.shards:
                name, rows = self.schema.tables[shard.table].name, np.arange(shard.row0, shard.row0 + shard.rows)
                if name in self.owners:
                    now, sent = self.owners[name], self.sent[name]
                    lost = rows[(sent[rows] != FREE) & (sent[rows] != now[rows])]
                    got = rows[(now[rows] != FREE) & (sent[rows] != now[rows])]
                    stream.events(shard.table, lost, sent[lost], EVICTED)
                    stream.events(shard.table, got, now[got], ASSIGNED)
        self.sent = {name: owners.copy() for name, owners in self.owners.items()}
        self.flush()

    def _map(self, table: str, row0: int, rows: int) -> dict[str, np.ndarray]:
        ids = self.owners[table][row0 : row0 + rows]
        order = np.argsort(ids, kind="stable")
        prefix = f"collision.{table}.{row0}"
        return {f"{prefix}.map_raw_ids": ids[order].copy(), f"{prefix}.map_rows": row0 + order}


Held = tuple[dict[str, np.ndarray], dict[str, np.ndarray]]


def _copied(held: Held) -> Held:
    owners, weights = ({name: array.copy() for name, array in each.items()} for each in held)
    return owners, weights
