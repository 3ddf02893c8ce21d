"""Merge sorted runs into a scratch folder until few enough are left to be merged at once, all under the same columns.

One pass reads each byte of the runs that it merges once, and writes the newest version of each row once. The newest
runs are merged first. A base, the oldest and largest run, is merged only where its columns are split differently from
those of newer rows.
"""

from __future__ import annotations

import contextlib
import tempfile
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from itertools import pairwise
from pathlib import Path

import numpy as np

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    MissingObjectError,
    ScratchUnavailableError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.format.rows import RowLayout, RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import ChunkEntry, SegmentId, SegmentKind
from torchrec_stream_ckpt.maintain.fold import SegmentWriter
from torchrec_stream_ckpt.maintain.row_digests import RowDigests
from torchrec_stream_ckpt.maintain.sorter import RowSorter
from torchrec_stream_ckpt.store.api import Readable
from torchrec_stream_ckpt.store.catalog import Picked
from torchrec_stream_ckpt.store.folder import FolderObjects
from torchrec_stream_ckpt.store.newest import NewestFirst
from torchrec_stream_ckpt.store.reader import open_segments
from torchrec_stream_ckpt.store.runs import Given, Runs, columns_of, cuts_of, open_at_once, read_from
from torchrec_stream_ckpt.util.scratch import ScratchFolder
from torchrec_stream_ckpt.util.types import MarkerId

FAN_IN = 64
"""Number of runs merged at once. One chunk of each, of at most 4 MB, is held in memory."""
PASS_BYTES = 64 * 2**20
"""Bytes of rows that one window of a pass takes at most, and that one of its segments holds before it is written."""


_ROOM_HINT = "make room there, or set TMPDIR to a folder with room for the rows that came since the last base"


class ScratchRuns:
    """Segments of a store, and those that passes write to a separate folder, which :meth:`close` deletes.

    Args:
        objects: The store.
        pool: Threads to read with.
        folder: Where the folder is made once a pass needs it. None for the place of temporary files (``TMPDIR``).
        progress: Called with the bytes of each chunk that a pass reads.
    """

    def __init__(
        self,
        objects: Readable,
        pool: Executor,
        folder: Path | None = None,
        progress: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._objects = objects
        self._pool = pool
        self._where = folder
        self._progress = progress
        self._folder: ScratchFolder | None = None
        self._made: FolderObjects | None = None
        self._names: set[str] = set()
        self._groups = 0
        self._written, self._seen = RowDigests(), RowDigests()

    def read(self, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        """Read a range of a segment of the store or of the folder."""
        if self._made is None or name not in self._names:
            return self._objects.read(name, begin, end)
        with self._named():
            return self._made.read(name, begin, end)

    def saw(self, given: Given) -> None:
        """Record a chunk that was given to a merge, for :meth:`check`."""
        if not given.is_kept and given.picked.ref.name in self._names:
            entry = given.entry
            self._seen.add(entry.table, entry.col0, entry.cols, given.view)

    def check(self) -> None:
        """Check, after a merge has seen everything, that the rows read back are those that passes have written.

        Raises:
            CorruptionError: they are not.
        """
        if self._seen != self._written:
            raise CorruptionError(
                f"{self._written.rows} rows were written to the scratch folder, but {self._seen.rows} were read "
                "back, or their bits differ",
                hint="check this host's memory and the disk of its temporary files (TMPDIR), and restart",
            )

    def narrowed(
        self,
        schema: Schema,
        newest: Sequence[Picked],
        table: int,
        *,
        as_wide: bool = False,
        within: tuple[int, int] | None = None,
    ) -> list[Picked]:
        """Return runs with the newest rows, of which at most ``FAN_IN`` are open at once.

        None of them is wider than the gap between adjacent cuts.

        Args:
            schema: Schema of the rows.
            newest: Chunks of one table, the newest segment first.
            table: Index of the table.
            as_wide: Whether runs may keep their width.
            within: [first row, row after the last) of the wanted rows. None for all. Passes omit other rows.

        Raises:
            CorruptionError: a segment is damaged, or row-wise state exists under two column splits.
            ScratchUnavailableError: there is no room for temporary files.
            StoreUnavailableError: a store does not answer.
        """
        held, cuts = [each for each in newest if len(each.chunks)], cuts_of(columns_of(newest))
        is_wide = not as_wide and not columns_of(held) <= _slices(cuts)
        newer = len(held) if is_wide else _first_of_oldest(held, cuts)
        held, oldest = held[:newer], held[newer:]
        while is_wide or open_at_once([*held, *oldest], cuts) > FAN_IN:
            done: list[Picked] = []
            while held and (is_wide or open_at_once([*done, *held, *oldest], cuts) > FAN_IN):
                count = _most(held, cuts)
                done += self._pass(schema, held[:count], table, cuts, within)
                self.free(held[:count])
                held = held[count:]
            held, is_wide = done + held, False
        return held + oldest

    def free(self, done: Iterable[Picked]) -> None:
        """Delete segments written by passes that are not read any more. Segments of the store stay."""
        for name in {each.ref.name for each in done} & self._names:
            assert self._made is not None
            with self._named():
                self._made.delete(name)

    def _pass(
        self,
        schema: Schema,
        newest: Sequence[Picked],
        table: int,
        cuts: Sequence[int],
        within: tuple[int, int] | None,
    ) -> list[Picked]:
        """Merge some segments into new ones in the folder."""
        with self._named():
            return self._merged(self._open(), schema, newest, table, cuts, within)

    def _merged(
        self,
        folder: FolderObjects,
        schema: Schema,
        newest: Sequence[Picked],
        table: int,
        cuts: Sequence[int],
        within: tuple[int, int] | None,
    ) -> list[Picked]:
        group = self._groups
        self._groups += 1
        writer = SegmentWriter(
            folder,
            schema,
            lambda part: f"runs/{group:06d}-p{part:03d}.seg",
            lambda part: SegmentId(SegmentKind.FOLD, bytes(16), MarkerId(1, 1), 0, part),
        )
        layouts = [RowLayout.of(schema.tables[table], right - left) for left, right in pairwise(cuts)]
        height = max(1, PASS_BYTES // sum(layout.row_bytes for layout in layouts))
        first = min(int(each.entries["first"].min()) for each in newest)
        last = max(int(each.entries["last"].max()) for each in newest)
        if within is not None:
            first, last = max(first, within[0]), min(last, within[1] - 1)
        windows = ((row0, min(row0 + height, last + 1)) for row0 in range(first, last + 1, height))
        rows, runs = RowSorter(schema), Runs(newest, schema, read_from(self, self._pool, self._progress))
        for (row0, stop), chunks in runs.through(windows):
            fresh = NewestFirst(row0, stop - row0, len(cuts) - 1)
            for given in chunks:
                self.saw(given)
                self._take(rows, fresh, given, cuts)
            if rows.num_bytes >= PASS_BYTES:
                writer.put(rows, last=False)
        writer.put(rows, last=True)
        self._names |= {ref.name for ref in writer.refs}
        made = open_segments(folder, writer.refs, bytes(16), self._pool)
        return [each for each in reversed(made) if len(each.chunks)]

    def _take(self, rows: RowSorter, fresh: NewestFirst, given: Given, cuts: Sequence[int]) -> None:
        entry = given.entry
        for cut, (left, right) in enumerate(pairwise(cuts)):
            if entry.col0 <= left and right <= entry.col0 + entry.cols:
                _, chosen = fresh.take(given.view.ids, cut)
                if len(chosen):
                    part = cut_rows(given.view, chosen, entry, left, right - left, given.picked.ref.name)
                    rows.add(entry.table, left, right - left, part)
                    self._written.add(entry.table, left, right - left, part)

    def _open(self) -> FolderObjects:
        if self._made is None:
            try:
                self._folder = ScratchFolder(self._where)
            except OSError as error:
                raise ScratchUnavailableError(
                    f"cannot create a folder for temporary files: {error.strerror or error}",
                    hint=_ROOM_HINT,
                    path=self._where or tempfile.gettempdir(),
                ) from None
            self._made = FolderObjects(self._folder.path)
        return self._made

    @contextlib.contextmanager
    def _named(self) -> Iterator[None]:
        """Change errors of the folder so that they name it, because it looks like a store."""
        try:
            yield
        except (StoreUnavailableError, MissingObjectError) as error:
            path = error.where.get("path")
            if self._folder is None or path is None or self._folder.path not in Path(str(path)).parents:
                raise
            what = "a temporary file is gone" if isinstance(error, MissingObjectError) else error.message
            raise ScratchUnavailableError(
                f"the merge cannot use its folder for temporary files: {what}", hint=_ROOM_HINT, path=path
            ) from error

    def close(self) -> None:
        """Delete the folder, if one was made."""
        if self._folder is not None:
            self._folder.close()


def cut_rows(view: RowsView, chosen: np.ndarray, entry: ChunkEntry, col0: int, cols: int, name: str) -> RowsView:
    """Copy columns [col0, col0 + cols) of the chosen rows.

    Raises:
        CorruptionError: a state has one value per row, and the chunk has more columns.
    """
    begin = col0 - entry.col0
    columns = slice(begin, begin + cols)
    if entry.cols != cols and any(state.ndim == 1 for state in view.states):
        raise CorruptionError(
            "row-wise states have two different column splits, and neither was sent whole",
            segment=name,  # not "name": the object is whole, and must not be repaired
            table=entry.table,
        )
    states = tuple(state[chosen] if state.ndim == 1 else state[chosen, columns] for state in view.states)
    return RowsView(view.ids[chosen], view.weights[chosen, columns], states)


def _slices(cuts: Sequence[int]) -> set[tuple[int, int]]:
    return {(left, right - left) for left, right in pairwise(cuts)}


def _first_of_oldest(newest: Sequence[Picked], cuts: Sequence[int]) -> int:
    """Return the index of the first of the oldest segments that form one run: a base."""
    return bisect_left(range(len(newest)), True, key=lambda first: open_at_once(newest[first:], cuts) <= 1)


def _most(segments: Sequence[Picked], cuts: Sequence[int]) -> int:
    """Return how many of the first segments can be merged at once."""
    least = min(FAN_IN, len(segments))  # each adds at most one open chunk
    more = range(least + 1, len(segments) + 1)
    return least + bisect_left(more, True, key=lambda count: open_at_once(segments[:count], cuts) > FAN_IN)
