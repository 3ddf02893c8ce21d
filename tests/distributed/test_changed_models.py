"""A marker is restored into a model that has changed: kept values bit for bit, all others as the model made them.

A longer random run: ``STREAM_CKPT_EVOLVE_EXAMPLES=60 pytest tests/distributed/test_changed_models.py -k random``.
"""

from __future__ import annotations

import io
import logging
import os
import random
import shutil
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.optimizers import SGD, Adagrad

from tests import ranks, stores, warm, zoo
from tests.command import call
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, TWO, tree
from tests.evolving import Origin, State, Step, changed, expected, first, pasted, plan_of, restored
from tests.inside import inside
from tests.laps import config, one
from tests.model import differences
from tests.pool import Pool
from tests.ranks import RankFailed
from tests.zoo import MARK, Marks
from tests.zoo_models import Model, Plan, Table
from torchrec_stream_ckpt import Changes, IdMap, ModelSchema, RowChange, StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.errors import ProofMismatchError, StreamCkptError

pytestmark = pytest.mark.distributed

EXAMPLES = int(os.environ.get("STREAM_CKPT_EVOLVE_EXAMPLES", "3"))


@pytest.mark.parametrize("seed", range(EXAMPLES))
def test_a_random_chain_of_changes_is_exact(seed: int, pool: Pool, tmp_path: Path) -> None:
    """Three changes one after the other, each on other ranks and under another plan; then each model once more.

    One of the three is a warm start: a job with a log of its own begins in the marker of the one before.
    """
    rng = random.Random(seed)
    log, sweep_bytes = tmp_path / "log", rng.choice([2**12, 2**24])
    where = config(log, sweep_bytes=sweep_bytes)
    step, world = first(rng), rng.randint(1, 4)
    marks = pool.run(world, zoo.start, step.model, plan_of(rng, step, world), where, ("train", MARK, "schedule", MARK))
    history = [(step, marks, Changes(), where)]
    for number in range(3):
        step, saved = changed(rng, step, tmp_path), [each[newest(marks)] for each in marks]
        world = rng.randint(1, 4)
        if rng.random() < 0.4:
            stores.fold(log)
        marker = newest(marks) if len(history) > 1 else None  # named: a second id map of one table is meant
        source = None
        if (seed + number) % 3 == 0:
            source, log = f"file://{log}{f'@{marker}' if marker else ''}", tmp_path / f"log{number}"
            where = config(log, sweep_bytes=sweep_bytes)
        events, plan = ("train", MARK, "train", MARK), plan_of(rng, step, world)
        said = pool.run(world, restored, step.model, plan, where, marker, step.declared, events, source)
        check(step, said, saved)
        marks, changes = [each[2] for each in said], said[0][3]
        again(rng, pool, where, step, marks)
        history.append((step, marks, changes, where))
    for (old, there, _, where), (new, _, changes, _) in pairwise(history):
        marker = newest(there)
        again(rng, pool, where, old, there, marker)
        world = rng.randint(1, 4)
        said = pool.run(world, restored, new.model, plan_of(rng, new, world), where, marker, changes, ())
        check(new, said, [each[marker] for each in there])


@pytest.mark.parametrize(
    ("before", "after"),
    [("adagrad", "rowwise_adagrad"), ("rowwise_adagrad", "adagrad"), ("rowwise_rmsprop_ar", "rowwise_adagrad")],
)
def test_states_of_another_shape_stay_as_the_model_has_made_them(
    before: str, after: str, pool: Pool, tmp_path: Path
) -> None:
    """A state of the same name and kind is kept, another one is not."""
    rng, where, table = random.Random(0), config(tmp_path), Table("t", 41, 16, ("f",))
    old, new = (Step(one("ebc", table, optimizer=name), (1,), {}, Changes()) for name in (before, after))
    marks = pool.run(2, zoo.start, old.model, plan_of(rng, old, 2), where, ("train", "train", MARK))
    step = replace(new, origins={"t": Origin("t", table, None)}, before=old.model)
    said = pool.run(3, restored, step.model, plan_of(rng, step, 3), where, None, Changes(), ("train", MARK))
    check(step, said, [each["1:1"] for each in marks])
    again(rng, pool, where, step, [each[2] for each in said])


def newest(marks: list[dict[str, object]]) -> str:
    return max(marks[0], key=lambda marker: tuple(map(int, marker.split(":"))))


def check(step: Step, said: list, saved: list) -> None:
    """Each rank holds what it must; a new rank has random state of its own."""
    for rank, (before, after, *_) in enumerate(said):
        there = saved[min(rank, len(saved) - 1)]
        assert differences({**expected(step, before, there), "rng": there["rng"]}, after, rng=rank < len(saved)) == []


def again(rng: random.Random, pool: Pool, where: object, step: Step, marks: list, marker: str | None = None) -> None:
    """A plain restore into the same model, on other ranks."""
    world = rng.randint(1, 4)
    found = pool.run(world, zoo.resume, step.model, plan_of(rng, step, world), where, marker, ())
    for rank, (state, _) in enumerate(found):
        there = marks[min(rank, len(marks) - 1)][marker or newest(marks)]
        assert differences(there, state, rng=rank < len(marks)) == []


# Proofs across a change: tables that went on are compared, changed ones count as not compared, and are proved anew.


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


# Changes that are given twice, edited after they were made, or are of another kind.


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Marks]]:
    directory = tmp_path_factory.mktemp("trained") / "log"
    return directory, warm.run(2, zoo.start, OLD, TWO, config(directory), EVENTS)


@pytest.mark.parametrize("only_first", [False, True])
def test_what_is_not_changes_is_refused_on_all_ranks(
    saved: tuple[Path, list[Marks]], only_first: bool, tmp_path: Path
) -> None:
    directory = shutil.copytree(saved[0], tmp_path / "log")
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
    saved: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    directory = shutil.copytree(saved[0], tmp_path / "log")
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


def test_the_command_line_compares_the_dense_state_too(saved: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    new, own, toml = tmp_path / "new.json", tmp_path / "own.json", tmp_path / "changes.toml"
    warm.run(1, save_schema, config(tmp_path / "other"), new)
    uri = f"file://{saved[0]}"
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
    damaged = shutil.copytree(saved[0], tmp_path / "log")
    for each in damaged.rglob("*.distcp"):
        each.write_bytes(each.read_bytes()[:-1] + b"x")
    code, _, error = plan("--schema", str(new), "--dense", uri=f"file://{damaged}")
    assert (code, ".distcp" in error) == (1, True), "no pickle is opened that COMMIT does not vouch for"


def test_the_command_line_counts_trained_rows_that_would_go(saved: tuple[Path, list[Marks]], tmp_path: Path) -> None:
    own, uri = tmp_path / "own.json", f"file://{saved[0]}"
    assert plan("--save", str(own), uri=uri)[0] == 0
    model = ModelSchema.load(own)
    small = tuple(replace(each, rows=9) if each.name == "part0.t0" else each for each in model.tables)
    replace(model, tables=small).save(own)
    (state,) = (value[9:] for name, value in saved[1][0]["1:2"].items() if name.startswith("fused.part0.t0.0"))
    count = int((state != 0).reshape(len(state), -1).any(1).sum())
    assert 0 < count < 51
    code, _, error = plan("--schema", str(own), "--count-trained", uri=uri)
    assert (code, f"51 rows would be dropped, {count} of them trained" in error) == (1, True), error
    assert "51 rows would be dropped, which may be trained" in plan("--schema", str(own), uri=uri)[2]


def plan(*arguments: str, uri: str) -> tuple[int, str, str]:
    """What ``stream-ckpt evolve-plan`` says of marker 1:2."""
    done = call("evolve-plan", uri, "1:2", *arguments, columns=240)
    error = str(done.exception) if done.exception is not None else ""
    return done.exit_code, done.stdout, error + done.output


MOVED = [*range(13, 40), *range(13)]


def test_a_command_that_names_a_marker_and_changes_goes_on_when_it_is_given_again(
    saved: tuple[Path, list[Marks]], tmp_path: Path
) -> None:
    """The job that it started is not thrown away by its own restart; before its first marker, all is made again."""
    settings = config(shutil.copytree(saved[0], tmp_path / "log"))
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


# What the kernels of a changed model count: tables with optimizers of their own, in kernels of their own.


Kinds = dict[str, tuple[type, float]]
RATED: Kinds = {"kept": (Adagrad, 0.1), "switched": (SGD, 0.1)}
SWITCHED: Kinds = {"kept": (Adagrad, 0.1), "switched": (Adagrad, 0.2), "added": (Adagrad, 0.3)}
TOGETHER: Kinds = {"kept": (Adagrad, 0.1), "switched": (Adagrad, 0.3), "added": (Adagrad, 0.3)}


def counted(settings: StreamConfig, kinds: Kinds, changes: Changes | None) -> dict[str, Any]:
    """(iteration, learning rate) of the kernel of each table."""
    tables = [
        EmbeddingBagConfig(name=name, num_embeddings=10, embedding_dim=8, feature_names=[f"f_{name}"]) for name in kinds
    ]
    ebc = EmbeddingBagCollection(tables=tables, device=torch.device("meta"))
    for name, (kind, rate) in kinds.items():
        apply_optimizer_in_backward(kind, ebc.embedding_bags[name].parameters(), {"lr": rate})
    module, sharder = nn.Sequential(ebc), EmbeddingBagCollectionSharder()
    constraints = {name: ParameterConstraints(["table_wise"], ["fused"]) for name in kinds}
    planner = EmbeddingShardingPlanner(Topology(1, "cpu"), constraints=constraints)
    model = DistributedModelParallel(
        module, device=torch.device("cpu"), plan=planner.plan(module, [sharder]), sharders=[sharder]
    )
    with StreamCheckpointer(model, model.fused_optimizer, config=settings) as checkpointer:
        if changes is not None:
            checkpointer.restore(changes=changes)
        if changes is None:
            for kernel in inside(checkpointer).kernels:  # these optimizers count no steps on a CPU
                rate = kernel.scalars.learning_rate
                kernel.scalars.put_back(3, 1.0, rate, rate)
            checkpointer.mark().result(60)
        return {
            shard.table.name: (kernel.scalars.iteration, round(kernel.scalars.learning_rate, 6))
            for kernel in inside(checkpointer).kernels
            for shard in kernel.held
        }


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (SWITCHED, {"0.kept": (3, 0.1), "0.switched": (0, 0.2), "0.added": (3, 0.1)}),
        (TOGETHER, {"0.kept": (3, 0.1), "0.switched": (0, 0.3), "0.added": (0, 0.3)}),
    ],
    ids=["apart", "together"],
)
def test_a_switched_optimizer_counts_from_where_the_model_is_and_a_new_table_from_where_kept_ones_are(
    kinds: Kinds, expected: dict[str, Any], tmp_path: Path
) -> None:
    run = partial(ranks.run, 1, counted, config(tmp_path))
    assert run(RATED, None)[0] == {"0.kept": (3, 0.1), "0.switched": (3, 0.1)}
    assert run(kinds, Changes(added=("0.added",), optimizer={"0.switched": "exact_adagrad"}))[0] == expected
