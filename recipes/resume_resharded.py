"""Restore a marker of any recipe under a new plan, and prove that nothing differs: one file to copy.

    torchrun --standalone --nproc_per_node 3 recipes/resume_resharded.py --recipe train_deepfm \\
        --stream_ckpt file://ckpt --restore 1:2 --sharding column_wise

All other flags are those of the recipe. The number of ranks and ``--sharding`` determine the new plan. The state of the
ranks after the restore is gathered on rank 0 by plain TorchRec code, and compared bit for bit with an export of the
marker. The export knows no plan, assembles rows in its own way, and writes files that plain ``dcp.load`` opens.

Rank 0 holds the model twice, so choose a model that fits. The job is taken over: a trainer that still runs on this URI
stops.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from rich.console import Console
from rich.table import Table
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from torchrec_stream_ckpt import Restored, StreamCkptError
from torchrec_stream_ckpt.flags import FlagParser, restore_from

State = dict[str, torch.Tensor]
PARTS = {
    "table": "embedding tables, weights",
    "fused": "embedding tables, optimizer rows",
    "model": "dense model",
    "optimizer": "dense optimizer",
}


class UserError(Exception):
    """An error that the user can fix: shown as one message, without a traceback."""


def load_recipe(name: str) -> ModuleType:
    """Load a recipe in this folder, or your own file: a module with ``parse_args()`` and ``build()``."""
    path = Path(name) if name.endswith(".py") else Path(__file__).with_name(f"{name}.py")
    if not path.is_file():
        raise UserError(f"--recipe {name}: no such file: {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    if not (hasattr(module, "parse_args") and hasattr(module, "build")):
        raise UserError(f"--recipe {name}: the recipe needs parse_args() and build()")
    return module


# ----------------------------------------------------------------------------- what the ranks hold, by plain TorchRec


def gather(dmp: torch.nn.Module, optimizer: Any) -> dict[str, State] | None:
    """Gather the whole logical job on rank 0, by part and by the names of its state dicts; None elsewhere.
    Collective."""
    entries: dict[tuple[str, str], Any] = {}
    for name, value in dmp.state_dict().items():
        entries["table" if isinstance(value, ShardedTensor) else "model", name] = value
    for parameter, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            part = "fused" if isinstance(value, ShardedTensor) else "optimizer"
            entries[part, f"state.{parameter}.{name}"] = value
    mine, state = {}, {part: State() for part in PARTS}
    for key, value in entries.items():
        if isinstance(value, ShardedTensor):
            shards = [(shard.metadata.shard_offsets, shard.tensor.detach().cpu()) for shard in value.local_shards()]
            mine[key] = (tuple(value.size()), shards)
        elif isinstance(value, torch.Tensor):
            state[key[0]][key[1]] = (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu()
    everyone: list[Any] | None = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
    dist.gather_object(mine, everyone)
    if everyone is None:
        return None
    for part, name in sorted({key for held in everyone for key in held}):
        held = [each[part, name] for each in everyone if (part, name) in each]
        state[part][name] = assemble(name, held[0][0], [shard for _, shards in held for shard in shards])
    return state


def assemble(name: str, size: Sequence[int], shards: Sequence[tuple[Sequence[int], torch.Tensor]]) -> torch.Tensor:
    """Lay shards side by side, and check that they cover the tensor exactly once."""
    whole, covered = torch.zeros(size, dtype=shards[0][1].dtype), torch.zeros(size, dtype=torch.int8)
    for offsets, shard in shards:
        place = tuple(slice(offset, offset + count) for offset, count in zip(offsets, shard.shape, strict=True))
        whole[place] = shard
        covered[place] += 1
    assert bool((covered == 1).all()), f"the shards of {name} do not cover it exactly once"
    return whole


# ------------------------------------------------------------------------------- what the marker holds, by an export


def read_marker(args: argparse.Namespace, restored: Restored, folder: Path) -> State:
    """Return all tensors of a marker by name, through ``stream-ckpt export`` and plain ``dcp.load``."""
    command = ["export", *args.stream_ckpt, "--marker", str(restored.id), "--to", f"dcp://{folder / 'marker'}"]
    for flag in ("store", "store_options", "kafka_options", "commit_key_file"):
        value = getattr(args, flag)
        command += [f"--{flag.replace('_', '-')}", str(value)] if value is not None else []
    program = "from torchrec_stream_ckpt.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", program, *command], capture_output=True, text=True, check=False)
    if done.returncode:
        raise UserError(f"stream-ckpt export: {done.stderr.strip()}")
    metadata = dcp.FileSystemReader(folder / "marker").read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(state, checkpoint_id=str(folder / "marker"), no_dist=True)
    return state


# ------------------------------------------------------------------------------------------------------ comparison


@dataclass
class Line:
    """One line of the report: a part of the job, and its first difference."""

    tensors: int = 0
    values: int = 0
    difference: str = ""


def compare(held: dict[str, State], marker: State) -> dict[str, Line]:
    """Compare bit by bit. Both sides must have the same entries."""
    lines = {part: Line() for part in PARTS}
    for part, state in held.items():
        for name, now in state.items():
            line, then = lines[part], marker.get(name)
            line.tensors, line.values = line.tensors + 1, line.values + now.numel()
            if then is None or not same_bits(then, now):
                line.difference = line.difference or f"{name}: {'not in the marker' if then is None else 'differs'}"
    names = {name for state in held.values() for name in state}
    for name in sorted(marker.keys() - names - {name.replace(".embeddings.", ".embedding_bags.") for name in names}):
        if name.replace(".embeddings.", ".embedding_bags.") not in names:  # an export has both names of a table
            lines["model"].difference = lines["model"].difference or f"{name}: only in the marker"
    return lines


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return ``torch.equal`` of their bytes: a NaN is equal to itself, and 0.0 is not -0.0."""
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def show(lines: dict[str, Line], restored: Restored) -> bool:
    """Print the comparisons. Returns whether all parts are the same."""
    console = Console(highlight=False, soft_wrap=True)
    world = dist.get_world_size()
    console.print(
        f"marker {restored.id}, step {restored.step}: written by {restored.world} ranks, held by {world} ranks"
    )
    table = Table()
    for column in ("what", "tensors", "values", "verdict"):
        table.add_column(column, justify="right" if column in ("tensors", "values") else "left")
    for part, line in lines.items():
        verdict = "[red]differs[/]" if line.difference else "[green]bit-identical[/]" if line.tensors else "none there"
        table.add_row(PARTS[part], f"{line.tensors:,}", f"{line.values:,}", verdict)
    console.print(table)
    for line in lines.values():
        if line.difference:
            console.print(f"[red]{line.difference}[/]")
    return lines["table"].tensors > 0 and not any(line.difference for line in lines.values())


def prove(recipe: ModuleType, args: argparse.Namespace, device: torch.device) -> bool:
    """Restore, gather, compare. Returns whether everything is the same. Collective: every rank has the same result."""
    from torchrec_stream_ckpt import StreamCheckpointer

    dmp, optimizer, loader = recipe.build(args, device)
    config = replace(args.stream, on_signal=None)  # no training, so a signal has nothing to mark
    with StreamCheckpointer(dmp, optimizer, config=config, stateful={"loader": loader}) as checkpointer:
        restored = restore_from(args, checkpointer)
        if restored is None:
            raise UserError(f"{args.stream_ckpt[0]} has no committed marker to restore")
        print(f"rank {dist.get_rank()} restored {restored.rows:,} rows from {restored.source}", flush=True)
        held = gather(dmp, optimizer)
        is_same = [False]
        if held is not None:
            with tempfile.TemporaryDirectory() as folder:
                is_same = [show(compare(held, read_marker(args, restored, Path(folder))), restored)]
        dist.broadcast_object_list(is_same)
    return is_same[0]


def fail(message: str) -> NoReturn:
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once per node
        print(f"resume_resharded.py: error: {message}", file=sys.stderr, flush=True)
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank of the job."""
    parser = FlagParser(
        prog="resume_resharded.py",
        description="Restore a marker under a new plan and prove it; all other flags are the recipe's.",
        allow_abbrev=False,
    )
    parser.add_argument("--recipe", required=True, metavar="NAME", help="train_deepfm, or the path of a .py file")
    own, flags = parser.parse_known_args(argv)
    try:
        recipe = load_recipe(own.recipe)
        args = recipe.parse_args(flags)
        if args.stream is None or args.restore == "none":
            fail("pass --stream_ckpt URI and --restore latest or GENERATION:MARKER")
        if len(args.stream_ckpt) > 1:
            fail("a proof applies to one tier: pass --stream_ckpt once")
        if "RANK" not in os.environ:
            fail("start it with torchrun: torchrun --standalone --nproc_per_node 3 recipes/resume_resharded.py ...")
        recipe.configure_logging(int(os.environ["RANK"]))
        for message in (".*deprecating ShardedTensor", "torch.distributed is disabled"):
            warnings.filterwarnings("ignore", message=message)
        is_same = run(recipe, args)
    except (UserError, StreamCkptError) as error:
        fail(str(error))
    except Exception as error:
        if type(error).__name__ == "UserError":  # the recipe's own
            fail(str(error))
        raise
    raise SystemExit(0 if is_same else 1)


def run(recipe: ModuleType, args: argparse.Namespace) -> bool:
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        is_same = prove(recipe, args, device)
        dist.barrier()  # no rank leaves while another one still communicates with it
        return is_same
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
