"""Restore of the newest marker from HEAD, from the store, and torch.load of the same tables: paired, interleaved.

    python benchmarks/head/run.py [--tables 4] [--rows 1250000] [--dim 64] [--rounds 7] [--out FILE.json]

One job of one rank trains a few steps, commits a marker, and a materializer folds it into a store in a local folder,
with a HEAD in shared memory. Then each round does, in random order and once each:

``torch.load``   read a ``torch.save`` file of the same tables and optimizer states into new memory
``and copy``     the same, and copy them into the live tables: what such a restart really does
``mmap, copy``   the same with the file mapped: torch's fastest way
``store``        ``StreamCheckpointer.restore()`` of the newest marker without HEAD
``head``         the same with HEAD, checksums compared
``unverified``   the same with ``verify_head=False``

All is in the page cache. A restore is the whole call: lineage, plan, rows, dense state, and the claim of a generation.
``ratio`` of a variant is the median over rounds of the time of ``torch.load`` divided by its own, in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import at_least, machine  # noqa: E402
from job import Job, Shape, build, join_group  # noqa: E402

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig  # noqa: E402
from torchrec_stream_ckpt.control.partition import Control  # noqa: E402
from torchrec_stream_ckpt.log.files import FileLog  # noqa: E402
from torchrec_stream_ckpt.materialize.head import HeadWriter  # noqa: E402
from torchrec_stream_ckpt.materialize.materializer import Materializer  # noqa: E402
from torchrec_stream_ckpt.store.api import open_store  # noqa: E402
from torchrec_stream_ckpt.store.dense import open_dense  # noqa: E402

VARIANTS = ("torch.load", "and copy", "mmap, copy", "store", "head", "unverified")
BATCH = 512


class Rounds:
    """What each variant does, on one job."""

    def __init__(self, args: argparse.Namespace, job: Job, folder: Path, head: Path) -> None:
        self._job, self._folder, self._head = job, folder, head
        self._file = folder / "tables.pt"
        with contextlib.closing(self._attach(None)) as checkpointer:
            for _ in range(args.steps):
                job.train([torch.randint(0, args.rows, (BATCH,)) for _ in range(args.tables)], bags=BATCH)
                checkpointer.step()
            checkpointer.mark().result(600)
        torch.save(job.tensors, self._file)
        self._truth = {name: tensor.clone() for name, tensor in job.tensors.items()}
        self._fold()

    def _attach(self, head: Path | None, *, verify: bool = True) -> StreamCheckpointer:
        config = StreamConfig(
            uri=f"file://{self._folder / 'log'}",
            marker_every=None,
            head=str(head) if head is not None else None,
            verify_head=verify,
        )
        return StreamCheckpointer(self._job.model, self._job.optimizer, config=config)

    def _fold(self) -> None:
        log, objects = FileLog(self._folder / "log"), open_store(str(self._folder / "log"))
        dense = open_dense(str(self._folder / "log"))
        with ThreadPoolExecutor(2) as pool:
            writer = HeadWriter(self._head, objects, pool)
            materializer = Materializer(log, objects, lambda _: dense, pool, head=writer)
            self.markers = len(list(materializer.catch_up(Control(log).refresh())))
        assert writer.marker is not None

    def run(self, variant: str) -> float:
        """Seconds."""
        for tensor in self._job.tensors.values():
            tensor.zero_()
        if variant == "store":
            return self._restore(None, "store ")
        if variant in ("head", "unverified"):
            return self._restore(self._head, "head ", verify=variant == "head")
        begin = time.perf_counter()
        loaded = torch.load(self._file, mmap=variant == "mmap, copy")
        if variant != "torch.load":
            with torch.no_grad():
                for name, tensor in self._job.tensors.items():
                    tensor.copy_(loaded[name])
        return time.perf_counter() - begin

    def _restore(self, head: Path | None, source: str, *, verify: bool = True) -> float:
        with contextlib.closing(self._attach(head, verify=verify)) as checkpointer:
            begin = time.perf_counter()
            restored = checkpointer.restore()
            seconds = time.perf_counter() - begin
        assert restored is not None
        assert restored.source.startswith(source)
        for name, tensor in self._job.tensors.items():
            assert torch.equal(tensor, self._truth[name]), name
        return seconds


def measure(args: argparse.Namespace, run: Callable[[str], float]) -> dict[str, list[float]]:
    """Seconds of each round, by variant; a first round is not counted."""
    times: dict[str, list[float]] = {name: [] for name in VARIANTS}
    order = random.Random(0)
    for done in range(-1, args.rounds):
        names = list(VARIANTS)
        order.shuffle(names)
        for name in names:
            seconds = run(name)
            if done >= 0:
                times[name].append(seconds)
        print(f"round {done + 1} of {args.rounds}", file=sys.stderr, flush=True)
    return times


def summary(times: dict[str, list[float]], num_bytes: int) -> dict[str, Any]:
    base = times["torch.load"]
    rows = {}
    for name, mine in times.items():
        ratios = [theirs / own for theirs, own in zip(base, mine, strict=True)]
        rows[name] = {
            "seconds_median": round(statistics.median(mine), 4),
            "seconds_min": round(min(mine), 4),
            "gigabytes_a_second": round(num_bytes / statistics.median(mine) / 1e9, 2),
            "ratio_median": round(statistics.median(ratios), 2),
            "ratio_min": round(min(ratios), 2),
            "ratio_max": round(max(ratios), 2),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tables", type=at_least(1), default=4)
    parser.add_argument("--rows", type=at_least(1), default=1_250_000)
    parser.add_argument("--dim", type=at_least(4), default=64)
    parser.add_argument("--steps", type=at_least(1), default=3)
    parser.add_argument("--rounds", type=at_least(1), default=7)
    parser.add_argument("--head", type=Path, default=Path("/dev/shm"), help="where HEAD's folder is made")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parser.parse_args()
    here = machine()
    with (
        tempfile.TemporaryDirectory(prefix="head-bench-", dir=os.environ.get("BENCH_DIR")) as scratch,
        tempfile.TemporaryDirectory(prefix="head-bench-", dir=args.head) as head,
    ):
        join_group(Path(scratch), 0, 1)
        job = build(Shape((args.rows,) * args.tables, args.dim))
        rounds = Rounds(args, job, Path(scratch), Path(head))
        times = measure(args, rounds.run)
        dist.destroy_process_group()
    report = {
        "case": "head",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/head/run.py --tables {args.tables} --rows {args.rows} --dim {args.dim} "
        f"--rounds {args.rounds}",
        "machine": here,
        "bytes": job.num_bytes,
        "variants": summary(times, job.num_bytes),
        "seconds": {name: [round(each, 4) for each in mine] for name, mine in times.items()},
    }
    show(report)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def show(report: dict[str, Any]) -> None:
    print(f"{report['command']}\n{report['machine']}\n{report['bytes']} bytes of rows and states")
    print(f"{'variant':12}{'seconds':>9}{'best':>9}{'GB/s':>8}{'ratio':>8}{'min':>7}{'max':>7}")
    for name, row in report["variants"].items():
        print(
            f"{name:12}{row['seconds_median']:>9}{row['seconds_min']:>9}{row['gigabytes_a_second']:>8}"
            f"{row['ratio_median']:>8}{row['ratio_min']:>7}{row['ratio_max']:>7}"
        )


if __name__ == "__main__":
    main()
