"""Copy committed data from the inner log to the outer one: frames unchanged, then dense state, then COMMIT.

A relay has no state of its own: it resumes at the outer log's newest COMMIT of the generation. If frames after that
COMMIT were sent before and are sent again, they carry the same seq and checksums, so readers drop them. It copies only
the newest generation, since no other generation can commit any more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    FencedError,
    LogUnavailableError,
    MarkerNotFoundError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.find.tiers import Tiers, TierState
from torchrec_stream_ckpt.format.aliases import aliases, names_in
from torchrec_stream_ckpt.format.claim_references import alone
from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.lineage import notes_of
from torchrec_stream_ckpt.format.record import PIN, Meta
from torchrec_stream_ckpt.log.api import DataWriter
from torchrec_stream_ckpt.log.control.ancestor_check import Older
from torchrec_stream_ckpt.log.stream import read_stream
from torchrec_stream_ckpt.save.generation import check_claimed
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import copy_dense
from torchrec_stream_ckpt.store.pins import note_reached, pin, pin_before_commit, unpin_others
from torchrec_stream_ckpt.tiers.lock import RelayLock
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import dropped_name
from torchrec_stream_ckpt.util.types import MarkerId, RankEnd

log = logging.getLogger(__name__)

LOCK_TIMEOUT_S = 60.0
PATIENCE_S = 20.0
"""Seconds without an acknowledgment of the outer log after which the relay reports it and starts over."""
COMMIT_TIMEOUT_S = 60.0
_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True)
class Lag:
    """Committed data that the outer log does not have yet."""

    markers: int
    num_bytes: int
    """Bytes of frames."""
    oldest_s: float | None
    """When the oldest of those markers was committed, by the trainer's wall clock."""

    @property
    def seconds(self) -> float:
        return max(0.0, time.time() - self.oldest_s) if self.oldest_s is not None else 0.0


@dataclass(frozen=True, slots=True)
class _Delivered:
    """Progress of copying one rank's stream."""

    inner: RankEnd
    begin: int
    end: int
    """End of the copied frames, as an offset in the outer log."""


def say_passed(commit: Commit, error: StreamCkptError) -> None:
    """Log that the outer tier does not get a marker."""
    log.warning("marker %s cannot be copied to the outer tier and is skipped: %s", commit.id, error.headline)


class Relay:
    """Copies one inner log to its outer one.

    Args:
        tiers: Both logs.
        going_on: Called repeatedly; raises to stop the work where it is.
        pass_over: Called once with each marker that the outer log cannot get, and the reason. Later markers can still
            be copied.
    """

    def __init__(
        self,
        tiers: Tiers,
        going_on: Callable[[], None] = lambda: None,
        pass_over: Callable[[Commit, StreamCkptError], None] = say_passed,
    ) -> None:
        self._tiers = tiers
        self._going_on = going_on
        self._pass_over = pass_over
        self._passed: set[MarkerId] = set()
        self._noted: MarkerId | None = None
        """Newest marker that the note in the inner store reports as copied to the outer log."""
        self._lock = RelayLock(tiers.folder)
        self._generation: Claim | None = None
        """CLAIM of the generation on the outer log."""
        self._sent: dict[int, _Delivered] = {}
        self._reached: MarkerId | None = None
        """Marker up to which this relay has sent rows without a break."""
        self._writers: dict[int, DataWriter] = {}
        self._older = Older()
        """Streams of the older generations on which this one is based, on the outer log."""
        self.frames_bytes = 0
        """Bytes of frames that the relay has sent."""
        self.dense_bytes = 0

    def catch_up(self, *, upto: MarkerId | None = None, everything: bool = False) -> Iterator[Commit]:
        """Copy all that exists now. Yields each marker that the outer log has received.

        Args:
            upto: Copy this marker in any case, and nothing after it.
            everything: Copy the newest marker in any case.

        Raises:
            FencedError: another trainer has claimed the job on the outer log; the claim was copied to the inner log.
            CorruptionError: the inner log is damaged, or one of the logs lacks data that it had.
            LogUnavailableError, StoreUnavailableError, CommitUnknownError: try again.
        """
        with self._lock.hold(LOCK_TIMEOUT_S) as undisturbed:
            if not undisturbed or (upto is not None and self._reached is not None and self._reached > upto):
                self._forget()
            try:
                yield from self._catch_up(TierState.read(self._tiers), upto, everything=everything)
            except BaseException:
                self._forget()
                raise

    def state(self) -> TierState:
        """Read both control partitions as of now."""
        return TierState.read(self._tiers)

    @staticmethod
    def lag(state: TierState) -> Lag:
        """Measure what is missing on the outer log."""
        missing = state.unrelayed
        if not missing:
            return Lag(0, 0, None)
        there = state.outer.newest
        before = there.num_bytes if there and there.generation == state.generation else 0
        return Lag(len(missing), missing[-1].num_bytes - before, missing[0].time_s)

    def close(self) -> None:
        self._forget()

    def _forget(self) -> None:
        """Forget the rows sent after the outer log's newest COMMIT: they count as never sent."""
        for writer in self._writers.values():
            writer.close()
        self._writers, self._sent, self._reached, self._generation = {}, {}, None, None
        self._older = Older()

    def _catch_up(self, state: TierState, upto: MarkerId | None, *, everything: bool) -> Iterator[Commit]:
        self._tell_fenced(state)
        if state.owns(state.generation):
            there, beginning = state.outer.newest, MarkerId(state.generation, 0)
            self._note(state.inner.job, there.id if there is not None and there.id > beginning else beginning)
        missing = [each for each in state.unrelayed if upto is None or each.id <= upto]
        self._copy_notes(state)
        end = state.inner.ended if upto is None and state.owns(state.generation) else None
        if missing:
            yield from self._copy(state, missing, upto, everything=everything or end is not None)
        if end is not None and end.generation == state.generation and state.outer.ended is None:
            self._tiers.outer.control.end(replace(end, mac=""))

    def _copy(
        self, state: TierState, missing: list[Commit], upto: MarkerId | None, *, everything: bool
    ) -> Iterator[Commit]:
        self._begin(state)
        for commit in missing:
            last = commit is missing[-1] and (everything or commit.id == upto)
            if self._reached is None or commit.id > self._reached:
                self._send_rows(commit)
                self._reached = commit.id
            if (last or commit.marker % self._tiers.every == 0) and self._has_dense(commit):
                self._commit(commit)
                self._note(commit.job, commit.id)
                self._copy_notes(replace(state, outer=self._tiers.outer.control.lineage))
                yield commit

    def _copy_notes(self, state: TierState) -> None:
        """Copy the records that follow the COMMIT of each marker that the outer log has."""
        for marker in state.inner.notes:
            if marker not in state.outer.commits or not state.owns(marker.generation):
                continue
            there = {note.nonce for note in notes_of(state.outer, marker)}
            for note in notes_of(state.inner, marker):
                if note.nonce not in there:
                    self._pin(note.job, marker, note.meta)
                    failpoint("relay.note")
                    self._tiers.outer.control.note(note, COMMIT_TIMEOUT_S)
                    self._unpin_moved(note.job, note.meta)

    def _pin(self, job: bytes, marker: MarkerId, meta: Meta) -> None:
        """Pin a marker of the outer log before a NOTE says so, or names the marker."""
        if PIN in dict(meta):
            pin(self._tiers.outer.objects, job, marker, folded=False)
        for name in names_in(meta):
            pin(self._tiers.outer.objects, job, marker, folded=False, alias=name)

    def _unpin_moved(self, job: bytes, meta: Meta) -> None:
        """Delete the pins of markers that had a name before a NOTE moved or removed it."""
        for name in names_in(meta):
            now = aliases(self._tiers.outer.control.lineage.notes).get(name)
            unpin_others(self._tiers.outer.objects, job, name, now)

    def _note(self, job: bytes, reached: MarkerId) -> None:
        """Note in the inner store how far the outer log is, so that gc keeps what the outer log does not have yet.

        If that store accepts no writes, the previous note stays valid, and gc keeps more.
        """
        if reached == self._noted:
            return
        try:
            note_reached(self._tiers.inner.objects, job, reached, self._tiers.every)
        except StoreUnavailableError as error:
            log.warning(
                "gc of the inner store keeps markers up to %s, although the outer tier has them: %s",
                reached,
                error.headline,
            )
            return
        self._noted = reached

    def _has_dense(self, commit: Commit) -> bool:
        """Copy the dense state of a marker to the outer store. Returns False if it was given up or is damaged.

        No later marker depends on it, so the relay reports this marker and continues with the next ones.
        """
        if commit.id in self._passed:
            return False
        try:
            self._check_offered(commit)
            self._send_dense(commit)
        except (CorruptionError, MarkerNotFoundError) as error:
            self._passed.add(commit.id)
            self._pass_over(commit, error)
            return False
        return True

    def _check_offered(self, commit: Commit) -> None:
        """Raise MarkerNotFoundError if the inner store has given the marker up."""
        objects = self._tiers.inner.objects
        if objects.size(dropped_name(commit.job, commit.id)) is not None:
            Catalog.load(objects, commit.job).check_offered(commit.id)

    def _tell_fenced(self, state: TierState) -> None:
        """Copy a claim of another trainer, which only the outer log has, to the inner log, where the inner trainer
        looks for it."""
        if not state.inner.claims or state.generation <= state.inner.newest_generation:
            return
        for number in sorted(state.outer.claims):
            if number > state.inner.newest_generation:
                self._tiers.inner.control.append(alone(state.outer.claims[number]))
        raise FencedError(
            f"generation {state.generation} has taken over this job on the outer log",
            hint="stop the trainer that writes here; another one restored the job, and it ends at its next marker",
            generation=state.inner.newest_generation,
        )

    def _begin(self, state: TierState) -> None:
        """Find where this generation starts on the outer log, unless that is known."""
        claim = state.outer.claims[state.generation]
        if self._generation == claim:
            return
        self._forget()
        there = state.outer.newest
        if there is not None and there.generation == state.generation:
            mine = state.commit(there.id)
            if mine is None or [end.chain for end in mine.ranks] != [end.chain for end in there.ranks]:
                raise CorruptionError(
                    f"marker {there.id} differs between the inner log and the outer log that it was copied to",
                    hint="restart the job to restore from the outer log; the inner log was damaged, or replaced by an "
                    "older copy",
                    marker=there.id,
                )
            pairs = zip(mine.ranks, there.ranks, strict=True)
            self._sent = {end.rank: _Delivered(end, theirs.begin, theirs.end) for end, theirs in pairs}
            self._reached = there.id
        self._generation = claim

    def _send_rows(self, commit: Commit) -> None:
        for end in commit.ranks:
            self._send_stream(commit, end)

    def _send_stream(self, commit: Commit, end: RankEnd) -> None:
        """Send one rank's frames up to a marker, unchanged. All of them are durable on return."""
        inner, sent = self._tiers.inner.log, self._sent.get(end.rank)
        writer = self._writer(end.rank, sent.end if sent is not None else 0)
        begin, stop = (sent.begin, sent.end) if sent is not None else (-1, 0)
        waiting = 0
        after = sent.inner if sent is not None else None
        for _, frame in read_stream(inner, commit, end, after, payloads=True):  # so no damaged frame is copied
            writer.send(memoryview(bytes(frame)))
            failpoint("relay.sent")
            self.frames_bytes += len(frame)
            waiting += 1
            if waiting == _IN_FLIGHT:
                begin, stop, waiting = self._acknowledged(writer, begin, stop, waiting)
        while waiting:
            begin, stop, waiting = self._acknowledged(writer, begin, stop, waiting)
        self._sent[end.rank] = _Delivered(end, begin, stop)

    def _acknowledged(self, writer: DataWriter, begin: int, stop: int, waiting: int) -> tuple[int, int, int]:
        """Wait until some of ``waiting`` frames are durable. Returns where the stream then begins and ends."""
        deadline = time.monotonic() + PATIENCE_S
        while True:
            self._going_on()
            acks = writer.poll(0.2)
            if acks:
                return begin if begin >= 0 else acks[0].offset, acks[-1].end, waiting - len(acks)
            if time.monotonic() > deadline:
                raise LogUnavailableError(
                    f"the outer log has acknowledged nothing for {PATIENCE_S:.0f} s",
                    hint="repair the outer log; the relay then continues by itself",
                    uri=self._tiers.outer.uri,
                )

    def _writer(self, rank: int, resume_at: int) -> DataWriter:
        if rank not in self._writers:
            assert self._generation is not None
            partition = rank % self._generation.partitions
            outer = self._tiers.outer.log
            self._writers[rank] = outer.open_writer(self._generation.generation, partition, resume_at, again=True)
        return self._writers[rank]

    def _send_dense(self, commit: Commit) -> None:
        """Put the dense state into the outer store; every file is compared with COMMIT."""
        source, objects = self._tiers.inner.dense, self._tiers.outer.objects
        for file in copy_dense(source, commit, None, objects, self._going_on):
            self.dense_bytes += file.num_bytes
            failpoint("relay.dense")

    def _commit(self, commit: Commit) -> None:
        """Commit the same marker on the outer log, with the positions of its streams there."""
        outer, claim = self._tiers.outer, self._generation
        assert claim is not None
        ends = tuple(
            replace(
                end,
                partition=end.rank % claim.partitions,
                begin=self._sent[end.rank].begin,
                end=self._sent[end.rank].end,
            )
            for end in commit.ranks
        )
        check_claimed(outer.log, outer.control, claim, commit.marker, ends, self._older)
        failpoint("relay.commit")
        copy = replace(commit, ranks=ends, store=outer.store_url, mac="")
        if PIN in dict(commit.meta or ()):
            pin_before_commit(outer.objects, commit.job, commit.id)
        outer.control.commit(copy, COMMIT_TIMEOUT_S, threading.Event())
        failpoint("relay.committed")
