"""The main object for users: stream a TorchRec job, and restore it."""

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
from torchrec_stream_ckpt.extras.tiers.process import RelayProcess
from torchrec_stream_ckpt.find.job import open_tier
from torchrec_stream_ckpt.format.ring import FrameRing
from torchrec_stream_ckpt.job.startup import Restoring
from torchrec_stream_ckpt.loaders.tracked_loader import TrackedLoader
from torchrec_stream_ckpt.ranks.collective import PEERS_S, Groups
from torchrec_stream_ckpt.ranks.exclusive_calls import Calls, collective
from torchrec_stream_ckpt.restore.plan import RestorePlan
from torchrec_stream_ckpt.restore.session import RestoreParts, Session, chosen
from torchrec_stream_ckpt.save.commit_callbacks import Announcer
from torchrec_stream_ckpt.save.generation_end import Ending, LastWord
from torchrec_stream_ckpt.save.marker_notes import agreed, said_here
from torchrec_stream_ckpt.save.metrics_export import Showing
from torchrec_stream_ckpt.save.signals import Signals
from torchrec_stream_ckpt.save.stream import JOIN_S, StreamParts
from torchrec_stream_ckpt.save.streaming import Streaming
from torchrec_stream_ckpt.save.telemetry import Telemetry
from torchrec_stream_ckpt.tiers.job import Tiered
from torchrec_stream_ckpt.util.config import Source, StreamConfig, Takeover
from torchrec_stream_ckpt.util.stats import Stats
from torchrec_stream_ckpt.util.types import Committed, MarkerId, MarkerReport, Restored

log = logging.getLogger(__name__)


class StreamCheckpointer:
    """Streams the changed rows of a TorchRec job and commits markers; restores any of them.

    Every method is collective: all ranks call it at the same step boundary, on the training thread. A call inside
    another one, by a signal handler or on another thread, is refused and changes nothing.

    Args:
        dmp: The sharded model: a ``DistributedModelParallel``, or the result of TorchRec's ``shard_modules``.
        optimizer: The optimizer that the job steps: a torch optimizer, ``KeyedOptimizerWrapper`` or
            ``CombinedOptimizer``; None if all parameters are fused.
        config: Where to stream, and how often.
        stateful: Objects with ``state_dict()`` and ``load_state_dict()`` whose state is the same on all ranks; markers
            compare it. Examples are a loader that counts samples (in a ``TrackedLoader`` for pipelines), or a schedule.
        stateful_per_rank: Objects with a separate state on every rank. They can be restored only on the same number of
            ranks.
        stateful_rank0: Objects of which rank 0's state is saved and used for all ranks: a run's id, a tracker of
            metrics.
        paranoid: At every marker, compare the state that the stream implies with the live tables, bit by bit, and fail
            at the first difference (``CaptureMismatchError``). This costs a second copy of this rank's tables and
            optimizer rows in host memory and, at each marker, one pass over both and a collective on the training
            thread. Use it for tests, and for a day of a new job. See docs/guarantees.md.
        on_commit: (only rank 0's is used) Called with each marker once it is committed, and again after something was
            added to its metadata, in order, on a separate thread. An exception that it raises is logged. While 64
            markers wait for this call, no marker is cut.

    Raises:
        UnsupportedError: the model holds something that cannot be captured exactly; the error names it.
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
            raise ConfigError("torch.distributed is not initialized", hint="call init_process_group() first")
        if not isinstance(config, StreamConfig):
            raise ConfigError(
                f"config must be a StreamConfig, got {type(config).__name__}",
                hint="pass config=StreamConfig(uri=...); config_from(args) returns None without a URI: then "
                "train without a StreamCheckpointer",
            )
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
            lazy = config.dense_copy == "lazy"
            self._dense = self._team.together(
                lambda: DenseState(live(config.replicas == "rank0"), groups.dense, lazy=lazy)
            )
            check_handed_over(self._team, {"stateful": shared, "stateful_rank0": rank0, PER_RANK: per_rank})
            self._loaders = [item for item in self._dense.live.handed_over if isinstance(item, TrackedLoader)]
            # The log that this job writes to: its only log, or the inner one of two tiers.
            how = {"signs": self._team.rank == 0, "spare": config.outer is None}
            self._tier = self._team.together(lambda: open_tier(self._config, **how))
            undo.callback(self._tier.close)
            self._team.on_rank0(self._tier.preflight)  # report an unreachable log now, not at a marker
            self._tiers = Tiered.open(config, self._tier, self._team, RelayProcess)
            if self._tiers is not None:
                undo.callback(self._tiers.close, JOIN_S)
            self._job = self._tiers.logs if self._tiers is not None else self._tier
            restored = RestoreParts(self._config, self._team, self._job, self._dense, self._attached)
            self._session = Session(restored)
            self._attached.hook(self._reshard)
            undo.callback(self._attached.unhook)
            self._dense.watch()
            self._telemetry = Telemetry(self._team.rank, config.restore_bytes_per_s)
            device = self._attached.device
            self._ring = FrameRing(
                config.ring_bytes,
                config.marker_budget_bytes,
                lambda num_bytes: allocate(device, num_bytes),
                padded=self._config.writes_direct,
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
            """Exception that was already being handled here; it does not affect the job's outcome."""
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
            log.exception("the StreamCheckpointer was not closed")  # the user's own error is raised

    @property
    def steps(self) -> int:
        """Steps of the job so far, including those before a restored marker."""
        return self._streaming.steps

    @property
    def should_stop(self) -> bool:
        """True if a rank has received SIGTERM (``StreamConfig.on_signal``), and the wait for its marker is over. Local.

        It becomes true on all ranks in the same ``step()``. Leave the loop then, and ``close()``.
        """
        return bool(self._streaming.stopping.by)

    @property
    def generation(self) -> int | None:
        """This job's own generation; None before ``restore()``, ``step()`` or ``mark()`` has opened it."""
        stream = self._streaming.stream
        return stream.claim.generation if stream is not None else None

    def stats(self) -> Stats:
        """Return this rank's statistics: rows sent, data that would be lost now, times. Local, on any thread."""
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
        """Restore a marker, in place, on any number of ranks and under any plan.

        Args:
            marker: The marker: ``"GENERATION:MARKER"``, ``"best:auc:max"``, or a name that ``stream-ckpt name`` gave;
                None or ``"latest"``: the newest complete one.
                ``Restored.skipped`` lists markers that were passed over because they are proved to be damaged.
            changes: Differences of this model from the marker's. They must be complete; otherwise the restore is
                refused and names the missing ones. If the marker's model already has these changes, and they were its
                last ones, it is restored as it is.
            best: In place of ``marker``: ``"auc:max"`` or ``"loss:min"``, the best marker by the metadata of
                ``mark(meta=...)``; of equal ones the newest. If it is damaged, the restore fails, as for a named
                marker.
            once: (with ``marker`` and ``changes``) Continue from the newest marker if it came from ``marker`` by the
                same changes. Use it for a command that may be run again.
            accept_unproved: Continue with rows that differ from a marker's proof, and send them again.

        Returns:
            The restored state; None if nothing was ever committed, or ``StreamConfig.fresh`` is set.

        Raises:
            MarkerNotFoundError: ``marker`` is not committed; or no marker is, and changes are declared, or an import or
                a warm start has begun in this log.
            SchemaMismatchError: tables or dense state differ from the model's, and the difference was not declared; the
                error names all differences, and the ``Changes`` that accept them.
            ChangesError: declarations in ``changes`` are wrong; the error names all of them.
            UnsupportedError: a declared change cannot be made exactly; the error names the table.
            ColumnResplitError: see ``StreamConfig.on_column_resplit``.
            CorruptionError: bytes that the marker needs are damaged or missing; the error names the place. Without
                ``marker``: the newest marker and ``StreamConfig.max_fallback`` older ones are damaged.
            ConfigError: ``StreamConfig.fresh`` is set and a marker is named or changes are declared.
            TrimmedError: the bytes were trimmed on purpose; the error names the store that holds them.
            ProofMismatchError: (without ``accept_unproved``) rows differ from those in the tables at a cut; the
                error names them. No older marker is tried, because it may have lost the same rows.
        """
        self._check_open(restoring=True)
        wanted = chosen(self._team, self._job, marker, best)
        return self._restoring.restore(wanted, changes, once=once, accept_unproved=accept_unproved)

    @collective("warm_start()")
    def warm_start(
        self, source: Source | str, *, changes: Changes | None = None, accept_unproved: bool = False
    ) -> Restored:
        """Start from a marker of another job, with all its state, on any number of ranks and under any plan.

        Call it instead of ``restore()``. The other job's log and store are only read. This job's first generation has
        no parent, and its first marker holds every table; its CLAIM names the other job's marker. Once this job has its
        own marker, it continues from its newest one, as ``restore()`` does, and does not read the source: the call may
        stay in a script that is started again.

        Args:
            source: The other job's marker; a string as ``URI`` or ``URI@GENERATION:MARKER``.
            changes: Differences of this model from the marker's, as in :meth:`restore`.
            accept_unproved: As in :meth:`restore`.

        Returns:
            The restored state; ``origin`` names the source, one log or two, if it is a marker of the other job.

        Raises:
            ConfigError: the source is this job's own log; or this job has markers, and did not start from that source.
            MarkerNotFoundError: the source has no such marker, or none at all.
            StreamCkptError: as :meth:`restore` of the other job's marker.
        """
        self._check_open()
        there = source if isinstance(source, Source) else Source.of(source)
        return self._restoring.warm_start(there, changes, accept_unproved=accept_unproved)

    @collective("standby()")
    def standby(self, takeover: Takeover | None = None, *, accept_unproved: bool = False) -> Restored | None:
        """Wait as a hot spare of this job's trainer, then take over as :meth:`restore` does.

        Call it instead of ``restore()``, on separate ranks. Any number of them is allowed, under any plan with the
        trainer's column split. It loads the newest marker and keeps it up to date in the live tables. When it is time
        for a takeover, it fences the trainer, continues from its last marker, and returns. See docs/follow.md.

        Args:
            takeover: Condition of the takeover; default: 60 s without a sign of life.
            accept_unproved: As in :meth:`restore`.

        Returns:
            The state that was taken over; None if nothing was ever committed.

        Raises:
            JobFinishedError: the trainer has recorded that the job is finished.
            FencedError: another trainer, or spare, was first.
            ColumnResplitError: this plan splits columns of a row-wise optimizer in another way; a spare merges nothing.
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
        """Plan the reads and writes of a ``restore()`` with these arguments on this rank.

        Writes nothing. ``describe()`` renders the plan.
        """
        self._check_not_closed()
        return self._session.plan(chosen(self._team, self._job, marker, best), changes)

    def schema(self) -> ModelSchema:
        """Return this model's schema: tables, dense parameters and optimizers, and the names of the stateful objects.

        Local. ``schema().save(path)`` writes it for plans without the model.
        """
        return self._session.schema()

    def step(self, batches: int = 1, *, event_s: float | None = None) -> None:
        """Record that a training step is done: forward, backward and optimizer.

        Drains and cuts markers at their intervals. Never waits for the log. A marker that does not fit the ring is sent
        over the next steps.

        Args:
            batches: How many batches it trained: more with gradient accumulation, 0 for none of the loader. Each
                ``TrackedLoader`` among the stateful objects receives it; without one it has no effect.
            event_s: Unix time up to which this rank has trained all of its events: a watermark, which must never
                decrease. The minimum of all ranks is in the marker's metadata as ``event_s``; see
                ``StreamConfig.marker_every_event_s``.

        Raises:
            ConfigError: a ``TrackedLoader`` has fewer batches in flight; ``event_s`` is not a valid time, or is
                missing.
            FencedError: another trainer has taken over the job; raised by all ranks at the same step.
            MarkerFailedError, CommitUnknownError: (``on_stream_failure="raise"``) why the last marker failed; raised by
                all ranks at the same step.
            CaptureMismatchError: (``paranoid``) the stream differs from the tables; raised by all ranks at the same
                step, and by every call from then on.
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
        self._dense.live.schedule_watch.step_ended()

    @collective("mark()")
    def mark(self, meta: Mapping[str, str | int | float] | None = None, *, pin: str | None = None) -> Future[Committed]:
        """Start a marker at this step boundary. If a committed marker already holds the current state, return that one.

        Rows, dense state, random state and stateful objects are compared. With FSDP2, managed collision or ``paranoid``
        they are not, and each call starts a marker. The call waits for a marker in flight, for the rest of the sweep if
        it is the job's first marker, and until all changed rows are in the ring. A marker that is cut at its interval
        waits for none of these.

        Args:
            meta: Metadata of the marker: ``{"auc": 0.801, "run": "a"}``. Text and finite numbers, at most 4 KiB of
                JSON. Rank 0's value is used; other ranks pass the same, or none. If this boundary has a committed
                marker, and no row has changed since, no second one is cut: the existing marker gets the metadata.
            pin: Reason why ``stream-ckpt gc`` must keep this marker until ``stream-ckpt unpin``; None: it is not
                pinned.

        Returns:
            A future that resolves on every rank once the marker is committed with all of this, or fails with the
            reason.

        Raises:
            ConfigError: ``meta`` or ``pin`` is not valid for a marker, or differs by rank; on all ranks.
            RankLostError: not all ranks have made this call.
            FencedError, CaptureMismatchError: as in ``step()``.
        """
        self._check_open()
        room = partial(self._announcer.make_room, self._config.commit_timeout_s)
        said = said_here(self._team.rank, meta, pin, room)
        if self._streaming.stream is None:  # a refused marker must not open a generation
            said = agreed(self._team.gather(said))
        self._ensure_stream()
        return self._streaming.mark(said)

    def mark_all(self) -> None:
        """Send all rows again, after tables were written past torch: by ``.data``, NumPy, a raw pointer or a
        collective.

        Call it after the write, before the next ``step()`` or ``mark()``. Writes in place by torch, and loading by
        ``load_state_dict``, are detected without this call. A marker whose rows have not all been sent is given up,
        because their values are gone.
        """
        self._attached.capture.outside.mark_all()

    def close(self, timeout_s: float = 60.0, *, outcome: str | None = None) -> None:
        """Remove the hooks, wait for the marker in flight, record how the job ended, and close the log.

        Takes at most ``timeout_s``, and 10 s more for the END record. Rows that changed since the last marker are not
        part of any marker: to keep them, call ``mark()`` before.

        Args:
            timeout_s: How long to wait for the marker in flight and the other ranks.
            outcome: ``finished``, ``preempted`` or ``failed``: the outcome in the log until another trainer takes the
                job over. Default: ``failed`` while an exception is in flight (in a ``finally`` or ``except``, at the
                end of a ``with``), otherwise ``finished``. See docs/training_loop.md.

        Raises:
            ConfigError: another call is running, on this thread or on another one, or the outcome is unknown; nothing
                is closed.
        """
        if self._closed or self._calls.in_fork:  # a fork has nothing to close: everything belongs to its parent
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
        # The wait for a signal's marker is already over: the rest of a grace period is for END.
        self._streaming.close(min(timeout_s, JOIN_S) if stopping.by else timeout_s)
        self._groups.roll.close()  # ranks that wait in another call are notified
        self._ending.say(self._streaming.stream, self._streaming.steps, word, deadline)
        self._announcer.close(max(0.0, deadline - time.monotonic()))
        if self._tiers is not None:
            self._tiers.close(max(JOIN_S, deadline - time.monotonic()))
        self._tier.close()
        self._end_groups()

    # Internal steps between a public call and the parts that execute it.

    def _check_not_closed(self) -> None:
        if self._closed:
            raise ConfigError(
                "this StreamCheckpointer is closed", hint="make the call before close(), or create another one"
            )

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
        """Run ``dmp.reshard()``: rows move between ranks, and kernels are built again."""
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
