"""Step time with and without streaming, on the file log: paired blocks in one process group.

    python benchmarks/step_time/run.py [--ranks 1] [--rounds 7] [--steps 10] [--out FILE.json]

Every variant trains its own copy of the recipe's DLRM (thesis configuration: 8 tables x 80,000 x 64, global
batch 2048, 100 ids a lookup) on the same batches. A round runs one block of steps of each variant, in random order;
a block begins when no stream has anything left to send. The ratio of a variant is the median, over rounds, of its
block time divided by the block time of ``off`` in the same round. ``off again`` is a second ``off``: the noise.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "recipes"))

# variant -> steps between drains; None: no streaming at all
VARIANTS: dict[str, int | None] = {"off": None, "off again": None, "drain every 10": 10, "drain every step": 1}


@dataclass
class Job:
    """One variant's live job, and its block times in seconds."""

    model: Any
    optimizer: Any
    checkpointer: Any
    blocks_s: list[float] = field(default_factory=list)
    caught_up_s: list[float] = field(default_factory=list)
    num_bytes: int = 0

    def block(self, batches: list[Any], steps: int) -> None:
        """Train ``steps`` steps; then wait until the stream has sent all that it took."""
        sent = self._sent()
        begin = time.perf_counter()
        for step in range(steps):
            self.optimizer.zero_grad()
            loss, _ = self.model(batches[step % len(batches)])
            loss.backward()
            self.optimizer.step()
            if self.checkpointer is not None:
                self.checkpointer.step()
        end = time.perf_counter()
        self.settle()
        self.blocks_s.append(end - begin)
        self.caught_up_s.append(time.perf_counter() - begin)
        self.num_bytes = self._sent() - sent

    def settle(self) -> None:
        if self.checkpointer is not None:
            stream = self.checkpointer._stream
            while stream is not None and stream.publisher.pending:
                time.sleep(0.005)
        dist.barrier()

    def _sent(self) -> int:
        stream = self.checkpointer._stream if self.checkpointer is not None else None
        return stream.publisher.num_bytes if stream is not None else 0


def _rank(rank: int, args: argparse.Namespace, scratch: str, results: Any) -> None:
    import train_dlrm as recipe

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(args.ranks), "LOCAL_WORLD_SIZE": str(args.ranks)}
    torch.set_num_threads(1)
    recipe.configure_logging(1)
    dist.init_process_group("gloo", init_method=f"file://{scratch}/group", rank=rank, world_size=args.ranks)
    flags = recipe.parse_args(["--sharding", "mixed", "--zipf", str(args.zipf), "--synthetic", args.config])
    loader = recipe.open_loader(flags, rank, args.ranks)
    batches = [batch for batch, _ in zip(loader, range(4), strict=False)]
    jobs = {name: _job(recipe, flags, loader, drain_every, scratch, name) for name, drain_every in VARIANTS.items()}
    for job in jobs.values():
        job.block(batches, args.steps)  # warm-up, and the sweep of the streamed ones
        while job.checkpointer is not None and not job.checkpointer._capture.swept:
            job.block(batches, 1)
        job.blocks_s.clear()
        job.caught_up_s.clear()
    order = random.Random(0)
    for done in range(args.rounds):
        names = list(jobs)
        order.shuffle(names)
        for name in names:
            jobs[name].block(batches, args.steps)
        if rank == 0:
            print(f"round {done + 1} of {args.rounds}", file=sys.stderr, flush=True)
    if rank == 0:
        results.put({name: (job.blocks_s, job.caught_up_s, job.num_bytes) for name, job in jobs.items()})
    for job in jobs.values():
        if job.checkpointer is not None:
            job.checkpointer.close()
    dist.barrier()
    os._exit(0)


def _job(recipe: Any, flags: argparse.Namespace, loader: Any, drain_every: int | None, scratch: str, name: str) -> Job:
    device = torch.device("cpu")
    torch.manual_seed(0)
    dlrm = recipe.build_model(flags, loader, device)
    sharder = recipe.EmbeddingBagCollectionSharder(
        fused_params={"optimizer": recipe.FUSED_OPTIMIZERS[flags.optimizer], "learning_rate": flags.learning_rate}
    )
    plan = recipe.make_plan(flags, dlrm, sharder, device)
    model = recipe.DistributedModelParallel(dlrm, device=device, plan=plan, sharders=[sharder])
    optimizer = recipe.build_optimizer(flags, model)
    if drain_every is None:
        return Job(model, optimizer, None)
    from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

    directory = Path(scratch) / name.replace(" ", "-")
    config = StreamConfig(uri=f"file://{directory}", drain_every=drain_every, marker_every=None)
    return Job(model, optimizer, StreamCheckpointer(model, optimizer, config=config))


def _machine() -> dict[str, Any]:
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line), "")
    memory = next(line for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    return {
        "cpu": model.partition(":")[2].strip() or platform.machine(),
        "cores": os.cpu_count(),
        "memory": memory.split(maxsplit=1)[1],
        "python": platform.python_version(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="steps of a block")
    parser.add_argument("--config", choices=("thesis", "small"), default="thesis")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parser.parse_args()
    machine = _machine()
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory(prefix="step-time-", dir=os.environ.get("BENCH_DIR")) as scratch:
        mp.spawn(_rank, (args, scratch, results), nprocs=args.ranks)
        blocks = results.get()
    report = {
        "case": "step_time",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/step_time/run.py --ranks {args.ranks} --rounds {args.rounds} "
        f"--steps {args.steps} --config {args.config} --zipf {args.zipf}",
        "machine": machine,
        "variants": {name: _summary(name, blocks, args.steps) for name in VARIANTS},
    }
    _print(report)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def _summary(name: str, blocks: dict[str, tuple[list[float], list[float], int]], steps: int) -> dict[str, Any]:
    times, caught_up, num_bytes = blocks[name]
    off = blocks["off"][0]
    ratios = [mine / base for mine, base in zip(times, off, strict=True)]
    behind = [mine / base for mine, base in zip(caught_up, off, strict=True)]
    return {
        "step_ms_median": round(1000 * statistics.median(times) / steps, 2),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "ratio_median_until_all_is_sent": round(statistics.median(behind), 4),
        "megabytes_a_step": round(num_bytes / steps / 1e6, 2),
    }


def _print(report: dict[str, Any]) -> None:
    print(f"{report['command']}\n{report['machine']}")
    print(f"{'variant':18}{'step ms':>10}{'ratio':>9}{'min':>9}{'max':>9}{'all sent':>10}{'MB a step':>11}")
    for name, row in report["variants"].items():
        print(
            f"{name:18}{row['step_ms_median']:>10}{row['ratio_median']:>9}{row['ratio_min']:>9}{row['ratio_max']:>9}"
            f"{row['ratio_median_until_all_is_sent']:>10}{row['megabytes_a_step']:>11}"
        )


if __name__ == "__main__":
    main()
