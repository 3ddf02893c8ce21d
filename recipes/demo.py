"""Train DLRM, kill it, restore it elsewhere, and prove that nothing was lost.

    python recipes/demo.py [--kafka | --bucket s3://BUCKET/PREFIX]

Act 1 trains on 2 ranks and streams. At a random moment all ranks are killed with SIGKILL. Act 2 restores the newest
committed marker on 3 ranks under another sharding plan, and continues training.

The check does not use the stream: at every step of act 1 the whole job is gathered by plain TorchRec and torch
(``proof.py``) and saved separately. Right after the restore it is gathered again, and compared bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from torchrec_stream_ckpt.recipes.proof import StepEvent, compare, gather, train
from torchrec_stream_ckpt.script import free_port

ROWS = [9000, 6000, 4000, 3000, 2500, 2000, 1500, 1200, 800]
MARKER_EVERY = 10
MARKERS_WANTED = 3
STEPS_AFTER_RESTORE = 20
STEPS_KEPT = 60  # truths that are kept in addition to those of the steps at which markers are cut
TIMEOUT_S = 180
JOB_FLAGS = [
    *("--learning_rate", "0.05"),
    *("--num_embeddings_per_feature", ",".join(map(str, ROWS))),
    *("--embedding_dim", "32"),
    *("--ids_per_lookup", "4"),
    *("--batch_size", "240"),
    *("--dense_arch_layer_sizes", "64,32"),
    *("--over_arch_layer_sizes", "64,1"),
    *("--marker_every", str(MARKER_EVERY)),
    *("--epochs", "1", "--limit_train_batches", "1000000"),
]

console = Console(highlight=False, soft_wrap=True)


def say(text: str) -> None:
    console.print(f"[bold cyan]demo[/] {text}")


class DemoError(Exception):
    """The demo cannot continue."""


# ------------------------------------------------------------------------------------------- the two sharding plans


def plan_of_act_1() -> dict[str, Any]:
    """Return a plan for 2 ranks: table-wise, row-wise and column-wise in turn."""
    kinds = [{"table_wise": 0}, "row_wise", {"column_wise": [0, 1]}, {"table_wise": 1}, "row_wise"]
    kinds += [{"column_wise": [1, 0]}, {"table_wise": 0}, "row_wise", {"column_wise": [0, 1]}]
    return {f"t_cat_{i}": kind for i, kind in enumerate(kinds)}


def plan_of_act_2() -> dict[str, Any]:
    """Return a plan for 3 ranks: table-wise and row-wise are swapped, and column shards move to other ranks.

    The column split is unchanged: under row-wise Adagrad the state belongs to a column shard.
    """
    kinds = ["row_wise", {"table_wise": 2}, {"column_wise": [2, 0]}, "row_wise", {"table_wise": 0}]
    kinds += [{"column_wise": [1, 2]}, "row_wise", {"table_wise": 1}, {"column_wise": [2, 1]}]
    return {f"t_cat_{i}": kind for i, kind in enumerate(kinds)}


# ---------------------------------------------------------------------------------------------------- the two acts


def keep_truth(folder: Path) -> Any:
    """Return act 1's observer, which saves the truth of each step."""
    (folder / "truth").mkdir(exist_ok=True)
    steps: list[int] = []
    driver = os.getppid()

    def on_step(event: StepEvent) -> None:
        if os.getppid() != driver:
            os._exit(1)  # the driver was killed: do not train on forever
        truth = gather(event)
        if truth is not None:
            path = folder / "truth" / f"step-{event.step}.pt"
            torch.save(truth, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").rename(path)
            steps.append(event.step)
            if len(steps) > STEPS_KEPT and steps[-STEPS_KEPT] % MARKER_EVERY:
                (folder / "truth" / f"step-{steps[-STEPS_KEPT]}.pt").unlink()
        use_randomness()

    return on_step


def use_randomness() -> None:
    """Advance each rank's generators by a different amount, as dropout and sampling would."""
    for _ in range(dist.get_rank() + 1):
        torch.rand(3)
        np.random.random()
        random.random()


def compare_with_truth(folder: Path) -> Any:
    """Return act 2's observer, which compares the restored state."""

    def on_step(event: StepEvent) -> None:
        if event.loss is None:
            now = gather(event)
            if event.restored is None:
                raise DemoError("nothing was restored")
            if now is not None:
                truth = torch.load(folder / "truth" / f"step-{event.restored.step}.pt", weights_only=True)
                report = {
                    "marker": f"{event.restored.generation}:{event.restored.marker}",
                    "step": event.restored.step,
                    "samples": now["loader/samples"],
                    "lines": [dataclasses.asdict(line) for line in compare(truth, now)],
                }
                (folder / "proof.json").write_text(json.dumps(report, indent=1) + "\n")
        use_randomness()

    return on_step


def run_rank(act: int, folder: Path, flags: Sequence[str]) -> None:
    """Run one rank of one act, in a separate process."""
    warnings.filterwarnings("ignore", message=".*deprecating ShardedTensor", category=FutureWarning)
    if act == 1 and os.environ["RANK"] == "0":
        handler = logging.FileHandler(folder / "act-1.log")
        logging.getLogger("torchrec_stream_ckpt").addHandler(handler)
    if act == 1:
        train(flags, keep_truth(folder))
    else:
        train(flags, compare_with_truth(folder), steps=STEPS_AFTER_RESTORE)


# ------------------------------------------------------------------------------------------------------- the driver


@contextmanager
def ranks(act: int, world: int, folder: Path, flags: Sequence[str]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the ranks; none of them outlives the block."""
    port = free_port()
    command = [sys.executable, __file__, "--act", str(act), "--dir", str(folder), *flags]
    shared = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    if sys.platform == "linux":
        shared["GLOO_SOCKET_IFNAME"] = "lo"
    children: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
            children.append(subprocess.Popen(command, env={**os.environ, **shared, **own}, start_new_session=True))
        yield children
    finally:
        kill(children)


def kill(children: Sequence[subprocess.Popen[bytes]]) -> None:
    for child in children:
        if child.poll() is None:
            child.send_signal(signal.SIGKILL)
    for child in children:
        child.wait()


def committed(folder: Path) -> list[str]:
    """Return the markers that act 1 has reported."""
    log = folder / "act-1.log"
    return re.findall(r"marker (\d+:\d+) committed", log.read_text()) if log.exists() else []


def act_1(folder: Path, flags: Sequence[str]) -> None:
    say("act 1: 2 ranks train and stream")
    deadline = time.monotonic() + TIMEOUT_S
    with ranks(1, 2, folder, [*flags, "--sharding", str(folder / "plan-1.json")]) as children:
        last_wait: float | None = None
        while last_wait is None or time.monotonic() < last_wait:
            if any(child.poll() is not None for child in children):
                raise DemoError("a rank of act 1 ended early")
            if time.monotonic() > deadline:
                raise DemoError(f"act 1 had {len(committed(folder))} markers after {TIMEOUT_S} s")
            if last_wait is None and len(committed(folder)) >= MARKERS_WANTED:
                last_wait = time.monotonic() + random.uniform(0.0, 4.0)
            time.sleep(0.01)
        kill(children)
    steps = [int(path.stem.removeprefix("step-")) for path in (folder / "truth").glob("step-*.pt")]
    say(f"killed both ranks with SIGKILL at step {max(steps)}; last marker seen: {committed(folder)[-1]}")


def act_2(folder: Path, flags: Sequence[str]) -> None:
    say(f"act 2: 3 ranks restore under another plan and train {STEPS_AFTER_RESTORE} steps")
    flags = [*flags, "--sharding", str(folder / "plan-2.json"), "--restore", "latest"]
    with ranks(2, 3, folder, flags) as children:
        deadline = time.monotonic() + TIMEOUT_S
        while any(child.poll() is None for child in children):
            if any(child.poll() for child in children) or time.monotonic() > deadline:
                break
            time.sleep(0.02)
        codes = [child.poll() for child in children]
    if codes != [0, 0, 0]:
        raise DemoError(f"the ranks of act 2 ended with {codes} (None: they hung)")


NAMES = {
    "table": "embedding tables, weights",
    "fused optimizer": "embedding tables, optimizer rows",
    "dense": "dense model",
    "dense optimizer": "dense optimizer",
    "random": "random state of ranks 0 and 1",
    "loader": "loader position",
}


def show_proof(folder: Path) -> bool:
    """Print the comparisons. Returns whether all parts were identical, and none of them was missing."""
    report = json.loads((folder / "proof.json").read_text())
    table = Table(
        title=f"marker {report['marker']}, step {report['step']}: live job (2 ranks) and restored job (3 ranks)"
    )
    for column in ("what", "tensors", "values", "verdict"):
        table.add_column(column, justify="right" if column in ("tensors", "values") else "left")
    found = {line["part"]: line for line in report["lines"]}
    is_good = found.keys() == NAMES.keys()
    for part, name in NAMES.items():
        line = found.get(part, {"tensors": 0, "values": 0, "difference": "nothing to compare"})
        verdict = "[red]differs[/]" if line["difference"] else "[green]bit-identical[/]"
        note = f", sample {report['samples']}" if part == "loader" else ""
        table.add_row(name + note, f"{line['tensors']:,}", f"{line['values']:,}", verdict)
        is_good = is_good and not line["difference"]
    console.print(table)
    for line in report["lines"]:
        if line["difference"]:
            say(f"[red]{NAMES.get(line['part'], line['part'])}[/]: {line['difference']}")
    return is_good


def run_demo(folder: Path, bucket: str | None, use_kafka: bool) -> bool:
    folder.mkdir(parents=True)
    for act, plan in ((1, plan_of_act_1()), (2, plan_of_act_2())):
        (folder / f"plan-{act}.json").write_text(json.dumps(plan, indent=1) + "\n")
    with contextlib.ExitStack() as stack:
        where = ["--stream_ckpt", f"file://{folder / 'log'}"]
        if bucket is not None:
            where = ["--stream_ckpt", bucket]
        if use_kafka:
            where = ["--stream_ckpt", stack.enter_context(broker(folder)), "--store", f"file://{folder / 'store'}"]
        act_1(folder, [*JOB_FLAGS, *where])
        act_2(folder, [*JOB_FLAGS, *where])
    return show_proof(folder)


@contextmanager
def broker(folder: Path) -> Iterator[str]:
    """Run a private Kafka broker on loopback, stopped at the end."""
    from torchrec_stream_ckpt.extras.broker.kraft import Broker

    ours = Broker(folder / "broker")
    say("starting a Kafka broker (the first time, this fetches it)")
    try:
        uri = ours.start(die_with=os.getpid()).uri("demo")
        say(f"broker is up: {uri}")
        yield uri
    finally:
        ours.stop()
        say("broker stopped")


def main() -> int:
    from torchrec_stream_ckpt import StreamCkptError

    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--kafka", action="store_true", help="stream over a Kafka broker that the demo starts")
    parser.add_argument("--bucket", metavar="URI", help="stream into an empty prefix of a bucket, and nowhere else")
    parser.add_argument("--dir", type=Path, default=Path("demo-run"), help="working folder (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the working folder; it is kept anyway on failure")
    parser.add_argument("--act", type=int, help=argparse.SUPPRESS)
    args, flags = parser.parse_known_args()
    folder = args.dir.absolute()
    if args.act:
        run_rank(args.act, folder, flags)
        return 0
    if flags:
        parser.error(f"unknown arguments: {' '.join(flags)}")
    if folder.exists():
        if not (folder / "plan-1.json").exists():
            parser.error(f"{folder} exists but was not created by the demo")
        shutil.rmtree(folder)
    started = time.monotonic()
    try:
        is_good = run_demo(folder, args.bucket, args.kafka)
    except (DemoError, StreamCkptError) as error:
        say(f"[red]failed[/]: {error} (see {folder})")
        return 1
    seconds = time.monotonic() - started
    if not is_good:
        say(f"[red]the restored job differs from the live one[/] ({seconds:.0f} s; see {folder})")
        return 1
    say(f"[green]the restored job is bit-identical to the live one at that marker[/] ({seconds:.0f} s)")
    if not args.keep:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
