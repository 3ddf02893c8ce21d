"""A model changes over a real broker: CLAIM, sweep and deltas of the new tables go there and come back."""

from __future__ import annotations

import uuid
from pathlib import Path

import pytest

from tests import ranks, zoo
from tests.distributed.test_changed_model_faults import ALONE, CHANGES, EVENTS, NEW, OLD, TWO, check
from tests.evolving import restored
from tests.model import differences
from tests.parts import open_log
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.inner import Control
from torchrec_stream_ckpt.util.types import MarkerId

pytestmark = pytest.mark.kafka


def test_a_model_changes_over_a_broker(bootstrap: str, tmp_path: Path) -> None:
    uri = f"kafka://{bootstrap}/changed-{uuid.uuid4().hex}"
    settings = StreamConfig(uri=uri, store=f"file://{tmp_path}", marker_every=None)
    begun = ranks.run(2, zoo.start, OLD, TWO, settings, EVENTS)
    said = ranks.run(2, restored, NEW, TWO, settings, None, CHANGES, EVENTS)
    check(begun, said, "1:2")
    (state, _), *_ = ranks.run(1, zoo.resume, NEW, ALONE, settings, None, ())
    assert differences(said[0][2]["2:4"], state) == []
    check(begun, ranks.run(1, restored, NEW, ALONE, settings, "1:2", CHANGES, ()), "1:2")
    log = open_log(uri)
    made = Control(log).refresh().changes_made(MarkerId(2, 4))
    log.close()
    assert [each.digest for each in made] == [CHANGES.digest]
