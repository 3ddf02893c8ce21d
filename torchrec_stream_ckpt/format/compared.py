"""That rows were compared with what a marker proves of them: it is all in the name of an empty object."""

from __future__ import annotations

import re
from dataclasses import dataclass

from torchrec_stream_ckpt.format.proof import POSITIONS
from torchrec_stream_ckpt.layout import parse_proved_name, proved_name
from torchrec_stream_ckpt.types import MarkerId

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
