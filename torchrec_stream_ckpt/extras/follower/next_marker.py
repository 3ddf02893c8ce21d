"""Choose the marker that a follower goes to next. No I/O.

Also checks whether the rows of a replica lead to a marker, and whether its tables are those of the marker.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_stream_ckpt.errors import MarkerNotFoundError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower.source import handed_out
from torchrec_stream_ckpt.format.claim_changes import in_words
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema, check_schema
from torchrec_stream_ckpt.util.types import MarkerId


def astray(lineage: Lineage, target: MarkerId, at: MarkerId, towards: MarkerId | None) -> str:
    """Return why the rows of a replica do not lead to a marker; empty if they do.

    Args:
        lineage: The control partition.
        target: The marker to go to.
        at: The marker that the replica holds.
        towards: Another marker of which the replica may hold some rows; None if it holds rows of ``at`` only.
    """
    leading = lineage.leading_to(target)
    if at not in leading:
        how = "is on an abandoned branch: the trainer continued from an older marker"
        return f"marker {at} {how if at in lineage.commits else 'was given up'}"
    if towards is not None and towards not in leading:
        return f"rows of marker {towards} may have been applied, but the trainer continued from an older marker"
    return ""


def includes(way: Iterable[MarkerId], marker: MarkerId) -> bool:
    """Return whether a marker is on a path (:meth:`Lineage.way`). Its COMMIT may be gone, as after a trim."""
    return any(each.generation == marker.generation and marker <= each for each in way)


def changed_tables(lineage: Lineage, at: MarkerId, held: Schema, target: MarkerId, *, may_change: bool) -> str:
    """Return how the tables of a marker differ from those of a replica, in words; empty if they do not.

    Args:
        lineage: The control partition.
        at: The marker that the replica holds.
        held: Tables of the replica, as they were handed out.
        target: The marker to go to.
        may_change: Whether the tables may differ at all.

    Raises:
        SchemaMismatchError: the tables differ, and the model has not changed along one lineage; or they may not differ.
    """
    schema = lineage.claims[target.generation].schema
    newest = [lineage.newest_of(each.generation) for each in (at, target)]  # the held marker may have been given up
    roots = [lineage.way(each)[0].generation for each in newest]
    if roots[0] != roots[1] and lineage.claims[roots[1]].changes is None:
        check_schema(held, handed_out(schema))
        return ""
    changed = "; ".join(in_words(lineage.claims[at.generation].schema, schema))
    if changed and not may_change:
        raise SchemaMismatchError(
            f"the model has changed after marker {at}: {changed}",
            hint="follow again with at_change='load' (--at-change load), and give the replica's model the tables of "
            "the new one",
            marker=target,
        )
    return changed


class NextMarker:
    """Chooses the newest marker, with two exceptions: markers to pass over, and a marker to load first."""

    def __init__(self) -> None:
        self.passed: frozenset[MarkerId] = frozenset()
        """Markers that were given up, or to which rows cannot be reset. The follower goes to a newer one."""
        self.first: MarkerId | None = None
        """A marker to load before newer ones, if it is on the path to them: it has proved rows that newer markers
        perhaps do not prove."""
        self._detour: MarkerId | None = None
        """The marker to load first, while the follower goes to it."""
        self._skips = False
        """True if the next look skips the marker to load first, because it could not be read."""

    def pass_over(self, markers: Iterable[MarkerId]) -> None:
        """Never go to these markers again."""
        self.passed |= frozenset(markers)

    def loaded(self) -> None:
        """Note that a load was applied: of the marker to load first, or of a newer one in its place."""
        self.first = None

    def next(self, lineage: Lineage, at: MarkerId, *, is_whole: bool) -> Commit | None:
        """Return the marker to go to; None if the replica is already there, or has to wait for another one.

        Args:
            lineage: The control partition; it has at least one COMMIT.
            at: The marker that the replica holds.
            is_whole: Whether the replica holds all rows of that marker.
        """
        newest = next((each for each in reversed(lineage.commits) if each not in self.passed), None)
        if newest is None or (newest < at and newest != lineage.commits.newest):
            return None
        leads = not self._skips and self._leads_to(lineage, newest)
        self._skips, self._detour = False, self.first if leads else None
        if self._detour is not None:
            return lineage.commits[self._detour]
        return lineage.commits[newest] if newest != at or not is_whole else None

    def _leads_to(self, lineage: Lineage, newest: MarkerId) -> bool:
        """Return whether the marker to load first can be loaded, and is on the path to the newest one."""
        first = self.first
        if first is None or first == newest or first in self.passed or first not in lineage.commits:
            return False
        try:
            return includes(lineage.way(newest), first)
        except MarkerNotFoundError:
            return False

    def skip(self, marker: MarkerId) -> bool:
        """Skip an unreadable marker at the next look, if it is the one to load first. Returns whether it is."""
        self._skips = marker == self._detour
        return self._skips

    def passes(self, marker: MarkerId) -> bool:
        """Return whether the next look goes to another marker."""
        return marker in self.passed or (self._skips and marker == self._detour)
