"""A job on one Kafka log begins in a marker of another one, whose rows and dense state are in different places."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests import ranks, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, THREE, TWO, check
from tests.distributed.test_warm_start import begun, refused
from tests.model import differences
from torchrec_stream_ckpt import Source, StreamConfig

pytestmark = [pytest.mark.kafka, pytest.mark.distributed]


def test_a_changed_job_begins_in_another_jobs_topics_and_goes_on_in_its_own(bootstrap: str, tmp_path: Path) -> None:
    name = uuid.uuid4().hex
    old, new = (
        StreamConfig(uri=f"kafka://{bootstrap}/{which}-{name}", store=f"file://{tmp_path}/{which}", marker_every=None)
        for which in ("old", "new")
    )
    marks = ranks.run(2, zoo.start, OLD, TWO, old, EVENTS)
    said = ranks.run(2, refused, new, f"{old.uris[0]}@1:2")
    assert all("store is required with Kafka" in each for each in said), said
    said = ranks.run(2, refused, new, Source(new.uris[0], store=new.store))
    assert all("is this job's own log" in each for each in said), said
    found = ranks.run(3, begun, NEW, THREE, new, Source(old.uris[0], "1:2", old.store), CHANGES, EVENTS)
    check(marks, found, "1:2")
    (state, _), *_ = ranks.run(1, zoo.resume, NEW, ALONE, new, "1:2", ())
    assert differences(found[0][2]["1:2"], state) == []
