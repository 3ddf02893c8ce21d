"""The states of the machine of `protocol.py`: what the log holds, where each trainer stands, and what control says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

NEW, CLAIMING, RUNS, SENT, COMMITTING, LOST, OVER = range(7)
"""Where a trainer stands."""
EXACT, NEWER, STRANGE = range(3)
"""Whose values an entry has: those of its cut, those of a later step, or a stranger's, who names this stream."""

Marker = tuple[int, int]
"""(generation, number)."""
NONE: Marker = (0, 0)


class Claim(NamedTuple):
    generation: int
    trainer: int
    """Its nonce."""
    parent: Marker
    swept: bool
    """It sends every table whole."""


class Commit(NamedTuple):
    generation: int
    number: int
    trainer: int
    """Its nonce."""


class Trim(NamedTuple):
    markers: tuple[Marker, ...]
    """The marker up to which, for each generation of which data may be gone."""
    stored: bool
    """A store holds all markers that were committed before; False in a mutation alone."""


class Entry(NamedTuple):
    """Rows and MARK of one rank and cut."""

    writer: int
    seq: int
    first: int
    last: int
    """Intervals whose rows are in it."""
    values: int


class Partition(NamedTuple):
    """Of one rank: on Kafka one for all generations, in a file log one for each."""

    gone: int = 0
    """Offset of the first entry that is there."""
    entries: tuple[Entry, ...] = ()

    @property
    def end(self) -> int:
        return self.gone + len(self.entries)

    def at(self, offset: int) -> Entry | None:
        """The entry at ``offset``; None if it is gone, or the partition ends before."""
        return self.entries[offset - self.gone] if self.gone <= offset < self.end else None

    def trim(self, upto: int) -> Partition:
        """Without what lies before ``upto``."""
        return Partition(upto, self.entries[upto - self.gone :]) if self.gone < upto <= self.end else self


class Writer(NamedTuple):
    """What one rank of a trainer knows of its stream."""

    seq: int = 0
    begin: int = 0
    end: int = 0
    """Offset up to which all was acknowledged."""
    interval: int = 0
    """The first one whose rows are not sent."""


class End(NamedTuple):
    """Where a stream stands at a marker: RankEnd."""

    begin: int = 0
    end: int = 0
    frames: int = 0


class Column(NamedTuple):
    """All that belongs to one rank. Ranks are alike: a state's columns are sorted."""

    partitions: tuple[Partition, ...]
    writers: tuple[Writer, ...]
    """By trainer."""
    ends: tuple[End, ...]
    """By trainer and marker, once its COMMIT is on its way."""


class Trainer(NamedTuple):
    phase: int = NEW
    generation: int = 0
    parent: Marker = NONE
    swept: bool = False
    marker: int = 0
    """The next one, or the one in the making."""
    flying: int = 0
    """A marker whose COMMIT is in flight, and for which the trainer does not wait any longer."""


class State(NamedTuple):
    control: tuple[Claim | Commit | Trim, ...]
    trainers: tuple[Trainer, ...]
    columns: tuple[Column, ...]
    cuts: int
    """How many are left."""
    faults: int
    """How many are left."""
    lost: bool = False
    """Whether one has taken away what was acknowledged."""


class Lineage(NamedTuple):
    """The control partition, folded."""

    owners: dict[int, Claim]
    commits: dict[Marker, Commit]
    reach: dict[int, Marker]
    stored: frozenset[Marker]

    @property
    def newest_generation(self) -> int:
        return max(self.owners, default=0)

    @property
    def newest(self) -> Marker:
        return next(reversed(self.commits), NONE)

    def path(self, marker: Marker) -> list[Commit]:
        """``Lineage.path``."""
        path: list[Commit] = []
        while marker != NONE:
            path.append(self.commits[marker])
            marker = self.owners[marker[0]].parent
        return path[::-1]


def wrong_in(entry: Entry, expected: int) -> str:
    """What a reader does wrong that applies an entry, and which promise that breaks."""
    if entry.values == STRANGE:
        return "P4 an entry of somebody else is applied"
    if entry.values == NEWER:
        return "P1 rows have values of another step"
    if entry.first != expected:
        return f"P3 rows are {'applied twice' if entry.first < expected else 'missing'}"
    return ""


def is_mark(entry: Entry | None, commit: Commit) -> bool:
    return entry is not None and (entry.writer, entry.last) == (commit.trainer, commit.number)


def holds_last(partition: Partition, which: int, writer: Writer) -> bool:
    """Whether the log still has the last frame that it acknowledged: else it takes no other one of this writer.

    A broker knows its producer's last frame (``kafka/producer.py``), a file its length (``FileWriter._check_length``).
    """
    if not writer.seq or writer.end <= partition.gone:
        return True
    entry = partition.at(writer.end - 1)
    return entry is not None and (entry.writer, entry.seq) == (which, writer.seq - 1)


def name_of(marker: Sequence[int]) -> str:
    return f"{marker[0]}:{marker[1]}" if tuple(marker) != NONE else "nothing"


def with_trainer(state: State, which: int, trainer: Trainer) -> State:
    return state._replace(trainers=(*state.trainers[:which], trainer, *state.trainers[which + 1 :]))


def writing(column: Column, which: int, writer: Writer) -> Column:
    return column._replace(writers=(*column.writers[:which], writer, *column.writers[which + 1 :]))


def holding(column: Column, place: int, partition: Partition) -> Column:
    return column._replace(partitions=(*column.partitions[:place], partition, *column.partitions[place + 1 :]))


def in_order(state: State, columns: list[Column]) -> State:
    return state._replace(columns=tuple(sorted(columns)))
