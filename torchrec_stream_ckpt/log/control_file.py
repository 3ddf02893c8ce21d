"""The records of ``control.log``, read in pieces: no more of the file is in memory than one record.

What stands after the last whole record may be *torn*: an appender died while it wrote. That is at most one record,
cut short or never written (zeros). Anything else that is not a record is damage, unless there is a commit key. Then it
is garbage that somebody without the key has put there, and the next whole record is looked for, byte by byte.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from torchrec_stream_ckpt.errors import CorruptionError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, MAGIC, MAX_FRAME_BYTES, parse_header, payload_of

_BUFFER_BYTES = 2**20


@dataclass(slots=True)
class ControlEnd:
    """Where the last record, or piece of garbage, that was read ends: what follows is torn."""

    offset: int


def records(path: Path, start: int, end: ControlEnd, *, garbage: bool) -> Iterator[tuple[int, bytes]]:
    """(offset, record) from offset ``start`` to what is the end of the file now, torn tail excluded.

    Args:
        path: The file.
        start: Where a record, or garbage, begins.
        end: Is told how far everything was read, before the next record is given.
        garbage: Go on after what is not a record; the first bytes of each such piece are given in the place of one.

    Raises:
        CorruptionError: (without ``garbage``) something is neither a record nor a torn tail.
        OSError: the file cannot be read.
    """
    with open(path, "rb", buffering=_BUFFER_BYTES) as file:
        size = os.fstat(file.fileno()).st_size
        position = start
        while position < size:
            try:
                record = _record_at(file, position, size)
                if record is not None and garbage:
                    payload_of(parse_header(record), record)
                whole, why = record, None
            except CorruptionError as error:
                whole, why = None, error
            if whole is not None:
                end.offset = position + len(whole)
                yield position, whole
                position = end.offset
                continue
            following = _find_record(file, position + 1, size) if garbage else None
            if following is None and _is_torn(file, position, size):
                return
            if not garbage:
                why = why or CorruptionError("a record is longer than the file")
                raise CorruptionError(why.message, hint=why.hint, path=path, offset=position) from None
            end.offset = size if following is None else following
            file.seek(position)
            yield position, file.read(min(HEADER_LEN, end.offset - position))
            position = end.offset


def _record_at(file: BinaryIO, position: int, size: int) -> bytes | None:
    """The record at ``position``; None if the file ends inside it.

    Raises:
        CorruptionError: no record begins there.
    """
    file.seek(position)
    head = file.read(HEADER_LEN)
    if len(head) < HEADER_LEN:
        return None
    header = parse_header(head)
    if position + HEADER_LEN + header.payload_len > size:
        return None
    return head + file.read(header.payload_len)


def _is_torn(file: BinaryIO, position: int, size: int) -> bool:
    """Whether all from ``position`` on is what an appender can have left that died in the middle of a record."""
    if size - position > MAX_FRAME_BYTES:
        return False
    file.seek(position)
    tail = file.read(size - position)
    if len(tail) < HEADER_LEN or tail.count(0) == len(tail):
        return True
    try:
        parse_header(tail)
    except CorruptionError:
        return False
    return True


def _find_record(file: BinaryIO, begin: int, end: int) -> int | None:
    """Where the first whole record in [begin, end) stands, its checksums compared."""
    position = begin
    while position < end:
        file.seek(position)
        piece = file.read(min(_BUFFER_BYTES, end - position))
        found = piece.find(MAGIC)
        if found < 0:
            if position + len(piece) >= end:
                return None
            position += len(piece) - len(MAGIC) + 1
            continue
        position += found
        try:
            record = _record_at(file, position, end)
            if record is not None:
                payload_of(parse_header(record), record)
                return position
        except CorruptionError:
            pass
        position += 1
    return None
