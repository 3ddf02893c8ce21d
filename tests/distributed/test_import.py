"""A checkpoint that a plain TorchRec job has saved with DCP becomes the first marker of a lineage."""

from __future__ import annotations

import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests import jobs, warm, zoo
from tests.command import ask, call
from tests.distributed.test_import_torch_save import WHOLE, WHOLE_PLAN, kept, save
from tests.evolving import State, pasted, restored
from tests.forks import context
from tests.laps import config
from tests.model import OPTIMIZERS, PLAN_1, PLAN_2, PLAN_3, Spec, differences, trainer, truth
from tests.parts import FileLog, failpoints, fence_of, main
from tests.pool import Pool
from tests.zoo import MARK
from tests.zoo_models import Place, Plan
from torchrec_stream_ckpt import Changes, StreamConfig
from torchrec_stream_ckpt.errors import ConfigError, FencedError, SchemaMismatchError, StreamCkptError
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.save import import_writer

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


# An import is killed at each of its steps: nothing is restored that is not whole, and the next one begins anew.


ALONE = Plan(1, 1, (Place("tw", (0,)), Place("rw"), Place("dp")))
POINTS = {
    "claim.append": None,
    "control.written": 1,
    "claim.appended": 1,
    "segment.written": 1,
    "stream.acknowledged": 1,
    "import.rows": 1,
    "dense.metadata": 1,
    "commit.append": 1,
    "commit.appended": None,
}
"""Where an import is killed, and the generation that waits for the end of one from then on."""


@pytest.fixture(scope="module")
def whole_save(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    folder = tmp_path_factory.mktemp("saved")
    (folder / "ranks").mkdir()
    return folder, pool.run(2, save, str(folder), WHOLE, WHOLE_PLAN)[0]


def arguments(whole_save: Path, log: Path) -> list[str]:
    keys = ("--model-key=model", "--optimizer-key=optim", "--optimizer=exact_adagrad")
    return ["import", f"--from=torch://{whole_save}/model.pt", f"--to=file://{log}", *keys]


def command(given: list[str], fuse: str, report: Path) -> None:
    failpoints.arm(fuse, report)
    sys.argv = ["stream-ckpt", *given]
    main()


def kill(given: list[str], point: str, report: Path) -> None:
    process = context.Process(target=command, args=(given, f"{point}=kill", report))
    process.start()
    process.join(300)
    assert (process.exitcode, report.read_text()) == (-signal.SIGKILL, f"{point}\n")


def refused(settings: StreamConfig, call: str, *given: Any, **more: Any) -> str:
    with zoo.attach(zoo.build(WHOLE, ALONE), settings, paranoid=False) as checkpointer:
        try:
            getattr(checkpointer, call)(*given, **more)
        except StreamCkptError as error:
            return str(error)
    return ""


def refused_changes(settings: StreamConfig) -> str:
    return refused(settings, "restore", changes=Changes(dropped=("part0.t_user",)))


def afresh(settings: StreamConfig) -> None:
    job = zoo.build(WHOLE, ALONE)
    with zoo.attach(job, settings) as checkpointer:
        assert checkpointer.restore() is None
        zoo.play(job, checkpointer, ("train", MARK))


def check(pool: Pool, truth: State, log: Path, marker: str) -> None:
    """A real restore: bit for bit what was saved."""
    ((before, after, _, _, found),) = pool.run(1, restored, WHOLE, ALONE, config(log), None, Changes(), ())
    assert str(found.id) == marker
    assert differences(kept(before, truth), after) == []


@pytest.mark.parametrize("point", POINTS)
def test_an_import_that_is_killed_is_begun_anew_by_the_next_one(
    point: str, whole_save: tuple[Path, State], pool: Pool, tmp_path: Path
) -> None:
    (folder, truth), log, generation = whole_save, tmp_path / "log", POINTS[point]
    given = arguments(folder, log)
    kill(given, point, tmp_path / "fired")
    listed = ask("list", f"file://{log}") if point != "claim.append" else {"markers": [], "unfinished_import": None}
    assert listed["unfinished_import"] == generation
    if point == "commit.appended":  # it has come to its end, and nobody has heard of it
        assert [each["restorable"] for each in listed["markers"]] == [True]
        with pytest.raises(ConfigError, match=r"an import has committed marker 1:1.*\n  Try: restore that marker"):
            ask(*given)
        check(pool, truth, log, "1:1")
        return
    assert listed["markers"] == []
    if generation is not None:
        assert "generation 1 is an unfinished import" in call("list", f"file://{log}").output
        (said,) = pool.run(1, refused, config(log), "restore")
        assert "an import into this log has not committed a marker" in said
        assert "run the same `stream-ckpt import` again" in said
    found = ask(*given)
    marker = "2:1" if generation is not None else "1:1"
    assert (found["marker"], found["unfinished"]) == (marker, generation)
    check(pool, truth, log, marker)


def test_a_log_that_waits_for_the_end_of_an_import_is_no_beginning(
    whole_save: tuple[Path, State], pool: Pool, tmp_path: Path
) -> None:
    """Neither for changes nor for a warm start; an import may be killed twice; only fresh=True begins from nothing."""
    (folder, _), log = whole_save, tmp_path / "log"
    for number in (1, 2):
        kill(arguments(folder, log), "import.rows", tmp_path / f"fired{number}")
    assert ask("list", f"file://{log}")["unfinished_import"] == 2
    tree = call("list", f"file://{log}", "--tree").output
    assert "generation 2 (an import" in tree
    there = "an import into this log has not committed a marker"
    (said,) = pool.run(1, refused_changes, config(log))
    assert there in said
    (said,) = pool.run(1, refused, config(log), "warm_start", f"file://{tmp_path}/other")
    assert there in said
    (said,) = pool.run(1, refused, config(tmp_path / "own"), "warm_start", f"file://{log}")
    assert there in said
    assert f"uri=file://{log}" in said
    pool.run(1, afresh, replace(config(log), fresh=True))
    assert ask("list", f"file://{log}")["unfinished_import"] is None
    with pytest.raises(ConfigError, match=r"but this one has marker 3:1"):
        ask(*arguments(folder, log))


def test_what_an_operator_or_a_job_has_claimed_is_not_imported_into(
    whole_save: tuple[Path, State], tmp_path: Path
) -> None:
    (folder, _), log = whole_save, tmp_path / "log"
    kill(arguments(folder, log), "import.rows", tmp_path / "fired")
    control = Control(FileLog(log))
    control.claim(fence_of(control.refresh(), f"file://{log}"))
    with pytest.raises(ConfigError, match=r"requires an empty log, but generation 2 of a job has begun in this one"):
        ask(*arguments(folder, log))


def test_of_two_imports_at_one_time_the_older_one_is_fenced(
    whole_save: tuple[Path, State], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder, _), log = whole_save, tmp_path / "log"
    write, found = import_writer.write_stream, []

    def overtaken(*given: Any) -> Any:
        monkeypatch.setattr(import_writer, "write_stream", write)
        found.append(ask(*arguments(folder, log)))
        return write(*given)

    monkeypatch.setattr(import_writer, "write_stream", overtaken)
    with pytest.raises(FencedError):
        ask(*arguments(folder, log))
    assert [(each["marker"], each["unfinished"]) for each in found] == [("2:1", 1)]
    assert [each["marker"] for each in ask("list", f"file://{log}")["markers"]] == ["2:1"]
