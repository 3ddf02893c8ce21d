"""What a restart costs if the tables are small: the fixed costs of a restore, by the clock and in CPU time.

    python benchmarks/restore/small.py [--rows 10000] [--tables 8] [--rounds 30] [--out FILE.json]

A job of one rank, as in ``run.py``, with tables of 10,000 x 64 float32 and a dense layer. Fresh processes restore its
newest marker, once each, with the page cache warm:

``torch.load, mmap + copy``  the tables and their states alone, from one mapped file
``ours, log``                ``StreamCheckpointer.restore()``: tables, dense state, proofs, and a new generation
``ours, store``              the same from a store into which a materializer has folded the log

CPU time is that of all threads of the process, user and system, during the call. Every restore is compared with the
saved tables, bit for bit.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from cache import WARM, prepare  # noqa: E402
from common import Goal, Report, arguments, at_least, check_disk, check_memory, in_turns, parse, scratch  # noqa: E402
from job import Shape, spread  # noqa: E402
from run import LOG, MAPPED, STORE, Restores, fold, train  # noqa: E402

GOAL_MS = 20
STEPS = 10


def load(shape: Shape, folder: Path, uri: str, variant: str) -> tuple[float, float]:
    """(one rank) Seconds of one load, and its CPU time."""
    restores = Restores(shape, folder, uri)
    return restores.run(variant), restores.cpu_s


def fresh(shape: Shape, folder: Path, uri: str, variant: str) -> tuple[float, float]:
    """The same in a process that has done nothing before."""
    prepare(WARM, folder)
    taken, spent = spread(load, 1, folder.parent, shape, folder, uri, variant)
    return taken, spent


def main() -> None:
    parser = arguments(__doc__, rounds=30)
    parser.add_argument("--rows", type=at_least(1000), default=10_000, help="of each table")
    parser.add_argument("--tables", type=at_least(1), default=8)
    args = parse(parser, rows=1000, tables=2, rounds=1)
    shape = Shape((args.rows,) * args.tables, 64, sharding="row_wise")
    name = f"{args.tables} tables of {args.rows} rows"
    check_memory((1 << 30) + 4 * shape.table_bytes, name)
    check_disk(7 * shape.table_bytes, name)
    report = Report("restore", args, script="small.py")
    with scratch("restore") as base:
        folder = base / "job"
        uri = f"file://{folder / 'log'}"
        report.facts |= spread(train, 1, base, shape, folder, STEPS, uri)
        fold(folder)
        variants = {each: partial(fresh, shape, folder, uri, each) for each in (MAPPED, LOG, STORE)}
        taken, spent = in_turns(variants, args.rounds)
    report.add(name, taken, MAPPED)
    report.add(f"{name}, CPU", spent, MAPPED)
    for each in (LOG, STORE):
        median = report.points[f"{name}, CPU"]["variants"][each]["median"]
        report.goals.append(Goal.at_most(f"{name}, CPU: {each}", GOAL_MS, median, "ms"))
    report.finish()


if __name__ == "__main__":
    main()
