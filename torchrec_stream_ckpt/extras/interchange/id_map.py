"""Raw ids of managed collision at one marker: which row TorchRec looks up for them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.extras.interchange.dense_state import read_entries
from torchrec_stream_ckpt.format.rows import ASSIGNED, NO_ID, IdEvents

Ids = npt.NDArray[np.int64]

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
    """(raw ids, rows). A shard has all of its rows; free ones share the greatest int64 as raw id. The last shards may
    have no rows."""

    def rows_of(self, raw_ids: Ids) -> Ids:
        """Return the row of each raw id. An unknown one has the last row of the shard that it is sent to.

        Raises:
            ConfigError: a raw id is sent to a shard without rows, where TorchRec fails, too.
        """
        rows = np.empty(len(raw_ids), np.int64)
        for number, (mine, (ids, places)) in enumerate(zip(self._mine(raw_ids), self.shards, strict=True)):
            wanted = raw_ids[mine]
            if not len(ids):
                if len(wanted):
                    raise ConfigError(
                        f"raw id {wanted[0]} is sent to shard {number} of {len(self.shards)}, which has no rows: "
                        "TorchRec cannot look it up",
                        hint="look up only raw ids that the trainer can train",
                    )
                continue
            found = np.searchsorted(ids[:-1], wanted)
            rows[mine] = np.where(ids[found] == wanted, places[found], places.max())
        return rows

    def after(self, shard: int, events: IdEvents, table: str) -> RawIdMap:
        """Return the map after some events of one shard.

        Args:
            shard: Its number.
            events: The events, in order.
            table: The table, for errors.

        Raises:
            CorruptionError: the events contradict this map: a raw id loses a row that it does not have, or gets a row
                that is not free, or has one already.
        """
        if shard >= len(self.shards):
            raise CorruptionError(f"events of shard {shard}, but the id map has {len(self.shards)}", table=table)
        ids, places = self.shards[shard]
        edges = np.flatnonzero(np.diff(events.kinds)) + 1
        for rows, raw_ids, kinds in zip(
            *(np.split(each, edges) for each in (events.rows, events.raw_ids, events.kinds)), strict=True
        ):
            if len(rows):
                change = _give_rows if kinds[0] == ASSIGNED else _free_rows
                ids, places = change(ids, places, rows, raw_ids, table)
        return replace(self, shards=(*self.shards[:shard], (ids, places), *self.shards[shard + 1 :]))

    def strangers(self) -> int:
        """Count raw ids that the hash size sends to another shard than the one that has them."""
        return sum(
            int(np.count_nonzero(shards_of(ids[ids != NO_ID], self.input_hash_size, len(self.shards)) != number))
            for number, (ids, _) in enumerate(self.shards)
        )

    def _mine(self, raw_ids: Ids) -> Iterator[Ids]:
        shards = shards_of(raw_ids, self.input_hash_size, len(self.shards))
        for number in range(len(self.shards)):
            yield np.flatnonzero(shards == number)


def _free_rows(ids: Ids, places: Ids, rows: Ids, raw_ids: Ids, table: str) -> tuple[Ids, Ids]:
    """Free these rows of a sorted map."""
    at = np.minimum(np.searchsorted(ids, raw_ids), max(0, len(ids) - 1))
    fits = (ids[at] == raw_ids) & (places[at] == rows) if len(ids) else np.zeros(len(rows), bool)
    if not fits.all() or len(np.unique(at)) < len(at):
        row, raw_id = _first(rows, raw_ids, ~fits)
        raise CorruptionError(f"raw id {raw_id} loses row {row}, which it does not have", table=table)
    free = np.full(len(rows), NO_ID, np.int64)
    return np.concatenate([np.delete(ids, at), free]), np.concatenate([np.delete(places, at), rows])


def _give_rows(ids: Ids, places: Ids, rows: Ids, raw_ids: Ids, table: str) -> tuple[Ids, Ids]:
    """Give free rows of a sorted map to these raw ids."""
    used = int(np.searchsorted(ids, NO_ID))
    order = np.argsort(raw_ids, kind="stable")
    rows, raw_ids = rows[order], raw_ids[order]
    at = np.searchsorted(ids[:used], raw_ids)
    known = np.append(ids[:used], NO_ID)[at] == raw_ids
    fits = np.isin(rows, places[used:]) & ~known
    if not fits.all() or len(np.unique(rows)) < len(rows) or (raw_ids[1:] == raw_ids[:-1]).any():
        row, raw_id = _first(rows, raw_ids, ~fits)
        raise CorruptionError(f"raw id {raw_id} gets row {row}, which is not free, or has another one", table=table)
    free = places[used:][~np.isin(places[used:], rows)]
    return (
        np.concatenate([np.insert(ids[:used], at, raw_ids), np.full(len(free), NO_ID, np.int64)]),
        np.concatenate([np.insert(places[:used], at, rows), free]),
    )


def _first(rows: Ids, raw_ids: Ids, bad: npt.NDArray[np.bool_]) -> tuple[int, int]:
    """Return the first contradicting pair; the first pair if one occurs twice."""
    place = int(np.argmax(bad))
    return int(rows[place]), int(raw_ids[place])


def read_raw_ids(folder: Path) -> dict[str, Ids]:
    """Read the raw id of each row of all tables with an id map; :data:`NO_ID` for free rows.

    Args:
        folder: A dense directory whose digests have been compared.

    Returns:
        Arrays of shape (rows,), by ``TableSpec.name``.

    Raises:
        CorruptionError: the maps of a table do not give each of its rows at most one raw id, and each raw id one row.
    """
    owners = {}
    for table, shards in _read_shards(folder).items():
        ids, rows = (np.concatenate(parts) for parts in zip(*shards, strict=True))
        found = np.full(len(rows), NO_ID, np.int64)
        used = np.sort(ids[ids != NO_ID])
        if not np.array_equal(np.sort(rows), np.arange(len(rows))) or (used[1:] == used[:-1]).any():
            raise CorruptionError("the id maps of the marker give a row or a raw id twice", table=table)
        found[rows] = ids
        owners[table] = found
    return owners


def _read_shards(folder: Path, tables: Iterable[str] | None = None) -> dict[str, list[tuple[Ids, Ids]]]:
    """Read (raw ids, rows) of each shard that has rows, in the order of their rows; ``tables``: None for all."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    starts: dict[str, list[int]] = {}
    for entry in metadata.state_dict_metadata:
        if entry.startswith("collision.") and entry.endswith(f".{_FIELDS[0]}"):
            table, row0, _ = entry.removeprefix("collision.").rsplit(".", 2)
            starts.setdefault(table, []).append(int(row0))
    found = {}
    for table in starts if tables is None else tables:
        if table not in starts:
            raise SchemaMismatchError(
                f"the marker has no id map of this table, only of {', '.join(sorted(starts)) or 'no table'}",
                hint="name only tables with managed collision in input_hash_sizes; other rows are known by number",
                table=table,
            )
        entries = [[f"collision.{table}.{row0}.{field}" for field in _FIELDS] for row0 in sorted(starts[table])]
        values = read_entries(reader, metadata, [each for pair in entries for each in pair])
        shards = [(values[ids].numpy(), values[rows].numpy()) for ids, rows in entries]
        found[table] = [each for each in shards if len(each[0])] or shards[:1]
    return found


def read_id_maps(folder: Path, input_hash_sizes: Mapping[str, int], world: int) -> dict[str, RawIdMap]:
    """Read the id maps of tables from a dense directory whose digests have been compared.

    Args:
        folder: The directory.
        world: Number of ranks that have written it. Each has a shard of each table; the last ones may have no rows.
        input_hash_sizes: ``input_hash_size`` of the managed collision module, by ``TableSpec.name``.

    Raises:
        SchemaMismatchError: the marker has no id map of a table.
        ConfigError: its raw ids contradict the hash size.
    """
    maps = {}
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    for table, shards in _read_shards(folder, input_hash_sizes).items():
        size = input_hash_sizes[table]
        maps[table] = RawIdMap(size, (*shards, *(nothing for _ in range(world - len(shards)))))
        if strangers := maps[table].strangers():
            raise ConfigError(
                f"input_hash_size {size} sends {strangers} raw ids of the marker to another of its "
                f"{world} shards than the one that has them",
                hint="give the input_hash_size of the trainer's MCHManagedCollisionModule",
                table=table,
            )
    return maps
