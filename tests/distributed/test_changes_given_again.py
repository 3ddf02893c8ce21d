"""Changes that are given twice, edited after they were made, or are of another kind."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from typer.testing import CliRunner

from tests import warm, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, TWO, tree
from tests.evolving import State, pasted
from tests.laps import config
from tests.model import differences
from tests.parts import app
from tests.ranks import RankFailed
from tests.zoo import MARK, Marks
from tests.zoo_models import Model, Plan
from torchrec_stream_ckpt import Changes, IdMap, ModelSchema, RowChange, StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Marks]]:
    directory = tmp_path_factory.mktemp("trained") / "log"
    return directory, warm.run(2, zoo.start, OLD, TWO, config(directory), EVENTS)


@pytest.mark.parametrize("only_first", [False, True])
def test_what_is_not_changes_is_refused_on_all_ranks(
    trained: tuple[Path, list[Marks]], only_first: bool, tmp_path: Path
) -> None:
    directory = shutil.copytree(trained[0], tmp_path / "log")
    before = tree(directory)
    said = warm.run(2, refused_kind, config(directory), only_first)
    assert "changes must be a Changes object, got 'changes.toml'" in said[0]
    assert all(said), "no rank goes on"
    assert tree(directory) == before


def refused_kind(settings: StreamConfig, only_first: bool) -> str:
    mine = CHANGES if only_first and dist.get_rank() else "changes.toml"
    with zoo.attach(zoo.build(NEW, TWO), settings, paranoid=False) as checkpointer:
        for ask in (checkpointer.plan, checkpointer.restore):
            with pytest.raises(StreamCkptError) as refused:
                ask(changes=mine)  # type: ignore[arg-type]
    return str(refused.value)


def test_an_id_map_that_is_edited_after_the_change_moves_no_row_twice(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    directory = shutil.copytree(trained[0], tmp_path / "log")
    settings = config(directory)
    first, edited = (Changes(rows={"part0.t1": RowChange(40, IdMap(range(40), new))}) for new in (MOVED, MOVED[::-1]))
    changed = warm.run(2, moved, TWO, settings, None, first, (MARK, "train", MARK))
    newest = max(changed[0][2])
    before = tree(directory)
    both = r"rows: 'part0.t1' has an id map(.|\n)*name the marker and give the changes another label"
    with pytest.raises(RankFailed, match=both):
        warm.run(2, moved, TWO, settings, None, edited, ())
    assert tree(directory) == before
    (state, *_), *_ = warm.run(2, moved, TWO, settings, None, first, ())
    assert differences(changed[0][2][newest], state) == []
    again = replace(first, label="once more")
    (state, *_), *_ = warm.run(2, moved, TWO, settings, newest, again, ())
    name = "model.part0.embedding_bags.t1.weight"
    assert torch.equal(state[name][MOVED], changed[0][2][newest][name])
    (state, *_), *_ = warm.run(2, moved, TWO, settings, newest, edited, ())
    name = "model.part0.embedding_bags.t1.weight"
    assert torch.equal(state[name][MOVED[::-1]], changed[0][2][newest][name])


# The command line.


def save_schema(settings: StreamConfig, file: Path) -> None:
    with zoo.attach(zoo.build(NEW, ALONE), settings, paranoid=False) as checkpointer:
        checkpointer.schema().save(file)


def test_the_command_line_compares_the_dense_state_too(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    new, own, toml = tmp_path / "new.json", tmp_path / "own.json", tmp_path / "changes.toml"
    warm.run(1, save_schema, config(tmp_path / "other"), new)
    uri = f"file://{trained[0]}"
    assert plan("--save", str(own), "--dense", uri=uri)[0] == 0
    code, said, _ = plan("--schema", str(own), "--dense", uri=uri)
    assert (code, "dense state: 8 of 8 parts as they were" in said) == (0, True), said
    code, _, error = plan("--schema", str(new), "--dense", uri=uri)
    assert code == 1
    needed = pasted(error)
    assert Changes(dense=needed.dense).digest == Changes(dense=CHANGES.dense).digest
    toml.write_text(CHANGES.to_toml())
    code, said, _ = plan("--schema", str(new), "--changes", str(toml), "--dense", uri=uri)
    assert code == 0
    assert "dense heads.0_d.weight: fresh" in said
    assert "dense heads.0_c.weight: dropped" in said
    code, said, _ = plan("--schema", str(new), "--changes", str(toml), uri=uri)
    assert (code, "dense state: not compared" in said) == (0, True)
    damaged = shutil.copytree(trained[0], tmp_path / "log")
    for each in damaged.rglob("*.distcp"):
        each.write_bytes(each.read_bytes()[:-1] + b"x")
    code, _, error = plan("--schema", str(new), "--dense", uri=f"file://{damaged}")
    assert (code, ".distcp" in error) == (1, True), "no pickle is opened that COMMIT does not vouch for"


def test_the_command_line_counts_trained_rows_that_would_go(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    own, uri = tmp_path / "own.json", f"file://{trained[0]}"
    assert plan("--save", str(own), uri=uri)[0] == 0
    model = ModelSchema.load(own)
    small = tuple(replace(each, rows=9) if each.name == "part0.t0" else each for each in model.tables)
    replace(model, tables=small).save(own)
    (state,) = (value[9:] for name, value in trained[1][0]["1:2"].items() if name.startswith("fused.part0.t0.0"))
    count = int((state != 0).reshape(len(state), -1).any(1).sum())
    assert 0 < count < 51
    code, _, error = plan("--schema", str(own), "--count-trained", uri=uri)
    assert (code, f"51 rows would be dropped, {count} of them trained" in error) == (1, True), error
    assert "51 rows would be dropped, which may be trained" in plan("--schema", str(own), uri=uri)[2]


def plan(*arguments: str, uri: str) -> tuple[int, str, str]:
    """What ``stream-ckpt evolve-plan`` says of marker 1:2."""
    done = CliRunner().invoke(app, ["evolve-plan", uri, "1:2", *arguments], env={"COLUMNS": "240"})
    error = str(done.exception) if done.exception is not None else ""
    return done.exit_code, done.stdout, error + done.output


MOVED = [*range(13, 40), *range(13)]


def test_a_command_that_names_a_marker_and_changes_goes_on_when_it_is_given_again(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    """The job that it started is not thrown away by its own restart; before its first marker, all is made again."""
    settings = config(shutil.copytree(trained[0], tmp_path / "log"))
    begun = warm.run(2, given, NEW, settings, "1:1", CHANGES, ())
    assert begun[0][:2] == ("1:1", True)
    first = warm.run(2, given, NEW, settings, "1:1", CHANGES, ("train", MARK, "train", MARK))
    assert first[0][:2] == ("1:1", True)
    newest = max(first[0][2])
    for times in range(2):
        again = warm.run(2, given, NEW, settings, "1:1", CHANGES, ("train", MARK) if times else ())
        assert again[0][:2] == (newest, False)
        assert differences(first[0][2][newest], again[0][3]) == []
    assert warm.run(2, given, NEW, settings, "1:2", CHANGES, ())[0][:2] == ("1:2", True), "another marker is meant"


def test_changes_of_an_empty_log_are_refused(tmp_path: Path) -> None:
    """They would be made of nothing, and then be wrong when the job is started again."""
    with pytest.raises(RankFailed, match="this job has no committed marker to apply them to"):
        warm.run(2, given, NEW, config(tmp_path / "log"), None, CHANGES, ())
    assert not (tmp_path / "log").exists()


def given(
    model: Model, settings: StreamConfig, marker: str | None, changes: Changes, events: tuple[str, ...]
) -> tuple[str, bool, Marks, State]:
    """A start by a command line: as ``flags.restore_from`` does."""
    job = zoo.build(model, TWO)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        found = checkpointer.restore(marker, changes=changes, once=True)
        assert found is not None
        state = zoo.truth(job)
        zoo.play(job, checkpointer, events)
    return str(found.id), found.evolved is not None, job.marks, state


def moved(
    plan: Plan, settings: StreamConfig, marker: str | None, changes: Changes, events: tuple[str, ...]
) -> tuple[State, None, Marks]:
    job = zoo.build(OLD, plan)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        checkpointer.restore(marker, changes=changes)
        state = zoo.truth(job)
        zoo.play(job, checkpointer, events)
    return state, None, job.marks
