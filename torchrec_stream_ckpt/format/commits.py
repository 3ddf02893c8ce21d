"""COMMITs of a lineage, by marker. A COMMIT is parsed when it is first used, or fetched from the log.

Of tens of thousands of markers a trainer needs all names but few COMMITs: those that lead to its parent, and one per
generation. So if COMMITs can be fetched again, only the newest one of each generation is held. For the others, the name
and the place in the log are held. A COMMIT that is requested by name is held from then on. Every query has the same
answer as if all COMMITs were held. But if the answer needs a COMMIT that is not held, the log may be unavailable.

A COMMIT from a snapshot has no place of its own and is always held: a trim makes the snapshot and drops the markers
that the store gave up. A COMMIT that differs in any byte from its writer's encoding is always held too.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from itertools import islice
from typing import Any, TypeAlias

from torchrec_stream_ckpt.errors import located
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.packed_commit import PackedCommit, open_commit
from torchrec_stream_ckpt.util.types import MarkerId

Place: TypeAlias = int
"""Place of a COMMIT in its log, in the terms of the function that fetches it."""
Fetch: TypeAlias = Callable[[Mapping[MarkerId, Place]], Mapping[MarkerId, bytes]]
"""Function that returns the frames of COMMITs in one pass over the log."""

_AT_A_TIME = 1024
"""COMMITs that are fetched at once when a caller iterates over all of them."""


class Commits(MutableMapping[MarkerId, Commit]):
    """Committed markers, in the order in which they were committed.

    Args:
        commits: Markers that are known at the start.
    """

    __slots__ = ("_held", "_last", "fetch")

    def __init__(self, commits: Mapping[MarkerId, Commit | bytes] | None = None) -> None:
        self._held: dict[MarkerId, Commit | bytes | Place] = dict(commits or {})
        """The COMMIT, its frame, or its place, by marker."""
        self._last: tuple[MarkerId, Place] | None = None
        """The newest marker that has a place and is held, with that place."""
        self.fetch: Fetch | None = None
        """Function that fetches the COMMITs that are not held."""

    def add(self, marker: MarkerId, commit: Commit | PackedCommit, place: Place | None = None) -> None:
        """Add a marker. If it has a place, the COMMIT before it in its generation is no longer held."""
        self._held[marker] = commit.frame if isinstance(commit, PackedCommit) else commit
        if place is None:
            return
        if self._last is not None and self._last[0].generation == marker.generation:
            self._held[self._last[0]] = self._last[1]
        self._last = marker, place

    @property
    def newest(self) -> MarkerId | None:
        """The marker that was committed last. None if no marker was committed."""
        return next(reversed(self._held), None)

    def __getitem__(self, marker: MarkerId) -> Commit:
        found = self._held[marker]
        if not isinstance(found, Commit):
            found = _opened(marker, found if isinstance(found, bytes) else self._fetched({marker: found})[marker])
            self._held[marker] = found
        return found

    def named(self, markers: Iterable[MarkerId]) -> list[Commit]:
        """Return the COMMITs of these markers, fetched in one pass."""
        markers = list(markers)
        away = {marker: place for marker in markers if isinstance(place := self._held[marker], int)}
        if away:
            self._held |= {marker: _opened(marker, frame) for marker, frame in self._fetched(away).items()}
        return [self[marker] for marker in markers]

    def only(self, markers: Collection[MarkerId]) -> Commits:
        """Return a copy with only these markers, in this order. Their COMMITs are held as they are here."""
        some = Commits()
        some._held = {marker: self._held[marker] for marker in markers}
        some.fetch = self.fetch
        return some

    def __setitem__(self, marker: MarkerId, commit: Commit) -> None:
        self._held[marker] = commit

    def __delitem__(self, marker: MarkerId) -> None:
        del self._held[marker]
        if self._last is not None and self._last[0] == marker:
            self._last = None

    def __contains__(self, marker: object) -> bool:
        return marker in self._held

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[MarkerId]:
        return iter(self._held)

    def __reversed__(self) -> Iterator[MarkerId]:
        return reversed(self._held)

    def values(self) -> CommitValues:
        return CommitValues(self)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Commits):
            return dict(self.items()) == dict(other.items())
        return dict(self.items()) == other if isinstance(other, Mapping) else NotImplemented

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Commits({', '.join(map(str, self._held))})"

    def __reduce__(self) -> Any:
        """Pickle with all COMMITs, because another process cannot fetch them."""
        away = {marker: place for marker, place in self._held.items() if isinstance(place, int)}
        return Commits, (self._held | dict(self._fetched(away)) if away else self._held,)

    def through(self, markers: Iterable[MarkerId], *, to_end: bool = False) -> Iterator[Commit]:
        """Iterate over the COMMITs of these markers. Those that are fetched for this are not held.

        Args:
            markers: The markers.
            to_end: True if the caller wants all of them, so that the first ones are not fetched alone.
        """
        markers, at_a_time = iter(markers), _AT_A_TIME if to_end else 1
        while some := list(islice(markers, at_a_time)):
            at_a_time = min(4 * at_a_time, _AT_A_TIME)  # a caller that wants the first few fetches only a few
            away = {marker: place for marker in some if isinstance(place := self._held[marker], int)}
            fetched = self._fetched(away) if away else {}
            for marker in some:
                yield _opened(marker, fetched[marker]) if marker in fetched else self[marker]

    def _fetched(self, away: Mapping[MarkerId, Place]) -> Mapping[MarkerId, bytes]:
        assert self.fetch is not None
        return self.fetch(away)


def _opened(marker: MarkerId, frame: bytes) -> Commit:
    """Parse the COMMIT of a marker.

    Raises:
        CorruptionError: a field is invalid; the error names the marker.
    """
    with located(marker=marker):
        return open_commit(frame)


class CommitValues(ValuesView[Commit]):
    """COMMITs in order; see :meth:`Commits.through`."""

    _mapping: Commits

    def __iter__(self) -> Iterator[Commit]:
        return self._mapping.through(list(self._mapping))

    def __reversed__(self) -> Iterator[Commit]:
        return self._mapping.through(list(reversed(self._mapping)))
