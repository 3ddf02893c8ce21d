"""The read side of a checkpointer: all ranks choose a marker, write its rows into the live tables, and load the rest.

Damage that is proved while rows are read leads to another place that has the same marker, and where no place is left,
to an older marker: half written tables are no harm then, because a restore writes every cell of every table.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from functools import partial

from torchrec_stream_ckpt.commit.collective import Team
from torchrec_stream_ckpt.commit.dense import DenseState
from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.restore.apply import apply_rows
from torchrec_stream_ckpt.restore.located import located
from torchrec_stream_ckpt.restore.plan import RestorePlan, plan_restore
from torchrec_stream_ckpt.restore.proofs import Met
from torchrec_stream_ckpt.route.damaged import Damaged
from torchrec_stream_ckpt.route.find import OpenHead, find, no_head
from torchrec_stream_ckpt.route.held import segment_of
from torchrec_stream_ckpt.route.job import Tier
from torchrec_stream_ckpt.route.path import Path
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.route.tiers import OUTER, Source
from torchrec_stream_ckpt.store.head import Head, HeadDamagedError, head_root
from torchrec_stream_ckpt.tiers.job import Tiered
from torchrec_stream_ckpt.trainer.attached import Attached
from torchrec_stream_ckpt.trainer.checking import check_live, check_replicated, refuse_or_accept, say_unproved
from torchrec_stream_ckpt.types import MarkerId, RowRange

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a restore came with, beside the rows; the same on every rank."""

    share: float
    """Part of the cells that are as they were proved."""
    merged: tuple[int, ...]
    """Tables whose row-wise state was merged from other columns, ascending."""
    proved_up_to: int
    """Where the window of the newest proof ends."""
    unproved: tuple[RowRange, ...]
    """What was accepted although it is not as it was proved."""
    source: str
    """What rows were read from, in words."""

    def say(self, plan: RestorePlan) -> None:
        """(rank 0) Log what was restored."""
        log.info(
            "restored marker %s (step %d, written by %d ranks) from %s; %.1f%% of its rows are as they were proved",
            plan.marker,
            plan.step,
            plan.world,
            self.source,
            100 * self.share,
        )
        if self.merged:
            names = ", ".join(plan.schema.tables[table].name for table in self.merged)
            log.info("row-wise state of %s is merged from other columns: it was not compared", names)


class Session:
    """Finds markers and brings them back. Every method is collective, but for ``advance``.

    Args:
        config: Of the nearest tier.
        team: All ranks.
        tier: What the job writes to.
        tiers: Both tiers, if there are two.
        dense: Checks and loads the dense state of a marker.
        attached: The live tables.
    """

    def __init__(
        self,
        config: StreamConfig,
        team: Team,
        tier: Tier,
        tiers: Tiered | None,
        dense: DenseState,
        attached: Attached,
    ) -> None:
        self._config = config
        self._team = team
        self._tier = tier
        self._tiers = tiers
        self._job = tiers.logs if tiers is not None else tier
        self._dense = dense
        self._attached = attached
        self._head: Head | None = None
        """What rows are copied from; its writer waits until it is closed."""
        self._use_head = True
        self._damaged = Damaged(config.max_fallback)
        self._place = OUTER
        """Where the marker is read from that was found last."""
        self._met = Met(Path())
        """What the rows of the live tables came with."""
        self.touched = False
        """Whether rows of the live tables have been written."""

    def plan(self, marker: MarkerId | None) -> RestorePlan | None:
        """What a restore would do on this rank, as far as names and directories tell; None: nothing was committed."""
        self._begin()
        try:
            route = self._find(marker)
            return self._plan(route) if route is not None else None
        finally:
            self._close_head()

    def rows(self, marker: MarkerId | None, *, fall_back: bool = True) -> tuple[RestorePlan, Route, int] | None:
        """Write all rows of ``marker``, or of the newest one that is whole; None when nothing was ever committed.

        Args:
            marker: Which one; None: the newest.
            fall_back: Whether damage in rows leads to an older marker, if none is named.

        Returns:
            What was done, the marker, and how many row records this rank has written.

        Raises:
            CorruptionError: the marker is damaged wherever it can be read from, or too many newer ones are.
        """
        self._begin()
        try:
            while (route := self._find(marker)) is not None:
                try:
                    plan = self._plan(route)
                    failpoint("restore.planned")
                    self.touched = True
                    return plan, route, self._team.together(partial(self._apply, plan, route))
                except HeadDamagedError as error:
                    log.warning("HEAD is damaged, all is restored without it: %s", error.headline)
                    self._use_head = False
                except CorruptionError as error:
                    self._go_elsewhere(route, error, may_pass=marker is None and fall_back)
            return None
        finally:
            self._close_head()

    def newest_rows(self) -> tuple[RestorePlan, Route, int] | None:
        """Write the newest marker into the live tables; None while nothing is committed. A spare calls it."""
        try:
            return self.rows(None, fall_back=False)
        finally:
            self._source.dense.release()

    def advance(self, route: Route) -> int:
        """(each rank) Write what was committed after the marker that the tables hold; returns the rows."""
        assert route.since is not None
        plan = plan_restore(route, self._attached.schema, self._attached.shards)
        self._met.path = self._met.path.then(route.since, plan.path)
        return apply_rows(self._tier.log, plan, self._attached.kernels, met=self._met)

    def held(self, marker: MarkerId) -> tuple[RestorePlan, Route]:
        """What the live tables hold, once ``advance`` has brought ``marker``.

        Raises:
            CorruptionError: its dense state is damaged.
        """
        route = self._team.on_rank0(lambda: self._held(marker))
        attached = self._attached
        return self._team.together(lambda: plan_restore(route.stay(), attached.schema, attached.shards)), route

    def _held(self, marker: MarkerId) -> Route:
        """(rank 0) The marker that the live tables hold, its dense state compared."""
        lineage = self._tier.control.refresh()
        commit = lineage.find(marker)
        self._tier.dense.verify(commit)
        return Route(lineage, commit)

    def finish(self, plan: RestorePlan, route: Route, *, accept_unproved: bool) -> Loaded:
        """The rows of a marker are in the live tables: compare them with its proofs, and load the dense state.

        Raises:
            ProofMismatchError: (without ``accept_unproved``) rows are not as they were proved.
        """
        team, attached = self._team, self._attached
        checked = check_live(team, attached.kernels, plan.schema, attached.shards, self._met)
        unproved = checked.compared.unproved
        if unproved is not None and team.rank == 0:
            say_unproved(self._tier.objects, route.commit, unproved, plan.schema)
        refuse_or_accept(unproved, plan.marker, accept=accept_unproved, say=team.rank == 0)
        dense = self._source.dense
        load_rest = team.together(lambda: self._dense.load(dense.local(route.commit), plan.world))
        compared = check_replicated(team, attached.replicated().tensors(), self._met)
        refuse_or_accept(compared.unproved, plan.marker, accept=accept_unproved, say=team.rank == 0)
        merged = {table for tables in team.gather(plan.merged) for table in tables}
        attached.begin(merged)
        team.together(load_rest)  # what the user's objects change from here on is captured
        failpoint("restore.dense")
        dense.release()
        return Loaded(
            (checked.compared + compared).share,
            tuple(sorted(merged)),
            checked.proved_up_to,
            unproved.rows(plan.schema) if unproved is not None else (),
            f"{route.place}: {plan.source}" if self._tiers is not None else plan.source,
        )

    def _begin(self) -> None:
        self._use_head, self._damaged = True, self._damaged.anew()

    @property
    def _source(self) -> Source:
        return self._place.source(self._job)

    # Choosing.

    def _find(self, marker: MarkerId | None) -> Route | None:
        """The marker. After it, all ranks know where to read it from, and a HEAD that they count on is open."""
        route = self._look(marker, self._open_head if self._use_head else no_head)
        if route is not None and route.held is not None and route.held.head is not None:
            route = self._everywhere(route, route.held.head)
        if route is None or route.held is None or route.held.head is None:
            self._close_head()
        return route

    def _look(self, marker: MarkerId | None, head: OpenHead) -> Route | None:
        route = self._team.on_rank0(lambda: find(self._job, marker, head, self._damaged))
        self._place = route.place if route is not None else OUTER
        if self._tiers is not None:
            self._tiers.seen = route.newest_generation if route is not None else None
        return route

    def _plan(self, route: Route) -> RestorePlan:
        merge = self._config.on_column_resplit == "merge"
        attached = self._attached
        plan = self._team.together(lambda: plan_restore(route, attached.schema, attached.shards, merge=merge))
        self._team.together(lambda: self._dense.check(self._source.dense.local(route.commit), plan.world))
        return plan

    def _apply(self, plan: RestorePlan, route: Route) -> int:
        source, held = self._source, route.held
        self._met = Met(plan.path)
        try:
            if held is not None:
                self._met.held(held)
            return apply_rows(source.log, plan, self._attached.kernels, source.objects, self._head, self._met)
        except HeadDamagedError:
            assert self._head is not None
            self._head.drop()
            raise
        except CorruptionError as error:
            read = [each.interval for each in plan.reads]
            raise located(error, source.log, read, plan.schema, held) from None

    def _go_elsewhere(self, route: Route, error: CorruptionError, *, may_pass: bool) -> None:
        """(all ranks) A marker is damaged where it was read: note it, so that the next look finds another place.

        Raises:
            CorruptionError: no other place has it.
        """
        name = segment_of(route.held, error)
        if name is not None and name not in self._damaged.segments:
            log.warning(
                "marker %s is restored without a damaged segment of the store: %s", route.marker, error.headline
            )
            self._damaged.segments[name] = error
        elif may_pass or not route.place.outer_alone:
            self._damaged.places[route.marker, route.place] = error
        else:
            raise error

    # HEAD.

    def _everywhere(self, route: Route, head: HeadState) -> Route:
        """``route`` if each host has what rank 0's HEAD holds, otherwise one that uses no HEAD."""
        if all(self._team.gather(self._has_head(head))):
            return route
        if self._team.rank == 0:
            log.info("HEAD is not used: not every host of this job has marker %s", head.marker)
        cold = self._look(route.commit.id, no_head)
        assert cold is not None
        return replace(cold, skipped=route.skipped)

    def _has_head(self, wanted: HeadState) -> bool:
        """Whether this host holds what rank 0's does; it is open then."""
        if self._team.rank:
            self._open_head(wanted.job)
        return self._head is not None and self._head.state.same_image(wanted)

    def _open_head(self, job: bytes) -> HeadState | None:
        self._close_head()
        root = head_root(self._config.head)
        self._head = Head.open(root, job) if root is not None else None
        if self._head is None:
            return None
        self._head.verify = self._config.verify_head
        return self._head.state

    def _close_head(self) -> None:
        if self._head is not None:
            self._head.close()
            self._head = None
