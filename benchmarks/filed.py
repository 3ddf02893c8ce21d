"""Which filed results are older than the code that they measure.

    python benchmarks/filed.py [CASE ...]

A result names the commit that it was measured at (``machine.commit``). If it names none, or one that this repository
does not have (commits get other names when they are moved), the commit that filed it counts. ``commits`` is how many
later ones changed the case itself, what cases share, or a part of the package that it measures. A result with none is
as good as new; one with many may still be true, and nobody knows. A commit with ``+`` had changes beside it. A result
that is not filed yet, and names no commit of this repository, has ``?``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
_STEP = ("model", "capture", "format", "log", "ranks", "save", "checkpointer.py")
_MARKER = (*_STEP, "dense")
_RESTORE = ("restore", "find", "job", "ranks", "store", "format", "log", "checkpointer.py")
_FOLD = ("maintain", "store", "format", "log", "find")
MEASURES: dict[str, tuple[str, ...]] = {
    "age": ("find", "format", "log", "cli", "save", "restore"),
    "bucket": ("log/api.py", "log/worker.py", "log/publisher.py", "log/bucket", "log/control", "store", "save"),
    "dense": ("dense", "save", "checkpointer.py"),
    "encode": ("capture/staging.py", "format/frame.py", "format/ring.py", "format/rows.py"),
    "evolve": (*_RESTORE, "evolve"),
    "freshness": ("extras/follower", "read", "log", "format", "find", "capture", "save"),
    "growth": (*_FOLD, "cli", "restore", "proofs", "extras/reporting"),
    "head": (*_RESTORE, "maintain/head.py"),
    "hooks": ("model", "capture"),
    "ingest": _FOLD,
    "limits": (),
    "marker": _MARKER,
    "memory": _MARKER,
    "merge": _FOLD,
    "overhead": (*_MARKER,),
    "proof": (*_MARKER, *_RESTORE, *_FOLD),
    "recovery": (*_RESTORE, *_FOLD),
    "restore": _RESTORE,
    "scale": ("extras/sizing", *_MARKER, *_RESTORE, *_FOLD),
    "scaleout": (*_FOLD, "proofs", "extras/sizing"),
    "step_time": _MARKER,
    "stream": ("log", "format"),
    "takeover": (*_MARKER, *_RESTORE, "extras/follower"),
    "thesis": (*_MARKER, *_RESTORE, *_FOLD),
    "tiers": (*_RESTORE, "extras/tiers", "dense", "save"),
    "tracker": ("capture", "model"),
}
"""Case -> what of the package stands in its figures."""
_ALL = ("util/types.py", "util/layout.py")
"""What every part of the package is built on."""
_BEFORE = {
    "model": ("adapter", "proving.py"),
    "ranks": ("commit", "trainer"),
    "save": ("commit", "trainer"),
    "dense": ("commit",),
    "job": ("trainer",),
    "restore": ("trainer",),
    "find": ("route",),
    "log": ("control",),
    "maintain": ("materialize", "engine"),
    "maintain/head.py": ("materialize/head.py",),
    "util/types.py": ("types.py",),
    "util/layout.py": ("layout.py",),
} | {f"extras/{each}": (each,) for each in ("follower", "reporting", "sizing", "tiers")}
"""Where a part was before districts were made: commits up to then name it so."""
_SHARED = ("common", "start", "allocator", "at_hand", "brokers", "cache", "data", "device", "holes", "job")
"""Modules of this folder that cases are built of: jobs, clocks, caches. The others make pages and pictures."""
_BESIDE = {"merge": "recovery", "recovery": "merge"}
"""Cases that are built of parts of another one."""


class Filed(NamedTuple):
    """One result."""

    case: str
    name: str
    date: str
    commit: str
    """It was measured at, or filed by."""
    commits: int | str
    """Later ones that changed what it measures; ``?`` where its own is not known."""
    load: str
    """Average over the minute before it."""


def results(cases: list[str]) -> Iterator[Filed]:
    """All of these cases, oldest case by name first."""
    for path in sorted(ROOT.glob("benchmarks/*/results/*.json")):
        case = path.parts[-3]
        if cases and case not in cases:
            continue
        if case not in MEASURES:
            raise SystemExit(f"Error: MEASURES in {Path(__file__).name} does not name case {case}")
        found = read(path)
        machine = found["machine"] if isinstance(found.get("machine"), dict) else {}
        named = str(machine.get("commit") or "")
        commit = _commit_of(path, named.rstrip("+"))
        measured = [f"benchmarks/{each}/*.py" for each in (case, _BESIDE.get(case)) if each]
        measured += [f"benchmarks/{each}.py" for each in _SHARED]
        parts = (*MEASURES[case], *_ALL)
        measured += [f"torchrec_stream_ckpt/{each}" for part in parts for each in (part, *_BEFORE.get(part, ()))]
        since = _git("log", "--format=%h", f"{commit}..HEAD", "--", *measured).split() if commit else []
        load = machine.get("load_average", found.get("load", found.get("load_average_before")))
        shown = f"{load:.1f}" if isinstance(load, int | float) else "unknown"
        dirty = "+" * (named == f"{commit}+")
        yield Filed(case, path.stem, path.stem[:10], (commit or "?") + dirty, len(since) if commit else "?", shown)


def read(path: Path) -> dict[str, Any]:
    """One result.

    Raises:
        SystemExit: it cannot be read; the message says what.
    """
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise SystemExit(f"Error: {path}: {error}") from None
    if not isinstance(found, dict):
        raise SystemExit(f"Error: {path} is no result of a case")
    return found


def _commit_of(path: Path, measured_at: str) -> str:
    """A commit with the code of a result: ``measured_at`` if it is known here, or the one that filed it, if any."""
    if measured_at and _git("rev-parse", "--verify", "--quiet", f"{measured_at}^{{commit}}", missing=True):
        return measured_at
    return _git("log", "-1", "--format=%h", "--", str(path))


def _git(*arguments: str, missing: bool = False) -> str:
    """What git says; ``missing``: nothing if it does not know what it was asked for."""
    try:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=False)
    except OSError as error:
        raise SystemExit(f"Error: git cannot be run: {error.strerror}") from None
    if done.returncode and not missing:
        raise SystemExit(f"Error: git {' '.join(arguments)[:80]}: {done.stderr.strip()}")
    return done.stdout.strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help="of these folders alone")
    cases = parser.parse_args().cases
    if unknown := sorted(set(cases) - set(MEASURES)):
        parser.error(f"no case {', '.join(unknown)}: there are {', '.join(MEASURES)}")
    if _git("rev-parse", "--is-shallow-repository") == "true":
        raise SystemExit("Error: this clone has no history to count commits in. Try: git fetch --unshallow")
    table = Table("case", "result", "date", "commit", "later commits", "load", box=None)
    for each in results(cases):
        table.add_row(*(escape(str(cell)) for cell in each))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


if __name__ == "__main__":
    main()
