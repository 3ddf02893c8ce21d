"""Exponents of counted work, of CPU time and of memory, along each axis."""

from __future__ import annotations

from pathlib import Path

from .results import Table, newest

_LIMIT = 1.15
_NAMES = {
    "lines": "lines",
    "opened": "files opened",
    "listed": "folders listed",
    "cpu_s": "CPU",
    "memory_bytes": "memory",
}


def exponents(page: Path, variant: str = "") -> Table:
    """One row for each axis and call; an exponent above the limit is bold, with the lines that grow fastest."""
    result = newest("growth", variant)
    found = [[result.said(page), "call", *_NAMES.values(), "steepest lines"]]
    for row in result.found["rows"]:
        cells = [_bold(row["exponents"][kind]) if kind in row["exponents"] else "-" for kind in _NAMES]
        steepest = ", ".join(f"`{place}` {power:.2f}" for place, power, _ in row["steepest"][:2])
        found.append(
            [
                f"{row['axis']}, {row['sizes'][-2]:,} to {row['sizes'][-1]:,}",
                f"`{row['call']}`",
                *cells,
                steepest or "-",
            ]
        )
    return found


def _bold(power: float) -> str:
    return f"**{power:.2f}**" if power > _LIMIT else f"{max(power, 0):.2f}"
