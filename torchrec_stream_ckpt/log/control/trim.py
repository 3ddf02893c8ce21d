"""Delete log up to a marker that a store holds: append a TRIM record to the control partition, then delete the data.

The TRIM record is first, so a reader that misses data in the log learns that it was deleted on purpose. The control
partition alone decides which data may be deleted and which must stay. The next trim completes one that was killed.
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
"""Limit of markers that one TRIM gives up. The next one gives up the rest."""


@dataclass(frozen=True, slots=True)
class Trimmed:
    """Result of a trim, or of its dry run."""

    trim: Trim
    """The TRIM record."""
    appended: bool
    """True if the record is new. False in a dry run, or if earlier TRIMs already contain everything."""
    freed: Freed

    def describe(self) -> str:
        """Return the result as one line of text."""
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
    """Delete the log data up to ``marker``, and that of dead generations. The caller has checked the store.

    Trainers may write, readers read, and other trims run meanwhile.

    Args:
        log: The job's log.
        control: Its control partition, with the commit key if the job has one.
        marker: A committed marker, which the store holds with every generation on its path.
        store_url: URL of the store. It is written into the log and printed, so it must contain no secrets.
        others: Markers of other branches that the store also holds, or that are given up. Their data is deleted, too.
        given_up: Markers that the store gave up and that no other marker needs. Their COMMITs need not be kept.
        dry_run: Report what would be freed, and change nothing.

    Raises:
        MarkerNotFoundError: a marker is not committed.
        CorruptionError: the second copy of the control records has newer ones: the log has lost its end.
        ConfigError: the job has a commit key, and ``control`` has none; or the store has no printable URL.
        LogUnavailableError: the log does not answer, or refuses the deletion. Run it again.
        CommitUnknownError: it is unknown whether the record was appended. Nothing was deleted. Run it again.
    """
    if not store_url or not store_url.isprintable() or len(store_url) > MAX_PLACE_CHARS:
        raise ConfigError(f"{store_url!r:.80} is not a store URL", hint="use file://DIR or s3://BUCKET/PREFIX")
    control.check_copy()  # a generation whose COMMITs are lost would look like a dead one
    lineage = control.refresh()
    trim = _giving_up(lineage, _trim_of(lineage, [marker, *others], store_url), given_up)
    why = "this job has a commit key: its trainer ignores an unsigned TRIM, and then misses the trimmed data"
    control.require_key(lineage.claims.values(), why)
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
        raise LogUnavailableError("the log does not exist", hint="restore it from a copy")
    return now


def _trim_of(lineage: Lineage, commits: Iterable[Commit], store_url: str) -> Trim:
    """Make the record for a store that holds all of ``commits``. The first one is the marker of the record."""
    first, *others = commits
    reach = _furthest(lineage.ways(commit.id for commit in (first, *others)))
    marker = reach[first.generation]
    markers = tuple(sorted(reach.values()))
    return Trim(first.job, marker.generation, marker.marker, markers, store_url, uuid.uuid4().hex, time.time())


def _giving_up(lineage: Lineage, trim: Trim, given_up: Iterable[MarkerId]) -> Trim:
    """Add to the record those markers that are older than its reach and not the parent of any generation."""
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
    """Return the newest marker of each generation."""
    return {marker.generation: marker for marker in sorted(chain(*markers))}


def _said(lineage: Lineage, trim: Trim) -> bool:
    """Return whether the control partition already covers everything in ``trim``."""
    if trim.given_up:  # they are still in the control partition
        return False
    for marker in trim.markers:
        known = lineage.trims.of(marker.generation)
        reach = known.reach(marker.generation) if known else None
        if known is None or reach is None or reach < marker or (reach == marker and known.store != trim.store):
            return False
    return True


def trim_range(lineage: Lineage, reach: Mapping[int, MarkerId], incarnation: Incarnation) -> TrimRange:
    """Return the data that is no longer needed once another place holds the streams up to ``reach``.

    Args:
        lineage: Lineage of the control partition.
        reach: For each generation whose data may be deleted, the marker up to which.
        incarnation: Current identity of the log. Generations that wrote to another log have no data in it. ``recover``
            restores their COMMITs, but frames of others are at their offsets.
    """
    here = {generation for generation, claim in lineage.claims.items() if incarnation.holds_rows_of(claim.incarnation)}
    newest = {commit.generation: commit for commit in lineage.commits.values() if commit.generation in here}
    ends = [lineage.commits[marker] for marker in reach.values() if marker.generation in here]
    gone = [span for commit in ends for span in lineage.spans(commit.generation, commit.ranks, {})]
    kept = [span for commit in newest.values() for span in lineage.spans(commit.generation, commit.ranks, reach)]
    needed = {span.generation for span in kept} | {lineage.newest_generation}
    return TrimRange(tuple(gone), tuple(kept), frozenset(here - needed))
