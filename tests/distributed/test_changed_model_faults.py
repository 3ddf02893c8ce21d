"""Restores into a changed model that are killed, fail or are refused, and every place that one reads from."""

from __future__ import annotations

import hashlib
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torchrec.optim.keyed import CombinedOptimizer

from tests import collided as collision
from tests import ranks, stores, tiered, warm, zoo, zoo_models
from tests.command import call, run
from tests.evolving import Origin, State, Step, expected, restored
from tests.inside import inside
from tests.laps import config, one
from tests.model import differences
from tests.parts import FileLog, Policy, failpoints
from tests.ranks import RankFailed
from tests.zoo import MARK, Marks
from tests.zoo_models import Model, Place, Plan, Table
from torchrec_stream_ckpt import (
    Changes,
    DenseChanges,
    FollowedTables,
    ModelSchema,
    RowChange,
    StreamCheckpointer,
    StreamConfig,
    follow,
)
from torchrec_stream_ckpt.dense.live_dense import LiveDense
from torchrec_stream_ckpt.errors import StreamCkptError
from torchrec_stream_ckpt.format.frame import NEWEST_VERSION
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

OLD = one("ebc", Table("t0", 60, 8, ("a",)), Table("t1", 40, 16, ("b",)), Table("t2", 20, 8, ("c",)))
NEW = one("ebc", Table("t0", 97, 16, ("a",)), Table("u1", 40, 16, ("b",)), Table("n", 13, 8, ("d",)))
STEP = Step(
    NEW,
    (1, 1, 1),
    {"t0": Origin("t0", OLD.parts[0].tables[0], None), "u1": Origin("u1", OLD.parts[0].tables[1], None)},
    Changes(renamed={"part0.t1": "part0.u1"}),
    OLD,
)
CHANGES = Changes(
    added=("part0.n",),
    dropped=("part0.t2",),
    renamed={"part0.t1": "part0.u1"},
    rows={"part0.t0": 97},  # type: ignore[dict-item]
    columns={"part0.t0": 16},
    dense=DenseChanges(
        fresh=("heads.0_d.bias", "heads.0_d.weight"),
        dropped=("heads.0_c.bias", "heads.0_c.weight"),
        reshaped=("heads.0_a.weight",),
    ),
)
TWO = Plan(2, 1, (Place("rw"), Place("tw", (1,)), Place("tw", (0,))))
THREE = Plan(3, 1, (Place("tw", (2,)), Place("rw"), Place("rw")))
EVENTS = ("train", MARK, "train", MARK)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Marks]]:
    directory = tmp_path_factory.mktemp("trained") / "log"
    return directory, warm.run(2, zoo.start, OLD, TWO, config(directory), EVENTS)


def tree(directory: Path) -> dict[str, str]:
    files = (path for path in sorted(directory.rglob("*")) if path.is_file())
    return {path.relative_to(directory).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def check(saved: list[Marks], said: list[Any], marker: str) -> None:
    for rank, (before, after, *_) in enumerate(said):
        there = saved[min(rank, len(saved) - 1)][marker]
        assert differences({**expected(STEP, before, there), "rng": there["rng"]}, after, rng=rank < len(saved)) == []


def broken(plan: Plan, settings: StreamConfig, fuse: str, where: int, report: Path) -> str:
    """A restore in which one rank is killed, or fails."""
    job = zoo.build(NEW, plan)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        if dist.get_rank() == where:
            failpoints.arm(fuse, report)
        try:
            checkpointer.restore(changes=CHANGES)
            zoo.play(job, checkpointer, ("train", MARK))
        except (OSError, StreamCkptError) as error:
            return str(error)
        finally:
            failpoints.arm("")
    return ""


BEFORE_CLAIM = ("restore.planned", "restore.frame", "restore.rows", "restore.dense")


@pytest.mark.parametrize(
    ("point", "action", "where"),
    [
        ("restore.planned", "raise", 1),
        ("restore.frame", "raise", 1),
        ("restore.rows", "raise", 0),
        ("restore.dense", "raise", 0),
        ("restore.frame", "kill", 1),
        ("restore.dense", "kill", 0),
        ("claim.appended", "kill", 0),
        ("hello.submitted", "kill", 1),
        ("sweep.sent", "kill", 0),
        ("sweep.sent", "kill", 1),
    ],
)
def test_what_breaks_off_is_made_again_with_the_same_changes(
    trained: tuple[Path, list[Marks]], point: str, action: str, where: int, tmp_path: Path
) -> None:
    directory = shutil.copytree(trained[0], tmp_path / "log")
    settings, report, before = config(directory, sweep_bytes=2**10), tmp_path / "fired", tree(directory)
    if action == "raise":
        assert "" not in ranks.run(2, broken, TWO, settings, f"{point}=raise", where, report)
    else:
        with pytest.raises(RankFailed):
            ranks.run(2, broken, TWO, settings, f"{point}=kill", where, report, timeout_s=60)
    assert report.read_text().split() == [point]
    if point in BEFORE_CLAIM:
        assert tree(directory) == before, "nothing is written before all is loaded"
    said = warm.run(3, restored, NEW, THREE, settings, None, CHANGES, EVENTS)
    check(trained[1], said, "1:2")
    newest = max(said[0][2])
    (state, _), *_ = warm.run(1, zoo.resume, NEW, ALONE, settings, newest, ())
    assert differences(said[0][2][newest], state) == []


ALONE = Plan(1, 1, (Place("tw", (0,)),) * 3)


def test_a_refused_change_leaves_the_log_as_it_was(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    directory = shutil.copytree(trained[0], tmp_path / "log")
    before = tree(directory)
    for wrong, said in (
        (replace(CHANGES, added=("part0.m",)), "this model has no such table"),
        (replace(CHANGES, columns={}), "16 columns here, 8 in the marker"),
        (replace(CHANGES, dense=DenseChanges()), "only this model has it"),
    ):
        with pytest.raises(RankFailed, match=said):
            warm.run(2, restored_with, wrong, config(directory))
        assert tree(directory) == before


def restored_with(changes: Changes, settings: StreamConfig) -> None:
    with zoo.attach(zoo.build(NEW, TWO), settings, paranoid=False) as checkpointer:
        checkpointer.restore(changes=changes)


# Places that a marker comes from.


def test_head_serves_a_changed_model(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    directory, head = shutil.copytree(trained[0], tmp_path / "log"), tmp_path / "head"
    stores.fold(directory, head=head)
    stores.lose_rows(directory)
    stores.lose_segments(directory)
    said = warm.run(3, restored, NEW, THREE, config(directory, head=str(head)), None, CHANGES, ())
    assert {each[4].source for each in said} == {"head 1:2"}
    check(trained[1], said, "1:2")


def test_the_store_alone_serves_a_changed_model(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    directory = shutil.copytree(trained[0], tmp_path / "log")
    stores.fold(directory)
    stores.lose_rows(directory)
    for marker in ("1:1", "1:2"):
        said = warm.run(3, restored, NEW, THREE, config(directory), marker, CHANGES, ())
        assert {each[4].source for each in said} == {f"store {marker}"}
        check(trained[1], said, marker)


def test_both_tiers_serve_markers_on_either_side_of_a_change(tmp_path: Path) -> None:
    inner, outer = tmp_path / "inner", tmp_path / "outer"
    settings = tiered.config(inner, outer, marker_every=None)
    begun = warm.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    said = warm.run(3, restored, NEW, THREE, settings, None, CHANGES, EVENTS)
    check(begun, said, "1:2")
    newest = max(said[0][2])
    for lost in (False, True):
        if lost:
            shutil.rmtree(inner)
        (state, _), *_ = warm.run(1, zoo.resume, NEW, ALONE, settings, newest, ())
        assert differences(said[0][2][newest], state) == []
    (state, _), *_ = warm.run(2, zoo.resume, OLD, TWO, settings, "1:1", ())
    assert differences(begun[0]["1:1"], state) == []
    check(begun, warm.run(2, restored, NEW, TWO, settings, "1:1", CHANGES, ()), "1:1")


# What is the same, and what cannot be.


def once(model: Model, plan: Plan, settings: StreamConfig, changes: Changes | None) -> tuple[State, Any]:
    job = zoo.build(model, plan)
    with zoo.attach(job, settings, paranoid=False) as checkpointer:
        found = checkpointer.restore(changes=changes)
        assert found is not None
        state = zoo.truth(job)
        zoo.play(job, checkpointer, (MARK,))
        return state, found.evolved


def test_no_change_is_a_plain_restore(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    logs = [shutil.copytree(trained[0], tmp_path / name) for name in ("plain", "changes")]
    states = [
        warm.run(2, once, OLD, TWO, config(log), changes)[0]
        for log, changes in zip(logs, (None, Changes()), strict=True)
    ]
    assert differences(states[0][0], states[1][0]) == []
    assert states[1][1] is None
    claims = [Control(FileLog(log)).refresh().claims[2] for log in logs]
    assert [(claim.schema, claim.swept, claim.changes, claim.version) for claim in claims] == [
        (claims[0].schema, (), None, NEWEST_VERSION)
    ] * 2


def test_changes_that_were_made_last_are_not_made_twice(trained: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    settings = config(shutil.copytree(trained[0], tmp_path / "log"))
    _, report = warm.run(2, once, NEW, TWO, settings, CHANGES)[0]
    assert report.digest == CHANGES.digest
    assert any("part0.n" in line for line in report.lines())
    state, again = warm.run(2, once, NEW, TWO, settings, CHANGES)[0]
    assert again is None
    claims = Control(FileLog(tmp_path / "log")).refresh().claims
    assert claims[2].changes is not None
    assert (claims[2].changes.digest, claims[3].changes, claims[3].swept) == (CHANGES.digest, None, ())
    assert claims[2].swept == (0, 2, 3)
    assert state["step"] == 2


def test_a_table_without_an_id_map_has_no_raw_ids_to_reassign(trained: tuple[Path, list[Marks]]) -> None:
    changes = Changes(reassigned=("part0.t0",))
    with pytest.raises(RankFailed, match=r"reassigned: 'part0.t0': the marker has no id map"):
        warm.run(2, once, OLD, TWO, config(trained[0]), changes)


def test_columns_of_halves_cannot_change(tmp_path: Path) -> None:
    tables = OLD.parts[0].tables
    wide = (replace(tables[0], dim=16), *tables[1:])
    where = config(tmp_path)
    warm.run(2, zoo.start, one("ebc", *tables, optimizer="emainplace_rowwise_adagrad"), TWO, where, EVENTS)
    changes = Changes(columns={"part0.t0": 16}, dense=DenseChanges(reshaped=("heads.0_a.weight",)))
    model = one("ebc", *wide, optimizer="emainplace_rowwise_adagrad")
    with pytest.raises(RankFailed, match="keeps weights in the left half"):
        warm.run(2, once, model, TWO, where, changes)


def test_another_column_split_of_a_changed_table_is_refused_as_in_a_plain_restore(tmp_path: Path) -> None:
    where, table = config(tmp_path), Table("t", 30, 32, ("a",))
    split, whole = (Plan(2, 1, (place,)) for place in (Place("cw", (0, 1)), Place("tw", (0,))))
    warm.run(2, zoo.start, one("ebc", table), split, where, EVENTS)
    changes = Changes(rows={"part0.t": 41})  # type: ignore[dict-item]
    with pytest.raises(RankFailed, match="row-wise optimizer state has no exact value"):
        warm.run(2, once, one("ebc", replace(table, rows=41)), whole, where, changes)
    state, _ = warm.run(2, once, one("ebc", replace(table, rows=41)), split, where, changes)[0]
    assert state["model.part0.embedding_bags.t.weight"].shape == (41, 32)


def grown_collision(uri: str, changes: Changes | None) -> str | dict[str, collision.Owned]:
    with collision.tables_of(32, 24):
        job = collision.job()
        with collision.attach(job, uri) as checkpointer:
            try:
                checkpointer.restore(changes=changes)
            except StreamCkptError as error:
                return str(error)
        return collision.owned(job)


def owned_collision(uri: str) -> dict[str, collision.Owned]:
    job = collision.job()
    with collision.attach(job, uri) as checkpointer:
        checkpointer.restore()
        return collision.owned(job)


def test_rows_of_managed_collision_change_only_if_its_raw_ids_are_reassigned(tmp_path: Path) -> None:
    """The job and the command line ask for the same declaration, which the job then accepts."""
    uri, one = f"file://{tmp_path / 'log'}", "mc._embedding_module.one"
    warm.run(2, collision.train, uri, [3], 3, {})
    accepting = Changes(rows={one: RowChange(32)}, reassigned=(one,))
    for declared in (None, Changes(rows={one: RowChange(32)})):
        for said in warm.run(2, grown_collision, uri, declared):
            assert f"table '{one}': 32 rows here, 16 in the marker; it has an id map" in said
            assert accepting.to_python() in said
            assert "that cannot be declared" not in said
    for more in ([], ["--dense"]):
        command = ["evolve-plan", uri, *more]
        run(*command, "--save", str(tmp_path / "model.json"))
        model = ModelSchema.load(tmp_path / "model.json")
        tables = tuple(replace(each, rows=32) if each.name == one else each for each in model.tables)
        replace(model, tables=tables).save(tmp_path / "model.json")
        refused = call(*command, "--schema", str(tmp_path / "model.json"))
        assert f"changes = {accepting.to_python()}\n" in str(refused.exception), more
    there = warm.run(2, owned_collision, uri)[0]
    assert len(there["one"]) > 3
    assert warm.run(2, grown_collision, uri, accepting)[0] == there


def renamed_collision(uri: str) -> tuple[collision.State, collision.State]:
    """On rank 1 as if no row of the tables were there: TorchRec of now gives each rank some."""
    collision.TABLES[0] = ("uno", *collision.TABLES[0][1:])
    job = collision.job()
    with collision.attach(job, uri, marker_every=None) as checkpointer:
        if dist.get_rank() == 1:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(LiveDense, "collisions", frozenset())
                checkpointer.restore(changes=RENAMED_COLLISION)
        else:
            checkpointer.restore(changes=RENAMED_COLLISION)
    return job.truth(), job.map_truth()


RENAMED_COLLISION = Changes(renamed={"mc._embedding_module.one": "mc._embedding_module.uno"})


def test_a_table_of_managed_collision_is_renamed_also_where_a_rank_has_no_part_of_it(tmp_path: Path) -> None:
    uri = f"file://{tmp_path}"
    trained = warm.run(2, collision.train, uri, [3], 3, {})
    for before, (state, maps) in zip(trained, ranks.run(2, renamed_collision, uri), strict=True):
        there, maps_there = ({name.replace("one", "uno"): value for name, value in each.items()} for each in before[3])
        assert differences(there, state) == []
        assert differences(maps_there, maps) == []


# The dense state.


class Counter:
    """An object of the user."""

    def __init__(self) -> None:
        self.value = torch.zeros(1)

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


def begin_with(model: Model, plan: Plan, settings: StreamConfig) -> State:
    job, mine = zoo.build(model, plan), Counter()
    mine.value += 5
    with StreamCheckpointer(
        job.dmp, job.optimizer, config=settings, stateful={"loader": job, "gone": mine, "kept": mine}
    ) as checkpointer:
        zoo.play(job, checkpointer, ("train", "train", MARK))
    return job.marks["1:1"]


def go_on_with(model: Model, plan: Plan, settings: StreamConfig, changes: Changes) -> tuple[State, State, float, float]:
    job, kept, new = zoo.build(model, plan), Counter(), Counter()
    new.value += 9
    zoo.train(job)
    before = zoo.truth(job)
    with StreamCheckpointer(
        job.dmp, job.optimizer, config=settings, stateful={"loader": job, "kept": kept, "new": new}
    ) as checkpointer:
        assert checkpointer.restore(changes=changes) is not None
        return before, zoo.truth(job), float(kept.value), float(new.value)


def test_dense_entries_are_renamed_by_pattern_and_begin_anew_and_objects_come_and_go(tmp_path: Path) -> None:
    where = config(tmp_path)
    old = one("ebc", Table("t", 30, 8, ("f1", "f2", "f3")))
    new = one("ebc", Table("t", 30, 8, ("f1", "g2", "g3")))
    plan = Plan(2, 1, (Place("rw"),))
    saved = warm.run(2, begin_with, old, plan, where)[0]
    changes = Changes(
        dense=DenseChanges(
            renamed={r"heads\.0_f([23])\.(.+)": r"heads.0_g\1.\2"}, optimizer={"heads.0_f1.weight": "fresh"}
        ),
        stateful_added=("new",),
        stateful_dropped=("gone",),
    )
    before, after, kept, fresh = warm.run(2, go_on_with, new, plan, where, changes)[0]
    assert (kept, fresh) == (5.0, 9.0)
    for name, value in after.items():
        there = name.replace("0_g", "0_f")
        source = before if name.startswith("dense.heads.0_f1.weight.") else saved
        assert differences({there: source[there]}, {there: value}) == [], name


# A log loses rows of a job whose model has changed: the next generation stands on what is held.


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


# What runs beside a job goes through a change of its model, with real ranks: follower, folds, gc, trim, relay.


def weights(state: State) -> State:
    """By name of table, as a replica has them."""
    prefix = "model.part0.embedding_bags."
    found = {name.removeprefix(prefix): value for name, value in state.items() if name.startswith(prefix)}
    return {f"part0.{name.removesuffix('.weight')}": value for name, value in found.items()}


def replica_of(tables: FollowedTables) -> tuple[str, State]:
    tables.advance()
    with tables.reading() as served:
        return str(served.marker), {name: tensor.clone() for name, tensor in served.tables.items()}


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
        run("gc", uri, "--store", uri, "--newest", "1", "--grace", "0")
    run("trim", uri, "--store", uri)
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
