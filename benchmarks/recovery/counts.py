"""What each layout writes, stores, reads back, and reads to restore a marker: counted in rows, by their ids.

    python benchmarks/recovery/counts.py [--workload kaggle deepfm pnn] [--rows N] [--markers N] [--out FILE.json]

The rules are those that the schemes of ``run.py`` follow; no row has a value, no file is written and nothing is timed,
so the figures do not depend on the machine or on what else runs there. ``R`` is IncrCP's own figure of that name: the
part of a new chunk that an extraction must take out of an old one.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[2] / part) for part in ("benchmarks", "benchmarks/merge", "")]

import start  # noqa: E402, F401
import numpy as np  # noqa: E402
from common import at_least, command_of, machine  # noqa: E402
from lists import RATIO, Asked, Chunk, Filters, Lists  # noqa: E402
from radix import Layout  # noqa: E402
from workload import WORKLOADS, Ids, Workload, shaped  # noqa: E402

from torchrec_stream_ckpt.maintain.compactor import Policy  # noqa: E402

RATIOS = (0.0, 0.01, 0.02, 0.04, 0.08)
MARKERS = (10, 31, 50, 75, 100, 125, 150)
ALL = Filters()


@dataclass
class Counted:
    """Rows of one layout after the first base, with those of later bases."""

    written: int = 0
    stored: int = 0
    """That some marker needs."""
    dead: int = 0
    """Rows that no marker needs, in files that others of them still need; beside ``stored``."""
    read_back: int = 0
    """To write others."""
    restored: dict[int, int] = field(default_factory=dict)
    """By marker: what its restore reads beside its base."""
    bases: int = 0
    """After the first one."""
    files: dict[int, int] = field(default_factory=dict)
    """By marker, of IncrCP alone: what its restore opens beside its base, with a list a table and bundles."""
    files_unbundled: dict[int, int] = field(default_factory=dict)
    """The same if each part of Row_0 and of Row_1 were a file of its own."""
    asked: Asked | None = None
    """Of IncrCP alone: what its filters kept from being read or rewritten."""


def naive(workload: Workload, markers: Sequence[int]) -> Counted:
    rows = np.cumsum([0, *(len(ids) for ids in workload.touched[1:])])
    return Counted(int(rows[-1]), int(rows[-1]), restored={marker: int(rows[marker]) for marker in markers})


def differential(workload: Workload, markers: Sequence[int], *, resets: bool) -> Counted:
    """Check-N-Run's chain; with ``resets`` its intermittent policy."""
    found, changed, sizes = Counted(), np.zeros(workload.rows, np.bool_), []
    for interval, ids in enumerate(workload.touched[1:], 1):
        if resets and sizes and 1 + sum(sizes) <= (len(sizes) + 1) * sizes[-1]:
            changed[:], sizes, rows = False, [], workload.rows
            found.bases += 1
        else:
            changed[ids] = True
            rows = int(changed.sum())
            sizes.append(rows / workload.rows)
        found.written += rows
        if interval in markers:
            found.restored[interval] = rows if sizes else 0
    found.stored = found.written
    return found


def incrcp(
    workload: Workload,
    markers: Sequence[int],
    ratio: float,
    reset_every: int = 0,
    filters: Filters = ALL,
    *,
    by_rule: bool = False,
) -> Counted:
    """IncrCP's two-dimensional lists.

    Args:
        workload: The job.
        markers: Whose restores are counted.
        ratio: R.
        reset_every: Number of chunks after which a new base is written, as in the authors' runs.
        filters: Those that are asked.
        by_rule: A new base by the paper's rule (4.5): writing it and reading it back takes less than writing the
            increment, reading the base and reading what came after it, which the last two recoveries foretell.
    """
    found, lists, since = Counted(), Lists[Ids](ratio, filters), 0
    recoveries: list[int] = []
    changed = np.zeros(workload.rows, np.bool_)
    extracted: list[Extracted] = []
    own: list[int] = []
    bundles = Bundles()
    for interval, ids in enumerate(workload.touched[1:], 1):
        since += 1
        foretold = 2 * recoveries[-1] - recoveries[-2] if len(recoveries) > 1 else 0
        pays = by_rule and workload.rows < len(ids) + foretold  # the base is read in both cases
        if pays or (reset_every and since > reset_every):
            _read(found, lists, extracted, bundles, own, markers)
            lists.clear()
            extracted, own, since, recoveries = [], [], 0, []
            found.dead += bundles.dead
            bundles = Bundles()
            found.bases += 1
            found.written += workload.rows
            found.stored += workload.rows
            continue
        changed[ids] = True
        for table, keys in workload.linear(interval):
            for chunk in lists.worth_reading(table, keys):
                dead = changed[chunk.where]
                rows = int(dead.sum())
                found.read_back += len(dead)
                if not lists.worth_rewriting(rows, keys):
                    continue
                found.written += len(dead)
                bundles.take(table, chunk.interval)
                extracted.append(Extracted(table, chunk.interval, interval, rows))
                if rows == len(dead):
                    lists.drop(table, chunk.interval)
                else:
                    left = chunk.where[~dead]
                    lists.put(table, Chunk.of(chunk.interval, left, left))
                    bundles.put(table, chunk.interval, interval, len(left))
            lists.put(table, Chunk.of(interval, keys, keys))
        changed[ids] = False
        own.append(interval)
        if by_rule:
            chunks = (lists.left(table, one) for table in lists.tables() for one in own)
            recoveries.append(sum(len(chunk.where) for chunk in chunks if chunk is not None))
        found.written += len(ids)
        found.stored += len(ids)
    _read(found, lists, extracted, bundles, own, markers)
    found.dead += bundles.dead
    found.asked = lists.asked
    return found


@dataclass(frozen=True, slots=True)
class Extracted:
    """Rows that an interval took out of the chunk of an older one."""

    table: int
    chunk: int
    by: int
    rows: int


@dataclass
class Bundles:
    """Files that hold what one extraction has left of all chunks of a table; one goes with its last live part."""

    _rows: dict[tuple[int, int], int] = field(default_factory=dict)
    _parts: dict[tuple[int, int], dict[int, int]] = field(default_factory=dict)
    """Live rows by chunk."""
    _of: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def put(self, table: int, chunk: int, interval: int, rows: int) -> None:
        bundle = self._of[table, chunk] = (table, interval)
        self._rows[bundle] = self._rows.get(bundle, 0) + rows
        self._parts.setdefault(bundle, {})[chunk] = rows

    def take(self, table: int, chunk: int) -> None:
        """What is left of a chunk is written anew."""
        if bundle := self._of.pop((table, chunk), None):
            del self._parts[bundle][chunk]
            if not self._parts[bundle]:
                del self._parts[bundle], self._rows[bundle]

    def of(self, table: int, chunk: int) -> tuple[int, int]:
        """The file that has what is left of a chunk: the chunk's own, or a bundle."""
        return self._of.get((table, chunk), (table, chunk))

    @property
    def dead(self) -> int:
        return sum(self._rows.values()) - sum(sum(parts.values()) for parts in self._parts.values())


def _read(
    found: Counted,
    lists: Lists[Ids],
    extracted: Sequence[Extracted],
    bundles: Bundles,
    own: Sequence[int],
    markers: Sequence[int],
) -> None:
    """Of the markers since the base: chunks up to the marker, and what later intervals have taken out of them."""
    for marker in sorted(set(own).intersection(markers)):
        left = [
            (table, interval, len(chunk.where))
            for interval in own
            if interval <= marker
            for table in lists.tables()
            if (chunk := lists.left(table, interval)) is not None
        ]
        taken = [each for each in extracted if each.chunk <= marker < each.by]
        found.restored[marker] = sum(rows for _, _, rows in left) + sum(each.rows for each in taken)
        found.files_unbundled[marker] = len(left) + len(taken)
        own_files = {bundles.of(table, interval) for table, interval, _ in left}
        found.files[marker] = len(own_files) + len({(each.table, each.by) for each in taken})


def spans(workload: Workload, markers: Sequence[int], radix: int, rebase: float) -> Counted:
    """This library's store."""
    layout, found = Layout(radix, rebase), Counted()
    for read in layout.replay(workload.touched):
        found.bases += read.pieces == 1
        if read.marker in markers:
            found.restored[read.marker] = read.delta_rows
    found.written = found.stored = layout.written
    found.read_back = layout.merged
    return found


def count(workload: Workload, markers: Sequence[int], ratios: Sequence[float]) -> dict[str, Any]:
    """Every layout, each with what it is of naive's."""
    layouts = {
        "naive": naive(workload, markers),
        "differential": differential(workload, markers, resets=False),
        "Check-N-Run": differential(workload, markers, resets=True),
        **{_name(ratio): incrcp(workload, markers, ratio) for ratio in ratios},
        "IncrCP, base every 50": incrcp(workload, markers, RATIO, 50),
        "IncrCP, base every 100": incrcp(workload, markers, RATIO, 100),
        "store": spans(workload, markers, 0, 0),
        **{f"store, span{radix}": spans(workload, markers, radix, 0) for radix in (2, 4, 8, 16)},
        "store, by default": spans(workload, markers, Policy().radix, Policy().rebase),
        "store, rebase": spans(workload, markers, 0, 1),
        **{f"store, span{radix}, rebase": spans(workload, markers, radix, 1) for radix in (4, 8, 16)},
    }
    plain = layouts["naive"]
    return {
        "rows": workload.rows,
        "dim": workload.dim,
        "markers": workload.intervals,
        "rows_an_interval": round(plain.written / workload.intervals),
        "layouts": {
            name: asdict(each)
            | {
                "written_of_naive": round(each.written / plain.written, 3),
                "stored_of_naive": round(each.stored / plain.written, 3),
                "dead_of_naive": round(each.dead / plain.written, 3),
                "read_back_of_naive": round(each.read_back / plain.written, 3),
                "restored_of_naive": {
                    marker: round(rows / plain.restored[marker], 3) for marker, rows in each.restored.items()
                },
            }
            for name, each in layouts.items()
        },
    }


def _name(ratio: float) -> str:
    return "IncrCP" if ratio == RATIO else f"IncrCP, R={ratio:g}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["kaggle", "deepfm"])
    parser.add_argument("--rows", type=at_least(1000), help="of all tables together")
    parser.add_argument("--markers", type=at_least(1), help="intervals after the base")
    parser.add_argument("--batch", type=at_least(1), help="samples a step")
    parser.add_argument("--ratios", type=float, nargs="*", default=list(RATIOS), help="R of IncrCP; 0.02 always is one")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds: no figure means anything then")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.markers, args.batch = args.rows or 30_000, args.markers or 16, args.batch or 64
    ratios = sorted({RATIO, *args.ratios})
    report: dict[str, Any] = {
        "case": "recovery",
        "what": "rows, counted by their ids; nothing is timed",
        "date": time.strftime("%Y-%m-%d"),
        "command": command_of("recovery", "counts.py"),
        "machine": machine(),
        "workloads": {},
    }
    for name in args.workload:
        workload = shaped(WORKLOADS[name], rows=args.rows, intervals=args.markers, batch=args.batch)
        markers = sorted({marker for marker in MARKERS if marker < workload.intervals} | {workload.intervals})
        found = report["workloads"][name] = count(workload, markers, ratios)
        print(f"\n{name}: {found['rows']} rows, {found['markers']} markers of {found['rows_an_interval']} rows")
        print(f"  {'of naive':24}{'written':>9}{'stored':>9}{'dead':>7}{'read back':>11}{'bases':>7}  restores read")
        for layout, row in found["layouts"].items():
            reads = "".join(f"{marker:>5}: {part:.2f}" for marker, part in row["restored_of_naive"].items())
            print(
                f"  {layout:24}{row['written_of_naive']:>9.2f}{row['stored_of_naive']:>9.2f}"
                f"{row['dead_of_naive']:>7.2f}{row['read_back_of_naive']:>11.2f}{row['bases']:>7} {reads}"
            )
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
