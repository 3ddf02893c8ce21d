"""Write side of a checkpointer: step boundaries, markers, and the generations that they belong to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from torchrec_stream_ckpt.capture.prover import Load, Prover, Replicated, window_width
from torchrec_stream_ckpt.capture.sender import Drain
from torchrec_stream_ckpt.errors import MarkerFailedError, StreamCkptError, UnsupportedError
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.format.control import Claim
from torchrec_stream_ckpt.format.lineage import previous_commit
from torchrec_stream_ckpt.format.proof import Window
from torchrec_stream_ckpt.format.record import Meta
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.ranks.collective import PEERS_S, Groups
from torchrec_stream_ckpt.save.cadence import NOTHING, Cadence, StepVote
from torchrec_stream_ckpt.save.claims import Claims, OuterTier
from torchrec_stream_ckpt.save.event_time import EventTime
from torchrec_stream_ckpt.save.generation import check_same_log
from torchrec_stream_ckpt.save.marker_notes import agreed, note
from torchrec_stream_ckpt.save.pace import Pace
from torchrec_stream_ckpt.save.rank_cut import Drains
from torchrec_stream_ckpt.save.retry_policy import Patience, at_once
from torchrec_stream_ckpt.save.signals import MARK, STOP, Signals
from torchrec_stream_ckpt.save.stop_requests import Stopping
from torchrec_stream_ckpt.save.stream import JOIN_S, Stream, StreamParts, open_stream, say_hello
from torchrec_stream_ckpt.save.telemetry import Telemetry
from torchrec_stream_ckpt.util.config import StreamConfig
from torchrec_stream_ckpt.util.signal_safe import SafeFuture
from torchrec_stream_ckpt.util.types import Committed, MarkerId


class Streaming:
    """Streams one job, from one generation to the next. Runs on the training thread of all ranks.

    Args:
        config: Configuration of the job.
        parts: Objects that each stream uses.
        tiers: Both tiers, if there are two.
        groups: Process groups.
        telemetry: Collects metrics.
        signals: Signals that this rank has received.
    """

    def __init__(
        self,
        config: StreamConfig,
        parts: StreamParts,
        tiers: OuterTier | None,
        groups: Groups,
        telemetry: Telemetry,
        signals: Signals,
    ) -> None:
        self._config = config
        self._parts = parts
        self._attached, self._team = parts.attached, parts.team
        self._tiers = tiers
        self._pace = Pace(config.drain_every, config.max_overhead)
        account = self._pace.account
        self._cadence = Cadence(
            config.marker_every if account is None else None,
            config.marker_every_s,
            groups.step,
            account.steps_to_marker if account is not None else None,
            groups.roll,
            groups.vote_s,
            EventTime(config.marker_every_event_s),
            listens=signals.on,
        )
        self._roll = groups.roll
        self._telemetry = telemetry
        self.stopping = Stopping(signals, groups.team, groups.roll, PEERS_S)
        """Responds to signals."""
        self.events = self._cadence.events
        """Event time that the user has set."""
        self.claims = Claims(parts.tier, tiers, parts.attached, parts.team.world)
        """(rank 0) Claims this job's generations."""
        self._drains = Drains(parts.ring, self._pace, config.sweep_bytes, telemetry.drain, parts.team.rank)
        self.stream: Stream | None = None
        """Open stream of this rank; None until a generation is open."""
        self.steps = 0
        """Number of steps of the job, including those before a restored marker."""
        self._next_marker = 1
        self._proved_up_to = 0
        """Position at which the window of the next marker begins, after that of the restored one."""
        self._last: tuple[int, Future[Committed] | None] = (-1, None)
        """Step and future of the newest marker of this generation."""
        self._ended = False
        """True if the log has lost this generation's stream, and this process cannot open another one."""

    @property
    def _opened(self) -> Stream:
        assert self.stream is not None
        return self.stream

    def check(self) -> None:
        """Refuse to continue if a marker differed from the tables, or kernels were replaced.

        Raises:
            CaptureMismatchError: the oracle has found a difference.
            UnsupportedError: kernels were replaced; the error names the sharded module.
        """
        if self.stream is not None and self.stream.cuts.mismatch is not None:
            raise self.stream.cuts.mismatch
        self.check_kernels()

    def check_kernels(self) -> None:
        """Refuse kernels that have replaced hooked ones."""
        try:
            self._attached.standing.check()
        except UnsupportedError:
            if self.stream is not None:
                self.stream.cuts.give_up("kernels were replaced")
            raise

    # Step boundaries.

    def step(self, began_s: float) -> None:
        """End a training step.

        Args:
            began_s: Begin of the user's call, by ``time.perf_counter()``; :meth:`stepped` ends it.
        """
        self.steps += 1
        self._pace.step(self._attached.capture.frozen.saving_s, began_s)
        vote = self._cadence.decide()
        stream = self._opened
        if not vote.owner:
            raise stream.fenced()
        self._raise_failure(stream, vote)
        self._send_again(stream)
        if not vote.sound and self._go_on_after_loss(stream):
            return
        if not vote.holding:
            stream.cuts.give_up("another rank gave it up")
        if vote.ready:
            self._cut(stream, deadline_s=None, asked=not vote.calm)
        else:
            with self._pace.going_on() if stream.cuts.open else nullcontext():
                stream.cuts.go_on()
        if not vote.staying:
            self._stop(stream)
        elif not (vote.ready or stream.cuts.open):
            self._drains.drain(
                self._attached.capture, stream.cuts.ids, stream.publisher, Drain(self.steps, self._next_marker)
            )
        self._vote(stream)

    def stepped(self) -> None:
        """Record that the user's call ends, so that its total time is known."""
        self._pace.stepped()

    def _stop(self, stream: Stream) -> None:
        """(all ranks) Respond to a signal on any rank that requests a marker here and the end of the job."""
        step, future = self._last
        with self._pace.waiting():
            there = future if step == self.steps else None
            self.stopping.stop(stream, self.steps, there, lambda deadline_s: self._cut(stream, deadline_s))

    def _raise_failure(self, stream: Stream, vote: StepVote) -> None:
        """Raise on all ranks if the last marker has settled on all ranks and has failed.

        This applies with ``on_stream_failure="raise"``, and in any case if the first marker finds that replicas
        differ."""
        failure, raises = stream.coordinator.failure, self._config.on_stream_failure == "raise"
        # Without a vote a rank may know more than the others.
        if (raises or stream.coordinator.refused) and vote is not NOTHING and vote.settled and failure:
            stream.coordinator.failure = None
            raise failure

    def _vote(self, stream: Stream) -> None:
        """Start a vote with this rank's state, for the decision at the end of the next step."""
        sound = self._ended or stream.sound
        vote = stream.vote(swept=self._attached.capture.swept, sound=sound)
        self.stopping.boundary(stream)
        signals = self.stopping.signals
        vote = replace(
            vote,
            ready=vote.ready and not self._parts.announcer.is_behind,
            calm=not signals.pending(MARK),
            staying=not signals.pending(STOP),
        )
        self._cadence.start(self.steps, vote)

    def mark(self, said: Meta | StreamCkptError = ()) -> Future[Committed]:
        """Cut a marker at this step boundary, unless the boundary already has one.

        Waits first until the marker in flight has settled. One gather then tells all ranks what each of them says of
        the marker, and whether the boundary has one.

        Args:
            said: Metadata from the user, or the error of this rank that all ranks must raise. If this boundary has a
                marker, and no row has changed since, the metadata is added to that marker.
        """
        stream = self._opened
        said = self._wait_for_last(stream, said)
        there, whole = self._marker_here(said)
        votes = self._team.gather((said, there, whole))
        meta = agreed([each for each, *_ in votes])
        deadline_s = time.monotonic() + self._config.commit_timeout_s
        self._roll.bound(self._config.commit_timeout_s + PEERS_S)
        if stream.coordinator.lost is not None and not self._ended:
            self._go_on_after_loss(stream)
        elif there is not None and all(other == there and (meta or unchanged) for _, other, unchanged in votes):
            return self._annotate(there, meta, self._config.commit_timeout_s)
        return self._cut(self._opened, deadline_s=max(deadline_s, time.monotonic() + 1.0), meta=meta)

    def _wait_for_last(self, stream: Stream, said: Meta | StreamCkptError) -> Meta | StreamCkptError:
        """Wait until the marker in flight has settled. Returns ``said``, or the error that replaces it."""
        refused = isinstance(said, StreamCkptError)
        deadline_s = time.monotonic() + self._config.commit_timeout_s
        self._roll.bound(self._config.commit_timeout_s + PEERS_S)
        with self._pace.waiting():
            if refused:  # its time may be over already, which must not end the open cut
                stream.cuts.go_on()
            else:
                stream.cuts.complete(deadline_s)
            # The marker in flight was cut before this call, so it settles within its own bound.
            if not refused and not stream.coordinator.settle(deadline_s + PEERS_S - time.monotonic()):
                return MarkerFailedError(
                    "the marker in flight was neither committed nor given up within its bound",
                    hint="look for the reason in this rank's output, and restart the job if no marker commits",
                )
        fenced = stream.coordinator.fenced
        return said if refused or fenced is None else fenced

    def _marker_here(self, said: Meta | StreamCkptError) -> tuple[Committed | None, bool]:
        """Return the committed marker of this boundary if this rank has changed no rows since, otherwise None.

        Also returns whether nothing else in a marker has changed. With an oracle something always has, because a new
        marker compares. Not looked at if this rank has metadata: then all ranks annotate the marker.
        """
        step, future = self._last
        done = step == self.steps and future is not None and future.done() and future.exception() is None
        if future is None or not done or isinstance(said, StreamCkptError) or self._attached.capture.changed():
            return None, False
        return future.result(), not said and not self._more_has_changed()

    def _more_has_changed(self) -> bool:
        try:
            return self._attached.oracle is not None or self._parts.dense.has_changed()
        except Exception:  # an error of a user's Stateful: the cut reports it on all ranks
            return True

    def _annotate(self, there: Committed, meta: Meta, timeout_s: float) -> Future[Committed]:
        """(all ranks) Add metadata, if any, to a committed marker; the same outcome on every rank."""
        future: Future[Committed] = SafeFuture()
        try:
            if meta:
                self._team.on_rank0(partial(self._note, there.id, meta, timeout_s))
        except StreamCkptError as error:
            future.set_exception(error)
        else:
            future.set_result(there)
        return future

    def _note(self, marker: MarkerId, meta: Meta, timeout_s: float) -> None:
        """(rank 0) Write metadata for a committed marker, and report it to the user's callback."""
        tier = self._parts.tier
        note(tier, self._opened.claim.job, marker, meta, timeout_s)
        lineage = tier.control.lineage
        before = previous_commit(lineage, marker)
        self._parts.announcer.noted(lineage.commits[marker], before, lineage.meta(marker))

    def _cut(
        self, stream: Stream, deadline_s: float | None, meta: Meta = (), *, asked: bool = False
    ) -> Future[Committed]:
        """Cut a marker at this step boundary; ``asked`` is true if a signal requested it."""
        seen = self.stopping.signals.seen()
        self._attached.standing.check_all()
        self._send_again(stream)
        self._cadence.cut()
        marker, self._next_marker = self._next_marker, self._next_marker + 1
        # The cadence did not choose a marker that the user requests.
        with self._telemetry.cut.running(), self._pace.cutting() if deadline_s is None else self._pace.waiting():
            future = stream.cuts.begin(
                self.steps, marker, deadline_s, self._finish_sweep, meta, self.events.watermark_s
            )
        self._last = self.steps, future
        self.stopping.cut(seen, stream.generation.marker(marker), self.steps, future, asked=asked)
        self._telemetry.follow(stream.generation.marker(marker), self.steps, future)
        return future

    def _send_again(self, stream: Stream) -> None:
        """Mark the rows named in verdicts on markers of this generation."""
        if rows := stream.coordinator.take_again():
            self._attached.capture.mark_ranges(rows)

    def _finish_sweep(self, drain: Drain) -> bool:
        while not self._attached.capture.swept:
            if not self._attached.capture.sweep(drain, self._config.ring_bytes):
                return False
        return True

    # Generations.

    def check_restored(self) -> None:
        """(all ranks) Refuse a run that forgot ``restore()``."""
        self._team.on_rank0(self.claims.check_restored)

    def check_root(self, *, warm: bool = False) -> None:
        """(all ranks) Refuse a log of other tables: a generation without a marker cannot begin there.

        Args:
            warm: Same as in ``Claims.check_schema``.
        """
        self._team.on_rank0(lambda: self.claims.check_schema(warm=warm))

    def open_root(self, step: int = 0, changes: ClaimChanges | None = None) -> None:
        """Open a generation that is based on no marker; every table is sent completely.

        Args:
            step: Number of steps already made, in the job that it began from.
            changes: Origin of its first rows; None if they are as the model has initialized them.
        """
        self.check_root(warm=changes is not None)
        self.steps = step
        tables = self._attached.tables
        self._attached.begin(tables)
        self._open(None, tables, parent_bytes=0, changes=changes)

    def go_on_from(
        self,
        parent: MarkerId,
        step: int,
        swept: Sequence[int],
        parent_bytes: int,
        proved_up_to: int,
        patience: Patience = at_once,
        changes: ClaimChanges | None = None,
    ) -> None:
        """Open a generation that is based on a restored marker.

        Args:
            parent: The marker.
            step: Step of the marker.
            swept: Indices of tables that are sent completely.
            parent_bytes: Bytes that a restore of the parent reads on this rank.
            proved_up_to: Position at which the window of its newest proof ends.
            patience: Retry policy for the claim.
            changes: Differences of the model from that of the marker. None if the model is unchanged.
        """
        self._proved_up_to = proved_up_to
        self.steps = step
        self._next_marker = parent.marker + 1
        self._open(parent, swept, parent_bytes, patience, changes)

    def go_on_with(self, parent: MarkerId, swept: Sequence[int]) -> None:
        """Open a generation based on a marker of the previous one, after other kernels have taken over the tables."""
        self._attached.begin(swept)
        self._open(parent, swept, parent_bytes=None)

    def _open(
        self,
        parent: MarkerId | None,
        swept: Sequence[int],
        parent_bytes: int | None,
        patience: Patience = at_once,
        changes: ClaimChanges | None = None,
    ) -> None:
        """Claim the next generation, and start this rank's stream in it.

        Args:
            parent: The marker that it is based on.
            swept: Indices of tables that are sent completely.
            parent_bytes: Same as in ``go_on_from``; None for the bytes that this process has sent.
            patience, changes: Same as in ``go_on_from``.
        """
        claim = patience(lambda: self._team.on_rank0(lambda: self.claims.claim(parent, swept, changes)))
        self._enter(claim, self.steps, parent_bytes)

    def _enter(self, claim: Claim, parent_step: int, parent_bytes: int | None) -> None:
        """Start this rank's stream in a claimed generation."""
        parts, tier = self._parts, self._parts.tier
        self._last = (-1, None)
        self._team.together(lambda: check_same_log(tier.log, tier.dense, tier.config, claim, self._team.rank))
        prover = partial(self._open_prover, claim.schema)
        stream = self.stream = open_stream(parts, claim, self._config.commit_timeout_s, prover)
        say_hello(parts, stream, self.steps)
        if self._tiers is not None:
            self._team.on_rank0(self._tiers.start_relay)
        strays = stream.generation.strays
        self._telemetry.opened(claim.generation, stream.publisher, strays, claim.parent, parent_step, parent_bytes)
        self._cadence.open()
        self._vote(stream)

    def _open_prover(self, schema: Schema) -> Prover | None:
        """Open the prover of a generation at the end of the last proof; returns None if markers have no proof."""
        kernels = self._attached.kernels
        replicated: Replicated = dict
        if self._team.rank == 0:
            replicated = self._attached.replicated().tensors
        load = Load.of(kernels, replicated())
        said = self._team.gather((self._config.proof_bytes, load))
        proof_bytes, position = said[0][0], self._proved_up_to
        if self.stream is not None and self.stream.prover is not None:
            position = self.stream.prover.window.position
        if not proof_bytes:
            return None
        width = window_width([each for _, each in said], proof_bytes)
        return Prover(kernels, schema, replicated, Window(position, width))

    def _go_on_after_loss(self, stream: Stream) -> bool:
        """Open another generation after the log has lost acknowledged frames.

        No later marker of the current generation could be restored. The new one sends every table completely. Frames
        that were not acknowledged, and a marker in flight, are given up.

        Returns:
            Whether the new generation is open; until it is, markers fail.
        """
        coordinator = stream.coordinator
        said = self._team.gather(stream.publisher.lost or coordinator.lost)
        why = next((error for error in said if error is not None), None)
        assert why is not None
        stream.cuts.give_up(why.headline)
        stream.publisher.discard(why, JOIN_S)
        coordinator.settle()
        if coordinator.fenced is not None:
            raise coordinator.fenced
        claimed = self._team.on_rank0(lambda: self.claims.claim_after_loss(stream.claim, why))
        self._ended = claimed is None
        if not claimed:
            return False
        coordinator.close(0.0)
        self._cadence.close(JOIN_S)
        self._attached.begin(self._attached.tables)
        self._enter(*claimed, parent_bytes=0)
        return True

    def close(self, timeout_s: float) -> None:
        """Close this rank's stream, if there is one."""
        if self.stream is not None:
            self.stream.close(timeout_s, self._cadence.close)

    def end(self) -> None:
        """End the votes."""
        self._cadence.end()
