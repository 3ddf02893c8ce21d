"""What ``stream-ckpt diff`` says of two markers is what the jobs' own tables say, across branches and splits."""

from __future__ import annotations

import pytest
import torch

from tests import jobs, stores, warm
from tests.command import ask
from tests.model import PLAN_2, PLAN_3, Spec
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

SPLIT_OTHERWISE: Spec = {**PLAN_3, "t_wide": ("tw", 0)}
Truths = dict[str, dict[str, torch.Tensor]]


@pytest.fixture(scope="module", params=["folded", "log"])
def job(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Truths]:
    """Markers 1:1 to 1:3 of a job, and 2:2 of a branch from 1:1 with another column split; the truth at each."""
    directory = tmp_path_factory.mktemp("job")
    settings = StreamConfig(uri=f"file://{directory}", marker_every=3, on_column_resplit="merge")
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, 6, {})[0][1]
    branch = warm.run(3, jobs.restore_with, SPLIT_OTHERWISE, settings, "1:1", 3, {})[0][3]
    if request.param == "folded":
        stores.fold(directory, upto=MarkerId(1, 2))
    return str(settings.uri), {"1:1": trained[3], "1:2": trained[6], "1:3": trained[6], "2:2": branch[6]}


def rows_that_differ(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return (one.view(torch.int32) != other.view(torch.int32)).reshape(len(one), -1).any(1)


@pytest.mark.parametrize(("first", "second"), [("1:1", "1:2"), ("1:3", "1:2"), ("1:2", "2:2"), ("2:2", "1:1")])
def test_rows_are_counted_bit_by_bit(job: tuple[str, Truths], first: str, second: str) -> None:
    uri, truths = job
    found = ask("diff", uri, first, second)
    one, other = truths[first], truths[second]
    for table in found["tables"]:
        name = table["table"].removeprefix("ebc.")
        key = f"ebc.embedding_bags.{name}.weight"
        differ = rows_that_differ(one[f"model.{key}"], other[f"model.{key}"])
        assert (table["rows"], table["weights"]) == (len(differ), int(differ.sum()))
        left, right = (state[f"fused.{key}.{name}.momentum1"] for state in (one, other))
        if len(left) == len(right):
            states = rows_that_differ(left, right).reshape(-1, len(differ)).any(0)
            assert table["states"] == {"sum": int(states.sum())}
            assert table["changed"] == int((differ | states).sum())
        else:
            assert table["states"] == {"sum": None}
            assert table["changed"] == table["weights"]
    dense = {f"model.{key.removeprefix('model.')}" for key in one if key.startswith("model.") and "t_" not in key}
    changed = {key for key in dense if not torch.equal(one[key], other[key])}
    assert {name for name in found["dense"]["changed"] if name.startswith("model.") and "t_" not in name} == changed
    assert bool(changed) == ({first, second} != {"1:2", "1:3"})


def test_rows_that_were_sent_hold_those_that_changed(job: tuple[str, Truths]) -> None:
    uri, _ = job
    sent, found = ask("diff", uri, "1:1", "1:3", "--sent")["sent"], ask("diff", uri, "1:1", "1:3")
    for table in found["tables"]:
        assert table["changed"] <= sent[table["table"]] <= table["rows"]
    assert 0 < sent["ebc.t_item"] < 307
    assert set(ask("diff", uri, "1:2", "1:2", "--sent")["sent"].values()) == {0}
