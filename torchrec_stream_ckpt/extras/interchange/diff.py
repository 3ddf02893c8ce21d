"""Compare two markers, on the same or different branches, byte by byte and window by window."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchrec_stream_ckpt.extras.interchange.export import chosen_tables
from torchrec_stream_ckpt.format.claim_changes import TableChange, changes_of, differences
from torchrec_stream_ckpt.format.control import Commit
from torchrec_stream_ckpt.format.dense_files import LIST_NAME, DenseFile, parse_list
from torchrec_stream_ckpt.format.lineage import Lineage
from torchrec_stream_ckpt.format.rows import Array
from torchrec_stream_ckpt.format.schema import Schema
from torchrec_stream_ckpt.inner import MarkerRows, TableReader
from torchrec_stream_ckpt.util.types import TOMBSTONE, MarkerId, TableSpec

Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class TableDiff:
    """One table under two markers."""

    table: str
    rows: int
    """Rows of the table."""
    changed: int | None
    """Rows of which any byte differs: weights, or a state that can be compared, row by row of one number. None if the
    markers do not both have a table of this shape."""
    weights: int | None
    """Rows whose weights differ."""
    states: dict[str, int | None]
    """Rows that differ, by state. None if a state holds one value a row under two different column splits, so that no
    comparison is possible."""
    note: str = ""
    """Changes of the model between the markers that concern this table; empty if the model did not change for it."""


@dataclass(frozen=True, slots=True)
class DenseDiff:
    """The dense state of two markers."""

    changed: tuple[str, ...]
    """Entries that differ."""
    only: tuple[str, ...]
    """Entries that only one of them has."""
    same: int
    """Number of equal entries; number of files if all of them are equal."""


def pairs(first: Schema, second: Schema, patterns: Sequence[str]) -> list[tuple[int | None, int | None]]:
    """Return (index under the first marker, index under the second) of the tables that match a pattern under either.

    Tables are matched by id, and then by name. An index is None if that marker does not have the table.

    Raises:
        ConfigError: a pattern matches no table.
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
        tables: The tables, as :func:`pairs` returns them.
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
            yield TableDiff(now.name, now.rows, None, None, {}, f"not compared: {differing}")
        else:
            found = _diff_table(TableReader(first, one), TableReader(second, other), progress)
            yield replace(found, note=_note(first, second, before, now))


def _note(first: MarkerRows, second: MarkerRows, before: TableSpec, now: TableSpec) -> str:
    """Return the note on two tables of one shape."""
    said = [f"{before.name} was renamed"] if before.name != now.name else []
    if before.id is not None and now.id is not None and before.id != now.id:
        sides = ((first.marker, before.id), (second.marker, now.id))
        said.append(max(sent_whole(second.lineage, marker, id_) for marker, id_ in sides)[1])
    return ", ".join(said)


def sent_whole(lineage: Lineage, marker: MarkerId, id_: int) -> tuple[int, str]:
    """Return the generation in which a table got its id, and the reason in words.

    Args:
        lineage: The job's lineage.
        marker: A marker that has the table.
        id_: Its id there.
    """
    for each in lineage.way(marker):
        claim = lineage.claims[each.generation]
        if any(table.id == id_ for _, table in claim.schema.live):
            break
    generation = claim.generation
    if claim.parent is None:
        return generation, f"generation {generation} is based on no marker and initialized it again"
    for what, was, now in changes_of(lineage.claims[claim.parent.generation].schema, claim.schema):
        if now.id == id_ and what is TableChange.CHANGED:
            differing = differences(was, now)
            return generation, f"generation {generation} " + (
                f"changed it ({differing})" if differing else "mapped its rows to other ids"
            )
    return generation, f"generation {generation} dropped the earlier table and initialized it again"


def _diff_table(first: TableReader, second: TableReader, progress: Callable[[int], None]) -> TableDiff:
    spec = second.spec
    resplit = first.slices != second.slices
    comparable = [not (state.per_row and resplit) for state in spec.states]
    values = [0 if state.per_row else 1 for state in spec.states]
    """Axis of a state's array along which the values of one row lie."""
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
    """Compare bit by bit: a NaN equals itself, and 0 is not -0."""
    bits = f"u{one.dtype.itemsize}"
    return np.asarray(one.view(bits) != other.view(bits))


def diff_dense(first: tuple[Commit, Path], second: tuple[Commit, Path]) -> DenseDiff | None:
    """Compare dense entries by their digests.

    Returns None if files differ and torch is not installed to compare their entries.

    Args:
        first: A marker, and its dense directory, digests compared.
        second: The same.
    """
    files = [{(file.name, file.sha256) for file in _files(*each)} for each in (first, second)]
    if files[0] == files[1]:
        return DenseDiff((), (), first[0].dense_count)
    try:
        from torchrec_stream_ckpt.extras.interchange.dense_state import digest_entries
    except ModuleNotFoundError:
        return None
    one, other = digest_entries(first[1]), digest_entries(second[1])
    both = one.keys() & other.keys()
    changed = sorted(name for name in both if one[name] != other[name])
    return DenseDiff(tuple(changed), tuple(sorted(one.keys() ^ other.keys())), len(both) - len(changed))


def _files(commit: Commit, path: Path) -> tuple[DenseFile, ...]:
    """Return the dense files of a marker, from its COMMIT or from the list in its directory."""
    said = commit.dense_list
    return commit.dense_files if said is None else parse_list((path / LIST_NAME).read_bytes(), said, str(path))
