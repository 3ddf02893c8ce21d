"""What changed between two markers, on whatever branches: their bytes side by side, window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.format.changed import differences
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense import files_at
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.interchange.export import chosen_tables
from torchrec_stream_ckpt.interchange.rows import MarkerRows, TableReader
from torchrec_stream_ckpt.types import TOMBSTONE, TableSpec

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TableDiff:
    """One table under two markers."""

    table: str
    rows: int
    """Rows of the table."""
    changed: int | None
    """Rows of which any byte differs: weights, or a state that can be compared. None: it is another table."""
    weights: int | None
    """Rows whose weights differ."""
    states: dict[str, int | None]
    """Rows that differ, by state; None where it holds one value a row under two column splits: that has no
    answer."""
    note: str = ""
    """How the model has changed between the markers, as far as this table is concerned."""


@dataclass(frozen=True, slots=True)
class DenseDiff:
    """The dense state of two markers."""

    changed: tuple[str, ...]
    """Entries that differ."""
    only: tuple[str, ...]
    """Entries that one of them has."""
    same: int
    """Entries that do not differ; files, where all of them are the same."""


def pairs(first: Schema, second: Schema, patterns: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """(index under the first marker, index under the second) of tables that one of the patterns fits under either.

    Tables are told by id, and then by name; None: that marker does not have it.

    Raises:
        ConfigError: a pattern fits none.
    """
    ids, names = {table.id: index for index, table in first.live if table.id is not None}, first.index()
    found: list[tuple[int | None, int | None]] = []
    for index, table in second.live:
        found.append((ids.pop(table.id), index) if table.id in ids else (None, index))
    left = set(names.values()) - {one for one, _ in found}
    for place, (one, other) in enumerate(found):
        named = names.get(second.tables[other].name) if other is not None else None
        if one is None and named in left:
            found[place] = named, other
            left.remove(named)
    found += [(index, None) for index in sorted(left)]
    fitting = Schema(tuple({table.name: table for _, table in (*first.live, *second.live)}.values()))
    wanted = {fitting.tables[index].name for index in chosen_tables(fitting, patterns)}
    return [
        (one, other)
        for one, other in found
        if (one is not None and first.tables[one].name in wanted)
        or (other is not None and second.tables[other].name in wanted)
    ]


def diff_tables(
    first: MarkerRows,
    second: MarkerRows,
    tables: Sequence[tuple[int | None, int | None]],
    progress: Callable[[int], None] = lambda _: None,
) -> Iterator[TableDiff]:
    """Compare tables bit by bit. Holds a window of each marker.

    Args:
        first, second: The rows of the markers.
        tables: Which, as :func:`pairs` gives them.
        progress: Called with the bytes that were read.

    Raises:
        CorruptionError: one of the markers is damaged.
    """
    for one, other in tables:
        before = first.schema.tables[one] if one is not None else TOMBSTONE
        now = second.schema.tables[other] if other is not None else TOMBSTONE
        if one is None or other is None:
            table, which = (now, "second") if one is None else (before, "first")
            yield TableDiff(table.name, table.rows, None, None, {}, f"only the {which} marker has it")
        elif differing := differences(before, now):
            yield TableDiff(now.name, now.rows, None, None, {}, f"another table: {differing}")
        else:
            found = _diff_table(TableReader(first, one), TableReader(second, other), progress)
            yield replace(found, note=_note(before, now))


def _note(before: TableSpec, now: TableSpec) -> str:
    """Of two tables of one shape."""
    anew = [] if before.id is None or now.id is None or before.id == now.id else ["its rows were begun anew"]
    return ", ".join([f"{before.name} was renamed"] * (before.name != now.name) + anew)


def _diff_table(first: TableReader, second: TableReader, progress: Callable[[int], None]) -> TableDiff:
    spec = second.spec
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
