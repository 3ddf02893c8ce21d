"""What else a model may have: batch sizes by feature, dtypes, decays, shared features; and what no CPU can train."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    CounterBasedRegularizationDefinition,
    CounterWeightDecayMode,
    CowClipDefinition,
    GlobalWeightDecayDefinition,
    WeightDecayMode,
)
from torchrec.distributed.sharding.grid_sharding import GridPooledEmbeddingDist

from tests import zoo
from tests.laps import EVERYTHING, FAMILIES, cell_model, config, lap, lapped, one, place, plan
from tests.model import differences
from tests.pool import Pool
from tests.ranks import RankFailed
from tests.sampled import marks_of
from tests.zoo_models import OPTIMIZERS, Model, Part, Place, Plan, Table

pytestmark = pytest.mark.distributed

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


LIKE_OTHERS = {
    *(f"batch size by feature, {name}" for name in OPTIMIZERS if name != "rowwise_adagrad"),
    *("batch size by feature and rank, rowwise_adagrad", "batch size by feature, weighted"),
    *("fp16, ebc, sgd", "fp16, ebc, adagrad", "fp16, ec, sgd", "fp16, ec, rowwise_adagrad"),
    *("fp16 without stochastic rounding", "int32 ids, sequences", "max_norm"),
    *("weight decay L2", "weight decay decoupled", "weight decay by counter, adagradw"),
}
"""Models that differ in one value from one that `make test` runs: `make test-all` runs them too."""
CELL_FAMILIES = tuple(FAMILIES)
GRID_BY_FEATURE = hasattr(GridPooledEmbeddingDist, "_preprocess_batch_size_per_rank_per_feature")
"""True if a grid takes batch sizes that vary by feature, as under the newer stack alone."""
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
        "COWCLIP (a CPU changes states only)",
    ),
    "gradient clipping": (
        with_fused(gradient_clipping=True, max_gradient=0.001),
        CELL_FAMILIES,
        "gradient_clipping",
    ),
    "max_norm": (with_fused(max_norm=0.1), CELL_FAMILIES, "max_norm (a CPU ignores it)"),
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
    return lapped(model.optimizer, plan, model.parts[0].kind, what)


def left_out(name: str) -> list[pytest.MarkDecorator]:
    model, families, _ = MODELS[name]
    wanted = model.vbe != "" and "grid" in families
    return [pytest.mark.skipif(wanted and not GRID_BY_FEATURE, reason="no grid of this TorchRec takes such batches")]


MODEL_CELLS = [
    pytest.param(name, marks=[model_cell(name), *marks_of(name, MODELS.keys() - LIKE_OTHERS), *left_out(name)])
    for name in MODELS
]


@pytest.mark.pitfall(4, 7, 23, 26, 27)
@pytest.mark.parametrize("name", MODEL_CELLS)
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
    [
        pytest.param(
            name,
            marks=[lapped(name, "column-wise, shards of uneven width", "ebc"), *marks_of(name, ("rowwise_adagrad",))],
        )
        for name in OPTIMIZERS
    ],
)
def test_column_shards_of_uneven_width_are_exact(optimizer: str, pool: Pool, tmp_path: Path) -> None:
    model = one("ebc", Table("t", 40, 32, ("a", "b")), Table("u", 33, 64, ("c",)), optimizer=optimizer)
    uneven = (Place("uneven", (8, 24)), Place("uneven", (40, 24)))
    done = lap(pool, model, (Plan(4, 4, uneven), Plan(2, 2, uneven), Plan(3, 3, uneven)), tmp_path)
    assert done.wrong == ()


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
        f"sequences, {FAMILIES[family]}": (
            *lone("ec", family),
            f"Sharding not supported {FAMILIES[family].replace('-', '_')}",
        )
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


OLDER = {
    "a kernel without any row": "must be a CUDA tensor",
    "batch size by feature and rank, grid": "Dimension out of range",
}
"""Messages of the older stack that differ."""


def unverified(name: str) -> pytest.MarkDecorator:
    """The cell of the coverage page that stays empty."""
    optimizer = name.upper() in EmbOptimType.__members__
    cell = {"optimizer": name.upper(), "module": "on a CPU"} if optimizer else {"module": f"{name}, on a CPU"}
    return pytest.mark.covers(**cell, outcome="unverified", why=f"TorchRec and FBGEMM fail: `{UPSTREAM[name][2]}`")


@pytest.mark.pitfall(6, 30)
@pytest.mark.parametrize("name", [pytest.param(name, marks=unverified(name)) for name in UPSTREAM])
def test_what_torchrec_cannot_train_on_a_cpu(name: str, pool: Pool) -> None:
    model, where, message = UPSTREAM[name]
    with pytest.raises(RankFailed, match=message if GRID_BY_FEATURE else OLDER.get(name, message)):
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
    changed = [name for name in differences(marks["1:1"], marks["1:2"]) if not name.startswith("counters.")]
    assert not any("part0.t" in name for name in changed)
    assert any("heads" in name for name in changed)
