"""The most memory that a checkpoint takes on top of training: streaming and a marker against whole copies.

    python benchmarks/memory/run.py [--rows 5000000] [--touched 0.01 0.2] [--rounds 3] [--out FILE.json]

One table of 5,000,000 x 64 float32 with row-wise Adagrad, 1.3 GB, one rank. Every measurement is a process of its own,
which builds the job, trains a step, and looks at its own memory from then on: RssAnon and RssShmem of
``/proc/self/status``, every 2 ms, so without the page cache. The figure is the peak less what there was before.

``ours``             attach, base, ten steps that touch so many of the rows, drained every step, marker committed
``torch.save``       of the tables and states, to a file
``dcp.async_save``   of plain tensors, DCP's default stager (``DefaultStager`` with no option)

Ours must stay within what docs/guarantees.md (P5) says: the ring, the marker's budget, three bytes a row, eight more
while the kernel is drained, and the rows that a marker proves.
"""

from __future__ import annotations

import argparse
import resource
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed.checkpoint as dcp  # noqa: E402
from allocator import trim  # noqa: E402
from common import Goal, Report, arguments, at_least, parse, refuse_small_machine, scratch, take_turns  # noqa: E402
from job import Job, Shape, build, spread  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402

SAVE, DCP = "torch.save", "dcp.async_save"
RING_BYTES, BUDGET_BYTES = 64 << 20, 256 << 20
STEPS = 10


class Memory:
    """Most memory that is no view of a file. Sampled."""

    def __init__(self) -> None:
        trim()  # what building the job has freed must not hold what is measured
        self.before = self.peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> int:
        """Bytes on top of what there was; one page at least, for less is not seen."""
        self._done.set()
        self._thread.join()
        return max(self.peak - self.before, resource.getpagesize())

    def _watch(self) -> None:
        while not self._done.wait(0.002):
            self.peak = max(self.peak, self._now())

    @staticmethod
    def _now() -> int:
        fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines() if ":" in line)
        return sum(int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def train(job: Job, touched: int) -> None:
    ids = torch.randint(0, job.shape.rows[0], (touched,))
    job.train([ids], bags=touched // 10)


def a_step(rows: int, touched: float) -> int:
    """How many rows a step touches; ten of them make a bag."""
    return round(rows * touched / STEPS) // 10 * 10


def ours(touched: float, shape: Shape, folder: Path) -> int:
    """(one rank) Bytes."""
    job = build(shape)
    each = a_step(shape.rows[0], touched)
    train(job, each)
    memory = Memory()
    config = StreamConfig(
        uri=f"file://{folder}/log",
        marker_every=None,
        head=None,
        ring_bytes=RING_BYTES,
        marker_budget_bytes=BUDGET_BYTES,
    )
    with StreamCheckpointer(job.model, job.optimizer, config=config) as checkpointer:
        checkpointer.mark().result(600)
        for _ in range(STEPS):
            train(job, each)
            checkpointer.step()
        checkpointer.mark().result(600)
    return memory.close()


def save(shape: Shape, folder: Path) -> int:
    """(one rank) Bytes."""
    job = build(shape)
    train(job, 1000)
    memory = Memory()
    torch.save(job.tensors, folder / "tables.pt")
    return memory.close()


def async_save(shape: Shape, folder: Path) -> int:
    """(one rank) Bytes."""
    job = build(shape)
    train(job, 1000)
    memory = Memory()
    dcp.async_save(dict(job.tensors), checkpoint_id=folder / "dcp").result()
    return memory.close()


def alone(body: Callable[[Shape, Path], int], shape: Shape) -> float:
    """In a process and a folder of its own; bytes."""
    with scratch("memory") as folder:
        return float(spread(body, 1, folder, shape, folder))


def main() -> None:
    parser = arguments(__doc__, rounds=3)
    parser.add_argument("--rows", type=at_least(1), default=5_000_000)
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--touched", type=float, nargs="+", default=[0.01, 0.2], help="share of the rows")
    args: argparse.Namespace = parse(parser, rows=5000, dim=8, touched=[0.1], rounds=1)
    for share in args.touched:
        if a_step(args.rows, share) < 10:
            parser.error(
                f"--rows {args.rows} --touched {share:g} leaves each of {STEPS} steps less than one bag of 10 rows: "
                f"raise one of the two"
            )
    shape = Shape((args.rows,), args.dim)
    size = shape.table_bytes
    refuse_small_machine("memory", args, "the table and a copy", memory=(1 << 30) + 5 * size // 2, disk=3 * size)
    proved = StreamConfig(uri="file:///nowhere").proof_bytes
    stated = (RING_BYTES + BUDGET_BYTES + (3 + 8) * args.rows + proved * 9 // 8 + 8 * (proved // (4 * args.dim))) / 1e6
    report = Report("memory", args, facts={"bytes of the table": shape.table_bytes, "stated bound, MB": stated})
    variants = {SAVE: partial(alone, save, shape), DCP: partial(alone, async_save, shape)}
    variants |= {f"ours, {share:.0%} touched": partial(alone, partial(ours, share), shape) for share in args.touched}
    report.add("peak", take_turns(variants, args.rounds, warm_up=0), DCP, unit="MB", scale=1e-6)
    for share in args.touched:
        name = f"ours, {share:.0%} touched"
        report.goals.append(Goal.at_most(f"{name}: peak", stated, report.median("peak", name), "MB"))
    report.finish()


if __name__ == "__main__":
    main()
