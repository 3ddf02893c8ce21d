"""What users hold: one object that streams a TorchRec job and restores it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from torchrec_stream_ckpt.capture.attached_model import Attached
from torchrec_stream_ckpt.capture.staging import allocate
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.dense.rank_agreement import PER_RANK, check_handed_over, check_settings, meet
from torchrec_stream_ckpt.dense.stateful_objects import Stateful
from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError
from torchrec_stream_ckpt.evolve.changes import Changes
from torchrec_stream_ckpt.evolve.model_schema import ModelSchema
from torchrec_stream_ckpt.extras.tiers.job import Tiered
from torchrec_stream_ckpt.find.job import open_tier
from torchrec_stream_ckpt.format.ring import FrameRing
from torchrec_stream_ckpt.job.startup import Restoring
from torchrec_stream_ckpt.loaders.tracked_loader import TrackedLoader
from torchrec_stream_ckpt.ranks.collective import PEERS_S, Groups
from torchrec_stream_ckpt.ranks.exclusive_calls import Calls, collective
from torchrec_stream_ckpt.restore.finder import chosen
from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.restore.session import RestoreParts, Session
from torchrec_stream_ckpt.save.commit_callbacks import Announcer
from torchrec_stream_ckpt.save.generation_end import Ending, LastWord
from torchrec_stream_ckpt.save.marker_notes import agreed
from torchrec_stream_ckpt.save.metrics_export import Showing
from torchrec_stream_ckpt.save.signals import Signals
from torchrec_stream_ckpt.save.stream import JOIN_S, StreamParts
from torchrec_stream_ckpt.save.streaming import Streaming
from torchrec_stream_ckpt.save.telemetry import Telemetry
from torchrec_stream_ckpt.util.config import Source, StreamConfig, Takeover
from torchrec_stream_ckpt.util.stats import Stats
from torchrec_stream_ckpt.util.types import Committed, MarkerId, MarkerReport, Restored

log = logging.getLogger(__name__)


class StreamCheckpointer:
    """Streams the changed rows of a TorchRec job and commits markers; restores any of them.

    Every method is collective: all ranks call it at the same step boundary, on the training thread. A call inside of
    another one, by a signal handler or on another thread, is refused and changes nothing.

    Args:
        dmp: The sharded model: a ``DistributedModelParallel``, or what ``shard_modules`` of TorchRec returns.
        optimizer: What the job steps: a torch optimizer, ``KeyedOptimizerWrapper`` or ``CombinedOptimizer``;
            None when all parameters are fused.
        config: Where to stream, and how often.
        stateful: Objects with ``state_dict()`` and ``load_state_dict()`` whose state is the same on all ranks; markers
            compare it. A loader that counts samples (in a ``TrackedLoader`` for pipelines), a schedule.
        stateful_per_rank: Objects with a state of their own on every rank: they restore on as many ranks only.
        stateful_rank0: Objects whose state on rank 0 counts, and serves all ranks: a run's id, a tracker of metrics.
        paranoid: At every marker, compare the state that the stream implies with the live tables, bit by bit, and
            fail at the first difference (``CaptureMismatchError``). Costs a second copy of this rank's tables and
            optimizer rows in host memory and, at each marker, one pass over both and a collective on the training
            thread: for tests, and for a day of a new job. See docs/guarantees.md.
        on_commit: (rank 0's counts) Called with each marker once it is committed, and again once something was added
            to what is said of it, in their order, on a thread of its own. What it raises is logged. While it has 64
            markers to hear of, none is cut.

    Raises:
        UnsupportedError: the model holds something that cannot be captured exactly; names it.
        ConfigError: the configuration is wrong.
        LogUnavailableError: the log does not answer.
        StoreUnavailableError: the store does not answer, or does not accept our login.
    """

    def __init__(
        self,
        dmp: nn.Module,
        optimizer: torch.optim.Optimizer | None = None,
        *,
        config: StreamConfig,
        stateful: Mapping[str, Stateful] | None = None,
        stateful_per_rank: Mapping[str, Stateful] | None = None,
        stateful_rank0: Mapping[str, Stateful] | None = None,
        paranoid: bool = False,
        on_commit: Callable[[MarkerReport], object] | None = None,
    ) -> None:
        if not dist.is_initialized():
            raise ConfigError("torch.distributed is not initialized", hint="init_process_group() comes first")
        self._config = config.inner
        signals = Signals(config.on_signal, config.signal_s)
        signals.check()
        meet(dmp, optimizer, config.commit_timeout_s + PEERS_S)
        with ExitStack() as undo:
            self._groups = groups = Groups(config.commit_timeout_s)
            undo.callback(self._end_groups)
            self._calls = Calls(groups.roll)
            self._team = groups.team
            check_settings(self._team, {**config.of_all_ranks(), "paranoid": paranoid})
            self._attached = Attached(dmp, optimizer, self._team, paranoid=paranoid)
            shared, per_rank, rank0 = stateful or {}, stateful_per_rank or {}, stateful_rank0 or {}
            live = partial(LiveDense, dmp, optimizer, shared, per_rank, self._attached.kernels, rank0)
            self._dense = self._team.together(lambda: DenseState(live(config.replicas == "rank0"), groups.dense))
            check_handed_over(self._team, {"stateful": shared, "stateful_rank0": rank0, PER_RANK: per_rank})
            self._loaders = [item for item in self._dense.live.handed_over if isinstance(item, TrackedLoader)]
            # What this job writes to: its only log, or the inner one of two tiers.
            how = {"signs": self._team.rank == 0, "spare": config.outer is None}
            self._tier = self._team.together(lambda: open_tier(self._config, **how))
            undo.callback(self._tier.close)
            self._team.on_rank0(self._tier.preflight)  # a log that cannot be reached is said now, not at a marker
            self._tiers = Tiered.open(config, self._tier, self._team)
            if self._tiers is not None:
                undo.callback(self._tiers.close, JOIN_S)
            self._job = self._tiers.logs if self._tiers is not None else self._tier
            restored = RestoreParts(self._config, self._team, self._tier, self._tiers, self._dense, self._attached)
            self._session = Session(restored)
            self._attached.hook(self._reshard)
            undo.callback(self._attached.unhook)
            self._dense.live.watch()
            self._telemetry = Telemetry(self._team.rank, config.restore_bytes_per_s)
            device = self._attached.device
            self._ring = FrameRing(
                config.ring_bytes, config.marker_budget_bytes, lambda num_bytes: allocate(device, num_bytes)
            )
            self._announcer = Announcer(on_commit if self._team.rank == 0 else None)
            undo.callback(self._announcer.close, 0.0)
            parts = StreamParts(
                self._attached, self._tier, self._dense, self._ring, self._team, groups.commit_team, self._announcer
            )
            self._streaming = Streaming(self._config, parts, self._tiers, groups, self._telemetry, signals)
            self._restoring = Restoring(restored, self._session, self._streaming)
            self._ending = Ending(groups.roll.store, self._team.rank, self._team.world)
            self._handled = sys.exception()
            """What was in flight here: of no meaning to the job's end."""
            self._closed = False
            self._showing = Showing(config, self._team, self.stats, self._telemetry)
            self._signals = signals
            signals.install()
            undo.pop_all()

    def __enter__(self) -> StreamCheckpointer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception:
            if error is None:
                raise
            log.exception("the StreamCheckpointer was not closed")  # and the user's own error goes on

    @property
    def steps(self) -> int:
        """Steps of the job so far, those before a restored marker counted."""
        return self._streaming.steps

    @property
    def should_stop(self) -> bool:
        """True if SIGTERM has come to a rank (``StreamConfig.on_signal``), and its marker was waited for. Local.

        It becomes true on all ranks in the same ``step()``. Leave the loop then, and ``close()``.
        """
        return bool(self._streaming.stopping.by)

    @property
    def generation(self) -> int | None:
        """This job's own generation; None before ``restore()``, ``step()`` or ``mark()`` has opened it."""
        stream = self._streaming.stream
        return stream.claim.generation if stream is not None else None

    def stats(self) -> Stats:
        """Where this rank stands: what it has sent, what would be lost now, how long it took. Local, on any thread."""
        streaming = self._streaming
        prover = streaming.stream.prover if streaming.stream is not None else None
        return self._telemetry.stats(streaming.steps, self._attached.capture, self._ring, prover)

    @collective("restore()")
    def restore(
        self,
        marker: MarkerId | str | tuple[int, int] | None = None,
        *,
        changes: Changes | None = None,
        best: str | None = None,
        once: bool = False,
        accept_unproved: bool = False,
    ) -> Restored | None:
        """Bring back a marker, in place, on any number of ranks and any plan.

        Args:
            marker: Which one, as ``"GENERATION:MARKER"``; None or ``"latest"``: the newest that is whole. What was
                passed over, because it is proved to be damaged, stands in ``Restored.skipped``.
            changes: In what this model differs from the marker's: all of it, or the restore is refused and says what is
                missing. A marker of a model that has these changes already, made last, is restored as it is.
            best: In place of ``marker``: ``"auc:max"`` or ``"loss:min"``, the best by what ``mark(meta=...)`` said; of
                equal ones the newest. If it is damaged, it is refused as one that is named.
            once: (with ``marker`` and ``changes``) Go on from the newest marker, if it came from ``marker`` by these
                very changes: for a command that is given again.
            accept_unproved: Go on with rows that are not as a marker proved them, and send them again.

        Returns:
            What was restored; None when nothing was ever committed, or ``StreamConfig.fresh`` is set.

        Raises:
            MarkerNotFoundError: ``marker`` is not committed; or no marker is, and changes are declared,
                or an import or a warm start has begun in this log.
            SchemaMismatchError: tables or dense state differ from the model's in what was not declared; names all of
                it, and the ``Changes`` that accept it.
            ChangesError: ``changes`` declares what is not so; names all of it.
            UnsupportedError: a change that was declared cannot be made exactly; names the table.
            ColumnResplitError: see ``StreamConfig.on_column_resplit``.
            CorruptionError: bytes that the marker needs are damaged or missing; says where. Without ``marker``: of the
                newest marker, and ``StreamConfig.max_fallback`` older ones are damaged, too.
            ConfigError: ``StreamConfig.fresh`` is set and a marker is named or changes are declared.
            TrimmedError: they were trimmed on purpose; says which store holds them.
            ProofMismatchError: (without ``accept_unproved``) rows are not as they were in the tables at a cut; names
                them. No older marker is tried: it may have lost the same.
        """
        self._check_open(restoring=True)
        wanted = chosen(self._team, self._job, marker, best)
        return self._restoring.restore(wanted, changes, once=once, accept_unproved=accept_unproved)

    @collective("warm_start()")
    def warm_start(
        self, source: Source | str, *, changes: Changes | None = None, accept_unproved: bool = False
    ) -> Restored:
        """Begin in a marker of another job, with all that it holds, on any number of ranks and any plan.

        Instead of ``restore()``. The other job's log and store are only read. This job's first generation stands on
        nothing and its first marker holds every table; its CLAIM names the other job's marker. Once this job has a
        marker of its own it goes on from its newest one, as ``restore()`` does, and does not look at the source: the
        call may stay in a script that is started again.

        Args:
            source: The other job's marker; a string as ``URI`` or ``URI@GENERATION:MARKER``.
            changes: In what this model differs from that of the marker, as of :meth:`restore`.
            accept_unproved: As of :meth:`restore`.

        Returns:
            What was restored; ``origin`` names the source, one log or two, when it is a marker of the other job.

        Raises:
            ConfigError: the source is this job's own log; or this job has markers, and did not begin in that source.
            MarkerNotFoundError: the source has no such marker, or none at all.
            StreamCkptError: as :meth:`restore` of the other job's marker.
        """
        self._check_open()
        there = source if isinstance(source, Source) else Source.of(source)
        return self._restoring.warm_start(there, changes, accept_unproved=accept_unproved)

    @collective("standby()")
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
            JobFinishedError: the trainer has said that the job is finished.
            FencedError: another trainer, or spare, was first.
            ColumnResplitError: this plan splits columns of a row-wise optimizer otherwise; a spare merges nothing.
        """
        self._check_open()
        with self._signals.aside():
            return self._restoring.standby(takeover or Takeover(), accept_unproved=accept_unproved)

    @collective("plan()")
    def plan(
        self,
        marker: MarkerId | str | tuple[int, int] | None = None,
        *,
        changes: Changes | None = None,
        best: str | None = None,
    ) -> RestorePlan | None:
        """Plan what a ``restore()`` with these arguments would read and write on this rank; prints with ``describe()``.

        Writes nothing.
        """
        self._check_not_closed()
        return self._session.plan(chosen(self._team, self._job, marker, best), changes)

    def schema(self) -> ModelSchema:
        """Return what this model holds: tables, dense parameters and optimizers, and the names of the stateful objects.

        Local. ``schema().save(path)`` writes it for plans without the model.
        """
        return self._session.schema()

    def step(self, batches: int = 1, *, event_s: float | None = None) -> None:
        """A training step is done: forward, backward and optimizer. Drains and cuts markers by cadence.

        Never waits for the log. A marker that does not fit the ring is sent over the next steps.

        Args:
            batches: How many batches it trained: more with gradient accumulation, 0 for none of the loader. Each
                ``TrackedLoader`` among the stateful objects is told; of no meaning without one.
            event_s: Unix time up to which this rank has trained all of its events: a watermark, which never goes back.
                The least of all ranks is in the marker's metadata as ``event_s``; see
                ``StreamConfig.marker_every_event_s``.

        Raises:
            ConfigError: a ``TrackedLoader`` has fewer batches in flight; ``event_s`` is no time, or is missing.
            FencedError: another trainer has taken over the job; raised by all ranks at the same step.
            MarkerFailedError, CommitUnknownError: (``on_stream_failure="raise"``) why the last marker failed; raised by
                all ranks at the same step.
            CaptureMismatchError: (``paranoid``) the stream does not say what the tables hold; raised by all ranks at
                the same step, and by every call from then on.
        """
        began_s = time.perf_counter()
        self._step(batches, event_s, began_s)
        self._streaming.stepped()  # which counts all of this call for max_overhead

    @collective("step()")
    def _step(self, batches: int, event_s: float | None, began_s: float) -> None:
        self._ensure_stream()
        self._streaming.events.reach(event_s)
        with self._telemetry.blocked.running():
            for loader in self._loaders:
                loader.trained(batches)
            self._streaming.step(began_s)

    @collective("mark()")
    def mark(self, meta: Mapping[str, str | int | float] | None = None, *, pin: str | None = None) -> Future[Committed]:
        """Start a marker at this step boundary; if it has a committed one that holds all as it is now, return that.

        Rows, dense state, random state and stateful objects are compared. With FSDP2, managed collision or ``paranoid``
        they are not, and each call starts a marker. Waits for a marker in flight, for the rest of the sweep when it is
        the job's first one, and until all that changed is in the ring; a marker that the cadence cuts waits for none of
        these.

        Args:
            meta: What you want to know of it later: ``{"auc": 0.801, "run": "a"}``. Text and finite numbers, at most
                4 KiB of JSON. Rank 0's counts; other ranks give the same, or none. If this boundary has a committed
                marker, and no row has changed since, no second one is cut: that one gets it.
            pin: Why ``stream-ckpt gc`` is to keep this marker until ``stream-ckpt unpin``; None: it is not pinned.

        Returns:
            A future that resolves on every rank once the marker is committed with all of this, or fails with the
            reason.

        Raises:
            ConfigError: ``meta`` or ``pin`` is nothing that a marker can hold, or differs by rank; on all ranks.
            RankLostError: not all ranks have come to this call.
            FencedError, CaptureMismatchError: as in ``step()``.
        """
        self._check_open()
        room = partial(self._announcer.make_room, self._config.commit_timeout_s)
        meta_of_all = agreed(self._team, meta, pin, room)
        self._ensure_stream()
        return self._streaming.mark(meta_of_all)

    def mark_all(self) -> None:
        """Send all rows again: tables were written past torch, by ``.data``, NumPy, a raw pointer or a collective.

        To be called after the write, before the next ``step()`` or ``mark()``. Writes in place by torch, and loading by
        ``load_state_dict``, are seen without this call. A marker whose rows have not all been sent is given up: their
        values are gone.
        """
        self._attached.capture.outside.mark_all()

    def close(self, timeout_s: float = 60.0, *, outcome: str | None = None) -> None:
        """Remove the hooks, wait for the marker in flight, say how the job has ended, and let go of the log.

        Takes at most ``timeout_s``, and 10 s more for the last word. Rows that changed since the last marker are not
        part of any: call ``mark()`` before if they shall be.

        Args:
            timeout_s: How long the marker in flight and the other ranks are waited for.
            outcome: ``finished``, ``preempted`` or ``failed``: what the log says from then on, until another trainer
                takes the job over. Default: ``failed`` while an exception is in flight (in a ``finally`` or ``except``,
                at the end of a ``with``), otherwise ``finished``. See docs/training_loop.md.

        Raises:
            ConfigError: another call is running, on this thread or on another one, or there is no such outcome; nothing
                is closed.
        """
        if self._closed or self._calls.in_fork:  # a fork has nothing to close: all of it is its parent's
            return
        self._calls.check_none("close()")
        error = sys.exception()
        word = LastWord.of(outcome, error if error is not self._handled else None, self._streaming.stopping.by)
        self._closed = True
        try:
            self._close(timeout_s, word)
        finally:
            self._signals.remove()

    def _close(self, timeout_s: float, word: LastWord) -> None:
        deadline, stopping = time.monotonic() + timeout_s, self._streaming.stopping
        self._showing.close()
        with suppress(UnsupportedError):
            self._streaming.check_kernels()
        self._attached.unhook()
        stopping.close()
        # The marker of a signal was waited for already: what is left of a grace period is for END.
        self._streaming.close(min(timeout_s, JOIN_S) if stopping.by else timeout_s)
        self._groups.roll.close()  # ranks that wait in another call are told
        self._ending.say(self._streaming.stream, self._streaming.steps, word, deadline)
        self._announcer.close(max(0.0, deadline - time.monotonic()))
        if self._tiers is not None:
            self._tiers.close(max(JOIN_S, deadline - time.monotonic()))
        self._tier.close()
        self._end_groups()

    # What stands between a call and the parts that do it.

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConfigError("this StreamCheckpointer is closed")

    def _check_open(self, *, restoring: bool = False) -> None:
        self._check_not_closed()
        self._restoring.check_whole(restoring=restoring)
        self._streaming.check()

    def _ensure_stream(self) -> None:
        self._check_open()
        if self._streaming.stream is None:
            self._streaming.check_restored()
            self._streaming.open_root()

    @collective("reshard()")
    def _reshard(self, reshard: Callable[[], float]) -> float:
        """``dmp.reshard()``: rows move between ranks, in kernels that are built anew."""
        if self._streaming.stream is not None:
            self._check_open()
        return self._restoring.reshard(reshard, self._reshard)

    def _end_groups(self) -> None:
        """End threads and sockets of process groups here, with the last references to them."""
        self._groups.close()
        if hasattr(self, "_dense"):
            self._dense.end()
        if hasattr(self, "_streaming"):
            self._streaming.end()
