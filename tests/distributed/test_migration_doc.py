"""docs/migration.md: all of its code runs, in its order, and what it brings over is the very same state."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests import ranks
from tests.command import call, run
from tests.model import PLAN_2, Trainer, differences, trainer, truth

pytestmark = [
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

DOC = (Path(__file__).parents[2] / "docs" / "migration.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", DOC, re.S)
COMMANDS = re.findall(r"^    stream-ckpt (\w+ .*)$", DOC.replace("\\\n", ""), re.M)
NAMES = ("after", "dcp", "import", "save", "load", "schema", "evolve", "snapshot", "restore", "back")


class Loader:
    """Four batches; its position is its state."""

    def __init__(self) -> None:
        self.position = 0

    def __iter__(self) -> Any:
        while self.position < 4:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


def _command(command: str, folder: str) -> None:
    """(rank 0) One of the page's command lines."""
    if dist.get_rank() == 0:
        run(*shlex.split(command.replace("FOLDER", folder)))
    dist.barrier()


def _paste(command: str, folder: str) -> None:
    """(rank 0) The refusal of a command, and the file that it says to write."""
    if dist.get_rank() == 0:
        done = call(*shlex.split(command.replace("FOLDER", folder)))
        said = str(done.exception)
        assert "t_user': trained by exact_rowwise_adagrad here, none in the marker" in said
        assert not (Path(folder) / "weights" / "data").exists()
        (Path(folder) / "changes.toml").write_text(said.split("or in a TOML file:\n")[1].split("\n# ")[0])
    dist.barrier()


def follow(folder: str) -> list[str]:
    """Do what the page says; what differs from the state that was saved, after each way of bringing it back."""
    blocks = dict(zip(NAMES, BLOCKS, strict=True))
    job = trainer(PLAN_2)
    names = {
        "dmp": job.dmp,
        "optimizer": job.optimizer,
        "loader": Loader(),
        "train_step": lambda batch: job.step(),
        "folder": folder,
        "rank": dist.get_rank(),
    }

    def do(name: str) -> None:
        exec(compile(blocks[name], f"docs/migration.md, block {name}", "exec"), names)

    of_dcp, of_torch, refused, declared, export = COMMANDS
    do("after")
    assert names["step"] == 4
    found = []

    def compare(what: str) -> None:
        found.extend(f"{what}: {each}" for each in differences(saved, truth(job), rng=False))

    do("dcp")
    saved = truth(job)
    _command(of_dcp, folder)
    _spoil(job)
    do("import")
    compare("import")
    do("save")
    _command(of_torch, folder)
    _spoil(job)
    do("load")
    compare("torch.save")
    _spoil(job)
    fresh = truth(job)
    do("schema")
    _paste(refused, folder)
    _command(declared, folder)
    do("evolve")
    weights = {name: value for name, value in saved.items() if name.startswith("model.")}
    found.extend(f"weights: {each}" for each in differences(fresh | weights, truth(job), rng=False))
    saved = truth(job)
    do("snapshot")
    _spoil(job)
    do("restore")
    compare("torchsnapshot")
    _command(export, folder)
    _spoil(job, dense=False)
    do("back")
    compare("export")
    return found


@torch.no_grad()
def _spoil(job: Trainer, *, dense: bool = True) -> None:
    """Other values everywhere, so that what comes back has to be written."""
    values = list(job.dmp.state_dict().values())
    values += [value for states in job.dmp.fused_optimizer.state_dict()["state"].values() for value in states.values()]
    for value in values:
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                shard.tensor.fill_(7)
        elif dense and isinstance(value, torch.Tensor):
            value.add_(1)


def test_every_way_that_the_page_shows_brings_back_the_state(tmp_path: Path) -> None:
    assert [line.split()[0] for line in COMMANDS] == ["import"] * 4 + ["export"]
    for found in ranks.run(2, follow, str(tmp_path)):
        assert found == []
