"""``make proof``: run all parts of the proof, and write docs/proof.md once more with what they found.

    python benchmarks/proof/page.py [--quick] [--to build/proof]

The parts file their results in ``--to``, which also keeps what they have done: the same command goes on after an end,
and takes no result of another commit. Without ``--quick`` that is some hours. A part that fails is named at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[1:1] = [str(ROOT / "benchmarks"), str(ROOT)]

import start  # noqa: E402, F401
from common import commit, run_script  # noqa: E402
from draw import main as draw  # noqa: E402
from page_tables import results  # noqa: E402
from pages import written  # noqa: E402

PARTS = {"": "run.py", "terabyte": "terabyte.py", "costs": "costs.py", "ettr": "ettr.py", "age": "../freshness/run.py"}
"""Variant of a result -> what makes it. ``ettr.py`` reads the costs."""
OPTIONS = {"age": ["--part", "age"]}
LONG = {"": ["--kills", "1000", "--peer-kills", "50"]}
"""Without ``--quick``; by itself the part has fewer kills."""
QUICK = {"age": ["--log", "file"]}
"""No broker within two minutes."""
PICTURE = r"\]\(\.\./benchmarks/proof/results/[^_)]*_[^_)]*{}\.png\)"
"""Link to a picture of the filed result."""
MORE = re.compile(r"\n[^\n]+\n\n<!-- figures: proof-kills \w+ -->.*?<!-- end -->\n", re.S)
"""Tables of other runs, each with the line above it: they are not made again."""
RESUMED = ("run.py", "costs.py")
"""They go on in a folder."""


def filed(to: Path, variant: str) -> Path:
    """Where a part files its result."""
    case = (ROOT / "benchmarks" / "proof" / PARTS[variant]).resolve().parent.name
    day = time.strftime("%Y-%m-%d", time.gmtime())
    return to / case / "results" / f"{day}_here{'_' * bool(variant)}{variant}.json"


def run(to: Path, variant: str, quick: bool, more: list[str]) -> bool:
    """Run a part unless its result for this commit is there. Returns whether it is there now."""
    script, out = PARTS[variant], filed(to, variant)
    out.parent.mkdir(parents=True, exist_ok=True)
    if out.exists() and json.loads(out.read_text())["machine"]["commit"] == commit():
        return True
    for old in out.parent.glob(f"*_here{'_' * bool(variant)}{variant}.json"):
        old.unlink()
    call = ["--out", str(out), *([] if quick else LONG.get(variant, ())), *more, *OPTIONS.get(variant, ())]
    call += ["--quick", *QUICK.get(variant, ())] if quick else []
    if script in RESUMED:
        call += ["--folder", str(to / f"{script.removesuffix('.py')}-{commit()}")]
    if variant == "ettr":
        call += ["--costs", str(filed(to, "costs"))]
    print(f"== {script}", flush=True)
    return run_script((ROOT / "benchmarks" / "proof" / script).resolve(), *call) == 0 and out.exists()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small sizes, two minutes: no figure means anything then")
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "proof", help="results, and the page")
    parser.add_argument("more", nargs="*", metavar="-- OPTION", help="given to run.py: -- --kills 100 --minutes 30")
    args = parser.parse_args()
    failed = [
        script
        for variant, script in PARTS.items()
        if not run(args.to, variant, args.quick, args.more if script == "run.py" else [])
    ]
    if failed:
        raise SystemExit(f"Error: not done: {', '.join(failed)}. Try: the same command again; it goes on")
    print(f"== {page_of(args.to, args.quick)}")


def page_of(to: Path, quick: bool) -> Path:
    """Write the page with the results in a folder, and draw its pictures."""
    results.BENCHMARKS = to
    results.newest.cache_clear()
    draw()
    page = to / "proof.md"
    page.write_text(MORE.sub("", (ROOT / "docs" / "proof.md").read_text()))
    text = written(page)
    for variant in ("", "ettr"):
        text = re.sub(PICTURE.format(variant and f"_{variant}"), f"]({_picture(to, variant)})", text)
    docs = os.path.relpath(ROOT / "docs", to)
    text = re.sub(r"\]\((?!proof/|freshness/|#)", f"]({docs}/", text)
    if quick:
        text = text.replace("\n\n", "\n\n**Made by `make proof` at small sizes: no figure means anything.**\n\n", 1)
    page.write_text(text)
    return page


def _picture(to: Path, variant: str) -> str:
    return os.path.relpath(results.newest("proof", variant).path.with_suffix(".png"), to)


if __name__ == "__main__":
    main()
