"""Train a product-based neural network (PNN) on clicks, with streaming checkpoints: one file to copy.

    torchrun --standalone --nproc_per_node 2 recipes/train_pnn.py --stream_ckpt file://ckpt

The model takes the inner product of each pair of embeddings (IPNN); a perceptron reads products, embeddings and counts.
``--data`` takes files of Criteo; without it the recipe generates clicks. If it is started again, on any number of
ranks, it continues after the newest committed marker. Without ``--stream_ckpt`` it is a plain TorchRec job.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import logging
import os
import signal
import sys
import time
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import KeyedTensor

from torchrec_stream_ckpt import StreamCkptError, TrackedLoader
from torchrec_stream_ckpt.flags import FlagParser, add_flags, config_from, positive, restore_from, whole
from torchrec_stream_ckpt.recipes.data import IGNORED, add_data_flags, make_batches, open_clicks
from torchrec_stream_ckpt.recipes.files import COUNTS, HASHES, UserError

log = logging.getLogger("train_pnn")

SHARDINGS = ("table_wise", "row_wise", "column_wise")
FEATURES = [f"cat_{i}" for i in range(HASHES)]


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(prog="train_pnn.py", description="Train PNN.")
    add_data_flags(parser, "files of Criteo", batch_size=256)
    add_flags(parser)
    model = parser.add_argument_group("model")
    model.add_argument(
        "--num_embeddings", type=whole(1), default=5_000, help="rows of each table; hashes are taken modulo it"
    )
    model.add_argument("--embedding_dim", type=whole(4), default=16)
    model.add_argument("--hidden", type=whole(1), default=64, help="width of the perceptron (%(default)s)")
    model.add_argument("--learning_rate", type=positive, default=0.05)
    model.add_argument(
        "--sharding", choices=("auto", *SHARDINGS), default="auto", help="column_wise: tables cut in two"
    )
    model.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--log_every", metavar="STEPS", type=whole(1), default=50)
    args = parser.parse_args(argv)
    if args.embedding_dim % 4:
        parser.error(f"--embedding_dim {args.embedding_dim} is not a multiple of 4, which FBGEMM needs")
    try:
        args.stream = config_from(args, on_signal="mark")
    except StreamCkptError as error:
        parser.error(str(error))
    return args


# ----------------------------------------------------------------------------------------------------------- model


def make_tables(args: argparse.Namespace) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(
                name=f"t_{feature}",
                embedding_dim=args.embedding_dim,
                num_embeddings=args.num_embeddings,
                feature_names=[feature],
            )
            for feature in FEATURES
        ],
    )


class ClickLoss(nn.Module):
    """This rank's term of the loss; its mean over the ranks is the loss of the global batch."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        targets = labels.clamp(min=0).to(logits.dtype)
        each = nn.functional.binary_cross_entropy_with_logits(logits.squeeze(1), targets, reduction="none")
        return (each * (labels != IGNORED)).sum() * self.scale


class ProductLayer(nn.Module):
    """The dense part: a logit (B, 1) of the embeddings, their inner products and the counts."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.first, self.second = torch.triu_indices(HASHES, HASHES, offset=1).tolist()
        width = COUNTS + HASHES * args.embedding_dim + len(self.first)
        self.perceptron = nn.Sequential(
            nn.Linear(width, args.hidden, device=device), nn.ReLU(), nn.Linear(args.hidden, 1, device=device)
        )

    def forward(self, dense: torch.Tensor, embedded: KeyedTensor) -> torch.Tensor:
        fields = torch.stack([embedded[name] for name in FEATURES], dim=1)  # by name: their order depends on the plan
        products = torch.bmm(fields, fields.transpose(1, 2))[:, self.first, self.second]
        return self.perceptron(torch.cat([dense, fields.flatten(1), products], dim=1))


class Pnn(nn.Module):
    def __init__(self, args: argparse.Namespace, scale: float, device: torch.device) -> None:
        super().__init__()
        self.ebc = make_tables(args)
        self.products = ProductLayer(args, device)
        self.loss = ClickLoss(scale)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.products(batch.dense_features, self.ebc(batch.sparse_features))
        loss = self.loss(logits, batch.labels)
        return loss, loss.detach()


def make_plan(
    args: argparse.Namespace, model: nn.Module, sharder: EmbeddingBagCollectionSharder, device: torch.device
) -> ShardingPlan:
    """Return a plan for these ranks, under which the marker to be restored can be restored."""
    world = dist.get_world_size()
    mine = ParameterConstraints(
        sharding_types=list(SHARDINGS) if args.sharding == "auto" else [args.sharding],
        compute_kernels=["fused"],
        min_partition=-(-args.embedding_dim // 2) if args.sharding == "column_wise" else None,
    )
    constraints = {f"t_{feature}": mine for feature in FEATURES}
    if args.stream is not None and args.restore != "none" and dist.get_rank() == 0:  # rank 0 makes the plan for all
        from torchrec_stream_ckpt import planner_constraints

        constraints = planner_constraints(
            args.stream, args.restore, constraints, source=args.source, changes=args.changes
        )
    topology = Topology(world_size=world, compute_device=device.type)
    planner = EmbeddingShardingPlanner(topology, batch_size=-(-args.batch_size // world), constraints=constraints)
    try:
        return planner.collective_plan(model, [sharder], dist.group.WORLD)
    except (PlannerError, RuntimeError) as error:
        raise UserError(f"--sharding {args.sharding}: no plan for {world} ranks: {error}") from error


def build(
    args: argparse.Namespace, device: torch.device
) -> tuple[DistributedModelParallel, CombinedOptimizer, TrackedLoader[Batch]]:
    """Build the job without its checkpoints: sharded model, optimizer, loader."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = make_batches(args, open_clicks(args, [args.num_embeddings] * HASHES), rank, world)
    torch.manual_seed(args.seed + rank)  # shards differ; DDP copies rank 0's dense part to all
    model = Pnn(args, world / args.batch_size, device)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": args.learning_rate}
    sharder = EmbeddingBagCollectionSharder(fused_params=fused)
    dmp = DistributedModelParallel(
        model, device=device, plan=make_plan(args, model, sharder, device), sharders=[sharder]
    )
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    dense_optimizer = KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adagrad(params, lr=args.learning_rate))
    return dmp, CombinedOptimizer([dmp.fused_optimizer, dense_optimizer]), TrackedLoader(batches)


# -------------------------------------------------------------------------------------------------------- training


def train(args: argparse.Namespace, device: torch.device) -> None:
    dmp, optimizer, loader = build(args, device)
    log.info("training on %d ranks, %s, global batch %d", dist.get_world_size(), device.type, args.batch_size)
    checkpointer, step = None, 0
    with contextlib.ExitStack() as closing:  # records in the log how the job ended, even after an error
        if args.stream is not None:
            from torchrec_stream_ckpt import StreamCheckpointer

            checkpointer = StreamCheckpointer(
                dmp, optimizer, config=args.stream, stateful={"loader": loader}, paranoid=args.paranoid
            )
            closing.enter_context(checkpointer)
            restored = restore_from(args, checkpointer)
            step = restored.step if restored is not None else 0
        pipeline = TrainPipelineSparseDist(dmp, optimizer, device)
        dmp.train()
        for epoch in range(loader.epoch, args.epochs):
            batches = iter(loader)
            with contextlib.suppress(StopIteration):
                while True:
                    loss = pipeline.progress(batches)
                    step += 1
                    checkpointer.step() if checkpointer is not None else loader.trained()
                    if step % args.log_every == 0:
                        dist.all_reduce(loss)
                        log.info("step %d, epoch %d: loss %.6f", step, epoch, loss.item() / dist.get_world_size())
                    if checkpointer is not None and checkpointer.should_stop:
                        raise SystemExit(128 + signal.SIGTERM)
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


def fail(message: str) -> NoReturn:
    if int(os.environ.get("LOCAL_RANK", 0)) == 0:  # once per node
        print(f"{log.name}.py: error: {message}", file=sys.stderr, flush=True)
    else:
        time.sleep(3)  # torchrun ends all ranks when the first one leaves: let the reporting rank be first
    raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> None:
    """Run one rank of the job."""
    args = parse_args(argv)
    if "RANK" not in os.environ:
        fail(f"start it with torchrun: torchrun --standalone --nproc_per_node 2 recipes/{log.name}.py ...")
    configure_logging(int(os.environ["RANK"]))
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo")
    try:
        train(args, device)
        dist.barrier()  # no rank leaves while another one still communicates with it
    except (UserError, StreamCkptError) as error:
        fail(str(error))
    finally:
        gc.collect()  # the model holds the group's threads: free it first
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
