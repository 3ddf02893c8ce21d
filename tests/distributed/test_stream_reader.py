"""``dcp.load`` with StreamReader gives what plain ``dcp.load`` gives of an export, and what the live job held."""

from __future__ import annotations

import shutil
import tarfile
from itertools import product
from pathlib import Path

import pytest
import torch

from tests import dcp_readers, jobs, stores, tiered, warm, zoo
from tests.command import run
from tests.dcp_readers import How
from tests.laps import FAMILIES, MODULES, config, plan
from tests.model import PLAN_1, PLAN_2, PLAN_2_OTHER, PLAN_3, Spec, differences
from tests.parts import FileLog, entries_of, open_tiers, parse_front
from tests.pool import Pool
from tests.sampled import marks_of
from tests.zoo import MARK
from tests.zoo_models import OPTIMIZERS, Model, Part, Table
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.inner import Control, open_store
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.distributed

ARCHIVE = Path(__file__).parents[1] / "golden" / "v1" / "job.tar.xz"
PLANS: dict[int, Spec] = {1: PLAN_1, 2: PLAN_2_OTHER, 3: PLAN_3}


def export(uri: str, target: Path, *options: str) -> str:
    run("export", uri, "--to", f"dcp://{target}", *options)
    return str(target)


# Every plan, optimizer and module, on other ranks.


def all_families(kind: str, optimizer: str) -> tuple[Model, tuple[str, ...]]:
    """One table for each plan family that TorchRec has for the module, and a data-parallel one where it trains."""
    trains = () if kind == "fused" else ("dp",)  # its data-parallel tables ask DDP for a device, also on a CPU
    families = ("tw", "rw", "cw") if kind == "ec" else (*FAMILIES, *trains)
    wide = {"grid": 256, "cw": 32, "twcw": 32} if kind != "ec" else {}
    tables = [
        Table(f"t_{family}", 35 + number, wide.get(family, 16), (f"f{number}",))
        for number, family in enumerate(families)
    ]
    return Model((Part(kind, tuple(tables)),), optimizer), families


CELLS = [
    *(
        pytest.param("ebc", optimizer, id=f"ebc-{optimizer}", marks=marks_of(optimizer, ("rowwise_rmsprop_ar",)))
        for optimizer in OPTIMIZERS
    ),
    *(
        pytest.param(kind, "rowwise_adagrad", id=kind, marks=marks_of(kind, ("ec", "fp")))
        for kind in MODULES
        if kind != "ebc"
    ),
]


@pytest.mark.parametrize(("kind", "optimizer"), CELLS)
def test_each_plan_is_loaded_on_one_to_four_ranks_as_from_an_export(
    kind: str, optimizer: str, pool: Pool, tmp_path: Path
) -> None:
    model, families = all_families(kind, optimizer)
    where = config(tmp_path / "log")
    (expected, *_) = pool.run(4, zoo.start, model, plan(families, 4, 2, 0), where, ("train", "train", MARK))
    folder = export(where.uris[0], tmp_path / "out")
    hows: list[How] = [{"checkpoint_id": folder}, {"uri": where.uris[0], "marker": "1:1"}]
    for turn, (world, host) in enumerate(((1, 1), (2, 1), (3, 1), (4, 2))):
        for plain, ours in pool.run(world, dcp_readers.load_zoo, model, plan(families, world, host, turn), hows):
            assert differences(plain, ours, rng=False) == []
            assert loaded(ours) == loaded(expected["1:1"])
            assert differences(only_loaded(expected["1:1"]), only_loaded(ours)) == []


def only_loaded(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What DCP brings: not what kernels count, nor the step and the random state."""
    return {name: value for name, value in state.items() if name.startswith(("model.", "fused.", "dense."))}


def loaded(state: dict[str, torch.Tensor]) -> set[str]:
    return set(only_loaded(state))


# From wherever the marker is.


@pytest.fixture(scope="module", params=["rowwise", "adagrad"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path, jobs.Truths]:
    """A finished job of two ranks with markers 1:1 to 1:3 at steps 3, 6 and 8: its optimizer, its log, the truth."""
    directory = tmp_path_factory.mktemp(request.param)
    settings = StreamConfig(uri=f"file://{directory}", marker_every=3)
    trained = warm.run(2, jobs.train_with, PLAN_2, settings, 8, {"optimizer": request.param})
    return request.param, directory, trained[0][1]


HELD = ("log", "store", "both", "head")
SAMPLE = {
    *(("rowwise", "log", 1), ("rowwise", "store", 2), ("rowwise", "both", 3), ("rowwise", "head", 2)),
    *(("adagrad", "log", 3), ("adagrad", "store", 1), ("adagrad", "both", 2), ("adagrad", "head", 3)),
}


@pytest.mark.parametrize(
    ("source", "held", "world"),
    [pytest.param(*cell, marks=marks_of(cell, SAMPLE)) for cell in product(("rowwise", "adagrad"), HELD, (1, 2, 3))],
    indirect=["source"],
)
def test_a_marker_comes_from_the_log_the_store_and_both(
    source: tuple[str, Path, jobs.Truths], held: str, world: int, pool: Pool, tmp_path: Path
) -> None:
    optimizer, directory, truths = source
    copy = shutil.copytree(directory, tmp_path / "log")
    if held != "log":
        upto = MarkerId(1, 1) if held == "both" else None
        stores.fold(copy, upto=upto, head=tmp_path / "head" if held == "head" else None)
    if held == "store":
        stores.lose_rows(copy)
    together = held in ("log", "store")
    keys = {"model_key": "model", "optimizer_key": "optim"} if together else {}
    how = {"uri": f"file://{copy}", **keys}
    build = {"optimizer": optimizer}
    for state in pool.run(world, dcp_readers.load_small, PLANS[world], how, build, together):
        assert differences({**truths[8], "step": state["step"]}, state, rng=False) == []
    older = pool.run(world, dcp_readers.load_small, PLANS[world], {**how, "marker": "1:2"}, build, together)
    for state in older:
        assert differences({**truths[6], "step": state["step"]}, state, rng=False) == []


@pytest.mark.parametrize("source", ["rowwise"], indirect=True)
def test_both_tiers_give_a_marker_that_the_outer_one_lacks(
    source: tuple[str, Path, jobs.Truths], pool: Pool, tmp_path: Path
) -> None:
    settings = tiered.config(tmp_path / "inner", tmp_path / "outer", marker_every=3)
    truths = warm.run(2, jobs.train_with, PLAN_2, settings, 8, {})[0][1]
    lost = shutil.copytree(tmp_path / "outer", tmp_path / "late")
    tiers = open_tiers(settings)
    assert set(Control(FileLog(lost)).refresh().commits) <= set(tiers.inner.control.refresh().commits)
    tiers.close()
    for uri in (settings.uri, f"file://{tmp_path}/outer"):
        newest = Control(FileLog(tmp_path / "outer")).refresh().newest
        assert newest is not None
        step = 8 if uri == settings.uri else newest.step
        for state in pool.run(3, dcp_readers.load_small, PLAN_3, {"uri": uri}, {}):
            assert differences({**truths[step], "step": state["step"]}, state, rng=False) == []


def test_a_job_of_format_version_1_is_loaded(pool: Pool, tmp_path: Path) -> None:
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="data")
    truths: list[jobs.Truths] = torch.load(tmp_path / "job" / "truth.pt", weights_only=True)
    how = {"uri": f"file://{tmp_path}/job/log", "marker": "1:2"}
    for state in pool.run(3, dcp_readers.load_small, PLAN_3, how, {}):
        assert differences({**truths[0][10], "step": state["step"]}, state, rng=False) == []


# What a rank reads.


@pytest.mark.parametrize("source", ["rowwise"], indirect=True)
def test_each_rank_reads_only_its_part_of_one_table(
    source: tuple[str, Path, jobs.Truths], pool: Pool, tmp_path: Path
) -> None:
    _, directory, truths = source
    copy = shutil.copytree(directory, tmp_path / "log")
    stores.fold(copy)
    name = "ebc.embedding_bags.t_item.weight"
    row_wise: Spec = {**PLAN_2, "t_item": ("rw", None), "t_user": ("rw", None)}
    results = pool.run(2, dcp_readers.bytes_of_load, row_wise, {"uri": f"file://{copy}"}, {}, name)
    assert torch.equal(torch.cat([part[name] for _, part in results]), truths[8][f"model.{name}"])
    ranges = chunks_of(copy, "ebc.t_item")
    for read, _ in results:
        dense = {name.rpartition("/")[2] for name, _, _ in read if name.startswith("dense/")}
        assert dense == {".metadata", "__0_0.distcp"}  # what names the entries, and the buffers of rank 0
        rows = [(name, begin, begin + count) for name, begin, count in read if name.startswith("segments/") and begin]
        assert rows
        assert all(any(first <= begin and end <= last for first, last in ranges[name]) for name, begin, end in rows)


def chunks_of(directory: Path, table: str) -> dict[str, list[tuple[int, int]]]:
    """Where each segment has the rows of a table: (first byte, end)."""
    objects, schema = open_store(str(directory)), Control(FileLog(directory)).refresh().claims[1].schema
    found = {}
    for entry in objects.list("segments/"):
        front = parse_front(objects.read(entry.name), entry.name)
        mine = entries_of(front.directory[front.directory["table"] == schema.index()[table]])
        found[entry.name] = [(chunk.offset, chunk.offset + chunk.num_bytes) for chunk in mine]
    return found
