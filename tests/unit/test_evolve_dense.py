"""What becomes of dense parameters, their optimizer state and the user's objects in a model that differs."""

from __future__ import annotations

import pytest

from torchrec_stream_ckpt import Changes, DenseChanges, ModelSchema
from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.changes import NO_CHANGES
from torchrec_stream_ckpt.evolve.dense import compare_dense
from torchrec_stream_ckpt.evolve.dense_outcome import DenseEvolution
from torchrec_stream_ckpt.evolve.findings import Findings
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer
from torchrec_stream_ckpt.inner import DenseEntry

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


SAVED = model(*OVER)


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
    evolution = resolve_dense(SAVED, model(*OVER))
    assert evolution.is_plain
    assert evolution.sources == {name: name for name in OVER}
    assert evolution.optimizers[0].groups == (0,)


def test_a_replaced_layer_is_fresh_and_so_is_its_state() -> None:
    here = model("over.0.weight", "over.0.bias", "new.weight")
    evolution = resolve_dense(SAVED, here, dense(fresh=["new.weight"], dropped=["over.1.weight"]))
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
    evolution = resolve_dense(SAVED, here, dense(renamed={r"over\.(\d+)\.(.+)": r"top.\1.\2"}))
    assert evolution.sources["top.1.weight"] == "over.1.weight"
    assert states(evolution)["top.0.bias"] == ("optimizer0", "over.0.bias")
    assert evolution.optimizers[0].label == "exact"
    assert not evolution.is_plain


def test_a_name_of_the_marker_is_taken_as_it_stands() -> None:
    here = model("over.0.weight", "over.0.bias", "last")
    assert resolve_dense(SAVED, here, dense(renamed={"over.1.weight": "last"})).sources["last"] == "over.1.weight"


def test_another_shape_begins_anew() -> None:
    here = model(*OVER, shapes={"over.0.weight": (4, 3)})
    with pytest.raises(SchemaMismatchError, match=r"'over.0.weight': 4 x 3 float32 here, 4 x 2 float32 in the marker"):
        resolve_dense(SAVED, here)
    evolution = resolve_dense(SAVED, here, dense(reshaped=["over.0.weight"]))
    assert labels(evolution)["over.0.weight"] == "fresh"
    assert states(evolution)["over.0.weight"] is None
    assert evolution.optimizers[0].groups == (0,)
    assert evolution.entries[0].num_bytes == 48


def test_another_optimizer_begins_anew() -> None:
    here = model(*OVER, kind="SGD")
    with pytest.raises(SchemaMismatchError, match="'optimizer0': SGD here, Adam in the marker"):
        resolve_dense(SAVED, here)
    evolution = resolve_dense(SAVED, here, dense(optimizer={"optimizer0": "SGD"}))
    assert set(states(evolution).values()) == {None}
    assert (evolution.optimizers[0].label, evolution.optimizers[0].groups) == ("fresh", (None,))


def test_other_groups_keep_the_states_and_not_the_hyperparameters() -> None:
    here = model(*OVER, groups=(OVER[:1], OVER[1:]))
    with pytest.raises(SchemaMismatchError, match="its param groups have different parameters"):
        resolve_dense(SAVED, here)
    evolution = resolve_dense(SAVED, here, dense(optimizer={"optimizer0": "Adam"}))
    assert all(state.label == "exact" for state in evolution.states)
    assert evolution.optimizers[0].groups == (None, None)


def test_a_group_of_new_parameters_has_its_own_hyperparameters() -> None:
    here = model(*OVER, "new", groups=(("new",), OVER))
    evolution = resolve_dense(SAVED, here, dense(fresh=["new"]))
    assert (evolution.optimizers[0].groups, evolution.optimizers[0].label) == ((None, 0), "by rule")


def test_the_state_of_one_parameter_can_begin_anew() -> None:
    evolution = resolve_dense(SAVED, model(*OVER), dense(optimizer={"over.0.bias": "fresh"}))
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
        resolve_dense(SAVED, model(*OVER), changes)
    assert said in refused.value.message


def test_a_parameter_may_begin_anew_under_its_name() -> None:
    evolution = resolve_dense(SAVED, model(*OVER), dense(fresh=["over.0.bias"], dropped=["over.0.bias"]))
    assert [(entry.name, entry.label) for entry in evolution.entries][-1] == ("over.0.bias", "dropped")
    assert states(evolution)["over.0.bias"] is None
