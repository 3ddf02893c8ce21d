"""Bars of a filed result: one group a point, one bar a variant, with the range over rounds.

python benchmarks/plot.py RESULT.json PICTURE.png [--points TEXT]
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

COLORS = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#8c8c8c")


def draw(result: dict[str, Any], points: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = list(dict.fromkeys(name for point in points.values() for name in point["variants"]))
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.9 * len(points)), 4))
    width = 0.8 / len(names)
    for number, name in enumerate(names):
        for place, point in enumerate(points.values()):
            row = point["variants"].get(name, {})
            if "median" in row:
                spread = [[row["median"] - row["min"]], [row["max"] - row["median"]]]
                axes.bar(
                    place + number * width,
                    row["median"],
                    width,
                    yerr=spread,
                    capsize=2,
                    color=COLORS[number % len(COLORS)],
                    label=name,
                )
    handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
    axes.legend(handles.values(), handles.keys(), fontsize=8)
    axes.set_xticks([place + 0.4 - width / 2 for place in range(len(points))], points, fontsize=8)
    axes.set_ylabel(next(iter(points.values()))["unit"])
    axes.set_title(
        f"{result['case']}: {result['machine']['cpu']}, {result['machine']['cores']} cores, {result['date']}"
    )
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--points", default="", help="only those whose name holds this")
    args = parser.parse_args()
    result = json.loads(args.result.read_text())
    points = {name: point for name, point in result["points"].items() if args.points in name}
    if not points:
        parser.error(f"no point of {args.result} has '{args.points}' in its name")
    draw(result, points, args.picture)


if __name__ == "__main__":
    main()
