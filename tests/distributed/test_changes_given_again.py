"""Changes that are given twice, edited after they were made, or are of another kind."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import ranks, zoo
from tests.distributed.test_changed_model_faults import CHANGES, EVENTS, NEW, OLD, TWO, tree
from tests.evolving import State
from tests.laps import config
from tests.model import differences
from tests.ranks import RankFailed
from tests.zoo import MARK, Marks, Model, Plan
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.evolve.changes import Changes, RowChange
from torchrec_stream_ckpt.evolve.row_maps import IdMap

pytestmark = pytest.mark.distributed


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Marks]]:
    directory = tmp_path_factory.mktemp("trained") / "log"
    return directory, ranks.run(2, zoo.start, OLD, TWO, config(directory), EVENTS)


@pytest.mark.parametrize("only_first", [False, True])
def test_what_is_not_changes_is_refused_on_all_ranks(
    trained: tuple[Path, list[Marks]], only_first: bool, tmp_path: Path
) -> None:
    directory = shutil.copytree(trained[0], tmp_path / "log")
    before = tree(directory)
    said = ranks.run(2, refused_kind, config(directory), only_first)
    assert "changes is 'changes.toml'" in said[0]
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
    changed = ranks.run(2, moved, TWO, settings, None, first, (MARK, "train", MARK))
    newest = max(changed[0][2])
    before = tree(directory)
    with pytest.raises(RankFailed, match=r"rows: 'part0.t1' has an id map"):
        ranks.run(2, moved, TWO, settings, None, edited, ())
    assert tree(directory) == before
    (state, *_), *_ = ranks.run(2, moved, TWO, settings, None, first, ())
    assert differences(changed[0][2][newest], state) == []
    (state, *_), *_ = ranks.run(2, moved, TWO, settings, newest, edited, ())
    name = "model.part0.embedding_bags.t1.weight"
    assert torch.equal(state[name][MOVED[::-1]], changed[0][2][newest][name])


MOVED = [*range(13, 40), *range(13)]


def test_a_command_that_names_a_marker_and_changes_goes_on_when_it_is_given_again(
    trained: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    """The job that it started is not thrown away by its own restart; before its first marker, all is made again."""
    settings = config(shutil.copytree(trained[0], tmp_path / "log"))
    begun = ranks.run(2, given, NEW, settings, "1:1", CHANGES, ())
    assert begun[0][:2] == ("1:1", True)
    first = ranks.run(2, given, NEW, settings, "1:1", CHANGES, ("train", MARK, "train", MARK))
    assert first[0][:2] == ("1:1", True)
    newest = max(first[0][2])
    for times in range(2):
        again = ranks.run(2, given, NEW, settings, "1:1", CHANGES, ("train", MARK) if times else ())
        assert again[0][:2] == (newest, False)
        assert differences(first[0][2][newest], again[0][3]) == []
    assert ranks.run(2, given, NEW, settings, "1:2", CHANGES, ())[0][:2] == ("1:2", True), "another marker is meant"


def test_changes_of_an_empty_log_are_refused(tmp_path: Path) -> None:
    """They would be made of nothing, and then be wrong when the job is started again."""
    with pytest.raises(RankFailed, match="changes are declared, and no marker was ever committed"):
        ranks.run(2, given, NEW, config(tmp_path / "log"), None, CHANGES, ())
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
