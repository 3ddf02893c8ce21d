"""Check the gaps between acknowledged frames of one stream, before a marker depends on them.

A rank is the only writer of its partition, so its frames are adjacent. If they are not, a frame was sent twice, or
another writer has written there. A reader skips both, because seq and chain identify the next frame. A reader could be
misled only by a frame that another writer has put in the place of the next one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.format.frame import Header, data_header
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import Strays
from torchrec_stream_ckpt.util.types import LogSpan

_NEAR = 256
"""Gaps no further apart than this, in offsets, are read together."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets [begin, end) of a partition, between two acknowledged frames of a stream."""

    begin: int
    end: int
    seq: int
    """Seq of the frame that was acknowledged at ``end``."""
    sent: tuple[int, ...]
    """header_crc of that frame and of those that were sent after it, before it was acknowledged."""

    def expects(self, header: Header) -> bool:
        """Return whether a frame of this stream may be in the gap: readers have passed it, or it was sent."""
        place = header.seq - self.seq
        return place < 0 or (place < len(self.sent) and self.sent[place] == header.header_crc)


@dataclass(frozen=True, slots=True)
class StreamName:
    """Identity of a stream, and the partition that it is written to."""

    job: bytes
    generation: int
    rank: int
    partition: int


def check_gaps(log: LogReader, stream: StreamName, gaps: Iterable[Gap], strays: Strays) -> None:
    """Check everything that others have written between the frames of a stream. Counts it in ``strays``.

    Raises:
        StreamLostError: a reader could mistake a frame there for one of the stream.
        LogUnavailableError: the log does not answer.
    """
    for run in _runs(sorted(gaps, key=lambda gap: gap.begin)):
        waiting = list(run)
        for offset, frame in log.read(LogSpan(stream.generation, stream.partition, run[0].begin, run[-1].end)):
            while waiting and offset >= waiting[0].end:
                waiting.pop(0)
            if waiting and offset >= waiting[0].begin:
                _look(frame, offset, stream, waiting[0], strays)
    strays.tell(stream.job, stream.partition)


def _look(frame: memoryview, offset: int, stream: StreamName, gap: Gap, strays: Strays) -> None:
    try:
        header = data_header(frame, stream.job)
    except CorruptionError as error:
        strays.add(offset, error.message)
        return
    if (header.generation, header.rank) == (stream.generation, stream.rank) and not gap.expects(header):
        raise StreamLostError(
            f"another program wrote a frame of this stream (seq {header.seq}): readers cannot distinguish it from ours",
            hint="find the second trainer, or the program that writes to this partition",
            generation=stream.generation,
            rank=stream.rank,
            partition=stream.partition,
            offset=offset,
        )


def _runs(gaps: list[Gap]) -> Iterator[list[Gap]]:
    """Yield groups of gaps that are read together."""
    run: list[Gap] = []
    for gap in gaps:
        if run and gap.begin - run[-1].end > _NEAR:
            yield run
            run = []
        run.append(gap)
    if run:
        yield run
