"""From where a marker can be restored, as far as names and sizes tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError, TrimmedError
from torchrec_stream_ckpt.find.holdings import Holding, Holdings
from torchrec_stream_ckpt.find.job import Job
from torchrec_stream_ckpt.find.route import Route, source_of
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.rank_ends import RankEnds
from torchrec_stream_ckpt.log.stream import read_stream
from torchrec_stream_ckpt.store.identity import check_store
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd

_BEGIN = MarkerId(0, 0)
"""Before all markers."""


@dataclass(frozen=True, slots=True)
class Availability:
    """What is there of a marker."""

    reason: str = ""
    """Why it cannot be restored; empty when it can."""
    trimmed: str = ""
    """The store that has what it lacks, when it lacks what was trimmed on purpose."""
    source: str | None = None
    """Where a restore takes the rows from: ``log``, ``store`` or ``store+log``; None when it cannot."""
    in_log: bool = False
    """True if the log alone has all its rows."""
    dropped: str | None = None
    """When it was given up."""
    holding: Holding | None = None
    """What the store has; None if the job has written nothing there."""


class Survey:
    """What is there of a job's markers, as of when it is first asked.

    Args:
        job: Whose control partition has been read.
    """

    def __init__(self, job: Job) -> None:
        self._job = job
        self._incarnation = job.log.incarnation()
        self._holdings: list[Holdings | StreamCkptError | None] = []
        self._stands: dict[tuple[MarkerId, MarkerId | None], bool] = {}
        """Of markers, each beyond another one or None: whether the log has all of it."""
        self._has: dict[tuple[MarkerId, MarkerId | None], bool] = {}
        self._has_since: dict[MarkerId, MarkerId] = {}
        """By marker, one of its generation beyond which the log has all that leads to it."""
        """The same of what their own generation has sent."""

    def holdings(self) -> Holdings | None:
        """List what the store has of the job, once; None if the job has written nothing there.

        Raises:
            StoreUnavailableError: it does not answer.
        """
        if not self._holdings:
            try:
                self._holdings.append(self._hold())
            except StreamCkptError as error:  # a store that does not answer is not asked again for each marker
                self._holdings.append(error)
        (found,) = self._holdings
        if isinstance(found, StreamCkptError):
            raise found
        return found

    def _hold(self) -> Holdings | None:
        lineage = self._job.lineage
        objects = self._job.objects if lineage.commits else None
        return Holdings.load(objects, lineage) if objects is not None and check_store(objects) else None

    def given_up(self, commit: Commit) -> str | None:
        """When a marker was given up; None when it was not."""
        holdings = self.holdings()
        if holdings is None or commit.id not in holdings.catalog.dropped:
            return None
        try:
            return holdings.catalog.drop_of(commit.id).day
        except CorruptionError:
            return "a day that its record does not say any more"

    def look(self, commit: Commit) -> Availability:
        """Search at what is there of a marker: its dense files, its streams' ends, the segments that lead to it."""
        try:
            holdings = self.holdings()
            if holdings is not None and commit.id in holdings.catalog.dropped:
                return self._dropped(commit, holdings)
            holding = holdings.look(commit.id) if holdings is not None else None
            reason = self._job.dense_of(commit).why_not(commit)
        except StreamCkptError as error:
            return Availability(error.headline)
        reach = holding.reach if holding is not None else None
        in_log = self._is_there(commit.id, None)
        is_there = in_log if reach is None else self._is_there(commit.id, reach)
        lacks, trimmed = ("", "") if is_there else self._lacks(commit, reach)
        if trimmed and not Route(self._job.lineage, commit).wrote_to(self._incarnation):
            reason = ""  # its dense state is where its rows are
        if reason or lacks:
            return Availability(reason or lacks, "" if reason else trimmed, None, in_log, None, holding)
        return Availability("", "", source_of(commit.id, reach), in_log, None, holding)

    def _dropped(self, commit: Commit, holdings: Holdings) -> Availability:
        drop = holdings.catalog.drop_of(commit.id)
        in_log = self._is_there(commit.id, None)
        return Availability(f"given up by {drop.reason} on {drop.day}", "", None, in_log, drop.day)

    def _is_there(self, marker: MarkerId, reach: MarkerId | None) -> bool:
        """Return whether the log has all of a marker beyond ``reach``. The cost does not grow with its path.

        Generations that others stand on are looked at once, and of each generation the newest marker first: if all of
        that one is there, so is all of those before it.
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
        """Return whether the log has what a marker's own generation has sent for it beyond ``reach``."""
        since = reach if reach is not None and reach.generation == marker.generation else None
        for each in dict.fromkeys((self._job.lineage.newest_of(marker.generation), marker)):
            if each in self._has_since and self._has_since[each] <= (since or _BEGIN):
                return True  # all beyond an older marker is there
            known = (each, since)
            if known not in self._has:
                self._has[known] = self._has_streams(each, reach)
            if self._has[known]:
                if since is not None or reach is None:
                    self._has_since[each] = since or _BEGIN
                return True
        return False

    def _has_streams(self, marker: MarkerId, reach: MarkerId | None) -> bool:
        """The same of one marker, as far as names, sizes and ends tell."""
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
        """(what the log lacks beyond ``reach``, the store that has it if it was trimmed); empty for nothing."""
        log = self._job.log
        try:
            route = Route(self._job.lineage, commit, since=reach)
            route.check(log)
            for each in route.intervals:
                next(read_stream(log, each.commit, each.end, each.after))
        except TrimmedError as error:
            store = str(error.where["store"])
            return f"trimmed, in the store {store}", store
        except StreamCkptError as error:
            return error.headline, ""
        return "", ""
