"""What one rank sent between two markers of a generation, and which of it leads to a marker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrec_stream_ckpt.format.control import Claim, Commit
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.segment import SegmentId, SegmentKind
from torchrec_stream_ckpt.util.layout import StoreSegment
from torchrec_stream_ckpt.util.types import LogSpan, MarkerId, RankEnd


@dataclass(frozen=True, slots=True)
class Interval:
    """The frames of one rank that lead to a marker, from an earlier marker of its generation or from its HELLO on."""

    claim: Claim = field(repr=False)
    commit: Commit
    """COMMIT of the marker that the interval ends at."""
    end: RankEnd
    """Where the rank's stream stands there."""
    after: RankEnd | None = None
    """Where it stood at the earlier marker; None: the interval begins with HELLO."""

    @property
    def span(self) -> LogSpan:
        """Where it lies in the log."""
        begin = self.after.end if self.after is not None else self.end.begin
        return LogSpan(self.commit.generation, self.end.partition, begin, self.end.end)

    @property
    def frames(self) -> int:
        return self.end.frames - (self.after.frames if self.after is not None else 0)

    @property
    def num_bytes(self) -> int:
        """Bytes of frames."""
        return self.end.num_bytes - (self.after.num_bytes if self.after is not None else 0)

    def segment(self, part: int) -> SegmentId:
        """Identity of a part in the store."""
        return SegmentId(SegmentKind.INTERVAL, self.commit.job, self.commit.id, self.end.rank, part, self.end.chain)

    def name(self, part: int) -> str:
        """Name of that part."""
        return StoreSegment(self.commit.job, self.commit.id, self.end.rank, part).name


def intervals_of(claim: Claim, commit: Commit, previous: Commit | None) -> Iterator[Interval]:
    """Yield the interval of each rank between two markers of a generation; without ``previous``, from its HELLO on."""
    for end in commit.ranks:
        yield Interval(claim, commit, end, previous.ranks[end.rank] if previous is not None else None)


def generations(
    lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None
) -> Iterator[tuple[Commit, Commit | None]]:
    """The generations of which the log has to give something for a marker.

    Args:
        lineage: The control partition.
        marker: A committed marker.
        reach: The marker on its path up to which another source gives all rows.

    Yields:
        (the generation's commit on the path, where its streams are read from; None: from HELLO).
    """
    for ancestor in lineage.path(marker):
        if reach is None or ancestor.generation > reach.generation:
            yield ancestor, None
        elif ancestor.generation == reach.generation and ancestor.id != reach:
            yield ancestor, lineage.find(reach)


def intervals(lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None) -> Iterator[Interval]:
    """Yield the intervals that the log has to give for a marker, in the order of its path, of all ranks."""
    for commit, previous in generations(lineage, marker, reach):
        yield from intervals_of(lineage.claims[commit.generation], commit, previous)
