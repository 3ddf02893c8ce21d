"""Hot standby: spare ranks that keep the newest marker in their live tables, and take the job over if its trainer dies.

All ranks of the spare run :meth:`Standby.wait` in step: rank 0 reads the log and decides, and all ranks act.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

from torchrec_stream_ckpt.errors import (
    ColumnResplitError,
    CommitUnknownError,
    CorruptionError,
    JobFinishedError,
    LogUnavailableError,
    StoreUnavailableError,
    TrimmedError,
)
from torchrec_stream_ckpt.find.job import Tier
from torchrec_stream_ckpt.find.route import Route, Shards, locate
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.end_note import Outcome
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.restore.model_change import refuse_changed
from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.restore.session import Attempt, Session
from torchrec_stream_ckpt.save.claims import Claims
from torchrec_stream_ckpt.save.generation import check_newest, fence_of
from torchrec_stream_ckpt.util.config import Takeover
from torchrec_stream_ckpt.util.types import MarkerId

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class _Pulse:
    """(rank 0) Signs of life of the trainer."""

    after_s: float | None
    seen: object = None
    beat_s: float = field(default_factory=time.monotonic)

    def beat(self) -> None:
        self.beat_s = time.monotonic()

    def is_gone(self, now: object) -> bool:
        """Return whether nothing has changed for ``after_s`` seconds."""
        if now != self.seen:
            self.seen = now
            self.beat()
        return self.after_s is not None and time.monotonic() - self.beat_s > self.after_s


@dataclass(frozen=True, slots=True)
class _Order:
    """Decision of rank 0, sent to all ranks."""

    take_over: str = ""
    """Reason to take over now; empty to wait."""
    newest: MarkerId | None = None


class Standby:
    """Lets a spare follow the job until it takes over.

    Args:
        team: All ranks of the spare.
        tier: The job's log; its control partition is used on rank 0 only.
        session: Writes rows into the live tables: all of the newest marker, or those committed after the marker that
            they hold.
        takeover: Settings for when to take over.
        claims: Claims the generation of the takeover; used on rank 0 only.
    """

    def __init__(
        self,
        team: Team,
        tier: Tier,
        session: Session,
        takeover: Takeover,
        claims: Claims,
    ) -> None:
        self._team = team
        self._tier = tier
        self._session = session
        self._takeover = takeover
        self._claims = claims
        self.pulse = _Pulse(takeover.after_s)
        self._known: Shards = {}
        self._at: MarkerId | None = None
        self._towards: MarkerId | None = None
        """Target of an unfinished advance, which may have written some rows. None if no advance is unfinished."""
        self._claim: Claim | None = None
        """(rank 0) CLAIM that fences the trainer."""
        self.touched = False
        """True if rows of the live tables have been written."""
        self.rows = 0
        self.held: Attempt | None = None
        """Attempt that loaded the rows in the live tables."""

    def wait(self) -> MarkerId | None:
        """(all ranks) Keep the tables at the newest marker until it is time to take over.

        Returns:
            The marker that the tables hold, after which the previous trainer cannot commit any more. None if no marker
            was ever committed.

        Raises:
            JobFinishedError: the trainer has recorded that the job is finished.
            FencedError: another trainer, or spare, was first.
            ColumnResplitError: this plan splits columns differently, so that row-wise state would have to be merged.
            SchemaMismatchError: as in a restore; or the trainer was restored into a changed model in the meantime.
            CorruptionError, TrimmedError: as in a restore.
        """
        why, ready = "", False
        while not (why and ready):
            order = self._team.on_rank0(self._look)
            why = order.take_over
            asks = order.newest != self._at or bool(why and self._at is None)
            # A spare that could not load the marker must not fence any trainer: it may have another model.
            ready = not asks or self._outlasting(self.follow) or self._at is not None
            if not (why and ready):
                time.sleep(self._takeover.poll_s)
        begin = time.monotonic()
        self.outlast(lambda: self._team.on_rank0(self._fence))
        self.outlast(self.follow)  # rows that were committed just before the fence
        if self._team.rank == 0:
            log.warning("taking over from marker %s: %s (ready in %.2f s)", self._at, why, time.monotonic() - begin)
        return self._at

    def _look(self) -> _Order:
        """(rank 0) Read the log, and decide whether to take over."""
        takeover = self._takeover
        if takeover.trigger is not None and Path(takeover.trigger).exists():
            return _Order("the trigger file exists", self._at)
        try:
            lineage = self._refresh()
            self._check_model(lineage)
            sign = self._signs(lineage)
        except LogUnavailableError as error:  # a spare that cannot reach the log can neither judge nor take over
            log.info("the log does not answer: %s", error.headline)
            self.pulse.beat()
            return _Order(newest=self._at)
        silent = self.pulse.is_gone(sign) and bool(lineage.claims)
        newest = lineage.newest.id if lineage.newest is not None else None
        end = lineage.ended
        if end is not None and end.outcome == Outcome.FINISHED:
            raise JobFinishedError(
                f"the job has finished at step {end.step}: there is nothing to take over",
                hint="stop this spare; to continue training, start the job with restore()",
                generation=end.generation,
            )
        if end is not None and end.outcome == Outcome.FAILED and takeover.after_s is not None:
            return _Order(f"its trainer has failed: {end.reason}", newest)
        return _Order(f"no sign of life for {takeover.after_s:g} s" if silent else "", newest)

    def _refresh(self) -> Lineage:
        return self._tier.control.refresh() if self._tier.log.incarnation() is not None else Lineage()

    def _signs(self, lineage: Lineage) -> object:
        """Return a value that changes while a trainer is alive."""
        if not lineage.claims:
            return None
        claim = lineage.claims[lineage.newest_generation]
        ends = self._tier.log.ends(claim.generation, range(claim.partitions))
        newest, ended = lineage.newest.id if lineage.newest else None, lineage.ended is not None
        return claim.nonce, newest, ended, tuple(sorted(ends.items()))

    def _fence(self) -> None:
        """(rank 0) Fence the previous trainer, so that the newest marker is its last one.

        Each attempt uses the same CLAIM, because a CLAIM that is written late must not fence the spare itself.
        """
        lineage = self._refresh()
        self._check_model(lineage)
        if self._at is None and lineage.claims:
            self._claims.check_schema()  # no marker was committed that would show more of the trainer's model
        if lineage.claims and lineage.claims[lineage.newest_generation].world:
            self._claim = self._claim or fence_of(lineage, self._tier.uri)
            self._tier.control.claim(self._claim)
            lineage = self._refresh()
            check_newest(lineage, {self._claim.nonce})
        if lineage.claims:
            self._claims.after = lineage.claims[lineage.newest_generation].nonce

    def _check_model(self, lineage: Lineage) -> None:
        """(rank 0) Check that the trainer was not restored into another model than that of the marker held here."""
        if self._at is not None:
            refuse_changed(lineage, lineage.newest_generation, self._at)

    def _check_alone(self) -> None:
        """(rank 0) Check that no trainer was started while this spare waited; such a trainer must not be fenced."""
        if self._claims.after is not None:
            check_newest(self._refresh(), {self._claims.after, self._claims.nonce})

    def outlast(self, action: Callable[[], T]) -> T:
        """(all ranks) Run ``action`` until log and store answer, however long that takes, and return its result.

        After the fence the trainer cannot continue, so a spare that ended now would end the job.

        Raises:
            FencedError: another trainer has taken over in the meantime.
        """
        said = ""
        while True:
            try:
                self._team.on_rank0(self._check_alone)
                return action()
            except (CommitUnknownError, LogUnavailableError, StoreUnavailableError) as error:
                if self._team.rank == 0 and error.headline != said:
                    log.warning("the spare waits to take over: %s", error.headline)
                said = error.headline
                time.sleep(self._takeover.poll_s)

    def _outlasting(self, action: Callable[[], None]) -> bool:
        """Run ``action``; returns whether log and store have answered. If not, the next look tries again."""
        try:
            action()
        except (LogUnavailableError, StoreUnavailableError) as error:
            if self._team.rank == 0:
                log.warning("the spare cannot follow the trainer now: %s", error.headline)
            return False
        return True

    def follow(self) -> None:
        """(all ranks) Bring the tables to the newest marker, by changed rows if possible, otherwise by all rows."""
        try:
            route = self._team.on_rank0(self._newer)
            if route is None:
                self._load_all()
            elif route.commit.id != self._at:
                assert self.held is not None
                self.touched, self._towards = True, route.commit.id
                self.rows += self._team.together(partial(self._session.advance, self.held, route))
                self._at, self._towards = route.commit.id, None
        except (CorruptionError, TrimmedError) as error:
            if self._team.rank == 0:
                log.warning("the spare reloads all rows: %s", error.headline)
            self._load_all()

    def _newer(self) -> Route | None:
        """(rank 0) Return the route from the tables' marker to the newest one; None if there is no such route."""
        lineage = self._refresh()
        newest = lineage.newest
        held = {self._at, self._towards or self._at}
        if self._at is None or newest is None or not held.issubset(lineage.leading_to(newest.id)):
            return None
        refuse_changed(lineage, newest.id.generation, self._at)
        route = locate(lineage, newest.id, since=self._at)
        route.check(self._tier.log)
        route = route.complete(self._tier.log, self._known)
        self._known = {**self._known, **route.shards}
        return route

    def _load_all(self) -> None:
        """(all ranks) Load all rows of the newest marker."""
        before, self.touched, self._at = self.touched, True, None
        loaded = self._session.newest_rows()
        if loaded is None:
            self.touched = before
            return
        self._towards = None
        self.held, plan = loaded, loaded.plan
        self._team.together(lambda: _refuse_merges(plan))
        self._known, self._at = loaded.route.all_shards(), plan.marker
        self.rows = loaded.rows
        if self._team.rank == 0:
            log.info("standing by at marker %s, loaded from %s", plan.marker, plan.source)


def _refuse_merges(plan: RestorePlan) -> None:
    if plan.merged:
        names = ", ".join(plan.schema.tables[table].name for table in sorted(plan.merged))
        raise ColumnResplitError(
            f"a spare cannot follow row-wise state that must be merged: {names}",
            hint="use the trainer's column split for the spare: planner_constraints(uri) returns it",
        )
