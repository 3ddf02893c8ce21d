"""Views that map rows and columns of a marker to live shards of tables with another shape."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.evolve.table_outcome import Evolution, TableOutcome
from torchrec_stream_ckpt.util.types import TableShard

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class View:
    """Part of a live shard that takes rows of a marker."""

    shard: TableShard
    """The part in the marker's numbering: rows by their old ids, and the kept columns, the first of the live shard."""
    states: tuple[int | None, ...]
    """For each state of the marker, its position among the live states; None if it is not kept."""
    numbers: Ints | None = field(default=None, compare=False)
    """For each row of ``shard``, its row in the live shard, -1 if it is not kept. None for the shard's first rows."""
    dtype: str | None = None
    """Dtype of the marker's weights; None if the live weights have the same."""


def view_of(outcome: TableOutcome, live: TableShard) -> View | None:
    """Return the view of a live shard that takes rows of the marker. Returns None if it takes no rows.

    Args:
        outcome: Outcome of the shard's table.
        live: The live shard.
    """
    cols = min(live.col0 + live.cols, outcome.cols_kept) - live.col0
    old, new = outcome.saved_spec, outcome.spec
    if outcome.source is None or old is None or new is None or cols <= 0:
        return None
    numbers = None
    if outcome.rows_kept.is_identity:
        first, rows = live.row0, min(live.row0 + live.rows, outcome.rows_kept.count) - live.row0
    else:
        kept, ids = outcome.rows_kept.within(live.row0, live.row0 + live.rows)
        first, rows = (int(kept[0]), int(kept[-1] - kept[0]) + 1) if len(kept) else (0, 0)
        numbers = np.full(rows, -1, np.int64)
        numbers[kept - first] = ids - live.row0
    if rows <= 0:
        return None
    here = {source: position for position, source in outcome.states if source is not None}
    states = tuple(here.get(position) for position in range(len(old.states)))
    dtype = old.dtype if old.dtype != new.dtype else None
    return View(TableShard(outcome.source, first, rows, live.col0, cols), states, numbers, dtype)


@dataclass(frozen=True, slots=True)
class Views:
    """Views of the live shards of one rank onto a marker of another model."""

    evolution: Evolution
    outcomes: Mapping[int, TableOutcome]
    """Outcomes of live tables, by index."""
    changed: Mapping[TableShard, View]
    """Views of tables that changed, by live shard; the indices are those of the new schema."""

    @classmethod
    def make(cls, evolution: Evolution, shards: Iterable[TableShard]) -> Views:
        """Make the views of some live shards, which have the indices of the new schema."""
        outcomes = {outcome.index: outcome for outcome in evolution.tables if not outcome.is_dropped}
        changed = {
            shard: view
            for shard in shards
            if not outcomes[shard.table].goes_on and (view := view_of(outcomes[shard.table], shard)) is not None
        }
        assert len({view.shard for view in changed.values()}) == len(changed), "two shards of a rank share a view"
        return cls(evolution, outcomes, changed)

    def target(self, live: TableShard) -> TableShard | None:
        """Part of a live shard, in the marker's numbering, that comes from the marker. None if no part does."""
        if self.outcomes[live.table].goes_on:
            return live
        view = self.changed.get(live)
        return view.shard if view is not None else None
