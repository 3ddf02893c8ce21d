"""Exponents of counted work, of CPU time and of memory, along each axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .results import Result, Table, newest

_LIMIT = 1.15
_NAMES = {
    "lines": "lines",
    "calls": "functions",
    "opened": "files opened",
    "listed": "folders listed",
    "read_bytes": "bytes read",
    "written_bytes": "bytes written",
    "cpu_s": "CPU",
    "memory_bytes": "memory",
}


def steep(page: Path, variant: str) -> Table:
    """Only calls with an exponent above the limit: what grows, between which sizes, and what it came to."""
    result = newest("growth", variant)
    found = [
        [result.said(page), "call", "what grows", "exponent", "at the larger size", f"where, at `{_commit(result)}`"]
    ]
    for row in result.found["rows"]:
        last, sizes = row["measured"][-1], f"{row['sizes'][-2]:,} to {row['sizes'][-1]:,}"
        where = f"`{row['steepest'][0][0]}`" if row["steepest"] else "-"
        for kind, power in row["exponents"].items():
            if power > _LIMIT:
                name = f"{row['axis']}, {sizes}"
                found.append([name, f"`{row['call']}`", _NAMES[kind], f"{power:.2f}", _amount(kind, last[kind]), where])
    return found


def memory(page: Path, variant: str) -> Table:
    """Most memory of each call at the far end of all axes, and of a trainer beside the bound of its settings."""
    result = newest("growth", variant)
    found = [[result.said(page), "most memory", "axis", "bound of its settings"]]
    ends = [(row, row["measured"][-1]) for row in result.found["rows"]]
    trainers = [each for each in ends if "bound_bytes" in each[1]]
    if trainers:
        row, cell = max(trainers, key=lambda each: each[1]["trainer_bytes"] / each[1]["bound_bytes"])
        bound = _amount("memory_bytes", cell["bound_bytes"])
        found.append(
            ["a trainer, nearest to its bound", _amount("memory_bytes", cell["trainer_bytes"]), _end(row), bound]
        )
    for call in dict.fromkeys(row["call"] for row, cell in ends if "bound_bytes" not in cell):
        row, cell = max((each for each in ends if each[0]["call"] == call), key=lambda each: each[1]["memory_bytes"])
        found.append([f"`{call}`", _amount("memory_bytes", cell["memory_bytes"]), _end(row), "-"])
    return found


def _commit(result: Result) -> str:
    """Return the commit whose files the lines are of: files are renamed, and lines move."""
    return str(result.machine["commit"])[:8]


def _end(row: dict[str, Any]) -> str:
    return f"{row['axis']}: {row['sizes'][-1]:,}"


def _amount(kind: str, value: float) -> str:
    if kind == "cpu_s":
        return f"{value:.2g} s"
    return f"{value / 2**20:,.1f} MiB" if kind.endswith("_bytes") else f"{value:,}"
