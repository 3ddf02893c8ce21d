"""Raw ids of managed collision at one marker: which row TorchRec looks up for them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError
from torchrec_stream_ckpt.extras.interchange.dense_state import read_entries

Ids = npt.NDArray[np.int64]

_NO_ID = np.iinfo(np.int64).max
"""Raw id of a free row."""
_FIELDS = ("map_raw_ids", "map_rows")


def shards_of(raw_ids: Ids, input_hash_size: int, shards: int) -> Ids:
    """Return the number of the shard that TorchRec's input dist sends each raw id to."""
    numbers = raw_ids.astype(np.uint64)
    block = -(-input_hash_size // shards)
    dealt = numbers % np.uint64(shards)
    if not block:
        return dealt.astype(np.int64)
    return np.where(numbers < np.uint64(block * shards), numbers // np.uint64(block), dealt).astype(np.int64)


@dataclass(frozen=True, slots=True)
class RawIdMap:
    """The id map of one table: a sorted map for each of its shards, in the order of their rows."""

    input_hash_size: int
    shards: tuple[tuple[Ids, Ids], ...]
    """(raw ids, rows). A shard has all of its rows; free ones share the greatest int64 as raw id."""

    def rows_of(self, raw_ids: Ids) -> Ids:
        """Return the row of each raw id. An unknown one has the last row of the shard that it is sent to."""
        rows = np.empty(len(raw_ids), np.int64)
        for mine, (ids, places) in zip(self._mine(raw_ids), self.shards, strict=True):
            wanted = raw_ids[mine]
            found = np.searchsorted(ids[:-1], wanted)
            rows[mine] = np.where(ids[found] == wanted, places[found], places.max())
        return rows

    def strangers(self) -> int:
        """Count raw ids that the hash size sends to another shard than the one that has them."""
        return sum(
            int(np.count_nonzero(shards_of(ids[ids != _NO_ID], self.input_hash_size, len(self.shards)) != number))
            for number, (ids, _) in enumerate(self.shards)
        )

    def _mine(self, raw_ids: Ids) -> Iterator[Ids]:
        shards = shards_of(raw_ids, self.input_hash_size, len(self.shards))
        for number in range(len(self.shards)):
            yield np.flatnonzero(shards == number)


def read_id_maps(folder: Path, input_hash_sizes: Mapping[str, int]) -> dict[str, RawIdMap]:
    """Read the id maps of tables from a dense directory whose digests have been compared.

    Args:
        folder: The directory.
        input_hash_sizes: ``input_hash_size`` of the managed collision module, by ``TableSpec.name``.

    Raises:
        SchemaMismatchError: the marker has no id map of a table.
        ConfigError: its raw ids contradict the hash size.
    """
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    starts: dict[str, list[int]] = {}
    for entry in metadata.state_dict_metadata:
        if entry.startswith("collision.") and entry.endswith(f".{_FIELDS[0]}"):
            table, row0, _ = entry.removeprefix("collision.").rsplit(".", 2)
            starts.setdefault(table, []).append(int(row0))
    maps = {}
    for table, size in input_hash_sizes.items():
        if table not in starts:
            raise SchemaMismatchError(
                f"the marker has no id map of this table, only of {', '.join(sorted(starts)) or 'no table'}",
                hint="name only tables with managed collision in input_hash_sizes; other rows are known by number",
                table=table,
            )
        entries = [[f"collision.{table}.{row0}.{field}" for field in _FIELDS] for row0 in sorted(starts[table])]
        values = read_entries(reader, metadata, [each for pair in entries for each in pair])
        maps[table] = RawIdMap(size, tuple((values[ids].numpy(), values[rows].numpy()) for ids, rows in entries))
        if strangers := maps[table].strangers():
            raise ConfigError(
                f"input_hash_size {size} sends {strangers} raw ids of the marker to another of its "
                f"{len(entries)} shards than the one that has them",
                hint="give the input_hash_size of the trainer's MCHManagedCollisionModule",
                table=table,
            )
    return maps
