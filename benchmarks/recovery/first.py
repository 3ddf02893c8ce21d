"""The newest marker by the first load of a fresh process, as after a restart: schemes that can begin from files alone.

A scheme of ``run.py`` restores many times in one process, so that memory which an earlier restore has freed is at hand.
Here each load has a process of its own (fork and exec). Naive increments, differentials and IncrCP know from memory
where things lie, and have no such figure.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from at_hand import have_at_hand
from cache import STATES, prepare
from common import UnavailableError, fresh_processes
from crc32c import crc32c
from ours import FromLog, FromStore
from saved import TorchLoad, TorchLoadAndCopy, TorchMmapAndCopy
from workload import Tables, Workload

from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.maintain.compactor import Policy

FROM_FILES: dict[str, Callable[..., Any]] = {
    "torch.load": TorchLoad,
    "torch.load + copy": TorchLoadAndCopy,
    "torch.load, mmap + copy": TorchMmapAndCopy,
    "log, no store": FromLog,
    "store": partial(FromStore, Policy(rebase=0, compact="none")),
    "store, by default": partial(FromStore, Policy()),
}
Times = dict[str, dict[str, list[float]]]
"""Seconds of each round, by the state of the page cache and scheme."""


@dataclass(frozen=True)
class Found:
    """What a fresh process finds of a job: no more than its schemes ask a trainer for."""

    root: Path
    workload: Workload

    @cached_property
    def log(self) -> FileLog:
        return FileLog(self.root)


def load(name: str, found: Found, folder: Path, marker: int, threads: int) -> tuple[float, int]:
    """(in a fresh process) Seconds of one restore, and a checksum of what came back."""
    torch.set_num_threads(threads)
    scheme = FROM_FILES[name](name, folder, found, frozenset([marker]))
    tables = Tables.of(found.workload)
    have_at_hand(tables.num_bytes * 5 // 4)
    begin = time.perf_counter()
    scheme.restore(marker, tables)
    taken = time.perf_counter() - begin
    scheme.land(tables)
    return taken, crc32c(tables.sums.numpy().data, crc32c(tables.weights.numpy().data))


def first_loads(found: Found, folders: dict[str, Path], marker: int, rounds: int) -> tuple[Times, dict[str, str]]:
    """Each scheme once a round, by turns; and why there are no cold ones, by name.

    Raises:
        ValueError: two schemes have brought back different rows.
    """
    names, order, came_back = sorted(set(folders) & set(FROM_FILES)), random.Random(0), set()
    times: Times = {state: {name: [] for name in names} for state in STATES}
    unavailable: dict[str, str] = {}
    for state in STATES:
        for _ in range(rounds):
            for name in order.sample(names, len(names)):
                try:
                    prepare(state, *_places(found, folders[name]))
                except UnavailableError as error:
                    unavailable[name] = str(error)
                    continue
                with fresh_processes().Pool(1) as pool:
                    taken, checksum = pool.apply(load, (name, found, folders[name], marker, torch.get_num_threads()))
                times[state][name].append(taken)
                came_back.add(checksum)
    if len(came_back) > 1:
        raise ValueError(f"first loads of marker {marker} have brought back {len(came_back)} different states")
    return times, unavailable


def _places(found: Found, folder: Path) -> Iterable[Path]:
    return found.root, folder, folder.parent / "torch-save.pt"
