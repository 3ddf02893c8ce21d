"""Row files of the baselines: raw sections after one another, checksums kept aside, written once.

A piece is ids (int64, linear, ascending), weights and states of some rows, one section after the other. Where pieces
lie and what their checksums are stays in memory: no baseline pays for reading a manifest, ours does.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from cache import Part
from crc32c import crc32c
from workload import Ids, Tables

from torchrec_stream_ckpt.util.durable import fsync_dir, write_all

Buffer: TypeAlias = bytes | bytearray | memoryview
Rows: TypeAlias = npt.NDArray[Any]

_CHECK_BYTES = 4 << 20
_WINDOW_BYTES = 256 << 20
_WINDOW_PIECE_ROWS = 2048
_BASE_BLOCK = 2 << 20
_GAP_BYTES = 256 << 10
"""Bytes of no use between two pieces: up to this many are read along, rather than asked for twice."""


@dataclass(frozen=True)
class Piece:
    """Some rows in a file."""

    path: Path
    offset: int
    rows: int
    num_bytes: int
    crc: int
    first: int = 0
    """No id is less."""
    last: int = sys.maxsize
    """No id is more."""


def needed(pieces: Iterable[Piece]) -> Iterator[Part]:
    """The parts of files that these pieces are in, each file's in order: what lies far between them is left out."""
    by_file: dict[Path, list[Piece]] = {}
    for piece in pieces:
        by_file.setdefault(piece.path, []).append(piece)
    for path, found in by_file.items():
        found.sort(key=lambda each: each.offset)
        begin = end = found[0].offset
        for piece in found:
            if piece.offset > end + _GAP_BYTES:
                yield Part(path, begin, end)
                begin = piece.offset
            end = piece.offset + piece.num_bytes
        yield Part(path, begin, end)


def write_file(path: Path, pieces: Iterable[Sequence[Buffer]]) -> list[tuple[int, int, int]]:
    """(offset, length, checksum) of each piece; with :func:`publish` the file is durable, and there as a whole."""
    places, offset = [], 0
    fd = os.open(_unpublished(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
    try:
        for parts in pieces:
            length = crc = 0
            for part in parts:
                crc, length = crc32c(part, crc), length + memoryview(part).nbytes
            write_all(fd, [memoryview(part).cast("B") for part in parts])
            places.append((offset, length, crc))
            offset += length
    finally:
        os.close(fd)
    return places


def publish(folder: Path, paths: Sequence[Path]) -> None:
    """Sync files that were written, then give them their names: the first sync takes most of the others along."""
    for path in paths:
        fd = os.open(_unpublished(path), os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)
    for path in paths:
        _unpublished(path).rename(path)
    fsync_dir(folder)


def _unpublished(path: Path) -> Path:
    return path.with_name(path.name + ".new")


class Maps:
    """Memory maps of the files that one restore reads; a copy-on-write map, as torch takes no read-only memory."""

    def __init__(self, dim: int) -> None:
        self._dim = dim
        self._maps: dict[Path, mmap.mmap] = {}

    def of(self, path: Path) -> mmap.mmap:
        if path not in self._maps:
            with open(path, "rb") as file:
                self._maps[path] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._maps[path]

    def fetch(self, pieces: Iterable[Piece]) -> None:
        """Ask for all that will be read, file by file: for a disk, that is a few long reads."""
        for part in needed(pieces):
            begin = part.begin - part.begin % mmap.PAGESIZE
            self.of(part.path).madvise(mmap.MADV_WILLNEED, begin, part.end - begin)

    def check(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            data = memoryview(self.of(piece.path))[piece.offset : piece.offset + piece.num_bytes]
            if crc32c(data) != piece.crc:
                raise RuntimeError(f"{piece.path}: checksum of the piece at {piece.offset} does not match")

    def views(self, piece: Piece) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Ids, weights and states of a piece."""
        data, rows, dim, begin = self.of(piece.path), piece.rows, self._dim, piece.offset
        ids = torch.frombuffer(data, dtype=torch.int64, count=rows, offset=begin)
        weights = torch.frombuffer(data, dtype=torch.float32, count=rows * dim, offset=begin + 8 * rows)
        sums = torch.frombuffer(data, dtype=torch.float32, count=rows, offset=begin + (8 + 4 * dim) * rows)
        return ids, weights.view(rows, dim), sums

    def arrays(self, piece: Piece) -> tuple[Ids, Rows, Rows]:
        """The same as arrays; a row of weights is one string of bytes, which is placed faster than numbers are."""
        data, rows, row_bytes, begin = self.of(piece.path), piece.rows, 4 * self._dim, piece.offset
        ids = np.frombuffer(data, np.int64, rows, begin)
        weights = np.frombuffer(data, np.dtype((np.void, row_bytes)), rows, begin + 8 * rows)
        return ids, weights, np.frombuffer(data, np.float32, rows, begin + (8 + row_bytes) * rows)


def copy_pieces(pieces: Sequence[Piece], tables: Tables) -> None:
    """Write the pieces' rows into the tables, in order, by torch's ``index_copy_``; a second thread checks ahead."""
    maps = Maps(tables.weights.shape[1])
    maps.fetch(pieces)
    with ThreadPoolExecutor(1) as checker:
        for piece, check in zip(pieces, checks(maps, pieces, checker), strict=True):
            check.result()
            tables.put(*maps.views(piece))


def place_pieces(pieces: Sequence[Piece], tables: Tables) -> None:
    """The same result, faster: each thread writes a window of the tables, piece by piece, so that its rows stay in the
    processor's caches, and places rows as strings of bytes. This is how the store's rows are placed, too."""
    maps = Maps(tables.weights.shape[1])
    maps.fetch(pieces)
    weights, sums = whole_rows(tables)
    with ThreadPoolExecutor(1) as checker:
        ready = checks(maps, pieces, checker)
        views = [maps.arrays(piece) for piece in pieces]
        firsts = np.array([piece.first for piece in pieces], np.int64)
        lasts = np.array([piece.last for piece in pieces], np.int64)

        def place(begin: int, end: int) -> None:
            for number in np.flatnonzero((firsts < end) & (lasts >= begin)).tolist():
                ready[number].result()
                ids, new_weights, new_sums = views[number]
                low, high = np.searchsorted(ids, (begin, end))
                if low < high:
                    weights[ids[low:high]] = new_weights[low:high]
                    sums[ids[low:high]] = new_sums[low:high]

        in_windows(place, pieces, tables)


def in_windows(place: Callable[[int, int], None], pieces: Sequence[Piece], tables: Tables) -> None:
    """Call ``place(begin, end)`` for windows of all rows, in as many threads as torch has.

    A window is small enough for a cache, but not so small that a pass over the tables has hardly any rows in it.
    """
    threads, rows = torch.get_num_threads(), tables.sums.numel()
    wanted = -(-tables.weights.nbytes // _WINDOW_BYTES)
    passes = max(1.0, sum(min(piece.last + 1, rows) - piece.first for piece in pieces) / rows)
    count = max(threads, min(wanted, int(sum(piece.rows for piece in pieces) / passes) // _WINDOW_PIECE_ROWS))
    cuts = [rows * number // count for number in range(count + 1)]
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(place, cuts[:-1], cuts[1:]))


def whole_rows(tables: Tables) -> tuple[Rows, Rows]:
    """Weights, a row as one string of bytes, and states; views."""
    weights = tables.weights.numpy()
    return weights.view(np.dtype((np.void, weights.shape[1] * 4)))[:, 0], tables.sums.numpy()


def checks(maps: Maps, pieces: Sequence[Piece], checker: Executor) -> list[Future[None]]:
    """For each piece, in order, what is done once it has been read and its checksum compared; some share one."""
    found: list[Future[None]] = []
    batch: list[Piece] = []
    num_bytes = 0
    for piece in pieces:
        batch.append(piece)
        num_bytes += piece.num_bytes
        if num_bytes >= _CHECK_BYTES:
            found += [checker.submit(maps.check, batch)] * len(batch)
            batch, num_bytes = [], 0
    return found + [checker.submit(maps.check, batch)] * len(batch)


class Gather:
    """Rows of three tensors into memory that is used again: what it gave is good until it gives the next."""

    def __init__(self) -> None:
        self._memory: dict[int, torch.Tensor] = {}

    def tensors(self, chosen: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Of each source the ``chosen`` rows."""
        return [self._rows(place, chosen, source) for place, source in enumerate(sources)]

    def sections(self, chosen: torch.Tensor, sources: Sequence[torch.Tensor]) -> list[Buffer]:
        """The same, as sections of a piece."""
        return [memoryview(rows.view(-1).numpy()) for rows in self.tensors(chosen, sources)]

    def _rows(self, place: int, chosen: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        width = source.shape[1] if source.dim() > 1 else 1
        wanted = chosen.numel() * width
        if place not in self._memory or self._memory[place].numel() < wanted:
            self._memory[place] = torch.empty(wanted + wanted // 4, dtype=source.dtype)
        target = self._memory[place][:wanted].view(chosen.numel(), *source.shape[1:])
        return torch.index_select(source, 0, chosen, out=target)


class Image:
    """A whole image of the tables in one file: weights, then states. Read straight into the tables by two threads."""

    def __init__(self, path: Path, parts: Iterable[tuple[int, Buffer]]) -> None:
        """(offset, bytes) of what it holds; the blocks are checksummed behind the write, from the page cache."""
        self.path = path
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        try:
            for offset, data in parts:
                view = memoryview(data).cast("B")
                while view.nbytes:
                    written = os.pwrite(fd, view, offset)
                    view, offset = view[written:], offset + written
            os.fdatasync(fd)
            self.num_bytes = os.fstat(fd).st_size
            with mmap.mmap(fd, 0, prot=mmap.PROT_READ) as whole, memoryview(whole) as view:
                blocks = range(0, self.num_bytes, _BASE_BLOCK)
                self._crcs = [crc32c(view[begin : begin + _BASE_BLOCK]) for begin in blocks]
        finally:
            os.close(fd)

    def restore(self, tables: Tables) -> None:
        targets = [memoryview(part.view(-1).numpy()).cast("B") for part in (tables.weights, tables.sums)]
        fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with ThreadPoolExecutor(2) as pool:
                list(pool.map(lambda block: self._read(fd, block, targets), range(len(self._crcs))))
        finally:
            os.close(fd)

    def _read(self, fd: int, block: int, targets: Sequence[memoryview]) -> None:
        begin = block * _BASE_BLOCK
        views = _slices(targets, begin, min(begin + _BASE_BLOCK, self.num_bytes))
        crc, wanted = 0, sum(view.nbytes for view in views)
        if os.preadv(fd, views, begin) != wanted:
            raise RuntimeError(f"{self.path}: short read at {begin}")
        for view in views:
            crc = crc32c(view, crc)
        if crc != self._crcs[block]:
            raise RuntimeError(f"{self.path}: checksum of the block at {begin} does not match")


def _slices(targets: Sequence[memoryview], begin: int, end: int) -> list[memoryview]:
    """Where bytes [begin, end) of the targets, taken as one, lie."""
    views, base = [], 0
    for target in targets:
        low, high = max(begin - base, 0), min(end - base, target.nbytes)
        if low < high:
            views.append(target[low:high])
        base += target.nbytes
    return views
