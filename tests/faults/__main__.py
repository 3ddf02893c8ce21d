"""``make chaos``: every scenario in its long form, and the table of what became of it."""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from rich.console import Console

from tests.faults import (
    brokers,
    buckets,
    disks,
    frozen,
    kills,
    leaders,
    materializer,
    partitions,
    power,
    surgery,
    survivors,
    topics,
    workers,
)
from tests.faults.board import Board
from tests.faults.subject import Form
from tests.s3.server import S3Server
from torchrec_stream_ckpt.extras.broker.kraft import Broker
from torchrec_stream_ckpt.extras.broker.runtime import KAFKA

SCENARIOS: tuple[Callable[[Form], None], ...] = (
    kills.kills_on_files,
    kills.kills_on_kafka,
    kills.kills_on_bucket,
    kills.kills_while_drains_are_slow,
    survivors.one_rank_dies,
    survivors.one_rank_freezes,
    frozen.ranks_freeze_in_markers,
    frozen.ranks_freeze_in_restores,
    frozen.ranks_freeze_in_closes,
    frozen.broker_freezes_in_commits,
    survivors.zombies_on_files,
    survivors.zombies_on_kafka,
    survivors.zombies_on_bucket,
    survivors.zombie_with_the_lock,
    survivors.clock_jumps,
    brokers.broker_and_network_fail,
    brokers.network_slower_than_training,
    brokers.catch_up,
    disks.log_full,
    disks.store_full,
    disks.broker_disk_full,
    disks.errors_of_a_disk,
    disks.short_writes,
    materializer.kills_of_the_materializer,
    workers.kills_of_workers,
    surgery.frames_on_files,
    surgery.frames_on_kafka,
    surgery.files_tampered_with,
    topics.topics_tampered_with,
    buckets.late_puts,
    buckets.two_trainers_at_one_instant,
    buckets.objects_tampered_with,
    buckets.kills_in_one_bucket,
    power.power_loss,
    partitions.of_brokers,
    partitions.of_trainers,
    partitions.of_leaders_and_followers,
    leaders.of_followers,
)
LIBRARIES = ("torch", "torchrec", "fbgemm-gpu-cpu", "confluent-kafka")


def torment(
    chosen: list[Callable[[Form], None]], board: Board, seed: int, full: bool, console: Console, into: Path | None
) -> None:
    """Run scenarios one after the other; one that breaks is a wrong row, and the others still run.

    What is known is written ``into`` a file after each of them: a run that is ended has not run in vain.
    """
    with tempfile.TemporaryDirectory(prefix="chaos-") as scratch:
        broker = Broker(Path(scratch) / "broker")
        address = broker.start(die_with=os.getpid()).bootstrap
        assert address is not None
        server = S3Server(Path(scratch))
        server.start()
        try:
            for scenario in chosen:
                name, begin = (
                    f"{scenario.__module__}.{scenario.__name__}".removeprefix("tests.faults."),
                    time.monotonic(),
                )
                board.rows.pop(name, None)  # it broke in another part
                directory = Path(scratch) / name
                directory.mkdir()
                console.print(f"{name} ...", end=" ")
                try:
                    scenario(Form(directory, board, full, seed, address, server=server))
                except Exception as error:
                    board.row(name).err(f"the scenario broke: {type(error).__name__}: {error}")
                    traceback.print_exc()
                shutil.rmtree(directory, ignore_errors=True)
                console.print(f"{time.monotonic() - begin:.0f} s")
                if into:
                    board.save(into)
        finally:
            server.kill()
            broker.stop()


def about(seeds: list[int]) -> dict[str, str]:
    """What ran, where and when."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = ", ".join(f"{name} {version(name)}" for name in LIBRARIES)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    commit = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit or "not in a git repository",
        "machine": f"{os.cpu_count()} cores, {memory:.0f} GiB of memory, Linux {platform.release().split('-')[0]}",
        "versions": f"Python {platform.python_version()}, {versions}, {KAFKA}",
        "seeds": ", ".join(map(str, seeds)),
    }


def report(board: Board) -> str:
    """The page of one run."""
    total = board.total()
    run = "\n".join(f"| {name} | {value} |" for name, value in board.about.items())
    return f"""# Chaos

The output of `make chaos`: {total.fired} faults fired, and {total.compared} markers were compared: {total.lost} lost,
{total.wrong} wrong. Faults that differ only in the fail point or the log share a row; [chaos.json](chaos.json) has
each, with its whole remark.

Real jobs of one to three gloo ranks train with DCP for the dense state, on the file log and on a real broker. Each
restored state is compared, bit for bit, with a copy that the job saved before the step. Hosts that are cut off, or lose
power, are network namespaces on one machine, with three brokers.

- *fired*: injected faults with evidence that they happened. A row with less than it injected shows both, and fails.
- *compared*: markers that were restored after the fault and equal the copy; for the power loss, markers that were read
  whole from a rebuilt disk.
- *refused*: markers whose bytes the fault itself destroyed, and whose restore was refused by name.
- *lost*: committed markers that could not be restored. *wrong*: restores that differ, markers that should not exist,
  ranks that did not end as they must. One of either fails the run, and gets a column.
- *seen*, in remarks: states that readers of a follower found, all of them right, and the greatest age of one.

{board.markdown()}

## Conditions of the run

| | |
|---|---|
{run}
| time | {board.took_s / 60:.0f} minutes |
"""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--short", action="store_true", help="the form that the tests run")
    parser.add_argument(
        "--minutes", type=float, default=0.0, help="begin again, with another seed, until this many have passed"
    )
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument(
        "--only", default="", help="scenarios whose name contains this, or one of these: A,B; with --onto, - for none"
    )
    parser.add_argument("--onto", type=Path, nargs="+", default=[], help="rows of other parts, as --json wrote them")
    parser.add_argument("--json", type=Path, help="write the rows there")
    parser.add_argument("--conditions", default="", help="what else ran meanwhile, for the page")
    parser.add_argument("--report", type=Path, help="write a page there, as docs/chaos.md is")
    arguments = parser.parse_args()
    chosen = [
        each
        for each in SCENARIOS
        if any(part in f"{each.__module__}.{each.__name__}" for part in arguments.only.split(","))
    ]
    if not chosen and not arguments.onto:
        parser.error(f"no scenario has '{arguments.only}' in its name")
    console, board, seeds, begin = Console(width=160), Board(), [], time.monotonic()
    for part in arguments.onto:
        board.load(part)
    while chosen and (not seeds or time.monotonic() - begin < 60 * arguments.minutes):
        seeds.append(arguments.seed + len(seeds))
        torment(chosen, board, seeds[-1], not arguments.short, console, arguments.json)
    if seeds:
        board.took_s += time.monotonic() - begin
        board.ran(about(seeds))
    if arguments.conditions:
        board.ran({"conditions": arguments.conditions})
    console.print(board.table())
    if arguments.json:
        board.save(arguments.json)
    if arguments.report:
        arguments.report.write_text(report(board))
    try:
        board.check()
    except AssertionError as failure:
        sys.exit(f"chaos: {failure}")
    total = board.total()
    console.print(f"chaos: {total.fired} faults fired, {total.compared} markers compared, 0 lost, 0 wrong")


if __name__ == "__main__":
    main()
