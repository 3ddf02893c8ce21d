"""Route to a marker: an immutable value with the sources of its rows. Restores, ``verify`` and exports use it.

HEAD has the oldest rows, pieces of the store have the following ones, and intervals of the log have the rest. The
module also defines the path of a marker: the markers that lead to it, and the ends of their streams.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError, OtherLogError, StreamCkptError, TrimmedError
from torchrec_stream_ckpt.find.tiers import OUTER, Place
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.interval import Interval, generations, intervals, intervals_of
from torchrec_stream_ckpt.format.lineage import Lineage, towards
from torchrec_stream_ckpt.format.notes import Notes
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.api import Incarnation, LogReader
from torchrec_stream_ckpt.log.stream import held_by
from torchrec_stream_ckpt.store.catalog import Picked, Piece
from torchrec_stream_ckpt.store.reader import Told
from torchrec_stream_ckpt.util.layout import SUMMARIES_DIR
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd, TableShard


@dataclass(frozen=True, slots=True)
class Path:
    """Committed markers that lead to one, oldest first. The *place* of a marker is its index."""

    chain: tuple[MarkerId, ...] = ()
    ends: tuple[Sequence[RankEnd], ...] = ()
    """For each marker, the ends of its ranks' streams."""
    ids: Mapping[int, tuple[int | None, ...]] = field(default_factory=dict)
    """For each generation, the ids of its tables, by index."""
    sections: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """For each generation, the number of sections (weights and states) of its tables, by index."""

    @classmethod
    def to(cls, lineage: Lineage, marker: MarkerId, since: MarkerId | None = None) -> Path:
        """Make the path to ``marker``; with ``since``, which is on the path, only the markers after it."""
        commits = lineage.chain(marker)
        if since is not None:
            commits = commits[[commit.id for commit in commits].index(since) + 1 :]
        chain = tuple(commit.id for commit in commits)
        ends = tuple(commit.ranks for commit in commits)
        schemas = {each.generation: lineage.claims[each.generation].schema for each in chain}
        sections = {each: _sections(schema) for each, schema in schemas.items()}
        return cls(chain, ends, {each: _ids(schema) for each, schema in schemas.items()}, sections)

    @classmethod
    def at(cls, lineage: Lineage, marker: MarkerId) -> Path:
        """Make a path of one marker, for a reader that does not compare rows with proofs of older ones."""
        schema, generation = lineage.claims[marker.generation].schema, marker.generation
        ends = lineage.commits[marker].ranks
        return cls((marker,), (ends,), {generation: _ids(schema)}, {generation: _sections(schema)})

    def then(self, since: MarkerId, tail: Path) -> Path:
        """Return the path up to ``since``, followed by ``tail``."""
        place = self.place(since) + 1
        ids, sections = {**self.ids, **tail.ids}, {**self.sections, **tail.sections}
        return Path(self.chain[:place] + tail.chain, self.ends[:place] + tail.ends, ids, sections)

    def place(self, marker: MarkerId) -> int:
        """Return the place of ``marker``, or of the first marker that contains the rows sent for it."""
        return bisect_left(self.chain, marker)

    def place_of(self, mark: Header) -> int | None:
        """Return the place of a MARK; None if its marker was not committed, or is not on the path."""
        marker = MarkerId(mark.generation, mark.marker)
        place = self.place(marker)
        if place == len(self.chain) or self.chain[place] != marker or mark.rank >= len(self.ends[place]):
            return None
        return place if mark.header_crc == self.ends[place][mark.rank].chain else None

    def id(self, table: int) -> int | None:
        """Return the id of a table, by its index at the last marker."""
        return self.ids[self.chain[-1].generation][table]

    def same_table(self, table: int) -> npt.NDArray[np.bool_]:
        """Return one flag for each place: whether the table with this index has the same id as at the last marker."""
        last = self.id(table)
        same = {each: last is not None and ids[table : table + 1] == (last,) for each, ids in self.ids.items()}
        return np.array([same[each.generation] for each in self.chain])


def _ids(schema: Schema) -> tuple[int | None, ...]:
    return tuple(table.id for table in schema.tables)


def _sections(schema: Schema) -> tuple[int, ...]:
    return tuple(1 + len(table.states) for table in schema.tables)


Shards = Mapping[int, Sequence[tuple[TableShard, ...]]]
"""Shards of each rank, by generation; generations with the same layout share one object."""


@dataclass(frozen=True, slots=True)
class Route:
    """Sources that a reader uses to get a marker, oldest first."""

    lineage: Lineage
    """Lineage of the control partition; in a route from :meth:`complete`, only the part that leads to the marker."""
    commit: Commit
    """COMMIT of the marker."""
    since: MarkerId | None = None
    """Marker on the path whose rows the reader has. None if the reader has no rows."""
    head: HeadState | None = None
    """HEAD that has the oldest rows; None if no HEAD is used."""
    pieces: tuple[Piece, ...] = ()
    """Open pieces of the store, oldest first; without HEAD and ``since``, the first one holds every row."""
    told: Told = field(default_factory=dict)
    """Notes of the ranks at markers up to which HEAD and the store have all rows, if they were read."""
    shards: Shards = field(default_factory=dict)
    """Shards of each rank, in every generation of which the log is needed."""
    skipped: tuple[str, ...] = ()
    """Newer markers that were skipped, each with its reason."""
    place: Place = OUTER
    """Place that the marker is read from: which of the job's logs."""
    newest_generation: int = 0
    """Newest generation that was claimed when the marker was found."""
    summarized: bool = False
    """True if directories of :attr:`pieces` come from summaries; after a mismatch, the objects are read instead."""

    @property
    def marker(self) -> MarkerId:
        return self.commit.id

    @property
    def claim(self) -> Claim:
        """CLAIM of the marker's generation."""
        return self.lineage.claims[self.commit.generation]

    @property
    def schema(self) -> Schema:
        return self.claim.schema

    @property
    def bases(self) -> dict[int, int]:
        """For each table, the newest generation on the path that sent it completely; older rows do not count."""
        return self.lineage.bases(self.marker)

    @property
    def path(self) -> Path:
        """Path to this marker, after ``since``."""
        return Path.to(self.lineage, self.marker, self.since)

    @property
    def stored(self) -> MarkerId | None:
        """Marker up to which HEAD and the store have all rows; None if they have none."""
        if self.pieces:
            return self.pieces[-1].end
        return self.head.marker if self.head is not None else None

    @property
    def notes(self) -> tuple[Notes, ...]:
        """Notes of each rank at the marker :attr:`stored`."""
        return self.told[self.stored] if self.stored is not None else ()

    @property
    def segments(self) -> list[Picked]:
        """Segments to read from the store."""
        return [picked for piece in self.pieces for picked in piece.opened]

    @property
    def reach(self) -> MarkerId | None:
        """Marker up to which the log is not needed; None if all rows come from the log."""
        return self.stored or self.since

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """Intervals to read from the log, in the order of the path."""
        return tuple(intervals(self.lineage, self.marker, self.reach))

    @property
    def source(self) -> str:
        """Sources of the rows, as text: ``log``, ``store`` or ``store+log``."""
        return source_of(self.marker, self.stored)

    def segment_of(self, error: StreamCkptError) -> str | None:
        """Return the segment of this route that ``error`` is about; None if it is about something else.

        If its directory may be from a summary, returns the name of the summaries, so that the next search reads the
        objects.
        """
        said = str(error.where.get("name", error.where.get("path", "")))
        name = next((each.ref.name for each in self.segments if said.endswith(each.ref.name)), None)
        return SUMMARIES_DIR if name is not None and self.summarized else name

    # Presence in the log.

    def check(self, log: LogReader) -> None:
        """Check that the log has the intervals that are needed.

        Missing parts of streams whose ends are not checked are detected when they are read.

        Raises:
            TrimmedError: they were trimmed, and a store has them.
            OtherLogError: the log was deleted and recreated under its name.
            CorruptionError: something is missing that was not trimmed.
            LogUnavailableError: the log does not answer.
        """
        self.check_trimmed(log)  # first, because a recovered log is also another log
        walked = generations(self.lineage, self.marker, self.reach)
        check_incarnation(log, self.lineage, self.marker, (commit.generation for commit, _ in walked))

    def check_trimmed(self, log: LogReader) -> None:
        """Check that the log still has intervals that a TRIM covers: it may delete less. Raises as :meth:`check`."""
        walked = generations(self.lineage, self.marker, self.reach)
        if any(self.lineage.trims.of(commit.generation) is not None for commit, _ in walked):
            check_there(log, self.lineage, self.marker, self.intervals)

    def wrote_to(self, now: Incarnation | None) -> bool:
        """Return whether the marker's own generation wrote to this log; an inner tier also takes over other markers."""
        return now is not None and now.holds_rows_of(self.claim.incarnation)

    def check_own(self, log: LogReader) -> None:
        """Check that the streams of the marker's own generation exist, judging by names and sizes.

        Streams of older generations, of which there is one for each restart, are checked when they are read.

        Raises:
            CorruptionError: a stream is missing or too short.
        """
        own = [
            each
            for each in generations(self.lineage, self.marker, self.reach)
            if each[0].generation == self.marker.generation
        ]
        log.check_there([each.span for commit, after in own for each in intervals_of(self.claim, commit, after)])

    # Shards of the ranks.

    def complete(self, log: LogReader, known: Shards | None = None) -> Route:
        """Return the route with :attr:`shards`, and with only the part of the lineage that leads to its marker.

        The result can be sent to other ranks.

        Shards come from the CLAIMs. HELLOs in the log are read only for generations whose CLAIM has none. Whether the
        HELLOs agree is checked when the streams are read.

        Args:
            log: The job's log.
            known: Shards from an earlier call, because HELLOs up to ``since`` may be trimmed.

        Raises:
            CorruptionError: a HELLO is missing in the log, or the shards in the store differ from those in the CLAIM.
        """
        known = known or {}
        found: dict[int, Sequence[tuple[TableShard, ...]]] = {}
        for commit, after in generations(self.lineage, self.marker, self.reach):
            claim = self.lineage.claims[commit.generation]
            if self.stored is not None and after is not None:
                found[commit.generation] = _layout(claim, self.notes)
            else:
                found[commit.generation] = known.get(commit.generation) or _in_log(log, claim, commit)
        return replace(self, lineage=towards(self.lineage, self.marker, self.since), shards=found)

    def all_shards(self) -> Shards:
        """Return :attr:`shards`, with those of the marker's own generation even if the store has all of its rows."""
        stored, generation = self.stored, self.commit.generation
        if stored is None or stored.generation != generation or generation in self.shards:
            return self.shards
        return {**self.shards, generation: _layout(self.claim, self.notes)}

    @property
    def own_shards(self) -> list[TableShard]:
        """Shards of the marker's ranks, from its generation's part of :attr:`shards`, otherwise from the store."""
        of_ranks = self.shards.get(self.commit.generation) or [each.shards for each in self.notes]
        return [shard for each in of_ranks for shard in each]

    def stay(self) -> Route:
        """Return the route of a reader that already has the marker."""
        return Route(self.lineage, self.commit, since=self.marker)


def check_there(log: LogReader, lineage: Lineage, marker: MarkerId, needed: Sequence[Interval]) -> None:
    """Check that the log has the intervals that lead to a marker, judging by names, sizes and ends.

    Raises:
        TrimmedError: they were trimmed, and a store has them.
        CorruptionError: something is missing that was not trimmed.
        LogUnavailableError: the log does not answer.
    """
    try:
        log.check_there([each.span for each in needed])
    except CorruptionError:
        trims = [trim for each in needed if (trim := lineage.trims.of(each.commit.generation)) is not None]
        if not trims:
            raise
        said = lineage.trims.reach
        log.check_there(
            [
                span._replace(begin=max(span.begin, each.span.begin))
                for each in needed
                for span in lineage.spans(each.commit.generation, [each.end], said)
            ]
        )
        last = trims[-1]
        raise TrimmedError(
            f"the log up to marker {last.id} was trimmed on {last.day}; the store {last.store} holds it",
            hint="name that store: store=URL, on the command line --store URL; if it belongs to the outer tier of "
            "this job, name both tiers, or only the outer one",
            marker=marker,
            store=last.store,
        ) from None


def check_incarnation(log: LogReader, lineage: Lineage, marker: MarkerId, walked: Iterable[int]) -> None:
    """Check that the log is the same one that these generations, which lead to a marker, wrote to.

    Raises:
        OtherLogError: the log was deleted and recreated under its name.
    """
    now = log.incarnation()
    for generation in walked:
        if now is None or not now.holds_rows_of(lineage.claims[generation].incarnation):
            raise OtherLogError(
                f"the log was deleted and recreated after generation {generation} wrote to it",
                hint="put the old log back; this one does not hold its rows",
                generation=generation,
                marker=marker,
            )


def source_of(marker: MarkerId, reach: MarkerId | None) -> str:
    """Return the source of rows if a store serves up to ``reach``: ``log``, ``store`` or ``store+log``."""
    return "log" if reach is None else "store" if reach == marker else "store+log"


def _in_log(log: LogReader, claim: Claim, commit: Commit) -> Sequence[tuple[TableShard, ...]]:
    """Return the shards of each rank in a generation, from the CLAIM or, if it has none, from the HELLOs in the log."""
    if claim.layout is not None and len(claim.layout) == len(commit.ranks):
        return claim.layout
    return tuple(held_by(log, claim, commit, end) for end in commit.ranks)


def _layout(claim: Claim, notes: Sequence[Notes]) -> Sequence[tuple[TableShard, ...]]:
    """Return the shards of the ranks from the store, after a check against the CLAIM or, without it, the tables."""
    held = tuple(each.shards for each in notes)
    if claim.layout is not None and claim.layout[:] == held:
        return claim.layout
    for rank, shards in enumerate(held):
        outside = next((shard for shard in shards if not claim.schema.holds(shard)), None)
        if claim.layout is not None or outside is not None:
            raise CorruptionError(
                f"the store lists a rank's shard {outside}, which is outside its table"
                if outside is not None
                else "the store lists other shards of the ranks than the CLAIM",
                generation=claim.generation,
                rank=rank,
            )
    return held
