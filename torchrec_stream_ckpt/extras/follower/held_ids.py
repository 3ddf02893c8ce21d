"""Raw ids that a sink holds: which rows an update writes under which raw ids, and which raw ids it deletes. No I/O."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.extras.follower.updates import Changed
from torchrec_stream_ckpt.format.rows import NO_ID
from torchrec_stream_ckpt.util.types import TableSpec

Ids = npt.NDArray[np.int64]


@dataclass(slots=True)
class HeldIds:
    """Raw ids that a sink holds for the rows of one table."""

    of_rows: Ids
    """Raw id of each row at the marker that the sink holds."""
    doubtful: npt.NDArray[np.bool_]
    """Rows that the sink may hold under the raw id of another marker, because an update broke off."""

    @classmethod
    def at_marker(cls, of_rows: Ids) -> HeldIds:
        return cls(of_rows, np.zeros(len(of_rows), np.bool_))

    def doubt(self, other: Ids) -> None:
        """Note that an update to a marker with other raw ids begins."""
        self.doubtful |= self.of_rows != other


class IdUpdate:
    """One table's part of an update: from the raw ids that a sink holds to those of a marker.

    Each row is written once, in its newest version: an older one may be of the raw id that had the row before.

    Args:
        table: The table. TorchRec cuts it by rows alone, so all columns of a row arrive together.
        raw_ids: Raw id of each row at the marker.
        held: Raw ids that the sink holds; None if all rows are loaded.
    """

    def __init__(self, table: TableSpec, raw_ids: Ids, held: HeldIds | None) -> None:
        self._table = table
        self._raw_ids = raw_ids
        self._sorted = np.sort(raw_ids[raw_ids != NO_ID])
        self._left = np.zeros(len(raw_ids), np.int32)
        """Number of times that each row will still be handed out."""
        live = raw_ids != NO_ID
        before = held.of_rows if held is not None else raw_ids
        self._due = live & (before != raw_ids)
        """Rows that the sink lacks."""
        if held is not None:
            self._due |= live & held.doubtful
        self.gone: Ids = self.strays(before[before != NO_ID])
        """Raw ids that the sink holds and the marker has not."""

    def strays(self, raw_ids: Ids) -> Ids:
        """Return those of some raw ids that the marker does not have."""
        if not len(self._sorted):
            return raw_ids
        places = np.minimum(np.searchsorted(self._sorted, raw_ids), len(self._sorted) - 1)
        kept: Ids = raw_ids[self._sorted[places] != raw_ids]
        return kept

    def preview(self, changed: Changed) -> None:
        """Count rows that will be handed out."""
        self._left[np.unique(changed.ids)] += 1

    def take(self, changed: Changed) -> Changed:
        """Return those of the rows handed out that are to be written now, by raw id."""
        assert changed.weights.shape[1] == self._table.dim
        _, last = np.unique(changed.ids[::-1], return_index=True)
        places = len(changed.ids) - 1 - last
        rows = changed.ids[places]
        self._left[rows] -= 1
        live, left = self._raw_ids[rows] != NO_ID, self._left[rows]
        # A row that comes more often than it did before is read again: a store may have yielded all rows again.
        self._due[rows[live & (left != 0)]] = True
        now = live & (left == 0)
        self._due[rows[now]] = False
        return self._by_raw_id(changed, places[now])

    def take_newest(self, changed: Changed) -> Changed:
        """Return rows that are handed out once, by raw id."""
        live = np.flatnonzero(self._raw_ids[changed.ids] != NO_ID)
        self._due[changed.ids[live]] = False
        return self._by_raw_id(changed, live)

    def lacking(self) -> Ids:
        """Return the rows that were not handed out in their newest version, and that the sink lacks."""
        return np.flatnonzero(self._due)

    def _by_raw_id(self, changed: Changed, places: Ids) -> Changed:
        return replace(changed, ids=self._raw_ids[changed.ids[places]], weights=changed.weights[places], states=())

    def raw_ids_of(self, rows: Ids) -> Ids:
        """Return the raw id of each row at the marker."""
        return self._raw_ids[rows]

    def are_used(self, blocks: Ids, block_rows: int) -> npt.NDArray[np.bool_]:
        """Return which blocks of rows have a raw id for each of their rows."""
        live = np.concatenate([[0], np.cumsum(self._raw_ids != NO_ID)])
        first = blocks * block_rows
        end = np.minimum(first + block_rows, len(self._raw_ids))
        used: npt.NDArray[np.bool_] = live[end] - live[first] == end - first
        return used
