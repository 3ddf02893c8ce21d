"""SIGKILL of workers of the materializer, and of materializer, gc and scrub, side by side on one store.

No task is too small for a worker here. Whoever dies, the store says what the log says, of every marker.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Sequence
from functools import partial
from multiprocessing.process import BaseProcess

from tests.children import is_gone, workers_of
from tests.faults.board import Row
from tests.faults.materializer import PATIENCE_S, Beside, check_listed_objects, compare_all, grow, start, wait
from tests.faults.subject import Form
from tests.synthetic import Job
from torchrec_stream_ckpt.inner import Catalog, Control, open_store
from torchrec_stream_ckpt.util.types import MarkerId

VERBS = ("materialize", "gc", "scrub")
KILLS_A_LOG = 24
BEFORE = 12
"""Markers of a log before anybody is killed."""
KEPT = 4
"""Markers that gc keeps besides those that were not compared: few, so that it has something to delete."""
MERGED = ["--rebase", "0.5", "--compact", "span16"]
_TRIES = 10
"""A gc or scrub that ends before it can be hit is begun again so often."""


def kills_of_workers(form: Form) -> None:
    """Each of the three, and workers, in random order; a new log after some kills, for it grows."""
    draw = form.draw("workers")
    kills = [(verb, False) for verb in VERBS] + [("materialize", True)]
    kills *= 16 if form.full else 1
    draw.shuffle(kills)
    for begin in range(0, len(kills), KILLS_A_LOG):
        _Store(form, draw, form.seed + begin).torment(kills[begin : begin + KILLS_A_LOG])


def _name(verb: str, of_worker: bool) -> str:
    where = {"gc": "while it deletes", "scrub": "while threads read"}.get(verb, "all tasks at workers")
    return f"SIGKILL of {'a worker of ' if of_worker else ''}{verb}, {where}"


class _Store:
    """One log and its store."""

    def __init__(self, form: Form, draw: random.Random, seed: int) -> None:
        self._board, self._draw = form.board, draw
        self._folder = form.folder("workers")
        self._output = self._folder / "materialize"
        self._output.touch()
        self._job = Job(self._folder / "log", seed=seed)
        self._objects = open_store(str(self._folder / "store"))
        self._arguments = [f"file://{self._folder / 'log'}", "--store", str(self._folder / "store")]
        self._arguments += ["--engine", "local:2", "--json", *MERGED]
        self._compared: set[MarkerId] = set()
        self._pids: set[int] = set()
        """Workers that must end with what has started them."""

    def torment(self, kills: Sequence[tuple[str, bool]]) -> None:
        """Kill (verb, whether a worker of it) one after the other, and compare all markers after each."""
        seen: set[str] = set()
        self._grow(BEFORE)
        self._finish(self._board.row(_name(*kills[0])))
        for verb, of_worker in kills:
            row = self._board.row(_name(verb, of_worker))
            row.injected += 1
            row.fired += self._kill(row, verb, of_worker)
            check_listed_objects(row, self._objects, seen)
            compare_all(row, self._job.log, self._objects, self._compared)
        self._finish(row)

    def _finish(self, row: Row) -> None:
        """Materialize all there is, and compare it."""
        process = start([*self._arguments, "--once"], self._output, large=True)
        process.join(PATIENCE_S)
        if process.exitcode != 0:
            row.err(self._output.read_text())
        compare_all(row, self._job.log, self._objects, self._compared, ended=True)

    def _grow(self, markers: int) -> None:
        for _ in range(markers):
            grow(self._job, self._draw)

    def _kill(self, row: Row, verb: str, of_worker: bool) -> bool:
        """Run all three, kill one; whether it died as it should have. Whoever was not killed goes on, or ends well."""
        beside, fired = Beside(self._folder, row), False
        process = start(
            [*self._arguments, "--poll-s", "0.01", "--scrub-bytes-per-s", "100MB"], self._output, large=True
        )
        try:
            for number in range(_TRIES):
                self._grow(3)
                fuse = f"gc.deleted=kill@{self._draw.randint(1, 3)}" if verb == "gc" else ""
                beside.start(KEPT + len(self._commits() - self._compared), fuse)
                victim = process if verb == "materialize" else beside.running[verb]
                if verb == "gc":
                    victim.join(PATIENCE_S)
                    fired = victim.exitcode == -signal.SIGKILL
                else:
                    fired = self._hit(victim, verb, of_worker, 0.6 / 2**number)
                if fired:
                    break
                beside.join()
            beside.join(killed="" if of_worker else verb)
            if of_worker or verb != "materialize":
                self._grow(1)
                wait("the newest marker", partial(self._has, max(self._commits())), self._output)
                if process.exitcode is not None:
                    row.err(f"the materializer ended with {process.exitcode}: {self._output.read_text()}")
        finally:
            self._pids.update(workers_of(process))
            process.kill()
            process.join()
            beside.join(killed=verb)
        wait("the end of all workers", lambda: all(is_gone(pid) for pid in self._pids), self._output)
        self._pids.clear()
        return fired

    def _hit(self, process: BaseProcess, verb: str, of_worker: bool, within_s: float) -> bool:
        """Kill it, or a worker of it, at a random moment, of a materializer once it has one; False: it ended before."""
        deadline = time.monotonic() + PATIENCE_S
        while verb == "materialize" and process.is_alive() and not workers_of(process):
            assert time.monotonic() < deadline, f"no worker was started: {self._output.read_text()}"
            time.sleep(0.002)
        process.join(self._draw.uniform(0.0, within_s))
        workers = [pid for pid in workers_of(process) if not is_gone(pid)]
        self._pids.update(workers)
        victims = workers if of_worker else [process.pid or 0]
        if not victims or not process.is_alive():
            return False
        victim = self._draw.choice(victims)
        os.kill(victim, signal.SIGKILL)
        if not of_worker:
            process.join()
            return process.exitcode == -signal.SIGKILL
        wait("its death", lambda: is_gone(victim), self._output)
        return True

    def _commits(self) -> set[MarkerId]:
        return set(Control(self._job.log).refresh().commits)

    def _has(self, marker: MarkerId) -> bool:
        return marker in Catalog.load(self._objects, Control(self._job.log).refresh().job).markers
