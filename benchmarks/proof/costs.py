"""What each way to save costs the job that ``run.py`` kills: a step, a save, and a restart. Nothing dies by chance.

    python benchmarks/proof/costs.py [--rows 1000000] [--saves 12] [--folder DIR] [--out FILE.json]

The job is that of ``run.py`` with larger tables and a larger dense part, so that a step takes longer than 8 ms.

One rank trains and saves at a fixed interval of steps, then gets SIGKILL and starts again as a new process, several
times. A run that saves nothing comes right before it. All is measured from outside, alike for each way: by the times
at which steps end. The *window* of a save begins with its step and ends with the first step after it is complete. A
save costs what its window takes on top of as many other steps. The other steps, compared with those of the run that
saves nothing, show what a way costs all the time. ``ettr.py`` reads it.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
from common import at_least, file_facts, parse, refuse_small_machine, tell  # noqa: E402
from peers import PEERS, TrackerDcp, peer, saved  # noqa: E402
from ranks import Processes, StuckError, job_flags, last_step, loads, ours, times  # noqa: E402

from torchrec_stream_ckpt.inner import Where  # noqa: E402

NOTHING, OURS, PACED = "none", "ours", "ours, paced"
JOB = ["--batch_size", "512", "--dense_arch_layer_sizes", "1024,256,16", "--over_arch_layer_sizes", "1024,512,256,1"]
WAYS: dict[str, list[str]] = {
    OURS: ["--drain_every", "1"],
    PACED: ["--drain_every", "auto", "--max_overhead", "0.01"],
    **{name: [] for name in PEERS},
}
SKIPPED = 40
"""First steps, which do not count: caches fill, and a first marker sends every row."""


def counted(folder: Path, way: str) -> dict[int, float]:
    """Step of each save -> the Unix time from which on a restart may use it."""
    if way not in PEERS:
        with Where(f"file://{folder / 'log'}").open() as job:
            return {commit.step: commit.time_s for commit in job.control.refresh().commits.values()}
    return saved(folder / "saves")


def windows(ended: list[tuple[int, float]], saves: dict[int, float]) -> dict[int, tuple[int, int]]:
    """Step of each save -> the indices in ``ended`` of the steps in its window, [first, last]."""
    place = {step: number for number, (step, _) in enumerate(ended)}
    found = {}
    for step, at in saves.items():
        if step <= SKIPPED or step not in place:
            continue
        last = place[step] + 1
        while last < len(ended) and ended[last - 1][1] < at:
            last += 1
        if last < len(ended):
            found[step] = (place[step], last)
    return found


def costs_of(ended: list[tuple[int, float]], saves: dict[int, float], deltas: int = 0) -> dict[str, Any]:
    """Seconds of a step outside of windows, and of each save.

    Args:
        ended: (step, when it had ended), in their order.
        saves: As of :func:`counted`.
        deltas: Saves between two full ones; the first save of all is a full one.
    """
    found = windows(ended, saves)
    inside = {each for first, last in found.values() for each in range(first, last + 1)}
    took = {number: ended[number][1] - ended[number - 1][1] for number in range(1, len(ended))}
    others = [each for number, each in took.items() if number not in inside and ended[number][0] > SKIPPED]
    step_s = statistics.fmean(others)
    full = set(sorted(saves)[:: deltas + 1])
    save_s, counts_s = {}, {}
    for kind, wanted in (("full", True), ("rows", False)):
        mine = {step: window for step, window in found.items() if (step in full) == wanted}
        if mine:
            extra = [sum(took[n] for n in range(a, b + 1)) - (b - a + 1) * step_s for a, b in mine.values()]
            save_s[kind] = round(statistics.fmean(extra), 4)
            counts_s[kind] = round(statistics.fmean(saves[step] - ended[a - 1][1] for step, (a, _) in mine.items()), 4)
    return {"step_s": step_s, "steps": len(others), "save_s": save_s, "counts_s": counts_s, "saves": len(found)}


def fold(uri: str) -> None:
    """(process) Fold the log into its store, as a materializer on another host would have done by then."""
    from torchrec_stream_ckpt.cli.main import main

    sys.argv = ["stream-ckpt", "materialize", uri, "--once", "--engine", "local:1"]
    main()


def measure(way: str, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Train without saves; then with them until there are enough, kill it and start it again."""
    flags = [*job_flags(args.rows), *([] if args.quick else JOB)]
    until = SKIPPED + args.every * (args.saves + 2)
    plain = folder / "plain"
    plain.mkdir()
    ranks = Processes(plain, "ranks", 1, peer, flags, plain, NOTHING)
    try:
        ranks.wait(lambda: last_step(plain) > SKIPPED + (until - SKIPPED) // 2)
    finally:
        ranks.kill()
    plain_s = costs_of(times(plain), {})["step_s"]

    mine = folder / "job"
    mine.mkdir()

    def begin() -> Processes:
        if way in PEERS:
            return Processes(mine, "ranks", 1, peer, flags, mine, way, args.every)
        pace = ["--marker_every", str(args.every)] if way == OURS else []
        log = ["--stream_ckpt", f"file://{mine / 'log'}", *pace]
        return Processes(mine, "ranks", 1, ours, [*flags, *WAYS[way], *log], mine)

    ranks, restarts = begin(), []
    try:
        ranks.wait(lambda: last_step(mine) > until)
        ranks.kill()
        ended, saves = times(mine), counted(mine, way)
        if way not in PEERS:
            service = Processes(mine, "materializer", 1, fold, f"file://{mine / 'log'}")
            service.wait(lambda: service.codes == [0])
        for _ in range(args.restarts):
            before, at = len(times(mine)), time.time()
            ranks = begin()
            ranks.wait(lambda before=before: len(times(mine)) > before)  # type: ignore[misc]
            ranks.kill()
            if not loads(mine)[-1]["step"]:
                raise StuckError(f"{way} began from nothing, after saves at {sorted(saves)}")
            restarts.append(round(times(mine)[before][1] - at, 3))
    finally:
        ranks.kill()
    found = costs_of(ended, saves, TrackerDcp.DELTAS if way == "ModelDeltaTracker and DCP" else 0)
    return {**found, "plain_step_s": plain_s, "slower": round(found["step_s"] / plain_s, 4), "restart_s": restarts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=at_least(50), default=1_000_000, help="of the largest of 26 tables")
    parser.add_argument("--every", type=at_least(5), default=20, help="steps between saves")
    parser.add_argument("--saves", type=at_least(1), default=12, help="to be measured, of each way")
    parser.add_argument("--restarts", type=at_least(1), default=3)
    parser.add_argument("--ways", nargs="+", choices=list(WAYS), default=list(WAYS), metavar="WAY")
    parser.add_argument("--folder", type=Path, help="keep each way's costs there, and take those that are there")
    parser.add_argument("--out", type=Path, help="file the result as JSON, once all ways are measured")
    args = parse(parser, rows=500, every=5, saves=2, restarts=1)
    refuse_small_machine("proof", args, "a job, saved", memory=(2 if args.quick else 6) << 30, disk=8 << 30)
    kept = args.folder or Path(tempfile.mkdtemp(prefix="costs-"))
    kept.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for way in WAYS:
        path = kept / f"{way}.json"
        if way in args.ways and not path.exists():
            with tempfile.TemporaryDirectory(prefix="costs-") as folder:
                path.write_text(json.dumps(measure(way, Path(folder), args)))
        if path.exists():
            found[way] = json.loads(path.read_text())
            tell(f"{way}: {found[way]}")
    if args.folder is None:
        shutil.rmtree(kept)
    if missing := sorted(set(WAYS) - set(found)):
        print(f"not measured yet: {', '.join(missing)}")
        return
    facts = {"rows": args.rows, "steps between saves": args.every, "ways": found}
    file_facts("proof", "costs.py", args.out, facts)


if __name__ == "__main__":
    main()
