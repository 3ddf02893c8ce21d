"""Train BERT4Rec on sequences of items, with streaming checkpoints: one file to copy.

    torchrun --standalone --nproc_per_node 2 recipes/train_bert4rec.py --stream_ckpt file://ckpt

A transformer over the embeddings of a sharded ``EmbeddingCollection`` predicts the masked items of a user's history.
Without ``--data`` the recipe generates histories. If it is started again, on any number of ranks, it continues after
the newest committed marker. Without ``--stream_ckpt`` it is a plain TorchRec job.
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

import numpy as np
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.datasets.utils import Batch
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.types import PlannerError
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from torchrec_stream_ckpt import StreamCkptError, TrackedLoader
from torchrec_stream_ckpt.flags import FlagParser, add_flags, config_from, positive, restore_from, whole
from torchrec_stream_ckpt.recipes.data import add_data_flags, make_batches
from torchrec_stream_ckpt.recipes.files import UserError, read_ratings

log = logging.getLogger("train_bert4rec")

SHARDINGS = ("table_wise", "row_wise", "column_wise")
MADE_HISTORIES = 2_000
IGNORED = -1


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = FlagParser(prog="train_bert4rec.py", description="Train BERT4Rec.")
    add_data_flags(parser, "ratings: USER::ITEM::RATING::TIME, or split by commas or tabs", batch_size=64)
    add_flags(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--length", type=whole(2), default=20, help="items of a history at most (%(default)s)")
    model.add_argument("--mask", type=positive, default=0.2, help="part of the items that is masked (%(default)s)")
    model.add_argument("--items", type=whole(2), default=1_000, help="ids are taken modulo it (%(default)s)")
    model.add_argument("--embedding_dim", type=whole(4), default=32)
    model.add_argument("--heads", type=whole(1), default=2)
    model.add_argument("--layers", type=whole(1), default=1)
    model.add_argument("--dropout", type=float, default=0.1)
    model.add_argument("--learning_rate", type=positive, default=0.02)
    model.add_argument(
        "--sharding", choices=("auto", *SHARDINGS), default="auto", help="column_wise: tables cut in two"
    )
    model.add_argument("--seed", type=whole(0), default=0)
    parser.add_argument("--log_every", metavar="STEPS", type=whole(1), default=50)
    args = parser.parse_args(argv)
    if args.embedding_dim % 4:
        parser.error(f"--embedding_dim {args.embedding_dim} is not a multiple of 4, which FBGEMM needs")
    if args.embedding_dim % args.heads:
        parser.error(f"--embedding_dim {args.embedding_dim} is not a multiple of --heads {args.heads}")
    if not (args.mask <= 1 and 0 <= args.dropout < 1):
        parser.error(f"--mask {args.mask} must not be above 1, --dropout {args.dropout} from 0 to below 1")
    try:
        args.stream = config_from(args, on_signal="mark")
    except StreamCkptError as error:
        parser.error(str(error))
    return args


# ------------------------------------------------------------------------------------------------------------ data


def histories_of(ratings: np.ndarray, length: int) -> list[np.ndarray]:
    """Return each user's items in the order of time, cut into pieces of at most ``length`` and at least 2."""
    ordered = ratings[np.lexsort((ratings[:, 3], ratings[:, 0]))]
    users = np.split(ordered[:, 1].astype(np.int64), np.flatnonzero(np.diff(ordered[:, 0])) + 1)
    pieces = [items[at : at + length] for items in users for at in range(0, len(items), length)]
    return [piece for piece in pieces if len(piece) > 1]


def make_histories(args: argparse.Namespace) -> list[np.ndarray]:
    """Generate walks on which the next item mostly follows from the last one, so that there is something to learn."""
    random = np.random.default_rng(args.seed)
    walks = np.empty((MADE_HISTORIES, args.length), np.int64)
    walks[:, 0] = random.zipf(1.3, MADE_HISTORIES) % args.items
    for at in range(1, args.length):
        jumps = random.integers(args.items, size=MADE_HISTORIES)
        walks[:, at] = np.where(random.random(MADE_HISTORIES) < 0.1, jumps, (walks[:, at - 1] * 7 + 1) % args.items)
    return [walk[:length] for walk, length in zip(walks, random.integers(2, args.length + 1, len(walks)), strict=True)]


class Histories:
    """Samples: histories with masked items. A pure function of (epoch, number)."""

    def __init__(self, args: argparse.Namespace) -> None:
        histories = (
            histories_of(read_ratings(args.data), args.length) if args.data is not None else make_histories(args)
        )
        self.histories = histories
        self.length, self.mask, self.seed, self.items = args.length, args.mask, args.seed, args.items
        self.epoch, self.order = -1, np.empty(0, np.int64)

    def __len__(self) -> int:
        return len(self.histories)

    def batch(self, epoch: int, rows: range, size: int) -> Batch:
        """Return this rank's part of a batch; ``labels`` (size, length) are the masked items, IGNORED elsewhere."""
        if epoch != self.epoch:
            self.epoch, self.order = epoch, np.random.default_rng([self.seed, epoch]).permutation(len(self))
        lengths, labels = np.zeros(size, np.int32), np.full((size, self.length), IGNORED, np.int64)
        shown = []
        for place, number in enumerate(rows):
            items = self.histories[self.order[number]] % self.items
            random = np.random.default_rng([self.seed, epoch, number])
            masked = random.random(len(items)) < self.mask
            masked[random.integers(len(items))] = True  # at least one
            labels[place, : len(items)] = np.where(masked, items, IGNORED)
            lengths[place] = len(items)
            shown.append(np.where(masked, self.items, items))  # the last row of the table represents a masked item
        ids = torch.from_numpy(np.concatenate(shown) if shown else np.empty(0, np.int64))
        return Batch(
            torch.empty(size, 0),
            KeyedJaggedTensor(["item"], ids, lengths=torch.from_numpy(lengths)),
            torch.from_numpy(labels),
        )


# ----------------------------------------------------------------------------------------------------------- model


class Encoder(nn.Module):
    """The dense part: a score of each item (B, length, items) at each place of a history."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        super().__init__()
        self.length, dim = args.length, args.embedding_dim
        self.places = nn.Parameter(torch.randn(args.length, dim, device=device) * 0.02)
        layer = nn.TransformerEncoderLayer(dim, args.heads, 2 * dim, args.dropout, batch_first=True, device=device)
        self.layers = nn.TransformerEncoder(layer, args.layers, enable_nested_tensor=False)
        self.scores = nn.Linear(dim, args.items, device=device)

    def forward(self, embedded: JaggedTensor) -> torch.Tensor:
        shown = embedded.to_padded_dense(self.length)
        # A sample that only fills up the batch has one place, too: attention over nothing is not a number.
        ends = embedded.lengths().clamp(min=1).unsqueeze(1)
        hidden = torch.arange(self.length, device=shown.device).unsqueeze(0) >= ends
        return self.scores(self.layers(shown + self.places, src_key_padding_mask=hidden))


class MaskedLoss(nn.Module):
    """This rank's term of the loss; its mean over the ranks is the loss of the global batch, a mean over histories."""

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def forward(self, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        each = nn.functional.cross_entropy(scores.transpose(1, 2), labels, ignore_index=IGNORED, reduction="none")
        return (each.sum(1) / (labels != IGNORED).sum(1).clamp(min=1)).sum() * self.scale


class Bert4Rec(nn.Module):
    def __init__(self, args: argparse.Namespace, scale: float, device: torch.device) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="t_item", embedding_dim=args.embedding_dim, num_embeddings=args.items + 1, feature_names=["item"]
        )
        self.ec = EmbeddingCollection(tables=[table], device=torch.device("meta"))
        self.encoder = Encoder(args, device)
        self.loss = MaskedLoss(scale)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = self.loss(self.encoder(self.ec(batch.sparse_features)["item"]), batch.labels)
        return loss, loss.detach()


def make_plan(
    args: argparse.Namespace, model: nn.Module, sharder: EmbeddingCollectionSharder, device: torch.device
) -> ShardingPlan:
    """Return a plan for these ranks, under which the marker to be restored can be restored."""
    world = dist.get_world_size()
    mine = ParameterConstraints(
        sharding_types=list(SHARDINGS) if args.sharding == "auto" else [args.sharding],
        compute_kernels=["fused"],
        min_partition=-(-args.embedding_dim // 2) if args.sharding == "column_wise" else None,
    )
    constraints = {"t_item": mine}
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
    batches = make_batches(args, Histories(args), rank, world)
    torch.manual_seed(args.seed + rank)  # shards differ; DDP copies rank 0's dense part to all
    model = Bert4Rec(args, world / args.batch_size, device)
    fused = {"optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD, "learning_rate": args.learning_rate}
    sharder = EmbeddingCollectionSharder(fused_params=fused)
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
