"""What a refusal prints can be pasted: it declares all that differs, in Python and as TOML."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from torchrec_stream_ckpt import Changes, DenseChanges, IdMap, ModelSchema, RowChange
from torchrec_stream_ckpt.errors import ChangesError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.findings import PYTHON_FOLLOWS, TOML_FOLLOWS
from torchrec_stream_ckpt.evolve.model_evolution import ModelEvolution, evolve
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.inner import DenseEntry
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

SUM = StateSpec("sum", "float32", per_row=True)
NAMES = {"Changes": Changes, "DenseChanges": DenseChanges, "IdMap": IdMap, "RowChange": RowChange}


def spec(name: str) -> TableSpec:
    return TableSpec(name, 100, 4, "float32", "exact_rowwise_adagrad", (SUM,))


def entry(name: str, *shape: int) -> DenseEntry:
    return DenseEntry(name, shape, "float32")


A, B, C, D = (spec(f"sparse.ebc.t_{name}") for name in "abcd")
SAVED = ModelSchema(
    tuple(replace(table, id=number) for number, table in enumerate((A, B, C, D), 5)),
    (entry("over.0.weight", 4, 2), entry("over.1.weight", 4, 2)),
    (DenseOptimizer("optimizer0", "Adam", (("over.0.weight", "over.1.weight"),)),),
    ("loader",),
)
HERE = ModelSchema(
    (
        replace(B, rows=70),
        replace(C, dim=8, dtype="float16"),
        replace(D, optimizer="exact_sgd", states=()),
        spec('na\\me"\n\u00e9\U0001f600'),
    ),
    (entry("over.0.weight", 4, 3), entry("top.weight", 1)),
    (DenseOptimizer("optimizer0", "SGD", (("over.0.weight", "top.weight"),)),),
    ("schedule",),
)


def refusal(saved: ModelSchema, here: ModelSchema, changes: Changes | None = None) -> str:
    with pytest.raises(SchemaMismatchError) as refused:
        evolve(saved, here, changes or Changes())
    return str(refused.value)


def pasted(said: str) -> Changes:
    """What the Python in a refusal makes."""
    names = dict(NAMES)
    exec(said.partition(f"{PYTHON_FOLLOWS}\n")[2].partition(f"\n{TOML_FOLLOWS}")[0], names)  # type: ignore[arg-type]
    changes = names["changes"]
    assert isinstance(changes, Changes)
    return changes


def loaded(said: str, folder: Path) -> Changes:
    """What the TOML in a refusal says."""
    (folder / "changes.toml").write_text(said.partition(f"{TOML_FOLLOWS}\n")[2].partition("\n  Try:")[0])
    return Changes.load(folder / "changes.toml")


def test_all_differences_stand_in_one_message_and_what_it_prints_is_accepted(tmp_path: Path) -> None:
    said = refusal(SAVED, HERE)
    for part in ("t_b': 70 rows here", "t_c': 8 columns", "t_c': weights of float16", "t_a': only the marker"):
        assert part in said
    assert "# 12 differences" in said
    assert pasted(said) == loaded(said, tmp_path)
    evolution = evolve(SAVED, HERE, pasted(said))
    assert evolution.tables.swept == (0, 1, 2, 3, 4)


def test_what_was_declared_already_is_in_what_is_printed(tmp_path: Path) -> None:
    declared = Changes(
        rows={B.name: RowChange(70, IdMap([1, 5], [0, 2]), allow_dropped_rows=True)},
        dense=DenseChanges(renamed={r"over\.1\.(.*)": r"top.\1"}),
    )
    here = replace(HERE, dense=(entry("over.0.weight", 4, 3), entry("top.weight", 4, 2)))
    said = refusal(SAVED, here, declared)
    again = pasted(said)
    assert again == loaded(said, tmp_path)
    assert (again.rows, again.dense.renamed) == (declared.rows, declared.dense.renamed)
    evolution = evolve(SAVED, here, again)
    assert evolution.dense is not None
    assert evolution.dense.sources == {"top.weight": "over.1.weight"}


def test_a_long_id_map_is_called_by_its_file(tmp_path: Path) -> None:
    ids = IdMap(np.arange(70), np.arange(70)[::-1])
    declared = Changes(rows={B.name: RowChange(70, ids, allow_dropped_rows=True)})
    said = refusal(SAVED, HERE, declared)
    assert f"first save the ids of {B.name!r}" in said
    ids.save(tmp_path / f"ids-{ids.digest[:12]}.npz")
    assert loaded(said, tmp_path).rows == declared.rows
    named = IdMap.load(tmp_path / f"ids-{ids.digest[:12]}.npz")
    said = refusal(SAVED, HERE, Changes(rows={B.name: RowChange(70, named, allow_dropped_rows=True)}))
    assert "first save" not in said
    assert pasted(said).rows == loaded(said, tmp_path / "..").rows == declared.rows


def test_wrong_declarations_of_tables_and_dense_state_stand_in_one_message() -> None:
    wrong = Changes(added=("x",), dense=DenseChanges(fresh=("y",)), stateful_added=("z",))
    with pytest.raises(ChangesError) as refused:
        evolve(SAVED, HERE, wrong)
    for part in ("added: 'x'", "dense.fresh: 'y'", "stateful_added: 'z'"):
        assert part in refused.value.message


def test_changes_that_were_made_are_not_made_twice() -> None:
    changes = pasted(refusal(SAVED, HERE))
    made = replace(HERE, tables=evolve(SAVED, HERE, changes).tables.schema.tables)
    with pytest.raises(ChangesError):
        evolve(made, HERE, changes)
    again = evolve(made, HERE, changes, made=[ClaimChanges.of(changes.canonical())])
    assert (again.is_plain, again.already) == (True, True)
    assert not evolve(SAVED, HERE, changes, made=[ClaimChanges.of(changes.canonical())]).already


def test_an_id_map_is_not_applied_twice() -> None:
    model = ModelSchema((A,))
    changes = Changes(rows={A.name: RowChange(100, IdMap(np.arange(100), np.arange(100)[::-1]))})
    first = evolve(model, model, changes)
    assert first.tables.swept == (0,)
    after = ModelSchema(first.tables.schema.tables)
    assert evolve(after, model, changes, made=[ClaimChanges.of(changes.canonical())]).is_plain
    assert evolve(after, model, changes).tables.swept == (0,)


ENDS = IdMap([0, 99], [99, 0])


@pytest.mark.parametrize(
    ("declared", "edited", "said"),
    [
        (
            Changes(rows={A.name: RowChange(100, ENDS, allow_dropped_rows=True)}),
            Changes(rows={A.name: RowChange(100, IdMap([0, 98], [98, 0]), allow_dropped_rows=True)}),
            f"rows: {A.name!r} has an id map",
        ),
        (
            Changes(renamed={A.name: B.name, B.name: A.name}),
            Changes(renamed={A.name: B.name, B.name: A.name}, added=(C.name,)),
            f"{A.name!r} is renamed {B.name!r}",
        ),
        (
            Changes(added=(A.name,), dropped=(B.name,), renamed={A.name: B.name}),
            Changes(added=(A.name, C.name), dropped=(B.name,), renamed={A.name: B.name}),
            f"{A.name!r} is renamed {B.name!r}",
        ),
        (
            Changes(added=(A.name,), dropped=(A.name,)),
            Changes(added=(A.name, C.name), dropped=(A.name,)),
            f"{A.name!r} is dropped and added",
        ),
        (
            Changes(dense=DenseChanges(renamed={"x": "y", "y": "x"})),
            Changes(added=(C.name,), dense=DenseChanges(renamed={"x": "y", "y": "x"})),
            "dense: 'x' is renamed 'y'",
        ),
    ],
    ids=["id map", "swap", "instead", "anew", "dense"],
)
def test_a_file_of_changes_that_is_edited_does_not_repeat_what_was_made(
    declared: Changes, edited: Changes, said: str
) -> None:
    dense = (entry("x", 2), entry("y", 2))
    model = ModelSchema((A, B), dense)
    saved = ModelSchema(tuple(replace(table, id=number) for number, table in enumerate((A, B))), dense)
    after = replace(saved, tables=evolve(saved, model, declared).tables.schema.tables)
    here = ModelSchema((A, B, C), dense) if edited.added else model
    other = ClaimChanges.of(Changes(added=("elsewhere",)).canonical())
    told = [other, ClaimChanges.of(declared.canonical())]
    with pytest.raises(ChangesError) as refused:
        evolve(after, here, edited, made=told)
    assert said in refused.value.message
    evolve(after, here, edited, made=told, again=True)
    evolve(after, here, edited, made=[other])
    unknown = replace(told[1], text=None)
    with pytest.raises(ChangesError, match="would be applied twice"):
        evolve(after, here, edited, made=[unknown])


def test_a_change_that_the_model_shows_follows_on_any_other() -> None:
    saved, here = ModelSchema((replace(A, id=1),)), ModelSchema((replace(A, rows=120),))
    grown = Changes(rows={A.name: RowChange(120)})
    assert evolve(saved, here, grown, made=[ClaimChanges.of(b"{}", None)]).tables.swept == (0,)
    assert evolve(saved, here, grown, made=[ClaimChanges("0" * 64)]).tables.swept == (0,)


def test_tables_alone_are_compared_where_dense_state_is_not_known() -> None:
    bare = ModelSchema(SAVED.tables)
    evolution: ModelEvolution = evolve(bare, SAVED, dense=False)
    assert evolution.is_plain
    assert evolution.dense is None
    with pytest.raises(SchemaMismatchError):
        evolve(bare, SAVED)


@pytest.mark.parametrize("below", ["embedding_bags", "embeddings"])
def test_a_table_that_is_data_parallel_on_one_side_is_never_declared_away(below: str) -> None:
    sharded = ModelSchema((A, B), (entry("over.0.weight", 4, 2),))
    replicated = ModelSchema((B,), (entry("over.0.weight", 4, 2), entry(f"sparse.ebc.{below}.t_a.weight", 100, 4)))
    for saved, here, said in (
        (sharded, replicated, "sharded in the marker, data-parallel in this model"),
        (replicated, sharded, "data-parallel in the marker, sharded in this model"),
    ):
        with pytest.raises(SchemaMismatchError, match="cannot change between data-parallel and sharded") as refused:
            evolve(saved, here)
        assert f"sparse.ebc.t_a: {said}" in refused.value.message
        assert PYTHON_FOLLOWS not in refused.value.message
    weight = f"sparse.ebc.{below}.t_a.weight"
    anew = Changes(dropped=(A.name,), dense=DenseChanges(fresh=(weight,)))
    assert evolve(sharded, replicated, anew).tables.swept
    back = Changes(added=(A.name,), dense=DenseChanges(dropped=(weight,)))
    assert not evolve(replicated, sharded, back).is_plain
