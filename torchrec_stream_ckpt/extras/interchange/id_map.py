"""Raw ids of managed collision at one marker: which row TorchRec looks up for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch.distributed.checkpoint.filesystem import FileSystemReader

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, SchemaMismatchError
from torchrec_stream_ckpt.extras.interchange.dense_state import read_entries
from torchrec_stream_ckpt.extras.interchange.hash_rows import FREE, HashLayout
from torchrec_stream_ckpt.format.rows import ASSIGNED, NO_ID, IdEvents

Ids = npt.NDArray[np.int64]

_FIELDS = ("map_raw_ids", "map_rows")
_HASH_FIELDS = ("hash_raw_ids", "hash_hidden", "hash_buckets", "hash_layout")


def shards_of(raw_ids: Ids, input_hash_size: int, shards: int) -> Ids:
    """Return the number of the shard that TorchRec's input dist sends each raw id to."""
    numbers = raw_ids.astype(np.uint64)
    block = -(-input_hash_size // shards)
    dealt = numbers % np.uint64(shards)
    if not block:
        return dealt.astype(np.int64)
    return np.where(numbers < np.uint64(block * shards), numbers // np.uint64(block), dealt).astype(np.int64)


class _RowsById:
    """Raw id -> row, in a hash table with open addressing. A change costs the same whatever the number of ids.

    Args:
        ids: Raw ids, each once, without :data:`NO_ID`.
        rows: Their rows.
    """

    def __init__(self, ids: Ids, rows: Ids) -> None:
        self._fill(ids, rows, len(ids))

    def find(self, ids: Ids) -> Ids:
        """Return the row of each raw id; -1 for unknown ones, and for :data:`NO_ID`."""
        return self._rows[self._places(ids)]

    def put(self, ids: Ids, rows: Ids) -> None:
        """Set the rows of raw ids, each given once; -1 forgets one."""
        if 3 * (self._used + len(ids)) > 2 * len(self._ids):
            live = np.flatnonzero(self._rows >= 0)
            self._fill(self._ids[live], self._rows[live], len(live) + len(ids))
        left = np.arange(len(ids))
        while len(left):
            places = self._places(ids[left])
            fresh = self._ids[places] == NO_ID
            self._ids[places[fresh]] = ids[left[fresh]]  # of several in one place, one remains
            mine = self._ids[places] == ids[left]
            self._used += int(np.count_nonzero(fresh & mine))
            self._rows[places[mine]] = rows[left[mine]]
            left = left[~mine]

    def _fill(self, ids: Ids, rows: Ids, room: int) -> None:
        self._shift = np.uint64(64 - max(4, (2 * room).bit_length()))
        size = 1 << (64 - int(self._shift))
        self._ids = np.full(size, NO_ID, np.int64)
        self._rows = np.full(size, -1, np.int64)
        self._used = 0
        """Places with a raw id, also a forgotten one."""
        self.put(ids, rows)

    def _places(self, ids: Ids) -> Ids:
        """Return the place of each raw id: that which has it, or the empty one where it would be put."""
        numbers = ids.astype(np.uint64)
        numbers ^= numbers >> np.uint64(32)
        places = (numbers * np.uint64(0x9E3779B97F4A7C15) >> self._shift).astype(np.int64)
        open_ = np.arange(len(ids))
        while len(open_):
            found = self._ids[places[open_]]
            open_ = open_[(found != ids[open_]) & (found != NO_ID)]
            places[open_] = (places[open_] + 1) % len(self._ids)
        return places


@dataclass(frozen=True, slots=True)
class IdChanges:
    """Effect of events on a :class:`RawIdMap`: each raw id and each row once, as it is after all of them."""

    raw_ids: Ids
    rows_of_ids: Ids
    """-1 for a raw id that has no row any more."""
    rows: Ids
    ids_of_rows: Ids
    """:data:`NO_ID` for a row that is free."""


class RawIdMap:
    """The id map of one table over all of its shards.

    Holds 40 to 72 bytes per raw id and row. A change of the map costs the same whatever its size.

    Args:
        input_hash_size: As of the managed collision module.
        shards: (raw ids, rows) of each shard, in the order of their rows. A shard has all of its rows; free ones share
            :data:`NO_ID`, in TorchRec's order. The last shards may have no rows.
        table: The table, for errors.
        hashed: The buckets, if the module is one of hash ZCH.

    Raises:
        ConfigError: raw ids contradict the hash size.
    """

    def __init__(
        self,
        input_hash_size: int,
        shards: Sequence[tuple[Ids, Ids]],
        table: str = "",
        hashed: HashLayout | None = None,
    ) -> None:
        self._size = input_hash_size
        self.hashed = hashed
        """The buckets of hash ZCH, if it is a map of that."""
        self._first = np.array([rows.min() if len(rows) else 0 for _, rows in shards], np.int64)
        self._last = np.array([rows.max() if len(rows) else -1 for _, rows in shards], np.int64)
        ids, rows = (np.concatenate(parts) for parts in zip(*shards, strict=True))
        numbers = np.repeat(np.arange(len(shards)), [len(part) for part, _ in shards])
        used = ids != NO_ID
        self._check_shards(ids[used], rows[used], numbers[used], table)
        self._owners = np.full(int(self._last.max()) + 1, NO_ID, np.int64)
        """Raw id of each row."""
        self._owners[rows] = ids
        self._rows = _RowsById(ids[used], rows[used])
        self._free: list[Ids | None] = [part[raw_ids == NO_ID] for raw_ids, part in shards]
        """Rows of each shard that were free at first. TorchRec keeps their order. None if rows have become free."""

    @property
    def rows(self) -> int:
        """Rows of the table."""
        return len(self._owners)

    def rows_of(self, raw_ids: Ids) -> Ids:
        """Return the row of each raw id. An unknown one has the last row of the shard that it is sent to.

        The greatest int64 has the first free row of its shard, as in TorchRec, where that is its mark of free rows. In
        hash ZCH an unknown raw id has the row that its hash points to.

        Raises:
            ConfigError: a raw id is sent to a shard without rows, where TorchRec fails, too; or it is the greatest
                int64, and the order of free rows is not known. In hash ZCH: it has no bucket; or it is -1, TorchRec's
                mark of free rows, or the greatest int64, which events use for free rows.
        """
        if self.hashed is not None:
            return self._hashed_rows(raw_ids, self.hashed)
        shards = shards_of(raw_ids, self._size, len(self._last))
        if (lost := self._last[shards] < 0).any():
            place = int(np.argmax(lost))
            raise ConfigError(
                f"raw id {raw_ids[place]} is sent to shard {shards[place]} of {len(self._last)}, which has no rows: "
                "TorchRec cannot look it up",
                hint="look up only raw ids that the trainer can train",
            )
        rows = self._rows.find(raw_ids)
        rows = np.where(rows >= 0, rows, self._last[shards])
        if (marks := raw_ids == NO_ID).any():
            rows[marks] = self._first_free(int(shards[int(np.argmax(marks))]))
        return rows

    def _hashed_rows(self, raw_ids: Ids, layout: HashLayout) -> Ids:
        if (marks := (raw_ids == FREE) | (raw_ids == NO_ID)).any():
            raise ConfigError(
                f"raw id {raw_ids[int(np.argmax(marks))]} is reserved for free rows, by TorchRec's hash "
                "ZCH or by the stream",
                hint="look up other raw ids",
            )
        shared, rows = layout.shared_rows(raw_ids), self._rows.find(raw_ids)
        return np.where(rows >= 0, rows, shared)

    def owners_of(self, rows: Ids) -> Ids:
        """Return the raw id of each row; :data:`NO_ID` for a free one."""
        return self._owners[rows]

    def held_rows(self, raw_ids: Ids) -> Ids:
        """Return the row that each raw id has; -1 for an unknown one."""
        return self._rows.find(raw_ids)

    def until(self, owners: Ids) -> IdChanges:
        """Return what changes this map into another one of the same rows; this map stays as it is.

        Args:
            owners: Raw id of each row there, each at most once.
        """
        rows = np.flatnonzero(self._owners != owners)
        new = owners[rows]
        used = new != NO_ID
        lost = np.setdiff1d(self._owners[rows], np.append(new, NO_ID))
        return IdChanges(
            np.concatenate([new[used], lost]),
            np.concatenate([rows[used], np.full(len(lost), -1)]),
            rows,
            new,
        )

    def after(self, frames: Sequence[tuple[int, IdEvents]], table: str) -> IdChanges:
        """Return what events change; this map stays as it is.

        Args:
            frames: (number of the shard, events of one of its frames), in order.
            table: The table, for errors.

        Raises:
            CorruptionError: the events contradict this map: a raw id loses a row that it does not have, or gets a row
                that is not free, or has one already.
            ConfigError: a raw id contradicts the hash size.
        """
        nothing = np.empty(0, np.int64)
        shards = np.concatenate([nothing, *(np.full(len(each.rows), shard) for shard, each in frames)])
        rows = np.concatenate([nothing, *(each.rows for _, each in frames)])
        raw_ids = np.concatenate([nothing, *(each.raw_ids for _, each in frames)])
        gets = np.concatenate([nothing, *(each.kinds for _, each in frames)]) == ASSIGNED
        if len(shards) and shards.max() >= len(self._last):
            raise CorruptionError(f"events of shard {shards.max()}, but the id map has {len(self._last)}", table=table)
        fits = (self._first[shards] <= rows) & (rows <= self._last[shards])
        owners = self._owners[np.where(fits, rows, 0)]
        owners, last_of_row = _before(rows, np.where(gets, raw_ids, NO_ID), owners)
        held, last_of_id = _before(raw_ids, np.where(gets, rows, -1), self._rows.find(raw_ids))
        fits &= np.where(gets, (owners == NO_ID) & (held < 0), owners == raw_ids)
        if not fits.all():
            place = int(np.argmin(fits))
            row, raw_id = int(rows[place]), int(raw_ids[place])
            if gets[place]:
                what = f"raw id {raw_id} gets row {row}, which is not free, or has another one"
            else:
                what = f"raw id {raw_id} loses row {row}, which it does not have"
            raise CorruptionError(what, table=table)
        self._check_shards(raw_ids, rows, shards, table)
        return IdChanges(
            raw_ids[last_of_id],
            np.where(gets, rows, -1)[last_of_id],
            rows[last_of_row],
            np.where(gets, raw_ids, NO_ID)[last_of_row],
        )

    def apply(self, changes: IdChanges) -> None:
        """Make changes of :meth:`after`. Nobody may read the map meanwhile."""
        self._owners[changes.rows] = changes.ids_of_rows
        self._rows.put(changes.raw_ids, changes.rows_of_ids)
        freed = changes.rows[changes.ids_of_rows == NO_ID]
        for shard in np.flatnonzero(self._last >= 0).tolist() if len(freed) else ():
            if ((self._first[shard] <= freed) & (freed <= self._last[shard])).any():
                self._free[shard] = None

    def pairs(self) -> dict[int, int]:
        """Return the row of each raw id."""
        rows = np.flatnonzero(self._owners != NO_ID)
        return dict(zip(self._owners[rows].tolist(), rows.tolist(), strict=True))

    def _first_free(self, shard: int) -> int:
        free = self._free[shard]
        if free is None:
            raise ConfigError(
                f"raw id {NO_ID} is TorchRec's mark of free rows, and it is not known which of them TorchRec looks up",
                hint="look up other raw ids",
            )
        taken = self._owners[free] != NO_ID
        return int(free[np.argmin(taken)]) if not taken.all() else int(self._last[shard])

    def _check_shards(self, raw_ids: Ids, rows: Ids, shards: Ids, table: str) -> None:
        world = len(self._last)
        if self.hashed is not None:
            strangers, parts = self.hashed.strangers(raw_ids, rows), f"{len(self.hashed.edges) - 1} buckets"
        else:
            strangers, parts = int(np.count_nonzero(shards_of(raw_ids, self._size, world) != shards)), f"{world} shards"
        if strangers:
            raise ConfigError(
                f"by input_hash_size {self._size}, {strangers} raw ids of the marker belong to another of its {parts} "
                "than the one that holds them",
                hint="pass the input_hash_size of the trainer's managed collision module",
                table=table,
            )


def _before(keys: Ids, after: Ids, first: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Return the value that each key has before each of some events, and which event is the last one of its key.

    Args:
        keys: Key of each event, in order.
        after: Value that the key has after the event.
        first: Value that the key has before all events.
    """
    order = np.argsort(keys, kind="stable")
    again = np.append(False, keys[order][1:] == keys[order][:-1])[: len(keys)]
    before, is_last = np.empty_like(first), np.empty(len(keys), np.bool_)
    before[order] = np.where(again, np.roll(after[order], 1), first[order])
    is_last[order] = ~np.append(again[1:], False)[: len(keys)]
    return before, is_last


@dataclass(frozen=True, slots=True)
class _SavedMap:
    """The id map of one table in a marker."""

    shards: list[tuple[Ids, Ids]]
    """(raw ids, rows) of each shard that has rows, in the order of their rows."""
    hashed: tuple[Ids, Ids] | None = None
    """(hash ZCH) The fields ``hash_buckets`` and ``hash_layout``."""


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
    for table, saved in _read_maps(folder).items():
        ids, rows = (np.concatenate(parts) for parts in zip(*saved.shards, strict=True))
        owners[table] = np.full(len(rows), NO_ID, np.int64)
        owners[table][rows] = ids
    return owners


def _read_maps(folder: Path, tables: Iterable[str] | None = None) -> dict[str, _SavedMap]:
    """Read the id maps of tables; ``tables``: None for all."""
    reader = FileSystemReader(folder)
    metadata = reader.read_metadata()
    starts: dict[str, list[int]] = {}
    hashed = set()
    for entry in metadata.state_dict_metadata:
        if entry.startswith("collision.") and entry.endswith((f".{_FIELDS[0]}", f".{_HASH_FIELDS[0]}")):
            table, row0, field = entry.removeprefix("collision.").rsplit(".", 2)
            starts.setdefault(table, []).append(int(row0))
            if field == _HASH_FIELDS[0]:
                hashed.add(table)
    found = {}
    for table in starts if tables is None else tables:
        if table not in starts:
            raise SchemaMismatchError(
                f"the marker has no id map of this table, only of {', '.join(sorted(starts)) or 'no table'}",
                hint="look up by raw id only in tables with managed collision; rows of others are known by number",
                table=table,
            )
        fields = _HASH_FIELDS if table in hashed else _FIELDS
        names = [[f"collision.{table}.{row0}.{field}" for field in fields] for row0 in sorted(starts[table])]
        values = read_entries(reader, metadata, [each for entries in names for each in entries])
        pieces = [[values[entry].numpy() for entry in entries] for entries in names]
        found[table] = saved = _hash_map(pieces, sorted(starts[table])) if table in hashed else _sorted_map(pieces)
        raw_ids, rows = (np.concatenate(parts) for parts in zip(*saved.shards, strict=True))
        used = np.sort(raw_ids[raw_ids != NO_ID])
        if not np.array_equal(np.sort(rows), np.arange(len(rows))) or (used[1:] == used[:-1]).any():
            raise CorruptionError("the id maps of the marker give a row or a raw id twice", table=table)
    return found


def _sorted_map(pieces: Sequence[Sequence[Ids]]) -> _SavedMap:
    shards = [(raw_ids, rows) for raw_ids, rows in pieces]
    return _SavedMap([each for each in shards if len(each[0])] or shards[:1])


def _hash_map(pieces: Sequence[Sequence[Ids]], starts: Sequence[int]) -> _SavedMap:
    shards = []
    for (raw_ids, hidden, _, _), row0 in zip(pieces, starts, strict=True):
        ids = np.where(raw_ids == FREE, NO_ID, raw_ids)
        ids[hidden - row0] = NO_ID
        shards.append((ids, row0 + np.arange(len(ids))))
    _, _, buckets, layout = pieces[0]
    return _SavedMap([each for each in shards if len(each[0])] or shards[:1], (buckets, layout))


def read_id_maps(folder: Path, input_hash_sizes: Mapping[str, int], world: int) -> dict[str, RawIdMap]:
    """Read the id maps of tables from a dense directory whose digests have been compared.

    Args:
        folder: The directory.
        world: Number of ranks that have written it. Each has a shard of each table; the last ones may have no rows.
        input_hash_sizes: ``input_hash_size`` of the managed collision module, by ``TableSpec.name``.

    Raises:
        SchemaMismatchError: the marker has no id map of a table.
        CorruptionError: a map gives a row or a raw id twice.
        ConfigError: its raw ids contradict the hash size.
        UnsupportedError: TorchRec looks up no row for unknown raw ids of a table.
    """
    nothing = np.empty(0, np.int64), np.empty(0, np.int64)
    found = {}
    for table, saved in _read_maps(folder, input_hash_sizes).items():
        size, layout = input_hash_sizes[table], None
        if saved.hashed is not None:
            layout = HashLayout.of(*saved.hashed, table)
            if layout.input_hash_size != size:
                raise ConfigError(
                    f"input_hash_size is {size} here and {layout.input_hash_size} in the marker",
                    hint="pass the input_hash_size of the trainer's managed collision module",
                    table=table,
                )
        shards = (*saved.shards, *(nothing for _ in range(world - len(saved.shards))))
        found[table] = RawIdMap(size, shards, table, layout)
    return found
