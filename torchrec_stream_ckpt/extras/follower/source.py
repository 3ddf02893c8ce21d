"""Sources of a follower's rows: the log, a store, and the dense state of markers."""

from __future__ import annotations

import contextlib
import fnmatch
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError, OtherLogError, TrimmedError
from torchrec_stream_ckpt.extras.follower.serving import decode, decoded_table, is_served
from torchrec_stream_ckpt.extras.follower.updates import Changed
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import IdEvents, RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import (
    Catalog,
    Job,
    MarkerRows,
    Objects,
    TableReader,
    TableWindow,
    WeightProof,
    open_rows,
)
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec
from torchrec_stream_ckpt.util.uris import check_store_url

UNREADABLE = (CorruptionError, TrimmedError, MarkerNotFoundError)
"""Errors of rows that are damaged, gone or given up: waiting does not help."""
Ids = Mapping[int, npt.NDArray[np.int64]]
"""Rows by table."""
_Sent = Callable[[Collection[int]], Iterator[tuple[int, int, RowsView]]]
"""Yields (table, first column, rows) of some tables, in the order in which they were sent."""


@dataclass(frozen=True, slots=True)
class Delivered:
    """Data of one update from log and store, readable while they are open for it."""

    changes: Callable[[], Iterator[Changed]]
    """Rows, in order."""
    proof: Callable[[], WeightProof | None]
    """The marker's proof of its weights; None if it has none."""
    older: Callable[[], Iterator[WeightProof]] = lambda: iter(())
    """(all rows) Proofs of older markers, for weights that were not sent or proved since."""
    ids: Sequence[tuple[Header, IdEvents]] | None = None
    """(changes of one generation, from the log) Its id events, with their headers; None if they are unknown."""


class FollowedJob:
    """One job's log, its store and its dense state, as one replica reads them. Not thread-safe.

    Args:
        uri: The job's log.
        store: Its store; None: the place where the job kept the marker, otherwise inside the file log.
        store_options, kafka_options, commit_key_file: As in ``StreamConfig``.
        tables: Globs of the wanted tables.
        states: Whether optimizer states are wanted.
        scratch: A folder with room for rows that only the log has; None: the system's folder.
    """

    def __init__(
        self,
        uri: str,
        store: str | None,
        store_options: Options,
        kafka_options: Options,
        commit_key_file: Path | str | None,
        tables: Sequence[str],
        scratch: Path | str | None,
        *,
        states: bool,
    ) -> None:
        self.job = Job.open(
            uri,
            store=str(check_store_url(store)) if store is not None else None,
            store_options=store_options,
            kafka_options=kafka_options,
            commit_key_file=commit_key_file,
            serving=True,
        )
        self.watch = self.job.log.watch()
        """Waits for news of the log."""
        self.between: Callable[[], None] = lambda: None
        """Called after each frame that is read, and after each look at the control partition."""
        self.repeats = False
        """True if the log may hand out older versions of a row before the newest one."""
        self._incarnation: str | None = None
        """Id of the incarnation of the followed log; None before the log exists."""
        self._globs = tuple(tables)
        self._states = states
        self._scratch = Path(scratch) if scratch is not None else Path(tempfile.gettempdir())

    def close(self) -> None:
        self.watch.close()
        self.job.close()

    # Control partition and markers.

    def look(self) -> Lineage:
        """Return the control partition as of now; an empty one while there is no log.

        Raises:
            CorruptionError: the log is not the same one as before.
        """
        now = self.job.log.incarnation()
        if now is None and self._incarnation is None:
            return Lineage()
        if self._incarnation is not None and (now is None or now.id != self._incarnation):
            raise CorruptionError(
                "the log was deleted or recreated while it was followed",
                hint="bring the old log back, or follow the new one with a new replica",
            )
        lineage = self.job.control.refresh()
        if now is not None and lineage.claims:
            self._incarnation = now.id
        self.between()
        return lineage

    def newest_offered(self, lineage: Lineage, passed: Set[MarkerId] = frozenset()) -> Commit | None:
        """Return the newest marker that was neither given up nor passed over; None if no marker is left."""
        newest = lineage.newest
        catalog = Catalog.of_job(self.objects(newest), lineage) if newest is not None else None
        left = (each for each in reversed(lineage.commits.values()) if each.id not in passed)
        return next((each for each in left if catalog is None or not _was_given_up(catalog, each)), None)

    def given_up(self, lineage: Lineage, after: Commit | None) -> frozenset[MarkerId]:
        """Return the markers newer than ``after`` that the store of the newest marker has given up."""
        newest = lineage.newest
        catalog = Catalog.of_job(self.objects(newest), lineage) if newest is not None else None
        if catalog is None:
            return frozenset()
        return frozenset(
            each
            for each in catalog.dropped & lineage.commits.keys()
            if (after is None or each > after.id) and _was_given_up(catalog, lineage.commits[each])
        )

    def nothing(self) -> MarkerNotFoundError:
        """Return the error that explains why there is no marker."""
        if self.job.log.incarnation() is None:
            return MarkerNotFoundError(
                "there is no log here", hint="check the URI; a job creates its log when it starts", uri=self.job.uri
            )
        if self.job.lineage.commits:
            return MarkerNotFoundError(
                "every committed marker was given up", hint="let the job run until it commits a marker"
            )
        return MarkerNotFoundError("this job has no committed marker", hint="let the job run until it commits a marker")

    # Wanted tables, and the places of rows and dense state.

    def check_wanted(self, schema: Schema) -> None:
        """Raise ConfigError if none of the tables is wanted."""
        if not self._wanted(schema):
            raise ConfigError(
                f"no table matches {', '.join(self._globs)}", hint=f"choose from {', '.join(schema.index())}"
            )

    def wants(self, table: TableSpec) -> bool:
        return any(fnmatch.fnmatchcase(table.name, glob) for glob in self._globs)

    def _wanted(self, schema: Schema) -> list[int]:
        return [index for index, table in schema.live if self.wants(table)]

    def objects(self, commit: Commit) -> Objects | None:
        """Return the store that may hold a marker's rows; None if no setting and no COMMIT names it."""
        return self.job.objects_of(commit) if self.job.says_where(commit) else None

    def dense(self, commit: Commit) -> Path:
        """Return a folder with the marker's dense files, their digests compared; raises as :meth:`Job.dense_folder`."""
        if any(map(is_served, self.job.lineage.claims[commit.generation].schema.tables)):
            raise ConfigError("a serving stream has no dense state", hint="follow the trainer's log to get dense state")
        self.job.check_vouched(commit)
        self.job.dense_of(commit).release()  # of the previous marker
        return self.job.dense_folder(commit)

    def dense_at(self, marker: MarkerId) -> Path:
        """Return :meth:`dense` of a marker. Raises MarkerNotFoundError if the log no longer has it."""
        commit = self.job.lineage.commits.get(marker)
        if commit is None:
            raise MarkerNotFoundError(f"marker {marker} is no longer in this log", hint="load a newer marker")
        return self.dense(commit)

    # Rows.

    @contextlib.contextmanager
    def whole(self, lineage: Lineage, commit: Commit) -> Iterator[Delivered]:
        """Yield every row of a marker, from the store and from the log after it; raises as :func:`open_rows`."""
        with self._open(lineage, commit, self.objects(commit), proofs=True) as rows:
            yield Delivered(partial(self._windows, rows), rows.proof, rows.older_proofs)

    @contextlib.contextmanager
    def since(self, lineage: Lineage, start: MarkerId, commit: Commit, *, stored: bool) -> Iterator[Delivered]:
        """Yield the rows sent after a marker on the path to another one. The log is read and checked before it yields.

        Args:
            lineage: The control partition.
            start: The marker that the replica holds.
            commit: The marker to go to.
            stored: Let a store serve rows that it has, too.
        """
        if not stored:
            logged = MarkerRows.from_log(self.job.log, lineage, commit.id, start, self.between)
            knows_ids = start.generation == commit.generation and lineage.claims[commit.generation].has_id_events
            logged.repeats, changes = self.repeats, partial(self.sent, logged.schema, logged.sent)
            try:
                yield Delivered(changes, logged.proof, ids=logged.id_events if knows_ids else None)
            finally:
                logged.release()  # the replica keeps its newest update
            return
        with self._open(lineage, commit, self.objects(commit), start) as rows:
            yield Delivered(partial(self.sent, rows.schema, rows.sent), rows.proof)

    @contextlib.contextmanager
    def some(self, lineage: Lineage, commit: Commit, ids: Ids) -> Iterator[Callable[[], Iterator[Changed]]]:
        """Yield some rows as a marker has them, to replace newer ones that are undone."""
        with self._open(lineage, commit, self.objects(commit)) as rows:
            yield lambda: self._picked(rows, ids)

    def _open(
        self,
        lineage: Lineage,
        commit: Commit,
        objects: Objects | None,
        since: MarkerId | None = None,
        *,
        proofs: bool = False,
    ) -> contextlib.AbstractContextManager[MarkerRows]:
        return open_rows(self.job.log, lineage, commit.id, objects, self._scratch, since=since, proofs=proofs)

    def _windows(self, rows: MarkerRows) -> Iterator[Changed]:
        for index in self._wanted(rows.schema):
            reader = TableReader(rows, index)
            for row0, count in reader.windows():
                window = reader.read(row0, count)
                yield from self._parts(reader, window, np.arange(row0, row0 + count), slice(None))

    def _picked(self, rows: MarkerRows, ids: Ids) -> Iterator[Changed]:
        for index, wanted in ids.items():
            reader = TableReader(rows, index)
            for row0, count in reader.windows():
                here = wanted[(wanted >= row0) & (wanted < row0 + count)]
                if len(here):
                    yield from self._parts(reader, reader.read(row0, count), here, here - row0)

    def _parts(
        self,
        reader: TableReader,
        window: TableWindow,
        ids: npt.NDArray[np.int64],
        places: npt.NDArray[np.int64] | slice,
    ) -> Iterator[Changed]:
        """Yield rows of a window. With states of one value a row, they are split by the column slices that these belong
        to."""
        if is_served(reader.spec):
            states = tuple(
                state[0, places] if spec.per_row else state[places]
                for spec, state in zip(reader.spec.states, window.states, strict=True)
            )
            yield self.changed(reader.spec, 0, RowsView(ids, window.weights[places], states))
            return
        if not (self._states and reader.slices):
            states = tuple(state[places] for state in window.states) if self._states else ()
            yield Changed(reader.spec, 0, ids, window.weights[places], states)
            return
        for position, (col0, cols) in enumerate(reader.slices):
            columns = slice(col0, col0 + cols)
            states = tuple(
                state[position, places] if spec.per_row else state[places, columns]
                for spec, state in zip(reader.spec.states, window.states, strict=True)
            )
            yield Changed(reader.spec, col0, ids, window.weights[places, columns], states)

    def sent(self, schema: Schema, sent: _Sent) -> Iterator[Changed]:
        """Yield the sent rows, oldest first."""
        for table, col0, view in sent(self._wanted(schema)):
            yield self.changed(schema.tables[table], col0, view)

    def changed(self, table: TableSpec, col0: int, view: RowsView) -> Changed:
        """Convert rows to the form that is handed out."""
        if is_served(table):
            return Changed(decoded_table(table), col0, view.ids, decode(table, view))
        return Changed(table, col0, view.ids, view.weights, view.states if self._states else ())


def _was_given_up(catalog: Catalog, commit: Commit) -> bool:
    """Return whether a marker was given up. An unreadable record counts, too: giving up is never revoked."""
    try:
        return catalog.is_dropped(commit)
    except OtherLogError:
        raise
    except CorruptionError:
        return True


def handed_out(schema: Schema) -> Schema:
    """Return the tables in the form that followers get."""
    return Schema(tuple(map(decoded_table, schema.tables)))
