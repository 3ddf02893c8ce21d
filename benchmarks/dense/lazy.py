"""What a marker costs if the dense state is copied during the next forward and backward, and not at the cut.

    python benchmarks/dense/lazy.py [--megabytes 100] [--ranks 2] [--rounds 30] [--out FILE.json]

Dense layers under DDP with SGD, as in ``run.py``: ``mark()``, then a training step, then the marker is awaited.

``at once``  the copy is made in ``mark()``, the default
``lazy``     ``StreamConfig(dense_copy="lazy")``: by another thread, and the rest of it before the optimizer's step
``none``     the same step without a marker

``mark()`` is what training waits for there. A copy that goes on later may delay the step that follows, so both are
timed together, too. CPU time is that of the thread that calls ``mark()``, and of all threads until the marker is
committed. All figures are those of the slowest rank.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Measured,
    Report,
    arguments,
    at_least,
    check_disk,
    check_memory,
    parse,
    scratch,
    take_turns,
)
from job import Job, Shape, build, largest, spread  # noqa: E402
from run import ROWS  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

AT_ONCE, LAZY, NONE = "at once", "lazy", "none"
MARK, MARK_CPU = "mark()", "mark(), CPU of its thread"
WITH_STEP, ALL_CPU = "mark() and the next step", "mark() and the next step, CPU until committed"
POINTS = (MARK, MARK_CPU, WITH_STEP, ALL_CPU)


@dataclass
class Turns:
    """Seconds of each run, by point."""

    found: dict[str, dict[str, list[float]]] = field(default_factory=lambda: {point: {} for point in POINTS})

    def note(self, point: str, name: str, seconds: float) -> float:
        taken = largest(seconds)
        self.found[point].setdefault(name, []).append(taken)
        return taken

    def of(self, point: str, rounds: int) -> Measured:
        return Measured({name: times[-rounds:] for name, times in self.found[point].items()})


def train(job: Job) -> None:
    job.train([torch.randint(0, ROWS, (64,))], bags=64)


def run(turns: Turns, name: str, job: Job, checkpointer: StreamCheckpointer, *, marks: bool) -> float:
    train(job)
    checkpointer.step()
    dist.barrier()
    begin, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    future = checkpointer.mark() if marks else None
    marked, marked_cpu = time.perf_counter() - begin, time.thread_time() - thread
    train(job)
    stepped = time.perf_counter() - begin
    if future is not None:
        future.result(300)
    spent = time.process_time() - process
    checkpointer.step()
    if marks:
        turns.note(MARK, name, marked)
        turns.note(MARK_CPU, name, marked_cpu)
    turns.note(ALL_CPU, name, spent)
    return turns.note(WITH_STEP, name, stepped)


def measure(num_bytes: int, rounds: int, folder: str) -> dict[str, Measured]:
    """(all ranks) Both jobs, by turns."""
    turns, checkpointers = Turns(), []
    variants: dict[str, Callable[[], float]] = {}
    for name, copy in ((AT_ONCE, "at_once"), (LAZY, "lazy")):
        job = build(Shape((ROWS,), 16, dense_bytes=num_bytes))
        uri = f"file://{folder}/{copy}"
        config = StreamConfig(uri=uri, marker_every=None, head=None, dense_copy=copy)  # type: ignore[arg-type]
        checkpointers.append(StreamCheckpointer(job.model, job.optimizer, config=config))
        variants[name] = partial(run, turns, name, job, checkpointers[-1], marks=True)
        variants.setdefault(NONE, partial(run, turns, NONE, job, checkpointers[-1], marks=False))
    take_turns(variants, rounds)
    for each in checkpointers:
        each.close()
    return {point: turns.of(point, rounds) for point in POINTS}


def main() -> None:
    parser = arguments(__doc__, rounds=30)
    parser.add_argument("--megabytes", type=at_least(1), default=100, help="of parameters")
    parser.add_argument("--ranks", type=at_least(1), default=2)
    args = parse(parser, megabytes=2, ranks=2, rounds=1)
    report = Report("dense", args, script="lazy.py")
    name = f"{args.megabytes} MB, {args.ranks} ranks"
    check_memory(int(1e6 * args.megabytes * args.ranks * 2 * 4), name)
    check_disk(int(1e6 * args.megabytes * 2 * (args.rounds + 3)), name)
    with scratch("dense") as folder:
        measured = spread(measure, args.ranks, folder, args.megabytes * 1_000_000, args.rounds, str(folder))
    for point, found in measured.items():
        report.add(f"{name}: {point}", found, AT_ONCE)
    for each in (AT_ONCE, LAZY):
        median = report.points[f"{name}: {MARK_CPU}"]["variants"][each]["median"]
        report.goals.append(Goal.at_most(f"{name}: {MARK_CPU}, {each}", 6, median, "ms"))
    report.finish()


if __name__ == "__main__":
    main()
