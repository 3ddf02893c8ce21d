"""Whether two results of a case agree: where the ranges of both runs meet.

    python benchmarks/compare.py OLD.json NEW.json

Times of two days differ by the machine's mood; ratios, whose halves were measured in turns, should not. A range is that
of a run's rounds. Ranges that do not meet mean that the rounds of one run do not show what another run may find.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table


class Compared(NamedTuple):
    """One figure that both results have."""

    what: str
    kind: str
    """``time`` or ``ratio``."""
    old: tuple[float, float, float]
    """Median, smallest and largest round."""
    new: tuple[float, float, float]

    @property
    def meet(self) -> bool:
        return self.old[1] <= self.new[2] and self.new[1] <= self.old[2]


def compared(old: dict[str, Any], new: dict[str, Any]) -> Iterator[Compared]:
    """Every variant of every point that both have."""
    for name, point in new["points"].items():
        before = old["points"].get(name, {"variants": {}})["variants"]
        for variant, row in point["variants"].items():
            rows = (before.get(variant, {}), row)
            if all("median" in each for each in rows):
                times = [(each["median"], each["min"], each["max"]) for each in rows]
                yield Compared(f"{name}: {variant}", "time", *times)
            if all("ratio" in each for each in rows) and variant != point.get("baseline"):
                ratios = [(each["ratio"], *each["ratio_range"]) for each in rows]
                yield Compared(f"{name}: {variant}", "ratio", *ratios)


def read(path: Path) -> dict[str, Any]:
    """One result.

    Raises:
        SystemExit: it cannot be read, or it has no points; the message says what.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise SystemExit(f"Error: {path}: {error}") from None
    if not isinstance(found, dict) or not isinstance(found.get("points"), dict):
        raise SystemExit(f"Error: {path} has no points: only results of cases that print points can be compared")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    args = parser.parse_args()
    old, new = read(args.old), read(args.new)
    if old.get("case") != new.get("case"):
        parser.error(f"{args.old.name} is of '{old.get('case')}', {args.new.name} of '{new.get('case')}'")
    rows = list(compared(old, new))
    table = Table("figure", "", "old (range)", "new (range)", "new / old", "ranges", box=None)
    for each in rows:
        said = [f"{middle:.4g} ({least:.4g}-{most:.4g})" for middle, least, most in (each.old, each.new)]
        table.add_row(each.what, each.kind, *said, f"{each.new[0] / each.old[0]:.2f}", "meet" if each.meet else "APART")
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for kind in ("ratio", "time"):
        of = [each.meet for each in rows if each.kind == kind]
        console.print(f"ranges of {kind}s that meet: {sum(of)} of {len(of)}")


if __name__ == "__main__":
    main()
