"""Tables of the page of proof: kills, a job that fails, a job of 1 TB, a month at an object store."""

from __future__ import annotations

import contextlib
import io
import json
import shlex
from functools import cache
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.extras.sizing.bills import kept_markers
from torchrec_stream_ckpt.extras.sizing.folds import MONTH_S
from torchrec_stream_ckpt.extras.sizing.inputs import Deployment, UnitCosts
from torchrec_stream_ckpt.extras.sizing.requests import Requests, put_requests
from torchrec_stream_ckpt.extras.sizing.touched import ZipfTouched

from .results import Table, code, newest, three

MONTH = (
    "plan --tables 8 --rows 242688000 --dim 128 --batch-size 65536 --zipf 1.05 --steps-per-second 10 --ranks 1024 "
    "--drain-every 10 --marker-every-s 30 --then-every 1d"
)
"""The job of 1 TB, of which Zipf ids change rows; its command stands on the page."""
_GB = 1e9


def lost(facts: dict[str, Any], way: str) -> dict[str, float]:
    """Steps and seconds that a way to save has lost, per kill of ranks.

    All that was lost counts. Kills of the materializer and of the broker are not among those that it is divided by:
    no step is lost by one of them alone, and the other ways have none.
    """
    row = facts["variants"][way]
    kills = max(sum(number for what, number in row["kills"].items() if "rank" in what), 1)
    seconds = row["seconds"] - facts["a step never killed, ms"] / 1e3 * row["steps"]
    return {"steps": row["steps trained again"] / kills, "seconds": seconds / kills}


def kills(page: Path, variant: str = "") -> Table:
    """One row a way to save, under kills."""
    result = newest("proof", variant)
    head = [result.said(page), "kills", "steps", "steps lost per kill of ranks", "seconds lost per kill of ranks"]
    found = [[*head, "losses that differ", "tensors that differ", "rows lost or stale"]]
    for name, row in result.facts["variants"].items():
        killed = ", ".join(f"{number} of {kind}" for kind, number in sorted(row["kills"].items()))
        found.append(
            [
                code(name),
                f"{sum(row['kills'].values())}: {killed}",
                f"{row['steps']:,}",
                *(f"{each:.1f}" for each in lost(result.facts, name).values()),
                f"{row['losses that differ']} of {row['losses compared']:,}",
                f"{row['tensors that differ']} of {row['tensors compared']}",
                f"{row['rows lost or stale']}",
            ]
        )
    return found


def costs(page: Path) -> Table:
    """What the simulation takes as measured, with what it assumes of a restart."""
    result = newest("proof", "ettr")
    days = sorted({each[:10] for each in result.facts["costs from"]})
    head = [
        f"{result.link(page, result.date)}, costs of {' and '.join(days)}",
        "step time, relative to no saves",
        "a save takes, ms",
        "complete after, ms",
    ]
    found = [[*head, "from a failure to the first step, s"]]
    for name, row in result.facts["costs"].items():
        cells = [f"{row['slower']:.3f}", *(three(1e3 * row[each]) for each in ("save_s", "counts_s"))]
        found.append([code(name), *cells, f"{row['restart_s']:.2f}"])
    return found


def measured_costs(page: Path) -> Table:
    """Costs of each way for one small job; a save of rows follows the slash, if a way has both kinds."""
    result = newest("proof", "costs")
    head = [result.said(page), "a step without saves, ms", "with them, ms", "a save takes, ms", "complete after, ms"]
    found = [[*head, "saves", "a new process until its first step, s"]]
    for name, row in result.facts["ways"].items():
        steps = [three(1e3 * row[each]) for each in ("plain_step_s", "step_s")]
        saves = [" / ".join(three(1e3 * each) for each in row[of].values()) for of in ("save_s", "counts_s")]
        restarts = ", ".join(f"{each:.2f}" for each in row["restart_s"])
        found.append([code(name), *steps, *saves, str(row["saves"]), restarts])
    return found


def ettr(page: Path) -> Table:
    """Effective training time, in per cent, and the interval between saves."""
    result = newest("proof", "ettr")
    points, spent = result.points(), result.facts["spent"]
    found = [[result.link(page, result.date), *(f"{point.name}: ETTR (saves every)" for point in points)]]
    for name in points[0].variants:
        cells = [
            f"{point.median(name):.1f}% ({three(each[name]['interval s'])} s)"
            for point, each in zip(points, spent.values(), strict=True)
        ]
        found.append([code(name), *cells])
    return found


def spent(page: Path) -> Table:
    """Where the rest of the time went: saves and slower steps, lost training, restarts."""
    result = newest("proof", "ettr")
    found = [["saving, lost, restarting, %", *(f"MTBF {name}" for name in result.facts["spent"])]]
    for name in result.points()[0].variants:
        each = [row[name] for row in result.facts["spent"].values()]
        cells = [", ".join(f"{row[kind]:.1f}" for kind in ("saving", "lost", "restarting")) for row in each]
        found.append([code(name), *cells])
    return found


def _asked(requests: dict[str, int]) -> str:
    return ", ".join(f"{kind} {number:,}" for kind, number in requests.items()) or "none"


def terabyte(page: Path) -> Table:
    """Memory, objects, requests and seconds of each part."""
    result = newest("proof", "terabyte")
    facts = result.facts
    found = [[result.said(page), "seconds", "CPU seconds", "memory, MB", "requests", "bytes read, MB", "of what"]]

    def row(name: str, part: dict[str, Any], what: str) -> None:
        cells = [f"{part[each]:,.1f}" for each in ("seconds", "cpu seconds", "memory, MB")]
        found.append([name, *cells, _asked(part["requests"]), f"{part['bytes read'] / 1e6:,.1f}", what])

    folded = facts["materializer"]
    of_spans = f"their spans of {folded['bytes of spans'] / _GB:.2f} GB"
    row("materializer", folded, f"{folded['markers']} markers of {facts['ranks']:,} ranks, and {of_spans}")
    for state in ("cold", "warm"):
        part = facts[f"restore, {state}"]
        where = f"{part['find']['pieces']} pieces, {part['find']['segments']:,} directories"
        row(f"find the newest marker, {state}", part["find"], where)
        picked = part["plan"]
        row(f"plan one rank, {state}", picked, f"{picked['chunks']:,} chunks of {picked['segments']} segments")
        row(
            f"restore one rank, {state}",
            part["restore"],
            f"{facts['bytes of a share'] / _GB:.2f} GB; rows that differ: {part['restore']['rows that differ']}",
        )
    return found


def terabyte_store(page: Path) -> Table:
    """What lies in the store, and what of it the disk has."""
    result = newest("proof", "terabyte")
    found = [[result.said(page), "objects", "bytes, GB", "on the disk, GB"]]
    for name in ("store of the first marker", "store"):
        row = result.facts[name]
        said = name if name != "store" else f"after {result.facts['materializer']['markers']} more markers"
        sizes = [f"{row[each] / _GB:,.2f}" for each in ("bytes", "bytes on the disk")]
        found.append([said, f"{row['objects']:,}", *sizes])
    return found


@cache
def planned(*more: str, command: str = MONTH) -> dict[str, Any]:
    """The plan of a command, with more options."""
    from torchrec_stream_ckpt.cli.main import app

    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        app([*shlex.split(command), *more, "--json"], standalone_mode=False)
    found: dict[str, Any] = json.loads(said.getvalue())
    return found


def month(page: Path) -> Table:
    """Ways to keep the same markers: requests, their price, and bytes."""
    found = [["a month", "PUT and LIST", "GET and HEAD", "requests", "held, TB"]]
    for name, (asked, held) in ways().items():
        counts = [f"{each / 1e6:,.1f} M" for each in (asked.writes, asked.reads)]
        found.append([name, *counts, f"${asked.cost(UnitCosts()):,.0f}", f"{held / 1e12:,.0f}"])
    return found


def ways() -> dict[str, tuple[Requests, float]]:
    """Requests of a month and bytes held at its end, by way: the store's, whole copies, and differentials.

    Differentials hold the rows that changed since the last whole copy; a new one is due once they outgrow it.
    """
    plain, alone = planned(), planned("--no-check-proofs")
    job, markers = plain["workload"], MONTH_S / plain["workload"]["marker_s"]
    kept = kept_markers(job["marker_s"], Deployment(**plain["deployment"]))
    tables = [(ZipfTouched(**each["touched"]), each["row_bytes"]) for each in job["tables"]]
    copy, dense, total, number = float(job["table_bytes"]), job["dense_bytes"], 0.0, 0
    while not number or (number < markers and total <= copy):
        step = max(1, number // 16)
        number += step
        middle_s = (number - (step - 1) / 2) * job["marker_s"]
        total += step * sum(touched.distinct(middle_s) * row_bytes for touched, row_bytes in tables)
    mean = total / number

    def puts(num_bytes: float) -> float:
        """A file of each rank, and one that marks them complete."""
        return float(job["ranks"] * put_requests(num_bytes / job["ranks"]) + 1)

    def of_store(found: dict[str, Any]) -> tuple[Requests, float]:
        shares = found["month"].values()
        counts = (sum(each["times"] * each["once"][kind] for each in shares) for kind in ("writes", "reads"))
        return Requests(*counts), dict(found["store_bytes"])[MONTH_S]

    of_dense = job["ranks"] + 1 if dense else 0
    differentials = markers * (puts(mean) + of_dense) + markers / number * puts(copy)
    return {
        "this project's store": of_store(plain),
        "the same, `--no-check-proofs`": of_store(alone),
        "a full copy at each marker": (Requests(markers * (puts(copy) + of_dense)), kept * (copy + dense)),
        "differentials": (Requests(differentials), kept * (mean + dense) + max(1.0, kept / number) * copy),
    }


def month_shares(page: Path) -> Table:
    """Work of this project's store: how often, and what one of it takes."""
    found = [["work", "times a month", "PUT and LIST of one", "GET and HEAD of one", "read, GB", "written, GB"]]
    for name, share in planned()["month"].items():
        once = share["once"]
        sizes = [f"{share[each] / _GB:,.1f}" for each in ("read_bytes", "written_bytes")]
        found.append([name, f"{share['times']:,.0f}", f"{once['writes']:,.1f}", f"{once['reads']:,.0f}", *sizes])
    return found
