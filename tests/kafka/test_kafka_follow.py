"""A stream on a real broker is followed: markers, rows ahead of them, a trimmed log, a broker that goes away."""

from __future__ import annotations

import time
import uuid
from pathlib import Path

import pytest

from tests.followers import held, weights_at
from tests.own_broker import OwnBroker
from tests.parts import FollowMode, UpdateKind, open_log
from tests.synthetic import SCHEMA, Image, Job, image_of_log
from torchrec_stream_ckpt import FollowedTables, Follower, follow
from torchrec_stream_ckpt.errors import LogUnavailableError
from torchrec_stream_ckpt.format.rows import RowsView
from torchrec_stream_ckpt.inner import Control

pytestmark = pytest.mark.kafka


def apply(follower: Follower, image: Image) -> list[UpdateKind]:
    came = []
    for update in follower.updates(0):
        for each in update.changes():
            image.put(SCHEMA.tables.index(each.table), each.col0, RowsView(each.ids, each.weights, each.states))
        came.append(update.kind)
    return came


def test_markers_and_rows_on_a_broker(bootstrap: str, tmp_path: Path) -> None:
    uri = f"kafka://{bootstrap}/follow-{uuid.uuid4().hex}"
    log = open_log(uri)
    job = Job(tmp_path, log=log)
    job.begin()
    job.commit()
    exact, eager = (follow(uri, mode=mode, states=True, scratch=tmp_path) for mode in ("markers", "rows"))
    with exact, eager:
        images = {exact: Image(SCHEMA), eager: Image(SCHEMA)}
        for follower, image in images.items():
            assert apply(follower, image) == [UpdateKind.LOAD]
        job.touch()
        assert apply(exact, images[exact]) == []
        assert apply(eager, images[eager]) == [UpdateKind.ROWS]
        marker = job.commit()
        assert apply(exact, images[exact]) == [UpdateKind.MARKER]
        assert apply(eager, images[eager])[-1] == UpdateKind.MARKER
        expected = image_of_log(log, Control(log).refresh(), marker.id)
        assert images[exact] == images[eager] == expected
        job.touch()
        assert apply(eager, images[eager]) == [UpdateKind.ROWS]
        job.begin(marker.id, world=3)
        assert apply(eager, images[eager]) == [UpdateKind.ROLLBACK]
        assert images[eager] == expected
        job.touch()
        last = job.commit()
        for follower, image in images.items():
            assert apply(follower, image) == [UpdateKind.MARKER]
            assert image == image_of_log(log, Control(log).refresh(), last.id)
    log.close()


@pytest.mark.parametrize("mode", ["markers", "rows"])
def test_a_broker_that_was_killed_and_started_again_is_followed_further(
    mode: FollowMode, victim: OwnBroker, tmp_path: Path
) -> None:
    log = open_log(victim.uri)
    job = Job(tmp_path, log=log, world=1)
    job.begin()
    job.commit()
    with FollowedTables(follow(victim.uri, mode=mode, scratch=tmp_path, poll_s=0.1)) as tables:
        tables.start()
        for kills in (False, False, True, False):
            if kills:
                victim.kill()
                victim.begin()
            job.touch()
            marker = job.commit()
            deadline = time.monotonic() + 120
            while tables.stats.marker != marker.id:
                assert tables.failure is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert held(tables) == weights_at(job, marker.id)
        assert tables.stats.woken_by == "fetch"
        assert tables.stats.reloads == 0
    log.close()


def test_a_broker_that_is_not_there_is_waited_for_so_long_and_no_longer(tmp_path: Path) -> None:
    with (
        follow("kafka://127.0.0.1:1/nobody", outage_s=0.0, scratch=tmp_path) as follower,
        pytest.raises(LogUnavailableError, match="connection refused"),
    ):
        list(follower.updates())
