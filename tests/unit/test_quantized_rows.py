"""A followed module is, at each marker, the one that is quantized from scratch: bits, lookups, refusals."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection

from tests import builders
from tests.builders import JOB
from tests.evolved import EvolvingJob
from tests.followers import lose_frames, wait_for
from tests.parts import Policy, UpdateKind
from tests.served import WIDTHS, SmallValues, all_rows, bits, collection, quantized, refusals
from tests.stores import fold
from torchrec_stream_ckpt import FollowedModel, follow
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    ProofMismatchError,
    ReplicaNotReadyError,
    SchemaMismatchError,
    UnsupportedError,
)
from torchrec_stream_ckpt.extras.follower import model as model_module
from torchrec_stream_ckpt.extras.follower.source import FollowedJob
from torchrec_stream_ckpt.extras.follower.updates import Changed
from torchrec_stream_ckpt.extras.follower.whole_rows import WholeRows, Write
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec, TableSpec

ROWWISE = StateSpec("momentum1", "float32", True)
SCHEMA = Schema(
    (
        builders.table("m.t_a", 150, 16, "float32", ROWWISE),
        builders.table("m.t_b", 90, 16, "float16"),
        builders.table("m.t_c", 70, 16, "float32", StateSpec("exp_avg", "float32", False)),
    )
).named(None, JOB, 1)
STEPS = Policy(rebase=0, compact="none")


class Trained(SmallValues, EvolvingJob):
    """A trainer's values."""


@pytest.fixture
def job(tmp_path: Path) -> EvolvingJob:
    made = Trained(tmp_path / "log", schema=SCHEMA)
    made.first(SCHEMA)
    return made


def weights_at(job: EvolvingJob, marker: MarkerId) -> dict[str, torch.Tensor]:
    return {
        table.spec.name.removeprefix("m."): torch.from_numpy(table.arrays[0].copy())
        for table in job.truth[marker].values()
    }


def from_scratch(job: EvolvingJob, marker: MarkerId, kind: str, width: str) -> nn.Module:
    return nn.ModuleDict({"m": quantized(collection(kind, weights_at(job, marker)), width)})


def empty_module(kind: str, width: str) -> nn.Module:
    weights = {
        table.name.removeprefix("m."): torch.full((table.rows, table.dim), 7.0, dtype=getattr(torch, table.dtype))
        for table in SCHEMA.tables
    }
    made = collection(kind, weights)
    return nn.ModuleDict({"m": quantized(made, width) if width != "float" else made})


def followed(job: EvolvingJob, kind: str = "ebc", width: str = "int8", **more: object) -> FollowedModel:
    return FollowedModel(empty_module(kind, width), follow(f"file://{job.root}", scratch=job.root.parent), **more)  # type: ignore[arg-type]


def looked_up(module: nn.Module, kind: str, weights: dict[str, torch.Tensor]) -> list[bytes]:
    with torch.no_grad():
        found = module["m"](all_rows(weights))  # type: ignore[index, operator]
    if kind == "ec":
        return [found[f"f_{name}"].values().numpy().tobytes() for name in weights]
    return [found.values().numpy().tobytes()]


@pytest.mark.parametrize("kind", ["ebc", "ec"])
@pytest.mark.parametrize("width", WIDTHS)
def test_each_marker_is_the_one_that_is_quantized_from_scratch(job: EvolvingJob, kind: str, width: str) -> None:
    """Column shards, branches, other ranks and a store; parts of rows that arrive without the other part."""
    tips = job.markers(1)
    with followed(job, kind, width) as model:
        for number in range(8):
            model.advance()
            with model.reading() as served:
                expected = from_scratch(job, served.marker, kind, width)
                assert served.marker == tips[-1]
                assert bits(served.module) == bits(expected)
                weights = weights_at(job, served.marker)
                assert looked_up(served.module, kind, weights) == looked_up(expected, kind, weights)
            if number in (2, 5):
                job.go_on(tips[0] if number == 5 else tips[-1])
            tips += job.markers(1 + number % 2)
            if number == 3:
                fold(job.root, STEPS)
        assert (model.stats.proofs, model.stats.unproved, model.stats.uncompared) == (8, 0, 0)
        assert model.stats.reloads == 1  # the branch
        assert (max(len(table.slices) for table in job.live.values()) > 1) <= (model.stats.reread > 0)


def test_a_part_of_a_row_is_completed_by_the_other_part_or_read_again(tmp_path: Path) -> None:
    """Two column shards: if both send a row, nothing is read again; if one does, the whole row is."""
    job = Trained(tmp_path / "log", schema=SCHEMA)
    while not (job.live and all(len(table.slices) == 2 for table in job.live.values())):
        job.first(SCHEMA)
    job.markers(1)
    with followed(job) as model:
        model.advance()
        for shards, reread in (((0, 1), 0), ((0,), 5), ((1,), 10)):
            stream = job.streams[0]
            for shard in [each for each in stream.shards if each.table == 0]:
                if shard.col0 // 8 in shards:
                    job.put_rows(stream, shard, shard.row0 + np.arange(5))
            job.flush()
            marker = job.commit().id
            (update,) = model.advance()
            assert update.kind is UpdateKind.MARKER
            assert model.stats.reread == reread
            with model.reading() as served:
                assert bits(served.module) == bits(from_scratch(job, marker, "ebc", "int8"))


def test_a_gap_in_the_log_is_loaded_from_the_store(job: EvolvingJob) -> None:
    job.markers(1)
    with followed(job) as model:
        model.advance()
        (marker,) = job.markers(1)
        fold(job.root, Policy(rebase=1e-9, compact="none"))
        lose_frames(job)
        updates = model.advance()
        assert [update.marker for update in updates] == [marker]
        with model.reading() as served:
            assert bits(served.module) == bits(from_scratch(job, marker, "ebc", "int8"))


def test_rows_that_cannot_be_completed_lead_to_a_load(job: EvolvingJob, monkeypatch: pytest.MonkeyPatch) -> None:
    job.markers(1)
    with followed(job) as model:
        model.advance()
        (marker,) = job.markers(1)
        with monkeypatch.context() as patch:

            def gone(*args: object) -> object:
                raise CorruptionError("gone")

            patch.setattr(FollowedJob, "some", gone)
            patch.setattr(WholeRows, "end", lambda rows: np.arange(3))
            with pytest.raises(CorruptionError, match="gone"):
                model.advance()
            with pytest.raises(ReplicaNotReadyError, match="interrupted"), model.reading():
                pass
        (update,) = model.advance()
        assert (update.kind, update.marker) == (UpdateKind.LOAD, marker)
        with model.reading() as served:
            assert bits(served.module) == bits(from_scratch(job, marker, "ebc", "int8"))


def test_a_row_that_was_not_quantized_is_named_and_loaded_again(
    job: EvolvingJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    job.markers(1)
    with followed(job) as model:
        model.advance()
        job.markers(1)
        put = WholeRows.put

        def shorter(rows: WholeRows, changed: Changed) -> None:
            put(rows, replace(changed, ids=changed.ids[1:], weights=changed.weights[1:]))

        with monkeypatch.context() as patch:
            patch.setattr(WholeRows, "put", shorter)
            with pytest.raises(ProofMismatchError) as raised:
                model.advance()
        assert str(raised.value.where["proved"]) == "1:2"
        with pytest.raises(ReplicaNotReadyError, match="proved by 1:2"):
            model(None)
        (update,) = model.advance()
        assert (update.kind, update.why) == (UpdateKind.LOAD, "rows differ from the proof of marker 1:2")
        with model.reading() as served:
            assert bits(served.module) == bits(from_scratch(job, served.marker, "ebc", "int8"))
        assert (model.stats.proofs, model.stats.doubted) == (2, 0)


def test_each_forward_is_of_one_marker_while_a_thread_follows(job: EvolvingJob) -> None:
    job.markers(1)
    weights = weights_at(job, MarkerId(1, 1))
    seen: list[tuple[MarkerId, list[bytes]]] = []
    stop = threading.Event()
    with followed(job) as model:
        model.advance()
        model.start()

        def read() -> None:
            while not stop.is_set():
                with model.reading() as served:
                    seen.append((served.marker, looked_up(served.module, "ebc", weights)))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for _ in range(10):
            (marker,) = job.markers(1)
            wait_for(lambda marker=marker: model.stats.marker == marker or model.failure is not None)
        stop.set()
        for reader in readers:
            reader.join()
        assert model.failure is None
    assert len({marker for marker, _ in seen}) >= 3
    expected = {
        marker: looked_up(from_scratch(job, marker, "ebc", "int8"), "ebc", weights) for marker in {m for m, _ in seen}
    }
    assert all(found == expected[marker] for marker, found in seen)


@pytest.mark.parametrize("rows", [2_000, 20_000])
def test_an_update_quantizes_the_changed_rows_alone(tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    schema = Schema((builders.table("m.t_a", rows, 16, "float32", ROWWISE),)).named(None, JOB, 1)
    job = Trained(tmp_path / "log", schema=schema)
    job.first(schema)
    job.commit()
    module = nn.ModuleDict({"m": quantized(collection("ebc", {"t_a": torch.zeros(rows, 16)}), "int4")})
    counted: list[int] = []

    class Counting(WholeRows):
        def __init__(self, table: TableSpec, write: Write) -> None:
            super().__init__(table, lambda ids, weights: (counted.append(len(ids)), write(ids, weights))[1])

    monkeypatch.setattr(model_module, "WholeRows", Counting)
    with FollowedModel(module, follow(f"file://{job.root}", scratch=tmp_path)) as model:
        model.advance()
        counted.clear()
        for shard in job.streams[0].shards:
            job.put_rows(job.streams[0], shard, shard.row0 + np.arange(100))
        job.flush()
        job.commit()
        model.advance()
    assert sum(counted) == 100


def bags(**more: object) -> EmbeddingBagCollection:
    tables = [EmbeddingBagConfig(name="t_a", num_embeddings=20, embedding_dim=16, feature_names=["f"])]
    return EmbeddingBagCollection(tables=tables, **more)  # type: ignore[arg-type]


def _cases() -> Iterator[tuple[str, nn.Module, str]]:
    scripted = torch.jit.script(nn.Linear(2, 2))
    yield "scripted", nn.ModuleDict({"a": scripted}), "it is scripted.*module=a"
    kernel = quantized(bags(), "int8")._emb_modules[0]  # type: ignore[union-attr, index, operator]
    yield "kernel", nn.ModuleDict({"tbe": kernel}), "the layout of its tables is not known.*module=tbe"
    fused = FusedEmbeddingBagCollection(
        bags().embedding_bag_configs(), torch.optim.SGD, {"lr": 0.1}, device=torch.device("meta")
    )
    yield "fused", nn.ModuleDict({"f": fused}), "the layout of its tables is not known"
    yield "meta", nn.ModuleDict({"m": bags(device=torch.device("meta"))}), "t_a has no memory"
    yield "compiled", torch.compile(nn.Linear(2, 2)), "it is compiled"  # type: ignore[dict-item]
    twice = bags()
    yield "twice", nn.ModuleDict({"a": twice, "b": twice}), "in the module twice.*module=b"
    packed = torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Linear(4, 4)), {nn.Linear})
    yield "packed", nn.ModuleDict({"over": packed}), "is packed or quantized.*module=over"
    for name, change, said in (
        ("pruned", {"index_remappings_array": torch.zeros(20, dtype=torch.int32)}, "t_a is pruned"),
        ("wide", {"scale_bias_size_in_bytes": 8}, "has 8 bytes of scale and bias a row, not 4"),
        ("empty", {"weight_initialized": False}, "has no memory"),
    ):
        module = quantized(bags(), "int8")
        for key, value in change.items():
            setattr(module._emb_modules[0], key, value)  # type: ignore[union-attr, index, arg-type]
        yield name, nn.ModuleDict({"q": module}), f"{said}.*module=q"
    for kind in ("FP8", "BF16"):
        module = quantized(bags(), "int8")
        (spec,) = module._emb_modules[0].embedding_specs  # type: ignore[union-attr, index]
        module._emb_modules[0].embedding_specs = [(*spec[:3], type(spec[3])[kind], spec[4])]  # type: ignore[union-attr, index]
        yield kind, nn.ModuleDict({"q": module}), f"t_a is {kind}"
    module = quantized(bags(), "int8")
    module._emb_modules = [SimpleNamespace()]  # type: ignore[assignment, list-item]
    yield "virtual", nn.ModuleDict({"q": module}), "its kernel is a SimpleNamespace"


REFUSED = {
    "scripted": "a scripted module",
    "kernel": "a bare kernel of FBGEMM",
    "fused": "FusedEmbeddingBagCollection",
    "compiled": "a compiled module",
    "packed": "packed dense layers (quantize_dynamic)",
    "pruned": "a pruned table",
    "FP8": "a table in FP8",
    "BF16": "a table quantized to BF16",
}
"""Names of cases for docs/coverage.md."""


@pytest.mark.parametrize(("module", "said"), refusals(_cases(), REFUSED))
def test_what_cannot_be_followed_is_refused_by_name_when_it_is_made(
    tmp_path: Path, module: nn.Module, said: str
) -> None:
    with follow(f"file://{tmp_path}") as follower, pytest.raises(UnsupportedError, match=f"(?s){said}"):
        FollowedModel(module, follower)


def test_rows_that_no_marker_has_are_refused(tmp_path: Path) -> None:
    with (
        follow(f"file://{tmp_path}", mode="rows") as follower,
        pytest.raises(ConfigError, match="a followed module requires a follower of markers"),
    ):
        FollowedModel(nn.ModuleDict({"m": bags()}), follower)


@pytest.mark.parametrize(
    ("tables", "said"),
    [
        ({"t_a": (150, 16)}, "only the job has this table.*table=m.t_b"),
        ({"t_a": (140, 16), "t_b": (90, 16), "t_c": (70, 16)}, r"\(140, 16\), but the job's are float32 \(150, 16\)"),
    ],
)
def test_a_module_of_other_tables_is_refused_by_name(
    job: EvolvingJob, tables: dict[str, tuple[int, int]], said: str
) -> None:
    job.markers(1)
    module = nn.ModuleDict({"m": quantized(collection("ebc", {n: torch.zeros(s) for n, s in tables.items()}), "int8")})
    with FollowedModel(module, follow(f"file://{job.root}")) as model:
        with pytest.raises(SchemaMismatchError, match=f"(?s){said}"):
            model.advance()
        with pytest.raises(ReplicaNotReadyError, match="has not loaded a marker"):
            model(None)


def test_bfloat16_rows_are_not_quantized(tmp_path: Path) -> None:
    schema = Schema((builders.table("m.t_a", 20, 16, "bfloat16", ROWWISE),)).named(None, JOB, 1)
    job = Trained(tmp_path / "log", schema=schema)
    job.first(schema)
    job.commit()
    module = nn.ModuleDict({"m": quantized(bags(), "int8")})
    with (
        FollowedModel(module, follow(f"file://{job.root}")) as model,
        pytest.raises(SchemaMismatchError, match=r"float16 or float32 \(20, 16\), but the job's are bfloat16"),
    ):
        model.advance()
