"""PyMM's figures 2 and 3: one save of a state by its size, and saves again and again.

    python benchmarks/dense/sizes.py [--megabytes 16 64 256] [--rounds 3] [--repeated 16] [--saves 100] [--quick]
        [--out FILE.json]

The ways to save are those of ``pymm.py``, in one file, and ``np.savez_compressed``, which the paper adds for its two
algorithms. The state is random float32, which hardly compresses, as weights do.

``N MB: written``  until the call returns, and a marker until ``mark()`` does: the lower part of a bar of figure 2
``N MB``           the same saves until the disk has the state (``fsync``, ``msync``, a commit): the whole bar
``N MB, M saves``  figure 3: so many saves in a row, each until the disk has it. Every way takes its turn in each round.
                   Nothing is compressed there: the figure has no such line
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import Measured, Report, Room, arguments, at_least, parse, scratch, synced, take_turns, with_room  # noqa: E402
from job import join_group  # noqa: E402
from pymm import OURS, WAIT_S, WAYS, Ours  # noqa: E402

COMPRESSED, BASE = "np.savez_compressed", "np.save"
WRITTEN = ": written"
Save = Callable[[int], tuple[float, float]]
"""Saves the state of a number; seconds until the call has returned, and until the disk has it."""


class Ways:
    """All ways to save a state of one size."""

    def __init__(self, folder: Path, megabytes: int, stack: ExitStack) -> None:
        size = megabytes * 1_000_000 // 4
        chance = np.random.default_rng(0)
        self._states = [chance.standard_normal(size, np.float32) for _ in range(2)]
        self._folder = folder
        self.saves: dict[str, Save] = {way: partial(self._save, way) for way in WAYS}
        self.saves[COMPRESSED] = self._compress
        ours = Ours(folder, size, stack)
        ours.checkpointer.mark().result(WAIT_S)
        self.saves[OURS] = partial(self._mark, ours)

    def _save(self, way: str, number: int) -> tuple[float, float]:
        name, write, _ = WAYS[way]
        path, begin = self._folder / name, time.perf_counter()
        write(path, self._states[number % 2], False)
        written = time.perf_counter() - begin
        synced(path)  # of a map, too: its pages are those of the file
        return written, time.perf_counter() - begin

    def _compress(self, number: int) -> tuple[float, float]:
        path, begin = self._folder / "state.npz", time.perf_counter()
        np.savez_compressed(path, state=self._states[number % 2])
        written = time.perf_counter() - begin
        synced(path)
        return written, time.perf_counter() - begin

    def _mark(self, ours: Ours, number: int) -> tuple[float, float]:
        ours.put(self._states[number % 2])
        begin = time.perf_counter()
        future = ours.checkpointer.mark()
        written = time.perf_counter() - begin
        future.result(WAIT_S)
        return written, time.perf_counter() - begin


def one_save(args: argparse.Namespace, report: Report, megabytes: int) -> None:
    """Figure 2."""
    with scratch("dense") as folder, ExitStack() as stack:
        ways = Ways(folder, megabytes, stack)
        written: dict[str, list[float]] = {name: [] for name in ways.saves}
        saves = [0]

        def save(name: str) -> float:
            saves[0] += 1
            returned, durable = ways.saves[name](saves[0])
            written[name].append(returned)
            return durable

        warm_up = int(not args.quick)
        found = take_turns({name: partial(save, name) for name in ways.saves}, args.rounds, warm_up)
        counted = Measured({name: each[warm_up:] for name, each in written.items()})
        report.add(f"{megabytes} MB{WRITTEN}", counted, BASE)
        report.add(f"{megabytes} MB", found, BASE)


def many_saves(args: argparse.Namespace, report: Report) -> None:
    """Figure 3."""
    with scratch("dense") as folder, ExitStack() as stack:
        ways = Ways(folder, args.repeated, stack)

        def run(name: str) -> float:
            return sum(ways.saves[name](number)[1] for number in range(args.saves))

        variants = {name: partial(run, name) for name in ways.saves if name != COMPRESSED}
        report.add(named(args), take_turns(variants, args.rounds, 0), BASE, unit="s", scale=1)


def named(args: argparse.Namespace) -> str:
    return f"{args.repeated} MB, {args.saves} saves"


def room(megabytes: int, markers: int) -> Room:
    """Markers stay, the other ways write over."""
    size = megabytes * 1_000_000
    return Room("a state, its copies and files, and a marker of each round", (1 << 30) + 8 * size, (5 + markers) * size)


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--megabytes", type=at_least(1), nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeated", type=at_least(1), default=16, help="megabytes of the state that is saved again")
    parser.add_argument("--saves", type=at_least(0), default=100, help="in a row, each round; 0: figure 2 alone")
    args = parse(parser, megabytes=[4], repeated=4, saves=2, rounds=1)
    torch.set_num_threads(1)
    report = Report("dense", args, script="sizes.py")
    rooms = {f"{megabytes} MB": room(megabytes, args.rounds + 2) for megabytes in args.megabytes}
    if args.saves:
        rooms[named(args)] = room(args.repeated, args.rounds * args.saves + 1)
    rows = with_room(report, rooms)
    with scratch("dense") as folder:
        join_group(folder, 0, 1)
        for megabytes in args.megabytes:
            if f"{megabytes} MB" in rows:
                one_save(args, report, megabytes)
        if named(args) in rows:
            many_saves(args, report)
        dist.destroy_process_group()
    report.finish()


if __name__ == "__main__":
    main()
