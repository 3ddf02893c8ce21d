"""Status of a job from its control partition and the contents of its store: a plain value, with alerts.

Also describes the proofs of a generation in its log, and the comparisons with them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from dataclasses import dataclass, field

from torchrec_stream_ckpt.extras.reporting.follower_status import FollowerStatus
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.end_note import Outcome
from torchrec_stream_ckpt.format.lineage import Lineage, previous_commit
from torchrec_stream_ckpt.format.proof import Proved
from torchrec_stream_ckpt.format.record import REFUSED
from torchrec_stream_ckpt.inner import Holdings, ProofStatus
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import duration


def compared_in_words(standing: ProofStatus, now_s: float) -> str:
    """Describe how much was compared, and since when, or which blocks differ."""
    if standing.differing:
        at = ", ".join(str(marker) for marker in standing.differing_at[:3])
        return f"{standing.differing} {'block differs' if standing.differing == 1 else 'blocks differ'}, found at {at}"
    share = "all" if standing.share >= 1 else f"{100 * standing.share:.0f}%"
    return f"{share}, the oldest {duration(max(0.0, now_s - standing.oldest_s))} ago"


RECENT = 12
"""Number of markers that a status shows, and from which rates are computed."""
_LATE_INTERVALS = 3.0
_LATE_S = 10.0
_FIRST_S = 600.0
_LAG_INTERVALS = 5.0
_LAG_S = 60.0


@dataclass(frozen=True, slots=True)
class MarkerRow:
    """One committed marker, and the rows and bytes sent for it alone."""

    marker: MarkerId
    step: int
    time_s: float
    rows: int
    num_bytes: int
    dense_bytes: int
    steps: int
    """Steps since the marker before it in its generation, or since the parent."""
    took_s: float | None
    """Seconds since that marker. None for the first one of a generation."""
    meta: dict[str, str | int | float] = field(default_factory=dict)
    """Values noted for the marker."""


@dataclass(frozen=True, slots=True)
class RankRow:
    """One rank at the newest marker."""

    rank: int
    partition: int
    end: int
    frames: int
    rows: int
    """Rows that it sent for this marker alone."""
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Backlog:
    """Markers that a materializer has not put into the store."""

    markers: int
    num_bytes: int
    age_s: float
    """Age of the oldest of them, in seconds."""


@dataclass(frozen=True, slots=True)
class Restore:
    """Estimated cost of restoring the newest marker, without dense state."""

    source: str
    """``log``, ``store`` or ``store + log``."""
    num_bytes: int
    seconds: float
    """Seconds if all of the marker's ranks read at once, each at the assumed rate."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Last report of a job's trainer."""

    outcome: str
    """``finished``, ``preempted`` or ``failed``."""
    reason: str
    """Reason for people: the class of the exception, or the cause of the preemption. May be empty."""
    step: int
    time_s: float

    def said(self, now_s: float) -> str:
        """Format as a line: ``failed at step 120 (ValueError), 3.0 min ago``."""
        why = f" ({self.reason})" if self.reason else ""
        return f"{self.outcome} at step {self.step:,}{why}, {duration(max(0.0, now_s - self.time_s))} ago"


@dataclass(frozen=True, slots=True)
class Alert:
    kind: str
    """``lost``, ``late``, ``first``, ``failed``, ``preempted``, ``fenced``, ``gap``, ``refused``, ``lag``,
    ``unproved``, ``strays``, ``unsigned`` or ``unavailable``: stable, for programs."""
    text: str


@dataclass(frozen=True, slots=True)
class Look:
    """Status of a job at ``time_s``."""

    time_s: float
    generation: int
    world: int
    """Number of ranks of that generation. 0 if it is a fence."""
    newest: MarkerRow | None
    recent: tuple[MarkerRow, ...]
    """The last markers, newest first."""
    markers: int
    ranks: tuple[RankRow, ...]
    steps_per_s: float | None
    """Steps per second over the recent markers of the newest marker's generation."""
    interval_s: float | None
    """Median seconds between the recent markers."""
    loss_s: float | None
    """Age of the newest marker in seconds: the time lost if the job died now. None if there is no marker."""
    restore: Restore | None
    proved: Proved | None
    """Proofs of the markers of the newest marker's generation. None if no marker has a proof, or if that is unknown."""
    backlog: Backlog | None
    """None if no store is known, or nothing was written there."""
    alerts: tuple[Alert, ...]
    ended: Ended | None = None
    """None while a trainer may be running, or if it has died without a last report."""
    compared: ProofStatus | None = None
    """Comparison with proofs by the materializer. None if it has compared nothing."""
    followers: tuple[FollowerStatus, ...] = ()
    """The followers that were named."""


def look(
    lineage: Lineage,
    holdings: Holdings | None,
    bytes_per_s: float,
    time_s: float,
    gap: str = "",
    window_width: int | None = None,
    lost: str = "",
    strays: Mapping[int, int] | None = None,
    compared: ProofStatus | None = None,
) -> Look:
    """Read the status of a job.

    Args:
        lineage: Its control partition.
        holdings: Contents of its store. None for no store.
        bytes_per_s: Bytes that one rank restores per second.
        time_s: Current wall-clock time, in seconds.
        gap: Missing part of the newest marker; empty for none.
        window_width: Window width of the proofs of the newest marker's generation, if known.
        lost: Lost part of the control partition, and how to recover it; empty for none.
        strays: :func:`strays_of` the newest marker, if the log is on Kafka.
        compared: Comparison with proofs that the store records.
    """
    commits = list(lineage.commits.values())
    recent = tuple(row(lineage, commit) for commit in commits[: -RECENT - 1 : -1])
    newest = lineage.newest
    same = [each for each in recent if each.marker.generation == recent[0].marker.generation]
    times = [each.took_s for each in same if each.took_s is not None]
    interval_s = statistics.median(times) if times else None
    generation = lineage.newest_generation
    backlog = backlog_of(lineage, holdings, time_s) if holdings is not None else None
    loss_s = max(0.0, time_s - newest.time_s) if newest is not None else None
    return Look(
        time_s=time_s,
        generation=generation,
        world=lineage.claims[generation].world if generation else 0,
        newest=recent[0] if recent else None,
        recent=recent,
        markers=len(commits),
        ranks=_ranks(lineage, newest) if newest is not None else (),
        steps_per_s=_rate(same),
        interval_s=interval_s,
        loss_s=loss_s,
        restore=restore_of(lineage, newest, holdings, bytes_per_s) if newest is not None else None,
        proved=Proved.by(window_width, _markers_of(lineage, newest)) if newest is not None and window_width else None,
        backlog=backlog,
        alerts=(
            *_alerts(lineage, loss_s, interval_s, backlog, time_s, gap, lost),
            *([Alert("unproved", _of_proofs(compared))] if compared is not None and compared.differing else ()),
            *([Alert("strays", f"records among the newest marker's frames, {in_words(strays)}")] if strays else ()),
        ),
        ended=ended_of(lineage),
        compared=compared,
    )


def ended_of(lineage: Lineage, generation: int | None = None) -> Ended | None:
    """Return how a generation has ended, as reported by its trainer. None if it has reported no end.

    Args:
        lineage: The control partition.
        generation: Number of the generation. None for the newest, whose end is that of the job.
    """
    end = lineage.ends.get(generation if generation is not None else lineage.newest_generation)
    return Ended(str(end.outcome), end.reason, end.step, end.time_s) if end is not None else None


def lost_in_words(seen: Look) -> str:
    """Say what is lost: if the trainer dies now, or by the way in which it has ended."""
    if seen.ended is None:
        return "lost, if the job dies now" if seen.loss_s is not None else "all of it is lost, if the job dies now"
    steps = steps_lost(seen.ended, seen.newest)
    return f"lost: {steps:,} steps after it" if steps else "nothing to lose"


def steps_lost(ended: Ended, newest: MarkerRow | None) -> int:
    """Return how many steps the trainer had made after the newest marker when it ended."""
    return max(0, ended.step - (newest.step if newest is not None else 0))


def refused_after(lineage: Lineage, newest: Commit) -> str:
    """Return why the trainer has refused the markers after the newest one. Empty if it refused none, or has ended."""
    why = dict(lineage.meta(newest.id)).get(REFUSED)
    if why is None or newest.generation != lineage.newest_generation or lineage.ended is not None:
        return ""
    return f"markers after {newest.id} were refused because ranks differ: {why}"


def strays_of(commit: Commit) -> dict[int, int]:
    """(Kafka) Return the number of stray records among the frames of a marker, by partition.

    Stray records were sent twice, or by another program. They can be counted because each record has an offset and the
    number of frames is known.
    """
    counts = {end.partition: end.end - end.begin - end.frames for end in commit.ranks}
    return {partition: count for partition, count in sorted(counts.items()) if count > 0}


def in_words(strays: Mapping[int, int]) -> str:
    """Describe the number of stray records by partition."""
    places = ", ".join(f"{count} in partition {partition}" for partition, count in strays.items())
    return f"sent twice or by another program: {places}"


def _of_proofs(compared: ProofStatus) -> str:
    """Describe the rows of the store that differ from those in the tables."""
    at = ", ".join(str(marker) for marker in compared.differing_at[:3])
    return (
        f"{compared.said()} in the tables, found at marker {at}; a trainer that "
        "runs sends them again, and they are compared again within a round"
    )


def _markers_of(lineage: Lineage, newest: Commit) -> int:
    """Count the committed markers of the newest marker's generation."""
    return sum(marker.generation == newest.generation for marker in lineage.commits)


def row(lineage: Lineage, commit: Commit) -> MarkerRow:
    """Create the row of one marker."""
    previous = previous_commit(lineage, commit.id)
    parent = lineage.claims[commit.generation].parent
    base = previous if previous is not None else lineage.commits.get(parent) if parent is not None else None
    return MarkerRow(
        marker=commit.id,
        step=commit.step,
        time_s=commit.time_s,
        rows=commit.rows - (previous.rows if previous else 0),
        num_bytes=commit.num_bytes - (previous.num_bytes if previous else 0),
        dense_bytes=commit.dense_bytes,
        steps=commit.step - (base.step if base is not None else 0),
        took_s=max(0.0, commit.time_s - previous.time_s) if previous is not None else None,
        meta=dict(lineage.meta(commit.id)),
    )


def path_bytes(lineage: Lineage, marker: MarkerId) -> int:
    """Return the bytes of all frames that make up a marker."""
    return sum(commit.num_bytes for commit in lineage.path(marker))


def restore_of(lineage: Lineage, commit: Commit, holdings: Holdings | None, bytes_per_s: float) -> Restore:
    """Estimate the bytes and time to restore ``commit``: from the store as far as it reaches, then from the log."""
    source, num_bytes = "log", path_bytes(lineage, commit.id)
    held = holdings.look(commit.id) if holdings is not None else None
    if held is not None and held.reach is not None:
        tail = num_bytes - path_bytes(lineage, held.reach)
        source = "store + log" if tail else "store"
        num_bytes = sum(piece.num_bytes for piece in held.pieces) + tail
    return Restore(source, num_bytes, num_bytes / (bytes_per_s * len(commit.ranks)))


def backlog_of(lineage: Lineage, holdings: Holdings, time_s: float) -> Backlog:
    known = holdings.catalog.markers | holdings.catalog.dropped
    newest: dict[int, Commit] = {}
    missing, num_bytes = [], 0
    for commit in lineage.commits.values():
        if commit.id not in known:
            missing.append(commit)
            num_bytes += commit.num_bytes
            num_bytes -= newest[commit.generation].num_bytes if commit.generation in newest else 0
        newest[commit.generation] = commit
    age_s = max(0.0, time_s - missing[0].time_s) if missing else 0.0
    return Backlog(len(missing), num_bytes, age_s)


def _ranks(lineage: Lineage, commit: Commit) -> tuple[RankRow, ...]:
    previous = previous_commit(lineage, commit.id)
    ends = {end.rank: end for end in previous.ranks} if previous is not None else {}
    return tuple(
        RankRow(
            end.rank,
            end.partition,
            end.end,
            end.frames,
            end.rows - (ends[end.rank].rows if end.rank in ends else 0),
            end.num_bytes - (ends[end.rank].num_bytes if end.rank in ends else 0),
        )
        for end in commit.ranks
    )


def _rate(rows: list[MarkerRow]) -> float | None:
    """Return steps per second over markers of one generation, newest first."""
    seconds = rows[0].time_s - rows[-1].time_s if rows else 0.0
    return (rows[0].step - rows[-1].step) / seconds if seconds > 0 else None


def _of_end(ended: Ended, time_s: float) -> list[Alert]:
    """Return the alerts about a trainer's last report: the job is not finished, and no trainer continues it."""
    if ended.outcome == Outcome.FAILED:
        return [Alert("failed", f"its trainer has {ended.said(time_s)}")]
    if ended.outcome == Outcome.PREEMPTED and time_s - ended.time_s > _FIRST_S:
        return [Alert("preempted", f"its trainer was {ended.said(time_s)}, and no other trainer has continued")]
    return []


def _alerts(
    lineage: Lineage,
    loss_s: float | None,
    interval_s: float | None,
    backlog: Backlog | None,
    time_s: float,
    gap: str,
    lost: str,
) -> list[Alert]:
    found = [Alert("lost", lost)] if lost else []
    found += [Alert("gap", f"the newest marker cannot be restored: {gap}")] if gap else []
    generation, newest = lineage.newest_generation, lineage.newest
    if generation and not lineage.claims[generation].world:
        found.append(Alert("fenced", f"generation {generation} is a fence: an operator has ended the trainer before"))
    elif (ended := ended_of(lineage)) is not None:
        found += _of_end(ended, time_s)
    elif generation and (newest is None or newest.generation != generation):
        since_s = time_s - lineage.claims[generation].time_s
        if since_s > _FIRST_S:
            found.append(
                Alert("first", f"generation {generation} began {duration(since_s)} ago and has committed no marker")
            )
    elif loss_s is not None and interval_s is not None and loss_s > max(_LATE_S, _LATE_INTERVALS * interval_s):
        found.append(Alert("late", f"no marker for {duration(loss_s)}, after one every {duration(interval_s)}"))
    if newest is not None and (refused := refused_after(lineage, newest)):
        found.append(Alert("refused", refused))
    if backlog is not None and backlog.age_s > max(_LAG_S, _LAG_INTERVALS * (interval_s or 0.0)):
        found.append(
            Alert("lag", f"the store lacks {backlog.markers} markers, the oldest for {duration(backlog.age_s)}")
        )
    if lineage.unsigned:
        found.append(Alert("unsigned", f"{lineage.unsigned} records are not signed with the commit key"))
    return found
