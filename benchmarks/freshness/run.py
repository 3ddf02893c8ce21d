"""How old a served row is, what following costs, how fast a replica catches up, and how long its readers wait.

    python benchmarks/freshness/run.py --part age [--log file kafka] [--rounds 3] [--out FILE.json]

A trainer of one rank trains steps without a pause and streams them to a log; a replica in another process follows.
Each has one core. Kafka's broker is the library's own on loopback, on both cores.

``age``       from the end of the trainer's ``step()`` to a lookup in the replica that returns the new bits, of every
              step, in both modes
``cpu``       CPU time of the trainer's process with a follower of each mode and without one, by turns; that of the
              follower
``catch-up``  one update of a replica that was away, against reading the same part of the log and doing nothing with it
``pause``     lookups without a pause between, while an update is applied: whole, and in slices
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
from brokers import start_broker  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Measured,
    Report,
    UnavailableError,
    arguments,
    at_least,
    parse,
    refuse_small_machine,
    scratch,
    tell,
)
from job import Shape  # noqa: E402
from processes import CLOCK, CPU, Remote, Replica, Seen, Trainer, cores  # noqa: E402

from torchrec_stream_ckpt.util.uris import KafkaUri, parse_uri  # noqa: E402

MODES = ("rows", "markers")
PARTS = ("age", "cpu", "catch-up", "pause")
AGE_MS, PAUSE_MS, CPU_PERCENT, OF_RAW_PERCENT = 100, 5, 0.5, 60
NOBODY, AGAIN, WAITS, STRANGER, RAW = "no follower", "no follower, again", "waits alone", "other work", "raw read"
DISK, CACHE = "from the disk", "from the page cache"
P50, P99, WORST = "p50", "p99", "worst"


@dataclass(frozen=True)
class Place:
    """A log, the trainer that writes it and a replica, in processes of their own."""

    name: str
    uri: str
    folder: Path
    trainer: Remote
    replica: Remote


@contextmanager
def place(name: str, args: Any, shape: Shape, marker_s: float | None = None) -> Iterator[Place]:
    """Start all that a part needs on one log.

    Raises:
        UnavailableError: there is no broker.
    """
    with scratch("freshness") as folder, ExitStack() as stack:
        uri = f"file://{folder}/log"
        if name == "kafka":
            uri = f"kafka://{start_broker('freshness', stack)}/freshness"
        mine, theirs = cores()
        trainer = stack.enter_context(Remote(mine, Trainer, folder / "job", uri, shape, marker_s))
        replica = stack.enter_context(Remote(theirs, Replica, uri, f"file://{folder}/job/store"))
        yield Place(name, uri, folder, trainer, replica)


def turns(ways: Sequence[str], number: int) -> tuple[str, ...]:
    """Return the order of a round. In as many rounds as there are ways, each of them has each place once."""
    first = number % len(ways)
    return (*ways[first:], *ways[:first])


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """Return median, 99th percentile and largest value."""
    found = sorted(values)
    return {P50: statistics.median(found), P99: found[min(len(found) - 1, int(0.99 * len(found)))], WORST: found[-1]}


def add(report: Report, point: str, rounds: Sequence[Sequence[float]]) -> dict[str, float]:
    """File the quantiles of each round, in ms. Returns those of all rounds together."""
    each = [quantiles(values) for values in rounds]
    report.add(point, Measured({name: [one[name] for one in each] for name in each[0]}), "none")
    pooled = {
        name: round(1e3 * value, 3) for name, value in quantiles([one for values in rounds for one in values]).items()
    }
    report.facts[f"{point}: of all rounds, ms"] = {**pooled, "samples": sum(map(len, rounds))}
    return pooled


# Ages.


def ages(steps: Sequence[Seen], seen: Sequence[Seen]) -> list[float]:
    """Return for each step the seconds until a lookup returned its bits, or those of a later step."""
    number_of = {bits: number for number, (_, bits) in enumerate(steps)}
    if len(number_of) < len(steps):
        raise SystemExit("Error: two steps leave the same bits in the probe row")
    found: list[float] = []
    for when, bits in seen:
        while len(found) <= number_of.get(bits, -1):
            found.append(when - steps[len(found)][0])
    if len(found) < len(steps):
        raise SystemExit(f"Error: of {len(steps)} steps, {len(steps) - len(found)} never reached the replica")
    return found


def age(args: Any, report: Report, name: str) -> None:
    shape = Shape((args.rows,) * args.tables, args.dim)
    ways = [(mode, rest_ms) for mode in MODES for rest_ms in (0, args.rest_ms)]
    rounds: dict[tuple[str, int], list[list[float]]] = {way: [] for way in ways}
    intervals = []
    with place(name, args, shape, args.marker_s) as here:
        for number in range(args.rounds):
            for mode, rest_ms in random.Random(number).sample(ways, len(ways)):
                here.replica.call("open", mode)
                here.replica.call("watch", mode)
                begin = time.monotonic()
                steps, _ = here.trainer.call("train", args.steps, args.ids, rest_ms / 1e3)
                if not rest_ms:
                    intervals.append((time.monotonic() - begin) / args.steps)
                here.replica.call("await_bits", steps[-1][1], args.settle_s)
                rounds[mode, rest_ms].append(ages(steps, here.replica.call("found")))
                woken_by = here.replica.call("release")
            tell(f"{name}: round {number + 1} of {args.rounds}")
    report.facts[f"{name}: woken by"] = woken_by
    report.facts[f"{name}: a step, ms"] = round(1e3 * statistics.median(intervals), 2)
    for mode, rest_ms in ways:
        point = f"{name}, {mode}" + (f", {rest_ms} ms between steps" if rest_ms else "")
        found = add(report, point, rounds[mode, rest_ms])
        most = AGE_MS + (1e3 * args.marker_s if mode == "markers" else 0)
        report.goals.append(Goal.at_most(f"{point}: p99 of a row's age", most, found[P99], "ms"))


# CPU time.


def cpu(args: Any, report: Report, name: str) -> None:
    shape = Shape((args.rows,) * args.tables, args.dim)
    ways = (NOBODY, AGAIN, WAITS, STRANGER, *MODES)
    trainer: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
    follower: dict[str, list[float]] = {mode: [] for mode in MODES}
    with place(name, args, shape, args.marker_s) as here:
        alone_s = here.trainer.call("loop_s")
        here.replica.call("spin")
        crowded = here.trainer.call("loop_s") / alone_s
        here.replica.call("found")
        report.facts[f"{name}: a loop without memory, next to another one: times as long"] = round(crowded, 3)
        share = 0.0
        for number in range(-1, args.rounds):
            for way in turns(ways, number):
                used, theirs = _trained(args, here, way, share)
                if way == MODES[0]:
                    share = theirs / used[CLOCK]
                if number < 0:
                    continue
                trainer[way].append({what: value / args.steps for what, value in used.items()})
                if way in MODES:
                    follower[way].append(theirs / args.steps)
            tell(f"{name}: round {number + 1} of {args.rounds}")
    point = f"{name}: CPU of the trainer, a step"
    report.add(point, Measured({way: [each[CPU] for each in rounds] for way, rounds in trainer.items()}), NOBODY)
    report.add(f"{name}: CPU of the follower, a step", Measured(follower), "none")
    counts = [what for what in trainer[NOBODY][0] if what not in (CPU, CLOCK)]
    report.facts[f"{name}: work of the trainer, a step"] = {
        way: {what: round(statistics.median(each[what] for each in rounds), 3) for what in counts}
        for way, rounds in trainer.items()
    }
    for mode in MODES:
        ratio = report.ratio(point, mode)
        more = None if ratio is None else 100 * (1 / ratio - 1)
        report.goals.append(Goal.at_most(f"{name}, {mode}: CPU of the trainer, more", CPU_PERCENT, more, "%"))


def _trained(args: Any, here: Place, way: str, share: float) -> tuple[dict[str, float], float]:
    """Train with a follower, without one, or next to what takes its place.

    Args:
        args: The arguments.
        here: The trainer, which rests before, and the replica.
        way: A mode of a follower, or one of the others.
        share: (other work) Share of the time of the replica's core.

    Returns:
        What the trainer has used, and the seconds of CPU of the replica's process.
    """
    replica = here.replica
    replica.call("open", way if way in MODES else MODES[0])
    if way in MODES:
        replica.call("start", way)
    else:
        replica.call("release")
    if way == STRANGER:
        replica.call("work", share)
    elif way == WAITS:
        replica.call("wait")
    replica.call("reset")
    used: dict[str, float] = here.trainer.call("train", args.steps, args.ids)[1]
    theirs: float = replica.call("used")[CPU]
    replica.call("release" if way in MODES else "found")
    return used, theirs


# Catching up.


class RawFiles:
    """The part of a file log that was written since the last :meth:`go_on`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._done: dict[Path, int] = {}

    def _parts(self) -> list[tuple[Path, int]]:
        return [(path, self._done.get(path, 0)) for path in sorted(self._folder.glob("log/data/**/*.seg"))]

    def size(self) -> int:
        return sum(path.stat().st_size - begin for path, begin in self._parts())

    def read(self) -> float:
        """Read it and drop it. Returns the seconds that this took."""
        buffer, parts = memoryview(bytearray(1 << 20)), self._parts()
        begin_s = time.perf_counter()
        for path, begin in parts:
            with path.open("rb", buffering=0) as file:
                file.seek(begin)
                while file.readinto(buffer):
                    pass
        return time.perf_counter() - begin_s

    def go_on(self) -> None:
        self._done.update({path: path.stat().st_size for path, _ in self._parts()})

    def put(self, state: str) -> None:
        """Have the part in the page cache, or on the disk alone.

        Raises:
            UnavailableError: its pages stay in memory.
        """
        if state == CACHE:
            self.read()
            return
        for path, _ in self._parts():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        held = sum(_resident(path, begin) for path, begin in self._parts())
        if held > max(mmap.PAGESIZE, self.size() // 20):
            raise UnavailableError(f"{held} of {self.size()} bytes stay in the page cache")


def _resident(path: Path, begin: int) -> int:
    """Return how many bytes of a file from ``begin`` on are in the page cache."""
    size, page = path.stat().st_size, mmap.PAGESIZE
    begin -= begin % page
    if size <= begin:
        return 0
    with path.open("rb") as file, mmap.mmap(file.fileno(), size - begin, prot=mmap.PROT_READ, offset=begin) as mapped:
        held = np.zeros(-(-(size - begin) // page), np.uint8)
        address = np.frombuffer(mapped, np.uint8).ctypes.data
        if ctypes.CDLL(None).mincore(*map(ctypes.c_void_p, (address, size - begin, held.ctypes.data))):
            raise OSError("mincore failed")
    return page * int((held & 1).sum())


class RawConsumer:
    """The records of a partition since the last :meth:`go_on`, by one consumer with our settings."""

    def __init__(self, uri: str) -> None:
        log = parse_uri(uri)
        assert isinstance(log, KafkaUri)
        self._log = log
        self._done = self._end = self._num_bytes = 0

    def size(self) -> int:
        """Return how many bytes the last :meth:`read` has got."""
        return self._num_bytes

    def read(self) -> float:
        """Read them and drop them. Returns the seconds from the first fetch on."""
        import confluent_kafka as ck

        from torchrec_stream_ckpt.log.kafka.settings import consumer_settings

        topic, self._num_bytes = self._log.data_topic, 0
        consumer = ck.Consumer(consumer_settings(self._log, {}))
        try:
            position, self._end = self._done, consumer.get_watermark_offsets(ck.TopicPartition(topic, 0))[1]
            begin_s = time.perf_counter()
            consumer.assign([ck.TopicPartition(topic, 0, position)])
            while position < self._end:
                for message in consumer.consume(min(64, self._end - position), timeout=1):
                    if message.error() is None:
                        position, self._num_bytes = message.offset() + 1, self._num_bytes + len(message.value())
            return time.perf_counter() - begin_s
        finally:
            consumer.close()

    def go_on(self) -> None:
        self._done = self._end

    def put(self, state: str) -> None:
        """Do nothing: the broker has the records in its page cache."""


def catch_up(args: Any, report: Report, name: str) -> None:
    shape = Shape((args.rows,) * args.tables, args.dim)
    with place(name, args, shape) as here:
        log = RawFiles(here.folder) if name == "file" else RawConsumer(here.uri)
        log.read()
        log.go_on()
        for mode in MODES:
            here.replica.call("open", mode)
        for state in (DISK, CACHE) if name == "file" else ("",):
            point = ", ".join(part for part in (name, state) if part) + ": catching up"
            try:
                times, sizes = _caught_up(args, here, log, state, point)
            except UnavailableError as error:
                report.leave_out(point, str(error))
                continue
            report.facts[f"{point}: bytes of the log since the replica was away"] = round(statistics.median(sizes))
            report.add(point, Measured(times), RAW)
            for mode in MODES:
                share = report.ratio(point, mode)
                found = 100 * share if share else None
                what = ", ".join(part for part in (name, mode, state) if part)
                report.goals.append(Goal.at_least(f"{what}: of the speed of a {RAW}", OF_RAW_PERCENT, found, "%"))


def _caught_up(
    args: Any, here: Place, log: RawFiles | RawConsumer, state: str, point: str
) -> tuple[dict[str, list[float]], list[int]]:
    """Return the seconds of each way, and the bytes of the log, by round."""
    times: dict[str, list[float]] = {way: [] for way in (RAW, *MODES)}
    sizes = []
    for number in range(-1, args.rounds):
        for _ in range(args.away):
            here.trainer.call("touch", args.rows // 10)
        for way in turns((RAW, *MODES), number):
            log.put(state)
            taken = _on(cores()[1], log.read) if way == RAW else here.replica.call("advance", way)
            if number >= 0:
                times[way].append(taken)
        sizes.append(log.size())
        log.go_on()
        wanted = here.trainer.call("digests")
        if any(here.replica.call("digests", mode) != wanted for mode in MODES):
            raise SystemExit("Error: a replica holds other bits than the trainer")
        tell(f"{point}: round {number + 1} of {args.rounds}")
    return times, sizes


def _on(pinned: set[int], call: Callable[[], float]) -> float:
    """Call on some cores, as the replica does."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, pinned)
    try:
        return call()
    finally:
        os.sched_setaffinity(0, before)


# Pauses of readers.


def pause(args: Any, report: Report) -> None:
    shape = Shape((args.large_rows * 2,), args.dim)
    report.facts["rows of an update"] = {"small": args.small_rows, "large": args.large_rows}
    mine, theirs = cores()
    with place("file", args, shape) as here:
        for where, pinned in (("one core", theirs), ("two cores", mine | theirs)):
            for slices in (False, True):
                here.replica.call("open", "markers", slices)
                how = "in slices" if slices else "whole"
                idle = here.replica.call("hammer", slices, pinned, False)
                if slices:
                    add(report, f"{where}, no update", [[sum(each) for each in idle]])
                for size, rows, rounds in (
                    ("small", args.small_rows, 4 * args.rounds),
                    ("large", args.large_rows, args.rounds),
                ):
                    found = []
                    for _ in range(rounds):
                        here.trainer.call("touch", rows)
                        found.append(here.replica.call("hammer", slices, pinned, True))
                    both = add(
                        report, f"{where}, {how}, {size}", [[sum(each) for each in samples] for samples in found]
                    )
                    waits = quantiles([wait for samples in found for wait, _ in samples])
                    report.facts[f"{where}, {how}, {size}: until inside reading(), ms"] = {
                        name: round(1e3 * value, 3) for name, value in waits.items()
                    }
                    if slices:
                        what = f"{where}, {size}: worst pause of a reader, in slices"
                        report.goals.append(Goal.at_most(what, PAUSE_MS, both[WORST], "ms"))
                here.replica.call("release")
                tell(f"{where}, {how}")


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--log", nargs="+", choices=("file", "kafka"), default=["file", "kafka"])
    sizes = {"tables": 4, "rows": 100_000, "dim": 64, "steps": 400, "ids": 512, "away": 10}
    for name, default in {**sizes, "small_rows": 2000, "large_rows": 200_000}.items():
        parser.add_argument(f"--{name}", type=at_least(4 if name == "ids" else 1), default=default)
    parser.add_argument("--marker_s", type=float, default=0.5, help="seconds between markers (age, cpu)")
    parser.add_argument("--rest_ms", type=at_least(1), default=20, help="between steps of a trainer that rests (age)")
    parser.add_argument("--settle_s", type=float, default=1.0, help="most time for the last rows to arrive")
    quick = {"tables": 2, "rows": 500, "dim": 8, "steps": 10, "ids": 8, "away": 2, "rounds": 1}
    args = parse(parser, **quick, small_rows=50, large_rows=500, settle_s=60.0)
    size = 4 * (args.dim + 2) * max(args.tables * args.rows, 2 * args.large_rows)
    what = "a trainer, a replica and a log"
    refuse_small_machine("freshness", args, what, memory=(3 << 30) + 6 * size, disk=(1 << 30) + 20 * size)
    report = Report("freshness", args)
    mine, theirs = cores()
    report.facts["cores"] = {"of the machine": os.cpu_count(), "trainer": sorted(mine), "replica": sorted(theirs)}
    for part, run in {"age": age, "cpu": cpu, "catch-up": catch_up}.items():
        for name in args.log if part in args.part else ():
            try:
                run(args, report, name)
            except UnavailableError as error:
                report.leave_out(f"{part}, {name}", str(error))
    if "pause" in args.part:
        pause(args, report)
    report.finish()


if __name__ == "__main__":
    main()
