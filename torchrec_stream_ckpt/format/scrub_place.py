"""Where a scrub of a store stands: one small object, so that the next one goes on there. See docs/format.md."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.schema import canonical

MAX_DAMAGED = 1000
"""Names of damaged objects that a place holds; of others it has the number."""


_COUNTS = ("done", "objects", "num_bytes", "more")


@dataclass(frozen=True, slots=True)
class ScrubPlace:
    """What a pass over a store has read so far. Decides nothing about the data."""

    number: int
    """Of the pass, counted from 1."""
    begun_s: float
    """When the pass began, Unix time."""
    unit: str = ""
    """Units are read in the order of their names: the last one of which something was read."""
    done: int = 0
    """How many objects of that unit were read."""
    objects: int = 0
    """Objects that the pass has read."""
    num_bytes: int = 0
    """Their bytes."""
    damaged: tuple[str, ...] = ()
    """Objects that are damaged: the next scrub reads them again."""
    ended: bool = False
    """Whether the pass has read everything."""
    whole_s: float = 0.0
    """When the last pass began that has read everything, Unix time; 0: there was none."""
    more: int = 0
    """Objects that are damaged and that ``damaged`` does not name."""

    def to_bytes(self) -> bytes:
        body = asdict(self)
        if not self.more:
            del body["more"]  # as older programs write and read it
        return canonical({"format": 1, "kind": "scrub", "crc32c": f"{crc32c(canonical(body)):08x}", "body": body})

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> ScrubPlace:
        """Read and check one.

        Raises:
            CorruptionError: it is altered, of a newer format, or not a place of a scrub; names the object.
        """
        try:
            raw = json.loads(bytes(data))
            body = raw["body"]
            right = raw == {"format": 1, "kind": "scrub", "crc32c": f"{crc32c(canonical(body)):08x}", "body": body}
            place = cls(**{**body, "damaged": tuple(body["damaged"])}) if right else None
        except (ValueError, TypeError, KeyError, RecursionError):
            place = None
        if place is None or not _is_sound(asdict(place)):
            raise CorruptionError("not the place of a scrub", name=where)
        return place


def _is_sound(values: dict[str, Any]) -> bool:
    """Tell whether each field has a value of its type."""
    hints = get_type_hints(ScrubPlace)
    plain = all(
        type(values[each.name]) is hints[each.name] or (hints[each.name] is float and type(values[each.name]) is int)
        for each in fields(ScrubPlace)
        if each.name != "damaged"
    )
    names = all(isinstance(name, str) for name in values["damaged"])
    return plain and names and values["number"] > 0 and min(values[name] for name in _COUNTS) >= 0
