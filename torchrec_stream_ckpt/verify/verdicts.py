"""Compute a verdict for each marker of a job: read all data that they need, without a model, and check it.

Markers share the data that leads to them. Each interval of the log and each piece of the store is read once, and its
result counts for all markers that it leads to. Markers form a tree and are read along it, so that their proofs of live
rows are compared on the way (``proofs/ledger.py``).

:class:`Steps` lists the data to read for markers, as a tree.

:class:`KeptNotes` reads the ranks' notes at markers from a store once, and keeps them for folds that lead past these
markers.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError, TrimmedError
from torchrec_stream_ckpt.find.route import Route, lacking, lacks_trimmed, layout_of, locate
from torchrec_stream_ckpt.find.strides import Strides
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.entry_digests import DenseProof
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.interval import Interval, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.manifest import SegmentRef
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.proof import Proof
from torchrec_stream_ckpt.format.rows import decode_events
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.format.segment import Front, check_tables, decode_chunk
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import check_hello, checked_payload, read_mark, read_stream
from torchrec_stream_ckpt.proofs.ledger import Ledger
from torchrec_stream_ckpt.proofs.seen_marks import RankReport
from torchrec_stream_ckpt.proofs.unproved import Compared, Unproved
from torchrec_stream_ckpt.restore.coverage import Coverage, rows_of_frame
from torchrec_stream_ckpt.restore.damage_location import Placing, in_segments
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog, Picked, Piece
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.store.reader import NOTES_READS, load_front, open_segments, read_chunks
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, TableShard

READERS = 4
"""Number of threads that read the store and compare checksums."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Amounts:
    """Data that was read, of the log and of the store."""

    streams: int = 0
    frames: int = 0
    rows: int = 0
    num_bytes: int = 0
    segments: int = 0
    """Number of segments of the store."""
    stored_rows: int = 0
    stored_bytes: int = 0
    """Bytes of chunks."""

    def __add__(self, other: Amounts) -> Amounts:
        mine, others = asdict(self), asdict(other)
        return Amounts(**{name: mine[name] + others[name] for name in mine})


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified(Amounts):
    """Counts and results of a marker that was read and found whole."""

    marker: MarkerId
    generations: int
    dense_files: int
    dense_bytes: int
    reach: MarkerId | None = None
    """Last marker whose rows were read from the store. None if all rows were read from the log."""
    proved: float = 0.0
    """Share of all rows that were compared with proofs of markers. Weights and states count separately."""
    unproved: Unproved | None = None
    """Rows that differ from their proof."""
    uncompared: tuple[str, ...] = ()
    """Tables whose row-wise states arrived in several column splits, and are partly not compared."""
    read_around: tuple[str, ...] = ()
    """Descriptions of damaged objects of the store whose rows were read from elsewhere."""


CompareDense = Callable[[Path, Commit, Proof | None, Mapping[int, DenseProof]], Compared]
"""Compares a marker's dense files with its proofs: that of rank 0 for replicated tables, and those of all ranks."""


def dense_of(
    said: RankReport | None,
    proofs: Mapping[int, DenseProof],
    dense: DenseStore,
    commit: Commit,
    compare_dense: CompareDense | None,
) -> Compared:
    """Compare the dense state of a marker with the proofs of its ranks.

    Args:
        said: Proof of rank 0 on replicated tables.
        proofs: Proofs of ranks on their entries.
        dense: Place of the files.
        commit: COMMIT of the marker.
        compare_dense: Compares dense state. None to compare nothing.

    Raises:
        CorruptionError: an entry differs from the cut; the error names it, and the rank that proved it.
    """
    proof = said.proof if said is not None and said.proof is not None and said.proof.replicated else None
    if compare_dense is None or (proof is None and not proofs):
        return Compared()
    return compare_dense(dense.local(commit), commit, proof, proofs)


_KEPT = 1024
"""Number of markers whose notes are kept."""


class KeptNotes:
    """Notes of markers by their ids.

    Args:
        catalog: Catalog of the store.
        lineage: The control partition. A manifest of another history counts as damaged.
    """

    def __init__(self, catalog: Catalog, lineage: Lineage) -> None:
        self._catalog = catalog
        self._lineage = lineage
        self._kept: OrderedDict[MarkerId, tuple[Notes, ...]] = OrderedDict()
        self._read: set[MarkerId] = set()

    def of(self, marker: MarkerId, fronts: Mapping[str, Front]) -> tuple[Notes, ...]:
        """Return the notes of each rank at a marker. Raises CorruptionError.

        Args:
            marker: A marker with a manifest.
            fronts: Fronts of open segments, by name.
        """
        if marker not in self._kept:
            self._read.add(marker)
            self._kept[marker] = tuple(
                Notes.from_json((fronts.get(ref.name) or self._front(ref)).notes, ref.name)
                for ref in self._catalog.check(self._lineage.find(marker)).last
            )
            while len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return self._kept[marker]

    def _front(self, ref: SegmentRef) -> Front:
        return load_front(self._catalog.objects, ref, self._catalog.job)

    def some_of(self, markers: Iterable[MarkerId]) -> Iterator[tuple[MarkerId, tuple[Notes, ...]]]:
        """Yield the notes of the first few markers if they are still kept, or can be read for the first time.

        The rows can be read without them. So damaged notes are omitted: less can be proved.
        """
        there = (each for each in markers if each in self._catalog.markers and each not in self._catalog.dropped)
        for marker in islice(there, NOTES_READS):
            if marker in self._kept or marker not in self._read:
                try:
                    notes = self.of(marker, {})
                except CorruptionError:
                    continue
                yield marker, notes


@dataclass(frozen=True, slots=True)
class Step:
    """Unit of reading: the interval of the log, or the piece of the store, that ends at a marker."""

    marker: MarkerId
    stored: bool


class Steps:
    """Steps of all markers of a job.

    Args:
        lineage: The control partition.
        catalog: The store that serves some of them. None for the log alone.
    """

    def __init__(self, lineage: Lineage, catalog: Catalog | None) -> None:
        self._lineage, self._catalog = lineage, catalog
        self._strides = Strides(lineage, catalog)
        self.reach = self._strides.reach
        self.previous: dict[MarkerId, MarkerId | None] = {}
        """Marker that each marker builds on."""
        newest: dict[int, MarkerId] = {}
        for marker in lineage.commits:
            self.previous[marker] = newest.get(marker.generation, lineage.claims[marker.generation].parent)
            newest[marker.generation] = marker

    def to(self, marker: MarkerId) -> Step:
        """Return the last step that leads to a marker."""
        return Step(marker, self._strides.serves(marker))

    def tree(self, markers: Iterable[MarkerId]) -> dict[Step | None, list[Step]]:
        """Return the steps that follow each step, and those that follow none, the most needed first."""
        found: dict[Step | None, list[Step]] = {}
        known: set[Step] = set()
        for marker in markers:
            for step in self.steps(marker, known):
                known.add(step)
                found.setdefault(self.before(step), []).append(step)
        weight: dict[Step, int] = {}
        for step in reversed(list(_downward(found))):
            weight[step] = 1 + sum(weight[each] for each in found.get(step, ()))
        for steps in found.values():
            steps.sort(key=lambda step: -weight[step])
        return found

    def within(self, step: Step) -> Iterator[MarkerId]:
        """Yield markers that a piece of the store leads past, newest first. Yields nothing if it holds every row."""
        start, at = self._strides.start(step.marker), self.previous[step.marker]
        while start is not None and at is not None and at != start:
            yield at
            at = self.previous[at]

    def before(self, step: Step) -> Step | None:
        """Return the step that an interval of the log, or a piece of the store, builds on."""
        if step.stored:
            start = self._strides.start(step.marker)
            return Step(start, True) if start is not None else None
        previous = self.previous[step.marker]
        return self.to(previous) if previous is not None else None

    def steps(self, marker: MarkerId, known: Container[Step]) -> list[Step]:
        """Return the steps that lead to ``marker`` from the last known one, the newest first."""
        steps: list[Step] = []
        at: Step | None = self.to(marker)
        while at is not None and at not in known:
            steps.append(at)
            at = self.before(at)
        return steps

    def size_of(self, step: Step) -> int:
        """Return the bytes of a step, judging by names and COMMITs."""
        if step.stored:
            with contextlib.suppress(CorruptionError):  # reported when it is read
                return sum(ref.num_bytes for ref in self.piece(step).segments)
            return 0
        return sum(interval.num_bytes for interval in self.intervals(step))

    def intervals(self, step: Step) -> Iterator[Interval]:
        """Return the interval of each rank for a step of the log."""
        marker, previous = step.marker, self.previous[step.marker]
        before = previous if previous is not None and previous.generation == marker.generation else None
        commit = self._lineage.find(marker)
        claim = self._lineage.claims[marker.generation]
        return intervals_of(claim, commit, self._lineage.find(before) if before is not None else None)

    def piece(self, step: Step) -> Piece:
        """Return the piece of the store for a step. Raises CorruptionError."""
        assert self._catalog is not None
        return self._catalog.piece(self._strides.start(step.marker), self._lineage.find(step.marker))


def _downward(tree: Mapping[Step | None, list[Step]]) -> Iterator[Step]:
    """Yield all steps, each after the one that it builds on."""
    wanted = list(tree.get(None, ()))
    while wanted:
        step = wanted.pop()
        yield step
        wanted += tree.get(step, ())


def _forks(tree: Mapping[Step | None, list[Step]]) -> int:
    """Return the most branches on the way to a step that are read before the heaviest one at their fork."""
    sides = dict.fromkeys(tree.get(None, ()), 0)
    for step in _downward(tree):
        for number, following in enumerate(tree.get(step, ())):
            sides[following] = sides[step] + (number > 0)
    return max(sides.values(), default=0)


@dataclass(frozen=True, slots=True)
class MarkerVerdict:
    """Result of checking one marker."""

    marker: MarkerId
    damage: tuple[CorruptionError, ...]
    """Errors, each with the marker in whose interval it is, and its place. Empty if the marker is whole."""
    verified: Verified | None
    """Result of reading it, including rows that differ from their proof. None if the marker is damaged."""


@dataclass(frozen=True, slots=True)
class _Way:
    """Totals of the data that leads to a marker, from the start of its path."""

    reach: MarkerId | None = None
    read: Amounts = field(default_factory=Amounts)
    damage: tuple[CorruptionError, ...] = ()


@dataclass(slots=True)
class _Reading:
    """One interval of the log, or one piece of the store, while it is read."""

    commit: Commit
    claim: Claim
    coverage: Coverage
    stale: Collection[int] = ()
    """Tables whose rows of this interval or piece do not count: a later generation has sent them whole."""
    frames: int = 0
    rows: int = 0
    num_bytes: int = 0
    segments: int = 0
    said: list[RankReport] = field(default_factory=list)
    """Proofs of each rank at the marker."""
    damage: list[CorruptionError] = field(default_factory=list)

    @property
    def schema(self) -> Schema:
        return self.claim.schema

    def note(self, error: CorruptionError, **place: object) -> None:
        """Record an error with its known place."""
        where = {"marker": str(self.commit.id), **error.where, **place}
        self.damage.append(type(error)(error.message, hint=error.hint, **where))

    def sent(self, table: int, col0: int, cols: int, ids: npt.NDArray[np.int64]) -> None:
        """Record that rows of one column slice were sent."""
        if table not in self.stale:
            self.coverage.add(table, col0, cols, ids)

    def check(self) -> None:
        if not self.damage:  # rows that were not read cannot be distinguished from rows that were not sent
            try:
                self.coverage.check()
            except CorruptionError as error:
                self.note(error)


class Verifier:
    """Reads the data that markers need, each byte once for all of them.

    Args:
        log: The job's log.
        lineage: Its control partition.
        progress: Called with the bytes of each chunk and frame.
        catalog: Catalog of the store that a restore takes rows from. None for the log alone.
        compare_dense: Compares dense state. None to skip it.
        route: Route to the only marker that is read. None to choose pieces of the store by their names.
        objects: The store, also if it is empty: then no other store is named for rows that it should have.
    """

    def __init__(
        self,
        log: LogReader,
        lineage: Lineage,
        progress: Callable[[int], None] = lambda _: None,
        catalog: Catalog | None = None,
        compare_dense: CompareDense | None = None,
        route: Route | None = None,
        objects: Objects | None = None,
    ) -> None:
        self._log = Placing(log)
        self._lineage = lineage
        self._progress = progress
        self._compare_dense = compare_dense
        self._objects = objects
        self._catalog = catalog
        self._route = route
        self._rotation = route.marker.marker if route is not None else 0
        self._whole: Coverage | None = None
        """Rows on the whole route: a row that is missing in one interval may have been sent again in a later one."""
        self._bases: Mapping[int, int] = {}
        """(with a route) For each table, the generation that sent it whole last."""
        if route is not None:
            self._whole, self._bases = Coverage(route.schema, range(len(route.schema.tables))), route.bases
        self._ledger = Ledger(lineage)
        self._opened: Mapping[MarkerId, Sequence[Picked]] = {}
        """Segments whose directories were read, by the end of their piece."""
        if catalog is not None and route is not None:
            self._opened = {piece.end: piece.opened for piece in route.pieces}
            folds = {(piece.start, piece.end) for piece in route.pieces} & catalog.folds
            catalog = replace(catalog, markers=self._opened.keys() & catalog.markers, folds=folds)
        self._steps = Steps(lineage, catalog)
        self._ways: dict[Step, _Way] = {}
        self._compared: dict[Step, tuple[Compared, tuple[str, ...], RankReport | None, dict[int, DenseProof]]] = {}
        """Results for the rows, tables whose row-wise states are not compared, and proofs of ranks on dense state."""
        self._refused: dict[MarkerId, CorruptionError | TrimmedError] = {}
        self._shards: dict[tuple[int, int], tuple[TableShard, ...]] = {}
        """Shards by generation and rank."""
        self._told = KeptNotes(self._catalog, lineage) if self._catalog is not None else None

    def read(self, commits: Iterable[Commit]) -> None:
        """Read the data that these markers need, if it exists.

        Raises:
            MarkerNotFoundError: a marker was given up, according to the store.
            StoreUnavailableError, LogUnavailableError: the store or the log does not answer.
        """
        tree = self._steps.tree(commit.id for commit in commits if self._is_there(commit.id))
        self._ledger = Ledger(self._lineage, _forks(tree), self._rotation)
        wanted: list[tuple[Step | None, bool]] = [(step, False) for step in tree.get(None, ())]
        while wanted:
            step, is_side = wanted.pop()
            if step is None:
                self._ledger.back()
                continue
            if is_side:
                self._ledger.fork()
                wanted.append((None, False))
            self._ways[step] = self._read(step, self._steps.before(step))
            wanted += [(each, number > 0) for number, each in enumerate(tree.get(step, ()))]

    def _is_there(self, marker: MarkerId) -> bool:
        if self._catalog is not None:
            self._catalog.check_offered(marker)
        try:
            locate(self._lineage, marker, since=self._steps.reach(marker)).check(self._log)
        except (TrimmedError, CorruptionError) as error:
            self._refused[marker] = error
            if lacks_trimmed(error, self._objects):
                here = lacking(error, self._objects)
                self._refused[marker] = CorruptionError(here.message, hint=here.hint, **here.where)
        return marker not in self._refused

    def verdict(self, commit: Commit, dense: DenseStore) -> MarkerVerdict:
        """Return the verdict on a marker that was passed to :meth:`read`.

        Args:
            commit: COMMIT of the marker.
            dense: Place of its dense state.

        Raises:
            StoreUnavailableError: the store does not answer.
            TrimmedError: the log was trimmed, and the marker needs the deleted data.
        """
        refused = self._refused.get(commit.id)
        if isinstance(refused, TrimmedError) and not Route(self._lineage, commit).wrote_to(self._log.incarnation()):
            raise refused  # its dense state is where its rows are
        damage: tuple[CorruptionError, ...] = ()
        try:
            dense.verify(commit)
        except CorruptionError as error:
            where = {"marker": str(commit.id), **error.where}
            damage = (type(error)(error.message, hint=error.hint, **where),)
        if damage and isinstance(refused, TrimmedError):
            return MarkerVerdict(commit.id, damage, None)
        found = self.rows_verdict(commit, None if damage else dense)
        return replace(found, damage=(*damage, *found.damage), verified=None) if damage else found

    def rows_verdict(self, commit: Commit, dense: DenseStore | None) -> MarkerVerdict:
        """Return the verdict of :meth:`verdict` on rows alone, and on entries of ``dense`` that have proofs."""
        marker, refused = commit.id, self._refused.get(commit.id)
        if isinstance(refused, TrimmedError):
            raise refused
        step = self._steps.to(marker)
        if damage := (refused,) if refused is not None else self._ways[step].damage:
            return MarkerVerdict(marker, damage, None)
        compared, uncompared, said, proofs = self._compared[step]
        if dense is not None:
            try:
                compared += dense_of(said, proofs, dense, commit, self._compare_dense)
            except CorruptionError as error:
                return MarkerVerdict(marker, (error,), None)
        return MarkerVerdict(marker, (), self._verified(commit, step, compared, uncompared))

    def num_bytes(self, commits: Iterable[Commit]) -> int:
        """Return the bytes of the log and the store that are read for these markers, judging by names and COMMITs."""
        known: set[Step] = set()
        for commit in commits:
            known.update(self._steps.steps(commit.id, known))
        return sum(map(self._steps.size_of, known))

    def _verified(self, commit: Commit, step: Step, compared: Compared, uncompared: tuple[str, ...]) -> Verified:
        way = self._ways[step]
        return Verified(
            marker=commit.id,
            generations=len(self._lineage.path(commit.id)),
            dense_files=commit.dense_count,
            dense_bytes=commit.dense_bytes,
            reach=way.reach,
            proved=compared.share,
            unproved=compared.unproved,
            uncompared=uncompared,
            **asdict(way.read),
        )

    def _read(self, step: Step, before: Step | None) -> _Way:
        commit = self._lineage.find(step.marker)
        claim = self._lineage.claims[commit.generation]
        swept: set[int] = set()
        """Tables that were sent whole since ``before``."""
        for each in self._lineage.upward(commit.id):
            if before is not None and each.generation <= before.marker.generation:
                break
            swept.update(self._lineage.claims[each.generation].swept)
        wanted = [table for table in range(len(claim.schema.tables)) if before is None or table in swept]
        coverage, stale = Coverage(claim.schema, wanted), frozenset[int]()
        if self._whole is not None:
            coverage = self._whole
            stale = frozenset(table for table, base in self._bases.items() if base > commit.generation)
        reading = _Reading(commit, claim, coverage, stale)
        way = self._ways[before] if before is not None else _Way()
        damage = way.damage
        self._turn(step, before, claim.schema)
        if step.stored:
            self._read_store(step, reading)
            read = Amounts(segments=reading.segments, stored_rows=reading.rows, stored_bytes=reading.num_bytes)
        else:
            begun = before is not None and not before.stored and before.marker.generation == commit.generation
            for interval in self._steps.intervals(step):
                self._read_interval(reading, interval)
            streams = 0 if begun else len(commit.ranks)
            read = Amounts(streams=streams, frames=reading.frames, rows=reading.rows, num_bytes=reading.num_bytes)
        if self._route is None or (commit.id == self._route.marker and not damage):
            reading.check()
        if not (damage or reading.damage):
            try:
                self._ledger.judge(commit.id, reading.said)
            except CorruptionError as error:
                reading.note(error)
        if not (damage or reading.damage):
            of_rank_0 = reading.said[0] if reading.said else None
            proofs = {rank: each.dense for rank, each in enumerate(reading.said) if each.dense is not None}
            outcome = self._ledger.outcome(), self._ledger.uncompared
            self._compared[step] = *outcome, _without_rows(of_rank_0), proofs if self._compare_dense is not None else {}
        return _Way(step.marker if step.stored else way.reach, way.read + read, (*damage, *reading.damage))

    def _turn(self, step: Step, before: Step | None, schema: Schema) -> None:
        if before is None:
            self._ledger.begin(schema)
        elif before.marker.generation != step.marker.generation:
            self._ledger.turn(schema)
        self._ledger.read_on()

    def _read_interval(self, reading: _Reading, interval: Interval) -> None:
        """Read the frames of one rank up to the marker, from the marker before it or from HELLO."""
        try:
            for header, frame in read_stream(self._log, reading.commit, interval.end, interval.after):
                try:
                    self._check_frame(reading, interval.end, header, frame)
                except CorruptionError as error:  # of this frame alone: reading continues with the next header
                    reading.note(error, **self._log.where(error), **_table(header, reading.schema))
                reading.frames += 1
                reading.num_bytes += len(frame)
                self._progress(len(frame))
        except CorruptionError as error:
            reading.note(error, **self._log.where(error))

    def _check_frame(self, reading: _Reading, end: RankEnd, header: Header, frame: memoryview) -> None:
        payload = checked_payload(header, frame, reading.commit, end)
        if header.kind is Kind.HELLO:
            hello = check_hello(header, frame, reading.claim, reading.commit, end)
            self._shards[reading.commit.generation, end.rank] = hello.shards
        elif header.kind is Kind.MARK:
            shards = self._shards.get((reading.commit.generation, end.rank), ())
            mark = read_mark(header, frame, reading.commit, end)
            if header.marker == reading.commit.marker:  # otherwise it is the MARK of a marker that failed
                reading.said.append(RankReport(shards, mark.proof, mark.dense_proof))
        elif header.kind is Kind.IDS:
            decode_events(header, payload, reading.schema.tables)
        elif header.kind is Kind.ROWS:
            view = rows_of_frame(header, payload, reading.schema)
            reading.rows += header.rows
            reading.sent(header.table, header.col0, header.cols, view.ids)
            self._ledger.rows(header.table, header.col0, header.cols, view)

    def _read_store(self, step: Step, reading: _Reading) -> None:
        """Read all chunks of a piece, and the notes of each rank at its marker."""
        assert self._catalog is not None
        objects, schema, told = self._catalog.objects, reading.schema, self._told
        assert told is not None
        try:
            segments = self._opened.get(step.marker)
            if segments is None:
                with ThreadPoolExecutor(READERS) as pool:
                    segments = open_segments(objects, self._steps.piece(step).segments, self._catalog.job, pool)
            if step.marker in self._catalog.markers:
                notes = told.of(step.marker, {picked.ref.name: picked.front for picked in segments})
                self._heard(step.marker, notes)
                reading.said = [RankReport(each.shards, each.mark.proof, each.mark.dense_proof) for each in notes]
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
                reading.sent(entry.table, entry.col0, entry.cols, view.ids)
                self._ledger.rows(entry.table, entry.col0, entry.cols, view)
                reading.rows += len(view.ids)
                reading.num_bytes += len(data)
                self._progress(len(data))

        if not reading.damage:
            self._judge_within(step, told)

    def _judge_within(self, step: Step, told: KeptNotes) -> None:
        """Judge blocks that a fold does not send by the proofs of markers within it."""
        for marker, notes in reversed(list(told.some_of(self._steps.within(step)))):
            said = [RankReport(each.shards, each.mark.proof) for each in notes]
            with contextlib.suppress(CorruptionError):  # less can be proved
                self._ledger.judge(marker, said, within=True)

    def _heard(self, marker: MarkerId, notes: Sequence[Notes]) -> None:
        """Keep the shards from notes, because HELLOs may be missing from a trimmed log. Raises CorruptionError."""
        for rank, shards in enumerate(layout_of(self._lineage.claims[marker.generation], notes)):
            self._shards.setdefault((marker.generation, rank), shards)


def _without_rows(said: RankReport | None) -> RankReport | None:
    """Return a copy with only the proof of replicated tables. None if there is none."""
    if said is None or said.proof is None or not said.proof.replicated:
        return None
    return RankReport((), replace(said.proof, digests=""))


def _table(header: Header, schema: Schema) -> dict[str, object]:
    is_known = header.kind is Kind.ROWS and header.table < len(schema.tables)
    return {"table": schema.tables[header.table].name} if is_known else {}
