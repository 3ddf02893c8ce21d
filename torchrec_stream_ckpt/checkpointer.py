"""What users hold: one object that streams a TorchRec job and restores it."""

from __future__ import annotations

import logging
import os
import time
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, nullcontext, suppress
from functools import partial, wraps
from typing import Concatenate, ParamSpec, TypeVar, cast

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from torchrec_stream_ckpt.adapter import (
    ReplicatedTables,
    Standing,
    check_free,
    claim,
    dense_optimizers,
    fused_kernels,
    watch_outside_writes,
)
from torchrec_stream_ckpt.capture.hook import Capture, Drain
from torchrec_stream_ckpt.capture.oracle import Oracle
from torchrec_stream_ckpt.capture.prover import Load, Prover, Replicated, window_width
from torchrec_stream_ckpt.capture.shards import check_rows_fit, local_shards, local_tables, merge_schema
from torchrec_stream_ckpt.capture.staging import StreamIdentity, allocate
from torchrec_stream_ckpt.checking import Checked, check_live, check_replicated, refuse_or_accept, say_unproved
from torchrec_stream_ckpt.commit.again import Again
from torchrec_stream_ckpt.commit.cadence import NOTHING, Ballot, Cadence
from torchrec_stream_ckpt.commit.collective import Team, end_group, meet, new_group
from torchrec_stream_ckpt.commit.coordinator import Coordinator
from torchrec_stream_ckpt.commit.dense import DenseState, Stateful
from torchrec_stream_ckpt.commit.generation import Generation, check_same_log, claim_generation, newest_held
from torchrec_stream_ckpt.commit.pace import Pace
from torchrec_stream_ckpt.commit.roll import Roll
from torchrec_stream_ckpt.config import StreamConfig, Takeover
from torchrec_stream_ckpt.cuts import Cuts
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    ConfigError,
    CorruptionError,
    FencedError,
    LogUnavailableError,
    MarkerFailedError,
    StoreUnavailableError,
    StreamLostError,
    UnsupportedError,
)
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.control import Claim, Hello
from torchrec_stream_ckpt.format.frame import Kind
from torchrec_stream_ckpt.format.proof import Window
from torchrec_stream_ckpt.format.rank_shards import RankShards
from torchrec_stream_ckpt.format.ring import FrameRing
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.loader import TrackedLoader
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.restore.plan import RestorePlan, check_schema, plan_restore
from torchrec_stream_ckpt.restore.unproved import Compared
from torchrec_stream_ckpt.restoring import Restoring, Tables
from torchrec_stream_ckpt.route.job import open_tier
from torchrec_stream_ckpt.route.route import Route
from torchrec_stream_ckpt.showing import Showing
from torchrec_stream_ckpt.standby import Standby
from torchrec_stream_ckpt.stats import Stats
from torchrec_stream_ckpt.telemetry import Telemetry
from torchrec_stream_ckpt.tiers.job import Tiered
from torchrec_stream_ckpt.types import Committed, MarkerId, Restored

log = logging.getLogger(__name__)

_JOIN_S = 5.0
_PEERS_S = 20.0
"""Other ranks are waited for so much longer than for the log."""
_REOPEN_S = 30.0
"""A log that has lost a stream, and does not answer now, is asked again after so long."""


P = ParamSpec("P")
T = TypeVar("T")
Method = Callable[Concatenate["StreamCheckpointer", P], T]


class _Call:
    """Lives as long as a collective call."""

    def __init__(self, name: str) -> None:
        self.name = name


def _inside(name: str, running: _Call) -> ConfigError:
    return ConfigError(
        f"{name} was called while {running.name} is running, on this thread or on another one",
        hint="make one call after the other, on one thread; a signal handler or a hook sets a flag, and the loop "
        "calls at its next step boundary",
    )


def _collective(name: str) -> Callable[[Method[P, T]], Method[P, T]]:
    """A call that all ranks make, under its name: a rank that waits in it can say so, and be told where others are.

    None begins inside of another one, on whatever thread: it would find rows and cuts half way.
    """

    def named(method: Method[P, T]) -> Method[P, T]:
        @wraps(method)
        def call(self: StreamCheckpointer, *args: P.args, **kwargs: P.kwargs) -> T:
            if os.getpid() != self._process:
                raise ConfigError(
                    f"{name} was called in a process that was forked from the one that made this StreamCheckpointer",
                    hint="call it in the trainer itself: a fork has none of its threads and connections",
                )
            mine = _Call(name)
            running: _Call | None = None
            try:
                running = self._calls.setdefault("now", weakref.ref(mine))()  # one step, for all threads
                if running is None:  # one that was interrupted where it could not say that it has ended
                    self._calls["now"], running = weakref.ref(mine), mine
                if running is not mine:
                    raise _inside(name, running)
                with self._roll.call(name):
                    return method(self, *args, **kwargs)
            finally:
                if (held := self._calls.get("now")) is not None and held() is mine:
                    del self._calls["now"]
                running = None
                del mine  # a traceback keeps this frame: it must not keep the call running

        return cast("Method[P, T]", call)

    return named


class StreamCheckpointer:
    """Streams the changed rows of a TorchRec job and commits markers; restores any of them.

    Every method is collective: all ranks call it at the same step boundary, on the training thread. A call inside of
    another one, by a signal handler or on another thread, is refused and changes nothing.

    Args:
        dmp: The sharded model.
        optimizer: What the job steps: a torch optimizer, ``KeyedOptimizerWrapper`` or ``CombinedOptimizer``;
            None when all parameters are fused.
        config: Where to stream, and how often.
        stateful: Objects with ``state_dict()`` and ``load_state_dict()`` whose state on rank 0 serves all
            ranks: a loader that counts samples (within a ``TrackedLoader`` for pipelines, which fetch ahead), a
            schedule of the dense optimizer (one over all param groups has a list that fits its own rank and plan only).
        stateful_per_rank: The same for objects with a state of their own on every rank; they can only be
            restored on as many ranks.
        paranoid: At every marker, compare the state that the stream implies with the live tables, bit by bit, and
            fail at the first difference (``CaptureMismatchError``). Costs a second copy of this rank's tables and
            optimizer rows in host memory and, at each marker, one pass over both and a collective on the training
            thread: for tests, and for a day of a new job. See docs/guarantees.md.

    Raises:
        UnsupportedError: the model holds something that cannot be captured exactly; names it.
        ConfigError: the configuration is wrong.
        LogUnavailableError: the log does not answer.
        StoreUnavailableError: the store does not answer, or does not let us in.
    """

    def __init__(
        self,
        dmp: DistributedModelParallel,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: StreamConfig,
        stateful: Mapping[str, Stateful] | None = None,
        stateful_per_rank: Mapping[str, Stateful] | None = None,
        paranoid: bool = False,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized", hint="init_process_group() comes first")
        self._config = config.inner
        self._process = os.getpid()
        self._calls: dict[str, weakref.ref[_Call]] = {}
        """The collective call that is running."""
        meet(config.commit_timeout_s + _PEERS_S)
        with ExitStack() as undo:
            # One group for each thread and purpose: calls on one group are in the same order on every rank.
            groups = [new_group(2 * config.commit_timeout_s + 60) for _ in range(3)]
            step_group, vote_group, self._dense_group = groups
            bound_s = config.commit_timeout_s + _PEERS_S
            self._roll = Roll.of(step_group)
            undo.callback(self._roll.close)
            self._team = Team(step_group, self._roll, bound_s)
            self._commit_team = Team(vote_group, self._roll, bound_s, in_call=False)
            undo.callback(self._end_groups)
            self._dmp, self._optimizer, self._paranoid = dmp, optimizer, paranoid
            self._describe()
            self._dense = self._team.together(
                lambda: DenseState(
                    dmp, optimizer, stateful or {}, stateful_per_rank or {}, self._kernels, self._dense_group
                )
            )
            handed = (*(stateful or {}).values(), *(stateful_per_rank or {}).values())
            self._loaders = [item for item in handed if isinstance(item, TrackedLoader)]
            # What this job writes to: its only log, or the inner one of two tiers.
            how = {"signs": self._team.rank == 0, "spare": config.outer is None}
            self._tier = self._team.together(lambda: open_tier(self._config, **how))
            undo.callback(self._tier.close)
            self._log, self._control = self._tier.log, self._tier.control
            self._team.on_rank0(self._tier.preflight)  # a log that cannot be reached is said now, not at a marker
            self._tiers = Tiered.open(config, self._tier, self._team)
            if self._tiers is not None:
                undo.callback(self._tiers.close, _JOIN_S)
            self._restoring = Restoring(config, self._team, self._tier, self._tiers, self._dense)
            self._hook()
            undo.callback(self._unhook)
            self._telemetry = Telemetry(self._team.rank, config.restore_bytes_per_s)
            device = self._kernels[0].device if self._kernels else torch.device("cpu")
            if device.type == "cuda" and self._team.rank == 0:
                log.warning(
                    "tables on a GPU: never run by its authors (docs/guarantees.md); paranoid=True checks each marker"
                )
            self._ring = FrameRing(
                config.ring_bytes, config.marker_budget_bytes, lambda num_bytes: allocate(device, num_bytes)
            )
            self._pace = Pace(config.drain_every, config.max_overhead)
            self._cadence = Cadence(
                config.marker_every if self._pace.account is None else None,
                config.marker_every_s,
                step_group,
                self._pace.account.marker_affordable if self._pace.account is not None else None,
                self._roll,
                2 * config.commit_timeout_s + 60,
            )
            self._stream: Generation | None = None
            self._coordinator: Coordinator | None = None
            self._cuts: Cuts | None = None
            self._prover: Prover | None = None
            self._proved_up_to = 0
            """Where the window of the next marker begins: behind that of the restored one."""
            self._step = 0
            self._next_marker = 1
            self._broken: BaseException | None = None
            self._stranded = False
            self._reopen_s = 0.0
            """(rank 0) When to try next to go on after a loss, on the monotonic clock."""
            self._ended = False
            """The log has lost this generation's stream, and no other one can be opened in this process."""
            self._closed = False
            self._showing = Showing(config, self._team, self.stats, self._telemetry)
            undo.pop_all()

    def _describe(self) -> None:
        """Learn which rows this rank holds, and the schema of all ranks."""
        self._kernels = self._team.together(lambda: fused_kernels(self._dmp))
        self._team.together(lambda: check_rows_fit(self._kernels))
        self._schema = merge_schema(self._team.gather(local_tables(self._kernels)))
        self._shards = local_shards(self._kernels, self._schema)
        shards = self._team.gather(self._shards)
        self._layout = RankShards.of(shards) if self._team.rank == 0 else None

    @property
    def _tables(self) -> Tables:
        return Tables(self._kernels, self._schema, self._shards)

    def _hook(self) -> None:
        """Hook the kernels as they are now, and what changes rows beside them."""
        self._team.together(lambda: check_free(self._kernels))
        self._standing = Standing(self._dmp)
        self._capture = Capture(self._kernels, self._schema)
        self._oracle = Oracle(self._kernels, self._schema) if self._paranoid else None
        self._unwatch = watch_outside_writes(self._dmp, self._optimizer, self._capture.before_load, self._reshard)
        self._free_kernels = claim(self._kernels)

    def _unhook(self) -> None:
        """Leave nothing on the model and on the optimizers."""
        self._unwatch()
        self._capture.close()
        self._free_kernels()

    def _end_groups(self) -> None:
        """Their threads and sockets end here, with the last references to them."""
        self._roll.close()
        self._team.close()
        self._commit_team.close()
        end_group(self._dense_group)
        del self._dense_group  # whatever still refers to this object keeps no thread and no socket alive
        if hasattr(self, "_dense"):
            self._dense.end()
        if hasattr(self, "_cadence"):
            self._cadence.end()

    def __enter__(self) -> StreamCheckpointer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def steps(self) -> int:
        """Steps of the job so far, those before a restored marker counted."""
        return self._step

    @property
    def generation(self) -> int | None:
        """This job's own generation; None before ``restore()``, ``step()`` or ``mark()`` has opened it."""
        return self._stream.claim.generation if self._stream is not None else None

    def stats(self) -> Stats:
        """Where this rank stands: what it has sent, what would be lost now, how long it took. Local, on any thread."""
        return self._telemetry.stats(self._step, self._capture, self._ring, self._prover)

    @_collective("restore()")
    def restore(
        self, marker: MarkerId | str | tuple[int, int] | None = None, *, accept_unproved: bool = False
    ) -> Restored | None:
        """Bring back a marker, in place, on any number of ranks and any plan.

        Args:
            marker: Which one, as ``"GENERATION:MARKER"``; None: the newest that is whole. What was passed over, because
                it is proved to be damaged, stands in ``Restored.skipped``.
            accept_unproved: Go on with rows that are not as a marker proved them, and send them again.

        Returns:
            What was restored; None when nothing was ever committed, or ``StreamConfig.fresh`` is set.

        Raises:
            MarkerNotFoundError: ``marker`` is not committed.
            SchemaMismatchError: tables or dense state differ from the model's; names the first, with both values.
            ColumnResplitError: see ``StreamConfig.on_column_resplit``.
            CorruptionError: bytes that the marker needs are damaged or missing; says where. Without ``marker``: of the
                newest marker, and ``StreamConfig.max_fallback`` older ones are damaged, too.
            ConfigError: ``StreamConfig.fresh`` is set and a marker is named.
            TrimmedError: they were trimmed on purpose; says which store holds them.
            ProofMismatchError: (without ``accept_unproved``) rows are not as they were in the tables at a cut; names
                them. No older marker is tried: it may have lost the same.
        """
        return self._restore(_marker_id(marker), accept_unproved=accept_unproved)

    def _restore(self, wanted: MarkerId | None, *, accept_unproved: bool) -> Restored | None:
        self._check_open()
        if self._stream is not None:
            raise ConfigError(
                f"this StreamCheckpointer has opened generation {self.generation} already, by an earlier restore(), "
                "step() or mark()",
                hint="call restore() once, before the first step(); for another marker make a new one, after close()",
            )
        if self._config.fresh:
            self._start_fresh(wanted)
            return None
        try:
            found = self._restoring.rows(self._tables, wanted)
            failpoint("restore.rows")
        except BaseException as error:
            self._broken = error if self._restoring.touched else None
            raise
        if found is None:
            self._open_root()
            return None
        return self._go_on_from(*found, accept_unproved=accept_unproved)

    def _start_fresh(self, wanted: MarkerId | None) -> None:
        if wanted is not None:
            raise ConfigError(
                f"fresh=True starts from nothing, and restore() was given marker {wanted}",
                hint="leave out one of the two",
            )
        self._open_root()

    @_collective("standby()")
    def standby(self, takeover: Takeover | None = None, *, accept_unproved: bool = False) -> Restored | None:
        """Stand by as a hot spare of the trainer of this job, then take over as :meth:`restore` does.

        Instead of ``restore()``, on ranks of their own, any number of them and under any plan of the trainer's column
        split. Loads the newest marker, keeps it up to date in the live tables, and when it is time fences the trainer
        and goes on from its last marker. Returns only then. See docs/follow.md.

        Args:
            takeover: When; default: after 60 s without a sign of life.
            accept_unproved: As of :meth:`restore`.

        Returns:
            What was taken over; None when nothing was ever committed.

        Raises:
            FencedError: another trainer, or spare, was first.
            ColumnResplitError: this plan splits columns of a row-wise optimizer otherwise; a spare merges nothing.
        """
        self._check_open()
        if self._stream is not None:
            raise ConfigError("standby() comes before the first step() and mark()")
        if self._config.fresh:
            raise ConfigError("fresh=True starts from nothing, a spare does not", hint="leave out one of the two")
        if self._tiers is not None:
            raise ConfigError("a spare follows one log", hint="give it the outer one alone; it goes on without a tee")
        takeover = takeover or Takeover()
        load, advance, uri = self._load_newest, partial(self._restoring.behind, self._tables), self._tier.uri
        spare = Standby(self._team, self._log, self._control, load, advance, takeover, uri)
        try:
            marker = spare.wait()
        except BaseException as error:
            self._broken = error if spare.touched else None
            raise
        if marker is None:
            return self._restore(None, accept_unproved=accept_unproved)
        try:
            choice = self._team.on_rank0(lambda: self._taken_over(marker))
        except CorruptionError as error:  # of its dense state: an older marker may be whole
            log.warning("marker %s cannot be taken over: %s", marker, error.headline)
            return self._restore(None, accept_unproved=accept_unproved)
        plan = self._team.together(lambda: plan_restore(choice.stay(), self._schema, self._shards))
        return self._go_on_from(plan, choice, spare.rows, accept_unproved=accept_unproved)

    def _load_newest(self) -> tuple[RestorePlan, Route, int] | None:
        """(all ranks) Write the newest marker into the live tables; None while nothing is committed."""
        try:
            return self._restoring.rows(self._tables, None, fall_back=False)
        finally:
            self._restoring.source.dense.release()

    def _taken_over(self, marker: MarkerId) -> Route:
        """(rank 0) The marker that the live tables hold, its dense state compared."""
        lineage = self._control.refresh()
        commit = lineage.find(marker)
        self._tier.dense.verify(commit)
        return Route(lineage, commit)

    def _go_on_from(self, plan: RestorePlan, choice: Route, rows: int, *, accept_unproved: bool) -> Restored:
        """(all ranks) The rows of a marker are in the live tables: load the rest, and open a generation on it."""
        try:
            checked = self._check_proofs(plan, choice, accept_unproved=accept_unproved)
            load_rest = self._team.together(lambda: self._load_dense(choice, plan.world))
            share = (checked.compared + self._check_replicated(plan, accept_unproved=accept_unproved)).share
            merged = {table for tables in self._team.gather(plan.merged) for table in tables}
            self._begin(merged)
            self._team.together(load_rest)  # what the user's objects change from here on is captured
        except BaseException as error:
            self._broken = error
            raise
        failpoint("restore.dense")
        self._restoring.source.dense.release()
        source = f"{self._tiers.place}: {plan.source}" if self._tiers is not None else plan.source
        self._step = plan.step
        self._next_marker = plan.marker.marker + 1
        path = choice.lineage.path(plan.marker)
        parent_bytes = sum(commit.num_bytes for commit in path) // self._team.world
        self._open(plan.marker, sorted(merged), parent_bytes)
        if self._team.rank == 0:
            log.info(
                "restored marker %s (step %d, written by %d ranks) from %s; %.1f%% of its rows are as they were proved",
                plan.marker,
                plan.step,
                plan.world,
                source,
                100 * share,
            )
            if merged:
                names = ", ".join(plan.schema.tables[table].name for table in sorted(merged))
                log.info("row-wise state of %s is merged from other columns: it was not compared", names)
        if checked.compared.unproved is not None:
            self._capture.mark_ranges(checked.compared.unproved.rows(plan.schema))
        return Restored(
            plan.marker.generation,
            plan.marker.marker,
            plan.step,
            plan.world,
            rows,
            choice.skipped,
            source,
            share,
        )

    def _check_proofs(self, plan: RestorePlan, choice: Route, *, accept_unproved: bool) -> Checked:
        """(all ranks) Compare the rows with what markers proved of them, before anybody changes one."""
        checked = check_live(self._team, self._kernels, plan.schema, self._shards, self._restoring.met)
        if checked.compared.unproved is not None and self._team.rank == 0:
            say_unproved(self._tier.objects, choice.commit, checked.compared.unproved, plan.schema)
        refuse_or_accept(checked.compared.unproved, plan.marker, accept=accept_unproved, say=self._team.rank == 0)
        self._proved_up_to = checked.proved_up_to
        return checked

    def _check_replicated(self, plan: RestorePlan, *, accept_unproved: bool) -> Compared:
        """(all ranks) The same for the tables that came with the dense state."""
        tensors = ReplicatedTables(self._dmp, dense_optimizers(self._optimizer)).tensors()
        compared = check_replicated(self._team, tensors, self._restoring.met)
        refuse_or_accept(compared.unproved, plan.marker, accept=accept_unproved, say=self._team.rank == 0)
        return compared

    def _load_dense(self, choice: Route, world: int) -> Callable[[], None]:
        return self._dense.load(self._restoring.source.dense.local(choice.commit), world)

    @_collective("plan()")
    def plan(self, marker: MarkerId | str | tuple[int, int] | None = None) -> RestorePlan | None:
        """What ``restore(marker)`` would read and write on this rank; prints with ``describe()``. Writes nothing."""
        return self._restoring.plan(self._tables, _marker_id(marker))

    @_collective("step()")
    def step(self, batches: int = 1) -> None:
        """A training step is done: forward, backward and optimizer. Drains and cuts markers by cadence.

        Never waits for the log. A marker that does not fit the ring is sent over the next steps.

        Args:
            batches: How many batches it trained: more with gradient accumulation, 0 for none of the loader. Each
                ``TrackedLoader`` among the stateful objects is told; of no meaning without one.

        Raises:
            ConfigError: a ``TrackedLoader`` has not so many batches in flight.
            FencedError: another trainer has taken over the job; raised by all ranks at the same step.
            MarkerFailedError, CommitUnknownError: (``on_stream_failure="raise"``) why the last marker failed; raised by
                all ranks at the same step.
            CaptureMismatchError: (``paranoid``) the stream does not say what the tables hold; raised by all ranks at
                the same step, and by every call from then on.
        """
        self._ensure_stream()
        with self._telemetry.blocked.running():
            self._step_done(batches)

    def _step_done(self, batches: int) -> None:
        for loader in self._loaders:
            loader.trained(batches)
        self._step += 1
        self._pace.step(self._capture.saving_s)
        ballot = self._cadence.decide()
        if not ballot.owner:
            raise self._fenced()
        self._raise_failure(ballot)
        assert self._cuts is not None
        self._send_again()
        if not ballot.sound and self._go_on_after_loss():
            self._pace.stepped()
            return
        if not ballot.holding:
            self._cuts.give_up("it is given up with another rank")
        if ballot.ready:
            self._cut(deadline_s=None)
        else:
            with self._pace.going_on() if self._cuts.open else nullcontext():
                self._cuts.go_on()
        if not (ballot.ready or self._cuts.open):
            self._try_drain()
        self._vote()
        self._pace.stepped()

    def _raise_failure(self, ballot: Ballot) -> None:
        """(``on_stream_failure="raise"``) The last marker has settled on all ranks: if it failed, all of them raise."""
        assert self._coordinator is not None
        failure = self._coordinator.failure
        # Without a vote a rank may know more than the others.
        if self._config.on_stream_failure == "raise" and ballot is not NOTHING and ballot.settled and failure:
            self._coordinator.failure = None
            raise failure

    @_collective("mark()")
    def mark(self) -> Future[Committed]:
        """Start a marker at this step boundary.

        Waits for a marker in flight, for the rest of the sweep when it is the job's first one, and until all that
        changed is in the ring; a marker that the cadence cuts waits for none of these.

        Returns:
            A future that resolves on every rank once the marker is committed, or fails with the reason.

        Raises:
            FencedError, CaptureMismatchError: as in ``step()``.
        """
        return self._mark()

    def _mark(self) -> Future[Committed]:
        self._ensure_stream()
        assert self._coordinator is not None
        assert self._cuts is not None
        deadline_s = time.monotonic() + self._config.commit_timeout_s
        self._roll.bound(self._config.commit_timeout_s + _PEERS_S)
        with self._pace.waiting():
            self._cuts.complete(deadline_s)
            # The marker in flight was cut before this call, so it settles within its own bound.
            if not self._coordinator.settle(deadline_s + _PEERS_S - time.monotonic()):
                raise MarkerFailedError("the marker in flight has not settled", hint="see the log of this rank")
        if self._coordinator.fenced is not None:
            raise self._coordinator.fenced
        if self._coordinator.lost is not None and not self._ended:
            self._go_on_after_loss()
        return self._cut(deadline_s=max(deadline_s, time.monotonic() + 1.0))

    def mark_all(self) -> None:
        """Send all rows again: tables were written past torch, by ``.data``, NumPy, a raw pointer or a collective.

        To be called after the write, before the next ``step()`` or ``mark()``. Writes in place by torch, and loading by
        ``load_state_dict``, are seen without this call. A marker whose rows have not all been sent is given up: their
        values are gone.
        """
        self._capture.mark_all()

    @_collective("reshard()")
    def _reshard(self, reshard: Callable[[], float]) -> float:
        """``dmp.reshard()``: rows move between ranks, in kernels that are built anew.

        A marker holds all rows where they were; once they have moved, a generation that stands on it goes on. Only
        tables with another column split are sent whole again.
        """
        wait_s = self._config.commit_timeout_s + 2 * _PEERS_S
        parent = self._mark().result(wait_s).id if self._stream is not None else None
        before = self._column_splits()
        if self._stream is not None:
            self._close_stream(_JOIN_S)
        try:
            moved = reshard()
        except BaseException as error:
            self._broken = error
            raise
        self._unhook()
        self._describe()
        self._dense.kernels = self._kernels
        self._hook()
        if parent is not None:
            after = self._column_splits()
            swept = [table for table in sorted(after) if after[table] != before[table]]
            self._begin(swept)
            self._open(parent, swept)
        return moved

    def _column_splits(self) -> dict[int, set[tuple[int, int]]]:
        """Table -> the column ranges of its shards on all ranks."""
        splits: dict[int, set[tuple[int, int]]] = {}
        for shards in self._team.gather(self._shards):
            for shard in shards:
                splits.setdefault(shard.table, set()).add((shard.col0, shard.cols))
        return splits

    def close(self, timeout_s: float = 60.0) -> None:
        """Remove the hooks, wait for the marker in flight and let go of the log; takes at most ``timeout_s``.

        Rows that changed since the last marker are not part of any: call ``mark()`` before if they shall be.

        Raises:
            ConfigError: another call is running, on this thread or on another one; nothing is closed.
        """
        if self._closed or os.getpid() != self._process:  # a fork has nothing to close: all of it is its parent's
            return
        if (held := self._calls.get("now")) is not None and (running := held()) is not None:
            raise _inside("close()", running)
        self._closed = True
        deadline = time.monotonic() + timeout_s
        self._showing.close()
        with suppress(UnsupportedError):
            self._check_kernels()
        self._unhook()
        self._close_stream(timeout_s)
        if self._tiers is not None:
            self._tiers.close(max(_JOIN_S, deadline - time.monotonic()))
        self._tier.close()
        self._end_groups()

    def _close_stream(self, timeout_s: float) -> None:
        """End this generation on this rank."""
        if self._stream is None or self._coordinator is None or self._cuts is None:
            return
        begin = time.monotonic()
        self._cuts.close(begin + timeout_s / 2)  # the rest of the time is for the commit
        deadline = begin + timeout_s
        if not self._coordinator.close(max(0.0, deadline - time.monotonic())):
            log.warning("closed while a marker was in flight: it is given up, or settles when read")
        self._cadence.close(min(_JOIN_S, deadline - time.monotonic()))
        self._stream.publisher.close(max(0.0, min(_JOIN_S, deadline - time.monotonic())))

    # Drains and cuts.

    def _try_drain(self) -> None:
        """Drain; if that fails here alone, training goes on and the next marker says it on all ranks."""
        try:
            with self._telemetry.drain.running():
                self._drain()
        except Exception:  # the publisher has died: what was not sent stays marked
            if not self._stranded:
                log.exception(
                    "rank %d cannot drain: every marker will fail until the job is restarted", self._team.rank
                )
            self._stranded = True

    def _drain(self) -> None:
        """Send what finds space, without waiting."""
        drain = Drain(self._step, self._next_marker)
        if not self._capture.swept:
            # First, and at every step: where steps touch more than the ring takes, the sweep must go on all the same.
            self._capture.sweep(drain, self._config.sweep_bytes)
            failpoint("sweep.sent")
        if self._capture.look(self._pace.drain_due(self._step, self._ring.used_bytes / self._ring.ring_bytes)):
            self._drain_touched(drain)
            failpoint("drain.sent")

    def _drain_touched(self, drain: Drain) -> None:
        assert self._stream is not None
        publisher = self._stream.publisher
        rows, num_bytes = publisher.rows, publisher.num_bytes
        with self._pace.draining():
            self._capture.drain(drain)
        changed = publisher.rows - rows + self._capture.dirty_rows
        self._pace.drained(
            (publisher.num_bytes - num_bytes) / self._ring.ring_bytes, changed / max(1, self._capture.sweep_progress[1])
        )

    def _vote(self) -> None:
        """Say how this rank stands, for the decision at the end of the next step."""
        assert self._coordinator is not None
        assert self._cuts is not None
        settled, owner = not self._coordinator.busy, self._coordinator.fenced is None
        ready = settled and owner and self._capture.swept and self._cuts.idle
        self._cadence.start(self._step, Ballot(ready, settled, owner, self._cuts.holding, self._sound))

    @property
    def _sound(self) -> bool:
        """Whether the log holds what it has acknowledged, as far as this rank knows; True once nothing can be done."""
        assert self._stream is not None
        assert self._coordinator is not None
        return self._ended or (self._stream.publisher.lost is None and self._coordinator.lost is None)

    def _cut(self, deadline_s: float | None) -> Future[Committed]:
        """Cut a marker at this step boundary."""
        assert self._cuts is not None
        self._standing.check_all()
        self._send_again()
        self._cadence.cut()
        assert self._stream is not None
        marker, self._next_marker = self._next_marker, self._next_marker + 1
        # A marker that the user asks for is none that the cadence chose.
        with self._telemetry.cut.running(), self._pace.cutting() if deadline_s is None else self._pace.waiting():
            future = self._cuts.begin(self._step, marker, deadline_s, self._finish_sweep)
        self._telemetry.follow(self._stream.marker(marker), self._step, future)
        return future

    def _send_again(self) -> None:
        """Mark the rows that a verdict on a marker of this generation names."""
        assert self._coordinator is not None
        if rows := self._coordinator.take_again():
            self._capture.mark_ranges(rows)

    def _finish_sweep(self, drain: Drain) -> bool:
        while not self._capture.swept:
            if not self._capture.sweep(drain, self._config.ring_bytes):
                return False
        return True

    def _fenced(self) -> FencedError:
        """A rank knows that the job has a new owner; rank 0's word on it is on its way to this one."""
        assert self._coordinator is not None
        self._coordinator.settle(_JOIN_S)
        return self._coordinator.fenced or FencedError("another trainer has taken over this job", hint="stop this one")

    # Opening a generation.

    def _ensure_stream(self) -> None:
        self._check_open()
        if self._stream is None:
            self._team.on_rank0(self._check_restored)
            self._open_root()

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this StreamCheckpointer is closed")
        if self._broken is not None:
            raise ConfigError(f"a restore or reshard failed half way ({self._broken})", hint="start the job anew")
        if self._cuts is not None and self._cuts.mismatch is not None:
            raise self._cuts.mismatch
        self._check_kernels()

    def _check_kernels(self) -> None:
        """Refuse kernels that were put in the place of those that are hooked."""
        try:
            self._standing.check()
        except UnsupportedError:
            if self._cuts is not None:
                self._cuts.give_up("kernels were replaced")
            raise

    def _open_root(self) -> None:
        """Open a generation that stands on nothing: every table is sent whole."""
        self._team.on_rank0(self._check_schema)
        tables = range(len(self._schema.tables))
        self._begin(tables)
        self._open(None, tables, parent_bytes=0)

    def _begin(self, swept: Collection[int]) -> None:
        """The next generation stands on what the tables hold now; those in ``swept`` it sends whole."""
        self._capture.begin()
        if self._oracle is not None:
            self._team.together(partial(self._oracle.begin, swept))

    def _check_schema(self) -> None:
        """(rank 0) A job that restores nothing must still be of the log's kind."""
        claims = (self._control if self._tiers is None else self._tiers.control).refresh().claims
        if claims:
            check_schema(claims[max(claims)].schema, self._schema)

    def _check_restored(self) -> None:
        """(rank 0) Markers of a run that forgot ``restore()`` would be newer than all that the log holds.

        Raises:
            ConfigError: it holds some, and nobody has said that this is meant.
        """
        control = self._control if self._tiers is None else self._tiers.control
        newest = control.refresh().newest
        if newest is not None and not self._config.fresh:
            raise ConfigError(
                f"the log holds markers, the newest is {newest.id}, and this run has restored none",
                hint="add the line `checkpointer.restore()` before the first step(); to start from nothing, set "
                "StreamConfig(..., fresh=True), in the recipes --restore none",
                uri=self._config.uris[0],
            )

    def _open(self, parent: MarkerId | None, swept: Sequence[int], parent_bytes: int | None = None) -> None:
        """Claim the next generation, and start this rank's stream in it.

        Args:
            parent: The marker that it stands on.
            swept: Tables that are sent whole.
            parent_bytes: This rank's share of what a restore of the parent reads; None: what this process has sent.
        """
        claim = self._team.on_rank0(lambda: self._claim(parent, tuple(swept)))
        self._enter(claim, self._step, parent_bytes)

    def _enter(self, claim: Claim, parent_step: int, parent_bytes: int | None) -> None:
        """(all ranks) Start this rank's stream in a generation that was claimed."""
        config, team = self._config, self._team
        dense = self._tier.dense
        team.together(lambda: check_same_log(self._log, dense, config, claim, team.rank))
        partition = team.rank % claim.partitions
        publisher = Publisher(
            lambda resume_at: self._log.open_writer(claim.generation, partition, resume_at), self._ring
        )
        stream = Generation(self._log, self._control, claim, publisher, partition, dense, self._tier.store_url)
        self._stream = stream
        again = Again(stream, self._tier.objects) if team.rank == 0 else None
        self._coordinator = Coordinator(stream, self._dense, self._commit_team, config.commit_timeout_s, again)
        self._cuts = Cuts(
            stream,
            self._coordinator,
            self._capture,
            self._oracle,
            self._ring,
            self._dense,
            team,
            claim.schema.crc,
            self._open_prover(claim.schema),
        )
        hello = self._ring.acquire(extra=True, wait_s=_JOIN_S)
        assert hello is not None
        hello.put_json(
            self._cuts.header(Kind.HELLO, self._step, marker=0),
            Hello(team.world, claim.schema, self._shards).to_json(),
        )
        publisher.submit(hello)
        failpoint("hello.submitted")
        identity = StreamIdentity(claim.job, claim.generation, team.rank, claim.schema.crc)
        self._capture.open(identity, self._ring, self._cuts.submit, claim.swept)
        if self._tiers is not None:
            self._team.on_rank0(self._tiers.start_relay)
        self._telemetry.opened(claim.generation, publisher, stream.strays, claim.parent, parent_step, parent_bytes)
        self._vote()

    def _open_prover(self, schema: Schema) -> Prover | None:
        """(all ranks) What the markers of this generation prove, from where the last proof has ended; None: nothing."""
        replicated: Replicated = dict
        if self._team.rank == 0:
            replicated = ReplicatedTables(self._dmp, dense_optimizers(self._optimizer)).tensors
        load = Load.of(self._kernels, replicated())
        said = self._team.gather((self._config.proof_bytes, load))
        proof_bytes, position = said[0][0], self._proved_up_to
        if self._prover is not None:
            position = self._prover.window.position
        self._prover = None
        if proof_bytes:
            width = window_width([each for _, each in said], proof_bytes)
            self._prover = Prover(self._kernels, schema, replicated, Window(position, width))
        return self._prover

    # After a loss.

    def _go_on_after_loss(self) -> bool:
        """(all ranks) The log has lost acknowledged frames: nothing more of this generation can be restored.

        Another one sends every table whole. What was not acknowledged, and a marker in flight, are given up.

        Returns:
            Whether it is open; if not, markers fail until it is.
        """
        assert self._stream is not None
        assert self._coordinator is not None
        assert self._cuts is not None
        stream, coordinator = self._stream, self._coordinator
        said = self._team.gather(stream.publisher.lost or coordinator.lost)
        why = next((error for error in said if error is not None), None)
        assert why is not None
        self._cuts.give_up(why.headline)
        stream.publisher.discard(why, _JOIN_S)
        coordinator.settle()
        if coordinator.fenced is not None:
            raise coordinator.fenced
        claimed = self._team.on_rank0(lambda: self._claim_after(why))
        self._ended = claimed is None
        if not claimed:
            return False
        coordinator.close(0.0)
        self._cadence.close(_JOIN_S)
        self._begin(range(len(self._schema.tables)))
        self._enter(*claimed, parent_bytes=0)
        return True

    def _claim_after(self, why: StreamLostError) -> tuple[Claim, int] | tuple[()] | None:
        """(rank 0) The next generation, on the newest marker that the log holds, and the step of that; () when not now,
        None when never."""
        assert self._stream is not None
        if time.monotonic() < self._reopen_s:
            return ()
        self._reopen_s = time.monotonic() + _REOPEN_S
        claim = self._stream.claim
        try:
            now = self._log.incarnation()
            if self._tiers is not None or now is None or now.id != claim.incarnation:
                log.error("no marker commits any more, start the job anew: %s", why.headline)
                return None
            newest = self._control.refresh().newest_generation
            if newest != claim.generation:
                raise FencedError(f"generation {newest} has taken over this job", hint="stop this one")
            parent = newest_held(self._log, self._control, claim.generation)
            mine = self._claim(parent, tuple(range(len(self._schema.tables))))
        except (LogUnavailableError, StoreUnavailableError, CommitUnknownError) as error:
            log.warning("no marker commits until the log answers: %s", error.headline)
            return ()
        log.warning(
            "generation %d goes on from marker %s, every table is sent whole: %s", mine.generation, parent, why.headline
        )
        return mine, self._control.lineage.find(parent).step if parent is not None else 0

    def _claim(self, parent: MarkerId | None, swept: tuple[int, ...]) -> Claim:
        """(rank 0) Own the next generation."""
        world, tier = self._team.world, self._tier
        if self._tiers is not None:
            return self._tiers.claim(self._schema, world, parent, swept, self._layout)
        return claim_generation(
            tier.log,
            tier.control,
            tier.dense,
            tier.objects,
            tier.config,
            self._schema,
            world,
            parent,
            swept,
            layout=self._layout,
        )


def _marker_id(marker: MarkerId | str | tuple[int, int] | None) -> MarkerId | None:
    if isinstance(marker, str):
        return MarkerId.parse(marker)
    if isinstance(marker, tuple) and len(marker) == 2 and all(type(number) is int for number in marker):
        return MarkerId(*marker)
    if marker is not None and not isinstance(marker, MarkerId):
        raise ConfigError(f"{marker!r} is not a marker", hint='write it as GENERATION:MARKER, for example "2:17"')
    return marker
