"""Requests of the model behind ``stream-ckpt plan``: those of the real materializer over a store that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.counting import CountingObjects
from tests.synthetic import SCHEMA, Job
from torchrec_stream_ckpt.control.partition import Control
from torchrec_stream_ckpt.materialize import fold
from torchrec_stream_ckpt.materialize.compactor import Policy
from torchrec_stream_ckpt.materialize.materializer import Materializer
from torchrec_stream_ckpt.sizing import RateTouched, Requests, TableLoad, UnitCosts, Workload, marker_requests, plan
from torchrec_stream_ckpt.sizing import requests as model
from torchrec_stream_ckpt.sizing.inputs import optimizer_states
from torchrec_stream_ckpt.store import reader
from torchrec_stream_ckpt.store.api import open_store
from torchrec_stream_ckpt.store.dense import open_dense
from torchrec_stream_ckpt.types import TableSpec

Asked = Counter[tuple[str, str]]


def folded(root: Path, world: int, policy: Policy) -> Iterator[Asked]:
    """What each marker of a job asks of the store, from the third on."""
    job = Job(root / "log", world=world)
    job.begin()
    objects = CountingObjects(open_store(str(root / "store")))
    with ThreadPoolExecutor(2) as pool:
        dense = open_dense(str(root / "log"))
        materializer = Materializer(job.log, objects, lambda _: dense, pool, policy)
        control = Control(job.log)
        for number in range(5):
            job.touch(2)
            job.commit()
            objects.taken()
            assert list(materializer.catch_up(control.refresh()))
            if number > 1:
                yield objects.taken()


def summed(asked: Asked) -> dict[str, int]:
    found: Counter[str] = Counter()
    for (operation, _), times in asked.items():
        found[operation] += times
    return dict(found)


def counts(requests: Requests) -> dict[str, int]:
    return {name: int(times) for name, times in asdict(requests).items() if times}


@pytest.mark.parametrize("world", [1, 2, 4])
def test_a_marker_asks_for_what_the_model_says(tmp_path: Path, world: int) -> None:
    for asked in folded(tmp_path, world, Policy(rebase=0, compact="none")):
        assert summed(asked) == counts(marker_requests(world, num_bytes=1.0, folds=False))


def test_only_the_listing_of_all_manifests_grows_with_what_is_kept() -> None:
    few, many = (marker_requests(2, kept=kept, dense_files=9) for kept in (1.0, 20_000.0))
    assert many.list - few.list == 19


@pytest.mark.parametrize("world", [1, 4])
def test_a_base_asks_for_no_more_than_the_model_says(tmp_path: Path, world: int) -> None:
    marker = marker_requests(world, num_bytes=1.0)
    most = model.base_requests(1.0, 1.0, segments=world + 1, tables=len(SCHEMA.tables))
    for asked in folded(tmp_path, world, Policy(rebase=1e-9, compact="none")):
        found, said = summed(asked), counts(marker + most)
        gets = found.pop("get"), said.pop("get")
        assert found == said
        assert gets[1] / 2 <= gets[0] <= gets[1]


def test_the_sizes_of_the_model_are_those_of_the_code() -> None:
    assert (model.SEGMENT_BYTES, model.RANGE_BYTES) == (fold.SEGMENT_BYTES, reader.RANGE_BYTES)


@pytest.mark.parametrize(
    ("num_bytes", "puts"), [(0, 1), (100 * 2**20 - 1, 1), (100 * 2**20, 4), (101 * 2**20, 5), (128 * 2**20, 5)]
)
def test_a_large_object_is_put_in_parts(num_bytes: int, puts: int) -> None:
    """As tests/s3/test_s3_faults.py counts them at a server."""
    assert model.put_requests(num_bytes) == puts


def test_a_month_costs_more_in_full_copies_and_prices_are_parameters() -> None:
    table = TableSpec("t", 10_000_000, 64, "float32", "sgd", optimizer_states("sgd"))
    touched = RateTouched(table.rows, 50_000.0, 0.1, 0.8)
    job = Workload(tables=(TableLoad(table, touched),), ranks=8, steps_per_s=10.0, marker_s=60.0)
    bills = plan(job).bills
    assert bills.store.usd < bills.differential.usd < bills.full.usd
    assert bills.full.requests.put == 43_200 * (8 * 9 + 1)  # 2.64 GB: 330 MB a rank, in 7 parts
    dear = plan(job, costs=UnitCosts(put_list_usd_per_1000=0.05, get_head_usd_per_1000=0.004)).bills
    assert dear.store.requests_usd == pytest.approx(10 * bills.store.requests_usd)
    assert dear.store.storage_usd == bills.store.storage_usd
