"""Building and restoring by several schemes in turn, timed: interleaved rounds, the page cache warm or cold."""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from at_hand import have_at_hand
from baselines import Reads, Scheme, Timing, UnavailableError
from cache import Part, chill, warm
from first import Found, Times, first_loads
from stream import Trainer
from workload import Tables, Values, Workload, wrong_rows

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
    first: Times
    """Seconds of first loads in fresh processes."""
    no_cold: dict[str, str]
    """Why a scheme has none with a cold page cache."""


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
    folders = {name: scratch / f"scheme-{number}" for number, name in enumerate(makes) if name in live}
    fresh = Found(scratch / "log", replace(workload))  # without what it has drawn: that would be sent along
    first, no_cold = first_loads(fresh, folders, plan.markers[-1], plan.cold_rounds)
    tell(f"{workload.name}: first loads of fresh processes measured")
    return Measured(records, schemes, tables, first, no_cold)


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
                timing = _timed(schemes[name], marker, tables, partial(_chill, drop_caches=plan.drop_caches))
            except UnavailableError as error:
                records[name].no_cold = str(error)
                continue
            records[name].cold.setdefault(marker, []).append(timing)
    tell(f"marker {marker} measured")


def _chill(parts: Sequence[Path | Part], *, drop_caches: bool) -> None:
    """Whole files: no part of them may help."""
    paths = (part.path if isinstance(part, Part) else part for part in parts)
    chill(list(dict.fromkeys(paths)), drop_caches=drop_caches)


def _timed(scheme: Scheme, marker: int, tables: Tables, prepare: Callable[[Sequence[Path | Part]], None]) -> Timing:
    """One restore, and the delta part once more by itself; ``prepare`` warms or chills what they read."""
    gc.collect()
    prepare(list(scheme.files(marker)))
    have_at_hand(tables.num_bytes * 5 // 4)  # what a load of all of them may allocate
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


def tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text} (load {os.getloadavg()[0]:.2f})", file=sys.stderr, flush=True)
