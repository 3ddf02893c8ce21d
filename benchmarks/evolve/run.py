"""A marker into a model in which one of 26 tables has changed, against a plain restore: paired, in the page cache.

    python benchmarks/evolve/run.py [--tables 26] [--rows 190000] [--rounds 5] [--out FILE.json]

Tables of 190,000 x 64 float32 with row-wise Adagrad, 1.3 GB in all, on one rank. One job sends them all, trains some
steps on a tenth of the rows, and commits a marker. Jobs restore that marker out of the log by turns, each from its own
copy of the log's names: one of the same model, one whose first table has a tenth more rows, and, as the worse half, one
in which the rows of the first table have other ids, and one in which every table has grown. Measured are

``restore``         ``StreamCheckpointer.restore()``
``to first marker`` the same, and the first marker of the new generation, which waits for the sweep of changed tables.
                    The baseline is a plain restore after which that one table, of the same size, is swept as well;
                    beside it stands one that sweeps nothing

The sweep has to send that one table, and no other: ``facts`` has what was sent. What comes back is compared with the
tables of the first job, bit for bit; the rows that a table has grown by stay as they were.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import torch  # noqa: E402
from cache import COLD, STATES, WARM, files_under, prepare  # noqa: E402
from common import (  # noqa: E402
    Goal,
    Measured,
    Report,
    arguments,
    at_least,
    parse,
    refuse_small_machine,
    scratch,
    take_turns,
    timed,
)
from job import Job, Shape, build, spread  # noqa: E402

from tests.inside import inside  # noqa: E402
from torchrec_stream_ckpt import Changes, IdMap, RowChange, StreamCheckpointer, StreamConfig  # noqa: E402

PLAIN, SWEPT = "same model", "same model, that table swept"
GROWN, RENUMBERED, EVERY = "one table grown", "one table with an id map", "every table grown"
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
    """All models of one rank."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self._folder = folder
        self._truth = torch.load(folder / "tables.pt", mmap=True)
        rows = shape.rows[0]
        grown = rows + rows // 10
        self._new_ids = torch.from_numpy(np.random.default_rng(0).permutation(rows))
        same = build(shape)
        one = build(replace(shape, rows=(grown, *shape.rows[1:])))
        every = build(replace(shape, rows=(grown,) * len(shape.rows)))
        names = [f"ebc.t{number:02d}" for number in range(len(shape.rows))]
        ids = IdMap(np.arange(rows), self._new_ids.numpy())
        self._jobs: dict[str, tuple[Job, Changes | None]] = {
            PLAIN: (same, None),
            SWEPT: (same, None),
            GROWN: (one, Changes(rows={names[0]: RowChange(grown)})),
            RENUMBERED: (same, Changes(rows={names[0]: RowChange(rows, ids)})),
            EVERY: (every, Changes(rows={name: RowChange(grown) for name in names})),
        }
        self.facts: dict[str, int] = {
            "bytes of the table": 4 * rows * (shape.dim + 1),
            "bytes of the grown table": 4 * grown * (shape.dim + 1),
        }

    def variants(self, names: tuple[str, ...], *, marks: bool, state: str = WARM) -> dict[str, Callable[[], float]]:
        return {name: partial(self._run, name, marks=marks, state=state) for name in names}

    def _run(self, name: str, *, marks: bool, state: str = WARM) -> float:
        job, changes = self._jobs[name]
        for tensor in job.tensors.values():
            tensor.fill_(FRESH)
        folder = self._folder / "turn"
        shutil.copytree(self._folder / "log", folder / "log", copy_function=_link_rows)
        prepare(state, *(path for path in files_under(folder) if path.suffix == ".seg"))
        try:
            with contextlib.closing(attach(job, folder)) as checkpointer:
                taken = timed(lambda: checkpointer.restore("1:2", changes=changes))
                self._compare(name, job)
                if marks:
                    if name == SWEPT:
                        _sweep_first(checkpointer)
                    taken += timed(lambda: checkpointer.mark().result(600))
                    self.facts[f"bytes sent up to the first marker: {name}"] = checkpointer.stats().num_bytes
                return taken
        finally:
            shutil.rmtree(folder)

    def _compare(self, job_name: str, job: Job) -> None:
        for name, truth in self._truth.items():
            found = job.tensors[name]
            if job_name == RENUMBERED and ".t00." in name:
                found = found[self._new_ids]
            if not torch.equal(found[: len(truth)], truth) or not bool((found[len(truth) :] == FRESH).all()):
                raise RuntimeError(f"{job_name}: {name} was restored wrongly")


def _link_rows(source: str, target: str) -> None:
    """Segments are written once; the control partition is appended to."""
    if source.endswith(".seg"):
        os.link(source, target)
    else:
        shutil.copy2(source, target)


def _sweep_first(checkpointer: StreamCheckpointer) -> None:
    """The sweep of the first table, and of nothing else, before the next marker."""
    (mask,) = inside(checkpointer).masks
    (kernel,) = inside(checkpointer).kernels
    mask.sweep.again([[shard.table.name for shard in kernel.shards].index("ebc.t00")])


def measure(shape: Shape, folder: Path, rounds: int) -> tuple[dict[str, Measured], Measured, dict[str, int]]:
    """(one rank) Restores by the state of the page cache, and first markers."""
    restores, names = Restores(shape, folder), (PLAIN, GROWN, RENUMBERED, EVERY)
    restored = {state: take_turns(restores.variants(names, marks=False, state=state), rounds) for state in STATES}
    marked = take_turns(restores.variants((SWEPT, PLAIN, GROWN, RENUMBERED, EVERY), marks=True), rounds)
    return restored, marked, restores.facts


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    parser.add_argument("--tables", type=at_least(2), default=26)
    parser.add_argument("--rows", type=at_least(1), default=190_000)
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--steps", type=at_least(1), default=10)
    args = parse(parser, tables=3, rows=1000, dim=8, rounds=1)
    if args.rows < 100 * args.steps:
        parser.error(
            f"--rows {args.rows} --steps {args.steps}: the steps touch a tenth of the rows, at least 10 each: "
            f"pass at least --rows {100 * args.steps}"
        )
    report = Report("evolve", args)
    _measure_all(args, report)
    for name in (GROWN, RENUMBERED, EVERY):
        report.goals.append(_goal(report, "restore", PLAIN, name))
    for name in (GROWN, RENUMBERED):
        report.goals.append(_goal(report, "to first marker", SWEPT, name))
    sent, table = (
        report.facts[name] for name in (f"bytes sent up to the first marker: {GROWN}", "bytes of the grown table")
    )
    report.goals.append(Goal.at_most("sent up to the first marker / the grown table", 1.15, sent / table, "x"))
    report.finish()


def _goal(report: Report, point: str, base: str, name: str) -> Goal:
    """Round by round, against the variant of the same round."""
    ratio = report.paired(point, base, name)
    return Goal.at_most(f"{point}: {name} / {base}", 1.15, 1 / ratio if ratio else None, "x")


def _measure_all(args: argparse.Namespace, report: Report) -> None:
    shape = Shape((args.rows,) * args.tables, args.dim)
    size, what = shape.table_bytes, f"tables of {shape.table_bytes / 1e9:.1f} GB, thrice, the truth and the log"
    refuse_small_machine("evolve", args, what, memory=5 * size, disk=4 * size)
    with scratch("evolve") as folder:
        report.facts |= spread(train, 1, folder, shape, folder, args.steps)
        restore, marker, facts = spread(measure, 1, folder, shape, folder, args.rounds)
        report.facts |= facts
        report.add("restore", restore[WARM], PLAIN)
        report.add("restore, cold", restore[COLD], PLAIN)
        report.add("to first marker", marker, SWEPT)


if __name__ == "__main__":
    main()
