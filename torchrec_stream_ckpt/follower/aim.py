"""Which marker a follower goes to next. No I/O."""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_stream_ckpt.errors import MarkerNotFoundError
from torchrec_stream_ckpt.follower.way import includes
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.types import MarkerId


class Aim:
    """The newest marker, with two exceptions: markers that are passed over, and one that is to be loaded first."""

    def __init__(self) -> None:
        self.passed: frozenset[MarkerId] = frozenset()
        """Markers that were given up, or to which nothing can be taken back: the follower goes to a newer one."""
        self._first: MarkerId | None = None
        """A marker to load before newer ones: it has proved rows that these perhaps do not prove."""
        self._detour: MarkerId | None = None
        """That marker, while the follower goes to it."""
        self._skips = False
        """Whether the next look skips it, because it could not be read."""

    def pass_over(self, markers: Iterable[MarkerId]) -> None:
        """Go to none of these markers any more."""
        self.passed |= frozenset(markers)

    def load_first(self, marker: MarkerId) -> None:
        """Go to a marker before newer ones, if it is on the way to them."""
        self._first = marker

    def loaded(self) -> None:
        """A load was applied: of the marker to load first, or of a newer one in its place."""
        self._first = None

    def next(self, lineage: Lineage, at: MarkerId, *, is_whole: bool) -> Commit | None:
        """The marker to go to; None: the replica is there, or has to wait for another one.

        Args:
            lineage: The control partition; something is committed.
            at: Where the replica stands.
            is_whole: Whether it holds all that it says.
        """
        newest = next((each for each in reversed(lineage.commits) if each not in self.passed), None)
        if newest is None or (newest < at and newest != lineage.commits.newest):
            return None
        leads = not self._skips and self._leads_to(lineage, newest)
        self._skips, self._detour = False, self._first if leads else None
        if self._detour is not None:
            return lineage.commits[self._detour]
        return lineage.commits[newest] if newest != at or not is_whole else None

    def _leads_to(self, lineage: Lineage, newest: MarkerId) -> bool:
        """Tell whether the marker to load first can be loaded, and is on the way to the newest one."""
        first = self._first
        if first is None or first == newest or first in self.passed or first not in lineage.commits:
            return False
        try:
            return includes(lineage.way(newest), first)
        except MarkerNotFoundError:
            return False

    def skip(self, marker: MarkerId) -> bool:
        """Skip a marker that cannot be read at the next look, if it is the one to load first; returns whether it is."""
        self._skips = marker == self._detour
        return self._skips

    def passes(self, marker: MarkerId) -> bool:
        """Tell whether the next look goes to another marker."""
        return marker in self.passed or (self._skips and marker == self._detour)
