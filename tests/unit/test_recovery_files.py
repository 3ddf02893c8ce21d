"""Rows of the baselines of ``benchmarks/recovery``: a layout is asked for what it needs, and for no byte between."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.test_bench_common import BENCHMARKS, load

DIM, ROWS = 16, 4096


@pytest.fixture
def files(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(BENCHMARKS) / "recovery"))
    return load("recovery/files", monkeypatch)


def written(files: Any, folder: Path, pieces: int) -> list[Any]:
    """One file; each piece has every second row of a part of the tables."""
    each = [np.arange(number * ROWS, (number + 1) * ROWS, 2) for number in range(pieces)]
    rows = [np.random.default_rng(number).random((len(ids), DIM + 1), np.float32) for number, ids in enumerate(each)]
    parts = [
        [memoryview(part.ravel()) for part in (ids, np.ascontiguousarray(own[:, :DIM]), own[:, DIM].copy())]
        for ids, own in zip(each, rows, strict=True)
    ]
    places = files.write_file(folder / "file", parts)
    files.publish(folder, [folder / "file"])
    return [
        files.Piece(folder / "file", offset, len(ids), size, crc, int(ids[0]), int(ids[-1]))
        for ids, (offset, size, crc) in zip(each, places, strict=True)
    ]


def test_what_lies_between_pieces_is_not_asked_for(files: Any, tmp_path: Path) -> None:
    """A bundle of IncrCP holds ten times what the newest marker needs of it."""
    size = 1 << 20
    pieces = [files.Piece(tmp_path / "a", number * size, 1, size, 0) for number in (7, 0, 1, 4)]
    near = files.Piece(tmp_path / "a", 5 * size + 4096, 1, size, 0)
    other = files.Piece(tmp_path / "b", 3 * size, 1, size, 0)
    found = [(part.path.name, part.begin, part.end) for part in files.needed([*pieces, near, other])]
    parts = [("a", 0, 2 * size), ("a", 4 * size, 6 * size + 4096), ("a", 7 * size, 8 * size), ("b", 3 * size, 4 * size)]
    assert found == parts, "a gap of a page is read along, one of a megabyte is not"


def test_a_part_alone_is_read_to_warm_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = load("cache", monkeypatch)
    with (tmp_path / "file").open("wb") as file:
        file.truncate(64 << 20)

    def read(part: Any) -> int:
        """Bytes that this process has read for it."""
        before = int(Path("/proc/self/io").read_text().split()[1])
        cache.warm([part])
        return int(Path("/proc/self/io").read_text().split()[1]) - before

    assert 1 << 20 <= read(cache.Part(tmp_path / "file", 3 << 20, 4 << 20)) < 2 << 20
    assert read(tmp_path / "file") >= 64 << 20


def test_a_window_asks_only_the_pieces_that_have_rows_of_it(
    files: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """IncrCP has 23 times as many pieces as naive increments, most of them small."""
    pieces = written(files, tmp_path, 8)
    placed, copied = (files.Tables(torch.zeros(8 * ROWS, DIM), torch.zeros(8 * ROWS)) for _ in range(2))
    files.copy_pieces(pieces, copied)
    asked, search = [], np.searchsorted
    monkeypatch.setattr(files.torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(files.np, "searchsorted", lambda *each: asked.append(1) or search(*each))
    files.place_pieces(pieces, placed)
    assert len(asked) == len(pieces)
    assert torch.equal(placed.weights, copied.weights)
    assert torch.equal(placed.sums, copied.sums)
    assert placed.weights.any()


def test_a_damaged_piece_is_noticed_in_whatever_window_it_lies(files: Any, tmp_path: Path) -> None:
    pieces = written(files, tmp_path, 8)
    with (tmp_path / "file").open("r+b") as file:
        file.seek(pieces[5].offset + 100)
        file.write(b"x")
    with pytest.raises(RuntimeError, match=f"checksum of the piece at {pieces[5].offset}"):
        files.place_pieces(pieces, files.Tables(torch.zeros(8 * ROWS, DIM), torch.zeros(8 * ROWS)))


# The filters that ``benchmarks/recovery`` gives IncrCP: what passes each of them.


@pytest.fixture
def lists(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(BENCHMARKS) / "recovery"))
    return load("recovery/lists", monkeypatch)


def test_a_bloom_filter_knows_all_its_keys_and_few_others(lists: Any) -> None:
    keys = np.unique(np.random.default_rng(0).integers(0, 1 << 40, 20_000))
    known = lists.Bloom(keys)
    assert known.hits(keys) == len(keys)
    assert known.hits(keys + (1 << 41)) < 0.002 * len(keys)


def ranged(lists: Any, interval: int, begin: int, end: int) -> Any:
    keys = np.arange(begin, end)
    return lists.Chunk.of(interval, keys, keys)


def test_the_ratio_is_of_the_new_chunks_keys_and_the_old_chunk_is_asked(lists: Any) -> None:
    """A small old chunk that lies wholly in a large new one is left alone; a large one that shares as much is not."""
    found = lists.Lists(0.5)
    found.put(0, ranged(lists, 1, 0, 300))
    found.put(0, ranged(lists, 2, 0, 600))
    found.put(0, ranged(lists, 3, 5000, 6000))
    found.put(1, ranged(lists, 4, 0, 1000))
    assert [chunk.interval for chunk in found.worth_reading(0, np.arange(1000))] == [2]
    assert (found.asked.chunks, found.asked.by_range, found.asked.by_bloom) == (3, 1, 1)
    assert [chunk.interval for chunk in found.worth_reading(1, np.arange(1000))] == [4], "each table has its own list"


def test_what_the_bloom_filter_let_pass_is_counted_once_more(lists: Any) -> None:
    found = lists.Lists(0.02)
    assert not found.worth_rewriting(20, np.arange(1000))
    assert found.worth_rewriting(21, np.arange(1000))
    assert found.asked.by_ratio == 1


def test_a_table_with_few_new_keys_takes_nothing_out(lists: Any) -> None:
    found = lists.Lists(0.02)
    found.put(0, ranged(lists, 1, 0, 1000))
    assert found.worth_reading(0, np.arange(lists.FEW_KEYS)) == []
    assert len(found.worth_reading(0, np.arange(lists.FEW_KEYS + 1))) == 1


def test_a_chunk_that_is_gone_is_not_asked(lists: Any) -> None:
    found = lists.Lists(0.02)
    found.put(0, ranged(lists, 1, 0, 1000))
    found.drop(0, 1)
    assert found.left(0, 1) is None
    assert found.worth_reading(0, np.arange(1000)) == []
