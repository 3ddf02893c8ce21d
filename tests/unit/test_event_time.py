"""Event time: which stretch all ranks have ended, over restarts and whatever else cuts markers."""

from __future__ import annotations

import pytest

from tests.parts import EventTime
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.errors import ConfigError


def vote(*ranks: EventTime) -> list[bool]:
    """One vote: whether each rank then says that a marker is due."""
    least = min(rank.stretch for rank in ranks)
    for rank in ranks:
        rank.heard(least)
    return [rank.is_due for rank in ranks]


def test_a_stretch_has_ended_once_the_last_rank_has_left_it() -> None:
    first, second = EventTime(10.0), EventTime(10.0)
    first.reach(105.0)
    assert vote(first, second) == [False, False]  # the other one has no watermark
    second.reach(101.0)
    assert vote(first, second) == [False, False]
    first.reach(137.0)  # three stretches at once
    assert vote(first, second) == [False, False]
    second.reach(110.0)
    assert vote(first, second) == [True, True]
    assert vote(first, second) == [True, True]  # until there is one
    first.cut()
    second.cut()
    assert vote(first, second) == [False, False]
    second.reach(135.0)
    assert vote(first, second) == [True, True]


def test_a_watermark_never_goes_back() -> None:
    rank = EventTime(10.0)
    rank.reach(100.0)
    rank.reach(20.0)
    assert rank.watermark_s == 100.0


def test_after_a_restart_the_marker_says_which_stretch_was_cut() -> None:
    rank = EventTime(10.0)
    rank.stand_on(105.0)
    rank.reach(109.0)
    assert vote(rank) == [False]
    rank.reach(131.0)
    assert vote(rank) == [True]
    new = EventTime(10.0)
    new.stand_on("text of a user")
    new.reach(131.0)
    assert vote(new) == [False]


def test_without_a_setting_a_watermark_is_only_kept() -> None:
    rank = EventTime(None)
    rank.reach(None)
    rank.reach(5.0)
    assert vote(rank) == [False]
    assert rank.watermark_s == 5.0


@pytest.mark.parametrize("event_s", [float("nan"), float("inf"), "1", True])
def test_what_is_no_time_is_refused(event_s: object) -> None:
    with pytest.raises(ConfigError, match="event_s must be a finite number"):
        EventTime(10.0).reach(event_s)  # type: ignore[arg-type]


def test_a_job_that_never_says_the_time_is_told_so() -> None:
    with pytest.raises(ConfigError, match="was called without event_s"):
        EventTime(10.0).reach(None)
    with pytest.raises(ConfigError, match="marker_every_event_s must be a number above 0"):
        StreamConfig(uri="file:///x", marker_every_event_s=0)
    with pytest.raises(ConfigError, match="marker_every_event_s must be a number above 0 or none, got '1h'"):
        StreamConfig(uri="file:///x", marker_every_event_s="1h")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="max_overhead cannot be combined"):
        StreamConfig(uri="file:///x", marker_every_event_s=60, max_overhead=0.01)
