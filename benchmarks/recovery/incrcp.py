"""IncrCP's two-dimensional lists of chunks, as its paper has them (PVLDB 18(4)); ``lists.py`` has the filters.

Each table has a list of its own. A chunk holds the rows of one interval. When a later interval t changes rows that an
older chunk b holds too, those rows are taken out of b into a chunk (b, t): the second dimension. Marker m then reads,
of each b <= m, what is left of the chunk (Row_0) and what later intervals than m have taken out of it, and little that
is superseded.

What one interval rewrites goes into two bundles, ordered by b, so that marker m reads a prefix of each: what is left of
all chunks (Row_0), and what was taken out of them (Row_1). A Row_0 bundle goes with its last live part.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from baselines import _Chain
from files import Buffer, Gather, Maps, Piece, place_pieces, publish
from lists import Chunk, Lists
from stream import Trainer, linear_ids, read_rows
from workload import Ids


@dataclass(frozen=True)
class _Taken:
    """What an interval supersedes of one chunk of one table."""

    table: int
    chunk: Chunk[Piece]
    dead: npt.NDArray[np.bool_]


class IncrCp(_Chain):
    """All lists, and the files that hold their chunks; no new base."""

    resets: ClassVar[bool] = False
    reset_every: int | None = None
    """Chunks until a new base; None: what timed recoveries say."""
    look_every = 10
    """Chunks from one timed recovery to the next."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._lists = Lists[Piece]()
        self._left: dict[int, dict[int, Piece]] = {}
        """Row_0: by interval, by table."""
        self._taken: dict[int, dict[int, Piece]] = {}
        """Row_1 and below: by interval, by the one that superseded them; all tables in one piece."""
        self._gathers: dict[int, Gather] = {}
        self._changed = np.zeros(self.trainer.workload.rows, np.bool_)
        self._users: dict[Path, int] = {}
        """Live parts of each file of Row_0."""
        self._since_base = 0
        self._slow = False
        """The last timed recovery took longer after the base than for it."""

    def build(self, interval: int) -> None:
        if not interval:
            return self._first_base()
        if self.resets and self._new_base_pays():
            return self._reset(interval)
        keys, names, chunk = self._new_chunk(interval)
        files, gone = self._extract(interval, keys)
        publish(self.folder, [self.folder / f"chunk-{interval:04d}", *files])
        for path in gone:
            path.unlink()
        for table, piece in zip(names, chunk, strict=True):
            self._keep(table, interval, keys[table], piece)
        self._since_base += 1
        self._try_recovery(interval)
        return None

    def _reset(self, interval: int) -> None:
        old = self.base_of(interval)
        self._live_base(interval)
        self._lists.clear()
        self._since_base, self._slow = 0, False
        if not any(old <= marker < interval for marker in self.keep):
            self.bases[old].path.unlink()

    def _new_base_pays(self) -> bool:
        return self._slow if self.reset_every is None else self._since_base >= self.reset_every

    def _try_recovery(self, interval: int) -> None:
        """Now and then: whether what came after the base takes longer to restore than the base. No part of the build.

        The tables already hold the newest marker, so restoring it into them changes nothing.
        """
        if not self.resets or self.reset_every is not None or self._since_base % self.look_every:
            return
        begin = time.perf_counter()
        self.bases[self.base_of(interval)].restore(self.trainer.live)
        after_base = time.perf_counter()
        place_pieces(self.pieces(interval), self.trainer.live)
        end = time.perf_counter()
        self._slow = end - after_base > after_base - begin
        self.ledger.untimed_s += end - begin

    def _new_chunk(self, interval: int) -> tuple[dict[int, Ids], list[int], list[Piece]]:
        """(ids by table, tables, their pieces in the interval's file)."""
        trainer, keys, parts = self.trainer, {}, []
        rows = read_rows(trainer.log, trainer.spans[interval], trainer.workload)
        for table, found in groupby(rows, key=lambda each: each[0]):
            frames = [view for _, view in found]
            keys[table] = np.concatenate([linear_ids(table, view, trainer.workload) for view in frames])
            weights = [memoryview(view.weights) for view in frames]
            parts.append([memoryview(keys[table]), *weights, *(memoryview(view.states[0]) for view in frames)])
        names = list(keys)
        return keys, names, self._write(f"chunk-{interval:04d}", [len(keys[table]) for table in names], parts)

    def _keep(self, table: int, interval: int, keys: Ids, piece: Piece) -> None:
        """A part of Row_0 is there."""
        piece = replace(piece, first=int(keys[0]), last=int(keys[-1]))
        self._left.setdefault(interval, {})[table] = piece
        self._lists.put(table, Chunk.of(interval, keys, piece))
        self._users[piece.path] = self._users.get(piece.path, 0) + 1
        self.ledger.add(piece.num_bytes)

    def _extract(self, interval: int, keys: dict[int, Ids]) -> tuple[list[Path], list[Path]]:
        """Take what ``interval`` supersedes out of the chunks since the base: (files written, files of no use now)."""
        maps = Maps(self.trainer.workload.dim)
        found = sorted(self._superseded(maps, keys), key=lambda each: (each.chunk.interval, each.table))
        if not found:
            return [], []
        by_chunk = {number: list(same) for number, same in groupby(found, key=lambda each: each.chunk.interval)}
        rows = [sum(int(each.dead.sum()) for each in same) for same in by_chunk.values()]
        taken = self._write(f"row1-{interval:04d}", rows, (self._joined(maps, same) for same in by_chunk.values()))
        for number, piece in zip(by_chunk, taken, strict=True):
            self._taken.setdefault(number, {})[interval] = piece
            self.ledger.add(piece.num_bytes)
        files = [self.folder / f"row1-{interval:04d}"]
        kept = [each for each in found if not each.dead.all()]
        left = self._write(
            f"row0-{interval:04d}",
            [int((~each.dead).sum()) for each in kept],
            (self._rows_of(maps, each.table, each.chunk.where, ~each.dead) for each in kept),
        )
        gone = [path for each in found if (path := self._release(each)) is not None]
        for each, piece in zip(kept, left, strict=True):
            self._keep(each.table, each.chunk.interval, maps.arrays(each.chunk.where)[0][~each.dead], piece)
        return [*files, *{piece.path for piece in left}], gone

    def _superseded(self, maps: Maps, keys: dict[int, Ids]) -> Iterator[_Taken]:
        """What passes all three filters; what passes two has been read."""
        for table, new in keys.items():
            self._changed[new] = True
            for chunk in self._lists.worth_reading(table, new):
                maps.check([chunk.where])
                self.ledger.read_back += chunk.where.num_bytes
                dead = self._changed[maps.arrays(chunk.where)[0]]
                if self._lists.worth_rewriting(int(dead.sum()), new):
                    yield _Taken(table, chunk, dead)
            self._changed[new] = False

    def _joined(self, maps: Maps, same: Sequence[_Taken]) -> list[Buffer]:
        """What is taken out of one interval's chunks, of all tables, as one piece: ids, then weights, then states."""
        parts = [self._rows_of(maps, each.table, each.chunk.where, each.dead) for each in same]
        return [part for section in zip(*parts, strict=True) for part in section]

    def _rows_of(self, maps: Maps, table: int, piece: Piece, which: npt.NDArray[np.bool_]) -> list[Buffer]:
        gather = self._gathers.setdefault(table, Gather())
        return gather.sections(torch.from_numpy(np.flatnonzero(which)), maps.views(piece))

    def _release(self, taken: _Taken) -> Path | None:
        """The old part of a chunk is of no use; its file, if that was the last one in it."""
        table, number, old = taken.table, taken.chunk.interval, taken.chunk.where
        self._lists.drop(table, number)
        del self._left[number][table]
        self.ledger.stored -= old.num_bytes
        self.ledger.dead += old.num_bytes
        self._users[old.path] -= 1
        if self._users[old.path]:
            return None
        self.ledger.dead -= old.path.stat().st_size
        return old.path

    def pieces(self, interval: int) -> list[Piece]:
        """Chunk by chunk, as a row may be in several of them, and the newest one has to stay."""
        found = []
        for number in range(self.base_of(interval) + 1, interval + 1):
            found += self._left[number].values()
            found += [piece for later, piece in self._taken.get(number, {}).items() if later > interval]
        return found


class IncrCpWithResets(IncrCp):
    resets = True


def resetting_every(chunks: int, name: str, folder: Path, trainer: Trainer, keep: frozenset[int]) -> IncrCp:
    """A new base after so many chunks: the authors ran 50 on hard disks, 100 on flash and on 3D XPoint."""
    scheme = IncrCpWithResets(name, folder, trainer, keep)
    scheme.reset_every = chunks
    return scheme
