"""The read side of a checkpointer: all ranks choose a marker, and write its rows into the live tables.

Damage that is proved while rows are read leads to another place that has the same marker, and where no place is left,
to an older marker: half written tables are no harm then, because a restore writes every cell of every table.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchrec_stream_ckpt.adapter import FusedKernel
from torchrec_stream_ckpt.commit.collective import Team
from torchrec_stream_ckpt.commit.dense import DenseState
from torchrec_stream_ckpt.config import StreamConfig
from torchrec_stream_ckpt.control.lost import check_whole
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.layout import parse_uri
from torchrec_stream_ckpt.restore.apply import StoreSource, apply_rows
from torchrec_stream_ckpt.restore.located import located
from torchrec_stream_ckpt.restore.plan import RestorePlan, plan_restore
from torchrec_stream_ckpt.restore.proofs import Met
from torchrec_stream_ckpt.route.find import choose
from torchrec_stream_ckpt.route.job import Tier
from torchrec_stream_ckpt.route.passed import Passed
from torchrec_stream_ckpt.route.path import Path
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.store.head import Head, HeadDamagedError, head_root
from torchrec_stream_ckpt.tiers.job import Tiered
from torchrec_stream_ckpt.tiers.source import Source
from torchrec_stream_ckpt.types import MarkerId, TableShard

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tables:
    """What this rank holds."""

    kernels: list[FusedKernel]
    schema: Schema
    shards: Sequence[TableShard]


class Restoring:
    """Finds markers and reads their rows. Every method is collective, but for those of a single marker's rows.

    Args:
        config: Of the nearest tier.
        team: All ranks.
        tier: What the job writes to.
        tiers: Both tiers, if there are two.
        dense: Checks the dense state of a marker.
    """

    def __init__(self, config: StreamConfig, team: Team, tier: Tier, tiers: Tiered | None, dense: DenseState) -> None:
        self._config = config
        self._team = team
        self._tier = tier
        self._tiers = tiers
        self._dense = dense
        self._head: Head | None = None
        """What rows are copied from; its writer waits until it is closed."""
        self._use_head = True
        self._passed = Passed(config.max_fallback)
        self._damaged: dict[str, CorruptionError] = {}
        """Segments of the store that turned out to be damaged."""
        self.source = Source(tier.log, tier.objects, tier.dense)
        """Where the marker is read from that was found last."""
        self.met = Met(Path())
        """What the rows of the live tables came with."""
        self.touched = False
        """Whether rows of the live tables have been written."""

    def plan(self, tables: Tables, marker: MarkerId | None) -> RestorePlan | None:
        """What a restore would do on this rank, as far as names and directories tell; None: nothing was committed."""
        self._begin()
        try:
            choice = self._find(marker)
            return self._plan(tables, choice) if choice is not None else None
        finally:
            self._close_head()

    def rows(
        self, tables: Tables, marker: MarkerId | None, *, fall_back: bool = True
    ) -> tuple[RestorePlan, Route, int] | None:
        """Write all rows of ``marker``, or of the newest one that is whole; None when nothing was ever committed.

        Args:
            tables: Where to.
            marker: Which one; None: the newest.
            fall_back: Whether damage in rows leads to an older marker, if none is named.

        Returns:
            What was done, the marker, and how many row records this rank has written.

        Raises:
            CorruptionError: the marker is damaged wherever it can be read from, or too many newer ones are.
        """
        self._begin()
        try:
            while (choice := self._find(marker)) is not None:
                try:
                    plan = self._plan(tables, choice)
                    failpoint("restore.planned")
                    self.touched = True
                    return plan, choice, self._team.together(partial(self._apply, tables, plan, choice))
                except HeadDamagedError as error:
                    log.warning("HEAD is damaged, all is restored without it: %s", error.headline)
                    self._use_head = False
                except CorruptionError as error:
                    self._go_elsewhere(choice, error, may_pass=marker is None and fall_back)
            return None
        finally:
            self._close_head()

    def behind(self, tables: Tables, behind: Route) -> int:
        """(each rank) Write what is behind the marker that the tables hold."""
        assert behind.since is not None
        plan = plan_restore(behind, tables.schema, tables.shards)
        self.met.path = self.met.path.then(behind.since, plan.path)
        return apply_rows(self._tier.log, plan, tables.kernels, met=self.met)

    def _begin(self) -> None:
        self._use_head, self._passed = True, Passed(self._config.max_fallback)

    # Choosing.

    def _find(self, marker: MarkerId | None) -> Route | None:
        """The marker; behind it, all ranks know where to read it from, and a HEAD that they count on is open."""
        choice = self._look(marker, self._open_head if self._use_head else lambda _: None)
        if choice is not None and choice.held is not None and choice.held.head is not None:
            choice = self._everywhere(choice, choice.held.head)
        if choice is None or choice.held is None or choice.held.head is None:
            self._close_head()
        return choice

    def _look(self, marker: MarkerId | None, head: Callable[[bytes], HeadState | None]) -> Route | None:
        if self._tiers is None:
            return self._team.on_rank0(lambda: self._look_up(marker, head))
        choice, self.source = self._tiers.find(marker, head, self._passed, self._damaged)
        return choice

    def _look_up(self, marker: MarkerId | None, head: Callable[[bytes], HeadState | None]) -> Route | None:
        """(rank 0)"""
        tier = self._tier
        lineage = tier.control.refresh() if tier.log.incarnation() is not None else Lineage()
        if not lineage.claims:
            _check_key(lineage, tier)
            check_whole(tier.log, tier.control, parse_uri(tier.uri), tier.objects)
            if marker is not None:
                raise MarkerNotFoundError("there is no log yet", hint="check the URI", uri=tier.uri)
            return None
        tier.control.check_copy()
        found, damaged = self._passed, self._damaged
        return choose(tier.log, lineage, tier.dense, marker, tier.objects, head, passed=found, damaged=damaged)

    def _plan(self, tables: Tables, choice: Route) -> RestorePlan:
        merge = self._config.on_column_resplit == "merge"
        plan = self._team.together(lambda: plan_restore(choice, tables.schema, tables.shards, merge=merge))
        self._team.together(lambda: self._dense.check(self.source.dense.local(choice.commit), plan.world))
        return plan

    def _apply(self, tables: Tables, plan: RestorePlan, choice: Route) -> int:
        source, held = self.source, choice.held
        store = StoreSource(source.objects, held.scalars) if held is not None else None
        self.met = Met(plan.path)
        try:
            if held is not None:
                self.met.held(held)
            return apply_rows(source.log, plan, tables.kernels, store, self._head, self.met)
        except HeadDamagedError:
            assert self._head is not None
            self._head.drop()
            raise
        except CorruptionError as error:
            read = [each.interval for each in plan.reads]
            raise located(error, source.log, read, plan.schema, held) from None

    def _go_elsewhere(self, choice: Route, error: CorruptionError, *, may_pass: bool) -> None:
        """(all ranks) A marker is damaged where it was read: note it, so that the next look finds another place.

        Raises:
            CorruptionError: there is none.
        """
        marker = choice.commit.id
        name = _segment(choice, error)
        if name is not None and name not in self._damaged:
            log.warning("marker %s is restored without a damaged segment of the store: %s", marker, error.headline)
            self._damaged[name] = error
        elif self._tiers is not None and (may_pass or not self._tiers.place.outer_alone):
            self._tiers.note_damage(marker, error)
        elif may_pass:
            self._team.on_rank0(lambda: self._passed.over(marker, error))
        else:
            raise error

    # HEAD.

    def _everywhere(self, choice: Route, head: HeadState) -> Route:
        """``choice`` if each host has what rank 0's HEAD holds, else one that counts on none."""
        if all(self._team.gather(self._has_head(head))):
            return choice
        if self._team.rank == 0:
            log.info("HEAD is not used: not every host of this job has marker %s", head.marker)
        cold = self._look(choice.commit.id, lambda _: None)
        assert cold is not None
        return replace(cold, skipped=choice.skipped)

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


def _segment(choice: Route, error: CorruptionError) -> str | None:
    """The segment of the store that ``error`` is about, if the marker was read from it."""
    said = str(error.where.get("name", error.where.get("path", "")))
    names = (picked.ref.name for piece in (choice.held.pieces if choice.held else ()) for picked in piece.segments)
    return next((name for name in names if said.endswith(name)), None)


def _check_key(lineage: Lineage, tier: Tier) -> None:
    """A log of which the commit key vouches for nothing is another key's, and no empty one."""
    if lineage.unsigned and not tier.config.fresh:
        raise ConfigError(
            f"the log holds {lineage.unsigned} records, and this job's commit key has signed none of them",
            hint="give the key that the log was written with; to begin anew beside them, set fresh=True",
            uri=tier.uri,
        )
