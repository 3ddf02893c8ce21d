"""Read side of a checkpointer: all ranks choose a marker, write its rows into the live tables, and load dense state.

If rows turn out to be damaged while they are read, the restore tries another place that has the same marker. If no
place is left, it tries an older marker. Partly written tables are harmless then, because a restore writes every cell of
every table. A restore into a changed model does not write every cell, so it ends there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torchrec_stream_ckpt.capture.attached_model import Attached
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.dense.saved_dense import SavedDense
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
)
from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.model_evolution import ModelEvolution
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.find.best import Best
from torchrec_stream_ckpt.find.find import Damaged, OpenHead, find, no_head
from torchrec_stream_ckpt.find.job import Job, Named, Tier, Wanted, not_shared, wanted
from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.find.tiers import Tiers, TierState, named
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, same_tables
from torchrec_stream_ckpt.format.head import HeadState
from torchrec_stream_ckpt.format.imported import begun_in, check_may_begin, check_no_import
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model import MapShard
from torchrec_stream_ckpt.proofs.seen_marks import SeenMarks
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.restore.apply import apply_rows, set_scalars
from torchrec_stream_ckpt.restore.damage_location import located
from torchrec_stream_ckpt.restore.model_change import (
    Evolved,
    MarkerComparison,
    compared,
    declared,
    evolved,
    model_schema,
    nothing_to_change,
)
from torchrec_stream_ckpt.restore.plan import RestorePlan, plan_evolved, plan_restore
from torchrec_stream_ckpt.restore.proof_check import (
    check_cells,
    check_dense,
    check_live,
    check_replicated,
    refuse_or_accept,
    refuse_or_accept_dense,
    say_unproved,
)
from torchrec_stream_ckpt.restore.views import Views
from torchrec_stream_ckpt.store.head import Head, HeadDamagedError, head_root
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.marker_names import LATEST
from torchrec_stream_ckpt.util.types import MarkerId, Restored, RowRange, TableShard


def chosen(team: Team, job: Job | Tiers, marker: Named, best: str | None) -> MarkerId | None:
    """(all ranks) Return the marker that is asked for, or None for the newest intact one.

    Raises:
        ConfigError: the name is not a marker, the ranks ask for different ones, or no marker has a value of that name.
        MarkerNotFoundError: no marker has the name, or there is no marker to choose the best from.
        StoreUnavailableError: the store does not answer; it holds the list of markers that were given up.
    """
    mine = team.together(lambda: _wanted(marker, best))
    said = team.gather(mine)
    if len(set(said)) > 1:
        asked = ", ".join(str(each or LATEST) for each in said)
        raise ConfigError(
            f"the ranks ask for different markers: {asked}"[:400], hint="name the same marker on all ranks"
        )
    if mine is None or isinstance(mine, MarkerId):
        return mine
    found = team.on_rank0(lambda: named(job, mine))
    if team.rank == 0:
        log.info("%s is %s", f"the best marker by {mine}" if isinstance(mine, Best) else f"marker {mine}", found)
    return found


def _wanted(marker: Named, best: str | None) -> Wanted:
    if best is None:
        return wanted(marker)
    if marker is not None:
        raise ConfigError(f"marker={marker} and best={best} were both given", hint="pass only one of them")
    return Best.parse(best)


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Begun:
    """Newest marker and origin of a job that has committed markers."""

    newest: MarkerId
    origin: tuple[str, MarkerId] | None
    """Job (its id in hex) and marker that the job's warm start began from; None if it had no warm start."""


class Finder:
    """Finds the same marker on all ranks, repeatedly if locations with damage must be skipped.

    Args:
        config: Configuration of the nearest tier.
        team: All ranks.
        job: The job's log, or both of its logs.
    """

    def __init__(self, config: StreamConfig, team: Team, job: Tier | Tiers) -> None:
        self._config = config
        self._team = team
        self._job = job
        self.head: Head | None = None
        """HEAD that rows are copied from; its writer waits until it is closed."""
        self.use_head = True
        """True if the search includes HEAD."""
        self.damaged = Damaged(config.max_fallback)
        """Locations that were found damaged; the same on all ranks, except for the markers that were skipped."""

    def begin(self) -> None:
        """Reset the list of known damage; files may have been repaired since."""
        self.use_head, self.damaged = True, self.damaged.anew()

    def find(self, marker: MarkerId | None) -> Route | None:
        """(all ranks) Find a marker, or the newest one if ``marker`` is None.

        Afterwards all ranks know where to read it from, and a HEAD that they use is open. Returns None if no marker
        exists.
        """
        route = self._look(marker, self._open_head if self.use_head else no_head)
        if route is not None and route.head is not None:
            route = self._everywhere(route, route.head)
        if route is None or route.head is None:
            self.close()
        return route

    def begun(self) -> Begun | None:
        """(rank 0) Return the newest marker, and the origin of the first rows on the path to it.

        Returns:
            None if no marker was ever committed.

        Raises:
            CorruptionError: the log was lost, and its store holds markers.
            MarkerNotFoundError: an import into the log has begun and has not finished.
        """
        if (found := self._newest()) is None:
            find(self._job, None)  # checks whether a log was lost
            outer = self._job.outer
            check_no_import(outer.control.lineage, outer.uri)
            return None
        newest, lineage = found
        return Begun(newest, begun_in(lineage.claims[lineage.way(newest)[0].generation]))

    def _newest(self) -> tuple[MarkerId, Lineage] | None:
        """(rank 0) Return the newest marker, and the lineage of the best place that has it. None without markers."""
        state = TierState.read(self._job)
        newest = next(state.newest_first(), None)
        return (newest.id, state.lineage(next(state.places(newest.id)))) if newest is not None else None

    def made_of(self, marker: MarkerId, digest: str) -> MarkerId | None:
        """(rank 0) Return the newest marker if its path has ``marker``, followed by the changes with this digest."""
        if (found := self._newest()) is None:
            return None
        newest, lineage = found
        claims = (lineage.claims[each.generation] for each in lineage.way(newest))
        told = (claim.changes.each for claim in claims if claim.parent == marker and claim.changes is not None)
        made = any(change.digest == digest for each in told for change in each)
        return newest if made else None

    def close(self) -> None:
        """Close the HEAD, so that its writer can continue."""
        if self.head is not None:
            self.head.close()
            self.head = None

    def _look(self, marker: MarkerId | None, head: OpenHead) -> Route | None:
        route = self._team.on_rank0(lambda: find(self._job, marker, head, self.damaged))
        if isinstance(self._job, Tiers):
            self._job.seen = route.newest_generation if route is not None else None
        return route

    def _everywhere(self, route: Route, head: HeadState) -> Route:
        """Return ``route`` if every host has the same HEAD as rank 0, otherwise a route without HEAD."""
        if all(self._team.gather(self._has_head(head))):
            return route
        if self._team.rank == 0:
            log.info("HEAD is not used: not every host of this job has marker %s", head.marker)
        cold = self._look(route.commit.id, no_head)
        assert cold is not None
        return replace(cold, skipped=route.skipped)

    def _has_head(self, wanted: HeadState) -> bool:
        """Return whether the HEAD of this host has the same content as that of rank 0. If so, it is open."""
        if self._team.rank:
            self._open_head(wanted.job)
        return self.head is not None and self.head.state.same_image(wanted)

    def _open_head(self, job: bytes) -> HeadState | None:
        self.close()
        root = head_root(self._config.head)
        self.head = Head.open(root, job) if root is not None else None
        if self.head is None:
            return None
        self.head.verify = self._config.verify_head
        return self.head.state


@dataclass(frozen=True, slots=True)
class Loaded:
    """Result of a restore, and what the next generation needs of it. Identical on every rank, except for ``rows``."""

    restored: Restored
    merged: tuple[str, ...]
    """Names of tables whose row-wise state was merged from other columns."""
    swept: tuple[int, ...]
    """Indices of tables that the next generation sends completely, ascending: merged ones and changed ones."""
    proved_up_to: int
    """Position at which the window of the newest proof ends."""
    unproved: tuple[RowRange, ...]
    """Rows that were accepted although they differ from their proofs."""
    record: ClaimChanges | None
    """Record of the changes for the next CLAIM; None if the model is that of the marker."""

    def say(self) -> None:
        """(rank 0) Log what was restored."""
        done = self.restored
        log.info(
            "restored marker %s (step %d, written by %d ranks) from %s; %s rows match the digests taken in training",
            done.id,
            done.step,
            done.world,
            done.source,
            "all" if done.proved >= 1 else f"{100 * done.proved:.1f}% of its",
        )
        if done.replicas != "same":
            log.warning("the marker was saved with replicas='rank0': all ranks now have the dense state of its rank 0")
        if self.merged:
            log.info(
                "row-wise state of %s was merged from other columns and not compared with its proof",
                ", ".join(self.merged),
            )
        for part in done.evolved.parts if done.evolved is not None else ():
            if part.raw_ids is not None:
                kept, dropped = part.raw_ids
                level = logging.WARNING if dropped else logging.INFO
                log.log(
                    level, "%s: %d raw ids have new rows; %d did not fit and were dropped", part.name, kept, dropped
                )
        if done.evolved is not None and (changed := done.evolved.kept_in_part):
            log.info(
                "rows of %s were loaded into changed tables and not compared with their proofs", ", ".join(changed)
            )


@dataclass(frozen=True, slots=True)
class RestoreParts:
    """Sources and targets of a restore."""

    config: StreamConfig
    """Configuration of the nearest tier."""
    team: Team
    """All ranks."""
    job: Tier | Tiers
    """The job's log, or both of its logs."""
    dense: DenseState
    """The live dense state."""
    attached: Attached
    """The live tables."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """One attempt to restore a marker, from its plan to its dense state."""

    plan: RestorePlan
    route: Route
    saved: SavedDense
    """Dense state of the marker, from which the plan was made. The same object is loaded."""
    evolved: Evolved | None
    """Resolved changes of the model. None if the marker is of this model."""
    seen: SeenMarks
    """MARKs and newest markers of blocks, collected while the rows were read."""
    rows: int = 0
    """Number of row records that this rank has written."""


class Session:
    """Finds markers and restores them. Every method except ``advance`` is collective.

    Args:
        parts: The job to read, and the live one.
        own: Whether the log belongs to this job. Nothing is written to the log or the store of another job.
    """

    def __init__(self, parts: RestoreParts, *, own: bool = True) -> None:
        self._config = parts.config
        self._team = parts.team
        self._job = parts.job
        self._tier = parts.job.near
        self._dense = parts.dense
        self._attached = parts.attached
        self._own = own
        self._finder = Finder(parts.config, parts.team, parts.job)
        self.touched = False
        """True if rows of the live tables have been written."""

    def schema(self) -> ModelSchema:
        """(each rank) Describe the live model."""
        return model_schema(self._attached.schema, self._dense.live)

    def plan(self, marker: MarkerId | None, changes: Changes | None = None) -> RestorePlan | None:
        """Plan a restore on this rank, judging by names and directories. Returns None if no marker exists."""
        declared = self._begin(changes)
        try:
            route = self._finder.find(marker)
            return self._prepare(route, declared, again=marker is not None).plan if route is not None else None
        finally:
            self._finder.close()

    def rows(
        self, marker: MarkerId | None, changes: Changes | None = None, *, fall_back: bool = True, once: bool = False
    ) -> Attempt | None:
        """Write all rows of ``marker`` or of the newest intact one. Returns None if no marker was ever committed.

        Args:
            marker: The marker; None for the newest.
            changes: Differences of this model from that of the marker, as the user declares them.
            fall_back: If no marker is named, damage in rows leads to an older marker. If false, a log that waits for
                the end of an import, or for the first marker of a warm start, counts as a log without a marker.
            once: If the job has already made the same changes to ``marker``, continue from its newest marker.

        Returns:
            The attempt that wrote the rows.

        Raises:
            CorruptionError: the marker is damaged in every place that it can be read from, or too many newer ones are
                damaged.
            MarkerNotFoundError: the marker was never committed, or an import or a warm start has no marker yet.
            SchemaMismatchError, ChangesError, ConfigError, UnsupportedError: the marker does not match this job with
                the declared changes. Everything is compared before a row is written.
        """
        declared = self._begin(changes)
        if once:
            marker = self._unless_made(marker, declared)
        written: tuple[RestorePlan, CorruptionError] | None = None
        try:
            while (route := self._finder.find(marker)) is not None:
                attempt = None
                try:
                    attempt = self._prepare(route, declared, again=marker is not None)
                    if written is not None:
                        check_cells(attempt.plan, *written)
                    failpoint("restore.planned")
                    self.touched = True
                    attempt = replace(attempt, rows=self._team.together(partial(self._apply, attempt)))
                    self._share_scalars(attempt)
                    return attempt
                except HeadDamagedError as error:
                    log.warning("HEAD is damaged; restoring without it: %s", error.headline)
                    self._finder.use_head = False
                except CorruptionError as error:
                    self._finder.damaged.elsewhere(route, error, may_pass=marker is None and fall_back)
                    written = (attempt.plan, error) if attempt is not None else written
            if fall_back:
                outer = self._job.outer
                self._team.on_rank0(lambda: check_may_begin(outer.control.lineage, outer.uri))
            if declared is not None:
                raise nothing_to_change(self._tier.uri)
            return None
        finally:
            self._finder.close()

    def let_go(self) -> None:
        """Release the copies of dense state after a restore has ended or failed."""
        for each in (self._job.near, self._job.outer):
            each.dense.release()

    def begun(self) -> Begun | None:
        """Return the newest marker of this log and its origin, as :meth:`Finder.begun`."""
        return self._team.on_rank0(self._finder.begun)

    def newest_rows(self) -> Attempt | None:
        """Write the newest marker into the live tables. A spare calls it. Returns None if no marker is committed."""
        try:
            return self.rows(None, fall_back=False)
        finally:
            self.let_go()

    def advance(self, held: Attempt, route: Route) -> int:
        """(each rank) Write the rows committed after the marker that the tables hold; returns their number.

        Args:
            held: The attempt that wrote the tables. Its ``seen`` grows.
            route: Route from the marker that the tables hold to a newer one.
        """
        assert route.since is not None
        plan = self._plain(route)
        held.seen.path = held.seen.path.then(route.since, plan.path)
        return apply_rows(self._tier.log, plan, self._attached.kernels, seen=held.seen)

    def taken_over(self, held: Attempt, marker: MarkerId) -> Attempt:
        """Return the attempt for ``marker``, to which ``advance`` has brought the live tables.

        Raises:
            CorruptionError: the dense state of the marker is damaged.
        """
        route = self._team.on_rank0(lambda: self._held(marker))
        saved, _ = self._compare(route, None, ())
        return Attempt(self._team.together(lambda: self._plain(route.stay())), route, saved, None, held.seen)

    def _held(self, marker: MarkerId) -> Route:
        """(rank 0) Return the route of the marker that the live tables hold, after a check of its dense state."""
        lineage = self._tier.control.refresh()
        commit = lineage.find(marker)
        self._tier.dense.verify(commit)
        return Route(lineage, commit)

    def finish(self, attempt: Attempt, *, accept_unproved: bool) -> Loaded:
        """Compare the restored rows in the live tables with the marker's proofs, then load the dense state.

        Raises:
            ProofMismatchError: rows or dense state differ from their proofs, and ``accept_unproved`` is false.
        """
        team, attached, plan, route = self._team, self._attached, attempt.plan, attempt.route
        new, saved, seen = attempt.evolved, attempt.saved, attempt.seen
        schema = new.schema if new is not None else plan.schema
        checked = check_live(team, attached.kernels, schema, self._comparable(plan, schema), seen)
        unproved = checked.compared.unproved
        if unproved is not None and team.rank == 0 and self._own:
            say_unproved(self._tier.objects, route.commit, unproved, schema)
        refuse_or_accept(unproved, plan.marker, accept=accept_unproved, say=team.rank == 0)
        match = new.match if new is not None else None
        load_rest = team.together(lambda: self._dense.loader.load(saved, match))
        replicated = attached.replicated().tensors()
        compared = check_replicated(team, match.replicated(replicated) if match is not None else replicated, seen)
        refuse_or_accept(compared.unproved, plan.marker, accept=accept_unproved, say=team.rank == 0)
        proofs = seen.marks.dense(len(seen.path.chain) - 1)
        different = check_dense(team, self._dense.live, saved, match, proofs)
        refuse_or_accept_dense(different, plan.marker, accept=accept_unproved, say=team.rank == 0)
        merged = {table for tables in team.gather(plan.merged) for table in tables}
        swept = merged | set(new.tables.swept) if new is not None else merged
        self._adopt(schema, evolved=new is not None)
        attached.begin(swept)
        team.together(load_rest)  # changes that the user's objects make from here on are captured
        failpoint("restore.dense")
        source = f"{route.place}: {plan.source}" if self._job.inner is not None else plan.source
        share = (checked.compared + compared).share
        return Loaded(
            Restored(
                *plan.marker,
                plan.step,
                plan.world,
                attempt.rows,
                route.skipped,
                source,
                share,
                plan.report,
                replicas="rank0" if saved.one_replica else "same",
            ),
            tuple(plan.schema.tables[table].name for table in sorted(merged)),
            tuple(sorted(swept)),
            checked.proved_up_to,
            unproved.rows(schema) if unproved is not None else (),
            new.record if new is not None else None,
        )

    def _comparable(self, plan: RestorePlan, schema: Schema) -> tuple[TableShard, ...]:
        """Return the live shards whose rows are those of the marker; proofs do not cover changed tables."""
        return tuple(shard for shard in self._attached.shards_in(schema) if plan.is_same(shard.table))

    def _adopt(self, schema: Schema, *, evolved: bool) -> None:
        """(all ranks) Adopt the schema that the next generation is based on: an index must always mean one table."""
        own = schema if evolved else same_tables(schema, self._attached.schema)
        assert own is not None
        if evolved or own != self._attached.schema:
            self._attached.adopt(own)

    def _share_scalars(self, attempt: Attempt) -> None:
        """(all ranks, changed model) Share kernel state with ranks that read no rows of a table."""
        if attempt.plan.views is not None:
            said = self._team.gather(attempt.seen.scalars)
            records = list(dict.fromkeys(each for scalars in said for each in scalars))
            self._team.together(lambda: set_scalars(attempt.plan, self._attached.kernels, records))

    def _begin(self, changes: Changes | None) -> Changes | None:
        """(all ranks) Begin a search; returns the changes that the user declares, if any."""
        given = self._team.together(lambda: declared(changes))
        self._finder.begin()
        said = self._team.gather(given.digest if given is not None else None)
        if len(set(said)) > 1:
            digests = ", ".join(f"rank {rank} {each[:8] if each else 'none'}" for rank, each in enumerate(said))
            raise ConfigError(
                f"the ranks declare different changes, by their SHA-256: {digests}"[:400],
                hint="pass the same Changes on all ranks",
            )
        return given

    def _unless_made(self, marker: MarkerId | None, changes: Changes | None) -> MarkerId | None:
        """(all ranks) Return ``marker``, or None if the newest marker came from it by the declared changes."""
        if marker is None or changes is None:
            return marker
        newest = self._team.on_rank0(lambda: self._finder.made_of(marker, changes.digest))
        if newest is None:
            return marker
        if self._team.rank == 0:
            log.info(
                "marker %s was restored with these changes before, which led to marker %s: continuing from the "
                "newest marker, not from %s",
                marker,
                newest,
                marker,
            )
        return None

    def _prepare(self, route: Route, changes: Changes | None, *, again: bool) -> Attempt:
        """(all ranks) Compare a marker with this job, and plan how to read it; ``again`` as in :func:`evolved`."""
        merge = self._config.on_column_resplit == "merge"
        here = self._team.gather(self._dense.live.collisions)
        saved, model = self._compare(route, changes, here)

        def evolve() -> Evolved | None:
            if changes is None:
                return None
            assert model is not None
            return evolved(route, model, saved, changes, collisions=frozenset().union(*here), again=again)

        new = self._team.together(evolve)
        make = partial(self._plain, route) if new is None else partial(self._plan_evolved, route, new)
        plan = self._team.together(partial(make, merge=merge))
        return Attempt(plan, route, saved, new, SeenMarks(plan.path))

    def _compare(
        self, route: Route, changes: Changes | None, shards: Sequence[Mapping[str, MapShard]]
    ) -> tuple[SavedDense, ModelEvolution | None]:
        """(all ranks) Compare a marker with this job before anything is written; raises the same error on all ranks.

        ``shards`` are the id maps of each rank.

        Raises:
            SchemaMismatchError, ConfigError, ChangesError: they differ; the error names all differences of all ranks.
            ConfigError: a rank does not see the folder of dense state that rank 0 has found.
        """
        schema = self._attached.schema

        def compare() -> tuple[SavedDense, MarkerComparison]:
            folder = route.place.dense(self._job).local(route.commit)
            if self._team.rank and not folder.is_dir():  # rank 0 has found it
                raise not_shared(self._config.uris[0], self._team.rank)
            saved = SavedDense(folder, len(route.commit.ranks), self._team.rank)
            return saved, compared(route, schema, self._dense, saved, changes, shards)

        saved, mine = self._team.together(compare)
        Findings.merged(self._team.gather(mine.found)).check()
        return saved, mine.model

    def _plain(self, route: Route, *, merge: bool = False) -> RestorePlan:
        """Plan a marker that has the tables of this model, in any order."""
        attached = self._attached
        same = same_tables(route.schema, attached.schema) or attached.schema
        return plan_restore(route, same, attached.shards_in(same), merge=merge)

    def _plan_evolved(self, route: Route, new: Evolved, *, merge: bool) -> RestorePlan:
        shards = self._attached.shards_in(new.schema)
        plan = plan_evolved(route, Views.make(new.tables, shards), shards, merge=merge)
        return replace(plan, report=new.report)

    def _apply(self, attempt: Attempt) -> int:
        plan, route, seen = attempt.plan, attempt.route, attempt.seen
        data, objects = route.place.log(self._job), route.place.objects(self._job)
        try:
            seen.told(route.told)
            return apply_rows(data, plan, self._attached.kernels, objects, self._finder.head, seen)
        except HeadDamagedError:
            assert self._finder.head is not None
            self._finder.head.drop()
            raise
        except CorruptionError as error:
            read = [each.interval for each in plan.reads]
            raise located(error, data, read, plan.schema, route.segments) from None
