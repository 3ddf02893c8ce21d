"""Sections of the report, each a chart and a table of the same numbers.

The values noted for markers are drawn as one chart per name, over the markers that have it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence

from torchrec_stream_ckpt.extras.reporting.history import Heat, History, Stalls, Traffic
from torchrec_stream_ckpt.extras.reporting.job_status import Look
from torchrec_stream_ckpt.extras.reporting.svg import (
    COLORS,
    LEFT,
    RIGHT,
    WIDTH,
    Axis,
    Bar,
    Points,
    bar_chart,
    by_generation,
    chart,
    labels,
    legend,
    line_chart,
    name_of,
    some,
    text,
    text_of,
)
from torchrec_stream_ckpt.format.lineage import Lineage, changed_tables
from torchrec_stream_ckpt.util.types import MarkerId, grouped
from torchrec_stream_ckpt.util.units import day, duration, size

MOST_CHARTS = 8
"""Maximum number of values that are drawn: those that most markers have."""

Numbers = list[tuple[MarkerId, float]]


def series(lineage: Lineage, markers: Sequence[MarkerId]) -> dict[str, Numbers]:
    """Return the numbers of each name in the order of the markers. Names that most markers have are first."""
    found: dict[str, Numbers] = {}
    for marker in markers:
        for name, value in lineage.meta(marker):
            if not isinstance(value, str):
                found.setdefault(name, []).append((marker, float(value)))
    return dict(sorted(found.items(), key=lambda each: (-len(each[1]), each[0])))


def values(found: Mapping[str, Numbers]) -> str:
    """Draw one chart per name."""
    shown = list(found)[:MOST_CHARTS]
    rest = list(found)[MOST_CHARTS:]
    left = f'<p class="none">Not drawn: {text_of(", ".join(rest)[:400])}.</p>' if rest else ""
    return "".join(_chart(number, name, found[name]) for number, name in enumerate(shown)) + left


def _chart(number: int, name: str, points: Numbers) -> str:
    best, worst = max(points, key=lambda each: each[1]), min(points, key=lambda each: each[1])
    low, high = worst[1], best[1]
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 1.0
    said = f"{len(points)} markers; highest {high:.6g} at {best[0]}, lowest {low:.6g} at {worst[0]}"
    drawn = line_chart(
        f"value-{number}",
        name,
        said,
        by_generation((marker.generation, place, value) for place, (marker, value) in enumerate(points)),
        f"{name}, by marker",
        lambda value: f"{value:.6g}",
        some([marker for marker, _ in points]),
        (low - pad, high + pad),
    )
    return drawn + f"<p>{text_of(name)}: {text_of(said)}.</p>"


MOST_BARS = 100
"""Maximum number of bars in a chart. If there are more markers, each bar is the mean of several."""
MOST_LANES = 24
_LANE = 26
_OTHERS = COLORS - 1
_FOOT = 0.3
"""Height of a single row on a logarithmic axis, in powers of ten."""


def count(value: float) -> str:
    """Format a number for people."""
    for unit in ("", "k", "M"):
        if value < 1000:
            return f"{value:.3g}{unit}"
        value /= 1000
    return f"{value:.3g}G"


def _on_axis_bytes(num_bytes: float) -> str:
    return size(num_bytes).replace(".0 ", " ")


def _on_axis_s(seconds: float) -> str:
    """Format seconds as the label of an axis, including very small values."""
    for unit, length in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Format a table whose first column holds names."""
    cells = "".join(f'<th scope="col">{text_of(name)}</th>' for name in head)
    body = "".join(
        "<tr>"
        + f"<td class=name>{name_of(row[0])}</td>"
        + "".join(
            f'<td data-of="{text_of(of)}">{text_of(cell)}</td>' for of, cell in zip(head[1:], row[1:], strict=True)
        )
        + "</tr>"
        for row in rows
    )
    kind = ' class="names"' if head[0] == "table" else ""
    return f'<div class="wide"><table{kind}><thead><tr>{cells}</tr></thead><tbody>{body}</tbody></table></div>'


def details(summary: str, body: str) -> str:
    return f"<details><summary>{text_of(summary)}</summary>{body}</details>"


# Markers over time.


def over_time(intervals: Sequence[Traffic]) -> str:
    """Draw the step over time, one line per generation."""
    first, last = intervals[0].commit.time_s, max(each.commit.time_s for each in intervals)
    span_s = min(last - first, sys.float_info.max)  # between two clocks that differ greatly it would be infinite
    unit, length = next(
        (pair for pair in (("days", 86_400.0), ("hours", 3_600.0), ("minutes", 60.0)) if span_s > 2 * pair[1]),
        ("seconds", 1.0),
    )
    lines = by_generation(
        (each.commit.generation, min(each.commit.time_s - first, span_s) / length, float(each.commit.step))
        for each in intervals
    )
    said = f"{len(intervals)} markers of {len(lines)} generations, up to step {intervals[-1].commit.step}"
    names = [(generation % _OTHERS, f"generation {generation}") for generation in list(lines)[-_OTHERS:]]
    if len(lines) > len(names):
        names.append((_OTHERS, f"{len(lines) - len(names)} older ones"))
    foot = f"{unit} since {day(first)}; upward: step"
    return line_chart("time", "Markers over time", said, lines, foot, count, count) + legend(names)


# Lineage.


def lineage(whole: Lineage) -> str:
    """Draw one lane per generation, over steps. Each begins below its parent marker."""
    generations = sorted(whole.claims)
    shown = generations[-MOST_LANES:]
    ends = _ends(whole)
    height = 48 + _LANE * len(shown)
    x = Axis(0.0, float(max(end for _, end, _ in ends.values()) or 1), LEFT - 40, WIDTH - RIGHT - 230)
    lanes = {generation: 16 + _LANE * number for number, generation in enumerate(shown)}
    body = "".join(_lane(whole, generation, lanes, ends[generation], x) for generation in shown)
    body += "".join(text(x(value), height - 8, label, "middle") for value, label in labels(x, count))
    said = f"{len(generations)} generations, the newest {len(shown)} of them drawn"
    older = (
        f"<p>{len(generations) - len(shown):,} older generations are not drawn.</p>"
        if len(generations) > len(shown)
        else ""
    )
    return chart("lineage", "Lineage of generations", said, body, height) + older + _generations(whole, ends)


def _ends(whole: Lineage) -> dict[int, tuple[int, int, int]]:
    """Return for each generation (step where it begins, step of its last marker, number of its markers)."""
    steps = grouped((marker.generation, commit.step) for marker, commit in whole.commits.items())
    found = {}
    for generation, claim in whole.claims.items():
        own, parent = steps.get(generation, []), claim.parent
        begin = whole.commits[parent].step if parent is not None and parent in whole.commits else 0
        found[generation] = begin, max(own, default=begin), len(own)
    return found


def _lane(whole: Lineage, generation: int, lanes: dict[int, int], span: tuple[int, int, int], x: Axis) -> str:
    claim, (begin, end, markers) = whole.claims[generation], span
    y, left, right = lanes[generation], x(begin), x(end)
    drawn = ""
    if claim.parent is not None:
        top = lanes.get(claim.parent.generation, 2)
        drawn += f'<path class="branch" d="M{left:.1f} {top}V{y}"/>'
    color = f"var(--c{generation % _OTHERS})"
    drawn += f'<line x1="{left:.1f}" x2="{right:.1f}" y1="{y}" y2="{y}" style="stroke:{color};stroke-width:3"/>'
    fill = color if markers else "var(--bg)"
    drawn += f'<circle r="4" cx="{right:.1f}" cy="{y}" style="fill:{fill};stroke:{color}"/>'
    what = (
        f"{claim.world} rank{'s' * (claim.world != 1)}, {markers:,} marker{'s' * (markers != 1)}"
        if claim.world
        else "a fence"
    )
    return drawn + text(max(left, right) + 9, y + 4, f"{generation}: {what}", kind="lane")


def _generations(whole: Lineage, ends: dict[int, tuple[int, int, int]]) -> str:
    rows = [
        (
            generation,
            claim.parent or "-",
            claim.world or "a fence",
            f"{ends[generation][2]:,}",
            f"{ends[generation][0]:,} to {ends[generation][1]:,}",
            day(claim.time_s, "%Y-%m-%d %H:%M"),
            whole.ends[generation].outcome if generation in whole.ends else "-",
            "; ".join(changed_tables(whole, claim)) or "-",
        )
        for generation, claim in sorted(whole.claims.items(), reverse=True)
    ]
    head = ("generation", "parent", "ranks", "markers", "steps", "began (UTC)", "ended", "changes of the model")
    return details(f"As a table: {len(rows):,} generations", table(head, rows[:200]))


# By table.


def by_table(intervals: Sequence[Traffic], what: str) -> str:
    """Draw stacked bars, one per marker or per mean of several. ``what`` is ``rows`` or ``num_bytes``."""
    show = _on_axis_bytes if what == "num_bytes" else count
    totals, top = _totals(intervals, what), _largest(intervals)
    groups = _groups(intervals)
    stacks = [_stack(group, what, top) for group in groups]
    scale = max((stack.total for stack in stacks if not stack.clipped), default=0.0)
    scale = scale or max((stack.total for stack in stacks), default=0.0) or 1.0
    name = "bytes" if what == "num_bytes" else "rows"
    mean = max(map(len, groups))
    foot = "marker" if mean == 1 else f"markers; a bar is the mean of up to {mean}"
    said = f"{show(sum(totals.values()))} {name} of {len(totals)} tables in {len(intervals)} markers"
    named = list(enumerate(top))
    if len(totals) > len(top) or any(each.missing for each in intervals):
        named.append((_OTHERS, _rest_name(len(totals) - len(top), intervals)))
    rows = [(table_name, show(totals[table_name])) for table_name in sorted(totals, key=lambda each: -totals[each])]
    return (
        bar_chart(
            f"by-{name}",
            f"{name.capitalize()} a marker, by table",
            said,
            stacks,
            foot,
            show,
            1.05 * scale,
            some([group[0].commit.id for group in groups]),
        )
        + legend(named)
        + _missing(intervals)
        + details(f"All together, by table: {len(rows):,} tables", table(("table", name), rows[:500]))
    )


def _totals(intervals: Sequence[Traffic], what: str) -> dict[str, int]:
    found: dict[str, list[int]] = grouped(pair for each in intervals for pair in getattr(each, what).items())
    return {name: sum(values) for name, values in found.items()}


def _largest(intervals: Sequence[Traffic]) -> list[str]:
    """Return the tables that have their own color, by bytes: the same ones in each chart."""
    totals = _totals(intervals, "num_bytes")
    return sorted(totals, key=lambda name: (-totals[name], name))[: _OTHERS if len(totals) <= _OTHERS else _OTHERS - 1]


def _groups(intervals: Sequence[Traffic]) -> list[list[Traffic]]:
    """Group neighboring markers so that there are few enough bars. A base is alone; no group spans generations."""
    together = -(-len(intervals) // MOST_BARS)
    groups: list[list[Traffic]] = []
    for each in intervals:
        last = groups[-1] if groups else None
        alone = last is None or each.is_base or last[0].is_base or len(last) == together
        if alone or (last is not None and last[0].commit.generation != each.commit.generation):
            groups.append([each])
        elif last is not None:
            last.append(each)
    return groups


def _stack(group: Sequence[Traffic], what: str, top: Sequence[str]) -> Bar:
    label = str(group[0].commit.id) if len(group) == 1 else f"{group[0].commit.id} to {group[-1].commit.id}, mean"
    parts = [
        (number, name, sum(getattr(each, what).get(name, 0) for each in group) / len(group))
        for number, name in enumerate(top)
    ]
    known = sum(value for each in group for value in getattr(each, what).values())
    unknown = sum(each.all_bytes if what == "num_bytes" else each.all_rows for each in group if each.missing)
    known_there = sum(value for each in group if each.missing for value in getattr(each, what).values())
    rest = known / len(group) - sum(value for _, _, value in parts)
    rest += max(0, unknown - known_there) / len(group)
    return Bar(label, [*parts, (_OTHERS, "other", max(0.0, rest))], clipped=group[0].is_base)


def _rest_name(others: int, intervals: Sequence[Traffic]) -> str:
    unknown = "not known by table" if any(each.missing for each in intervals) else ""
    return ", ".join(part for part in (f"{others:,} other tables" if others > 0 else "", unknown) if part)


def _missing(intervals: Sequence[Traffic]) -> str:
    why = dict.fromkeys(each.missing for each in intervals if each.missing)
    gone = sum(bool(each.missing) for each in intervals)
    if not gone:
        return ""
    reasons = "; ".join(list(why)[:3])
    return (
        f'<p class="none">The frames of {gone:,} markers are not in the log: {text_of(reasons)}. '
        "Their totals come from their COMMITs.</p>"
    )


# Hot rows.


def heat(history: History) -> str:
    """Draw how many rows were sent how many times."""
    tables = [each for each in history.heat.values() if each.sent_rows]
    if not tables:
        return '<p class="none">No frame with rows could be read.</p>'
    classes: list[int] = []
    for each in tables:
        for number, rows in enumerate(each.classes()):
            classes += [0] * (number + 1 - len(classes))
            classes[number] += rows
    high = _FOOT + math.log10(max(classes)) * 1.05
    names = ["1" if not number else f"{2**number}-{2 ** (number + 1) - 1}" for number in range(len(classes))]
    drawn = bar_chart(
        "heat",
        "How often rows were sent",
        "; ".join(f"{count(rows)} rows {name} times" for name, rows in zip(names, classes, strict=True)),
        [
            Bar(f"{name} times", [(0, "rows", _FOOT + math.log10(rows) if rows else 0.0)])
            for name, rows in zip(names, classes, strict=True)
        ],
        "times sent, from this number to the next; upward: rows",
        lambda value: count(10 ** (value - _FOOT)),
        high,
        [(float(number), count(2**number)) for number in range(len(names))],
        [(_FOOT + power, count(10.0**power)) for power in range(int(high - _FOOT) + 1)],
    )
    return drawn + _heat_table(tables)


def _heat_table(tables: Sequence[Heat]) -> str:
    ordered = sorted(tables, key=lambda each: -each.most)
    rows = [
        (
            each.table.name,
            f"{each.table.rows:,}",
            f"{min(each.sent_rows, each.table.rows):,}",
            f"{each.most:,}",
            f"{100 * each.hottest_share:.1f} %",
        )
        for each in ordered
    ]
    head = ("table", "rows", "ever sent", "hottest row sent", "share of the hottest 1%")
    listed = table(head, rows[:200])
    return listed if len(rows) <= 12 else details(f"By table: {len(rows):,}", listed)


# Stalls.


def stalls(found: Stalls | None) -> str:
    """Draw milliseconds over steps."""
    if found is None:
        return (
            '<p class="none">Not shown: the log does not hold it. A job with <code>tensorboard="DIR"</code> writes it; '
            "then <code>stream-ckpt report URI --tensorboard DIR</code> draws it.</p>"
        )
    longest = max(value for _, value in found.longest)
    drawn = line_chart(
        "stalls",
        "Stall a step",
        f"{len(found.longest)} points; the longest stall took {longest:.1f} ms",
        {1: _peaks(found.longest), 0: _peaks(found.mean)},
        "step",
        lambda value: f"{value:g} ms",
        count,
    )
    return drawn + legend([(1, "longest of about a second"), (0, "mean")])


def _peaks(points: Points) -> list[tuple[float, float]]:
    """Return the highest point of each group of neighbors if there are too many points to draw."""
    stride = max(1, -(-len(points) // 300))
    return [max(points[at : at + stride], key=lambda point: point[1]) for at in range(0, len(points), stride)]


# Restores.


def restore(whole: Lineage, intervals: Sequence[Traffic], bytes_per_s: float) -> str:
    """Draw the seconds that a restore of each marker would take."""
    older, points = _older(whole), []
    for number, each in enumerate(intervals):
        num_bytes = older[each.commit.generation] + each.commit.num_bytes
        points.append((each.commit.generation, float(number), num_bytes / (bytes_per_s * len(each.commit.ranks))))
    said = f"up to {_on_axis_s(max(seconds for _, _, seconds in points))}"
    names = some([each.commit.id for each in intervals])
    return line_chart("restore", "Restore estimate", said, by_generation(points), "marker", _on_axis_s, names)


def _older(whole: Lineage) -> dict[int, int]:
    """Return for each generation the bytes of frames that its parent marker is made of."""
    found: dict[int, int] = {}
    for generation, claim in sorted(whole.claims.items()):
        parent: MarkerId | None = claim.parent
        known = parent is not None and parent in whole.commits and parent.generation in found
        found[generation] = found[parent.generation] + whole.commits[parent].num_bytes if known and parent else 0
    return found


# The last markers.


def last_markers(look: Look) -> str:
    said = any(row.meta for row in look.recent)
    rows = [
        (
            row.marker,
            f"{row.step:,}",
            day(row.time_s, "%m-%d %H:%M:%S"),
            duration(row.took_s) if row.took_s is not None else "-",
            f"{row.rows:,}",
            size(row.num_bytes),
            size(row.dense_bytes),
            *([", ".join(f"{name}={value}" for name, value in row.meta.items()) or "-"] * said),
        )
        for row in look.recent
    ]
    head = ("marker", "step", "committed (UTC)", "after", "rows", "bytes", "dense", *(["meta"] * said))
    return table(head, rows)
