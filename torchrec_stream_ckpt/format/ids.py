"""Payload of an IDS frame: raw ids that were assigned to rows, or evicted from them. Specified in docs/format.md.

Its layout is that of a ROWS payload: sections one after another, each at a multiple of 64 bytes. Readers that want
rows skip such frames, because they contain none.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAX_FRAME_BYTES, Header, Kind
from torchrec_stream_ckpt.format.rows import NUMPY_DTYPES, RowLayout, Section

_LAYOUT_SECTIONS = (Section("int64", True, 1), Section("int64", True, 1), Section("uint8", True, 1))
MAX_EVENTS = (MAX_FRAME_BYTES - HEADER_LEN - (len(_LAYOUT_SECTIONS) + 1) * 64) // 17
"""Maximum number of events in one frame."""
_LAYOUT = RowLayout(_LAYOUT_SECTIONS, MAX_EVENTS)


class IdEvent(IntEnum):
    """Event of a raw id. The numbers are on disk: never changed, never reused."""

    ASSIGNED = 1  # from here on, the row belongs to the raw id
    EVICTED = 2  # the raw id no longer has a row


@dataclass(frozen=True, slots=True)
class IdEvents:
    """Events in the order in which they happened, shape (events,) each."""

    rows: npt.NDArray[np.int64]
    """Global rows of the table."""
    raw_ids: npt.NDArray[np.int64]
    events: npt.NDArray[np.uint8]
    """Numbers of :class:`IdEvent`."""


def encode_ids(header: Header, events: IdEvents) -> bytearray:
    """Encode a frame, still unsealed: an empty header, then the payload. The sections are recorded in ``header``.

    Args:
        header: A header of kind IDS, with its table.
        events: At most ``MAX_EVENTS``.
    """
    count = len(events.rows)
    assert header.kind is Kind.IDS
    assert count <= MAX_EVENTS
    offsets, length = _LAYOUT.offsets(count)
    header.rows, header.payload_len, header.section_offsets = count, length, offsets
    header.dtypes = _LAYOUT.codes
    frame = bytearray(HEADER_LEN + length)
    arrays = (events.rows, events.raw_ids, events.events)
    for section, offset, array in zip(_LAYOUT_SECTIONS, offsets, arrays, strict=True):
        data = np.ascontiguousarray(array, NUMPY_DTYPES[section.dtype]).tobytes()
        frame[HEADER_LEN + offset : HEADER_LEN + offset + len(data)] = data
    return frame


def decode_ids(header: Header, payload: memoryview, table_rows: int) -> IdEvents:
    """View the sections of an IDS payload.

    Raises:
        CorruptionError: sections do not fit the header, a row is outside the table, or an event is unknown.
    """
    offsets, length = _LAYOUT.offsets(header.rows)
    if header.dtypes != _LAYOUT.codes or header.section_offsets != offsets or length != len(payload):
        raise CorruptionError("sections do not match an id event", **header.place())
    rows, raw_ids, events = (
        np.frombuffer(payload, NUMPY_DTYPES[section.dtype], header.rows, offset)
        for section, offset in zip(_LAYOUT_SECTIONS, offsets, strict=True)
    )
    if header.rows and (int(rows.min()) < 0 or int(rows.max()) >= table_rows):
        raise CorruptionError(f"a row of an id event is outside [0, {table_rows})", **header.place())
    if not np.isin(events, [event.value for event in IdEvent]).all():
        raise CorruptionError("an id event has an unknown kind", **header.place())
    return IdEvents(rows, raw_ids, events)
