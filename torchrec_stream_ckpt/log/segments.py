"""Segment files of one partition: list them, read their frames, and find those that a trim may delete."""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import groupby, pairwise, zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Any

from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header
from torchrec_stream_ckpt.log.disk import explained
from torchrec_stream_ckpt.util.failpoints import failpoint
from torchrec_stream_ckpt.util.layout import DATA_DIR, IDENTITY_FILE, parse_segment, partition_dir, segment_name
from torchrec_stream_ckpt.util.types import LogSpan

_PARTITION = re.compile(r"p[0-9]{5}")
SETTLED_S = 2.0
"""Age in seconds after which a folder's modification time shows any added file. File systems count time in steps."""
_OLD_S = 60.0
"""Age for the same purpose if it is measured by the clocks of two hosts, which may differ."""
_MAX_KEPT = 2**22
"""Limit of names kept, over all folders: 64 MB."""
_LARGE_BYTES = 2**21
"""Bytes from which on a segment is mapped by large pages. Frames that bypassed the page cache are then read
from the disk into large pages, and ahead. Into small ones that takes three times the CPU time, and so does each later
read of them."""


class SegmentNames:
    """Names of the segments of partition folders, by generation. Cached while a folder does not change.

    A folder holds the segments of all generations, and an interval is in a few of them. Only a listing shows where a
    segment ends if the next one begins before its last byte. Can be used from any thread.
    """

    def __init__(self) -> None:
        self._kept: dict[str, _Listing] = {}
        """Listings by folder. The most recently listed folder is last."""
        self._count = 0
        """Number of names in all listings."""
        self._lock = threading.Lock()

    def bases(self, folder: Path, generation: int) -> list[int]:
        """Return the first offsets of a generation's segments, in order.

        Raises:
            OSError: the folder cannot be read.
        """
        place, now_s = str(folder), time.monotonic()
        changed_ns = os.stat(place).st_mtime_ns
        with self._lock:
            listing = self._kept.get(place)
        is_same = listing is not None and listing.changed_ns == changed_ns
        if listing is None or not is_same or not listing.is_settled:
            seen_s = listing.seen_s if listing is not None and is_same else now_s
            is_settled = now_s - seen_s >= SETTLED_S or time.time() - changed_ns / 1e9 >= _OLD_S
            listing = _Listing.of(place, changed_ns, seen_s, is_settled)
            with self._lock:
                self._keep(place, listing)
        return listing.bases(generation)

    def _keep(self, place: str, listing: _Listing) -> None:
        self._forget(place)
        self._kept[place] = listing
        self._count += len(listing.firsts)
        while self._count > _MAX_KEPT and len(self._kept) > 1:
            self._forget(next(iter(self._kept)))

    def _forget(self, place: str) -> None:
        if (listing := self._kept.pop(place, None)) is not None:
            self._count -= len(listing.firsts)


@dataclass(frozen=True, slots=True)
class _Listing:
    """The segments of one folder, by generation and first byte."""

    changed_ns: int
    """Modification time of the folder from its file system, read before the listing."""
    seen_s: float
    """Time when that modification time was first seen, on this process's clock."""
    is_settled: bool
    """True if the folder's modification time shows every file that was added since."""
    generations: array[int]
    firsts: array[int]

    @classmethod
    def of(cls, place: str, changed_ns: int, seen_s: float, is_settled: bool) -> _Listing:
        parsed = (parse_segment(name) for name in os.listdir(place))
        names = sorted(each for each in parsed if each is not None and each[1] < 2**63)  # no file is that long
        return cls(
            changed_ns,
            seen_s,
            is_settled,
            array("q", [generation for generation, _ in names]),
            array("q", [first for _, first in names]),
        )

    def bases(self, generation: int) -> list[int]:
        begin = bisect_left(self.generations, generation)
        return list(self.firsts[begin : bisect_right(self.generations, generation, begin)])


def segments(folder: Path, generation: int, names: SegmentNames | None = None) -> Iterator[tuple[Path, int, int]]:
    """Yield (path, first byte, end) of a generation's segments, in order. Each ends where the next one begins."""
    with explained("cannot read a partition", folder):
        bases = (names or SegmentNames()).bases(folder, generation)
    yield from sized(folder, generation, bases)


def sized(folder: Path, generation: int, bases: Sequence[int]) -> Iterator[tuple[Path, int, int]]:
    """Yield :func:`segments` whose first bytes are known. Omits those that a trim has just deleted."""
    with explained("cannot read a partition", folder):
        paths = ((base, folder / segment_name(generation, base)) for base in bases)
        mine = [(base, path, size) for base, path in paths if (size := size_of(path)) is not None]
    following = [base for base, _, _ in mine[1:]]
    for (base, path, size), limit in zip_longest(mine, following):
        yield path, base, base + size if limit is None else min(base + size, limit)


def within(folder: Path, span: LogSpan, names: SegmentNames) -> Iterator[tuple[Path, int, int]]:
    """Yield :func:`segments` that may hold bytes of a span, judging by their first bytes."""
    with explained("cannot read a partition", folder):
        bases = names.bases(folder, span.generation)
    first = max(0, bisect_right(bases, span.begin) - 1)
    yield from sized(folder, span.generation, bases[first : bisect_left(bases, span.end)])


def partition_dirs(root: Path) -> Iterator[Path]:
    """Yield the folders of a log's partitions, in any order. None if the log does not exist.

    Raises:
        OSError: the log's folder cannot be read.
    """
    folder = root / DATA_DIR
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return
    yield from (folder / name for name in names if _PARTITION.fullmatch(name))


def newest_segment(root: Path) -> tuple[int, Path] | None:
    """Return (generation, path) of a segment of the newest generation that has any. None if the log has no segment."""
    newest: tuple[int, Path] | None = None
    with explained("cannot read the file log", root):
        for folder in partition_dirs(root):
            for name in os.listdir(folder):
                parsed = parse_segment(name)
                if parsed is not None and (newest is None or parsed[0] > newest[0]):
                    newest = parsed[0], folder / name
    return newest


def pieces(root: Path, span: LogSpan, names: SegmentNames) -> list[tuple[Path, int, int, int]]:
    """Return (path, first byte, begin, end) of the segments that hold a span.

    Raises:
        StreamLostError: they end before the span does.
        CorruptionError: another part of the span is missing.
        LogUnavailableError: the log in folder ``root`` cannot be read.
    """
    folder = partition_dir(root, span.partition)
    found = [
        (path, base, max(base, span.begin), min(end, span.end))
        for path, base, end in ([] if _is_lost(root, folder) else within(folder, span, names))
        if base < span.end and end > span.begin
    ]
    position = span.begin
    for _, _, begin, end in found:
        position = end if begin <= position else position
    if position < span.end:
        later = [begin for _, _, begin, _ in found if begin > position]
        if later:
            what = f"bytes {position} to {min(later)} of the log are missing, but were committed: no segment has them"
        elif found:
            what = f"the log ends at byte {position}, but was committed up to byte {span.end}"
        else:
            what = f"no segment with bytes {position} to {span.end} is there, but they were committed"
        cut_short = all(end < span.end for _, _, _, end in found)
        written = "" if found else "; if a rank has just written it, put the log on a file system that all ranks share"
        raise (StreamLostError if cut_short else CorruptionError)(
            what,
            hint=f"restore an older marker, or restore the missing segment from a copy{written}",
            generation=span.generation,
            path=folder,
        )
    return found


def _is_lost(root: Path, folder: Path) -> bool:
    """Return whether a partition is missing although its log exists."""
    try:
        folder.stat()
    except FileNotFoundError:
        return (root / IDENTITY_FILE).is_file()
    except OSError:  # a later access reports the error
        pass
    return False


def has_in_turn(folder: str, span: LogSpan, base: int = 0) -> int | None:
    """Find a span in adjacent segments, each beginning where the previous one ends. Returns the start of the last one.

    It queries their names and does not list the folder, which holds those of all generations. Returns None if some are
    missing. They may still exist under other names.

    Args:
        folder: Folder of the partition.
        span: A span that is not empty.
        base: First byte of a segment that begins at or before the span.
    """
    while True:
        try:
            size = os.stat(f"{folder}/{segment_name(span.generation, base)}").st_size
        except OSError:  # the caller that lists the folder reports the error
            return None
        if not size:
            return None
        if base + size >= span.end:
            return base
        base += size


def size_of(path: Path) -> int | None:
    """Return the size in bytes. Returns None if a trim has just deleted the file."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def before(folder: Path, ends: Mapping[tuple[int, int], int], dead: Collection[int]) -> Iterator[Path]:
    """Yield the segments of one partition that are not needed, oldest first.

    The last one of a live generation is kept, because its writer may be appending to it.
    """
    partition = int(folder.name[1:])
    names = sorted(parsed for name in os.listdir(folder) if (parsed := parse_segment(name)))
    for generation, bases in groupby(names, itemgetter(0)):
        mine = list(sized(folder, generation, [base for _, base in bases]))
        if generation in dead:
            yield from (path for path, _, _ in mine)
        else:
            end = ends.get((generation, partition), 0)
            yield from (path for (path, _, _), (_, limit, _) in pairwise(mine) if limit <= end)


def unlink(path: Path, *, dry_run: bool) -> int | None:
    """Return the size of the file that was, or would be, deleted. Returns None if another trim was first."""
    size = size_of(path)
    if size is None or dry_run:
        return size
    try:
        path.unlink()
    except FileNotFoundError:
        return None
    failpoint("trim.deleted")
    return size


def frames(path: Path, begin: int, end: int) -> Iterator[tuple[int, memoryview]]:
    """Yield (position, frame) of the frames in bytes [begin, end) of one segment."""
    with explained("cannot read a segment", path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) if size else b""
        if isinstance(mapped, mmap.mmap) and end - begin >= _LARGE_BYTES:
            with suppress(OSError):  # a kernel without large pages
                mapped.madvise(mmap.MADV_HUGEPAGE)
    yield from split_frames(memoryview(mapped), begin, end, f"segment of {size} bytes ends", path=path)


def split_frames(view: memoryview, begin: int, end: int, what: str, **where: Any) -> Iterator[tuple[int, memoryview]]:
    """Yield (position, frame) of the frames in bytes [begin, end) of a segment or an object.

    Args:
        view: Its bytes.
        begin, end: Positions in it.
        what: Beginning of the message if it ends inside a frame, such as "segment of 9 bytes ends".
        where: Its place, for errors.

    Raises:
        CorruptionError: the end of a frame cannot be determined.
    """
    position = begin
    while position < end:
        try:
            header = parse_header(view[position : position + HEADER_LEN])
        except CorruptionError as error:
            raise CorruptionError(error.message, hint=error.hint, **where, offset=position) from None
        stop = position + HEADER_LEN + header.payload_len
        if stop > min(len(view), end):
            raise CorruptionError(f"{what} inside a frame", **where, offset=position, **header.place())
        yield position, view[position:stop]
        position = stop
