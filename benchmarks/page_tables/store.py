"""Any marker back: what layouts store, write and read."""

from __future__ import annotations

import re
import statistics
from pathlib import Path
from typing import Any

from .costs import judged
from .results import Result, Table, newest, three

LAYOUTS = {
    "naive": "naive, rows placed as ours are",
    "naive, index_copy_": "naive, rows placed by `index_copy_`",
    "store": "store, no bases",
    "store, by default": "store, by default (`--rebase 1 --compact span4`)",
    "store, rebase": "store, `--rebase 1 --compact none`",
    "torch.load": "`torch.load` of the newest",
    "torch.load + copy": "`torch.load` + copy into the tables",
    "torch.load, mmap + copy": "`torch.load(mmap=True)` + copy",
}


def _result() -> Result:
    return newest("recovery", "150-markers")


def _groups() -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = _result().found["workloads"]["kaggle"]["groups"]
    return found


def _name(scheme: str) -> str:
    return LAYOUTS.get(scheme, scheme.replace("store, span", "store, `span") + "`" * scheme.startswith("store, span"))


def any_marker(page: Path) -> Table:
    """Milliseconds, at markers 50 and 150."""
    head = [f"ms; {_result().said(page)}", "stored, of naive", "written, of naive"]
    found = [[*head, "delta warm, 50 / 150", "delta cold", "whole warm", "whole cold"]]
    for group, schemes in _groups().items():
        for scheme, row in schemes.items():
            cells = [_parts(row, schemes["naive"], each) for each in ("stored", "written")]
            for part in ("delta", "whole"):
                cells += [_times(row, which, f"{part}_ms") for which in ("warm", "cold")]
            found.append([("" if group == "one base" else f"{group}: ") + _name(scheme), *cells])
    return found


def _parts(row: dict[str, Any], naive: dict[str, Any], key: str) -> str:
    if not row[key] or not row[key][-1]:
        return ""
    return f"{row[key][-1] / naive[key][-1]:.2f}"


def _times(row: dict[str, Any], which: str, part: str) -> str:
    if row["unavailable"]:
        return f"not measured: {row['unavailable']}"
    if which == "cold" and row["no_cold"]:
        return f"not measured: {row['no_cold']}"
    found = [three(row[which][marker][part]) for marker in ("50", "150") if part in row[which].get(marker, {})]
    return " / ".join(found)


def as_fast(page: Path) -> Table:
    """Times naive's speed: median of the rounds' own ratios, worst round."""
    head = ["times as fast as naive: median (worst round)"]
    found = [[*head, "delta warm, 50 / 150", "delta cold", "whole warm", "whole cold"]]
    for group, schemes in _groups().items():
        for scheme, row in schemes.items():
            if scheme != "naive" and not scheme.startswith("torch.load"):
                cells = [
                    _speed(row, schemes["naive"], which, part)
                    for part in ("delta", "whole")
                    for which in ("warm", "cold")
                ]
                found.append([("" if group == "one base" else f"{group}: ") + _name(scheme), *cells])
    return found


def _speed(row: dict[str, Any], naive: dict[str, Any], which: str, part: str) -> str:
    said = []
    for marker in ("50", "150"):
        times, base = (each[which].get(marker, {}).get(f"{part}_ms_rounds") for each in (row, naive))
        if times and base and len(times) == len(base):
            found = [other / own for own, other in zip(times, base, strict=True)]
            said.append(f"{statistics.median(found):.2f} ({min(found):.2f})")
    return " / ".join(said) or "-"


def store_goals(page: Path) -> Table:
    """Of the store as it is by default; a goal that only its own group's ``torch.load`` lets it reach says so."""
    goals = _result().found["workloads"]["kaggle"]["goals"]
    head, *rows = judged(page, Result(_result().path, _result().found | {"goals": goals}))
    return [head, *(_against_the_faster(goal, row) for goal, row in zip(goals, rows, strict=True))]


def _against_the_faster(goal: dict[str, Any], row: list[str]) -> list[str]:
    """``torch.load`` is in both groups; of the same file it takes several times as long in one of them."""
    newest_of = re.fullmatch(r"newest marker, (\w+): (.*) / (.*)", goal["what"])
    if newest_of is None or not goal["met"]:
        return row
    which, own, other = newest_of.groups()
    mine, *theirs = (
        rows[name][which]["150"]["whole_ms"]
        for name in (own, other)
        for rows in _groups().values()
        if name in rows and "150" in rows[name][which]
    )
    share, most = mine / min(theirs), float(goal["wanted"].split()[1])
    if share <= most:
        return row
    what, wanted, found, verdict = row
    found += f"; of the {three(min(theirs))} ms in the other group {three(share)} x"
    return [what, wanted, found, f"{verdict}; **missed**"]


def first_loads(page: Path) -> Table:
    """The newest marker as the first thing that a fresh process does."""
    found = [["the newest marker in a fresh process, ms", "warm (range)", "cold (range)"]]
    for group, states in _result().found["workloads"]["kaggle"]["first_loads_ms"].items():
        for scheme, warm in states["warm"].items():
            cells = [_spread(warm), _spread(states["cold"].get(scheme, []), states["no cold"].get(scheme, ""))]
            found.append([("" if group == "one base" else f"{group}: ") + _name(scheme), *cells])
    return found


def _spread(rounds: list[float], why: str = "") -> str:
    if not rounds:
        return f"not measured: {why}" if why else "not measured"
    return f"{three(statistics.median(rounds))} ({three(min(rounds))}-{three(max(rounds))})"


COUNTED = {
    "naive increments": "naive",
    "differential chain": "differential",
    "Check-N-Run": "Check-N-Run",
    "IncrCP, R = 0.02": "IncrCP",
    "IncrCP, a base every 100 chunks": "IncrCP, base every 100",
    "store without bases": "store",
    "store with `span4`": "store, span4",
    "store with `span16`": "store, span16",
    "store with bases (`--rebase 1`)": "store, rebase",
}


def counted(page: Path) -> Table:
    """By rows alone, of naive's."""
    result = newest("recovery", "kaggle")
    layouts = result.found["workloads"]["kaggle"]["layouts"]
    found = [
        [
            f"counted, {result.link(page, result.date)}",
            "written",
            "stored",
            "read back to write",
            "rows after the base, 50 / 150",
        ]
    ]
    for said, name in COUNTED.items():
        row = layouts[name]
        cells = [f"{row[f'{each}_of_naive']:.2f}" for each in ("written", "stored", "read_back")]
        found.append([said, *cells, " / ".join(f"{row['restored_of_naive'][marker]:.2f}" for marker in ("50", "150"))])
    return found
