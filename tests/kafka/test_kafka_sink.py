"""A sink that is fed over a real broker holds exactly the raw ids of the marker."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests.mapped_job import MappedJob
from tests.parts import open_log
from tests.unit.test_sink_raw_ids import Shelf, is_true, never_an_old_owners
from torchrec_stream_ckpt import follow
from torchrec_stream_ckpt.extras.follower.sink import Feed

pytestmark = pytest.mark.kafka


def test_raw_ids_over_a_broker_on_4_3_and_5_ranks(bootstrap: str, tmp_path: Path) -> None:
    uri = f"kafka://{bootstrap}/sink-{uuid.uuid4().hex}"
    log = open_log(uri)
    job, shelf = MappedJob(tmp_path, log=log, world=4), Shelf()
    shelf.watch = never_an_old_owners(job)
    job.begin()
    job.churn(40)
    job.commit()
    tombstones = 0
    for world in (4, 3, 5):
        if world != 4:
            job.begin(list(job.truths)[-1], world=world)
        for _ in range(2):
            job.churn(20)
            job.commit()
            with follow(uri, store=f"file://{tmp_path}", scratch=tmp_path) as follower:
                written = list(Feed(follower, shelf).updates(0))
            assert is_true(job, shelf), world
            tombstones += sum(sum(each.tombstones.values()) for each in written)
    assert tombstones > 5
    log.close()
