"""What TorchRec jobs have saved with ``torch.save`` becomes the first marker of a lineage, for any model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import ShardedTensor

from tests import zoo
from tests.command import ask
from tests.evolving import Origin, State, Step, expected, restored
from tests.laps import config
from tests.model import assemble, differences
from tests.pool import Pool
from tests.zoo import MARK
from tests.zoo_models import Model, Part, Place, Plan, Table
from torchrec_stream_ckpt import Changes
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, SchemaMismatchError, UnsupportedError

pytestmark = pytest.mark.distributed

USER, ITEM = Table("t_user", 57, 16, ("user",)), Table("t_item", 97, 16, ("item",), dtype="fp16")
WIDE, FEW = Table("t_wide", 41, 32, ("wide",)), Table("t_few", 13, 16, ("few",))
MODEL = Model((Part("ebc", (USER, ITEM, WIDE, FEW)),), "rowwise_adagrad")
PLAN = Plan(2, 2, (Place("tw", (1,)), Place("rw"), Place("cw", (0, 1)), Place("dp")))
KEYS = ("--model-key=model", "--optimizer-key=optim", "--optimizer=exact_rowwise_adagrad")
WHOLE = Model((Part("ebc", (USER, ITEM, FEW)),), "adagrad")
WHOLE_PLAN = Plan(2, 2, (Place("rw"), Place("tw", (0,)), Place("dp")))


def save(folder: str, model: Model, plan: Plan) -> State:
    """A job that knows nothing of this project: a file a rank, and one of gathered tensors; the truth about it."""
    job = zoo.build(model, plan)
    for _ in range(3):
        zoo.train(job)
    state = {"model": job.dmp.state_dict(), "optim": job.optimizer.state_dict(), "steps": 3}
    torch.save(state, f"{folder}/ranks/rank{dist.get_rank()}.pt")
    gathered = _gathered(state)
    if dist.get_rank() == 0:
        torch.save(gathered, f"{folder}/model.pt")
        fused = {name: values for name, values in gathered["optim"]["state"].items() if "exp_avg" not in values}
        torch.save({**gathered, "optim": {"state": fused}}, f"{folder}/fused.pt")
        torch.save({f"module.{name}": value for name, value in gathered["model"].items()}, f"{folder}/weights.pt")
    return zoo.truth(job)


def _gathered(state: dict[str, Any]) -> dict[str, Any]:
    found: dict[tuple[str, ...], ShardedTensor] = dict(_sharded(state, ()))
    tensors = assemble({"/".join(keys): value for keys, value in found.items()})
    return _replaced(state, (), tensors)


def _sharded(value: Any, keys: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], ShardedTensor]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _sharded(inner, (*keys, key))
    elif isinstance(value, ShardedTensor):
        yield keys, value


def _replaced(value: Any, keys: tuple[str, ...], tensors: State) -> Any:
    if isinstance(value, dict):
        return {key: _replaced(inner, (*keys, key), tensors) for key, inner in value.items()}
    return tensors["/".join(keys)] if isinstance(value, ShardedTensor) else value


def write_schema(folder: str, model: Model, plan: Plan) -> None:
    """What the new job would say of its model."""
    job = zoo.build(model, plan)
    with zoo.attach(job, config(Path(folder) / "unused")) as checkpointer:
        checkpointer.schema().save(f"{folder}/model.json")


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    return _saved(pool, tmp_path_factory.mktemp("cut"), MODEL, PLAN)


@pytest.fixture(scope="module")
def whole(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    return _saved(pool, tmp_path_factory.mktemp("whole"), WHOLE, WHOLE_PLAN)


def _saved(pool: Pool, folder: Path, model: Model, plan: Plan) -> tuple[Path, State]:
    (folder / "ranks").mkdir()
    return folder, pool.run(2, save, str(folder), model, plan)[0]


def kept(before: State, saved: State) -> State:
    """All that a checkpoint holds is the checkpoint's; all else is as it was."""
    return before | {name: value for name, value in saved.items() if name.startswith(("model.", "fused.", "dense."))}


def own(before: State) -> State:
    """What no checkpoint holds."""
    return {name: value for name, value in before.items() if name.startswith("counters.") or name in ("step", "rng")}


@pytest.mark.parametrize("world", [1, 3])
def test_the_files_of_all_ranks_come_to_other_ranks_and_another_plan(
    world: int, saved: tuple[Path, State], pool: Pool, tmp_path: Path
) -> None:
    folder, truth = saved
    found = ask("import", f"--from=torch://{folder}/ranks", f"--to=file://{tmp_path}/log", "--step=3", *KEYS)
    assert found["marker"] == "1:1"
    assert found["without_states"] == []
    assert found["not_taken"] == ["optim.param_groups", "steps"] or found["not_taken"] == ["steps"]
    places = (Place("rw"), Place("tw", (world - 1,)), Place("cw", (world - 1, 0)), Place("dp"))
    where, plan = config(tmp_path / "log"), Plan(world, world, places)
    said = pool.run(world, restored, MODEL, plan, where, None, Changes(), ("train", MARK))
    for before, after, _, _, found in said:
        assert (str(found.id), found.step, found.evolved) == ("1:1", 3, None)
        assert differences(kept(before, truth), after) == []
    ((marker, there),) = said[0][2].items()
    again = pool.run(2, zoo.resume, MODEL, PLAN, where, marker, ())
    assert [differences(there, state, rng=False) for state, _ in again] == [[], []]


@pytest.mark.parametrize("file", ["model.pt", "fused.pt"])
def test_gathered_tensors_come_to_one_rank(file: str, whole: tuple[Path, State], pool: Pool, tmp_path: Path) -> None:
    """Where the state of the dense optimizer is not in the file, it stays as the job has made it."""
    folder, truth = whole
    keys = ("--model-key=model", "--optimizer-key=optim", "--optimizer=exact_adagrad")
    ask("import", f"--from=torch://{folder}/{file}", f"--to=file://{tmp_path}/log", *keys)
    plan = Plan(1, 1, (Place("tw", (0,)), Place("rw"), Place("dp")))
    ((before, after, *_),) = pool.run(1, restored, WHOLE, plan, config(tmp_path / "log"), None, Changes(), ())
    dense = {name: value for name, value in before.items() if name.startswith("dense.")}
    assert differences(kept(before, truth) | (dense if file == "fused.pt" else {}), after) == []


def test_weights_alone_come_to_another_model_by_changes_that_the_refusal_has_named(
    whole: tuple[Path, State], pool: Pool, tmp_path: Path
) -> None:
    """One more table, one with more rows and columns, one without its feature, another prefix; states begin anew."""
    folder, truth = whole
    user, city = replace(USER, rows=80, dim=32), Table("t_city", 30, 8, ("city",))
    model = Model((Part("ebc", (user, city, FEW)),), "rowwise_adagrad")
    plan = Plan(2, 2, (Place("tw", (0,)), Place("rw"), Place("dp")))
    pool.run(2, write_schema, str(tmp_path), model, plan)
    log = tmp_path / "log"
    arguments = ["import", f"--from=torch://{folder}/weights.pt", f"--to=file://{log}", "--optimizer=none"]
    arguments.append(f"--schema={tmp_path}/model.json")
    with pytest.raises(ConfigError, match=r"named 'module\.part0\.t_user' in the checkpoint") as refused:
        ask(*arguments)
    assert r"--rename 'module\.(.+)=\1'" in str(refused.value)
    arguments.append(r"--rename=module\.(.+)=\1")
    with pytest.raises(SchemaMismatchError) as differs:
        ask(*arguments)
    assert not log.exists()
    said = str(differs.value)
    for name in ("part0.t_city", "part0.t_item", "80 rows here, 57", "32 columns here, 16", "heads.0_user.weight"):
        assert name in said
    (tmp_path / "changes.toml").write_text(said.split("or in a TOML file:\n")[1].split("\n# ")[0])
    found = ask(*arguments, f"--changes={tmp_path}/changes.toml")
    assert found["without_states"] == ["part0.t_item", "part0.t_user"]
    assert any("t_city: added" in line for line in found["becomes"])
    changes = Changes.load(tmp_path / "changes.toml")
    before_it = replace(WHOLE, optimizer="sgd")  # it has no state to keep
    origins = {"t_user": Origin("t_user", USER, None)}
    step = Step(model, (1, 1, 1), origins, changes, before_it)
    answers = pool.run(2, restored, model, plan, config(log), None, changes, ("train", MARK))
    for before, after, _, _, found in answers:
        fresh = {name: value for name, value in before.items() if name.startswith("dense.")}
        there = {"step": before["step"], "counters.part0.t_user": torch.zeros(())} | truth
        assert differences(expected(step, before, there) | few(truth) | own(before) | fresh, after) == []
        labels = {part.name: part.labels for part in found.evolved.parts}
        assert labels["part0.t_user"] == {"weights": "exact", "sum": "fresh"}
    again = pool.run(1, zoo.resume, model, Plan(1, 1, plan.places), config(log), None, ())
    (there,) = answers[0][2].values()
    assert differences(there, again[0][0], rng=False) == []


def few(truth: State) -> State:
    """The data-parallel table, which nothing has changed, and its state."""
    return {name: value for name, value in truth.items() if "embedding_bags.t_few.weight" in name}


def test_states_that_are_there_go_on_in_a_changed_model(saved: tuple[Path, State], pool: Pool, tmp_path: Path) -> None:
    folder, truth = saved
    user, wide = replace(USER, name="t_member"), replace(WIDE, rows=20)
    model = Model((Part("ebc", (user, ITEM, wide, FEW)),), "rowwise_adagrad")
    (tmp_path / "changes.toml").write_text(
        '[renamed]\n"part0.t_user" = "part0.t_member"\n'
        '[rows]\n"part0.t_wide" = { rows = 20, allow_dropped_rows = true }\n'
    )
    changes = Changes.load(tmp_path / "changes.toml")
    pool.run(2, write_schema, str(tmp_path), model, PLAN)
    more = (f"--schema={tmp_path}/model.json", f"--changes={tmp_path}/changes.toml")
    ask("import", f"--from=torch://{folder}/ranks", f"--to=file://{tmp_path}/log", *KEYS, *more)
    origins = {each.name: Origin(each.name, old, None) for each, old in ((user, USER), (ITEM, ITEM), (wide, WIDE))}
    step = Step(model, (1, 1, 2, 1), origins, changes, MODEL)
    for before, after, *_ in pool.run(2, restored, model, PLAN, config(tmp_path / "log"), None, changes, ()):
        want = expected(step, before, truth) | few(truth) | own(before)
        assert differences(want, after) == []


def test_a_file_of_a_rank_that_is_missing_or_of_another_job_is_named(
    saved: tuple[Path, State], whole: tuple[Path, State], tmp_path: Path
) -> None:
    folder, _ = saved
    to = f"--to=file://{tmp_path}/log"
    with pytest.raises(CorruptionError, match=r"t_\w+\.weight is incomplete: 1 of its \d shards .*which rank 1 had"):
        ask("import", f"--from=torch://{folder}/ranks/rank0.pt", to, *KEYS)
    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "rank0.pt").symlink_to(folder / "ranks" / "rank0.pt")
    (mixed / "rank1.pt").symlink_to(whole[0] / "ranks" / "rank1.pt")
    with pytest.raises(ConfigError, match="sharded differently"):
        ask("import", f"--from=torch://{mixed}", to, *KEYS)
    with pytest.raises(UnsupportedError, match=r"momentum1 has size \(82,\), but the table has \(41, 32\)"):
        ask("import", f"--from=torch://{folder}/model.pt", to, *KEYS)
    assert not (tmp_path / "log").exists()
