"""Send changes of this rank's id maps (managed collision): which raw ids have lost their rows, and which have got one.

A reader that applies a stream in order must find under a raw id only values of that raw id. So *evicted* events precede
every frame with newer values of their rows, and *assigned* events follow the frame with the values at the cut, just
before its MARK. Until then a new raw id is unknown.

In each generation the log knows no raw id at first. So its first marker carries the whole map.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from torchrec_stream_ckpt.capture.sender import Drain
from torchrec_stream_ckpt.format.dense_proof import MODULUS
from torchrec_stream_ckpt.format.entry_digests import id_entry, pairs_digest
from torchrec_stream_ckpt.format.frame import Header, Kind
from torchrec_stream_ckpt.format.proof import Ints
from torchrec_stream_ckpt.format.ring import FrameBuffer, FrameRing
from torchrec_stream_ckpt.format.rows import ASSIGNED, EVICTED, ID_LAYOUT, NO_ID, events_frame_bytes, put_events
from torchrec_stream_ckpt.model import IdMap

_NONE: Ints = np.empty(0, np.int64)
_Take = Callable[[Drain, int], FrameBuffer | None]
"""Returns memory for a frame of so many bytes; None if there is none."""


@dataclass(slots=True)
class _SentMap:
    """One id map, as the frames so far describe it."""

    live: IdMap
    table: int
    """Index of the table."""
    sent: Ints = field(init=False)
    """Raw id of each row of the shard, as sent; ``NO_ID`` for a row of which no raw id was sent."""
    seen: tuple[int, ...] | None = None
    """Version of the live map that was compared last."""
    new: tuple[Ints, Ints] = (_NONE, _NONE)
    """(rows of the shard, raw ids) at the open cut that are still to be sent as assigned."""
    digest: int = 0
    """Digest of the pairs in ``sent``."""

    def __post_init__(self) -> None:
        self.sent = np.full(self.live.rows, NO_ID, np.int64)

    def pairs(self, rows: Ints, raw_ids: Ints) -> int:
        """Return the digest of some pairs of the shard."""
        return pairs_digest(self.live.table, rows + self.live.row0, raw_ids)


class IdStream:
    """Sends the id events of one generation. All methods run on the training thread.

    A look at an unchanged map reads a few numbers. A map is compared only after an eviction, for which TorchRec has
    sorted it, and at each cut. After an eviction of hash ZCH only the evicted rows are compared.

    Args:
        maps: Id maps of this rank; empty if it has none.
        tables: Name -> index of each table.
        header: Makes the header of a frame of a kind, step and marker.
        ring: Memory for frames.
        submit: Submits frames.
    """

    def __init__(
        self,
        maps: Sequence[IdMap],
        tables: Mapping[str, int],
        header: Callable[[Kind, int, int], Header],
        ring: FrameRing,
        submit: Callable[[FrameBuffer], int],
    ) -> None:
        self._maps = [_SentMap(each, tables[each.table]) for each in maps if each.rows]
        self._header = header
        self._ring = ring
        self._submit = submit

    def evict(self, drain: Drain) -> bool:
        """(before rows are sent, no open cut) Send which raw ids have lost their rows. Returns False if the ring is
        full: then no rows may be sent."""
        for each in self._maps:
            version = each.live.version
            if version == each.seen:
                continue
            if not self._ring.has_room:  # nothing is compared, at whatever number of boundaries
                return False
            rows = each.live.lost(each.seen)
            each.seen = None  # if not all events fit, the whole map is compared
            if not self._send_evicted(each, rows, each.live.owners(rows), drain, self._take):
                return False
            each.seen = version
        return True

    def freeze(self, drain: Drain) -> bool:
        """(at a cut, before its first row) Send which raw ids have lost their rows, within the marker's budget, and
        keep which have got one. Returns False if there is no space: the cut has to be given up."""
        for each in self._maps:
            version, owners = each.live.version, each.live.owners()
            if not self._send_evicted(each, None, owners, drain, self._borrow):
                self.let_go()
                return False
            each.seen = version
            rows = np.flatnonzero((owners != NO_ID) & (each.sent == NO_ID))
            each.new = rows, owners[rows]
        return True

    def assign(self, drain: Drain) -> bool:
        """(open cut, after its last row) Send the new raw ids that fit. Returns True if all were sent."""
        for each in self._maps:
            rows, raw_ids = each.new
            done = self._send(each, rows, raw_ids, ASSIGNED, drain, self._take)
            each.new = rows[done:], raw_ids[done:]
            if done < len(rows):
                return False
        return True

    def let_go(self) -> None:
        """End the open cut. Raw ids that were not sent as assigned are sent with the next one."""
        for each in self._maps:
            each.new = _NONE, _NONE

    def digests(self) -> dict[str, int]:
        """(open cut) Return the digests of the maps that all frames before its MARK add up to, by entry."""
        return {id_entry(each.live.table): (each.digest + each.pairs(*each.new)) % MODULUS for each in self._maps}

    def _send_evicted(self, each: _SentMap, looked: Ints | None, owners: Ints, drain: Drain, take: _Take) -> bool:
        """Send which raw ids have lost their rows, of all rows or of those in ``looked``, with these owners."""
        sent = each.sent if looked is None else each.sent[looked]
        rows = np.flatnonzero((sent != NO_ID) & (sent != owners))
        rows = rows if looked is None else looked[rows]
        return self._send(each, rows, each.sent[rows], EVICTED, drain, take) == len(rows)

    def _send(
        self,
        each: _SentMap,
        rows: Ints,
        raw_ids: Ints,
        kind: int,
        drain: Drain,
        take: _Take,
    ) -> int:
        """Send events of one kind. Returns how many of them, from the first on, were submitted."""
        for begin in range(0, len(rows), ID_LAYOUT.max_rows):
            some, ids = rows[begin : begin + ID_LAYOUT.max_rows], raw_ids[begin : begin + ID_LAYOUT.max_rows]
            buffer = take(drain, events_frame_bytes(len(some)))
            if buffer is None:
                return begin
            header = self._header(Kind.IDS, drain.step, drain.marker)
            header.table = each.table
            put_events(header, buffer.array, some + each.live.row0, ids, kind)
            buffer.header, buffer.payload_crc = header, None
            self._submit(buffer)
            each.sent[some] = ids if kind == ASSIGNED else NO_ID
            each.digest += each.pairs(some, ids) * (1 if kind == ASSIGNED else -1)
        return len(rows)

    def _take(self, drain: Drain, _num_bytes: int) -> FrameBuffer | None:
        """Return memory as for rows."""
        return self._ring.acquire(extra=drain.extra, wait_s=drain.wait_s)

    def _borrow(self, drain: Drain, num_bytes: int) -> FrameBuffer | None:
        """Return memory of the marker's budget, or, if it has none, as for rows."""
        return self._ring.borrow(num_bytes) or self._take(drain, num_bytes)
