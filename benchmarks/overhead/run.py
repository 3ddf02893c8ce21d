"""Whether ``max_overhead`` is held while the load changes under it.

    python benchmarks/overhead/run.py [--bound 0.01] [--seconds 30] [--out FILE.json]

One rank, 4 tables of 200,000 x 64, ``drain_every="auto"``. Five stretches: as it is, with eight times the ids (and rows
touched) a step, with a tenth of them, beside processes that keep every core busy, and as at first. In each,
every call of ``step()`` is timed from outside; ``overhead`` is that time over the rest of the stretch.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import torch  # noqa: E402
from common import Goal, Report, arguments, scratch, tell  # noqa: E402
from device import add_device, finish_queued  # noqa: E402
from job import Job, Shape, build, join_group  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

SHAPE = Shape(rows=(200_000,) * 4, dense_bytes=8 * 2**20)
BAGS = 256


def spin() -> None:
    while True:
        pass


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    others = [mp.get_context("spawn").Process(target=spin, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def stretch(job: Job, checkpointer: StreamCheckpointer, ids: int, seconds: float) -> dict[str, float]:
    """Train so long."""
    batches = [[torch.randint(0, rows, (ids,)) for rows in SHAPE.rows] for _ in range(8)]
    before, steps, ours_s, begin = checkpointer.stats(), 0, 0.0, time.perf_counter()
    while time.perf_counter() - begin < seconds:
        job.train(batches[steps % len(batches)], BAGS)
        finish_queued()
        entered = time.perf_counter()
        checkpointer.step()
        finish_queued()
        ours_s += time.perf_counter() - entered
        steps += 1
    whole_s, after = time.perf_counter() - begin, checkpointer.stats()
    return {
        "overhead": round(ours_s / (whole_s - ours_s), 5),
        "ours s": round(ours_s, 3),
        "training s": round(whole_s - ours_s, 3),
        "step ms": round(1e3 * (whole_s - ours_s) / steps, 2),
        "steps": steps,
        "markers": after.markers_committed - before.markers_committed,
        "steps a marker": round(steps / max(1, after.markers_committed - before.markers_committed), 1),
    }


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--bound", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=30.0)
    add_device(parser)
    args = parser.parse_args()
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: no step fits into that time: pass more than 0")
    torch.set_num_threads(1)
    report = Report("overhead", args)
    with scratch("overhead") as folder:
        join_group(folder, 0, 1, args.device)
        job = build(replace(SHAPE, device=args.device))
        config = StreamConfig(
            uri=f"file://{folder}/log", drain_every="auto", max_overhead=args.bound, sweep_bytes=2**28
        )
        with StreamCheckpointer(job.model, job.optimizer, config=config) as checkpointer:
            found = {}
            warm_up = stretch(job, checkpointer, 5_120, args.seconds / 2)
            tell(f"warm-up, with the sweep: {warm_up}")
            for name, ids, cores in (
                ("at first", 5_120, 0),
                ("8 times the ids", 40_960, 0),
                ("a tenth of the ids", 512, 0),
                ("every core busy", 5_120, os.cpu_count() or 1),
                ("as at first", 5_120, 0),
            ):
                with busy_cores(cores):
                    found[name] = stretch(job, checkpointer, ids, args.seconds)
                tell(f"{name}: {found[name]}")
    report.facts |= found
    # One marker may cost more than a stretch earns: over all of them the account is settled, but for the last marker.
    ours_s = sum(values["ours s"] for values in found.values())
    training_s = sum(values["training s"] for values in found.values())
    report.goals.append(Goal.at_most("overhead of all stretches", 100 * args.bound, 100 * ours_s / training_s, "%"))
    report.finish()
    os._exit(0)


if __name__ == "__main__":
    main()
