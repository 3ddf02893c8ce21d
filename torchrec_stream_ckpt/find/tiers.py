"""Combine the control partitions of both logs of a job with tiers, and find where a marker can be read from.

The outer log's order decides. It knows every generation, because a trainer claims there first. The newest generation
that is claimed there, G, fences all earlier ones. The inner log may hold markers that have not been copied yet:

- Markers of G continue from the outer log's newest marker, and are newer than all markers there.
- Markers of an older generation that the outer log does not have are on an abandoned line: its trainer was fenced
  before they were copied, or a restore went back to an older marker. They can be restored by name, but are never the
  newest.

A job with one log is read the same way: its log is the outer one, and the inner one is empty.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.find.best import Value
from torchrec_stream_ckpt.find.job import Job, Tier, Wanted, open_tier, resolve
from torchrec_stream_ckpt.format.aliases import aliases
from torchrec_stream_ckpt.format.commits import Commits
from torchrec_stream_ckpt.format.control import Claim, Commit, Trim
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.trims import Trims
from torchrec_stream_ckpt.log.api import Incarnation, LogReader
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense_objects import DenseStore
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd
from torchrec_stream_ckpt.util.uris import FileUri, parse_uri

MIXED = "inner and outer"
"""Incarnation of a lineage that is combined from both logs."""


JOINED = 1 << 32
"""Least partition of streams that go on from one log to the other; no log has as many."""


@dataclass(slots=True)
class Tiers:
    """Both logs of a job, each with its store. The inner one is near the trainer; the outer one decides."""

    inner: Tier
    outer: Tier
    every: int = 1
    """The outer log gets markers whose number is a multiple of this."""
    seen: int | None = None
    """Newest generation when a restore last found a marker, or the trainer's own generation after it was opened."""

    @property
    def near(self) -> Tier:
        """The log that the trainer writes to."""
        return self.inner

    @property
    def folder(self) -> Path:
        """Directory of the inner log."""
        return folder_of(self.inner)

    def close(self) -> None:
        self.inner.close()
        self.outer.close()


def folder_of(inner: Job) -> Path:
    """Return the directory of an inner log, which is always a file log."""
    parsed = parse_uri(inner.uri)
    assert isinstance(parsed, FileUri)
    return parsed.directory


def open_job(config: StreamConfig, *, signs: bool = True, copies: bool = True) -> Tier | Tiers:
    """Open a job's log, or both of its logs, with their stores; arguments as in :func:`open_tier`."""
    open_it = open_tiers if config.outer is not None else open_tier
    return open_it(config, signs=signs, copies=copies)


def open_tiers(config: StreamConfig, *, signs: bool = True, copies: bool = True) -> Tiers:
    """Open both tiers of a job, for processes other than its trainer; arguments as in :func:`open_tier`."""
    assert config.outer is not None
    inner = open_tier(config.inner, signs=signs, copies=copies)
    try:
        return Tiers(inner, open_tier(config.outer, signs=signs, copies=copies), config.outer_every)
    except BaseException:
        inner.close()
        raise


_ALL = MarkerId(1 << 63, 0)
"""Later than every marker."""


@dataclass(frozen=True, slots=True)
class Place:
    """Choice of the logs that a marker is read from. An immutable value that rank 0 sends to all ranks."""

    upto: MarkerId = _ALL
    """Markers up to this one are read from the outer log, later ones and dense state from the inner one.

    Everything is read from the outer log if this is later than every marker. That is the only place of a job with one
    log, and the last place to try for a job with two.
    """
    ends: tuple[tuple[RankEnd, RankEnd], ...] = ()
    """End of each rank's stream at ``upto``, in the outer log and in the inner one. Empty between two generations.

    The relay copies frames unchanged, so the streams of both logs are equal at this marker, but at other offsets. A
    joined stream has the offsets of the outer log, which continue in the inner log. Its partition is :data:`JOINED` and
    its rank.
    """

    def __str__(self) -> str:
        if self.outer_alone:
            return "outer"
        return "inner + outer" if self.is_mixed else "inner"

    @property
    def outer_alone(self) -> bool:
        """True if everything, including dense state, is read from the outer log."""
        return self.upto == _ALL

    def is_outer(self, generation: int) -> bool:
        """Return whether a generation is read from the outer log, at least its first part."""
        return MarkerId(generation, 0) < self.upto

    def joined(self, commit: Commit) -> Commit:
        """Return a COMMIT of the inner log, with the ends of the joined streams if its generation is in both logs."""
        if not (self.ends and commit.generation == self.upto.generation):
            return commit
        ends = (
            replace(
                end,
                partition=JOINED + end.rank,
                begin=theirs.begin,
                end=end.end + theirs.end - mine.end,
            )
            for end, (theirs, mine) in zip(commit.ranks, self.ends, strict=True)
        )
        return replace(commit, ranks=tuple(ends))

    # Sources of each rank.

    def log(self, job: Job | Tiers) -> LogReader:
        """Return the log of the frames."""
        nearest = self.nearest(job).log
        return MixedLog(nearest, job.outer.log, self) if self.is_mixed else nearest

    def objects(self, job: Job | Tiers) -> Objects:
        """Return the store that rows may come from."""
        return (job.outer if self.reads_outer_store else self.nearest(job)).objects

    def offered(self, catalog: Catalog | None) -> Catalog | None:
        """Return the catalog of :meth:`objects` with only the markers that are read from there."""
        return catalog.upto(self.upto) if catalog is not None and self.is_mixed else catalog

    @property
    def is_mixed(self) -> bool:
        """True if both logs are read."""
        return self.reads_outer_store and not self.outer_alone

    @property
    def reads_outer_store(self) -> bool:
        """True if :meth:`objects` is the store of the outer tier."""
        return self.is_outer(1)

    def dense(self, job: Job | Tiers) -> DenseStore:
        """Return the store of the dense state."""
        return self.nearest(job).dense

    def nearest(self, job: Job | Tiers) -> Job:
        """Return the job that has the newest frames and the dense state."""
        return job.outer if self.outer_alone else job.near


OUTER = Place()


@dataclass(frozen=True, slots=True)
class MixedLog:
    """Reader of both logs as one log. Each generation is in one of them, or joined."""

    inner: LogReader
    outer: LogReader
    cut: Place

    def incarnation(self) -> Incarnation | None:
        """Return the incarnation that :meth:`TierState.lineage` gives to generations that wrote to these logs."""
        return Incarnation(MIXED, 0)

    def read(self, span: LogSpan) -> Iterator[tuple[int, memoryview]]:
        for log, part, shift in self._parts(span):
            for offset, frame in log.read(part):
                yield offset + shift, frame

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        parts = [part for span in spans for part in self._parts(span)]
        for each in (self.inner, self.outer):
            if mine := [span for log, span, _ in parts if log is each]:
                each.check_there(mine)

    def place(self, span: LogSpan) -> tuple[str, int]:
        log, part, _ = self._parts(span)[0]
        return log.place(part)

    def _parts(self, span: LogSpan) -> list[tuple[LogReader, LogSpan, int]]:
        """Return the parts of a span: the log that has it, the span there, and the shift of its offsets."""
        if not self.cut.ends or span.partition < JOINED:
            return [(self.outer if self.cut.is_outer(span.generation) else self.inner, span, 0)]
        theirs, mine = self.cut.ends[span.partition - JOINED]
        shift, middle = theirs.end - mine.end, min(max(theirs.end, span.begin), span.end)
        outer = LogSpan(span.generation, theirs.partition, span.begin, middle)
        inner = LogSpan(span.generation, mine.partition, middle - shift, span.end - shift)
        parts = [(self.outer, outer, 0), (self.inner, inner, shift)]
        return [part for part in parts if part[1].begin < part[1].end]


@dataclass(frozen=True, slots=True)
class TierState:
    """Snapshot of both control partitions."""

    outer: Lineage
    outer_id: str = ""
    inner: Lineage = field(default_factory=Lineage)
    inner_id: str = ""
    """Incarnation of the inner log. Empty if the inner log does not exist."""

    @classmethod
    def read(cls, job: Job | Tiers) -> TierState:
        """Read both control partitions; the inner one first, so that the outer one has all generations found there.

        Raises:
            ConfigError: the logs belong to different jobs.
            CorruptionError: the outer log is empty, and the inner one is not.
        """
        inner = _read_inner(job.inner) if job.inner is not None else (Lineage(), "")
        state = cls(*_read(job.outer), *inner)
        if job.inner is not None:
            state.check({"inner": job.inner.uri, "outer": job.outer.uri})
        return state

    def check(self, where: Mapping[str, str]) -> None:
        """Check that the logs with these URIs belong to one job. Raises as :meth:`read`."""
        if self.inner.claims and not self.outer.claims:
            raise CorruptionError(
                f"the outer log is empty, but the inner one holds {len(self.inner.commits)} markers: the outer "
                "one was lost, or this job began without it",
                hint="put it back from a copy, or rebuild it from its store with stream-ckpt recover; to continue "
                "without it, name only the inner log; to start over, name another folder",
                **where,
            )
        if self.inner.claims and self.inner.job != self.outer.job:
            raise ConfigError(
                "the two logs belong to different jobs", hint="give each job a separate inner folder", **where
            )

    # Markers.

    @property
    def generation(self) -> int:
        """Newest generation that any trainer has claimed."""
        return self.outer.newest_generation

    def owns(self, generation: int) -> bool:
        """Return whether the trainer that owns this generation wrote to the inner log."""
        mine, theirs = self.inner.claims.get(generation), self.outer.claims.get(generation)
        return (
            mine is not None and theirs is not None and mine.nonce == theirs.nonce and mine.incarnation == self.inner_id
        )

    def commit(self, marker: MarkerId) -> Commit | None:
        """Return the COMMIT of a marker whose last frames are in the inner log, otherwise None."""
        return self.inner.commits.get(marker) if self.owns(marker.generation) else None

    @property
    def unrelayed(self) -> list[Commit]:
        """Valid markers of the inner log that are newer than all markers of the outer one, oldest first."""
        if not self.owns(self.generation):
            return []
        newest = self.outer.newest
        mine = (commit for commit in self.inner.commits.values() if commit.generation == self.generation)
        return [commit for commit in mine if newest is None or commit.id > newest.id]

    @property
    def abandoned(self) -> list[MarkerId]:
        """Markers of earlier generations that only the inner log has."""
        over = (marker for marker in self.inner.commits if marker.generation < self.generation)
        return [marker for marker in over if self.owns(marker.generation) and marker not in self.outer.commits]

    def newest_first(self) -> Iterator[Commit]:
        """Yield all markers that may be the newest intact one, newest first."""
        yield from reversed(self.unrelayed)
        yield from reversed(self.outer.commits.values())

    # Places of markers.

    def places(self, marker: MarkerId) -> Iterator[Place]:
        """Yield the places to search for a marker, the best first.

        The first place uses everything that the inner log has of it. The second uses the inner log only for its own
        generation, because both logs have the earlier ones, and the third only for what the outer log does not have of
        that generation. The last is the outer log.
        """
        if self.commit(marker) is not None:
            parent = self.inner.claims[marker.generation].parent
            most = parent.generation if parent is not None else 0
            for outer_upto in dict.fromkeys((self.outer_upto(marker), most)):
                if outer_upto is not None:
                    yield Place(MarkerId(outer_upto + 1, 0))
            if (joined := self.joined(marker)) is not None:
                yield joined
        if marker in self.outer.commits:
            yield OUTER

    def outer_upto(self, marker: MarkerId) -> int | None:
        """Return the newest generation on the path to ``marker`` that only the outer log can serve.

        Returns 0 if the inner log can serve the whole path, and None if the path is not known."""
        while True:
            if self.commit(marker) is None:
                known = self.outer.commits.get(marker)
                return marker.generation if known is not None else None
            parent = self.inner.claims[marker.generation].parent
            if parent is None:
                return 0
            marker = parent

    def joined(self, marker: MarkerId) -> Place | None:
        """Return the place that reads up to the newest older marker of its generation in both logs from the outer one.

        Returns None if there is no such marker, or the logs have different ones of its name.
        """
        theirs = next((each for each in reversed(self.outer.commits.values()) if each.id <= marker), None)
        if theirs is None or theirs.generation != marker.generation or theirs.id == marker:
            return None
        mine = self.commit(theirs.id)
        if mine is None or not theirs.is_same_marker(mine):
            return None
        return Place(theirs.id, tuple(zip(theirs.ranks, mine.ranks, strict=True)))

    def lineage(self, place: Place) -> Lineage:
        """Return the lineage that the logs of a place have together: of the outer one up to its marker, then the inner
        one."""
        if not place.is_mixed:
            return self.outer if place.outer_alone else self.inner
        claims: dict[int, Claim] = {}
        for number in sorted({*self.outer.claims, *self.inner.claims}):
            outer = place.is_outer(number)
            lineage, log_id = (self.outer, self.outer_id) if outer else (self.inner, self.inner_id)
            if (claim := lineage.claims.get(number)) is not None and number <= self.generation:
                here = Incarnation(log_id, 0).holds_rows_of(claim.incarnation)
                claims[number] = replace(claim, incarnation=MIXED) if here else claim
        commits = {marker: commit for marker, commit in self.outer.commits.items() if marker <= place.upto}
        for marker, commit in self.inner.commits.items():
            if marker > place.upto and marker.generation <= self.generation:
                commits[marker] = place.joined(commit)
        trims: list[Trim] = []
        for lineage in (self.outer, self.inner):
            for trim in lineage.trims:
                reach = tuple(each for each in trim.markers if (each <= place.upto) == (lineage is self.outer))
                if reach:
                    trims.append(replace(trim, markers=reach))
        return Lineage(claims, Commits(commits), Trims(trims))


def _read_inner(job: Job) -> tuple[Lineage, str]:
    try:
        return _read(job)
    except CorruptionError as error:
        raise CorruptionError(
            f"the inner log cannot be read: {error.message}",
            hint=f"move {folder_of(job)} away: the outer tier has all data that was copied to it",
            **error.where,
        ) from None


def _read(job: Job) -> tuple[Lineage, str]:
    """Read the control partition and the incarnation of one log; both are empty if there is no log."""
    now = job.log.incarnation()
    return (job.control.refresh(), now.id) if now is not None else (Lineage(), "")


def named(job: Job | Tiers, marker: Wanted) -> MarkerId | None:
    """Return the marker that a name means; None for the newest one. With two tiers, reads both logs.

    Raises:
        MarkerNotFoundError: no marker has this name, or there is no marker to choose the best from.
        ConfigError: no marker has the value that decides.
        StoreUnavailableError: the store does not answer; it holds the list of markers that were given up.
    """
    if marker is None or isinstance(marker, MarkerId):
        return marker
    state = TierState.read(job)
    return resolve(marker, aliases(state.outer.notes, state.inner.notes), lambda: _offered(job, state))


def _offered(job: Job | Tiers, state: TierState) -> dict[MarkerId, dict[str, Value]]:
    """Return the metadata of each marker that can be restored, oldest first; with two tiers, from both."""
    found = job.outer.offered()
    if job.inner is not None and state.inner.claims:
        for marker, said in job.inner.offered().items():
            if state.owns(marker.generation):
                found[marker] = {**found.get(marker, {}), **said}
    return {marker: found[marker] for marker in sorted(found)}
