"""Types that all packages share, and how values are grouped. Plain values: no torch, no I/O."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.util.marker_names import is_marker_name

K = TypeVar("K")
V = TypeVar("V")
MARKER_FORMS = "GENERATION:MARKER, latest, best:auc:max, or a name"
"""The forms of a marker's name, for help texts and errors."""


class MarkerId(NamedTuple):
    """Name of one marker: the generation that committed it, and its number on the lineage.

    It is a tuple because it is created, hashed and compared tens of thousands of times when the log of an old job is
    read.
    """

    generation: int
    """Run of the trainer that committed it, counted from 1 on each log."""
    marker: int
    """Number of the marker, 1 for the first of a new job. After a restore, counting continues from the restored one."""

    def __str__(self) -> str:
        return f"{self.generation}:{self.marker}"

    @classmethod
    def of(cls, marker: MarkerId | str | tuple[int, int] | None) -> MarkerId | None:
        """Convert any form in which a user names a marker. None stays None."""
        if isinstance(marker, str):
            return cls.parse(marker)
        if isinstance(marker, tuple) and len(marker) == 2 and all(type(number) is int for number in marker):
            return cls(*marker)
        if marker is not None:
            raise ConfigError(f"{marker!r} is not a marker", hint='write it as GENERATION:MARKER, for example "2:17"')
        return None

    @classmethod
    def parse(cls, text: str) -> MarkerId:
        """Read ``GENERATION:MARKER``, for example ``2:17``."""
        match = re.fullmatch(r"([0-9]{1,9}):([0-9]{1,18})", text)
        if match is None:
            raise ConfigError(f"'{text}' is not a marker", hint="write it as GENERATION:MARKER, for example 2:17")
        return cls(int(match[1]), int(match[2]))

    @staticmethod
    def checked_name(text: str) -> str:
        """Return ``text`` if it has one of the forms that name a marker; only the log knows which marker it means.

        Raises:
            ConfigError: it has none of them.
        """
        if not isinstance(text, str):
            raise ConfigError(f'marker must be a string such as "2:17", got {text!r}', hint='pass "2:17" or "latest"')
        if not is_marker_name(text):
            raise ConfigError(f"{text!r:.80} is not a marker", hint=f"name it as {MARKER_FORMS}")
        return text


@dataclass(frozen=True, slots=True)
class StateSpec:
    """One fused optimizer state of a table."""

    name: str
    dtype: str
    per_row: bool
    """True if there is one value per row. False if there is one value per weight, shape (rows, dim)."""


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One logical embedding table, whatever its plan."""

    name: str
    """Path of the sharded module and name of the table, ``sparse.ebc.t_user``: unique in the model."""
    rows: int
    dim: int
    dtype: str
    optimizer: str
    states: tuple[StateSpec, ...]
    id: int | None = field(default=None, compare=False)
    """Identifies the table, below 2^53, even if it is renamed. None until a generation was claimed for it, and in logs
    of format version 1. The comparison of two specs ignores it."""

    def __hash__(self) -> int:
        # Hash the name alone: for each frame that is read, its layout is looked up by its table.
        return hash(self.name)

    @property
    def has_row_state(self) -> bool:
        """True if some state has one value per row, and so depends on the column split."""
        return any(state.per_row for state in self.states)

    @property
    def dropped(self) -> bool:
        """True if it is a tombstone: it keeps the index of a table that the model no longer has."""
        return not self.name


TOMBSTONE = TableSpec(name="", rows=0, dim=0, dtype="", optimizer="", states=())
"""Entry of a schema at the index of a dropped table, so that the indices of all others stay."""


class RowRange(NamedTuple):
    """Rows of a whole table."""

    table: str
    begin: int
    end: int
    """The row after the last one."""


@dataclass(frozen=True, slots=True, order=True)
class TableShard:
    """The part of one table that one rank holds: rows [row0, row0+rows), columns [col0, col0+cols)."""

    table: int
    """Index of the table in the job's schema."""
    row0: int
    rows: int
    col0: int
    cols: int


@dataclass(frozen=True, slots=True)
class RankEnd:
    """Position of one rank's stream at a marker."""

    rank: int
    partition: int
    begin: int
    """Log offset of this rank's HELLO of this generation."""
    end: int
    """Log offset just past this rank's MARK."""
    frames: int
    """Number of frames from HELLO to MARK, including both: the MARK has seq ``frames - 1``."""
    chain: int
    """Header checksum of the MARK."""
    rows: int
    """Row records since HELLO."""
    num_bytes: int
    """Bytes of frames since HELLO."""


class LogSpan(NamedTuple):
    """A contiguous piece of one data partition, offsets [begin, end)."""

    generation: int
    partition: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class MarkPlace:
    """Position of a MARK that the log has acknowledged."""

    generation: int
    partition: int
    end: int
    """Log offset just past it."""
    chain: int
    """Header checksum of the last frame."""


@dataclass(frozen=True, slots=True)
class Committed:
    """Result of the future of a marker."""

    generation: int
    """Generation that committed the marker: this run's own."""
    marker: int
    """Number of the marker."""
    step: int
    """Steps of the job when it was cut, including those before a restored marker."""

    @property
    def id(self) -> MarkerId:
        """The marker's name, ``GENERATION:MARKER``."""
        return MarkerId(self.generation, self.marker)


@dataclass(frozen=True, slots=True)
class MarkerReport:
    """Report of a committed marker for ``on_commit``."""

    generation: int
    """Generation that committed the marker."""
    marker: int
    """Number of the marker."""
    step: int
    """Steps of the job when it was cut."""
    time_s: float
    """Time of its commit, Unix time of rank 0."""
    meta: dict[str, str | int | float]
    """All metadata passed to ``mark(meta=...)``."""
    rows: int
    """Row records that all ranks have sent for this marker alone."""
    num_bytes: int
    """Bytes of the frames of these."""
    dense_bytes: int
    """Bytes of its dense state."""

    @property
    def id(self) -> MarkerId:
        """The marker's name, ``GENERATION:MARKER``."""
        return MarkerId(self.generation, self.marker)


@dataclass(frozen=True, slots=True)
class Restored:
    """Result of a restore."""

    generation: int
    """Generation of the marker that was restored (this job's own generation is higher)."""
    marker: int
    """Number of the marker that was restored."""
    step: int
    """Steps that the job had made at that marker. Training continues with the next one."""
    world: int
    """Number of ranks of the job that wrote the marker."""
    rows: int
    """Row records that this rank applied."""
    skipped: tuple[str, ...] = ()
    """Newer markers that could not be used, each with its reason."""
    source: str = "log"
    """Source of the rows: ``head 1:40``, ``store 1:40 + log``, ``log``. With two tiers it starts with the name of one:
    ``inner: log``, ``inner + outer: log``, ``outer: store 1:40 + log``."""
    proved: float = 0.0
    """Share of all rows that were compared with proofs of markers. Weights and states count separately. Rows of tables
    that have changed, or were added, count as not compared."""
    evolved: Any = None
    """The ``EvolutionReport`` of a model that has changed: state that was kept, and state that stayed as the model
    created it. Its ``lines()`` are for people. None if the model is that of the marker."""
    origin: str | None = None
    """URI of the other job whose marker it is, after a warm start. None if the marker is this job's."""
    replicas: str = "same"
    """``rank0`` if dense replicas might differ when the marker was cut, and all ranks have rank 0's now
    (``StreamConfig.replicas``)."""

    @property
    def id(self) -> MarkerId:
        """The marker's name, ``GENERATION:MARKER``."""
        return MarkerId(self.generation, self.marker)


def plain_name(name: str) -> str:
    """Return the name of a parameter or table without the parts ``_orig_mod`` that ``torch.compile`` adds."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key. Keys and values keep their order."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found
