"""What runs beside a job goes through a change of its model, with real ranks: follower, folds, gc, trim, relay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import stores, tiered, warm, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, THREE, TWO, check
from tests.evolving import State, restored
from tests.laps import config
from tests.model import differences
from tests.parts import Policy, app
from tests.zoo_models import Model, Plan
from torchrec_stream_ckpt import FollowedTables, StreamConfig, follow

pytestmark = pytest.mark.distributed


def weights(state: State) -> State:
    """By name of table, as a replica has them."""
    prefix = "model.part0.embedding_bags."
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {f"part0.{name.removesuffix('.weight')}": value for name, value in found.items()}


def replica_of(tables: FollowedTables) -> tuple[str, State]:
    tables.advance()
    with tables.reading() as served:
        return str(served.marker), {name: tensor.clone() for name, tensor in served.tables.items()}


def command(*arguments: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output


def read(model: Model, plan: Plan, settings: StreamConfig, marker: str) -> tuple[State, str]:
    """What a plain restore brings, and from where."""
    job = zoo.build(model, plan)
    with zoo.attach(job, settings) as checkpointer:
        found = checkpointer.restore(marker)
        assert found is not None
        return zoo.truth(job), found.source


def test_a_replica_head_folds_gc_and_trim_go_through_a_change(tmp_path: Path) -> None:
    """A HEAD of before the change serves what went on, one of after it no marker of before; gc leaves both aside."""
    root, head, policy = tmp_path / "log", tmp_path / "head", Policy(rebase=0.5, compact="none")
    settings, uri = config(root, head=str(head)), f"file://{root}"
    begun = warm.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    with FollowedTables(follow(uri, scratch=tmp_path)) as tables:
        marker, found = replica_of(tables)
        assert (marker, differences(weights(begun[0]["1:2"]), found)) == ("1:2", [])
        stores.fold(root, policy, head=head)
        said = warm.run(3, restored, NEW, THREE, settings, None, CHANGES, EVENTS)
        assert said[0][4].source == "head 1:2"
        check(begun, said, "1:2")
        marker, found = replica_of(tables)
        assert (marker, differences(weights(said[0][2]["2:4"]), found)) == ("2:4", [])
    (state, source), *_ = warm.run(1, read, NEW, ALONE, settings, "2:4")
    assert (source, differences(said[0][2]["2:4"], state)) == ("head 1:2 + log", [])
    before = shutil.copytree(head, tmp_path / "before")
    stores.fold(root, policy, head=head)
    (state, source), *_ = warm.run(2, read, OLD, TWO, settings, "1:2")
    assert (source, differences(begun[0]["1:2"], state)) == ("store 1:2", [])
    again = warm.run(2, restored, NEW, TWO, settings, "1:2", CHANGES, ())
    assert again[0][4].source == "store 1:2"
    check(begun, again, "1:2")
    for _ in range(2):
        command("gc", uri, "--store", uri, "--newest", "1", "--grace", "0")
    command("trim", uri, "--store", uri)
    stores.lose_rows(root)
    for world, plan, local, place in ((1, ALONE, head, "head 2:4"), (2, TWO, before, "store 2:4")):
        (state, source), *_ = warm.run(world, read, NEW, plan, config(root, head=str(local)), "2:4")
        assert (source, differences(said[0][2]["2:4"], state)) == (place, [])


def test_an_outer_tier_that_gets_every_second_marker_goes_through_a_change(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    settings = tiered.config(inner, outer, 2, marker_every=None)
    begun = warm.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    said = warm.run(2, restored, NEW, TWO, settings, None, CHANGES, EVENTS)
    check(begun, said, "1:2")
    shutil.rmtree(inner)
    (state, _), *_ = warm.run(1, zoo.resume, NEW, ALONE, settings, None, ())
    assert differences(said[0][2]["2:4"], state) == []
    check(begun, warm.run(3, restored, NEW, THREE, settings, "1:2", CHANGES, ()), "1:2")
