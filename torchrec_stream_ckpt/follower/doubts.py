"""Blocks of a replica that differ from a marker's proof, until newer rows or a newer proof settle them. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError, ProofMismatchError, TrimmedError
from torchrec_stream_ckpt.follower.updates import Changed, Update
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.proofs.unproved import Unproved, UnprovedBlock
from torchrec_stream_ckpt.proofs.weights import WeightProof
from torchrec_stream_ckpt.types import MarkerId, TableSpec

log = logging.getLogger(__name__)

Block = tuple[str, int]
"""(name of a table, number of a block)."""


@dataclass(slots=True)
class _Doubt:
    """What is known of a block that a marker proved otherwise. It stays known once it is settled."""

    named: UnprovedBlock
    missing: npt.NDArray[np.bool_]
    """The cells that have not come again, shape (rows, dim)."""
    is_open: bool = True
    """Whether the block is in doubt."""
    by: MarkerId | None = None
    """The newest marker whose rows or proof have taken some of the doubt away."""


class Doubts:
    """Blocks that log and store give with other bits than the marker proved. For one thread at a time.

    Newer rows or a newer proof settle a block for as long as the replica stays on their branch. If the trainer goes on
    from before them, all rows are loaded anew, and log and store give the block as they did: it is in doubt again.
    """

    def __init__(self) -> None:
        self._known: dict[Block, _Doubt] = {}

    def __len__(self) -> int:
        return sum(doubt.is_open for doubt in self._known.values())

    def add(self, table: TableSpec, found: Iterable[UnprovedBlock]) -> None:
        """Add blocks of a table that differ."""
        for each in found:
            missing = np.ones((each.end - each.begin, table.dim), np.bool_)
            self._known[table.name, each.begin // BLOCK_ROWS] = _Doubt(each, missing)

    def has(self, found: Iterable[UnprovedBlock]) -> bool:
        """Tell whether all of these blocks are in doubt already."""
        doubts = [self._known.get((each.table, each.begin // BLOCK_ROWS)) for each in found]
        return all(doubt is not None and doubt.is_open for doubt in doubts)

    def sent(self, changed: Changed, marker: MarkerId) -> None:
        """Note rows of ``marker`` that are newer than the proof: a block with all rows new is as it was sent."""
        for (table, block), doubt in self._known.items():
            if table != changed.table.name or not doubt.is_open:
                continue
            rows = changed.ids - block * BLOCK_ROWS
            rows = rows[(rows >= 0) & (rows < len(doubt.missing))]
            if not len(rows):
                continue
            doubt.missing[rows, changed.col0 : changed.col0 + changed.weights.shape[1]] = False
            doubt.is_open, doubt.by = bool(doubt.missing.any()), marker

    def proved(self, proof: WeightProof) -> None:
        """Settle blocks that a newer marker proves and that fit: call it before :meth:`add` for those that do not."""
        for (table, block), doubt in self._known.items():
            blocks, _ = proof.tables.get(table, (np.empty(0, np.int64), None))
            if doubt.is_open and np.isin(block, blocks):
                doubt.is_open, doubt.by = False, proof.marker

    def loaded(self, stands_on: Callable[[MarkerId], bool]) -> None:
        """All rows were loaded anew: what newer rows or a proof had settled is settled only where they are among them.

        Args:
            stands_on: Whether the marker that was loaded stands on another one.
        """
        for doubt in self._known.values():
            if doubt.by is not None and not stands_on(doubt.by):
                doubt.missing[:] = True
                doubt.is_open, doubt.by = True, None

    def keep(self, tables: Iterable[TableSpec]) -> None:
        """The replica has these tables now; of others there is nothing to doubt."""
        dims = {table.name: table.dim for table in tables}
        for key in list(self._known):
            if dims.get(key[0]) != self._known[key].missing.shape[1]:
                del self._known[key]

    @property
    def unproved(self) -> Unproved | None:
        """All doubted blocks; None if there are none."""
        blocks = tuple(doubt.named for _, doubt in sorted(self._known.items()) if doubt.is_open)
        if not blocks:
            return None
        return Unproved(len(blocks), blocks, tuple(sorted({each.table for each in blocks})))


IN_TABLES = (
    "call advance() again: it loads all rows anew. Rows that log and store have lost are served once the trainer has "
    "sent them again, or a newer marker proves them; "
    "or serve them as they are: FollowedTables(..., accept_unproved=True)"
)
IN_A_STREAM = (
    "start it again: it loads all rows anew. If it says the same again, log and store have lost these rows: let a "
    "materializer run, so that the trainer sends them again"
)


def refusal(unproved: Unproved, marker: MarkerId, hint: str = IN_TABLES) -> ProofMismatchError:
    """The error of a replica that does not serve ``marker``."""
    error = unproved.error(marker)
    return ProofMismatchError(error.message, hint=hint, **error.where)


def proof_of(update: Update) -> WeightProof | None:
    """The proof of the update's marker; None if it has none, or it cannot be read: the reason is logged."""
    try:
        return update.proof()
    except (CorruptionError, TrimmedError) as error:
        log.warning("marker %s is not compared with its proof: %s", update.marker, error.headline)
        return None
