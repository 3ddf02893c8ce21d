"""The demo's proof: train_dlrm.py in a loop with observers, the truth of each step, and a comparison.

The truth does not come from the stream: it is gathered by plain TorchRec and torch.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.keyed import CombinedOptimizer

from torchrec_stream_ckpt import GlobalBatches
from torchrec_stream_ckpt.recipes import train_dlrm as recipe

Truth = dict[str, Any]


class ProofError(Exception):
    """The state of the ranks does not form a whole job."""


# -------------------------------------------------------------------------------------------- the recipe, looked at


@dataclass(frozen=True)
class StepEvent:
    """The live job. ``step`` 0 or the restored step is reported first, before any training."""

    step: int
    model: DistributedModelParallel
    optimizer: CombinedOptimizer
    loader: GlobalBatches[Any]
    restored: Any
    checkpointer: Any
    loss: torch.Tensor | None
    """This rank's term of the loss; its mean over the ranks is the loss of the global batch."""


def train(flags: Sequence[str], on_step: Callable[[StepEvent], None], steps: int | None = None) -> None:
    """Train the recipe's job, in a separate loop.

    Args:
        flags: The recipe's flags.
        on_step: Called on every rank, once before the first step and after each one.
        steps: Most steps to train.
    """
    args = recipe.parse_args(flags)
    recipe.configure_logging(int(os.environ["RANK"]))
    with recipe.process_group() as device:
        model, optimizer, loader = recipe.build(args, device)
        checkpointer, restored = recipe.open_checkpointer(args, model, optimizer, loader)
        with checkpointer:
            step = 0 if restored is None else restored.step
            on_step(StepEvent(step, model, optimizer, loader, restored, checkpointer, None))
            model.train()
            batches = (batch for _ in range(loader.epoch, args.epochs) for batch in loader)
            for batch in islice(batches, steps):
                optimizer.zero_grad()
                loss, _ = model(batch.to(device))
                loss.backward()
                optimizer.step()
                step += 1
                checkpointer.step()
                on_step(StepEvent(step, model, optimizer, loader, restored, checkpointer, loss.detach()))
                if checkpointer.should_stop:
                    raise SystemExit(128 + signal.SIGTERM)
            checkpointer.mark(meta={"final": "yes"}).result()  # if this step has a marker, that one gets it


# --------------------------------------------------------------------------------- the truth, by plain TorchRec code


def gather(event: StepEvent) -> Truth | None:
    """Gather the whole logical job on rank 0, None elsewhere: a flat mapping of names to tensors and plain values."""
    fused, dense = (optimizer for _, optimizer in event.optimizer.optimizers)
    state: Truth = {}
    for name, value in event.model.state_dict().items():
        state[f"{'table' if isinstance(value, ShardedTensor) else 'dense'}/{name}"] = value
    for kind, optimizer in (("fused optimizer", fused), ("dense optimizer", dense)):
        for parameter, values in optimizer.state_dict()["state"].items():
            state.update({f"{kind}/{parameter}/{name}": value for name, value in values.items()})
    mine = {  # only its own rank knows a table-wise table's optimizer state
        name: (tuple(value.size()), [(s.metadata.shard_offsets, s.tensor.detach().cpu()) for s in value.local_shards()])
        for name, value in state.items()
        if isinstance(value, ShardedTensor)
    }
    generators = (torch.get_rng_state(), np.random.get_state(), random.getstate())
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object((mine, generators), everyone)
    if everyone is None:
        return None
    truth = {name: plain(value) for name, value in state.items() if name not in mine}
    for name in sorted({name for sharded, _ in everyone for name in sharded}):
        held = [sharded[name] for sharded, _ in everyone if name in sharded]
        truth[name] = assemble(name, held[0][0], [shard for _, shards in held for shard in shards])
    for rank, (_, (of_torch, of_numpy, of_python)) in enumerate(everyone):
        truth[f"random/{rank}/torch"] = of_torch
        truth[f"random/{rank}/numpy"] = torch.from_numpy(np.array([*of_numpy[1], of_numpy[2]], dtype=np.int64))
        truth[f"random/{rank}/python"] = torch.tensor(of_python[1])
    position = event.loader.state_dict()
    truth["loader/epoch"], truth["loader/samples"] = position["epoch"], position["samples"]
    return truth


def assemble(name: str, size: Sequence[int], shards: Sequence[tuple[Sequence[int], torch.Tensor]]) -> torch.Tensor:
    """Lay shards side by side, and check that they cover the tensor exactly once."""
    whole = torch.zeros(size, dtype=shards[0][1].dtype)
    covered = torch.zeros(size, dtype=torch.int8)
    for offsets, shard in shards:
        place = tuple(slice(offset, offset + n) for offset, n in zip(offsets, shard.shape, strict=True))
        whole[place] = shard
        covered[place] += 1
    if not bool((covered == 1).all()):
        raise ProofError(f"the shards of {name} do not cover it exactly once")
    return whole


def plain(value: Any) -> Any:
    return value.detach().cpu().clone() if isinstance(value, torch.Tensor) else value


# ------------------------------------------------------------------------------------------------------- comparison


@dataclass
class Line:
    """One line of the report: a part of the job, and its differences."""

    part: str
    tensors: int = 0
    values: int = 0
    difference: str = ""


def compare(truth: Truth, now: Truth) -> list[Line]:
    """Compare bit by bit. Random state is compared for ranks that both jobs have; everything else must exist in
    both."""
    ranks = {name.split("/")[1] for name in truth if name.startswith("random/")}
    now = {name: v for name, v in now.items() if not name.startswith("random/") or name.split("/")[1] in ranks}
    lines: dict[str, Line] = {}
    for name in sorted(truth.keys() | now.keys()):
        line = lines.setdefault(name.split("/")[0], Line(name.split("/")[0]))
        difference = differ(truth.get(name), now.get(name))
        line.tensors += 1
        line.values += truth[name].numel() if isinstance(truth.get(name), torch.Tensor) else 1
        if difference and not line.difference:
            line.difference = f"{name}: {difference}"
    return list(lines.values())


def differ(truth: Any, now: Any) -> str:
    """Return the first difference, or an empty string."""
    if truth is None or now is None:
        return "missing before the kill" if truth is None else "missing after the restore"
    if not isinstance(truth, torch.Tensor) or not isinstance(now, torch.Tensor):
        return "" if truth == now else f"{truth} before, {now} after"
    if truth.shape != now.shape or truth.dtype != now.dtype:
        return f"{tuple(truth.shape)} {truth.dtype} before, {tuple(now.shape)} {now.dtype} after"
    bits, bits_now = (tensor.reshape(-1).view(torch.uint8).reshape(tensor.numel(), -1) for tensor in (truth, now))
    places = (bits != bits_now).any(dim=1).nonzero().reshape(-1).tolist()
    if not places:
        return ""
    before, after = (tensor.reshape(-1)[places[0]].item() for tensor in (truth, now))
    return f"{len(places)} of {truth.numel()} values, the first is number {places[0]}: {before} before, {after} after"
