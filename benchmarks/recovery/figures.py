"""Figures 13, 14, 15 and 17 of IncrCP's paper, counted in rows and files: no clock, so any machine will do.

    python benchmarks/recovery/figures.py [--figures 13 14a 14b 15 17] [--quick] [--out FILE.json]

``13``   R, the least part of a new chunk that an extraction takes out of an old one: rows written, read back, restored
``14a``  each of the three filters left out
``14b``  bundles, or a file for each part: files that a restore opens
``15``   DeepFM and PNN: rows that each marker's restore reads, and what is stored
``17``   the length of an interval, over one number of steps

Sizes are those of the authors' scripts where these say them: R, 50 markers of 10 steps for 13 and 14, 100 markers and a
base every 80 for 15. Figure 17 is theirs on Criteo Terabyte with 16 GPUs and R = 0.0003; here it is the Kaggle job.
The rules are those of ``counts.py``, which ``tests/bench`` compares with the files of ``run.py`` row for row.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()
sys.path[1:1] = [str(HERE.parents[1]), str(HERE.parents[1] / "merge"), str(HERE.parents[2])]

from common import machine  # noqa: E402
from counts import Counted, differential, incrcp, naive, spans  # noqa: E402
from lists import RATIO, Filters  # noqa: E402
from workload import WORKLOADS, Workload  # noqa: E402

from torchrec_stream_ckpt.materialize.compactor import Policy  # noqa: E402

RATIOS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.0)
BUNDLED_RATIOS = RATIOS[:6]
MARKERS = 50
RESET_EVERY, RESET_MARKERS = 80, 100
STEPS, LENGTHS = 500, (5, 10, 25, 50, 100)
QUICK = {"rows": 4000, "batch": 60}
LEFT_OUT = {
    "all three": Filters(),
    "without key ranges": Filters(ranges=False),
    "without Bloom filters": Filters(bloom=False),
    "without the real ratio": Filters(real=False),
    "without any": Filters(ranges=False, bloom=False, real=False),
}


def sized(name: str, quick: bool, **sizes: int) -> Workload:
    """A workload of ``run.py`` with other sizes; the quick one is a small one with as many markers."""
    return replace(WORKLOADS[name], **sizes | (QUICK if quick else {}))


def row(counted: Counted, plain: Counted) -> dict[str, Any]:
    """What is filed of one layout, in rows; ``of_naive`` beside it."""
    found: dict[str, Any] = {
        "written": counted.written,
        "stored": counted.stored,
        "dead": counted.dead,
        "read_back": counted.read_back,
        "bases": counted.bases,
        "restored": counted.restored,
        "written_of_naive": round(counted.written / plain.written, 3),
        "stored_of_naive": round(counted.stored / plain.written, 3),
        "read_back_of_naive": round(counted.read_back / plain.written, 3),
        "restored_of_naive": {at: round(rows / plain.restored[at], 3) for at, rows in counted.restored.items()},
    }
    if counted.asked is not None:
        found["files"] = {at: [counted.files[at], counted.files_unbundled[at]] for at in counted.files}
        found["asked"] = vars(counted.asked)
    return found


def ours(workload: Workload, markers: Sequence[int]) -> Counted:
    """The store by default."""
    return spans(workload, markers, Policy().radix, Policy().rebase)


def figure_13(quick: bool) -> dict[str, Any]:
    workload, at = sized("kaggle", quick, intervals=MARKERS), (10, 25, MARKERS)
    plain = naive(workload, at)
    by_ratio = {f"{ratio:g}": row(incrcp(workload, at, ratio), plain) for ratio in RATIOS}
    return {"naive": row(plain, plain), "R": by_ratio, "store, by default": row(ours(workload, at), plain)}


def figure_14a(quick: bool) -> dict[str, Any]:
    workload, at = sized("kaggle", quick, intervals=MARKERS), (10, 25, MARKERS)
    plain = naive(workload, at)
    return {what: row(incrcp(workload, at, RATIO, filters=each), plain) for what, each in LEFT_OUT.items()}


def figure_14b(quick: bool) -> dict[str, Any]:
    workload, at = sized("kaggle", quick, intervals=MARKERS), (10, 25, MARKERS)
    plain = naive(workload, at)
    found = {}
    for ratio in BUNDLED_RATIOS:
        counted = incrcp(workload, at, ratio)
        found[f"{ratio:g}"] = {
            "files": counted.files,
            "files_unbundled": counted.files_unbundled,
            "dead_of_naive": round(counted.dead / plain.written, 3),
        }
    return found


def figure_15(quick: bool) -> dict[str, Any]:
    found = {}
    for name in ("deepfm", "pnn"):
        workload = sized(name, quick, intervals=RESET_MARKERS)
        at = (*range(10, RESET_MARKERS + 1, 10),)
        plain = naive(workload, at)
        layouts = {
            "naive": plain,
            "Check-N-Run": differential(workload, at, resets=True),
            f"IncrCP, base every {RESET_EVERY}": incrcp(workload, at, RATIO, RESET_EVERY),
            "store, by default": ours(workload, at),
        }
        found[name] = {"row_bytes": workload.row_bytes} | {key: row(each, plain) for key, each in layouts.items()}
    return found


def figure_17(quick: bool) -> dict[str, Any]:
    found = {}
    for steps in LENGTHS:
        workload = sized("kaggle", quick, intervals=STEPS // steps, steps=steps)
        at = (STEPS // steps,)
        plain = naive(workload, at)
        layouts = {
            "naive": plain,
            "Check-N-Run": differential(workload, at, resets=True),
            "IncrCP": incrcp(workload, at, RATIO),
            "store, by default": ours(workload, at),
        }
        found[str(steps)] = {key: row(each, plain) for key, each in layouts.items()}
    return found


FIGURES: dict[str, Callable[[bool], dict[str, Any]]] = {
    "13": figure_13,
    "14a": figure_14a,
    "14b": figure_14b,
    "15": figure_15,
    "17": figure_17,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--quick", action="store_true", help=f"small: {QUICK}")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parser.parse_args()
    report: dict[str, Any] = {
        "case": "recovery",
        "what": "rows and files, counted by the rows' ids; nothing is timed",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/recovery/figures.py {' '.join(sys.argv[1:])}".rstrip(),
        "machine": machine(),
        "figures": {},
    }
    for name in args.figures:
        report["figures"][name] = FIGURES[name](args.quick)
        print(f"figure {name}: {json.dumps(report['figures'][name])}", flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
