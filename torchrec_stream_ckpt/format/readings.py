"""What was read whole of a store, and when: so that not all of it is read each time. Specified in docs/format.md.

That rows were compared with what a marker proves of them: it is all in the name of an empty object.

Where a scrub of a store stands: one small object, so that the next one goes on there. See docs/format.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, get_type_hints

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.format.schema import canonical
from torchrec_stream_ckpt.util.layout import parse_proved_name, proved_name
from torchrec_stream_ckpt.util.types import MarkerId

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
    """True if the pass has read everything."""
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
        if place is None or not _is_sound_place(asdict(place)):
            raise CorruptionError("not the place of a scrub", name=where)
        return place


def _is_sound_place(values: dict[str, Any]) -> bool:
    """Return whether each field has a value of its type."""
    hints = get_type_hints(ScrubPlace)
    plain = all(
        type(values[each.name]) is hints[each.name] or (hints[each.name] is float and type(values[each.name]) is int)
        for each in fields(ScrubPlace)
        if each.name != "damaged"
    )
    names = all(isinstance(name, str) for name in values["damaged"])
    return plain and names and values["number"] > 0 and min(values[name] for name in _COUNTS) >= 0


_SAID = re.compile(
    r"(store|head|follower)-c([0-9a-f]{8})-p([0-9]{5})-w([0-9]{5})-d([0-9]{6,18})-t([0-9]{16})", re.ASCII
)


@dataclass(frozen=True, slots=True, order=True)
class Comparison:
    """One comparison of a marker with its proof."""

    job: bytes
    marker: MarkerId
    who: str
    """What the rows were read from: ``store``; ``head`` and ``follower`` are reserved."""
    chain: int
    """``RankEnd.chain`` of rank 0 at the marker: tells histories apart that share a job and a marker's name."""
    position: int
    """Of the marker's window."""
    width: int
    differing: int
    """Blocks that are not as they were proved, each once for weights and once for each state."""
    time_ms: int
    """When, Unix time. For people."""

    @property
    def name(self) -> str:
        """Of the object."""
        window = f"p{self.position:05d}-w{self.width:05d}-d{self.differing:06d}"
        return proved_name(self.job, self.marker, f"{self.who}-c{self.chain:08x}-{window}-t{self.time_ms:016d}")

    @property
    def time_s(self) -> float:
        """When, Unix time."""
        return self.time_ms / 1000

    @classmethod
    def parse(cls, name: str) -> Comparison | None:
        """Parse what :attr:`name` made; None: it is another name."""
        of = parse_proved_name(name)
        match = _SAID.fullmatch(of[2]) if of is not None else None
        if of is None or match is None:
            return None
        found = cls(*of[:2], match[1], int(match[2], 16), *(int(match[each]) for each in range(3, 7)))
        return found if found.name == name and found.position < POSITIONS and 0 < found.width <= POSITIONS else None


@dataclass(frozen=True, slots=True, order=True)
class ReadUnit:
    """A fold or a manifest with all its segments, of which every checksum was compared."""

    name: str
    """Of the fold's own object, or of the manifest."""
    crc: int
    """CRC32C of that object, which vouches for its segments."""
    num_bytes: int
    """Length of its segments."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What one process has read. Decides nothing that reading again would not decide."""

    time_s: float
    """When, Unix time. For people."""
    clocks: Mapping[str, float]
    """What clocks that are never set showed then, by name, in seconds."""
    units: tuple[ReadUnit, ...]
    store: str = ""
    """Which store it was: a copy elsewhere is another one. Empty: of no store, as older programs wrote it."""

    def to_bytes(self) -> bytes:
        body: dict[str, Any] = {"time_s": self.time_s, "clocks": dict(self.clocks)}
        body |= {"units": [asdict(each) for each in self.units]} | ({"store": self.store} if self.store else {})
        version = 2 if self.store else 1
        return canonical(
            {"format": version, "kind": "reading", "crc32c": f"{crc32c(canonical(body)):08x}", "body": body}
        )

    @classmethod
    def from_bytes(cls, data: Buffer, where: str) -> Reading:
        """Read and check one.

        Raises:
            CorruptionError: it is altered, of a newer format, or not a reading; names the object.
        """
        try:
            body = json.loads(bytes(data))["body"]
            units = tuple(ReadUnit(**unit) for unit in body["units"])
            store = body.get("store", "")
            found = cls(body["time_s"], body["clocks"], units, store) if _is_sound(body, units) else None
        except (ValueError, TypeError, KeyError, RecursionError):
            found = None
        if found is None or found.to_bytes() != data:
            raise CorruptionError("not a reading of this store", name=where)
        return found


def _is_sound(body: dict[str, Any], units: tuple[ReadUnit, ...]) -> bool:
    """Return whether each field has a value of its type."""
    if not isinstance(body["clocks"], dict):
        return False
    seconds = [body["time_s"], *body["clocks"].values()]
    plain = all(type(each) in (int, float) and abs(each) < 2**63 for each in seconds)  # no NaN, no infinity
    whole = all(type(each.crc) is int and type(each.num_bytes) is int and isinstance(each.name, str) for each in units)
    return plain and whole and isinstance(body.get("store", ""), str)
