"""Filed results, and how their figures are written on a page."""

from __future__ import annotations

import json
import os
import re
import statistics
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).resolve().parents[1]
Table = list[list[str]]
"""Rows of cells, the head first."""
VERDICT = {True: "reached", False: "**missed**", None: "not measured"}


class NotFiledError(Exception):
    """No result has what a table wants."""


@dataclass(frozen=True)
class Point:
    """One point of a result: its variants."""

    name: str
    unit: str
    variants: dict[str, dict[str, Any]]
    baseline: str = ""

    def has(self, variant: str) -> bool:
        return "median" in self.variants.get(variant, {})

    def median(self, variant: str) -> float:
        if not self.has(variant):
            raise NotFiledError(f"point '{self.name}' has no '{variant}'")
        return float(self.variants[variant]["median"])

    def taken(self, variant: str) -> str:
        """Median, unit, range."""
        row = self.variants.get(variant, {})
        if "median" not in row:
            return f"not measured: {row.get('unavailable', 'no such variant')}"
        return f"{three(row['median'])} {self.unit} ({three(row['min'])}-{three(row['max'])})"

    def ratios(self, base: str, variant: str) -> list[float]:
        """``base`` / ``variant``: median, smallest and largest round."""
        rounds = zip(self.variants[base]["rounds"], self.variants[variant]["rounds"], strict=True)
        found = [theirs / ours for theirs, ours in rounds]
        return [statistics.median(found), min(found), max(found)]

    def times(self, base: str, variant: str) -> str:
        """How many times as fast as ``base``, with the range, and the time itself."""
        if not self.has(base) or not self.has(variant):
            return f"not measured ({base if self.has(variant) else variant})"
        middle, least, most = map(three, self.ratios(base, variant))
        return f"{middle} x ({least}-{most}); {three(self.median(variant))} {self.unit}"

    def others(self, *names: str, unit: bool = True) -> str:
        """Medians of the baselines, each by its name."""
        unit_text = f" {self.unit}" if unit else ""
        said = (f"{code(name)} {three(self.median(name))}{unit_text}" for name in names if self.has(name))
        return ", ".join(said) or "-"


@dataclass(frozen=True)
class Result:
    """One filed file."""

    path: Path
    found: dict[str, Any]

    @property
    def machine(self) -> dict[str, Any]:
        machine = self.found.get("machine")
        return machine if isinstance(machine, dict) else {}

    @property
    def load(self) -> float | None:
        """Average over the minute before it."""
        return self.machine.get("load_average", self.found.get("load", self.found.get("load_average_before")))

    @property
    def date(self) -> str:
        return str(self.found.get("date") or self.path.name[:10])

    @property
    def facts(self) -> dict[str, Any]:
        return dict(self.found["facts"])

    def has(self, point: str) -> bool:
        return point in self.found.get("points", {})

    def point(self, name: str) -> Point:
        if not self.has(name):
            raise NotFiledError(
                f"{self.path.name} has no point '{name}': it has {', '.join(self.found.get('points', {}))}"
            )
        row = self.found["points"][name]
        return Point(name, row["unit"], row["variants"], row["baseline"])

    def points(self) -> list[Point]:
        return [self.point(name) for name in self.found.get("points", {})]

    def goal(self, what: str) -> dict[str, Any] | None:
        """As the case judged it; its ``run.py`` is the one place where goals stand."""
        return next((goal for goal in self.found.get("goals", ()) if goal["what"] == what), None)

    @property
    def cpu(self) -> str:
        if not self.machine:
            return "unknown"
        return f"{self.machine['cpu'].replace('(R)', '').replace(' Processor', '')}, {self.machine['cores']} cores"

    def said(self, page: Path) -> str:
        """Date, machine and load, for the head of a table."""
        load = "" if self.load is None else f", load {self.load:.1f}"
        return f"{self.link(page, self.date)}, {self.cpu}{load}"

    def link(self, page: Path, text: str) -> str:
        return f"[{text}]({os.path.relpath(self.path, page.parent)})"


@cache
def newest(case: str, variant: str = "") -> Result:
    """The newest result of a case that is named ``DATE_MACHINE.json``, or ``DATE_MACHINE_VARIANT.json``.

    Results of a loaded machine or of smaller sizes have other variants, so that no table takes them. What was counted,
    not timed, has ``counts`` or ``figures`` for its machine.
    """
    wanted = re.compile(r"\d{4}-\d\d-\d\d_[^_]+" + (f"_{re.escape(variant)}" if variant else ""))
    found = sorted(path for path in (BENCHMARKS / case / "results").glob("*.json") if wanted.fullmatch(path.stem))
    if not found:
        raise NotFiledError(f"benchmarks/{case}/results has no DATE_MACHINE{'_' * bool(variant)}{variant}.json")
    return Result(found[-1], json.loads(found[-1].read_text()))


def is_filed(case: str, variant: str = "") -> bool:
    try:
        newest(case, variant)
    except NotFiledError:
        return False
    return True


def three(value: float) -> str:
    """Three digits; whole numbers from 100 on."""
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.3g}"


def code(name: str) -> str:
    """Calls as code, words as they are."""
    return re.sub(r"(?<![\w.])[a-z]\w*[._][\w.]*", lambda found: f"`{found[0]}`", name)


def ranged(values: list[float], digits: int = 3) -> str:
    """Median (smallest to largest)."""
    middle, least, most = (f"{each:.{digits}f}" for each in values)
    return f"{middle} ({least} to {most})"
