"""A verdict for each marker of a job: read all that they need, without a model, and check it.

Markers share what leads to them: each interval of the log and each piece of the store is read once, in order, and what
was found there counts for all markers that it leads to. What they prove of live rows is compared for one marker at a
time, in ``verify.py``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

import numpy as np

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import Notes, SegmentRef
from torchrec_stream_ckpt.format.rows import decode_rows
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import check_tables, decode_chunk
from torchrec_stream_ckpt.log.api import Incarnation, LogReader
from torchrec_stream_ckpt.log.stream import check_hello, checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.restore.choose import check_incarnation, check_not_trimmed, load_catalog
from torchrec_stream_ckpt.restore.coverage import Coverage
from torchrec_stream_ckpt.restore.located import in_segments
from torchrec_stream_ckpt.restore.verify import READERS, Verified
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Piece
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.store.reader import Picked, load_front, read_chunks
from torchrec_stream_ckpt.types import LogSpan, MarkerId, RankEnd


@dataclass(frozen=True, slots=True)
class Verdict:
    """What can be said of one marker."""

    marker: MarkerId
    damage: tuple[CorruptionError, ...]
    """Each with the marker in whose interval it is, and its place; empty: the marker is whole."""
    verified: Verified | None
    """What was read; None if the marker is damaged."""


@dataclass(frozen=True, slots=True)
class _Way:
    """What leads to a marker: added up from its start."""

    reach: MarkerId | None = None
    streams: int = 0
    frames: int = 0
    rows: int = 0
    num_bytes: int = 0
    segments: int = 0
    stored_rows: int = 0
    stored_bytes: int = 0
    damage: tuple[CorruptionError, ...] = ()


@dataclass(frozen=True, slots=True)
class _Step:
    """What is read at once: the interval of the log, or the piece of the store, that ends at a marker."""

    marker: MarkerId
    stored: bool


@dataclass(slots=True)
class _Reading:
    """One interval of the log, or one piece of the store, while it is read."""

    commit: Commit
    claim: Claim
    coverage: Coverage
    frames: int = 0
    rows: int = 0
    num_bytes: int = 0
    segments: int = 0
    damage: list[CorruptionError] = field(default_factory=list)

    @property
    def schema(self) -> Schema:
        return self.claim.schema

    def note(self, error: CorruptionError, **place: object) -> None:
        """Something is wrong: keep what is known of its place."""
        where = {"marker": str(self.commit.id), **error.where, **place}
        self.damage.append(type(error)(error.message, hint=error.hint, **where))

    def check(self) -> None:
        if not self.damage:  # what was not read cannot be told from what was not sent
            try:
                self.coverage.check()
            except CorruptionError as error:
                self.note(error)


class Verifier:
    """Reads what markers need, each byte once for all of them.

    Args:
        log: The job's log.
        lineage: Its control partition.
        progress: Called with the bytes of each chunk and frame.
        objects: The store that a restore takes rows from; None for the log alone.
    """

    def __init__(
        self,
        log: LogReader,
        lineage: Lineage,
        progress: Callable[[int], None] = lambda _: None,
        objects: Objects | None = None,
    ) -> None:
        self._log = _Placing(log)
        self._lineage = lineage
        self._progress = progress
        self._catalog: Catalog | None = load_catalog(objects, lineage)
        self._ways: dict[_Step, _Way] = {}
        self._strides: dict[int, dict[MarkerId, MarkerId | None]] = {}
        self._newest: dict[int, MarkerId] = {}
        self._previous: dict[MarkerId, MarkerId | None] = {}
        for marker in lineage.commits:
            self._previous[marker] = self._newest.get(marker.generation, lineage.claims[marker.generation].parent)
            self._newest[marker.generation] = marker

    def verdict(self, commit: Commit, dense: DenseStore) -> Verdict:
        """Whether a marker is whole.

        Args:
            commit: The marker's.
            dense: Where its dense state lies.

        Raises:
            MarkerNotFoundError: the store says that it was given up.
            StoreUnavailableError, LogUnavailableError: nobody can tell.
            TrimmedError: the log was trimmed, and the marker needs what is gone.
        """
        marker = commit.id
        if self._catalog is not None:
            self._catalog.check_offered(marker)
        damage: list[CorruptionError] = []
        try:
            dense.verify(commit)
        except CorruptionError as error:
            damage.append(type(error)(error.message, hint=error.hint, **{"marker": str(marker), **error.where}))
        try:
            reach = self._reach(marker)
            check_not_trimmed(self._log, self._lineage, marker, reach)
            check_incarnation(self._log, self._lineage, marker, reach)
        except TrimmedError:
            if not damage:
                raise
            return Verdict(marker, tuple(damage), None)
        except CorruptionError as error:
            return Verdict(marker, (*damage, error), None)
        way = self._way(marker)
        damage += way.damage
        return Verdict(marker, tuple(damage), None if damage else self._verified(commit, way))

    def num_bytes(self, commits: Iterable[Commit]) -> int:
        """How much of the log and the store is read for these markers, as far as names and COMMITs tell."""
        known: set[_Step] = set()
        for commit in commits:
            known.update(self._steps(commit.id, known))
        return sum(self._size(step) for step in known)

    def _verified(self, commit: Commit, way: _Way) -> Verified:
        return Verified(
            commit.id,
            len(self._lineage.path(commit.id)),
            way.streams,
            way.frames,
            way.rows,
            way.num_bytes,
            len(commit.dense_files),
            sum(file.num_bytes for file in commit.dense_files),
            way.reach,
            way.segments,
            way.stored_rows,
            way.stored_bytes,
        )

    # The way to a marker.

    def _is_served(self, marker: MarkerId) -> bool:
        """Whether the store leads to it."""
        return self._catalog is not None and marker in self._catalog.markers and marker in self._strides_of(marker)

    def _strides_of(self, marker: MarkerId) -> Mapping[MarkerId, MarkerId | None]:
        """Of the way to the newest marker of its generation, on which it lies."""
        assert self._catalog is not None
        if marker.generation not in self._strides:
            chain = self._lineage.chain(self._newest[marker.generation])
            self._strides[marker.generation] = self._catalog.strides(chain)
        return self._strides[marker.generation]

    def _before(self, step: _Step) -> _Step | None:
        """What an interval of the log, or a piece of the store, stands on."""
        if step.stored:
            start = self._strides_of(step.marker)[step.marker]
            return _Step(start, True) if start is not None else None
        previous = self._previous[step.marker]
        return _Step(previous, self._is_served(previous)) if previous is not None else None

    def _steps(self, marker: MarkerId, known: Container[_Step]) -> list[_Step]:
        """What leads to ``marker`` from the last step that is known, the newest first."""
        steps: list[_Step] = []
        at: _Step | None = _Step(marker, self._is_served(marker))
        while at is not None and at not in known:
            steps.append(at)
            at = self._before(at)
        return steps

    def _reach(self, marker: MarkerId) -> MarkerId | None:
        at: MarkerId | None = marker
        while at is not None and not self._is_served(at):
            at = self._previous[at]
        return at

    def _size(self, step: _Step) -> int:
        if step.stored:
            with contextlib.suppress(CorruptionError):  # it is said when it is read
                return sum(ref.num_bytes for ref in self._piece(step).segments)
            return 0
        before = self._ends_before(step)
        return sum(
            end.num_bytes - (before[end.rank].num_bytes if before else 0)
            for end in self._lineage.find(step.marker).ranks
        )

    def _ends_before(self, step: _Step) -> tuple[RankEnd, ...]:
        """Where the streams of an interval begin: at a marker of the same generation, or at their HELLOs."""
        previous = self._previous[step.marker]
        if previous is None or previous.generation != step.marker.generation:
            return ()
        return self._lineage.find(previous).ranks

    def _piece(self, step: _Step) -> Piece:
        assert self._catalog is not None
        return self._catalog.piece(self._strides_of(step.marker)[step.marker], self._lineage.find(step.marker))

    # Reading.

    def _way(self, marker: MarkerId) -> _Way:
        """Read what leads to ``marker``, as far as it was not."""
        for step in reversed(self._steps(marker, self._ways)):
            self._ways[step] = self._read(step, self._before(step))
        return self._ways[_Step(marker, self._is_served(marker))]

    def _read(self, step: _Step, before: _Step | None) -> _Way:
        commit = self._lineage.find(step.marker)
        claim = self._lineage.claims[commit.generation]
        bases = self._lineage.bases(commit.id)
        wanted = [
            table
            for table in range(len(claim.schema.tables))
            if before is None or bases.get(table, 0) > before.marker.generation
        ]
        reading = _Reading(commit, claim, Coverage(claim.schema, wanted))
        way = self._ways[before] if before is not None else _Way()
        damage = way.damage
        if step.stored:
            self._read_store(step, reading)
            way = replace(
                way,
                reach=step.marker,
                segments=way.segments + reading.segments,
                stored_rows=way.stored_rows + reading.rows,
                stored_bytes=way.stored_bytes + reading.num_bytes,
            )
        else:
            begun = before is not None and not before.stored and before.marker.generation == commit.generation
            for end in commit.ranks:
                self._read_interval(reading, end, self._ends_before(step))
            way = replace(
                way,
                streams=way.streams + (0 if begun else len(commit.ranks)),
                frames=way.frames + reading.frames,
                rows=way.rows + reading.rows,
                num_bytes=way.num_bytes + reading.num_bytes,
            )
        reading.check()
        return replace(way, damage=(*damage, *reading.damage))

    def _read_interval(self, reading: _Reading, end: RankEnd, before: Sequence[RankEnd]) -> None:
        """The frames of one rank up to the marker, from the marker before it or from HELLO."""
        after = before[end.rank] if before else None
        try:
            for header, frame in read_stream(self._log, reading.commit, end, after):
                try:
                    self._check_frame(reading, end, header, frame)
                except CorruptionError as error:  # of this frame alone: headers and their chain go on
                    reading.note(error, **self._log.where(error), **_table(header, reading.schema))
                reading.frames += 1
                reading.num_bytes += len(frame)
                self._progress(len(frame))
        except CorruptionError as error:
            reading.note(error, **self._log.where(error))

    def _check_frame(self, reading: _Reading, end: RankEnd, header: Header, frame: memoryview) -> None:
        payload = checked_payload(header, frame, reading.commit, end)
        if header.kind is Kind.HELLO:
            check_hello(header, frame, reading.claim, reading.commit, end)
        elif header.kind is Kind.MARK:
            read_mark(header, frame, reading.commit, end)
        elif header.table >= len(reading.schema.tables):
            raise CorruptionError(f"table {header.table} is not in the schema", **header.place())
        else:
            view = decode_rows(header, payload, reading.schema.tables[header.table])
            reading.rows += header.rows
            reading.coverage.add(header.table, header.col0, header.cols, view.ids)

    def _read_store(self, step: _Step, reading: _Reading) -> None:
        """All chunks of a piece, and what each rank said at its marker."""
        assert self._catalog is not None
        objects, schema = self._catalog.objects, reading.schema
        try:
            segments = [self._open(ref) for ref in self._piece(step).segments]
            fronts = {picked.ref.name: picked.front for picked in segments}
            for ref in self._notes(step):
                Notes.from_json((fronts.get(ref.name) or self._open(ref).front).notes, ref.name)
            for picked in segments:
                check_tables(picked.front, schema, picked.ref.name)
        except CorruptionError as error:
            reading.note(error)
            return
        reading.segments = len(segments)

        def note(error: CorruptionError) -> None:
            reading.note(error, **in_segments(error, segments, schema))

        with ThreadPoolExecutor(READERS) as pool:
            for picked, entry, data in read_chunks(objects, segments, pool, damaged=note):
                try:
                    view = decode_chunk(entry, data, schema, picked.ref.name)
                except CorruptionError as error:
                    note(error)
                    continue
                reading.coverage.add(entry.table, entry.col0, entry.cols, view.ids)
                reading.rows += len(view.ids)
                reading.num_bytes += len(data)
                self._progress(len(data))

    def _notes(self, step: _Step) -> list[SegmentRef]:
        """The last segments of the marker's own interval, if a restore asks them."""
        assert self._catalog is not None
        if step.marker not in self._catalog.markers:
            return []
        return [refs[-1] for refs in self._catalog.manifest(step.marker).segments]

    def _open(self, ref: SegmentRef) -> Picked:
        assert self._catalog is not None
        front = load_front(self._catalog.objects, ref, self._catalog.job)
        return Picked(ref, front, np.arange(len(front.directory)))


class _Placing:
    """A log for reading, that knows the place of the frame that was read last."""

    def __init__(self, log: LogReader) -> None:
        self._log = log
        self._at: LogSpan | None = None

    def incarnation(self) -> Incarnation | None:
        return self._log.incarnation()

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        self._log.check_there(spans)

    def place(self, span: LogSpan) -> tuple[str, int]:
        return self._log.place(span)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        self._at = span
        for offset, frame in self._log.read(span):
            self._at = replace(span, begin=offset)
            yield offset, frame

    def where(self, error: CorruptionError) -> dict[str, object]:
        """The file and the offset that ``error`` is about: what it says, or the frame that was read last."""
        if "path" in error.where or self._at is None:
            return {}
        path, offset = self._log.place(replace(self._at, begin=int(str(error.where.get("offset", self._at.begin)))))
        return {"path": path, "offset": str(offset)}


def _table(header: Header, schema: Schema) -> dict[str, object]:
    is_known = header.kind is Kind.ROWS and header.table < len(schema.tables)
    return {"table": schema.tables[header.table].name} if is_known else {}
