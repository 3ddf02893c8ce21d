"""From where a marker can be restored, as far as names and sizes tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import StreamCkptError, TrimmedError
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.rank_ends import RankEnds
from torchrec_stream_ckpt.log.stream import read_stream
from torchrec_stream_ckpt.route.job import Job
from torchrec_stream_ckpt.route.route import Route, source_of
from torchrec_stream_ckpt.store.holdings import Holding, Holdings
from torchrec_stream_ckpt.types import MarkerId, RankEnd


@dataclass(frozen=True, slots=True)
class Standing:
    """What is there of a marker."""

    reason: str = ""
    """Why it cannot be restored; empty when it can."""
    trimmed: str = ""
    """The store that has what it lacks, when it lacks what was trimmed on purpose."""
    source: str | None = None
    """Where a restore takes the rows from: ``log``, ``store`` or ``store+log``; None when it cannot."""
    in_log: bool = False
    """Whether the log alone has all its rows."""
    dropped: str | None = None
    """When it was given up."""
    holding: Holding | None = None
    """What the store has; None when nobody has written there."""


def look(job: Job, commit: Commit) -> Standing:
    """Look at what is there of a marker: its dense files, its streams' ends, the segments that lead to it."""
    try:
        holdings = job.holdings()
        if holdings is not None and commit.id in holdings.catalog.dropped:
            return _dropped(job, commit, holdings)
        holding = holdings.look(commit.id) if holdings is not None else None
        reason = job.dense_of(commit).why_not(commit)
    except StreamCkptError as error:
        return Standing(error.headline)
    reach = holding.reach if holding is not None else None
    in_log = _stands(job, commit.id, None)
    stands = in_log if reach is None else _stands(job, commit.id, reach)
    lacks, trimmed = ("", "") if stands else _lacks(job, commit, reach)
    if reason or lacks:
        return Standing(reason or lacks, "" if reason else trimmed, None, in_log, None, holding)
    return Standing("", "", source_of(commit.id, reach), in_log, None, holding)


def _dropped(job: Job, commit: Commit, holdings: Holdings) -> Standing:
    drop = holdings.catalog.drop_of(commit.id)
    in_log = _stands(job, commit.id, None)
    return Standing(f"given up by {drop.reason} on {drop.day}", "", None, in_log, drop.day)


def _stands(job: Job, marker: MarkerId, reach: MarkerId | None) -> bool:
    """Whether the log has all of a marker behind ``reach``, at a cost that does not grow with the path to it.

    Generations that others stand on are looked at once, and of each generation the newest marker first: if all of that
    one is there, so is all of those before it.
    """
    waiting: list[MarkerId] = []
    here: MarkerId | None = marker
    whole = True
    while here is not None:
        if (here, reach) in job.stands:
            whole = job.stands[here, reach]
            break
        if here not in job.lineage.commits or (waiting and here.generation >= waiting[-1].generation):
            whole = False  # no path leads there
            break
        waiting.append(here)
        served = reach is not None and here.generation <= reach.generation
        here = None if served else job.lineage.claims[here.generation].parent
    for each in reversed(waiting):
        whole = whole and _has(job, each, reach)
        job.stands[each, reach] = whole
    return whole


def _has(job: Job, marker: MarkerId, reach: MarkerId | None) -> bool:
    """Whether the log has what a marker's own generation has sent for it behind ``reach``."""
    behind = reach if reach is not None and reach.generation == marker.generation else None
    for each in dict.fromkeys((job.lineage.newest_of(marker.generation), marker)):
        known = (each, behind)
        if known not in job.has:
            job.has[known] = _has_streams(job, each, reach)
        if job.has[known]:
            return True
    return False


def _has_streams(job: Job, marker: MarkerId, reach: MarkerId | None) -> bool:
    """The same of one marker, as far as names, sizes and ends tell."""
    generation = marker.generation
    after: Sequence[RankEnd] = ()
    if reach is not None and generation <= reach.generation:
        if generation < reach.generation or marker == reach:
            return True
        after = job.lineage.find(reach).ranks
    if job.incarnation is None or job.incarnation.id != job.lineage.claims[generation].incarnation:
        return False
    spans = RankEnds.of(job.lineage.find(marker).ranks).spans(generation)
    if after:
        spans = [replace(span, begin=after[rank].end) for rank, span in enumerate(spans)]
    try:
        job.log.check_there(spans)
    except StreamCkptError:
        return False
    return True


def _lacks(job: Job, commit: Commit, reach: MarkerId | None) -> tuple[str, str]:
    """(what the log lacks behind ``reach``, the store that has it if it was trimmed); empty for nothing."""
    try:
        route = Route(job.lineage, commit, since=reach)
        route.check(job.log)
        for each in route.intervals:
            next(read_stream(job.log, each.commit, each.end, each.after))
    except TrimmedError as error:
        store = str(error.where["store"])
        return f"trimmed, in the store {store}", store
    except StreamCkptError as error:
        return error.headline, ""
    return "", ""
