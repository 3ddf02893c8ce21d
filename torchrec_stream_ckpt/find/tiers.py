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
from torchrec_stream_ckpt.store.dense import DenseStore
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd
from torchrec_stream_ckpt.util.uris import FileUri, parse_uri

MIXED = "inner and outer"
"""Incarnation of a lineage that is combined from both logs."""


JOINED = 1 << 32
"""Least partition of streams that go on from one log to the other; no log has as many."""


@dataclass(frozen=True, slots=True)
class Tiers:
    """Both logs of a job, each with its store. The inner one is near the trainer; the outer one decides."""

    inner: Tier
    outer: Tier
    every: int = 1
    """The outer log gets markers whose number is a multiple of this."""

    @property
    def folder(self) -> Path:
        """Directory of the inner log."""
        return folder_of(self.inner)

    def close(self) -> None:
        self.inner.close()
        self.outer.close()


@dataclass(slots=True)
class TieredJob:
    """Job with two tiers."""

    logs: Tiers
    """Both logs, open."""
    seen: int | None = None
    """Newest generation when a marker was last found, or the job's own generation after it was opened."""


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


@dataclass(frozen=True, slots=True)
class Joint:
    """Marker that both logs have: its generation is read from the outer log up to it, then from the inner one.

    The relay copies frames unchanged, so the streams of both logs are equal at this marker, but at other offsets. A
    joined stream has the offsets of the outer log, which continue in the inner log. Its partition is :data:`JOINED` and
    its rank.
    """

    marker: MarkerId
    ends: tuple[tuple[RankEnd, RankEnd], ...]
    """End of each rank's stream at the marker: in the outer log, and in the inner one."""

    @classmethod
    def at(cls, outer: Commit, inner: Commit) -> Joint | None:
        """Return the joint at a marker. Returns None if the logs have different markers of this name."""
        if not outer.is_same_marker(inner):
            return None
        return cls(outer.id, tuple(zip(outer.ranks, inner.ranks, strict=True)))

    def after(self, commit: Commit) -> Commit:
        """Return a later COMMIT of the inner log with the ends of the joined streams."""
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

    def parts(self, span: LogSpan) -> tuple[LogSpan | None, LogSpan | None, int]:
        """Return the parts of a joined stream in the outer and in the inner log, and the latter's shift of offsets."""
        theirs, mine = self.ends[span.partition - JOINED]
        shift, middle = theirs.end - mine.end, min(max(theirs.end, span.begin), span.end)
        outer = LogSpan(span.generation, theirs.partition, span.begin, middle)
        inner = LogSpan(span.generation, mine.partition, middle - shift, span.end - shift)
        return outer if span.begin < middle else None, inner if middle < span.end else None, shift


@dataclass(frozen=True, slots=True)
class Place:
    """Choice of the logs that a marker is read from. An immutable value that rank 0 sends to all ranks."""

    outer_upto: int = 0
    """Generations up to this one are read from the outer log, the others from the inner one."""
    joint: Joint | None = None
    """The marker up to which its generation, a later one, is read from the outer log as well."""
    outer_alone: bool = False
    """True if everything, including dense state, is read from the outer log.

    This is the only place of a job with one log, and the last place to try for a job with two.
    """

    def __str__(self) -> str:
        if self.outer_alone:
            return "outer"
        return "inner + outer" if self.outer_last is not None else "inner"

    @property
    def outer_last(self) -> MarkerId | None:
        """Marker after which nothing comes from the outer tier; None if nothing does, or everything."""
        if self.joint is not None:
            return self.joint.marker
        return MarkerId(self.outer_upto + 1, 0) if self.outer_upto else None

    # Sources of each rank.

    def log(self, job: Job | Tiers) -> LogReader:
        """Return the log of the frames."""
        nearest = self.nearest(job).log
        if self.outer_last is None:
            return nearest
        return MixedLog(nearest, job.outer.log, self.outer_upto, self.joint)

    def objects(self, job: Job | Tiers) -> Objects:
        """Return the store that rows may come from."""
        return (job.outer if self.reads_outer_store else self.nearest(job)).objects

    def offered(self, catalog: Catalog | None) -> Catalog | None:
        """Return the catalog of :meth:`objects` with only the markers that are read from there."""
        return catalog.upto(self.outer_last) if catalog is not None and self.outer_last is not None else catalog

    @property
    def reads_outer_store(self) -> bool:
        """True if :meth:`objects` is the store of the outer tier."""
        return self.outer_alone or self.outer_last is not None

    def dense(self, job: Job | Tiers) -> DenseStore:
        """Return the store of the dense state."""
        return self.nearest(job).dense

    def nearest(self, job: Job | Tiers) -> Job:
        """Return the job that has the newest frames and the dense state."""
        return job.outer if self.outer_alone or job.inner is None else job.inner


OUTER = Place(outer_alone=True)


@dataclass(frozen=True, slots=True)
class MixedLog:
    """Reader of both logs as one log. Each generation is in one of them, except that of the joint."""

    inner: LogReader
    outer: LogReader
    outer_upto: int
    joint: Joint | None = None

    def incarnation(self) -> Incarnation | None:
        """Return the incarnation that :meth:`TierState.mixed` gives to generations that wrote to these logs."""
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
        if self.joint is not None and span.partition >= JOINED:
            outer, inner, shift = self.joint.parts(span)
            parts = [(self.outer, outer, 0), (self.inner, inner, shift)]
            return [(log, part, moved) for log, part, moved in parts if part is not None]
        joined = self.joint is not None and span.generation == self.joint.marker.generation
        return [(self.outer if joined or span.generation <= self.outer_upto else self.inner, span, 0)]


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
                    yield Place(outer_upto)
            if (joint := self.joint(marker)) is not None:
                yield Place(most, joint)
        if marker in self.outer.commits:
            yield OUTER

    def lineage(self, place: Place) -> Lineage:
        """Return the lineage that the logs of a place have together."""
        if place.outer_alone:
            return self.outer
        return self.mixed(place.outer_upto, place.joint) if place.outer_last is not None else self.inner

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

    def joint(self, marker: MarkerId) -> Joint | None:
        """Return the newest marker before ``marker`` in its generation that both logs have, with equal streams."""
        for commit in reversed(self.outer.commits.values()):
            if commit.id < marker:
                mine = self.commit(commit.id) if commit.generation == marker.generation else None
                return Joint.at(commit, mine) if mine is not None else None
            if commit.id == marker:
                return None
        return None

    def mixed(self, outer_upto: int, joint: Joint | None = None) -> Lineage:
        """Return one lineage with the outer log's generations up to ``outer_upto`` and the inner one's after it.

        With a joint, the markers of its generation are those of the outer log up to it, and those of the inner one
        after it.
        """
        joined = joint.marker.generation if joint is not None else 0

        def is_outer(marker: MarkerId) -> bool:
            if joint is not None and marker.generation == joined:
                return marker <= joint.marker
            return marker.generation <= outer_upto

        claims: dict[int, Claim] = {}
        for number in sorted({*self.outer.claims, *self.inner.claims}):
            outer = number <= outer_upto or number == joined
            lineage, log_id = (self.outer, self.outer_id) if outer else (self.inner, self.inner_id)
            if (claim := lineage.claims.get(number)) is not None and number <= self.generation:
                here = Incarnation(log_id, 0).holds_rows_of(claim.incarnation)
                claims[number] = replace(claim, incarnation=MIXED) if here else claim
        commits = {marker: commit for marker, commit in self.outer.commits.items() if is_outer(marker)}
        for marker, commit in self.inner.commits.items():
            if not is_outer(marker) and marker.generation <= self.generation:
                commits[marker] = joint.after(commit) if joint is not None and joined == marker.generation else commit
        trims: list[Trim] = []
        for lineage in (self.outer, self.inner):
            for trim in lineage.trims:
                reach = tuple(marker for marker in trim.markers if is_outer(marker) == (lineage is self.outer))
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
