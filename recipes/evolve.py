"""Change a DLRM between two runs of one job, and prove that nothing was lost that both models have.

    python recipes/evolve.py

Week 1 trains a small DLRM on 2 ranks, streams, and ends. In week 2 the model has changed: a feature is added, a table
has grown, and another table has another optimizer. 3 ranks restore the newest marker with the declared changes, and
continue training. Each kept value is compared bit for bit with its value in week 1, each fresh one with its value in
the new model before the restore. Both are gathered by plain TorchRec (``proof.py``), not from the stream.

``WEEKS`` describes the two models and ``CHANGES`` their differences; the rest is an ordinary trainer.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import shutil
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import Adagrad, in_backward_optimizer_filter
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_stream_ckpt import (
    Changes,
    DenseChanges,
    GlobalBatches,
    RowChange,
    StreamCheckpointer,
    StreamConfig,
    planner_constraints,
)
from torchrec_stream_ckpt.errors import SchemaMismatchError
from torchrec_stream_ckpt.recipes.proof import StepEvent, gather
from torchrec_stream_ckpt.script import free_port

DIM, COUNTS = 16, 4
BATCH = 240
STEPS = 60
CITIES = 50
console = Console(highlight=False, soft_wrap=True)


@dataclass(frozen=True)
class Week:
    """A model, and its ranks."""

    world: int
    rows: dict[str, int]
    """Feature -> rows of its table."""
    pointwise: tuple[str, ...] = ()
    """Features whose tables are trained by Adagrad; all others by its row-wise form."""


WEEKS = (
    Week(2, {"user": 2000, "item": 1500, "shop": 300}),
    Week(3, {"user": 2000, "item": 2500, "shop": 300, "city": CITIES}, pointwise=("shop",)),
)
EBC = "model.sparse_arch.embedding_bag_collection"
CHANGES = Changes(
    added=(f"{EBC}.t_city",),
    rows={f"{EBC}.t_item": RowChange(2500)},
    optimizer={f"{EBC}.t_shop": "exact_adagrad"},
    dense=DenseChanges(reshaped=("model.over_arch.model.0._mlp.0._linear.weight",)),  # it reads one more feature
)


# ------------------------------------------------------------------------------------------------ the job of a week


def make_batch(features: Sequence[str], epoch: int, rows: range, size: int) -> Batch:
    """Return the samples ``rows`` of an epoch, filled up to ``size`` with samples without ids, whose label is -1.

    Whether there was a click depends on all four ids, even if the model reads only some of them.
    """
    random = np.random.default_rng([epoch, rows.start])
    ids = {name: random.zipf(1.3, len(rows)) % limit for name, limit in (("user", 2000), ("item", 1500), ("shop", 300))}
    ids["city"] = random.integers(0, CITIES, len(rows))
    liking = sum(np.sin(31.0 * ids[name] + at) * (3.0 if name == "city" else 1.0) for at, name in enumerate(ids))
    counts = random.random((len(rows), COUNTS)).astype(np.float32)
    clicked = (random.random(len(rows)) < 1 / (1 + np.exp(-liking))).astype(np.float32)
    empty = size - len(rows)
    return Batch(
        dense_features=torch.from_numpy(np.pad(counts, ((0, empty), (0, 0)))),
        sparse_features=KeyedJaggedTensor(
            keys=list(features),
            values=torch.from_numpy(np.concatenate([ids[name] for name in features])),
            lengths=torch.tensor(([1] * len(rows) + [0] * empty) * len(features)),
        ),
        labels=torch.from_numpy(np.pad(clicked, (0, empty), constant_values=-1.0)),
    )


class ClickLoss(torch.nn.Module):
    """This rank's term of the loss; its mean over the ranks is the loss of the global batch."""

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels.clamp(min=0), reduction="none")
        return (each * (labels >= 0)).sum() * dist.get_world_size() / BATCH


def build(week: Week, config: StreamConfig, changes: Changes | None) -> tuple[Any, CombinedOptimizer]:
    """Build the sharded model and its optimizers."""
    torch.manual_seed(len(week.rows))
    tables = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in week.rows.items()
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    for name in week.rows:
        kind: Any = Adagrad if name in week.pointwise else RowWiseAdagrad
        apply_optimizer_in_backward(kind, ebc.embedding_bags[f"t_{name}"].parameters(), {"lr": 0.05})
    dlrm = DLRM(ebc, COUNTS, dense_arch_layer_sizes=[32, DIM], over_arch_layer_sizes=[32, 1])
    model = DLRMTrain(dlrm)
    model.loss_fn = ClickLoss()
    mine = ParameterConstraints(compute_kernels=["fused"])
    constraints = {f"t_{name}": mine for name in week.rows}
    if dist.get_rank() == 0:  # it makes the plan for all
        constraints = planner_constraints(config, base=constraints, changes=changes)
    sharder: Any = EmbeddingBagCollectionSharder()
    planner = EmbeddingShardingPlanner(Topology(dist.get_world_size(), "cpu"), BATCH, constraints=constraints)
    plan = planner.collective_plan(model, [sharder], dist.group.WORLD)
    dmp = DistributedModelParallel(model, device=torch.device("cpu"), plan=plan, sharders=[sharder])
    dense = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(dmp.named_parameters())), partial(torch.optim.Adagrad, lr=0.05)
    )
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense])


def train_week(number: int, folder: Path) -> None:
    """(one rank) Restore, train ``STEPS`` steps, set a marker."""
    week, changes = WEEKS[number], CHANGES if number else None
    rank, world = dist.get_rank(), dist.get_world_size()
    config = StreamConfig(uri=f"file://{folder / 'log'}", marker_every=20)
    dmp, optimizer = build(week, config, changes)
    read = partial(make_batch, list(week.rows))
    loader = GlobalBatches(read, samples=10**6, batch_size=BATCH, rank=rank, world=world)
    with StreamCheckpointer(dmp, optimizer, config=config, stateful={"loader": loader}) as checkpointer:
        look = partial(StepEvent, 0, dmp, optimizer, loader, None, checkpointer, None)
        before = gather(look())
        report: dict[str, Any] = {"refused": refusal(checkpointer) if number else ""}
        restored = checkpointer.restore(changes=changes)
        if restored is not None:
            report["restored"] = f"marker {restored.id}, step {restored.step}, written by {restored.world} ranks"
            report["changes"] = list(restored.evolved.lines())
            now = gather(look())
            if before is not None and now is not None:
                week_1 = torch.load(folder / "week-1.pt", weights_only=True)
                report["proof"] = compare(expected(week_1, before), now)
        losses = []
        for batch in islice(loader, STEPS):
            optimizer.zero_grad()
            loss, _ = dmp(batch)
            loss.backward()
            optimizer.step()
            checkpointer.step()
            dist.all_reduce(loss := loss.detach())
            losses.append(loss.item() / world)
        report["marker"] = str(checkpointer.mark().result().id)
        truth = gather(look())
    if rank == 0:
        torch.save(truth, folder / f"week-{number + 1}.pt")
        report["losses"] = {"first": sum(losses[:10]) / 10, "last": sum(losses[-10:]) / 10}
        (folder / f"week-{number + 1}.json").write_text(json.dumps(report))


def refusal(checkpointer: StreamCheckpointer) -> str:
    """Return the error for the changed model if nothing is declared."""
    try:
        checkpointer.plan()
    except SchemaMismatchError as error:
        return str(error)
    raise AssertionError("the changed model was accepted as the old one")


# ----------------------------------------------------------------------------- what the changed model has to hold


def expected(old: dict[str, Any], fresh: dict[str, Any]) -> dict[str, tuple[str, Any]]:
    """Return the expected values by name, each with its origin: the value of ``old`` if it fits, otherwise that of
    ``fresh``."""
    found: dict[str, tuple[str, Any]] = {}
    for name, value in fresh.items():
        kept = old.get(name)
        if name.startswith("random/"):
            continue
        if kept is None:
            found[name] = ("fresh", value)
        elif not isinstance(value, torch.Tensor) or (value.shape, value.dtype) == (kept.shape, kept.dtype):
            found[name] = ("kept", kept)
        elif name.startswith(("table/", "fused optimizer/")) and value.shape[1:] == kept.shape[1:]:
            found[name] = ("kept, new rows fresh", torch.cat([kept, value[len(kept) :]]))
        else:
            found[name] = ("fresh", value)
    for name in found:
        layer = name.removeprefix("dense optimizer/").rpartition("/")[0]
        if f"dense/{layer}" in found and found[f"dense/{layer}"][0] == "fresh":
            found[name] = ("fresh", fresh[name])  # the state of a parameter follows the parameter
    return found


def compare(wanted: dict[str, tuple[str, Any]], now: dict[str, Any]) -> list[list[Any]]:
    """Return [part, its origin, tensors, values, the first that differs] of each part."""
    lines: dict[tuple[str, str], list[Any]] = {}
    for name, (fate, value) in sorted(wanted.items()):
        line = lines.setdefault((name.partition("/")[0], fate), [0, 0, ""])
        line[0] += 1
        line[1] += value.numel() if isinstance(value, torch.Tensor) else 1
        if not same(value, now[name]):
            line[2] = line[2] or name
    return [[*key, *line] for key, line in lines.items()]


def same(one: Any, other: Any) -> bool:
    """Return whether two values have the same bits."""
    if not isinstance(one, torch.Tensor):
        return bool(one == other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(one.contiguous().reshape(-1).view(torch.uint8), other.contiguous().reshape(-1).view(torch.uint8))


# ------------------------------------------------------------------------------------------------------- the driver


def run_rank(number: int, rank: int, port: int, folder: Path) -> None:
    """Run one rank of one week, in a separate process."""
    world = WEEKS[number].world
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if sys.platform == "linux":
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    train_week(number, folder)
    dist.barrier()
    dist.destroy_process_group()


def run_week(number: int, folder: Path) -> dict[str, Any]:
    """Train one week, and return its report."""
    port = free_port()
    processes, world = multiprocessing.get_context("fork"), WEEKS[number].world
    ranks = [processes.Process(target=run_rank, args=(number, rank, port, folder)) for rank in range(world)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        raise SystemExit(f"evolve.py: error: week {number + 1} ended with {[each.exitcode for each in ranks]}")
    report: dict[str, Any] = json.loads((folder / f"week-{number + 1}.json").read_text())
    return report


def show(first: dict[str, Any], second: dict[str, Any]) -> bool:
    """Print the fate of each part of the model. Returns whether all of it is as expected."""
    console.print(
        "\n[bold]Without a declaration the restore is refused[/], and the error shows what would accept it:\n"
    )
    console.print(second["refused"], markup=False)
    console.print(f"\n[bold]With it[/]: {second['restored']}")
    console.print("\n".join(f"  {line}" for line in second["changes"]), markup=False)
    table = Table(title="compared bit for bit: kept with week 1, fresh with the new model before the restore")
    for column in ("what", "became", "tensors", "values", "verdict"):
        table.add_column(column, justify="right" if column in ("tensors", "values") else "left")
    for part, fate, tensors, values, differs in second["proof"]:
        verdict = f"[red]{differs} differs[/]" if differs else "[green]bit-identical[/]"
        table.add_row(part, fate, f"{tensors:,}", f"{values:,}", verdict)
    console.print(table)
    for name, report in (("week 1, the old model", first), ("week 2, the new one ", second)):
        losses = report["losses"]
        console.print(f"{name}: loss {losses['first']:.4f} at its beginning, {losses['last']:.4f} at its end")
    fates = {fate for _, fate, *_ in second["proof"]}
    return fates == {"kept", "kept, new rows fresh", "fresh"} and not any(line[-1] for line in second["proof"])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--dir", type=Path, default=Path("evolve-run"), help="working folder (default: %(default)s)")
    parser.add_argument("--keep", action="store_true", help="keep the working folder; it is kept anyway on failure")
    args = parser.parse_args()
    folder = args.dir.absolute()
    if folder.exists():
        if not (folder / "log").exists():
            parser.error(f"{folder} exists but was not created by this demo")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    started = time.monotonic()
    reports = []
    for number, week in enumerate(WEEKS):
        console.print(f"[bold cyan]week {number + 1}[/] {week.world} ranks train {STEPS} steps: {', '.join(week.rows)}")
        reports.append(run_week(number, folder))
    if not show(*reports):
        console.print(f"[red]the restored model differs from what was expected[/] (see {folder})")
        return 1
    console.print(f"[green]all that was kept is bit-identical[/] ({time.monotonic() - started:.0f} s)")
    if not args.keep:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
