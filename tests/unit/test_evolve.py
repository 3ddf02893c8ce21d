"""What becomes of a marker's tables in a model that differs: by what was declared, and by nothing else."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.parts import Findings
from torchrec_stream_ckpt import Changes, DenseChanges, IdMap, ModelSchema, RowChange
from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES
from torchrec_stream_ckpt.evolve.dense import compare_dense
from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer
from torchrec_stream_ckpt.evolve.resolve import TrainedRows, compare_tables
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.evolve.table_outcome import Evolution
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import DenseEntry
from torchrec_stream_ckpt.util.types import TOMBSTONE, StateSpec, TableSpec

SUM = StateSpec("sum", "float32", per_row=True)
MOMENTS = tuple(StateSpec(name, "float32", per_row=False) for name in ("exp_avg", "exp_avg_sq"))


def spec(name: str, rows: int = 10, dim: int = 4, id_: int | None = None) -> TableSpec:
    return TableSpec(name, rows, dim, "float32", "exact_rowwise_adagrad", (SUM,), id_)


def adam(table: TableSpec, optimizer: str = "adam") -> TableSpec:
    return replace(table, optimizer=optimizer, states=MOMENTS)


A, B, C = (spec(name, id_=number) for number, name in enumerate("abc", 11))
SAVED = Schema((A, B, C))


def here(*tables: TableSpec) -> Schema:
    """A model's own schema knows no ids."""
    return Schema(tuple(replace(table, id=None) for table in sorted(tables, key=lambda each: each.name)))


def resolve(
    saved: Schema, here: Schema, changes: Changes = NO_CHANGES, *, trained_rows: TrainedRows | None = None
) -> Evolution:
    found = Findings(changes)
    evolution = compare_tables(saved, here.tables, found, trained_rows)
    found.check()
    assert evolution is not None
    return evolution


def ids(evolution: Evolution) -> list[int | None]:
    return [table.id for table in evolution.schema.tables]


def test_an_unchanged_model_changes_nothing() -> None:
    evolution = resolve(SAVED, here(A, B, C))
    assert evolution.is_plain
    assert evolution.schema.is_same(SAVED)
    assert evolution.swept == ()
    assert [(each.label, each.goes_on, each.rows_fresh) for each in evolution.tables] == [("exact", True, 0)] * 3


def test_an_added_table_comes_last_and_is_sent_whole() -> None:
    early = spec("aa")
    evolution = resolve(SAVED, here(A, B, C, early), Changes(added=("aa",)))
    assert [table.name for table in evolution.schema.tables] == ["a", "b", "c", "aa"]
    assert ids(evolution) == [11, 12, 13, None]
    assert evolution.swept == (3,)
    assert not evolution.is_plain
    added = evolution.of(3)
    assert (added.source, added.weights_label, added.state_labels, added.rows_fresh) == (None, "fresh", ("fresh",), 10)
    assert (added.bytes_kept, added.bytes_fresh, added.bytes_dropped) == (0, 10 * (16 + 4), 0)


def test_a_dropped_table_leaves_a_tombstone_and_the_others_go_on() -> None:
    evolution = resolve(SAVED, here(A, C), Changes(dropped=("b",)))
    assert evolution.schema.tables == (A, TOMBSTONE, C)
    assert evolution.swept == (1,)
    gone = evolution.tables[-1]
    assert (gone.is_dropped, gone.name, gone.index, gone.rows_dropped, gone.label) == (True, "b", 1, 10, "dropped")
    assert gone.bytes_dropped == 10 * (16 + 4)


def test_a_tombstone_of_before_stays_and_is_not_swept_again() -> None:
    evolution = resolve(Schema((A, TOMBSTONE, C)), here(A, C, spec("b")), Changes(added=("b",)))
    assert [table.name for table in evolution.schema.tables] == ["a", "", "c", "b"]
    assert evolution.swept == (3,)
    assert resolve(evolution.schema, here(A, B, C)).is_plain


def test_a_renamed_table_goes_on_at_its_place() -> None:
    evolution = resolve(SAVED, here(A, replace(B, name="z"), C), Changes(renamed={"b": "z"}))
    assert [table.name for table in evolution.schema.tables] == ["a", "z", "c"]
    assert ids(evolution) == [11, 12, 13]
    assert evolution.swept == ()
    assert not evolution.is_plain
    assert (evolution.of(1).saved_name, evolution.of(1).goes_on, evolution.of(1).label) == ("b", True, "exact")


def test_two_tables_swap_their_names() -> None:
    evolution = resolve(SAVED, here(A, B, C), Changes(renamed={"a": "b", "b": "a"}))
    assert [table.name for table in evolution.schema.tables] == ["b", "a", "c"]
    assert ids(evolution) == [11, 12, 13]


def test_a_table_may_begin_anew_under_its_name() -> None:
    evolution = resolve(SAVED, here(A, B, C), Changes(dropped=("b",), added=("b",)))
    assert [table.name for table in evolution.schema.tables] == ["a", "", "c", "b"]
    assert evolution.swept == (1, 3)


def test_a_grown_table_keeps_its_rows_and_begins_a_new_row_space() -> None:
    evolution = resolve(SAVED, here(A, replace(B, rows=15), C), Changes(rows={"b": 15}))
    grown = evolution.of(1)
    assert ids(evolution) == [11, None, 13]
    assert evolution.swept == (1,)
    assert (grown.rows_kept.count, grown.rows_kept.is_identity, grown.rows_fresh, grown.rows_dropped) == (
        10,
        True,
        5,
        0,
    )
    assert (grown.label, grown.goes_on, grown.states) == ("exact", False, ((0, 0),))
    assert (grown.bytes_kept, grown.bytes_fresh) == (10 * 20, 5 * 20)


def test_a_shrunk_table_wants_leave_for_the_rows_that_go() -> None:
    smaller = here(A, replace(B, rows=7), C)
    with pytest.raises(ChangesError, match="rows: 'b': 3 rows would be dropped, which may be trained"):
        resolve(SAVED, smaller, Changes(rows={"b": 7}))
    asked = []

    def trained(source: int, kept: RowMap) -> int:
        asked.append((source, kept.count))
        return 2

    with pytest.raises(ChangesError, match="3 rows would be dropped, 2 of them trained; set allow_dropped_rows"):
        resolve(SAVED, smaller, Changes(rows={"b": 7}), trained_rows=trained)
    assert asked == [(1, 7)]
    assert resolve(SAVED, smaller, Changes(rows={"b": 7}), trained_rows=lambda *_: 0).of(1).rows_dropped == 3
    with pytest.raises(
        ChangesError, match=r"3 rows would be dropped, which may be trained \(they have no optimizer state"
    ):
        resolve(SAVED, smaller, Changes(rows={"b": 7}), trained_rows=lambda *_: None)
    allowed = Changes(rows={"b": RowChange(7, allow_dropped_rows=True)})
    assert resolve(SAVED, smaller, allowed).of(1).rows_dropped == 3


def test_an_id_map_moves_rows_and_says_which() -> None:
    change = RowChange(10, IdMap([3, 1, 7], [0, 9, 2]), allow_dropped_rows=True)
    moved = resolve(SAVED, here(A, B, C), Changes(rows={"b": change})).of(1)
    assert not moved.goes_on
    assert [each.tolist() for each in moved.rows_kept.pairs] == [[1, 3, 7], [9, 0, 2]]
    assert (moved.rows_fresh, moved.rows_dropped) == (7, 7)


def test_a_map_of_all_rows_to_other_ids_is_sent_whole() -> None:
    turned = IdMap(np.arange(10), np.arange(10)[::-1])
    evolution = resolve(SAVED, here(A, B, C), Changes(rows={"b": RowChange(10, turned)}))
    assert (evolution.of(1).goes_on, evolution.swept, evolution.of(1).rows_fresh) == (False, (1,), 0)
    assert ids(evolution) == [11, None, 13]


def test_an_id_map_of_each_id_to_itself_moves_nothing() -> None:
    same = IdMap(np.arange(10)[::-1], np.arange(10)[::-1])
    evolution = resolve(SAVED, here(A, B, C), Changes(rows={"b": RowChange(10, same)}))
    assert evolution.of(1).goes_on
    assert evolution.schema.is_same(SAVED)


def test_a_wider_table_keeps_its_columns_and_its_rowwise_state_by_rule() -> None:
    wider = resolve(SAVED, here(A, replace(B, dim=8), C), Changes(columns={"b": 8})).of(1)
    assert (wider.cols_kept, wider.weights_label, wider.state_labels, wider.label) == (
        4,
        "exact",
        ("by rule",),
        "by rule",
    )
    assert (wider.bytes_kept, wider.bytes_fresh, wider.bytes_dropped) == (10 * 20, 10 * 16, 0)


def test_a_state_a_weight_of_a_narrower_table_is_exact() -> None:
    narrow = here(A, adam(replace(B, dim=2)), C)
    narrower = resolve(Schema((A, adam(B), C)), narrow, Changes(columns={"b": 2})).of(1)
    assert (narrower.cols_kept, narrower.state_labels, narrower.label) == (2, ("exact", "exact"), "exact")
    assert (narrower.bytes_kept, narrower.bytes_dropped) == (10 * 24, 10 * 24)


def test_another_optimizer_keeps_states_of_the_same_name_and_shape() -> None:
    lamb = resolve(Schema((adam(A),)), here(adam(A, "lamb")), Changes(optimizer={"a": "lamb"})).of(0)
    assert (lamb.states, lamb.state_labels, lamb.keeps_iteration) == (((0, 0), (1, 1)), ("by rule", "by rule"), False)
    fresh = resolve(Schema((A,)), here(adam(A)), Changes(optimizer={"a": "adam"})).of(0)
    assert (fresh.states, fresh.weights_label, fresh.label) == (((0, None), (1, None)), "exact", "fresh")
    assert (fresh.bytes_kept, fresh.bytes_fresh, fresh.bytes_dropped) == (10 * 16, 10 * 32, 10 * 4)


def test_another_dtype_casts_by_rule() -> None:
    half = resolve(SAVED, here(A, replace(B, dtype="float16"), C), Changes(dtype={"b": "float16"})).of(1)
    assert (half.weights_label, half.state_labels, half.goes_on) == ("by rule", ("exact",), False)


def test_a_table_may_change_in_all_ways_at_once() -> None:
    new = adam(TableSpec("z", 12, 8, "float16", "", ()), "adam")
    changes = Changes(
        renamed={"b": "z"}, rows={"z": 12}, columns={"z": 8}, dtype={"z": "float16"}, optimizer={"z": "adam"}
    )
    outcome = resolve(SAVED, here(A, new, C), changes).of(1)
    assert (outcome.saved_name, outcome.rows_kept.count, outcome.cols_kept, outcome.label) == ("b", 10, 4, "fresh")


def test_what_was_not_declared_is_refused_all_at_once() -> None:
    model = here(spec("new"), adam(B), replace(C, dim=8, rows=5))
    with pytest.raises(SchemaMismatchError) as refused:
        resolve(SAVED, model)
    said = str(refused.value)
    assert "table 'new': only this model has it (10 x 4 float32, exact_rowwise_adagrad)" in said
    assert "table 'a': only the marker has it" in said
    assert "table 'b': trained by adam here, exact_rowwise_adagrad in the marker" in said
    assert "table 'c': 8 columns here, 4 in the marker" in said
    assert "table 'c': 5 rows here, 10 in the marker; 5 rows would be dropped, which may be trained" in said
    assert "# 5 differences" in said


def test_wrong_declarations_are_named_all_at_once() -> None:
    wrong = Changes(
        added=("a", "nowhere"),
        dropped=("bb", "c"),
        renamed={"c": "d", "a": "a"},
        rows={"b": 11},
        columns={"b": 4, "bb": 3},
        optimizer={"b": "adam"},
    )
    with pytest.raises(ChangesError) as refused:
        resolve(SAVED, here(A, B, C), wrong)
    said = str(refused.value)
    for part in (
        "'a' is both added and a new name",
        "added: 'nowhere': this model has no such table",
        "dropped: 'bb': the marker has no such table (near: 'b')",
        "'c' is both dropped and renamed",
        "renamed: 'd': this model has no such table",
        "renamed: 'a' has the same name",
        "rows: 'b': 11 rows are declared, but this model has 10",
        "columns: 'b': marker and model both have 4",
        "columns: 'bb': this model has no such table (near: 'b')",
        "optimizer: 'b': marker and model both have 'exact_rowwise_adagrad'",
    ):
        assert part in said, part


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (Changes(added=("a",)), "'a' is a table of the marker; to reset it, declare it dropped as well"),
        (Changes(renamed={"a": "b"}), "'b' is another table of the marker; declare that one dropped or renamed"),
        (Changes(renamed={"a": "b", "c": "b"}, dropped=("b",)), "more than one table becomes 'b'"),
        (Changes(dropped=("b",), added=("b",), rows={"b": 10}), "rows: 'b' is an added table"),
        (Changes(rows={"b": RowChange(10)}), "marker and model both have 10 rows, but no ids are declared"),
        (Changes(rows={"b": RowChange(10, IdMap([3, 12], [1, 2]))}), "1 old ids are outside the 10 rows of the marker"),
        (Changes(rows={"b": RowChange(10, IdMap([3, 4], [1, 10]))}), "1 new ids are outside the 10 rows of this model"),
        (Changes(rows={"b": RowChange(10, IdMap([3], [1]))}), "9 rows would be dropped"),
        (Changes(columns={"b": 5}), "columns: 'b': marker and model both have 4"),
        (Changes(dtype={"b": "float16"}), "dtype: 'b': marker and model both have 'float32'"),
    ],
)
def test_a_contradiction_is_refused(changes: Changes, said: str) -> None:
    with pytest.raises(ChangesError, match="the declared changes are wrong") as refused:
        resolve(SAVED, here(A, B, C), changes)
    assert said in refused.value.message


def test_going_back_is_the_other_change() -> None:
    there = resolve(SAVED, here(A, replace(B, name="z"), C, spec("d")), Changes(added=("d",), renamed={"b": "z"}))
    back = resolve(there.schema, here(A, B, C), Changes(dropped=("d",), renamed={"z": "b"}))
    assert [table.name for table in back.schema.tables] == ["a", "b", "c", ""]
    assert back.schema.tables[:3] == SAVED.tables
    assert back.swept == (3,)


def test_other_states_of_the_same_optimizer_are_declared_as_the_optimizer() -> None:
    counted = replace(B, states=(SUM, StateSpec("row_counter", "float32", per_row=True)))
    with pytest.raises(SchemaMismatchError, match=r"'b': exact_rowwise_adagrad keeps sum \(float32 a row\), row"):
        resolve(SAVED, here(A, counted, C))
    outcome = resolve(SAVED, here(A, counted, C), Changes(optimizer={"b": "exact_rowwise_adagrad"})).of(1)
    assert (outcome.states, outcome.state_labels) == (((0, 0), (1, None)), ("exact", "fresh"))
    assert not outcome.goes_on


# What becomes of dense parameters, their optimizer state and the user's objects in a model that differs.


OVER = ("over.0.weight", "over.0.bias", "over.1.weight")


def model(
    *names: str,
    shapes: dict[str, tuple[int, ...]] | None = None,
    groups: tuple[tuple[str, ...], ...] | None = None,
    kind: str = "Adam",
    stateful: tuple[str, ...] = (),
) -> ModelSchema:
    """A dense model with one optimizer, of one group if nothing else is said."""
    entries = tuple(DenseEntry(name, (shapes or {}).get(name, (4, 2)), "float32") for name in names)
    optimizer = DenseOptimizer("optimizer0", kind, groups if groups is not None else (names,))
    return ModelSchema((), entries, (optimizer,), stateful)


WITH_DENSE = model(*OVER)


def resolve_dense(saved: ModelSchema, here: ModelSchema, changes: Changes = NO_CHANGES) -> DenseEvolution:
    """Compare the dense parts of two models; raises for what prevents a restore."""
    found = Findings(changes)
    evolution = compare_dense(saved, here, found)
    found.check()
    return evolution


def labels(evolution: DenseEvolution) -> dict[str, str]:
    return {entry.name: entry.label for entry in evolution.entries}


def states(evolution: DenseEvolution) -> dict[str, tuple[str, str] | None]:
    return {state.parameter: state.source for state in evolution.states}


def dense(**declared: object) -> Changes:
    return Changes(dense=DenseChanges(**declared))  # type: ignore[arg-type]


def test_an_unchanged_model_keeps_all() -> None:
    evolution = resolve_dense(WITH_DENSE, model(*OVER))
    assert evolution.is_plain
    assert evolution.sources == {name: name for name in OVER}
    assert evolution.optimizers[0].groups == (0,)


def test_a_replaced_layer_is_fresh_and_so_is_its_state() -> None:
    here = model("over.0.weight", "over.0.bias", "new.weight")
    evolution = resolve_dense(WITH_DENSE, here, dense(fresh=["new.weight"], dropped=["over.1.weight"]))
    assert labels(evolution) == {
        "over.0.weight": "exact",
        "over.0.bias": "exact",
        "new.weight": "fresh",
        "over.1.weight": "dropped",
    }
    assert states(evolution)["new.weight"] is None
    assert states(evolution)["over.0.bias"] == ("optimizer0", "over.0.bias")
    assert (evolution.optimizers[0].groups, evolution.optimizers[0].label) == ((0,), "exact")
    assert evolution.dropped == ("over.1.weight",)
    assert not evolution.is_plain


def test_a_pattern_renames_and_state_follows() -> None:
    here = model("top.0.weight", "top.0.bias", "top.1.weight")
    evolution = resolve_dense(WITH_DENSE, here, dense(renamed={r"over\.(\d+)\.(.+)": r"top.\1.\2"}))
    assert evolution.sources["top.1.weight"] == "over.1.weight"
    assert states(evolution)["top.0.bias"] == ("optimizer0", "over.0.bias")
    assert evolution.optimizers[0].label == "exact"
    assert not evolution.is_plain


def test_a_name_of_the_marker_is_taken_as_it_stands() -> None:
    here = model("over.0.weight", "over.0.bias", "last")
    assert resolve_dense(WITH_DENSE, here, dense(renamed={"over.1.weight": "last"})).sources["last"] == "over.1.weight"


def test_another_shape_begins_anew() -> None:
    here = model(*OVER, shapes={"over.0.weight": (4, 3)})
    with pytest.raises(SchemaMismatchError, match=r"'over.0.weight': 4 x 3 float32 here, 4 x 2 float32 in the marker"):
        resolve_dense(WITH_DENSE, here)
    evolution = resolve_dense(WITH_DENSE, here, dense(reshaped=["over.0.weight"]))
    assert labels(evolution)["over.0.weight"] == "fresh"
    assert states(evolution)["over.0.weight"] is None
    assert evolution.optimizers[0].groups == (0,)
    assert evolution.entries[0].num_bytes == 48


def test_another_optimizer_begins_anew() -> None:
    here = model(*OVER, kind="SGD")
    with pytest.raises(SchemaMismatchError, match="'optimizer0': SGD here, Adam in the marker"):
        resolve_dense(WITH_DENSE, here)
    evolution = resolve_dense(WITH_DENSE, here, dense(optimizer={"optimizer0": "SGD"}))
    assert set(states(evolution).values()) == {None}
    assert (evolution.optimizers[0].label, evolution.optimizers[0].groups) == ("fresh", (None,))


def test_other_groups_keep_the_states_and_not_the_hyperparameters() -> None:
    here = model(*OVER, groups=(OVER[:1], OVER[1:]))
    with pytest.raises(SchemaMismatchError, match="its param groups have different parameters"):
        resolve_dense(WITH_DENSE, here)
    evolution = resolve_dense(WITH_DENSE, here, dense(optimizer={"optimizer0": "Adam"}))
    assert all(state.label == "exact" for state in evolution.states)
    assert evolution.optimizers[0].groups == (None, None)


def test_a_group_of_new_parameters_has_its_own_hyperparameters() -> None:
    here = model(*OVER, "new", groups=(("new",), OVER))
    evolution = resolve_dense(WITH_DENSE, here, dense(fresh=["new"]))
    assert (evolution.optimizers[0].groups, evolution.optimizers[0].label) == ((None, 0), "by rule")


def test_the_state_of_one_parameter_can_begin_anew() -> None:
    evolution = resolve_dense(WITH_DENSE, model(*OVER), dense(optimizer={"over.0.bias": "fresh"}))
    assert states(evolution)["over.0.bias"] is None
    assert states(evolution)["over.0.weight"] is not None
    assert labels(evolution)["over.0.bias"] == "exact"


def test_an_optimizer_comes_and_another_goes() -> None:
    first, second = DenseOptimizer("optimizer0", "Adam", (OVER,)), DenseOptimizer("optimizer1", "Adam", (OVER,))
    entries = model(*OVER).dense
    one, other = ModelSchema((), entries, (first,)), ModelSchema((), entries, (second,))
    with pytest.raises(SchemaMismatchError) as refused:
        resolve_dense(one, other)
    assert "only this job has it (Adam)" in str(refused.value)
    assert "only the marker has it (Adam)" in str(refused.value)
    evolution = resolve_dense(one, other, dense(optimizer={"optimizer0": "dropped", "optimizer1": "Adam"}))
    assert states(evolution)["over.0.bias"] == ("optimizer0", "over.0.bias")
    assert [each.label for each in evolution.optimizers] == ["fresh", "dropped"]


def test_objects_of_the_user_come_and_go() -> None:
    saved, here = model(*OVER, stateful=("loader", "old")), model(*OVER, stateful=("loader", "per_rank.meter"))
    with pytest.raises(SchemaMismatchError, match=r"stateful 'per_rank.meter': only this job has it"):
        resolve_dense(saved, here)
    changes = Changes(stateful_added=("per_rank.meter",), stateful_dropped=("old",))
    found = {each.name: each.label for each in resolve_dense(saved, here, changes).stateful}
    assert found == {"loader": "exact", "per_rank.meter": "fresh", "old": "dropped"}


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            dense(fresh=["over.0.wait"]),
            "'over.0.wait': this model has no such parameter (near: 'over.0.weight",
        ),
        (
            dense(dropped=["ower.0.bias"]),
            "'ower.0.bias': the marker has no such parameter (near: 'over.0.bia",
        ),
        (dense(reshaped=["x"]), "dense.reshaped: 'x': this model has no such parameter"),
        (dense(fresh=["over.0.bias"]), "'over.0.bias' is in the marker; to reset it, declare it dropped as well"),
        (dense(reshaped=["over.0.bias"]), "dense.reshaped: 'over.0.bias': marker and model both have 4 x 2 float32"),
        (dense(renamed={"under.*": "x"}), "dense.renamed: 'under.*': the marker has no such parameter"),
        (dense(renamed={"over.(": "x"}), "dense.renamed: 'over.(' -> 'x': missing ), unterminated subpattern"),
        (dense(renamed={r"over\.0\.bias": r"\1"}), r"invalid group reference"),
        (dense(renamed={"over.0.bias": "over.0.bia"}), "this model has no such parameter (near: 'over.0.bias'"),
        (dense(renamed={r"over\..\.weight": "over.0.bias"}), "all become 'over.0.bias'"),
        (dense(renamed={"over.1.weight": "over.0.bias"}), "another parameter of the marker; declare that one dropped"),
        (
            dense(renamed={r"over\.0\.(.*)": r"over.0.\1", "over.0.bias": "over.1.weight"}, dropped=["over.1.weight"]),
            "rename 'over.0.bias'",
        ),
        (
            dense(optimizer={"optimiser0": "SGD"}),
            "nor a parameter that one trains (near: 'optimizer0')",
        ),
        (
            dense(optimizer={"optimizer0": "Adam"}),
            "'optimizer0' does not differ from the marker",
        ),
        (dense(optimizer={"over.0.bias": "Adam"}), "the value for a parameter must be 'fresh', got 'Adam'"),
        (Changes(stateful_added=("loader",)), "stateful_added: 'loader': this job has no such object"),
        (Changes(stateful_dropped=("loader",)), "stateful_dropped: 'loader': the marker has no such object"),
    ],
)
def test_a_wrong_declaration_is_refused(changes: Changes, said: str) -> None:
    with pytest.raises(ChangesError) as refused:
        resolve_dense(WITH_DENSE, model(*OVER), changes)
    assert said in refused.value.message


def test_a_parameter_may_begin_anew_under_its_name() -> None:
    evolution = resolve_dense(WITH_DENSE, model(*OVER), dense(fresh=["over.0.bias"], dropped=["over.0.bias"]))
    assert [(entry.name, entry.label) for entry in evolution.entries][-1] == ("over.0.bias", "dropped")
    assert states(evolution)["over.0.bias"] is None
