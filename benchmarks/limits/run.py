"""What this machine can do at most: memory, gathers, checksums, the disk. The other cases' figures stand beside these.

python benchmarks/limits/run.py [--megabytes 256] [--out FILE.json]
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
from common import (  # noqa: E402
    Report,
    arguments,
    at_least,
    busy_cores,
    parse,
    refuse_small_machine,
    scratch,
    take_turns,
    timed,
)
from crc32c import crc32c  # noqa: E402

DIM = 64
IDLE = 0.2
"""Cores that other work may keep busy on a machine that counts as idle."""


def memory(size: int, threads: int) -> Callable[[], float]:
    """Copy ``size`` bytes within memory."""
    source, target = torch.ones(size, dtype=torch.uint8), torch.zeros(size, dtype=torch.uint8)
    return partial(_with_threads, threads, lambda: target.copy_(source))


def gather(size: int, threads: int) -> Callable[[], float]:
    """Gather ``size`` bytes of random rows, ascending, out of four times as many."""
    table = torch.ones(4 * size // (4 * DIM), DIM)
    rows = torch.randperm(len(table))[: size // (4 * DIM)].sort().values
    target = torch.zeros(len(rows), DIM)
    return partial(_with_threads, threads, lambda: torch.index_select(table, 0, rows, out=target))


def _with_threads(threads: int, action: Callable[[], object]) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        return timed(action)
    finally:
        torch.set_num_threads(before)


class Disk:
    """``size`` bytes to and from one file."""

    def __init__(self, folder: Path, size: int) -> None:
        self._path, self._size = folder / "file", size
        self._data = memoryview(np.random.default_rng(0).integers(0, 256, size, np.uint8).data)
        self.append(size)

    def append(self, sync_bytes: int) -> float:
        """Write, and have the disk hold each ``sync_bytes`` before the next."""
        self._path.unlink(missing_ok=True)
        fd = os.open(self._path, os.O_WRONLY | os.O_CREAT)

        def write() -> None:
            for begin in range(0, self._size, sync_bytes):
                os.write(fd, self._data[begin : begin + sync_bytes])
                os.fdatasync(fd)

        try:
            return timed(write)
        finally:
            os.close(fd)

    def read(self, *, cold: bool) -> float:
        target = memoryview(bytearray(self._size))
        fd = os.open(self._path, os.O_RDONLY)
        if cold:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        with open(fd, "rb", buffering=0) as file:
            return timed(lambda: file.readinto(target))


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--megabytes", type=at_least(1), default=256, help="of 2**20 bytes, that are copied or written")
    args = parse(parser, megabytes=4, rounds=1)
    size = args.megabytes << 20
    refuse_small_machine("limits", args, "what is copied, gathered and read", memory=20 * size, disk=2 * size)
    report = Report("limits", args)
    report.facts["cores busy with other work"] = others = round(busy_cores(0.1 if args.quick else 2.0), 2)
    if others > IDLE:
        report.facts["not idle"] = f"{others} cores were busy before it began: these are no limits of the machine"
    data = np.ones(size, np.uint8)
    cores = os.cpu_count() or 1
    with scratch("limits") as folder:
        disk = Disk(folder, size)
        variants = {
            "copy, 1 thread": memory(size, 1),
            f"copy, {cores} threads": memory(size, cores),
            "gather of rows of 256 B, 1 thread": gather(size, 1),
            f"gather of rows, {cores} threads": gather(size, cores),
            "CRC32C, 1 thread": lambda: timed(lambda: crc32c(data.data)),
            "append, fdatasync each 64 MiB": lambda: disk.append(64 << 20),
            "append, fdatasync each 1 MiB": lambda: disk.append(1 << 20),
            "read, in the page cache": lambda: disk.read(cold=False),
            "read, cold": lambda: disk.read(cold=True),
        }
        measured = take_turns(variants, args.rounds)
    speeds = {name: [size / each / 1e9 for each in times] for name, times in measured.times.items()}
    measured.times = speeds
    report.add("limits", measured, "none", unit="GB/s", scale=1)
    report.finish()


if __name__ == "__main__":
    main()
