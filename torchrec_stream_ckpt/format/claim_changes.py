"""Record of model changes in a CLAIM, for a generation whose tables differ from its parent's.

:func:`changes_of` finds what happened to each table: it compares two schemas by index and id.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, TableSpec

MAX_TEXT_BYTES = 16_384
"""Limit of the declared changes in a CLAIM, in bytes. Of larger ones the CLAIM has only the digest."""
MAX_EARLIER = 1000
"""Limit of the earlier changes in a CLAIM."""
_UNKNOWN = "not its tables"
_DIGEST = re.compile(r"[0-9a-f]{64}")
_ORIGIN = re.compile(r"[0-9a-f]{32} [0-9]{1,9}:[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class ClaimChanges:
    """Changes that were declared to a restore, as its generation's CLAIM keeps them."""

    digest: str
    """SHA-256 of the canonical JSON of the declared changes, 64 hex digits."""
    text: str | None = None
    """Canonical JSON of the declared changes. None if it is too large."""
    origin: str | None = None
    """``JOB GENERATION:MARKER`` of another job that the first rows came from. None if from the generation's parent."""
    earlier: tuple[ClaimChanges, ...] | None = None
    """Changes made after the parent and before these, newest first. None if no changes were made in between.

    Only a run whose log lost the markers in between records them.
    """

    @classmethod
    def of(cls, canonical: bytes, origin: tuple[bytes, MarkerId] | None = None) -> ClaimChanges:
        """Make the record of declared changes.

        Args:
            canonical: Their canonical JSON, in ASCII.
            origin: Job and marker that the rows come from, if not the generation's parent.
        """
        text = canonical.decode("ascii") if len(canonical) <= MAX_TEXT_BYTES else None
        said = f"{origin[0].hex()} {origin[1]}" if origin is not None else None
        return cls(hashlib.sha256(canonical).hexdigest(), text, said)

    @classmethod
    def of_several(cls, made: Sequence[ClaimChanges]) -> ClaimChanges | None:
        """Join consecutive changes into the form that one CLAIM records.

        Args:
            made: Changes, newest first. If empty, the result is None.
        """
        if not made:
            return None
        left, briefly = MAX_TEXT_BYTES, []
        for each in made[: 1 + MAX_EARLIER]:
            left -= len(each.text or "")
            briefly.append(each if left >= 0 else replace(each, text=None))
        return replace(briefly[0], earlier=tuple(briefly[1:]) or None)

    @property
    def each(self) -> tuple[ClaimChanges, ...]:
        """These changes and the earlier ones as separate records, newest first."""
        return replace(self, earlier=None), *(self.earlier or ())

    def check(self, what: str) -> None:
        """Refuse values that no writer produces.

        Raises:
            CorruptionError: a field does not match docs/format.md.
        """
        if not _DIGEST.fullmatch(self.digest):
            raise CorruptionError(f"{what}.digest is {self.digest!r:.80}, expected {_DIGEST.pattern}")
        if self.origin is not None and not _ORIGIN.fullmatch(self.origin):
            raise CorruptionError(f"{what}.origin is {self.origin!r:.80}, expected {_ORIGIN.pattern}")
        if self.text is not None:
            if len(self.text) > MAX_TEXT_BYTES or not self.text.isascii():
                raise CorruptionError(f"{what}.text is not ASCII of at most {MAX_TEXT_BYTES} bytes")
            if hashlib.sha256(self.text.encode("ascii")).hexdigest() != self.digest:
                raise CorruptionError(f"{what}.text does not have the digest {self.digest}")
        for each in self.earlier or ():
            each.check(f"{what}.earlier")

    @property
    def source(self) -> tuple[str, MarkerId] | None:
        """Job in hex and marker of :attr:`origin`. None if there is no origin."""
        if self.origin is None:
            return None
        job, marker = self.origin.split(" ")
        return job, MarkerId.parse(marker)


class TableChange(Enum):
    """Kind of change that a table underwent between a generation's parent and the generation."""

    ADDED = "added"
    DROPPED = "dropped"
    RENAMED = "renamed"
    CHANGED = "changed"


def changed_elsewhere(changes: ClaimChanges | None) -> str:
    """Describe declared changes that concern no table: ``dense, 1 fresh, 2 reshaped; stateful, 1 added``.

    Returns text that says so if a declaration is not known.
    """
    said = [_elsewhere(each) for each in changes.each] if changes is not None else [_UNKNOWN]
    return "; ".join(dict.fromkeys(filter(None, said))) or "raw ids may have new rows"


def only_reassigned(changes: ClaimChanges) -> bool:
    """Return whether nothing was declared but that raw ids may get new rows. Where shards allow it, they keep them."""
    return not any(map(_elsewhere, changes.each))


def _elsewhere(changes: ClaimChanges) -> str:
    """Describe one declaration likewise. Empty if it has only ``reassigned``."""
    try:
        declared = json.loads(changes.text) if changes.text is not None else None
    except (ValueError, RecursionError):  # the log holds any text
        declared = None
    if not isinstance(declared, dict):
        return _UNKNOWN
    if declared and declared.keys() <= {"reassigned", "label"}:
        return ""
    stateful = {name: declared.get(f"stateful_{name}") for name in ("added", "dropped")}
    said = []
    for part, counts in (("dense", declared.get("dense")), ("stateful", stateful)):
        values = counts.items() if isinstance(counts, dict) else ()
        found = [f"{len(names)} {name}" for name, names in values if isinstance(names, list | dict) and names]
        said += [", ".join([part, *found])] if found else []
    return "; ".join(said) or _UNKNOWN


def goes_on(before: TableSpec, now: TableSpec) -> bool:
    """Return whether two tables at one index of a lineage are the same, even if renamed. Then its rows stay deltas."""
    if before.dropped or now.dropped:
        return False
    if before.id is None or now.id is None:  # before version 2: the name is the id
        return before == now
    return before.id == now.id


def changes_of(parent: Schema, schema: Schema) -> list[tuple[TableChange, TableSpec, TableSpec]]:
    """Return (kind, before, now) of each changed table. ``before`` or ``now`` is a tombstone if the table is missing.

    Tables are matched by id, or by index if they have no ids. So ``parent`` may be of any generation of the job.
    """
    ids = {table.id: table for _, table in parent.live if table.id is not None}
    left, found = dict(parent.live), []
    for index, now in schema.live:
        at = parent.tables[index] if index < len(parent.tables) else TOMBSTONE
        before = ids.get(now.id) if now.id is not None else None
        before = before or (at if goes_on(at, now) else None)
        if before is not None:
            left = {place: table for place, table in left.items() if table is not before}
            if before.name != now.name:
                found.append((TableChange.RENAMED, before, now))
        elif at.dropped or at.id in {table.id for _, table in schema.live if table.id is not None}:
            found.append((TableChange.ADDED, TOMBSTONE, now))
        else:
            left.pop(index, None)
            found.append((TableChange.CHANGED, at, now))
    return [(TableChange.DROPPED, table, TOMBSTONE) for table in left.values()] + found


def differences(before: TableSpec, now: TableSpec) -> str:
    """Describe how two tables differ: ``rows 10 -> 20, dim 4 -> 8``. Empty if at most their names differ."""
    said = [
        f"{name} {_short(one)} -> {_short(other)}"
        for name in ("rows", "dim", "dtype", "optimizer", "states")
        if (one := getattr(before, name)) != (other := getattr(now, name))
    ]
    return ", ".join(said)


def _short(value: object) -> str:
    if not isinstance(value, tuple):
        return str(value)
    return (
        " + ".join(f"{state.name} ({state.dtype} a {'row' if state.per_row else 'weight'})" for state in value)
        or "none"
    )


def in_words(parent: Schema, schema: Schema) -> list[str]:
    """Describe what happened to the tables of a generation's parent, one line per table: ``t_user: rows 10 -> 20``."""
    lines = []
    for what, before, now in changes_of(parent, schema):
        if what is TableChange.RENAMED:
            lines.append(f"{before.name}: renamed {now.name}")
        elif what is TableChange.CHANGED:
            renamed = f"renamed {now.name}, " if before.name != now.name else ""
            lines.append(f"{before.name}: {renamed}{differences(before, now) or 'rows have other ids'}")
        else:
            lines.append(f"{now.name or before.name}: {what.value}")
    return lines


def check_follows(parent: Schema, schema: Schema, swept: Collection[int], generation: int) -> None:
    """Check the tables of a generation against its parent's: rows of one table must never be taken for another's.

    Args:
        parent: Schema of the parent generation.
        schema: Schema of this generation.
        swept: Indexes of the tables that this generation sends whole.
        generation: Number of this generation.

    Raises:
        CorruptionError: an index means another table than before, and the generation does not send it whole.
    """
    if parent is schema:
        return
    if len(schema.tables) < len(parent.tables):
        raise CorruptionError("a generation has fewer tables than its parent", generation=generation)
    for index, now in enumerate(schema.tables):
        before = parent.tables[index] if index < len(parent.tables) else None
        if before is not None and before.dropped and not now.dropped:
            raise CorruptionError(f"table {now.name} has the index of a dropped table", generation=generation)
        if before is not None and goes_on(before, now):
            if replace(now, name=before.name) != before:
                raise CorruptionError(f"table {now.name} has changed but keeps its id", generation=generation)
        elif index not in swept and not (before is not None and before.dropped):
            name = now.name or (before.name if before is not None else "")
            raise CorruptionError(
                f"table {name} differs from the parent's, but this generation does not send all its rows",
                generation=generation,
            )


def same_tables(saved: Schema, here: Schema) -> Schema | None:
    """Return the tables of a job in the order of a lineage. Returns None if the table names differ.

    Args:
        saved: Schema of the lineage.
        here: Schema of the job, in any order.
    """
    own = {table.name: table for _, table in here.live}
    if own.keys() != saved.index().keys():
        return None
    return Schema(tuple(table if table.dropped else own[table.name] for table in saved.tables))
