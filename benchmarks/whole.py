"""Run benchmarks one after the other, and go on where the last run was stopped: ``make bench``.

    python benchmarks/whole.py SCRIPT ... [-- OPTION ...]

Each of several files its result in ``build/bench``, with its output beside it. One that has ended well is not run again
for the same commit and options; with changes beside the commit, all are run. One that fails is named at the end, and
the others run.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(1, str(Path(__file__).resolve().parent))

from common import commit

ROOT = Path(__file__).resolve().parents[1]
KEPT = ROOT / "build" / "bench"


def run_all(scripts: Sequence[str], options: Sequence[str], kept: Path = KEPT) -> list[str]:
    """Run those that are not done yet.

    Args:
        scripts: Paths below the repository.
        options: Given to each.
        kept: Holds results, and what is done.

    Returns:
        Those that failed.
    """
    kept.mkdir(parents=True, exist_ok=True)
    failed, begin, stamp = [], time.monotonic(), f"{commit()} {shlex.join(options)}"
    for script in scripts:
        name = "_".join(Path(script).with_suffix("").parts[-2:])
        done, out = kept / f"{name}.done", kept / f"{name}.json"
        if len(scripts) > 1 and done.exists() and done.read_text() == stamp:
            print(f"== {script}: done at this commit", flush=True)
            continue
        done.unlink(missing_ok=True)
        print(f"== {script}", flush=True)
        own = [] if len(scripts) == 1 or "--out" in options else ["--out", str(out)]
        if subprocess.run([sys.executable, str(ROOT / script), *options, *own], check=False).returncode:
            failed.append(script)
        elif not commit().endswith("+"):
            done.write_text(stamp)
        print(f"== {script}: minutes so far: {(time.monotonic() - begin) / 60:.0f}", flush=True)
    return failed


def main(words: Sequence[str]) -> None:
    at = words.index("--") if "--" in words else len(words)
    scripts, options = words[:at], words[at + 1 :]
    if missing := [script for script in scripts if not (ROOT / script).is_file()]:
        raise SystemExit(f"make bench: no {', '.join(missing)}")
    if failed := run_all(scripts, options):
        raise SystemExit(f"make bench: failed: {', '.join(failed)}. The same command runs these again, and no other")


if __name__ == "__main__":
    main(sys.argv[1:])
