"""Effective training time of a job of 1,000 GPUs that fail: a simulation with measured costs.

    python benchmarks/proof/ettr.py [--gpus 1000] [--failures 20000] [--rounds 5] [--out FILE.json]

*Measured*, and read from the filed results: what each way adds to a step, what a save takes of training, how long until
it counts, how long a new process takes to its first step (``costs.py``), and how long a hot spare takes (``takeover``).
*Simulated*: when GPUs fail. Each has its own exponential clock; a replaced one starts anew. The job stops if one fails,
goes on from the newest save that counts, and a failure during a restart begins the restart again. *Assumed*, alike for
all ways: the seconds to notice a failure and to place processes, and that 1,000 ranks save and load as one does.

Each way saves at the interval that is best for it by Young's formula, no more often than a save takes to count.
"""

from __future__ import annotations

import argparse
import heapq
import json
import math
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from common import at_least, command_of, machine, parse  # noqa: E402
from page_tables.results import newest  # noqa: E402

MTBF_S = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21600.0}
"""Mean time between failures of the job, not of a GPU."""
OTHERS = ("torch.save", "dcp.async_save", "ModelDeltaTracker and DCP")
DELTAS = 10
"""Saves of rows between two full ones of the tracker's way (``peers.py``)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """What a way to save costs."""

    slower: float = 1.0
    """Time of a step beside one of a job that saves nothing."""
    save_s: float
    """What a save takes of training."""
    counts_s: float
    """From its step until a restart may use it."""
    restart_s: float
    """From a failure to the first step."""

    def interval_s(self, mtbf_s: float) -> float:
        """Training between two saves, in seconds of steps of a job that saves nothing (Young 1974)."""
        return max(math.sqrt(2 * self.save_s * mtbf_s), self.counts_s, self.save_s) / self.slower


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of a run went, as shares of it."""

    ettr: float
    """Steps that counted, at the speed of a job that saves nothing."""
    saving: float
    """Saves, and steps that are slower for them."""
    lost: float
    """Training after the newest save that counts."""
    restarting: float


def uptimes(gpus: int, mtbf_s: float, draw: random.Random) -> Any:
    """Yield the times at which a GPU of the job fails, for ever."""
    clocks = [draw.expovariate(1 / (gpus * mtbf_s)) for _ in range(gpus)]
    heapq.heapify(clocks)
    while True:
        at = clocks[0]
        heapq.heapreplace(clocks, at + draw.expovariate(1 / (gpus * mtbf_s)))
        yield at


def simulate(way: Way, interval_s: float, *, gpus: int, mtbf_s: float, failures: int, seed: int = 0) -> Spent:
    """Train through so many failures.

    Args:
        way: Its costs.
        interval_s: Training between two saves, in seconds of steps of a job that saves nothing.
        gpus: How many may fail.
        mtbf_s: Mean time between two failures of the job.
        failures: How many there are; the run ends with the last one.
        seed: Of the clocks.
    """
    clock = uptimes(gpus, mtbf_s, random.Random(seed))
    cycle_s = interval_s * way.slower + way.save_s
    useful = saving = lost = restarting = before = 0.0
    ready = 0.0
    """When it trains again."""
    for _ in range(failures):
        at = next(clock)
        up = at - ready
        if up < 0:
            restarting += at - before
        else:
            restarting += ready - before
            kept = max(0, math.floor((up - way.counts_s + way.save_s) / cycle_s))
            useful += kept * interval_s
            saving += kept * (cycle_s - interval_s)
            lost += up - kept * cycle_s
        before, ready = at, at + way.restart_s
    return Spent(*(each / before for each in (useful, saving, lost, restarting)))


def expected(way: Way, interval_s: float, mtbf_s: float) -> float:
    """Expected ETTR if a save counts once its stall is over (Daly 2006): the interval by the mean time that it takes,
    failures during saves and restarts included."""
    cycle_s = interval_s * way.slower + way.save_s
    return interval_s / (mtbf_s * math.exp(way.restart_s / mtbf_s) * math.expm1(cycle_s / mtbf_s))


def ways(costs: dict[str, Any], spare_s: float, notice_s: float, place_s: float) -> dict[str, Way]:
    """Ways by name, as they were measured, with what is assumed of a restart added.

    Args:
        costs: Filed by ``costs.py``.
        spare_s: From its decision to the first step of a hot spare.
        notice_s: From a failure until somebody acts on it.
        place_s: From there until new processes start.
    """
    found = {}
    for name, row in costs.items():
        if not row["saves"]:
            continue
        full, rows = (row["save_s"].get(kind, 0.0) for kind in ("full", "rows"))
        counts = row["counts_s"].get("rows", row["counts_s"].get("full", 0.0))
        delta = "rows" in row["save_s"]
        found[name] = Way(
            slower=max(1.0, row["slower"]),
            save_s=max(1e-3, (full + DELTAS * rows) / (1 + DELTAS) if delta else full),
            counts_s=counts,
            restart_s=notice_s + place_s + statistics.median(row["restart_s"]),
        )
    for name in [each for each in found if each not in OTHERS]:
        plain = found[name]
        found[f"{name}, a hot spare"] = Way(
            slower=plain.slower, save_s=plain.save_s, counts_s=plain.counts_s, restart_s=notice_s + spare_s
        )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=at_least(1), default=1000)
    parser.add_argument("--failures", type=at_least(10), default=20_000, help="of each run")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="runs with other clocks")
    parser.add_argument("--notice-s", type=float, default=10.0, help="assumed: until a failure is acted on")
    parser.add_argument("--place-s", type=float, default=60.0, help="assumed: until new processes start")
    parser.add_argument("--costs", type=Path, help="a result of costs.py; default: the newest filed one")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parse(parser, failures=200, rounds=2)
    costs = json.loads(args.costs.read_text()) if args.costs else newest("proof", "costs").found
    takeover = newest("takeover")
    spare_s = takeover.found["medians"]["spare_to_first_step_s"]
    found = ways(costs["facts"]["ways"], spare_s, args.notice_s, args.place_s)
    points: dict[str, Any] = {}
    spent: dict[str, Any] = {}
    for name, mtbf_s in MTBF_S.items():
        variants: dict[str, Any] = {}
        spent[name] = {}
        for kind, way in found.items():
            interval_s = way.interval_s(mtbf_s)
            runs = [
                simulate(way, interval_s, gpus=args.gpus, mtbf_s=mtbf_s, failures=args.failures, seed=seed)
                for seed in range(args.rounds)
            ]
            rounds = [round(100 * each.ettr, 2) for each in runs]
            variants[kind] = {
                "median": statistics.median(rounds),
                "min": min(rounds),
                "max": max(rounds),
                "rounds": rounds,
            }
            middle = sorted(runs, key=lambda run: run.ettr)[len(runs) // 2]
            spent[name][kind] = {
                "interval s": round(interval_s, 1),
                "saving": round(100 * middle.saving, 2),
                "lost": round(100 * middle.lost, 2),
                "restarting": round(100 * middle.restarting, 2),
            }
        points[f"MTBF {name}"] = {"unit": "% of the time", "baseline": "torch.save", "variants": variants}
    facts = {
        "GPUs": args.gpus,
        "failures of a run": args.failures,
        "assumed: seconds to notice": args.notice_s,
        "assumed: seconds to place processes": args.place_s,
        "measured: seconds of a hot spare": spare_s,
        "costs": {name: {key: getattr(way, key) for key in Way.__slots__} for name, way in found.items()},
        "spent": spent,
    }
    result = {
        "case": "proof",
        "command": command_of("proof", "ettr.py"),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "machine": machine(),
        "facts": facts,
        "points": points,
        "goals": [],
    }
    for point, rows in points.items():
        for kind, row in rows["variants"].items():
            print(f"{point}, {kind}: {row['median']:.2f} % ({row['min']:.2f}-{row['max']:.2f})")
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
