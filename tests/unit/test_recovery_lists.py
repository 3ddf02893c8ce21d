"""The filters that ``benchmarks/recovery`` gives IncrCP: what passes each of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_bench_common import BENCHMARKS, load


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
