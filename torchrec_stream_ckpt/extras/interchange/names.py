"""Names of a table and its states: in TorchRec's state dicts, and in exported files."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

_COLLECTIONS = ("embedding_bags", "embeddings")
"""Names under which an ``EmbeddingBagCollection`` and an ``EmbeddingCollection`` keep tables. A log does not record
which of them it was."""
_WEIGHT = re.compile(rf"(?:(.+)\.)?(?:{'|'.join(_COLLECTIONS)})\.([^.]+)\.weight")


@dataclass(frozen=True, slots=True)
class TorchRecName:
    """A table by its full names in ``dmp.state_dict()``."""

    path: str
    table: str

    @classmethod
    def of(cls, table: TableSpec) -> TorchRecName:
        path, _, name = table.name.rpartition(".")
        return cls(path, name)

    @classmethod
    def parse(cls, key: str) -> TorchRecName | None:
        """Parse a key such as ``sparse.ebc.embedding_bags.t_user.weight``; returns None if it does not belong to a
        table."""
        match = _WEIGHT.fullmatch(key)
        return cls(match[1] or "", match[2]) if match else None

    @property
    def spec_name(self) -> str:
        """``TableSpec.name`` of the table."""
        return f"{self.path}.{self.table}"

    @property
    def keys(self) -> tuple[str, str]:
        """Both names that it may have."""
        first, second = (
            ".".join(part for part in (self.path, collection, self.table, "weight") if part)
            for collection in _COLLECTIONS
        )
        return first, second

    def state_key(self, position: int, name: str) -> str:
        """Return the name that TorchRec's fused optimizers give the state at ``position`` of the schema."""
        return f"{self.table}.{'momentum1' if position == 0 else name}"


def state_names(table: TableSpec, state: StateSpec, slices: tuple[tuple[int, int], ...]) -> list[str]:
    """Return the names of a state's arrays: one for each column shard if it holds one value a row and there are
    several."""
    name = f"{table.name}.{state.name}"
    if not state.per_row or len(slices) == 1:
        return [name]
    return [f"{name}.col{col0}" for col0, _ in slices]


def nearest(name: str, names: Iterable[str]) -> str:
    """Return in words the names in ``names`` that resemble ``name``: the three nearest ones, or some of them."""
    known = sorted(names)
    if not known:
        return "nothing"
    found = difflib.get_close_matches(name, known, 3, 0.5)
    return ", ".join(map(repr, found or known[:3])) + (
        "" if found or len(known) <= 3 else f" and {len(known) - 3} more"
    )
