"""What was said of markers, drawn: a chart for each number, over the markers that have it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.reporting.svg import (
    COLORS,
    Axis,
    Line,
    chart,
    grid,
    plot_axes,
    polyline,
    text_of,
    thinned,
    ticks,
)
from torchrec_stream_ckpt.types import MarkerId

MOST_CHARTS = 8
"""Numbers that are drawn: those of most markers."""
_DOTS = 60

Points = list[tuple[MarkerId, float]]


def series(lineage: Lineage, markers: Sequence[MarkerId]) -> dict[str, Points]:
    """The numbers of each name, in the order of the markers; names of most markers first."""
    found: dict[str, Points] = {}
    for marker in markers:
        for name, value in lineage.meta(marker):
            if not isinstance(value, str):
                found.setdefault(name, []).append((marker, float(value)))
    return dict(sorted(found.items(), key=lambda each: (-len(each[1]), each[0])))


def values(found: Mapping[str, Points]) -> str:
    """A chart a name."""
    shown = list(found)[:MOST_CHARTS]
    rest = list(found)[MOST_CHARTS:]
    left = f'<p class="none">Not drawn: {text_of(", ".join(rest)[:400])}.</p>' if rest else ""
    return "".join(_chart(number, name, found[name]) for number, name in enumerate(shown)) + left


def _chart(number: int, name: str, points: Points) -> str:
    across, upward = plot_axes()
    numbers = [value for _, value in points]
    low, high = min(numbers), max(numbers)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    x, y = Axis(0.0, float(max(1, len(points) - 1)), *across), Axis(low - pad, high + pad, *upward)
    lines: dict[int, list[tuple[float, float]]] = {}
    for place, (marker, value) in enumerate(points):
        lines.setdefault(marker.generation, []).append((float(place), value))
    every = max(1, len(points) // 6)
    x_ticks = [(float(place), str(points[place][0])) for place in range(0, len(points), every)]
    body = grid(x, y, x_ticks, [(value, f"{value:.6g}") for value in ticks(y.low, y.high)], f"{name}, by marker")
    body += "".join(
        polyline(Line(str(generation), thinned(drawn), generation % (COLORS - 1), len(drawn) <= _DOTS), x, y)
        for generation, drawn in lines.items()
    )
    best = max(points, key=lambda each: each[1]), min(points, key=lambda each: each[1])
    said = f"{len(points)} markers; highest {best[0][1]:.6g} at {best[0][0]}, lowest {best[1][1]:.6g} at {best[1][0]}"
    drawn_as = re.sub(r"[^A-Za-z0-9]", "-", f"value-{number}")
    return chart(drawn_as, name, said, body) + f"<p>{text_of(name)}: {text_of(said)}.</p>"
