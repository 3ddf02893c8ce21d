"""A job whose only process group is NCCL's, as the recipes start it on a GPU: ours are gloo groups beside it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchrec_stream_ckpt.util.ports import free_port

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("default")]

ROOT = Path(__file__).parents[2]


def losses(folder: Path, epochs: int) -> dict[int, str]:
    """What the recipe prints for each step."""
    port = free_port()
    ranks = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torchrec_stream_ckpt.recipes.train_dlrm", "--synthetic", "small"),
            *("--batch_size", "64", "--limit_train_batches", "20", "--epochs", str(epochs), "--log_every", "1"),
            *("--marker_every", "10", "--paranoid", "--stream_ckpt", f"file://{folder}"),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=ROOT,
        env={**os.environ, **ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "training on 1 ranks, cuda" in done.stdout + done.stderr
    found = re.findall(r"step (\d+), epoch \d+: loss (\S+)", done.stdout + done.stderr)
    return {int(step): loss for step, loss in found}


def test_a_recipe_over_nccl_goes_on_where_it_ended(device: torch.device, tmp_path: Path) -> None:
    losses(tmp_path / "a", 1)
    second = losses(tmp_path / "a", 2)
    whole = losses(tmp_path / "b", 2)
    assert min(second) == 21
    assert second == {step: loss for step, loss in whole.items() if step > 20}
