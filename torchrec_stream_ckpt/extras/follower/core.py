"""Follow a running job: read its newest marker, then only the changes. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    LogUnavailableError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamCkptError,
    StreamLostError,
    TrimmedError,
)
from torchrec_stream_ckpt.extras.follower.next_marker import NextMarker, astray, changed_tables, includes
from torchrec_stream_ckpt.extras.follower.source import UNREADABLE, FollowedJob, handed_out
from torchrec_stream_ckpt.extras.follower.stats import FollowStats, Outages
from torchrec_stream_ckpt.extras.follower.tail import Tail
from torchrec_stream_ckpt.extras.follower.updates import Changed, ChangedIds, Update, UpdateKind
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.end_note import Outcome
from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import IdEvents
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import WeightProof
from torchrec_stream_ckpt.util.options import Options
from torchrec_stream_ckpt.util.types import MarkerId, TableSpec

log = logging.getLogger(__name__)

FollowMode = Literal["markers", "rows"]
AtChange = Literal["load", "stop"]
NET_S = 5.0
"""Longest time between two looks at a log whose events wake the follower, in seconds. Events can be lost."""
_POSITION = re.compile(r"([0-9]+:[0-9]+)@([^>]+)(?:>[0-9]+:[0-9]+)*?(?:>([0-9]+:[0-9]+))?")
_SPACING_S = 0.01
"""Shortest time between two looks, in seconds: a trainer may write thousands of times a second."""


class Follower:
    """A reader that follows one job's stream; see :func:`follow`. Not thread-safe, except for :meth:`stop` and
    ``stats``."""

    def __init__(
        self, source: FollowedJob, mode: FollowMode, poll_s: float, outage_s: float, at_change: AtChange = "load"
    ) -> None:
        self._source = source
        self._at_change = at_change
        self.mode = mode
        """``markers`` or ``rows``, as passed to :func:`follow`."""
        self._poll_s = poll_s
        self.outage_s = outage_s
        """Longest outage of log or store, in seconds."""
        self._stop = threading.Event()
        self._looked_s = 0.0
        """When the last look began, on the monotonic clock."""
        self._at: Commit | None = None
        self._towards: MarkerId | None = None
        """Marker of an update that was handed out and has not ended. Some of its rows may have been applied."""
        self._schema: Schema | None = None
        self._tail: Tail | None = None
        self._resume = ""
        """Position that the replica holds and that was not looked up yet."""
        self._first = "the first marker"
        """Reason for the first load."""
        self._anew = ""
        """Reason to load all rows at the next look, whatever the replica holds. It is cleared when a load has been
        applied."""
        self._aim = NextMarker()
        self.stats = FollowStats()
        """Counts and positions so far. Any thread may read them."""
        self._outages = Outages(self.stats)

    def __enter__(self) -> Follower:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def marker(self) -> MarkerId | None:
        """The newest marker whose updates have all been handed out; None before the first one."""
        return self._at.id if self._at is not None else None

    @property
    def uri(self) -> str:
        """The job's log, as passed to :func:`follow`."""
        return self._source.job.uri

    def wants(self, table: TableSpec) -> bool:
        """Return whether a table is one of those that were requested."""
        return self._source.wants(table)

    def gets_id_events(self, commit: Commit) -> bool:
        """Return whether the generation of a marker records, between markers, which raw id has which row."""
        return self._source.job.lineage.claims[commit.generation].has_id_events

    @property
    def resumes(self) -> bool:
        """True if the first update may be changes only, because the replica holds rows already."""
        return bool(self._resume)

    def resume(self, position: str) -> None:
        """Continue from rows that the replica holds. Call it before the first update.

        The first update is then the changes since that marker, or all rows if the log no longer leads from it.

        Args:
            position: :attr:`Update.position` of the marker that it holds. If the replica may hold some rows of
                other markers, too: ``POSITION>MARKER``, and so on, in the order of the updates that broke off.

        Raises:
            ConfigError: this is not a position.
        """
        if _POSITION.fullmatch(position) is None:
            raise ConfigError(f"{position!r} is not a position", hint="pass the text of Update.position")
        self._resume = position

    def dense_of(self, marker: MarkerId) -> Path:
        """Return a folder with the dense state of a marker that need not be the newest one, as :attr:`Update.dense`.

        Raises:
            MarkerNotFoundError: the log no longer has this marker.
            ConfigError, CorruptionError, StoreUnavailableError: as :attr:`Update.dense`.
        """
        return self._source.dense_at(marker)

    def load_anew(self, why: str, first: MarkerId | None = None) -> None:
        """Load every row at the next look instead of the changes only. This includes the update that is being applied.

        Args:
            why: The reason, for the log.
            first: A marker to load before newer ones, if possible; None for no preference.
        """
        if why != self._anew:
            log.warning("all rows are loaded again: %s", why)
        self._anew = why
        if first is not None:
            self._aim.first = first

    def passes(self, marker: MarkerId) -> bool:
        """Return whether the next look skips this marker, which could not be loaded, for another one."""
        return self._aim.passes(marker)

    def between_frames(self, call: Callable[[], None]) -> None:
        """Call ``call`` on the thread that follows, after each frame and after each look at the log."""
        self._source.between = call

    def take_repeats(self) -> None:
        """Yield every version of a row that was sent, for a sink that writes rows faster than older versions are
        removed."""
        self._source.repeats = True

    def pause(self) -> bool:
        """Wait as long as between two looks at the log. Returns whether the follower was stopped."""
        return self._stop.wait(self._poll_s)

    def stop(self) -> None:
        """End :meth:`updates` soon. Safe on any thread and in a signal handler."""
        self._stop.set()
        self._source.watch.wake()

    def close(self) -> None:
        """Close log and store."""
        self.stop()
        self._source.close()

    def updates(
        self, timeout_s: float | None = None, *, once: bool = False, until_closed: bool = False
    ) -> Iterator[Update]:
        """Yield the changes, one update after the other.

        An update counts as applied once the next one is requested. If the loop is left during an update, or the update
        cannot be read, it is yielded again as a whole. If the trainer has since continued from an older marker, all
        rows are yielded instead.

        Args:
            timeout_s: End if no update has arrived for this long. 0: end when everything that exists now was yielded.
                None: never end.
            once: After the first update, end when everything that exists then was yielded.
            until_closed: End when the trainer has recorded that the job is finished, and everything was yielded.

        Raises:
            SchemaMismatchError: a new generation has other tables, and is not based on the followed one; or the model
                has changed, and ``at_change`` is ``stop``.
            CorruptionError: required data is damaged or missing, in the log and in the store; or the log was deleted
                and recreated, or now belongs to another job.
            LogUnavailableError, StoreUnavailableError: there was no answer for ``outage_s``; with a timeout of 0,
                raised at once.
            MarkerNotFoundError: (a timeout of 0) there is no log, or nothing is committed yet.
        """
        idle, came = time.monotonic(), False
        while not self._stop.is_set():
            found, answers = False, True
            self._looked_s = time.monotonic()
            self.stats.looks += 1
            try:
                for update in self._round():
                    found = True
                    if update.kind in (UpdateKind.LOAD, UpdateKind.MARKER):
                        self._towards = update.marker
                    yield update
                    self._took(update)
                self._outages.over()
                end = self.stats.ended
                if until_closed and not found and end is not None and end.outcome == Outcome.FINISHED:
                    return
            except (LogUnavailableError, StoreUnavailableError) as error:
                self._outages.outlast(error, 0.0 if timeout_s == 0 else self.outage_s)
                answers = False
            if found:
                idle, came = time.monotonic(), True
                if once or until_closed or timeout_s == 0 or not self._has_all(update.kind):
                    continue
            if once and came:
                return
            if timeout_s is not None and time.monotonic() - idle >= timeout_s:
                if self._at is None and timeout_s == 0:
                    raise self._source.nothing()
                return
            left_s = timeout_s - (time.monotonic() - idle) if timeout_s is not None else NET_S
            if answers:
                self._await_news(left_s)
            else:
                self._stop.wait(self._poll_s)

    def _has_all(self, last: UpdateKind) -> bool:
        """Return whether after an update of this kind only new data of the log, which it reports, leads to another."""
        is_level = self._is_whole and self._at is not None and self._at.id == self.stats.newest
        is_last = last in (UpdateKind.ROWS, UpdateKind.MARKER) and (self._tail is None or not self._tail.has_more)
        return is_level and is_last and self._source.watch.by != "poll"

    def _await_news(self, most_s: float) -> None:
        """Wait until the log may have something new, for at most ``most_s``."""
        watch = self._source.watch
        pause_s = self._poll_s if watch.by == "poll" else max(self._poll_s, NET_S)
        tail = self._tail.partitions if self._tail is not None else ()
        try:
            news = watch.wait(min(pause_s, max(most_s, 0.0)), tail)
        except LogUnavailableError as error:
            self._outages.outlast(error, self.outage_s)
            self._stop.wait(self._poll_s)
            return
        self.stats.woken_by = watch.by
        if news:
            self.stats.wakeups += 1
            self._stop.wait(max(0.0, self._looked_s + _SPACING_S - time.monotonic()))

    # A single look at the log.

    def _round(self) -> Iterator[Update]:
        lineage = self._source.look()
        newest = lineage.newest
        self.stats.ended, self.stats.newest = lineage.ended, lineage.commits.newest
        self.stats.newest_s = newest.time_s if newest is not None else 0.0
        if self._resume and lineage.claims:
            self._take_up(lineage)
        if self._tail is not None and self._at is not None and not self._anew and self._tail.is_over(lineage):
            yield from self._end_generation(lineage, self._at)
        while (target := self._target(lineage)) is not None:
            try:
                yield from self._move(lineage, target)
                break
            except UNREADABLE as error:
                if isinstance(error, MarkerNotFoundError):
                    self._aim.pass_over({target.id} | self._source.given_up(lineage, self._at))
                elif not self._aim.skip(target.id):
                    raise
                log.warning("marker %s is passed over: %s", target.id, error.headline)
        if self.mode == "rows" and self._at is not None and self._is_whole:
            yield from self._follow_rows(lineage, self._at)

    def _take_up(self, lineage: Lineage) -> None:
        """Look up the position that the replica holds."""
        match = _POSITION.fullmatch(self._resume)
        assert match is not None
        self._resume = ""
        held, nonce, towards = match.groups()
        commit = lineage.commits.get(MarkerId.parse(held))
        if commit is None or commit.nonce != nonce:
            self._first = f"marker {held}, which the replica holds, is not in this log"
            return
        self._at, self._towards = commit, MarkerId.parse(towards) if towards else None
        self._schema = handed_out(lineage.claims[commit.generation].schema)
        self.stats.marker, self.stats.step, self.stats.committed_s = commit.id, commit.step, commit.time_s

    @property
    def _is_whole(self) -> bool:
        """True if the replica holds the complete marker: no update was left half way, and no load is due."""
        return self._towards is None and not self._anew

    def _target(self, lineage: Lineage) -> Commit | None:
        """Return the marker to go to; None if the replica is already there, or has to wait for another one."""
        if lineage.newest is None:
            return None
        if self._at is None:
            return self._source.newest_offered(lineage, self._aim.passed)
        return self._aim.next(lineage, self._at.id, is_whole=self._is_whole)

    def _move(self, lineage: Lineage, target: Commit) -> Iterator[Update]:
        """Yield the updates that lead from the replica's position to a marker."""
        schema = lineage.claims[target.generation].schema
        changed = self._check_tables(lineage, target.id, schema)
        why = self._first
        if self._at is not None:
            why = self._anew
            if not why and changed:
                why = f"the model has changed at generation {target.generation}: {changed}"
            if not why:
                why = yield from self._change(lineage, self._at, target, schema)
            if not why:
                return
        with self._source.whole(lineage, target) as given:
            if self._at is not None:
                self.load_anew(why)  # if it breaks off, the next update has to be a load, whatever its marker
            holds = partial(includes, lineage.way(target.id))
            update = self._update(UpdateKind.LOAD, target, schema, given.changes, why, given.proof, includes=holds)
            yield replace(update, older_proofs=given.older)

    def _change(self, lineage: Lineage, at: Commit, target: Commit, schema: Schema) -> Generator[Update, None, str]:
        """Advance to a marker by its changes. Returns the reason if that is impossible; empty on success."""
        if why := astray(lineage, target.id, at.id, self._towards):
            return why
        if (yield from self._reach(lineage, at, target, schema)):
            return ""
        return self._anew or (yield from self._go_on(lineage, at.id, target, schema))

    def _check_tables(self, lineage: Lineage, target: MarkerId, schema: Schema) -> str:
        """Return the result of :func:`changed_tables`; raises ConfigError if the tables have changed, and none of them
        is wanted."""
        changed = ""
        if self._at is not None and self._schema is not None:
            stop = self._at_change == "stop"
            changed = changed_tables(lineage, self._at.id, self._schema, target, may_change=not stop)
        if changed or self._schema is None:
            self._source.check_wanted(schema)
        return changed

    def _go_on(self, lineage: Lineage, start: MarkerId, target: Commit, schema: Schema) -> Generator[Update, None, str]:
        """Yield the rows sent between two markers, from the log or from a store. Returns the reason if neither has
        them; empty on success."""
        why = ""
        for stored in (False, True):
            with contextlib.ExitStack() as stack:
                try:
                    given = stack.enter_context(self._source.since(lineage, start, target, stored=stored))
                except (TrimmedError, CorruptionError) as error:
                    why = error.headline
                    continue
                update = self._update(UpdateKind.MARKER, target, schema, given.changes, proof=given.proof)
                ids = self._changed_ids(schema, given.ids) if given.ids is not None else None
                yield replace(update, whole=partial(self._whole, lineage, target, schema), ids=ids)
                return ""
        return why

    def _whole(
        self, lineage: Lineage, target: Commit, schema: Schema, ids: Mapping[str, npt.NDArray[np.int64]]
    ) -> Iterator[Changed]:
        """Yield all columns of some rows as a marker has them."""
        index = schema.index()
        try:
            with self._source.some(lineage, target, {index[name]: rows for name, rows in ids.items()}) as changes:
                yield from changes()
        except UNREADABLE as error:
            self._broke_off(UpdateKind.MARKER, target.id, error)
            raise

    # Rows that no marker has.

    def _follow_rows(self, lineage: Lineage, at: Commit) -> Iterator[Update]:
        if at.generation != lineage.newest_generation or lineage.ended is not None:
            return  # its trainer is gone; the rows of the next one arrive with its first marker
        if self._tail is None or self._tail.at.id != at.id:
            self._tail = Tail(self._source.job.log, lineage.claims[at.generation], at, self._source.between)
        if self._tail.is_undone:
            yield from self._take_back(lineage, at)
            return
        try:
            update = self._read_on(lineage, at)
        except StreamLostError as error:
            if self._tail.is_fresh:  # the marker itself is gone
                raise
            log.warning("%s", error.headline)
            yield from self._take_back(lineage, at)
            return
        if update is not None:
            yield update

    def _read_on(self, lineage: Lineage, at: Commit, upto: Commit | None = None) -> Update | None:
        """Read the rows that the tail has now, at least ``upto`` a marker; returns None if the tail has no new rows."""
        assert self._tail is not None
        rows = self._tail.read(upto)
        schema = lineage.claims[at.generation].schema

        def changes() -> Iterator[Changed]:
            for table, col0, view in rows:
                if self._source.wants(schema.tables[table]):
                    yield self._source.changed(schema.tables[table], col0, view)

        if not self._tail.has_read:
            return None
        newer = self._holds_newer(at, schema)
        update = self._update(UpdateKind.ROWS, at, schema, changes, is_provisional=newer)
        return replace(update, ids=self._changed_ids(schema, self._tail.id_events))

    def _changed_ids(self, schema: Schema, events: Iterable[tuple[Header, IdEvents]]) -> tuple[ChangedIds, ...]:
        """Return the id events of wanted tables."""
        return tuple(
            ChangedIds(schema.tables[header.table], header.rank, header.seq, each)
            for header, each in events
            if self._source.wants(schema.tables[header.table])
        )

    def _holds_newer(self, commit: Commit, schema: Schema) -> bool:
        """Return whether the tail has handed out rows of wanted tables that are newer than a marker."""
        assert self._tail is not None
        return any(self._source.wants(schema.tables[table]) for table in self._tail.tables_after(commit))

    def _reach(self, lineage: Lineage, at: Commit, target: Commit, schema: Schema) -> Generator[Update, None, bool]:
        """(``rows`` mode) Hand out the rest of a marker's rows as they were sent. If that fails, undo the rows that no
        marker has."""
        if self._tail is None:
            return False
        if target.generation == at.generation and not self._tail.is_undone:
            try:
                while not self._tail.reaches(target) and (update := self._read_on(lineage, at, target)) is not None:
                    yield update
            except CorruptionError as error:
                log.warning("rows after marker %s cannot be read: %s", at.id, error.headline)
            if self._tail.reaches(target):
                newer = self._holds_newer(target, schema)
                reached = self._update(UpdateKind.MARKER, target, schema, lambda: iter(()), is_provisional=newer)
                yield replace(reached, ids=())
                return True
        yield from self._take_back(lineage, at)
        return False

    def _end_generation(self, lineage: Lineage, at: Commit) -> Iterator[Update]:
        """Finish a generation that is over: rows that none of its markers has will be in no marker."""
        assert self._tail is not None
        mine = [each for each in lineage.commits if each.generation == at.generation and each not in self._aim.passed]
        if mine and mine[-1] > at.id and not self._tail.is_undone:
            try:
                yield from self._move(lineage, lineage.commits[mine[-1]])
            except UNREADABLE as error:  # the trainer may have continued because of it: its next marker shows that
                log.warning("marker %s cannot be followed: %s", mine[-1], error.headline)
        if self._tail is not None and self._at is not None:
            yield from self._take_back(lineage, self._at)

    def _take_back(self, lineage: Lineage, at: Commit) -> Iterator[Update]:
        """Reset rows that no marker has to their values at the newest marker. If that fails, a load of all rows is
        due."""
        assert self._tail is not None
        self._tail.is_undone = True
        schema = lineage.claims[at.generation].schema
        ids = {
            table: rows for table, rows in self._tail.provisional().items() if self._source.wants(schema.tables[table])
        }
        if ids:
            why = f"rows after marker {at.id} were undone, because no marker will contain them"
            with contextlib.ExitStack() as stack:
                try:
                    changes = stack.enter_context(self._source.some(lineage, at, ids))
                except UNREADABLE as error:
                    if self._is_last(at.id):
                        raise
                    self._cannot_undo(at.id, error)
                else:
                    log.warning("%s", why)
                    yield self._update(UpdateKind.ROLLBACK, at, schema, changes, why)
        self._tail = None

    def _cannot_undo(self, at: MarkerId, error: StreamCkptError) -> None:
        """Keep rows that no marker has until all rows of a newer marker are loaded."""
        self.load_anew(f"rows after marker {at} cannot be undone: {error.headline}")
        self._aim.pass_over([at])

    def _is_last(self, marker: MarkerId) -> bool:
        """Return whether the job is finished at a marker, so that no newer one will follow."""
        end = self.stats.ended
        return end is not None and end.outcome == Outcome.FINISHED and self.stats.newest == marker

    # Book-keeping.

    def _update(
        self,
        kind: UpdateKind,
        commit: Commit,
        schema: Schema,
        changes: Callable[[], Iterator[Changed]],
        why: str = "",
        proof: Callable[[], WeightProof | None] = lambda: None,
        *,
        is_provisional: bool = False,
        includes: Callable[[MarkerId], bool] = lambda _: True,
    ) -> Update:
        def handed(*, counts: bool) -> Iterator[Changed]:
            try:
                for each in changes():
                    if counts:
                        self.stats.count(len(each.ids))
                    yield each
            except UNREADABLE as error:
                self._broke_off(kind, commit.id, error)
                raise

        def dense() -> Path:
            return self._source.dense(commit)

        return Update(
            kind,
            commit,
            handed_out(schema),
            why,
            partial(handed, counts=True),
            dense,
            proof,
            is_provisional,
            includes,
            preview=partial(handed, counts=False),
        )

    def _broke_off(self, kind: UpdateKind, marker: MarkerId, error: StreamCkptError) -> None:
        """Handle rows of an update that cannot be read: a repeated attempt would fail at the same place."""
        if kind is UpdateKind.ROLLBACK and not self._is_last(marker):
            self._cannot_undo(marker, error)
        elif kind is UpdateKind.LOAD:
            self._aim.skip(marker)
        else:
            self.load_anew(f"the changed rows cannot be read: {error.headline}")

    def _took(self, update: Update) -> None:
        """Record that the caller has applied the update."""
        stats = self.stats
        if update.kind is UpdateKind.ROWS:
            assert self._tail is not None
            self._tail.taken()
            return
        if update.kind is UpdateKind.ROLLBACK:
            stats.rollbacks += 1
            return
        if update.kind is UpdateKind.LOAD:
            stats.reloads += self._at is not None
            self._tail, self._anew = None, ""
            self._aim.loaded()
        elif self._tail is not None:
            if self._tail.reaches(update.commit):
                self._tail.committed(update.commit)
            else:
                self._tail = None
        stats.markers += 1
        self._at, self._towards, self._schema = update.commit, None, update.schema
        stats.marker, stats.step, stats.committed_s = update.marker, update.step, update.commit.time_s


def follow(
    uri: str,
    *,
    store: str | None = None,
    mode: FollowMode = "markers",
    tables: Sequence[str] = ("*",),
    states: bool = False,
    poll_s: float = 0.5,
    outage_s: float = 300.0,
    at_change: AtChange = "load",
    scratch: Path | str | None = None,
    store_options: Options = None,
    kafka_options: Options = None,
    commit_key_file: Path | str | None = None,
) -> Follower:
    """Follow a job's stream. It is read-only, and accesses nothing until :meth:`Follower.updates` is used.

    Args:
        uri: ``file://DIR``, ``kafka://HOST:PORT/JOB`` or ``s3://BUCKET/PREFIX``. The log need not exist yet.
        store: The job's store, as in ``StreamConfig``. None: the place that the job has recorded.
        mode: ``markers``: after each update the tables are those of a committed marker, bit for bit. ``rows``: rows as
            they are sent, including rows that no marker has yet and that may never be in one (read uncommitted).
        tables: Globs of the wanted tables, such as ``sparse.ebc.t_*``.
        states: Hand out optimizer states, too.
        poll_s: Seconds between two looks at the log where nothing reports new data: ``follower.stats.woken_by`` is
            ``poll``. Otherwise a look follows new data within milliseconds, and at least every 5 s.
        outage_s: How long log or store may fail to answer before :meth:`Follower.updates` raises.
        at_change: Action if the job continues with a changed model: ``load`` every row of the new tables at the first
            marker of its generation, or ``stop`` with :class:`SchemaMismatchError`.
        scratch: A folder for rows that only the log has, while they are handed out; default: the system's folder.
        store_options: As in ``StreamConfig``.
        kafka_options: As in ``StreamConfig``.
        commit_key_file: As in ``StreamConfig``.

    Raises:
        ConfigError: the URI, the store or an option is wrong.
    """
    if mode not in ("markers", "rows"):
        raise ConfigError(f"mode must be 'markers' or 'rows', got {mode!r}")
    if at_change not in ("load", "stop"):
        raise ConfigError(f"at_change must be 'load' or 'stop', got {at_change!r}")
    if not poll_s > 0 or not outage_s >= 0:
        raise ConfigError(f"poll_s must be above zero and outage_s at least zero, got {poll_s} and {outage_s}")
    source = FollowedJob(uri, store, store_options, kafka_options, commit_key_file, tables, scratch, states=states)
    return Follower(source, mode, poll_s, outage_s, at_change)
