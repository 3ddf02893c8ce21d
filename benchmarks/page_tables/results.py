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
ALL = "all of it"
"""What a result leaves out that has no figure at all."""
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
        """``base`` / ``variant``: median, smallest and largest round; as the case filed it, where it did."""
        row = self.variants[variant]
        if base == self.baseline and "ratio" in row:
            return [row["ratio"], *row["ratio_range"]]
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
        """Medians of those baselines that the result names, each by its name; one that could not run says so."""
        unit_text = f" {self.unit}" if unit else ""
        found = []
        for name in names:
            if name in self.variants:
                taken = f"{three(self.median(name))}{unit_text}" if self.has(name) else "not measured"
                found.append(f"{code(name)} {taken}")
        return ", ".join(found) or "-"


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
        return dict(self.found.get("facts", {}))

    @property
    def left_out(self) -> dict[str, str]:
        """What the case filed without figures, by name (:data:`ALL`: the whole case), and why."""
        ending, facts = " is not measured", self.facts
        why = self.found.get("not measured") or facts.get("not measured")
        found = {ALL: str(why)} if why else {}
        return found | {name.removesuffix(ending): why for name, why in facts.items() if name.endswith(ending)}

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
        gpu = f", {self.machine['gpu']}" if self.machine.get("gpu") else ""
        return f"{self.machine['cpu'].replace('(R)', '').replace(' Processor', '')}, {self.machine['cores']} cores{gpu}"

    def said(self, page: Path) -> str:
        """Date, machine and load, for the head of a table; and whether more ran than a case that was just over."""
        load = "" if self.load is None else f", load {self.load:.1f}"
        busy = self.load is not None and self.load > 1.5 * self.machine.get("cores", self.load)
        idle = ": **a busy machine**" if busy else ": **not idle**" if "not idle" in self.facts else ""
        return f"{self.link(page, self.date)}, {self.cpu}{load}{idle}"

    def link(self, page: Path, text: str) -> str:
        return f"[{text}]({os.path.relpath(self.path, page.parent)})"


@cache
def newest(case: str, variant: str = "") -> Result:
    """The newest result of a case that is named ``DATE_MACHINE.json``, or ``DATE_MACHINE_VARIANT.json``.

    Results of a loaded machine or of smaller sizes have other variants, so that no table takes them. What was counted,
    not timed, has ``counts`` or ``figures`` for its machine.

    Raises:
        NotFiledError: there is none, there are two of the newest day, or it cannot be read.
    """
    found = _filed(case, variant)
    if not found:
        raise NotFiledError(f"benchmarks/{case}/results has no DATE_MACHINE{'_' * bool(variant)}{variant}.json")
    same_day = [path.name for path in found if path.name[:10] == found[-1].name[:10]]
    if len(same_day) > 1:
        raise NotFiledError(f"benchmarks/{case}/results has {' and '.join(same_day)}: keep one of a day")
    try:
        return Result(found[-1], json.loads(found[-1].read_text()))
    except ValueError as error:
        raise NotFiledError(f"{found[-1].name}: {error}") from None


def of_machines(case: str) -> list[Result]:
    """The newest result of each machine, of a case that is filed of several; machines by name."""
    newest_of = {path.stem[11:]: path for path in _filed(case, "")}
    return [Result(path, json.loads(path.read_text())) for _, path in sorted(newest_of.items())]


def is_filed(case: str, variant: str = "") -> bool:
    return bool(_filed(case, variant))


def _filed(case: str, variant: str) -> list[Path]:
    """Oldest first."""
    wanted = re.compile(r"\d{4}-\d\d-\d\d_[^_]+" + (f"_{re.escape(variant)}" if variant else ""))
    return sorted(path for path in (BENCHMARKS / case / "results").glob("*.json") if wanted.fullmatch(path.stem))


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
