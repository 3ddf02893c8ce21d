"""Building and restoring by several schemes in turn, timed: interleaved rounds, the page cache warm or cold."""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from baselines import Reads, Scheme, Timing, UnavailableError
from stream import Trainer
from workload import Tables, Values, Workload, wrong_rows

_BLOCK = 8 << 20
_DROP_CACHES = Path("/proc/sys/vm/drop_caches")

Make = Callable[[str, Path, Trainer, frozenset[int]], Scheme]


@dataclass
class Record:
    """What was measured of one scheme. Times in seconds, bytes behind each interval, the base first."""

    unavailable: str = ""
    """Why there is nothing, or no more."""
    build_s: list[float] = field(default_factory=list)
    stored: list[int] = field(default_factory=list)
    written: list[int] = field(default_factory=list)
    read_back: list[int] = field(default_factory=list)
    dead: list[int] = field(default_factory=list)
    reads: dict[int, Reads] = field(default_factory=dict)
    """By marker."""
    exact: list[int] = field(default_factory=list)
    """Markers whose restored state was the reference's, bit for bit."""
    no_cold: str = ""
    """Why there are no cold times."""
    warm: dict[int, list[Timing]] = field(default_factory=dict)
    cold: dict[int, list[Timing]] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """What to measure."""

    markers: tuple[int, ...]
    """To restore; the last one is the newest."""
    rounds: int
    cold_rounds: int
    drop_caches: bool
    """Chill by dropping the whole page cache (root), not by asking the kernel to forget the files."""


@dataclass(frozen=True)
class Measured:
    """A group behind its measurements; its files are still there."""

    records: dict[str, Record]
    schemes: dict[str, Scheme]
    tables: Tables


class WrongStateError(Exception):
    """A scheme has restored something else than the reference."""


def run_group(workload: Workload, values: Values, makes: dict[str, Make], plan: Plan, scratch: Path) -> Measured:
    """Build every marker by every scheme, then restore the chosen ones.

    Raises:
        WrongStateError: a restored state is not the reference, bit for bit.
    """
    gc.freeze()  # so that collecting before each restore is quick
    scratch.mkdir(parents=True)
    trainer = Trainer(scratch / "log", workload, values)
    keep = frozenset(plan.markers)
    schemes = {
        name: make(name, scratch / f"scheme-{number}", trainer, keep)
        for number, (name, make) in enumerate(makes.items())
    }
    records = {name: Record() for name in schemes}
    _build_all(trainer, schemes, records)
    trainer.close()
    tables = trainer.live  # from here on, what restores write into
    live = {name: scheme for name, scheme in schemes.items() if not records[name].unavailable}
    for marker in plan.markers:
        _verify(live, records, marker, tables, workload, values)
    for marker in plan.markers:
        _restore_all(live, records, marker, tables, plan)
    return Measured(records, schemes, tables)


def _build_all(trainer: Trainer, schemes: dict[str, Scheme], records: dict[str, Record]) -> None:
    for interval in range(trainer.workload.intervals + 1):
        trainer.interval()
        for name in _rotated(list(schemes), interval):
            record, scheme = records[name], schemes[name]
            if record.unavailable:
                continue
            try:
                begin = time.perf_counter()
                scheme.build(interval)
                taken = time.perf_counter() - begin
            except UnavailableError as error:
                record.unavailable = str(error)
                continue
            ledger = scheme.ledger
            record.build_s.append(taken - ledger.untimed_s)
            ledger.untimed_s = 0.0
            record.stored.append(ledger.stored)
            record.dead.append(ledger.dead)
            record.written.append(ledger.written)
            record.read_back.append(ledger.read_back)
        tell(f"{trainer.workload.name}: marker {interval} of {trainer.workload.intervals} built by all")


def _verify(
    schemes: dict[str, Scheme],
    records: dict[str, Record],
    marker: int,
    tables: Tables,
    workload: Workload,
    values: Values,
) -> None:
    for name, scheme in schemes.items():
        tables.poison()
        try:
            scheme.restore(marker, tables)
        except UnavailableError:
            continue
        scheme.land(tables)
        if wrong := wrong_rows(tables, workload, values, marker):
            raise WrongStateError(f"{workload.name}: {name} restored marker {marker} with {wrong} wrong rows")
        records[name].exact.append(marker)
        records[name].reads[marker] = scheme.reads(marker)
    tell(f"{workload.name}: marker {marker} restored exactly by all")


def _restore_all(
    schemes: dict[str, Scheme], records: dict[str, Record], marker: int, tables: Tables, plan: Plan
) -> None:
    able = [name for name in schemes if marker in records[name].exact]
    for number in range(plan.rounds):
        for name in _rotated(able, number):
            timing = _timed(schemes[name], marker, tables, warm)
            records[name].warm.setdefault(marker, []).append(timing)
    for number in range(plan.cold_rounds):
        for name in _rotated(able, number):
            try:
                timing = _timed(schemes[name], marker, tables, partial(chill, drop_caches=plan.drop_caches))
            except UnavailableError as error:
                records[name].no_cold = str(error)
                continue
            records[name].cold.setdefault(marker, []).append(timing)
    tell(f"marker {marker} measured")


def _timed(scheme: Scheme, marker: int, tables: Tables, prepare: Callable[[Sequence[Path]], None]) -> Timing:
    """One restore, and the delta part once more by itself; ``prepare`` warms or chills what they read."""
    gc.collect()
    prepare(list(scheme.files(marker)))
    begin = time.perf_counter()
    scheme.restore(marker, tables)
    whole_s = time.perf_counter() - begin
    scheme.land(tables)
    if not scheme.split:
        return Timing(whole_s, None)
    if prepare is not warm:  # they are, behind the restore
        prepare(list(scheme.files(marker)))
    return Timing(whole_s, scheme.restore_delta(marker, tables))


def _rotated(names: Sequence[str], number: int) -> list[str]:
    if not names:
        return []
    cut = number % len(names)
    return [*names[cut:], *names[:cut]]


def warm(paths: Iterable[Path]) -> None:
    """Have the files in the page cache."""
    block = memoryview(bytearray(_BLOCK))
    for path in paths:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(block):
                pass


def chill(paths: Sequence[Path], *, drop_caches: bool) -> None:
    """Have the files out of the page cache.

    Raises:
        UnavailableError: they are still there: some file systems live in it.
    """
    gc.collect()  # maps that nothing refers to any more
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)
    if drop_caches:
        _DROP_CACHES.write_text("1\n")
    there = resident(paths)
    if there > 0.02:
        raise UnavailableError(f"{there:.0%} of what should be cold stays in the page cache")


def resident(paths: Iterable[Path]) -> float:
    """Which part of the files is in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = cached = 0
    for path in paths:
        if not (size := path.stat().st_size):
            continue
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY) as view:
            count = -(-size // mmap.PAGESIZE)
            vector = (ctypes.c_ubyte * count)()
            first = ctypes.c_char.from_buffer(view)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(size), vector)
            del first
            if failed:
                raise OSError(ctypes.get_errno(), "mincore")
            pages += count
            cached += int((torch.frombuffer(vector, dtype=torch.uint8) & 1).sum())
    return cached / max(1, pages)


def can_drop_caches() -> bool:
    return os.access(_DROP_CACHES, os.W_OK)


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text} (load {os.getloadavg()[0]:.2f})", file=sys.stderr, flush=True)
