"""Rules for which markers a store keeps, by their names, commit times and ages alone. Reads no clock.

Also :class:`GcPlan`, a printable summary of a gc run or a dry run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from torchrec_stream_ckpt.errors import ConfigError
from torchrec_stream_ckpt.find.best import Best
from torchrec_stream_ckpt.maintain.compactor import Span
from torchrec_stream_ckpt.store.api import Entry
from torchrec_stream_ckpt.util.layout import PINS_DIR
from torchrec_stream_ckpt.util.types import MarkerId
from torchrec_stream_ckpt.util.units import is_whole, parse_duration, size


@dataclass(frozen=True, slots=True)
class GcPlan:
    """Actions that one run takes or would take. :meth:`describe` renders them."""

    job: bytes
    store: str
    kept: tuple[MarkerId, ...]
    dropping: tuple[MarkerId, ...]
    """Markers given up by this run."""
    dropped: int
    """Number of markers given up by earlier runs."""
    spans: tuple[Span, ...]
    """Folds to write."""
    now: tuple[Entry, ...]
    """Objects to delete now, in this order."""
    later: tuple[Entry, ...]
    """Unneeded objects to delete after the grace period."""
    not_whole: tuple[str, ...]
    """Kept markers that the store alone cannot restore, each with the reason. Nothing on their paths is deleted."""
    awaited: tuple[MarkerId, ...]
    """Markers kept because the outer tier does not have them yet."""
    elsewhere: tuple[str, ...]
    """Other places that hold dense state of the markers to give up. It is kept there."""
    damaged: tuple[str, ...] = ()
    """Unreadable folds that replace objects not needed otherwise, with the reason. A dry run does not check this."""
    by_hand: tuple[str, ...] = ()
    """Markers that the user gives up, each with the reason."""
    came_back: tuple[MarkerId, ...] = ()
    """Markers that the user gave up, but that could be restored again at their turn. They are kept."""
    unmerged: tuple[str, ...] = ()
    """Spans that could not be merged, each with the reason. The objects that they would replace are kept."""
    stands_still: str = ""
    """Why objects in the grace period do not age; empty if they do."""
    glances: bool = False
    """True if the time of an object store is known only up to its newest object."""

    @property
    def num_bytes(self) -> int:
        """Bytes to delete now."""
        return sum(entry.num_bytes for entry in self.now)

    def describe(self, *, every: bool = False) -> str:
        """Describe the plan as text: the amount of each kind to delete, or one line per object if ``every``."""
        lines = [f"job {self.job.hex()} in {self.store}", f"  keep {len(self.kept)} markers: {_names(self.kept)}"]
        if self.dropped:
            lines.append(f"  {self.dropped} markers were given up before")
        if every:
            lines += [f"  give up marker {marker}" for marker in self.dropping]
            lines += [f"  merge {span} (reads {size(span.num_bytes)})" for span in self.spans]
            lines += [f"  delete {entry.name} ({size(entry.num_bytes)})" for entry in self.now]
            lines += [f"  delete later {entry.name} ({size(entry.num_bytes)})" for entry in self.later]
        else:
            lines += [f"  give up {len(self.dropping)} markers: {_names(self.dropping)}"] if self.dropping else []
            read = sum(span.num_bytes for span in self.spans)
            lines += [f"  merge {len(self.spans)} spans (reads {size(read)})"] if self.spans else []
            lines += [f"  delete {of_kinds(self.now)}"] if self.now else []
            lines += [f"  delete later {of_kinds(self.later)}"] if self.later else []
        lines += self.remarks()
        later = sum(entry.num_bytes for entry in self.later)
        lines.append(
            f"  {len(self.now)} objects, {size(self.num_bytes)}; later {len(self.later)} objects, {size(later)}"
        )
        return "\n".join(lines)

    def remarks(self) -> list[str]:
        """Describe items that are kept although the retention does not want them, and why."""
        lines = [f"  marker {each}" for each in self.by_hand]
        lines += [f"  marker {each} can be restored by now: it is not given up" for each in self.came_back]
        lines += [f"  marker {reason}: all that leads to it stays" for reason in self.not_whole]
        if self.stands_still:
            where = "run gc on one host that is not booted in between, or over an object store"
            lines.append(f"  {self.stands_still}; {where}")
        if self.glances and self.later:
            lines.append("  the store's time is known here up to its newest object: a run may delete more by now")
        lines += [f"  {each}; its sources stay: let stream-ckpt materialize repair it" for each in self.damaged]
        lines += [f"  not merged: {each}" for each in self.unmerged]
        lines += [_awaited(self.awaited)] if self.awaited else []
        return lines + [f"  dense state in {place} stays: it is not in this store" for place in self.elsewhere]


def of_kinds(entries: Sequence[Entry]) -> str:
    """Format the number of objects, their bytes, and the count of each kind: each kind has its folder in a store."""
    kinds = Counter(entry.name.partition("/")[0] for entry in entries)
    num_bytes = sum(entry.num_bytes for entry in entries)
    named = ", ".join(_of_kind(count, kind) for kind, count in kinds.items())
    return f"{len(entries)} objects ({size(num_bytes)}): {named}"


def _of_kind(count: int, kind: str) -> str:
    if kind == PINS_DIR:  # what an attempt to pin leaves behind; the pin itself is another object, and stays
        return f"{count} leftover pin file{'s' * (count != 1)}"
    return f"{count} {kind}"


def _awaited(markers: Sequence[MarkerId]) -> str:
    return f"  {len(markers)} markers stay until stream-ckpt relay has copied them to the outer tier: {_names(markers)}"


def _names(markers: Sequence[MarkerId]) -> str:
    """Format the first and the last markers."""
    shown = [str(marker) for marker in markers]
    return ", ".join(shown if len(shown) < 8 else [*shown[:3], "...", *shown[-3:]]) or "none"


@dataclass(frozen=True, slots=True)
class Candidate:
    """A marker that a store offers."""

    id: MarkerId
    time_s: float
    """Commit time, Unix seconds."""
    restorable: bool = True
    """True if the store has everything that it needs. Others do not count for the floor, and are kept as well."""
    age_s: float = 0.0
    """Minimum age in seconds. An unknown age counts as young."""
    meta: Mapping[str, str | int | float] = field(default_factory=dict)
    """Values noted for the marker."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Decision on each candidate, in commit order."""

    kept: tuple[MarkerId, ...]
    dropped: tuple[MarkerId, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Retention:
    """Rules for which markers to keep. Without any rule, all are kept.

    A marker is kept if at least one rule keeps it. A dropped marker stays dropped: no later time or marker makes a rule
    want it back, so it does not matter how often the rules are applied.

    Raises:
        ConfigError: a value is invalid; the error names it.
    """

    keep_all_for: float | str | None = None
    """Keep every marker up to this age: seconds, or text such as ``24h``."""
    then_every: int | str | None = None
    """Rule for older markers: a count N keeps those whose number on the lineage is a multiple of N, a duration such as
    ``1d`` the first one of each such stretch of time. None keeps none of them.
    """
    newest: int | None = None
    """Keep this many of the newest markers that can be restored, whatever their age. At least 1 if there is any rule.
    Markers newer than the oldest of these that cannot be restored now are kept as well, because they may be repaired.
    """
    keep_best: Sequence[str] = ()
    """Keep the best markers by their noted values. Each entry is like ``auc:max:3``: the three with the highest
    ``auc``. Only markers that can be restored count; markers better than the last of these are kept as well.
    """
    pinned: frozenset[MarkerId] = field(default_factory=frozenset)
    """Markers to keep in any case."""

    def __post_init__(self) -> None:
        if self.keep_all_for is not None:
            parse_duration(self.keep_all_for)
        if self.then_every is not None:
            _parse_every(self.then_every)
        for each in self.keep_best:
            Best.parse(each, several=True)
        if self.newest is not None and (type(self.newest) is not int or self.newest < 1):
            raise ConfigError(f"newest must be at least 1, got {self.newest}", hint="the newest marker is always kept")

    @property
    def keeps_all(self) -> bool:
        """True if there is no rule. Pins alone drop nothing."""
        return self.keep_all_for is None and self.then_every is None and self.newest is None and not self.keep_best

    @property
    def best(self) -> list[Best]:
        """Parsed rules of ``keep_best``."""
        return [Best.parse(each, several=True) for each in self.keep_best]

    def plan(self, candidates: Iterable[Candidate]) -> Decision:
        """Decide on each candidate: every marker that the store offers.

        Raises:
            ConfigError: ``keep_best`` names a value that no candidate has, or values that cannot be compared.
        """
        ordered = sorted(candidates, key=lambda each: each.id)
        if self.keeps_all:
            return Decision(tuple(each.id for each in ordered), ())
        young = set()
        if self.keep_all_for is not None:
            longest_s = parse_duration(self.keep_all_for)
            young = {each.id for each in ordered if each.age_s <= longest_s}
        thinned = self._thinned([each for each in ordered if each.id not in young])
        kept = young | self.pinned | thinned | self._newest(ordered) | self._best(ordered)
        return Decision(
            tuple(each.id for each in ordered if each.id in kept),
            tuple(each.id for each in ordered if each.id not in kept),
        )

    def _newest(self, ordered: list[Candidate]) -> set[MarkerId]:
        """Return the markers that ``newest`` keeps, including those that cannot be restored now but may be repaired."""
        floor = self.newest or 1
        restorable = [place for place, each in enumerate(ordered) if each.restorable]
        first = restorable[-floor] if len(restorable) >= floor else 0
        return {each.id for each in ordered[first:]}

    def _best(self, ordered: list[Candidate]) -> set[MarkerId]:
        """Return the markers that ``keep_best`` keeps."""
        kept: set[MarkerId] = set()
        restorable = {each.id for each in ordered if each.restorable}
        for best in self.best if ordered else ():
            ranked = best.ranked({each.id: each.meta for each in ordered})
            places = [place for place, marker in enumerate(ranked) if marker in restorable]
            kept |= {*ranked[: places[best.count - 1] + 1 if len(places) >= best.count else None]}
        return kept

    def _thinned(self, older: list[Candidate]) -> set[MarkerId]:
        """Return the markers that ``then_every`` keeps."""
        if self.then_every is None:
            return set()
        every = _parse_every(self.then_every)
        if isinstance(every, int):
            return {each.id for each in older if each.id.marker % every == 0}
        firsts: dict[float, Candidate] = {}
        for each in sorted(older, key=lambda each: (each.time_s, each.id)):
            firsts.setdefault(each.time_s // every, each)
        return {first.id for first in firsts.values()}


def _parse_every(every: int | str) -> int | float:
    """Parse a count, or a duration in seconds as a float."""
    if isinstance(every, str) and not is_whole(every.strip()):
        stretch_s = parse_duration(every)
        if not stretch_s:
            raise ConfigError("then_every must not be zero", hint="write a count, or a duration such as 1d")
        return stretch_s
    count = int(every) if isinstance(every, str) else every
    if type(count) is not int or count < 1:
        raise ConfigError(f"then_every must be at least 1, got {every}", hint="10 keeps every tenth")
    return count
