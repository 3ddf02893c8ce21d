"""Each value of what is stored as JSON, replaced by odd ones, checksums made to fit: read or refused, never a crash."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator
from typing import Any

import pytest
from crc32c import crc32c

from tests.fuzz.targets import Frames, StoreObjects
from tests.golden import make, make_store
from tests.parts import ScrubPlace
from torchrec_stream_ckpt.errors import CorruptionError, StreamCkptError, UnsupportedError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, json_frame, parse_header, payload_of

ODD: tuple[Any, ...] = (
    *(None, True, -1, 0, 1, 2**53, 2**63, 2**64, 10**400, 1.5, -0.0, 1e308),
    *(math.inf, math.nan, "", "x", "é", "1" * 5000, [], {}, [None], [[]], [1, 2], {"a": 1}),
)
FRAMES = {name: frame for name, frame in make.frames().items() if frame[HEADER_LEN : HEADER_LEN + 1] == b"{"}
SCRUB = {"scrub": ScrubPlace(3, 17.0, "folds/x", 2, 40, 4000, ("segments/y",), whole_s=5.0).to_bytes()}
OBJECTS = {name: data for name, data in make_store.objects().items() if name != "pin"} | SCRUB
JSON_OBJECTS = [name for name, data in OBJECTS.items() if data.startswith(b"{")]


def _places(raw: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Ways to all values within this one; its own is empty."""
    yield path
    for key, value in raw.items() if isinstance(raw, dict) else enumerate(raw) if isinstance(raw, list) else ():
        yield from _places(value, (*path, key))


def _put(raw: Any, path: tuple[str | int, ...], value: Any) -> Any:
    if not path:
        return value
    copy = dict(raw) if isinstance(raw, dict) else list(raw)
    copy[path[0]] = _put(raw[path[0]], path[1:], value)
    return copy


def _odd(raw: Any) -> Iterator[Any]:
    for path in _places(raw):
        for value in ODD:
            yield _put(raw, path, value)


def _text(raw: Any) -> bytes:
    """As ``canonical`` writes it, and what it refuses to write."""
    return json.dumps(raw, sort_keys=True, separators=(",", ":")).encode()


def _read(data: bytes) -> str:
    with contextlib.suppress(CorruptionError):
        return repr(ScrubPlace.from_bytes(data, "odd"))
    return StoreObjects.read(data)


def test_there_are_frames_and_objects_of_json() -> None:
    assert FRAMES.keys() >= {"hello", "mark", "commit", "claim_changed", "snapshot", "base", "note_signed"}
    assert {"manifest", "fold", "dropped", "reading_2", "garbage_2", "verdict", "scrub"} <= set(JSON_OBJECTS)


@pytest.mark.parametrize("name", FRAMES)
def test_a_frame_with_an_odd_value_is_read_or_refused(name: str) -> None:
    header = parse_header(FRAMES[name])
    refused = 0
    for raw in _odd(json.loads(bytes(payload_of(header, FRAMES[name])))):
        with contextlib.suppress(UnsupportedError):  # too large for a frame
            frame = bytes(json_frame(header, _text(raw)))
        try:
            Frames.read(frame)
        except StreamCkptError:
            refused += 1
    assert refused > len(ODD)


@pytest.mark.parametrize("name", JSON_OBJECTS)
def test_an_object_with_an_odd_value_is_read_or_refused(name: str) -> None:
    refused = 0
    for raw in _odd(json.loads(OBJECTS[name])):
        if isinstance(raw, dict) and "body" in raw:
            raw["crc32c"] = f"{crc32c(_text(raw['body'])):08x}"
        try:
            _read(_text(raw))
        except StreamCkptError:
            refused += 1
    assert refused > len(ODD)
