"""Cut this rank's part of a marker on the training thread: freeze it at a step boundary, and send it at the log's pace.

The stream of a rank, read up to a MARK, must contain the values of the tables at the boundary of the cut. So between a
boundary and its MARK only rows of the cut are submitted, with their values at the boundary. Rows that steps touch in
the meantime stay marked for later. No step waits for space. Rows that do not fit are sent at later step boundaries.
Rows that an update is about to overwrite are sent just before the update. If even the marker's budget has no room, the
cut is given up.

Without a marker, a step boundary sends rows of the sweep, and rows that steps have touched.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import astuple, dataclass, replace
from functools import partial
from typing import Any

from torchrec_stream_ckpt.capture.hook import Capture
from torchrec_stream_ckpt.capture.id_stream import IdStream
from torchrec_stream_ckpt.capture.oracle import Difference, Oracle, mismatch
from torchrec_stream_ckpt.capture.prover import Prover, Taken
from torchrec_stream_ckpt.capture.sender import Drain
from torchrec_stream_ckpt.dense.dense_prover import DenseTurns, ProvedEntries
from torchrec_stream_ckpt.dense.dense_state import DenseState
from torchrec_stream_ckpt.dense.replica_check import Scope
from torchrec_stream_ckpt.errors import CaptureMismatchError
from torchrec_stream_ckpt.format.control import Mark, TableScalars
from torchrec_stream_ckpt.format.entry_digests import DenseProof, scalars_digest
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.proof import Window
from torchrec_stream_ckpt.format.record import Meta
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.log.publisher import Publisher
from torchrec_stream_ckpt.ranks.collective import Team
from torchrec_stream_ckpt.save.coordinator import Coordinator, CutOrder, Seal, Sealed
from torchrec_stream_ckpt.save.generation import Generation
from torchrec_stream_ckpt.save.pace import Pace
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.stats import Stopwatch
from torchrec_stream_ckpt.util.types import Committed


class Drains:
    """Sends the rows that fit into the ring, and never waits.

    Args:
        ring: Ring for the frames.
        pace: Decides when a drain is due.
        sweep_bytes: Bytes that the sweep may send at a boundary.
        watch: Stopwatch that times each drain.
        rank: Rank of this process, for messages.
    """

    def __init__(self, ring: FrameRing, pace: Pace, sweep_bytes: int, watch: Stopwatch, rank: int) -> None:
        self._ring = ring
        self._pace = pace
        self._sweep_bytes = sweep_bytes
        self._watch = watch
        self._rank = rank
        self.stranded = False
        """True if a drain has failed on this rank."""

    def drain(self, capture: Capture, ids: IdStream, publisher: Publisher, drain: Drain) -> None:
        """Drain. If that fails only on this rank, training continues, and the next marker reports it on all ranks."""
        try:
            with self._watch.running():
                self._drain(capture, ids, publisher, drain)
        except Exception:  # the publisher has died: rows that were not sent stay marked
            if not self.stranded:
                log.exception("rank %d cannot drain: every marker will fail until the job is restarted", self._rank)
            self.stranded = True

    def _drain(self, capture: Capture, ids: IdStream, publisher: Publisher, drain: Drain) -> None:
        if not ids.evict(drain):
            return  # rows must not overtake it
        if not capture.swept:
            # First, and at every step: the sweep must continue even if steps touch more rows than the ring holds.
            capture.sweep(drain, self._sweep_bytes)
            failpoint("sweep.sent")
        if capture.look(self._pace.drain_due(drain.step, self._ring.used_bytes / self._ring.ring_bytes)):
            self._drain_touched(capture, publisher, drain)
            failpoint("drain.sent")

    def _drain_touched(self, capture: Capture, publisher: Publisher, drain: Drain) -> None:
        rows, num_bytes = publisher.rows, publisher.num_bytes
        with self._pace.draining():
            capture.drain(drain)
        changed = publisher.rows - rows + capture.dirty_rows
        self._pace.drained(
            (publisher.num_bytes - num_bytes) / self._ring.ring_bytes, changed / max(1, capture.sweep_progress[1])
        )


log = logging.getLogger(__name__)


def put_mark(buffer: FrameBuffer, header: Header, mark: Mark, taken: Taken | None) -> None:
    """Fill a buffer with a MARK. Its proof is added up by the thread that sends the frame."""
    header.version = mark.version
    buffer.put_json(header, replace(mark, proof=taken.blank() if taken is not None else None).to_json())
    if taken is None:
        return
    length = header.payload_len

    def ready() -> None:
        buffer.put_json(header, replace(mark, proof=taken.proof()).to_json())
        assert header.payload_len == length

    buffer.ready = ready


def _settled(prover: Prover, window: Window, future: Future[Committed]) -> None:
    """(commit thread) Report the outcome of a marker to the prover."""
    prover.settled(window, committed=future.exception() is None)


def _settled_dense(turns: DenseTurns, after: str, future: Future[Committed]) -> None:
    """(commit thread) Report the outcome of a marker to the turns of dense entries."""
    turns.settled(after, committed=future.exception() is None)


@dataclass(slots=True)
class _Open:
    """State of a cut whose MARK is not in the ring yet."""

    step: int
    marker: int
    seal: Seal
    scalars: tuple[TableScalars, ...]
    """Own state of the kernels at the boundary."""
    taken: Taken | None = None
    """Rows that the marker proves, with their values at the boundary."""
    dense: DenseProof | None = None
    """Digests of the dense state at the boundary, and of the scalars, which were read a second time."""
    held: bool = False
    """(``paranoid``) True if the oracle has a copy of the tables at the boundary."""


class Cuts:
    """Cuts the markers of one generation, one at a time. All methods run on the training thread.

    Args:
        generation: The open generation of this rank.
        coordinator: Commits the cuts.
        capture: Sends rows of the tables.
        oracle: Compares sent rows with the tables (``paranoid``); otherwise None.
        ring: Memory for frames.
        dense: Copies the dense state at the boundary.
        team: All ranks; used for the oracle only.
        submit: Submits MARKs, after their rows.
        ids: Sends changes of id maps.
        prover: Takes the rows that each marker proves; None if markers have no proof.
        compared_bytes: Bytes of dense state that ranks compare, in turn, at each marker after the first one.
        turns: Chooses the entries of the dense state that each marker proves; unused without a prover.
    """

    def __init__(
        self,
        generation: Generation,
        coordinator: Coordinator,
        capture: Capture,
        oracle: Oracle | None,
        ring: FrameRing,
        dense: DenseState,
        team: Team,
        submit: Callable[[FrameBuffer], int],
        ids: IdStream,
        prover: Prover | None = None,
        compared_bytes: int = 0,
        turns: DenseTurns | None = None,
    ) -> None:
        self._generation = generation
        self._coordinator = coordinator
        self._capture = capture
        self._oracle = oracle
        self._ring = ring
        self._dense = dense
        self._team = team
        self._submit = submit
        self.ids = ids
        self._prover = prover
        self._compared_bytes = compared_bytes
        self._turns = turns or DenseTurns(0)
        self._open: _Open | None = None
        self._seal = Seal()
        """Seal of the last cut."""
        self._asking: CutOrder | None = None
        """(``paranoid``) Cut for which not all ranks have reported the result of their oracle."""
        self._sealed: Sealed | None = None
        self._found: Difference | None = None
        self.mismatch: CaptureMismatchError | None = None
        """(``paranoid``) Set after the oracle has found that the stream differs from the tables."""

    @property
    def open(self) -> bool:
        """True if rows of a cut must still be sent; until then nothing else may be sent."""
        return self._open is not None

    @property
    def idle(self) -> bool:
        """True if the training thread has finished the last cut."""
        return self._open is None and self._asking is None

    @property
    def holding(self) -> bool:
        """True if this rank has not given up its part of the last cut."""
        return not self._seal.failed

    def begin(
        self,
        step: int,
        marker: int,
        deadline_s: float | None,
        prepare: Callable[[Drain], bool],
        meta: Meta = (),
        event_s: float | None = None,
    ) -> Future[Committed]:
        """(all ranks) Freeze this step boundary: touched rows, the kernels' own state, a copy of the dense state.

        An error here fails the marker on all ranks; this rank raises nothing before the others know of it.

        Args:
            step: Step of the boundary.
            marker: Number of the marker.
            deadline_s: Limit of the wait for space, on the monotonic clock. None to wait for nothing, and to continue
                at later step boundaries if needed.
            prepare: Sends the rows that must precede the cut; returns whether they fit.
            meta: Metadata from the user.
            event_s: Event time up to which this rank has trained; None if the user has not set it.
        """
        assert self.idle
        self._seal = seal = Seal()
        forwards = self._capture.forwards()
        extra = deadline_s is not None or self._capture.outside.in_place
        drain = Drain(step, marker, extra=extra, deadline_s=deadline_s)
        staged: dict[str, Any] | None = None
        taken: Taken | None = None
        proved: ProvedEntries | None = None
        try:
            # The oracle compares live tables: until it is done, no update may run on another thread.
            with self._capture.still() if self._oracle is not None else nullcontext():
                if prepare(drain) and self.ids.freeze(drain):
                    staged = self._dense.stage(self._scope(marker))
                    if self._prover is not None:
                        proved = self._dense.prove(self._turns, compare=self._oracle is not None)
                    with self._capture.still():
                        scalars = self._capture.freeze(drain, seal.fail)
                        again = self._capture.scalars() if proved is not None else scalars
                        # Lookups of other threads continue, so the iteration may have changed between the two reads.
                        # MARK then has the second value, because the digest is of that one.
                        self._open = _Open(step, marker, seal, scalars if scalars == again else again)
                        self._open.taken = taken = self._prover.take() if self._prover is not None else None
                        self._open.dense = self._dense_proof(proved, again)
                else:
                    seal.fail(self._no_space())
                self._push(drain)
            if deadline_s is not None:
                self.give_up(self._no_space())
        except BaseException as error:  # a Stateful of the user, memory, the publisher; or an interrupt
            self._fail(marker, error)
            if not isinstance(error, Exception):
                self._hand_over(CutOrder(marker, step, seal, staged, meta, event_s, forwards), taken, proved)
                raise
        future = self._hand_over(CutOrder(marker, step, seal, staged, meta, event_s, forwards), taken, proved)
        self._ask()
        return future

    def _scope(self, marker: int) -> Scope:
        """Return the part of the dense state that ranks compare: all of it at the first marker or with an oracle."""
        whole = self._oracle is not None or not self._coordinator.compared
        return Scope(marker, None if whole else self._compared_bytes)

    def _dense_proof(self, proved: ProvedEntries | None, scalars: tuple[TableScalars, ...]) -> DenseProof | None:
        """Return the proof of the dense state for MARK. ``scalars`` were read a second time, for their digest."""
        if proved is None:
            return None
        return DenseProof.of({**proved.digests, **self.ids.digests()}, scalars_digest(map(astuple, scalars)))

    def _hand_over(self, cut: CutOrder, taken: Taken | None, proved: ProvedEntries | None) -> Future[Committed]:
        """(all ranks) Pass a cut to the commit thread, even if it was given up: all ranks must know."""
        if self._oracle is not None:
            self._asking = cut
        future = self._coordinator.begin(cut)
        if taken is not None and self._prover is not None:
            future.add_done_callback(partial(_settled, self._prover, taken.window))
        if proved is not None:
            future.add_done_callback(partial(_settled_dense, self._turns, proved.after))
        return future

    def go_on(self) -> None:
        """(all ranks, a later step boundary) Send more rows of the open cut, without waiting."""
        if self._open is not None:
            self._push(Drain(self._open.step, self._open.marker, extra=self._capture.outside.in_place))
        self._ask()

    def complete(self, deadline_s: float) -> None:
        """(all ranks) Send the rest of the open cut; give it up if there is not enough space before the deadline."""
        self._complete_here(deadline_s)
        self._ask()

    def close(self, deadline_s: float) -> None:
        """Like :meth:`complete`, for the end of the stream, without the other ranks: some may not get here."""
        self._complete_here(deadline_s)
        self._asking = None
        if self._oracle is not None:
            self._seal.fail("the stream was closed before all ranks had compared their tables")

    def give_up(self, reason: str) -> None:
        """End the open cut without its MARK; its rows are sent with the next one."""
        self._capture.frozen.give_up(reason)  # rows may be frozen for a cut that was never opened
        self._let_go()

    def _complete_here(self, deadline_s: float) -> None:
        if self._open is not None:
            self._push(Drain(self._open.step, self._open.marker, extra=True, deadline_s=deadline_s))
            self.give_up(self._no_space())

    def _push(self, drain: Drain) -> None:
        """Send the rows that fit, and MARK after the last row."""
        cut = self._open
        if cut is None:
            return
        try:
            if cut.seal.failed:  # before a write, in the commit thread or on another rank
                self.give_up(cut.seal.reason)
            elif (
                self._capture.push(drain)
                and self.ids.assign(drain)
                and (buffer := self._ring.acquire(extra=True, wait_s=drain.wait_s))
            ):
                self._finish(cut, buffer)
            elif self._oracle is not None and not cut.held:
                self._oracle.hold()
                cut.held = True
        except BaseException as error:  # the publisher has died, or memory is short; or an interrupt
            self._fail(cut.marker, error)
            if not isinstance(error, Exception):
                raise

    def _finish(self, cut: _Open, buffer: FrameBuffer) -> None:
        """Submit the MARK after all other frames of a cut are in the ring."""
        failpoint("cut.drained")
        publisher = self._generation.publisher
        rows, num_bytes = publisher.rows, publisher.num_bytes
        header = self._generation.header(Kind.MARK, cut.step, cut.marker)
        put_mark(buffer, header, Mark(rows, num_bytes, cut.scalars, dense_proof=cut.dense), cut.taken)
        sealed = Sealed(self._submit(buffer), rows, num_bytes)
        failpoint("mark.submitted")
        if self._oracle is None:
            cut.seal.close(sealed)
        else:  # a cut that differs on any rank must not be committed: the seal waits for the other ranks
            self._sealed, self._found = sealed, self._oracle.compare(cut.scalars)
        self._capture.frozen.finish()
        self._let_go()

    def _fail(self, marker: int, error: BaseException) -> None:
        if not self._seal.failed:
            log.exception("marker %d:%d cannot be cut on this rank", self._generation.claim.generation, marker)
        reason = f"{type(error).__name__}: {error}"
        self.give_up(reason)
        self._seal.fail(reason)

    def _let_go(self) -> None:
        if self._oracle is not None and self._open is not None and self._open.held:
            self._oracle.let_go()
        self.ids.let_go()
        self._open = None

    def _no_space(self) -> str:
        return f"the changed rows do not fit the {self._ring.limit_bytes} bytes of ring and marker budget"

    def _ask(self) -> None:
        """(all ranks, ``paranoid``) Check that the stream matches the tables; if not, no marker commits any more.

        The check takes place after every rank has sent its part or given it up. A rank that gave it up has nothing to
        compare.

        Raises:
            CaptureMismatchError: (on all ranks, at the same step) the stream differs from the tables.
        """
        if self._asking is None:
            return
        said = self._team.gather((self.open, self._found))
        if any(still_open for still_open, _ in said):
            return
        cut, sealed = self._asking, self._sealed
        self._asking = self._sealed = self._found = None
        self.mismatch = mismatch([found for _, found in said], self._generation.claim.generation, cut.marker, cut.step)
        if self.mismatch is not None:
            cut.seal.fail(self.mismatch.headline)
            raise self.mismatch
        if sealed is not None:
            cut.seal.close(sealed)
