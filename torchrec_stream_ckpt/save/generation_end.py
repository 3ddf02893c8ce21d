"""How a job ends, as far as its trainer can say: END, the last record of a generation.

Rank 0 writes it, once every rank has said how it ended. The ranks say that over their store and not in a collective:
where one of them has failed, the others may never come to their close(), and none must wait for that.
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
"""How long rank 0 waits for the other ranks' close()."""
_POLL_S = 0.02
_BY_SIGNAL = (130, 143)
"""Exit codes of a process that SIGINT or SIGTERM has ended."""


@dataclass(frozen=True, slots=True)
class LastWord:
    """How one rank, or the whole job, has ended."""

    outcome: Outcome
    reason: str = ""
    """As of ``End``."""

    @classmethod
    def of(cls, outcome: str | None, error: BaseException | None, stopped: str = "") -> LastWord:
        """Make the word of a rank.

        Args:
            outcome: As the user names it; None: what the rest says.
            error: What is in flight.
            stopped: The signal after which the job was to stop; empty: none.

        Raises:
            ConfigError: there is no such outcome.
        """
        if outcome is not None:
            if outcome not in list(Outcome):
                raise ConfigError(
                    f"outcome is {outcome!r:.80}", hint=f"give one of {', '.join(Outcome)}, or leave it out"
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
        """Decide by all ranks' words: one that failed decides, then one that was preempted."""
        for outcome in (Outcome.FAILED, Outcome.PREEMPTED):
            for rank, word in enumerate(said):
                if word.outcome is outcome:
                    return cls(outcome, f"rank {rank}: {word.reason}"[:MAX_REASON_CHARS] if rank else word.reason)
        return said[0]


def _named(error: BaseException | None) -> str:
    return printable(type(error).__name__)[:MAX_REASON_CHARS] if error is not None else ""


class Ending:
    """Says how the job has ended.

    Args:
        store: Shared by all ranks; None: there is none.
        rank: This one.
        world: How many there are.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self._store = store
        self._rank = rank
        self._world = world

    def say(self, stream: Stream | None, step: int, word: LastWord, deadline: float) -> None:
        """(each rank) Say this rank's last word; on rank 0, write that of the job. Never raises, and ends in time.

        Args:
            stream: What was open, closed by now; None: nothing.
            step: Steps of the job so far.
            word: This rank's.
            deadline: Until when the other ranks are waited for, on the monotonic clock.
        """
        if stream is None or (self._rank == 0 and not self._may_end(stream)):
            return
        worker = Worker("stream-ckpt-ending")  # store and log may never answer
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
        """Return whether the generation is this trainer's, and has no marker in flight."""
        if stream.coordinator.busy:
            log.warning("no END is written, a marker is still in flight: the job looks like one that was killed")
        return not stream.coordinator.busy and stream.coordinator.fenced is None

    def _tell(self, worker: Worker, word: LastWord) -> None:
        said = json.dumps([word.outcome, word.reason])
        store = self._store
        if store is not None:
            _answer(worker, lambda: store.set(_name(self._rank), said), JOIN_S)

    def _hear(self, worker: Worker, mine: LastWord, deadline: float) -> LastWord | None:
        """(rank 0) What all ranks say together; None where one of them says nothing, and none has failed."""
        said: dict[int, LastWord] = {0: mine}
        store = self._store
        while len(said) < self._world and all(word.outcome is not Outcome.FAILED for word in said.values()):
            left_s = deadline - time.monotonic()
            news = _answer(worker, lambda: _read(store, self._world), left_s) if store is not None else None
            if news is None or left_s <= 0:
                silent = ", ".join(str(rank) for rank in range(self._world) if rank not in said)
                log.warning(
                    "no END is written, the job looks like one that was killed: rank %s did not close its "
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
        """(rank 0)"""
        claim = stream.claim
        end = End(claim.job, claim.generation, claim.nonce, step, word.outcome, word.reason, time.time())
        control = stream.generation.control
        _answer(worker, lambda: control.end(end), 2 * JOIN_S, "END is not known to be in the log")


def _name(rank: int) -> str:
    return f"end{rank}"


def _read(store: Any, world: int) -> dict[int, LastWord]:
    """Read what the other ranks have said so far."""
    said = {}
    for rank in range(1, world):
        if store.check([_name(rank)]):
            outcome, reason = json.loads(store.get(_name(rank)))
            said[rank] = LastWord(Outcome(outcome), reason)
    return said


def _answer(worker: Worker, ask: Callable[[], Any], bound_s: float, what: str = "") -> Any:
    """Ask a store or a log; None if no answer comes in time, with a warning that begins with ``what``."""
    asked: Future[Any] = worker.submit(ask)
    if not wait([asked], max(0.0, bound_s)).done:
        said = f"no answer for {bound_s:.0f} s"
    elif (error := asked.exception()) is not None:
        said = error.headline if isinstance(error, StreamCkptError) else f"{type(error).__name__}: {error}"
    else:
        return asked.result()
    if what:
        log.warning("%s, the job looks like one that was killed: %s", what, said)
    return None
