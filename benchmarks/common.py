"""What the cases share: the machine, variants that take turns, goals, and how results are filed.

A case measures *variants* of one task in rounds: in each round every variant runs once, in random order, so that what
disturbs the machine disturbs all of them. ``ratio`` is baseline / variant in the same round: how many times less it
took. A variant that cannot run says why, and has no figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import pickle
import platform
import random
import runpy
import shlex
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import start
import numpy as np
import torch
import torch.multiprocessing as mp
from allocator import SETTING
from device import finish_queued

from torchrec_stream_ckpt.flags import whole as at_least
from torchrec_stream_ckpt.native.kernel import describe

Times = dict[str, list[float]]
Taken = tuple[float, float]
"""Seconds, and CPU seconds."""
_IMPORTED = ["torchrec_stream_ckpt", "torchrec.distributed.model_parallel", "torch.distributed.checkpoint"]


class UnavailableError(Exception):
    """Something cannot be measured here: a peer is not installed, memory is short, there is no broker."""


def machine() -> dict[str, Any]:
    """Of this run, for the filed result."""
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return {
        "commit": commit(),
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "memory": memory.split(maxsplit=1)[1],
        "kernel": platform.release(),
        "huge_pages": huge.read_text().strip() if huge.exists() else "",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "threads": torch.get_num_threads(),
        "load_average": start.LOAD,
        "allocator": SETTING,
        "native_kernel": describe(),
        **({"gpu": torch.cuda.get_device_name(0)} if torch.cuda.is_available() else {}),
    }


def busy_cores(seconds: float) -> float:
    """How many cores other processes keep busy, or the host takes away, while this one sleeps for ``seconds``."""
    begin, busy_s = time.monotonic(), all_cores_s()
    time.sleep(seconds)
    return (all_cores_s() - busy_s) / (time.monotonic() - begin)


def all_cores_s() -> float:
    """Processor seconds of all processes since the machine was started."""
    return _busy_ticks(Path("/proc/stat").read_text()) / os.sysconf("SC_CLK_TCK")


def _busy_ticks(stat: str) -> int:
    """Of all cores since the machine was started: user, nice, system, interrupts, taken by the host."""
    user, nice, system, _idle, _waiting, hard, soft, steal, *_guests = map(int, stat.split("\n", 1)[0].split()[1:])
    return user + nice + system + hard + soft + steal


def commit() -> str:
    """Of the code that is measured; with a plus sign if it is not quite that one, empty outside of a checkout."""
    git = ["git", "-C", str(Path(__file__).resolve().parents[1])]
    try:
        head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return ""
    return head.stdout.strip() + "+" * bool(changed.stdout)


def check_memory(num_bytes: int, what: str) -> None:
    """Rather no figures than those of a machine that swaps."""
    line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemAvailable" in line)
    free = int(line.split()[1]) * 1024
    if free < num_bytes:
        raise UnavailableError(f"{what} needs {num_bytes / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")


def check_disk(num_bytes: int, what: str, folder: Path | None = None) -> None:
    """The same of the disk of ``folder``, or of ``BENCH_DIR``."""
    free = shutil.disk_usage(folder or os.environ.get("BENCH_DIR") or tempfile.gettempdir()).free
    if free < num_bytes:
        needs = f"{what} needs {num_bytes / 1e9:.1f} GB of disk, {free / 1e9:.1f} GB are free"
        raise UnavailableError(needs if folder else f"{needs}: BENCH_DIR names a folder on another one")


def refuse_small_machine(
    case: str, args: argparse.Namespace, what: str, *, memory: int = 0, disk: int = 0, folder: Path | None = None
) -> None:
    """Before a case starts: end it where it has no room. Its result then says why, and the next case can run."""
    try:
        check_memory(memory, what)
        check_disk(disk, what, folder)
    except UnavailableError as error:
        unmeasured(case, args, str(error))
        raise SystemExit(0) from None


@dataclass(frozen=True)
class Room:
    """What one row of a result needs free before it starts, in bytes."""

    what: str
    memory: int = 0
    """All of it, what lies in ``/dev/shm`` included."""
    disk: int = 0
    """Of ``BENCH_DIR``."""
    shared: int = 0
    """Of ``/dev/shm``."""

    def check(self) -> None:
        """Compare it with what is free.

        Raises:
            UnavailableError: there is less; says what is needed and what is free.
        """
        check_memory(self.memory, self.what)
        check_disk(self.disk, self.what)
        if self.shared:
            check_disk(self.shared, f"{self.what}, in /dev/shm", Path("/dev/shm"))


def with_room(report: Report, rows: Mapping[str, Room]) -> list[str]:
    """Before anything starts: the rows that the machine has room for. The result says of the others why not."""
    found = []
    for row, room in rows.items():
        try:
            room.check()
            found.append(row)
        except UnavailableError as error:
            report.leave_out(row, str(error))
    return found


def unmeasured(case: str, args: argparse.Namespace, why: str) -> None:
    """File and print a result that has no figure, and the reason."""
    found = {"case": case, "date": time.strftime("%Y-%m-%d"), "command": command_of(case), "machine": machine()}
    print(f"{case}: not measured: {why}")
    if args.out is not None:
        out = args.out if args.out.suffix == ".json" else args.out.with_name(f"{args.out.name}.json")
        out.write_text(json.dumps(found | {"not measured": why}, indent=1) + "\n")


def command_of(case: str, script: str = "run.py") -> str:
    """As it was called, without where results go."""
    words, skip = [], False
    for word in sys.argv[1:]:
        if word != "--out" and not word.startswith("--out=") and not skip:
            words.append(word)
        skip = word == "--out"
    return f"python benchmarks/{case}/{script} {shlex.join(words)}".rstrip()


def file_facts(case: str, script: str, out: Path | None, facts: dict[str, Any], **more: Any) -> None:
    """File a result that consists of facts.

    Args:
        case: Folder of the script.
        script: Its name.
        out: File of the result; None files nothing.
        facts: The facts.
        more: Other parts of the result, such as ``points``.
    """
    found = {"case": case, "command": command_of(case, script), "date": time.strftime("%Y-%m-%d", time.gmtime())}
    if out is not None:
        out.write_text(json.dumps(found | {"machine": machine(), "facts": facts} | more, indent=1) + "\n")


@dataclass
class Measured:
    """Seconds (or whatever the case measures) of each round, by variant, and why others have none."""

    times: Times = field(default_factory=dict)
    unavailable: dict[str, str] = field(default_factory=dict)

    def split(self, ending: str) -> tuple[Measured, Measured]:
        """The variants whose name does not end so, and those whose name does, under the rest of the name."""
        plain, ended = Measured(), Measured()
        for kind in ("times", "unavailable"):
            for name, value in getattr(self, kind).items():
                part = ended if name.endswith(ending) else plain
                getattr(part, kind)[name.removesuffix(ending)] = value
        return plain, ended


def take_turns(variants: Mapping[str, Callable[[], float]], rounds: int, warm_up: int = 1) -> Measured:
    """Run each variant once a round, in random order; the first ``warm_up`` rounds do not count.

    Among ranks, all of them come to the same order.
    """
    found = Measured({name: [] for name in variants})
    order = random.Random(0)
    for number in range(-warm_up, rounds):
        names = [name for name in variants if name not in found.unavailable]
        order.shuffle(names)
        for name in names:
            try:
                taken = variants[name]()
            except UnavailableError as error:
                found.unavailable[name] = str(error)
                del found.times[name]
                continue
            if number >= 0:
                found.times[name].append(taken)
        tell(f"round {number + 1} of {rounds}")
    return found


def in_turns(variants: Mapping[str, Callable[[], Taken]], rounds: int) -> tuple[Measured, Measured]:
    """Take turns, and return the seconds of the clock and the CPU seconds of the same runs."""
    spent: Times = {name: [] for name in variants}

    def noted(name: str, run: Callable[[], Taken]) -> Callable[[], float]:
        def then() -> float:
            taken, cpu = run()
            spent[name].append(cpu)
            return taken

        return then

    found = take_turns({name: noted(name, run) for name, run in variants.items()}, rounds)
    return found, Measured({name: spent[name][-rounds:] for name in found.times}, found.unavailable)


def ratios(base: Sequence[float], own: Sequence[float]) -> list[float]:
    """baseline / own, round by round."""
    return [theirs / mine for theirs, mine in zip(base, own, strict=True)]


@dataclass
class Goal:
    """What was to be reached, and what was."""

    what: str
    wanted: str
    found: str = ""
    """Empty: not measured."""
    met: bool | None = None

    @classmethod
    def at_least(cls, what: str, least: float, found: float | None, unit: str = "x") -> Goal:
        """``found`` is None where something could not run."""
        if found is None:
            return cls(what, f">= {least:g} {unit}")
        return cls(what, f">= {least:g} {unit}", f"{found:.3g} {unit}", found >= least)

    @classmethod
    def at_most(cls, what: str, most: float, found: float | None, unit: str) -> Goal:
        if found is None:
            return cls(what, f"<= {most:g} {unit}")
        return cls(what, f"<= {most:g} {unit}", f"{found:.3g} {unit}", found <= most)


@dataclass
class Report:
    """One run of a case."""

    case: str
    args: argparse.Namespace
    machine: dict[str, Any] = field(default_factory=machine)
    facts: dict[str, Any] = field(default_factory=dict)
    """Sizes and whatever else belongs to the figures."""
    points: dict[str, dict[str, Any]] = field(default_factory=dict)
    goals: list[Goal] = field(default_factory=list)
    script: str = "run.py"

    def add(self, point: str, measured: Measured, base: str, *, unit: str = "ms", scale: float = 1e3) -> None:
        """One point: all its variants against ``base``.

        Args:
            point: Its name.
            measured: In seconds, or in whatever ``scale`` makes the unit of.
            base: The baseline.
            unit: Of the figures.
            scale: What a measured value is multiplied by.
        """
        rows: dict[str, Any] = {name: {"unavailable": why} for name, why in measured.unavailable.items()}
        for name, own in measured.times.items():
            rows[name] = {
                "median": _rounded(scale * statistics.median(own)),
                "min": _rounded(scale * min(own)),
                "max": _rounded(scale * max(own)),
                "rounds": [_rounded(scale * each) for each in own],
            }
            if base in measured.times:
                found = ratios(measured.times[base], own)
                rows[name]["ratio"] = _rounded(statistics.median(found))
                rows[name]["ratio_range"] = [_rounded(min(found)), _rounded(max(found))]
        self.points[point] = {"unit": unit, "baseline": base, "variants": rows}

    def leave_out(self, row: str, why: str) -> None:
        """File a row that is not measured."""
        self.facts[f"{row} is not measured"] = why
        tell(f"{row} is not measured: {why}")

    def median(self, point: str, variant: str) -> float | None:
        found: float | None = self.points.get(point, {}).get("variants", {}).get(variant, {}).get("median")
        return found

    def ratio(self, point: str, variant: str) -> float | None:
        """Median over rounds of baseline / variant."""
        found: float | None = self.points.get(point, {}).get("variants", {}).get(variant, {}).get("ratio")
        return found

    def paired(self, point: str, base: str, variant: str) -> float | None:
        """The same against another variant than the point's baseline."""
        rows = self.points.get(point, {}).get("variants", {})
        if any("rounds" not in rows.get(name, {}) for name in (base, variant)):
            return None
        return statistics.median(ratios(rows[base]["rounds"], rows[variant]["rounds"]))

    def finish(self) -> None:
        """Print, and file where ``--out`` says."""
        print("\n".join(self.lines()))
        if self.args.out is not None:
            self.args.out.write_text(json.dumps(self.to_json(), indent=1) + "\n")

    @property
    def command(self) -> str:
        return command_of(self.case, self.script)

    def to_json(self) -> dict[str, Any]:
        return {
            "case": self.case,
            "date": time.strftime("%Y-%m-%d"),
            "command": self.command,
            "machine": self.machine,
            "facts": self.facts,
            "points": self.points,
            "goals": [asdict(goal) for goal in self.goals],
        }

    def lines(self) -> Iterator[str]:
        yield self.command
        yield str(self.machine)
        for name, value in self.facts.items():
            yield f"{name}: {value}"
        for point, found in self.points.items():
            yield f"\n{point}: {found['unit']}; times as fast as {found['baseline']}, median of rounds"
            yield f"  {'variant':36}{'median':>11}{'min':>11}{'max':>11}{'ratio':>9}  range"
            for name, row in found["variants"].items():
                yield f"  {name:36}{_cells(row)}"
        if self.goals:
            yield ""
        for goal in self.goals:
            verdict = {True: "reached", False: "MISSED", None: "not measured"}[goal.met]
            yield f"{verdict:13}{goal.what}: {goal.found or '-'} (goal {goal.wanted})"


def _cells(row: Mapping[str, Any]) -> str:
    if "unavailable" in row:
        return f"  not measured: {row['unavailable']}"
    text = f"{row['median']:>11g}{row['min']:>11g}{row['max']:>11g}"
    return text + (f"{row['ratio']:>9g}  {row['ratio_range'][0]:g}-{row['ratio_range'][1]:g}" if "ratio" in row else "")


def _rounded(value: float) -> float:
    """To four digits."""
    return float(f"{value:.4g}")


def arguments(doc: str | None, *, rounds: int = 7) -> argparse.ArgumentParser:
    """What every case takes."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=at_least(1), default=rounds)
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    return parser


def parse(parser: argparse.ArgumentParser, **quick: Any) -> argparse.Namespace:
    """The arguments of a case, with ``--quick``: sizes that run to the end in seconds, where no other is given.

    Every case has it, so that a clone can be tried (``make bench-quick``).
    """
    parser.add_argument("--quick", action="store_true", help="small sizes, seconds: no figure means anything then")
    args = parser.parse_args()
    if args.quick:
        parser.set_defaults(**quick)
        args = parser.parse_args()
        os.environ["BENCH_START"] = "forkserver"
    return args


def fresh_processes() -> Any:
    """Where processes come from that have allocated nothing: fork and exec.

    With ``--quick`` they are forks of a server that has imported all of it, which takes no seconds.
    """
    context = multiprocessing.get_context(os.environ.get("BENCH_START", "spawn"))
    if context.get_start_method() == "forkserver":
        context.set_forkserver_preload(_IMPORTED)
    return context


def start_ranks(function: Callable[..., Any], world: int, *args: Any) -> Any:
    """Run ``function(rank, *args)`` on new processes. Returns what rank 0 returns, of any size, once all have ended."""
    how = fresh_processes().get_start_method()
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        result = Path(folder) / "result"  # a pipe that nobody reads before the end holds 64 KiB
        mp.start_processes(_rank, (dict(os.environ), result, function, *args), nprocs=world, start_method=how)
        return pickle.loads(result.read_bytes())


def _rank(rank: int, environment: dict[str, str], result: Path, function: Callable[..., Any], *args: Any) -> None:
    os.environ |= environment
    found = function(rank, *args)
    if rank == 0:
        result.write_bytes(pickle.dumps(found))


def run_script(script: Path, *arguments: str) -> int:
    """The exit status of another script in a process of its own, forked where :func:`fresh_processes` are."""
    if os.environ.get("BENCH_START") != "forkserver":
        return subprocess.run([sys.executable, str(script), *arguments], check=False).returncode
    process = fresh_processes().Process(target=_be, args=(script, arguments))
    process.start()
    process.join()
    return int(process.exitcode)


def _be(script: Path, arguments: Sequence[str]) -> None:
    sys.argv = [str(script), *arguments]
    sys.path.insert(0, str(script.parent))
    runpy.run_path(str(script), run_name="__main__")


@contextlib.contextmanager
def scratch(case: str) -> Iterator[Path]:
    """A folder on the disk to be measured (``BENCH_DIR``); removed again."""
    with tempfile.TemporaryDirectory(prefix=f"{case}-", dir=os.environ.get("BENCH_DIR")) as folder:
        yield Path(folder)


def synced(path: Path) -> None:
    """Have the disk hold what was written to ``path``."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


WITH_FSYNC, WITHOUT_FSYNC = "with", "without"
UNSYNCED, DURABLE = ", without fsync", ", durable"
"""How a point, or a variant of one, ends that has nobody's fsync in its clock, and one that has everybody's."""


def add_fsync(parser: argparse.ArgumentParser) -> None:
    """For cases that compare writers: no variant's clock stops before the disk has it, or no variant waits for that."""
    modes = (WITH_FSYNC, WITHOUT_FSYNC)
    said = "whether every variant's clock goes on until the disk has it, or none's (default: both are measured)"
    parser.add_argument("--fsync", nargs="+", choices=modes, default=list(modes), help=said)


@contextlib.contextmanager
def without_fsync() -> Iterator[None]:
    """In this process nothing waits for the disk, whose code it may be."""
    kept = os.fsync, os.fdatasync
    os.fsync = os.fdatasync = lambda _: None
    try:
        yield
    finally:
        os.fsync, os.fdatasync = kept


def timed(action: Callable[[], object]) -> float:
    """Seconds, of a GPU's work too."""
    finish_queued()
    begin = time.perf_counter()
    action()
    finish_queued()
    return time.perf_counter() - begin


def timed_cpu(action: Callable[[], object]) -> Taken:
    """Seconds of the clock, and CPU seconds of all threads of this process meanwhile."""
    begin = time.process_time()
    taken = timed(action)
    return taken, time.process_time() - begin


def tell(text: str) -> None:
    """To whoever waits; rank 0 only."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{time.strftime('%H:%M:%S')} {text} (load {os.getloadavg()[0]:.2f})", file=sys.stderr, flush=True)
