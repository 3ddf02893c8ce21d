"""Train DLRM on clicks, with streaming checkpoints: one file to copy.

    torchrun --standalone --nproc_per_node 2 recipes/train_dlrm.py --data train.txt --stream_ckpt file://ckpt

``--data`` takes files of Criteo; without it the recipe generates clicks. If it is started again, with any number of
ranks and any sharding, it continues after the newest committed marker. Without ``--stream_ckpt`` it is a plain TorchRec
job: every line that concerns checkpoints is in ``parse_args``, ``open_checkpointer`` or ``train``.

The model reads its embeddings by feature name (as TorchRec's ``SparseArch`` does), so it is the same model under every
sharding plan. A model that reads ``KeyedTensor.values()`` is not: regroup by name first.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import column_wise, construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ModuleSharder, ShardingPlan
from torchrec.models.dlrm import DLRM, DLRMTrain
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from torchrec_stream_ckpt import GlobalBatches
from torchrec_stream_ckpt.errors import ConfigError, StreamCkptError
from torchrec_stream_ckpt.flags import FlagParser, add_flags, config_from, positive, restore_from, whole
from torchrec_stream_ckpt.recipes.data import IGNORED, add_data_flags, make_batches, open_clicks
from torchrec_stream_ckpt.recipes.files import COUNTS, HASHES, UserError

log = logging.getLogger("train_dlrm")

EBC_PATH = "model.sparse_arch.embedding_bag_collection"
SHARDINGS = ("auto", "table_wise", "row_wise", "column_wise", "mixed")

FUSED_OPTIMIZERS = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
}

# Defaults of the flags. "thesis" is a published synthetic configuration, "small" trains on a laptop.
PRESETS: dict[str, dict[str, Any]] = {
    "thesis": {
        "learning_rate": 0.001,  # 100 ids are summed: a higher rate diverges at first
        "tables": 8,
        "num_embeddings": 80_000,
        "embedding_dim": 64,
        "batch_size": 2048,
        "ids_per_lookup": 100,
        "dense_arch_layer_sizes": [512, 512, 64],
        "over_arch_layer_sizes": [1024, 1024, 1024, 1],
    },
    "small": {
        "learning_rate": 0.05,
        "tables": 8,
        "num_embeddings": 5_000,
        "embedding_dim": 16,
        "batch_size": 256,
        "ids_per_lookup": 4,
        "dense_arch_layer_sizes": [64, 16],
        "over_arch_layer_sizes": [64, 1],
    },
    "criteo": {
        "learning_rate": 0.05,
        "tables": HASHES,
        "num_embeddings": 100_000,
        "embedding_dim": 64,
        "batch_size": 2048,
        "ids_per_lookup": 1,
        "dense_arch_layer_sizes": [512, 256, 64],
        "over_arch_layer_sizes": [512, 512, 256, 1],
    },
}


# ----------------------------------------------------------------------------------------------------------- flags


def sizes(text: str) -> list[int]:
    """Parse whole numbers above zero, separated by commas (an argparse type)."""
    return [whole(1)(part) for part in text.split(",")]


def sharding(text: str) -> str:
    """Parse one of SHARDINGS, or the name of a JSON file (an argparse type)."""
    if text not in SHARDINGS and not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"'{text}' is not one of {', '.join(SHARDINGS)} or the name of a .json file")
    return text


def make_parser() -> FlagParser:
    parser = FlagParser(
        prog="train_dlrm.py",
        description="Train DLRM with TorchRec, with streaming checkpoints if --stream_ckpt is given.",
    )
    add_data_flags(parser, "files of Criteo", batch_size=None, sizes=("thesis", "small"))
    add_flags(parser)

    model = parser.add_argument_group("model")
    model.add_argument("--embedding_dim", type=whole(4))
    model.add_argument("--num_embeddings", type=whole(1), help="rows of every table; ids are hashed to it")
    model.add_argument("--num_embeddings_per_feature", metavar="N,N,...", type=sizes, help="rows of each table")
    model.add_argument("--dense_arch_layer_sizes", metavar="N,N,...", type=sizes, help="must end in the embedding dim")
    model.add_argument("--over_arch_layer_sizes", metavar="N,N,...", type=sizes, help="must end in 1")
    model.add_argument("--optimizer", choices=tuple(FUSED_OPTIMIZERS), default="rowwise_adagrad")
    model.add_argument("--learning_rate", type=positive)
    model.add_argument("--ids_per_lookup", type=whole(1), help="of made clicks: ids of one sample and table")
    model.add_argument("--zipf", type=positive, default=1.05, help="of made clicks: exponent (%(default)s)")
    model.add_argument("--seed", type=whole(0), default=0)
    model.add_argument(
        "--sharding",
        type=sharding,
        default="auto",
        help=f"one of {', '.join(SHARDINGS)}, or a JSON file: {{TABLE: 'row_wise' | {{'table_wise': RANK}} | "
        "{'column_wise': [RANK, ...]}}. The state of row-wise Adagrad belongs to a column shard: a job that is to be "
        "restored under another plan keeps its tables' column splits (column_wise and mixed always cut in two)",
    )
    parser.add_argument("--log_every", metavar="STEPS", type=whole(1), default=50)
    return parser


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse and check the flags; a mistake prints one message and exits with 2, as argparse does."""
    parser = make_parser()
    args = parser.parse_args(argv)
    problem = complete(args)
    if problem:
        parser.error(problem)
    try:
        args.stream = config_from(args, on_signal="mark")
    except ConfigError as error:
        parser.error(str(error))
    return args


def complete(args: argparse.Namespace) -> str | None:
    """Fill in the defaults of the preset. Returns what is wrong with the combination of flags; None if nothing is."""
    if args.data is not None and args.ids_per_lookup is not None:
        return "--ids_per_lookup applies only to made clicks: omit it with --data"
    if args.num_embeddings is not None and args.num_embeddings_per_feature is not None:
        return "pass --num_embeddings or --num_embeddings_per_feature, not both"

    preset = PRESETS["criteo" if args.data is not None else args.synthetic or "thesis"]
    for flag in (
        "batch_size",
        "embedding_dim",
        "ids_per_lookup",
        "learning_rate",
        "dense_arch_layer_sizes",
        "over_arch_layer_sizes",
    ):
        if getattr(args, flag) is None:
            setattr(args, flag, preset[flag])
    if args.num_embeddings_per_feature is None:
        args.num_embeddings_per_feature = [args.num_embeddings or preset["num_embeddings"]] * preset["tables"]
    if args.data is not None and len(args.num_embeddings_per_feature) != HASHES:
        found = len(args.num_embeddings_per_feature)
        return f"--num_embeddings_per_feature needs {HASHES} numbers, not {found}"
    if args.embedding_dim % 4:
        return f"--embedding_dim {args.embedding_dim} is not a multiple of 4, which FBGEMM needs"
    if args.sharding in ("column_wise", "mixed") and args.embedding_dim % 8:
        return f"--sharding {args.sharding} halves tables: --embedding_dim {args.embedding_dim} is not a multiple of 8"
    if args.dense_arch_layer_sizes[-1] != args.embedding_dim:
        return (
            f"--dense_arch_layer_sizes must end in the embedding dimension, {args.embedding_dim}, but ends in "
            f"{args.dense_arch_layer_sizes[-1]}"
        )
    if len(args.over_arch_layer_sizes) < 2 or args.over_arch_layer_sizes[-1] != 1:
        return "--over_arch_layer_sizes must have at least two numbers and end in 1"
    return None


# ----------------------------------------------------------------------------------------------------------- model


class ClickLoss(nn.Module):
    """This rank's term of the loss; its mean over the ranks is the loss of the global batch."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = nn.functional.binary_cross_entropy_with_logits(logits, labels.clamp(min=0), reduction="none")
        return (each * (labels != IGNORED)).sum() * self.scale


def build_model(args: argparse.Namespace, device: torch.device) -> DLRMTrain:
    tables = [
        EmbeddingBagConfig(
            name=f"t_cat_{i}", embedding_dim=args.embedding_dim, num_embeddings=rows, feature_names=[f"cat_{i}"]
        )
        for i, rows in enumerate(args.num_embeddings_per_feature)
    ]
    model = DLRMTrain(
        DLRM(
            embedding_bag_collection=EmbeddingBagCollection(tables=tables, device=torch.device("meta")),
            dense_in_features=COUNTS,
            dense_arch_layer_sizes=args.dense_arch_layer_sizes,
            over_arch_layer_sizes=args.over_arch_layer_sizes,
            dense_device=device,
        )
    )
    model.loss_fn = ClickLoss(dist.get_world_size() / args.batch_size)
    return model


def make_plan(
    args: argparse.Namespace, model: DLRMTrain, sharder: ModuleSharder[Any], device: torch.device
) -> ShardingPlan:
    """Return the sharding plan of ``--sharding``, always with the fused kernel.

    TorchRec's helpers choose the dense kernel if no optimizer was applied in the backward pass.
    """
    ebc = model.get_submodule(EBC_PATH)
    tables = [config.name for config in ebc.embedding_bag_configs()]
    world = dist.get_world_size()
    if args.sharding == "auto":
        return ask_planner(args, model, sharder, device, tables)
    if args.sharding.endswith(".json"):
        wanted = read_sharding(Path(args.sharding), tables, world)
    else:
        kinds = ("table_wise", "row_wise", "column_wise") if args.sharding == "mixed" else (args.sharding,)
        wanted = {table: spread(kinds[i % len(kinds)], i, world) for i, table in enumerate(tables)}
    generators = {table: shard_as(kind, where) for table, (kind, where) in wanted.items()}
    try:
        plan: EmbeddingModuleShardingPlan = construct_module_sharding_plan(
            ebc, generators, sharder=sharder, world_size=world, device_type=device.type
        )
    except ValueError as error:
        raise UserError(f"--sharding {args.sharding}: {error}") from error
    for parameter in plan.values():
        parameter.compute_kernel = "fused"
    return ShardingPlan(plan={EBC_PATH: plan})


def ask_planner(
    args: argparse.Namespace, model: DLRMTrain, sharder: ModuleSharder[Any], device: torch.device, tables: list[str]
) -> ShardingPlan:
    """Let TorchRec's planner decide, within the constraints of the marker that will be restored."""
    world = dist.get_world_size()
    mine = ParameterConstraints(compute_kernels=["fused"], sharding_types=["table_wise", "row_wise", "column_wise"])
    constraints = dict.fromkeys(tables, mine)
    if args.stream is not None and args.restore != "none" and dist.get_rank() == 0:  # rank 0 makes the plan for all
        from torchrec_stream_ckpt import planner_constraints

        constraints = planner_constraints(
            args.stream, args.restore, constraints, source=args.source, changes=args.changes
        )
    topology = Topology(world_size=world, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology, batch_size=args.batch_size // world, constraints=constraints)
    return planner.collective_plan(model, [sharder], dist.group.WORLD)


def spread(kind: str, index: int, world: int) -> tuple[str, Any]:
    """Return the place of table number ``index``. Column-wise is always in two, so the split does not depend on the
    world size."""
    where = {"table_wise": index % world, "row_wise": None, "column_wise": [index % world, (index + 1) % world]}
    return kind, where[kind]


def shard_as(kind: str, where: Any) -> Any:
    if kind == "row_wise":
        return row_wise()
    return table_wise(rank=where) if kind == "table_wise" else column_wise(ranks=where)


def read_sharding(path: Path, tables: Sequence[str], world: int) -> dict[str, tuple[str, Any]]:
    """Read ``{TABLE: 'row_wise' | {'table_wise': RANK} | {'column_wise': [RANK, ...]}}``."""
    try:
        wanted = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--sharding {path}: {error}") from error
    if not isinstance(wanted, dict) or set(wanted) != set(tables):
        raise UserError(f"--sharding {path}: it must name exactly the tables {', '.join(tables)}")
    found = {}
    for table in tables:
        entry = wanted[table]
        kind, where = next(iter(entry.items())) if isinstance(entry, dict) and len(entry) == 1 else (entry, None)
        ranks: Any = (
            {"table_wise": [where], "column_wise": where, "row_wise": []}.get(kind) if isinstance(kind, str) else None
        )
        is_list = isinstance(ranks, list) and (kind == "row_wise" or bool(ranks))
        if not is_list or not all(isinstance(rank, int) and 0 <= rank < world for rank in ranks):
            raise UserError(
                f"--sharding {path}: {table}: {json.dumps(entry)} is not a valid sharding for {world} ranks"
            )
        found[table] = (kind, where)
    return found


def build_optimizer(args: argparse.Namespace, model: DistributedModelParallel) -> CombinedOptimizer:
    """Return the optimizer: fused over the tables (in the backward pass), Adagrad or SGD over the dense part."""
    dense_class = torch.optim.SGD if args.optimizer == "sgd" else torch.optim.Adagrad
    dense_optimizer = KeyedOptimizerWrapper(
        dict(in_backward_optimizer_filter(model.named_parameters())),
        lambda params: dense_class(params, lr=args.learning_rate),
    )
    return CombinedOptimizer([model.fused_optimizer, dense_optimizer])


# -------------------------------------------------------------------------------------------------------- training


def open_checkpointer(
    args: argparse.Namespace,
    model: DistributedModelParallel,
    optimizer: CombinedOptimizer,
    loader: GlobalBatches[Batch],
) -> tuple[Any, Any]:
    """Return the checkpointer and the state that it restored; (None, None) without ``--stream_ckpt``. Every rank calls
    it."""
    if args.stream is None:
        return None, None
    from torchrec_stream_ckpt import StreamCheckpointer

    checkpointer = StreamCheckpointer(
        model, optimizer, config=args.stream, stateful={"loader": loader}, paranoid=args.paranoid
    )
    return checkpointer, restore_from(args, checkpointer)


def open_loader(args: argparse.Namespace, rank: int, world: int) -> GlobalBatches[Batch]:
    rows, ids_per_lookup = args.num_embeddings_per_feature, args.ids_per_lookup
    clicks = open_clicks(args, rows, ids_per_lookup=ids_per_lookup, zipf=args.zipf, shuffle=False)
    return make_batches(args, clicks, rank, world)


def build(
    args: argparse.Namespace, device: torch.device, loader: GlobalBatches[Batch] | None = None
) -> tuple[DistributedModelParallel, CombinedOptimizer, GlobalBatches[Batch]]:
    """Build the job without its checkpoints: sharded model, optimizer, loader."""
    rank, world = dist.get_rank(), dist.get_world_size()
    loader = loader or open_loader(args, rank, world)
    for seed in (torch.manual_seed, np.random.seed, random.seed):
        seed(args.seed + rank)  # shards differ; DDP copies rank 0's dense part to all
    dlrm = build_model(args, device)
    fused = {"optimizer": FUSED_OPTIMIZERS[args.optimizer], "learning_rate": args.learning_rate}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    plan = make_plan(args, dlrm, sharder, device)
    model = DistributedModelParallel(dlrm, device=device, plan=plan, sharders=[sharder])
    return model, build_optimizer(args, model), loader


def train(args: argparse.Namespace, device: torch.device, loader: GlobalBatches[Batch]) -> None:
    model, optimizer, loader = build(args, device, loader)
    rank, world = dist.get_rank(), dist.get_world_size()
    log.info("training on %d ranks, %s, global batch %d", world, device.type, args.batch_size)
    checkpointer, restored = open_checkpointer(args, model, optimizer, loader)
    step = 0 if restored is None else restored.step
    model.train()
    bar = tqdm(desc="training", unit="step", initial=step, disable=rank > 0 or not sys.stderr.isatty())
    with logging_redirect_tqdm(), bar, checkpointer or nullcontext():  # which records in the log how the job ended
        for epoch in range(loader.epoch, args.epochs):
            for batch in loader:
                optimizer.zero_grad()
                loss, _ = model(batch.to(device))
                loss.backward()
                optimizer.step()
                step += 1
                if checkpointer is not None:
                    checkpointer.step()
                    if checkpointer.should_stop:
                        raise SystemExit(128 + signal.SIGTERM)
                bar.update()
                if step % args.log_every == 0:
                    loss = loss.detach()
                    dist.all_reduce(loss)
                    log.info("step %d, epoch %d: loss %.6f", step, epoch, loss.item() / world)
        if checkpointer is not None:
            checkpointer.mark(meta={"final": "yes"}).result()  # if this step has a marker, that one gets it
    log.info("done: step %d, %d epochs", step, args.epochs)


def configure_logging(rank: int) -> None:
    """Log events on rank 0, warnings on all ranks, except those that every TorchRec job on a CPU gives."""
    layout = f"%(asctime)s [rank {rank}] %(message)s"
    logging.basicConfig(level=logging.WARNING, format=layout, datefmt="%H:%M:%S", force=True)
    for name in (log.name, "torchrec_stream_ckpt"):
        logging.getLogger(name).setLevel(logging.INFO if rank == 0 else logging.WARNING)
    for name in ("torchrec.distributed.planner", "torch.fx._symbolic_trace"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch(rec)?\.")


@contextmanager
def process_group() -> Iterator[torch.device]:
    """Make this process a rank while open: on its GPU, or on the CPU."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    try:
        yield device
        dist.barrier()  # no rank leaves while another one still communicates with it
    finally:
        gc.collect()  # the model holds the group's threads: free it first
        dist.destroy_process_group()


def fail(message: str) -> NoReturn:
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once per node
        print(f"train_dlrm.py: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # torchrun ends all ranks when the first one leaves: let the reporting rank be first
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank of the job."""
    args = parse_args(argv)
    if "RANK" not in os.environ:
        fail("start it with torchrun: torchrun --standalone --nproc_per_node 2 recipes/train_dlrm.py ...")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    configure_logging(rank)
    try:
        loader = open_loader(args, rank, world)
        with process_group() as device:
            train(args, device, loader)
    except (UserError, StreamCkptError) as error:
        fail(str(error))


if __name__ == "__main__":
    main()
