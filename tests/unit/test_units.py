"""Sizes and times as people read and write them."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import pytest

from tests.command import call
from tests.parts import Retention
from torchrec_stream_ckpt import StreamConfig
from torchrec_stream_ckpt.cli.plan_input import number
from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.extras.follower.redis_sink import RedisSink
from torchrec_stream_ckpt.find.best import Best, Condition
from torchrec_stream_ckpt.flags import whole
from torchrec_stream_ckpt.util.settings import declared
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import age, clock, day, duration, parse_duration, parse_size, size
from torchrec_stream_ckpt.util.uris import parse_uri


def test_bytes_are_shown_in_powers_of_1000() -> None:
    assert [size(count) for count in (0, 999, 1000, 85_900_000, 2.5e9, 7.04e15)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "85.9 MB",
        "2.5 GB",
        "7040.0 TB",
    ]


def test_a_length_of_time_is_shown_in_the_largest_unit_that_fits() -> None:
    seconds = (0.0, 0.05, 0.25, 9.96, 42.4, 90, 5400, 172_800)
    assert [duration(each) for each in seconds] == [
        "0 ms",
        "50 ms",
        "0.2 s",
        "10.0 s",
        "42 s",
        "1.5 min",
        "1.5 h",
        "2.0 d",
    ]


def test_a_clock_that_runs_ahead_makes_no_negative_age() -> None:
    assert age(time.time() + 100) == "0 ms"
    assert age(time.time() - 7200) == "2.0 h"


def test_a_moment_is_shown_in_local_time() -> None:
    assert clock(0.0) == time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(0))


@pytest.mark.parametrize("time_s", [1e308, -1e308, float("inf"), float("nan")])
def test_a_moment_that_no_calendar_has_is_an_unknown_day(time_s: float) -> None:
    assert clock(time_s) == day(time_s) == day(time_s, "%H:%M") == "an unknown day"
    assert day(0.0) == "1970-01-01 00:00 UTC"
    assert duration(1e308) == "1.2e+303 d"


def test_sizes_and_times_are_read_as_people_write_them() -> None:
    assert [parse_size(text) for text in ("5GB", "800 mb", "3k", "17", "17B")] == [5 * 10**9, 8 * 10**8, 3000, 17, 17]
    assert [parse_duration(text) for text in ("90", "15min", 2.5, "1w")] == [90.0, 900.0, 2.5, 604_800.0]


@pytest.mark.parametrize("text", ["", "0", "5 apples", "-1GB", "1.5GB"])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="not a size"):
        parse_size(text)


ARABIC = "\u0661"
"""The digit 1 in Arabic script, which ``int`` and ``float`` accept."""


@pytest.mark.parametrize(
    "parse",
    [
        MarkerId.parse,
        MarkerId.checked_name,
        lambda text: MarkerId.parse(f"1:{text}"),
        lambda text: Best.parse(f"auc:max:{text}", several=True),
        parse_size,
        lambda text: parse_size(f"{text}GB"),
        parse_duration,
        lambda text: parse_duration(f"1.{text}s"),
        number,
        parse_uri,
        lambda text: parse_uri(f"kafka://broker:{text}/job"),
        lambda text: Retention(then_every=text).kept([], None),
        lambda text: RedisSink(f"redis://host:{text}/0", "p"),
    ],
)
@pytest.mark.parametrize("text", [ARABIC, f"{ARABIC}:{ARABIC}", f"1{ARABIC}"])
def test_digits_of_other_scripts_are_refused(parse: Callable[[str], object], text: str) -> None:
    with pytest.raises(ConfigError):
        parse(text)


def test_settings_and_options_take_the_digits_0_to_9_alone() -> None:
    assert declared(StreamConfig)["marker_every"].from_text("12") == 12
    assert declared(StreamConfig)["marker_every"].from_text(ARABIC) == ARABIC
    assert Condition.parse("auc>1").value == 1
    assert Condition.parse(f"auc={ARABIC}").value == ARABIC
    with pytest.raises(argparse.ArgumentTypeError):
        whole(1)(ARABIC)
    assert call("list", "file:///x", "--newest", ARABIC).exit_code == 2
