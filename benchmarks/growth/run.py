"""How work grows: each call on jobs of three sizes, along each axis, and the exponents between the two largest.

    python benchmarks/growth/run.py [--sizes small|full] [--axes NAME ...] [--calls NAME ...] [--out FILE.json]

Cells are kept beside ``--out`` until the run ends, so a run that was stopped goes on. Work is counted: lines of the
package that are executed, files opened, folders listed. These counts do not depend on the machine. CPU time and memory
are of another run of the same call. Each call runs in a fork of this process, which has imported everything.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from axes import AXES, Axis, write  # noqa: E402
from calls import CALLS, call  # noqa: E402
from common import command_of, machine, parse, scratch, tell, without_fsync  # noqa: E402
from live import LIVE, LIVE_CALLS, LiveAxis, job_of  # noqa: E402
from picture import IMAGE, draw  # noqa: E402

from tests.work import lines_of  # noqa: E402

LIMIT = 1.15
"""An exponent above it is named on the page."""
LEAST_CPU_S = 0.5
"""CPU time below it is mostly that of a start: it has no exponent."""
COUNTED = ("lines", "opened", "listed")
"""Work that is counted."""


def timed(act: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """CPU time and peak memory of a call, and its result."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    result = act()
    cpu = time.process_time() - begin
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    return {"cpu_s": cpu, "memory_bytes": memory}, result


class Counts:
    """Lines of the package that a call executes, files that it opens and folders that it lists; the busiest line."""

    def __init__(self) -> None:
        self._events: Counter[str] = Counter()
        sys.addaudithook(self._note)  # no hook can be taken back: this process ends after its calls

    def _note(self, event: str, _: object) -> None:
        if event in ("open", "os.listdir", "os.scandir"):
            self._events[event] += 1

    def of(self, act: Callable[[], Any]) -> tuple[dict[str, Any], Any]:
        """Make a call; returns its counts, and its result."""
        self._events.clear()
        results: list[Any] = []
        lines = lines_of(lambda: results.append(act()))
        found = {
            "lines": sum(lines.values()),
            "opened": self._events["open"],
            "listed": self._events["os.listdir"] + self._events["os.scandir"],
            "places": {f"{path}:{line}": count for (path, line), count in lines.most_common(400)},
        }
        return found, results[0]


def timed_call(root: Path, name: str) -> dict[str, float]:
    return timed(partial(call, root, name))[0]


def counted_call(root: Path, name: str) -> dict[str, Any]:
    return Counts().of(partial(call, root, name))[0]


def live_calls(axis: str, size: int, count: bool) -> dict[str, dict[str, Any]]:
    """All calls of a live job."""
    found: dict[str, dict[str, Any]] = {}
    how = Counts().of if count else timed

    def measure(name: str, act: Callable[[], Any]) -> Any:
        found[name], result = how(act)
        return result

    job_of(LIVE[axis].shape(size), measure)
    return found


def apart(act: Callable[..., Any], *words: object) -> Any:
    """Run it in a fork, so that no call finds what another one has left in memory."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(act, words)


def warm_up(folder: Path, calls: list[str]) -> None:
    """Run every call once, so that no fork has to import anything."""
    _write("rows", folder, 100)
    for name in calls:
        call(folder, name)


def _write(axis: str, root: Path, size: int) -> None:
    with without_fsync():
        write(axis, root, size)


def cells_of(axis: str, size: int, calls: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """All calls on one job of this size."""
    if axis in LIVE:
        spent, done = (apart(live_calls, axis, size, count) for count in (False, True))
        tell(f"{axis} {size}: {sum(cell['cpu_s'] for cell in spent.values()):.2f} s")
        return {name: spent[name] | done[name] for name in LIVE_CALLS}
    root, found = folder / "job", {}
    apart(_write, axis, root, size)
    if CALLS[0] not in calls:
        apart(call, root, CALLS[0])
    for name in calls:
        before = folder / "before"
        shutil.copytree(root, before)
        measured = apart(timed_call, root, name)
        measured |= apart(counted_call, before, name)
        shutil.rmtree(before)
        found[name] = measured
        tell(f"{axis} {size}, {name}: {measured['cpu_s']:.2f} s, {measured['lines']} lines")
    shutil.rmtree(root)
    return found


def exponent(sizes: list[int], values: list[float]) -> float | None:
    """By which power of the size a value grows, between the two largest sizes; None if it has no value there."""
    if min(values[-2:]) <= 0:
        return None
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def exponents(sizes: list[int], cells: list[dict[str, Any]]) -> dict[str, float]:
    """Exponents of one call along one axis: of counted work always, of CPU time and memory from a least value on."""
    found = {kind: exponent(sizes, [cell[kind] for cell in cells]) for kind in COUNTED}
    if cells[-1]["cpu_s"] >= LEAST_CPU_S:
        found["cpu_s"] = exponent(sizes, [cell["cpu_s"] for cell in cells])
    if cells[-1]["memory_bytes"] >= 64 * 2**20:
        found["memory_bytes"] = exponent(sizes, [cell["memory_bytes"] for cell in cells])
    return {kind: round(value, 3) for kind, value in found.items() if value is not None}


def steepest(sizes: list[int], cells: list[dict[str, Any]]) -> list[tuple[str, float, int]]:
    """Lines whose count grows faster than the limit, and that matter: (place, exponent, count), the busiest first."""
    last, before = cells[-1]["places"], cells[-2]["places"]
    found = []
    for place, count in last.items():
        power = exponent(sizes, [before.get(place, 0), count])
        if power is not None and power > LIMIT and count >= 0.01 * cells[-1]["lines"]:
            found.append((place, round(power, 2), count))
    return found[:5]


def calls_of(axis: str) -> tuple[str, ...]:
    """Names of the calls that are made along an axis."""
    return LIVE_CALLS if axis in LIVE else CALLS


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


def measure(args: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    """All cells that are asked for; those that ``--out`` has are kept, and each new size is filed at once."""
    until = time.monotonic() + 60 * args.minutes
    with scratch("growth") as folder:
        warm_up(folder, args.calls)
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    kept = args.out.with_suffix(".cells.json") if args.out is not None else None
    if kept is not None and kept.exists():
        cells = json.loads(kept.read_text())
    for name in args.axes:
        axis: Axis | LiveAxis = LIVE[name] if name in LIVE else AXES[name]
        for size in axis.small if args.sizes == "small" else axis.full:
            mine = cells.setdefault(name, {}).setdefault(str(size), {})
            wanted = LIVE_CALLS if name in LIVE else args.calls
            if set(wanted) <= set(mine):
                continue
            if time.monotonic() > until:
                tell(f"{name} {size}: not measured, the time is over")
                continue
            with scratch("growth") as folder:
                mine |= cells_of(name, size, [call for call in args.calls if call not in mine], folder)
            if kept is not None:
                kept.write_text(json.dumps(cells))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    parser.add_argument("--sizes", choices=("small", "full"), default="full")
    parser.add_argument("--axes", nargs="+", choices=[*AXES, *LIVE], default=[*AXES, *LIVE], metavar="NAME")
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
        name: sorted(int(size) for size, calls in cells[name].items() if not calls)
        for name in args.axes
        if name not in whole
    }
    for row in rows:
        said = ", ".join(f"{kind} {value:.2f}" for kind, value in row["exponents"].items())
        print(f"{row['axis']}, {row['call']}: {said}{'; ' if row['steepest'] else ''}{row['steepest'] or ''}")
    if args.out is not None:
        found = {"case": "growth", "date": time.strftime("%Y-%m-%d"), "command": command_of("growth")}
        found |= {"machine": machine(), "missing": missing, "rows": rows}
        args.out.write_text(json.dumps(found, indent=1) + "\n")
        args.out.with_suffix(".cells.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
