"""Restart on the same node against restart after its disk was lost: the inner tier against Kafka.

    python benchmarks/tiers/run.py [--tables 2] [--rows 500000] [--dim 64] [--rounds 5] [--out FILE.json]

One job of one rank trains on two tiers, a folder and a broker on loopback. Then each round restores twice, in random
order:

``inner``   ``StreamCheckpointer.restore()`` of the newest marker, with the inner tier there
``outer``   the same over an empty inner folder: all comes from Kafka

A restore is the whole call: both control partitions, plan, rows, dense state, the claim of a generation on both tiers.
Every one is compared with the tables that were committed, bit by bit.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[1])]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import at_least, machine  # noqa: E402
from job import Job, Shape, build, join_group  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.broker.kraft import Broker  # noqa: E402

BATCH = 512


def attach(job: Job, config: StreamConfig) -> contextlib.closing[StreamCheckpointer]:
    return contextlib.closing(StreamCheckpointer(job.model, job.optimizer, config=config))


def measure(args: argparse.Namespace, folder: Path, uri: str) -> dict[str, Any]:
    job = build(Shape((args.rows,) * args.tables, args.dim))
    inner = folder / "inner"
    config = StreamConfig(
        uri=(f"file://{inner}", uri), store=str(folder / "store"), marker_every=args.steps // 4, head=None
    )
    begin = time.perf_counter()
    with attach(job, config) as checkpointer:
        for _ in range(args.steps):
            job.train([torch.randint(0, args.rows, (BATCH,)) for _ in range(args.tables)], bags=BATCH)
            checkpointer.step()
        checkpointer.mark().result(600)
        trained_s = time.perf_counter() - begin
    truth = {name: tensor.clone() for name, tensor in job.tensors.items()}
    times: dict[str, list[float]] = {"inner": [], "outer": []}
    chance = random.Random(0)
    for _ in range(args.rounds):
        for variant in chance.sample(list(times), 2):
            if variant == "outer":
                shutil.move(inner, folder / "kept")
            for tensor in job.tensors.values():
                tensor.zero_()
            with attach(job, config) as checkpointer:
                begin = time.perf_counter()
                restored = checkpointer.restore()
                times[variant].append(time.perf_counter() - begin)
                assert restored is not None
                assert restored.source.startswith(variant)
                assert all(torch.equal(tensor, truth[name]) for name, tensor in job.tensors.items())
            if variant == "outer":
                shutil.rmtree(inner)
                shutil.move(folder / "kept", inner)
    return {
        "tables_bytes": job.num_bytes,
        "trained_s": round(trained_s, 3),
        "seconds": {name: [round(each, 4) for each in found] for name, found in times.items()},
        "median_s": {name: round(statistics.median(found), 4) for name, found in times.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default, least in (
        ("tables", 2, 1),
        ("rows", 500_000, 1),
        ("dim", 64, 4),
        ("steps", 20, 4),
        ("rounds", 5, 1),
    ):
        parser.add_argument(f"--{name}", type=at_least(least), default=default)
    parser.add_argument("--dir", type=Path, help="scratch, default: TMPDIR")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        folder = Path(scratch)
        join_group(folder, 0, 1)
        broker = Broker(folder / "broker")
        try:
            uri = broker.start(die_with=os.getpid()).uri("tiers")
        except (StreamCkptError, OSError) as error:
            found = {"not measured": f"no broker: {error}"}
        else:
            try:
                found = measure(args, folder, uri)
            finally:
                broker.stop()
        dist.destroy_process_group()
    settings = {name: value for name, value in vars(args).items() if name not in ("dir", "out")}
    result = {"case": "tiers", "date": time.strftime("%Y-%m-%d"), "machine": machine(), **settings, **found}
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
