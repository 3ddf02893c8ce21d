"""A checkpoint that a plain TorchRec job has saved with DCP becomes the first marker of a lineage."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import jobs, warm
from tests.command import ask
from tests.evolving import pasted
from tests.model import OPTIMIZERS, PLAN_1, PLAN_2, PLAN_3, Spec, differences, trainer, truth
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, SchemaMismatchError, StreamCkptError

pytestmark = pytest.mark.distributed

NAMES = ("first", "second")
KEYS = ("--model-key=model", "--optimizer-key=optim")


def save_plainly(folder: str, build: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A job that knows nothing of this project; the truth about it."""
    job = trainer(PLAN_2, **build)
    for _ in range(3):
        job.step()
    state = {"model": job.dmp.state_dict(), "optim": job.optimizer.state_dict(), "steps": job.step_number}
    dcp.save(state, checkpoint_id=folder)
    return truth(job)


@pytest.fixture(scope="module")
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, dict[str, Any]]:
    """An optimizer, a checkpoint, and the truth."""
    folder = tmp_path_factory.mktemp("dcp") / "checkpoint"
    expected = warm.run(2, save_plainly, str(folder), {"optimizer": request.param})[0]
    return request.param, folder, expected


def fused(optimizer: str) -> list[str]:
    named = [f"--optimizer={OPTIMIZERS[optimizer].name.lower()}"]
    return [*named, "--data-parallel=ebc.t_dp"] if optimizer == "sgd" else named


@pytest.mark.parametrize(
    ("saved", "world", "spec"), [("rowwise", 3, PLAN_3), ("adagrad", 1, PLAN_1), ("sgd", 1, PLAN_1)], indirect=["saved"]
)
def test_an_imported_checkpoint_is_restored_on_another_plan_and_the_lineage_goes_on(
    saved: tuple[str, Path, dict[str, Any]], world: int, spec: Spec, tmp_path: Path
) -> None:
    optimizer, folder, expected = saved
    uri = f"file://{tmp_path}/log"
    found = ask("import", f"--from=dcp://{folder}", f"--to={uri}", "--step=3", *KEYS, *fused(optimizer))
    assert found["marker"] == "1:1"
    assert found["not_taken"] == ["steps"]
    assert found["tables"] == ["ebc.t_item", "ebc.t_small", "ebc.t_user", "ebc.t_wide"]
    settings = StreamConfig(uri=uri, marker_every=2)
    build = {"optimizer": optimizer}
    restored = warm.run(world, jobs.restore_with, spec, settings, None, 3, build)
    for state, step, _, _ in restored:
        assert step == 3
        # The loader's position is not in such a checkpoint: the job goes on with the one that it has.
        assert differences({**expected, "step": state["step"]}, state, rng=False) == []
    assert set(restored[0][3]) == {2, 3, 4}
    again = warm.run(2, jobs.restore_with, PLAN_2, settings, "2:2", 0, build)
    for state, step, _, _ in again:
        assert step == 4
        assert differences(restored[0][3][2], state, rng=False) == []
    if world == 3:
        ask("verify", uri, "--all")


@pytest.mark.parametrize("saved", ["rowwise"], indirect=True)
def test_an_export_comes_back(saved: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> None:
    _, folder, _ = saved
    first, second = f"file://{tmp_path}/first", f"file://{tmp_path}/second"
    ask("import", f"--from=dcp://{folder}", f"--to={first}", *KEYS, *fused("rowwise"))
    ask("export", first, f"--to=dcp://{tmp_path}/out")
    ask("import", f"--from=dcp://{tmp_path}/out", f"--to={second}", *fused("rowwise"))
    for name in NAMES:
        ask("export", f"file://{tmp_path}/{name}", f"--to=safetensors://{tmp_path}/{name}-tables")
    one, other = (data_of(tmp_path / f"{name}-tables" / "model-00001-of-00001.safetensors") for name in NAMES)
    assert len(one) > 50_000
    assert one == other


def data_of(file: Path) -> bytes:
    """All tensors of a safetensors file, without its header."""
    data = file.read_bytes()
    return data[8 + int.from_bytes(data[:8], "little") :]


@pytest.mark.parametrize("saved", ["rowwise"], indirect=True)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--optimizer=exact_rowwise_adagrad"], "is below the key 'model'"),
        (["--optimizer=exact_rowwise_adagrad", "--model-key=model"], "no sharded table with the state"),
        (["--optimizer=adam", *KEYS], "adam keeps exp_avg, exp_avg_sq"),
        (["--optimizer=quick", *KEYS], "not a supported fused optimizer"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(
    saved: tuple[str, Path, dict[str, Any]], arguments: list[str], said: str, tmp_path: Path
) -> None:
    _, folder, _ = saved
    with pytest.raises(ConfigError, match=said):
        ask("import", f"--from=dcp://{folder}", f"--to=file://{tmp_path}/log", *arguments)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("saved", ["rowwise"], indirect=True)
def test_weights_alone_are_no_marker_of_a_model_with_states_until_that_is_declared(
    saved: tuple[str, Path, dict[str, Any]], tmp_path: Path
) -> None:
    _, folder, expected = saved
    uri = f"file://{tmp_path}/log"
    arguments = ("--optimizer=none", "--data-parallel=ebc.t_dp", *KEYS)
    found = ask("import", f"--from=dcp://{folder}", f"--to={uri}", *arguments)
    assert found["without_states"] == ["ebc.t_item", "ebc.t_small", "ebc.t_user", "ebc.t_wide"]
    refused, before, after = warm.run(1, restore_declared, StreamConfig(uri=uri, marker_every=None))[0]
    assert "table 'ebc.t_user': trained by exact_rowwise_adagrad here, none in the marker" in refused
    kept = {name: value for name, value in expected.items() if name.startswith(("model.", "dense."))}
    assert differences(before | kept, after) == []


def restore_declared(settings: StreamConfig) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """What a plain restore says, and the truth before and after one with what it has named."""
    job = trainer(PLAN_1)
    job.step()
    with jobs.attach(job, settings, paranoid=False) as checkpointer:
        with pytest.raises(SchemaMismatchError) as refused:
            checkpointer.restore()
        before = truth(job)
        restored = checkpointer.restore(changes=pasted(str(refused.value)))
        assert restored is not None
        assert restored.evolved is not None
        return str(refused.value), before, truth(job)


@pytest.mark.parametrize("saved", ["rowwise"], indirect=True)
def test_only_an_empty_log_is_imported_into(saved: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> None:
    _, folder, _ = saved
    arguments = ["import", f"--from=dcp://{folder}", f"--to=file://{tmp_path}/log", *KEYS, *fused("rowwise")]
    ask(*arguments)
    with pytest.raises(ConfigError, match="an import requires an empty log"):
        ask(*arguments)


@pytest.mark.parametrize("saved", ["rowwise"], indirect=True)
def test_a_checkpoint_that_is_cut_makes_no_marker(saved: tuple[str, Path, dict[str, Any]], tmp_path: Path) -> None:
    _, folder, _ = saved
    copy = shutil.copytree(folder, tmp_path / "cut")
    with open(copy / "__1_0.distcp", "r+b") as file:
        file.truncate(2000)
    with pytest.raises(StreamCkptError, match="cannot be read"):
        ask("import", f"--from=dcp://{copy}", f"--to=file://{tmp_path}/log", *KEYS, *fused("rowwise"))
    assert {path.name for path in tmp_path.iterdir()} == {"cut"}
