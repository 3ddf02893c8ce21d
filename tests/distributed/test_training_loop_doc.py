"""docs/training_loop.md: its pipelined loop with an evaluation runs as it stands, and goes on after an error."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from torchrec.datasets.utils import Batch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import row_wise, table_wise
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from tests import warm
from tests.programs import user_and_item
from tests.wrapped import wrapped
from torchrec_stream_ckpt import GlobalSampler, StreamCkptError, StreamConfig, TrackedLoader

pytestmark = pytest.mark.distributed

PAGE = (Path(__file__).parents[2] / "docs" / "training_loop.md").read_text()
TROUBLES = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, re.S)
(FILL,) = (each for each in BLOCKS if "def collate(" in each)
(LOOP,) = (each for each in BLOCKS if "def evaluate(" in each)
DATA = [(7 * number % 40, 3 * number % 60, number % 2) for number in range(26)]
IMPORTS = """\
import contextlib, sys
import torch
import torch.distributed as dist
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.datasets.utils import Batch
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec_stream_ckpt import StreamCheckpointer, StreamCkptError
"""
"""What a script imports for these blocks."""
EPOCHS = 2


class Net(nn.Module):
    """Two tables under a dense layer, with the page's loss."""

    def __init__(self) -> None:
        super().__init__()
        self.ebc, self.over = user_and_item(), nn.Linear(8, 1)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        found = self.ebc(batch.sparse_features)
        logits = self.over(found["user"] * found["item"]).squeeze(1)
        return self.loss_of(logits, batch.labels)  # type: ignore[no-any-return]


class Schedule(LambdaLR):
    """Fails at a step, as a call of the library does."""

    fails_at: ClassVar[int | None] = None

    def step(self, epoch: int | None = None) -> None:
        super().step(epoch)
        if self.last_epoch == self.fails_at:
            raise StreamCkptError("it fails", hint="start it again")


def train(uri: str, fails_at: int | None) -> tuple[int, str, float]:
    """(on each rank) Run the page's blocks. The steps of the job, what it exits with, and its loss at the end."""
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = GlobalSampler(DATA, batch_size=4, rank=rank, world=world, shuffle=True)
    names: dict[str, Any] = {"world": world, "sampler": sampler}
    exec(IMPORTS, names)
    exec(compile(FILL, "docs/training_loop.md", "exec"), names)
    torch.manual_seed(5)
    net = Net()
    net.loss_of = names["loss_of"]
    sharder = EmbeddingBagCollectionSharder(fused_params={"optimizer": EmbOptimType.EXACT_SGD, "learning_rate": 0.1})
    dmp = wrapped(net, {"t_user": table_wise(rank=world - 1), "t_item": row_wise()}, sharder)
    dense = dict(in_backward_optimizer_filter(dmp.named_parameters()))
    made = KeyedOptimizerWrapper(dense, lambda params: torch.optim.SGD(params, lr=0.1))
    optimizer = CombinedOptimizer([dmp.fused_optimizer, made])
    data: Any = DATA
    loader = TrackedLoader(DataLoader(data, batch_sampler=sampler, collate_fn=filled(names, sampler)))
    ours = GlobalSampler(DATA, batch_size=6, rank=rank, world=world)
    names |= {
        "dmp": dmp,
        "optimizer": optimizer,
        "device": torch.device("cpu"),
        "config": StreamConfig(uri=uri, marker_every=3),
        "loader": loader,
        "schedule": (schedule := Schedule(optimizer, lambda step: 1 / (1 + step))),
        "held": {"loader": loader, "schedule": schedule},
        "epochs": EPOCHS,
        "eval_data": DATA,
        "eval_loader": DataLoader(
            data, batch_sampler=ours, collate_fn=filled(names, ours), generator=torch.Generator()
        ),
    }
    Schedule.fails_at = fails_at  # on the class: the state of a schedule is what an instance has
    try:
        exec(compile(LOOP, "docs/training_loop.md", "exec"), names)
    except SystemExit as ended:
        return names["ckpt"].steps, str(ended), 0.0
    return names["ckpt"].steps, "", names["evaluate"]()


def filled(names: dict[str, Any], sampler: GlobalSampler) -> Any:
    return functools.partial(names["collate"], sampler.largest_part)


def test_the_pipelined_loop_goes_on_after_an_error_on_other_ranks(tmp_path: Path) -> None:
    whole = warm.run(2, train, f"file://{tmp_path}/whole", None)
    failed = warm.run(2, train, f"file://{tmp_path}/job", 5)
    assert [(steps, said) for steps, said, _ in failed] == [(4, "Error: it fails\n  Try: start it again")] * 2
    again = warm.run(3, train, f"file://{tmp_path}/job", None)
    assert [(steps, said) for steps, said, _ in again] == [(EPOCHS * -(-len(DATA) // 4), "")] * 3
    (loss,) = {loss for _, _, loss in again}
    assert loss == pytest.approx(whole[0][2], rel=1e-5)  # the loss does not depend on the ranks


def test_set_epoch_of_torchs_own_sampler_fails_as_the_page_says() -> None:
    loader = TrackedLoader(DataLoader(DATA, batch_sampler=GlobalSampler(DATA, batch_size=4, rank=0, world=1)))  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="'SequentialSampler' object has no attribute 'set_epoch'"):
        loader.sampler.set_epoch(0)
    assert "'SequentialSampler' object has no attribute 'set_epoch'" in TROUBLES
    loader.batch_sampler.set_epoch(0)
