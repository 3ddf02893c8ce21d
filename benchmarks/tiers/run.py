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
import importlib.util
import json
import os
import platform
import random
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.broker.kraft import Broker


def sibling(name: str) -> ModuleType:
    """The program of another case: its model is this one's."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / name / "run.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def attach(job: Any, config: StreamConfig) -> contextlib.closing[StreamCheckpointer]:
    return contextlib.closing(StreamCheckpointer(job.model, job.optimizer, config=config))


def measure(args: argparse.Namespace, folder: Path, uri: str) -> dict[str, Any]:
    job = sibling("head").build(args)
    inner = folder / "inner"
    config = StreamConfig(
        uri=(f"file://{inner}", uri), store=str(folder / "store"), marker_every=args.steps // 4, head=None
    )
    begin = time.perf_counter()
    with attach(job, config) as checkpointer:
        for _ in range(args.steps):
            job.step(args)
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
    for name, default in (("tables", 2), ("rows", 500_000), ("dim", 64), ("steps", 20), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--dir", type=Path, help="scratch, default: TMPDIR")
    parser.add_argument("--out", type=Path, help="write the result there as JSON")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        folder = Path(scratch)
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
        dist.init_process_group("gloo", init_method=f"file://{folder}/group", rank=0, world_size=1)
        broker = Broker(folder / "broker")
        status = broker.start(die_with=os.getpid())
        try:
            found = measure(args, folder, status.uri("tiers"))
        finally:
            broker.stop()
            dist.destroy_process_group()
    machine = {"cores": os.cpu_count(), "load": os.getloadavg()[0], "machine": platform.machine()}
    settings = {name: value for name, value in vars(args).items() if name not in ("dir", "out")}
    result = {"date": time.strftime("%Y-%m-%d"), "torch": torch.__version__, **machine, **settings, **found}
    print(json.dumps(result, indent=2))
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
