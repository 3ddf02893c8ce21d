"""A followed module is, at each marker, the one that is quantized from scratch: bits, lookups, refusals."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionModule, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import builders
from tests.builders import JOB
from tests.evolved import EvolvingJob
from tests.followers import lose_frames, wait_for
from tests.mapped_job import ONE, PLAIN, TWO, MappedJob
from tests.parts import Changed, FollowedJob, Policy, UpdateKind, followed_maps
from tests.served import WIDTHS, SmallValues, all_rows, bits, collection, collision, quantize_parts, quantized, refusals
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
from torchrec_stream_ckpt.extras.follower.whole_rows import WholeRows, Write
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Plane
from torchrec_stream_ckpt.model.inference_ids import ServedMap
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


def read_meanwhile(
    model: FollowedModel, look: Callable[[nn.Module], Any], move: Callable[[], MarkerId]
) -> list[tuple[MarkerId, Any]]:
    """What two threads look up while the model follows ten markers, and the marker of each look."""
    seen: list[tuple[MarkerId, Any]] = []
    stop = threading.Event()
    model.advance()
    model.start()

    def read() -> None:
        while not stop.is_set():
            with model.reading() as served:
                seen.append((served.marker, look(served.module)))

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    for _ in range(10):
        marker = move()
        wait_for(lambda marker=marker: model.stats.marker == marker or model.failure is not None)
    stop.set()
    for reader in readers:
        reader.join()
    assert model.failure is None
    assert len({marker for marker, _ in seen}) >= 3
    return seen


def test_each_forward_is_of_one_marker_while_a_thread_follows(job: EvolvingJob) -> None:
    job.markers(1)
    weights = weights_at(job, MarkerId(1, 1))
    with followed(job) as model:
        seen = read_meanwhile(model, lambda module: looked_up(module, "ebc", weights), lambda: job.markers(1)[0])
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


# A followed managed collision module is, at each marker, the one that is built from scratch: map, bits and lookups.


MAPPED = Schema(
    (
        builders.table(ONE, 60, 8, "float32", ROWWISE),
        builders.table(TWO, 30, 8, "float16"),
        builders.table(PLAIN, 25, 8, "float32"),
    )
)
CPU = torch.device("cpu")
Found = dict[str, bytes]


class TrainedMaps(SmallValues, MappedJob):
    """A trainer's values."""


def made(folder: Path, seed: int = 0, world: int = 1, schema: Schema = MAPPED) -> TrainedMaps:
    return TrainedMaps(folder, world=world, seed=seed, schema=schema, announces=("ids",))


def build(kind: str, width: str, schema: Schema = MAPPED, held: dict[str, np.ndarray] | None = None) -> nn.Module:
    """A module with all tables of a schema, on the trainer's paths; ``held``: their weights."""
    parts: dict[str, dict[str, torch.Tensor]] = {}
    for table in schema.tables:
        path, _, name = table.name.rpartition(".")
        weights = torch.full((table.rows, table.dim), 7.0, dtype=getattr(torch, table.dtype))
        parts.setdefault(path, {})[name] = torch.from_numpy(held[table.name].copy()) if held else weights
    model = nn.ModuleDict({"mc": collision(kind, parts["mc._embedding_module"])})
    if "sparse" in parts:
        model["sparse"] = collection(kind, parts["sparse"])
    return quantize_parts(model, width).eval()


def maps_of(model: nn.Module) -> dict[str, Any]:
    found: Any = model.get_submodule("mc._managed_collision_collection._managed_collision_modules")
    return dict(found.items())


def mapped_from_scratch(job: MappedJob, marker: MarkerId, kind: str, width: str) -> nn.Module:
    """The module of a marker, whose id maps TorchRec itself loads."""
    owners, weights = job.at[marker]
    model = build(kind, width, job.schema, weights)
    for name, module in maps_of(model).items():
        state = module.state_dict()
        state["_mch_sorted_raw_ids"] = torch.from_numpy(owners[f"mc._embedding_module.{name}"].copy())
        module.load_state_dict(state)
    return model


def look_up(model: nn.Module, raw_ids: list[int]) -> Found:
    """The weights that a module finds for raw ids, and for all rows of its other tables."""
    ids = torch.tensor(raw_ids)
    names = list(maps_of(model))
    features = KeyedJaggedTensor(
        [f"f_{name}" for name in names], ids.repeat(len(names)), lengths=torch.ones(len(ids) * len(names)).long()
    )
    with torch.no_grad():
        found, remapped = model.get_submodule("mc")(features)
    values = found if isinstance(found, dict) else found.to_dict()
    answers = {key: each if isinstance(each, torch.Tensor) else each.values() for key, each in values.items()}
    answers["rows"] = remapped.values()
    return {key: each.numpy().tobytes() for key, each in answers.items()}


def maps_as_torchrec(model: nn.Module) -> dict[str, tuple[list[int], dict[int, int]]]:
    """Sorted raw ids, and the row of each; free rows are in any order."""
    return {
        name: (
            (ids := module._mch_sorted_raw_ids.tolist()),
            {i: row for i, row in zip(ids, module._mch_remapped_ids_mapping.tolist(), strict=True) if i != 2**63 - 1},
        )
        for name, module in maps_of(model).items()
    }


def state_of(model: nn.Module) -> Found:
    return {key: value for key, value in bits(model).items() if "_managed_collision_collection" not in key}


def check(served: nn.Module, job: MappedJob, marker: MarkerId, kind: str, width: str, seen: set[int]) -> None:
    expected = mapped_from_scratch(job, marker, kind, width)
    assert maps_as_torchrec(served) == maps_as_torchrec(expected)
    assert all(
        sorted(module._mch_remapped_ids_mapping.tolist()) == list(range(module._zch_size))
        for module in maps_of(served).values()
    )
    assert state_of(served) == state_of(expected)
    assert look_up(served, sorted(seen)) == look_up(expected, sorted(seen))


@pytest.mark.parametrize("kind", ["ebc", "ec"])
def test_each_marker_is_the_one_that_is_built_from_scratch(tmp_path: Path, kind: str) -> None:
    """Raw ids that come, go and move; skipped markers, restarts, rewinds, and rows that only a store has."""
    job, random, seen = made(tmp_path / "log"), np.random.default_rng(3), {55, 56}
    job.begin()
    job.churn(40)
    job.commit()
    models = {
        width: FollowedModel(build(kind, width), follow(f"file://{job.root}", scratch=tmp_path))
        for width in ("float", *WIDTHS)
    }
    kinds = []
    for number in range(11):
        marker = list(job.truths)[-1]
        seen |= {raw_id for name in (ONE, TWO) for raw_id in job.truths[marker][name]}
        for width, model in models.items():
            kinds += [update.kind for update in model.advance()]
            if width in ("float", "int8") or number == 10:
                with model.reading() as served:
                    assert served.marker == marker
                    check(served.module, job, marker, kind, width, seen)
        if number in (3, 6, 8):
            markers = [each for each in job.truths if each.generation == job.generation]
            job.begin(markers[0] if number == 8 else markers[-1])
        for _ in range(int(random.integers(1, 3))):
            job.churn()
            job.touch(2)
            job.commit()
        if number == 5:
            fold(job.root, Policy(rebase=0, compact="none"))
            lose_frames(job)
    assert kinds.count(UpdateKind.LOAD) == 2 * len(models)  # the first one, and the rewind
    assert kinds.count(UpdateKind.MARKER) >= 9 * len(models)
    for model in models.values():
        model.close()


@pytest.mark.parametrize("rows", [1_000, 32_000])
def test_a_map_changes_by_its_changed_rows_and_only_with_them(
    tmp_path: Path, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    schema = Schema((builders.table(ONE, rows, 8), builders.table(TWO, rows, 8)))
    job = made(tmp_path / "log", schema=schema)
    job.owners = {name: np.arange(1000, 1000 + rows) for name in (ONE, TWO)}
    job.begin()
    job.commit()
    counted: list[int] = []
    changed = ServedMap.changed

    def counting(served: ServedMap, rows: Any, raw_ids: Any, find: Any) -> Any:
        counted.append(len(rows))
        return changed(served, rows, raw_ids, find)

    monkeypatch.setattr(ServedMap, "changed", counting)
    read = followed_maps.read_id_maps
    whole: list[object] = []
    monkeypatch.setattr(followed_maps, "read_id_maps", lambda *args: (whole.append(args), read(*args))[1])
    module = build("ebc", "float", schema)
    with FollowedModel(module, follow(f"file://{job.root}", scratch=tmp_path)) as model:
        model.advance()
        assert (counted, len(whole)) == ([rows, rows], 1)
        held = {name: each._mch_sorted_raw_ids for name, each in maps_of(module).items()}
        job.send(ONE, range(40))
        job.commit()
        model.advance()
        assert all(each._mch_sorted_raw_ids is held[name] for name, each in maps_of(module).items())
        job.owners[ONE][:25] += 10**6
        job.send(ONE, range(40))
        marker = job.commit().id
        model.advance()
        assert (counted, len(whole)) == ([rows, rows, 25], 1)
        assert maps_of(module)["t_two"]._mch_sorted_raw_ids is held["t_two"]
        check(module, job, marker, "ebc", "float", {*range(990, 1050), *range(10**6 + 990, 10**6 + 1050)})


def test_each_forward_is_of_one_marker_while_raw_ids_are_evicted_and_given_again(tmp_path: Path) -> None:
    job, probes = made(tmp_path / "log"), list(range(100, 160))
    job.begin()
    job.churn(40)
    job.commit()

    def move() -> MarkerId:
        job.churn(20)
        return job.commit().id

    with FollowedModel(build("ebc", "int8"), follow(f"file://{job.root}", scratch=tmp_path)) as model:
        seen = read_meanwhile(model, lambda module: look_up(module, probes), move)
    expected = {
        marker: look_up(mapped_from_scratch(job, marker, "ebc", "int8"), probes)
        for marker in {each for each, _ in seen}
    }
    assert len({found["rows"] for found in expected.values()}) > 1
    assert all(found == expected[marker] for marker, found in seen)


@pytest.mark.parametrize("width", ["float", "int8"])
def test_threads_may_make_the_first_forward_together(tmp_path: Path, width: str) -> None:
    """TorchRec appends the order of the features to a list in it. Here threads wait for each other before that."""
    job, probes = made(tmp_path / "log"), list(range(100, 160))
    job.begin()
    job.churn(40)
    marker = job.commit().id
    together = threading.Barrier(3)

    class Slow(list[str]):
        def __iter__(self) -> Iterator[str]:
            for each in super().__iter__():
                with contextlib.suppress(threading.BrokenBarrierError):
                    together.wait(0.2)
                yield each

    module: Any = build("ebc", width)
    maps = module["mc"]._managed_collision_collection
    maps._feature_names = Slow(maps._feature_names)
    with FollowedModel(module, follow(f"file://{job.root}", scratch=tmp_path)) as model:
        model.advance()

        def read() -> Found:
            with model.reading() as served:
                return look_up(served.module, probes)

        with ThreadPoolExecutor(3) as pool:
            found = [each.result() for each in [pool.submit(read) for _ in range(3)]]
    assert together.broken
    assert found == [look_up(mapped_from_scratch(job, marker, "ebc", width), probes)] * 3


def test_an_update_that_breaks_off_leaves_map_and_rows_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, seen = made(tmp_path / "log"), set(range(100, 190))
    job.begin()
    job.churn(40)
    first = job.commit().id
    with FollowedModel(build("ebc", "float"), follow(f"file://{job.root}", scratch=tmp_path)) as model:
        model.advance()
        job.churn(20)
        second = job.commit().id

        def broken(*args: object) -> None:
            raise OSError("broken")

        with monkeypatch.context() as patch:
            patch.setattr(Plane, "put", broken)
            with pytest.raises(OSError, match="broken"):
                model.advance()
        with pytest.raises(ReplicaNotReadyError, match="interrupted"), model.reading():
            pass
        job.sent[ONE][:3] = [6, 5, 2**63 - 1]
        job.owners[ONE][:3] = [5, 6, 2**63 - 1]
        third = job.commit().id
        with pytest.raises(CorruptionError, match=r"(?s)gets row|loses row"):
            model.advance()
        model.advance()
        with model.reading() as served:
            check(served.module, job, served.marker, "ebc", "float", seen)
            assert served.marker == third > second > first


def test_a_copy_of_the_module_stays_at_its_marker(tmp_path: Path) -> None:
    job = made(tmp_path / "log")
    job.begin()
    job.churn(40)
    first = job.commit().id
    known = sorted(set(job.truths[first][ONE]) & set(job.truths[first][TWO]))
    assert len(known) > 3
    with FollowedModel(build("ebc", "int8"), follow(f"file://{job.root}", scratch=tmp_path)) as model:
        model.advance()
        with model.reading() as served:
            copied = copy.deepcopy(served.module)
        before = look_up(copied, known)
        job.churn(40)
        job.commit()
        model.advance()
        with model.reading() as served:
            assert look_up(served.module, known) != before
        assert look_up(copied, known) == before == look_up(mapped_from_scratch(job, first, "ebc", "int8"), known)


class Own(MCHManagedCollisionModule):
    """A map of the user's."""


def sorted_map(kind: Any = MCHManagedCollisionModule, **more: Any) -> ManagedCollisionModule:
    made: ManagedCollisionModule = kind(20, more.pop("device", CPU), LFU_EvictionPolicy(), 3, **more)
    return made


def hash_map(**more: Any) -> ManagedCollisionModule:
    return HashZchManagedCollisionModule(20, CPU, **{"total_num_buckets": 2, **more})


def _map_cases() -> Iterator[tuple[str, nn.Module, str]]:
    def over(module: ManagedCollisionModule) -> Any:
        return nn.ModuleDict({"mc": collision("ebc", {"t": torch.zeros(20, 8)}, {"t": module})})

    where = "module=mc._managed_collision_collection._managed_collision_modules.t"
    yield "training", over(sorted_map()).train(), f"in training mode.*{where}"
    yield "own", over(sorted_map(Own)), f"Own cannot be followed: its id map is of an unknown kind.*{where}"
    yield "meta map", over(sorted_map(device=torch.device("meta"))), f"has no memory.*{where}"
    yield "shard", over(sorted_map(output_global_offset=20)), f"one shard of a table.*{where}"
    hashing = over(sorted_map(input_hash_func=lambda ids, size: ids % size))
    hashing.mc._managed_collision_collection.need_preprocess = False
    yield "hashing", hashing, f"applies its input_hash_func.*need_preprocess.*{where}"
    yield "omits", over(hash_map(disable_fallback=True)), f"omits unknown raw ids.*{where}"
    yield "hash shard", over(hash_map(output_segments=[20, 30, 40])), f"one shard of a table.*{where}"
    alone = "belongs to no embedding collection.*module=mc"
    yield "collection", nn.ModuleDict({"mc": over(sorted_map()).mc._managed_collision_collection}), alone
    yield "map", nn.ModuleDict({"mc": sorted_map().eval()}), alone


REFUSED_MAPS = {
    "own": "an own ManagedCollisionModule",
    "hashing": "an input_hash_func without need_preprocess",
    "omits": "hash ZCH with disable_fallback",
    "map": "a ManagedCollisionModule without its embedding collection",
}
"""Names of cases for docs/coverage.md."""


@pytest.mark.parametrize(("module", "said"), [*refusals(_cases(), REFUSED), *refusals(_map_cases(), REFUSED_MAPS)])
def test_what_cannot_be_followed_is_refused_by_name_when_it_is_made(
    tmp_path: Path, module: nn.Module, said: str
) -> None:
    with follow(f"file://{tmp_path}") as follower, pytest.raises(UnsupportedError, match=f"(?s){said}"):
        FollowedModel(module, follower)


def test_one_module_in_two_places_is_refused(tmp_path: Path) -> None:
    for width in ("float", "int8"):
        module = build("ebc", width)["mc"]  # type: ignore[index]
        with (
            follow(f"file://{tmp_path}") as follower,
            pytest.raises(UnsupportedError, match=r"(?s)in the module twice.*module=b"),
        ):
            FollowedModel(nn.ModuleDict({"a": module, "b": module}), follower)


def test_a_module_of_another_job_is_refused_by_name(tmp_path: Path) -> None:
    job = made(tmp_path / "log", world=2)
    job.begin()
    job.owners[ONE][:] = np.arange(60) + 100
    job.commit()
    uri = f"file://{job.root}"
    with (
        FollowedModel(build("ebc", "int8"), follow(uri)) as model,
        pytest.raises(ConfigError, match=rf"(?s)input_hash_size {2**63 - 1}, 30 raw ids .*table={ONE}"),
    ):
        model.advance()
    with (
        FollowedModel(build("ebc", "int8"), follow(uri, tables=[ONE, PLAIN])) as model,
        pytest.raises(SchemaMismatchError, match=rf"(?s)the followed tables lack it.*table={TWO}"),
    ):
        model.advance()
    more = Schema((*MAPPED.tables[:2], builders.table("mc._embedding_module.t_plain", 25, 8)))
    other = made(tmp_path / "other", schema=more)
    other.owners = {name: np.arange(rows) for name, rows in ((ONE, 60), (TWO, 30))}
    other.begin()
    other.commit()
    with (
        FollowedModel(build("ebc", "int8", more), follow(f"file://{other.root}")) as model,
        pytest.raises(SchemaMismatchError, match=r"(?s)the marker has no id map of this table.*t_plain"),
    ):
        model.advance()
