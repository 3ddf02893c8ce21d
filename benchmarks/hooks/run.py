"""What the hooks take of the training thread's CPU time in a step, apart from rows, marks and markers.

    python benchmarks/hooks/run.py [--rounds 200] [--steps 40] [--out FILE.json]

One rank, one table of 10,000 x 16, one kernel; 32 bags of two ids, so that little but calls is left. Three copies of
the job take turns in blocks of ``--steps`` steps: ``off``, ``off again`` (the noise) and ``hooks``, to which a
checkpointer is attached that never drains and whose ``step()`` is not called. Each figure is the thread's CPU time of a
step. What the hooks add is the difference of the medians of all rounds, and of their fastest tenths, which other work
on the machine disturbs less. It falls on each kernel of a step once, whatever the batch.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
from common import Goal, Report, arguments, at_least, parse, refuse_small_machine, scratch, take_turns  # noqa: E402
from job import Job, Shape, build, join_group  # noqa: E402
from page_tables.results import newest  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

SHAPE = Shape(rows=(10_000,), dim=16)
BAGS = 32
STEPS = {"thesis": "1-rank", "criteo": "criteo_1-rank"}
"""Filed results of ``benchmarks/step_time``: jobs of three kernels on one rank."""
KERNELS = 3
MOST = 0.002


def block(job: Job, ids: list[torch.Tensor], steps: int) -> Callable[[], float]:
    def run() -> float:
        begin = time.thread_time()
        for _ in range(steps):
            job.train(ids, BAGS)
        return (time.thread_time() - begin) / steps

    return run


def added(base: list[float], own: list[float]) -> tuple[float, float]:
    """By the medians, and by the fastest tenths."""
    tenth = len(base) // 10
    return statistics.median(own) - statistics.median(base), sorted(own)[tenth] - sorted(base)[tenth]


def main() -> None:
    parser = arguments(__doc__, rounds=200)
    parser.add_argument("--steps", type=at_least(1), default=40)
    args = parse(parser, steps=2, rounds=1)
    refuse_small_machine("hooks", args, "three small jobs", memory=1 << 30, disk=1 << 27)
    torch.set_num_threads(1)
    ids = [torch.randint(0, rows, (2 * BAGS,)) for rows in SHAPE.rows]
    report = Report("hooks", args)
    with scratch("hooks") as folder:
        join_group(folder, 0, 1)
        jobs = {name: build(SHAPE) for name in ("off", "off again", "hooks")}
        config = StreamConfig(uri=f"file://{folder / 'log'}", drain_every=10**6, marker_every=None, fresh=True)
        checkpointer = StreamCheckpointer(jobs["hooks"].model, jobs["hooks"].optimizer, config=config)
        checkpointer.step()
        gc.freeze()
        measured = take_turns({name: block(job, ids, args.steps) for name, job in jobs.items()}, args.rounds, warm_up=5)
    report.add("CPU time of a small step", measured, "off", unit="us", scale=1e6)
    found = {name: added(measured.times["off"], own) for name, own in measured.times.items()}
    report.facts["added by the hooks to a kernel's lookup and update, us (medians, fastest tenths)"] = [
        round(1e6 * each, 1) for each in found["hooks"]
    ]
    report.facts["noise, us"] = [round(1e6 * each, 1) for each in found["off again"]]
    most = max(found["hooks"])
    for name, filed in STEPS.items():
        step_ms = newest("step_time", filed).found["variants"]["off"]["step_ms_median"]
        share = 100 * KERNELS * most * 1e3 / step_ms
        report.goals.append(
            Goal.at_most(f"of a {name} step ({step_ms:.0f} ms, {KERNELS} kernels)", 100 * MOST, share, "%")
        )
    report.facts["shortest step of which it is 0.2%, ms a kernel"] = round(1e3 * most / MOST, 1)
    report.finish()
    sys.stdout.flush()
    os._exit(0)  # no last marker is owed


if __name__ == "__main__":
    main()
