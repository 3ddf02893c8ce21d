"""How work grows: each call on jobs of three sizes, along each axis, and the exponents between the two largest.

    python benchmarks/growth/run.py [--sizes small|far] [--axes NAME ...] [--calls NAME ...] [--out FILE.json]

Cells are kept beside ``--out`` until all are there, so a run that was stopped goes on, and several runs with the same
``--out`` share the axes among them. Work is counted: at small sizes lines of the package that are executed, at far
sizes its functions that are entered; files opened, folders listed, bytes read and written. Counts do not depend on the
machine. CPU time and memory are of another run of the same call. Each call runs in a fork of this process, which has
imported everything.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import gc
import json
import math
import os
import shutil
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]
# The other setting keeps what each thread has freed, up to 64 MiB: memory would be that of chance.
os.environ.setdefault("BENCH_ALLOCATOR", "default")

import start  # noqa: E402, F401
from axes import AXES, write  # noqa: E402
from axis import Axis  # noqa: E402
from calls import CALLS, CHANGING, call  # noqa: E402
from common import command_of, machine, parse, scratch, tell, without_fsync  # noqa: E402
from counts import FUNCTIONS, LINES, TIME, Counts, all_counted, apart, apart_together, timed  # noqa: E402
from live import LIVE, LIVE_CALLS, TRAINING, job_of  # noqa: E402
from picture import IMAGE, draw  # noqa: E402
from votes import VOTE_CALLS, VOTES, votes_of  # noqa: E402

LIMIT = 1.15
"""An exponent above it is named on the page."""
LEAST_CPU_S = 0.5
"""CPU time below it is mostly that of a start: it has no exponent."""
LEAST_MEMORY_BYTES = 2**26
"""The same of memory."""
COUNTED = ("lines", "calls", "opened", "listed")
"""Work that is counted."""
MOVED = ("read_bytes", "written_bytes")
LEAST_BYTES = 2**20
"""Fewer bytes are mostly those of modules and of one file."""
ALL: dict[str, Axis] = {**AXES, **VOTES, **LIVE}


def timed_call(root: Path, name: str) -> dict[str, float]:
    return timed(partial(call, root, name))[0]


def counted_call(root: Path, name: str, count: str) -> dict[str, Any]:
    return Counts(count == LINES).of(partial(call, root, name))[0]


def trainer_calls(axis: str, size: int, folder: Path, count: str, rank: int) -> dict[str, dict[str, Any]]:
    """All calls of a trainer's life."""
    shape = LIVE[axis].make(size)
    found = all_counted(count, partial(job_of, shape, folder, rank))
    if count == TIME:
        before = 0.0
        for name in TRAINING:  # what a trainer has by then, in all its calls so far
            found[name] |= {"trainer_bytes": before + found[name]["memory_bytes"], "bound_bytes": shape.bound_bytes()}
            before += max(0.0, found[name]["held_bytes"])
    return found


def vote_calls(size: int, folder: Path, count: str) -> dict[str, dict[str, Any]]:
    return all_counted(count, partial(votes_of, size, folder))


def warm_up(folder: Path, calls: list[str]) -> None:
    """Run every call once, so that no fork has to import anything."""
    _write("rows", folder, 100)
    for name in dict.fromkeys((CALLS[0], *calls)):
        call(folder, name)


def _write(axis: str, root: Path, size: int) -> None:
    with without_fsync():
        write(axis, root, size)


def cells_of(axis: str, size: int, calls: list[str], folder: Path, count: str) -> dict[str, dict[str, Any]]:
    """All calls on one job of this size."""
    if ALL[axis].kind != "log":
        return _cells_of_trainers(axis, size, folder, count)
    root, found = folder / "job", {}
    apart(_write, axis, root, size)
    if CALLS[0] not in calls:
        apart(call, root, CALLS[0])
    for name in calls:
        before = root
        if name in CHANGING:
            before = folder / "before"
            shutil.copytree(root, before)
        measured = apart(timed_call, root, name)
        measured |= apart(counted_call, before, name, count)
        if name in CHANGING:
            shutil.rmtree(before)
        found[name] = measured
        tell(f"{axis} {size}, {name}: {measured['cpu_s']:.2f} s, {work_of(measured)} {count}")
    shutil.rmtree(root)
    return found


def work_of(cell: dict[str, Any]) -> int:
    """Lines or functions, whichever was counted."""
    found: int = cell.get("lines", cell.get("calls", 0))
    return found


def _cells_of_trainers(axis: str, size: int, folder: Path, count: str) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {name: {} for name in calls_of(axis)}
    for what in (TIME, count):
        place = folder / what
        place.mkdir()
        if ALL[axis].kind == "votes":
            cells = apart(vote_calls, size, place, what)
        else:
            cells = apart_together(trainer_calls, LIVE[axis].make(size).world, axis, size, place, what)
        shutil.rmtree(place)
        for name, cell in cells.items():
            found[name] |= cell
    tell(f"{axis} {size}: {sum(cell['cpu_s'] for cell in found.values()):.2f} s")
    return found


def exponent(sizes: list[int], values: list[float]) -> float | None:
    """By which power of the size a value grows, between the two largest sizes; None if it has no value there."""
    if min(values[-2:]) <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def exponents(sizes: list[int], cells: list[dict[str, Any]]) -> dict[str, float]:
    """Exponents of one call along one axis: of counted work always, of CPU time and memory from a least value on."""
    found = {kind: exponent(sizes, [cell[kind] for cell in cells]) for kind in COUNTED if kind in cells[-1]}
    if cells[-1]["cpu_s"] >= LEAST_CPU_S:
        found["cpu_s"] = exponent(sizes, [cell["cpu_s"] for cell in cells])
    for kind in MOVED:
        if cells[-1][kind] >= LEAST_BYTES:
            found[kind] = exponent(sizes, [cell[kind] for cell in cells])
    if cells[-1]["memory_bytes"] >= LEAST_MEMORY_BYTES:
        found["memory_bytes"] = exponent(sizes, [cell["memory_bytes"] for cell in cells])
    return {kind: round(value, 3) for kind, value in found.items() if value is not None}


def steepest(sizes: list[int], cells: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """Lines whose count grows faster than the limit, and that matter: (place, exponent, count), the busiest first."""
    last, before = cells[-1]["places"], cells[-2]["places"]
    found = []
    for place, count in last.items():
        power = exponent(sizes, [before.get(place, 0), count])
        if power is not None and power > LIMIT and count >= 0.01 * work_of(cells[-1]):
            found.append((place, round(power, 2), count))
    return found[:5]


def calls_of(axis: str) -> tuple[str, ...]:
    """Names of the calls that are made along an axis."""
    return {"log": CALLS, "trainer": LIVE_CALLS, "votes": VOTE_CALLS}[ALL[axis].kind]


def rows_of(cells: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each axis and call that has all sizes."""
    rows = []
    for axis, by_size in cells.items():
        sizes = sorted(map(int, by_size))
        for name in calls_of(axis):
            own = [by_size[str(size)][name] for size in sizes if name in by_size[str(size)]]
            if len(own) < 3:
                continue
            plain = [{kind: value for kind, value in cell.items() if kind != "places"} for cell in own]
            rows.append(
                {
                    "axis": axis,
                    "call": name,
                    "sizes": sizes,
                    "measured": plain,
                    "exponents": exponents(sizes, own),
                    "steepest": steepest(sizes, own),
                }
            )
    return rows


Cells = dict[str, dict[str, Any]]
"""Size -> call -> what was measured, along one axis."""


@contextlib.contextmanager
def kept_cells(folder: Path | None, axis: str) -> Iterator[tuple[Path | None, Cells]]:
    """Cells of an axis that were measured before, and their file. Another run that measures this axis has it alone.

    Raises:
        BlockingIOError: another run has it.
    """
    if folder is None:
        yield None, {}
        return
    folder.mkdir(exist_ok=True)
    path = folder / f"{axis}.json"
    with path.open("a+") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path, read_cells(path)


def read_cells(path: Path) -> Cells:
    """Cells that are kept in a file, if any."""
    found: Cells = json.loads(path.read_text() or "{}") if path.exists() else {}
    return found


def measure(args: argparse.Namespace) -> dict[str, Cells]:
    """All cells that are asked for; those that are kept beside ``--out`` are not measured again."""
    until = time.monotonic() + 60 * args.minutes
    with scratch("growth") as folder:
        warm_up(folder, args.calls)
    gc.collect()
    gc.freeze()  # a collection in a fork would copy every page of what is imported, half a second of CPU
    kept = args.out.with_suffix(".cells") if args.out is not None else None
    cells: dict[str, Cells] = {}
    for name in args.axes:
        try:
            with kept_cells(kept, name) as (path, own):
                cells[name] = own
                _measure_axis(name, own, path, args, until)
        except BlockingIOError:
            tell(f"{name}: another run measures it")
    if kept is None:
        return cells
    there = {path.stem for path in kept.glob("*.json")}  # those of other runs as well
    return {name: read_cells(kept / f"{name}.json") for name in ALL if name in there.union(args.axes)}


def _measure_axis(name: str, own: Cells, path: Path | None, args: argparse.Namespace, until: float) -> None:
    count = LINES if args.sizes == "small" else FUNCTIONS
    for size in ALL[name].sizes(args.sizes == "far"):
        mine = own.setdefault(str(size), {})
        wanted = args.calls if ALL[name].kind == "log" else calls_of(name)
        if set(wanted) <= set(mine):
            continue
        if time.monotonic() > until:
            tell(f"{name} {size}: not measured, the time is over")
            continue
        with scratch("growth") as folder:
            mine |= cells_of(name, size, [call for call in args.calls if call not in mine], folder, count)
        if path is not None:
            path.write_text(json.dumps(own))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    parser.add_argument("--sizes", choices=("small", "far"), default="far")
    parser.add_argument("--axes", nargs="+", choices=list(ALL), default=list(ALL), metavar="NAME")
    parser.add_argument("--minutes", type=float, default=120.0, help="begin no cell after this time")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS), metavar="NAME")
    parser.add_argument(
        "--draw", type=Path, metavar="RESULT.json", help=f"draw a filed result as {IMAGE.name}, measure nothing"
    )
    args = parse(parser, sizes="small", axes=["rows"], calls=["materialize, catch-up", "list"])
    if args.draw is not None:
        IMAGE.write_text(draw(json.loads(args.draw.read_text())["rows"]))
        return
    cells = measure(args)
    rows = rows_of(cells)
    whole = {row["axis"] for row in rows}
    missing = {
        name: [size for size in ALL[name].sizes(args.sizes == "far") if not cells[name].get(str(size))]
        for name in cells
        if name not in whole
    }
    for row in rows:
        said = ", ".join(f"{kind} {value:.2f}" for kind, value in row["exponents"].items())
        print(f"{row['axis']}, {row['call']}: {said}{'; ' if row['steepest'] else ''}{row['steepest'] or ''}")
    if args.out is not None:
        found = {"case": "growth", "date": time.strftime("%Y-%m-%d"), "command": command_of("growth")}
        found |= {"machine": machine(), "missing": missing, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        if not missing:
            shutil.rmtree(args.out.with_suffix(".cells"))


if __name__ == "__main__":
    main()
