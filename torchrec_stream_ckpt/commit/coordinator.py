"""One marker from its cut to its COMMIT, off the training thread.

Call order of a marker, as DCP writes it down:

1. (all ranks, training thread) drain, MARK into the ring, dense state staged: :meth:`Coordinator.begin`
2. (all ranks, commit thread) wait until the MARK is durable and the dense files are written; digest them
3. (all ranks, commit thread) votes are gathered on rank 0, over a gloo group of our own
4. (rank 0, commit thread) COMMIT into the control partition; its order decides
5. (all ranks, commit thread) rank 0 tells the outcome; futures resolve
"""

from __future__ import annotations

import logging
import shutil
import threading
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchrec_stream_ckpt.commit.control import Control
from torchrec_stream_ckpt.commit.dense import written_by
from torchrec_stream_ckpt.errors import FencedError, MarkerFailedError, StreamCkptError
from torchrec_stream_ckpt.format.control import Claim, Commit, DenseFile
from torchrec_stream_ckpt.format.dense import digest_files
from torchrec_stream_ckpt.layout import dense_name
from torchrec_stream_ckpt.log.api import Log
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.types import Committed, MarkerId, RankEnd

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cut:
    """What the training thread leaves to the commit thread."""

    marker: int
    step: int
    mark_seq: int
    """Seq of this rank's MARK; -1 when the cut did not fit the budget."""
    rows: int
    num_bytes: int
    dense: Future[Any]
    reason: str = ""
    """Why this rank gives the marker up; empty when it does not."""


@dataclass(frozen=True, slots=True)
class Vote:
    """One rank's part of a marker."""

    end: RankEnd | None
    files: tuple[DenseFile, ...]
    reason: str


class Coordinator:
    """Commits the markers of one generation, one at a time.

    Args:
        log: The job's log.
        control: Its control partition, read up to our CLAIM.
        claim: The generation that this job owns.
        publisher: This rank's stream.
        partition: The data partition of this rank.
        store: Folder of the dense state.
        store_url: What COMMIT says of it, empty for inside the file log.
        group: A gloo group of our own for votes and outcomes.
        timeout_s: How long a marker may wait for the log.
    """

    def __init__(
        self,
        log: Log,
        control: Control,
        claim: Claim,
        publisher: Publisher,
        partition: int,
        store: Path,
        store_url: str,
        group: dist.ProcessGroup,
        timeout_s: float,
    ) -> None:
        self._log = log
        self._control = control
        self._claim = claim
        self._publisher = publisher
        self._partition = partition
        self._store = store
        self._store_url = store_url
        self._group = group
        self._timeout_s = timeout_s
        self._rank = dist.get_rank()
        self._world = dist.get_world_size()
        self._thread: threading.Thread | None = None
        self._abandoned = threading.Event()
        self.fenced: StreamCkptError | None = None
        """Set once another trainer owns the job."""

    def begin(self, cut: Cut) -> Future[Committed]:
        """(all ranks, training thread) Commit ``cut`` in the background; the last one must have settled."""
        assert not self.busy
        future: Future[Committed] = Future()
        future.set_running_or_notify_cancel()
        self._thread = threading.Thread(
            target=self._run, args=(cut, future), name=f"stream-ckpt-commit-{cut.marker}", daemon=True
        )
        self._thread.start()
        return future

    @property
    def busy(self) -> bool:
        """Whether a marker is in flight on this rank."""
        return self._thread is not None and self._thread.is_alive()

    def settle(self, timeout_s: float | None = None) -> bool:
        """Wait for the marker in flight; whether it has settled."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        return not self.busy

    def close(self, timeout_s: float) -> bool:
        """Wait for the marker in flight, then give it up; whether it had settled."""
        settled = self.settle(timeout_s)
        self._abandoned.set()
        return settled

    def _run(self, cut: Cut, future: Future[Committed]) -> None:
        try:
            outcome = self._decide_together(cut)
        except Exception as error:  # a peer died, or its connection did: nothing may leave this thread unsaid
            outcome = MarkerFailedError(
                f"a rank was lost while the marker was decided: {error}",
                hint="stream-ckpt list tells whether it was committed",
                generation=self._claim.generation,
                marker=cut.marker,
                rank=self._rank,
            )
        if outcome is None:
            if self._rank == 0:
                log.info("marker %d:%d committed (step %d)", self._claim.generation, cut.marker, cut.step)
            future.set_result(Committed(self._claim.generation, cut.marker, cut.step))
            return
        log.warning("marker %d:%d failed: %s", self._claim.generation, cut.marker, outcome)
        future.set_exception(outcome)

    def _decide_together(self, cut: Cut) -> StreamCkptError | None:
        vote = self._prepare(cut)
        votes: list[Vote | None] | None = [None] * self._world if self._rank == 0 else None
        dist.gather_object(vote, votes, dst=0, group=self._group)
        outcome: list[StreamCkptError | None] = [None]
        if votes is not None:
            outcome = [self._decide(cut, [vote for vote in votes if vote is not None])]
        dist.broadcast_object_list(outcome, src=0, group=self._group)
        if isinstance(outcome[0], FencedError):
            self.fenced = outcome[0]
        return outcome[0]

    def _prepare(self, cut: Cut) -> Vote:
        """Wait until this rank's part is durable. Every rank comes through here, whatever happened to it."""
        deadline = time.monotonic() + self._timeout_s
        reason = cut.reason
        files: tuple[DenseFile, ...] = ()
        end: RankEnd | None = None
        try:
            cut.dense.result(self._timeout_s)
            folder = self.folder(cut.marker)
            files = digest_files(folder, written_by(folder, self._rank))
        except Exception as error:  # DCP raises what its storage and peers raise
            reason = reason or f"dense state was not saved: {type(error).__name__}: {error}"
        if not reason:
            durable = self._publisher.wait_mark(cut.mark_seq, max(0.0, deadline - time.monotonic()))
            if durable is None:
                waited = self._publisher.failure or "it is slow"
                reason = f"the log did not acknowledge the rows in {self._timeout_s:.0f} s ({waited})"
            else:
                end = RankEnd(
                    self._rank,
                    self._partition,
                    durable.begin,
                    durable.end,
                    durable.frames,
                    durable.chain,
                    cut.rows,
                    cut.num_bytes,
                )
        return Vote(end, files, reason)

    def folder(self, marker: int) -> Path:
        """Where the dense state of a marker of this generation goes."""
        return self._store / dense_name(self._claim.job, MarkerId(self._claim.generation, marker))

    def _decide(self, cut: Cut, votes: list[Vote]) -> StreamCkptError | None:
        """(rank 0) Write COMMIT if all ranks voted for it; None means committed."""
        reasons = [f"rank {rank}: {vote.reason}" for rank, vote in enumerate(votes) if vote.reason]
        claim = self._claim
        if not reasons:
            reasons = self._changed_log()
        if reasons:
            shutil.rmtree(self.folder(cut.marker), ignore_errors=True)  # no COMMIT can name it any more
            return MarkerFailedError("; ".join(reasons), generation=claim.generation, marker=cut.marker)
        commit = Commit(
            job=claim.job,
            generation=claim.generation,
            nonce=claim.nonce,
            marker=cut.marker,
            step=cut.step,
            ranks=tuple(vote.end for vote in votes if vote.end is not None),
            dense=dense_name(claim.job, MarkerId(claim.generation, cut.marker)),
            dense_files=tuple(file for vote in votes for file in vote.files),
            time_s=time.time(),
            store=self._store_url,
        )
        try:
            self._control.commit(commit, self._timeout_s, self._abandoned)
        except StreamCkptError as error:
            return error
        return None

    def _changed_log(self) -> list[str]:
        try:
            now = self._log.incarnation()
        except StreamCkptError as error:
            return [error.headline]
        if now is None or now.id != self._claim.incarnation:
            return ["the log was deleted or made again behind our back: start a new job, or bring it back"]
        return []
