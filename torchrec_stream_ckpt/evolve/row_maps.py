"""Map rows of a marker to rows of this model: declared by a user (``IdMap``), and resolved (``RowMap``)."""

from __future__ import annotations

import hashlib
import itertools
import re
import warnings
import zlib
from codecs import BOM_UTF8
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.errors import ChangesError

Ids = npt.NDArray[np.int64]
FORMS = (".csv", ".npy", ".npz")
_NAME = re.compile("[A-Za-z_][A-Za-z0-9_ ]*")
_NO_NUMBERS = {"nan", "inf", "infinity", "na", "none", "null"}
"""Texts that programs write for a missing number."""
_PAIR = re.compile(r"([+-]?0*[0-9]{1,19})\s*,\s*([+-]?0*[0-9]{1,19})")


@dataclass(frozen=True, eq=False)
class IdMap:
    """Pairs of a table's ids: row ``old_ids[i]`` of the marker becomes row ``new_ids[i]`` of this model.

    A row of the marker that is in no pair is dropped. A row of this model that is in no pair starts fresh.

    Raises:
        ChangesError: an id is negative, a duplicate or not an integer; the sides have different lengths; or there is
            no pair.
    """

    old_ids: Ids
    """Ids in the marker, each once, in any order."""
    new_ids: Ids
    """Ids in this model, each once; as many as ``old_ids``."""
    path: str | None = None
    """File that the ids were read from, as the user named it."""

    def __post_init__(self) -> None:
        old, new = (_ids(each, side, self.path) for each, side in ((self.old_ids, "old"), (self.new_ids, "new")))
        if len(old) != len(new):
            raise ChangesError(f"an id map has {len(old)} old ids and {len(new)} new ones", path=self.path)
        if not len(old):
            raise ChangesError(
                "the id map has no pairs, so all rows would be dropped",
                hint="name the rows to keep; to drop all rows, declare the table both dropped and added",
                path=self.path,
            )
        for ids, side in ((old, "old"), (new, "new")):
            _check_ids(ids, side, self.path)
        order = np.argsort(old, kind="stable")
        for name, ids in (("old_ids", old[order]), ("new_ids", new[order])):
            ids.setflags(write=False)
            object.__setattr__(self, name, ids)

    @staticmethod
    def load(path: str | Path) -> IdMap:
        """Read a file of pairs.

        Formats are ``.csv`` (old,new in each line, after an optional header of two names), ``.npy`` (shape (pairs, 2)),
        and ``.npz`` (``old_ids`` and ``new_ids``).

        Raises:
            ChangesError: the file cannot be read, or is not an id map.
        """
        return IdMap(*_read(Path(path)), path=str(path))

    def save(self, path: str | Path) -> None:
        """Write the pairs as ``.npz``, which :meth:`load` reads.

        Raises:
            ChangesError: the path has another suffix, or cannot be written.
        """
        if Path(path).suffix != ".npz":
            raise ChangesError("an id map can only be saved as .npz", hint="name a file that ends in .npz", path=path)
        try:
            np.savez(path, old_ids=self.old_ids, new_ids=self.new_ids)
        except OSError as error:
            raise ChangesError(
                f"the id map cannot be written: {error.strerror}", hint="name an existing folder", path=path
            ) from None

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the pairs, sorted by old id; independent of the file."""
        pairs = np.stack([self.old_ids, self.new_ids], axis=1).astype("<i8")
        return hashlib.sha256(pairs.tobytes()).hexdigest()

    def __len__(self) -> int:
        return len(self.old_ids)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, IdMap) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)


def _ids(given: Any, side: str, path: str | None) -> Ids:
    array = np.asarray(given)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu" or (array.dtype.kind == "u" and array.max() >= 2**63):
        raise ChangesError(
            f"the {side} ids of an id map must be a list of whole numbers, got {array.dtype} of shape {array.shape}",
            hint="pass one list of whole numbers",
            path=path,
        )
    return array.astype(np.int64)


def _check_ids(ids: Ids, side: str, path: str | None) -> None:
    if len(ids) and ids.min() < 0:
        raise ChangesError(f"an id map has the negative {side} id {ids.min()}", hint="count rows from 0", path=path)
    found, counts = np.unique(ids, return_counts=True)
    twice = found[counts > 1]
    if len(twice):
        raise ChangesError(
            f"an id map repeats {len(twice)} {side} ids; the first is {twice[0]}",
            hint="name each id once on each side",
            path=path,
        )


def _read(path: Path) -> tuple[Any, Any]:
    if path.suffix not in FORMS:
        raise ChangesError(f"an id map must be a file of {', '.join(FORMS)}", hint="convert the file", path=path)
    try:
        if path.suffix == ".csv":
            return _read_csv(path)
        with path.open("rb") as file:  # numpy does not close a file that is not an archive
            loaded = np.load(file, allow_pickle=False)
            if isinstance(loaded, np.ndarray) != (path.suffix == ".npy"):
                raise ValueError(f"it is not a {path.suffix} file")
            if path.suffix == ".npz":
                return loaded["old_ids"], loaded["new_ids"]
    except (OSError, ValueError, KeyError, EOFError, OverflowError, BadZipFile, zlib.error) as error:
        hint = "write old,new in each line" if path.suffix == ".csv" else "write it with IdMap.save() or numpy"
        raise ChangesError(f"the id map cannot be read: {error}", hint=hint, path=path) from None
    if loaded.ndim != 2 or loaded.shape[1] != 2:
        raise ChangesError(
            f"the id map must have shape (pairs, 2), got {loaded.shape}", hint="write one pair per row", path=path
        )
    return loaded[:, 0], loaded[:, 1]


def _read_csv(path: Path) -> tuple[Any, Any]:
    with path.open("rb") as file:
        encoding = "utf-8-sig" if file.read(3) == BOM_UTF8 else "ascii"
    with path.open(encoding=encoding) as lines:
        skip = 1 if _is_header(lines.readline()) else 0
        lines.seek(0)
        if not any(line.strip() for line in itertools.islice(lines, skip, None)):
            return [], []
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy reads 1.5 as 1 with a warning
        try:
            pairs = np.loadtxt(path, np.int64, comments=None, delimiter=",", skiprows=skip, ndmin=2, encoding=encoding)
        except (ValueError, Warning) as error:
            raise ValueError(_wrong_line(path, encoding, skip) or str(error)) from None
    if pairs.shape[1] != 2:
        raise ValueError(_wrong_line(path, encoding, skip))
    return pairs[:, 0], pairs[:, 1]


def _is_header(line: str) -> bool:
    """Return whether a line names two columns. A malformed pair, such as ``x1,2`` or ``nan,2``, is not a header."""
    names = [each.strip() for each in line.split(",")]
    return len(names) == 2 and all(_NAME.fullmatch(each) and each.lower() not in _NO_NUMBERS for each in names)


def _wrong_line(path: Path, encoding: str, skip: int) -> str:
    """Describe the first line that is not a pair of ids; empty if all are."""
    with path.open(encoding=encoding) as lines:
        for number, line in enumerate(lines, 1):
            pair = _PAIR.fullmatch(line.strip())
            if (
                number > skip
                and line.strip()
                and (pair is None or max(abs(int(each)) for each in pair.groups()) >= 2**63)
            ):
                return f"line {number} is {line.strip()!r:.80}, not two ids"
    return ""


@dataclass(frozen=True, eq=False)
class RowMap:
    """Kept rows of the marker, and their ids in this model."""

    count: int = 0
    """Number of kept rows."""
    old_ids: Ids | None = None
    """Ids in the marker, sorted. None if rows [0, ``count``) keep their ids. One may have several new ids
    (:class:`NewRows`)."""
    new_ids: Ids | None = None
    """For each of ``old_ids``, the id in this model."""

    @staticmethod
    def of(ids: IdMap) -> RowMap:
        """Make the row map of an id map. Pairs of equal ids, from 0 on without a gap, become the identity."""
        count = len(ids)
        plain = np.array_equal(ids.old_ids, ids.new_ids) and np.array_equal(ids.old_ids, np.arange(count))
        return RowMap(count) if plain else RowMap(count, ids.old_ids, ids.new_ids)

    @property
    def is_identity(self) -> bool:
        """True if each kept row has its old id."""
        return self.old_ids is None

    @property
    def sources(self) -> int:
        """Number of rows of the marker that are kept."""
        return self.count if self.old_ids is None else int(np.count_nonzero(np.diff(self.old_ids, prepend=-1)))

    @property
    def pairs(self) -> tuple[Ids, Ids]:
        """Old ids in ascending order, and the new id of each."""
        if self.old_ids is None or self.new_ids is None:
            same = np.arange(self.count)
            return same, same
        return self.old_ids, self.new_ids

    def new_of(self, old_ids: npt.ArrayLike) -> Ids:
        """Return the new id of each of ``old_ids``; -1 for a row that is not kept."""
        return _look_up(*self.pairs, np.asarray(old_ids, np.int64)) if not self.is_identity else self._same(old_ids)

    def within(self, begin: int, end: int) -> tuple[Ids, Ids]:
        """Return those :attr:`pairs` whose new ids are in [begin, end)."""
        if self.is_identity:
            same = np.arange(min(begin, self.count), min(end, self.count))
            return same, same
        old, new = self.pairs
        here = (new >= begin) & (new < end)
        return old[here], new[here]

    def _same(self, ids: npt.ArrayLike) -> Ids:
        known = np.asarray(ids, np.int64)
        return np.where((known >= 0) & (known < self.count), known, -1)


def _look_up(keys: Ids, values: Ids, wanted: Ids) -> Ids:
    if not len(keys):
        return np.full(wanted.shape, -1, np.int64)
    places = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[places] == wanted, values[places], -1)


@dataclass(frozen=True, eq=False)
class NewRows:
    """Rows that the raw ids of a table get in this job (``Changes.reassigned``)."""

    rows: RowMap
    """Rows of the marker with a raw id, and for each shard of this job, the row that its unknown raw ids begin with."""
    kept: int
    """Number of raw ids that have a row."""
    dropped: int
    """Number of raw ids that do not fit."""
