"""Files of declared changes, id maps and schemas: read as they were written, refused by name where they are wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from torchrec_stream_ckpt import Changes, DenseChanges, IdMap, ModelSchema, RowChange
from torchrec_stream_ckpt.errors import ChangesError, ConfigError
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer
from torchrec_stream_ckpt.evolve.row_maps import RowMap
from torchrec_stream_ckpt.evolve.text import nearest
from torchrec_stream_ckpt.inner import DenseEntry
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
