"""How work grows: each call on jobs of three sizes, along each axis, and the exponents between the two largest.

    python benchmarks/growth/run.py [--sizes small|full] [--axes NAME ...] [--calls NAME ...] [--out FILE.json]

Cells are kept beside ``--out`` until the run ends, so a run that was stopped goes on. Work is counted: lines of the
package that are executed, files opened, folders listed. These counts do not depend on the machine. CPU time and memory
are of another run of the same call. Each call runs in a fork of this process, which has imported everything.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import multiprocessing
import resource
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from axes import AXES, Axis, write  # noqa: E402
from common import command_of, machine, parse, scratch, tell, without_fsync  # noqa: E402

from tests.work import lines_of  # noqa: E402
from torchrec_stream_ckpt.cli.main import app  # noqa: E402

CALLS: dict[str, tuple[str, ...]] = {
    "materialize, catch-up": ("materialize", "LOG", "--store", "STORE", "--once", "--json"),
    "materialize, nothing new": ("materialize", "LOG", "--store", "STORE", "--once", "--json"),
    "list": ("list", "LOG", "--store", "STORE", "--json"),
    "list --tree": ("list", "LOG", "--store", "STORE", "--tree"),
    "list --newest 1": ("list", "LOG", "--store", "STORE", "--newest", "1", "--json"),
    "show": ("show", "LOG", "--store", "STORE", "--json"),
    "verify": ("verify", "LOG", "--json"),
    "verify, from the store": ("verify", "LOG", "--store", "STORE", "--json"),
    "doctor": ("doctor", "LOG", "--json"),
    "report": ("report", "LOG", "--store", "STORE", "--out", "PAGE"),
    "trim --dry-run": ("trim", "LOG", "--store", "STORE", "--dry-run", "--json"),
    "gc --dry-run": ("gc", "LOG", "--store", "STORE", "--newest", "2", "--dry-run", "--json"),
    "scrub": ("scrub", "LOG", "--store", "STORE", "--json"),
}
"""In this order: the first one makes the store that the others read."""
LIMIT = 1.15
"""An exponent above it is named on the page."""
LEAST_CPU_S = 0.5
"""CPU time below it is mostly that of a start: it has no exponent."""
COUNTED = ("lines", "opened", "listed")
"""Work that is counted."""


def call(root: Path, words: tuple[str, ...]) -> None:
    """Run a command of the command line in this process.

    Raises:
        RuntimeError: it failed; the message holds its output.
    """
    places = {"LOG": f"file://{root / 'log'}", "STORE": str(root / "store"), "PAGE": str(root / "page.html")}
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), without_fsync():
        try:
            status = app([places.get(word, word) for word in words], standalone_mode=False)
        except SystemExit as end:
            status = end.code
    if status not in (0, None):
        raise RuntimeError(f"{' '.join(words)}: {said.getvalue()[-500:]}")


def timed(root: Path, words: tuple[str, ...]) -> dict[str, float]:
    """CPU time and peak memory of a call."""
    before, begin = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    call(root, words)
    cpu = time.process_time() - begin
    return {"cpu_s": cpu, "memory_bytes": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024}


def counted(root: Path, words: tuple[str, ...]) -> dict[str, Any]:
    """Lines of the package that a call executes, files that it opens and folders that it lists; the busiest line."""
    events: Counter[str] = Counter()
    sys.addaudithook(
        lambda event, _: events.update((event,)) if event in ("open", "os.listdir", "os.scandir") else None
    )
    lines = lines_of(lambda: call(root, words))
    return {
        "lines": sum(lines.values()),
        "opened": events["open"],
        "listed": events["os.listdir"] + events["os.scandir"],
        "places": {f"{path}:{line}": count for (path, line), count in lines.most_common(400)},
    }


def apart(act: Callable[..., Any], *words: object) -> Any:
    """Run it in a fork, so that no call finds what another one has left in memory."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(act, words)


def warm_up(folder: Path, calls: list[str]) -> None:
    """Run every call once, so that no fork has to import anything."""
    _write("rows", folder, 100)
    for name in calls:
        call(folder, CALLS[name])


def _write(axis: str, root: Path, size: int) -> None:
    with without_fsync():
        write(axis, root, size)


def cells_of(axis: str, size: int, calls: list[str], folder: Path) -> dict[str, dict[str, Any]]:
    """All calls on one job of this size."""
    root, found = folder / "job", {}
    apart(_write, axis, root, size)
    for name in calls:
        before = folder / "before"
        shutil.copytree(root, before)
        measured = apart(timed, root, CALLS[name])
        measured |= apart(counted, before, CALLS[name])
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


def rows_of(cells: dict[str, dict[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each axis and call that has all sizes."""
    rows = []
    for axis, by_size in cells.items():
        sizes = sorted(map(int, by_size))
        for name in CALLS:
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
    with scratch("growth") as folder:
        warm_up(folder, args.calls)
    cells: dict[str, dict[str, dict[str, Any]]] = {}
    kept = args.out.with_suffix(".cells.json") if args.out is not None else None
    if kept is not None and kept.exists():
        cells = json.loads(kept.read_text())
    for name in args.axes:
        axis: Axis = AXES[name]
        for size in axis.small if args.sizes == "small" else axis.full:
            mine = cells.setdefault(name, {})
            if set(args.calls) <= set(mine.get(str(size), {})):
                continue
            with scratch("growth") as folder:
                mine[str(size)] = cells_of(name, size, args.calls, folder)
            if kept is not None:
                kept.write_text(json.dumps(cells))
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    parser.add_argument("--sizes", choices=("small", "full"), default="full")
    parser.add_argument("--axes", nargs="+", choices=list(AXES), default=list(AXES), metavar="NAME")
    parser.add_argument("--calls", nargs="+", choices=list(CALLS), default=list(CALLS), metavar="NAME")
    args = parse(parser, sizes="small", axes=["rows"], calls=["materialize, catch-up", "list"])
    rows = rows_of(measure(args))
    for row in rows:
        said = ", ".join(f"{kind} {value:.2f}" for kind, value in row["exponents"].items())
        print(f"{row['axis']}, {row['call']}: {said}{'; ' if row['steepest'] else ''}{row['steepest'] or ''}")
    if args.out is not None:
        found = {"case": "growth", "date": time.strftime("%Y-%m-%d"), "command": command_of("growth")}
        args.out.write_text(json.dumps(found | {"machine": machine(), "rows": rows}, indent=1) + "\n")
        args.out.with_suffix(".cells.json").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
