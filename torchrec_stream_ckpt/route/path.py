"""The markers that lead to one, and where a reader meets each."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.types import MarkerId, RankEnd


@dataclass(frozen=True, slots=True)
class Path:
    """Committed markers that lead to one, oldest first. A marker's *place* is its index."""

    chain: tuple[MarkerId, ...] = ()
    ends: tuple[Sequence[RankEnd], ...] = ()
    """For each marker, where its ranks stand."""
    ids: Mapping[int, tuple[int | None, ...]] = field(default_factory=dict)
    """Generation -> ids of its tables, by their index."""
    sections: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Generation -> how many sections its tables have, weights and states, by their index."""

    @classmethod
    def to(cls, lineage: Lineage, marker: MarkerId, since: MarkerId | None = None) -> Path:
        """All of them, or those behind ``since``, which is one of them."""
        commits = lineage.chain(marker)
        if since is not None:
            commits = commits[[commit.id for commit in commits].index(since) + 1 :]
        chain = tuple(commit.id for commit in commits)
        ends = tuple(commit.ranks for commit in commits)
        schemas = {each.generation: lineage.claims[each.generation].schema for each in chain}
        sections = {each: _sections(schema) for each, schema in schemas.items()}
        return cls(chain, ends, {each: _ids(schema) for each, schema in schemas.items()}, sections)

    @classmethod
    def at(cls, lineage: Lineage, marker: MarkerId) -> Path:
        """The marker alone: for a reader that compares nothing with what older ones proved."""
        schema, generation = lineage.claims[marker.generation].schema, marker.generation
        ends = lineage.commits[marker].ranks
        return cls((marker,), (ends,), {generation: _ids(schema)}, {generation: _sections(schema)})

    def then(self, since: MarkerId, tail: Path) -> Path:
        """The path up to ``since``, and what follows on it."""
        place = self.place(since) + 1
        ids, sections = {**self.ids, **tail.ids}, {**self.sections, **tail.sections}
        return Path(self.chain[:place] + tail.chain, self.ends[:place] + tail.ends, ids, sections)

    def place(self, marker: MarkerId) -> int:
        """The place of ``marker``, or of the first one that holds what was sent for it."""
        return bisect_left(self.chain, marker)

    def place_of(self, mark: Header) -> int | None:
        """That of a MARK; None where its marker was not committed, or leads elsewhere."""
        marker = MarkerId(mark.generation, mark.marker)
        place = self.place(marker)
        if place == len(self.chain) or self.chain[place] != marker or mark.rank >= len(self.ends[place]):
            return None
        return place if mark.header_crc == self.ends[place][mark.rank].chain else None

    def id(self, table: int) -> int | None:
        """Of a table, by its index at the last marker."""
        return self.ids[self.chain[-1].generation][table]

    def same_table(self, table: int) -> npt.NDArray[np.bool_]:
        """One flag a place: whether the table of this index has the id that it has at the last marker."""
        last = self.id(table)
        same = {each: last is not None and ids[table : table + 1] == (last,) for each, ids in self.ids.items()}
        return np.array([same[each.generation] for each in self.chain])


def _ids(schema: Schema) -> tuple[int | None, ...]:
    return tuple(table.id for table in schema.tables)


def _sections(schema: Schema) -> tuple[int, ...]:
    return tuple(1 + len(table.states) for table in schema.tables)
