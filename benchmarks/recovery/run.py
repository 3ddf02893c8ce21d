"""Any marker back: this library's store beside naive increments, Check-N-Run and IncrCP, over the same frames.

    python benchmarks/recovery/run.py [--quick] [--workload kaggle deepfm pnn] [--schemes all] [--out STEM]

A stream is written by the library's own codec, marker by marker; every scheme makes each marker durable from the same
frames; then chosen markers are restored by all of them in interleaved rounds, with the page cache warm and cold. Every
scheme's state is compared with the reference bit for bit before it is timed. README.md says what each one does.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402
import torch  # noqa: E402
from baselines import Differential, DifferentialWithResets, Naive, NaiveByIndexCopy  # noqa: E402
from cache import STATES, can_drop_caches  # noqa: E402
from common import UnavailableError as Unavailable  # noqa: E402
from common import at_least, check_memory, command_of, machine, parse, unmeasured  # noqa: E402
from death_index import compare  # noqa: E402
from incrcp import IncrCp, IncrCpWithResets, resetting_every  # noqa: E402
from measure import Make, Measured, Plan, run_group  # noqa: E402
from ours import FromLog, FromStore, Head  # noqa: E402
from report import COPY, DEFAULT, MAPPED, against_paper, goals, lines, newest_lines, plot, ratio, summary  # noqa: E402
from saved import TorchLoad, TorchLoadAndCopy, TorchMmapAndCopy  # noqa: E402
from workload import WORKLOADS, Values, Workload  # noqa: E402

from torchrec_stream_ckpt.maintain.compactor import Policy  # noqa: E402

QUICK = {"rows": 30_000, "batch": 64, "intervals": 16}
PUBLISHED = "IncrCP, base every N"
MARKERS = (10, 31, 50, 75, 100, 125, 150)

# Each group is built and measured by itself, as all of them together would not fit a small disk; naive and
# torch.load are in both.
GROUPS: dict[str, dict[str, Make]] = {
    "one base": {
        "naive": Naive,
        "naive, index_copy_": NaiveByIndexCopy,
        "differential": Differential,
        "IncrCP": IncrCp,
        "log, no store": FromLog,
        "store": partial(FromStore, Policy(rebase=0, compact="none")),
        "store, span2": partial(FromStore, Policy(rebase=0, compact="span2")),
        "store, span4": partial(FromStore, Policy(rebase=0, compact="span4")),
        "store, span8": partial(FromStore, Policy(rebase=0, compact="span8")),
        "store, span16": partial(FromStore, Policy(rebase=0, compact="span16")),
        "store, head": Head,
        "torch.load": TorchLoad,
        COPY: TorchLoadAndCopy,
        MAPPED: TorchMmapAndCopy,
    },
    "new bases": {
        "naive": Naive,
        "Check-N-Run": DifferentialWithResets,
        "IncrCP, base reset": IncrCpWithResets,
        PUBLISHED: partial(resetting_every, 100),
        "store, rebase": partial(FromStore, Policy(rebase=1, compact="none")),
        DEFAULT: partial(FromStore, Policy()),
        "torch.load": TorchLoad,
        COPY: TorchLoadAndCopy,
        MAPPED: TorchMmapAndCopy,
    },
}

FILED = ["store", DEFAULT, "store, span4", "IncrCP", "torch.load", COPY, MAPPED]
"""Schemes of the newest result of the whole job: the others take hours, and 75 GB of disk."""

_ROOM = {name: (1.0, 2.0) for makes in GROUPS.values() for name in makes} | {
    "naive": (0.0, 1.0),
    **dict.fromkeys(("naive, index_copy_", "log, no store", "store, head"), (0.0, 0.0)),
    "IncrCP": (0.0, 4.0),
    PUBLISHED: (2.0, 4.0),
    "store": (1.0, 1.1),
    "store, span2": (1.0, 4.3),
    "store, span4": (1.0, 2.5),
    "store, rebase": (3.0, 1.1),
    DEFAULT: (3.0, 2.5),
    **dict.fromkeys((COPY, MAPPED), (0.0, 0.0)),
}
"""Disk that a scheme wants beside the first base: in bases, in the bytes of all increments."""


def main() -> None:
    args = _arguments()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "case": "recovery",
        "date": time.strftime("%Y-%m-%d"),
        "command": command_of("recovery"),
        "machine": machine(),
        "load_average_before": start.LOAD,
        "rounds": {"warm": args.rounds, "cold": args.cold_rounds, "cold_by": args.cold_by},
        "workloads": {},
    }
    if args.scratch is not None:
        args.scratch.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="recovery-", dir=args.scratch) as scratch:
        try:
            for name in args.workload:
                report["workloads"][name] = _run(_shape(name, args), args, Path(scratch))
        except Unavailable as error:
            unmeasured("recovery", args, str(error))
            return
    report["load_average_after"] = os.getloadavg()[0]
    _print(report)
    if args.out is not None:
        stem = args.out.with_suffix("")
        stem.with_suffix(".json").write_text(json.dumps(report, indent=1) + "\n")
        for name, found in report["workloads"].items():
            plot(name, found["groups"], stem.with_name(f"{stem.name}_{name}"))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workload", nargs="+", choices=WORKLOADS, default=["kaggle"])
    parser.add_argument("--rows", type=at_least(1000), help="of all tables together")
    parser.add_argument("--markers", type=at_least(1), help="intervals behind the base")
    parser.add_argument("--batch", type=at_least(1), help="samples a step; an interval is 10 steps")
    parser.add_argument("--restore", type=int, nargs="+", default=[50, 150], help="markers; the newest one always is")
    parser.add_argument("--rounds", type=at_least(1), help="with the page cache warm (default 7)")
    parser.add_argument("--cold-rounds", type=at_least(1), help="and cold (default 5)")
    parser.add_argument("--cold-by", choices=("fadvise", "drop-caches"), help="default: drop-caches where root allows")
    parser.add_argument("--incrcp-every", type=at_least(1), default=100, help=f"N of '{PUBLISHED}'")
    parser.add_argument("--threads", type=at_least(1), default=2, help="of torch")
    parser.add_argument("--schemes", nargs="+", default=FILED, help="these and naive, or all (default: %(default)s)")
    parser.add_argument("--scratch", type=Path, help="folder for the files, on the disk to be measured; removed again")
    parser.add_argument("--out", type=Path, help="file STEM.json and STEM_*.png")
    args = parse(parser, workload=["pnn"], restore=list(MARKERS), schemes=["all"])
    if args.rounds is None:
        args.rounds = 2 if args.quick else 7
    if args.cold_rounds is None:
        args.cold_rounds = 1 if args.quick else 5
    if args.cold_by is None:
        args.cold_by = "drop-caches" if can_drop_caches() and not args.quick else "fadvise"
    return args


def _shape(name: str, args: argparse.Namespace) -> Workload:
    """The workload as the flags want it."""
    sizes = dict(QUICK) if args.quick else {}
    asked = {"rows": args.rows, "batch": args.batch, "intervals": args.markers}
    return replace(WORKLOADS[name], **sizes | {key: value for key, value in asked.items() if value})


def _run(workload: Workload, args: argparse.Namespace, scratch: Path) -> dict[str, Any]:
    wanted = {marker for marker in args.restore if marker < workload.intervals} | {workload.intervals}
    few = sorted({*sorted(wanted)[::2], workload.intervals})
    asked = [{key: make for key, make in makes.items() if _is_asked(key, args)} for makes in GROUPS.values()]
    _check_room(workload, few, asked, scratch)
    plan = Plan(tuple(sorted(wanted)), args.rounds, args.cold_rounds, args.cold_by == "drop-caches")
    values = Values(workload)
    groups, first, index = {}, {}, {}
    for number, name in enumerate(GROUPS):
        chosen = asked[number]
        if PUBLISHED in chosen:
            chosen[PUBLISHED] = partial(resetting_every, args.incrcp_every)
        folder = scratch / f"{workload.name}-{number}"
        # Every new base that a marker needs takes the room of all tables.
        measured = run_group(workload, values, chosen, replace(plan, markers=tuple(few)) if number else plan, folder)
        groups[name] = summary(measured.records)
        first[name] = {
            state: {scheme: _ms(seconds) for scheme, seconds in rows.items()} for state, rows in measured.first.items()
        } | {"no cold": measured.no_cold}
        if not number:
            index = _death_index(measured, plan)
        del measured
        shutil.rmtree(folder)
    rows = [len(touched) for touched in workload.touched[1:]]
    return {
        "rows": workload.rows,
        "dim": workload.dim,
        "row_bytes": workload.row_bytes,
        "batch": workload.batch,
        "steps_an_interval": workload.steps,
        "zipf": workload.zipf,
        "markers": workload.intervals,
        "rows_an_interval": round(sum(rows) / len(rows)),
        "incrcp_every": args.incrcp_every,
        "groups": groups,
        "first_loads_ms": first,
        "against_the_paper": against_paper(groups),
        "goals": [asdict(goal) for goal in goals(groups)],
        "death_index": index,
    }


def _is_asked(scheme: str, args: argparse.Namespace) -> bool:
    return "all" in args.schemes or scheme in ("naive", *args.schemes)


def _check_room(workload: Workload, markers: Sequence[int], groups: Sequence[Collection[str]], scratch: Path) -> None:
    """For each group by itself: its log, a base that all baselines share, and what each scheme writes."""
    base = workload.row_bytes * workload.rows
    increments = workload.row_bytes * sum(len(touched) for touched in workload.touched[1:])
    room = _ROOM | {name: (len(markers), 0.0) for name in ("differential", "Check-N-Run", "IncrCP, base reset")}
    wanted = max(
        sum(base * room[name][0] + increments * room[name][1] for name in group) + 2 * base + increments
        for group in groups
    )
    free = shutil.disk_usage(scratch).free
    if free < wanted:
        raise Unavailable(
            f"{workload.name} wants {wanted / 1e9:.0f} GB of disk, {free / 1e9:.0f} are free: "
            f"name another --scratch, or some --schemes"
        )
    try:
        check_memory(5 * base, f"{workload.name}: tables here and in a fresh process, what torch.load makes of them")
    except Unavailable as error:
        raise Unavailable(f"{error}: pass fewer --rows, or run it on a larger machine") from None


def _death_index(measured: Measured, plan: Plan) -> dict[str, Any]:
    naive = measured.schemes["naive"]
    assert isinstance(naive, Naive)
    found = {}
    for marker in plan.markers:
        saved = compare(naive, marker, measured.tables, plan.rounds)
        found[str(marker)] = {
            "naive_ms": _ms(saved.naive_s),
            "flags_ms": _ms(saved.flags_s),
            "index_ms": _ms(saved.index_s),
            "naive_to_flags": round(ratio(saved.flags_s, saved.naive_s), 3),
            "flags_to_index": round(ratio(saved.index_s, saved.flags_s), 3),
            "rows_read": saved.rows_read,
            "rows_alive": saved.rows_alive,
        }
    return found


def _ms(seconds: list[float]) -> list[float]:
    return [round(1e3 * each, 2) for each in seconds]


def _print(report: dict[str, Any]) -> None:
    print(f"{report['command']}\n{report['machine']}")
    print(f"load average {report['load_average_before']:.2f} before, {report['load_average_after']:.2f} behind")
    for name, found in report["workloads"].items():
        print(
            f"\n{name}: {found['rows']} rows x {found['dim']}, {found['markers']} markers of "
            f"{found['rows_an_interval']} rows ({found['rows_an_interval'] * found['row_bytes'] / 1e6:.1f} MB)"
        )
        for group, rows in found["groups"].items():
            print("\n".join(lines(group, rows)))
            print("\n".join(newest_lines(rows)))
        for group, rows in found["first_loads_ms"].items():
            for state in STATES:
                said = ", ".join(f"{name} {statistics.median(ms):.1f}" for name, ms in rows[state].items() if ms)
                print(f"  {group}: first load of a fresh process, {state}, ms: {said}")
            for name, why in rows["no cold"].items():
                print(f"  {group}: {name}: no cold first load: {why}")
        for goal in found["goals"]:
            verdict = {True: "reached", False: "MISSED", None: "not measured"}[goal["met"]]
            print(f"  {verdict:13}{goal['what']}: {goal['found'] or '-'} (goal {goal['wanted']})")
        for key, value in found["against_the_paper"].items():
            print(f"  {key}: {value}")
        for marker, saved in found["death_index"].items():
            print(
                f"  marker {marker}, delta, newest first: with flags {saved['naive_to_flags']:.2f}x as fast as naive; "
                f"flags / death index {saved['flags_to_index']:.2f}; "
                f"{saved['rows_alive'] / saved['rows_read']:.0%} of the rows are alive"
            )


if __name__ == "__main__":
    main()
