"""recipes/quickstart.py as it stands: alone, killed, on two ranks, and alone again, each time from where it stood."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, SequentialSampler
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import data_parallel, get_default_sharders, table_wise
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import Adagrad

from tests import launched, warm
from tests.command import run
from tests.forks import ROOT, Torchrun, run_script
from tests.parts import FileLog
from tests.wrapped import wrapped
from torchrec_stream_ckpt import GlobalSampler, StreamCheckpointer, StreamConfig, TrackedLoader
from torchrec_stream_ckpt.errors import ConfigError, UnsupportedError
from torchrec_stream_ckpt.inner import Control

pytestmark = pytest.mark.distributed

SCRIPT = ROOT / "recipes" / "quickstart.py"
STEPS = 1000  # of an epoch


def restored_step(output: str, ranks: int) -> int:
    found = re.search(rf"restored marker \d+:\d+ \(step (\d+), written by {ranks} ranks\)", output)
    assert found is not None, output
    return int(found[1])


def test_it_goes_on_after_a_kill_and_on_other_ranks(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/ckpt"
    first = Torchrun(1, SCRIPT, uri)
    try:
        said = ""
        for line in first.stdout:
            said += line
            if "marker 1:2 committed" in line:
                break
    finally:
        first.kill()
    assert first.returncode, said
    assert "restored" not in said

    code, said = Torchrun(2, SCRIPT, uri).end(120)
    assert code == 0, said
    step = restored_step(said, ranks=1)
    assert 300 <= step < STEPS  # the second marker is due at 300, and may be cut later
    assert sorted(re.findall(r"rank (\d): step (\d+)", said)) == [("0", str(STEPS)), ("1", str(STEPS))]

    alone = run_script(SCRIPT, uri)  # without torchrun; the next epoch
    assert alone.returncode == 0, alone.stderr
    assert restored_step(alone.stderr, ranks=2) == STEPS
    assert f"rank 0: step {2 * STEPS}, loss 0.00" in alone.stdout


def test_a_mistake_is_a_message_without_a_traceback(tmp_path: Path) -> None:
    told = run_script(SCRIPT, "--help")
    assert (told.returncode, told.stderr) == (0, "")
    assert "file://DIR" in told.stdout
    wrong = run_script(SCRIPT, "foo://bar")
    assert wrong.returncode == 1
    assert "Error: 'foo://bar' is not a known kind of log" in wrong.stderr
    assert "Try: " in wrong.stderr
    assert "Traceback" not in wrong.stderr


def test_a_fenced_job_says_so_without_a_traceback(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/ckpt"
    job = Torchrun(1, SCRIPT, uri)
    try:
        said = ""
        for line in job.stdout:
            said += line
            if "marker 1:1 committed" in line:
                break
        run("fence", uri, "--yes")
        code, rest = job.end(120)
    finally:
        job.kill()
    assert code, rest
    assert "Error: " in rest
    assert "an operator has ended this trainer" in rest
    assert 'quickstart.py", line' not in rest


def test_torchrun_that_is_told_to_stop_leaves_a_marker_of_the_last_step(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}/ckpt"
    command = ["--standalone", "--nproc_per_node", "2", str(SCRIPT), uri]
    with launched.Torchrun(command, tmp_path / "output", {}) as job:
        job.wait_for("marker 1:1 committed", 120)
        job.process.terminate()
        job.process.join(120)
        assert job.poll()  # no success
        said = job.text()
    told = re.search(r"SIGTERM produced marker (\d+:\d+) of step (\d+); the job should stop", said)
    assert told is not None, said
    lineage = Control(FileLog(tmp_path / "ckpt")).refresh()
    assert lineage.newest is not None
    assert lineage.ended is not None
    assert (str(lineage.newest.id), lineage.newest.step) == (told[1], int(told[2]))
    assert (lineage.ended.outcome, lineage.ended.reason, lineage.ended.step) == ("preempted", "SIGTERM", int(told[2]))


def _model(rows: int) -> torch.nn.Module:
    table = EmbeddingBagConfig(name="t_item", num_embeddings=rows, embedding_dim=16, feature_names=["item"])
    ebc = EmbeddingBagCollection(tables=[table], device=torch.device("meta"))
    apply_optimizer_in_backward(Adagrad, ebc.parameters(), {"lr": 0.1})
    return torch.nn.Sequential(ebc)


def test_its_table_is_sharded_on_one_to_eight_ranks() -> None:
    """TorchRec's planner makes a table of 1,000 rows data-parallel on four ranks and more."""
    found = re.search(r"num_embeddings=([\d_]+)", SCRIPT.read_text())
    assert found is not None
    for world in range(1, 9):
        topology = Topology(world_size=world, local_world_size=world, compute_device="cpu")
        plan = EmbeddingShardingPlanner(topology=topology).plan(_model(int(found[1])), get_default_sharders())
        assert plan.plan["0"]["t_item"].sharding_type != "data_parallel", world  # type: ignore[index]


def _data_parallel(uri: str) -> str:
    model = wrapped(_model(50), {"t_item": data_parallel()}, EmbeddingBagCollectionSharder(), part="0")
    with pytest.raises(UnsupportedError) as refused:
        StreamCheckpointer(model, model.fused_optimizer, config=StreamConfig(uri=uri, marker_every=None))
    return str(refused.value)


def test_a_table_that_the_plan_makes_data_parallel_is_named_with_the_way_to_keep_it_sharded(tmp_path: Path) -> None:
    (said,) = warm.run(1, _data_parallel, f"file://{tmp_path}")
    assert "the plan makes the table t_item data-parallel" in said
    assert "EmbeddingShardingPlanner(constraints={'t_item': ParameterConstraints(" in said


def _sampler_beside(uri: str) -> str:
    model = wrapped(_model(50), {"t_item": table_wise(rank=0)}, EmbeddingBagCollectionSharder(), part="0")
    sampler = GlobalSampler(12, batch_size=4, rank=0, world=1)
    held = {"loader": TrackedLoader(DataLoader(range(12), batch_sampler=sampler)), "sampler": sampler}
    with pytest.raises(ConfigError) as refused:
        StreamCheckpointer(model, model.fused_optimizer, config=StreamConfig(uri=uri), stateful=held)
    return str(refused.value)


def test_a_sampler_that_is_handed_over_in_addition_to_its_loader_is_refused(tmp_path: Path) -> None:
    (said,) = warm.run(1, _sampler_beside, f"file://{tmp_path}")
    assert "'sampler' (GlobalSampler) has no state_dict() and load_state_dict()" in said
    assert "Try: add both methods, or omit it; a TrackedLoader saves the position of its sampler" in said
    data = range(12)
    with pytest.raises(ValueError, match="mutually exclusive"):  # torch's own refusal of a second sampler
        DataLoader(
            data, sampler=SequentialSampler(data), batch_sampler=GlobalSampler(12, batch_size=4, rank=0, world=1)
        )
