"""What can grow, and to which sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

Sizes = tuple[int, int, int]


@dataclass(frozen=True)
class Axis:
    """One thing that grows, all else small."""

    what: str
    make: Callable[..., Any]
    """Makes what is measured at one size: writes a log, returns the shape of a trainer, or writes the log of a vote."""
    small: int
    """Largest of the small sizes."""
    far: int
    """Largest of the far sizes."""
    ratio: int = 2
    """Each size by the size before it. The size of a pair of axes is their product, so it is 4 there."""
    kind: Literal["log", "trainer", "votes"] = "log"
    """Which calls are made along it."""

    def sizes(self, far: bool) -> Sizes:
        """Three sizes, the smallest first."""
        most = self.far if far else self.small
        return most // self.ratio**2, most // self.ratio, most
