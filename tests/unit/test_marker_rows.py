"""``open_marker``: rows of a marker as arrays, by name and number, read a chunk at a time."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests import stores, synthetic
from tests.followers import LOAD, MARKER, begun, following, truth
from tests.parts import FileLog, FolderObjects, Update, segment
from tests.tables import write_tables
from torchrec_stream_ckpt import open_marker
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.read import sent_rows
from torchrec_stream_ckpt.read.sent_rows import newest
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


# Rows between two markers as the log has them: each once, in its newest version, whatever is held in memory.


def _frames(random: np.random.Generator, count: int) -> list[tuple[Header, RowsView]]:
    frames = []
    for seq in range(count):
        ids = random.permutation(20)[: random.integers(1, 12)].astype(np.int64)
        place = Header(Kind.ROWS, bytes(16), 1, seq=seq, table=int(random.integers(2)), cols=2)
        header = replace(place, col0=2 * int(random.integers(2)))
        weights = random.integers(0, 2**32, (len(ids), 2), np.uint32).view(np.float32)
        frames.append((header, RowsView(ids, weights, (weights[:, 0].copy(),))))
    return frames


@pytest.mark.parametrize("seed", range(20))
def test_of_each_row_the_newest_version_is_left_in_the_order_of_the_frames(seed: int) -> None:
    frames = _frames(np.random.default_rng(seed), 1 + seed)
    last = {}
    for header, view in frames:
        for row, id_ in enumerate(view.ids):
            last[header.table, header.col0, int(id_)] = (header.seq, view.weights[row].tobytes())
    found = {}
    seqs = []
    for header, view in newest(frames):
        seqs.append(header.seq)
        for row, id_ in enumerate(view.ids):
            key = header.table, header.col0, int(id_)
            assert key not in found
            found[key] = (header.seq, view.weights[row].tobytes())
            assert view.states[0][row].tobytes() == view.weights[row, :1].tobytes()
    assert found == last
    assert seqs == sorted(seqs)


@pytest.mark.parametrize("held_bytes", [0, 2000, 1 << 30])
def test_an_update_is_the_same_whether_its_frames_are_held_or_read_again(
    held_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sent_rows, "HELD_BYTES", held_bytes)
    job = begun(tmp_path / "log")
    job.commit()
    with following(job, tmp_path) as replica:
        assert replica.catch_up() == [(LOAD, "1:1")]
        for _ in range(3):
            job.touch()
            job.commit()
        job.touch()
        marker = job.commit()
        assert replica.catch_up() == [(MARKER, "1:5")]
        assert replica.image == truth(job, marker.id)


def _reads(held_bytes: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, int]:
    """(frames read by one update, frames that the log got for it)"""
    job = begun(folder / "log")
    job.commit()
    count = [0]
    read = FileLog.read

    def counted(log: FileLog, span: object) -> object:
        for each in read(log, span):  # type: ignore[arg-type]
            count[0] += 1
            yield each

    with monkeypatch.context() as patched, following(job, folder) as replica:
        replica.catch_up()
        before = sum(len(stream.frames) for stream in job.streams)
        job.touch(20)
        job.commit()
        patched.setattr(sent_rows, "HELD_BYTES", held_bytes)
        patched.setattr(FileLog, "read", counted)
        replica.catch_up()
    return count[0], sum(len(stream.frames) for stream in job.streams) - before


def test_frames_that_are_held_are_read_once_and_others_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    once, frames = _reads(1 << 30, tmp_path / "held", monkeypatch)
    twice, same = _reads(0, tmp_path / "again", monkeypatch)
    assert frames == same > 20
    assert (once, twice) == (frames, 2 * frames)


def test_an_update_holds_no_frames_once_it_was_applied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job, count = begun(tmp_path / "log"), [0]
    read = FileLog.read

    def counted(log: FileLog, span: object) -> object:
        count[0] += 1
        return read(log, span)  # type: ignore[arg-type]

    def rows(update: Update) -> list[tuple[str, int, bytes, bytes]]:
        return [(one.table.name, one.col0, one.ids.tobytes(), one.weights.tobytes()) for one in update.changes()]

    job.commit()
    with following(job, tmp_path) as replica:
        replica.catch_up()
        job.touch()
        job.commit()
        monkeypatch.setattr(FileLog, "read", counted)
        updates = replica.follower.updates(0)
        update = next(updates)
        assert update.kind is MARKER
        held, before = rows(update), count[0]
        assert rows(update) == held
        assert count[0] == before
        assert next(updates, None) is None
        assert rows(update) == held  # whoever is late gets the same rows, read again
        assert count[0] > before


def test_changes_from_the_log_need_no_scratch_folder(tmp_path: Path) -> None:
    job, scratch = begun(tmp_path / "log"), tmp_path / "scratch"
    scratch.mkdir()
    job.commit()
    with following(job, scratch) as replica:
        replica.catch_up()
        scratch.rmdir()
        job.touch()
        marker = job.commit()
        assert replica.catch_up() == [(MARKER, "1:2")]
        assert replica.image == truth(job, marker.id)
