"""What lies between two acknowledged frames of one stream: looked at before a marker rests on it.

A rank writes its partition alone, so its frames follow one another. Where they do not, a frame was sent twice, or
another writer has put there. A reader passes over both, because seq and chain tell it which frame is the next one;
only a frame that another writer has put in the place of the next one could be taken for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.format.frame import Header
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.log.stream import Strays, data_header
from torchrec_stream_ckpt.util.types import LogSpan

_NEAR = 256
"""Gaps no further apart than this are read at one go."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Offsets [begin, end) of a partition, between two frames of a stream that were acknowledged."""

    begin: int
    end: int
    seq: int
    """Of the frame that was acknowledged at ``end``."""
    sent: tuple[int, ...]
    """header_crc of that frame and of those that were sent after it, before it was acknowledged."""

    def expects(self, header: Header) -> bool:
        """Return whether a frame of this stream may lie here: one that readers have passed, or one that was sent."""
        place = header.seq - self.seq
        return place < 0 or (place < len(self.sent) and self.sent[place] == header.header_crc)


@dataclass(frozen=True, slots=True)
class StreamName:
    """Which stream, and where it is written."""

    job: bytes
    generation: int
    rank: int
    partition: int


def check_gaps(log: LogReader, stream: StreamName, gaps: Iterable[Gap], strays: Strays) -> None:
    """Look at all that others have put between the frames of a stream; count it in ``strays``.

    Raises:
        StreamLostError: a reader could take a frame there for one of the stream.
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
            f"another program has written a frame of this stream (seq {header.seq}): readers could take it for ours",
            hint="find the second trainer, or the program that writes to this partition",
            generation=stream.generation,
            rank=stream.rank,
            partition=stream.partition,
            offset=offset,
        )


def _runs(gaps: list[Gap]) -> Iterator[list[Gap]]:
    """Gaps that are read together."""
    run: list[Gap] = []
    for gap in gaps:
        if run and gap.begin - run[-1].end > _NEAR:
            yield run
            run = []
        run.append(gap)
    if run:
        yield run
