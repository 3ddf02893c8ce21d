"""A marker into a model in which one of 26 tables has grown, against a plain restore of it: paired, in the page cache.

    python benchmarks/evolve/run.py [--tables 26] [--rows 190000] [--rounds 5] [--out FILE.json]

Tables of 190,000 x 64 float32 with row-wise Adagrad, 1.3 GB in all, on one rank. One job sends them all, trains some
steps on a tenth of the rows, and commits a marker. Two jobs restore that marker by turns, out of the log: one of the
same model, and one whose first table has a tenth more rows, by ``changes``. Measured are

``restore``       ``StreamCheckpointer.restore()``
``first marker``  the same, and the first marker of the new generation, which waits for the sweep of the changed table

The sweep has to send that one table, and no other: ``facts`` has what was sent. What comes back is compared with the
tables of the first job, bit for bit; the rows that the table has grown by stay as they were.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import torch  # noqa: E402
from common import Goal, Measured, Report, arguments, at_least, check_memory, scratch, take_turns, timed  # noqa: E402
from job import Job, Shape, build, spread  # noqa: E402

from torchrec_stream_ckpt import Changes, RowChange, StreamCheckpointer, StreamConfig  # noqa: E402

PLAIN, CHANGED = "same model", "one table grown"
FRESH = 7.0
"""In every value before a restore."""


def attach(job: Job, folder: Path) -> StreamCheckpointer:
    config = StreamConfig(uri=f"file://{folder / 'log'}", marker_every=None, head=None)
    return StreamCheckpointer(job.model, job.optimizer, config=config)


def train(shape: Shape, folder: Path, steps: int) -> dict[str, Any]:
    """(one rank) Make the marker 1:2, and what it holds."""
    job = build(shape)
    touched = max(shape.rows) // 10 // steps // 10 * 10
    with attach(job, folder) as checkpointer:
        checkpointer.mark().result(600)
        for _ in range(steps):
            job.train([torch.randint(0, rows, (touched,)) for rows in shape.rows], bags=touched // 10)
            checkpointer.step()
        checkpointer.mark().result(600)
    torch.save(job.tensors, folder / "tables.pt")
    return {"bytes of tables and states": job.num_bytes}


class Restores:
    """Both models of one rank."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._folder = folder
        self._truth = torch.load(folder / "tables.pt", mmap=True)
        grown = shape.rows[0] + shape.rows[0] // 10
        self._jobs = {PLAIN: build(shape), CHANGED: build(replace(shape, rows=(grown, *shape.rows[1:])))}
        self._changes = {PLAIN: None, CHANGED: Changes(rows={"ebc.t00": RowChange(grown)})}
        self.facts = {
            "bytes of the changed table": 4 * grown * (shape.dim + 1),
            "bytes sent before the first marker": 0,
        }

    def variants(self, *, marks: bool) -> dict[str, Callable[[], float]]:
        return {name: partial(self._run, name, marks=marks) for name in self._jobs}

    def _run(self, name: str, *, marks: bool) -> float:
        job, times = self._jobs[name], []
        for tensor in job.tensors.values():
            tensor.fill_(FRESH)
        with contextlib.closing(attach(job, self._folder)) as checkpointer:
            times.append(timed(lambda: checkpointer.restore("1:2", changes=self._changes[name])))
            self._compare(job)
            if marks:
                sent = []
                times.append(timed(lambda: sent.append(checkpointer.mark().result(600))))
                if name == CHANGED:
                    self.facts["bytes sent before the first marker"] = checkpointer.stats().num_bytes
        return sum(times)

    def _compare(self, job: Job) -> None:
        for name, truth in self._truth.items():
            found = job.tensors[name]
            if not torch.equal(found[: len(truth)], truth) or not bool((found[len(truth) :] == FRESH).all()):
                raise RuntimeError(f"{name} was restored wrongly")


def measure(shape: Shape, folder: Path, rounds: int) -> tuple[Measured, Measured, dict[str, int]]:
    """(one rank)"""
    restores = Restores(shape, folder)
    found = [take_turns(restores.variants(marks=marks), rounds) for marks in (False, True)]
    return found[0], found[1], restores.facts


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--tables", type=at_least(2), default=26)
    parser.add_argument("--rows", type=at_least(1), default=190_000)
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--steps", type=at_least(1), default=10)
    args = parser.parse_args()
    if args.rows < 100 * args.steps:
        parser.error(
            f"--rows {args.rows} --steps {args.steps}: the steps touch a tenth of the rows, at least 10 each: "
            f"pass at least --rows {100 * args.steps}"
        )
    report = Report("evolve", args)
    _measure_all(args, report)
    changed = report.median("restore", CHANGED)
    plain = report.median("restore", PLAIN)
    ratio = changed / plain if changed is not None and plain else None
    report.goals.append(Goal.at_most("restore: one table grown / same model", 1.15, ratio, "x"))
    sent, table = (report.facts[name] for name in ("bytes sent before the first marker", "bytes of the changed table"))
    report.goals.append(Goal.at_most("sent before the first marker / the changed table", 1.15, sent / table, "x"))
    report.finish()


def _measure_all(args: argparse.Namespace, report: Report) -> None:
    shape = Shape((args.rows,) * args.tables, args.dim)
    check_memory(4 * shape.table_bytes, f"tables of {shape.table_bytes / 1e9:.1f} GB, twice, the truth and the log")
    with scratch("evolve") as folder:
        report.facts |= spread(train, 1, folder, shape, folder, args.steps)
        restore, marker, facts = spread(measure, 1, folder, shape, folder, args.rounds)
        report.facts |= facts
        report.add("restore", restore, PLAIN)
        report.add("first marker", marker, PLAIN)


if __name__ == "__main__":
    main()
