"""Which marker a follower goes to next. No I/O.

Whether what a replica holds leads to a marker, and whether its tables are those of the marker. No I/O.
"""

from __future__ import annotations

from collections.abc import Iterable

from torchrec_stream_ckpt.errors import MarkerNotFoundError, SchemaMismatchError
from torchrec_stream_ckpt.extras.follower.source import handed_out
from torchrec_stream_ckpt.format.claim_changes import in_words
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.restore.plan import check_schema
from torchrec_stream_ckpt.util.types import MarkerId


def astray(lineage: Lineage, target: MarkerId, at: MarkerId, towards: MarkerId | None) -> str:
    """Say why what a replica holds does not lead to a marker; empty: it does.

    Args:
        lineage: The control partition.
        target: The marker.
        at: What the replica holds.
        towards: What it may hold rows of besides; None: nothing.
    """
    leading = lineage.leading_to(target)
    if at not in leading:
        how = "is on an abandoned branch: the trainer went on from an older one"
        return f"marker {at} {how if at in lineage.commits else 'was given up'}"
    if towards is not None and towards not in leading:
        return f"rows of marker {towards} may have been applied, and the trainer went on from an older one"
    return ""


def includes(way: Iterable[MarkerId], marker: MarkerId) -> bool:
    """Return whether a marker is on a way (:meth:`Lineage.way`). Its COMMIT may be gone, as after a trim."""
    return any(each.generation == marker.generation and marker <= each for each in way)


def changed_tables(lineage: Lineage, at: MarkerId, held: Schema, target: MarkerId, *, may_change: bool) -> str:
    """How the tables of a marker differ from those that a replica has, in words; empty: they do not.

    Args:
        lineage: The control partition.
        at: What the replica holds.
        held: Its tables, as they were handed out.
        target: The marker.
        may_change: Whether they may differ at all.

    Raises:
        SchemaMismatchError: they differ, and are not those of a model that has changed along one lineage; or they may
            not differ.
    """
    schema = lineage.claims[target.generation].schema
    newest = [lineage.newest_of(each.generation) for each in (at, target)]  # the one held may have been given up
    roots = [lineage.way(each)[0].generation for each in newest]
    if roots[0] != roots[1] and lineage.claims[roots[1]].changes is None:
        check_schema(held, handed_out(schema))
        return ""
    changed = "; ".join(in_words(lineage.claims[at.generation].schema, schema))
    if changed and not may_change:
        raise SchemaMismatchError(
            f"the model has changed after marker {at}: {changed}",
            hint="follow again with at_change='load', on a command line --at-change load; the replica's model must "
            "have the tables of the new one",
            marker=target,
        )
    return changed


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
        """True if the next look skips it, because it could not be read."""

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
        """Return whether the marker to load first can be loaded, and is on the way to the newest one."""
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
        """Return whether the next look goes to another marker."""
        return marker in self.passed or (self._skips and marker == self._detour)
