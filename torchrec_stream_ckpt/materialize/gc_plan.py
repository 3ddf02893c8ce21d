"""What one run of gc does, or would do: a value that prints."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from torchrec_stream_ckpt.materialize.compact import Span
from torchrec_stream_ckpt.store.api import Entry
from torchrec_stream_ckpt.types import MarkerId
from torchrec_stream_ckpt.units import size


@dataclass(frozen=True, slots=True)
class GcPlan:
    """What one run does, or would do. Prints with :meth:`describe`."""

    job: bytes
    store: str
    kept: tuple[MarkerId, ...]
    dropping: tuple[MarkerId, ...]
    """Given up by this run."""
    dropped: int
    """Given up by runs before."""
    spans: tuple[Span, ...]
    """Folds to be written."""
    now: tuple[Entry, ...]
    """Objects that go, in this order."""
    later: tuple[Entry, ...]
    """Objects that are not needed, and that are deleted after the grace period."""
    not_whole: tuple[str, ...]
    """Kept markers that the store alone cannot bring back, each with the reason: nothing on their way goes."""
    awaited: tuple[MarkerId, ...]
    """Kept because the outer tier does not have them yet."""
    elsewhere: tuple[str, ...]
    """Other places that hold dense state of the markers that are given up: they keep it."""
    damaged: tuple[str, ...] = ()
    """Folds that stand in for what nobody else needs and cannot be read, with the reason. A dry run does not look."""
    by_hand: tuple[str, ...] = ()
    """Markers that a person gives up, each with the reason."""
    came_back: tuple[MarkerId, ...] = ()
    """Markers that a person gave up, and that could be restored again when it was their turn: they stay."""
    unmerged: tuple[str, ...] = ()
    """Spans that could not be merged, each with the reason: what they would replace stays."""
    stands_still: str = ""
    """Why what waits for the grace period does not get older; empty where it does."""
    glances: bool = False
    """Whether the time of an object store is known up to its newest object alone."""

    @property
    def num_bytes(self) -> int:
        """Bytes that go."""
        return sum(entry.num_bytes for entry in self.now)

    def describe(self, *, every: bool = False) -> str:
        """In words: how much of each kind goes; with ``every``, a line an object."""
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
        """In words: what stays although the retention does not want it, and why."""
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
    """How many objects, how many bytes, and what they are: the folders of a store have a name for each kind."""
    kinds = Counter(entry.name.partition("/")[0] for entry in entries)
    num_bytes = sum(entry.num_bytes for entry in entries)
    named = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    return f"{len(entries)} objects ({size(num_bytes)}): {named}"


def _awaited(markers: Sequence[MarkerId]) -> str:
    return f"  {len(markers)} markers stay until stream-ckpt relay has copied them to the outer tier: {_names(markers)}"


def _names(markers: Sequence[MarkerId]) -> str:
    """The first and the last ones."""
    shown = [str(marker) for marker in markers]
    return ", ".join(shown if len(shown) < 8 else [*shown[:3], "...", *shown[-3:]]) or "none"
