"""Blocks of a replica that differ from a marker's proof, until newer rows or a newer proof settle them. No torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError, ProofMismatchError, TrimmedError
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.inner import Compared, Unproved, UnprovedBlock, WeightProof
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

log = logging.getLogger(__name__)

Compare = Callable[[WeightProof, TableSpec], Compared]
"""Compares the held rows of a table with a proof; nothing of a table that is not held."""


@dataclass(slots=True)
class _Doubt:
    """A block that differs from a marker's proof. It stays known after it is settled."""

    named: UnprovedBlock
    missing: npt.NDArray[np.bool_]
    """Cells that have not been sent again, shape (rows, dim). None are left if the block is settled."""
    by: MarkerId | None = None
    """The newest marker whose rows or proof have settled a part of the block; None if no marker has."""

    @property
    def is_open(self) -> bool:
        return bool(self.missing.any())


class Doubts:
    """Blocks whose bits in log and store differ from the marker's proof. For one thread at a time.

    Newer rows or a newer proof settle a block for as long as the replica stays on their branch. If the trainer
    continues from an older marker, all rows are loaded again, and log and store return the block as before: it is in
    doubt again. Tables are identified by id, because a name may pass to another table, and a branch may bring back a
    table that was dropped.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], _Doubt] = {}
        """By id of the table and number of the block."""
        self._names: dict[int, str] = {}
        """Names, by id, of the tables that the replica holds. Blocks of other tables stay known but do not count."""

    def __len__(self) -> int:
        return sum(doubt.is_open for (table, _), doubt in self._known.items() if table in self._names)

    def keep(self, tables: Iterable[TableSpec]) -> None:
        """Set the tables that the replica holds from now on. Call it before the other methods."""
        self._names = {table.id: table.name for table in tables if table.id is not None}

    def add(self, table: TableSpec, found: Iterable[UnprovedBlock]) -> None:
        """Add blocks of a table that differ."""
        assert table.id is not None  # tables without an id are not proved
        for each in found:
            missing = np.ones((each.end - each.begin, table.dim), np.bool_)
            self._known[table.id, each.begin // BLOCK_ROWS] = _Doubt(each, missing)

    def has(self, table: TableSpec, found: Iterable[UnprovedBlock]) -> bool:
        """Return whether all of these blocks of a table are already in doubt."""
        known = self._open(table.id)
        return all(each.begin // BLOCK_ROWS in known for each in found)

    def _open(self, table: int | None) -> dict[int, _Doubt]:
        """Return the blocks of a table that are in doubt, by number."""
        return {block: doubt for (id_, block), doubt in self._known.items() if id_ == table and doubt.is_open}

    def sent(self, changed: Changed, marker: MarkerId) -> None:
        """Note rows of ``marker`` that are newer than the proof. If all rows of a block are new, the block is as it was
        sent."""
        known = self._open(changed.table.id)
        if not known:
            return
        blocks = changed.ids // BLOCK_ROWS
        for block in known.keys() & set(np.unique(blocks).tolist()):
            rows = changed.ids[blocks == block] - block * BLOCK_ROWS
            known[block].missing[rows, changed.col0 : changed.col0 + changed.weights.shape[1]] = False
            known[block].by = marker

    def proved(self, proof: WeightProof, *, is_load: bool) -> None:
        """Settle all blocks that a marker proves. Call :meth:`add` after it for those that differ.

        Args:
            proof: The marker's proof. All of its blocks were compared.
            is_load: Whether all rows have just been loaded. If a block now matches the same proof that it did not match
                before, only the replica was wrong, not log and store, and the block is forgotten.
        """
        for table, name in self._names.items():
            blocks, _ = proof.tables.get(name, (np.empty(0, np.int64), None))
            for block, doubt in self._open(table).items():
                by = doubt.named.proved
                if block not in blocks or by > proof.marker or (by == proof.marker and not is_load):
                    continue
                doubt.missing[:], doubt.by = False, proof.marker
                if by == proof.marker:
                    del self._known[table, block]

    def loaded(self, includes: Callable[[MarkerId], bool]) -> None:
        """Note that all rows were loaded again: newer rows or a proof settle a block only on their own branch.

        Args:
            includes: Returns whether the loaded rows include those of another marker.
        """
        for doubt in self._known.values():
            if doubt.by is not None and not includes(doubt.by):
                doubt.missing[:], doubt.by = True, None

    @property
    def unproved(self) -> Unproved | None:
        """All doubted blocks; None if no block is in doubt."""
        blocks = [
            replace(doubt.named, table=name)
            for table, name in sorted(self._names.items(), key=lambda each: each[1])
            for _, doubt in sorted(self._open(table).items())
        ]
        tables = tuple(dict.fromkeys(each.table for each in blocks))
        return Unproved(len(blocks), tuple(blocks), tables) if blocks else None


IN_TABLES = (
    "call advance() again, which loads all rows. Rows lost in log and store are served once the trainer sends them "
    "again or a newer marker proves them; to serve them as they are, pass FollowedTables(..., accept_unproved=True)"
)
IN_A_STREAM = (
    "start it again, which loads all rows. If the error returns, log and store have lost these rows: run a "
    "materializer, so that the trainer sends them again"
)


def refusal(unproved: Unproved, marker: MarkerId, hint: str = IN_TABLES) -> ProofMismatchError:
    """Return the error of a replica that does not serve ``marker``."""
    error = unproved.error(marker)
    return ProofMismatchError(error.message, hint=hint, **error.where)


def proof_of(update: Update) -> WeightProof | None:
    """Return the proof of the update's marker. Returns None if it has none, or if it cannot be read; the reason is then
    logged."""
    try:
        return update.proof()
    except (CorruptionError, TrimmedError) as error:
        log.warning("marker %s was not compared with its proof: %s", update.marker, error.headline)
        return None


def compare_all(update: Update, own: WeightProof | None, compare: Compare) -> Compared:
    """Compare a copy of the tables with the proof of an update's marker, and with older ones.

    Args:
        update: An update that was applied.
        own: The proof of its marker; None if it has none.
        compare: Compares one table.
    """
    found = Compared()
    for proof in (*([own] if own is not None else []), *older_proofs_of(update)):
        for _, table in update.schema.live:
            found += compare(proof, table)
    return found


def older_proofs_of(update: Update) -> Iterator[WeightProof]:
    """Yield the update's older proofs that can be read. If one cannot be read, the reason is logged."""
    try:
        yield from update.older_proofs()
    except (CorruptionError, TrimmedError) as error:
        log.warning("marker %s was not compared with older proofs: %s", update.marker, error.headline)
