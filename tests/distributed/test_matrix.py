"""Optimizers x plan families x modules x world sizes: each combination exact, or refused by name.

``covers`` marks say which cell a test proves; ``docs/coverage.md`` is made of them. A longer random run:
``STREAM_CKPT_MATRIX_EXAMPLES=50 pytest tests/distributed/test_matrix.py -k random``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    GlobalWeightDecayDefinition,
    WeightDecayMode,
)
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from tests import zoo
from tests.model import differences
from tests.pool import Pool
from tests.random_zoo import Scenario, scenarios
from tests.ranks import RankFailed
from tests.zoo import MARK, OPTIMIZERS, POINTWISE, Marks, Model, Part, Place, Plan, Table
from torchrec_stream_ckpt import StreamConfig

pytestmark = pytest.mark.distributed

EXAMPLES = int(os.environ.get("STREAM_CKPT_MATRIX_EXAMPLES", "2"))
PHASES = [Phase.generate] if EXAMPLES < 10 else [Phase.generate, Phase.shrink]
HEALTH = list(HealthCheck)
WHOLE, SPLIT = ("tw", "rw", "twrw"), ("cw", "twcw", "grid")
FAMILIES = {
    "tw": "table-wise",
    "rw": "row-wise",
    "twrw": "table-row-wise",
    "cw": "column-wise",
    "twcw": "table-column-wise",
    "grid": "grid",
}
MODULES = {
    "ebc": "EmbeddingBagCollection",
    "weighted": "EmbeddingBagCollection, weighted",
    "ec": "EmbeddingCollection",
    "fp": "FeatureProcessedEmbeddingBagCollection, PositionWeightedModuleCollection",
    "fp_dict": "FeatureProcessedEmbeddingBagCollection, PositionWeightedModule",
}
EVERYTHING = (
    *("train", "two_forwards", MARK, "evaluate", "no_grad", "train", "skip_backward", "accumulate"),
    *("again", "empty", "empty_on_first", "schedule", MARK),
)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


def covers(optimizer: str, plan: str, kind: str, what: str = "", **more: str) -> pytest.MarkDecorator:
    """The cell of docs/coverage.md that a test proves."""
    name = OPTIMIZERS[optimizer].name + (f", {what}" if what else "")
    return pytest.mark.covers(optimizer=name, plan=plan, module=MODULES[kind], kernel="fused", pipeline="plain", **more)


def place(family: str, world: int, host: int, turn: int) -> Place:
    """Somewhere for a table, and for each turn somewhere else."""
    hosts = world // host
    first = (turn % hosts) * host
    where = {
        "tw": (turn % world,),
        "cw": (turn % world, (turn + 1) % world),
        "twcw": (first, first + host - 1),
        "twrw": (turn % hosts,),
        "grid": (turn % hosts, (turn + 1) % hosts),
    }
    return Place(family, where.get(family, ()))


def plan(families: tuple[str, ...], world: int, host: int, turn: int) -> Plan:
    return Plan(world, host, tuple(place(family, world, host, turn + at) for at, family in enumerate(families)))


def config(directory: Path, **more: Any) -> StreamConfig:
    return StreamConfig(uri=f"file://{directory}", marker_every=None, **more)


def compare(source: list[Marks], marker: str, restored: list[dict[str, torch.Tensor]]) -> list[str]:
    """What is not bitwise equal on some rank; a new rank has random state of its own."""
    found: set[str] = set()
    for rank, state in enumerate(restored):
        expected = source[min(rank, len(source) - 1)][marker]
        found |= set(differences(expected, state, rng=rank < len(source)))
    return sorted(found)


@dataclass(frozen=True)
class Lap:
    """A job, its markers restored on two other world sizes one behind the other, and what came out."""

    marks: Marks
    wrong: tuple[str, ...]
    """Names of what was not bitwise equal, anywhere."""


def lap(
    pool: Pool,
    model: Model,
    plans: tuple[Plan, Plan, Plan],
    directory: Path,
    events: tuple[str, ...] = EVERYTHING,
    more: tuple[str, ...] = ("train", "two_forwards", "evaluate", "train"),
    **options: Any,
) -> Lap:
    """Train on the first plan; restore both markers on the second, go on; restore that on the third."""
    first, second, third = plans
    where = config(directory, **options)
    begun = pool.run(first.world, zoo.start, model, first, where, events)
    resumed = pool.run(second.world, zoo.resume_each, model, second, where, ("1:1", None), (*more, MARK))
    gone_on = [marks for _, marks in resumed]
    (newest,) = gone_on[0]
    again = pool.run(third.world, zoo.resume, model, third, where, None, ())
    wrong = [
        *compare(begun, "1:1", [states[0] for states, _ in resumed]),
        *compare(begun, "1:2", [states[1] for states, _ in resumed]),
        *compare(gone_on, newest, [state for state, _ in again]),
    ]
    return Lap(begun[0], tuple(wrong))


# Cells that must be exact: every optimizer of a CPU x every plan family x every module.


def cell_model(kind: str, optimizer: str) -> tuple[Model, tuple[str, ...]]:
    """One table for each plan family that TorchRec has for the module, and the families."""
    families = ("tw", "rw", "cw") if kind == "ec" else tuple(FAMILIES)
    dims = {"grid": 256, "cw": 32, "twcw": 32} if kind != "ec" else {}
    pooling = {"rw": "mean", "cw": "mean"} if kind == "ebc" else {}
    tables = [
        Table(
            f"t_{family}",
            35 + number,
            dims.get(family, 16),
            (f"f{number}", f"g{number}") if number % 2 else (f"f{number}",),
            pooling.get(family, "sum"),
        )
        for number, family in enumerate(families)
    ]
    return Model((Part(kind, tuple(tables)),), optimizer), families


CELLS = [
    (kind, optimizer, family)
    for kind, optimizer in product(MODULES, OPTIMIZERS)
    for family in cell_model(kind, optimizer)[1]
]
_laps: dict[tuple[str, str], Lap] = {}


def test_every_cell_has_a_test() -> None:
    bags = {(kind, o, f) for kind in ("ebc", "weighted", "fp", "fp_dict") for o in OPTIMIZERS for f in FAMILIES}
    sequences = {("ec", o, f) for o in OPTIMIZERS for f in ("tw", "rw", "cw")}
    assert set(CELLS) == bags | sequences
    assert len(CELLS) == 135


@pytest.mark.pitfall(12, 13, 22, 25)
@pytest.mark.parametrize(
    ("kind", "optimizer", "family"),
    [pytest.param(*cell, marks=covers(cell[1], FAMILIES[cell[2]], cell[0]), id="-".join(cell)) for cell in CELLS],
)
def test_a_cell_is_exact(
    kind: str, optimizer: str, family: str, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """4 ranks on two hosts, restored on 2 ranks, and that on 3: the tables of a module share one job."""
    if (kind, optimizer) not in _laps:
        model, families = cell_model(kind, optimizer)
        plans = plan(families, 4, 2, 0), plan(families, 2, 1, 1), plan(families, 3, 1, 2)
        _laps[kind, optimizer] = lap(pool, model, plans, tmp_path_factory.mktemp("cell"))
    done = _laps[kind, optimizer]
    others = [f"t_{other}" for other in FAMILIES if other != family]
    assert [name for name in done.wrong if not any(part in others for part in name.split("."))] == []
    mine = [name for name in done.marks["1:1"] if f"t_{family}" in name.split(".")]
    assert len(mine) > 1 or optimizer == "sgd"
    assert set(mine) <= set(differences(done.marks["1:1"], done.marks["1:2"])), "the steps between the markers"


# Every plan family to every other one.


def bounds(optimizer: str) -> str:
    return "" if optimizer in POINTWISE else " of its column split"


def moved(families: tuple[str, ...], turn: int) -> tuple[str, ...]:
    return (*families[turn:], *families[:turn])


def moves(optimizer: str) -> list[tuple[str, ...]]:
    """Families of six tables, turn by turn; where a row has one state, the column split stays."""
    if optimizer in POINTWISE:
        return [moved((*WHOLE, *SPLIT), turn) for turn in range(6)]
    return [moved(WHOLE, turn) + moved(SPLIT, turn) for turn in range(3)]


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=covers(name, f"each into each other{bounds(name)}", "ebc")) for name in OPTIMIZERS],
)
def test_every_plan_family_becomes_every_other(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    turns = moves(optimizer)
    pairs = {pair for turn in turns for pair in zip(turns[0], turn, strict=True)}
    whole, split = {*product(WHOLE, WHOLE)}, {*product(SPLIT, SPLIT)}
    assert pairs == ({*product(FAMILIES, FAMILIES)} if optimizer in POINTWISE else whole | split)
    tables = tuple(Table(f"t{number}", 21 + number, 256, (f"f{number}",)) for number in range(6))
    model, where = Model((Part("ebc", tables),), optimizer), config(tmp_path)
    begun = pool.run(4, zoo.start, model, plan(turns[0], 4, 2, 0), where, ("train", "train", MARK))
    for turn, families in enumerate(turns):
        world, host = ((2, 1), (3, 1), (4, 2))[turn % 3]
        restored = pool.run(world, zoo.resume, model, plan(families, world, host, turn), where, "1:1", ())
        assert compare(begun, "1:1", [state for state, _ in restored]) == []


# What else a model may have.


def one(kind: str, *tables: Table, optimizer: str = "rowwise_adagrad", **more: Any) -> Model:
    return Model((Part(kind, tables),), optimizer, **more)


SIX = (*WHOLE, *SPLIT)
BATCHES = ("tw", "cw", "twcw")
"""Plans with which TorchRec runs batch sizes that vary by feature *and rank* on gloo."""
THREE = (Table("t", 40, 32, ("a", "b")), Table("u", 41, 32, ("c",)), Table("v", 42, 32, ("d", "a")))
PROCESSED = (THREE[0], THREE[1], Table("v", 42, 32, ("d", "e")))


def with_fused(optimizer: str = "rowwise_adagrad", **fused: Any) -> Model:
    """The model of the cells, with more arguments of the fused kernels."""
    return replace(cell_model("ebc", optimizer)[0], fused=tuple(fused.items()))


def with_dtype(kind: str, optimizer: str, dtype: str, **more: Any) -> Model:
    model = cell_model(kind, optimizer)[0]
    (part,) = model.parts
    return replace(
        model, parts=(replace(part, tables=tuple(replace(table, dtype=dtype) for table in part.tables)),), **more
    )


def counter(mode: CounterWeightDecayMode) -> dict[str, Any]:
    return {
        "weight_decay": 0.1,
        "weight_decay_mode": WeightDecayMode.COUNTER,
        "counter_based_regularization": CounterBasedRegularizationDefinition(
            counter_weight_decay_mode=mode, counter_halflife=5, adjustment_iter=2, max_counter_update_freq=3
        ),
    }


CELL_FAMILIES = tuple(FAMILIES)
SEQUENCES = ("tw", "rw", "cw")
MODELS: dict[str, tuple[Model, tuple[str, ...], str]] = {
    **{
        f"batch size by feature, {name}": (replace(cell_model("ebc", name)[0], vbe="even"), CELL_FAMILIES, "VBE")
        for name in OPTIMIZERS
        if name != "adagrad"
    },
    **{
        f"batch size by feature and rank, {name}": (
            one("ebc", *THREE, optimizer=name, vbe="ragged"),
            BATCHES,
            "ragged VBE",
        )
        for name in ("sgd", "rowwise_adagrad")
    },
    "batch size by feature, weighted": (
        replace(cell_model("weighted", "rowwise_adagrad")[0], vbe="even"),
        CELL_FAMILIES,
        "VBE",
    ),
    "batch size by feature, processed": (one("fp", *PROCESSED, vbe="ragged"), BATCHES, "ragged VBE"),
    **{
        f"fp16, {kind}, {name}": (with_dtype(kind, name, "fp16"), families, "FP16")
        for kind, families in (("ebc", CELL_FAMILIES), ("ec", SEQUENCES))
        for name in ("sgd", "adagrad", "rowwise_adagrad")
    },
    "fp16 without stochastic rounding": (
        with_dtype("ebc", "rowwise_adagrad", "fp16", fused=(("stochastic_rounding", False),)),
        CELL_FAMILIES,
        "FP16, stochastic_rounding=False",
    ),
    "int32 ids": (replace(cell_model("ebc", "rowwise_adagrad")[0], int32=True), CELL_FAMILIES, "int32 ids"),
    "int32 ids, sequences": (replace(cell_model("ec", "rowwise_adagrad")[0], int32=True), SEQUENCES, "int32 ids"),
    "weight decay L2": (
        with_fused(weight_decay=0.1, weight_decay_mode=WeightDecayMode.L2),
        CELL_FAMILIES,
        "weight decay L2",
    ),
    "weight decay decoupled": (
        with_fused(weight_decay=0.1, weight_decay_mode=WeightDecayMode.DECOUPLE),
        CELL_FAMILIES,
        "weight decay DECOUPLE",
    ),
    "weight decay by counter": (
        with_fused(**counter(CounterWeightDecayMode.DECOUPLE)),
        CELL_FAMILIES,
        "weight decay COUNTER",
    ),
    "weight decay by counter, adagradw": (
        with_fused(**counter(CounterWeightDecayMode.ADAGRADW)),
        CELL_FAMILIES,
        "weight decay COUNTER, ADAGRADW",
    ),
    "cowclip": (
        with_fused(
            weight_decay=0.1,
            weight_decay_mode=WeightDecayMode.COWCLIP,
            cowclip_regularization=CowClipDefinition(counter_halflife=5),
        ),
        CELL_FAMILIES,
        "COWCLIP",
    ),
    "gradient clipping": (
        with_fused(gradient_clipping=True, max_gradient=0.001),
        CELL_FAMILIES,
        "gradient_clipping",
    ),
    "max_norm": (with_fused(max_norm=0.1), CELL_FAMILIES, "max_norm"),
    "fewer rows than ranks": (
        one("ebc", Table("t", 2, 16, ("a",)), Table("u", 50, 16, ("b",)), Table("v", 1, 16, ("c",))),
        ("rw", "rw", "tw"),
        "fewer rows than ranks",
    ),
    "ranks without a table": (one("ebc", THREE[0]), ("tw",), "ranks without a table"),
    "mixed": (
        one(
            "ebc",
            Table("t", 40, 16, ("a", "b"), "sum", "fp16"),
            Table("u", 50, 8, ("b",), "mean"),
            Table("v", 50, 24, ("c",), "mean", "fp16"),
            Table("w", 50, 64, ("d",)),
            Table("x", 9, 16, ("e",)),
        ),
        ("rw", "tw", "rw", "cw", "dp"),
        "mixed dtypes, dims and poolings, a data-parallel table beside",
    ),
    "several modules": (
        Model(
            (
                Part("ebc", (Table("t", 40, 16, ("a", "b")), Table("u", 50, 32, ("a",)))),
                Part("ec", (Table("t", 30, 16, ("a",)), Table("x", 30, 16, ("a", "c")))),
                Part("weighted", (Table("t", 60, 16, ("c", "a")),)),
                Part("fp", (Table("y", 60, 16, ("c", "b")),)),
            ),
            "rowwise_adagrad",
        ),
        ("rw", "cw", "tw", "rw", "rw", "twrw"),
        "several modules that share features, tables of one name",
    ),
}


def model_cell(name: str) -> pytest.MarkDecorator:
    model, families, what = MODELS[name]
    plans = [FAMILIES[family] for family in dict.fromkeys(families) if family != "dp"]
    plan = "each of the six" if len(plans) == len(FAMILIES) else ", ".join(plans)
    return covers(model.optimizer, plan, model.parts[0].kind, what)


@pytest.mark.pitfall(4, 7, 23, 26, 27)
@pytest.mark.parametrize("name", [pytest.param(name, marks=model_cell(name)) for name in MODELS])
def test_a_model_is_exact(name: str, pool: Pool, tmp_path: Path) -> None:
    model, families, _ = MODELS[name]
    plans = plan(families, 4, 2, 0), plan(families, 2, 1, 1), plan(families, 3, 1, 2)
    done = lap(pool, model, plans, tmp_path)
    assert done.wrong == ()
    assert all(not state.isnan().any() for state in done.marks["1:2"].values())
    changed = {part for key in differences(done.marks["1:1"], done.marks["1:2"]) for part in key.split(".")}
    assert {table.name for part in model.parts for table in part.tables} <= changed


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=covers(name, "column-wise, shards of uneven width", "ebc")) for name in OPTIMIZERS],
)
def test_column_shards_of_uneven_width_are_exact(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    model = one("ebc", Table("t", 40, 32, ("a", "b")), Table("u", 33, 64, ("c",)), optimizer=optimizer)
    uneven = (Place("uneven", (8, 24)), Place("uneven", (40, 24)))
    done = lap(pool, model, (Plan(4, 4, uneven), Plan(2, 2, uneven), Plan(3, 3, uneven)), tmp_path)
    assert done.wrong == ()


# Random models, plans and world sizes.

WORLDS = list(product((1, 2, 3, 4), (1, 2, 3, 4)))


@pytest.mark.covers(
    optimizer="each that a CPU runs",
    plan="random, 1 to 4 ranks to 1 to 4 ranks to 1 to 4 ranks",
    module="random mixes",
    kernel="fused",
    pipeline="plain",
)
@pytest.mark.parametrize(("source", "target"), WORLDS)
def test_random_jobs_are_exact_on_every_pair_of_world_sizes(
    source: int, target: int, pool: Pool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Seeded by the pair, so that each run of the tests meets the same jobs."""
    number = 4 * source + target

    @seed(number)
    @settings(max_examples=EXAMPLES, phases=PHASES, deadline=None, database=None, suppress_health_check=HEALTH)
    @given(st.integers(1, 4).flatmap(lambda third: scenarios((source, target, third), number)))
    def check(scenario: Scenario) -> None:
        between, more = scenario.events
        directory = tmp_path_factory.mktemp("random")
        events = ("train", MARK, *between, MARK)
        done = lap(pool, scenario.model, scenario.plans, directory, events, more, sweep_bytes=scenario.sweep_bytes)
        assert done.wrong == ()

    check()


# A column split that changes.

ROWWISE = [name for name in OPTIMIZERS if name not in POINTWISE]
RESPLITS = {
    "merged": (Place("cw", (0, 1)), Place("tw", (1,))),
    "split": (Place("rw"), Place("cw", (1, 0))),
    "split further": (Place("cw", (1, 0)), Place("cw", (0, 1, 1, 0))),
    "shifted": (Place("uneven", (64, 192)), Place("uneven", (192, 64))),
    "grid to rows": (Place("grid", (1, 0)), Place("rw")),
}


def resplit(optimizer: str, world: int = 2) -> tuple[Model, Plan, Plan]:
    """All ways at once, beside a table that keeps its split: two hosts of one rank, then ``world`` ranks on one."""
    tables = [Table(f"t{number}", 30 + number, 256, (f"f{number}",)) for number in range(len(RESPLITS) + 1)]
    sources, targets = zip(*RESPLITS.values(), (Place("cw", (0, 1)), Place("cw", (1, 1))), strict=True)
    if world == 1:
        targets = tuple(Place("tw" if len(at.where) == 1 else at.family, (0,) * len(at.where)) for at in targets)
        targets = tuple(replace(at, family="cw") if at.family == "uneven" else at for at in targets)
    return one("ebc", *tables, optimizer=optimizer), Plan(2, 1, sources), Plan(world, world, targets)


def refused(optimizer: str) -> pytest.MarkDecorator:
    merge = ", also under `merge`: its halves would change places" if "emainplace" in optimizer else ""
    why = f"`ColumnResplitError: ... under the changed column split of TABLES`{merge}"
    return covers(optimizer, "a changed column split", "ebc", outcome="refused", why=why)


@pytest.mark.pitfall(14)
@pytest.mark.parametrize("optimizer", [pytest.param(name, marks=refused(name)) for name in ROWWISE])
def test_a_changed_column_split_is_refused_by_table(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    model, source, target = resplit(optimizer, 1)
    pool.run(2, zoo.start, model, source, config(tmp_path), ("train", MARK))
    with pytest.raises(RankFailed, match="ColumnResplitError") as caught:
        pool.run(1, zoo.resume, model, target, config(tmp_path), None, ())
    assert ", ".join(f"part0.t{number}" for number in range(len(RESPLITS))) in str(caught.value)
    assert f"part0.t{len(RESPLITS)}" not in str(caught.value)


def test_a_moving_average_in_place_is_never_merged(pool: Pool, tmp_path: Path) -> None:
    """Its halves would change places: weights where the average belongs."""
    model, source, target = resplit("emainplace_rowwise_adagrad")
    pool.run(2, zoo.start, model, source, config(tmp_path), ("train", MARK))
    with pytest.raises(RankFailed, match="change places"):
        pool.run(2, zoo.resume, model, target, config(tmp_path, on_column_resplit="merge"), None, ())


def merged_state(source: dict[str, torch.Tensor], key: str, begin: int, end: int) -> torch.Tensor:
    """The rule: the mean of the old shards' states, weighted by the columns that each gives to [begin, end)."""
    total = torch.zeros(1, dtype=torch.float64)
    for name, value in source.items():
        if name.startswith(f"{key} columns "):
            low, high = map(int, name.rsplit(" ", 1)[1].split(":"))
            total = total + max(0, min(high, end) - max(low, begin)) / (end - begin) * value.double()
    return total.float()


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "rowwise_rmsprop_ar"])
def test_a_merge_keeps_weights_and_takes_the_width_weighted_mean_of_states(
    optimizer: str, pool: Pool, tmp_path: Path
) -> None:
    model, source, target = resplit(optimizer)
    before = pool.run(2, zoo.start, model, source, config(tmp_path), ("train", "train", "again", MARK))[0]["1:1"]
    asked = config(tmp_path, on_column_resplit="merge")
    resumed = pool.run(2, zoo.resume, model, target, asked, None, ("train", "two_forwards", MARK))
    state, marks = resumed[0]
    states = [name for name in state if name.startswith("fused.part0.")]
    assert len(states) == (12 if optimizer == "rowwise_adagrad" else 24)
    for name in states:
        key, columns = name.split(" columns ")
        torch.testing.assert_close(
            state[name], merged_state(before, key, *map(int, columns.split(":"))), rtol=1e-7, atol=0
        )
    kept = {name for name in before if not name.startswith("fused.")}
    assert set(differences(before, state)) & kept == set()
    # Markers of the new generation hold the merged tables whole, and are exact under the new split.
    (newest,) = marks
    exact = pool.run(2, zoo.resume, model, target, config(tmp_path), None, ())
    assert compare([found for _, found in resumed], newest, [found for found, _ in exact]) == []


def test_for_equal_gradients_the_merged_state_is_that_of_an_unsplit_table(pool: Pool, tmp_path: Path) -> None:
    """With a learning rate of zero the weights stay, so both jobs have the same gradients at every step."""
    model = one("ebc", Table("t", 40, 32, ("a", "b")), fused=(("learning_rate", 0.0),))
    split, whole = Plan(2, 2, (Place("uneven", (8, 24)),)), Plan(2, 2, (Place("tw", (0,)),))
    events = (*["train", "accumulate", "again"] * 3, MARK)
    pool.run(2, zoo.start, model, split, config(tmp_path / "split"), events)
    unsplit = pool.run(2, zoo.start, model, whole, config(tmp_path / "whole"), events)[0]["1:1"]
    asked = config(tmp_path / "split", on_column_resplit="merge")
    merged, _ = pool.run(2, zoo.resume, model, whole, asked, None, ())[0]
    name = "fused.part0.t.0 columns 0:32"
    assert float(unsplit[name].max()) > 0
    torch.testing.assert_close(merged[name], unsplit[name], rtol=5e-7, atol=0)


def test_after_a_merge_a_job_drifts_less_than_by_the_other_split_itself(pool: Pool, tmp_path: Path) -> None:
    """The measurement of docs/guarantees.md: three jobs, two splits, losses of steps 31 to 60."""
    model = one("ebc", Table("t", 60, 32, ("a", "b")), Table("u", 60, 32, ("c",)))
    split = Plan(2, 2, (Place("cw", (0, 1)), Place("cw", (1, 0))))
    whole = Plan(2, 2, (Place("tw", (0,)), Place("tw", (1,))))
    steps = 30
    uninterrupted = pool.run(2, zoo.losses, model, split, config(tmp_path / "a"), None, 2 * steps)[0][steps:]
    always_whole = pool.run(2, zoo.losses, model, whole, config(tmp_path / "b"), None, 2 * steps)[0][steps:]
    pool.run(2, zoo.losses, model, split, config(tmp_path / "c"), None, steps)
    asked = config(tmp_path / "c", on_column_resplit="merge")
    merged = pool.run(2, zoo.losses, model, whole, asked, "1:1", steps)[0]
    drift, other = (
        max(abs(left - right) for left, right in zip(found, uninterrupted, strict=True))
        for found in (merged, always_whole)
    )
    assert merged[0] == pytest.approx(uninterrupted[0], abs=1e-6), "nothing but weights has been used yet"
    assert 0 < drift < min(other, 5e-3), (drift, other)


# What TorchRec and FBGEMM cannot do on a CPU: not ours to capture. Once one of these runs, it wants a cell above.


def lone(kind: str, family: str, **more: Any) -> tuple[Model, Plan]:
    return one(kind, Table("t", 40, 256, ("a",)), **more), Plan(4, 2, (place(family, 4, 2, 0),))


UPSTREAM: dict[str, tuple[Model, Plan, str]] = {
    "a processed feature of two row-wise tables": (
        one("fp_dict", Table("t", 40, 16, ("a",)), Table("u", 13, 16, ("a",))),
        Plan(2, 1, (Place("rw"), Place("rw"))),
        "weights size .* is not equal to indices size",
    ),
    **{
        f"sequences, {FAMILIES[family]}": (*lone("ec", family), f"Sharding not supported {FAMILIES[family]}")
        for family in ("twrw", "twcw", "grid")
    },
    **{
        f"batch size by feature and rank, {FAMILIES[family]}": (
            *lone("ebc", family, vbe="ragged"),
            "invalid tensor size",
        )
        for family in ("rw", "twrw", "grid")
    },
    "batch size by feature, adagrad": (
        *lone("ebc", "tw", optimizer="adagrad", vbe="even"),
        "Variable batch size TBE support is enabled for",
    ),
    "index dedup of sequences": (*lone("ec", "tw", dedup=True), "fbgemm::jagged_unique_indices"),
    "bf16": (
        one("ebc", Table("t", 40, 16, ("a",), dtype="bf16")),
        Plan(4, 2, (Place("rw"),)),
        "not implemented for 'BFloat16'",
    ),
    "global weight decay": (
        *lone(
            "ebc",
            "tw",
            fused=(
                ("weight_decay", 0.1),
                ("weight_decay_mode", WeightDecayMode.DECOUPLE_GLOBAL),
                ("global_weight_decay", GlobalWeightDecayDefinition()),
            ),
        ),
        "forward_unweighted_gwd",
    ),
    "a kernel without any row": (
        one("ebc", Table("t", 2, 16, ("a",))),
        Plan(4, 2, (Place("rw"),)),
        "must be a GPU or MTIA tensor",
    ),
    "column shards that four does not divide": (
        one("ebc", Table("t", 40, 6, ("a",))),
        Plan(4, 2, (Place("cw", (0, 1)),)),
        "not divisible by 4",
    ),
    **{
        name.lower(): (
            *lone("ebc", "tw", fused=(("optimizer", EmbOptimType[name]),)),
            "is not supported in CPU mode",
        )
        for name in (
            "ADAM",
            "PARTIAL_ROWWISE_ADAM",
            "LAMB",
            "PARTIAL_ROWWISE_LAMB",
            "LARS_SGD",
            "ENSEMBLE_ROWWISE_ADAGRAD",
        )
    },
}


def unverified(name: str) -> pytest.MarkDecorator:
    return pytest.mark.covers(
        module=f"{name}, on a CPU", outcome="unverified", why=f"TorchRec and FBGEMM fail: `{UPSTREAM[name][2]}`"
    )


@pytest.mark.pitfall(30)
@pytest.mark.parametrize("name", [pytest.param(name, marks=unverified(name)) for name in UPSTREAM])
def test_what_torchrec_cannot_train_on_a_cpu(name: str, pool: Pool) -> None:
    model, where, message = UPSTREAM[name]
    with pytest.raises(RankFailed, match=message):
        pool.run(where.world, zoo.only_train, model, where)


@pytest.mark.covers(
    module="EmbeddingCollection with batch sizes by feature, on a CPU",
    outcome="unverified",
    why="TorchRec trains no row of it: its reindexing has no gradient",
)
def test_torchrec_trains_no_row_of_sequences_with_batch_sizes_by_feature_on_a_cpu(pool: Pool, tmp_path: Path) -> None:
    """It reindexes their output by ``permute_1D_sparse_data``, through which no gradient comes on a CPU."""
    model, where = lone("ec", "tw", vbe="even")
    marks = pool.run(4, zoo.start, model, where, config(tmp_path), EVERYTHING)[0]
    assert not any("part0.t" in name for name in differences(marks["1:1"], marks["1:2"]))
    assert any("heads" in name for name in differences(marks["1:1"], marks["1:2"]))
