"""Rows of this generation that a checker did not find as they were in the tables: they are sent again."""

from __future__ import annotations

import logging

from torchrec_stream_ckpt.commit.generation import Generation
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.verdicts import new_verdicts
from torchrec_stream_ckpt.types import RowRange

log = logging.getLogger(__name__)


class Again:
    """(rank 0, commit thread) Looks into the store for verdicts on this generation's markers.

    Args:
        generation: What this rank has open.
        objects: Where checkers leave verdicts.
    """

    def __init__(self, generation: Generation, objects: Objects) -> None:
        self._generation = generation
        self._objects = objects
        self._known: set[str] = set()

    def look(self) -> tuple[RowRange, ...]:
        """The rows that new verdicts name. Never raises: a verdict decides nothing, and none is waited for."""
        try:
            return self._look()
        except StreamCkptError as error:
            log.info("verdicts are not read now: %s", error.headline)
            return ()

    def _look(self) -> tuple[RowRange, ...]:
        claim, found = self._generation.claim, []
        names = {table.id: table.name for table in claim.schema.tables}
        for name, verdict in new_verdicts(self._objects, claim.job, claim.generation, self._known):
            self._known.add(name)
            commit = self._generation.control.refresh().commits.get(verdict.marker)
            if commit is None or commit.chain != verdict.chain:
                continue  # of another history that shares the job's name
            rows = [RowRange(names[each.table], each.begin, each.end) for each in verdict.rows if each.table in names]
            log.warning("marker %s was found unproved (%s): %s are sent again", verdict.marker, name, _in_words(rows))
            found += rows
        return tuple(found)


def _in_words(rows: list[RowRange]) -> str:
    named = ", ".join(f"{table} rows [{begin}, {end})" for table, begin, end in rows[:8])
    return named + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")
