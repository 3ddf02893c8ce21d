"""Bases and spans say what the intervals below them say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests import synthetic
from tests.parts import Policy
from tests.sampled import sampled
from tests.synthetic import ROWWISE, WIDE, Job
from tests.unit.test_fold import check, fold, history, lineage_of
from torchrec_stream_ckpt.errors import ConfigError, CorruptionError
from torchrec_stream_ckpt.inner import Catalog, Objects, open_store
from torchrec_stream_ckpt.maintain import fold as fold_module
from torchrec_stream_ckpt.maintain import merge as merge_module
from torchrec_stream_ckpt.maintain.compactor import spans
from torchrec_stream_ckpt.util.types import MarkerId

POLICIES = {
    "bases": Policy(rebase=1e-9, compact="none"),
    "some bases": Policy(rebase=0.7, compact="none"),
    "spans": Policy(rebase=0, compact="span16"),
    "both": Policy(rebase=2.0, compact="span4"),
}
LARGE_PARTS = sampled(list(POLICIES), ["both"])


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path / "log", seed=3)


@pytest.mark.parametrize(
    ("policy", "part_bytes"), [*((each, 2000) for each in POLICIES), *((each, 2**20) for each in LARGE_PARTS)]
)
def test_every_marker_is_the_same_over_bases_and_spans(
    tmp_path: Path, policy: str, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (fold_module, merge_module):
        monkeypatch.setattr(module, "SEGMENT_BYTES", part_bytes)
    catalog = Catalog.load(check(history(tmp_path / "log"), POLICIES[policy]), synthetic.JOB)
    starts = {start for start, _ in catalog.folds}
    assert (None in starts) == (POLICIES[policy].rebase > 0)
    assert bool(starts - {None}) == (POLICIES[policy].radix > 0)


def test_long_spans_stand_on_short_ones(job: Job) -> None:
    job.begin(world=1)
    for _ in range(17):
        job.touch(1)
        job.commit()
    catalog, lineage = Catalog.load(check(job, Policy(rebase=0, compact="span4")), synthetic.JOB), lineage_of(job)
    ends = {(start.marker if start else None, end.marker) for start, end in catalog.folds}
    assert ends == {(1, 5), (5, 9), (9, 13), (13, 17), (1, 17)}
    cover = catalog.cover(lineage.chain(MarkerId(1, 17)))
    assert [piece.start for piece in cover] == [None, MarkerId(1, 1)]


def test_a_new_base_comes_when_what_came_since_is_larger(job: Job) -> None:
    job.begin()
    job.commit()
    objects, policy = store_of(job), Policy(rebase=1.5, compact="none")
    for _ in range(6):
        for stream in job.streams:
            for shard in stream.shards:  # every row of every table
                job.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + shard.rows))
        job.flush()
        job.commit()
        fold(job, objects, policy)
    bases = sorted(end.marker for start, end in Catalog.load(objects, synthetic.JOB).folds if start is None)
    assert bases == [3, 5, 7], "one interval is about as large as the base"


def test_rows_of_a_table_that_was_sent_whole_since_are_left_out(job: Job) -> None:
    job.begin()
    job.touch(10)
    parent = job.commit()
    job.begin(parent.id, swept=[ROWWISE])
    job.commit()
    objects = store_of(job)
    fold(job, objects, Policy(rebase=1e-9, compact="none"))
    base = Catalog.load(objects, synthetic.JOB).fold(None, MarkerId(2, 1))
    assert sum(ref.rows for ref in base.segments) == sum(table.rows for table in synthetic.SCHEMA.tables)


def test_row_wise_state_under_two_column_splits_without_a_sweep_is_refused(job: Job) -> None:
    job.begin()
    parent = job.commit()
    job.begin(parent.id, splits=[1, 2, 1])
    job.touch(20)
    job.commit()
    objects = store_of(job)
    with pytest.raises(CorruptionError, match="two different column splits") as told:
        fold(job, objects, Policy(rebase=1e-9, compact="none"))
    assert set(told.value.where) == {"segment", "table"}, "it is whole: what has a name or a path is mended"
    assert Catalog.load(objects, synthetic.JOB).folds == frozenset()


@pytest.mark.parametrize("table", [ROWWISE, WIDE])
def test_columns_between_those_that_were_sent_have_no_rows_in_a_span(job: Job, table: int) -> None:
    """Some column shards of a table were written to, as by a load of one of them, and not those between."""
    job.begin(splits=[1, 4, 4])
    job.commit()
    for _ in range(4):
        for stream in job.streams:
            for shard in stream.shards:
                if shard.table == table and shard.col0 in (0, 6):
                    job.put_rows(stream, shard, np.arange(shard.row0, shard.row0 + 5))
        job.flush()
        job.commit()
    catalog = Catalog.load(check(job, Policy(rebase=0, compact="span4")), synthetic.JOB)
    assert [(start, end) for start, end in catalog.folds] == [(MarkerId(1, 1), MarkerId(1, 5))]


@pytest.mark.parametrize(("place", "wanted"), [(0, []), (1, []), (16, [16]), (32, [16]), (256, [16, 256]), (257, [])])
def test_where_spans_end(place: int, wanted: list[int]) -> None:
    assert list(spans(place, 16)) == wanted


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ConfigError, match="rebase must not be negative"):
        Policy(rebase=-1, compact="none")
    with pytest.raises(ConfigError, match="compact must be"):
        Policy(compact="all")  # type: ignore[arg-type]


def store_of(job: Job) -> Objects:
    return open_store(str(job.root.parent / "store"))
