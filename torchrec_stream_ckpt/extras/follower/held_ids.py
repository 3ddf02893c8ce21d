"""Raw ids that a sink holds: which rows an update writes under which raw ids, and which raw ids it deletes. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.extras.follower.updates import Changed
from torchrec_stream_ckpt.format.rows import NO_ID, distinct
from torchrec_stream_ckpt.util.types import TableSpec

if TYPE_CHECKING:
    from torchrec_stream_ckpt.extras.interchange.id_map import IdChanges, RawIdMap

Ids = npt.NDArray[np.int64]


def _none() -> Ids:
    return np.empty(0, np.int64)


@dataclass(slots=True)
class HeldIds:
    """Raw ids that a sink holds for the rows of one table."""

    map: RawIdMap
    """Raw ids of the newest marker that an update to it has begun for."""
    doubtful: Ids = field(default_factory=_none)
    """Rows that the sink may hold under the raw id of another marker, because updates have not ended."""
    gone: Ids = field(default_factory=_none)
    """Raw ids that the map has lost in updates that have not ended: the sink may still hold them."""

    def begin(self, table: TableSpec, changes: IdChanges | None) -> IdUpdate:
        """Begin an update to the next marker.

        Args:
            table: The table.
            changes: Changes of the map; None if all rows are loaded.
        """
        if changes is not None:
            has_row = self.map.held_rows(changes.raw_ids) >= 0
            self.gone = np.union1d(self.gone, changes.raw_ids[has_row & (changes.rows_of_ids < 0)])
            changed = changes.rows[self.map.owners_of(changes.rows) != changes.ids_of_rows]
            self.doubtful = np.union1d(self.doubtful, changed)
            self.map.apply(changes)
            self.gone = self.gone[self.map.held_rows(self.gone) < 0]
        return IdUpdate(table, self.map, self.gone, self.doubtful)


class IdUpdate:
    """One table's part of an update: from the raw ids that a sink holds to those of a marker.

    Each row is written once, in its newest version: an older one may be of the raw id that had the row before. Costs
    what has changed, whatever the size of the table.

    Args:
        table: The table. TorchRec cuts it by rows alone, so all columns of a row arrive together.
        ids: Raw ids at the marker.
        gone: Raw ids that the sink holds and the marker has not.
        due: Rows that the sink may lack, or hold under other raw ids.
    """

    def __init__(self, table: TableSpec, ids: RawIdMap, gone: Ids, due: Ids) -> None:
        self._table = table
        self._ids = ids
        self.gone = gone
        self._previewed = [due[ids.owners_of(due) != NO_ID]]
        self._rows = _none()
        """Rows that are handed out or due, in order."""
        self._left = self._rows
        """Number of times that each of them will still be handed out."""
        self._due = np.empty(0, np.bool_)
        """True for those that the sink lacks."""
        self._more: list[Ids] = []
        """Rows that were handed out more often than it was previewed."""

    def strays(self, raw_ids: Ids) -> Ids:
        """Return those of some raw ids that the marker does not have."""
        return raw_ids[self._ids.held_rows(raw_ids) < 0]

    def preview(self, changed: Changed) -> None:
        """Count rows that will be handed out."""
        self._previewed.append(distinct(changed.ids))

    def end_preview(self) -> None:
        """Note that all rows were previewed. Call it before the first :meth:`take`."""
        due, *handed_out = self._previewed
        self._rows = distinct(np.concatenate(self._previewed))
        self._left = np.zeros(len(self._rows), np.int64)
        for rows in handed_out:
            self._left[np.searchsorted(self._rows, rows)] += 1
        self._due = np.isin(self._rows, due)
        self._previewed = []

    def take(self, changed: Changed) -> Changed:
        """Return rows to be written now, by raw id, of the rows handed out."""
        assert changed.weights.shape[1] == self._table.dim
        _, last = np.unique(changed.ids[::-1], return_index=True)
        places = len(changed.ids) - 1 - last
        live = self._ids.owners_of(changed.ids[places]) != NO_ID
        places = places[live]
        rows = changed.ids[places]
        # A row that comes more often than it did before is read again: a store may have yielded all rows again.
        at = np.searchsorted(self._rows, rows)
        known = np.append(self._rows, -1)[at] == rows
        self._more.append(rows[~known])
        places, at = places[known], at[known]
        self._left[at] -= 1
        now = self._left[at] == 0
        self._due[at] = ~now
        return self._by_raw_id(changed, places[now])

    def take_newest(self, changed: Changed) -> Changed:
        """Return rows that are handed out once, by raw id."""
        return self._by_raw_id(changed, np.flatnonzero(self._ids.owners_of(changed.ids) != NO_ID))

    def lacking(self) -> Ids:
        """Return the rows that were not handed out in their newest version, and that the sink lacks."""
        return distinct(np.concatenate([self._rows[self._due], *self._more]))

    def _by_raw_id(self, changed: Changed, places: Ids) -> Changed:
        raw_ids = self._ids.owners_of(changed.ids[places])
        return replace(changed, ids=raw_ids, weights=changed.weights[places], states=())

    def raw_ids_of(self, rows: Ids) -> Ids:
        """Return the raw id of each row at the marker."""
        return self._ids.owners_of(rows)

    def are_used(self, blocks: Ids, block_rows: int) -> npt.NDArray[np.bool_]:
        """Return which blocks of rows have a raw id for each of their rows."""
        rows = blocks[:, None] * block_rows + np.arange(block_rows)
        live = self._ids.owners_of(np.minimum(rows, self._table.rows - 1)) != NO_ID
        used: npt.NDArray[np.bool_] = np.logical_and.reduce(live, axis=1)
        return used
