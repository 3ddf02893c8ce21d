"""PyMM's table II: a state saved again and again by pickle, numpy and a memory map, in one file and in two, and ours.

    python benchmarks/dense/pymm.py [--megabytes 16] [--kills 20] [--quick] [--out FILE.json]

A state is one vector of float32, as KMeans' centers are. *One file* is written over; of *two files* the older one is,
and a restart takes the newer one that it can read. *Last complete*: a third file names the one that was saved last, and
is replaced once all of it is there, as PyMM does by an integer; a restart reads that one. Nothing here is persistent
memory: a memory map is one of a file on the disk, with ``msync``. ``ours`` is a job of one rank whose dense state is
the vector; a checkpoint is a marker. ``sizes.py`` times them.

No clock is needed: a process saves without a pause and is killed (SIGKILL) at a random moment, ``--kills`` times a way.
Then the state is read. In each state all numbers are the same, so a mixture of two is seen:

``right``    a state that was saved whole
``refused``  nothing that can be read: the job has lost its state
``wrong``    parts of two states, without an error
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
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
    Report,
    Room,
    at_least,
    fresh_processes,
    parse,
    scratch,
    synced,
    tell,
    with_room,
)
from job import Shape, build, join_group  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

Vector = npt.NDArray[np.float32]
OURS = "ours, a marker"
CRASHES = "crashes"
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


def room(size: int) -> Room:
    """A job that is killed has marked for a fifth of a second or a little longer."""
    return Room("a state in a job and in one that is killed, and its markers", (3 << 29) + 40 * size, 80 * size)


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=at_least(1), default=16)
    parser.add_argument("--kills", type=at_least(1), default=20, help="of each way")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parse(parser, megabytes=4, kills=1)
    torch.set_num_threads(1)
    report = Report("dense", args, script="pymm.py")
    size = args.megabytes * 1_000_000 // 4
    if with_room(report, {CRASHES: room(size)}):
        with scratch("dense") as folder:
            report.facts[CRASHES] = crash(args, folder, size)
            dist.destroy_process_group()
    report.finish()


if __name__ == "__main__":
    main()
