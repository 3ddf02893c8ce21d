"""What runs beside a job goes through a change of its model, with real ranks: follower, folds, gc, trim, relay."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tests import ranks, stores, tiered, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, THREE, TWO, check
from tests.evolving import State, restored
from tests.laps import config
from tests.model import differences
from torchrec_stream_ckpt import FollowedTables, follow
from torchrec_stream_ckpt.cli.main import app
from torchrec_stream_ckpt.materialize.compactor import Policy

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


def test_a_replica_folds_gc_and_trim_go_through_a_change(tmp_path: Path) -> None:
    root = tmp_path / "log"
    settings, uri = config(root), f"file://{root}"
    begun = ranks.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    with FollowedTables(follow(uri, scratch=tmp_path)) as tables:
        marker, found = replica_of(tables)
        assert (marker, differences(weights(begun[0]["1:2"]), found)) == ("1:2", [])
        stores.fold(root, Policy(rebase=0.5))
        said = ranks.run(3, restored, NEW, THREE, settings, None, CHANGES, EVENTS)
        marker, found = replica_of(tables)
        assert (marker, differences(weights(said[0][2]["2:4"]), found)) == ("2:4", [])
    stores.fold(root, Policy(rebase=0.5))
    for _ in range(2):
        command("gc", uri, "--store", uri, "--newest", "1", "--grace", "0")
    command("trim", uri, "--store", uri)
    stores.lose_rows(root)
    for world, plan in ((1, ALONE), (2, TWO)):
        (state, _), *_ = ranks.run(world, zoo.resume, NEW, plan, settings, "2:4", ())
        assert differences(said[0][2]["2:4"], state) == []


def test_an_outer_tier_that_gets_every_second_marker_goes_through_a_change(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    settings = tiered.config(inner, outer, 2, marker_every=None)
    begun = ranks.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    said = ranks.run(2, restored, NEW, TWO, settings, None, CHANGES, EVENTS)
    check(begun, said, "1:2")
    shutil.rmtree(inner)
    (state, _), *_ = ranks.run(1, zoo.resume, NEW, ALONE, settings, None, ())
    assert differences(said[0][2]["2:4"], state) == []
    check(begun, ranks.run(3, restored, NEW, THREE, settings, "1:2", CHANGES, ()), "1:2")
