"""Keep HEAD at the newest marker of the store.

Rows that changed since its current marker are applied in place. HEAD is then compared with the marker's proof.

A HEAD whose rows differ from the store is freed and rebuilt: no restore takes rows from it.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from bisect import bisect_left
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StoreUnavailableError, StreamCkptError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.head import FORMAT, HeadSlice, HeadState, SliceLayout, column_slices, head_slice_name
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import decode_chunk
from torchrec_stream_ckpt.maintain.progress import Progress
from torchrec_stream_ckpt.maintain.proof_checker import ProofChecker
from torchrec_stream_ckpt.maintain.repairer import Repairer
from torchrec_stream_ckpt.proofs.window import WindowCheck, check_head
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.head import Head, HeadFolder, SliceArrays
from torchrec_stream_ckpt.store.newest import TableChunks
from torchrec_stream_ckpt.store.reader import load_notes, open_pieces, read_chunks
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId

T = TypeVar("T")

WRITER_WAIT_S = 10.0
"""Seconds to wait for restores that copy. After that, HEAD stays as it is until the next marker."""

Columns = tuple[int, int, int]
"""(table, col0, cols)."""

log = logging.getLogger(__name__)


class HeadWriter:
    """Keeps a HEAD on this host. Any number of processes may: one at a time writes, and the others find the work done.

    Args:
        root: Folder of the HEADs of all jobs.
        objects: The store that the rows come from.
        pool: Threads to read it with.
        wait_s: Seconds to wait for readers and other writers.
    """

    def __init__(self, root: Path, objects: Objects, pool: Executor, wait_s: float = WRITER_WAIT_S) -> None:
        self._root = root
        self._objects = objects
        self._pool = pool
        self._wait_s = wait_s
        self.marker: MarkerId | None = None
        """Marker of HEAD when it was last read. None if it was at none."""

    def follow(self, lineage: Lineage, catalog: Catalog, marker: MarkerId) -> bool:
        """Bring HEAD to a marker that the store has. Returns False if others kept it busy.

        Memory: HEAD itself, the chunks read ahead, and one byte per row while HEAD is rebuilt.

        Raises:
            ConfigError: its folder belongs to another user.
            StoreUnavailableError: its folder cannot be made or written to, there is no room for it, or the store does
                not answer. There is no HEAD then.
            CorruptionError: the store is damaged. There is no HEAD then.
        """
        try:
            with contextlib.closing(HeadFolder(self._root, lineage.job, create=True)) as folder:
                return self._follow(folder, lineage, catalog, marker)
        except OSError as error:
            self.marker = None
            raise _not_written(self._root, error) from error

    def read(self, job: bytes, work: Callable[[Head], T]) -> T | None:
        """Do ``work`` with HEAD, which is open and does not change. Returns None if HEAD is missing or being written.

        Raises:
            HeadDamagedError: as ``work`` does.
        """
        head = Head.open(self._root, job, self._wait_s)
        if head is None:
            return None
        with contextlib.closing(head):
            return work(head)

    def free(self, job: bytes) -> bool:
        """Remove HEAD. Returns False if others kept it busy.

        Raises:
            StoreUnavailableError: its folder cannot be written to.
        """
        try:
            with contextlib.closing(HeadFolder(self._root, job, create=True)) as folder:
                if not folder.lock(exclusive=True, wait_s=self._wait_s):
                    return False
                _free(folder)
        except OSError as error:
            raise _not_written(self._root, error) from error
        self.marker = None
        return True

    def _follow(self, folder: HeadFolder, lineage: Lineage, catalog: Catalog, marker: MarkerId) -> bool:
        if not folder.lock(exclusive=True, wait_s=self._wait_s):
            log.info("HEAD is not updated: a reader is using it")
            return False
        try:
            self._bring(folder, lineage, catalog, marker)
        finally:
            state = _readable_state(folder)
            self.marker = state.marker if state is not None and state.clean else None
            if self.marker is None:
                _free(folder)
        return True

    def _bring(self, folder: HeadFolder, lineage: Lineage, catalog: Catalog, marker: MarkerId) -> None:
        chain = lineage.chain(marker)
        now = _readable_state(folder)
        if now is not None and now.clean and now.commit == chain[-1]:
            return
        schema = lineage.claims[marker.generation].schema
        goal = self._goal(catalog, chain[-1], schema)
        place = _place(now, goal, chain)
        if now is not None and place is not None:
            try:
                cover = catalog.cover(chain[place + 1 :], now.marker)
                self._write(folder, now, goal, schema, self._rows(lineage, catalog, goal, cover))
            except CorruptionError as error:  # damaged, or later pieces are missing: all rows may still be there
                log.warning("rebuilding HEAD: %s", error.headline)
            else:
                return
        cover = catalog.cover(chain)
        self._write(folder, None, goal, schema, self._rows(lineage, catalog, goal, cover))

    def _goal(self, catalog: Catalog, commit: Commit, schema: Schema) -> HeadState:
        """Return the state of HEAD at ``commit``, without the checksums."""
        notes = load_notes(catalog, commit, self._pool)
        columns = column_slices(schema, [each.shards for each in notes])
        return HeadState(FORMAT, True, schema.crc, commit, tuple(HeadSlice(*each, 0) for each in columns), notes)

    def _rows(self, lineage: Lineage, catalog: Catalog, goal: HeadState, cover: Sequence[Piece]) -> list[Picked]:
        """Return the chunks that lead to ``goal``, oldest first."""
        if not cover or cover[-1].end != goal.marker:
            raise CorruptionError("the store has a gap before this marker", marker=goal.marker)
        bases, schema = lineage.bases(goal.marker), lineage.claims[goal.marker.generation].schema
        chunks = TableChunks(open_pieces(self._objects, cover, catalog.job, self._pool))
        return chunks.of({table: bases.get(table, 0) for table, _ in schema.live})

    def _write(
        self, folder: HeadFolder, now: HeadState | None, goal: HeadState, schema: Schema, rows: Sequence[Picked]
    ) -> None:
        """Mark HEAD as dirty, write the rows, and mark it as clean at ``goal``."""
        if now is None:
            folder.drop()
            make_room(folder, schema, goal.columns)
        else:
            folder.put_state(replace(now, clean=False))
        failpoint("head.dirty")
        known = {(each.table, each.col0): each.crc for each in now.slices} if now is not None else {}
        slices = {
            each: SortedSlice(folder, schema, each, known.get(each[:2]), _cuts(rows, each) if now is None else None)
            for each in goal.columns
        }
        for picked, entry, data in read_chunks(self._objects, rows, self._pool):
            view = decode_chunk(entry, data, schema, picked.ref.name)
            for (table, col0, cols), target in slices.items():
                if table == entry.table and max(col0, entry.col0) < min(col0 + cols, entry.col0 + entry.cols):
                    target.write(view, entry.col0, entry.cols)
            failpoint("head.chunk")
        done = tuple(HeadSlice(*columns, target.finish()) for columns, target in slices.items())
        failpoint("head.clean")
        folder.put_state(replace(goal, slices=done))


class SortedSlice:
    """One column slice that is being written.

    Args:
        folder: Folder of the HEAD.
        schema: Schema of its tables.
        columns: Table and columns of the slice.
        crc: Checksum of the slice's previous checksums. None if the slice is rebuilt.
        cuts: Columns at which the column slices of the incoming rows begin and end. Only if the slice is rebuilt.
    """

    def __init__(
        self, folder: HeadFolder, schema: Schema, columns: Columns, crc: int | None, cuts: list[int] | None
    ) -> None:
        table, self._col0, self._cols = columns
        self._table = schema.tables[table]
        layout = SliceLayout.of(self._table, self._cols)
        name = head_slice_name(table, self._col0)
        self._arrays = SliceArrays(folder.open_slice(table, self._col0, writable=True), layout, name, writable=True)
        self._touched = np.full(layout.blocks, crc is None, np.bool_)
        self._cuts = cuts
        self._arrived = np.zeros((len(cuts) - 1, layout.rows), np.bool_) if cuts is not None else None
        if crc is not None:
            self._arrays.check_crcs(crc)

    def write(self, view: RowsView, col0: int, cols: int) -> None:
        """Write the rows of a chunk of columns [col0, col0+cols) that overlap this slice.

        Raises:
            HeadDamagedError: the current bytes are not those that were written.
        """
        begin, stop = max(col0, self._col0), min(col0 + cols, self._col0 + self._cols)
        here, there = slice(begin - self._col0, stop - self._col0), slice(begin - col0, stop - col0)
        self._touch(view.ids)
        rows = _span(view.ids)
        for target, source in zip(self._arrays.arrays, (view.weights, *view.states), strict=True):
            if target.ndim == 2:
                target[rows, here] = source[:, there]
            elif (col0, cols) != (self._col0, self._cols):
                raise CorruptionError("row-wise states have two different column splits", table=self._table.name)
            else:
                target[rows] = source
        if self._arrived is not None and self._cuts is not None:
            self._arrived[bisect_left(self._cuts, begin) : bisect_left(self._cuts, stop), rows] = True

    def _touch(self, ids: npt.NDArray[np.int64]) -> None:
        """Check each block against its checksum before its first row is written and the checksum replaced."""
        if self._arrived is not None:
            return
        blocks = self._arrays.layout.blocks_with(ids)
        for block in np.flatnonzero(blocks & ~self._touched):
            self._arrays.check(int(block), int(block) + 1)
        self._touched |= blocks

    def finish(self) -> int:
        """Write new checksums for the changed blocks. Returns the checksum of all checksums.

        Raises:
            CorruptionError: rows are missing in a slice that is rebuilt.
        """
        if self._arrived is not None and (missing := int((~self._arrived.all(0)).sum())):
            raise CorruptionError(f"{missing} rows are missing in the store", table=self._table.name, col0=self._col0)
        for block in np.flatnonzero(self._touched):
            self._arrays.crcs[block] = self._arrays.crc_of(int(block))
        return self._arrays.crcs_crc


def _free(folder: HeadFolder) -> None:
    """Free the memory of an incomplete HEAD."""
    folder.drop()
    for table, col0 in folder.slices():
        folder.remove_slice(table, col0)


def _span(ids: npt.NDArray[np.int64]) -> slice | npt.NDArray[np.int64]:
    """Return ascending ids as a slice if they are contiguous."""
    first, last = int(ids[0]), int(ids[-1])
    return slice(first, last + 1) if last - first + 1 == len(ids) else ids


def _readable_state(folder: HeadFolder) -> HeadState | None:
    try:
        return folder.state()
    except CorruptionError as error:
        log.warning("rebuilding HEAD: %s", error.headline)
        return None


def _place(now: HeadState | None, goal: HeadState, chain: Sequence[Commit]) -> int | None:
    """Return the position of HEAD on the path to ``goal``. None if HEAD must be rebuilt."""
    if now is None or not now.clean or (now.schema_crc, now.columns) != (goal.schema_crc, goal.columns):
        return None
    return chain.index(now.commit) if now.commit in chain else None


def _cuts(rows: Sequence[Picked], columns: Columns) -> list[int]:
    """Return the columns at which to cut a slice: the columns between two cuts always arrive together."""
    table, begin, cols = columns
    edges = {begin, begin + cols}
    for picked in rows:
        mine = picked.front.directory[picked.chunks]
        mine = mine[mine["table"] == table]
        edges |= {int(edge) for edge in np.concatenate([mine["col0"], mine["col0"] + mine["cols"]])}
    return sorted(edge for edge in edges if begin <= edge <= begin + cols)


def make_room(folder: HeadFolder, schema: Schema, slices: Sequence[Columns]) -> None:
    """Allocate all memory that the arrays need before anything is written, or none.

    Raises:
        StoreUnavailableError: there is not enough memory.
    """
    there = folder.slices()
    sizes = {(table, col0): SliceLayout.of(schema.tables[table], cols).file_bytes for table, col0, cols in slices}
    for table, col0 in there.keys() - sizes.keys():
        folder.remove_slice(table, col0)
    needed = sum(max(0, size - there.get(place, 0)) for place, size in sizes.items())
    free = folder.free_bytes()
    if needed > free:
        raise StoreUnavailableError(
            f"HEAD needs {needed} more bytes, but {free} are free",
            hint="enlarge shared memory (mount -o remount,size=), or choose another folder in memory",
            folder=folder.path,
        )
    for (table, col0), size in sizes.items():
        fd = folder.open_slice(table, col0, writable=True)
        try:
            os.ftruncate(fd, size)
            os.posix_fallocate(fd, 0, max(1, size))  # writing to a map of missing memory would end the process
        finally:
            os.close(fd)


def _not_written(root: Path, error: OSError) -> StoreUnavailableError:
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return StoreUnavailableError(
        f"HEAD cannot be written: {error.strerror or error}",
        hint="enlarge shared memory" if full else "check the folder and its permissions, or choose another one",
        folder=root,
    )


class HeadKeeper:
    """Keeps one HEAD up to date. Without it a restore is slower, and nothing is lost.

    Problems are reported, not raised.

    Args:
        writer: Writes HEAD.
        repairer: Repairs damage in the store.
        proofs: Knows which rows of the store itself differ from their proofs.
        progress: Updated with the work done.
    """

    def __init__(self, writer: HeadWriter, repairer: Repairer, proofs: ProofChecker, progress: Progress) -> None:
        self.writer = writer
        self._repairer = repairer
        self._proofs = proofs
        self._progress = progress
        self._compared: MarkerId | None = None
        self.problem: StreamCkptError | None = None
        """Error of the last attempt to bring HEAD to the newest marker, or the fault found in HEAD."""

    def follow(self, lineage: Lineage, catalog: Catalog) -> None:
        """Bring HEAD to the newest marker that the store offers."""
        offered = catalog.markers - catalog.dropped
        newest = next((marker for marker in reversed(lineage.commits) if marker in offered), None)
        if newest is None:
            return
        if self.writer.marker != newest:
            self._progress.doing = f"bringing HEAD to marker {newest}"
        bring = partial(self.writer.follow, lineage, catalog, newest)
        try:
            self._repairer.mending(lineage, catalog, bring)
            self.problem = self._wrong(lineage, catalog)
            if self.problem is not None and self.writer.free(lineage.job):
                self._repairer.mending(lineage, catalog, bring)
                if (again := self._wrong(lineage, catalog)) is not None:
                    self.writer.free(lineage.job)
                    raise again
        except (StoreUnavailableError, ConfigError, CorruptionError) as error:
            self.problem = error  # it is tried again

    def _wrong(self, lineage: Lineage, catalog: Catalog) -> CorruptionError | None:
        """Return an error if rows of HEAD differ from the proof but those of the store do not. Checks a marker once."""
        marker = self.writer.marker
        if marker is None or marker == self._compared or not self._proofs.wanted:
            return None
        try:
            found = self.writer.read(lineage.job, partial(check_head, lineage))
        except CorruptionError as error:
            return error
        if found is None:
            return None  # another process is writing it
        missing = _blocks(found) - (_blocks(self._proofs.of(lineage, catalog, marker)) if found.differing else set())
        if missing:
            return CorruptionError(
                f"{len(missing)} blocks of rows in HEAD differ from the tables at the cut; rebuilding HEAD",
                marker=marker,
                first=min(missing),
            )
        self._compared = marker
        return None


def _blocks(found: WindowCheck) -> set[str]:
    """Return the names of the blocks that differ."""
    return {str(block) for block in found.compared.unproved.blocks} if found.compared.unproved is not None else set()
