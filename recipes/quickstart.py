"""Train a small sharded table with streaming checkpoints. Kill it and start it again, on other ranks too: it continues.

python quickstart.py
torchrun --standalone --nproc_per_node 2 quickstart.py
"""

import sys

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad

from torchrec_stream_ckpt import (
    GlobalSampler,
    StreamCheckpointer,
    StreamCkptError,
    StreamConfig,
    TrackedLoader,
    init_ranks,
    log_to_stderr,
)
from torchrec_stream_ckpt.flags import FlagParser


def collate(samples: list[tuple[torch.Tensor]]) -> KeyedJaggedTensor:
    """One id a sample; samples without one make all ranks' batches equal."""
    items = torch.tensor([item for (item,) in samples], dtype=torch.int64)
    return KeyedJaggedTensor(["item"], items, lengths=(torch.arange(sampler.largest_part) < len(items)).int())


parser = FlagParser(description=__doc__.split("\n")[0])
parser.add_argument("uri", nargs="?", default="file://quickstart-ckpt", help="file://DIR (default: %(default)s)")
uri = parser.parse_args().uri

rank, world = init_ranks("gloo")
log_to_stderr(rank)

table = EmbeddingBagConfig(name="t_item", num_embeddings=10_000, embedding_dim=16, feature_names=["item"])
ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
apply_optimizer_in_backward(Adagrad, ebc.parameters(), {"lr": 0.1})  # fused into the backward pass
model = DistributedModelParallel(torch.nn.Sequential(ebc), device=torch.device("cpu"))
data = TensorDataset(7 * torch.arange(60_000) % 1000)
sampler = GlobalSampler(data, batch_size=60, rank=rank, world=world, shuffle=True)
loader = TrackedLoader(DataLoader(data, batch_sampler=sampler, collate_fn=collate))

try:
    config = StreamConfig(uri=uri, marker_every=150, on_signal="mark")
    with StreamCheckpointer(model, model.fused_optimizer, config=config, stateful={"loader": loader}) as ckpt:
        ckpt.restore()  # the newest intact marker, if there is one
        for batch in loader:  # the rest of the epoch
            loss = (model(batch)["item"] - 1).square().mean(1).sum() * world / sampler.batch_size
            loss.backward()  # updates the table
            ckpt.step()
            if ckpt.should_stop:
                sys.exit(143)
        ckpt.mark().result()
except StreamCkptError as error:
    sys.exit(f"Error: {error}")
print(f"rank {rank}: step {ckpt.steps}, loss {loss.item():.6f}")
dist.destroy_process_group()
