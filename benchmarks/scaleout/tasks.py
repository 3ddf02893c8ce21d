"""Speed of a scrub: on one core by the calling thread, and on several cores by several threads."""

from __future__ import annotations

import os
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.log.control.partition import Control
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.maintain.engine.api import Site
from torchrec_stream_ckpt.maintain.scrub.scrubber import AHEAD, Scrubber
from torchrec_stream_ckpt.store.api import open_store


class Nothing:
    """A task that does nothing: what it costs to hand one over."""

    num_bytes = 2**40

    def run(self, site: Site) -> None: ...


def tasks(root: Path, store: Path, cores: int, rounds: int) -> dict[str, Any]:
    """Seconds of a scrub by one core and by ``cores``, in turns.

    Args:
        root: A log.
        store: Where it is folded.
        cores: How many.
        rounds: How often.
    """
    lineage = Control(FileLog(root)).refresh()
    found: dict[int, list[float]] = {1: [], cores: []}
    done: set[int] = set()
    for number in range(rounds):
        for count in random.Random(number).sample([1, cores], 2):
            seconds, amount = timed(lineage, store, count)
            found[count].append(seconds)
            done.add(amount)
    (amount,) = done
    ratios = [a / b for a, b in zip(found[1], found[cores], strict=True)]
    times = {"one_core_s": found[1], "several_s": found[cores], "one_core_over_several": statistics.median(ratios)}
    return {"scrub": {"done": amount} | times}


def timed(lineage: Lineage, store: Path, cores: int) -> tuple[float, int]:
    """Wall seconds of a pass on so many cores, and the bytes that it has read."""
    usable = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(usable)[:cores]))  # threads that begin from here on have it, too
    try:
        with ThreadPoolExecutor(AHEAD) as pool:
            made = Scrubber(open_store(str(store)), lambda: lineage, "command", pool=pool if cores > 1 else None)
            begin = time.perf_counter()
            for _ in made.pieces(anew=True):
                pass
            seconds = time.perf_counter() - begin
    finally:
        os.sched_setaffinity(0, usable)
    assert not made.counts.scrub_damaged
    return seconds, made.counts.scrubbed_bytes
