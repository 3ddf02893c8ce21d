"""What becomes of each table of a marker in a model that differs: plain values, from ``resolve``.

How much a value of this model is one of the marker's.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TableSpec

EXACT = "exact"
"""Every kept value has the marker's bits, and means the same."""
BY_RULE = "by rule"
"""Kept by a rule that docs/evolve.md has: cast to another dtype, or read by another optimizer."""
FRESH = "fresh"
"""Exactly what the model had before the restore."""
DROPPED = "dropped"
"""Only the marker has it."""

_FROM_WEAK = (DROPPED, FRESH, BY_RULE, EXACT)


def weakest(labels: Iterable[str]) -> str:
    """The label that promises least."""
    return min(labels, key=_FROM_WEAK.index)


@dataclass(frozen=True, slots=True)
class TableOutcome:
    """What becomes of one table."""

    name: str
    """In this model; of a dropped table in the marker."""
    saved_name: str | None
    """In the marker; None: it was added."""
    index: int
    """In the schema of the new generation; of a dropped table that of its tombstone."""
    source: int | None
    """Index in the marker's schema, which is ``index``; None: it was added."""
    spec: TableSpec | None
    """As this model has it; None: it was dropped."""
    saved_spec: TableSpec | None
    """As the marker has it; None: it was added."""
    goes_on: bool
    """True if its rows stay deltas of the marker. Otherwise the new generation sends it whole, if it is not dropped."""
    rows_kept: RowMap
    """Which of the marker's rows are kept, and under which ids."""
    cols_kept: int
    """Columns [0, ``cols_kept``) of a kept row have the marker's values."""
    states: tuple[tuple[int, int | None], ...]
    """For each state of this model its position, and that in the marker; None: it stays as the model has made it."""
    weights_label: str
    """Of the kept weights: ``exact``, ``by rule``, ``fresh`` if none is kept, ``dropped``."""
    state_labels: tuple[str, ...]
    """Of the kept values of each state of this model, likewise."""
    keeps_iteration: bool
    """True if the optimizer's iteration is the marker's: the optimizer is the same."""

    @property
    def label(self) -> str:
        """The weakest of its labels."""
        return weakest((self.weights_label, *self.state_labels))

    @property
    def is_dropped(self) -> bool:
        """True if this model has it no longer."""
        return self.spec is None

    @property
    def keeps_all_rows(self) -> bool:
        """True if each row of the marker keeps its id, and there is no other one."""
        old, new = self.saved_spec, self.spec
        if old is None or new is None:
            return False
        return old.rows == new.rows == self.rows_kept.count and self.rows_kept.is_identity

    @property
    def rows_fresh(self) -> int:
        """Rows of this model that no row of the marker becomes."""
        return self.spec.rows - self.rows_kept.count if self.spec is not None else 0

    @property
    def rows_dropped(self) -> int:
        """Rows of the marker that are not kept."""
        return self.saved_spec.rows - self.rows_kept.count if self.saved_spec is not None else 0

    @property
    def bytes_kept(self) -> int:
        """Bytes of this model's values that come from the marker, states included."""
        if self.spec is None:
            return 0
        width = self.cols_kept * DTYPE_BYTES[self.spec.dtype]
        for position, source in self.states:
            state = self.spec.states[position]
            if source is not None:
                width += DTYPE_BYTES[state.dtype] * (1 if state.per_row else self.cols_kept)
        return self.rows_kept.count * width

    @property
    def bytes_fresh(self) -> int:
        """Bytes of this model's values that stay as the model has made them."""
        return table_bytes(self.spec) - self.bytes_kept

    @property
    def bytes_dropped(self) -> int:
        """Bytes of the marker's values that come to no place of this model."""
        if self.saved_spec is None:
            return 0
        width = self.cols_kept * DTYPE_BYTES[self.saved_spec.dtype]
        for _, source in self.states:
            if source is not None:
                state = self.saved_spec.states[source]
                width += DTYPE_BYTES[state.dtype] * (1 if state.per_row else self.cols_kept)
        return table_bytes(self.saved_spec) - self.rows_kept.count * width


def table_bytes(spec: TableSpec | None) -> int:
    """Bytes of all values of a table, states included."""
    if spec is None or spec.dropped:
        return 0
    states = (DTYPE_BYTES[state.dtype] * (1 if state.per_row else spec.dim) for state in spec.states)
    return spec.rows * (DTYPE_BYTES[spec.dtype] * spec.dim + sum(states))


@dataclass(frozen=True, slots=True)
class Evolution:
    """How the tables of a marker become those of this model."""

    saved: Schema
    """The marker's."""
    schema: Schema
    """Of the new generation: the marker's indices, tombstones for dropped tables, added ones last. Tables that go on
    have their ids, all others None."""
    tables: tuple[TableOutcome, ...]
    """Of all tables of this model by index, then of those that were dropped."""
    swept: tuple[int, ...]
    """Indices, sorted, of which older rows count no longer: changed, added and dropped tables."""
    changes: Changes
    """What was declared."""

    @property
    def is_plain(self) -> bool:
        """True if the tables are the marker's, names included."""
        return not self.swept and all(table.name == table.saved_name for table in self.tables)

    def of(self, index: int) -> TableOutcome:
        """Return what becomes of the table at an index of :attr:`schema`."""
        return next(table for table in self.tables if table.index == index)
