"""The rows that a log has between two markers, as they were sent: nothing is folded, and no table is assembled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

import numpy as np

from torchrec_stream_ckpt.find.route import Route
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.rows import IdEvents, RowsView, decode_events
from torchrec_stream_ckpt.log.api import LogReader
from torchrec_stream_ckpt.maintain.fold import IntervalFrames
from torchrec_stream_ckpt.proofs.seen_marks import RankReport
from torchrec_stream_ckpt.proofs.weights import WeightProof
from torchrec_stream_ckpt.util.types import grouped

HELD_BYTES = 256 * 2**20
"""Most bytes of frames that are held in memory. Of a file log they are its pages, not copies of them."""

_Frame = tuple[Header, RowsView]


class SentRows:
    """Rows of a route that only the log serves. All frames are read and checked before this returns.

    Frames of up to :data:`HELD_BYTES` are held. If there are more, they are read and checked again when they are
    handed out.

    Args:
        log: The job's log.
        route: A route without pieces of a store.
        between: Called after each frame that is read.

    Raises:
        TrimmedError: the log was trimmed, and a store has the rows.
        CorruptionError: the log is damaged, or lacks required data.
        LogUnavailableError: the log does not answer.
    """

    def __init__(self, log: LogReader, route: Route, between: Callable[[], None]) -> None:
        assert not route.pieces
        self._log = log
        self._route = route
        self.schema = route.schema
        self._between = between
        self.repeats = False
        """True if :meth:`sent` yields a row as often as it was sent."""
        self._reports: dict[int, RankReport] = {}
        """Report of each rank at the marker, without its shards."""
        self._held: list[_Frame] = []
        self.id_events: list[tuple[Header, IdEvents]] = []
        """Id events of the route, with their headers, in the order of each rank's stream."""
        route.check(log)
        held_bytes = 0
        for header, view in self._frames(self.id_events):
            held_bytes += header.payload_len
            if held_bytes <= HELD_BYTES:
                self._held.append((header, view))
            else:
                self._held.clear()
        self._is_held = held_bytes <= HELD_BYTES

    def release(self) -> None:
        """Hold no frames from here on: they are read and checked again if they are wanted."""
        self._held, self._is_held = [], False

    def proof(self) -> WeightProof | None:
        """Return the proof that the marker has of its weights; None if it has none.

        Raises:
            CorruptionError: it is damaged, or the shards of its ranks are unknown.
        """
        reports = [self._reports[rank] for rank in sorted(self._reports)]
        if any(each.proof is not None for each in reports):
            shards = self._route.complete(self._log).shards[self._route.marker.generation]
            reports = [replace(each, shards=held) for each, held in zip(reports, shards, strict=True)]
        return WeightProof.of(self._route.marker, self.schema, reports)

    def sent(self, tables: Collection[int]) -> Iterator[tuple[int, int, RowsView]]:
        """Yield (table, first column, rows) of the frames of some tables, oldest first.

        Within :data:`HELD_BYTES` of frames, each row is yielded once, in its newest version, unless :attr:`repeats` is
        set. If a table was sent whole later, rows of older generations are left out.
        """
        bases = {table: self._route.bases.get(table, 0) for table in tables}
        for batch in self._batches():
            wanted = [(header, view) for header, view in batch if header.generation >= bases.get(header.table, 2**63)]
            for header, view in wanted if self.repeats else newest(wanted):
                yield header.table, header.col0, view

    def _batches(self) -> Iterator[Sequence[_Frame]]:
        if self._is_held:
            yield self._held
            return
        batch: list[_Frame] = []
        num_bytes = 0
        for header, view in self._frames():
            if num_bytes + header.payload_len > HELD_BYTES:
                yield batch
                batch, num_bytes = [], 0
            batch.append((header, view))
            num_bytes += header.payload_len
        yield batch

    def _frames(self, events: list[tuple[Header, IdEvents]] | None = None) -> Iterator[_Frame]:
        """Yield frames with rows, after they were checked.

        Args:
            events: Gets the id events of the frames without rows; None if they are not wanted.
        """
        for interval in self._route.intervals:
            frames = IntervalFrames(self._log, interval, ())
            for header, payload, view in frames:
                if view is not None:
                    yield header, view
                elif header.kind is Kind.IDS and events is not None:
                    copy = memoryview(bytes(payload))
                    events.append((header, decode_events(header, copy, interval.claim.schema.tables)))
                self._between()
            if interval.commit.id == self._route.marker:
                self._reports[interval.end.rank] = RankReport((), frames.mark.proof)


def newest(frames: Sequence[_Frame]) -> Iterator[_Frame]:
    """Yield the rows of frames in their order, without versions of a row that a later frame replaces."""
    slices = grouped(((header.table, header.col0, header.cols), number) for number, (header, _) in enumerate(frames))
    kept: dict[int, np.ndarray[tuple[int], np.dtype[np.bool_]]] = {}
    for numbers in slices.values():
        if len(numbers) > 1:  # a frame has no row twice
            ids = np.concatenate([frames[number][1].ids for number in numbers])
            order = np.argsort(ids, kind="stable")
            ordered = ids[order]
            is_newest = np.empty(len(ids), np.bool_)
            is_newest[order] = np.append(ordered[1:] != ordered[:-1], True)
            ends = np.cumsum([len(frames[number][1].ids) for number in numbers])
            kept |= dict(zip(numbers, np.split(is_newest, ends[:-1]), strict=True))
    for number, (header, view) in enumerate(frames):
        chosen = kept.get(number)
        if chosen is None or chosen.all():
            yield header, view
        elif chosen.any():
            yield header, RowsView(view.ids[chosen], view.weights[chosen], tuple(each[chosen] for each in view.states))
