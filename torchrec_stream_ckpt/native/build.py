"""Compile the kernel next to its source, if a C compiler is found.

``setup.py`` and ``make`` run this file by its path: it needs Python alone, and imports nothing of the package.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("kernel.c")
LIBRARY = SOURCE.with_name("libkernel.so")
FLAGS = ("-O3", "-std=c11", "-Wall", "-Wextra", "-shared", "-fPIC")
WITHOUT = "without the native kernel torch, numpy and crc32c do its work: the same bytes, up to twice the CPU time"


def build(target: Path = LIBRARY, flags: tuple[str, ...] = FLAGS) -> str:
    """Compile the kernel into ``target``. Returns the reason if that failed, otherwise an empty string."""
    compiler = shlex.split(os.environ.get("CC", "")) or [shutil.which("cc") or shutil.which("gcc") or "cc"]
    # A process that has loaded the old file keeps it: the new one takes its name only when it is whole.
    with tempfile.TemporaryDirectory(dir=target.parent) as folder:
        made = Path(folder) / target.name
        try:
            done = subprocess.run(
                [*compiler, *flags, "-o", str(made), str(SOURCE)], capture_output=True, text=True, check=False
            )
        except OSError as error:
            return f"no C compiler: {compiler[0]}: {error.strerror}"
        if done.returncode:
            return f"{compiler[0]} failed: {done.stderr.strip()[-2000:]}"
        made.replace(target)
    return ""


def is_current() -> bool:
    """Return whether the library is newer than its source and than the way in which it is compiled."""
    times = [path.stat().st_mtime for path in (SOURCE, Path(__file__))]
    return LIBRARY.exists() and LIBRARY.stat().st_mtime >= max(times)


def main() -> None:
    """Compile the kernel if it is missing or older than its source. A failure is reported, and is not an error."""
    if is_current():
        return
    reason = build()
    print(f"{reason}; {WITHOUT}" if reason else f"native kernel: {LIBRARY}", file=sys.stderr)


if __name__ == "__main__":
    main()
