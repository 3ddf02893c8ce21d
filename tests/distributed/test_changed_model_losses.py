"""A log loses rows of a job whose model has changed: the next generation stands on what is held."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torchrec.optim.keyed import CombinedOptimizer

from tests import ranks, stores, warm, zoo, zoo_models
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, THREE, TWO, check
from tests.evolving import State, restored
from tests.inside import inside
from tests.laps import config
from tests.model import differences
from tests.parts import FileLog
from tests.ranks import RankFailed
from tests.zoo import MARK, Marks
from tests.zoo_models import Place
from torchrec_stream_ckpt import Changes, DenseChanges, StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed


def cut(root: Path, generations: tuple[int, ...]) -> None:
    """What rank 1 has sent in these generations is gone, but for some bytes."""
    for generation in generations:
        (segment,) = (root / "data" / "p00001").glob(f"g{generation:08d}-*.seg")
        os.truncate(segment, 50)


def train_through_a_loss(
    settings: StreamConfig, changes: Changes | None, before: tuple[str, ...], root: Path, lost: tuple[int, ...]
) -> tuple[int, Marks]:
    """The generation that goes on, and the truth at its markers."""
    job = zoo.build(NEW, TWO)
    with zoo.attach(job, settings) as checkpointer:
        assert checkpointer.restore(changes=changes) is not None
        zoo.play(job, checkpointer, before)
        lose(job, checkpointer, root, lost)
        return checkpointer.generation or 0, job.marks


def lose(job: zoo_models.Job, checkpointer: StreamCheckpointer, root: Path, lost: tuple[int, ...]) -> None:
    """Rows of these generations go; the job notices, goes on, and sets two markers."""
    opened = checkpointer.generation
    inside(checkpointer).wait_for_log()  # what goes was there
    dist.barrier()
    if dist.get_rank() == 1:
        cut(root, lost)
    dist.barrier()
    with pytest.raises(StreamCkptError):
        checkpointer.mark().result(60)
    for _ in range(2000):  # it hears of it from its commit thread, however long that takes
        zoo.play(job, checkpointer, ("train",))
        if checkpointer.generation != opened:
            break
    job.marks.clear()
    zoo.play(job, checkpointer, ("train", MARK, "train", MARK))


@pytest.mark.parametrize(
    ("runs", "before", "lost", "parent", "says"),
    [
        (1, ("train",), (2,), "1:2", True),
        (1, ("train", MARK, "train"), (2,), "1:2", True),
        (2, ("train", MARK, "train"), (3,), "2:4", False),
        (2, ("train",), (2, 3), "1:2", True),
        (1, ("train", MARK), (1, 2), None, True),
    ],
    ids=["before the first marker", "with its markers", "held", "of two runs", "all"],
)
def test_a_job_goes_on_after_a_loss(
    runs: int, before: tuple[str, ...], lost: tuple[int, ...], parent: str | None, says: bool, tmp_path: Path
) -> None:
    """A plain restart after the change opens generation 3, and knows of the change by the log alone."""
    root = tmp_path / "log"
    settings = config(root, sweep_bytes=2**12)
    begun = warm.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    declared: Changes | None = CHANGES
    if runs == 2:
        warm.run(2, restored, NEW, TWO, settings, None, CHANGES, EVENTS)
        declared = None
    said = ranks.run(2, train_through_a_loss, settings, declared, before, root, lost)
    generation, marks = said[0]
    claim = Control(FileLog(root)).refresh().claims[generation]
    assert (generation, claim.parent) == (runs + 2, MarkerId.parse(parent) if parent is not None else None)
    assert claim.swept == tuple(range(len(claim.schema.tables)))
    assert (claim.changes.digest if claim.changes is not None else None) == (CHANGES.digest if says else None)
    assert len(marks) == 2
    for marker in marks:
        assert differences(marks[marker], resumed(settings, marker)) == []
    if parent is not None:
        (state, _), *_ = warm.run(2, zoo.resume, OLD, TWO, settings, "1:2", ())
        assert differences(begun[0]["1:2"], state) == []
        check(begun, warm.run(3, restored, NEW, THREE, settings, "1:2", CHANGES, ()), "1:2")
    newest = max(marks, key=MarkerId.parse)
    (_, state, _, _, found), *_ = warm.run(1, restored, NEW, ALONE, settings, newest, CHANGES, ())
    assert found.evolved is None, "the command line of the job keeps its changes"
    assert differences(marks[newest], state) == []
    if runs == 1 and MARK not in before:  # a fold refuses to pass over lost markers
        stores.fold(root)
        stores.lose_rows(root)
        assert differences(marks[newest], resumed(settings, newest)) == []


def resumed(settings: StreamConfig, marker: str) -> State:
    found: list[Any] = warm.run(1, zoo.resume, NEW, ALONE, settings, marker, ())
    return found[0][0]


def reshard(settings: StreamConfig, root: Path) -> tuple[Marks, Marks]:
    """Rows move between ranks after the change, so that kernels are described anew; then the log loses some."""
    job = zoo.build(NEW, TWO)
    with zoo.attach(job, settings) as checkpointer:
        assert checkpointer.restore(changes=CHANGES) is not None
        zoo.play(job, checkpointer, ("train", MARK, "train"))
        moved = replace(TWO, places=(TWO.places[0], Place("tw", (0,)), Place("tw", (1,))))
        sharder = zoo_models._sharders(NEW)["ebc"]
        module = zoo_models.Net(NEW).get_submodule("part0")
        plan = zoo_models._module_plan(module, NEW.parts[0], iter(moved.places), moved, sharder)
        job.dmp.reshard({"part0": (0.0, {name: plan[name] for name in ("u1", "n")})}, "part0")
        job.optimizer = CombinedOptimizer([job.dmp.fused_optimizer, job.optimizer.optimizers[-1][1]])
        zoo.play(job, checkpointer, ("train", MARK, "train", MARK))
        marks = dict(job.marks)
        lose(job, checkpointer, root, (3,))
    return marks, job.marks


def test_a_reshard_after_a_change_keeps_the_indices_of_tables(tmp_path: Path) -> None:
    settings = config(tmp_path / "log")
    warm.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    marks, later = ranks.run(2, reshard, settings, tmp_path / "log")[0]
    claims = Control(FileLog(tmp_path / "log")).refresh().claims
    newest = claims[3]
    assert newest.schema.is_same(claims[2].schema)
    assert [table.name for table in newest.schema.tables] == ["part0.t0", "part0.u1", "", "part0.n"]
    assert newest.swept == ()
    assert (claims[4].swept, claims[4].schema.is_same(newest.schema)) == ((0, 1, 2, 3), True), "a dropped table, too"
    assert len(later) == 2
    for marker, state in {**{each: marks[each] for each in marks if each.startswith("2:")}, **later}.items():
        assert differences(state, resumed(settings, marker)) == []


def test_a_damaged_marker_of_the_new_model_does_not_lead_to_one_of_before_the_change(tmp_path: Path) -> None:
    """Its rows stand where the older marker would leave those of the new model."""
    root = tmp_path / "log"
    settings = config(root)
    begun = warm.run(1, zoo.start, OLD, ALONE, settings, EVENTS)
    warm.run(1, restored, NEW, ALONE, settings, None, CHANGES, ("train", MARK))
    (segment,) = (root / "data").rglob("g00000002-*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    with pytest.raises(
        RankFailed, match="its rows were already loaded where marker 1:2 keeps the new model's rows"
    ) as refused:
        warm.run(1, restored, NEW, ALONE, settings, None, CHANGES, ())
    assert "marker 2:3 is damaged" in str(refused.value)
    assert "name the older marker with the same changes: '1:2'" in str(refused.value)
    check(begun, warm.run(1, restored, NEW, ALONE, settings, "1:2", CHANGES, ()), "1:2")


LATER = Changes(dense=DenseChanges(optimizer={"heads.0_b.weight": "fresh"}))


def test_a_generation_after_a_loss_tells_all_changes_since_the_marker_that_is_held(tmp_path: Path) -> None:
    root = tmp_path / "log"
    settings = config(root, sweep_bytes=2**12)
    warm.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    warm.run(2, restored, NEW, TWO, settings, None, CHANGES, EVENTS)
    said = ranks.run(2, train_through_a_loss, settings, LATER, ("train",), root, (2, 3))
    generation, marks = said[0]
    lineage = Control(FileLog(root)).refresh()
    newest = max(marks, key=MarkerId.parse)
    assert (generation, lineage.claims[generation].parent) == (4, MarkerId(1, 2))
    assert [each.digest for each in lineage.changes_made(MarkerId.parse(newest))] == [LATER.digest, CHANGES.digest]
    (_, state, _, _, found), *_ = warm.run(1, restored, NEW, ALONE, settings, newest, LATER, ())
    assert found.evolved is None, "the command line of the job keeps its changes"
    assert differences(marks[newest], state) == []
