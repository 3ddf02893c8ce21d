"""The schemes to compare with, over the same frames: naive increments, and Check-N-Run's differentials.

All of them keep rows in the same raw form (``files.py``), check a CRC32C of all that they read, and place rows in the
same way as this library's restore does, in one fused pair of tensors: what differs between them is the layout alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import torch
from cache import Part
from files import Buffer, Gather, Image, Piece, copy_pieces, needed, place_pieces, publish, write_file
from stream import Trainer, linear_ids, read_rows
from workload import Ids, Tables

from torchrec_stream_ckpt.util.durable import fsync_dir


class UnavailableError(Exception):
    """A scheme has nothing to measure here; says why."""


@dataclass
class Ledger:
    """Bytes that a scheme has put on a disk, and has read again to do so."""

    stored: int = 0
    """What it keeps."""
    written: int = 0
    read_back: int = 0
    dead: int = 0
    """Of no use to any marker, in files of which another part is; beside ``stored``."""
    untimed_s: float = 0.0
    """Of a build: trials that a job would not make at each marker."""

    def add(self, num_bytes: int) -> None:
        self.stored += num_bytes
        self.written += num_bytes


@dataclass(frozen=True)
class Reads:
    """What the restore of one marker reads."""

    base_bytes: int
    delta_bytes: int
    """After the base; all of it, where a scheme reads both at once."""
    delta_rows: int | None = None
    pieces: int | None = None
    """That the rows after the base are in."""


@dataclass(frozen=True)
class Timing:
    """One restore, seconds."""

    whole_s: float
    delta_s: float | None
    """Without the base; None where a scheme reads both at once."""


class Scheme(Protocol):
    """One way to keep markers. ``build`` is called once for every interval, in order, the base first."""

    name: str
    ledger: Ledger
    split: bool
    """Whether what came behind the base can be restored by itself."""

    def build(self, interval: int) -> None:
        """Make the marker behind ``interval`` durable. The rows are in the log and, if it asks, in the live tables."""

    def restore(self, interval: int, tables: Tables) -> None:
        """Bring the marker behind ``interval`` back into the tables.

        Raises:
            UnavailableError: this scheme does not keep that marker.
        """

    def restore_delta(self, interval: int, tables: Tables) -> float:
        """Only what came behind the base, whatever the tables hold; the seconds that this takes, planning left out."""
        ...

    def land(self, tables: Tables) -> None:
        """Not timed: put into the tables what a restore has left elsewhere."""

    def files(self, interval: int) -> Iterable[Path | Part]:
        """What a restore of that marker reads, to warm or to chill it: files, or those parts that it needs of them."""

    def reads(self, interval: int) -> Reads:
        """How much of them."""
        ...


@dataclass
class _Chain:
    """What naive, differential and IncrCP have in common: where things are, and images of the whole tables."""

    split: ClassVar[bool] = True
    name: str
    folder: Path
    trainer: Trainer
    keep: frozenset[int]
    """Markers that will be restored: a file that none of them needs is counted, and then deleted."""
    ledger: Ledger = field(default_factory=Ledger)
    bases: dict[int, Image] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True)

    def base_of(self, interval: int) -> int:
        return max(number for number in self.bases if number <= interval)

    def restore(self, interval: int, tables: Tables) -> None:
        self.bases[self.base_of(interval)].restore(tables)
        place_pieces(self.pieces(interval), tables)

    def restore_delta(self, interval: int, tables: Tables) -> float:
        begin = time.perf_counter()
        place_pieces(self.pieces(interval), tables)
        return time.perf_counter() - begin

    def pieces(self, interval: int) -> list[Piece]:
        """What marker ``interval`` needs behind its base, in the order in which to write it."""
        raise NotImplementedError

    def files(self, interval: int) -> Iterator[Path | Part]:
        yield self.bases[self.base_of(interval)].path
        yield from needed(self.pieces(interval))

    def reads(self, interval: int) -> Reads:
        pieces = self.pieces(interval)
        rows, num_bytes = sum(piece.rows for piece in pieces), sum(piece.num_bytes for piece in pieces)
        return Reads(self.bases[self.base_of(interval)].num_bytes, num_bytes, rows, len(pieces))

    def land(self, tables: Tables) -> None:
        pass

    def _first_base(self) -> None:
        """The base from its frames, whose rows come in order."""
        workload = self.trainer.workload
        row = 4 * workload.dim

        def parts() -> Iterator[tuple[int, Buffer]]:
            for table, rows in read_rows(self.trainer.log, self.trainer.spans[0], workload):
                first = int(rows.ids[0] + workload.bases[table])
                yield first * row, memoryview(rows.weights)
                yield workload.rows * row + 4 * first, memoryview(rows.states[0])

        self._add_base(0, parts())
        _share(self.bases[0].path, self.folder.parent / "base-of-all")

    def _live_base(self, interval: int) -> None:
        """A new base from the live tables: nothing has to be read for it."""
        live = self.trainer.live
        weights = memoryview(live.weights.view(-1).numpy())
        self._add_base(interval, [(0, weights), (weights.nbytes, memoryview(live.sums.numpy()))])

    def _add_base(self, interval: int, parts: Iterable[tuple[int, Buffer]]) -> None:
        self.bases[interval] = Image(self.folder / f"base-{interval:04d}", parts)
        fsync_dir(self.folder)
        self.ledger.add(self.bases[interval].num_bytes)

    def _interval_parts(self, interval: int) -> tuple[Ids, list[Buffer]]:
        """(linear ids, sections of one piece) of an interval's rows, straight from the log's frames."""
        trainer = self.trainer
        found = list(read_rows(trainer.log, trainer.spans[interval], trainer.workload))
        ids = np.concatenate([linear_ids(table, rows, trainer.workload) for table, rows in found])
        weights = [memoryview(rows.weights) for _, rows in found]
        return ids, [memoryview(ids), *weights, *(memoryview(rows.states[0]) for _, rows in found)]

    def _write(self, name: str, rows: Sequence[int], pieces: Iterable[Sequence[Buffer]]) -> list[Piece]:
        path = self.folder / name
        places = write_file(path, pieces)
        return [Piece(path, *(place[0], count, *place[1:])) for count, place in zip(rows, places, strict=True)]


def _share(path: Path, same: Path) -> None:
    """Files of the same bytes take the room of one."""
    if same.exists():
        path.unlink()
        path.hardlink_to(same)
    else:
        same.hardlink_to(path)


class Naive(_Chain):
    """One file an interval; restored one behind the other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        _NAIVE[self.trainer] = self
        self._pieces: dict[int, Piece] = {}

    def build(self, interval: int) -> None:
        if not interval:
            return self._first_base()
        ids, parts = self._interval_parts(interval)
        (piece,) = self._write(f"delta-{interval:04d}", [len(ids)], [parts])
        publish(self.folder, [piece.path])
        self._pieces[interval] = piece
        return self.ledger.add(piece.num_bytes)

    def pieces(self, interval: int) -> list[Piece]:
        return [self._pieces[number] for number in range(1, interval + 1)]


_NAIVE: WeakKeyDictionary[Trainer, Naive] = WeakKeyDictionary()


class NaiveByIndexCopy:
    """The files of the naive scheme beside it, restored by torch's ``index_copy_``."""

    split = True

    def __init__(self, name: str, _folder: Path, trainer: Trainer, _keep: frozenset[int]) -> None:
        self.name = name
        self.ledger = Ledger()
        self._naive = _NAIVE[trainer]

    def build(self, interval: int) -> None:
        """It is there."""

    def restore(self, interval: int, tables: Tables) -> None:
        self._naive.bases[0].restore(tables)
        copy_pieces(self._naive.pieces(interval), tables)

    def restore_delta(self, interval: int, tables: Tables) -> float:
        begin = time.perf_counter()
        copy_pieces(self._naive.pieces(interval), tables)
        return time.perf_counter() - begin

    def land(self, tables: Tables) -> None:
        pass

    def files(self, interval: int) -> Iterator[Path | Part]:
        return self._naive.files(interval)

    def reads(self, interval: int) -> Reads:
        return self._naive.reads(interval)


class Differential(_Chain):
    """Check-N-Run: each marker is one file of all rows that changed since the base.

    It lives in the trainer, so its rows come from the live tables. With ``resets`` it takes a new base as the paper's
    intermittent policy does: once the sizes so far say that a new base and as many differentials behind it will take
    less space than as many more of the newest one's size.
    """

    resets = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._changed = np.zeros(self.trainer.workload.rows, np.bool_)
        self._gather = Gather()
        self._sizes: list[float] = []
        """Of the differentials since the base, in bases."""
        self._pieces: dict[int, Piece] = {}

    def build(self, interval: int) -> None:
        if not interval:
            return self._first_base()
        if self.resets and self._new_base_pays():
            return self._reset(interval)
        live, touched = self.trainer.live, self.trainer.workload.touched[interval]
        self._changed[touched] = True
        ids = np.flatnonzero(self._changed)
        parts = [memoryview(ids), *self._gather.sections(torch.from_numpy(ids), (live.weights, live.sums))]
        (piece,) = self._write(f"diff-{interval:04d}", [len(ids)], [parts])
        publish(self.folder, [piece.path])
        self.ledger.add(piece.num_bytes)
        self._sizes.append(piece.num_bytes / self.bases[self.base_of(interval)].num_bytes)
        self._pieces[interval] = piece
        if interval not in self.keep:
            piece.path.unlink()
        return None

    def _new_base_pays(self) -> bool:
        return bool(self._sizes) and 1 + sum(self._sizes) <= (len(self._sizes) + 1) * self._sizes[-1]

    def _reset(self, interval: int) -> None:
        old = self.base_of(interval)
        self._live_base(interval)
        self._changed[:] = False
        self._sizes.clear()
        if not any(old <= marker < interval for marker in self.keep):
            self.bases[old].path.unlink()

    def pieces(self, interval: int) -> list[Piece]:
        return [self._pieces[interval]] if interval in self._pieces else []


class DifferentialWithResets(Differential):
    resets = True
