"""Tables of a job, and the conversion of records to JSON.

JSON is canonical (sorted keys, no spaces, ASCII), so that the checksum of a schema is well defined.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property
from itertools import count
from typing import Any

from crc32c import crc32c

from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.format.proof import MAX_ID
from torchrec_stream_ckpt.util.types import TableShard, TableSpec

SINCE_3 = {"changes", "text", "origin", "earlier"}
"""Optional fields that no payload of version 2 has."""
SINCE_4 = {"announces", "dense_proof"}
"""Optional fields that no payload of version 3 has."""
OPTIONAL = {"proof", "id", "meta", "given_up", "dense_list", "layout", "same_schema", "same_layout", *SINCE_3, *SINCE_4}
"""Fields that are omitted if they have no value. No payload of version 1 has one."""


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def plain(record: Any) -> dict[str, Any]:
    """Convert a record to a JSON object, without optional fields that have no value.

    Not by ``dataclasses.asdict``, which also makes a deep copy of each value.
    """
    found = {}
    for name in _names(record.__class__):
        value = getattr(record, name)
        if value is not None or name not in OPTIONAL:
            found[name] = _plain(value)
    return found


@cache
def _names(kind: Hashable) -> tuple[str, ...]:
    return tuple(each.name for each in fields(kind))  # type: ignore[arg-type]


def _plain(value: Any) -> Any:
    if isinstance(value, (int, float, str)) or value is None:
        return value
    if isinstance(value, (tuple, list)):
        return [_plain(each) for each in value]
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    return plain(value) if is_dataclass(value) else value


def canonical(value: object) -> bytes:
    return _ENCODER.encode(value).encode("ascii")


@dataclass(frozen=True)
class Schema:
    """All tables of a job. A table's index here is its id in frames.

    The tables of a first generation are sorted by name. An index stays with its table along a lineage: a dropped table
    leaves a tombstone there, and an added one follows the last.
    """

    tables: tuple[TableSpec, ...]
    """Tables by index, including tombstones."""

    @cached_property
    def live(self) -> tuple[tuple[int, TableSpec], ...]:
        """Index and table of all tables that the model has, without tombstones."""
        return tuple((position, table) for position, table in enumerate(self.tables) if not table.dropped)

    def index(self) -> dict[str, int]:
        """Return the indexes by name of the tables that the model has."""
        return {table.name: position for position, table in self.live}

    @cached_property
    def is_sorted(self) -> bool:
        """True if no table is dropped and they are sorted by name, as in every payload of version 2."""
        names = [table.name for table in self.tables]
        return all(names) and names == sorted(names)

    @property
    def cells(self) -> int:
        """Number of values in all tables. A state of one value per row is counted as wide as its table."""
        return sum(table.rows * table.dim * (1 + len(table.states)) for table in self.tables)

    def holds(self, shard: TableShard) -> bool:
        """Return whether ``shard`` lies inside a table of this schema."""
        if shard.table >= len(self.tables):
            return False
        table = self.tables[shard.table]
        return shard.row0 + shard.rows <= table.rows and shard.col0 + shard.cols <= table.dim

    @cached_property
    def crc(self) -> int:
        return crc32c(canonical([plain(table) for table in self.tables]))

    def is_same(self, other: Schema) -> bool:
        """Return whether everything is equal, including the ids of tables."""
        ids = [[table.id for table in each.tables] for each in (self, other)]
        return self == other and ids[0] == ids[1]

    @cached_property
    def unnamed(self) -> Schema:
        """The same tables without ids, as in a generation of version 1."""
        return Schema(tuple(replace(table, id=None) for table in self.tables))

    def named(self, parent: Schema | None, job: bytes, generation: int) -> Schema:
        """Return the same tables, each with its stable id: that of the parent's table of this name, or a new one.

        Args:
            parent: Schema of the parent generation, which has the same tables. None if all are new.
            job: Job of the log.
            generation: The generation that is about to be claimed.
        """
        known = {table.name: table.id for _, table in parent.live} if parent is not None else {}
        before = [(table.name in known, known.get(table.name)) for table in self.tables]
        return self._with_ids(before, set(known.values()), job, generation)

    def renewed(self, parent: Schema, job: bytes, generation: int) -> Schema:
        """Return the same tables after a change of the model. Tables that have an id keep it; the others get a new one.

        Args:
            parent: Schema of the parent generation.
            job: Job of the log.
            generation: The generation that is about to be claimed.
        """
        taken = {table.id for table in parent.tables}
        return self._with_ids([(False, table.id) for table in self.tables], taken, job, generation)

    def _with_ids(
        self, before: Iterable[tuple[bool, int | None]], taken: set[int | None], job: bytes, generation: int
    ) -> Schema:
        """Return each table with its id, or with a new id if it has no id.

        A table of version 1, known without an id, gets the same id whichever generation is next.
        """
        tables = []
        for table, (known, id_) in zip(self.tables, before, strict=True):
            if id_ is None and not table.dropped:
                id_ = _new_id(job, 0 if known else generation, table.name, taken)
            taken.add(id_)
            tables.append(replace(table, id=id_))
        return Schema(tuple(tables))


NO_TABLES = Schema(())


def _new_id(job: bytes, generation: int, name: str, taken: set[int | None]) -> int:
    """Make an id below 2^53, not among ``taken``. It depends only on the arguments, so a retried claim has the same."""
    for salt in count():
        text = f"{job.hex()} {generation} {salt} {name}".encode()
        id_ = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % MAX_ID
        if id_ not in taken:
            return id_
    raise AssertionError


def check_schema(saved: Schema, here: Schema) -> None:
    """Compare the log's tables with the model's.

    Raises:
        SchemaMismatchError: the tables differ; the error names the first one that differs, the field, and both values.
    """
    there_by_name = {table.name: table for _, table in saved.live}
    here_by_name = {table.name: table for _, table in here.live}
    for name in sorted(there_by_name.keys() ^ here_by_name.keys()):
        side = "the log" if name in there_by_name else "this model"
        raise SchemaMismatchError(
            f"only {side} has a sharded table with this name",
            hint="declare renamed, added or dropped tables in restore(changes=...); fresh=True needs another log; a "
            "table cannot change between data-parallel and sharded",
            table=name,
        )
    for name, there in there_by_name.items():
        _check_table(there, here_by_name[name])


def _check_table(there: TableSpec, here: TableSpec) -> None:
    for name in ("rows", "dim", "dtype", "optimizer", "states"):
        saved, found = getattr(there, name), getattr(here, name)
        if saved != found:
            raise SchemaMismatchError(
                f"{name} is {saved} in the log and {found} in this model",
                hint="restore with the tables that the log was written with, or use another URI",
                table=there.name,
            )
