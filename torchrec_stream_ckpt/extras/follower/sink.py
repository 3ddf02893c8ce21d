"""Keep a copy of the tables outside this process, in a sink, at the newest marker of a job. Imports no torch."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Protocol

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
    that no raw id gets the value of the one that had the row before. Ids are compared with those of the marker that the
    sink holds, or, if an update broke off or all rows are loaded, with those that the sink has. Holds a few numbers a
    row of these tables.

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
        self._position, _, towards = stored.partition(">")
        """Position that the sink holds, without the marker that is being written."""
        self._towards = MarkerId.parse(towards) if towards else None
        """Marker of an update that broke off in a process before this one."""
        self._held: dict[str, HeldIds] | None = None
        """Raw ids of the rows at that position, by table; None if they were not read in this process."""
        self._may_stray = True
        """True if the sink may hold other raw ids than those."""
        if stored:
            follower.resume(stored)

    def updates(
        self, timeout_s: float | None = None, *, once: bool = False, until_closed: bool = False
    ) -> Iterator[Written]:
        """Yield each update once it is in the sink.

        Args:
            timeout_s, once, until_closed: As of :meth:`Follower.updates`.

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
                if outages.is_on:
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
        maps = self._maps_of(update)
        if not is_load and (why := self._recall(maps)):
            self._follower.load_anew(why)
            return None
        held = self._held if self._held is not None and not is_load else {}
        parts = {
            table.name: IdUpdate(table, maps[table.name], held.get(table.name))
            for _, table in update.schema.live
            if table.name in maps
        }
        self._sink.begin(update, maps.keys())
        strays, self._may_stray = is_load or self._may_stray, bool(maps)
        if is_load:
            self._position, self._held = "", None
        for name, each in held.items():
            each.doubt(maps[name])
        written = Written(update, {}, 0.0, self._delete(update, parts, strays=strays))
        self._put(update, parts, written.rows)
        if not self._is_proved(update, parts):
            return None
        self._sink.done(update)
        self._position, self._towards = update.position, None
        self._held, self._may_stray = {name: HeldIds.at_marker(ids) for name, ids in maps.items()}, False
        return replace(written, took_s=time.monotonic() - begin_s)

    # Raw ids.

    def _maps_of(self, update: Update) -> dict[str, Ids]:
        """Return the raw id of each row of the tables with an id map, by table; empty if the job has none.

        Raises:
            ConfigError, CorruptionError, StoreUnavailableError: as :attr:`Update.dense`.
        """
        wanted = {table.name: table.rows for _, table in update.schema.live if self._follower.wants(table)}
        if not any(_WITH_MAP in f".{name}" for name in wanted):
            return {}
        from torchrec_stream_ckpt.extras.interchange.id_map import read_raw_ids

        found = {name: ids for name, ids in read_raw_ids(update.dense()).items() if name in wanted}
        for name, ids in found.items():
            if len(ids) != wanted[name]:
                raise CorruptionError(
                    f"the id map of the marker has {len(ids)} rows, but the table has {wanted[name]}",
                    marker=update.marker,
                    table=name,
                )
        return found

    def _recall(self, maps: Mapping[str, Ids]) -> str:
        """Read the raw ids of the marker that the sink holds. Returns why they are not known; empty if they are."""
        if self._held is None:
            if not maps:
                self._held = {}
                return ""
            from torchrec_stream_ckpt.extras.interchange.id_map import read_raw_ids

            at = MarkerId.parse(self._position.partition("@")[0])
            try:
                held = {name: HeldIds.at_marker(ids) for name, ids in read_raw_ids(self._follower.dense_of(at)).items()}
                if self._towards is not None:
                    broken = read_raw_ids(self._follower.dense_of(self._towards))
                    for name in held.keys() & broken.keys():
                        held[name].doubt(broken[name])
            except (CorruptionError, TrimmedError, MarkerNotFoundError, SchemaMismatchError) as error:
                return f"the id maps of marker {at}, which the sink holds, cannot be read: {error.headline}"
            self._held = {name: each for name, each in held.items() if name in maps}
            self._may_stray = self._towards is not None
        if self._held.keys() != maps.keys():
            return "tables with id maps were added or removed"
        return ""

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
