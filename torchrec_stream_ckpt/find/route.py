"""Where the bytes of a marker are, and whether they are there: a value, of which restores, verify and exports are made.

A HEAD gives the oldest rows, pieces of the store those that follow, intervals of the log the rest.

The markers that lead to one, and where a reader meets each.
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
    """Committed markers that lead to one, oldest first. A marker's *place* is its index."""

    chain: tuple[MarkerId, ...] = ()
    ends: tuple[Sequence[RankEnd], ...] = ()
    """For each marker, where its ranks stand."""
    ids: Mapping[int, tuple[int | None, ...]] = field(default_factory=dict)
    """Generation -> ids of its tables, by their index."""
    sections: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    """Generation -> how many sections its tables have, weights and states, by their index."""

    @classmethod
    def to(cls, lineage: Lineage, marker: MarkerId, since: MarkerId | None = None) -> Path:
        """All of them, or those behind ``since``, which is one of them."""
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
        """The marker alone: for a reader that compares nothing with what older ones proved."""
        schema, generation = lineage.claims[marker.generation].schema, marker.generation
        ends = lineage.commits[marker].ranks
        return cls((marker,), (ends,), {generation: _ids(schema)}, {generation: _sections(schema)})

    def then(self, since: MarkerId, tail: Path) -> Path:
        """The path up to ``since``, and what follows on it."""
        place = self.place(since) + 1
        ids, sections = {**self.ids, **tail.ids}, {**self.sections, **tail.sections}
        return Path(self.chain[:place] + tail.chain, self.ends[:place] + tail.ends, ids, sections)

    def place(self, marker: MarkerId) -> int:
        """The place of ``marker``, or of the first one that holds what was sent for it."""
        return bisect_left(self.chain, marker)

    def place_of(self, mark: Header) -> int | None:
        """That of a MARK; None where its marker was not committed, or leads elsewhere."""
        marker = MarkerId(mark.generation, mark.marker)
        place = self.place(marker)
        if place == len(self.chain) or self.chain[place] != marker or mark.rank >= len(self.ends[place]):
            return None
        return place if mark.header_crc == self.ends[place][mark.rank].chain else None

    def id(self, table: int) -> int | None:
        """Of a table, by its index at the last marker."""
        return self.ids[self.chain[-1].generation][table]

    def same_table(self, table: int) -> npt.NDArray[np.bool_]:
        """One flag a place: whether the table of this index has the id that it has at the last marker."""
        last = self.id(table)
        same = {each: last is not None and ids[table : table + 1] == (last,) for each, ids in self.ids.items()}
        return np.array([same[each.generation] for each in self.chain])


def _ids(schema: Schema) -> tuple[int | None, ...]:
    return tuple(table.id for table in schema.tables)


def _sections(schema: Schema) -> tuple[int, ...]:
    return tuple(1 + len(table.states) for table in schema.tables)


Shards = Mapping[int, Sequence[tuple[TableShard, ...]]]
"""What each rank held, by generation; generations with one layout have one object."""


@dataclass(frozen=True, slots=True)
class Route:
    """What a reader takes, oldest first, to have a marker."""

    lineage: Lineage
    """The control partition; of a route that :meth:`complete` has made, what leads to the marker."""
    commit: Commit
    """The marker's."""
    since: MarkerId | None = None
    """A marker on the path whose rows the reader has; None: it has none."""
    head: HeadState | None = None
    """The HEAD that gives the oldest rows; None: there is none to use."""
    pieces: tuple[Piece, ...] = ()
    """What the store gives, oldest first and open: without HEAD and ``since``, the first one holds every row."""
    told: Told = field(default_factory=dict)
    """What the ranks said at markers that HEAD and the store lead to, as far as it was read."""
    shards: Shards = field(default_factory=dict)
    """What each rank held, in every generation of which the log has to give something."""
    skipped: tuple[str, ...] = ()
    """Newer markers that were passed over, each with its reason."""
    place: Place = OUTER
    """Which of a job's logs give it."""
    newest_generation: int = 0
    """The newest generation that was claimed when the marker was found."""
    summarized: bool = False
    """True if directories of :attr:`pieces` come from summaries: what does not fit them is looked at in the objects."""

    @property
    def marker(self) -> MarkerId:
        return self.commit.id

    @property
    def claim(self) -> Claim:
        """Of the marker's generation."""
        return self.lineage.claims[self.commit.generation]

    @property
    def schema(self) -> Schema:
        return self.claim.schema

    @property
    def bases(self) -> dict[int, int]:
        """For each table, the newest generation on the path that sent it whole: what is older does not count."""
        return self.lineage.bases(self.marker)

    @property
    def path(self) -> Path:
        """The markers that lead to this one, those after ``since``."""
        return Path.to(self.lineage, self.marker, self.since)

    @property
    def stored(self) -> MarkerId | None:
        """The marker up to which HEAD and the store give all rows; None: they give nothing."""
        if self.pieces:
            return self.pieces[-1].end
        return self.head.marker if self.head is not None else None

    @property
    def notes(self) -> tuple[Notes, ...]:
        """What each rank said there."""
        return self.told[self.stored] if self.stored is not None else ()

    @property
    def segments(self) -> list[Picked]:
        """What is read of the store."""
        return [picked for piece in self.pieces for picked in piece.opened]

    @property
    def reach(self) -> MarkerId | None:
        """The marker up to which the log need not give anything; None: it gives everything."""
        return self.stored or self.since

    @property
    def intervals(self) -> tuple[Interval, ...]:
        """What the log gives, in the order of the path."""
        return tuple(intervals(self.lineage, self.marker, self.reach))

    @property
    def source(self) -> str:
        """``log``, ``store`` or ``store+log``."""
        return source_of(self.marker, self.stored)

    def segment_of(self, error: StreamCkptError) -> str | None:
        """The segment of the store that ``error`` is about, if it is one of these.

        If its directory may be from a summary, the name is that of the summaries: the next look asks the objects.
        """
        said = str(error.where.get("name", error.where.get("path", "")))
        name = next((each.ref.name for each in self.segments if said.endswith(each.ref.name)), None)
        return SUMMARIES_DIR if name is not None and self.summarized else name

    # Whether the log has it.

    def check(self, log: LogReader) -> None:
        """See that the log has what it has to give; streams whose ends are not looked at are seen when they are read.

        Raises:
            TrimmedError: it was trimmed, and a store has it.
            OtherLogError: the log was deleted and made again under its name.
            CorruptionError: something is missing that was not trimmed.
            LogUnavailableError: the log does not answer.
        """
        self.check_trimmed(log)  # first: a log that was recovered is another one, too
        walked = generations(self.lineage, self.marker, self.reach)
        check_incarnation(log, self.lineage, self.marker, (commit.generation for commit, _ in walked))

    def check_trimmed(self, log: LogReader) -> None:
        """See that what was trimmed on purpose is still there: a trim deletes what it can. Raises as :meth:`check`."""
        walked = generations(self.lineage, self.marker, self.reach)
        if any(self.lineage.trims.of(commit.generation) is not None for commit, _ in walked):
            check_there(log, self.lineage, self.marker, self.intervals)

    def wrote_to(self, now: Incarnation | None) -> bool:
        """Return whether the marker's own generation wrote to this very log; an inner tier takes over other markers."""
        return now is not None and now.holds_rows_of(self.claim.incarnation)

    def check_own(self, log: LogReader) -> None:
        """The streams of the marker's own generation must be there, as far as names and sizes tell.

        Whether those of older generations are is seen when they are read: there are as many as restarts.

        Raises:
            CorruptionError: one of them is not.
        """
        own = [
            each
            for each in generations(self.lineage, self.marker, self.reach)
            if each[0].generation == self.marker.generation
        ]
        log.check_there([each.span for commit, after in own for each in intervals_of(self.claim, commit, after)])

    # Who held what.

    def complete(self, log: LogReader, known: Shards | None = None) -> Route:
        """The same with :attr:`shards`, and without what leads elsewhere: it can be sent to other ranks.

        As the CLAIMs say; the HELLOs in the log are read only of generations of which these do not say it. That the
        HELLOs say the same is seen when the streams are read.

        Args:
            log: The job's log.
            known: What was found out before: HELLOs up to ``since`` may be trimmed.

        Raises:
            CorruptionError: the log does not have a HELLO, or the store says other shards than the CLAIM.
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
        """:attr:`shards`, and those of the marker's own generation if the store has given all of it."""
        stored, generation = self.stored, self.commit.generation
        if stored is None or stored.generation != generation or generation in self.shards:
            return self.shards
        return {**self.shards, generation: _layout(self.claim, self.notes)}

    @property
    def own_shards(self) -> list[TableShard]:
        """What the ranks of the marker held, as its generation's part of :attr:`shards` or else the store says."""
        of_ranks = self.shards.get(self.commit.generation) or [each.shards for each in self.notes]
        return [shard for each in of_ranks for shard in each]

    def stay(self) -> Route:
        """The route of a reader that has the marker."""
        return Route(self.lineage, self.commit, since=self.marker)


def check_there(log: LogReader, lineage: Lineage, marker: MarkerId, needed: Sequence[Interval]) -> None:
    """See that the log has intervals that lead to a marker, as far as names, sizes and ends tell.

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
            hint="give that store: store=URL, on the command line --store URL; if it is the outer tier of this "
            "job, give both tiers, or that one alone",
            marker=marker,
            store=last.store,
        ) from None


def check_incarnation(log: LogReader, lineage: Lineage, marker: MarkerId, walked: Iterable[int]) -> None:
    """See that the log is the very one to which these generations wrote, which lead to a marker.

    Raises:
        OtherLogError: it was deleted and made again under its name.
    """
    now = log.incarnation()
    for generation in walked:
        if now is None or not now.holds_rows_of(lineage.claims[generation].incarnation):
            raise OtherLogError(
                "the log was deleted and made again since this generation wrote to it",
                hint="bring the old log back; its rows are not in this one",
                generation=generation,
                marker=marker,
            )


def source_of(marker: MarkerId, reach: MarkerId | None) -> str:
    """Where rows come from if a store serves up to ``reach``: ``log``, ``store`` or ``store+log``."""
    return "log" if reach is None else "store" if reach == marker else "store+log"


def _in_log(log: LogReader, claim: Claim, commit: Commit) -> Sequence[tuple[TableShard, ...]]:
    """Read which shards each rank held in a generation from the log."""
    if claim.layout is not None and len(claim.layout) == len(commit.ranks):
        return claim.layout
    return tuple(held_by(log, claim, commit, end) for end in commit.ranks)


def _layout(claim: Claim, notes: Sequence[Notes]) -> Sequence[tuple[TableShard, ...]]:
    """Return the shards that the ranks held by the store's word, if the CLAIM, or else the tables, agree."""
    held = tuple(each.shards for each in notes)
    if claim.layout is not None and claim.layout[:] == held:
        return claim.layout
    for rank, shards in enumerate(held):
        outside = next((shard for shard in shards if not claim.schema.holds(shard)), None)
        if claim.layout is not None or outside is not None:
            raise CorruptionError(
                f"the store says that a rank held {outside}, which is outside its table"
                if outside is not None
                else "the store says that the ranks held other shards than the CLAIM says",
                generation=claim.generation,
                rank=rank,
            )
    return held
