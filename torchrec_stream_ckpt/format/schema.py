"""The tables of a job, and how records become JSON.

JSON is canonical (sorted keys, no spaces, ASCII), so that the checksum of a schema is well defined.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any

from crc32c import crc32c

from torchrec_stream_ckpt.format.proof import MAX_ID
from torchrec_stream_ckpt.types import TableShard, TableSpec

OPTIONAL = {"proof", "id", "meta", "given_up", "dense_list", "layout", "same_schema", "same_layout"}
"""Fields that are left out where they have no value. No payload of version 1 has one."""


def plain(record: Any) -> dict[str, Any]:
    """A record as JSON has it: without optional fields that have no value."""
    return asdict(record, dict_factory=lambda items: {name: value for name, value in items if _stands(name, value)})


def _stands(name: str, value: object) -> bool:
    return value is not None or name not in OPTIONAL


def canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


@dataclass(frozen=True)
class Schema:
    """All tables of a job, sorted by name; a table's index here is its id in frames."""

    tables: tuple[TableSpec, ...]

    def index(self) -> dict[str, int]:
        return {table.name: position for position, table in enumerate(self.tables)}

    def holds(self, shard: TableShard) -> bool:
        """Whether ``shard`` lies inside a table of this schema."""
        if shard.table >= len(self.tables):
            return False
        table = self.tables[shard.table]
        return shard.row0 + shard.rows <= table.rows and shard.col0 + shard.cols <= table.dim

    @cached_property
    def crc(self) -> int:
        return crc32c(canonical([plain(table) for table in self.tables]))

    def is_same(self, other: Schema) -> bool:
        """Whether all is equal, the ids of tables too."""
        ids = [[table.id for table in each.tables] for each in (self, other)]
        return self == other and ids[0] == ids[1]

    @cached_property
    def unnamed(self) -> Schema:
        """The same tables without ids: how a generation of version 1 has them."""
        return Schema(tuple(replace(table, id=None) for table in self.tables))

    def named(self, parent: Schema | None, job: bytes, generation: int) -> Schema:
        """The same tables, each with its stable id: that of the parent's table of its name, or a new one.

        Args:
            parent: The schema that the generation stands on; None: all tables are new.
            job: Of the log.
            generation: The one that is about to be claimed.
        """
        known = {table.name: table for table in parent.tables} if parent is not None else {}
        taken = {table.id for table in known.values()}
        tables = []
        for table in self.tables:
            before = known.get(table.name)
            id_ = before.id if before is not None else None
            if id_ is None:  # a table of version 1 gets the same id in whatever generation comes next
                id_ = _new_id(job, 0 if before is not None else generation, table.name, taken)
            taken.add(id_)
            tables.append(replace(table, id=id_))
        return Schema(tuple(tables))


NO_TABLES = Schema(())


def _new_id(job: bytes, generation: int, name: str, taken: set[int | None]) -> int:
    """Below 2^53, and not among ``taken``. A function of what it names, so that a retried claim has the same ids."""
    for salt in count():
        text = f"{job.hex()} {generation} {salt} {name}".encode()
        id_ = int.from_bytes(hashlib.sha256(text).digest()[:8], "little") % MAX_ID
        if id_ not in taken:
            return id_
    raise AssertionError
