"""Figures 13, 14, 15 and 17 of IncrCP's paper, counted in rows and files: no clock, so any machine will do.

    python benchmarks/recovery/figures.py [--figures 13 14a 14b 15 17] [--part 1] [--quick] [--out FILE.json]

``13``   R, the least part of a new chunk that an extraction takes out of an old one: rows written, read back, and
         restored: the average over all 50 markers
``14a``  the three filters added one after another: none, key ranges, Bloom filters, the real ratio
``14b``  bundles, or a file for each part: files that a restore opens
``15``   DeepFM and PNN: rows that each marker's restore reads, and what is stored
``17``   the length of an interval: always the 10th marker

Sizes are those of the authors' scripts where these say them: R, 50 markers of 10 steps for 13 and 14, 100 markers and a
base every 80 for 15. ``--part 4`` takes a quarter of the rows and of the batch. Figure 17 is theirs on Criteo Terabyte
with 16 GPUs, intervals of 2,000 to 5,000 steps and R = 0.0003; here it is the Kaggle job with intervals in the same
proportions.
The rules are those of ``counts.py``, which ``tests/bench`` compares with the files of ``run.py`` row for row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[2] / part) for part in ("benchmarks", "benchmarks/merge", "")]

import start  # noqa: E402, F401
from common import at_least, command_of, machine  # noqa: E402
from counts import ALL, Counted, differential, incrcp, naive, spans  # noqa: E402
from lists import RATIO, Filters  # noqa: E402
from workload import WORKLOADS, Workload  # noqa: E402

from torchrec_stream_ckpt.maintain.compactor import Policy  # noqa: E402

RATIOS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
BUNDLED_RATIOS = RATIOS[:6]
MARKERS = 50
AT, EACH = (10, 25, MARKERS), (*range(1, MARKERS + 1),)
RESET_EVERY, RESET_MARKERS = 80, 100
LENGTHS, TENTH = (20, 30, 40, 50), 10
QUICK_PART = 80
ADDED = {
    "none": Filters(ranges=False, bloom=False, real=False),
    "key ranges": Filters(bloom=False, real=False),
    "and Bloom filters": Filters(real=False),
    "and the real ratio": ALL,
}


@cache
def sized(name: str, part: int, intervals: int = MARKERS, steps: int = 10) -> Workload:
    """A workload of ``run.py``: one row and one sample of so many. One object, as its ids take long to draw."""
    whole = WORKLOADS[name]
    return replace(whole, rows=whole.rows // part, batch=whole.batch // part, intervals=intervals, steps=steps)


@cache
def extracted(workload: Workload, at: tuple[int, ...], ratio: float = RATIO, filters: Filters = ALL) -> Counted:
    """IncrCP without new bases; more than one figure has it."""
    print(f"{workload.name}: IncrCP, R={ratio:g}, {filters}", file=sys.stderr, flush=True)
    return incrcp(workload, at, ratio, filters=filters)


def row(counted: Counted, plain: Counted, at: Sequence[int] = ()) -> dict[str, Any]:
    """What is filed of one layout, in rows; ``of_naive`` beside it. Markers of ``at``, and the average of all."""
    average = sum(counted.restored.values()) / sum(plain.restored.values())
    at = at or tuple(counted.restored)
    found: dict[str, Any] = {
        "written": counted.written,
        "stored": counted.stored,
        "dead": counted.dead,
        "read_back": counted.read_back,
        "bases": counted.bases,
        "restored": {marker: counted.restored[marker] for marker in at},
        "written_of_naive": round(counted.written / plain.written, 3),
        "stored_of_naive": round(counted.stored / plain.written, 3),
        "read_back_of_naive": round(counted.read_back / plain.written, 3),
        "restored_of_naive": {marker: round(counted.restored[marker] / plain.restored[marker], 3) for marker in at},
        "average_of_naive": round(average, 3),
    }
    if counted.asked is not None:
        found["files"] = {marker: [counted.files[marker], counted.files_unbundled[marker]] for marker in at}
        found["asked"] = vars(counted.asked)
    return found


def ours(workload: Workload, markers: Sequence[int]) -> Counted:
    """The store by default."""
    return spans(workload, markers, Policy().radix, Policy().rebase)


def figure_13(part: int) -> dict[str, Any]:
    workload = sized("kaggle", part)
    plain = naive(workload, EACH)
    by_ratio = {f"{ratio:g}": row(extracted(workload, EACH, ratio), plain, AT) for ratio in RATIOS}
    return {"naive": row(plain, plain, AT), "R": by_ratio, "store, by default": row(ours(workload, EACH), plain, AT)}


def figure_14a(part: int) -> dict[str, Any]:
    workload = sized("kaggle", part)
    plain = naive(workload, EACH)
    return {what: row(extracted(workload, EACH, filters=each), plain, AT) for what, each in ADDED.items()}


def figure_14b(part: int) -> dict[str, Any]:
    workload = sized("kaggle", part)
    written = naive(workload, EACH).written
    found = {}
    for ratio in BUNDLED_RATIOS:
        counted = extracted(workload, EACH, ratio)
        found[f"{ratio:g}"] = {
            "files": {marker: counted.files[marker] for marker in AT},
            "files_unbundled": {marker: counted.files_unbundled[marker] for marker in AT},
            "dead_of_naive": round(counted.dead / written, 3),
        }
    return found


def figure_15(part: int) -> dict[str, Any]:
    """PNN's job has the rows of DeepFM's, of other bytes: they are counted once."""
    workload = sized("deepfm", part, RESET_MARKERS)
    at = (*range(10, RESET_MARKERS + 1, 10),)
    plain = naive(workload, at)
    layouts = {
        "naive": plain,
        "Check-N-Run": differential(workload, at, resets=True),
        f"IncrCP, base every {RESET_EVERY}": incrcp(workload, at, RATIO, RESET_EVERY),
        "store, by default": ours(workload, at),
    }
    row_bytes = {name: WORKLOADS[name].row_bytes for name in ("deepfm", "pnn")}
    return {"row_bytes": row_bytes, "layouts": {key: row(each, plain) for key, each in layouts.items()}}


def figure_17(part: int) -> dict[str, Any]:
    found = {}
    for steps in LENGTHS:
        workload, at = sized("kaggle", part, TENTH, steps), (TENTH,)
        plain = naive(workload, at)
        layouts = {
            "naive": plain,
            "Check-N-Run": differential(workload, at, resets=True),
            "IncrCP": incrcp(workload, at, RATIO),
            "store, by default": ours(workload, at),
        }
        found[str(steps)] = {key: row(each, plain) for key, each in layouts.items()}
    return found


FIGURES: dict[str, Callable[[int], dict[str, Any]]] = {
    "13": figure_13,
    "14a": figure_14a,
    "14b": figure_14b,
    "15": figure_15,
    "17": figure_17,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--part", type=at_least(1), default=10, help="one row and one sample of so many")
    parser.add_argument("--quick", action="store_true", help=f"--part {QUICK_PART}")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "case": "recovery",
        "what": "rows and files, counted by the rows' ids; nothing is timed",
        "date": time.strftime("%Y-%m-%d"),
        "command": command_of("recovery", "figures.py"),
        "machine": machine(),
        "part": QUICK_PART if args.quick else args.part,
        "figures": {},
    }
    for name in args.figures:
        report["figures"][name] = FIGURES[name](QUICK_PART if args.quick else args.part)
        print(f"figure {name}: {json.dumps(report['figures'][name])}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
