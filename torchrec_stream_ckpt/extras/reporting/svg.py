"""Small charts as handwritten SVG, without scripts, fonts or other files.

Colors are variables of the page's style sheet. All text that comes from a log goes through :func:`text_of`.
"""

from __future__ import annotations

import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import printable
from torchrec_stream_ckpt.util.types import grouped

WIDTH, HEIGHT = 720, 260
LEFT, RIGHT, TOP, BOTTOM = 72, 16, 14, 52
COLORS = 8
"""Number of colors in the style sheet: ``--c0`` to ``--c7``. The last one is for the remaining items."""
Ticks = Sequence[tuple[float, str]]
Points = Sequence[tuple[float, float]]


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


def labels(axis: Axis, show: Callable[[float], str]) -> Ticks:
    """Return round numbers of an axis with their labels."""
    return [(value, show(value)) for value in ticks(axis.low, axis.high)]


def some(names: Sequence[object]) -> Ticks:
    """Return about six of the names, by their numbers."""
    return [(float(number), str(names[number])) for number in range(0, len(names), max(1, len(names) // 6))]


def text(x: float, y: float, label: object, anchor: str = "start", kind: str = "tick") -> str:
    """Draw a label."""
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{text_of(label)}</text>'


def _grid(x: Axis, y: Axis, x_ticks: Ticks, y_ticks: Ticks, foot: str) -> str:
    """Draw grid lines and labels."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = [
        f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{y(value):.1f}" y2="{y(value):.1f}"/>'
        + text(LEFT - 8, y(value) + 4, label, "end")
        for value, label in y_ticks
    ]
    parts += [text(x(value), bottom + 18, label, _anchor(x(value))) for value, label in x_ticks]
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts) + text((LEFT + right) / 2, HEIGHT - 6, foot, "middle")


def _anchor(position: float) -> str:
    if position > WIDTH - RIGHT - 40:
        return "end"
    return "start" if position < LEFT + 20 else "middle"


def by_generation(points: Iterable[tuple[int, float, float]]) -> dict[int, Points]:
    """Return the points (x, y) of each generation."""
    return {**grouped((generation, (x, y)) for generation, x, y in points)}


def line_chart(
    name: str,
    title: str,
    said: str,
    lines: Mapping[int, Points],
    foot: str,
    show: Callable[[float], str],
    x_ticks: Ticks | Callable[[float], str],
    bounds: tuple[float, float] | None = None,
) -> str:
    """Draw lines; few points of one are also drawn as dots.

    Args:
        name: Name of the chart, for identifiers.
        title: Title for screen readers.
        said: Description of its contents.
        lines: Points by color.
        foot: Meaning of both axes.
        show: Formats the values upward.
        x_ticks: Labels across, or the format of round numbers.
        bounds: Least and largest value upward. None for 0 to the largest one.
    """
    every = [point for points in lines.values() for point in points]
    x = Axis(min(at for at, _ in every), max(at for at, _ in every) or 1.0, LEFT, WIDTH - RIGHT)
    low, high = bounds or (0.0, max(value for _, value in every) or 1.0)
    y = Axis(low, high, HEIGHT - BOTTOM, TOP)
    body = _grid(x, y, labels(x, x_ticks) if callable(x_ticks) else x_ticks, labels(y, show), foot)
    return chart(name, title, said, body + "".join(_line(points, color, x, y) for color, points in lines.items()))


def _line(points: Points, color: int, x: Axis, y: Axis) -> str:
    stroke, thin = f"var(--c{color % (COLORS - 1)})", -(-len(points) // 300)
    path = " ".join(f"{x(px):.1f},{y(py):.1f}" for px, py in [*points[:-1:thin], points[-1]])
    drawn = f'<polyline class="line" style="stroke:{stroke}" points="{path}"/>'
    dots = points if len(points) <= 60 else ()
    return drawn + "".join(
        f'<circle r="3" style="fill:{stroke}" cx="{x(px):.1f}" cy="{y(py):.1f}"/>' for px, py in dots
    )


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


def bar_chart(
    name: str,
    title: str,
    said: str,
    stacks: Sequence[Bar],
    foot: str,
    show: Callable[[float], str],
    high: float,
    x_ticks: Ticks,
    y_ticks: Ticks | None = None,
) -> str:
    """Draw stacked bars over the whole width, each with a tooltip.

    Args:
        name: Name of the chart, for identifiers.
        title: Title for screen readers.
        said: Description of its contents.
        stacks: The bars.
        foot: Meaning of both axes.
        show: Formats the values upward.
        high: Largest value upward.
        x_ticks: Labels of bars, by their numbers.
        y_ticks: Labels upward. None for round numbers.
    """
    pitch, y = (WIDTH - LEFT - RIGHT) / len(stacks), Axis(0.0, high, HEIGHT - BOTTOM, TOP)
    x = Axis(-0.5, len(stacks) - 0.5, LEFT, WIDTH - RIGHT)
    width = min(48.0, max(1.0, pitch * (0.8 if pitch > 4 else 1.0)))
    body = _grid(x, y, x_ticks, labels(y, show) if y_ticks is None else y_ticks, foot)
    body += "".join(_bar(stack, x(number), width, y, show) for number, stack in enumerate(stacks))
    return chart(name, title, said, body)


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
        drawn.append(text(center + width / 2 + 4, TOP + 8, f"\u2191 {show(stack.total)}"))
    return "".join(drawn)


def legend(names: Sequence[tuple[int, str]]) -> str:
    """Draw the meaning of the colors, as HTML."""
    items = "".join(
        f'<li><span class="key" style="background:var(--c{color})"></span><span>{name_of(name)}</span></li>'
        for color, name in names
    )
    return f'<ul class="legend">{items}</ul>'
