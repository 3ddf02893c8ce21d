"""Keep a copy of the tables outside this process, in a sink, at the newest marker of a job. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    SchemaMismatchError,
    SinkUnavailableError,
    TrimmedError,
)
from torchrec_stream_ckpt.extras.follower.core import Follower
from torchrec_stream_ckpt.extras.follower.held_ids import HeldIds, Ids, IdUpdate
from torchrec_stream_ckpt.extras.follower.stats import Outages
from torchrec_stream_ckpt.extras.follower.unproved_blocks import compare_all, proof_of, refusal
from torchrec_stream_ckpt.extras.follower.updates import Changed, Update, UpdateKind
from torchrec_stream_ckpt.format.proof import BLOCK_ROWS
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.inner import Compared, WeightProof
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

if TYPE_CHECKING:
    from torchrec_stream_ckpt.extras.interchange.id_map import IdChanges

log = logging.getLogger(__name__)

_WITH_MAP = "._embedding_module."
"""Part of the name of each table that managed collision maps raw ids to."""


class Sink(Protocol):
    """Rows outside this process, and the position that they stand for. Used by one thread.

    Rows have a key: the raw id in a table with an id map (managed collision), the number of the row in any other.

    Each method may raise SinkUnavailableError: the sink does not answer or has lost rows. The update is then written
    again as a whole, so writing a row twice, or deleting it twice, must do no harm.
    """

    reads_back: bool
    """True if :meth:`read` works. Otherwise rows are not compared with proofs."""

    def position(self) -> str:
        """Return the stored position for :meth:`Follower.resume`. Returns "" if all rows have to be loaded."""

    def begin(self, update: Update, mapped: Collection[str]) -> None:
        """Record durably that rows of an update may follow. A load begins with rows of unknown value.

        Until :meth:`done`, :meth:`position` is that of the rows before, followed by ``>`` and the marker for each
        update that began; "" after a load has begun.

        Args:
            update: The update.
            mapped: Names of the tables whose rows have raw ids as keys.

        Raises:
            FencedError: another program feeds this sink.
        """

    def put(self, changed: Changed) -> None:
        """Write rows, or a slice of their columns. ``changed.ids`` are their keys. Raises FencedError as
        :meth:`begin`."""

    def delete(self, table: TableSpec, raw_ids: Ids) -> None:
        """Delete the rows of raw ids, as far as they exist. Raises FencedError as :meth:`begin`."""

    def held(self, table: TableSpec) -> Iterator[Ids]:
        """Yield the raw ids of all rows of a table that :meth:`put` has left here, each at least once. Others may be
        deleted meanwhile."""

    def read(self, table: TableSpec, ids: npt.NDArray[np.int64]) -> Array:
        """Return the weights of rows, shape (len(ids), dim). Missing rows have values that no trainer writes."""

    def done(self, update: Update) -> None:
        """Store the position of an update whose rows were all written. Raises FencedError as :meth:`begin`."""

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Written:
    """An update that is in a sink, with its position."""

    update: Update
    rows: dict[str, int]
    """Row records by table."""
    took_s: float
    tombstones: Mapping[str, int] = field(default_factory=dict)
    """Raw ids that were deleted, by table."""


class Feed:
    """Writes the updates of a follower to a sink: at least once, its position last.

    In a table with an id map the keys are raw ids. At each marker the raw ids that its map no longer has are deleted,
    and a row that another raw id has now is written under that one. Each row is written in its newest version only, so
    that no raw id gets the value of the one that had the row before. Costs the changed rows and ids, which the stream
    names; whole maps are read and compared where it does not. If an update broke off or all rows are loaded, the sink's
    raw ids are compared, too. Holds 40 to 72 bytes a row of these tables.

    Args:
        follower: Source of the updates, in ``markers`` mode. The feed does not close it.
        sink: Destination. The feed does not close it.
        accept_unproved: Keep rows that differ from their marker's proof. They are named and counted.

    Raises:
        ConfigError: the follower hands out rows that no marker has.
        SinkUnavailableError: the sink does not answer.
    """

    def __init__(self, follower: Follower, sink: Sink, *, accept_unproved: bool = False) -> None:
        if follower.mode != "markers":
            raise ConfigError("a sink requires a follower of markers", hint="follow with mode='markers'")
        self._follower = follower
        self._sink = sink
        self._accept = accept_unproved
        stored = sink.position()
        self._position, *towards = stored.split(">")
        """Position that the sink holds, without the markers that were being written."""
        self._towards = tuple(map(MarkerId.parse, towards))
        """Markers of updates that broke off in processes before this one."""
        self._held: dict[str, HeldIds] | None = None
        """Raw ids of the rows at that position, and what updates since may have changed, by table; None if they were
        not read in this process."""
        self._seqs: dict[int, int] = {}
        """Last frame of id events that these have, by rank, since whole maps were read."""
        self._may_stray = True
        """True if the sink may hold other raw ids than those."""
        if stored:
            follower.resume(stored)

    def updates(
        self, timeout_s: float | None = None, *, once: bool = False, until_closed: bool = False
    ) -> Iterator[Written]:
        """Yield each update once it is in the sink.

        Args:
            timeout_s, once, until_closed: As in :meth:`Follower.updates`.

        Raises:
            ProofMismatchError: rows in the sink differ from a proof, also after all of them were written again.
            SinkUnavailableError: the sink did not answer for ``follower.outage_s``; with a timeout of 0, raised at
                once.
            FencedError: another program feeds this sink.
            StreamCkptError: as :meth:`Follower.updates`.
        """
        outages = Outages(self._follower.stats, "the sink answers again")
        while True:
            try:
                if outages.since is not None:
                    self._look_again()
                for update in self._follower.updates(timeout_s, once=once, until_closed=until_closed):
                    written = self._write(update)
                    if written is None:
                        break  # the next update is a load
                    outages.over()
                    yield written
                else:
                    return
            except SinkUnavailableError as error:
                outages.outlast(error, 0.0 if timeout_s == 0 else self._follower.outage_s)
                if self._follower.pause():
                    return

    def _look_again(self) -> None:
        """Load all rows if the sink came back with another position: it lost what was not on its disk."""
        stored = self._sink.position().partition(">")[0]
        if not stored or stored != self._position:
            self._follower.load_anew("the sink no longer holds the marker that was written last")

    def _write(self, update: Update) -> Written | None:
        """Write an update. Returns None if a load has to follow: rows differ, or the ids in the sink are unknown."""
        begin_s = time.monotonic()
        is_load = update.kind is UpdateKind.LOAD
        changes: dict[str, IdChanges] = {}
        if is_load:
            held = _at_marker(self._maps_of(update))
        else:
            why = self._recall(update)
            held = self._held or {}
            if not why:
                why, changes = self._id_changes(update, held)
            if why:
                self._follower.load_anew(why)
                return None
        self._sink.begin(update, held.keys())
        strays, self._may_stray = is_load or self._may_stray, bool(held)
        self._note_begun(update, held)
        parts = {
            table.name: held[table.name].begin(table, changes.get(table.name))
            for _, table in update.schema.live
            if table.name in held
        }
        written = Written(update, {}, 0.0, self._delete(update, parts, strays=strays))
        self._put(update, parts, written.rows)
        if not self._is_proved(update, parts):
            return None
        self._sink.done(update)
        self._position, self._towards = update.position, ()
        self._held, self._may_stray = {name: HeldIds(each.map) for name, each in held.items()}, False
        return replace(written, took_s=time.monotonic() - begin_s)

    # Raw ids.

    def _has_maps(self, update: Update) -> bool:
        return any(_WITH_MAP in f".{table.name}" for _, table in update.schema.live if self._follower.wants(table))

    def _maps_of(self, update: Update) -> dict[str, Ids]:
        """Return the raw id of each row of the tables with an id map, by table; empty if the job has none.

        Raises:
            ConfigError, CorruptionError, StoreUnavailableError: as :attr:`Update.dense`.
        """
        if not self._has_maps(update):
            return {}
        from torchrec_stream_ckpt.extras.interchange.id_map import read_raw_ids

        wanted = {table.name: table.rows for _, table in update.schema.live if self._follower.wants(table)}
        found = {name: ids for name, ids in read_raw_ids(update.dense()).items() if name in wanted}
        for name, ids in found.items():
            if len(ids) != wanted[name]:
                raise CorruptionError(
                    f"the id map of the marker has {len(ids)} rows, but the table has {wanted[name]}",
                    marker=update.marker,
                    table=name,
                )
        return found

    def _recall(self, update: Update) -> str:
        """Read the raw ids of the marker that the sink holds. Returns why they are not known; empty if they are."""
        if self._held is not None:
            return ""
        if not self._has_maps(update):
            self._held = {}
            return ""
        from torchrec_stream_ckpt.extras.interchange.id_map import read_raw_ids

        wanted = {table.name for _, table in update.schema.live if self._follower.wants(table)}
        at = MarkerId.parse(self._position.partition("@")[0])
        try:
            maps = read_raw_ids(self._follower.dense_of(at))
            held = _at_marker({name: ids for name, ids in maps.items() if name in wanted})
            for towards in self._towards:
                broken = read_raw_ids(self._follower.dense_of(towards))
                for name in held.keys() & broken.keys():
                    each = held[name]
                    each.doubtful = np.union1d(each.doubtful, each.map.until(broken[name]).rows)
        except (CorruptionError, TrimmedError, MarkerNotFoundError, SchemaMismatchError) as error:
            return f"the id maps of marker {at}, which the sink holds, cannot be read: {error.headline}"
        self._held, self._may_stray = held, bool(self._towards)
        return ""

    def _id_changes(self, update: Update, held: Mapping[str, HeldIds]) -> tuple[str, dict[str, IdChanges]]:
        """Return what an update changes in the id maps, by table, or why it is not known.

        The stream says it, except between generations, for rows from a store and for an older trainer: then the maps of
        the marker are read and compared.
        """
        if update.ids is None:
            maps = self._maps_of(update)
            if maps.keys() != held.keys():
                return "tables with id maps were added or removed", {}
            return "", {name: held[name].map.until(ids) for name, ids in maps.items()}
        new = [each for each in update.ids if each.seq > self._seqs.get(each.rank, -1)]
        try:
            return "", {
                name: each.map.after([(0, part.events) for part in new if part.table.name == name], name)
                for name, each in held.items()
            }
        except CorruptionError as error:
            return f"id events contradict the id map: {error.headline}", {}

    def _note_begun(self, update: Update, held: dict[str, HeldIds]) -> None:
        """Note that rows of an update may be in the sink from here on."""
        if update.kind is UpdateKind.LOAD:
            self._position, self._held = "", None
        else:
            self._held = held
        if update.ids is None:
            self._seqs.clear()
        for each in update.ids or ():
            self._seqs[each.rank] = max(each.seq, self._seqs.get(each.rank, -1))

    def _delete(self, update: Update, parts: Mapping[str, IdUpdate], *, strays: bool) -> dict[str, int]:
        """Delete the raw ids that a marker does not have. Returns their number by table."""
        deleted = {}
        for _, table in update.schema.live:
            if table.name in parts:
                part = parts[table.name]
                found = (part.strays(ids) for ids in self._sink.held(table)) if strays else iter(())
                deleted[table.name] = sum(self._drop(table, ids) for ids in (part.gone, *found))
        return {name: number for name, number in deleted.items() if number}

    def _drop(self, table: TableSpec, raw_ids: Ids) -> int:
        if len(raw_ids):
            self._sink.delete(table, raw_ids)
            self._follower.stats.count(0, len(raw_ids))
        return len(raw_ids)

    # Rows.

    def _put(self, update: Update, parts: Mapping[str, IdUpdate], counts: dict[str, int]) -> None:
        """Write the rows of an update, and count them by table."""
        is_load = update.kind is UpdateKind.LOAD
        if parts and not is_load:
            for changed in update.preview():
                if changed.table.name in parts:
                    parts[changed.table.name].preview(changed)
            for each in parts.values():
                each.end_preview()
        for changed in update.changes():
            part = parts.get(changed.table.name)
            if part is not None:
                changed = part.take_newest(changed) if is_load else part.take(changed)
            self._put_counted(changed, counts)
        lacking = {name: rows for name, part in parts.items() if len(rows := part.lacking())}
        for changed in update.whole(lacking) if lacking else ():
            self._put_counted(parts[changed.table.name].take_newest(changed), counts)

    def _put_counted(self, changed: Changed, counts: dict[str, int]) -> None:
        if len(changed.ids):
            self._sink.put(changed)
            counts[changed.table.name] = counts.get(changed.table.name, 0) + len(changed.ids)

    def _compare(self, parts: Mapping[str, IdUpdate], proof: WeightProof, table: TableSpec) -> Compared:
        if not self._follower.wants(table):
            return Compared()
        read = partial(self._sink.read, table)
        if (part := parts.get(table.name)) is None or table.name not in proof.tables:
            return proof.compare(table, 0, table.rows, read)
        blocks, digests = proof.tables[table.name]
        used = part.are_used(blocks, BLOCK_ROWS)
        proof = replace(proof, tables={table.name: (blocks[used], digests[used])})
        return proof.compare(table, 0, table.rows, lambda rows: read(part.raw_ids_of(rows)))

    def _is_proved(self, update: Update, parts: Mapping[str, IdUpdate]) -> bool:
        """Compare the sink's rows with the proof of the marker; for a load, also with older ones.

        Raises:
            ProofMismatchError: they differ after a load.
        """
        stats = self._follower.stats
        if not self._sink.reads_back:
            stats.uncompared += 1
            return True
        own = proof_of(update)
        stats.proofs += own is not None
        stats.uncompared += own is None
        found = compare_all(update, own, partial(self._compare, parts))
        if found.unproved is None:
            return True
        stats.unproved += found.unproved.count
        error = refusal(found.unproved, update.marker)
        if self._accept:
            log.error("written as they are: %s", error.headline)
            return True
        if update.kind is UpdateKind.LOAD:
            raise error
        self._follower.load_anew(f"rows differ from the proof of marker {update.marker}", first=update.marker)
        return False


def _at_marker(maps: Mapping[str, Ids]) -> dict[str, HeldIds]:
    """Return the raw ids of a sink that holds a marker, from the raw id of each row, by table."""
    if not maps:
        return {}
    from torchrec_stream_ckpt.extras.interchange.id_map import RawIdMap

    # One shard: which rank has a raw id does not matter here.
    return {name: HeldIds(RawIdMap(0, ((ids, np.arange(len(ids))),), name)) for name, ids in maps.items()}
