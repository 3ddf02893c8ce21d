"""Whether two results of a case agree: where the ranges of both runs meet.

    python benchmarks/compare.py OLD.json NEW.json

Times of two days differ by the machine's mood; ratios, whose halves were measured in turns, should not. A range is that
of a run's rounds. Ranges that do not meet mean that the rounds of one run do not show what another run may find.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from filed import read
from rich.console import Console
from rich.markup import escape
from rich.table import Table


class Compared(NamedTuple):
    """One figure that both results have."""

    what: str
    kind: str
    """``ratio``, ``time``, or the unit of something else."""
    old: tuple[float, float, float]
    """Median, smallest and largest round."""
    new: tuple[float, float, float]

    @property
    def meet(self) -> bool:
        return self.old[1] <= self.new[2] and self.new[1] <= self.old[2]


def figures(result: dict[str, Any]) -> dict[tuple[str, str], tuple[float, float, float]]:
    """(what, kind) -> median, smallest and largest round."""
    found = {}
    for name, point in result["points"].items():
        base, unit = point.get("baseline"), point.get("unit", "s")
        kind = "time" if unit in ("s", "ms", "us") else unit
        for variant, row in point["variants"].items():
            if "median" in row:
                found[f"{name}: {variant}, {unit}", kind] = (row["median"], row["min"], row["max"])
            if "ratio" in row and variant != base:
                least, most = row["ratio_range"]
                found[f"{name}: {base} / {variant}", "ratio"] = (row["ratio"], least, most)
    return found


def compared(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Compared]:
    """Every figure that both have, of the same unit or against the same baseline."""
    before, after = figures(old), figures(new)
    for what, kind in after:
        if (what, kind) in before:
            yield Compared(what, kind, before[what, kind], after[what, kind])


def comparable(path: Path) -> dict[str, Any]:
    """One result.

    Raises:
        SystemExit: it cannot be read, or it has no figures to compare; the message says what.
    """
    found = read(path)
    if why := found.get("not measured"):
        raise SystemExit(f"Error: {path} was not measured: {why}")
    if not isinstance(found.get("points"), dict):
        raise SystemExit(f"Error: {path} has no points: only results of cases that print points can be compared")
    try:
        known = [math.isfinite(value) for row in figures(found).values() for value in row]
    except (AttributeError, LookupError, TypeError, ValueError, OverflowError) as error:
        raise SystemExit(f"Error: {path}: a point is not as cases file it: {type(error).__name__}: {error}") from None
    if not known or not all(known):
        raise SystemExit(f"Error: {path} has {'figures that are no numbers' if known else 'no figures'}")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    old, new = comparable(args.old), comparable(args.new)
    if old.get("case") != new.get("case"):
        parser.error(f"{args.old.name} is of '{old.get('case')}', {args.new.name} of '{new.get('case')}'")
    rows = list(compared(old, new))
    table = Table("figure", "", "old (range)", "new (range)", "new / old", "ranges", box=None)
    for each in rows:
        said = [f"{middle:.4g} ({least:.4g}-{most:.4g})" for middle, least, most in (each.old, each.new)]
        times = f"{each.new[0] / each.old[0]:.2f}" if each.old[0] else "-"
        table.add_row(escape(each.what), escape(each.kind), *said, times, "meet" if each.meet else "APART")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for kind in dict.fromkeys(each.kind for each in rows):
        of = [each.meet for each in rows if each.kind == kind]
        console.print(f"ranges that meet, {kind}: {sum(of)} of {len(of)}", markup=False)
    for path, (own, other) in ((args.old, (old, new)), (args.new, (new, old))):
        if alone := sorted({what for what, _ in figures(own).keys() - figures(other).keys()}):
            console.print(f"in {path.name} alone: {'; '.join(alone)}", markup=False)
    if not rows:
        raise SystemExit(f"Error: {args.old.name} and {args.new.name} have no figure in common")


if __name__ == "__main__":
    main()
