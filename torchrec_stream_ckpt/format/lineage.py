"""What the control partition says: which trainer owns a generation, which markers exist, and what was trimmed.

The order of the control partition is the fence. Within one generation number the first CLAIM in log
order wins; a higher number fences all lower ones; a COMMIT counts only while its writer's generation is
the highest claimed before it. Nothing here reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.commits import Commits, Place
from torchrec_stream_ckpt.format.control import Claim, Commit, ControlRecord, Trim
from torchrec_stream_ckpt.format.packed_commit import PackedCommit
from torchrec_stream_ckpt.format.record import Meta
from torchrec_stream_ckpt.format.referring import resolved
from torchrec_stream_ckpt.format.remarks import End, Note
from torchrec_stream_ckpt.format.snapshot import Snapshot
from torchrec_stream_ckpt.types import LogSpan, MarkerId, RankEnd

_COMMIT = (PackedCommit, Commit)
_MAX_GAP = 1000
"""Numbers that an unsigned record may take out of use: not all of them."""


@dataclass(slots=True)
class Lineage:
    """The control partition, folded record by record in log order."""

    claims: dict[int, Claim] = field(default_factory=dict)
    """The winning CLAIM of each generation."""
    commits: Commits = field(default_factory=Commits)
    """Committed markers, oldest first."""
    trims: list[Trim] = field(default_factory=list)
    """The TRIMs that count, oldest first."""
    ends: dict[int, End] = field(default_factory=dict)
    """The last word of each generation that has one; only that of the newest generation says that the job has ended."""
    notes: dict[MarkerId, Meta] = field(default_factory=dict)
    """What NOTEs have added to the metadata of markers."""
    given_up: set[MarkerId] = field(default_factory=set)
    """Markers that existed, and that a TRIM has given up: their COMMITs are not kept."""
    stale: int = 0
    """Records that lost: CLAIMs of a taken number, late COMMITs, those of a fenced or foreign writer, and TRIMs and
    NOTEs of markers that do not exist."""
    unsigned: int = 0
    """Records that the commit key, where there is one, does not vouch for: they decide nothing."""
    taken: int = 0
    """The highest number that such a record has taken out of use."""
    _noted: dict[MarkerId, list[Note]] = field(default_factory=dict)
    """The NOTEs that still say something, oldest first."""
    _taken: dict[int, tuple[MarkerId, Trim]] = field(default_factory=dict)
    """For each generation of which data may be gone: the marker up to which, and the last TRIM that says so."""
    _ordered: tuple[tuple[int, MarkerId | None], dict[int, list[MarkerId]]] = field(
        default=((-1, None), {}), compare=False, repr=False
    )
    """(what :attr:`commits` held, its markers by generation), made anew when it holds another number or newest one."""

    _job: bytes | None = field(default=None, init=False, compare=False, repr=False)
    """Of the first CLAIM."""

    def __post_init__(self) -> None:
        self._job = next((claim.job for claim in self.claims.values()), None)
        for trim in self.trims:
            self._take(trim)

    @classmethod
    def of(cls, records: Iterable[ControlRecord | PackedCommit]) -> Lineage:
        lineage = cls()
        for record in records:
            lineage.apply(record)
        return lineage

    @classmethod
    def restored(
        cls,
        records: Iterable[ControlRecord | PackedCommit],
        *,
        stale: int,
        unsigned: int,
        taken: int,
        given_up: Iterable[MarkerId],
    ) -> Lineage:
        """The lineage that had these :meth:`records`, which all count, and these numbers."""
        lineage = cls(unsigned=unsigned, taken=taken, given_up=set(given_up))
        for record in records:
            if isinstance(record, Trim):
                lineage._count(record)  # what its rule asks for may have been given up since
            else:
                lineage.apply(record)
        lineage.stale += stale
        return lineage

    def records(self) -> Iterator[Claim | Commit | Trim | End | Note]:
        """The records that decide anything, in an order in which all of them count."""
        commits = {number: list(each) for number, each in groupby(self.commits.values(), lambda each: each.generation)}
        for number, claim in self.claims.items():
            yield claim
            yield from commits.get(number, ())
            if number in self.ends:
                yield self.ends[number]
        yield from self._deciding_trims()
        for marker in sorted(self._noted):
            yield from self._noted[marker]

    def _deciding_trims(self) -> list[Trim]:
        """The TRIMs that :attr:`trimmed` and :meth:`trim_of` name, oldest first."""
        deciding: dict[int, tuple[MarkerId, int]] = {}
        for place, trim in enumerate(self.trims):
            for marker in trim.markers:
                if marker.generation not in deciding or deciding[marker.generation][0] <= marker:
                    deciding[marker.generation] = marker, place
        newest = max(((trim.id, place) for place, trim in enumerate(self.trims)), default=None)
        places = {place for _, place in deciding.values()} | ({newest[1]} if newest is not None else set())
        return [self.trims[place] for place in sorted(places)]

    def apply(self, record: ControlRecord | PackedCommit, place: Place | None = None) -> None:
        """Fold one record.

        Args:
            record: The next one.
            place: Of a COMMIT that need not be held for ever: where it can be fetched.
        """
        if isinstance(record, Snapshot):
            return  # it says again what others have said
        if self._job is not None and record.job != self._job:
            raise CorruptionError(
                f"control record of job {record.job.hex()} in the log of job {self._job.hex()}",
                hint="give every job its own directory or topic",
                generation=record.generation,
            )
        if isinstance(record, _COMMIT):  # first: nearly all are
            self._commit(record, place)
        elif isinstance(record, Claim):
            self._claim(record)
        elif isinstance(record, Trim):
            self._trim(record)
        elif isinstance(record, End):
            self._end(record)
        else:
            self._note(record)

    def disregard(self, generation: int) -> None:
        """A record that the commit key does not vouch for, of that generation or, if 0, of none that can be told.

        Its number is not given out again: its writer may be an honest one without the key, that writes segments.
        """
        self.unsigned += 1
        if generation <= self.newest_generation + _MAX_GAP:
            self.taken = max(self.taken, generation)

    def _claim(self, claim: Claim) -> None:
        if claim.generation <= self.newest_generation:
            self.stale += 1
            return
        claim = resolved(claim, self.claims)
        before = self.claims.get(self.newest_generation)
        if before is not None:  # a thousand generations keep tables and layouts once
            schema = before.schema if before.schema.is_same(claim.schema) else claim.schema
            layout = before.layout if before.layout == claim.layout else claim.layout
            claim = replace(claim, schema=schema, layout=layout)
        self.claims[claim.generation] = claim
        self._job = self._job or claim.job

    def _commit(self, commit: Commit | PackedCommit, place: Place | None) -> None:
        generation = commit.generation
        owner = self.claims.get(generation)
        if owner is None or owner.nonce != commit.nonce or generation != self.newest_generation:
            self.stale += 1
            return
        marker, newest = MarkerId(generation, commit.marker), self.commits.newest
        # A COMMIT that was not acknowledged may land late, after that of a later marker: it does not count.
        late = newest is not None and marker <= newest
        if late or generation in self.ends:
            self.stale += 1
        else:
            self.commits.add(marker, commit, place)

    def _trim(self, trim: Trim) -> None:
        # What is older than what may be gone did exist, whether or not its COMMIT has been given up.
        if all(marker in self.commits or self._is_gone(marker) for marker in trim.markers):
            self._count(trim)
        else:
            self.stale += 1

    def _is_gone(self, marker: MarkerId) -> bool:
        taken = self._taken.get(marker.generation)
        return taken is not None and marker <= taken[0]

    def _take(self, trim: Trim) -> None:
        for marker in trim.markers:
            taken = self._taken.get(marker.generation)
            if taken is None or taken[0] <= marker:
                self._taken[marker.generation] = marker, trim

    def _count(self, trim: Trim) -> None:
        self.trims.append(trim)
        self._take(trim)
        if trim.given_up:
            parents = {claim.parent for claim in self.claims.values()}
            for marker in trim.given_up:
                if marker in self.commits and marker not in parents:
                    del self.commits[marker]
                    self.notes.pop(marker, None)
                    self._noted.pop(marker, None)
                    self.given_up.add(marker)

    def _end(self, end: End) -> None:
        owner = self.claims.get(end.generation)
        if owner is None or owner.nonce != end.nonce or end.generation != self.newest_generation:
            self.stale += 1
        else:
            self.ends[end.generation] = end

    def _note(self, note: Note) -> None:
        if note.id in self.commits:
            self.notes[note.id] = tuple(sorted((dict(self.notes.get(note.id, ())) | dict(note.meta)).items()))
            self._noted[note.id] = _deciding_notes([*self._noted.get(note.id, ()), note])
        else:
            self.stale += 1

    def knows(self, record: ControlRecord) -> bool:
        """Whether it says what the record says."""
        if isinstance(record, Claim):
            return self.claims.get(record.generation) == record
        if isinstance(record, Commit):
            return self.commits.get(record.id) == record
        if isinstance(record, Trim):
            return record in self.trims
        if isinstance(record, End):
            return self.ends.get(record.generation) == record
        if isinstance(record, Snapshot):
            return True
        return record.id in self.commits and set(record.meta) <= set(self.meta(record.id))

    @property
    def ended(self) -> End | None:
        """The job's last word; None while a trainer may be at work, or has died without one."""
        return self.ends.get(self.newest_generation)

    def meta(self, marker: MarkerId) -> Meta:
        """Metadata of a committed marker: what its trainer said, under what was added later."""
        said = dict(self.commits[marker].meta or ()) | dict(self.notes.get(marker, ()))
        return tuple(sorted(said.items()))

    @property
    def job(self) -> bytes:
        return next(iter(self.claims.values())).job

    @property
    def newest_generation(self) -> int:
        return next(reversed(self.claims), 0)  # each one is higher than all before

    @property
    def next_generation(self) -> int:
        """The number for a new trainer."""
        return max(self.newest_generation, self.taken) + 1

    @property
    def newest(self) -> Commit | None:
        """The committed marker that was committed last."""
        marker = self.commits.newest
        return self.commits[marker] if marker is not None else None

    def find(self, marker: MarkerId) -> Commit:
        """The commit of ``marker``.

        Raises:
            MarkerNotFoundError: it was never committed.
        """
        self._check_committed(marker)
        return self.commits[marker]

    def _check_committed(self, marker: MarkerId) -> None:
        if marker in self.commits:
            return
        if marker in self.given_up:
            raise MarkerNotFoundError(
                f"marker {marker} was given up, and a trim took its COMMIT",
                hint="choose another one: stream-ckpt list URI shows which are offered",
            )
        known = ", ".join(str(known) for known in list(self.commits)[-5:]) or "none at all"
        raise MarkerNotFoundError(
            f"marker {marker} is not committed (newest committed: {known})",
            hint="list them: stream-ckpt list URI",
        )

    def path(self, marker: MarkerId) -> list[Commit]:
        """The commits whose frames make up ``marker``: root generation first, ``marker`` itself last.

        Frames after a generation's commit on this path are on an abandoned timeline.
        """
        return self.commits.named(self.way(marker))

    def way(self, marker: MarkerId) -> list[MarkerId]:
        """The markers of :meth:`path`; needs none of their COMMITs."""
        self._check_committed(marker)
        way = [marker]
        while (parent := self.claims[way[-1].generation].parent) is not None:
            if parent.generation >= way[-1].generation:
                raise CorruptionError(f"generation {way[-1].generation} names {parent} as its parent")
            self._check_committed(parent)
            way.append(parent)
        return way[::-1]

    def previous(self, marker: MarkerId) -> MarkerId | None:
        """The committed marker before ``marker`` in its generation; None at the first one."""
        same = self._of_generation(marker.generation)
        place = bisect_left(same, marker)
        return same[place - 1] if place else None

    def chain(self, marker: MarkerId) -> list[Commit]:
        """All committed markers on the path to ``marker``, oldest first, ``marker`` itself last.

        What one generation sent between two neighbors, or from its start, is an interval.
        """
        return list(self.commits.through(self.leading_to(marker)))

    def leading_to(self, marker: MarkerId) -> list[MarkerId]:
        """The markers of :meth:`chain`; needs none of their COMMITs."""
        leading: list[MarkerId] = []
        for ancestor in self.way(marker):
            same = self._of_generation(ancestor.generation)
            leading += same[: bisect_right(same, ancestor)]
        return leading

    def towards(self, marker: MarkerId, since: MarkerId | None = None) -> Lineage:
        """The part of this that a restore of ``marker`` needs: the markers that lead to it, and their generations.

        With ``since``, a marker on the path that the reader has: of those before it only what the path stands on.
        """
        way, leading = self.way(marker), self.leading_to(marker)
        if since is not None:
            place = leading.index(since)
            leading = [each for each in leading[:place] if each in way] + leading[place:]
        claims = {each.generation: self.claims[each.generation] for each in way}
        return Lineage(claims, self.commits.only(leading))

    def newest_of(self, generation: int) -> MarkerId:
        """The newest committed marker of a generation that has one."""
        return self._of_generation(generation)[-1]

    def _of_generation(self, generation: int) -> list[MarkerId]:
        """The committed markers of a generation, oldest first."""
        state = (len(self.commits), self.commits.newest)
        if self._ordered[0] != state:
            ordered: dict[int, list[MarkerId]] = {}
            for marker in self.commits:
                ordered.setdefault(marker.generation, []).append(marker)
            self._ordered = state, ordered
        return self._ordered[1].get(generation, [])

    def bases(self, marker: MarkerId) -> dict[int, int]:
        """For each table, the newest generation on the path to ``marker`` that sent it whole."""
        bases: dict[int, int] = {}
        for each in self.way(marker):
            bases |= dict.fromkeys(self.claims[each.generation].swept, each.generation)
        return bases

    @property
    def trimmed(self) -> Trim | None:
        """The TRIM of the newest marker."""
        return max(reversed(self.trims), key=lambda trim: trim.id, default=None)

    def trim_of(self, generation: int) -> Trim | None:
        """The TRIM that took most of a generation's data, None while all of it has to be there.

        A later one for an older marker takes nothing back; of two for one marker the later one says where the store is.
        """
        taken = self._taken.get(generation)
        return taken[1] if taken is not None else None

    @property
    def reach(self) -> dict[int, MarkerId]:
        """For each generation of which data may be gone, the marker up to which."""
        return {generation: marker for generation, (marker, _) in self._taken.items()}

    def spans(
        self, generation: int, ranks: Iterable[RankEnd], reach: Mapping[int, MarkerId] | None = None
    ) -> list[LogSpan]:
        """What the log has to hold of the streams of one generation up to ``ranks``; none of those that it need not.

        Args:
            generation: Whose streams.
            ranks: Where they end.
            reach: What is trimmed, if it is not what :attr:`reach` says; nothing: all, from HELLO to MARK.
        """
        marker = (self.reach if reach is None else reach).get(generation)
        gone = {(end.rank, end.partition): end.end for end in self.commits[marker].ranks} if marker else {}
        begins = [(max(end.begin, gone.get((end.rank, end.partition), 0)), end) for end in ranks]
        return [LogSpan(generation, end.partition, begin, end.end) for begin, end in begins if begin < end.end]


def _deciding_notes(notes: list[Note]) -> list[Note]:
    """The NOTEs of one marker that are the last to set some name."""
    said: set[str] = set()
    deciding = []
    for note in reversed(notes):
        names = {name for name, _ in note.meta}
        if names - said:
            deciding.append(note)
            said |= names
    return deciding[::-1]
