"""PyMM's table II: a state saved again and again by pickle, numpy and a memory map, in one file and in two, and ours.

    python benchmarks/dense/pymm.py [--megabytes 64] [--kills 20] [--crashes-only] [--rounds 7] [--fsync with without]
        [--quick] [--out FILE.json]

A state is one vector of float32, as KMeans' centers are. *One file* is written over; of *two files* the older one is,
and a restart takes the newer one that it can read. *Last complete*: a third file names the one that was saved last, and
is replaced once all of it is there, as PyMM does by an integer; a restart reads that one. Nothing here is persistent
memory: a memory map is one of a file on the disk, with ``msync``. ``ours`` is a job of one rank whose dense state is
the vector; a checkpoint is a marker.

*Crashes* need no clock: a process saves without a pause and is killed (SIGKILL) at a random moment, ``--kills`` times a
way. Then the state is read. In each state all numbers are the same, so a mixture of two is seen:

``right``    a state that was saved whole
``refused``  nothing that can be read: the job has lost its state
``wrong``    parts of two states, without an error

*Times* are those of one save. Point ``a save, durable``: until the disk has it (``fsync``, ``msync``, a commit). Point
``a save``: until the call returns, and a marker until its commit, where nobody syncs; for ours also how long it blocks
training.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import pickle
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
    DURABLE,
    WITH_FSYNC,
    Report,
    Room,
    add_fsync,
    arguments,
    at_least,
    fresh_processes,
    parse,
    scratch,
    synced,
    take_turns,
    tell,
    timed,
    with_room,
    without_fsync,
)
from job import Shape, build, join_group  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

Vector = npt.NDArray[np.float32]
OURS = "ours, a marker"
CRASHES, TIMES = "crashes", "a save"
WAIT_S = 300.0


def by_pickle(path: Path, state: Vector, fsync: bool) -> None:
    with open(path, "wb") as file:
        pickle.dump(state, file, protocol=5)
    if fsync:
        synced(path)


def by_numpy(path: Path, state: Vector, fsync: bool) -> None:
    np.save(path, state)
    if fsync:
        synced(path)


def by_map(path: Path, state: Vector, fsync: bool) -> None:
    mode: Any = "r+" if path.exists() else "w+"
    mapped = np.memmap(path, np.float32, mode, shape=state.shape)
    mapped[:] = state
    if fsync:
        mapped.flush()


def unpickled(path: Path, _: int) -> Vector:
    with open(path, "rb") as file:
        found: Vector = pickle.load(file)  # a file of this run
    return found


WAYS: dict[str, tuple[str, Callable[[Path, Vector, bool], None], Callable[[Path, int], Vector]]] = {
    "pickle": ("state.pkl", by_pickle, unpickled),
    "np.save": ("state.npy", by_numpy, lambda path, _: np.load(path)),
    "np.memmap": ("state.map", by_map, lambda path, size: np.array(np.memmap(path, np.float32, "r", shape=(size,)))),
}
FILES = {"one file": (1, False), "two files": (2, False), "two files, last complete": (2, True)}
"""Files, and whether a third one names the one that is complete."""


class Saver:
    """One way to save, in one or in two files."""

    def __init__(self, way: str, what: str, folder: Path, size: int, *, fsync: bool = True) -> None:
        name, self._write, self._read = WAYS[way]
        self._fsync = fsync
        self.files, named = FILES[what]
        self._paths = [folder / f"{number}-{name}" for number in range(self.files)]
        self._last = folder / "last-complete" if named else None
        self._size, self._saves = size, 0

    def save(self, state: Vector) -> None:
        path = self._paths[self._saves % len(self._paths)]
        self._write(path, state, self._fsync)
        self._saves += 1
        if self._last is not None:
            written = self._last.with_suffix(".new")
            written.write_text(path.name)
            if self._fsync:
                synced(written)
            written.replace(self._last)

    def load(self) -> Vector:
        """The newest that can be read, or the one that is named.

        Raises:
            ValueError: none can.
        """
        there = [path for path in self._paths if path.exists()]
        if self._last is not None:
            there = [path for path in there if path.name == self._last.read_text()]
        for path in sorted(there, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            try:
                return self._read(path, self._size)
            except (EOFError, ValueError, OSError, pickle.UnpicklingError):
                continue
        raise ValueError(f"no state can be read from {', '.join(path.name for path in self._paths)}")


def save_until_killed(way: str, what: str, folder: Path, size: int, told: Any) -> None:
    saver, state = Saver(way, what, folder, size), np.empty(size, np.float32)
    for number in range(1, 1 << 20):
        state[:] = number
        saver.save(state)
        if number == saver.files:
            told.set()


def outcome(load: Callable[[], Vector]) -> str:
    try:
        state = load()
    except ValueError:
        return "refused"
    return "right" if state[0] >= 1 and bool((state == state[0]).all()) else "wrong"


def killed(way: str, what: str, size: int, kills: int, chance: random.Random) -> dict[str, int]:
    """How often which outcome."""
    found = {"right": 0, "refused": 0, "wrong": 0}
    context = multiprocessing.get_context("fork")
    for _ in range(kills):
        with scratch("dense") as folder:
            told = context.Event()
            process = context.Process(target=save_until_killed, args=(way, what, folder, size, told), daemon=True)
            process.start()
            if not told.wait(WAIT_S):
                raise RuntimeError(f"{way}, {what}: nothing was saved")
            time.sleep(chance.random() * 0.2)
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.join()
            found[outcome(Saver(way, what, folder, size).load)] += 1
    return found


class Ours:
    """A job of one rank with the state as dense parameters."""

    def __init__(self, folder: Path, size: int, stack: ExitStack) -> None:
        self._job = build(Shape((1000,), 4, dense_bytes=4 * size))
        config = StreamConfig(uri=f"file://{folder}/log", marker_every=None, head=None)
        self.checkpointer = stack.enter_context(StreamCheckpointer(self._job.model, self._job.optimizer, config=config))
        self.dense = [each for name, each in self._job.model.state_dict().items() if "top" in name]

    @torch.no_grad()
    def change(self, number: int) -> None:
        for each in self.dense:
            each.fill_(number)
        self.checkpointer.step()

    @torch.no_grad()
    def put(self, state: Vector) -> None:
        """Make the first numbers of a state the parameters."""
        at, numbers = 0, torch.from_numpy(state)
        for each in self.dense:
            part = numbers[at : at + each.numel()]
            each.view(-1)[: len(part)].copy_(part)
            at += len(part)
        self.checkpointer.step()

    def state(self) -> Vector:
        return torch.cat([each.reshape(-1) for each in self.dense]).numpy()


def mark_until_killed(folder: Path, size: int, told: Any) -> None:
    join_group(folder, 0, 1)
    with ExitStack() as stack:
        ours = Ours(folder, size, stack)
        ours.checkpointer.restore()
        for number in range(1, 1 << 20):
            ours.change(number)
            ours.checkpointer.mark().result(WAIT_S)
            told.set()


def marked_and_killed(size: int, kills: int, chance: random.Random) -> dict[str, int]:
    """The same of ours: a killed job, then a restore by another one."""
    found = {"right": 0, "refused": 0, "wrong": 0}
    context = fresh_processes()
    for _ in range(kills):
        with scratch("dense") as folder, ExitStack() as stack:
            (folder / "killed").mkdir()
            told = context.Event()
            process = context.Process(target=mark_until_killed, args=(folder / "killed", size, told), daemon=True)
            process.start()
            if not told.wait(WAIT_S):
                raise RuntimeError(f"{OURS}: no marker was committed")
            time.sleep(chance.random() * 0.2)
            os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.join()
            ours = Ours(folder / "killed", size, stack)
            restored = ours.checkpointer.restore()
            found["refused" if restored is None else outcome(ours.state)] += 1
    return found


def times(args: argparse.Namespace, report: Report, size: int) -> None:
    with scratch("dense") as folder, ExitStack() as stack:
        states = [np.full(size, number, np.float32) for number in (1, 2)]
        ours, saves = Ours(folder, size, stack), [0]

        def saved(saver: Saver) -> float:
            saves[0] += 1
            return timed(lambda: saver.save(states[saves[0] % 2]))

        def marked(*, fsync: bool, blocked: bool = False) -> float:
            saves[0] += 1
            ours.change(saves[0])
            futures: list[Any] = []
            with nullcontext() if fsync else without_fsync():
                taken = timed(lambda: futures.append(ours.checkpointer.mark()))
                rest = timed(lambda: futures[0].result(WAIT_S))
            return taken if blocked else taken + rest

        variants: dict[str, Callable[[], float]] = {}
        for fsync in (mode == WITH_FSYNC for mode in args.fsync):
            ending = DURABLE if fsync else ""
            for way in WAYS:
                for number, what in enumerate(FILES):
                    own = folder / f"{way}-{number}{ending}"
                    own.mkdir()
                    variants[f"{way}, {what}{ending}"] = partial(saved, Saver(way, what, own, size, fsync=fsync))
            variants[OURS + ending] = partial(marked, fsync=fsync)
            if not fsync:
                variants[f"{OURS}: blocked"] = partial(marked, fsync=fsync, blocked=True)
        found = take_turns(variants, args.rounds, 0 if args.quick else 2)
        for point, measured in zip((TIMES, TIMES + DURABLE), found.split(DURABLE), strict=True):
            if measured.times:
                report.add(point, measured, "pickle, one file")


def rooms(args: argparse.Namespace, size: int) -> dict[str, Room]:
    """Of what is asked for. A job that is killed has marked for a fifth of a second or a little longer."""
    saves = len(args.fsync) * (9 + 2 * (args.rounds + 2))
    found = {
        CRASHES: Room("a state in a job and in one that is killed, and its markers", (3 << 29) + 40 * size, 80 * size),
        TIMES: Room("a state, its copies and files, a marker a round", (1 << 30) + 32 * size, (4 + 4 * saves) * size),
    }
    if args.crashes_only:
        del found[TIMES]
    return found


def crash(args: argparse.Namespace, folder: Path, size: int) -> dict[str, dict[str, int]]:
    """Outcomes by way; ``folder`` has the group's file."""
    chance, found = random.Random(0), dict[str, dict[str, int]]()
    for way in WAYS:
        for what in FILES:
            found[f"{way}, {what}"] = killed(way, what, size, args.kills, chance)
            tell(f"{way}, {what}: {found[f'{way}, {what}']}")
    join_group(folder, 0, 1)
    found[OURS] = marked_and_killed(size, args.kills, chance)
    return found


def main() -> None:
    parser = arguments(__doc__, rounds=7)
    parser.add_argument("--megabytes", type=at_least(1), default=64)
    parser.add_argument("--kills", type=at_least(1), default=20, help="of each way")
    parser.add_argument("--crashes-only", action="store_true", help="nothing is timed")
    add_fsync(parser)
    args = parse(parser, megabytes=4, kills=1, rounds=1)
    torch.set_num_threads(1)
    report = Report("dense", args, script="pymm.py")
    size = args.megabytes * 1_000_000 // 4
    rows = with_room(report, rooms(args, size))
    with scratch("dense") as folder:
        if CRASHES in rows:
            report.facts[CRASHES] = crash(args, folder, size)
        if TIMES in rows:
            if not dist.is_initialized():
                join_group(folder, 0, 1)
            times(args, report, size)
        if dist.is_initialized():
            dist.destroy_process_group()
    report.finish()


if __name__ == "__main__":
    main()
