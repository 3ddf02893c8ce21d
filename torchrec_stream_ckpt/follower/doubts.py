"""Blocks of a replica that differ from a marker's proof, until newer rows or a newer proof settle them. No torch."""

from __future__ import annotations

import logging
from collections.abc import Iterable

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


class Doubts:
    """Blocks that log and store give with other bits than the marker proved. For one thread at a time."""

    def __init__(self) -> None:
        self._cells: dict[Block, npt.NDArray[np.bool_]] = {}
        """The cells of each block that have not come again, shape (rows, dim)."""
        self._named: dict[Block, UnprovedBlock] = {}

    def __len__(self) -> int:
        return len(self._named)

    def add(self, table: TableSpec, found: Iterable[UnprovedBlock]) -> None:
        """Add blocks of a table that differ."""
        for each in found:
            key = table.name, each.begin // BLOCK_ROWS
            self._named[key] = each
            self._cells[key] = np.ones((each.end - each.begin, table.dim), np.bool_)

    def has(self, found: Iterable[UnprovedBlock]) -> bool:
        """Tell whether all of these blocks are in doubt already."""
        return all((each.table, each.begin // BLOCK_ROWS) in self._named for each in found)

    def sent(self, changed: Changed) -> None:
        """Note rows that are newer than the proof: a block with all rows new is as it was sent."""
        for (table, block), cells in list(self._cells.items()):
            if table != changed.table.name:
                continue
            rows = changed.ids - block * BLOCK_ROWS
            rows = rows[(rows >= 0) & (rows < len(cells))]
            cells[rows, changed.col0 : changed.col0 + changed.weights.shape[1]] = False
            if not cells.any():
                self._settle((table, block))

    def proved(self, proof: WeightProof) -> None:
        """Settle blocks that a newer marker proves and that fit: call it before :meth:`add` for those that do not."""
        for key in list(self._named):
            blocks, _ = proof.tables.get(key[0], (np.empty(0, np.int64), None))
            if np.isin(key[1], blocks):
                self._settle(key)

    def keep(self, tables: Iterable[TableSpec]) -> None:
        """The replica has these tables now; of others there is nothing to doubt."""
        dims = {table.name: table.dim for table in tables}
        for key in list(self._named):
            if dims.get(key[0]) != self._cells[key].shape[1]:
                self._settle(key)

    def _settle(self, key: Block) -> None:
        del self._named[key], self._cells[key]

    @property
    def unproved(self) -> Unproved | None:
        """All doubted blocks; None if there are none."""
        if not self._named:
            return None
        blocks = tuple(self._named[key] for key in sorted(self._named))
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
