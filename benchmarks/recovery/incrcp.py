"""IncrCP's 2-D chunk list, written from what its paper says (PVLDB 18(4)); none of its code was used.

A chunk holds the rows of one interval. When a later interval t changes rows that an older chunk b holds too, those
rows are extracted from b into a chunk of their own, (b, t): the second dimension. Marker m then reads, of each b <= m,
the chunk and what was extracted from it behind m, and little that is superseded.

Extraction rewrites chunks, so three filters keep it from chunks where it gains little; what one interval extracts is
concatenated into one file, ordered by b, so that marker m reads a prefix of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from baselines import _Chain
from files import Buffer, Gather, Maps, Piece, publish
from workload import Ids


@dataclass
class _Chunk:
    """What is left of one interval's rows, and what was extracted from them."""

    rows: int
    """Of the interval."""
    piece: Piece
    ids: Ids
    """In memory, so that the filters read nothing."""
    extracted: dict[int, Piece]
    """By the interval that superseded them."""


class IncrCp(_Chain):
    """The list of chunks, and the files that concatenate what was extracted."""

    min_ratio = 0.02
    """Filter 2: an extraction takes more than this part of a chunk (the setting of the authors' runs)."""
    min_part = 1 / 64
    """Filter 3: of a chunk that has shrunk to less than this part, the rest costs about one more access."""
    resets = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._gather = Gather()
        self._chunks: dict[int, _Chunk] = {}
        self._since_base = 0

    def build(self, interval: int) -> None:
        if not interval:
            return self._first_base()
        if self.resets and self._new_base_pays():
            self._since_base = 0
            return self._live_base(interval)
        ids, parts = self._interval_parts(interval)
        rewritten = self._extract(interval, ids)
        (piece,) = self._write(f"chunk-{interval:04d}", [len(ids)], [parts])
        publish(self.folder, [piece.path, *rewritten])
        self._chunks[interval] = _Chunk(len(ids), piece, ids, {})
        self._since_base += piece.num_bytes
        return self.ledger.add(piece.num_bytes)

    def _new_base_pays(self) -> bool:
        """Whether the chunks since the base have taken as many bytes as a base does."""
        return self._since_base >= self.bases[max(self.bases)].num_bytes

    def _extract(self, interval: int, ids: Ids) -> list[Path]:
        """Move what ``interval`` supersedes out of the chunks since the base; the files that this has written."""
        changed = np.zeros(self.trainer.workload.rows, np.bool_)
        changed[ids] = True
        found = [
            (chunk, dead)
            for number, chunk in self._chunks.items()
            if number > max(self.bases) and (dead := self._superseded(chunk, changed)) is not None
        ]
        if not found:
            return []
        maps = Maps(self.trainer.workload.dim)
        maps.check([chunk.piece for chunk, _ in found])
        rows = [int(dead.sum()) for _, dead in found]
        pieces = self._write(
            f"extracted-{interval:04d}", rows, (self._rows_of(maps, chunk, dead) for chunk, dead in found)
        )
        for (chunk, dead), piece in zip(found, pieces, strict=True):
            old = chunk.piece
            left = self._rows_of(maps, chunk, ~dead)
            chunk.ids = chunk.ids[~dead]
            (chunk.piece,) = self._write(old.path.name, [len(chunk.ids)], [left])
            chunk.extracted[interval] = piece
            self.ledger.read_back += old.num_bytes
            self.ledger.stored -= old.num_bytes
            self.ledger.add(chunk.piece.num_bytes + piece.num_bytes)
        return [pieces[0].path, *(chunk.piece.path for chunk, _ in found)]

    def _rows_of(self, maps: Maps, chunk: _Chunk, which: npt.NDArray[np.bool_]) -> Sequence[Buffer]:
        return self._gather.sections(torch.from_numpy(np.flatnonzero(which)), maps.views(chunk.piece))

    def _superseded(self, chunk: _Chunk, changed: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_] | None:
        """Which rows of a chunk to extract; None where a filter says that it is not worth it."""
        if len(chunk.ids) < self.min_part * chunk.rows:
            return None
        dead = changed[chunk.ids]
        count = int(dead.sum())
        if not count:  # filter 1: the chunk has nothing in common with the interval
            return None
        return dead if count > self.min_ratio * len(chunk.ids) else None

    def pieces(self, interval: int) -> list[Piece]:
        """Chunk by chunk, as a row may be in several of them, and the newest one has to stay."""
        found = []
        for number in range(self.base_of(interval) + 1, interval + 1):
            chunk = self._chunks[number]
            if chunk.piece.rows:
                found.append(chunk.piece)
            found += [piece for later, piece in chunk.extracted.items() if later > interval]
        return found


class IncrCpWithResets(IncrCp):
    resets = True
