"""What changed between two markers, on whatever branches: their bytes side by side, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import files_at
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.interchange.rows import MarkerRows, TableReader
from torchrec_stream_ckpt.restore.plan import check_schema

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TableDiff:
    """One table under two markers."""

    table: str
    rows: int
    """Rows of the table."""
    changed: int
    """Rows of which any byte differs: weights, or a state that can be compared."""
    weights: int
    """Rows whose weights differ."""
    states: dict[str, int | None]
    """Rows that differ, by state; None where it holds one value a row under two column splits: that has no
    answer."""


@dataclass(frozen=True, slots=True)
class DenseDiff:
    """The dense state of two markers."""

    changed: tuple[str, ...]
    """Entries that differ."""
    only: tuple[str, ...]
    """Entries that one of them has."""
    same: int
    """Entries that do not differ; files, where all of them are the same."""


def diff_tables(
    first: MarkerRows, second: MarkerRows, tables: Sequence[int], progress: Callable[[int], None] = lambda _: None
) -> Iterator[TableDiff]:
    """Compare tables bit by bit. Holds a window of each marker.

    Raises:
        SchemaMismatchError: the markers have different tables.
        CorruptionError: one of them is damaged.
    """
    check_schema(first.schema, second.schema)
    for index in tables:
        yield _diff_table(TableReader(first, index), TableReader(second, index), progress)


def _diff_table(first: TableReader, second: TableReader, progress: Callable[[int], None]) -> TableDiff:
    spec = first.spec
    resplit = first.slices != second.slices
    comparable = [not (state.per_row and resplit) for state in spec.states]
    values = [0 if state.per_row else 1 for state in spec.states]
    """Which axis of a state's array goes through the values of one row."""
    changed = weights = 0
    states = [0] * len(spec.states)
    for row0, rows in first.windows():
        left, right = first.read(row0, rows), second.read(row0, rows)
        differ = _differ(left.weights, right.weights).any(1)
        weights += int(differ.sum())
        for position, (one, other) in enumerate(zip(left.states, right.states, strict=True)):
            if comparable[position]:
                flags = _differ(one, other).any(values[position])
                states[position] += int(flags.sum())
                differ |= flags
        changed += int(differ.sum())
        progress(2 * rows * first.row_bytes)
    by_name = {
        state.name: count if well else None for state, count, well in zip(spec.states, states, comparable, strict=True)
    }
    return TableDiff(spec.name, spec.rows, changed, weights, by_name)


def _differ(one: Array, other: Array) -> Flags:
    """Bit by bit: a NaN equals itself, and 0 is not -0."""
    bits = f"u{one.dtype.itemsize}"
    return np.asarray(one.view(bits) != other.view(bits))


def diff_dense(first: tuple[Commit, Path], second: tuple[Commit, Path]) -> DenseDiff | None:
    """Compare dense entries by their digests; None if files differ and there is no torch to say in what.

    Args:
        first: A marker, and its dense directory, digests compared.
        second: The same.
    """
    files = [{(file.name, file.sha256) for file in files_at(path, commit)} for commit, path in (first, second)]
    if files[0] == files[1]:
        return DenseDiff((), (), first[0].dense_count)
    try:
        from torchrec_stream_ckpt.interchange.dense_state import digest_entries
    except ModuleNotFoundError:
        return None
    one, other = digest_entries(first[1]), digest_entries(second[1])
    both = one.keys() & other.keys()
    changed = sorted(name for name in both if one[name] != other[name])
    return DenseDiff(tuple(changed), tuple(sorted(one.keys() ^ other.keys())), len(both) - len(changed))
