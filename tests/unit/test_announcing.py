"""``on_commit``: it hears of every marker in order, and neither its errors nor its pace cost one."""

from __future__ import annotations

import logging
import threading

import pytest

from tests.builders import commit
from torchrec_stream_ckpt.errors import MarkerFailedError
from torchrec_stream_ckpt.format.record import meta_of
from torchrec_stream_ckpt.save import commit_callbacks
from torchrec_stream_ckpt.save.commit_callbacks import Announcer
from torchrec_stream_ckpt.util.types import MarkerReport


def test_what_a_callback_raises_is_logged_and_the_next_marker_is_told(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[MarkerReport] = []

    def on_commit(report: MarkerReport) -> None:
        heard.append(report)
        if len(heard) == 1:
            raise RuntimeError("no server")

    announcer = Announcer(on_commit)
    first, second = commit(1, 1), commit(1, 2)
    with caplog.at_level(logging.ERROR):
        announcer.committed(first)
        announcer.committed(second)
        announcer.noted(second, first, meta_of({"auc": 0.8}))
        announcer.close(60.0)
    assert [str(report.id) for report in heard] == ["1:1", "1:2", "1:2"]
    assert [report.meta for report in heard] == [{}, {}, {"auc": 0.8}]
    assert heard[0].num_bytes == first.num_bytes
    assert heard[1].num_bytes == heard[2].num_bytes == second.num_bytes - first.num_bytes
    assert "on_commit raised for marker 1:1" in caplog.text


def test_a_callback_that_stands_still_holds_markers_up_and_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commit_callbacks, "MOST_WAITING", 2)
    free = threading.Event()
    announcer = Announcer(lambda _: free.wait(60))
    announcer.committed(commit(1, 1))
    announcer.make_room(0.0)
    announcer.committed(commit(1, 2))
    assert announcer.is_behind
    with pytest.raises(MarkerFailedError, match="2 markers wait for it"):
        announcer.make_room(0.0)
    free.set()
    announcer.make_room(60.0)
    free.clear()
    announcer.committed(commit(1, 3))
    announcer.close(0.0)
    assert "closed before on_commit returned" in caplog.text
    free.set()


def test_without_a_callback_nothing_is_kept() -> None:
    announcer = Announcer(None)
    for number in range(1, 200):
        announcer.committed(commit(1, number))
    assert not announcer.is_behind
    announcer.close(0.0)
