"""Small charts as handwritten SVG, without scripts, fonts or other files.

Colors are variables of the page's style sheet. All text that comes from a log goes through :func:`text_of`.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import printable

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 14, 52
COLORS = 8
"""Number of colors in the style sheet: ``--c0`` to ``--c7``. The last one is for the remaining items."""


def text_of(value: object) -> str:
    """Escape text for a page: nothing in it is read as markup, and control characters are escaped."""
    return html.escape(printable(str(value)), quote=True)


def name_of(value: object) -> str:
    """Escape a name for a page. If there is no room, it breaks after one of ``. _ - /``."""
    return re.sub(r"([._/-])(?=[^._/-])", r"\1<wbr>", text_of(value))


@dataclass(frozen=True, slots=True)
class Axis:
    """Maps values onto a line of the chart."""

    low: float
    high: float
    begin: float
    end: float

    def __call__(self, value: float) -> float:
        span = self.high - self.low
        part = (value - self.low) / span if span else 0.0
        return self.begin + min(max(part, 0.0), 1.0) * (self.end - self.begin)


def ticks(low: float, high: float) -> list[float]:
    """Return round numbers between ``low`` and ``high``."""
    if high <= low:
        return [low]
    raw = (high - low) / 4
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * each for each in (1, 2, 2.5, 5, 10) if power * each >= raw)
    first = math.ceil(low / step) * step
    return [first + number * step for number in range(int((high - first) / step + 1e-9) + 1)]


def chart(name: str, title: str, description: str, body: str, height: int = HEIGHT) -> str:
    """Return an SVG with a title for screen readers."""
    return (
        f'<div class="chart"><svg viewBox="0 0 {WIDTH} {height}" role="img" aria-labelledby="{name}-t {name}-d">'
        f'<title id="{name}-t">{text_of(title)}</title><desc id="{name}-d">{text_of(description)}</desc>'
        f"{body}</svg></div>"
    )


def plot_axes(height: int = HEIGHT) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return ((left, right), (bottom, top)) of the plot."""
    return (LEFT, WIDTH - RIGHT), (height - BOTTOM, TOP)


def grid(
    x: Axis,
    y: Axis,
    x_ticks: Sequence[tuple[float, str]],
    y_ticks: Sequence[tuple[float, str]],
    x_name: str = "",
) -> str:
    """Draw grid lines and labels."""
    bottom = HEIGHT - BOTTOM
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        f'<text class="tick" x="{LEFT - 8}" y="{y(value) + 4:.1f}" text-anchor="end">{text_of(label)}</text>'
        for value, label in y_ticks
    ]
    parts += [
        f'<text class="tick" x="{x(value):.1f}" y="{bottom + 18}" text-anchor="{_anchor(x(value))}">'
        f"{text_of(label)}</text>"
        for value, label in x_ticks
    ]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    if x_name:
        parts.append(
            f'<text class="tick" x="{(LEFT + WIDTH - RIGHT) / 2}" y="{HEIGHT - 6}" text-anchor="middle">'
            f"{text_of(x_name)}</text>"
        )
    return "".join(parts)


def _anchor(position: float) -> str:
    if position > WIDTH - RIGHT - 40:
        return "end"
    return "start" if position < LEFT + 20 else "middle"


@dataclass(frozen=True, slots=True)
class Line:
    """Points of one line."""

    name: str
    points: Sequence[tuple[float, float]]
    color: int
    dots: bool = False


def polyline(line: Line, x: Axis, y: Axis) -> str:
    path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in line.points)
    drawn = f'<polyline class="line" style="stroke:var(--c{line.color})" points="{path}"/>'
    if line.dots or len(line.points) == 1:
        drawn += "".join(
            f'<circle r="3" style="fill:var(--c{line.color})" cx="{x(px):.1f}" cy="{y(py):.1f}"/>'
            for px, py in line.points
        )
    return drawn


def thinned(points: Sequence[tuple[float, float]], most: int = 300) -> Sequence[tuple[float, float]]:
    """Return evenly spaced points, always including the last one."""
    if len(points) <= most:
        return points
    stride = -(-len(points) // most)
    kept = list(points[::stride])
    return kept if kept[-1] == points[-1] else [*kept, points[-1]]


@dataclass(frozen=True, slots=True)
class Bar:
    """One stack of a bar chart."""

    label: str
    """First text of its tooltip, before the part."""
    parts: Sequence[tuple[int, str, float]]
    """(color, name, value), from the bottom."""
    clipped: bool = False
    """True if it may be cut off at the top, because the other stacks set the scale."""

    @property
    def total(self) -> float:
        return sum(value for _, _, value in self.parts)


def bars(stacks: Sequence[Bar], y: Axis, show: Callable[[float], str]) -> str:
    """Draw stacked bars over the whole width, each with a tooltip."""
    pitch = (WIDTH - LEFT - RIGHT) / max(1, len(stacks))
    width = min(48.0, max(1.0, pitch * (0.8 if pitch > 4 else 1.0)))
    return "".join(_bar(stack, LEFT + (number + 0.5) * pitch, width, y, show) for number, stack in enumerate(stacks))


def bar_center(number: int, count: int) -> float:
    """Return the horizontal center of a bar."""
    return LEFT + (number + 0.5) * (WIDTH - LEFT - RIGHT) / max(1, count)


def _bar(stack: Bar, center: float, width: float, y: Axis, show: Callable[[float], str]) -> str:
    base, drawn = 0.0, []
    for color, name, value in stack.parts:
        top, bottom = y(base + value), y(base)
        if value > 0 and bottom - top > 0.05:
            tip = f"{stack.label}: {name} {show(value)}"
            drawn.append(
                f'<rect x="{center - width / 2:.1f}" y="{top:.1f}" width="{width:.1f}" height="{bottom - top:.1f}" '
                f'style="fill:var(--c{color})"><title>{text_of(tip)}</title></rect>'
            )
        base += value
    if stack.clipped and stack.total > y.high:
        drawn.append(
            f'<text class="tick" x="{center + width / 2 + 4:.1f}" y="{TOP + 8}">'
            f"&#8593; {text_of(show(stack.total))}</text>"
        )
    return "".join(drawn)


def legend(names: Sequence[tuple[int, str]]) -> str:
    """Draw the meaning of the colors, as HTML."""
    items = "".join(
        f'<li><span class="key" style="background:var(--c{color})"></span><span>{name_of(name)}</span></li>'
        for color, name in names
    )
    return f'<ul class="legend">{items}</ul>'
