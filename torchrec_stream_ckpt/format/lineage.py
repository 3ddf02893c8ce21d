"""Lineage from the control partition: the owner of each generation, the existing markers, and the trimmed data.

The order of the control partition is the fence. Within one generation number the first CLAIM in log
order wins. A higher number fences all lower ones. A COMMIT counts only while its writer's generation is
the highest one claimed before it. Nothing here reads a clock.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby, islice, takewhile

from torchrec_stream_ckpt.errors import CorruptionError, MarkerNotFoundError
from torchrec_stream_ckpt.format.aliases import aliases, without_aliases
from torchrec_stream_ckpt.format.claim_changes import ClaimChanges, in_words, only_reassigned
from torchrec_stream_ckpt.format.claim_features import check_readable
from torchrec_stream_ckpt.format.claim_references import resolved
from torchrec_stream_ckpt.format.commits import Commits, Place
from torchrec_stream_ckpt.format.control import Claim, Commit, ControlRecord, Trim
from torchrec_stream_ckpt.format.end_note import End, Note
from torchrec_stream_ckpt.format.packed_commit import PackedCommit
from torchrec_stream_ckpt.format.record import Meta
from torchrec_stream_ckpt.format.snapshot import Snapshot
from torchrec_stream_ckpt.format.trims import Trims
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd, grouped

_COMMIT = (PackedCommit, Commit)
_MAX_GAP = 1000
"""Largest gap of generation numbers that an unsigned record may reserve, so that it cannot use up all of them."""


@dataclass(slots=True)
class Lineage:
    """The control partition, folded record by record in log order."""

    claims: dict[int, Claim] = field(default_factory=dict)
    """The winning CLAIM of each generation."""
    commits: Commits = field(default_factory=Commits)
    """Committed markers, oldest first."""
    trims: Trims = field(default_factory=Trims)
    """The TRIMs that count."""
    ends: dict[int, End] = field(default_factory=dict)
    """END of each generation that has one. Only the END of the newest generation means that the job has ended."""
    notes: dict[MarkerId, Meta] = field(default_factory=dict)
    """Metadata that NOTEs have added to markers."""
    given_up: set[MarkerId] = field(default_factory=set)
    """Markers that existed and that a TRIM has given up. Their COMMITs are not kept."""
    stale: int = 0
    """Number of records that lost: CLAIMs of a taken number, late COMMITs, records of a fenced or foreign writer, and
    TRIMs and NOTEs of markers that do not exist.
    """
    unsigned: int = 0
    """Number of records without a valid signature of the commit key, if there is one. They have no effect."""
    taken: int = 0
    """The highest generation number that an unsigned record has reserved."""
    _noted: dict[MarkerId, list[Note]] = field(default_factory=dict)
    """NOTEs that still have an effect, oldest first."""
    _ordered: tuple[tuple[int, MarkerId | None], dict[int, list[MarkerId]]] = field(
        default=((-1, None), {}), compare=False, repr=False
    )
    """((number, newest) of :attr:`commits`, its markers by generation). Updated if number or newest changes."""

    _job: bytes | None = field(default=None, init=False, compare=False, repr=False)
    """Job of the first CLAIM."""

    def __post_init__(self) -> None:
        self._job = next((claim.job for claim in self.claims.values()), None)

    @classmethod
    def of(cls, records: Iterable[ControlRecord | PackedCommit]) -> Lineage:
        lineage = cls()
        for record in records:
            lineage.apply(record)
        return lineage

    def records(self) -> Iterator[Claim | Commit | Trim | End | Note]:
        """Yield the records that have an effect, in an order in which all of them count."""
        commits = {number: list(each) for number, each in groupby(self.commits.values(), lambda each: each.generation)}
        for number, claim in self.claims.items():
            yield claim
            yield from commits.get(number, ())
            if number in self.ends:
                yield self.ends[number]
        yield from self.trims.deciding()
        for marker in sorted(self._noted):
            yield from self._noted[marker]

    def apply(self, record: ControlRecord | PackedCommit, place: Place | None = None) -> None:
        """Fold one record.

        Args:
            record: The next record.
            place: Place from which a COMMIT can be fetched again, if it need not be held forever.
        """
        if isinstance(record, Snapshot):
            return  # it repeats earlier records
        if self._job is not None and record.job != self._job:
            raise CorruptionError(
                f"control record of job {record.job.hex()} in the log of job {self._job.hex()}",
                hint="give every job its own directory or topic",
                generation=record.generation,
            )
        if isinstance(record, _COMMIT):  # first, because nearly all records are COMMITs
            _commit(self, record, place)
        elif isinstance(record, Claim):
            _claim(self, record)
        elif isinstance(record, Trim):
            _trim(self, record)
        elif isinstance(record, End):
            _end(self, record)
        else:
            _note(self, record)

    def disregard(self, generation: int) -> None:
        """Count a record that the commit key does not vouch for.

        Its generation number is not issued again, because its writer may be an honest one without the key that writes
        segments. Pass 0 if the record has no readable generation.
        """
        self.unsigned += 1
        if generation <= self.newest_generation + _MAX_GAP:
            self.taken = max(self.taken, generation)

    @property
    def ended(self) -> End | None:
        """END of the job. None while a trainer may be running, or if it died without one."""
        return self.ends.get(self.newest_generation)

    def meta(self, marker: MarkerId) -> Meta:
        """Return the metadata of a committed marker: its trainer's, overridden by metadata added later."""
        return without_aliases(_all_meta(self, marker))

    @property
    def aliases(self) -> dict[str, MarkerId]:
        """The names that operators have given to markers."""
        return aliases(self.notes)

    @property
    def names(self) -> dict[MarkerId, list[str]]:
        """The names of each marker that has one."""
        return grouped((marker, name) for name, marker in self.aliases.items())

    @property
    def job(self) -> bytes:
        """Id of the job.

        Raises:
            MarkerNotFoundError: the log has no CLAIM, so no job has begun in it.
        """
        for claim in self.claims.values():
            return claim.job
        raise MarkerNotFoundError("no job has begun in this log", hint="let the job run until it commits a marker")

    @property
    def newest_generation(self) -> int:
        return next(reversed(self.claims), 0)  # each one is higher than all before it

    @property
    def next_generation(self) -> int:
        """Generation number for a new trainer."""
        return max(self.newest_generation, self.taken) + 1

    @property
    def newest(self) -> Commit | None:
        """The marker that was committed last. None if no marker was committed."""
        marker = self.commits.newest
        return self.commits[marker] if marker is not None else None

    def find(self, marker: MarkerId) -> Commit:
        """Return the commit of ``marker``.

        Raises:
            MarkerNotFoundError: it was never committed.
        """
        _check_committed(self, marker)
        return self.commits[marker]

    def path(self, marker: MarkerId) -> list[Commit]:
        """Return the commits whose frames make up ``marker``: root generation first, ``marker`` itself last.

        Frames after a generation's commit on this path belong to an abandoned timeline.
        """
        return self.commits.named(self.way(marker))

    def way(self, marker: MarkerId) -> list[MarkerId]:
        """Return the markers of :meth:`path`, without reading their COMMITs."""
        return list(self.upward(marker))[::-1]

    def upward(self, marker: MarkerId) -> Iterator[MarkerId]:
        """Iterate over the markers of :meth:`way` from ``marker`` to its root generation, as far as they are wanted."""
        _check_committed(self, marker)
        yield marker
        while (parent := self.claims[marker.generation].parent) is not None:
            if parent.generation >= marker.generation:
                raise CorruptionError(f"generation {marker.generation} has parent {parent}, which is not older")
            _check_committed(self, parent)
            yield parent
            marker = parent

    def ways(self, markers: Iterable[MarkerId]) -> set[MarkerId]:
        """Return the markers of :meth:`way` of all these markers. Looks at each of them once."""
        found: set[MarkerId] = set()
        for marker in markers:
            found.update(takewhile(lambda each: each not in found, self.upward(marker)))
        return found

    def changes_made(self, marker: MarkerId) -> list[ClaimChanges]:
        """Return the changes declared to the generations on the path to ``marker``, newest first."""
        return told_to(self, self.claims[self.way(marker)[-1].generation])

    def previous(self, marker: MarkerId) -> MarkerId | None:
        """Return the committed marker before ``marker`` in its generation. Returns None for the first one."""
        same = _of_generation(self, marker.generation)
        place = bisect_left(same, marker)
        return same[place - 1] if place else None

    def chain(self, marker: MarkerId) -> list[Commit]:
        """Return all committed markers on the path to ``marker``, oldest first, ``marker`` itself last.

        The frames that one generation sent between two neighbors, or from its start, are an interval.
        """
        return list(self.commits.through(self.leading_to(marker), to_end=True))

    def leading_to(self, marker: MarkerId) -> list[MarkerId]:
        """Return the markers of :meth:`chain`, without reading their COMMITs."""
        leading: list[MarkerId] = []
        for ancestor in self.way(marker):
            same = _of_generation(self, ancestor.generation)
            leading += same[: bisect_right(same, ancestor)]
        return leading

    def newest_of(self, generation: int) -> MarkerId:
        """Return the newest committed marker of a generation that has one."""
        return _of_generation(self, generation)[-1]

    def bases(self, marker: MarkerId) -> dict[int, int]:
        """Return, for each table, the newest generation on the path to ``marker`` that sent it whole."""
        bases: dict[int, int] = {}
        for each in self.way(marker):
            bases |= dict.fromkeys(self.claims[each.generation].swept, each.generation)
        return bases

    def spans(
        self, generation: int, ranks: Iterable[RankEnd], reach: Mapping[int, MarkerId] | None = None
    ) -> list[LogSpan]:
        """Return the spans of one generation's streams up to ``ranks`` that the log must hold.

        Args:
            generation: Generation of the streams.
            ranks: Ends of the streams.
            reach: Trimmed data, instead of the record in :attr:`trims`. If empty, nothing is trimmed: the spans go from
                HELLO to MARK.
        """
        marker = (self.trims.reach if reach is None else reach).get(generation)
        gone = {(end.rank, end.partition): end.end for end in self.commits[marker].ranks} if marker else {}
        begins = [(max(end.begin, gone.get((end.rank, end.partition), 0)), end) for end in ranks]
        return [LogSpan(generation, end.partition, begin, end.end) for begin, end in begins if begin < end.end]


def _of_generation(lineage: Lineage, generation: int) -> list[MarkerId]:
    """Return the committed markers of a generation, oldest first."""
    state = (len(lineage.commits), lineage.commits.newest)
    if lineage._ordered[0] != state:
        (count, newest), ordered = lineage._ordered
        grown = list(islice(reversed(lineage.commits), max(0, state[0] - count) + 1))[::-1]
        if not count or len(grown) <= 1 or grown[0] != newest:  # not the known markers plus new ones
            grown, ordered = [*lineage.commits], {}
        else:
            del grown[0]
        for marker in grown:
            ordered.setdefault(marker.generation, []).append(marker)
        lineage._ordered = state, ordered
    return lineage._ordered[1].get(generation, [])


def previous_commit(lineage: Lineage, marker: MarkerId) -> Commit | None:
    """Return the committed marker before ``marker`` in its generation. Returns None for the first one."""
    previous = lineage.previous(marker)
    return lineage.find(previous) if previous is not None else None


def _claim(lineage: Lineage, claim: Claim) -> None:
    if claim.generation <= lineage.newest_generation:
        lineage.stale += 1
        return
    check_readable(claim.announces or (), claim.generation)
    claim = resolved(claim, lineage.claims)
    before = lineage.claims.get(lineage.newest_generation)
    if before is not None:  # a thousand generations share one copy of tables and layouts
        schema = before.schema if before.schema.is_same(claim.schema) else claim.schema
        layout = before.layout if before.layout == claim.layout else claim.layout
        claim = replace(claim, schema=schema, layout=layout)
    lineage.claims[claim.generation] = claim
    lineage._job = lineage._job or claim.job


def _commit(lineage: Lineage, commit: Commit | PackedCommit, place: Place | None) -> None:
    generation = commit.generation
    owner = lineage.claims.get(generation)
    if owner is None or owner.nonce != commit.nonce or generation != lineage.newest_generation:
        lineage.stale += 1
        return
    marker, newest = MarkerId(generation, commit.marker), lineage.commits.newest
    # A COMMIT that was not acknowledged may arrive late, after that of a later marker. It does not count.
    late = newest is not None and marker <= newest
    if late or generation in lineage.ends:
        lineage.stale += 1
    else:
        lineage.commits.add(marker, commit, place)


def _trim(lineage: Lineage, trim: Trim) -> None:
    # Markers before those of a trim existed, even if their COMMITs have been given up.
    if all(marker in lineage.commits or lineage.trims.has_taken(marker) for marker in trim.markers):
        count_trim(lineage, trim)
    else:
        lineage.stale += 1


def count_trim(lineage: Lineage, trim: Trim) -> None:
    """Fold a TRIM that counts, even if some of its markers have been given up since."""
    lineage.trims.add(trim)
    if trim.given_up:
        parents = {claim.parent for claim in lineage.claims.values()}
        for marker in trim.given_up:
            if marker in lineage.commits and marker not in parents:
                del lineage.commits[marker]
                lineage.notes.pop(marker, None)
                lineage._noted.pop(marker, None)
                lineage.given_up.add(marker)


def _end(lineage: Lineage, end: End) -> None:
    owner = lineage.claims.get(end.generation)
    if owner is None or owner.nonce != end.nonce or end.generation != lineage.newest_generation:
        lineage.stale += 1
    else:
        lineage.ends[end.generation] = end


def _note(lineage: Lineage, note: Note) -> None:
    if note.id in lineage.commits:
        lineage.notes[note.id] = tuple(sorted((dict(lineage.notes.get(note.id, ())) | dict(note.meta)).items()))
        lineage._noted[note.id] = _deciding_notes([*lineage._noted.get(note.id, ()), note])
    else:
        lineage.stale += 1


def _deciding_notes(notes: list[Note]) -> list[Note]:
    """Return the NOTEs of one marker that set the current value of some name."""
    said: set[str] = set()
    deciding = []
    for note in reversed(notes):
        names = {name for name, _ in note.meta}
        if names - said:
            deciding.append(note)
            said |= names
    return deciding[::-1]


def _all_meta(lineage: Lineage, marker: MarkerId) -> Meta:
    """Return the metadata of a committed marker, and its names."""
    said = dict(lineage.commits[marker].meta or ()) | dict(lineage.notes.get(marker, ()))
    return tuple(sorted(said.items()))


def notes_of(lineage: Lineage, marker: MarkerId) -> tuple[Note, ...]:
    """Return the NOTEs of a marker that still have an effect, oldest first."""
    return tuple(lineage._noted.get(marker, ()))


def knows(lineage: Lineage, record: ControlRecord) -> bool:
    """Return whether a lineage already contains the information of a record."""
    if isinstance(record, Claim):
        return lineage.claims.get(record.generation) == record
    if isinstance(record, Commit):
        return lineage.commits.get(record.id) == record
    if isinstance(record, Trim):
        return record in lineage.trims
    if isinstance(record, End):
        return lineage.ends.get(record.generation) == record
    if isinstance(record, Snapshot):
        return True
    return record.id in lineage.commits and set(record.meta) <= set(_all_meta(lineage, record.id))


def changed_tables(lineage: Lineage, claim: Claim) -> list[str]:
    """Describe what happened to the tables of a generation's parent, one line per table. Empty if they are the same."""
    parent = lineage.claims.get(claim.parent.generation) if claim.parent is not None else None
    return in_words(parent.schema, claim.schema) if parent is not None else []


KEPT = "the model did not change: raw ids keep their rows, although new ones were allowed (reassigned)"
"""Description of a generation whose declaration :func:`had_no_effect`."""


def had_no_effect(lineage: Lineage, claim: Claim) -> bool:
    """Return whether changes were declared to a generation, and all is as in its parent.

    They allowed new rows for raw ids, and each shard was a union of old ones.
    """
    if claim.changes is None or claim.parent is None:
        return False
    return only_reassigned(claim.changes) and not changed_tables(lineage, claim)


def told_to(
    lineage: Lineage, claim: Claim, since: MarkerId | None = None, *, effective: bool = False
) -> list[ClaimChanges]:
    """Return the model changes declared to a generation and to those on its path, newest first.

    Args:
        lineage: Lineage of the log.
        claim: CLAIM of the generation.
        since: A marker of one of these generations: return only changes declared after it. None for all.
        effective: Omit declarations that had no effect.
    """
    told: list[ClaimChanges] = []
    while since is None or claim.generation > since.generation:
        if claim.changes is not None and not (effective and had_no_effect(lineage, claim)):
            told += claim.changes.each
        if claim.parent is None:
            break
        claim = lineage.claims[claim.parent.generation]
    return told


def towards(lineage: Lineage, marker: MarkerId, since: MarkerId | None = None) -> Lineage:
    """Return the part of a lineage that a restore of ``marker`` needs: markers leading to it, and their generations.

    ``since`` is a marker on the way that the reader already has. Before it, only the markers of :meth:`Lineage.way` are
    kept.
    """
    way, leading = lineage.way(marker), lineage.leading_to(marker)
    if since is not None:
        place = leading.index(since)
        leading = [each for each in leading[:place] if each in way] + leading[place:]
    claims = {each.generation: lineage.claims[each.generation] for each in way}
    return Lineage(claims, lineage.commits.only(leading))


def _check_committed(lineage: Lineage, marker: MarkerId) -> None:
    if marker in lineage.commits:
        return
    if marker in lineage.given_up:
        raise MarkerNotFoundError(
            f"marker {marker} was given up, and a trim deleted its COMMIT",
            hint="choose another marker: stream-ckpt list URI",
        )
    known = ", ".join(str(known) for known in list(lineage.commits)[-5:]) or "none at all"
    raise MarkerNotFoundError(
        f"marker {marker} is not committed (newest committed: {known})",
        hint="list the markers: stream-ckpt list URI",
    )
