"""Outcomes of a marker's tables in a changed model: plain values, from ``resolve``, with labels for exactness."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.format.frame import DTYPE_BYTES
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

EXACT = "exact"
"""Label: every kept value has the marker's bits and the same meaning."""
BY_RULE = "by rule"
"""Label: values are kept by a rule in docs/evolve.md: cast to another dtype, or used by another optimizer."""
FRESH = "fresh"
"""Label: values are exactly those of the model before the restore."""
DROPPED = "dropped"
"""Label: only the marker has the values."""

_FROM_WEAK = (DROPPED, FRESH, BY_RULE, EXACT)


def weakest(labels: Iterable[str]) -> str:
    """Return the label with the weakest guarantee."""
    return min(labels, key=_FROM_WEAK.index)


@dataclass(frozen=True, slots=True)
class TableOutcome:
    """Outcome of one table."""

    name: str
    """Name in this model; for a dropped table, name in the marker."""
    saved_name: str | None
    """Name in the marker; None if it was added."""
    index: int
    """Index in the schema of the new generation; for a dropped table, index of its tombstone."""
    source: int | None
    """Index in the marker's schema, which equals ``index``; None if it was added."""
    spec: TableSpec | None
    """Table in this model; None if it was dropped."""
    saved_spec: TableSpec | None
    """Table in the marker; None if it was added."""
    weights_label: str
    """Label of the kept weights: ``exact``, ``by rule``, ``fresh`` if none is kept, or ``dropped``."""
    goes_on: bool = False
    """True if its rows stay deltas of the marker. Otherwise the new generation sends all rows, unless it is dropped."""
    rows_kept: RowMap = field(default_factory=RowMap)
    """Rows of the marker that are kept, with their ids."""
    cols_kept: int = 0
    """Columns [0, ``cols_kept``) of a kept row have the marker's values."""
    states: tuple[tuple[int, int | None], ...] = ()
    """For each state of this model, its position, and its position in the marker; None if it stays as initialized."""
    state_labels: tuple[str, ...] = ()
    """Label of the kept values of each state of this model, likewise."""
    keeps_iteration: bool = False
    """True if the optimizer is the same, so that its iteration count is that of the marker."""
    reassigned: bool = False
    """True if its raw ids get new rows."""
    raw_ids: tuple[int, int] | None = None
    """(if so) Number of raw ids that are kept and dropped; None if that depends on a job's ranks."""

    @property
    def label(self) -> str:
        """The weakest of its labels."""
        return weakest((self.weights_label, *self.state_labels))

    @property
    def is_dropped(self) -> bool:
        """True if this model does not have the table any more."""
        return self.spec is None

    @property
    def keeps_all_rows(self) -> bool:
        """True if each row of the marker keeps its id, and there are no other rows."""
        old, new = self.saved_spec, self.spec
        if old is None or new is None:
            return False
        return old.rows == new.rows == self.rows_kept.count and self.rows_kept.is_identity

    @property
    def rows_fresh(self) -> int:
        """Number of rows of this model that come from no row of the marker."""
        return self.spec.rows - self.rows_kept.count if self.spec is not None else 0

    @property
    def rows_dropped(self) -> int:
        """Number of rows of the marker that are not kept."""
        return self.saved_spec.rows - self.rows_kept.sources if self.saved_spec is not None else 0

    @property
    def bytes_kept(self) -> int:
        """Bytes of this model's values that come from the marker, including states."""
        if self.spec is None:
            return 0
        states = [self.spec.states[position] for position, source in self.states if source is not None]
        return self.rows_kept.count * _row_bytes(self.spec, self.cols_kept, states)

    @property
    def bytes_fresh(self) -> int:
        """Bytes of this model's values that stay as the model initialized them."""
        return table_bytes(self.spec) - self.bytes_kept

    @property
    def bytes_dropped(self) -> int:
        """Bytes of the marker's values that are not used in this model."""
        if self.saved_spec is None:
            return 0
        states = [self.saved_spec.states[source] for _, source in self.states if source is not None]
        kept = self.rows_kept.sources * _row_bytes(self.saved_spec, self.cols_kept, states)
        return table_bytes(self.saved_spec) - kept


def table_bytes(spec: TableSpec | None) -> int:
    """Return the bytes of all values of a table, including states."""
    if spec is None or spec.dropped:
        return 0
    return spec.rows * _row_bytes(spec, spec.dim, spec.states)


def _row_bytes(spec: TableSpec, cols: int, states: Iterable[StateSpec]) -> int:
    """Return the bytes of some columns of a row of a table, and of some of its states."""
    return DTYPE_BYTES[spec.dtype] * cols + sum(
        DTYPE_BYTES[state.dtype] * (1 if state.per_row else cols) for state in states
    )


@dataclass(frozen=True, slots=True)
class Evolution:
    """Outcomes of all tables of a marker in this model."""

    saved: Schema
    """Schema of the marker."""
    schema: Schema
    """Schema of the new generation, with the marker's indices, tombstones for dropped tables, and added tables last.

    Tables that continue have their ids; all others have None.
    """
    tables: tuple[TableOutcome, ...]
    """Outcomes of all tables of this model by index, followed by those of dropped tables."""
    swept: tuple[int, ...]
    """Sorted indices of tables whose older rows no longer count: changed, added and dropped ones."""
    changes: Changes
    """The declared changes."""

    @property
    def is_plain(self) -> bool:
        """True if the tables are those of the marker, including names."""
        return not self.swept and all(table.name == table.saved_name for table in self.tables)

    def of(self, index: int) -> TableOutcome:
        """Return the outcome of the table at an index of :attr:`schema`."""
        return next(table for table in self.tables if table.index == index)
