"""Control records in a bucket: one object a record, created only if its number is free.

A record's offset is its number. Number n+1 is created after n exists, so of two appenders at one number one wins, and
the other one sees the winner's record before it tries the next number. No lock, lease or clock is involved.

256 records form a block. Once a block is full, its records are also in one object, a *pack*, so that a reader needs few
requests for an old log. A pack decides nothing: if it is missing or damaged, the records are read one by one.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import count
from typing import NoReturn

from torchrec_stream_ckpt.errors import (
    CommitUnknownError,
    CorruptionError,
    LogUnavailableError,
    PrunedError,
    StoreUnavailableError,
)
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header, payload_of
from torchrec_stream_ckpt.log.bucket.objects import delete_all, numbered, of_log, read_if_there
from torchrec_stream_ckpt.log.worker import Worker
from torchrec_stream_ckpt.store.api import Objects

BLOCK = 256
"""Records of a block."""
CONTROL_DIR = "control"
PACKS_DIR = "packs"
BASE_DIR = "base"
_MOST_PACKED_BYTES = 32 * 2**20
_MOST_AHEAD_BYTES = 64 * 2**20
"""Bytes of packs that are read at the same time. A larger pack is read alone."""
_KNOWN = 2 * BLOCK
"""Newest records that are kept in memory."""


def record_name(number: int) -> str:
    return f"{_block_dir(number)}/{number:020d}"


def base_name(number: int) -> str:
    return f"{BASE_DIR}/{number:020d}"


def _block_dir(number: int) -> str:
    return f"{CONTROL_DIR}/{number // BLOCK * BLOCK:020d}"


class ControlObjects:
    """Appends and reads the control records of one log. Can be used from any thread.

    Args:
        objects: Objects below the log's URI.
    """

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._workers = Worker("stream-ckpt-control-0"), Worker("stream-ckpt-control-1")
        self._known: dict[int, bytes] = {}
        """Newest records that this object has read or written, and that counted then. A record never changes."""
        self._end = 0
        """Number of the next record, as far as it is known."""

    def append(self, record: bytes, *, garbage: bool = False) -> int:
        """Append one record; see :meth:`Log.append_control`."""
        # The number after the newest record that was read. If it is taken, the loop goes on after the records there.
        number = self._end if self._known else self._read_on(garbage=garbage)
        while True:
            try:
                is_new = self._objects.create(record_name(number), [record])
                found = record if is_new else self._read(number)
            except StoreUnavailableError as error:
                found = self._after_silence(number, error)
            if found is None:  # it was deleted, or is not shown yet
                raise CommitUnknownError(
                    "the bucket reports that the number of a control record is taken, but shows no such record",
                    hint="try again",
                    name=record_name(number),
                )
            if found != record:
                number = self._read_on(garbage=garbage)
            elif self._is_deleted(number):  # equal also if the answer to an earlier try was lost
                number = self._leave_hole(number, garbage=garbage)
            else:
                self._note(number, record)
                if number % BLOCK == BLOCK - 1:
                    self._pack(number - BLOCK + 1)
                return number

    def _leave_hole(self, number: int, *, garbage: bool) -> int:
        """Undo a put among records that were deleted while this process was away, and return the number of the end.

        Their names are free again, so the put succeeded. A base is written before the first record is deleted, so every
        such put is found. No reader takes it for a record, because each looks for the base after it has read.
        """
        with of_log("cannot undo a put among deleted control records"):
            self._objects.delete(record_name(number))
        self._forget()
        return self._read_on(garbage=garbage)

    def _after_silence(self, number: int, error: StoreUnavailableError) -> bytes | None:
        """Return the record that exists after a put without an answer.

        Raises:
            CommitUnknownError: none exists yet, or the bucket does not answer. The put may still arrive.
        """
        with suppress(StoreUnavailableError):
            if (found := self._read(number)) is not None:
                return found
        raise _unknown(error) from None

    def _is_deleted(self, number: int) -> bool:
        """Return whether a record that was just put is among deleted ones, so that it does not count.

        Raises:
            CommitUnknownError: the bucket does not answer.
        """
        try:
            return self.base() > number
        except LogUnavailableError as error:
            raise _unknown(error) from None

    def number_after(self, number: int) -> int:
        """Return the number of the next record, by asking for those after ``number`` and after the known ones."""
        number = max(number, self._end)
        while self._objects.size(record_name(number)) is not None:
            number += 1
        return number

    def _read_on(self, *, garbage: bool) -> int:
        """Read the newer records, and return the number after the newest one.

        Raises:
            LogUnavailableError: the bucket does not answer, or a record that was read before is gone.
        """
        while True:
            try:
                for _ in self.read(self._end if self._known else self.base(), garbage=garbage):
                    pass
            except PrunedError:  # others were deleted meanwhile
                self._forget()
            else:
                return self._end

    def read(self, start: int = 0, *, garbage: bool = False) -> Iterator[tuple[int, bytes]]:
        """Yield (number, record) from ``start`` on; see :meth:`Log.read_control`."""
        with of_log("cannot read the bucket log's control records"):
            number = start
            for number, record in self._in_blocks(start):
                yield number, self._checked(number, record, garbage=garbage)
                number += 1
            for newer, record in self._newer(number, nothing_read=number == start):
                yield newer, self._checked(newer, record, garbage=garbage)

    def _newer(self, begin: int, *, nothing_read: bool) -> list[tuple[int, bytes]]:
        """Return (number, record) from ``begin`` on, and ask for each by its name.

        Raises as :meth:`_check_not_deleted` and :meth:`_report_gap`.
        """
        found: list[tuple[int, bytes]] = []
        before = self._workers[0].submit(self._has_previous, begin) if nothing_read else None
        for number in count(begin):
            after = self._workers[1].submit(self._objects.size, record_name(number + 1))
            record = self._read(number)
            if record is None and after.result() is not None:
                record = self._read(number)  # both may have been created since
                if record is None:
                    self._report_gap(number, number + 1)
            if record is None:
                break
            found.append((number, record))
        if found:
            self._check_not_deleted(begin)
        elif before is not None and not before.result():
            self._check_begin(begin)
        for number, record in found:
            self._note(number, record)
        with self._lock:
            self._end = max(self._end, begin + len(found))
        return found

    def _has_previous(self, number: int) -> bool:
        """(during the read of ``number``) Return whether the record before exists. True for the first record."""
        return not number or self._objects.size(record_name(number - 1)) is not None

    def _check_not_deleted(self, number: int) -> None:
        """Check that no record from ``number`` on was deleted before it was read. Its name would be free again.

        Another process that was away may have put a record there, and may not have noticed yet.

        Raises:
            PrunedError: it was deleted, and a snapshot replaces it.
        """
        if (base := self.base()) > number:
            raise PrunedError(f"the control records begin at {base}, not at {number}", store=self._objects.url)

    def _check_begin(self, start: int) -> None:
        """Check that the record before ``start`` was deleted because a snapshot replaces it."""
        self._check_not_deleted(start)
        if self.base() < start:
            raise LogUnavailableError(
                f"control record {start - 1}, which was read before, is missing",
                hint="restore it from a copy, or start a new job: it was deleted while the job ran",
                store=self._objects.url,
                name=record_name(start - 1),
            )

    def _in_blocks(self, start: int) -> Iterator[tuple[int, bytes]]:
        """Yield records that are in memory, in packs, or in listed blocks, in order and without a gap."""
        number = start
        while (known := self._known.get(number)) is not None:
            yield number, known
            number += 1
        if number == self._end and number:
            return  # the usual case: everything was read before, and one request shows whether there is more
        self._check_not_deleted(number)
        packs, ahead = numbered(self._objects, PACKS_DIR), dict[int, Future[dict[int, bytes] | None]]()
        with ThreadPoolExecutor(self._objects.reads_ahead, "stream-ckpt-control") as pool:
            while True:
                begin = number // BLOCK * BLOCK
                self._read_ahead(pool, ahead, begin, packs)
                records = ahead.pop(begin).result() if begin in packs else None
                if records is None:
                    listed = [each for each in numbered(self._objects, _block_dir(begin)) if each >= number]
                    found = zip(listed, pool.map(self._read, listed), strict=True)
                    records = {each: record for each, record in found if record is not None}
                    self._check_not_deleted(number)
                while (record := records.get(number)) is not None:
                    self._note(number, record)
                    yield number, record
                    number += 1
                if number % BLOCK or number == begin:
                    self._check_gap(number, records, packs)
                    return

    def _read_ahead(
        self,
        pool: ThreadPoolExecutor,
        ahead: dict[int, Future[dict[int, bytes] | None]],
        begin: int,
        packs: Mapping[int, int],
    ) -> None:
        """Begin to read adjacent packs from the block ``begin`` on, several at the same time.

        Args:
            pool: Reads them.
            ahead: Packs that are being read. New ones are added.
            begin: First record of the block.
            packs: Lengths of all packs.
        """
        num_bytes = sum(packs[each] for each in ahead)
        while begin in packs:
            if begin not in ahead:
                num_bytes += packs[begin]
                if ahead and (len(ahead) >= self._objects.reads_ahead or num_bytes > _MOST_AHEAD_BYTES):
                    return
                ahead[begin] = pool.submit(self._unpacked, begin)
            begin += BLOCK

    def _check_gap(self, number: int, listed: Iterable[int], packs: Iterable[int]) -> None:
        """Check that no later record exists where the records end: each was created after the one before it.

        Args:
            number: The number after the last record that was found.
            listed: Numbers of the records of its block.
            packs: Blocks that were packed.

        Raises as :meth:`_report_gap`.
        """
        following = numbered(self._objects, _block_dir(number // BLOCK * BLOCK + BLOCK))
        later = [each for each in (*listed, *following) if each > number]
        later += [each for each in packs if each > number and not later and self._unpacked(each) is not None]
        if later and self._read(number) is None:  # a listing may lag
            self._report_gap(number, min(later))

    def _report_gap(self, number: int, later: int) -> NoReturn:
        """Report that the record ``number`` is missing, but record ``later`` exists.

        Raises:
            PrunedError: it was deleted, and a snapshot replaces it.
            CorruptionError: it was lost.
        """
        self._check_not_deleted(number)
        self._forget()  # so that an append looks again, and fills no gap
        raise CorruptionError(
            f"control record {number} is missing, but record {later} exists",
            store=self._objects.url,
            name=record_name(number),
        )

    def _checked(self, number: int, record: bytes, *, garbage: bool) -> bytes:
        """Return a record, or the beginning of an object that is not a record.

        Raises:
            CorruptionError: (without ``garbage``) it is not a record.
        """
        try:
            header = parse_header(record)
            if len(record) != HEADER_LEN + header.payload_len:
                raise CorruptionError(f"an object of {len(record)} bytes is not a control record")
            if garbage:
                payload_of(header, record)
        except CorruptionError as error:
            if garbage:
                return record[:HEADER_LEN]
            raise CorruptionError(
                error.message, hint=error.hint if not number else "", store=self._objects.url, name=record_name(number)
            ) from None
        return record

    def _read(self, number: int) -> bytes | None:
        return read_if_there(self._objects, record_name(number))

    def _note(self, number: int, record: bytes) -> None:
        with self._lock:
            self._known[number] = record
            self._end = max(self._end, number + 1)
            for old in [each for each in self._known if each < self._end - _KNOWN]:
                del self._known[old]

    def _forget(self) -> None:
        with self._lock:
            self._known.clear()
            self._end = 0

    def _unpacked(self, begin: int) -> dict[int, bytes] | None:
        """Return the records of a pack, by number. Returns None if it is not what it should be."""
        records, position = {}, 0
        try:
            data = read_if_there(self._objects, f"{PACKS_DIR}/{begin:020d}")
            if data is None:
                return None
            for number in range(begin, begin + BLOCK):
                header = parse_header(data[position : position + HEADER_LEN])
                record = data[position : position + HEADER_LEN + header.payload_len]
                payload_of(header, record)
                records[number] = record
                position += len(record)
        except CorruptionError:
            return None
        return records if position == len(data) else None

    def _pack(self, begin: int) -> None:
        """Put the records of a full block into one object, if all were read. If that fails, readers read the records.

        They are not read here: the first ones may have been deleted, and their names free again.
        """
        with suppress(StoreUnavailableError, CorruptionError):
            whole = [self._known[each] for each in range(begin, begin + BLOCK) if each in self._known]
            for each in whole:
                payload_of(parse_header(each), each)
            if len(whole) == BLOCK and sum(map(len, whole)) <= _MOST_PACKED_BYTES:
                self._objects.create(f"{PACKS_DIR}/{begin:020d}", whole)

    def base(self) -> int:
        """Return the number of the first record; see :meth:`Log.control_base`."""
        with of_log("cannot read the bucket log's control records"):
            return max(numbered(self._objects, BASE_DIR), default=0)

    def prune(self, base: int) -> None:
        """Delete the records before ``base``; see :meth:`Log.prune_control`."""
        with of_log("cannot delete control records"):
            bases = numbered(self._objects, BASE_DIR)
            if base > max(bases, default=0):
                if self._read(base) is None:
                    raise CorruptionError(f"no control record has number {base}", store=self._objects.url)
                self._objects.create(base_name(base), [b""])
            base = max(base, *bases, 0)
            names = sorted(entry.name for entry in self._objects.list(f"{CONTROL_DIR}/"))
            packs = [begin for begin in numbered(self._objects, PACKS_DIR) if begin + BLOCK <= base]
            delete_all(self._objects, [name for name in names if name < record_name(base)])
            delete_all(self._objects, [f"{PACKS_DIR}/{begin:020d}" for begin in packs])
            for old in bases:
                if old < base:
                    self._objects.delete(base_name(old))

    def close(self) -> None:
        for worker in self._workers:
            worker.close()


def _unknown(error: StoreUnavailableError | LogUnavailableError) -> CommitUnknownError:
    return CommitUnknownError(
        f"it is unknown whether a control record arrived: {error.message}", hint=error.hint, **error.where
    )
