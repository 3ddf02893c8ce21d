"""Draw a filed result as SVG: one small log-log picture an axis, of the counted lines or functions of each call.

``run.py --draw RESULT.json`` writes it.
"""

from __future__ import annotations

import math
from html import escape
from pathlib import Path
from typing import Any

IMAGE = Path(__file__).resolve().parent / "growth.svg"
COLUMNS, WIDTH, HEIGHT = 4, 210, 190
LEFT, TOP, SIDE = 30, 30, 130
"""Place and size of the square in which a picture's lines are drawn."""
MOST = 16.0
"""Largest growth that a picture shows."""
LIMIT = 1.15


def picture(number: int, axis: str, rows: list[dict[str, Any]]) -> str:
    """One axis: each call relative to its smallest size, red if it grows by an exponent above the limit."""
    x0, y0 = number % COLUMNS * WIDTH + LEFT, number // COLUMNS * HEIGHT + TOP
    sizes = rows[0]["sizes"]

    def place(growth: float, work: float) -> str:
        across, up = (math.log(min(max(each, 1.0), MOST)) / math.log(MOST) for each in (growth, work))
        return f"{x0 + SIDE * across:.1f},{y0 + SIDE * (1 - up):.1f}"

    drawn = [
        f'<text class="name" x="{x0}" y="{y0 - 10}">{escape(axis)}</text>',
        f'<rect class="frame" x="{x0}" y="{y0}" width="{SIDE}" height="{SIDE}"/>',
        f'<path class="linear" d="M{place(1, 1)} L{place(MOST, MOST)}"/>',
    ]
    for growth in (1, 2, 4, 8, 16):
        x, y = (float(each) for each in place(growth, growth).split(","))
        drawn.append(f'<text class="tick" x="{x0 - 4}" y="{y + 3:.1f}" text-anchor="end">{growth}</text>')
        drawn.append(f'<text class="tick" x="{x:.1f}" y="{y0 + SIDE + 11}" text-anchor="middle">{growth}</text>')
    work_of = "lines" if "lines" in rows[0]["measured"][0] else "calls"
    for row in sorted(rows, key=lambda row: row["exponents"].get(work_of, 0)):
        work = [cell[work_of] for cell in row["measured"]]
        points = " ".join(
            place(size / sizes[0], max(each, 1) / max(work[0], 1)) for size, each in zip(sizes, work, strict=True)
        )
        kind = "steep" if row["exponents"].get(work_of, 0) > LIMIT else "call"
        drawn.append(f'<polyline class="{kind}" points="{points}"><title>{escape(row["call"])}</title></polyline>')
    said = f"x 1 = {sizes[0]:,}, to {sizes[-1]:,}"
    drawn.append(f'<text class="tick" x="{x0}" y="{y0 + SIDE + 23}">{said}</text>')
    return "\n".join(drawn)


def draw(rows: list[dict[str, Any]]) -> str:
    """All axes, in the order of the result."""
    axes: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        axes.setdefault(row["axis"], []).append(row)
    width, height = COLUMNS * WIDTH, -(-len(axes) // COLUMNS) * HEIGHT
    style = (
        "text{font-family:sans-serif;fill:#222}.name{font-size:11px;font-weight:bold}.tick{font-size:8px;fill:#666}"
        ".frame{fill:none;stroke:#ccc}.linear{stroke:#999;stroke-dasharray:3 3;fill:none}"
        ".call{fill:none;stroke:#4c72b0;stroke-width:1.2;opacity:.6}.steep{fill:none;stroke:#c44e52;stroke-width:1.8}"
    )
    body = "\n".join(picture(number, axis, rows) for number, (axis, rows) in enumerate(axes.items()))
    said = "Counted work of each call, relative to its smallest size, by size of each axis; log-log"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">\n<title>{said}</title>\n'
        f'<style>{style}</style>\n<rect width="{width}" height="{height}" fill="white"/>\n{body}\n</svg>\n'
    )
