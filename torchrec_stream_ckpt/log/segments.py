"""The segment files of one partition: which there are, the frames in them, and those that a trim may take."""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection, Iterator, Mapping
from itertools import pairwise, zip_longest
from pathlib import Path

from torchrec_stream_ckpt.errors import CorruptionError, StreamLostError
from torchrec_stream_ckpt.failpoints import failpoint
from torchrec_stream_ckpt.format.frame import HEADER_LEN, parse_header
from torchrec_stream_ckpt.layout import DATA_DIR, IDENTITY_FILE, parse_segment, partition_dir, segment_name
from torchrec_stream_ckpt.log.disk import explained
from torchrec_stream_ckpt.types import LogSpan


def segments(folder: Path, generation: int) -> Iterator[tuple[Path, int, int]]:
    """(path, first byte, end) of a generation's segments, in order; each ends where the next one begins."""
    with explained("cannot read a partition", folder):
        names = [(parsed[1], name) for name in os.listdir(folder) if (parsed := parse_segment(name))]
        mine = [
            (base, folder / name, size)
            for base, name in sorted(names)
            if parse_segment(name) == (generation, base) and (size := size_of(folder / name)) is not None
        ]
    following = [base for base, _, _ in mine[1:]]
    for (base, path, size), limit in zip_longest(mine, following):
        yield path, base, base + size if limit is None else min(base + size, limit)


def newest_segment(root: Path) -> tuple[int, Path] | None:
    """(generation, path) of a segment of the newest generation that has any."""
    newest: tuple[int, Path] | None = None
    with explained("cannot read the file log", root):
        for folder in (root / DATA_DIR).glob("p" + 5 * "[0-9]"):
            for name in os.listdir(folder):
                parsed = parse_segment(name)
                if parsed is not None and (newest is None or parsed[0] > newest[0]):
                    newest = parsed[0], folder / name
    return newest


def pieces(root: Path, span: LogSpan) -> list[tuple[Path, int, int, int]]:
    """(path, first byte, begin, end) of the segments that hold a span.

    Raises:
        StreamLostError: they end before the span does.
        CorruptionError: another part of it is not there.
        LogUnavailableError: the log of which ``root`` is the folder cannot be read.
    """
    folder = partition_dir(root, span.partition)
    found = [
        (path, base, max(base, span.begin), min(end, span.end))
        for path, base, end in ([] if _is_lost(root, folder) else segments(folder, span.generation))
        if base < span.end and end > span.begin
    ]
    position = span.begin
    for _, _, begin, end in found:
        position = end if begin <= position else position
    if position < span.end:
        cut_short = all(end < span.end for _, _, _, end in found)
        raise (StreamLostError if cut_short else CorruptionError)(
            f"the log ends at byte {position}, {span.end} were committed",
            hint="restore an older marker, or bring the missing segment back",
            generation=span.generation,
            path=folder,
        )
    return found


def _is_lost(root: Path, folder: Path) -> bool:
    """Tell whether a partition is not there although its log is."""
    try:
        folder.stat()
    except FileNotFoundError:
        return (root / IDENTITY_FILE).is_file()
    except OSError:  # the next one to look says what it is
        pass
    return False


def has_in_turn(folder: str, span: LogSpan) -> bool:
    """Tell whether segments hold a span from the generation's first byte on, each where the one before ends.

    Asks for their names, and lists no folder: it holds those of all generations. Where the answer is no, they may
    still be there under other names.
    """
    base = 0
    while base < span.end:
        try:
            size = os.stat(f"{folder}/{segment_name(span.generation, base)}").st_size
        except OSError:  # whoever lists the folder says what it is
            return False
        if not size:
            return False
        base += size
    return True


def size_of(path: Path) -> int | None:
    """Size in bytes; None when a trim has just taken the file away."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return None


def before(folder: Path, ends: Mapping[tuple[int, int], int], dead: Collection[int]) -> Iterator[Path]:
    """The segments of one partition that are not needed, oldest first.

    The last one of a generation that lives stays: its writer may be appending to it.
    """
    partition = int(folder.name[1:])
    generations = {parsed[0] for name in os.listdir(folder) if (parsed := parse_segment(name))}
    for generation in sorted(generations):
        mine = list(segments(folder, generation))
        if generation in dead:
            yield from (path for path, _, _ in mine)
        else:
            end = ends.get((generation, partition), 0)
            yield from (path for (path, _, _), (_, limit, _) in pairwise(mine) if limit <= end)


def unlink(path: Path, *, dry_run: bool) -> int | None:
    """Size of the file that was, or would be, deleted; None when another trim was first."""
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
    """(position, frame) of the frames in bytes [begin, end) of one segment."""
    with explained("cannot read a segment", path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        view = memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)) if size else memoryview(b"")
    position = begin
    while position < end:
        try:
            header = parse_header(view[position : position + HEADER_LEN])
        except CorruptionError as error:
            raise CorruptionError(error.message, hint=error.hint, path=path, offset=position) from None
        stop = position + HEADER_LEN + header.payload_len
        if stop > min(size, end):
            raise CorruptionError(
                f"segment of {size} bytes ends inside a frame", path=path, offset=position, **header.place()
            )
        yield position, view[position:stop]
        position = stop
