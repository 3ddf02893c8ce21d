"""Frames in flight (sealed, sent, and kept until the log acknowledges them), and the position of the stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torchrec_stream_ckpt.errors import StreamLostError
from torchrec_stream_ckpt.format.frame import Kind, seal, seal_pad
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.log.api import Ack, DataWriter
from torchrec_stream_ckpt.log.gaps import Gap
from torchrec_stream_ckpt.util.failpoints import failpoint


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """Position of a rank's stream just after one acknowledged frame."""

    frames: int
    begin: int
    end: int
    chain: int


class Flight:
    """Unacknowledged frames of one stream, in order. For the publisher's thread.

    Other threads may read acknowledged positions while they hold ``changed``.

    Args:
        ring: Ring that buffers are returned to.
        changed: Held while acknowledged positions change. The publisher's threads wait for it.
    """

    def __init__(self, ring: FrameRing, changed: threading.Condition) -> None:
        self._ring = ring
        self._changed = changed
        self._chain = 0
        self.buffers: deque[FrameBuffer] = deque()
        self.acked = StreamEnd(0, 0, 0, 0)
        self.acked_bytes = 0
        self.marks: dict[int, StreamEnd] = {}
        """End of the stream at each acknowledged MARK that was not yet requested, by its seq."""
        self._gaps: list[Gap] = []

    @property
    def gaps(self) -> tuple[Gap, ...]:
        """(any thread) Unchecked gaps between acknowledged frames. Other writers may have written there."""
        with self._changed:
            return tuple(self._gaps)

    def looked_at(self, gaps: Collection[Gap]) -> None:
        """(any thread) Note that a reader cannot mistake any bytes in these gaps for a frame of the stream."""
        with self._changed:
            self._gaps = [gap for gap in self._gaps if gap not in gaps]

    def send(self, buffer: FrameBuffer, writer: DataWriter) -> None:
        """Chain, checksum and send the stream's next frame."""
        self._seal(buffer)
        self.buffers.append(buffer)
        writer.send(buffer.view())
        failpoint("stream.sent")

    def send_again(self, writer: DataWriter) -> None:
        """Send all unacknowledged frames to a fresh writer."""
        for buffer in self.buffers:
            writer.send(buffer.view())
            failpoint("stream.resent")

    def acknowledge(self, acks: Iterable[Ack]) -> None:
        """Release the oldest frames, which are durable now.

        Raises:
            StreamLostError: the log has lost frames that it acknowledged before.
        """
        for ack in acks:
            self._compare(ack)
            buffer = self.buffers.popleft()
            header = buffer.header
            assert header is not None
            begin = ack.offset if header.seq == 0 else self.acked.begin
            with self._changed:
                self.acked = StreamEnd(buffer.last.seq + 1, begin, ack.end, buffer.last.header_crc)
                self.acked_bytes += buffer.num_bytes
                if header.kind is Kind.MARK:
                    self.marks[header.seq] = self.acked
            self._ring.release(buffer)

    def _seal(self, buffer: FrameBuffer) -> None:
        header = buffer.header
        assert header is not None
        if buffer.ready is not None:
            buffer.ready()
        header.chain = self._chain
        seal(header, buffer.array.data, buffer.payload_crc)
        if buffer.pad is not None:
            buffer.pad.chain = header.header_crc
            seal_pad(buffer.pad, buffer.view()[buffer.frame_bytes :])
        self._chain = buffer.last.header_crc

    def _compare(self, ack: Ack) -> None:
        """Compare the oldest frame's position ``ack`` with the stream's end, which must never decrease."""
        acked = self.acked
        if not acked.frames or ack.offset == acked.end:
            return
        if ack.offset < acked.end:
            raise StreamLostError(
                f"the log had acknowledged frames up to offset {acked.end}, but put the next one at "
                f"{ack.offset}: its tail was lost",
                hint="see the brokers' logs: a disk or machine failed, or an unclean leader was elected",
                seq=acked.frames,
            )
        sent = [each.header_crc for buffer in self.buffers for each in (buffer.header, buffer.pad) if each is not None]
        with self._changed:
            self._gaps.append(Gap(acked.end, ack.offset, acked.frames, tuple(sent)))
