"""Effective training time of a job of 1,000 GPUs that fail: a simulation with measured costs.

    python benchmarks/proof/ettr.py [--gpus 1000] [--failures 20000] [--rounds 5] [--costs FILE.json] [--out FILE.json]

*Measured*: what each way adds to a step, what a save takes of training, how long until it is complete, how long a new
process takes to its first step, and how long a hot spare takes. ``costs.py`` measures it on one job; without
``--costs`` it comes from the newest filed results of ``marker``, ``step_time``, ``restore``, ``tracker`` and
``takeover`` (:func:`filed_costs`). *Simulated*: when GPUs fail. Each has its own exponential clock; a replaced one
starts again. The job stops if one fails, goes on from the newest save that counts, and a failure during a restart
begins the restart again. *Assumed*, alike for all ways: the seconds to notice a failure and to place processes; and
either that 1,000 ranks save and load as one does, each on a disk of its own that outlives it, or that all of them
share one store of so many bytes a second.

Each way saves at the interval that is best for it by Young's formula, no more often than a save takes to complete.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from common import at_least, file_facts, parse  # noqa: E402
from page_tables.results import newest  # noqa: E402

MTBF_S = {"10 min": 600.0, "1 h": 3600.0, "6 h": 21600.0}
"""Mean time between failures of the job, not of a GPU."""
OTHERS = ("torch.save", "dcp.async_save", "ModelDeltaTracker and DCP")
SOURCES = (("marker",), ("step_time", "1-rank"), ("restore",), ("tracker",), ("takeover",))
"""Case, and variant, of each filed result that :func:`filed_costs` reads."""
WAITS = "torch.save"
"""Training waits until all of its bytes are written."""
ROWS_OF_MARKER = 5_000_000
"""Rows of the table of ``marker``."""
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


def filed_costs() -> dict[str, Any]:
    """Costs of each way out of filed results of other cases, in the form of ``costs.py``.

    A rank holds 1.3 GB, of which 1% changes between two saves. Work of DCP beside training is not counted, ours is:
    its steps are those of a job with a marker every ten. A restart is a new process (``takeover``), with its restore
    replaced by that of this size (``restore``), all from the page cache. A save of the tracker's rows was not
    measured: it counts the query of its ids, and 1% of ``torch.save``. Of DCP's ways to stage, the one that blocks
    least.
    """
    marker, took = newest("marker"), newest("takeover").found
    stall, durable = (
        {name: row["median"] / 1e3 for name, row in marker.point(point).variants.items()}
        for point in ("table", "table, durable")
    )
    loads = newest("restore")
    log, store = (
        {name: row["median"] / 1e3 for name, row in loads.point(point).variants.items()}
        for point in ("log, on 1", "store, on 1")
    )
    share = took["table_bytes"] / loads.facts["bytes of tables and states"]
    start_s = took["medians"]["plain_to_first_step_s"] - share * log["ours, log"]
    steps = newest("step_time", "1-rank").found["variants"]
    rows_s = newest("tracker").point("criteo").median("tracker") / 1e3 + 0.01 * stall["torch.save"]
    dcp = min((name for name in durable if name.startswith("dcp.async_save")), key=stall.__getitem__)

    def way(save_s: dict[str, float], counts_s: float, load_s: float, slower: float = 1.0) -> dict[str, Any]:
        counts = dict.fromkeys(save_s, counts_s)
        return {"saves": 1, "slower": slower, "save_s": save_s, "counts_s": counts, "restart_s": [start_s + load_s]}

    def ours(pace: str) -> dict[str, Any]:
        slower = steps[pace]["ratio_median_until_all_is_sent"]
        return way({"full": stall["ours"]}, durable["ours"], store["ours, store"], slower)

    facts = marker.facts
    whole = facts["bytes, table"]
    some = round(whole * facts["rows touched"] / ROWS_OF_MARKER)
    ways_ = {
        "ours": ours("marker every 10, direct"),
        "ours, paced": ours("auto, max_overhead 1%, direct"),
        "torch.save": way({"full": stall["torch.save"]}, stall["torch.save"], log["torch.load + copy"]),
        "dcp.async_save": way({"full": stall[dcp]}, durable[dcp], log["dcp.load"]),
        "ModelDeltaTracker and DCP": way({"full": stall[dcp], "rows": rows_s}, durable[dcp], log["dcp.load"]),
    }
    for name, row in ways_.items():
        row["save_bytes"] = {"full": whole if name in OTHERS else some, "rows": some}
        row["load_bytes"] = whole
    return ways_


def _mean(row: dict[str, float]) -> float:
    """Of a full save and the saves of rows that follow it, if there are any."""
    return (row["full"] + DELTAS * row["rows"]) / (1 + DELTAS) if "rows" in row else row["full"]


def ways(
    costs: dict[str, Any],
    spare_s: float,
    notice_s: float,
    place_s: float,
    slow: Callable[[float], float] = lambda _: 0.0,
) -> dict[str, Way]:
    """Ways by name, as they were measured, with what is assumed of a restart added.

    Args:
        costs: Ways of a result of ``costs.py``, or :func:`filed_costs`.
        spare_s: From its decision to the first step of a hot spare.
        notice_s: From a failure until somebody acts on it.
        place_s: From there until new processes start.
        slow: Least seconds in which all ranks move so many bytes each.
    """
    found = {}
    for name, row in costs.items():
        if not row["saves"] or "full" not in row["save_s"]:
            continue
        moved = {kind: slow(row.get("save_bytes", {}).get(kind, 0)) for kind in row["save_s"]}
        counts = {kind: max(seconds, moved[kind]) for kind, seconds in row["counts_s"].items()}
        save = {kind: max(seconds, moved[kind] * (name == WAITS)) for kind, seconds in row["save_s"].items()}
        found[name] = Way(
            slower=max(1.0, row["slower"]),
            save_s=max(1e-3, _mean(save)),
            counts_s=_mean(counts),
            restart_s=notice_s + place_s + statistics.median(row["restart_s"]) + slow(row.get("load_bytes", 0)),
        )
    for name in [each for each in found if each not in OTHERS]:
        found[f"{name}, a hot spare"] = replace(found[name], restart_s=notice_s + spare_s)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpus", type=at_least(1), default=1000)
    parser.add_argument("--failures", type=at_least(10), default=20_000, help="of each run")
    parser.add_argument("--rounds", type=at_least(1), default=5, help="runs with other clocks")
    parser.add_argument("--notice-s", type=float, default=10.0, help="assumed: until a failure is acted on")
    parser.add_argument("--place-s", type=float, default=60.0, help="assumed: until new processes start")
    parser.add_argument("--store-gb-s", type=float, default=100.0, help="assumed: of one store that all ranks share")
    parser.add_argument("--costs", type=Path, help="a result of costs.py; default: filed results of other cases")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parse(parser, failures=200, rounds=2)
    costs = json.loads(args.costs.read_text())["facts"]["ways"] if args.costs else filed_costs()
    spare_s = newest("takeover").found["medians"]["spare_to_first_step_s"]
    given = (costs, spare_s, args.notice_s, args.place_s)
    where = {"": ways(*given)}
    if all("save_bytes" in row for row in costs.values()):
        where[", one store"] = ways(*given, lambda num_bytes: args.gpus * num_bytes / (1e9 * args.store_gb_s))
    points: dict[str, Any] = {}
    spent: dict[str, Any] = {}
    for (name, mtbf_s), (ending, found) in itertools.product(MTBF_S.items(), where.items()):
        variants: dict[str, Any] = {}
        spent[f"{name}{ending}"] = {}
        for kind, way in found.items():
            interval_s = way.interval_s(mtbf_s)
            runs = [
                simulate(way, interval_s, gpus=args.gpus, mtbf_s=mtbf_s, failures=args.failures, seed=seed)
                for seed in range(args.rounds)
            ]
            rounds = [round(100 * each.ettr, 2) for each in runs]
            middle = sorted(runs, key=lambda run: run.ettr)[len(runs) // 2]
            variants[kind] = {
                "median": statistics.median(rounds),
                "min": min(rounds),
                "max": max(rounds),
                "rounds": rounds,
            }
            spent[f"{name}{ending}"][kind] = {
                "interval s": round(interval_s, 1),
                "saving": round(100 * middle.saving, 2),
                "lost": round(100 * middle.lost, 2),
                "restarting": round(100 * middle.restarting, 2),
            }
        points[f"MTBF {name}{ending}"] = {"unit": "% of the time", "baseline": "torch.save", "variants": variants}
    sources = [newest(*each).path.stem for each in SOURCES] if args.costs is None else [args.costs.stem]
    facts = {
        "GPUs": args.gpus,
        "costs from": sources,
        "failures of a run": args.failures,
        "assumed: seconds to notice": args.notice_s,
        "assumed: seconds to place processes": args.place_s,
        "measured: seconds of a hot spare": spare_s,
        "assumed: GB a second of one store": args.store_gb_s,
        "costs": {name + ending: asdict(way) for ending, each in where.items() for name, way in each.items()},
        "spent": spent,
    }
    for point, rows in points.items():
        for kind, row in rows["variants"].items():
            print(f"{point}, {kind}: {row['median']:.2f} % ({row['min']:.2f}-{row['max']:.2f})")
    file_facts("proof", "ettr.py", args.out, facts, points=points, goals=[])


if __name__ == "__main__":
    main()
