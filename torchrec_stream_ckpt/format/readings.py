"""Records of complete reads of a store, so that not all of it is read each time. Specified in docs/format.md.

A comparison of rows with a marker's proof is recorded entirely in the name of an empty object.

The progress of a scrub is one small object, so that the next scrub continues there.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass
from typing import ClassVar

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.manifest import FORMAT, StoreObject
from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.util.layout import parse_proved_name, proved_name
from torchrec_stream_ckpt.util.types import MarkerId

MAX_DAMAGED = 1000
"""Limit of the names of damaged objects in a record. Further ones are only counted."""


@dataclass(frozen=True, slots=True)
class ScrubPlace(StoreObject):
    """Progress of a pass over a store. It has no effect on the data."""

    KIND: ClassVar[str] = "scrub"
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"more"})
    number: int
    """Number of the pass, counted from 1."""
    begun_s: float
    """Time when the pass began, Unix time."""
    unit: str = ""
    """Last unit of which an object was read. Units are read in the order of their names."""
    done: int = 0
    """Number of objects of that unit that were read."""
    objects: int = 0
    """Number of objects that the pass has read."""
    num_bytes: int = 0
    """Total bytes of these objects."""
    damaged: tuple[str, ...] = ()
    """Damaged objects. The next scrub reads them again."""
    ended: bool = False
    """True if the pass has read everything."""
    whole_s: float = 0.0
    """Time when the last complete pass began, Unix time. 0 if there was none."""
    more: int = 0
    """Number of damaged objects that are not in ``damaged``."""

    @property
    def left_out(self) -> Set[str]:
        return self.OPTIONAL if not self.more else frozenset()

    def check(self, where: str) -> None:
        if not self.number:
            raise CorruptionError("the number of a scrub's pass must be above 0", name=where)


@dataclass(frozen=True, slots=True, order=True)
class Comparison:
    """One comparison of a marker with its proof."""

    job: bytes
    marker: MarkerId
    who: str
    """Source of the rows: ``store``. ``head`` and ``follower`` are reserved."""
    chain: int
    """``RankEnd.chain`` of rank 0 at the marker. Distinguishes histories that share a job and a marker's name."""
    position: int
    """Position of the marker's window."""
    width: int
    differing: int
    """Number of blocks that differ from the proof, counted once for weights and once for each state."""
    time_ms: int
    """Time of the comparison, Unix time in milliseconds. For people."""

    @property
    def name(self) -> str:
        """Name of the object."""
        window = f"p{self.position:05d}-w{self.width:05d}-d{self.differing:06d}"
        return proved_name(self.job, self.marker, f"{self.who}-c{self.chain:08x}-{window}-t{self.time_ms:016d}")

    @property
    def time_s(self) -> float:
        """Time of the comparison, Unix time."""
        return self.time_ms / 1000

    @classmethod
    def parse(cls, name: str) -> Comparison | None:
        """Parse a name that :attr:`name` made. Returns None for any other name."""
        found = parse_proved_name(name, cls)
        return found if found is not None and found.position < POSITIONS and 0 < found.width <= POSITIONS else None


@dataclass(frozen=True, slots=True, order=True)
class ReadUnit:
    """A fold or a manifest with all its segments, of which every checksum was compared."""

    name: str
    """Name of the fold's own object, or of the manifest."""
    crc: int
    """CRC32C of that object, which vouches for its segments."""
    num_bytes: int
    """Total length of its segments, in bytes."""


@dataclass(frozen=True, slots=True)
class Reading(StoreObject):
    """Record of the units that one process has read. It decides nothing that another read would not decide."""

    KIND: ClassVar[str] = "reading"
    NEWEST: ClassVar[int] = 2
    OPTIONAL: ClassVar[frozenset[str]] = frozenset({"store"})
    time_s: float
    """Time of the record, Unix time. For people."""
    clocks: Mapping[str, float]
    """Readings at that time of clocks that are never set, by name, in seconds."""
    units: tuple[ReadUnit, ...]
    store: str = ""
    """Identity of the store; a copy elsewhere is another store. Empty in records of older programs."""

    @property
    def format(self) -> int:
        return 2 if self.store else FORMAT
