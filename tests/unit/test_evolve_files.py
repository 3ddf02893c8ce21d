"""Files of declared changes, id maps and schemas: read as they were written, refused by name where they are wrong."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrec_stream_ckpt import Changes, DenseChanges, IdMap, ModelSchema, RowChange
from torchrec_stream_ckpt.errors import ChangesError, ConfigError, SchemaMismatchError
from torchrec_stream_ckpt.evolve.findings import PYTHON_FOLLOWS, TOML_FOLLOWS
from torchrec_stream_ckpt.evolve.model_evolution import ModelEvolution, evolve
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.evolve.text import nearest
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges
from torchrec_stream_ckpt.inner import DenseEntry, EvolutionReport
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

FULL = Changes(
    added=("a", 'quo"te'),
    dropped=("back\\slash",),
    renamed={"x.y": "z", "new\nline": "\u00e9\U0001f600\x7f"},
    rows={"g": 5, "m": RowChange(9, IdMap([3, 1], [0, 2]), allow_dropped_rows=True)},
    columns={"w": 32},
    optimizer={"o": "adam"},
    dtype={"d": "float16"},
    reassigned=("mc.t", 'm"c'),
    dense=DenseChanges(
        renamed={r"over\.(\d+)": r"top.\1"},
        fresh=("f",),
        dropped=("q",),
        reshaped=("r",),
        optimizer={"optimizer0": "Adam"},
    ),
    stateful_added=("loader",),
    stateful_dropped=("per_rank.meter",),
    label='the "second" one',
)


def written(folder: Path, text: str) -> Path:
    (folder / "changes.toml").write_text(text, "utf-8")
    return folder / "changes.toml"


@pytest.mark.parametrize(
    "changes",
    [
        FULL,
        Changes(),
        Changes(label="x"),
        Changes(dense=DenseChanges(fresh=("f",))),
        Changes(dense=DenseChanges(renamed={"a": "b"})),
        Changes(columns={"w": 1}, dense=DenseChanges(renamed={"a": "b"}, optimizer={"p": "fresh"})),
        Changes(rows={"g": RowChange(4, IdMap([7], [0]), allow_dropped_rows=True)}),
    ],
)
def test_changes_come_back_from_toml_and_from_python(changes: Changes, tmp_path: Path) -> None:
    again = Changes.load(written(tmp_path, changes.to_toml()))
    assert again == changes
    assert again.digest == changes.digest
    assert changes.to_toml().isascii()
    names = {"Changes": Changes, "DenseChanges": DenseChanges, "IdMap": IdMap, "RowChange": RowChange}
    assert eval(changes.to_python(), names) == changes  # type: ignore[arg-type]


def test_the_digest_is_of_what_is_said_and_not_of_how() -> None:
    one = Changes(added=("a", "b"), renamed={"x": "y", "p": "q"}, rows={"t": RowChange(3, IdMap([0, 1], [1, 0]))})
    two = Changes(added=["b", "a"], renamed={"p": "q", "x": "y"}, rows={"t": RowChange(3, IdMap([1, 0], [0, 1]))})  # type: ignore[arg-type]
    other = Changes(added=("a", "b"), renamed={"x": "y", "p": "q"}, rows={"t": RowChange(3, IdMap([0, 1], [0, 1]))})
    assert one.digest == two.digest != other.digest
    assert one.rows["t"].ids == two.rows["t"].ids
    assert Changes().canonical() == b"{}"
    assert Changes().is_empty
    assert not one.is_empty
    said = json.loads(one.canonical())
    assert said["rows"]["t"]["ids"]["pairs"] == 2
    assert len(said["rows"]["t"]["ids"]["digest"]) == 64


def test_rows_are_not_given_up_by_a_word(tmp_path: Path) -> None:
    for word in ("no", 1, None):
        with pytest.raises(ChangesError, match="allow_dropped_rows must be True or False"):
            RowChange(3, allow_dropped_rows=word)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text", ["[rows]\nm.a = 5", "[rows.m.a]\nrows = 5", '[renamed]\nm.a = "m.b"', "[columns]\nm.a = 8"]
)
def test_a_name_without_quotes_is_told(text: str, tmp_path: Path) -> None:
    with pytest.raises(ChangesError) as refused:
        Changes.load(written(tmp_path, text))
    assert "in quotes" in refused.value.message


def test_the_path_of_a_table_is_near_its_last_name() -> None:
    assert nearest("t_a", ("sparse.ebc.t_a", "sparse.ebc.t_b")) == " (near: 'sparse.ebc.t_a')"


def test_an_empty_id_map_would_drop_all_rows_and_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ChangesError, match="the id map has no pair"):
        IdMap([], [])
    np.save(tmp_path / "none.npy", np.zeros((0, 2), np.int64))
    for text in ("", "old,new\n", "\n", "old,new\n\n", "\n\n"):
        (tmp_path / "none.csv").write_text(text)
        for name in ("none.csv", "none.npy"):
            with pytest.raises(ChangesError, match=r"has no pair(.|\n)*path=.*none"):
                IdMap.load(tmp_path / name)
    with pytest.raises(ChangesError, match="rows\\['t'\\]: the id map has no pair"):
        Changes.load(written(tmp_path, "[rows]\nt = { rows = 3, ids = [], allow_dropped_rows = true }\n"))


def test_no_name_comes_twice_in_a_list_and_all_wrong_values_are_named() -> None:
    with pytest.raises(ChangesError) as refused:
        Changes(added=("a", "a"), dropped="b", renamed={"x": 3}, columns={"c": 0}, rows={"r": "many"}, dense=7)  # type: ignore[arg-type, dict-item]
    for part in (
        "added names 'a' twice",
        "dropped must be a list of names, got 'b'",
        "renamed['x'] must be a name, got 3",
        "columns['c'] must be a number above zero, got 0",
        "rows['r'] must be a number or a RowChange, got 'many'",
        "dense must be DenseChanges, got 7",
    ):
        assert part in refused.value.message


def test_all_that_is_wrong_in_a_file_stands_in_one_message(tmp_path: Path) -> None:
    text = """
adde = ["x"]
columns = { t = 0 }
[rows]
a = { row = 3 }
b = { rows = 4, ids = "missing.csv" }
c = { rows = 2, ids = [[0, 1], [0, 2]] }
d = { rows = 2, allow_dropped_rows = 1 }
e = -4
f = { rows = 4, ids = 7 }
[dense]
frech = []
fresh = ["y", "y"]
"""
    with pytest.raises(ChangesError) as refused:
        Changes.load(written(tmp_path, text))
    for part in (
        "unknown field adde (near: 'added')",
        "columns['t'] must be a number above zero, got 0",
        "unknown field rows['a'].row (near: 'rows')",
        "rows['a']: rows is required",
        "rows['b']: the id map cannot be read",
        f"[{tmp_path / 'missing.csv'}]",
        "rows['c']: an id map repeats 1 old ids; the first is 0",
        "rows['d']: allow_dropped_rows must be true or false",
        "rows: the number of rows must be at least 1, got -4",
        "rows['f']: ids must be a file or a list of pairs, got 7",
        "unknown field dense.frech (near: 'fresh')",
        "dense: fresh names 'y' twice",
    ):
        assert part in refused.value.message, part
    assert refused.value.where["path"] == tmp_path / "changes.toml"


@pytest.mark.parametrize("text", ["added = [", "added = 3", "dense = 3", 'rows = "t"', "\ud800", "a = 1\na = 2"])
def test_a_file_that_does_not_parse_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "changes.toml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(ChangesError):
        Changes.load(path)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ChangesError, match=r"cannot be read: No such file.* \[path=.*nowhere.toml\]"):
        Changes.load(tmp_path / "nowhere.toml")


def test_a_number_that_is_too_long_is_told_with_its_file(tmp_path: Path) -> None:
    path = written(tmp_path, f"columns = {{ t = {'9' * 5000} }}")
    with pytest.raises(ChangesError, match=r"not TOML: .*5000 digits(.|\n)*changes.toml"):
        Changes.load(path)


def test_a_byte_order_mark_is_skipped(tmp_path: Path) -> None:
    (tmp_path / "changes.toml").write_text(FULL.to_toml(), "utf-8-sig")
    assert Changes.load(tmp_path / "changes.toml") == FULL
    SCHEMA.save(tmp_path / "schema.json")
    (tmp_path / "schema.json").write_text((tmp_path / "schema.json").read_text(), "utf-8-sig")
    assert ModelSchema.load(tmp_path / "schema.json") == SCHEMA


def test_changes_are_loaded_from_a_path() -> None:
    for path in (None, 3):
        with pytest.raises(ChangesError, match=f"path must be a str or a Path, got {path}"):
            Changes.load(path)  # type: ignore[arg-type]


def test_paths_of_id_maps_are_relative_to_the_file(tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text("old,new\n4,1\n2,0\n")
    changes = Changes.load(written(tmp_path, '[rows]\nt = { rows = 3, ids = "ids.csv" }\n'))
    assert changes.rows["t"].ids == IdMap([2, 4], [0, 1])
    (tmp_path / "below").mkdir()
    assert Changes.load(written(tmp_path / "below", changes.to_toml())) == changes


def test_id_maps_are_read_in_each_form(tmp_path: Path) -> None:
    wanted = IdMap([5, 0, 9], [1, 2, 0])
    (tmp_path / "names.csv").write_text("old,new\r\n5,1\r\n0,2\r\n9,0\r\n")
    (tmp_path / "plain.csv").write_text("5, 1\n0, 2\n9, 0")
    (tmp_path / "marked.csv").write_text("old id, new id\n5,1\n\n0,2\n9,0\n", "utf-8-sig")
    (tmp_path / "marked_plain.csv").write_text("5,1\n0,2\n9,0\n", "utf-8-sig")
    np.save(tmp_path / "pairs.npy", np.array([[5, 1], [0, 2], [9, 0]], np.uint32))
    wanted.save(tmp_path / "saved.npz")
    for name in ("names.csv", "plain.csv", "marked.csv", "marked_plain.csv", "pairs.npy", "saved.npz"):
        found = IdMap.load(tmp_path / name)
        assert found == wanted, name
        assert found.digest == wanted.digest
        assert found.old_ids.dtype == np.int64
    with pytest.raises(ChangesError, match=r"cannot be written: No such file.*\n?.*path=.*nowhere"):
        wanted.save(tmp_path / "nowhere" / "saved.npz")
    with pytest.raises(ChangesError, match=r"name a file that ends in \.npz"):
        wanted.save(tmp_path / "saved.csv")


@pytest.mark.parametrize(
    "first",
    [
        *(
            "x1,2",
            "n/a,2",
            "NaN,2",
            "nan,NAN",
            "na,inf",
            "None,null",
            ".5,2",
            ";1,2",
            '"1","2"',
            "O,1",
            "1,old",
            "1o,l2",
        ),
        *("old", "old;new", "old,new,weight", "old,", "# old,new", "'1','2'", "-,2", " x,2", "old-id,new-id"),
    ],
)
def test_a_first_line_that_may_have_been_a_pair_is_not_taken_for_names(first: str, tmp_path: Path) -> None:
    (tmp_path / "ids.csv").write_text(f"{first}\n3,4\n")
    with pytest.raises(ChangesError) as refused:
        IdMap.load(tmp_path / "ids.csv")
    assert f"line 1 is {first.strip()!r}, not two ids" in refused.value.message


def test_a_line_that_is_no_pair_is_named_by_its_number(tmp_path: Path) -> None:
    for line in ("3", "3,4,5", "three,4", "3.0,4", f"{2**63},4", "old,new"):
        (tmp_path / "ids.csv").write_text(f"old,new\n\n1,2\n{line}\n")
        with pytest.raises(ChangesError, match=r"line 4 is .*, not two ids"):
            IdMap.load(tmp_path / "ids.csv")


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.csv", b"1.5,2\n"),
        ("a.csv", b"1,2,3\n"),
        ("a.csv", b"1\n"),
        ("a.csv", b"1,2\n3\n"),
        ("a.csv", b"old,new\none,two\n"),
        ("a.csv", b"99999999999999999999,1\n"),
        ("a.csv", b"\xff\xfe"),
        ("a.csv", b"-1,2\n"),
        ("a.csv", b"1,2\n1,3\n"),
        ("a.csv", b"1,3\n2,3\n"),
        ("a.npy", b""),
        ("a.npy", b"garbage"),
        ("a.npz", b"PK\x03\x04 garbage"),
        ("a.txt", b"1,2\n"),
    ],
)
def test_a_file_that_is_no_id_map_is_refused(name: str, data: bytes, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises(ChangesError) as refused:
        IdMap.load(tmp_path / name)
    assert str(refused.value.where["path"]) == str(tmp_path / name)
    assert refused.value.hint


@pytest.mark.parametrize(
    "array", [np.zeros((3, 3), np.int64), np.zeros((2, 2)), np.array([[2**63, 1]], np.uint64), np.array([["a", "b"]])]
)
def test_an_array_that_is_no_id_map_is_refused(array: Any, tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", array)
    with pytest.raises(ChangesError):
        IdMap.load(tmp_path / "a.npy")


def test_a_file_of_another_form_than_its_name_says_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "a.npz").open("wb") as file:
        np.save(file, np.array([[1, 2]]))
    IdMap([1], [2]).save(tmp_path / "b.npz")
    (tmp_path / "b.npz").rename(tmp_path / "b.npy")
    np.savez(tmp_path / "c.npz", old=[1], new=[2])
    for name in ("a.npz", "b.npy", "c.npz"):
        with pytest.raises(ChangesError, match="the id map cannot be read"):
            IdMap.load(tmp_path / name)


def test_objects_in_an_array_are_not_unpickled(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([[print, 1]], object), allow_pickle=True)
    with pytest.raises(ChangesError, match="cannot be read"):
        IdMap.load(tmp_path / "a.npy")


@pytest.mark.parametrize(
    ("old", "new"), [([1, 2], [1]), ([1.0], [1]), ([[1]], [[1]]), ([True], [False]), (["1"], ["2"]), ([-1], [0])]
)
def test_arrays_that_are_no_id_map_are_refused(old: Any, new: Any) -> None:
    with pytest.raises(ChangesError):
        IdMap(old, new)


def test_a_row_map_says_where_rows_go_and_which_come() -> None:
    moved = RowMap.of(IdMap([7, 2, 4], [0, 5, 3]))
    assert moved.new_of([2, 3, 4, 7, -1, 99]).tolist() == [5, -1, 3, 0, -1, -1]
    assert [each.tolist() for each in moved.within(3, 6)] == [[2, 4], [5, 3]]
    same = RowMap(3)
    assert same.new_of([0, 2, 3, -1]).tolist() == [0, 2, -1, -1]
    assert [each.tolist() for each in same.within(1, 9)] == [[1, 2]] * 2
    assert [each.tolist() for each in same.within(5, 9)] == [[]] * 2
    assert RowMap.of(IdMap([1, 2], [1, 2])).is_identity is False
    assert RowMap.of(IdMap([1, 0], [1, 0])).is_identity is True


SCHEMA = ModelSchema(
    (
        TableSpec("b", 5, 4, "float32", "exact_sgd", (), 7),
        TableSpec("a", 3, 2, "float16", "adam", (StateSpec("exp_avg", "float32", per_row=False),)),
    ),
    (DenseEntry("over.0", (3, 4), "bfloat16"), DenseEntry("scale", (), "float32")),
    (DenseOptimizer("optimizer0", "Adam", (("over.0",), ("scale",), ())),),
    ("loader", "per_rank.meter"),
)


def test_a_schema_comes_back(tmp_path: Path) -> None:
    SCHEMA.save(tmp_path / "schema.json")
    found = ModelSchema.load(tmp_path / "schema.json")
    assert found == SCHEMA
    assert [table.id for table in found.tables] == [7, None]


def _edited(change: Any) -> str:
    data = json.loads(json.dumps({"format": 1, **_record()}))
    change(data)
    return json.dumps(data)


def _record() -> dict[str, Any]:
    return asdict(SCHEMA)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "\u00e9",
        _edited(lambda data: data.update(format=2)),
        _edited(lambda data: data.update(more=1)),
        _edited(lambda data: data.pop("dense")),
        _edited(lambda data: data["tables"][0].update(rows=-1)),
        _edited(lambda data: data["tables"][0].update(rows=True)),
        _edited(lambda data: data["tables"][0].update(dtype="float3")),
        _edited(lambda data: data["tables"][0].update(name="")),
        _edited(lambda data: data["tables"][0].update(name="a")),
        _edited(lambda data: data["tables"][0].update(id="x")),
        _edited(lambda data: data["tables"][1]["states"][0].update(per_row=1)),
        _edited(lambda data: data["tables"][1]["states"][0].update(dtype="x")),
        _edited(lambda data: data["dense"][0].update(shape=[1.5])),
        _edited(lambda data: data["dense"][1].update(name="over.0")),
        _edited(lambda data: data["optimizers"][0].update(groups=[[3]])),
        _edited(lambda data: data.update(stateful=["x", "x"])),
        _edited(lambda data: data.update(tables=None)),
        "[" * 100_000,
    ],
)
def test_what_is_no_schema_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "schema.json").write_text(text, "utf-8")
    with pytest.raises(ConfigError, match="not a schema") as refused:
        ModelSchema.load(tmp_path / "schema.json")
    assert refused.value.hint


def test_a_schema_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        ModelSchema.load(tmp_path / "schema.json")
    with pytest.raises(ConfigError, match="cannot be written"):
        SCHEMA.save(tmp_path / "nowhere" / "schema.json")


# What a refusal prints can be pasted: it declares all that differs, in Python and as TOML.


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


# What a report says of tables, dense parameters, optimizers and objects.


def test_each_part_that_differs_has_a_line() -> None:
    changes = pasted(refusal(SAVED, HERE))
    report = EvolutionReport.of(evolve(SAVED, HERE, changes))
    lines = list(report.lines())
    for line in (
        "table sparse.ebc.t_b: rows 100 -> 70; exact",
        "table sparse.ebc.t_c: columns 4 -> 8, float32 -> float16; by rule",
        "table sparse.ebc.t_a: dropped; dropped",
        "dense over.0.weight: fresh; fresh",
        "dense top.weight: fresh; fresh",
        "dense over.1.weight: dropped; dropped",
        "optimizer optimizer0: Adam -> SGD; fresh",
        "stateful schedule: fresh; fresh",
        "stateful loader: dropped; dropped",
    ):
        assert line in lines, line
    assert lines[-1].startswith("kept ")
    kept, fresh, dropped = report.total_bytes
    # b: 70 rows of 16 + 4; c: 4 columns of 2 bytes and the state; d: weights. Fresh: the rest and the new table.
    assert kept == 70 * 20 + 100 * (4 * 2 + 4) + 100 * 16
    assert fresh == 100 * 4 * 2 + 100 * 20 + (4 * 3 + 1) * 4
    assert dropped == 100 * 20 + 30 * 20 + 100 * 4 + 2 * 8 * 4 - 8 * 4
    assert report.swept_bytes == 70 * 20 + 100 * (8 * 2 + 4) + 100 * 16 + 100 * 20
    record = json.loads(json.dumps(report.record))
    assert record["digest"] == changes.digest
    assert record["dense_compared"] is True
    assert len(record["parts"]) == len(report.parts)


def test_a_model_as_it_was_has_a_line_of_totals_alone() -> None:
    report = EvolutionReport.of(evolve(SAVED, SAVED))
    (line,) = report.lines()
    assert line == "kept 8.1 kB, fresh 0 B, dropped 0 B; sent whole 0 B"
    assert {part.label for part in report.parts} == {"exact"}


def test_the_rows_of_an_id_map_are_counted_once_each_and_none_is_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    """``np.unique`` hashes each row: twice in a report, which cost a restore more than to write the rows."""
    turned = IdMap(np.arange(100), np.arange(100)[::-1])
    model = evolve(SAVED, SAVED, Changes(rows={A.name: RowChange(100, turned)}))
    hashed: list[int] = []
    monkeypatch.setattr(np, "unique", lambda rows, **_: hashed.append(len(rows)))
    (part,) = (each for each in EvolutionReport.of(model).parts if each.name == A.name)
    assert part.rows == (100, 0, 0)
    assert RowMap(4, np.array([0, 3, 3, 9]), np.array([5, 1, 0, 2])).sources == 3, "a row may go to several places"
    assert RowMap(0, np.zeros(0, np.int64), np.zeros(0, np.int64)).sources == 0
    assert hashed == []
