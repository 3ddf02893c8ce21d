"""A followed managed collision module is, at each marker, the one that is built from scratch: map, bits and lookups."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_modules import LFU_EvictionPolicy, ManagedCollisionModule, MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from tests import builders
from tests.followers import lose_frames, wait_for
from tests.mapped_job import ONE, PLAIN, TWO, MappedJob
from tests.parts import Policy, UpdateKind
from tests.served import WIDTHS, SmallValues, bits, collection, collision, quantize_parts, refusals
from tests.stores import fold
from torchrec_stream_ckpt import FollowedModel, follow
from torchrec_stream_ckpt.errors import (
    ConfigError,
    CorruptionError,
    ReplicaNotReadyError,
    SchemaMismatchError,
    UnsupportedError,
)
from torchrec_stream_ckpt.extras.follower import followed_maps
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.model.inference_ids import ServedMap
from torchrec_stream_ckpt.restore.target import Plane
from torchrec_stream_ckpt.util.types import MarkerId, StateSpec

ROWWISE = StateSpec("momentum1", "float32", True)
SCHEMA = Schema(
    (
        builders.table(ONE, 60, 8, "float32", ROWWISE),
        builders.table(TWO, 30, 8, "float16"),
        builders.table(PLAIN, 25, 8, "float32"),
    )
)
CPU = torch.device("cpu")
Found = dict[str, bytes]


class Trained(SmallValues, MappedJob):
    """A trainer's values."""


def made(folder: Path, seed: int = 0, world: int = 1, schema: Schema = SCHEMA) -> Trained:
    return Trained(folder, world=world, seed=seed, schema=schema, announces=("ids",))


def build(kind: str, width: str, schema: Schema = SCHEMA, held: dict[str, np.ndarray] | None = None) -> nn.Module:
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


def from_scratch(job: MappedJob, marker: MarkerId, kind: str, width: str) -> nn.Module:
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
    expected = from_scratch(job, marker, kind, width)
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
    seen: list[tuple[MarkerId, Found]] = []
    stop = threading.Event()
    with FollowedModel(build("ebc", "int8"), follow(f"file://{job.root}", scratch=tmp_path)) as model:
        model.advance()
        model.start()

        def read() -> None:
            while not stop.is_set():
                with model.reading() as served:
                    seen.append((served.marker, look_up(served.module, probes)))

        readers = [threading.Thread(target=read) for _ in range(2)]
        for reader in readers:
            reader.start()
        for _ in range(10):
            job.churn(20)
            marker = job.commit().id
            wait_for(lambda marker=marker: model.stats.marker == marker or model.failure is not None)
        stop.set()
        for reader in readers:
            reader.join()
        assert model.failure is None
    assert len({marker for marker, _ in seen}) >= 3
    expected = {
        marker: look_up(from_scratch(job, marker, "ebc", "int8"), probes) for marker in {each for each, _ in seen}
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
    assert found == [look_up(from_scratch(job, marker, "ebc", width), probes)] * 3


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
        assert look_up(copied, known) == before == look_up(from_scratch(job, first, "ebc", "int8"), known)


class Own(MCHManagedCollisionModule):
    """A map of the user's."""


def sorted_map(kind: Any = MCHManagedCollisionModule, **more: Any) -> ManagedCollisionModule:
    made: ManagedCollisionModule = kind(20, more.pop("device", CPU), LFU_EvictionPolicy(), 3, **more)
    return made


def hash_map(**more: Any) -> ManagedCollisionModule:
    return HashZchManagedCollisionModule(20, CPU, **{"total_num_buckets": 2, **more})


def _cases() -> Iterator[tuple[str, nn.Module, str]]:
    def over(module: ManagedCollisionModule) -> Any:
        return collision("ebc", {"t": torch.zeros(20, 8)}, {"t": module})

    where = "module=mc._managed_collision_collection._managed_collision_modules.t"
    yield "training", over(sorted_map()).train(), f"in training mode.*{where}"
    yield "own", over(sorted_map(Own)), f"Own cannot be followed: its id map is of an unknown kind.*{where}"
    yield "meta", over(sorted_map(device=torch.device("meta"))), f"has no memory.*{where}"
    yield "shard", over(sorted_map(output_global_offset=20)), f"one shard of a table.*{where}"
    hashing = over(sorted_map(input_hash_func=lambda ids, size: ids % size))
    hashing._managed_collision_collection.need_preprocess = False
    yield "hashing", hashing, f"applies its input_hash_func.*need_preprocess.*{where}"
    yield "omits", over(hash_map(disable_fallback=True)), f"omits unknown raw ids.*{where}"
    yield "hash shard", over(hash_map(output_segments=[20, 30, 40])), f"one shard of a table.*{where}"
    yield (
        "collection",
        over(sorted_map())._managed_collision_collection,
        "belongs to no embedding collection.*module=mc",
    )
    yield "map", sorted_map().eval(), "belongs to no embedding collection.*module=mc"


REFUSED = {
    "own": "an own ManagedCollisionModule",
    "hashing": "an input_hash_func without need_preprocess",
    "omits": "hash ZCH with disable_fallback",
    "map": "a ManagedCollisionModule without its embedding collection",
}
"""Names of cases for docs/coverage.md."""


@pytest.mark.parametrize(("module", "said"), refusals(_cases(), REFUSED))
def test_a_map_that_cannot_be_followed_is_refused_by_name_when_it_is_made(
    tmp_path: Path, module: nn.Module, said: str
) -> None:
    with follow(f"file://{tmp_path}") as follower, pytest.raises(UnsupportedError, match=f"(?s){said}"):
        FollowedModel(nn.ModuleDict({"mc": module}), follower)


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
        pytest.raises(ConfigError, match=rf"(?s)input_hash_size {2**63 - 1} sends 30 raw ids .*table={ONE}"),
    ):
        model.advance()
    with (
        FollowedModel(build("ebc", "int8"), follow(uri, tables=[ONE, PLAIN])) as model,
        pytest.raises(SchemaMismatchError, match=rf"(?s)the followed tables lack it.*table={TWO}"),
    ):
        model.advance()
    more = Schema((*SCHEMA.tables[:2], builders.table("mc._embedding_module.t_plain", 25, 8)))
    other = made(tmp_path / "other", schema=more)
    other.owners = {name: np.arange(rows) for name, rows in ((ONE, 60), (TWO, 30))}
    other.begin()
    other.commit()
    with (
        FollowedModel(build("ebc", "int8", more), follow(f"file://{other.root}")) as model,
        pytest.raises(SchemaMismatchError, match=r"(?s)the marker has no id map of this table.*t_plain"),
    ):
        model.advance()
