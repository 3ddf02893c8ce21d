"""What the publisher's thread takes of the interpreter lock, from a thread that wants it all the time.

    python benchmarks/step_time/gil.py [--rounds 15] [--frames 65] [--seconds 0.5]

A thread that spins in Python is the worst that can stand beside the publisher: a training thread is in kernels, without
the lock, most of the time. In each round it spins for ``--seconds`` while nothing is sent, and again while ``--frames``
frames of 0.97 MB are checksummed, written to a file log and synced (what the thesis configuration drains a step). The
share is what the second spin lacks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
from common import at_least  # noqa: E402

from torchrec_stream_ckpt.format.frame import HEADER_LEN, Header, Kind  # noqa: E402
from torchrec_stream_ckpt.format.ring import FrameRing  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.log.publisher import Publisher  # noqa: E402

PAYLOAD = 970_048


def spin(seconds: float) -> float:
    """Turns a second, by the wall clock."""
    turns, begin = 0, time.perf_counter()
    end = begin + seconds
    while time.perf_counter() < end:
        turns += 1
    return turns / seconds


def submit(publisher: Publisher, ring: FrameRing, frames: int, noise: np.ndarray) -> None:
    for _ in range(frames):
        buffer = ring.acquire(wait_s=10)
        assert buffer is not None
        if buffer.array[HEADER_LEN] == 0:
            buffer.array[HEADER_LEN : HEADER_LEN + PAYLOAD] = noise
        buffer.header = Header(Kind.ROWS, b"0" * 16, 1, payload_len=PAYLOAD, rows=1)
        publisher.submit(buffer)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=15)
    parser.add_argument("--frames", type=at_least(1), default=65)
    parser.add_argument("--seconds", type=float, default=0.5)
    args = parser.parse_args()
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: nothing can be counted in that time: pass more than 0")
    noise = np.random.default_rng(0).integers(1, 256, PAYLOAD, dtype=np.uint8)
    with tempfile.TemporaryDirectory(prefix="gil-", dir=os.environ.get("BENCH_DIR")) as folder:
        log = FileLog(Path(folder))
        log.prepare(1)
        ring = FrameRing((args.frames + 2) * 10**6, 0)
        publisher = Publisher(lambda resume_at: log.open_writer(1, 0, resume_at), ring)
        shares = []
        for number in range(-1, args.rounds):
            idle = spin(args.seconds)
            submit(publisher, ring, args.frames, noise)
            busy = spin(args.seconds)
            while publisher.pending:
                time.sleep(0.01)
            if number >= 0:
                shares.append(1 - busy / idle)
        publisher.close(10)
    print(f"share of the interpreter lock, {args.frames} frames in {args.seconds} s: median", end=" ")
    print(f"{statistics.median(shares):.4f}, range {min(shares):.4f} to {max(shares):.4f}")


if __name__ == "__main__":
    main()
