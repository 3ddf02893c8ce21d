"""docs/read.md: all of its code runs as it stands, and brings what the job held."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests import jobs, ranks, warm
from tests.model import PLAN_2, PLAN_3, differences, trainer, truth
from torchrec_stream_ckpt import StreamConfig

pytestmark = pytest.mark.distributed

BLOCKS = re.findall(r"```python\n(.*?)```", (Path(__file__).parents[2] / "docs" / "read.md").read_text(), re.S)
READER, TOGETHER, PARTIAL, WHOLE, ROWS = BLOCKS


def do(block: str, names: dict[str, Any]) -> dict[str, Any]:
    exec(compile(block, "docs/read.md", "exec"), names)
    return names


def follow(uri: str) -> tuple[list[dict[str, torch.Tensor]], dict[str, Any]]:
    """(on each rank) What the page says about a job: the truth after each way, and what stayed as it was."""
    found = []
    for block in (READER, TOGETHER):
        job = trainer(PLAN_3)
        job.step()
        names = do(block, {"dmp": job.dmp, "optimizer": job.optimizer, "uri": uri, "dcp": None, **imported()})
        found.append(truth(job))
    names = do(PARTIAL, {"dmp": job.dmp, "torch": torch, **imported(), **do(READER, {**names, "uri": uri})})
    return found, {"stayed": names["more"]["new_tower.weight"].tolist(), "reader": str(names["reader"].marker)}


def imported() -> dict[str, Any]:
    """What an earlier block of the page imports."""
    names: dict[str, Any] = {}
    exec("import torch.distributed.checkpoint as dcp\nfrom torchrec_stream_ckpt import StreamReader", names)
    return {name: names[name] for name in ("dcp", "StreamReader")}


def test_all_that_the_page_shows_brings_what_the_marker_holds(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/log"
    expected = warm.run(2, jobs.train_with, PLAN_2, StreamConfig(uri=uri, marker_every=3), 6, {})[0][1][6]
    for states, said in ranks.run(3, follow, uri):
        for state in states:
            assert differences({**expected, "step": state["step"]}, state, rng=False) == []
        assert said == {"stayed": [0.0] * 4, "reader": "1:3"}
    key = "ebc.embedding_bags.t_user.weight"
    with pytest.warns(UserWarning, match=r"torch\.distributed is disabled"):
        names = do(WHOLE, {"torch": torch, "uri": uri, **imported()})
    assert torch.equal(names["whole"][key], expected[f"model.{key}"])
    names = do(ROWS, {"uri": uri})
    np.testing.assert_array_equal(names["vectors"], expected[f"model.{key}"][[3, 17, 3]].numpy())
    np.testing.assert_array_equal(names["sums"], expected[f"fused.{key}.t_user.momentum1"][[3, 17, 3]].numpy())
