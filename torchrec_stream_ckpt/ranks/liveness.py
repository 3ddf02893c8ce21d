"""The call that each rank of a job is in: reported out of band over the job's own store, for ranks that wait long.

A rank that waits asks all ranks. Each of them answers from a separate thread, once a second, with its current call. So
a wait can end with the name of the missing rank, and a call that was made on one rank alone is named on all of them. A
rank that does not answer is frozen or dead. While no rank waits, each checks once a second whether it is asked.
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from torchrec_stream_ckpt.errors import ConfigError, RankLostError
from torchrec_stream_ckpt.util.interpreter_exit import end_at_exit
from torchrec_stream_ckpt.util.signal_safe import SafeEvent

log = logging.getLogger(__name__)

QUIET_S = 3.0
"""A rank asks the others only after a wait of this length."""
TICK_S = 1.0
SILENT_S = 3.0
"""A rank that has not answered for this long is frozen, dead, or cut off."""
PROOF_S = 4.0
"""Two ranks that have waited in different calls for this long wait for each other."""
WARN_S = 10.0
_LAST_WORD_S = 2.0
"""Longest time that a closing rank waits until its last answer is sent."""


@dataclass(slots=True)
class _Seen:
    """State of one rank, as far as known."""

    said: str = ""
    """Its last answer."""
    changed_s: float = 0.0
    """Time of the last change of the answer."""
    state: tuple[str, bool] = ("", False)
    """The call that it is in, and whether it waits there."""
    since_s: float = 0.0
    """Time since which that state holds."""


class Liveness:
    """The ranks of one checkpointer.

    Args:
        store: Shared by all ranks. If None, nothing is reported, and waits end without names.
        rank: This rank.
        world: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, world: int) -> None:
        self.store = store
        """Store shared by all ranks. None if the ranks share no store."""
        self._rank = rank
        self._world = world
        self.current = ""
        """The collective call that the training thread is in. Empty between calls."""
        self._call_ends_s: float | None = None
        self._waits_in_call = False
        self._waiting: set[object] = set()
        """One object per wait. It is removed even if a signal handler raises at the start of the wait."""
        self._asked = False
        self._alarm = ""
        self._beat = 0
        self._seen = {other: _Seen(since_s=time.monotonic()) for other in range(world) if other != rank}
        self._answered_s = time.monotonic()
        """Time of the store's last answer."""
        self.woken = SafeEvent()
        self.ending = SafeEvent()
        self._closed = False
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        """Held where the thread starts, ends, or is looked up."""
        self._start()

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> Liveness:
        """(all ranks) Create a roll over the store of a group, with a separate connection."""
        store = group.get_group_store() if hasattr(group, "get_group_store") else None
        with contextlib.suppress(RuntimeError, NotImplementedError, AttributeError):
            store = store.clone() if store is not None else None
        return cls(store, dist.get_rank(), dist.get_world_size())

    def close(self, call: str = "close()") -> None:
        """Report to waiting ranks that this rank makes no more calls."""
        self.current, self._waits_in_call, self._closed = call, True, True
        self.ending.set()
        self.woken.set()
        with self._lock:  # another thread may be starting it
            thread = self._thread
        if thread is not None and thread.is_alive():
            thread.join(_LAST_WORD_S)  # while the store exists

    def _start(self) -> None:
        """Start the thread if it is not running. Not needed without another rank."""
        begun = self._thread is not None and self._thread.is_alive()  # False if its start was interrupted
        if not begun and self.store is not None and self._world > 1:
            left, woken = SafeEvent(), self.woken
            self._thread = threading.Thread(
                target=_run, args=(weakref.ref(self), woken, self.ending, left), name="stream-ckpt-roll", daemon=True
            )
            self._thread.start()

            def leave() -> None:
                left.set()
                woken.set()

            end_at_exit(self._thread, leave)

    def _is_over(self) -> bool:
        """(its thread) Return whether it is no longer needed. A marker in flight may still wait after a close."""
        with self._lock:
            if not self._closed or self._waiting:
                return False
            self._thread = None
            return True

    @contextlib.contextmanager
    def call(self, name: str) -> Iterator[None]:
        """(training thread) Run a collective call, or one inside another, which then keeps its name."""
        before = self.current, self._call_ends_s
        if not self.current:
            self.current, self._call_ends_s = name, None
        try:
            yield
        finally:
            self.current, self._call_ends_s = before

    def bound(self, bound_s: float) -> None:
        """End all waits of the training thread's current call within ``bound_s``."""
        self._call_ends_s = time.monotonic() + bound_s

    def wait(self, done: Callable[[float], bool], bound_s: float, what: str = "", *, in_call: bool = True) -> None:
        """Wait for other ranks.

        Args:
            done: Waits at most for the given seconds, and returns whether the wait is over.
            bound_s: Longest time of the wait.
            what: Name of the wait for messages. By default the call that the training thread is in.
            in_call: True on the training thread.

        Raises:
            RankLostError: The wait was not over in time. Names the missing ranks.
            ConfigError: Other ranks are in another call, and wait there as well.
        """
        begin = time.monotonic()
        ends = begin + bound_s
        if in_call and self._call_ends_s is not None:
            ends = min(ends, self._call_ends_s)
        if done(max(0.0, min(QUIET_S, ends - begin))):
            return
        what = what or self.current or "a collective"
        with self._asking(in_call=in_call):
            warned = False
            while not done(max(0.0, min(0.5, ends - time.monotonic()))):
                if in_call:
                    self._check_calls(what)
                if time.monotonic() > ends:
                    waited_s = time.monotonic() - begin
                    raise RankLostError(
                        f"rank {self._rank} has waited {waited_s:.0f} s in {what} for {self._missing()}",
                        hint="check that rank's output and host; restart the job if the rank stays silent",
                    )
                if not warned and time.monotonic() - begin > WARN_S:
                    warned = True
                    self._tell(f"rank {self._rank} waits in {what} for {self._missing()}", fatal=False)

    def lost(self, error: Exception, what: str) -> RankLostError:
        """Return the error for a broken connection. It names the lost rank, as soon as it is known."""
        with self._asking(in_call=False):
            ends = time.monotonic() + SILENT_S + 2 * TICK_S
            while self.store is not None and time.monotonic() < ends and not (self._silent() or self._gone()):
                time.sleep(0.1)
        log.debug("a connection to another rank broke: %s", error)
        hint = "check that rank's output and host; restart the job"
        if gone := self._gone():
            said = ", ".join(f"rank {other} has closed its StreamCheckpointer" for other in gone)
            hint = "make every call on all ranks, including close(), at the same step boundary"
        else:
            said = f"it has lost {self._missing()}"
        return RankLostError(f"rank {self._rank} cannot finish {what}: {said}", hint=hint)

    # Known state.

    def _silent(self) -> list[int]:
        now = time.monotonic()
        return [other for other, seen in self._seen.items() if now - seen.changed_s > SILENT_S]

    def _gone(self) -> list[int]:
        """Return the ranks that have closed."""
        return [other for other, seen in self._seen.items() if seen.state[0] == "close()"]

    def _missing(self) -> str:
        """Describe the missing ranks and their current calls."""
        if self.store is None:
            return "another rank"
        if time.monotonic() - self._answered_s > SILENT_S:
            return "rank 0, or the host of the ranks' store, which does not answer"
        if silent := self._silent():
            return ", ".join(f"rank {other} (no sign of life: frozen, dead or cut off)" for other in silent)
        busy = [other for other, seen in self._seen.items() if not seen.state[1]] or list(self._seen)
        calls = {other: self._seen[other].state[0] or "no call of this library" for other in busy}
        return ", ".join(f"rank {other} (in {call})" for other, call in calls.items())

    def _check_calls(self, mine: str) -> None:
        """Raise ConfigError once ranks wait for each other in different calls."""
        if not self._alarm:
            now = time.monotonic()
            others = {
                other: seen.state[0]
                for other, seen in self._seen.items()
                if seen.state[1] and seen.state[0] not in ("", mine) and now - seen.since_s > PROOF_S
            }
            if not others:
                return
            calls = {self._rank: mine} | {o: seen.state[0] or "no call" for o, seen in self._seen.items()}
            said = ", ".join(f"rank {rank} is in {calls[rank]}" for rank in sorted(calls))
            self._tell(said, fatal=True)
        raise ConfigError(
            self._alarm, hint="make every call on all ranks, at the same step boundary: calls are collective"
        )

    def out_of_step(self, calls: list[str]) -> ConfigError:
        """Return the error for ranks that are in different calls."""
        said = ", ".join(f"rank {rank} is in {call or 'no call'}" for rank, call in enumerate(calls))
        self._alarm = self._alarm or said
        return ConfigError(said, hint="make every call on all ranks, at the same step boundary: calls are collective")

    def _tell(self, said: str, *, fatal: bool) -> None:
        """Log a message on all ranks."""
        log.log(logging.ERROR if fatal else logging.WARNING, "%s", said)
        if fatal:
            self._alarm = said
        if self.store is not None:
            self._outbox = (said, fatal)
            self.woken.set()

    _outbox: tuple[str, bool] | None = None

    # The thread.

    @contextlib.contextmanager
    def _asking(self, *, in_call: bool) -> Iterator[None]:
        now = time.monotonic()
        if not self._waiting:
            for seen in self._seen.values():
                seen.changed_s = seen.since_s = now
            self._answered_s = now
        mine = object()
        try:
            with self._lock:
                self._waiting.add(mine)
                self._start()
            self._waits_in_call = self._waits_in_call or in_call
            self.woken.set()
            yield
        finally:
            with self._lock:
                self._waiting.discard(mine)
            if in_call:
                self._waits_in_call = False

    def _tick(self, heard: set[str]) -> None:
        store = self.store
        assert store is not None
        if self._waiting:
            store.set("ask", "1")
            self._asked = True
        elif self._asked:
            self._asked = False
            store.delete_key("ask")
        if self._waiting or self._closed or store.check(["ask"]):
            self._beat += 1
            store.set(f"rank{self._rank}", json.dumps([self._beat, self.current, self._waits_in_call]))
        if (outbox := self._outbox) is not None:
            self._outbox = None
            store.set("said", json.dumps(outbox))
            heard.add(outbox[0])
        if store.check(["said"]):
            said, fatal = json.loads(store.get("said"))
            if said not in heard:
                heard.add(said)
                log.log(logging.ERROR if fatal else logging.WARNING, "%s", said)
            if fatal:
                self._alarm = self._alarm or said
        if self._waiting:
            self._read(store)
        self._answered_s = time.monotonic()

    def _read(self, store: Any) -> None:
        for other, seen in self._seen.items():
            name = f"rank{other}"
            if not store.check([name]):
                continue
            said = store.get(name).decode()
            now = time.monotonic()
            if said == seen.said:
                if seen.state[0] == "close()":
                    seen.changed_s = now  # it has sent its last answer
                continue
            _, call, waits = json.loads(said)
            if (call, waits) != seen.state:
                seen.state, seen.since_s = (call, waits), now
            seen.said, seen.changed_s = said, now


def _run(of: weakref.ref[Liveness], woken: threading.Event, ending: threading.Event, left: threading.Event) -> None:
    """Run the thread of a roll. It ends with the roll, even if that is never closed."""
    heard: set[str] = set()
    while True:
        woken.wait(TICK_S)
        woken.clear()
        roll = of()
        if roll is None or left.is_set():
            return
        try:
            roll._tick(heard)
        except Exception as error:  # the store is gone, with the rank that held it: waits report that
            log.debug("the ranks' store does not answer: %s", error)
            ending.wait(TICK_S)
        if roll._is_over():
            return
        del roll
        ending.wait(TICK_S / 4)
