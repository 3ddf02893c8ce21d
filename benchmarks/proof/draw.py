"""Draw the filed results that the page of proof begins with: what a kill costs, and the time that failures leave.

python benchmarks/proof/draw.py
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from page_tables.proof import lost  # noqa: E402
from page_tables.results import is_filed, newest  # noqa: E402
from plot import draw  # noqa: E402


def of_kills(result: dict[str, Any]) -> dict[str, Any]:
    """The result of ``run.py`` as points of bars."""
    points = {}
    for unit in ("steps", "seconds"):
        each = {way: lost(result["facts"], way)[unit] for way in result["facts"]["variants"]}
        rows = {way: {"median": value, "min": value, "max": value} for way, value in each.items()}
        points[f"{unit} lost per kill of ranks"] = {"unit": "steps; seconds", "variants": rows}
    return points


def of_ettr(result: dict[str, Any]) -> dict[str, Any]:
    """The result of ``ettr.py`` as the time that it leaves no steps for: bars that differ."""
    points = {}
    for name, point in result["points"].items():
        rows = {
            way: {"median": 100 - row["median"], "min": 100 - row["max"], "max": 100 - row["min"]}
            for way, row in point["variants"].items()
        }
        points[name] = {"unit": "% of the time without steps that count", "variants": rows}
    return points


def main() -> None:
    for variant in filter(partial(is_filed, "proof"), ("", "ettr")):
        result = newest("proof", variant)
        points = of_ettr(result.found) if variant else of_kills(result.found)
        draw(result.found, points, result.path.with_suffix(".png"))
        print(result.path.with_suffix(".png"))


if __name__ == "__main__":
    main()
