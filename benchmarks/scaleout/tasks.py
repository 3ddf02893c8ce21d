"""What threads make of a scrub, and workers of a comparison with a proof: by one and by several."""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from tests import builders
from tests.evolved import EvolvingJob
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.maintain.compactor import Policy
from torchrec_stream_ckpt.maintain.engine.api import Engine, InProcess, Site
from torchrec_stream_ckpt.maintain.engine.parcel import SiteAddress
from torchrec_stream_ckpt.maintain.engine.processes import Processes
from torchrec_stream_ckpt.maintain.materializer import Materializer
from torchrec_stream_ckpt.maintain.proof_checker import read_shares
from torchrec_stream_ckpt.maintain.scrub.scrubber import Scrubber
from torchrec_stream_ckpt.proofs import window
from torchrec_stream_ckpt.proofs.window import WindowReader
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.catalog import Catalog
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.util.types import StateSpec

DIM = 64
READERS = 4


class Nothing:
    """A task that does nothing: what it costs to hand one over."""

    num_bytes = 2**40

    def run(self, site: Site) -> None: ...


def make_small() -> None:
    """For a smoke test: few rows are several tasks."""
    window.SHARE_BYTES = 2**16


class Proved:
    """One marker that proves all rows, folded into the folder of its log."""

    def __init__(self, root: Path, rows: int) -> None:
        table = builders.table("t", rows, DIM, "float32", StateSpec("momentum1", "float32", True))
        job = EvolvingJob(root, schema=Schema((replace(table, id=3),)), width=POSITIONS)
        job.first(job.schema)
        job.commit()
        log, self.objects = FileLog(root), open_store(str(root))
        self.lineage = Control(log).refresh()
        with ThreadPoolExecutor(READERS) as pool:
            dense, policy = open_dense(str(root)), Policy(rebase=0, compact="none")
            list(Materializer(log, self.objects, lambda _: dense, pool, policy).catch_up(self.lineage))

    def compare(self, engine: Engine, pool: ThreadPoolExecutor) -> int:
        """Returns the bytes that were read."""
        run = partial(read_shares, engine, lambda: None) if not isinstance(engine, InProcess) else None
        reader, catalog = WindowReader(self.objects, pool, run=run), Catalog.load(self.objects, self.lineage.job)
        found = reader.check(self.lineage, catalog, max(self.lineage.commits))
        assert not found.differing
        return found.num_bytes


def tasks(root: Path, store: Path, scratch: Path, rows: int, workers: int, rounds: int) -> dict[str, Any]:
    """Seconds of each, by one core and by ``workers``, in turns.

    Args:
        root: A log.
        store: Where it is folded.
        scratch: For a job that proves its rows.
        rows: Of that job.
        workers: How many.
        rounds: How often.
    """
    proved, held = Proved(scratch / "proved", rows), open_store(str(store))
    lineage = Control(FileLog(root)).refresh()

    def scrub(engine: Engine, pool: ThreadPoolExecutor) -> int:
        made = Scrubber(held, lambda: lineage, "command", pool=pool if engine.workers > 1 else None)
        list(made.pieces(anew=True))
        assert not made.counts.scrub_damaged
        return made.counts.scrubbed_bytes

    works: dict[str, tuple[str, Callable[[Engine, ThreadPoolExecutor], int]]] = {
        "scrub": (held.url, scrub),
        "proof": (proved.objects.url, proved.compare),
    }
    found: dict[str, dict[int, list[float]]] = {name: {1: [], workers: []} for name in works}
    done: dict[str, set[int]] = {name: set() for name in works}
    for number in range(rounds):
        turns = [(name, count) for name in works for count in (1, workers)]
        for name, count in random.Random(number).sample(turns, len(turns)):
            url, work = works[name]
            seconds, amount = timed(url, work, count)
            found[name][count].append(seconds)
            done[name].add(amount)
    assert all(len(each) == 1 for each in done.values()), done
    return {
        name: {
            "done": done[name].pop(),
            "one_core_s": each[1],
            "several_s": each[workers],
            "one_core_over_several": statistics.median(a / b for a, b in zip(each[1], each[workers], strict=True)),
        }
        for name, each in found.items()
    }


def timed(url: str, work: Callable[[Engine, ThreadPoolExecutor], int], workers: int) -> tuple[float, int]:
    """Wall seconds on as many cores as workers, which have started before, and what was done."""
    address = SiteAddress(uri=None, kafka_options=None, store=url, store_options=None)
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(usable)[:workers]))
    try:
        with ThreadPoolExecutor(READERS) as pool:
            here = Site(None, open_store(url), pool)
            engine: Engine = InProcess(here) if workers == 1 else Processes(here, address, workers)
            waiting = [engine.submit(Nothing()) for _ in range(workers)]
            while left := [future for future in waiting if not future.done()]:
                engine.wait(left, 1.0)
            begin = time.perf_counter()
            amount = work(engine, pool)
            seconds = time.perf_counter() - begin
            engine.close()
    finally:
        os.sched_setaffinity(0, usable)
    return seconds, amount
