"""Exponents of counted work, of CPU time and of memory, along each axis."""

from __future__ import annotations

from pathlib import Path

from .results import Table, newest

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


def exponents(page: Path, variant: str = "") -> Table:
    """One row for each axis and call; an exponent above the limit is bold, with the lines that grow fastest."""
    result = newest("growth", variant)
    rows = result.found["rows"]
    names = {kind: name for kind, name in _NAMES.items() if any(kind in row["exponents"] for row in rows)}
    found = [[result.said(page), "call", *names.values(), "steepest lines"]]
    for row in rows:
        cells = [_bold(row["exponents"][kind]) if kind in row["exponents"] else "-" for kind in names]
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
