"""What one call takes: CPU time and memory, or counted work. Each is measured in a run of its own."""

from __future__ import annotations

import cProfile
import multiprocessing
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import allocator

from tests.work import PACKAGE, Lines, Place

TIME, LINES, FUNCTIONS = "time", "lines", "functions"
"""What is measured in one run of a call."""
_EVERY_S = 0.004
_PAGE = os.sysconf("SC_PAGESIZE")


class Peak:
    """Most memory that this process has on top of what it has now, sampled on a thread. Pages of files do not count."""

    def __init__(self) -> None:
        self._statm = os.open("/proc/self/statm", os.O_RDONLY)
        self._ended = threading.Event()
        allocator.trim()
        self._begin = self._most = self._now()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def _now(self) -> int:
        resident, shared = os.pread(self._statm, 200, 0).split()[1:3]
        return (int(resident) - int(shared)) * _PAGE

    def _watch(self) -> None:
        while not self._ended.wait(_EVERY_S):
            self._most = max(self._most, self._now())

    def end(self) -> tuple[int, int]:
        """Bytes at most, and bytes that are still held."""
        self._ended.set()
        self._thread.join()
        most = max(self._most, self._now())
        allocator.trim()
        held = self._now()
        os.close(self._statm)
        return most - self._begin, held - self._begin


def timed(act: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """CPU time and memory of a call, and its result."""
    peak, begin = Peak(), time.process_time()
    result = act()
    cpu = time.process_time() - begin
    most, held = peak.end()
    return {"cpu_s": cpu, "memory_bytes": most, "held_bytes": held}, result


class Calls:
    """Counts functions of the package that are entered, on this thread and on those that begin while this is in use.

    A round of a comprehension is no call, its start is one, and each value of a generator. Twice as slow as no
    counting, and not twenty times, as :class:`tests.work.Lines` is: for far sizes.
    """

    def __init__(self) -> None:
        self._profiles: list[cProfile.Profile] = []
        self._lock = threading.Lock()

    def __enter__(self) -> Calls:
        threading.setprofile(self._begin)
        return self

    def __exit__(self, *_: object) -> None:
        threading.setprofile(None)

    def of(self, act: Callable[[], object]) -> Counter[Place]:
        """How often each function is entered until ``act`` returns; the line is that of its ``def``."""
        before = self._all()
        own = self._begin()
        try:
            act()
        finally:
            own.disable()
        return self._all() - before

    def _begin(self, *_: object) -> cProfile.Profile:
        profile = cProfile.Profile(builtins=False)
        with self._lock:
            self._profiles.append(profile)
        profile.enable()  # in place of this function, on the thread that has just begun
        return profile

    def _all(self) -> Counter[Place]:
        found: Counter[Place] = Counter()
        with self._lock:
            for entry in (each for profile in self._profiles for each in profile.getstats()):
                if not isinstance(entry.code, str) and entry.code.co_filename.startswith(PACKAGE):
                    place = entry.code.co_filename[len(PACKAGE) + 1 :], entry.code.co_firstlineno
                    found[place] += entry.callcount
        return found


class Counts:
    """Work of a call: lines or functions of the package, files opened, folders listed, bytes read and written.

    Args:
        lines: Count lines that are executed; otherwise functions that are entered.
    """

    def __init__(self, lines: bool) -> None:
        self._events: Counter[str] = Counter()
        self._kind = "lines" if lines else "calls"
        self._work = Lines() if lines else Calls()
        self._work.__enter__()  # threads that begin between two calls work for later ones, too
        sys.addaudithook(self._note)  # no hook can be taken back: this process ends after its calls
        self._ahead = 0
        self._send, os.sendfile = os.sendfile, self._sent_away

    def _sent_away(self, out_fd: int, in_fd: int, offset: int | None, count: int) -> int:
        """``os.sendfile``: the store reads ahead by it, into /dev/null. The system counts that as written, too."""
        sent = self._send(out_fd, in_fd, offset, count)
        self._ahead += sent
        return sent

    def _note(self, event: str, _: object) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            self._events[event] += 1

    def of(self, act: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
        """Make a call; returns its counts, and its result."""
        self._events.clear()
        self._ahead = 0
        results: list[Any] = []
        read, written = _moved_bytes()
        places = self._work.of(lambda: results.append(act()))
        opened, listed = self._events["open"], self._events["os.listdir"] + self._events["os.scandir"]
        read_after, written_after = _moved_bytes()
        found = {
            self._kind: sum(places.values()),
            "opened": opened,
            "listed": listed,
            "read_bytes": read_after - read,
            "written_bytes": written_after - written - self._ahead,
            "places": {f"{path}:{line}": count for (path, line), count in places.most_common(400)},
        }
        return found, results[0]


def _moved_bytes() -> tuple[int, int]:
    """Bytes that this process has read and written by system calls. Maps of files do not count."""
    with open("/proc/self/io") as file:
        said = dict(line.split(": ") for line in file)
    return int(said["rchar"]), int(said["wchar"])


def all_counted(count: str, act: Callable[[Callable[[str, Callable[[], Any]], Any]], None]) -> dict[str, Any]:
    """Measure all calls that ``act`` makes through the function that it is given: time, or count lines or calls."""
    found: dict[str, Any] = {}
    how = timed if count == TIME else Counts(count == LINES).of

    def measure(name: str, call: Callable[[], Any]) -> Any:
        found[name], result = how(call)
        return result

    act(measure)
    return found


def apart(act: Callable[..., Any], *words: object) -> Any:
    """Run it in a fork, so that no call finds what another one has left in memory."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(act, words)


def apart_together(act: Callable[..., Any], ranks: int, *words: object) -> dict[str, dict[str, Any]]:
    """Run it in a fork for each rank, at once, with the rank as the last word; returns the sums over ranks."""
    with multiprocessing.get_context("fork").Pool(ranks) as pool:
        waiting = [pool.apply_async(act, (*words, rank)) for rank in range(ranks)]
        while not all(each.ready() for each in waiting):
            for each in waiting:
                if each.ready():
                    each.get()  # a rank that failed: the others would wait for it
            waiting[0].wait(0.1)
        by_rank = [each.get() for each in waiting]
    return {name: _sum([each[name] for each in by_rank]) for name in by_rank[0]}


def _sum(cells: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {kind: sum(cell[kind] for cell in cells) for kind in cells[0] if kind != "places"}
    if "places" in cells[0]:
        places: Counter[str] = Counter()
        for cell in cells:
            places.update(cell["places"])
        found["places"] = dict(places.most_common(400))
    return found
