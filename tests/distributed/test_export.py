"""What an export writes is the marker: read back by plain DCP, by safetensors and by pyarrow, on other plans."""

from __future__ import annotations

import json
import shutil
import tracemalloc
import warnings
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import nn

from tests import jobs, ranks, stores, warm
from tests.command import call, run
from tests.model import PLAN_1, PLAN_2, PLAN_3, Spec, Trainer, differences, trainer, truth
from tests.parts import fold
from tests.tables import FIRST, write_tables
from torchrec_stream_ckpt import StreamCheckpointer, StreamConfig
from torchrec_stream_ckpt.extras.interchange.dcp import Keys, write_dcp
from torchrec_stream_ckpt.extras.interchange.dense_state import DenseTensors
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import TableReader, open_rows, open_store
from torchrec_stream_ckpt.read import rows as rows_module
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableSpec

pytestmark = pytest.mark.distributed

STEPS = 6  # markers 1:1 and 1:2 at steps 3 and 6, and one more by mark()


@pytest.fixture(scope="module", params=["rowwise", "adagrad"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, list[Any]]:
    """A finished job of two ranks: its optimizer, its log, and per rank the losses and the truth at each step."""
    directory = tmp_path_factory.mktemp(request.param)
    settings = StreamConfig(uri=f"file://{directory}", marker_every=3)
    build = {"optimizer": request.param}
    return request.param, directory, warm.run(2, jobs.train_with, PLAN_2, settings, STEPS, build)


def load_plainly(spec: Spec, folder: str, build: dict[str, Any], keys: tuple[str, str]) -> dict[str, torch.Tensor]:
    """Another job that knows nothing of this project: all that its state dicts hold, loaded in place."""
    job = trainer(spec, **build)
    job.step()  # a live, different state, and state of the dense optimizer to load into
    model, optimizer = job.dmp.state_dict(), job.optimizer.state_dict()
    if keys == ("", ""):
        dcp.load(model, checkpoint_id=folder)
        dcp.load(optimizer, checkpoint_id=folder)
    else:
        dcp.load({keys[0]: model, keys[1]: optimizer}, checkpoint_id=folder)
    job.dmp.load_state_dict(model)
    job.optimizer.load_state_dict(optimizer)
    return truth(job)


@pytest.mark.parametrize(
    ("source", "spec", "keys"),
    [("rowwise", PLAN_3, ("model", "optim")), ("adagrad", PLAN_1, ("", ""))],
    indirect=["source"],
)
def test_plain_dcp_loads_an_export_on_another_plan(
    source: tuple[str, Path, list[Any]], spec: Spec, keys: tuple[str, str], tmp_path: Path
) -> None:
    optimizer, directory, trained = source
    target = tmp_path / "dcp"
    options = [f"--model-key={keys[0]}", f"--optimizer-key={keys[1]}"]
    run("export", f"file://{directory}", "--marker", "1:1", "--to", f"dcp://{target}", *options)
    world = 1 if spec is PLAN_1 else 3
    for state in warm.run(world, load_plainly, spec, str(target), {"optimizer": optimizer}, keys):
        expected = {**trained[0][1][3], "step": state["step"]}
        assert differences(expected, state, rng=False) == []


def test_dcp_is_written_window_by_window(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = 150_000
    half = StateSpec("sum", "bfloat16", False)
    schema = Schema((TableSpec("m.ebc.t", rows, 64, "float32", "adagrad", (half,)),))
    weights = np.arange(rows * 64, dtype=np.float32).reshape(rows, 64)
    bits = (weights.astype(np.int64) % 2**16).astype(np.uint16)
    log, lineage = write_tables(tmp_path / "log", schema, [(weights, (bits,))], [[0, 32]])
    monkeypatch.setattr(rows_module, "WINDOW_BYTES", 2**20)
    monkeypatch.setattr(fold, "SEGMENT_BYTES", 2 * 2**20)
    (tmp_path / "out").mkdir()
    with open_rows(log, lineage, FIRST, open_store(str(tmp_path / "log")), tmp_path) as opened:
        tracemalloc.start()
        write_dcp(tmp_path / "out", [TableReader(opened, 0)], DenseTensors({}, {}), states=True, keys=Keys("net"))
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 16 * 2**20 < weights.nbytes // 2
    name = "m.ebc.embeddings.t.weight"
    state = f"state.{name.replace('embeddings', 'embedding_bags')}.t.momentum1"
    found = {f"net.{name}": torch.empty(rows, 64), state: torch.empty(rows, 64, dtype=torch.bfloat16)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=str(tmp_path / "out"), no_dist=True)
    np.testing.assert_array_equal(found[f"net.{name}"].numpy(), weights)
    np.testing.assert_array_equal(found[state].view(torch.uint16).numpy(), bits)


@pytest.mark.parametrize("held", ["log", "store", "both"])
def test_tables_are_read_from_the_log_the_store_and_both(
    source: tuple[str, Path, list[Any]], held: str, tmp_path: Path
) -> None:
    optimizer, directory, trained = source
    copy = shutil.copytree(directory, tmp_path / "log")
    if held != "log":
        stores.fold(copy, upto=MarkerId(1, 1) if held == "both" else None)
    if held == "store":
        stores.lose_rows(copy)
    target = tmp_path / "out"
    found = json.loads(
        run("export", f"file://{copy}", "--to", f"safetensors://{target}", "--max-shard-size", "20KB", "--json")
    )
    assert found["marker"] == "1:3"
    assert sorted(path.name for path in target.iterdir()) == sorted(found["files"])
    assert not list(tmp_path.glob(".*"))
    index = json.loads((target / "model.safetensors.index.json").read_text())
    loaded = {}
    for name, file in index["weight_map"].items():
        with safe_open(target / file, "pt") as tensors:
            loaded[name] = tensors.get_tensor(name)
    assert len(set(index["weight_map"].values())) > 1
    expected = logical(trained[0][1][STEPS], optimizer)
    assert differences(expected, loaded) == []
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in expected.values())


def logical(state: dict[str, torch.Tensor], optimizer: str) -> dict[str, torch.Tensor]:
    """The truth by the names of a safetensors export."""
    tables = {}
    for name in ("t_user", "t_item", "t_wide", "t_small"):
        key = f"ebc.embedding_bags.{name}.weight"
        tables[f"ebc.{name}"] = state[f"model.{key}"]
        tables[f"ebc.{name}.sum"] = state[f"fused.{key}.{name}.momentum1"]
    if optimizer == "rowwise":
        both = tables.pop("ebc.t_wide.sum")
        tables["ebc.t_wide.sum.col0"], tables["ebc.t_wide.sum.col16"] = both[:150], both[150:]
    return tables


def test_parquet_has_ids_vectors_and_states(source: tuple[str, Path, list[Any]], tmp_path: Path) -> None:
    optimizer, directory, trained = source
    target = tmp_path / "parquet"
    more = ["--tables", "*wide", "--tables", "*small", "--states"]
    run("export", f"file://{directory}", "--marker", "1:2", "--to", f"parquet://{target}", *more)
    assert {path.name for path in target.iterdir()} == {"ebc.t_wide.parquet", "ebc.t_small.parquet"}
    expected = logical(trained[0][1][6], optimizer)
    wide = pyarrow.parquet.read_table(target / "ebc.t_wide.parquet")
    assert wide.schema.metadata[b"marker"] == b"1:2"
    assert wide["id"].to_pylist() == list(range(150))
    np.testing.assert_array_equal(np.stack(wide["vector"].to_numpy()), expected["ebc.t_wide"].numpy())
    for name in ["sum.col0", "sum.col16"] if optimizer == "rowwise" else ["sum"]:
        found = wide[name].to_numpy()
        found = np.stack(found) if optimizer != "rowwise" else found
        np.testing.assert_array_equal(found, expected[f"ebc.t_wide.{name}"].numpy())


@pytest.mark.parametrize("source", ["rowwise"], indirect=True)
def test_a_job_with_another_column_split_is_told_by_dcp(source: tuple[str, Path, list[Any]], tmp_path: Path) -> None:
    _, directory, _ = source
    target = tmp_path / "dcp"
    run("export", f"file://{directory}", "--to", f"dcp://{target}")
    whole = {**PLAN_1, "t_wide": ("tw", 0)}
    with warnings.catch_warnings(), pytest.raises(ranks.RankFailed, match="Size mismatch"):
        warm.run(1, load_plainly, whole, str(target), {"optimizer": "rowwise"}, ("", ""))


# Exports of a marker whose modules and optimizers keep more than tensors.


ARRAYS = {
    "counts": np.arange(6, dtype=np.int32).reshape(2, 3),
    "swapped": np.arange(3, dtype=np.dtype("i4").newbyteorder("S")),
    "columns": np.asfortranarray(np.ones((2, 2), np.float32)),
    "flags": np.array([True, False]),
    "names": np.array(["a", "bc"]),
    "mean": np.float64(0.25),
    "seen": np.int64(7),
}


class Extra(nn.Linear):
    """Has a state beside its parameters."""

    extra: Any = None

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def _job(extra: Any) -> Trainer:
    job = trainer(PLAN_1)
    layer = next(each for each in job.dmp.modules() if type(each) is nn.Linear)
    layer.__class__, layer.extra = Extra, extra
    return job


def _train(uri: str, extra: Any) -> None:
    job = _job(extra)
    with StreamCheckpointer(job.dmp, job.optimizer, config=StreamConfig(uri=uri, marker_every=None)) as checkpointer:
        job.step()
        first = next(iter(job.dense.state.values()))
        first["history"] = ARRAYS["counts"]
        checkpointer.step()
        checkpointer.mark().result(60)


def _load(folder: str) -> tuple[Any, Any]:
    """What plain DCP makes of an export: the extra state, and what the dense optimizer keeps beside tensors."""
    job = _job(dict.fromkeys(ARRAYS, 0))
    job.step()
    next(iter(job.dense.state.values()))["history"] = np.zeros(1)
    model, optimizer = job.dmp.state_dict(), job.optimizer.state_dict()
    dcp.load({"model": model, "optim": optimizer}, checkpoint_id=folder)
    (extra,) = (value for name, value in model.items() if name.endswith("_extra_state"))
    (kept,) = (each["history"] for each in optimizer["state"].values() if "history" in each)
    return extra, kept


def _equal(one: Any, other: Any) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(np.all(one == other))


def test_arrays_of_modules_and_optimizers_are_exported(tmp_path: Path) -> None:
    uri, target = f"file://{tmp_path / 'log'}", tmp_path / "out"
    warm.run(1, _train, uri, ARRAYS)
    run("export", uri, "--to", f"dcp://{target}", "--model-key=model", "--optimizer-key=optim")
    ((extra, kept),) = warm.run(1, _load, str(target))
    assert extra.keys() == ARRAYS.keys()
    native = {**ARRAYS, "swapped": np.arange(3, dtype=np.int32)}  # as pickles of NumPy give it back, which DCP writes
    assert [name for name in native if not _equal(extra[name], native[name])] == []
    assert _equal(kept, ARRAYS["counts"])


def test_extra_state_that_runs_code_is_refused_by_the_name_of_its_class(tmp_path: Path) -> None:
    uri = f"file://{tmp_path / 'log'}"
    warm.run(1, _train, uri, {"last": deque([torch.ones(2)], 2)})
    done = call("export", uri, "--to", f"dcp://{tmp_path / 'out'}")
    assert done.exit_code != 0
    said = str(done.exception) + done.output
    assert "the extra state of a module holds objects that run code when unpickled: collections.deque" in said
    assert "Try: return only numbers" in said
    assert not list((tmp_path / "out").glob("*")), "something was written"
