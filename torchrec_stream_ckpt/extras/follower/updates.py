"""Updates that a follower hands out, each with the rows that it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.rows import Array, IdEvents
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import WeightProof
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

_MARKER = re.compile(r"[0-9]+:[0-9]+")
"""Form of COMMIT.dense in a serving stream."""


class UpdateKind(StrEnum):
    """Effect of an update on the tables."""

    LOAD = "load"
    """Every row of a marker. It is the first update, or follows if the changes since the last marker are gone or on an
    abandoned branch, or if the model has changed: the update's schema then has other tables."""
    MARKER = "marker"
    """Changes since the previous marker: after it the tables are those of the marker, bit for bit. In ``rows`` mode,
    newer rows may already have arrived: ``Update.is_provisional`` reports that."""
    ROWS = "rows"
    """(``rows`` mode) Rows that no marker has yet. Some of them, or none, may never be in one."""
    ROLLBACK = "rollback"
    """(``rows`` mode) The trainer that sent such rows is gone: they get their values at the newest marker again."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows of one table, or of a slice of its columns. The arrays are valid until the next ones are requested."""

    table: TableSpec
    col0: int
    """First column of ``weights`` in the table."""
    ids: npt.NDArray[np.int64]
    """Rows of the logical table, shape (n,)."""
    weights: Array
    """Shape (n, cols). bfloat16 is represented by its bits, as uint16."""
    states: tuple[Array, ...] = ()
    """(``states=True``) In the order of ``table.states``: (n,) or (n, cols)."""


@dataclass(frozen=True, slots=True)
class ChangedIds:
    """Id events of one frame: which raw ids have got rows of a table, and which have lost them."""

    table: TableSpec
    rank: int
    """Rank that holds these rows: the number of their shard."""
    seq: int
    """Number of the frame in the stream of the rank."""
    events: IdEvents


@dataclass(frozen=True, slots=True)
class Update:
    """One step of a replica. Apply all of :meth:`changes` before readers see any of it."""

    kind: UpdateKind
    commit: Commit
    """The newest marker that is wholly applied after this update."""
    schema: Schema
    why: str
    """(LOAD, ROLLBACK) The reason, for people; otherwise empty."""
    changes: Callable[[], Iterator[Changed]]
    """Changed rows, in order: if a row occurs more than once, the last one counts. Read them while the update is the
    newest."""
    dense: Callable[[], Path]
    """Returns a folder with the marker's dense state, a DCP checkpoint, digests compared. Raises as a restore would."""
    proof: Callable[[], WeightProof | None] = lambda: None
    """(LOAD, MARKER) Returns the marker's proof of its weights; None if it has none. Call it while the update is
    the newest. Raises CorruptionError or TrimmedError if it is damaged or gone; StoreUnavailableError,
    LogUnavailableError."""
    is_provisional: bool = False
    """(``rows`` mode) True if after this update the tables hold rows newer than its marker, which no marker had when
    they were handed out."""
    includes: Callable[[MarkerId], bool] = lambda marker: True
    """(LOAD) Returns whether these rows include those of another marker: it is this one, or on the path to it."""
    older_proofs: Callable[[], Iterator[WeightProof]] = lambda: iter(())
    """(LOAD) Returns the proofs of older markers for weights that were not sent or proved since, newest first, back to
    one round of windows. Call it, and expect errors, as for :attr:`proof`."""

    whole: Callable[[Mapping[str, npt.NDArray[np.int64]]], Iterator[Changed]] = lambda ids: iter(())
    """(MARKER) Returns all columns of some rows, by table name, as the marker has them. They are read as those of a
    load, so it is meant for few markers. Call it, and expect errors, as for :attr:`changes`."""
    ids: tuple[ChangedIds, ...] | None = None
    """Changes of id maps since the last update, in order, to be applied together with the rows. None if they are not
    known: the maps are those of the marker, in its dense state."""
    preview: Callable[[], Iterator[Changed]] = lambda: iter(())
    """Returns the same rows as :attr:`changes`, for a look ahead: they are not counted as handed out."""

    @property
    def marker(self) -> MarkerId:
        return self.commit.id

    @property
    def origin(self) -> str:
        """The trainer's marker; in a serving stream, the one that is served."""
        return self.commit.dense if _MARKER.fullmatch(self.commit.dense) else str(self.marker)

    @property
    def position(self) -> str:
        """Position of a replica that holds this update's marker, for :meth:`Follower.resume`."""
        return f"{self.marker}@{self.commit.nonce}"

    @property
    def step(self) -> int:
        """Steps that the trainer had done at the marker."""
        return self.commit.step
