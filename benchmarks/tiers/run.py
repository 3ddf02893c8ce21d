"""Restart on the same node against restart after its disk was lost: the inner tier against Kafka.

    python benchmarks/tiers/run.py [--tables 2] [--rows 500000] [--dim 64] [--rounds 5] [--out FILE.json]

One job of one rank trains on two tiers, a folder and a broker on loopback. Then each round restores in fresh processes,
in random order, with the page cache warm and cold:

``inner``   ``StreamCheckpointer.restore()`` of the newest marker, with the inner tier there
``outer``   the same over an empty inner folder: all comes from Kafka

A restore is the whole call: both control partitions, plan, rows, dense state, the claim of a generation on both tiers.
Every one is compared with the tables that were committed, bit by bit.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
from cache import STATES, files_under  # noqa: E402
from common import Report, arguments, at_least, parse, refuse_small_machine, scratch, take_turns, timed  # noqa: E402
from common import unmeasured as file_unmeasured  # noqa: E402
from job import Job, Shape, build, first, spread  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.extras.broker.kraft import Broker  # noqa: E402

BATCH = 512
INNER, OUTER = "inner", "outer"


def attach(job: Job, folder: Path, uri: str, marker_every: int | None = None) -> contextlib.closing[StreamCheckpointer]:
    tiers = (f"file://{folder / 'inner'}", uri)
    config = StreamConfig(uri=tiers, store=str(folder / "store"), marker_every=marker_every, head=None)
    return contextlib.closing(StreamCheckpointer(job.model, job.optimizer, config=config))


def train(shape: Shape, steps: int, folder: Path, uri: str) -> int:
    """(one rank) Make what is restored; the bytes of rows and states."""
    job = build(shape)
    with attach(job, folder, uri, steps // 4) as checkpointer:
        for _ in range(steps):
            job.train([torch.randint(0, rows, (BATCH,)) for rows in shape.rows], bags=BATCH)
            checkpointer.step()
        checkpointer.mark().result(600)
    torch.save(job.tensors, folder / "tables.pt")
    return job.num_bytes


def load(shape: Shape, folder: Path, uri: str, tier: str) -> float:
    """(one rank) Seconds of one restore; then the truth is read, and compared."""
    job, found = build(shape), list[Any]()
    for tensor in job.tensors.values():
        tensor.zero_()
    with attach(job, folder, uri) as checkpointer:
        taken = timed(lambda: found.append(checkpointer.restore()))
    if found[0] is None or not found[0].source.startswith(tier):
        raise RuntimeError(f"restored {found[0]}, not from the {tier} tier")
    truth = torch.load(folder / "tables.pt", mmap=True)
    if not all(torch.equal(tensor, truth[name]) for name, tensor in job.tensors.items()):
        raise RuntimeError(f"the {tier} tier has given something else")
    return taken


def restore(shape: Shape, folder: Path, uri: str, broker: Path, state: str, tier: str) -> float:
    """In a process of its own; the inner tier is put aside for the outer one, and comes back."""
    inner, kept = folder / "inner", folder / "kept"
    if tier == INNER:
        return first(load, 1, folder.parent, state, [inner, folder / "store"], shape, folder, uri, tier)
    records = [path for path in files_under(broker) if path.suffix == ".log"]
    shutil.move(inner, kept)
    try:
        return first(load, 1, folder.parent, state, [*records, folder / "store"], shape, folder, uri, tier)
    finally:
        shutil.rmtree(inner, ignore_errors=True)
        shutil.move(kept, inner)


def main() -> None:
    parser = arguments(__doc__, rounds=5)
    for name, default, least in (("tables", 2, 1), ("rows", 500_000, 1), ("dim", 64, 4), ("steps", 20, 4)):
        parser.add_argument(f"--{name}", type=at_least(least), default=default)
    args = parse(parser, tables=1, rows=2000, dim=8, steps=4, rounds=1)
    shape = Shape((args.rows,) * args.tables, args.dim)
    size, what = shape.table_bytes, "the job, both tiers and a broker"
    refuse_small_machine("tiers", args, what, memory=(4 << 30) + 3 * size, disk=(1 << 29) + 8 * size)
    report = Report("tiers", args)
    with scratch("tiers") as base:
        broker = Broker(base / "broker")
        try:
            uri = broker.start(die_with=os.getpid()).uri("tiers")
        except (StreamCkptError, OSError) as error:
            file_unmeasured("tiers", args, f"no broker: {error}")
            return
        folder = base / "job"
        folder.mkdir()
        try:
            report.facts["bytes"] = spread(train, 1, base, shape, args.steps, folder, uri)
            for state in STATES:
                variants = {
                    tier: partial(restore, shape, folder, uri, base / "broker", state, tier) for tier in (INNER, OUTER)
                }
                report.add(state, take_turns(variants, args.rounds, warm_up=0), OUTER)
        finally:
            broker.stop()
    report.finish()


if __name__ == "__main__":
    main()
