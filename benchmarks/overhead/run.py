"""Whether ``max_overhead`` is held while the load changes under it.

    python benchmarks/overhead/run.py [--ranks 1] [--bound 0.01] [--seconds 300] [--out FILE.json]

4 tables of 200,000 x 64, ``drain_every="auto"``. Five stretches: as it is, with eight times the ids (and rows
touched) a step, with a tenth of them, beside processes that keep every core busy, and as at first. In each,
every call of ``step()`` is timed from outside; ``overhead`` is that time over the rest of the stretch; of
several ranks the one counts where it is largest.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import Goal, Report, arguments, at_least, fresh_processes, parse, refuse_small_machine, scratch, tell  # noqa: E402
from device import add_device, finish_queued  # noqa: E402
from holes import punch  # noqa: E402
from job import Job, Shape, build, spread  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

SHAPE = Shape(rows=(200_000,) * 4, dense_bytes=8 * 2**20)
BAGS = 256
Found = dict[str, float]
"""Of one stretch."""


def spin() -> None:
    while True:
        pass


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    others = [fresh_processes().Process(target=spin, daemon=True) for _ in range(count)]
    for other in others:
        other.start()
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.join()


def stretch(job: Job, checkpointer: StreamCheckpointer, ids: int, seconds: float) -> Found:
    """Train so long, by rank 0's clock."""
    batches = [[torch.randint(0, rows, (ids,)) for rows in SHAPE.rows] for _ in range(8)]
    before, steps, ours_s, begin = checkpointer.stats(), 0, 0.0, time.perf_counter()
    while agreed(time.perf_counter() - begin < seconds):
        for batch in batches:
            job.train(batch, BAGS)
            finish_queued()
            entered = time.perf_counter()
            checkpointer.step()
            finish_queued()
            ours_s += time.perf_counter() - entered
            steps += 1
    whole_s, after = time.perf_counter() - begin, checkpointer.stats()
    training_s = whole_s - ours_s
    ours_s, training_s = max(of_each_rank((ours_s, training_s)), key=lambda each: each[0] / each[1])
    return {
        "overhead": round(ours_s / training_s, 5),
        "ours s": round(ours_s, 3),
        "training s": round(training_s, 3),
        "step ms": round(1e3 * training_s / steps, 2),
        "steps": steps,
        "markers": after.markers_committed - before.markers_committed,
        "steps a marker": round(steps / max(1, after.markers_committed - before.markers_committed), 1),
    }


def agreed(word: bool) -> bool:
    """What rank 0 says."""
    said = torch.tensor(int(word))
    dist.broadcast(said, 0)
    return bool(said)


def of_each_rank(value: tuple[float, float]) -> list[tuple[float, float]]:
    said: list[tuple[float, float]] = [value] * dist.get_world_size()
    dist.all_gather_object(said, value)
    return said


def measure(folder: Path, bound: float, seconds: float, device: str) -> dict[str, Found]:
    """(all ranks) Every stretch."""
    torch.set_num_threads(1)
    job = build(replace(SHAPE, device=device))
    config = StreamConfig(uri=f"file://{folder}/log", drain_every="auto", max_overhead=bound, sweep_bytes=2**28)
    with StreamCheckpointer(job.model, job.optimizer, config=config) as checkpointer:
        found = {}
        warm_up = stretch(job, checkpointer, 5_120, seconds / 2)
        tell(f"warm-up, with the sweep: {warm_up}")
        for name, ids, cores in (
            ("at first", 5_120, 0),
            ("8 times the ids", 40_960, 0),
            ("a tenth of the ids", 512, 0),
            ("every core busy", 5_120, os.cpu_count() or 1),
            ("as at first", 5_120, 0),
        ):
            with busy_cores(cores if dist.get_rank() == 0 else 0):
                found[name] = stretch(job, checkpointer, ids, seconds)
            if dist.get_rank() == 0:
                punch(folder / "log")
            dist.barrier()
            tell(f"{name}: {found[name]}")
    return found


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=at_least(1), default=1)
    parser.add_argument("--bound", type=float, default=0.01)
    parser.add_argument("--seconds", type=float, default=90.0, help="of each stretch")
    add_device(parser)
    args = parse(parser, seconds=0.2)
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds:g}: no step fits into that time: pass more than 0")
    room = int(4 * SHAPE.table_bytes + 15e6 * args.seconds)
    refuse_small_machine("overhead", args, "a job and its log", memory=3 << 30, disk=room)
    torch.set_num_threads(1)
    report = Report("overhead", args)
    with scratch("overhead") as folder:
        found = spread(measure, args.ranks, folder, folder, args.bound, args.seconds, args.device, device=args.device)
    report.facts |= found
    # One marker may cost more than a stretch earns: over all of them the account is settled, but for the last marker.
    ours_s = sum(values["ours s"] for values in found.values())
    training_s = sum(values["training s"] for values in found.values())
    report.goals.append(Goal.at_most("overhead of all stretches", 100 * args.bound, 100 * ours_s / training_s, "%"))
    report.finish()


if __name__ == "__main__":
    main()
