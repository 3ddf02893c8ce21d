"""The JSON objects of a store: what was written comes back, and nothing that was altered is believed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.builders import claim, commit
from tests.parts import Dropped, Manifest
from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.manifest import Garbage, SegmentRef
from torchrec_stream_ckpt.util.layout import (
    StoreSegment,
    dropped_name,
    garbage_name,
    is_garbage_list,
    parse_pin_name,
    pin_name,
)
from torchrec_stream_ckpt.util.types import MarkerId

JOB = claim(1).job


def segment(marker: MarkerId) -> SegmentRef:
    return SegmentRef(StoreSegment(JOB, marker, 0, 0).name, 256, 128, 7, 3)


RECORDS: list[tuple[Any, Callable[..., Any]]] = [
    (Manifest(commit(1, 2), MarkerId(1, 1), ((segment(MarkerId(1, 2)),),)), Manifest.from_bytes),
    (Manifest(commit(1, 1), None, ((segment(MarkerId(1, 1)),),)), Manifest.from_bytes),
    (Dropped(commit(1, 2), MarkerId(1, 1), 1.5e9), Dropped.from_bytes),
    (Garbage(1.5e9, ("segments/a", "segments/b")), Garbage.from_bytes),
]


@pytest.mark.parametrize(("record", "parse"), RECORDS)
def test_what_was_written_comes_back(record: Any, parse: Callable[..., Any]) -> None:
    assert parse(record.to_bytes(), "here") == record


@pytest.mark.parametrize(("record", "parse"), RECORDS)
def test_no_byte_can_be_altered(record: Any, parse: Callable[..., Any]) -> None:
    data = record.to_bytes()
    for place in range(len(data)):
        altered = bytearray(data)
        altered[place] ^= 1
        with pytest.raises(CorruptionError) as caught:
            parse(bytes(altered), "here")
        assert caught.value.where["name"] == "here"
    for stop in range(0, len(data), 7):
        with pytest.raises(CorruptionError):
            parse(data[:stop], "here")


@pytest.mark.parametrize(
    ("record", "parse", "message"),
    [
        (Dropped(commit(1, 2), MarkerId(1, 2), 0.0), Dropped.from_bytes, "1:2 is not before 1:2"),
        (Dropped(commit(2, 2), MarkerId(1, 1), 0.0), Dropped.from_bytes, "1:1 is not before 2:2"),
        (Dropped(commit(1, 2), None, -1.0), Dropped.from_bytes, "-1.0 is not a time"),
        (Garbage(1e99, ()), Garbage.from_bytes, "is not a time"),
        (Garbage(0.0, ()), Dropped.from_bytes, "not a dropped of this store"),
    ],
)
def test_what_makes_no_sense_is_refused(record: Any, parse: Callable[..., Any], message: str) -> None:
    with pytest.raises(CorruptionError, match=message):
        parse(record.to_bytes(), "here")


def test_names_come_back_and_foreign_ones_are_none() -> None:
    marker = MarkerId(3, 17)
    assert parse_pin_name(pin_name(JOB, marker)) == (JOB, marker, "")
    assert parse_pin_name(pin_name(JOB, marker, "prod.v2")) == (JOB, marker, "prod.v2")
    assert parse_pin_name(pin_name(JOB, marker, "9")) is None
    assert parse_pin_name(dropped_name(JOB, marker)) is None
    assert is_garbage_list(garbage_name(JOB, 1_771_234_567_890, 7))
    assert not is_garbage_list(f"garbage/{JOB.hex()}/notes.json")
