"""Logical tables from a log without a model, and what is written of them."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from safetensors import safe_open

from tests import stores
from tests.builders import ROWWISE, table
from tests.command import ask, run
from tests.parts import fold
from tests.tables import FIRST, Tables, write_tables
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, StreamCkptError
from torchrec_stream_ckpt.extras.interchange.names import TorchRecName
from torchrec_stream_ckpt.extras.interchange.target import new_folder, parse_target
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import TableReader, open_rows, open_store
from torchrec_stream_ckpt.read import rows as rows_module
from torchrec_stream_ckpt.util.types import StateSpec
from torchrec_stream_ckpt.util.units import parse_size

MOMENT = StateSpec("exp_avg", "float32", False)
SCHEMA = Schema(
    (
        table("m.t_half", 50, 6, "bfloat16"),
        table("m.t_moment", 9, 4, "float32", MOMENT),
        table("m.t_row", 300, 8, "float32", ROWWISE),
    )
)


def values(seed: int = 0) -> Tables:
    rng = np.random.default_rng(seed)
    half = rng.integers(0, 2**16, (50, 6), np.uint16)  # any bits, NaNs too
    moment = rng.random((9, 4), np.float32)
    return [
        (half, ()),
        (moment, (moment * 2,)),
        (rng.random((300, 8), np.float32), (rng.random(300, np.float32),)),
    ]


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("window_bytes", [1, 1000, 2**20])
def test_windows_hold_the_rows_that_were_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, window_bytes: int, folded: bool
) -> None:
    monkeypatch.setattr(rows_module, "WINDOW_BYTES", window_bytes)
    log, lineage = write_tables(tmp_path, SCHEMA, values(), [[0], [0, 3], [0, 2]])
    if folded:
        stores.fold(tmp_path)
        stores.lose_rows(tmp_path)
    with open_rows(log, lineage, FIRST, open_store(str(tmp_path)), tmp_path) as rows:
        for index, (weights, states) in enumerate(values()):
            reader = TableReader(rows, index)
            assert reader.slices == (((0, 2), (2, 6)) if index == 2 else ())
            windows = [reader.read(row0, rows) for row0, rows in reader.windows()]
            np.testing.assert_array_equal(np.concatenate([window.weights for window in windows]), weights)
            for position, state in enumerate(states):
                found = np.concatenate([window.states[position] for window in windows], axis=int(state.ndim == 1))
                np.testing.assert_array_equal(found, np.stack([state, state]) if state.ndim == 1 else state)
            assert all(window.weights.nbytes <= max(window_bytes, reader.row_bytes) for window in windows)
    assert not list(tmp_path.glob(".stream-ckpt-*"))


def test_what_is_read_is_bounded_whatever_the_size_of_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = 120_000
    schema = Schema((table("m.t", rows, 64, "float32", ROWWISE),))
    weights = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64)
    write_tables(tmp_path / "log", schema, [(weights, (weights[:, 0],))])
    monkeypatch.setattr(rows_module, "WINDOW_BYTES", 2**19)
    monkeypatch.setattr(fold, "SEGMENT_BYTES", 2**20)
    for target in ("safetensors", "parquet"):
        tracemalloc.start()
        run("export", f"file://{tmp_path}/log", "--to", f"{target}://{tmp_path}/{target}")
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert peak < 14 * 2**20 < weights.nbytes // 2
    with safe_open(tmp_path / "safetensors" / "model-00001-of-00001.safetensors", "np") as file:
        np.testing.assert_array_equal(file.get_tensor("m.t"), weights)
    parquet = pyarrow.parquet.ParquetFile(tmp_path / "parquet" / "m.t.parquet")
    assert parquet.metadata.num_row_groups > 40


def test_half_precision_becomes_float32_in_parquet_with_the_same_values(tmp_path: Path) -> None:
    write_tables(tmp_path / "log", SCHEMA, values())
    run("export", f"file://{tmp_path}/log", "--to", f"parquet://{tmp_path}/out", "--tables", "m.t_half")
    found = pyarrow.parquet.read_table(tmp_path / "out" / "m.t_half.parquet")
    assert found.schema.field("vector").type == pyarrow.list_(pyarrow.float32(), 6)
    assert found.schema.metadata[b"dtype"] == b"bfloat16"
    bits = np.stack(found["vector"].to_numpy()).view(np.uint32)
    np.testing.assert_array_equal(bits, values()[0][0].astype(np.uint32) << 16)


def test_a_table_without_rows_is_a_file_without_rows(tmp_path: Path) -> None:
    schema = Schema((table("m.none", 0, 4, "float32", ROWWISE, MOMENT), table("m.t", 9, 4)))
    none, some = np.empty((0, 4), np.float32), np.ones((9, 4), np.float32)
    write_tables(tmp_path / "log", schema, [(none, (none[:, 0], none)), (some, ())])
    out = ask("export", f"file://{tmp_path}/log", "--to", f"parquet://{tmp_path}/out", "--states")
    assert [name for name in out["files"] if not (tmp_path / "out" / name).is_file()] == []
    found = pyarrow.parquet.read_table(tmp_path / "out" / "m.none.parquet")
    assert (found.num_rows, found.schema.field("vector").type) == (0, pyarrow.list_(pyarrow.float32(), 4))
    assert found.column_names == ["id", "vector", "momentum1", "exp_avg"]
    assert pyarrow.parquet.read_table(tmp_path / "out" / "m.t.parquet").num_rows == 9
    run("export", f"file://{tmp_path}/log", "--to", f"safetensors://{tmp_path}/tensors", "--states")
    with safe_open(tmp_path / "tensors" / "model-00001-of-00001.safetensors", "np") as file:
        assert file.get_tensor("m.none").shape == (0, 4)


def test_a_folder_that_holds_something_is_replaced_only_by_force(tmp_path: Path) -> None:
    write_tables(tmp_path / "log", SCHEMA, values())
    arguments = ["export", f"file://{tmp_path}/log", "--to", f"safetensors://{tmp_path}/out"]
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("dear to me")
    with pytest.raises(ConfigError, match="not empty"):
        run(*arguments)
    assert (tmp_path / "out" / "mine").read_text() == "dear to me"
    run(*arguments, "--force")
    assert not (tmp_path / "out" / "mine").exists()
    assert {path.name for path in tmp_path.iterdir()} == {"log", "out"}


@pytest.mark.parametrize("target", ["job/log", "job/log/data", "job", "job/log/dense/mine"])
def test_an_export_replaces_no_log_and_no_store(tmp_path: Path, target: str) -> None:
    write_tables(tmp_path / "job" / "log", SCHEMA, values())
    (tmp_path / "job" / "log" / "dense" / "mine").mkdir(parents=True)
    (tmp_path / "job" / "log" / "dense" / "mine" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ConfigError, match="cannot replace a log or a store"):
        run("export", f"file://{tmp_path}/job/log", "--to", f"safetensors://{tmp_path}/{target}", "--force")
    assert sorted(tmp_path.rglob("*")) == before


def test_an_export_does_not_replace_the_store_of_another_job(tmp_path: Path) -> None:
    write_tables(tmp_path / "log", SCHEMA, values())
    run("materialize", f"file://{tmp_path}/log", "--once", "--store", f"file://{tmp_path}/store")
    with pytest.raises(ConfigError, match=r"cannot replace a log or a store.*[\s\S]*store/STORE"):
        run("export", f"file://{tmp_path}/log", "--to", f"safetensors://{tmp_path}/store", "--force")
    assert (tmp_path / "store" / "manifests").is_dir()


@pytest.mark.parametrize("target", ["safetensors", "parquet"])
def test_nothing_stays_of_an_export_that_fails(tmp_path: Path, target: str) -> None:
    write_tables(tmp_path / "log", SCHEMA, values())
    (segment,) = (tmp_path / "log").glob("data/*/*.seg")
    data = bytearray(segment.read_bytes())
    data[-1000] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptionError):
        run("export", f"file://{tmp_path}/log", "--to", f"{target}://{tmp_path}/out")
    assert {path.name for path in tmp_path.iterdir()} == {"log"}


def test_a_folder_is_not_there_before_its_last_byte(tmp_path: Path) -> None:
    def write_half() -> None:
        with new_folder(tmp_path / "out", force=False) as folder:
            (folder / "half").write_text("x")
            assert not (tmp_path / "out").exists()
            raise KeyError

    with pytest.raises(KeyError):
        write_half()
    assert list(tmp_path.iterdir()) == []


def test_a_row_that_was_never_sent_is_an_error(tmp_path: Path) -> None:
    weights, states = values()[2]
    short = [*values()[:2], (weights[:200], (states[0][:200],))]
    log, lineage = write_tables(tmp_path, SCHEMA, short)
    with open_rows(log, lineage, FIRST, open_store(str(tmp_path)), tmp_path) as rows:
        reader = TableReader(rows, 2)
        assert reader.read(0, 200).rows == 200
        with pytest.raises(CorruptionError, match="100 rows were never sent"):
            reader.read(0, 300)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--to", "zip:///tmp/x"], "does not name a known format"),
        (["--to", f"dcp:///tmp/{'x' * 300}"], "cannot be read: File name too long"),
        (["--to", f"dcp:///tmp/{'x' * 300}/y", "--force"], "cannot be read: File name too long"),
        (["--to", "dcp://"], "does not name a known format"),
        (["--to", "parquet:///tmp/x", "--tables", "nothing*"], "no table matches"),
        (["--to", "safetensors:///tmp/x", "--max-shard-size", "5 apples"], "not a size"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, arguments: list[str], said: str) -> None:
    write_tables(tmp_path / "log", SCHEMA, values())
    with pytest.raises(ConfigError, match=said):
        run("export", f"file://{tmp_path}/log", *arguments)


def test_sizes_are_read() -> None:
    assert [parse_size(text) for text in ("5GB", "800 mb", "3k", "17")] == [5 * 10**9, 8 * 10**8, 3000, 17]
    assert parse_target("dcp:///a/b").folder == Path("/a/b")


def test_names_of_torchrec_go_both_ways() -> None:
    for path, key in (("m.ebc", "m.ebc.embedding_bags.t.weight"), ("", "embeddings.t.weight")):
        name = TorchRecName.parse(key)
        assert name == TorchRecName(path, "t")
        assert key in name.keys
        assert TorchRecName.of(table(name.spec_name)) == name
    assert TorchRecName.parse("over.weight") is None


def test_a_missing_library_is_named(tmp_path: Path) -> None:
    write_tables(tmp_path / "log", SCHEMA, values())
    for library, target, said in (("torch", "dcp", "needs torch"), ("pyarrow", "parquet", "needs pyarrow")):
        program = f"""
import sys
sys.modules[{library!r}] = None
from torchrec_stream_ckpt.cli.main import main
sys.argv = ["stream-ckpt", "export", "file://{tmp_path}/log", "--to", "{target}://{tmp_path}/out"]
main()
"""
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 1
        assert said in done.stderr
        assert "Try: " in done.stderr
        assert not (tmp_path / "out").exists()


def test_sent_needs_an_ancestor(tmp_path: Path) -> None:
    write_tables(tmp_path, SCHEMA, values())
    found = ask("diff", f"file://{tmp_path}", "1:1", "1:1", "--sent")
    assert set(found["sent"].values()) == {0}
    with pytest.raises(StreamCkptError):
        run("diff", f"file://{tmp_path}", "1:1", "2:7", "--sent")


@pytest.mark.parametrize(
    ("names", "target", "said"),
    [
        (["n" * 300], "parquet", "the table name is too long for a file"),
        (["__metadata__"], "safetensors", "cannot hold a tensor named __metadata__"),
        (["a", "a.exp_avg"], "safetensors", "two tensors would have the name a.exp_avg"),
    ],
)
def test_a_name_that_the_format_cannot_hold_is_refused_before_anything_is_written(
    tmp_path: Path, names: list[str], target: str, said: str
) -> None:
    schema = Schema(tuple(table(name, 4, 2, "float32", MOMENT) for name in names))
    ones = np.ones((4, 2), np.float32)
    write_tables(tmp_path / "log", schema, [(ones, (ones,)) for _ in names])
    with pytest.raises(ConfigError, match=said) as told:
        run("export", f"file://{tmp_path}/log", "--to", f"{target}://{tmp_path}/out", "--states")
    assert told.value.hint
    assert {path.name for path in tmp_path.iterdir()} == {"log"}
