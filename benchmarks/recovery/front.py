"""IncrCP's published metric for every policy of the store: the average over all markers, base left out, in rows.

    python benchmarks/recovery/front.py [--part 1] [--quick] [--out FILE.json]
    python benchmarks/recovery/front.py --sizes 20 10 6 4 3 2 [--out FILE.json]   # the store alone
    python benchmarks/recovery/front.py --picture FILE.json

The paper restores each of 150 checkpoints after the last one is there, leaves the base out of the time, and divides the
average of naive increments by its own (5.1.3, 5.1.4, 5.2.1). Here a row stands for a second:

``average``  rows that naive reads over all markers / rows that the layout reads; a new base counts as no row
``with_bases``  the same with the base of each restore in both
``written``, ``stored``, ``read_back``  rows after the first base, in parts of all increments

Policies of the store: spans of radix 2 to 32; two radices (``4, then 8``: spans of 4, 32, 256 markers); a new base once
a restore reads more than ``rebase`` times a base after it (0.2 to 1), or after so many markers (*by age*). The rules
are those of ``Layout`` in ``benchmarks/merge/radix.py``; here the rows of a span are looked up in one table of how many
rows of each interval were last changed by each older one, so that a policy takes milliseconds. The default is counted
both ways and compared, with ``--quick`` every radix. ``--sizes`` says which policies are no worse than the default at
each of several sizes: where a base falls depends on the size. Check-N-Run and IncrCP follow ``counts.py``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[2] / part) for part in ("benchmarks", "benchmarks/merge", "")]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
import numpy.typing as npt  # noqa: E402
from common import at_least, command_of, machine  # noqa: E402
from counts import Counted, differential, incrcp, naive, spans  # noqa: E402
from figures import QUICK_PART, sized  # noqa: E402
from lists import RATIO  # noqa: E402
from workload import Workload  # noqa: E402

from torchrec_stream_ckpt.maintain.compactor import Policy  # noqa: E402

MARKERS = 150
RADICES = (2, 3, 4, 5, 6, 8, 12, 16, 24, 32)
MIXED = tuple((small, large) for small in (2, 3, 4, 6, 8) for large in (2, 3, 4, 6, 8, 16) if small != large)
REBASES = (0.2, 0.25, 0.3, 0.35, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
AGES = (20, 25, 30, 40, 50, 60, 75, 100)
AT = (50, 100, 150)
SLACK = 1.05
"""A policy counts as no worse if it reads at most this many times what the default reads at each marker of ``AT``."""


class Overlaps:
    """How many different rows any run of intervals has changed."""

    def __init__(self, workload: Workload) -> None:
        self.rows, self.intervals = workload.rows, workload.intervals
        last = np.zeros(workload.rows, np.int32)
        changed_before = np.zeros((workload.intervals + 1, workload.intervals + 1), np.int64)
        for interval, ids in enumerate(workload.touched[1:], 1):
            changed_before[interval] = np.bincount(last[ids], minlength=workload.intervals + 1)
            last[ids] = interval
        self._first: npt.NDArray[np.int64] = changed_before.cumsum(axis=0).cumsum(axis=1)
        """[j, p]: rows of intervals 1 to j whose last change before was at p or older."""

    def rows_of(self, after: int, last: int) -> int:
        """Different rows of the intervals after ``after`` up to ``last``; with the base (``after`` < 0) all rows."""
        return self.rows if after < 0 else int(self._first[last, after] - self._first[after, after])


@dataclass(frozen=True)
class Spans:
    """A policy of the store.

    Args:
        radices: Number of markers that a span joins, then number of spans, and so on; the last one repeats.
        rebase: Number of bases' worth of rows after a base that makes a new one due.
        every: Number of markers after which a new base is written; 0: by ``rebase``.
    """

    radices: tuple[int, ...]
    rebase: float = 0.0
    every: int = 0

    @property
    def name(self) -> str:
        spans = f"span{self.radices[0]}" + "".join(f", then {each}" for each in self.radices[1:])
        return f"{spans}, " + (f"a base every {self.every}" if self.every else f"rebase {self.rebase:g}")

    def lengths(self, marker: int) -> list[int]:
        """Spans that end at a marker, the shortest first."""
        found = []
        for length in accumulate((*self.radices, *self.radices[-1:] * 8), mul):
            if marker % length:
                break
            found.append(length)
        return found

    def count(self, overlaps: Overlaps) -> Counted:
        """By the rules of ``radix.Layout``."""
        found, cover = Counted(), [(-1, 0)]

        def merge(place: int) -> None:
            pieces = cover[place:]
            if len(pieces) > 1:
                joined = pieces[0][0], pieces[-1][1]
                found.read_back += sum(overlaps.rows_of(*each) for each in pieces)
                found.written += overlaps.rows_of(*joined)
                cover[place:] = [joined]

        for marker in range(1, overlaps.intervals + 1):
            cover.append((marker - 1, marker))
            found.written += overlaps.rows_of(*cover[-1])
            for length in self.lengths(marker):
                place = next((place for place, each in enumerate(cover) if each[0] == marker - length), None)
                if place:
                    merge(place)
            after = sum(overlaps.rows_of(*each) for each in cover[1:])
            due = marker - cover[0][1] >= self.every if self.every else after > self.rebase * overlaps.rows
            if due and (self.every or self.rebase):
                merge(0)
                found.bases += 1
            found.restored[marker] = sum(overlaps.rows_of(*each) for each in cover[1:])
        found.stored = found.written
        return found


def policies() -> Iterator[Spans]:
    """All that are counted: the default is among them."""
    for radices in [(radix,) for radix in RADICES] + list(MIXED):
        for rebase in REBASES:
            yield Spans(radices, rebase)
        for every in AGES:
            yield Spans(radices, every=every)


def row(counted: Counted, plain: Counted, rows: int) -> dict[str, Any]:
    """Filed counts of one layout."""
    read = {marker: counted.restored.get(marker, 0) for marker in plain.restored}
    of_naive, bases = sum(plain.restored.values()), rows * len(read)
    return {
        "average": round(of_naive / sum(read.values()), 3),
        "with_bases": round((of_naive + bases) / (sum(read.values()) + bases), 3),
        "written": round(counted.written / plain.written, 3),
        "stored": round(counted.stored / plain.written, 3),
        "read_back": round(counted.read_back / plain.written, 3),
        "bases": counted.bases,
        "read_at": {marker: round(read[marker] / plain.restored[marker], 3) for marker in AT if marker in read},
    }


def front(rows: dict[str, dict[str, Any]]) -> list[str]:
    """Names of the layouts that no other one beats in both, rows read and rows written; fewest written first."""
    found: list[str] = []
    for name in sorted(rows, key=lambda name: (rows[name]["written"], -rows[name]["average"])):
        if not found or rows[name]["average"] > rows[found[-1]]["average"]:
            found.append(name)
    return found


def no_worse(rows: dict[str, dict[str, Any]], default: str) -> list[str]:
    """Those that read at most ``SLACK`` times what the default reads at each marker of ``AT``."""
    limits = {marker: SLACK * part for marker, part in rows[default]["read_at"].items()}
    return [name for name, each in rows.items() if all(each["read_at"][at] <= limit for at, limit in limits.items())]


def compare(workload: Workload, overlaps: Overlaps, chosen: Sequence[Spans]) -> None:
    """Count policies by ``Layout``, which keeps the ids of each piece, too.

    Raises:
        RuntimeError: a count differs.
    """
    for policy in chosen:
        found = policy.count(overlaps)
        wanted = spans(workload, range(1, workload.intervals + 1), policy.radices[0], policy.rebase)
        if (found.restored, found.written, found.read_back) != (wanted.restored, wanted.written, wanted.read_back):
            raise RuntimeError(f"{policy.name}: {found} is counted from overlaps, {wanted} from ids")


def count(workload: Workload, *, quick: bool) -> dict[str, Any]:
    """Others' layouts, and each policy of the store."""
    markers = range(1, workload.intervals + 1)
    plain, overlaps = naive(workload, markers), Overlaps(workload)
    usual = Spans((Policy().radix,), Policy().rebase)
    compare(workload, overlaps, [Spans((each,), part) for each in RADICES for part in (0.05, 1)] if quick else [usual])
    others: dict[str, Callable[[], Counted]] = {
        "naive": lambda: plain,
        "Check-N-Run": lambda: differential(workload, markers, resets=True),
        "IncrCP, one base": lambda: incrcp(workload, markers, RATIO),
        "IncrCP, a base every 50": lambda: incrcp(workload, markers, RATIO, 50),
        "IncrCP, a base every 100": lambda: incrcp(workload, markers, RATIO, 100),
        "IncrCP, bases by its rule": lambda: incrcp(workload, markers, RATIO, by_rule=True),
    }
    found: dict[str, dict[str, Any]] = {}
    for name, counted in others.items():
        found[name] = row(counted(), plain, workload.rows)
        print(f"{name}: {json.dumps(found[name])}", file=sys.stderr, flush=True)
    store = {policy.name: row(policy.count(overlaps), plain, workload.rows) for policy in policies()}
    kept = no_worse(store, usual.name)
    return {
        "rows": workload.rows,
        "markers": workload.intervals,
        "base": round(workload.rows / plain.written, 3),
        "others": found,
        "store": store,
        "default": usual.name,
        "front": front(store),
        "no_worse": front({name: store[name] for name in kept}),
    }


def robust(parts: Sequence[int]) -> dict[str, Any]:
    """The store at several sizes, and the front of those policies that are no worse than the default at each."""
    usual = Spans((Policy().radix,), Policy().rebase).name
    sizes: dict[int, dict[str, dict[str, Any]]] = {}
    kept = {policy.name for policy in policies()}
    for part in parts:
        workload = sized("kaggle", part, MARKERS, 10)
        plain, overlaps = naive(workload, range(1, MARKERS + 1)), Overlaps(workload)
        sizes[part] = {policy.name: row(policy.count(overlaps), plain, workload.rows) for policy in policies()}
        kept &= set(no_worse(sizes[part], usual))
        print(f"part {part}: {len(kept)} policies are no worse so far", file=sys.stderr, flush=True)
        sized.cache_clear()
    keys = ("average", "written")
    means = {name: {key: sum(rows[name][key] for rows in sizes.values()) / len(sizes) for key in keys} for name in kept}
    chosen = front(means)
    return {
        "default": usual,
        "no_worse": chosen,
        "sizes": {
            str(part): {name: rows[name] for name in {usual: 0, **dict.fromkeys(chosen)}}
            for part, rows in sizes.items()
        },
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """The front, and others' layouts: how much less is read, against what is written."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.2))
    store, others = found["store"], {name: each for name, each in found["others"].items() if name != "naive"}
    axes.plot(*_places(store.values()), ".", color="#bbbbbb", markersize=3, label="store, every policy")
    axes.plot(*_places([store[name] for name in found["front"]]), "-", color="#4c72b0", label="store, the front")
    axes.plot(*_places([store[found["default"]]]), "s", color="#4c72b0", label=f"store, default: {found['default']}")
    places: dict[tuple[float, float], list[str]] = {}
    for name, each in others.items():
        places.setdefault((each["written"], each["average"]), []).append(name)
    for place, names in places.items():
        axes.plot(*place, "o", color="#c44e52")
        axes.annotate("  " + "; ".join(names), place, fontsize=7, va="center")
    axes.set_xlim(0.8, 1.2 * max(each["written"] for each in others.values()))
    axes.set_xlabel("rows written, in parts of all increments")
    axes.set_ylabel("times fewer rows read than naive, average")
    axes.set_title(f"{found['rows']:,} rows, {found['markers']} markers, counted", fontsize=9)
    axes.legend(fontsize=7, loc="upper left")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def _places(rows: Any) -> Sequence[list[float]]:
    chosen = list(rows)
    return [each["written"] for each in chosen], [each["average"] for each in chosen]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=at_least(1), nargs="+", metavar="PART", help="the store alone, at these parts")
    parser.add_argument("--part", type=at_least(1), default=10, help="take one row and one sample of this many")
    parser.add_argument(
        "--quick", action="store_true", help=f"--part {QUICK_PART}, 16 markers: no figure means anything"
    )
    parser.add_argument("--out", type=Path, help="file the result as JSON, with a picture next to it")
    parser.add_argument("--picture", type=Path, metavar="FILE.json", help="draw a filed result again, count nothing")
    args = parser.parse_args()
    if args.picture:
        draw(json.loads(args.picture.read_text()), args.picture.with_suffix(".png"))
        return
    part = QUICK_PART if args.quick else args.part
    workload = sized("kaggle", part, 16 if args.quick else MARKERS, 10)
    report: dict[str, Any] = {
        "case": "recovery",
        "what": "rows, counted by their ids; nothing is timed",
        "date": time.strftime("%Y-%m-%d"),
        "command": command_of("recovery", "front.py"),
        "machine": machine(),
        "part": part,
    } | (robust(args.sizes) if args.sizes else count(workload, quick=args.quick))
    if args.sizes:
        del report["part"]
    for name in report.get("front", ()):
        print(f"{name:28} {json.dumps(report['store'][name])}")
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")
    if args.out is not None and not args.sizes:
        draw(report, args.out.with_suffix(".png"))


if __name__ == "__main__":
    main()
