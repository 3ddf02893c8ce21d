"""What StreamReader does not load, and what it says then: damage, keys, column splits, pickles, wrong names."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

from tests import jobs, stores, warm
from tests.dcp_readers import failure_alone, load_alone, refusal
from tests.model import PLAN_1, PLAN_2, PLAN_3, Spec, differences
from tests.parts import FolderObjects
from tests.pool import Pool
from torchrec_stream_ckpt import StreamConfig, StreamReader
from torchrec_stream_ckpt.errors import (
    ColumnResplitError,
    ConfigError,
    CorruptionError,
    MarkerNotFoundError,
    StreamCkptError,
)

pytestmark = pytest.mark.distributed

USER, WIDE = "ebc.embedding_bags.t_user.weight", "ebc.embedding_bags.t_wide.weight"
WIDE_SUM = f"state.{WIDE}.t_wide.momentum1"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, jobs.Truths]:
    """A job of two ranks with markers 1:1 (step 4) and 1:2 (step 8), and rank 0's truth."""
    directory = tmp_path_factory.mktemp("refusals")
    settings = StreamConfig(uri=f"file://{directory}", marker_every=4)
    return directory, warm.run(2, jobs.train_with, PLAN_2, settings, 8, {})[0][1]


@pytest.fixture
def log(finished: tuple[Path, jobs.Truths], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "log"))


def plain() -> dict[str, torch.Tensor]:
    """Room for whole tables, without a model."""
    return {USER: torch.zeros(211, 16), WIDE: torch.zeros(150, 32), WIDE_SUM: torch.zeros(300)}


def in_truth(truth: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {
        USER: truth[f"model.{USER}"],
        WIDE: truth[f"model.{WIDE}"],
        WIDE_SUM: truth[f"fused.{WIDE}.t_wide.momentum1"],
    }


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


# Plain tensors, other dtypes, other layouts, parts.


def test_whole_tables_are_loaded_into_plain_tensors_without_ranks(
    log: Path, finished: tuple[Path, jobs.Truths]
) -> None:
    reader = StreamReader(f"file://{log}", "1:1")
    assert reader.step is None
    state = load_alone(plain(), {"uri": f"file://{log}", "marker": "1:1"})
    assert differences(in_truth(finished[1][4]), state) == []
    dcp.load(plain(), storage_reader=reader, no_dist=True)
    assert (str(reader.marker), reader.step) == ("1:1", 4)


@pytest.mark.parametrize("stored", [False, True])
def test_other_dtypes_and_layouts_are_filled_as_dcp_fills_them(
    stored: bool, log: Path, finished: tuple[Path, jobs.Truths]
) -> None:
    if stored:
        stores.fold(log)
    both = USER.replace("embedding_bags", "embeddings")
    state = {
        USER: torch.zeros(211, 16, dtype=torch.float64),
        both: torch.zeros(16, 211).t(),
        WIDE: torch.zeros(150, 64),
    }
    state[WIDE] = state[WIDE][:, ::2]
    load_alone(state, {"uri": f"file://{log}"})
    truth = finished[1][8]
    assert torch.equal(state[USER], truth[f"model.{USER}"].double())
    assert torch.equal(state[both], truth[f"model.{USER}"])
    assert torch.equal(state[WIDE], truth[f"model.{WIDE}"])


def dtensors(uri: str) -> list[torch.Tensor]:
    """Tables as DTensors, by rows and by columns, and whole again."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = {
        USER: distribute_tensor(torch.zeros(211, 16), mesh, [Shard(0)]),
        WIDE: distribute_tensor(torch.zeros(150, 32), mesh, [Shard(1)]),
    }
    dcp.load(state, storage_reader=StreamReader(uri))
    return [value.full_tensor() for value in state.values()]


@pytest.mark.parametrize("world", [2, 3])
def test_dtensors_are_filled_by_rows_and_by_columns(
    world: int, log: Path, finished: tuple[Path, jobs.Truths], pool: Pool
) -> None:
    for user, wide in pool.run(world, dtensors, f"file://{log}"):
        assert torch.equal(user, finished[1][8][f"model.{USER}"])
        assert torch.equal(wide, finished[1][8][f"model.{WIDE}"])


# Which marker.


def load_as_told(markers: list[str], uri: str) -> tuple[str, torch.Tensor]:
    """Each rank asks for a marker of its own."""
    reader = StreamReader(uri, markers[dist.get_rank()])
    state = {USER: torch.zeros(211, 16)}
    dcp.load(state, storage_reader=reader)
    return str(reader.marker), state[USER]


def test_all_ranks_read_the_marker_of_rank_0(log: Path, finished: tuple[Path, jobs.Truths], pool: Pool) -> None:
    for marker, user in pool.run(3, load_as_told, ["1:1", "1:2", "latest"], f"file://{log}"):
        assert marker == "1:1"
        assert torch.equal(user, finished[1][4][f"model.{USER}"])


def test_a_reader_stays_with_its_marker_until_it_is_reset(log: Path, finished: tuple[Path, jobs.Truths]) -> None:
    reader, state = StreamReader(f"file://{log}", "1:1"), plain()
    dcp.load(state, storage_reader=reader, no_dist=True)
    dcp.load(state, checkpoint_id="latest", storage_reader=reader, no_dist=True)
    assert differences(in_truth(finished[1][8]), state) == []
    assert (StreamReader.validate_checkpoint_id("2:7"), StreamReader.validate_checkpoint_id("/x")) == (True, False)
    with pytest.raises(ConfigError, match="not a marker"):
        reader.reset("/somewhere")


@pytest.mark.parametrize(("marker", "said"), [("1:9", "1:9"), ("7:1", "7:1")])
def test_a_marker_that_is_not_there_is_named(marker: str, said: str, log: Path) -> None:
    failure = failure_alone(plain(), {"uri": f"file://{log}", "marker": marker})
    assert isinstance(failure, MarkerNotFoundError)
    assert said in str(failure)


def test_what_is_no_marker_and_no_log_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="not a marker"):
        StreamReader("file:///x", "newest")
    with pytest.raises(ConfigError, match="not a known kind of log"):
        StreamReader("/x")
    failure = failure_alone(plain(), {"uri": f"file://{tmp_path}/nothing"})
    assert isinstance(failure, MarkerNotFoundError)
    assert not (tmp_path / "nothing").exists()


# Keys.


def test_a_key_that_the_marker_lacks_is_refused_by_name(log: Path) -> None:
    wrong = USER.replace("t_user", "t_users")
    failure = failure_alone({wrong: torch.zeros(211, 16)}, {"uri": f"file://{log}"})
    assert isinstance(failure, RuntimeError)
    assert str(failure).startswith(f"Missing key in checkpoint state_dict: {wrong}.")


def test_a_partial_load_leaves_what_the_marker_lacks_and_fills_the_rest(
    log: Path, finished: tuple[Path, jobs.Truths]
) -> None:
    state = {"new.weight": torch.full((3,), 7.0), **plain()}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load_alone(state, {"uri": f"file://{log}"}, planner=planner)
    assert state.pop("new.weight").tolist() == [7.0, 7.0, 7.0]
    assert differences(in_truth(finished[1][8]), state) == []


def test_keys_below_another_key_are_told(log: Path) -> None:
    failure = failure_alone({"model": plain()}, {"uri": f"file://{log}"})
    assert "embedding_bags" in str(failure)
    failure = failure_alone({USER: torch.zeros(211, 8)}, {"uri": f"file://{log}"})
    assert isinstance(failure, ValueError)
    assert "Size mismatch" in str(failure)


# Column splits.


def test_a_row_wise_state_under_fewer_column_shards_is_refused(log: Path, pool: Pool) -> None:
    whole: Spec = {**PLAN_1, "t_wide": ("tw", 0)}
    (said,) = pool.run(1, refusal, whole, {"uri": f"file://{log}"}, {})[0]
    assert said.startswith("ColumnResplitError")
    assert "1 column shards" in said
    assert "ebc.t_wide" in said
    assert "Try: " in said


def uneven(uri: str) -> str:
    """Weights of t_wide in two shards of other columns than the marker's, and a row-wise state of as many values."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    # DTensor cuts 32 columns on three ranks into 11, 11 and 10: no column shard of the marker.
    weights = distribute_tensor(torch.zeros(150, 32), mesh, [Shard(1)])
    sums = distribute_tensor(torch.zeros(300), mesh, [Shard(0)])
    try:
        dcp.load({WIDE: weights, WIDE_SUM: sums}, storage_reader=StreamReader(uri))
    except dcp.api.CheckpointException as error:
        return "; ".join(f"{type(each).__name__}: {each}" for each, _ in error.failures.values())
    return ""


def test_a_row_wise_state_beside_weights_of_other_columns_is_refused(log: Path, pool: Pool) -> None:
    said = pool.run(3, uneven, f"file://{log}")[0]
    assert "ColumnResplitError" in said
    assert "[0, 11)" in said
    assert "[16, 32)" in said


def test_columns_are_checked_whatever_is_loaded_first_and_not_by_an_earlier_model(log: Path) -> None:
    reader = StreamReader(f"file://{log}")
    look, columns, states = reader._looked(), reader._columns, reader._states
    table, _ = look.entries.tables[WIDE]
    columns[table] = {(0, 11), (11, 11), (22, 10)}  # of a model of three ranks
    dcp.load(plain(), storage_reader=reader, no_dist=True)
    assert columns[table] == {(0, 32)}
    assert table in states
    columns[table] = {(0, 11)}
    with pytest.raises(ColumnResplitError):
        reader._check_table(look, table)  # as the weights of another model would, after these states
    reader.reset()
    assert not states


def test_a_failure_to_find_a_marker_is_not_raised_by_a_later_load(log: Path) -> None:
    reader = StreamReader(f"file://{log}", "1:9")
    reader.read_metadata()  # as a program does that only looks
    reader.reset("1:2")
    reader.set_up_storage_reader(reader.read_metadata(), True)
    commits, reader = log / "control.log", StreamReader(f"file://{log}", "1:2")
    commits.rename(log / "away")
    reader.read_metadata()
    (log / "away").rename(commits)
    reader.set_up_storage_reader(reader.read_metadata(), True)


def test_weights_that_share_a_shard_with_their_average_are_refused_in_other_columns(pool: Pool, tmp_path: Path) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}/log", marker_every=3)
    warm.run(2, jobs.train_with, PLAN_2, settings, 3, {"optimizer": "ema"})
    failure = failure_alone({WIDE: torch.zeros(150, 32)}, {"uri": settings.uri})
    assert isinstance(failure, ColumnResplitError)
    state = load_alone({USER: torch.zeros(211, 16)}, {"uri": settings.uri})
    assert state[USER].abs().sum() > 0


# Damage.


def chunk_of(log: Path, rank: int) -> Path:
    return sorted(log.glob(f"segments/*/g*-r{rank:05d}-m00000001-*.seg"))[0]


def test_a_damaged_chunk_is_read_around_where_the_log_has_its_rows(
    log: Path, finished: tuple[Path, jobs.Truths], caplog: pytest.LogCaptureFixture
) -> None:
    stores.fold(log)
    segment = chunk_of(log, 0)
    flip(segment, segment.stat().st_size - 5000)
    state = load_alone(plain(), {"uri": f"file://{log}"})
    assert differences(in_truth(finished[1][8]), state) == []
    assert "without a damaged segment of the store" in caplog.text


def test_a_damaged_chunk_that_nothing_else_has_is_named(log: Path) -> None:
    stores.fold(log)
    stores.lose_rows(log)
    segment = chunk_of(log, 0)
    flip(segment, segment.stat().st_size - 5000)
    failure = failure_alone(plain(), {"uri": f"file://{log}"})
    assert isinstance(failure, CorruptionError)
    assert segment.name in str(failure)


def test_a_flipped_byte_in_the_log_is_named_by_its_place(log: Path) -> None:
    (stream,) = (log / "data" / "p00001").glob("*.seg")
    flip(stream, stream.stat().st_size // 3)
    failure = failure_alone(plain(), {"uri": f"file://{log}"})
    assert isinstance(failure, CorruptionError)
    for part in ("generation=1", "rank=1", "seq="):
        assert part in str(failure)


def test_rows_that_neither_log_nor_store_has_are_told_before_anything_is_written(log: Path) -> None:
    stores.lose_rows(log)
    state = plain()
    failure = failure_alone(state, {"uri": f"file://{log}"})
    assert isinstance(failure, CorruptionError)
    assert not any(value.any() for value in state.values())


def test_one_rank_that_meets_damage_fails_the_load_on_all(log: Path, pool: Pool) -> None:
    (stream,) = (log / "data" / "p00001").glob("*.seg")
    flip(stream, stream.stat().st_size // 3)
    for said in pool.run(3, refusal, PLAN_3, {"uri": f"file://{log}"}, {}):
        assert said
        assert all(each.startswith("CorruptionError") for each in said)


# Pickles.


class Evil:
    """A pickle that writes a file when it is opened."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (Path(self.path),))


def test_a_dense_file_is_not_opened_before_its_digest_is_compared(log: Path, tmp_path: Path) -> None:
    import pickle

    (metadata,) = log.glob("dense/*/g00000001-m00000002/.metadata")
    size = metadata.stat().st_size
    pickled = pickle.dumps(Evil(str(tmp_path / "opened")))
    metadata.write_bytes(pickled + bytes(size - len(pickled)))
    failure = failure_alone(plain(), {"uri": f"file://{log}", "marker": "1:2"})
    assert isinstance(failure, CorruptionError)
    assert "altered" in str(failure)
    assert not (tmp_path / "opened").exists()


def test_a_dense_file_that_is_not_asked_for_is_not_read(log: Path, finished: tuple[Path, jobs.Truths]) -> None:
    (other,) = log.glob("dense/*/g00000001-m00000002/__1_0.distcp")
    flip(other, 100)
    how = {"uri": f"file://{log}", "marker": "1:2"}
    state = load_alone(plain(), how)
    assert differences(in_truth(finished[1][8]), state) == []
    entries = StreamReader(**how).read_metadata().state_dict_metadata
    dense = {name: torch.zeros(each.size) for name, each in entries.items() if name.startswith(("top.", "bottom."))}
    failure = failure_alone(dense, how)
    assert isinstance(failure, CorruptionError)
    assert other.name in str(failure)


def test_a_place_of_pickles_that_the_log_alone_names_is_not_opened(
    finished: tuple[Path, jobs.Truths], tmp_path: Path
) -> None:
    settings = StreamConfig(uri=f"file://{tmp_path}/log", store=f"file://{tmp_path}/store", marker_every=4)
    truths = warm.run(2, jobs.train_with, PLAN_2, settings, 4, {})[0][1]
    failure = failure_alone(plain(), {"uri": settings.uri})
    assert isinstance(failure, ConfigError)
    assert "no commit key authenticates" in str(failure)
    state = load_alone(plain(), {"uri": settings.uri, "store": settings.store})
    assert differences(in_truth(truths[4]), state) == []


def test_a_failure_of_a_store_is_not_taken_for_a_checkpoint_of_another_kind(
    log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stores.fold(log)

    def down(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        raise StreamCkptError("the store is down")

    monkeypatch.setattr(FolderObjects, "read", down)
    failure = failure_alone(plain(), {"uri": f"file://{log}"})
    assert isinstance(failure, StreamCkptError)
    assert "the store is down" in str(failure)
