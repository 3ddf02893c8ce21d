"""Intervals: the frames that one rank sent between two markers of a generation, and those that lead to a marker."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torchrec_stream_ckpt.errors import CorruptionError
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
    """COMMIT of the marker at the end of the interval."""
    end: RankEnd
    """End of the rank's stream at that marker."""
    after: RankEnd | None = None
    """End of the rank's stream at the earlier marker. None if the interval begins with HELLO."""

    @property
    def span(self) -> LogSpan:
        """Range of the interval in the log."""
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
        """Return the identity of a part in the store."""
        return SegmentId(SegmentKind.INTERVAL, self.commit.job, self.commit.id, self.end.rank, part, self.end.chain)

    def name(self, part: int) -> str:
        """Return the name of a part in the store."""
        return StoreSegment(self.commit.job, self.commit.id, self.end.rank, part).name


def intervals_of(claim: Claim, commit: Commit, previous: Commit | None) -> Iterator[Interval]:
    """Yield the interval of each rank between two markers of a generation, or from HELLO without ``previous``."""
    for end in commit.ranks:
        yield Interval(claim, commit, end, previous.ranks[end.rank] if previous is not None else None)


def generations(
    lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None
) -> Iterator[tuple[MarkerId, MarkerId | None]]:
    """Yield the generations from which the log must provide frames for a marker, without reading their COMMITs.

    Args:
        lineage: Lineage of the control partition.
        marker: A committed marker.
        reach: Marker on its path up to which another source provides all rows.

    Yields:
        (the generation's marker on the path, the marker from which its streams are read). The second is None if they
        are read from HELLO.
    """
    for ancestor in lineage.way(marker):
        if reach is None or ancestor.generation > reach.generation:
            yield ancestor, None
        elif ancestor.generation == reach.generation and ancestor != reach:
            yield ancestor, reach


def intervals(lineage: Lineage, marker: MarkerId, reach: MarkerId | None = None) -> Iterator[Interval]:
    """Yield the intervals that the log must provide for a marker, in the order of its path, of all ranks.

    Raises:
        CorruptionError: a COMMIT has a wrong field, or another number of ranks than the layout in its CLAIM.
    """
    walked = dict(generations(lineage, marker, reach))
    for commit in lineage.commits.named(walked):
        claim, after = lineage.claims[commit.generation], walked[commit.id]
        if claim.layout is not None and len(claim.layout) != len(commit.ranks):
            said = f"the COMMIT has {len(commit.ranks)} ranks, but the layout in its CLAIM has {len(claim.layout)}"
            raise CorruptionError(said, marker=commit.id)
        yield from intervals_of(claim, commit, lineage.find(after) if after is not None else None)
