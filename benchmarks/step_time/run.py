"""Step time with and without streaming, on the file log: paired blocks in one process group.

    python benchmarks/step_time/run.py [--ranks 1] [--rounds 5] [--steps 100] [--config thesis|criteo] [--out FILE.json]

Every variant trains its own copy of the recipe's DLRM on the same batches. ``thesis``: 8 tables x 80,000 x 64, global
batch 2048, 100 ids a lookup. ``criteo``: 26 tables, a million rows in the proportions of Criteo Kaggle, x 128, global
batch 4096, one id a lookup. A round runs one block of steps of each variant, in random order; a block begins when no
stream has anything left to send. ``ratio`` of a variant is the median, over rounds, of the time until its block is done
and all that it took is sent, divided by the block time of ``off`` in the same round. ``off again`` is a second ``off``:
the noise. ``trains`` leaves the rest that is sent after the block out: it holds where a core is free. ``cpu`` is the
ratio of the training thread's CPU time, which says less of what else runs on the machine; ``all cpu`` that of all
threads of rank 0's process, until all is sent. ``direct``: direct writes of the log, the default; the others write
it buffered.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path[1:1] = [str(Path(__file__).resolve().parents[level]) for level in (1, 2)]

import start  # noqa: E402, F401
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from common import at_least, machine, parse, refuse_small_machine, start_ranks  # noqa: E402
from data import CRITEO_ROWS  # noqa: E402
from device import add_device, finish_queued, join  # noqa: E402
from holes import punch  # noqa: E402

from tests.inside import inside  # noqa: E402

BUFFERED = {"log_writes": "buffered"}
# variant -> settings of its stream; None: no streaming at all
VARIANTS: dict[str, dict[str, Any] | None] = {
    "off": None,
    "off again": None,
    "drain every 10": BUFFERED | {"drain_every": 10},
    "drain every step": BUFFERED | {"drain_every": 1},
    "drain every step, direct": {"drain_every": 1, "log_writes": "direct"},
    "marker every 10": BUFFERED | {"drain_every": 1, "marker_every": 10},
    "marker every 10, direct": {"drain_every": 1, "marker_every": 10, "log_writes": "direct"},
    "marker every 10, no proof": BUFFERED | {"drain_every": 1, "marker_every": 10, "proof_bytes": 0},
    "auto, max_overhead 1%": BUFFERED | {"drain_every": "auto", "max_overhead": 0.01},
    "auto, max_overhead 1%, direct": {"drain_every": "auto", "max_overhead": 0.01, "log_writes": "direct"},
}
PERIOD = 10
"""Steps between two markers, or drains, of the variants that have any."""
ROOM = {"thesis": (170_000_000, 70_000_000), "small": (10_000_000, 5_000_000), "criteo": (530_000_000, 15_000_000)}
"""Bytes of a job's tables and states, and of what a step streams."""
CONFIGS: dict[str, list[str]] = {
    "thesis": ["--synthetic", "thesis"],
    "small": ["--synthetic", "small"],
    # The layers of MLPerf's DLRM.
    "criteo": [
        *("--num_embeddings_per_feature", ",".join(map(str, CRITEO_ROWS)), "--embedding_dim", "128"),
        *("--batch_size", "4096", "--ids_per_lookup", "1", "--learning_rate", "0.05"),
        *("--dense_arch_layer_sizes", "512,256,128", "--over_arch_layer_sizes", "1024,1024,512,256,1"),
    ],
}


@dataclass
class Job:
    """One variant's live job, and its block times in seconds."""

    model: Any
    optimizer: Any
    checkpointer: Any
    blocks_s: list[float] = field(default_factory=list)
    caught_up_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    """Of the training thread, which on a CPU the backward runs on as well."""
    all_cpu_s: list[float] = field(default_factory=list)
    """Of all threads of this rank's process, until all is sent; idle threads of the other jobs take next to nothing."""
    num_bytes: int = 0
    markers: int = 0
    pause: Any = None
    """While other variants run, no time passes for ``max_overhead``."""

    def block(self, batches: list[Any], steps: int) -> None:
        """Train ``steps`` steps; then wait until the stream has sent all that it took."""
        sent, markers = self._sent(), self._markers()
        if self.pause is not None:
            self.pause.__exit__(None, None, None)
        finish_queued()
        begin, cpu, all_cpu = time.perf_counter(), time.thread_time(), time.process_time()
        for step in range(steps):
            self.optimizer.zero_grad()
            loss, _ = self.model(batches[step % len(batches)])
            loss.backward()
            self.optimizer.step()
            if self.checkpointer is not None:
                self.checkpointer.step()
        finish_queued()
        end = time.perf_counter()
        self.cpu_s.append(time.thread_time() - cpu)
        self.settle()
        self.all_cpu_s.append(time.process_time() - all_cpu)
        self.blocks_s.append(end - begin)
        self.caught_up_s.append(time.perf_counter() - begin)
        self.num_bytes += self._sent() - sent
        self.markers += self._markers() - markers
        if self.checkpointer is not None:
            self.pause = inside(self.checkpointer).waiting()
            self.pause.__enter__()

    def forget(self) -> None:
        """What was done so far was warm-up."""
        self.blocks_s.clear()
        self.caught_up_s.clear()
        self.cpu_s.clear()
        self.all_cpu_s.clear()
        self.num_bytes = self.markers = 0

    def settle(self) -> None:
        if self.checkpointer is not None:
            inside(self.checkpointer).settle()  # no step follows for a while that would send the rest of a marker
            inside(self.checkpointer).wait_for_log()
        dist.barrier()

    def _sent(self) -> int:
        return self.checkpointer.stats().num_bytes if self.checkpointer is not None else 0

    def _markers(self) -> int:
        return self.checkpointer.stats().markers_committed if self.checkpointer is not None else 0


def _rank(rank: int, args: argparse.Namespace, scratch: str) -> dict[str, Any]:
    from torchrec_stream_ckpt.recipes import train_dlrm as recipe

    torch.set_num_threads(1)
    recipe.configure_logging(1)
    device = join(args.device, Path(scratch) / "group", rank, args.ranks)
    flags = recipe.parse_args(["--sharding", "mixed", "--zipf", str(args.zipf), *CONFIGS[args.config]])
    loader = recipe.open_loader(flags, rank, args.ranks)
    batches = [batch.to(device) for batch, _ in zip(loader, range(4), strict=False)]
    jobs = {name: _job(recipe, flags, loader, VARIANTS[name], scratch, name, device) for name in args.variants}
    for job in jobs.values():
        job.block(batches, min(args.steps, PERIOD))  # warm-up, and the sweep of the streamed ones
        while job.checkpointer is not None and not inside(job.checkpointer).capture.swept:
            job.block(batches, 1)
        job.block(batches, min(args.steps, PERIOD))
        if job.checkpointer is not None:  # no block ends with a marker: the last one is sent over the rest of it
            job.block(batches, (PERIOD // 2 - job.checkpointer.steps) % PERIOD)
        job.forget()
    order = random.Random(0)
    for done in range(args.rounds):
        names = list(jobs)
        order.shuffle(names)
        for name in names:
            jobs[name].block(batches, args.steps)
            if rank == 0 and jobs[name].checkpointer is not None:
                punch(log_of(scratch, name))
            dist.barrier()
        if rank == 0:
            print(f"round {done + 1} of {args.rounds}", file=sys.stderr, flush=True)
    for job in jobs.values():
        if job.checkpointer is not None:
            job.checkpointer.close()
    dist.barrier()
    dist.destroy_process_group()
    return {
        name: (job.blocks_s, job.caught_up_s, job.cpu_s, job.all_cpu_s, job.num_bytes, job.markers)
        for name, job in jobs.items()
    }


def _job(
    recipe: Any,
    flags: argparse.Namespace,
    loader: Any,
    settings: dict[str, Any] | None,
    scratch: str,
    name: str,
    device: torch.device,
) -> Job:
    model, optimizer, _ = recipe.build(flags, device, loader)
    if settings is None:
        return Job(model, optimizer, None)
    from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig

    uri = f"file://{log_of(scratch, name)}"
    config = StreamConfig(uri=uri, sweep_bytes=2**28, **{"marker_every": None, **settings})
    return Job(model, optimizer, StreamCheckpointer(model, optimizer, config=config))


def log_of(scratch: str, name: str) -> Path:
    return Path(scratch) / name.replace(" ", "-")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=at_least(1), default=1)
    parser.add_argument("--rounds", type=at_least(1), default=5)
    parser.add_argument("--steps", type=at_least(1), default=40, help="of a block (default: %(default)s)")
    parser.add_argument("--config", choices=tuple(CONFIGS), default="thesis")
    parser.add_argument("--variants", nargs="+", choices=tuple(VARIANTS), default=list(VARIANTS), metavar="NAME")
    parser.add_argument("--zipf", type=float, default=1.05)
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    add_device(parser)
    args = parse(parser, config="small", rounds=1, steps=2)
    if "off" not in args.variants:
        parser.error("--variants: 'off' is what the others are compared with: name it, too")
    memory_bytes, step_bytes = ROOM[args.config]
    streamed = sum(VARIANTS[name] is not None for name in args.variants)
    room = streamed * (2 * memory_bytes + step_bytes * args.steps)
    what = f"{len(args.variants)} jobs and their logs"
    memory = (2 << 30) + len(args.variants) * (memory_bytes + (1 << 28))
    refuse_small_machine("step_time", args, what, memory=memory, disk=room)
    here = machine()
    with tempfile.TemporaryDirectory(prefix="step-time-", dir=os.environ.get("BENCH_DIR")) as scratch:
        blocks = start_ranks(_rank, args.ranks, args, scratch)
    report = {
        "case": "step_time",
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/step_time/run.py --ranks {args.ranks} --rounds {args.rounds} "
        f"--steps {args.steps} --config {args.config} --zipf {args.zipf} --device {args.device}"
        + (f" --variants {' '.join(map(repr, args.variants))}" if args.variants != list(VARIANTS) else ""),
        "machine": here,
        "variants": {name: _summary(name, blocks, args.steps) for name in args.variants},
    }
    _print(report)
    if args.out is not None:
        args.out.write_text(json.dumps(report, indent=2) + "\n")


def _summary(name: str, blocks: dict[str, Any], steps: int) -> dict[str, Any]:
    times, caught_up, cpu, all_cpu, num_bytes, markers = blocks[name]
    off = blocks["off"][0]
    ratios = [mine / base for mine, base in zip(times, off, strict=True)]
    cpu_ratios = [mine / base for mine, base in zip(cpu, blocks["off"][2], strict=True)]
    all_ratios = [mine / base for mine, base in zip(all_cpu, blocks["off"][3], strict=True)]
    behind = [mine / base for mine, base in zip(caught_up, off, strict=True)]
    return {
        "step_ms_median": round(1000 * statistics.median(times) / steps, 2),
        "ratio_median_until_all_is_sent": round(statistics.median(behind), 4),
        "ratio_min_until_all_is_sent": round(min(behind), 4),
        "ratio_max_until_all_is_sent": round(max(behind), 4),
        "ratio_median": round(statistics.median(ratios), 4),
        "ratio_min": round(min(ratios), 4),
        "ratio_max": round(max(ratios), 4),
        "cpu_ratio_median": round(statistics.median(cpu_ratios), 4),
        "all_cpu_ms_median": round(1000 * statistics.median(all_cpu) / steps, 2),
        "all_cpu_ratio_median": round(statistics.median(all_ratios), 4),
        "all_cpu_ratio_min": round(min(all_ratios), 4),
        "all_cpu_ratio_max": round(max(all_ratios), 4),
        "megabytes_a_step": round(num_bytes / steps / len(times) / 1e6, 2),
        "markers": markers,
        "steps": steps * len(times),
    }


def _print(report: dict[str, Any]) -> None:
    print(f"{report['command']}\n{report['machine']}")
    names = ("step ms", "ratio", "min", "max", "trains", "cpu", "all cpu", "MB a step", "markers")
    print(f"{'variant':26}" + "".join(f"{name:>10}" for name in names))
    for name, row in report["variants"].items():
        keys = ("step_ms_median", "ratio_median_until_all_is_sent", "ratio_min_until_all_is_sent")
        keys += ("ratio_max_until_all_is_sent", "ratio_median", "cpu_ratio_median", "all_cpu_ratio_median")
        keys += ("megabytes_a_step", "markers")
        print(f"{name:26}" + "".join(f"{row[key]:>10}" for key in keys))


if __name__ == "__main__":
    main()
