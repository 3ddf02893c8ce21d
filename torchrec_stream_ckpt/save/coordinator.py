"""Commit one marker, from its cut to its COMMIT, without blocking the training thread.

Call order of a marker, in the notation of DCP:

1. (each rank, training thread) freeze touched rows, stage the dense state, and put as many rows into the ring as fit;
   all of this is local
2. (all ranks, commit thread) exchange which cut each rank has made, and which dense state it holds; unless all have
   made the same cut of the same state, the marker is given up here. A lazy copy of the dense state ends before that
3. (all ranks, commit thread) DCP saves the staged state over a separate gloo group; each rank digests its files, and
   uploads them if the store is not a directory
4. (each rank, commit thread) wait until the training thread has put the last row and the MARK into the ring (at a later
   step boundary if they did not fit), and until the MARK is durable
5. (all ranks, commit thread) gather the votes
6. (rank 0, outcome thread) write COMMIT to the control partition, whose order decides. The log or the store may block
   this thread, but not the commit thread, which then reports that the outcome is unknown
7. (all ranks, commit thread) rank 0 sends the outcome; futures resolve

A rank that fails anywhere reports it in the next of these collectives. No rank skips one, so no rank waits for another
that has given up.

The module also contains:

- the seal of a cut, by which the commit thread waits until the training thread has put the last row into the ring;
- the check that all ranks have cut at the same step of training, and not only after as many ``step()`` calls;
- the search for rows of this generation that a checker found to differ from the tables, which are sent again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.dense.replica_check import all_same, check_same
from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    FencedError,
    MarkerFailedError,
    RankLostError,
    ReplicaMismatchError,
    StreamCkptError,
    StreamLostError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import DenseFile
from torchrec_stream_ckpt.format.record import PIN, Meta
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.save.event_time import with_event_time
from torchrec_stream_ckpt.save.failed_markers import FailureLog, hint_for, why_not_saved
from torchrec_stream_ckpt.save.generation import Generation
from torchrec_stream_ckpt.save.refusal_notes import note_refused
from torchrec_stream_ckpt.store.api import Objects
from torchrec_stream_ckpt.store.dense import name_files
from torchrec_stream_ckpt.store.pins import pin_before_commit, unpin
from torchrec_stream_ckpt.store.verdicts import new_verdicts
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import dense_name
from torchrec_stream_ckpt.util.signal_safe import SafeEvent, SafeFuture
from torchrec_stream_ckpt.util.types import Committed, RankEnd, RowRange


@dataclass(frozen=True, slots=True)
class Sealed:
    """MARK that was submitted after all rows of its cut."""

    mark_seq: int
    """Sequence number of this rank's MARK."""
    rows: int
    """Row records that this rank has submitted up to the MARK."""
    num_bytes: int
    """Bytes of frames that this rank has submitted up to the MARK."""


class Seal:
    """State of this rank's part of one cut: sealed or given up, whichever is first, and never both. Thread-safe."""

    def __init__(self) -> None:
        self._decided = SafeEvent()
        self._lock = threading.Lock()
        self.sealed: Sealed | None = None
        """The MARK of a sealed cut; None if the cut is given up or not decided."""
        self.reason = ""
        """Reason why the cut was given up; empty if it was not."""

    def close(self, sealed: Sealed) -> bool:
        """Seal the cut, whose MARK is in the ring. Returns False if the cut was given up before."""
        with self._lock:
            if not self._decided.is_set():
                self.sealed = sealed
                self._decided.set()
            return self.sealed is not None

    def fail(self, reason: str) -> bool:
        """Give the cut up unless it is sealed; returns whether it is given up."""
        with self._lock:
            if not self._decided.is_set():
                self.reason = reason
                self._decided.set()
            return self.sealed is None

    def wait(self, timeout_s: float) -> bool:
        """Wait for the decision; returns False if there was none in time."""
        return self._decided.wait(timeout_s)

    @property
    def failed(self) -> bool:
        return self._decided.is_set() and self.sealed is None


def unheard(error: Exception, marker: int, generation: int, rank: int) -> CommitUnknownError:
    """Make the error for a marker whose COMMIT was attempted, but whose outcome did not reach all ranks.

    Args:
        error: The error that prevented the exchange.
        marker, generation: The marker.
        rank: This rank; rank 0 knows that the marker is committed.
    """
    said = error.message if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"
    if rank == 0:
        what = f"the marker is committed, but the other ranks did not receive the result: {said}"
        hint = "run stream-ckpt list to see it; restore() finds it"
    else:
        what = f"a rank was lost while the marker was decided: {said}"
        hint = "run stream-ckpt list to see whether it was committed"
    return CommitUnknownError(what, hint=hint, generation=generation, marker=marker, rank=rank)


def check_in_step(forwards: Sequence[Mapping[str, int]], generation: int, marker: int) -> None:
    """Refuse a cut if some ranks have run a forward more than others: the job never had such a state.

    Each forward of a sharded module needs all ranks, so a rank with more forwards than another one is ahead.

    Args:
        forwards: For each rank, the number of forwards by module path, for sharded modules of which it holds rows.
        generation: Generation of the marker, for the error.
        marker: Number of the marker, for the error.

    Raises:
        MarkerFailedError: the counts differ; the error names the module and two ranks.
    """
    for path in sorted({path for of_rank in forwards for path in of_rank}):
        counts = {rank: of_rank[path] for rank, of_rank in enumerate(forwards) if path in of_rank}
        behind, ahead = min(counts, key=counts.__getitem__), max(counts, key=counts.__getitem__)
        if counts[behind] != counts[ahead]:
            raise MarkerFailedError(
                f"the ranks have cut at different training steps: {path or 'the sharded module'} has had "
                f"{counts[behind]} forwards on rank {behind}, but {counts[ahead]} on rank {ahead}",
                hint="restart the job from its newest marker, and call step() and mark() on all ranks after the same "
                "training steps: a rank has missed a call, or made an extra one",
                generation=generation,
                marker=marker,
            )


class Again:
    """(rank 0, commit thread) Reads verdicts on this generation's markers from the store.

    Args:
        generation: The open generation of this rank.
        objects: Store to which checkers write verdicts.
    """

    def __init__(self, generation: Generation, objects: Objects) -> None:
        self._generation = generation
        self._objects = objects
        self._known: set[str] = set()

    def look(self) -> tuple[RowRange, ...]:
        """Return the rows in new verdicts. Never raises and never waits: no decision depends on a verdict."""
        try:
            return self._look()
        except StreamCkptError as error:
            log.info("verdicts cannot be read now: %s", error.headline)
            return ()

    def _look(self) -> tuple[RowRange, ...]:
        claim, found = self._generation.claim, []
        names = {table.id: table.name for table in claim.schema.tables}
        for name, verdict in new_verdicts(self._objects, claim.job, claim.generation, self._known):
            self._known.add(name)
            commit = self._generation.control.refresh().commits.get(verdict.marker)
            if commit is None or commit.chain != verdict.chain:
                continue  # belongs to another history that shares the job's name
            rows = [RowRange(names[each.table], each.begin, each.end) for each in verdict.rows if each.table in names]
            log.warning("marker %s was found unproved (%s): %s are sent again", verdict.marker, name, _in_words(rows))
            found += rows
        return tuple(found)


def _in_words(rows: list[RowRange]) -> str:
    named = ", ".join(f"{table} rows [{begin}, {end})" for table, begin, end in rows[:8])
    return named + (f" and {len(rows) - 8} more" if len(rows) > 8 else "")


log = logging.getLogger(__name__)

T = TypeVar("T")
PHASES = {1: "cut", 2: "dense state", 3: "votes", 4: "outcome"}
PHASE_S = 5.0
"""Seconds that each phase may take longer than the previous one: the ranks do not begin at the same instant."""
_NO_ANSWER_HINT = "run stream-ckpt list once the log answers again"


def _left_s(deadline: float) -> float:
    """Return the seconds until ``deadline`` on the monotonic clock, or 0.0 if it has passed."""
    return max(0.0, deadline - time.monotonic())


@dataclass(frozen=True, slots=True)
class CutOrder:
    """Work that the training thread of one rank hands over to its commit thread."""

    marker: int
    step: int
    seal: Seal
    """Signals that the MARK is in the ring, or that this rank gives the marker up, with the reason."""
    staged: dict[str, Any] | None = None
    """Copy of the dense state; None only if the marker is given up."""
    meta: Meta = ()
    """Metadata from the user; that of rank 0 counts."""
    event_s: float | None = None
    """Event time up to which this rank has trained; None if the user has not set it."""
    forwards: Mapping[str, int] = field(default_factory=dict)
    """Result of ``Capture.forwards`` at the cut."""


@dataclass(frozen=True, slots=True)
class MarkerVote:
    """Vote of one rank on a marker."""

    marker: int
    step: int
    reason: str
    held: Mapping[str, int] = field(default_factory=dict)
    """For each group of ranks, the checksum of the dense state that they must have in common (``Held.checksums``)."""
    end: RankEnd | None = None
    files: tuple[DenseFile, ...] = ()
    lost: StreamLostError | None = None
    """Set if the log has lost acknowledged frames of this rank's stream, so that no later marker can be restored."""
    event_s: float | None = None
    """Same as in ``CutOrder``."""
    forwards: Mapping[str, int] = field(default_factory=dict)
    """Same as in ``CutOrder``; sent in the first phase."""


class Coordinator:
    """Commits the markers of one generation, one at a time.

    Args:
        generation: The open generation of this rank.
        dense: Dense state to save.
        team: Ranks that exchange votes and outcomes, over a gloo group that only the commit thread uses.
        timeout_s: Seconds that a marker may wait for the log.
        again: (rank 0) Finds rows that must be sent again.
        pins: (rank 0) Store that keeps the pins of markers.
        heard: (rank 0) Called on the outcome thread with each valid COMMIT.
        direct: True to use direct writes for the dense state.
    """

    def __init__(
        self,
        generation: Generation,
        dense: DenseState,
        team: Team,
        timeout_s: float,
        again: Again | None = None,
        pins: Objects | None = None,
        heard: Callable[[Commit], None] | None = None,
        *,
        direct: bool = False,
    ) -> None:
        self._generation = generation
        self._dense = dense
        self._direct = direct
        self._team = team
        self._timeout_s = timeout_s
        # One thread for all markers: starting a thread makes the training thread wait for it, and for the interpreter.
        self._worker = Worker("stream-ckpt-commit", self._leave)
        self._decider = Worker("stream-ckpt-outcome")
        """Runs rank 0's calls to log and store: one that hangs must not keep the outcome from the other ranks."""
        self._deciding: Future[None] | None = None
        self._running: Future[None] | None = None
        self._seal = Seal()
        """Seal of the marker in flight."""
        self._look_again = again
        self._pins = pins
        self._heard = heard
        self._found_again: tuple[RowRange, ...] = ()
        """(rank 0) Rows to send to all ranks with the outcome of the next marker."""
        self._again: list[RowRange] = []
        self._abandoned = SafeEvent()
        self.fenced: FencedError | None = None
        """Set after another trainer has taken over the job."""
        self.lost: StreamLostError | None = None
        """Set, on all ranks by the same marker, after the log has lost frames that this generation is based on."""
        self.failure: StreamCkptError | None = None
        """Error of the last marker; None while it is in flight, or if it was committed."""
        self.compared = False
        """True if a marker of this generation has confirmed that ranks hold the same dense state."""
        self.refused = False
        """True if the last marker failed because replicas differ, and no earlier one found them equal."""
        self._failures = FailureLog()

    def begin(self, cut: CutOrder) -> Future[Committed]:
        """(all ranks, training thread) Commit ``cut`` in the background; the previous one must have settled."""
        assert not self.busy
        self._seal, self.failure, self.refused = cut.seal, None, False
        future: Future[Committed] = SafeFuture()
        future.set_running_or_notify_cancel()
        self._running = self._worker.submit(self._settle, cut, future)
        return future

    def take_again(self) -> list[RowRange]:
        """(training thread) Take the rows that must be sent again; each is returned once."""
        again, self._again = self._again, []
        return again

    @property
    def busy(self) -> bool:
        """True if a marker is in flight on this rank."""
        return self._running is not None and not self._running.done()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait for the marker in flight. Returns whether it has settled."""
        if self._running is not None:
            wait([self._running], timeout_s)
        return not self.busy

    def close(self, timeout_s: float) -> bool:
        """Wait for the marker in flight, then give it up. Returns whether it had settled."""
        settled = self.settle(timeout_s)
        self._seal.fail("the stream was closed")
        self._abandoned.set()
        for worker in (self._worker, self._decider):
            worker.close()
        return settled

    def _leave(self) -> None:
        """(training thread) Give up the cut at interpreter exit: rows that are not in the ring will not be sent."""
        self._seal.fail("the process ends before the next step")

    # The commit thread.

    def _settle(self, cut: CutOrder, future: Future[Committed]) -> None:
        generation = self._generation.claim.generation
        try:
            self._decide_together(cut)
        except Exception as error:  # a peer or its connection died: every error must be reported from this thread
            failure = self._failure(cut, error)
        else:
            unsaid = self._failures.committed()
            if self._team.rank == 0:
                after = f"; {unsaid} more markers before it had failed" if unsaid else ""
                log.info("marker %d:%d committed (step %d)%s", generation, cut.marker, cut.step, after)
            future.set_result(Committed(generation, cut.marker, cut.step))
            if self._look_again is not None:
                self._found_again += self._look_again.look()
            return
        cut.seal.fail("the marker has failed")  # releases rows that are still frozen
        if isinstance(failure, FencedError):
            self.fenced = failure
        if isinstance(failure, StreamLostError):
            self.lost = failure
        self.failure = failure
        differs = isinstance(failure, ReplicaMismatchError)
        self.refused = differs and not self.compared
        if (said := self._failures.failed(failure)) is not None:
            log.warning("marker %d:%d failed: %s", generation, cut.marker, said)
            if differs and self._team.rank == 0:
                self._decider.submit(partial(note_refused, self._generation, failure))
        future.set_exception(failure)

    def _failure(self, cut: CutOrder, error: Exception) -> StreamCkptError:
        """Return the error for the future of a failed marker."""
        if isinstance(error, StreamCkptError) and not isinstance(error, RankLostError):
            return error
        said = error.message if isinstance(error, RankLostError) else f"{type(error).__name__}: {error}"
        return MarkerFailedError(
            f"a rank was lost while the marker was decided: {said}",
            hint="run stream-ckpt list to see whether it was committed",
            generation=self._generation.claim.generation,
            marker=cut.marker,
            rank=self._team.rank,
        )

    def _decide_together(self, cut: CutOrder) -> None:
        """Return after the marker is committed; otherwise raise. The outcome is the same on every rank."""
        deadline = time.monotonic() + self._timeout_s
        reason = cut.seal.reason or self._dense.finish_copy()
        said = MarkerVote(cut.marker, cut.step, reason, self._dense.held.checksums(), forwards=cut.forwards)
        votes = self._agree(cut, 1, said, deadline)
        self._check(votes)
        check_in_step([vote.forwards for vote in votes], self._generation.claim.generation, cut.marker)
        if not all_same([vote.held for vote in votes]):
            check_same(self._agree(cut, 2, self._dense.held, deadline))
        self.compared = True
        failpoint("cut.agreed")
        votes = self._agree(cut, 3, self.prepare(cut, deadline), deadline)
        failpoint("votes.gathered")
        outcome = self._outcome(cut, votes, deadline) if self._team.rank == 0 else ()
        try:
            told = self._agree(cut, 4, outcome, deadline)[0]
        except Exception as error:
            if self._team.rank == 0 and isinstance(outcome, StreamCkptError):
                raise outcome from error
            if self._team.rank != 0 and isinstance(error, MarkerFailedError):
                raise
            raise unheard(error, cut.marker, self._generation.claim.generation, self._team.rank) from error
        if isinstance(told, StreamCkptError):
            raise told
        self._again += told
        self._found_again = ()
        failpoint("commit.told")

    def _agree(self, cut: CutOrder, phase: int, value: T, deadline: float) -> list[T]:
        """Gather the values of all ranks in one phase of a marker; a later phase may wait a little longer."""
        bound_s = _left_s(deadline) + PHASE_S * phase
        return self._team.agree((cut.marker, phase), value, bound_s, f"marker {cut.marker} ({PHASES[phase]})")

    def _outcome(
        self, cut: CutOrder, votes: list[MarkerVote], deadline: float
    ) -> tuple[RowRange, ...] | StreamCkptError:
        """(rank 0) Commit. Returns the rows that all ranks must send again, or the error if it is not committed.

        Ends before the wait of the other ranks times out, even if the log or the store hangs.
        """
        bound_s = _left_s(deadline) + PHASE_S * 3
        ends = time.monotonic() + bound_s
        where = {"generation": self._generation.claim.generation, "marker": cut.marker}
        if self._deciding is not None and not wait([self._deciding], bound_s).done:
            return MarkerFailedError(
                "COMMIT: the log or the store has still not answered for an earlier marker",
                hint=_NO_ANSWER_HINT,
                **where,
            )
        self._deciding = self._decider.submit(self._commit, cut, votes, _left_s(ends))
        if not wait([self._deciding], _left_s(ends)).done:
            return CommitUnknownError(
                f"COMMIT: the log or the store has not answered for {bound_s:.0f} s; the log waits for "
                f"{self._generation.log.waits_for()}",
                hint=_NO_ANSWER_HINT,
                **where,
            )
        try:
            self._deciding.result()
        except StreamCkptError as error:
            return error
        except Exception as failure:  # any error must reach the other ranks
            return StreamCkptError(f"{type(failure).__name__}: {failure}", rank=0)
        return self._found_again  # kept until the other ranks have them

    def prepare(self, cut: CutOrder, deadline: float) -> MarkerVote:
        """Make this rank's part durable; an error becomes the reason in the vote."""
        vote = partial(MarkerVote, cut.marker, cut.step)
        try:
            assert cut.staged is not None
            earlier = self._dense.saving
            if earlier is not None and not wait([earlier], _left_s(deadline)).done:
                raise TimeoutError("an earlier marker's dense state is still being saved, because a rank is missing")
            saving = self._dense.saver.submit(self._save, cut.staged, cut.marker)
            self._dense.saving = saving
            if not wait([saving], _left_s(deadline)).done:
                raise TimeoutError(f"it takes longer than {self._timeout_s:.0f} s, or a rank is missing")
            files = saving.result()
        except Exception as error:  # DCP raises what its storage and peers raise
            return vote(f"dense state was not saved: {why_not_saved(error, self._generation.dense.url)}")
        publisher = self._generation.publisher
        if publisher.lost is not None:
            return vote(publisher.lost.headline, lost=publisher.lost)
        if not cut.seal.wait(_left_s(deadline)):
            why = publisher.failure or "the log is slow, or no step follows"
            cut.seal.fail(f"its rows did not fit into the ring within {self._timeout_s:.0f} s ({why})")
        sealed = cut.seal.sealed
        if sealed is None:
            return vote(cut.seal.reason)
        try:
            failpoint("mark.wait")
            durable = publisher.wait_mark(sealed.mark_seq, _left_s(deadline))
            failpoint("mark.durable")
            self._generation.check_gaps()
        except StreamLostError as error:
            return vote(error.headline, lost=error)
        except Exception as error:  # the publisher has died or is closed
            return vote(f"the stream has ended: {error}")
        if durable is None:
            waited = publisher.failure or "it is slow"
            return vote(f"the log did not acknowledge the rows in {self._timeout_s:.0f} s ({waited})")
        if reason := self._dense.finish_copy():
            return vote(reason)
        end = RankEnd(
            self._team.rank,
            self._generation.partition,
            durable.begin,
            durable.end,
            durable.frames,
            durable.chain,
            sealed.rows,
            sealed.num_bytes,
        )
        return vote("", end=end, files=files, event_s=cut.event_s)

    def _save(self, staged: dict[str, Any], number: int) -> tuple[DenseFile, ...]:
        """Save the dense state together with the other ranks. Returns the files that this rank wrote, now durable."""
        store, job, marker = self._generation.dense, self._generation.claim.job, self._generation.marker(number)
        folder = store.writing(job, marker)
        try:
            failpoint("dense.save")
            files = self._dense.save(staged, folder, marker, direct=self._direct)
            failpoint("dense.saved")
            store.publish(job, marker, files)
        finally:
            store.settle(job, marker)
        return files

    def _check(self, votes: list[MarkerVote]) -> None:
        """Raise an error if the votes require the marker to be given up; the same on every rank."""
        generation = self._generation.claim.generation
        if len({(vote.marker, vote.step) for vote in votes}) > 1:
            cuts = "; ".join(
                f"rank {rank}: marker {vote.marker} at step {vote.step}" for rank, vote in enumerate(votes)
            )
            raise MarkerFailedError(
                f"the ranks have cut different markers: {cuts}",
                hint="call step() and mark() on all ranks at the same step; restart the job if a rank skipped one",
                generation=generation,
            )
        for vote in votes:
            if vote.lost is not None:
                raise vote.lost
        reasons = [f"rank {rank}: {vote.reason}" for rank, vote in enumerate(votes) if vote.reason]
        if reasons:
            raise MarkerFailedError(
                "; ".join(reasons), hint=hint_for(reasons), generation=generation, marker=votes[0].marker
            )

    # The outcome thread.

    def _commit(self, cut: CutOrder, votes: list[MarkerVote], timeout_s: float) -> None:
        """(rank 0) Write COMMIT if all ranks voted for it."""
        generation, claim = self._generation, self._generation.claim
        marker = generation.marker(cut.marker)
        try:
            self._check(votes)
            ends = tuple(vote.end for vote in votes if vote.end is not None)
            generation.check_log(cut.marker, ends)
            files, list_ = name_files(
                generation.dense, claim.job, marker, [file for vote in votes for file in vote.files]
            )
        except StreamCkptError:
            generation.dense.discard(claim.job, marker)  # no COMMIT can refer to it any more
            raise
        commit = Commit(
            job=claim.job,
            generation=claim.generation,
            nonce=claim.nonce,
            marker=cut.marker,
            step=cut.step,
            ranks=ends,
            dense=dense_name(claim.job, marker),
            dense_files=files,
            time_s=time.time(),
            store=generation.store_url,
            dense_list=list_,
            meta=with_event_time(cut.meta, [vote.event_s for vote in votes]) or None,
        )
        self._pin(commit)
        try:
            generation.control.commit(commit, timeout_s, self._abandoned)
        except CommitUnknownError:
            raise
        except StreamCkptError:
            self._pin(commit, off=True)
            raise
        if self._heard is not None:  # whether or not the outcome reaches the other ranks
            self._heard(commit)

    def _pin(self, commit: Commit, *, off: bool = False) -> None:
        """(rank 0) Pin a marker before its COMMIT: it must not be visible without its pin. ``off`` removes the pin."""
        if PIN not in dict(commit.meta or ()) or self._pins is None:
            return
        if not off:
            pin_before_commit(self._pins, commit.job, commit.id)
            return
        with contextlib.suppress(StreamCkptError):  # the pin of a marker that does not exist keeps nothing
            unpin(self._pins, commit.job, commit.id)
