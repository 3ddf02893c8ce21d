"""Files of ``torch.save`` that cannot be imported: each is named, nothing of it is run, and nothing is written."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.command import ask
from tests.padded import file_limit
from torchrec_stream_ckpt import Changes, ModelSchema, open_marker
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    SchemaMismatchError,
    StoreUnavailableError,
    StreamCkptError,
)
from torchrec_stream_ckpt.evolve.model_schema import DenseOptimizer
from torchrec_stream_ckpt.inner import DenseEntry
from torchrec_stream_ckpt.save import import_writer
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

WEIGHT, HEAD = "ebc.embedding_bags.t_user.weight", "head.weight"
ROWWISE = ("--optimizer=exact_rowwise_adagrad", "--model-key=model", "--optimizer-key=optim")
SUM = StateSpec("sum", "float32", True)


def state(**more: Any) -> dict[str, Any]:
    """A small job's."""
    model = {WEIGHT: torch.arange(24.0).reshape(6, 4), HEAD: torch.ones(1, 4)}
    fused = {WEIGHT: {"t_user.momentum1": torch.arange(6.0)}}
    dense = {HEAD: {"step": torch.tensor(3.0), "exp_avg": torch.ones(1, 4), "exp_avg_sq": torch.ones(1, 4)}}
    return {"model": model, "optim": {"state": fused | dense, "param_groups": [{"lr": 0.1}]}, "epoch": 2, **more}


def imported(folder: Path, *arguments: str, source: Path | None = None) -> Any:
    source = source if source is not None else folder / "model.pt"
    return ask("import", f"--from=torch://{source}", f"--to=file://{folder}/log", *arguments)


def save(folder: Path, value: Any, **how: Any) -> Path:
    torch.save(value, folder / "model.pt", **how)
    return folder / "model.pt"


def test_what_is_there_is_taken_and_the_rest_is_named(tmp_path: Path) -> None:
    save(tmp_path, state())
    found = imported(tmp_path, *ROWWISE, "--step=7")
    assert (found["marker"], found["step"], found["tables"], found["rows"]) == ("1:1", 7, ["ebc.t_user"], 6)
    assert (found["dense"], found["dense_states"], found["without_states"]) == (1, 3, [])
    assert found["not_taken"] == ["epoch", "optim.param_groups"]


def test_states_are_left_where_weights_alone_are_asked_for(tmp_path: Path) -> None:
    save(tmp_path, state())
    found = imported(tmp_path, "--optimizer=none", *ROWWISE[1:])
    assert found["without_states"] == ["ebc.t_user"]
    assert f"optim.state.{WEIGHT}.t_user.momentum1" in found["not_taken"]


class Code:
    """Its pickle makes a file."""

    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.made),)


def spoil(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "cut":
        del data[-200:]
    elif how == "flipped":
        data[data.index(torch.arange(24.0).numpy().tobytes()) + 9] ^= 1
    elif how == "text":
        data = bytearray(b"hello")
    elif how == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("model/word.xml", "hello")
        return
    path.write_bytes(data)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("cut", "truncated: it is a zip archive without its end"),
        ("flipped", r"the record model/data/\d does not match its checksum"),
        ("text", "the file was not written by torch.save"),
        ("zip", "the file was not written by torch.save"),
    ],
)
def test_bytes_that_are_not_as_they_were_saved_are_refused(tmp_path: Path, how: str, said: str) -> None:
    spoil(save(tmp_path, state()), how)
    with pytest.raises(StreamCkptError, match=said):
        imported(tmp_path, *ROWWISE)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_nothing_that_is_pickled_is_run(tmp_path: Path) -> None:
    for how in ({}, {"_use_new_zipfile_serialization": False}):
        save(tmp_path, state(config=Code(tmp_path / "made")), **how)
        with pytest.raises(StreamCkptError, match=r"(posix|nt)\.mkdir; none of them was run" if not how else "pickle"):
            imported(tmp_path, *ROWWISE)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def named(name: str, value: Any) -> dict[str, Any]:
    found = state()
    (found["model"] if name in found["model"] else found["optim"]["state"][WEIGHT])[name] = value
    return found


@pytest.mark.parametrize(
    ("value", "arguments", "said"),
    [
        (torch.ones(3), ROWWISE, "holds a Tensor, not a dictionary"),
        ({"epoch": 3}, ROWWISE, "no sharded table"),
        (state(), ROWWISE[:1], "is below the key 'model'"),
        (state(), (*ROWWISE[:2], "--optimizer-key=opt"), "--optimizer none"),
        (
            state(),
            ("--optimizer=adam", *ROWWISE[1:]),
            "adam keeps exp_avg, exp_avg_sq, but the checkpoint has momentum1",
        ),
        (state(), ("--optimizer=adma", *ROWWISE[1:]), "'adma' is not a supported fused optimizer"),
        (state(), (*ROWWISE, "--rename=modul.(.+)=x"), "no name matches the pattern"),
        (state(), (*ROWWISE, "--rename=(=x"), "missing"),
        (state(), (*ROWWISE, "--rename=x"), "must be PATTERN=NEW"),
        (state(), (*ROWWISE, "--rename=.*=x"), "both become x"),
        (state(), (*ROWWISE, "--changes=none.toml"), "requires the model that it describes"),
        (state(), (*ROWWISE, "--of-rank0=model.hed"), "the files have no such tensor"),
        (named(WEIGHT, torch.ones(24)), ROWWISE, "is not a matrix"),
        (named(WEIGHT, torch.ones(6, 4).to(torch.complex64)), ROWWISE, "has the dtype complex64"),
        (named(WEIGHT, torch.ones(6, 4).to_sparse()), ROWWISE, "cannot be imported: a Tensor"),
        (named("t_user.momentum1", torch.ones(5)), ROWWISE, r"has size \(5,\), but the table has \(6, 4\)"),
        (named("t_user.momentum1", 3), ROWWISE, "momentum1 is not a tensor"),
        (state(), (*ROWWISE, "--data-parallel=zz"), "--data-parallel zz: the checkpoint has no such table"),
        (state(), (*ROWWISE, f"--step={10**22}"), f"--step must be .* got {10**22}"),
        (state(), (*ROWWISE, f"--step={2**63}"), f"--step must be .* got {2**63}"),
        (state(), ("--optimizer=exact_sgd", *ROWWISE[1:]), "exact_sgd keeps nothing, but the checkpoint has momentum1"),
        (state(), ("--optimizer=exact_adagrad", *ROWWISE[1:]), "keeps sum for each weight, .* one per row"),
        (named("t_user.momentum1", torch.ones(6, 4)), ROWWISE, "keeps sum for each row, .* one per weight"),
    ],
)
def test_what_does_not_fit_is_named_before_a_byte_is_written(
    tmp_path: Path, value: Any, arguments: tuple[str, ...], said: str
) -> None:
    save(tmp_path, value)
    with pytest.raises(StreamCkptError, match=said):
        imported(tmp_path, *arguments)
    assert [path.name for path in tmp_path.iterdir()] == ["model.pt"]


def test_files_of_ranks_are_numbered_and_agree(tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    ranks.mkdir()
    with pytest.raises(ConfigError, match="one file for each rank from 0, found nothing"):
        imported(tmp_path, *ROWWISE, source=ranks)
    torch.save(state(), ranks / "rank0.pt")
    torch.save(state(), ranks / "rank2.pt")
    with pytest.raises(ConfigError, match=r"rank0.pt, rank2.pt"):
        imported(tmp_path, *ROWWISE, source=ranks)
    (ranks / "rank2.pt").unlink()
    other = state()
    other["model"][HEAD] = torch.full((1, 4), 2.0)
    torch.save(other, ranks / "rank1.pt")
    with pytest.raises(ConfigError, match=r"model.head.weight differs between rank1.pt"):
        imported(tmp_path, *ROWWISE, source=ranks)
    assert not (tmp_path / "log").exists()
    assert imported(tmp_path, *ROWWISE, "--of-rank0=model.head.weight", source=ranks)["marker"] == "1:1"
    other["model"][WEIGHT] = torch.zeros(6, 4)
    torch.save(other, ranks / "rank1.pt")
    with pytest.raises(ConfigError, match=r"t_user.weight differs between.*\n.*as ShardedTensors"):
        imported(tmp_path, *ROWWISE, "--of-rank0=model.head.weight", source=ranks)


def schema(folder: Path, *tables: TableSpec, kind: str = "Adam", head: str = HEAD) -> str:
    dense = (DenseEntry(head, (1, 4), "float32"),)
    ModelSchema(tables, dense, (DenseOptimizer("optimizer0", kind, ((head,),)),), ("loader",)).save(folder / "m.json")
    return f"--schema={folder}/m.json"


def test_all_differences_are_said_at_once_and_what_is_pasted_accepts_them(tmp_path: Path) -> None:
    save(tmp_path, state())
    user = TableSpec("ebc.t_user", 9, 4, "float32", "exact_rowwise_adagrad", (SUM,))
    city = TableSpec("ebc.t_city", 5, 4, "float32", "exact_rowwise_adagrad", (SUM,))
    given = schema(tmp_path, user, city, kind="Adagrad", head="top.weight")
    with pytest.raises(ConfigError, match="no sharded table with the state"):
        imported(tmp_path, *ROWWISE[:2], given)  # without the key of the optimizer all states would be left out
    with pytest.raises(SchemaMismatchError) as refused:
        imported(tmp_path, *ROWWISE, given)
    said = str(refused.value)
    assert not (tmp_path / "log").exists()
    for each in (
        "ebc.t_city': only this model",
        "9 rows here, 6",
        "top.weight': only this",
        "head.weight': only the m",
    ):
        assert each in said
    (tmp_path / "c.toml").write_text(said.split("in a TOML file:\n")[1].split("\n# ")[0])
    found = imported(tmp_path, *ROWWISE, given, f"--changes={tmp_path}/c.toml")
    assert any("rows 6 -> 9" in line for line in found["becomes"])
    assert Changes.load(tmp_path / "c.toml").added == ("ebc.t_city",)


def test_states_of_another_dense_optimizer_are_not_put_into_this_one(tmp_path: Path) -> None:
    save(tmp_path, state())
    given = schema(tmp_path, TableSpec("ebc.t_user", 6, 4, "float32", "exact_rowwise_adagrad", (SUM,)), kind="Adagrad")
    with pytest.raises(SchemaMismatchError, match="Adagrad here; the marker has exp_avg, exp_avg_sq, step for 'head"):
        imported(tmp_path, *ROWWISE, given)
    (tmp_path / "c.toml").write_text('[dense.optimizer]\noptimizer0 = "Adagrad"\n')
    found = imported(tmp_path, *ROWWISE, given, f"--changes={tmp_path}/c.toml")
    assert "dense head.weight: state is reset; value exact, state fresh" in found["becomes"]


def test_a_damaged_rank_file_is_a_corruption(tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    torch.save(state(), tmp_path / "ranks" / "rank0.pt")
    (tmp_path / "ranks" / "rank1.pt").write_bytes((tmp_path / "ranks" / "rank0.pt").read_bytes()[:300])
    with pytest.raises(CorruptionError, match=r"rank1\.pt"):
        imported(tmp_path, *ROWWISE, source=tmp_path / "ranks")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tensor_that_is_saved_as_the_negative_of_its_bits_has_its_values(tmp_path: Path, dtype: torch.dtype) -> None:
    value = state()
    value["model"][WEIGHT] = value["model"][WEIGHT].to(dtype)
    value["model"] = {name: torch._neg_view(tensor) for name, tensor in value["model"].items()}
    save(tmp_path, value)
    assert torch.load(tmp_path / "model.pt")["model"][WEIGHT].is_neg()
    imported(tmp_path, *ROWWISE)
    with open_marker(f"file://{tmp_path}/log") as marker:
        assert torch.equal(torch.as_tensor(marker.tables["ebc.t_user"][:]), value["model"][WEIGHT].resolve_neg())


def test_an_import_whose_dense_state_does_not_fit_the_disk_says_why_and_starts_over(tmp_path: Path) -> None:
    value = state()
    value["model"][HEAD] = torch.rand(1000, 1000)
    save(tmp_path, value)
    with file_limit(2**20), pytest.raises(StoreUnavailableError, match=r"dense state was not saved.*File too large"):
        imported(tmp_path, *ROWWISE)
    assert imported(tmp_path, *ROWWISE)["unfinished"] == 1
    (verdict,) = ask("verify", f"file://{tmp_path}/log")
    assert (verdict["marker"], verdict["dense_files"]) == ("2:1", 2)


def test_an_import_that_ends_before_this_one_claims_the_log_stays_the_only_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path, state())
    claim, found = import_writer.claim_generation, []

    def overtaken(*given: Any, **more: Any) -> Any:
        monkeypatch.setattr(import_writer, "claim_generation", claim)
        found.append(imported(tmp_path, *ROWWISE)["marker"])
        return claim(*given, **more)

    monkeypatch.setattr(import_writer, "claim_generation", overtaken)
    for _ in range(2):
        with pytest.raises(ConfigError, match="an import has committed marker 1:1"):
            imported(tmp_path, *ROWWISE)
    listed = ask("list", f"file://{tmp_path}/log", status=None)
    assert (found, [each["marker"] for each in listed["markers"]]) == (["1:1"], ["1:1"])
