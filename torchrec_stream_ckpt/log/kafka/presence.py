"""Check that the data partitions still hold acknowledged data. Imports no Kafka client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.format.frame import parse_header
from torchrec_stream_ckpt.log.kafka.reasons import LOST_HINT, RETENTION_HINT
from torchrec_stream_ckpt.util.types import LogSpan, MarkPlace

if TYPE_CHECKING:
    from torchrec_stream_ckpt.log.kafka.brokers import Brokers, Edge
    from torchrec_stream_ckpt.log.kafka.reader import Reader


class Presence:
    """Looks for spans and MARKs in the data topic. Can be used from any thread.

    Args:
        brokers: Brokers of the log.
        reader: Reader of the same log.
    """

    def __init__(self, brokers: Brokers, reader: Reader) -> None:
        self._data_topic = brokers.uri.data_topic
        self._brokers = brokers
        self._reader = reader

    def check_there(self, spans: Sequence[LogSpan]) -> None:
        """Check both ends of all partitions in one query: retention deletes the front, a failure loses the tail.

        Raises:
            StreamLostError: a partition ends, or once ended, before the end of acknowledged data.
        """
        lows = self.check_ends(spans)
        for span in spans:
            if span.begin < lows[span.partition]:
                raise CorruptionError(
                    f"rows from offset {span.begin} on are required, but the log begins at "
                    f"{lows[span.partition]}: retention or a user deleted them",
                    hint=RETENTION_HINT,
                    **self._where(span),
                )
        self._check_order(spans)

    def check_marks(self, marks: Sequence[MarkPlace]) -> None:
        """Check MARKs with one fetch from all partitions, and another one for each further MARK in a partition.

        A partition can lose only its end. So if a MARK exists, everything before it does.

        Raises:
            StreamLostError: another frame is there, or none.
        """
        waiting = sorted(marks, key=lambda mark: -mark.end)
        while waiting:
            now = {mark.partition: mark for mark in reversed(waiting)}
            waiting = [mark for mark in waiting if now[mark.partition] is not mark]
            frames = self._reader.records_at({partition: mark.end - 1 for partition, mark in now.items()})
            for partition, mark in now.items():
                if not _has_checksum(frames[partition], mark.chain):
                    raise StreamLostError(
                        f"the frame acknowledged at offset {mark.end - 1} is not there: the tail was lost, and "
                        "another program has written after it",
                        hint=LOST_HINT,
                        topic=self._data_topic,
                        partition=partition,
                        generation=mark.generation,
                    )

    def check_ends(self, spans: Sequence[LogSpan]) -> dict[int, int]:
        """Check that no partition ends before its spans do. Returns the partitions' first offsets."""
        edges = self._brokers.edges(self._data_topic, {span.partition for span in spans})
        short = self._short(spans, edges)
        if short is not None:
            edges = self._brokers.newest_edges(self._data_topic, edges)
            short = self._short(spans, edges)
        if short is not None:
            raise StreamLostError(
                f"the log ends at offset {edges[short.partition].high}, but had acknowledged frames up to "
                f"{short.end}: its tail was lost",
                hint=LOST_HINT,
                **self._where(short),
            )
        return {partition: edge.low for partition, edge in edges.items()}

    @staticmethod
    def _short(spans: Sequence[LogSpan], edges: Mapping[int, Edge]) -> LogSpan | None:
        """Return a span that ends after its partition. Returns None if each partition holds its spans."""
        return next((span for span in spans if edges[span.partition].high < span.end), None)

    def _check_order(self, spans: Sequence[LogSpan]) -> None:
        """Check the order of generations. If one begins before an older one ends, it was written over a lost tail."""
        ends: dict[int, LogSpan] = {}
        for span in sorted(spans, key=lambda span: span.generation):
            older = ends.get(span.partition)
            if older is not None and older.generation < span.generation and span.begin < older.end:
                raise StreamLostError(
                    f"generation {older.generation} ends at offset {older.end}, but generation {span.generation} "
                    f"begins at {span.begin}: the tail between them was lost",
                    hint=LOST_HINT,
                    **self._where(older),
                )
            if older is None or span.end > older.end:
                ends[span.partition] = span

    def _where(self, span: LogSpan) -> dict[str, object]:
        return {"topic": self._data_topic, "partition": span.partition, "generation": span.generation}


def _has_checksum(record: bytes | None, header_crc: int) -> bool:
    try:
        return record is not None and parse_header(record).header_crc == header_crc
    except CorruptionError:
        return False
