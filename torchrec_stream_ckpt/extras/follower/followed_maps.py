"""Id maps of a replica: which raw id has which row at the update that is applied."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError, SchemaMismatchError, UnsupportedError
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.extras.follower.updates import ChangedIds, Update
from torchrec_stream_ckpt.extras.interchange.id_map import IdChanges, Ids, RawIdMap, read_id_maps


class FollowedMaps:
    """The id maps of some tables, read when all rows are loaded, and changed by the stream from there on.

    Args:
        follower: Source of the updates.
        input_hash_sizes: ``input_hash_size`` of the managed collision modules, by ``TableSpec.name``.
    """

    def __init__(self, follower: Follower, input_hash_sizes: Mapping[str, int]) -> None:
        self._follower = follower
        self._sizes = dict(input_hash_sizes)
        self._applied: dict[str, RawIdMap] = {}
        """Id maps of the applied update."""
        self._next: dict[str, RawIdMap] = {}
        """Id maps of the update that is being applied, without its id events."""
        self._changes: dict[str, IdChanges] = {}
        """Id events of the update that is being applied."""
        self._seqs: dict[int, int] = {}
        """Last frame of id events that the applied maps have, by rank, since they were read."""

    def __contains__(self, table: str) -> bool:
        return table in self._sizes

    def __getitem__(self, table: str) -> RawIdMap:
        """Return the id map of a table at the applied update."""
        return self._applied[table]

    def prepare(self, update: Update) -> None:
        """Read the id maps of an update's marker, or find what the stream changes. Applied maps stay as they are.

        Raises:
            UnsupportedError: (``rows`` mode) the stream does not say how the maps change.
            CorruptionError: its id events contradict the maps. The next update loads a marker.
            ConfigError, SchemaMismatchError, CorruptionError, StoreUnavailableError: as :func:`read_id_maps` and
                :meth:`Update.dense`.
        """
        if not self._sizes:
            return
        if self._follower.mode == "rows" and not self._follower.gets_id_events(update.commit):
            raise UnsupportedError(
                f"generation {update.marker.generation} does not record between markers which raw id has which row",
                hint="follow with mode='markers', or restart the trainer with this version",
                marker=update.marker,
            )
        self._changes = {}
        if update.ids is not None:
            self._next, self._changes = self._applied, self._planned(update.ids)
            return
        followed = {table.name: table.rows for _, table in update.schema.live if self._follower.wants(table)}
        unknown = sorted(self._sizes.keys() - followed.keys())
        if unknown:
            raise SchemaMismatchError(
                f"input_hash_sizes names this table, but {', '.join(sorted(followed)) or 'no table'} is followed",
                hint="name tables as TableSpec.name does",
                table=unknown[0],
            )
        self._next = read_id_maps(update.dense(), self._sizes, len(update.commit.ranks))
        for name, each in self._next.items():
            if each.rows != followed[name]:
                raise CorruptionError(
                    f"the id map of the marker has {each.rows} rows, but the table has {followed[name]}",
                    marker=update.marker,
                    table=name,
                )

    def _planned(self, changes: Sequence[ChangedIds]) -> dict[str, IdChanges]:
        """Return the effect of id events by table, without those that the maps have from an update that is handed out
        again."""
        new = [each for each in changes if each.seq > self._seqs.get(each.rank, -1)]
        try:
            return {
                name: held.after([(each.rank, each.events) for each in new if each.table.name == name], name)
                for name, held in self._applied.items()
            }
        except CorruptionError as error:
            self._follower.load_anew(f"id events contradict the id map: {error.headline}")
            raise

    def changed(self) -> Iterator[tuple[str, Ids, Ids]]:
        """Yield (table, rows, their raw ids) of the maps that the prepared update changes.

        A map that was read is yielded whole.
        """
        for name, each in self._next.items():
            if name in self._changes:
                rows, raw_ids = self._changes[name].rows, self._changes[name].ids_of_rows
            else:
                rows = np.arange(each.rows)
                raw_ids = each.owners_of(rows)
            if len(rows):
                yield name, rows, raw_ids

    def settle(self, update: Update) -> None:
        """Apply the prepared update. Nobody may read the maps meanwhile."""
        self._applied = self._next
        for name, changes in self._changes.items():
            self._applied[name].apply(changes)
        self._changes = {}
        if update.ids is None:
            self._seqs.clear()
        for each in update.ids or ():
            self._seqs[each.rank] = max(each.seq, self._seqs.get(each.rank, -1))
