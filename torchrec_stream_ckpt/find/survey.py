"""Find out from where a marker can be restored, judging by names and sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError, TrimmedError
from torchrec_stream_ckpt.find.holdings import Holding, Holdings
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.route import Route, lacking, lacks_trimmed, source_of
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.rank_ends import RankEnds
from torchrec_stream_ckpt.log.stream import read_stream
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd

_BEGIN = MarkerId(0, 0)
"""Id that sorts before all markers."""


@dataclass(frozen=True, slots=True)
class Availability:
    """Availability of a marker in the log and the store."""

    reason: str = ""
    """Reason why it cannot be restored; empty if it can."""
    trimmed: str = ""
    """Store that has the missing rows, if they were trimmed; otherwise empty."""
    source: str | None = None
    """Source of the rows in a restore: ``log``, ``store`` or ``store+log``; None if it cannot be restored."""
    in_log: bool = False
    """True if the log alone has all its rows."""
    dropped: str | None = None
    """Day on which it was given up; None if it was not."""
    holding: Holding | None = None
    """Contents of the store; None if the job has written nothing there."""


class Survey:
    """Availability of a job's markers, as of the first query.

    Args:
        job: The job, whose control partition must have been read.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._incarnation = job.log.incarnation()
        self._stands: dict[tuple[MarkerId, MarkerId | None], bool] = {}
        """For (marker, reach): whether the log has all rows of the marker after ``reach``."""
        self._has: dict[tuple[MarkerId, MarkerId | None], bool] = {}
        """For (marker, since): whether the log has the frames of the marker's own generation after ``since``."""
        self._has_since: dict[MarkerId, MarkerId] = {}
        """For each marker, one of its generation after which the log has everything that leads to the marker."""

    def holdings(self) -> Holdings | None:
        """List the contents of the store for the job, once. Returns None if the job has written nothing there.

        Raises:
            StoreUnavailableError: the store does not answer.
        """
        if isinstance(self._listed, StreamCkptError):
            raise self._listed
        return self._listed

    @cached_property
    def _listed(self) -> Holdings | StreamCkptError | None:
        """Result or error of :meth:`holdings`: an unreachable store is not asked again for each marker."""
        try:
            lineage = self._job.lineage
            objects = self._job.objects if lineage.commits else None
            return Holdings.load(objects, lineage) if objects is not None and check_store(objects) else None
        except StreamCkptError as error:
            return error

    def given_up(self, commit: Commit) -> str | None:
        """Return the day on which a marker was given up; None if it was not."""
        holdings = self.holdings()
        if holdings is None or commit.id not in holdings.catalog.dropped:
            return None
        try:
            return holdings.catalog.drop_of(commit.id).day
        except CorruptionError:
            return "an unknown day"

    def look(self, commit: Commit) -> Availability:
        """Check the availability of a marker: its dense files, its streams' ends, and the segments that lead to it."""
        try:
            holdings = self.holdings()
            if holdings is not None and commit.id in holdings.catalog.dropped:
                drop = holdings.catalog.drop_of(commit.id)
                reason, in_log = f"given up by {drop.reason} on {drop.day}", self._is_there(commit.id, None)
                return Availability(reason, in_log=in_log, dropped=drop.day)
            holding = holdings.look(commit.id) if holdings is not None else None
            reason = self._job.dense_of(commit).why_not(commit)
        except StreamCkptError as error:
            return Availability(error.headline)
        reach = holding.reach if holding is not None else None
        in_log = self._is_there(commit.id, None)
        is_there = in_log if reach is None else self._is_there(commit.id, reach)
        lacks, trimmed = ("", "") if is_there else self._lacks(commit, reach)
        if trimmed and not Route(self._job.lineage, commit).wrote_to(self._incarnation):
            reason = ""  # its dense state is in the same place as its rows
        if reason or lacks:
            return Availability(reason or lacks, "" if reason else trimmed, None, in_log, None, holding)
        return Availability("", "", source_of(commit.id, reach), in_log, None, holding)

    def _is_there(self, marker: MarkerId, reach: MarkerId | None) -> bool:
        """Return whether the log has all rows of a marker after ``reach``. The cost does not grow with its path.

        Generations that others are based on are checked once. In each generation the newest marker is checked first: if
        it is complete, so are all earlier ones.
        """
        lineage = self._job.lineage
        waiting: list[MarkerId] = []
        here: MarkerId | None = marker
        whole = True
        while here is not None:
            if (here, reach) in self._stands:
                whole = self._stands[here, reach]
                break
            if here not in lineage.commits or (waiting and here.generation >= waiting[-1].generation):
                whole = False  # no path leads there
                break
            waiting.append(here)
            served = reach is not None and here.generation <= reach.generation
            here = None if served else lineage.claims[here.generation].parent
        for each in reversed(waiting):
            whole = whole and self._has_own(each, reach)
            self._stands[each, reach] = whole
        return whole

    def _has_own(self, marker: MarkerId, reach: MarkerId | None) -> bool:
        """Return whether the log has the frames that a marker's own generation has sent for it after ``reach``."""
        since = reach if reach is not None and reach.generation == marker.generation else None
        for each in dict.fromkeys((self._job.lineage.newest_of(marker.generation), marker)):
            if each in self._has_since and self._has_since[each] <= (since or _BEGIN):
                return True  # everything after an older marker exists
            known = (each, since)
            if known not in self._has:
                self._has[known] = self._has_streams(each, reach)
            if self._has[known]:
                if since is not None or reach is None:
                    self._has_since[each] = since or _BEGIN
                return True
        return False

    def _has_streams(self, marker: MarkerId, reach: MarkerId | None) -> bool:
        """Check :meth:`_has_own` for one marker, judging by names, sizes and ends."""
        lineage, generation = self._job.lineage, marker.generation
        after: Sequence[RankEnd] = ()
        if reach is not None and generation <= reach.generation:
            if generation < reach.generation or marker == reach:
                return True
            after = lineage.find(reach).ranks
        if self._incarnation is None or self._incarnation.id != lineage.claims[generation].incarnation:
            return False
        spans = RankEnds.of(lineage.find(marker).ranks).spans(generation)
        if after:
            spans = [span._replace(begin=after[rank].end) for rank, span in enumerate(spans)]
        try:
            self._job.log.check_there(spans)
        except StreamCkptError:
            return False
        return True

    def _lacks(self, commit: Commit, reach: MarkerId | None) -> tuple[str, str]:
        """Return (error of the log after ``reach``, store that has the rows if they were trimmed); empty for none."""
        log = self._job.log
        try:
            route = Route(self._job.lineage, commit, since=reach)
            route.check(log)
            for each in route.intervals:
                next(read_stream(log, each.commit, each.end, each.after))
        except TrimmedError as error:
            if lacks_trimmed(error, self._job.objects):
                return lacking(error, self._job.objects).headline, ""
            store = str(error.where["store"])
            return f"trimmed, in the store {store}", store
        except StreamCkptError as error:
            return error.headline, ""
        return "", ""
