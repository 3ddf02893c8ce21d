"""Proofs across a change: tables that went on are compared, changed ones count as not compared, and are proved anew."""

from __future__ import annotations

import io
import logging
import shutil
from pathlib import Path

import pytest

from tests import ranks, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, NEW, OLD
from tests.inside import inside
from tests.laps import config
from tests.zoo import MARK
from torchrec_stream_ckpt import Changes, StreamConfig
from torchrec_stream_ckpt.errors import ProofMismatchError

pytestmark = pytest.mark.distributed

Answer = tuple[float, list[str]] | str


def cells(*names: str) -> int:
    """Of tables of the new model: weights and, counted apart, the state."""
    return sum(2 * table.rows * table.dim for table in NEW.parts[0].tables if table.name in names)


def train(settings: StreamConfig, loses: str) -> None:
    job = zoo.build(OLD, ALONE)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        zoo.play(job, checkpointer, ("train", MARK))
        if loses == "some":
            inside(checkpointer).lose_a_hook()  # rows change from here on, and nobody sends them
        zoo.play(job, checkpointer, ("train", MARK))


def go_on(
    settings: StreamConfig, marker: str, changes: Changes | None, events: tuple[str, ...] = (), loses: str = "none"
) -> Answer:
    """Share that was proved, and what was said of the changed tables; or the tables that are not as proved."""
    logger, lines = logging.getLogger("torchrec_stream_ckpt"), io.StringIO()
    logger.setLevel(logging.INFO)
    logger.addHandler(logging.StreamHandler(lines))
    job = zoo.build(NEW, ALONE)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        try:
            found = checkpointer.restore(marker, changes=changes)
        except ProofMismatchError as error:
            return str(error)
        assert found is not None
        zoo.play(job, checkpointer, events[:1])
        if loses == "some":
            inside(checkpointer).lose_a_hook()
        zoo.play(job, checkpointer, events[1:])
        said = lines.getvalue().splitlines()
        return found.proved, [line for line in said if "not compared" in line or "match the digests" in line]


@pytest.fixture(scope="module", params=["none", "some"])
def trained(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """A job that sent all that it changed, or did not."""
    where = tmp_path_factory.mktemp("trained") / "log"
    ranks.run(1, train, config(where), request.param)
    return request.param, where


def answer(*args: object) -> Answer:
    (found,) = ranks.run(1, go_on, *args)
    return found


def test_tables_that_go_on_are_compared_across_a_change_and_changed_ones_at_their_first_marker(
    trained: tuple[str, Path], tmp_path: Path
) -> None:
    loses, log = trained
    settings = config(shutil.copytree(log, tmp_path / "log"))
    found = answer(settings, "1:2", CHANGES, ("train", "train", MARK))
    if loses == "some":
        assert isinstance(found, str)
        assert "part0.u1 weights rows" in found
        assert "part0.t0" not in found, "its rows are not those of the marker any more"
        return
    share = cells("u1") / cells("t0", "u1", "n")
    assert 0 < found[0] == share < 1
    assert found[1][0].endswith(f"{100 * share:.1f}% of its rows match the digests taken in training")
    assert found[1][1:] == ["rows of part0.t0 were loaded into changed tables and not compared with their proofs"]
    share, said = answer(settings, "2:3", None)
    assert (share, len(said)) == (1.0, 1)
    answer(settings, "1:2", CHANGES, ("train", "train", MARK), "some")
    found = answer(settings, "4:3", None)
    assert isinstance(found, str)
    assert "part0.t0 weights rows [0, 64)" in found
    assert "part0.n weights rows [0, 13)" in found
