"""Keep a store up to date with its log until stopped: check, catch up, wait, and outlast outages."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torchrec_stream_ckpt.errors import (
    CorruptionError,
    EngineUnavailableError,
    LogUnavailableError,
    MarkerNotFoundError,
    MissingObjectError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.end_note import End, Outcome
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.maintain.progress import Counts
from torchrec_stream_ckpt.maintain.repairer import Repair
from torchrec_stream_ckpt.maintain.scrub.background_scrub import BackgroundScrub
from torchrec_stream_ckpt.maintain.scrub.scrubber import Damage, Scrubber
from torchrec_stream_ckpt.proofs.proof_status import ProofStatus
from torchrec_stream_ckpt.proofs.window import WindowCheck
from torchrec_stream_ckpt.util.service import Event, Service
from torchrec_stream_ckpt.util.types import MarkerId

FIRST_RETRY_S = 1.0
LAST_RETRY_S = 30.0
_PATIENCE_S = 0.2
"""Seconds between checks for a stop while merges run."""
_NAMED = 8
"""Maximum number of blocks that an event names as differing from their proof."""


@dataclass(slots=True)
class Status:
    """State of a service, for people and for metrics. Written by one thread, read by others."""

    doing: str = "starting"
    newest: MarkerId | None = None
    """Newest marker known to be in the store, by commit order."""
    lag_markers: int = 0
    """Number of committed markers that are not in the store."""
    lag_bytes: int = 0
    """Bytes of frames that lead to the markers not in the store."""
    waiting_since_s: float | None = None
    """Commit time of the oldest marker not in the store, by the trainer's wall clock."""
    ended: End | None = None
    """The job's end note. None while a trainer may be running, or if it has died without one."""
    errors: int = 0
    """Number of failures that were outlasted, without the retries of each."""

    @property
    def lag_s(self) -> float:
        return max(0.0, time.time() - self.waiting_since_s) if self.waiting_since_s is not None else 0.0


class MaterializeService(Service):
    """Follows one log.

    Its own events are ``head``, ``waiting``, ``ended``, ``repaired``, ``passed_over``, ``damaged``, ``scrubbed``,
    ``unproved`` and ``uncompared``.

    Args:
        read: Returns the current control partition. None while there is no log.
        open_: Creates the materializer once the log has records. None while the place of the store cannot be known.
        report: Receives events, on the thread of :meth:`run`.
        until_closed: Whether to end once the job is finished and all its markers are in the store.
    """

    def __init__(
        self,
        read: Callable[[], Lineage | None],
        open_: Callable[[Lineage], Materializer | None],
        report: Callable[[Event], None] = lambda _: None,
        *,
        until_closed: bool = False,
    ) -> None:
        away = (LogUnavailableError, StoreUnavailableError, EngineUnavailableError)
        super().__init__(report, away, (FIRST_RETRY_S, LAST_RETRY_S))
        self._read = read
        self._open = open_
        self._until_closed = until_closed
        self._over = False
        self._materializer: Materializer | None = None
        self._compared = False
        self._missed = ""
        self._said_waiting = False
        self._said_head: tuple[MarkerId | None, bool] = (None, False)
        self.status = Status()
        self.scrub: BackgroundScrub | None = None
        """Reads the store again while there is nothing to fold. None for no scrub in the background."""
        self._scrub_trouble = ""

    @property
    def counts(self) -> Counts:
        return self._materializer.counts if self._materializer is not None else Counts()

    @property
    def head_marker(self) -> MarkerId | None:
        """Marker that HEAD on this host is at. None if it is at none."""
        return self._materializer.head_marker if self._materializer is not None else None

    @property
    def doing(self) -> str:
        """Description of the current work, for people."""
        at_work = self._materializer is not None and not self._trouble
        return self._materializer.progress.doing if self._materializer is not None and at_work else self.status.doing

    def pass_over(self, commit: Commit, error: CorruptionError) -> None:
        """Report a marker that is passed over. Passed to the materializer if lost markers are to be passed over."""
        self.status.errors += 1
        self.report(Event("passed_over", {"marker": str(commit.id), "reason": error.headline}))

    def repaired(self, repair: Repair) -> None:
        """Report a repaired object. Passed to the materializer, which calls it for each."""
        self.report(Event("repaired", asdict(repair)))

    def unproved(self, check: WindowCheck) -> None:
        """Report a marker whose rows differ from its proof. Passed to the materializer."""
        found = check.compared.unproved
        assert found is not None
        blocks = [str(block) for block in found.blocks[:_NAMED]]
        self.report(Event("unproved", {"marker": str(check.marker), "blocks": found.count, "first": blocks}))

    def uncompared(self, commit: Commit, error: CorruptionError) -> None:
        """Report a marker that cannot be compared with its proof. Passed to the materializer."""
        self.status.errors += 1
        self.report(Event("uncompared", {"marker": str(commit.id), "reason": error.headline}))

    @property
    def proofs(self) -> ProofStatus | None:
        """Progress of comparing the store with proofs. None if nothing was compared, or only by another process."""
        return self._materializer.proofs.standing if self._materializer is not None else None

    def damaged(self, damage: Damage) -> None:
        """Report a damaged object that was not repaired. Passed to the scrub, which calls it for each damaged one."""
        if damage.repair is None:
            fields = {"marker": str(damage.marker) if damage.marker is not None else None, "table": damage.table}
            said = {"name": damage.name, **fields, "reason": damage.reason}
            self.report(Event("damaged", {**said, "lost": damage.lost, "unrepaired": damage.unrepaired}))
        elif self._materializer is not None:
            self._materializer.forget()

    def scrubbed(self, scrubber: Scrubber) -> None:
        """Report a pass that has read everything. Passed to the scrub."""
        place = scrubber.place
        counts = {"objects": place.objects, "bytes": place.num_bytes, "damaged": len(place.damaged)}
        self._scrub_trouble = ""
        self.report(Event("scrubbed", counts | {"took_s": round(max(0.0, time.time() - place.begun_s), 3)}))

    def scrub_trouble(self, error: StreamCkptError) -> None:
        """Report that the scrub could not continue and will try again. Repeated only if the error changes.

        Passed to the scrub.
        """
        if error.headline != self._scrub_trouble:
            self._scrub_trouble = error.headline
            self.status.errors += 1
            self.report(Event("trouble", {"message": f"scrub: {error.headline}", "hint": error.advice}))

    def _wait(self, seconds: float) -> None:
        if self._materializer is not None and self._materializer.compactor.is_busy and not self._trouble:
            self._wait_for_merges(self._materializer, time.monotonic() + seconds)
        elif self.scrub is None or self._trouble:
            super()._wait(seconds)
        else:
            self.scrub.use(seconds, self._stop)

    def _wait_for_merges(self, materializer: Materializer, until: float) -> None:
        """Wait for merges, so that the next round advances them and reads the log."""
        while (left := until - time.monotonic()) > 0:
            self.going_on()
            if materializer.has_merged(min(left, _PATIENCE_S)):
                return

    def _close(self) -> None:
        if self.scrub is not None:
            self.scrub.close()

    def _round(self, *, once: bool, last: bool = False) -> None:
        """Put the missing markers into the store.

        Raises:
            MarkerNotFoundError: (``once``) there is no log.
            CorruptionError, UnsupportedError, ConfigError: waiting does not help. The store is unchanged.
        """
        self._over = False
        lineage = self._read()
        if lineage is None and once:
            raise MarkerNotFoundError(
                "there is no log here", hint="check the URI; a job creates its log when it starts"
            )
        if lineage is not None and self._materializer is None and lineage.claims:
            self._materializer = self._open(lineage)
        if lineage is None or self._materializer is None:
            self._wait_for("a log" if lineage is None else "its first marker")
            if lineage is not None:
                self._hear_end(lineage, missing=len(lineage.commits))
            return
        if not self._compared:
            self._materializer.compare(lineage.job, self._read_again)
            self._compared = True
        try:
            self._catch_up(lineage, self._materializer)
        except MissingObjectError as error:
            # A process that deletes markers may have done so after our listing: only objects missing again are lost.
            if self._missed == error.headline:
                raise
            self._missed = error.headline
            self._catch_up(lineage, self._materializer)
        self._missed = ""
        if last:
            self._materializer.settle(lineage)
        self._hear_end(lineage, missing=len(self._materializer.missing))

    def _hear_end(self, lineage: Lineage, missing: int) -> None:
        """Note whether the job has ended, as of this round's lineage, and how many of its markers are not folded."""
        end = lineage.ended
        self._over = (
            self._until_closed
            and not missing
            and end is not None
            and end.outcome == Outcome.FINISHED
            and (self._materializer is None or not self._materializer.compactor.is_busy)
        )
        if end != self.status.ended and end is not None:
            fields = {"outcome": str(end.outcome), "reason": end.reason, "step": end.step}
            self.report(Event("ended", {"generation": end.generation, **fields}))
        self.status.ended = end

    def _is_over(self) -> bool:
        return self._over

    def _read_again(self) -> Lineage:
        lineage = self._read()
        if lineage is None:
            raise LogUnavailableError(
                "the log was deleted", hint="restore it, or run stream-ckpt recover URI --store URL"
            )
        return lineage

    def _catch_up(self, lineage: Lineage, materializer: Materializer) -> None:
        self._measure(lineage, materializer)
        begin = time.monotonic()
        for marker in self._measured(lineage, materializer):
            commit = lineage.commits[marker]
            self.status.newest = marker
            counts, now = asdict(materializer.counts), time.monotonic()
            self.report(
                Event(
                    "marker",
                    {
                        "marker": str(marker),
                        "step": commit.step,
                        "committed_s": commit.time_s,
                        "lag_markers": self.status.lag_markers,
                        "lag_bytes": self.status.lag_bytes,
                        "lag_s": round(self.status.lag_s, 3),
                        "took_s": round(now - begin, 3),
                        **counts,
                    },
                )
            )
            begin = now

    def _measured(self, lineage: Lineage, materializer: Materializer) -> Iterator[MarkerId]:
        """Run :meth:`Materializer.catch_up`, and measure the lag after each marker."""
        try:
            for marker in materializer.catch_up(lineage):
                self._measure(lineage, materializer)
                yield marker
        finally:
            self._measure(lineage, materializer)
        held = materializer.held
        self.status.newest = next((marker for marker in reversed(lineage.commits) if marker in held), None)
        self._say_head(materializer)

    def _say_head(self, materializer: Materializer) -> None:
        """Report that HEAD has moved, or once that it could not: that is tried again each time the log is read."""
        problem = materializer.head_problem
        now = (materializer.head_marker, problem is not None)
        if now != self._said_head:
            self._said_head = now
            marker = str(now[0]) if now[0] is not None else None
            fields = {"marker": marker, "problem": problem.headline if problem is not None else None}
            self.report(Event("head", fields | {"hint": problem.hint if problem is not None else ""}))

    def _measure(self, lineage: Lineage, materializer: Materializer) -> None:
        missing = materializer.missing
        self.status.lag_markers = len(missing)
        self.status.lag_bytes = materializer.missing_bytes
        self.status.waiting_since_s = missing[0].time_s if missing else None

    def _wait_for(self, what: str) -> None:
        self.status.doing = f"waiting for {what}"
        if not self._said_waiting:
            self._said_waiting = True
            self.report(Event("waiting", {"for": what}))

    def _say_trouble(self, error: StreamCkptError) -> None:
        self.status.doing = f"trying again: {error.headline}"
        self.status.errors += error.headline != self._trouble
        super()._say_trouble(error)

    def _totals(self) -> dict[str, Any]:
        return {"lag_markers": self.status.lag_markers, **asdict(self.counts)}
