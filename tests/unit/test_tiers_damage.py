"""An object of the inner tier's store is damaged: the outer tier's store has one of the same name, which is whole."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import stores, tiered
from tests.parts import Policy, trim_log
from tests.synthetic import SCHEMA, Image
from tests.tiered import TieredJob, relay
from tests.unit.read_job import flipped
from torchrec_stream_ckpt import open_marker
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.inner import Damaged, find
from torchrec_stream_ckpt.util.types import MarkerId

NEWEST = MarkerId(1, 3)
DAMAGED = "segments/*/g00000001-r00001-m0000000{}-p000.seg"


@pytest.fixture
def job(tmp_path: Path) -> TieredJob:
    """Three markers on both tiers, in a store on each."""
    made = TieredJob(tmp_path / "inner", settings=tiered.config(tmp_path / "inner", tmp_path / "outer"))
    made.begin()
    made.markers(3)
    relay(made.tiers)
    for tier in ("inner", "outer"):
        stores.fold(tmp_path / tier, Policy(rebase=0, compact="none"))
    return made


def trim(job: TieredJob) -> None:
    """Only the stores have rows."""
    for tier in (job.tiers.inner, job.tiers.outer):
        commit = tier.control.refresh().commits[NEWEST]
        trim_log(tier.log, tier.control, commit, tier.objects.url)
        stores.lose_rows(Path(tier.uri.removeprefix("file://")))


def harm(job: TieredJob, *tiers: str, marker: int = 2) -> str:
    """Flip a bit of a chunk; returns the name of the segment."""
    for tier in tiers:
        path = next((job.root.parent / tier).glob(DAMAGED.format(marker)))
        path.write_bytes(flipped(path.read_bytes()))
    return path.name


def uris(job: TieredJob) -> tuple[str, str]:
    return f"file://{job.root.parent}/inner", f"file://{job.root.parent}/outer"


def read(job: TieredJob, expected: Image) -> None:
    """All rows of all tables and states, table by table, are those of a marker."""
    with open_marker(uris(job), str(NEWEST), scratch=job.root.parent) as marker:
        for index, spec in SCHEMA.live:
            table = marker.tables[spec.name]
            for number, section in enumerate((table, *table.states.values())):
                key = (index, number) if not number or not spec.states[number - 1].per_row else (index, number, 0, 8)
                bits = np.ascontiguousarray(section[:]).tobytes()
                assert bits == expected.arrays[key][:, :, :-1].tobytes()


@pytest.mark.parametrize("trimmed", [False, True])
def test_rows_of_an_open_marker_come_from_the_other_tier(job: TieredJob, trimmed: bool) -> None:
    expected = job.truth(NEWEST)
    if trimmed:
        trim(job)
    harm(job, "inner")
    read(job, expected)


def test_rows_of_an_open_marker_come_from_the_other_tier_when_the_nearest_log_cannot_be_read(job: TieredJob) -> None:
    expected = job.truth(NEWEST)
    for path in (job.root.parent / "inner").glob("data/p*/*.seg"):
        path.write_bytes(flipped(path.read_bytes(), path.stat().st_size // 2))
    harm(job, "inner")
    read(job, expected)


def test_rows_that_no_tier_has_are_named(job: TieredJob) -> None:
    expected = job.truth(NEWEST)
    trim(job)
    name = harm(job, "inner", "outer")
    with pytest.raises(CorruptionError, match=name):
        read(job, expected)


def test_what_is_damaged_in_one_store_is_read_from_the_other_under_the_same_name(job: TieredJob) -> None:
    trim(job)
    name, damaged = harm(job, "inner"), Damaged()
    route = find(job.tiers, None, damaged=damaged)
    assert route is not None
    assert str(route.place) == "inner"
    full = next(each.ref.name for each in route.segments if each.ref.name.endswith(name))
    damaged.elsewhere(route, CorruptionError("chunk's checksum does not match", name=full), may_pass=True)
    found = find(job.tiers, None, damaged=damaged)
    assert found is not None
    assert (found.marker, str(found.place), found.skipped) == (NEWEST, "outer", ())
    assert found.stored == NEWEST
    assert full in {each.ref.name for each in found.segments}
