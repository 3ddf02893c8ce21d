"""Write END, the last record of a generation: how the job ended, as far as its trainer knows.

Rank 0 writes END after every rank has reported how it ended. The ranks report this over their store and not in a
collective: if a rank has failed, other ranks may never reach their close(), and no rank must wait for them.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError, printable
from torchrec_stream_ckpt.format.end_note import MAX_REASON_CHARS, End, Outcome
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.save.stream import JOIN_S, Stream

log = logging.getLogger(__name__)

OTHERS_S = 20.0
"""Seconds that rank 0 waits for the other ranks' close()."""
_POLL_S = 0.02
_BY_SIGNAL = (130, 143)
"""Exit codes of a process that was ended by SIGINT or SIGTERM."""


@dataclass(frozen=True, slots=True)
class LastWord:
    """Report of how one rank, or the whole job, has ended."""

    outcome: Outcome
    reason: str = ""
    """Same as in ``End``."""

    @classmethod
    def of(cls, outcome: str | None, error: BaseException | None, stopped: str = "") -> LastWord:
        """Make the report of a rank.

        Args:
            outcome: Outcome as the user names it; None to derive it from the other arguments.
            error: The exception in flight, if any.
            stopped: Signal after which the job was asked to stop; empty if there was none.

        Raises:
            ConfigError: there is no such outcome.
        """
        if outcome is not None:
            if outcome not in list(Outcome):
                raise ConfigError(
                    f"outcome {outcome!r:.80} is not valid", hint=f"pass one of {', '.join(Outcome)}, or omit it"
                )
            return cls(Outcome(outcome), _named(error) if outcome != Outcome.FINISHED else "")
        if stopped:
            return cls(Outcome.PREEMPTED, stopped)
        if error is None or (isinstance(error, SystemExit) and error.code in (None, 0)):
            return cls(Outcome.FINISHED)
        by_signal = isinstance(error, SystemExit) and error.code in _BY_SIGNAL
        if by_signal or isinstance(error, KeyboardInterrupt):
            return cls(Outcome.PREEMPTED, _named(error))
        return cls(Outcome.FAILED, _named(error))

    @classmethod
    def of_all(cls, said: list[LastWord]) -> LastWord:
        """Combine the reports of all ranks: a failed rank decides, then a preempted one."""
        for outcome in (Outcome.FAILED, Outcome.PREEMPTED):
            for rank, word in enumerate(said):
                if word.outcome is outcome:
                    return cls(outcome, f"rank {rank}: {word.reason}"[:MAX_REASON_CHARS] if rank else word.reason)
        return said[0]


def _named(error: BaseException | None) -> str:
    return printable(type(error).__name__)[:MAX_REASON_CHARS] if error is not None else ""


class Ending:
    """Reports how the job has ended.

    Args:
        store: Store shared by all ranks. None if the ranks share no store.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world

    def say(self, stream: Stream | None, step: int, word: LastWord, deadline: float) -> None:
        """(each rank) Send this rank's report; on rank 0, write END. Never raises, and always ends in time.

        Args:
            stream: The stream that was open, closed by now; None if there was none.
            step: Number of steps of the job so far.
            word: Report of this rank.
            deadline: Limit of the wait for the other ranks, on the monotonic clock.
        """
        if stream is None or (self._rank == 0 and not self._may_end(stream)):
            return
        worker = Worker("stream-ckpt-ending")  # a separate thread, because store and log may never answer
        try:
            if self._rank:
                self._tell(worker, word)
                return
            whole = self._hear(worker, word, min(deadline, time.monotonic() + OTHERS_S))
            if whole is not None:
                self._write(worker, stream, step, whole)
        finally:
            worker.close()

    @staticmethod
    def _may_end(stream: Stream) -> bool:
        """Return whether this trainer still owns the generation, and no marker is in flight."""
        if stream.coordinator.busy:
            log.warning("END was not written because a marker is in flight: the job looks like one that was killed")
        return not stream.coordinator.busy and stream.coordinator.fenced is None

    def _tell(self, worker: Worker, word: LastWord) -> None:
        said = json.dumps([word.outcome, word.reason])
        store = self._store
        if store is not None:
            _answer(worker, lambda: store.set(_name(self._rank), said), JOIN_S)

    def _hear(self, worker: Worker, mine: LastWord, deadline: float) -> LastWord | None:
        """(rank 0) Return the combined report of all ranks; None if a rank does not report and none has failed."""
        said: dict[int, LastWord] = {0: mine}
        store = self._store
        while len(said) < self._world and all(word.outcome is not Outcome.FAILED for word in said.values()):
            left_s = deadline - time.monotonic()
            news = _answer(worker, lambda: _read(store, self._world), left_s) if store is not None else None
            if news is None or left_s <= 0:
                silent = ", ".join(str(rank) for rank in range(self._world) if rank not in said)
                log.warning(
                    "END was not written, and the job looks like one that was killed: rank %s did not close its "
                    "StreamCheckpointer within %.0f s",
                    silent,
                    OTHERS_S,
                )
                return None
            said |= news
            if len(said) < self._world:
                time.sleep(_POLL_S)
        failed = [rank for rank, word in sorted(said.items()) if word.outcome is Outcome.FAILED]
        ranks = range(self._world) if not failed else range(failed[0] + 1)
        return LastWord.of_all([said.get(rank, LastWord(Outcome.FINISHED)) for rank in ranks])

    def _write(self, worker: Worker, stream: Stream, step: int, word: LastWord) -> None:
        """(rank 0) Write END."""
        claim = stream.claim
        end = End(claim.job, claim.generation, claim.nonce, step, word.outcome, word.reason, time.time())
        control = stream.generation.control
        _answer(worker, lambda: control.end(end), 2 * JOIN_S, "it is unknown whether END was written")


def _name(rank: int) -> str:
    return f"end{rank}"


def _read(store: Any, world: int) -> dict[int, LastWord]:
    """Read the reports that other ranks have sent so far."""
    said = {}
    for rank in range(1, world):
        if store.check([_name(rank)]):
            outcome, reason = json.loads(store.get(_name(rank)))
            said[rank] = LastWord(Outcome(outcome), reason)
    return said


def _answer(worker: Worker, ask: Callable[[], Any], bound_s: float, what: str = "") -> Any:
    """Call a store or a log. If there is no answer in time, log a warning that begins with ``what``; return None."""
    asked: Future[Any] = worker.submit(ask)
    if not wait([asked], max(0.0, bound_s)).done:
        said = f"no answer for {bound_s:.0f} s"
    elif (error := asked.exception()) is not None:
        said = error.headline if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"
    else:
        return asked.result()
    if what:
        log.warning("%s; without it, the job looks like one that was killed: %s", what, said)
    return None
