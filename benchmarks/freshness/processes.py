"""The trainer and the replica of the case: each a process on one core, which answers calls."""

from __future__ import annotations

import hashlib
import os
import resource
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from common import fresh_processes
from job import Shape, build, join_group

from torchrec_stream_ckpt import FollowedTables, StreamCheckpointer, StreamConfig, follow
from torchrec_stream_ckpt.log.api import open_log

Seen = tuple[float, bytes]
"""A time of the clock that all processes of a host share, and the bits of the probe row then."""
_LOOK_S = 0.0005
"""Pause between two lookups of the probe row: ages are that much too old at most."""
_LOOKUP_ROWS = 64
_WAIT_S = 120.0
_IDLE_S = 0.5
CPU, CLOCK = "CPU", "clock"
_TURN_S = 0.01
"""Time in which a replica looks at a log once at most. Work that is no follower's has turns of the same length."""
_LOOP = 10_000
"""Numbers that a loop without memory adds up before it looks whether it is to end."""
_LOOPS = 1000
_STRANGER_ROWS = 100_000


def cores() -> tuple[set[int], set[int]]:
    """Return the cores of the trainer and of the replica: one each if there are two."""
    found = sorted(os.sched_getaffinity(0))
    return {found[0]}, {found[-1]}


def used() -> dict[str, float]:
    """Return what this process has used so far, all threads: seconds of CPU and of the clock, and counts of its work.

    Switches are those of the kernel: of a thread that waits for something, and of one that has to leave its core.
    Reads and writes are system calls of these names; a Kafka client uses others.
    """
    own = resource.getrusage(resource.RUSAGE_SELF)
    calls = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return {
        CPU: time.process_time(),
        CLOCK: time.monotonic(),
        "waits": own.ru_nvcsw,
        "interruptions": own.ru_nivcsw,
        "page faults": own.ru_minflt + own.ru_majflt,
        "reads and writes": int(calls["syscr"]) + int(calls["syscw"]),
    }


def since(before: dict[str, float]) -> dict[str, float]:
    """Return what this process has used since an earlier :func:`used`."""
    return {name: value - before[name] for name, value in used().items()}


class Remote:
    """An object in a fresh process that is bound to some cores.

    Args:
        pinned: The cores.
        make: Makes the object there; importable.
        args: Its arguments.
    """

    def __init__(self, pinned: set[int], make: Callable[..., Any], *args: Any) -> None:
        context = fresh_processes()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, pinned, make, args), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def call(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        return self._answer()

    def _answer(self) -> Any:
        try:
            result, error = self._pipe.recv()
        except EOFError:
            raise SystemExit("Error: a process of this case died") from None
        if error:
            raise SystemExit(f"Error: a process of this case failed:\n{error}")
        return result

    def __enter__(self) -> Remote:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_error: object) -> None:
        if kind is None:
            self.call("close")
        self._pipe.close()
        self._process.join(_WAIT_S)


def _serve(pipe: Connection, pinned: set[int], make: Callable[..., Any], args: tuple[Any, ...]) -> None:
    os.sched_setaffinity(0, pinned)
    torch.set_num_threads(1)
    try:
        served = make(*args)
        pipe.send((None, ""))
        while True:
            name, given = pipe.recv()
            pipe.send((getattr(served, name)(*given), ""))
            if name == "close":
                return
    except EOFError:
        return
    except BaseException:
        pipe.send((None, traceback.format_exc()))
        raise


class Trainer:
    """One rank that trains small steps, one after the other, and streams them.

    Args:
        folder: For the process group, and for dense state.
        uri: The log.
        shape: Of the job.
        marker_s: Seconds between markers; None for markers on request alone.
    """

    def __init__(self, folder: Path, uri: str, shape: Shape, marker_s: float | None) -> None:
        folder.mkdir()
        join_group(folder, 0, 1)
        self._job, self._shape = build(shape), shape
        self._random = torch.Generator().manual_seed(1)
        self._last = max(name for name in self._job.tensors if "weight" in name)
        self._store = f"file://{folder}/store"
        self._config = StreamConfig(uri=uri, store=self._store, marker_every=None, marker_every_s=marker_s, head=None)
        self._ckpt = StreamCheckpointer(self._job.model, self._job.optimizer, config=self._config)
        self.mark()

    def mark(self) -> None:
        """Commit a marker of all that was trained."""
        self._ckpt.mark().result(_WAIT_S)

    def train(self, steps: int, ids_a_step: int, rest_s: float = 0.0) -> tuple[list[Seen], dict[str, float]]:
        """Train, and commit a marker at the end.

        Args:
            steps: Number of steps.
            ids_a_step: Ids of each table and step.
            rest_s: Sleep after each step, as while a GPU computes.

        Returns:
            For each step when ``step()`` ended, and the bits of the last row of the last table; what this process has
            used, and the rows and bytes that it has sent.
        """
        found: list[Seen] = []
        probe = self._job.tensors[self._last][-1, :2]
        before, sent = used(), self._ckpt.stats()
        for _ in range(steps):
            ids = [torch.randint(0, each, (ids_a_step,), generator=self._random) for each in self._shape.rows]
            ids[-1][-1] = self._shape.rows[-1] - 1
            self._job.train(ids, bags=ids_a_step // 4)
            self._ckpt.step()
            found.append((time.monotonic(), probe.numpy().tobytes()))
            if rest_s:
                time.sleep(rest_s)
        self.mark()
        now = self._ckpt.stats()
        return found, {**since(before), "rows": now.rows - sent.rows, "bytes": now.num_bytes - sent.num_bytes}

    def loop_s(self) -> float:
        """Return the seconds of CPU of a loop that needs no memory."""
        begin = time.thread_time()
        for _ in range(_LOOPS):
            sum(range(_LOOP))
        return time.thread_time() - begin

    def touch(self, rows: int) -> None:
        """Change this many rows of each table in one step, and commit a marker."""
        self._job.train([torch.randperm(each, generator=self._random)[:rows] for each in self._shape.rows])
        self._ckpt.step()
        self.mark()

    def digests(self) -> list[str]:
        return [_digest(tensor) for name, tensor in sorted(self._job.tensors.items()) if "weight" in name]

    def close(self) -> None:
        self._ckpt.close()


class Replica:
    """Followers of the log, each known by its mode and by whether it applies updates in slices.

    Args:
        uri: The log.
        store: The job's store.
    """

    def __init__(self, uri: str, store: str) -> None:
        self._uri, self._store = uri, store
        self._tables: dict[tuple[str, bool], FollowedTables] = {}
        self._stop = threading.Event()
        self._reader: threading.Thread | None = None
        self._found: list[Any] = []
        self._before: dict[str, float] = {}

    def open(self, mode: str, slices: bool = False) -> None:
        """Load the newest marker."""
        follower = follow(self._uri, store=self._store, mode=mode)  # type: ignore[arg-type]
        self._tables[mode, slices] = tables = FollowedTables(follower, slices=slices)
        tables.advance(_WAIT_S)

    def release(self) -> str:
        """Close all followers. Returns what has woken them."""
        woken_by = ""
        for tables in self._tables.values():
            tables.close()
            if tables.failure is not None:
                raise tables.failure
            woken_by = tables.follower.stats.woken_by
        self._tables.clear()
        return woken_by

    close = release

    def advance(self, mode: str, slices: bool = False) -> float:
        """Apply all updates that there are. Returns the seconds that this took."""
        begin = time.perf_counter()
        while not self._tables[mode, slices].advance():
            pass
        return time.perf_counter() - begin

    def digests(self, mode: str, slices: bool = False) -> list[str]:
        with self._tables[mode, slices].reading() as served:
            return [_digest(tensor) for _, tensor in sorted(served.tables.items())]

    def watch(self, mode: str) -> None:
        """Follow on one thread, and look the probe row up on another one."""
        tables = self._tables[mode, False]
        tables.start()
        self._begin(lambda: self._watch(tables))

    def _watch(self, tables: FollowedTables) -> None:
        last = b""
        while not self._stop.is_set():
            with tables.reading() as served:
                bits = served.tables[max(served.tables)][-1, :2].numpy().tobytes()
            if bits != last:
                self._found.append((time.monotonic(), bits))
                last = bits
            time.sleep(_LOOK_S)

    def start(self, mode: str) -> None:
        """Follow on a thread while nobody reads."""
        self._tables[mode, False].start()

    def reset(self) -> None:
        self._before = used()

    def used(self) -> dict[str, float]:
        """Return what this process has used since :meth:`reset`."""
        return since(self._before)

    def wait(self) -> None:
        """Wait for news of the log on a thread, as a follower in ``rows`` mode does, and read nothing."""
        self._begin(self._wait)

    def _wait(self) -> None:
        with closing(open_log(self._uri)) as log, closing(log.watch()) as watch:
            while not self._stop.is_set():
                watch.wait(_TURN_S, [0])
                time.sleep(_TURN_S)

    def work(self, share: float) -> None:
        """Write rows of a table that nobody follows, on a thread, for a share of the time of its core. Read no log."""
        self._begin(lambda: self._work(share))

    def _work(self, share: float) -> None:
        random = torch.Generator().manual_seed(2)
        target, source = (torch.zeros(_STRANGER_ROWS, 64) for _ in range(2))
        while not self._stop.is_set():
            begin_s, end_s = time.monotonic(), time.thread_time() + share * _TURN_S
            while time.thread_time() < end_s:
                ids = torch.randint(0, _STRANGER_ROWS, (512,), generator=random)
                target.index_copy_(0, ids, source.index_select(0, ids))
            time.sleep(max(0.0, begin_s + _TURN_S - time.monotonic()))

    def spin(self) -> None:
        """Loop without memory on a thread, until :meth:`found`."""
        self._begin(self._spin)

    def _spin(self) -> None:
        while not self._stop.is_set():
            sum(range(_LOOP))

    def hammer(self, slices: bool, pinned: set[int], apply: bool) -> list[tuple[float, float]]:
        """Look rows up on a thread, one lookup after the other, while an update is applied; or while none is.

        Returns:
            For each lookup the seconds until it was inside ``reading()``, counted from the end of the lookup before
            it, and those that it took there.
        """
        for thread in os.listdir("/proc/self/task"):
            os.sched_setaffinity(int(thread), pinned)
        tables = self._tables["markers", slices]
        self._begin(lambda: self._hammer(tables))
        time.sleep(0.01)
        self._found.clear()
        if apply:
            self.advance("markers", slices)
        else:
            time.sleep(_IDLE_S)
        return self.found()

    def _hammer(self, tables: FollowedTables) -> None:
        now, found, ids = time.perf_counter, self._found, torch.arange(_LOOKUP_ROWS) * 7
        end, last = now(), False
        while not last:  # one more after the stop: a reader that never ran during a short update waited for it, too
            last, begin = self._stop.is_set(), end
            with tables.reading() as served:
                entered = now()
                for tensor in served.tables.values():
                    tensor[ids].sum(0)
            end = now()
            found.append((entered - begin, end - entered))

    def _begin(self, body: Callable[[], None]) -> None:
        self._found.clear()
        self._stop.clear()
        self._reader = threading.Thread(target=body, daemon=True)
        self._reader.start()

    def await_bits(self, bits: bytes, most_s: float) -> None:
        """Wait until :meth:`watch` has found these, for at most so long."""
        end = time.monotonic() + most_s
        while time.monotonic() < end and not (self._found and self._found[-1][1] == bits):
            time.sleep(0.02)

    def found(self) -> list[Any]:
        """End the thread, if there is one. Returns what it has found."""
        self._stop.set()
        if self._reader is not None:
            self._reader.join(_WAIT_S)
        return list(self._found)


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().data).hexdigest()
