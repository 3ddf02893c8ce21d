"""What a follower hands out: one update after the other, each with the rows that it changes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.proofs.weights import WeightProof
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

_MARKER = re.compile(r"\d+:\d+")
"""What COMMIT.dense is in a serving stream."""


class UpdateKind(StrEnum):
    """What an update makes of the tables."""

    LOAD = "load"
    """Every row of a marker: the first one, or again because what lies between is gone or on an abandoned branch, or
    the model has changed: the update's schema has other tables then."""
    MARKER = "marker"
    """What changed since the marker before: after it the tables are those of the marker, bit for bit. (``rows`` mode)
    Newer rows may have come already: ``Update.is_provisional`` says so."""
    ROWS = "rows"
    """(``rows`` mode) Rows that no marker has yet. Some of them, or none, may never be in one."""
    ROLLBACK = "rollback"
    """(``rows`` mode) The trainer that sent such rows is gone: they are what the newest marker says again."""


@dataclass(frozen=True, slots=True)
class Changed:
    """Rows of one table, or of a slice of its columns. Arrays are good until the next ones are asked for."""

    table: TableSpec
    col0: int
    """First column of ``weights`` in the table."""
    ids: npt.NDArray[np.int64]
    """Rows of the logical table, shape (n,)."""
    weights: Array
    """Shape (n, cols). bfloat16 is there as its bits, uint16."""
    states: tuple[Array, ...] = ()
    """(``states=True``) In the order of ``table.states``: (n,) or (n, cols)."""


@dataclass(frozen=True, slots=True)
class Update:
    """One step of a replica. Apply all of :meth:`changes` before readers see any of it."""

    kind: UpdateKind
    commit: Commit
    """The newest marker that is wholly applied after this update."""
    schema: Schema
    why: str
    """LOAD, ROLLBACK: the reason, for people; else empty."""
    changes: Callable[[], Iterator[Changed]]
    """In order: of a row that comes more than once the last one counts. To be read while the update is the newest."""
    dense: Callable[[], Path]
    """A folder with the marker's dense state, a DCP checkpoint, digests compared. Raises as a restore would."""
    proof: Callable[[], WeightProof | None] = lambda: None
    """(LOAD, MARKER) What the marker proves of the weights; None: nothing. To be asked while the update is the newest.
    Raises CorruptionError, TrimmedError: it is damaged or gone; StoreUnavailableError, LogUnavailableError."""
    is_provisional: bool = False
    """(``rows`` mode) Whether after this update the tables hold rows that are newer than its marker: no marker had
    them when they were handed out."""
    includes: Callable[[MarkerId], bool] = lambda marker: True
    """(LOAD) Whether the rows of another marker are among these: it is this one, or on the way to it."""
    older_proofs: Callable[[], Iterator[WeightProof]] = lambda: iter(())
    """(LOAD) What markers before this one prove of weights that were not sent or proved since, newest first: one round
    of windows back. To be asked, and raises, as :attr:`proof`."""

    @property
    def marker(self) -> MarkerId:
        return self.commit.id

    @property
    def origin(self) -> str:
        """The trainer's marker: of a serving stream, the one that is served."""
        return self.commit.dense if _MARKER.fullmatch(self.commit.dense) else str(self.marker)

    @property
    def step(self) -> int:
        """Steps that the trainer had done at the marker."""
        return self.commit.step
