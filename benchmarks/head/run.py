"""Restore of the newest marker from HEAD, from the store, and torch.load of the same tables: paired, interleaved.

    python benchmarks/head/run.py [--tables 4] [--rows 1250000] [--dim 64] [--rounds 7] [--out FILE.json]

One job of one rank trains a few steps, commits a marker, and a materializer folds it into a store in a local folder,
with a HEAD in shared memory. Then each round does, in random order and once each:

``torch.load``   read a ``torch.save`` file of the same tables and optimizer states into new memory
``and copy``     the same, and copy them into the live tables: what such a restart really does
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
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingEnv, ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.commit.control import Control
from torchrec_stream_ckpt.log.files import FileLog
from torchrec_stream_ckpt.materialize.head import HeadWriter
from torchrec_stream_ckpt.materialize.materializer import Materializer
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.dense import open_dense

VARIANTS = ("torch.load", "and copy", "store", "head", "unverified")
BATCH = 512


class Net(nn.Module):
    """A dense layer on an EmbeddingBagCollection."""

    def __init__(self, tables: int, rows: int, dim: int) -> None:
        super().__init__()
        configs = [
            EmbeddingBagConfig(name=f"t{n:02d}", num_embeddings=rows, embedding_dim=dim, feature_names=[f"f{n}"])
            for n in range(tables)
        ]
        self.ebc = EmbeddingBagCollection(tables=configs, device=torch.device("meta"))
        self.top = nn.Linear(tables * dim, 1)

    def forward(self, ids: KeyedJaggedTensor) -> torch.Tensor:
        loss: torch.Tensor = self.top(self.ebc(ids).values()).square().mean()
        return loss


@dataclass
class Job:
    """A live job, and all tensors of its tables: views of what it trains."""

    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)

    def step(self, args: argparse.Namespace) -> None:
        ids = torch.randint(0, args.rows, (args.tables * BATCH,))
        lengths = torch.ones(args.tables * BATCH, dtype=torch.int32)
        self.optimizer.zero_grad()
        self.model(KeyedJaggedTensor([f"f{n}" for n in range(args.tables)], ids, lengths=lengths)).backward()
        self.optimizer.step()

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


def build(args: argparse.Namespace) -> Job:
    torch.manual_seed(0)
    net = Net(args.tables, args.rows, args.dim)
    sharder = EmbeddingBagCollectionSharder(
        fused_params={"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": 0.1}
    )
    placement = {f"t{n:02d}": table_wise(rank=0, compute_kernel="fused") for n in range(args.tables)}
    plan = construct_module_sharding_plan(net.ebc, placement, sharder, 1, 1, "cpu")
    model = DistributedModelParallel(
        net,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({"ebc": plan}),
        sharders=[sharder],
    )
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    job = Job(model, CombinedOptimizer([model.fused_optimizer, dense]))
    for name, value in {**model.state_dict(), **_states(model.fused_optimizer.state_dict()["state"])}.items():
        if "t" in name and hasattr(value, "local_shards"):
            job.tensors |= {f"{name}.{n}": shard.tensor for n, shard in enumerate(value.local_shards())}
    return job


def _states(by_table: dict[str, dict[str, Any]]) -> dict[str, Any]:
    return {name: value for states in by_table.values() for name, value in states.items()}


class Rounds:
    """What each variant does, on one job."""

    def __init__(self, args: argparse.Namespace, job: Job, folder: Path, head: Path) -> None:
        self._job, self._folder, self._head = job, folder, head
        self._file = folder / "tables.pt"
        with contextlib.closing(self._attach(None)) as checkpointer:
            for _ in range(args.steps):
                job.step(args)
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
        loaded = torch.load(self._file)
        if variant == "and copy":
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


def machine() -> dict[str, Any]:
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
    parser.add_argument("--tables", type=int, default=4)
    parser.add_argument("--rows", type=int, default=1_250_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--head", type=Path, default=Path("/dev/shm"), help="where HEAD's folder is made")
    parser.add_argument("--out", type=Path, help="file the result as JSON")
    args = parser.parse_args()
    here = machine()
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with (
        tempfile.TemporaryDirectory(prefix="head-bench-", dir=os.environ.get("BENCH_DIR")) as scratch,
        tempfile.TemporaryDirectory(prefix="head-bench-", dir=args.head) as head,
    ):
        dist.init_process_group("gloo", init_method=f"file://{scratch}/group", rank=0, world_size=1)
        job = build(args)
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
