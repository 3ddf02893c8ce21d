"""Logs of jobs that nobody trained, for what reads logs: of any number of markers, quickly. No torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from tests import builders
from tests.builders import Stream
from tests.parts import FileLog
from torchrec_stream_ckpt.format.control import Commit, Mark
from torchrec_stream_ckpt.format.end_note import Note
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.proof import Proof, Window
from torchrec_stream_ckpt.format.record import meta_of
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Log
from torchrec_stream_ckpt.util.types import MarkerId, TableShard

FIRST_S = 1_700_000_000.0
"""When the first generation began."""
EVIL = "<script>alert('x')</script>&\"\x1b[31m"
LONG = "sparse.ebc." + "a_very_long_name_" * 7


@dataclass
class PaperJob:
    """Each marker sends a few rows of a few tables; steps and clock go on as a trainer's do.

    Args:
        root: Folder of the log.
        schema: Tables without optimizer states.
        world: Ranks.
        window: What its MARKs say that they prove; they have no digests.
    """

    root: Path
    schema: Schema
    world: int = 1
    window: Window | None = None
    generation: int = 0
    step: int = 0
    marker: int = 0
    time_s: float = FIRST_S
    log: Log = None  # type: ignore[assignment]
    """By default a file log in ``root``."""

    def __post_init__(self) -> None:
        self.log = self.log or FileLog(self.root)
        self.random = np.random.default_rng(0)

    def say(self, marker: MarkerId, meta: dict[str, str | float]) -> None:
        """Something of a marker."""
        note = Note(builders.JOB, marker.generation, marker.marker, meta_of(meta), "n", self.time_s)
        self.log.append_control(note.to_frame())

    def run(self, markers: int, parent: MarkerId | None = None, *, seconds: float = 20.0) -> list[Commit]:
        """A generation with so many markers, 10 steps apart. The first one of a job holds every row."""
        self.generation += 1
        swept = () if parent is not None else tuple(range(len(self.schema.tables)))
        claim = builders.claim(
            self.generation,
            parent=parent,
            world=self.world,
            partitions=self.world,
            incarnation=self.log.prepare(self.world).id,
            schema=self.schema,
            swept=swept,
            time_s=self.time_s,
        )
        self.log.append_control(claim.to_frame())
        ends = [self._write(rank, markers, whole=bool(swept)) for rank in range(self.world)]
        commits = []
        for each in range(markers):
            self.marker, self.step, self.time_s = self.marker + 1, self.step + 10, self.time_s + seconds
            commits.append(
                builders.commit(
                    self.generation,
                    self.marker,
                    [end(each) for end in ends],
                    step=self.step,
                    time_s=self.time_s,
                )
            )
            self.log.append_control(commits[-1].to_frame())
        return commits

    def _write(self, rank: int, markers: int, *, whole: bool) -> Callable[[int], builders.RankEnd]:
        """A whole stream at one go; what it answers tells where it stood at which marker."""
        stream = Stream(rank, self.generation, shards=self._shards(rank), schema=self.schema, world=self.world)
        places, rows, num_bytes = [], 0, len(stream.frames[0])
        proof = Proof.of(self.window, np.empty(0, np.uint64)) if self.window is not None else None
        for each in range(markers):
            begin = len(stream.frames)
            for table, ids in self._sent(rank, whole=whole and not each):
                dim = self.schema.tables[table].dim
                stream.put(table, [ids, np.zeros((len(ids), dim), np.float32)])
                rows += len(ids)
            num_bytes += sum(map(len, stream.frames[begin:]))
            place = {"marker": self.marker + each + 1, "step": self.step + 10 * (each + 1)}
            stream.json(Kind.MARK, Mark(rows, num_bytes, (), proof).to_json(), **place)
            num_bytes += len(stream.frames[-1])
            places.append((len(stream.frames), rows, num_bytes))
        acks = builders.write(self.log, stream.frames, generation=self.generation, partition=rank, timeout_s=180.0)

        def end(each: int) -> builders.RankEnd:
            frames, rows, num_bytes = places[each]
            found = stream.end(acks[0].offset, acks[frames - 1].end, partition=rank, frames=frames)
            return replace(found, rows=rows, num_bytes=num_bytes)

        return end

    def _shards(self, rank: int) -> tuple[TableShard, ...]:
        return tuple(
            TableShard(number, *self._range(rank, table.rows), 0, table.dim)
            for number, table in enumerate(self.schema.tables)
        )

    def _range(self, rank: int, rows: int) -> tuple[int, int]:
        begin, end = (rows * each // self.world for each in (rank, rank + 1))
        return begin, end - begin

    def _sent(self, rank: int, *, whole: bool) -> list[tuple[int, np.ndarray]]:
        """(table, ids): all, or some of two tables, the first rows more often."""
        tables = range(len(self.schema.tables)) if whole else self.random.integers(0, len(self.schema.tables), 2)
        found = []
        for table in dict.fromkeys(int(each) for each in tables):
            begin, rows = self._range(rank, self.schema.tables[table].rows)
            ids = np.arange(rows) if whole else np.unique((rows * self.random.random(rows) ** 4).astype(np.int64))
            found.append((table, (begin + ids).astype(np.int64)))
        return found


def tables(*names: str, rows: int = 40, dim: int = 4) -> Schema:
    return Schema(tuple(builders.table(name, rows, dim) for name in sorted(names)))
