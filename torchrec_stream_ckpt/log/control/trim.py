"""Delete log up to a marker that a store holds: a TRIM record in the control partition first, then the data.

The TRIM record comes first, so a reader that misses data in the log finds there that it was deleted on purpose. The
control partition alone decides what may go and what must stay: the next trim finishes one that was killed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from torchrec_stream_ckpt.errors import ConfigError, LogUnavailableError
from torchrec_stream_ckpt.format.control import MAX_PLACE_CHARS, Commit, Trim
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.api import Freed, Incarnation, Log, TrimRange
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import size

MAX_GIVEN_UP = 30_000
"""Markers that one TRIM gives up; more go with the next one."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Result of a trim, or of its dry run."""

    trim: Trim
    """The TRIM record."""
    appended: bool
    """True if the record is new: False if an earlier trim had said all of it, and in a dry run."""
    freed: Freed

    def describe(self) -> str:
        """The result as one line of text."""
        bytes_ = "" if self.freed.num_bytes is None else f", {size(self.freed.num_bytes)}"
        markers = ", ".join(map(str, self.trim.markers))
        return f"{self.freed.count} {self.freed.what}{bytes_} of the log up to {markers}, which {self.trim.store} holds"


def trim_log(
    log: Log,
    control: Control,
    marker: Commit,
    store_url: str,
    *,
    others: Iterable[Commit] = (),
    given_up: Iterable[MarkerId] = (),
    dry_run: bool = False,
) -> Trimmed:
    """Delete the log data up to ``marker``, and that of dead generations. The caller has looked into the store.

    Trainers may write, readers read, and other trims run meanwhile.

    Args:
        log: The job's log.
        control: Its control partition; with the commit key if the job has one.
        marker: A committed marker, which the store holds with every generation on its path.
        store_url: Where. It is written into the log, and printed: without secrets.
        others: Markers of other branches that the store holds as well, or that are given up: their data goes, too.
        given_up: Markers that the store gave up and needs for no other one: their COMMITs need not be kept, either.
        dry_run: Say what would be freed, and change nothing.

    Raises:
        MarkerNotFoundError: a marker is not committed.
        CorruptionError: the second copy of the control records has newer ones: the log has lost its end.
        ConfigError: the job has a commit key, and ``control`` has none; or the store has no printable URL.
        LogUnavailableError: the log does not answer, or does not let us delete. Run it again.
        CommitUnknownError: whether the record is there is unknown. Nothing was deleted. Run it again.
    """
    if not store_url or not store_url.isprintable() or len(store_url) > MAX_PLACE_CHARS:
        raise ConfigError(f"{store_url!r:.80} is not the URL of a store", hint="use file://DIR or s3://BUCKET/PREFIX")
    control.check_copy()  # a generation whose COMMITs are lost would look like a dead one
    lineage = control.refresh()
    trim = _giving_up(lineage, _trim_of(lineage, [marker, *others], store_url), given_up)
    if any(claim.mac for claim in lineage.claims.values()) and not control.signs:
        raise ConfigError(
            "this job has a commit key: its trainer ignores a TRIM that is not signed with it, and misses the data",
            hint="give it with --commit-key-file",
        )
    incarnation = _incarnation(log)
    plan = log.trim(
        trim_range(lineage, _furthest(lineage.trims.reach.values(), trim.markers), incarnation), dry_run=True
    )
    if dry_run:
        return Trimmed(trim, False, plan)
    new = not _said(lineage, trim)
    if new:
        control.trim(trim)
    failpoint("trim.recorded")
    lineage = control.refresh()
    return Trimmed(trim, new, log.trim(trim_range(lineage, lineage.trims.reach, incarnation)))


def _incarnation(log: Log) -> Incarnation:
    now = log.incarnation()
    if now is None:
        raise LogUnavailableError("the log is gone", hint="bring it back")
    return now


def _trim_of(lineage: Lineage, commits: Iterable[Commit], store_url: str) -> Trim:
    """The record for a store that holds all of ``commits``, the first of them above all."""
    first, *others = commits
    reach = _furthest(step.id for commit in (first, *others) for step in lineage.path(commit.id))
    marker = reach[first.generation]
    markers = tuple(sorted(reach.values()))
    return Trim(first.job, marker.generation, marker.marker, markers, store_url, uuid.uuid4().hex, time.time())


def _giving_up(lineage: Lineage, trim: Trim, given_up: Iterable[MarkerId]) -> Trim:
    """The record, with those of these markers older than what may be gone, on which no generation stands."""
    parents = {claim.parent for claim in lineage.claims.values()}
    gone = [
        marker
        for marker in sorted(set(given_up))
        if marker in lineage.commits
        and marker not in parents
        and (reach := trim.reach(marker.generation)) is not None
        and marker < reach
    ]
    return replace(trim, given_up=tuple(gone[:MAX_GIVEN_UP]) or None)


def _furthest(*markers: Iterable[MarkerId]) -> dict[int, MarkerId]:
    """The newest marker of each generation."""
    return {marker.generation: marker for marker in sorted(chain(*markers))}


def _said(lineage: Lineage, trim: Trim) -> bool:
    """Return whether the control partition says all of that already, or more."""
    if trim.given_up:  # they are there
        return False
    for marker in trim.markers:
        known = lineage.trims.of(marker.generation)
        reach = known.reach(marker.generation) if known else None
        if known is None or reach is None or reach < marker or (reach == marker and known.store != trim.store):
            return False
    return True


def trim_range(lineage: Lineage, reach: Mapping[int, MarkerId], incarnation: Incarnation) -> TrimRange:
    """Return what is no longer needed once the streams up to ``reach`` are elsewhere.

    Args:
        lineage: The control partition.
        reach: For each generation of which data may go, the marker up to which.
        incarnation: The log as it is now. Generations that wrote to another one have no data in it: at their offsets,
            which ``recover`` brings back with their COMMITs, lie frames of others.
    """
    here = {generation for generation, claim in lineage.claims.items() if incarnation.holds_rows_of(claim.incarnation)}
    newest = {commit.generation: commit for commit in lineage.commits.values() if commit.generation in here}
    ends = [lineage.commits[marker] for marker in reach.values() if marker.generation in here]
    gone = [span for commit in ends for span in lineage.spans(commit.generation, commit.ranks, {})]
    kept = [span for commit in newest.values() for span in lineage.spans(commit.generation, commit.ranks, reach)]
    needed = {span.generation for span in kept} | {lineage.newest_generation}
    return TrimRange(tuple(gone), tuple(kept), frozenset(here - needed))
