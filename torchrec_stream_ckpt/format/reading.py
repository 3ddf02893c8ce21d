"""What was read whole of a store, and when: so that not all of it is read each time. Specified in docs/format.md."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from crc32c import crc32c

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import Buffer
from torchrec_stream_ckpt.format.schema import canonical


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
    """Tell whether each field has a value of its type."""
    if not isinstance(body["clocks"], dict):
        return False
    seconds = [body["time_s"], *body["clocks"].values()]
    plain = all(type(each) in (int, float) and abs(each) < 2**63 for each in seconds)  # no NaN, no infinity
    whole = all(type(each.crc) is int and type(each.num_bytes) is int and isinstance(each.name, str) for each in units)
    return plain and whole and isinstance(body.get("store", ""), str)
