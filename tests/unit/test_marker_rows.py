"""``open_marker``: rows of a marker as arrays, by name and number, read a chunk at a time."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from tests import stores, synthetic
from tests.parts import FolderObjects
from tests.tables import write_tables
from torchrec_stream_ckpt import open_marker
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format import segment
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import StateSpec, TableSpec

ROWS, DIM = 5000, 16
SUM, HALF = StateSpec("sum", "float32", True), StateSpec("momentum", "bfloat16", False)
SCHEMA = Schema(
    (
        TableSpec("sparse.ebc.t_item", ROWS, DIM, "float32", "rowwise_adagrad", (SUM,)),
        TableSpec("sparse.ebc.t_user", 40, 4, "bfloat16", "sgd", (HALF,)),
        TableSpec("sparse.ebc.t_wide", 60, 8, "float32", "rowwise_adagrad", (SUM,)),
    )
)
ITEM = np.arange(ROWS * DIM, dtype=np.float32).reshape(ROWS, DIM)
SUMS = np.arange(ROWS, dtype=np.float32) / 7
BITS = (np.arange(160, dtype=np.uint16) * 257).reshape(40, 4)
WIDE = np.arange(480, dtype=np.float32).reshape(60, 8)


@pytest.fixture(params=["log", "store"])
def uri(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job whose rows only the log has, or only the store, in chunks of some hundred rows."""
    monkeypatch.setattr(segment, "CHUNK_BYTES", 16 * 2**10)
    write_tables(
        tmp_path / "log",
        SCHEMA,
        [(ITEM, (SUMS,)), (BITS, (BITS[::-1],)), (WIDE, (np.arange(60, dtype=np.float32),))],
        [[0], [0], [0, 3]],
    )
    if request.param == "store":
        stores.fold(tmp_path / "log")
        stores.lose_rows(tmp_path / "log")
    return f"file://{tmp_path}/log"


def test_rows_come_by_number_slice_numbers_and_mask(uri: str) -> None:
    with open_marker(uri) as marker:
        assert (str(marker.id), marker.step, sorted(marker.tables)) == ("1:1", 10, [t.name for t in SCHEMA.tables])
        table = marker.tables["sparse.ebc.t_item"]
        assert (table.shape, len(table), table.dtype) == ((ROWS, DIM), ROWS, np.float32)
        mask = np.zeros(ROWS, np.bool_)
        mask[[3, 4999]] = True
        several = [4000, 7, 7, 0]
        for chosen in (
            7,
            np.int64(4999),
            several,
            np.array(several, np.int32),
            [[1, 2], [3, 4]],
            mask,
            [],
            slice(0, 0),
        ):
            found = table[chosen]
            expected = ITEM[np.array(chosen, np.int64) if isinstance(chosen, list) else chosen]
            np.testing.assert_array_equal(found, expected)
            assert found.shape == expected.shape
        for part in (slice(None), slice(-3, None), slice(10, 4000, 700), slice(None, None, -999)):
            np.testing.assert_array_equal(table[part], ITEM[part])
        np.testing.assert_array_equal(table.states["sum"][several], SUMS[several])
        assert table.states["sum"][5] == SUMS[5]


def test_bfloat16_comes_as_the_same_numbers(uri: str) -> None:
    with open_marker(uri, "1:1") as marker:
        table = marker.tables["sparse.ebc.t_user"]
        assert table.dtype == table.states["momentum"].dtype == np.float32
        np.testing.assert_array_equal(table[:].view(np.uint32), BITS.astype(np.uint32) << 16)
        np.testing.assert_array_equal(table.states["momentum"][[39, 1]].view(np.uint32) >> 16, BITS[::-1][[39, 1]])


def test_a_row_wise_state_has_a_value_for_each_column_shard(uri: str) -> None:
    with open_marker(uri) as marker:
        table = marker.tables["sparse.ebc.t_wide"]
        assert table.column_shards == ((0, 3), (3, 5))
        np.testing.assert_array_equal(table[[59, 2]], WIDE[[59, 2]])
        np.testing.assert_array_equal(table.states["sum"][[59, 2]], [[59, 59], [2, 2]])


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        (-1, r"row -1 of .* must be between 0 and 4999"),
        (ROWS, "row 5000 of "),
        ([1, 2, 70_000], "row 70000 of "),
        (1.5, "whole numbers"),
        ("t", "whole numbers"),
        (None, "whole numbers"),
        ([0.5], "whole numbers"),
        (np.ones(3, np.bool_), "whole numbers"),
    ],
)
def test_what_is_no_row_is_told(uri: str, chosen: object, said: str) -> None:
    with open_marker(uri) as marker, pytest.raises(IndexError, match=said):
        marker.tables["sparse.ebc.t_item"][chosen]


def test_names_that_are_not_there_are_told_with_the_nearest_ones(uri: str) -> None:
    with open_marker(uri) as marker:
        with pytest.raises(KeyError, match=r"'t_user'; known names: 'sparse\.ebc\.t_user'"):
            marker.tables["t_user"]
        with pytest.raises(KeyError, match="'sums'; known names: 'sum'"):
            marker.tables["sparse.ebc.t_item"].states["sums"]
        assert "t_user" not in marker.tables
    with pytest.raises(ConfigError, match="was closed"):
        marker.tables["sparse.ebc.t_wide"][0]


def test_markers_and_logs_that_are_not_there_are_told(uri: str, tmp_path: Path) -> None:
    with pytest.raises(MarkerNotFoundError, match="1:2"):
        open_marker(uri, "1:2")
    with pytest.raises(ConfigError, match="not a marker"):
        open_marker(uri, "newest")
    with pytest.raises(MarkerNotFoundError):
        open_marker(f"file://{tmp_path}/nothing")
    assert not (tmp_path / "nothing").exists()


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each read of a chunk."""
    found: list[int] = []
    plain = FolderObjects.read

    def count(self: FolderObjects, name: str, begin: int = 0, end: int | None = None) -> memoryview:
        data = plain(self, name, begin, end)
        if name.startswith("segments/") and begin:
            found.append(len(data))
        return data

    monkeypatch.setattr(FolderObjects, "read", count)
    return found


@pytest.mark.parametrize("uri", ["store"], indirect=True)
def test_only_chunks_that_may_have_the_rows_are_read(uri: str, read: list[int]) -> None:
    with open_marker(uri) as marker:
        table = marker.tables["sparse.ebc.t_item"]
        assert read == []
        table[2500]
        assert len(read) == 1
        assert read[0] < 17 * 2**10 < ITEM.nbytes // 10
        read.clear()
        table.states["sum"][[3, 4990]]
        assert len(read) == 2
        read.clear()
        table[[]]
        assert read == []


@pytest.mark.parametrize("held", ["log", "store", "both"])
def test_each_row_is_the_newest_one_on_the_path_of_its_marker(held: str, tmp_path: Path) -> None:
    job = synthetic.Job(tmp_path / "log")
    job.begin()
    for _ in range(3):
        job.commit()
        job.touch(4)
    first = job.commit()
    if held == "both":
        stores.fold(job.root)
    job.begin(first.id, world=3)
    job.touch()
    job.commit()
    if held == "store":
        stores.fold(job.root)
        stores.lose_rows(shutil.copytree(job.root, tmp_path / "stored"))
    where = tmp_path / ("stored" if held == "store" else "log")
    some = np.random.default_rng(1).permutation(30)[:9]
    for commit, image in synthetic.images_of_all(job.log, Control(job.log).refresh()):
        with open_marker(f"file://{where}", str(commit.id)) as marker:
            for index, spec in synthetic.SCHEMA.live:
                table = marker.tables[spec.name]
                for number, section in enumerate((table, *table.states.values())):
                    key = (
                        (index, number) if not number or not spec.states[number - 1].per_row else (index, number, 0, 8)
                    )
                    expected = image.arrays[key][some, :, :-1].tobytes()
                    assert np.ascontiguousarray(section[some]).tobytes() == expected


@pytest.mark.parametrize("uri", ["store"], indirect=True)
def test_damage_is_named_where_nothing_else_has_the_rows(uri: str, tmp_path: Path) -> None:
    (path,) = (tmp_path / "log" / "segments").rglob("*.seg")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with open_marker(uri) as marker:
        np.testing.assert_array_equal(marker.tables["sparse.ebc.t_item"][0], ITEM[0])
        with pytest.raises(CorruptionError, match="checksum does not match") as caught:
            marker.tables["sparse.ebc.t_item"][:]
    assert path.name in str(caught.value)
