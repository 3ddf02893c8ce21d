"""What readers of the machine of `protocol.py` do: restore a marker on all ranks; ask whether all of it is there."""

from __future__ import annotations

from collections.abc import Sequence

from tests.model_check.explore import Broken
from tests.model_check.rules import ALL, Rules
from tests.model_check.states import (
    NONE,
    STRANGE,
    Claim,
    Column,
    Commit,
    End,
    Lineage,
    State,
    Trim,
    is_mark,
    name_of,
    wrong_in,
)

REFUSED = "refused"
Verdict = Broken | str | None
"""Of a read: wrong, refused by an error, or (None) exact."""


class Readers:
    """One machine, and how its log is read.

    Args:
        ranks: Of each trainer.
        generations: Trainers that may start.
        cuts: Of all of them together.
        faults: Of fate.
        trims: TRIMs that may be appended.
        kafka: A partition is shared by all generations.
        markers: Cuts of one trainer.
        rules: What holds.
    """

    def __init__(
        self,
        ranks: int,
        generations: int,
        cuts: int = 3,
        faults: int = 1,
        trims: int = 1,
        *,
        kafka: bool = False,
        markers: int = 2,
        rules: Rules = ALL,
    ) -> None:
        self.ranks, self.generations, self.cuts, self.markers = ranks, generations, cuts, markers
        self.faults, self.trims, self.kafka, self.rules = faults, trims, kafka, rules
        self._lineages: dict[tuple[Claim | Commit | Trim, ...], Lineage] = {}

    def lineage(self, state: State) -> Lineage:
        found = self._lineages.get(state.control)
        if found is None:
            found = self._lineages[state.control] = self._fold(state.control)
        return found

    def _fold(self, control: Sequence[Claim | Commit | Trim]) -> Lineage:
        """``Lineage.apply``, of records that count."""
        lineage = Lineage({}, {}, {}, frozenset())
        for record in control:
            if isinstance(record, Claim):
                lineage.owners[record.generation] = record
            elif isinstance(record, Commit):
                lineage.commits[record[:2]] = record
            else:
                if not self.rules.trims_add_up:
                    lineage.reach.clear()
                for marker in record.markers:
                    lineage.reach[marker[0]] = max(marker, lineage.reach.get(marker[0], NONE))
                if record.stored:
                    lineage = lineage._replace(stored=frozenset(lineage.commits))
        return lineage

    def read(self, state: State, lineage: Lineage, path: list[Commit]) -> Verdict:
        """Restore a marker on all ranks."""
        verdict: Verdict = None
        for column in state.columns:
            mine = self._read_rank(column, lineage, path)
            if isinstance(mine, Broken):
                return mine
            verdict = verdict or mine
        return verdict

    def _read_rank(self, column: Column, lineage: Lineage, path: list[Commit]) -> Verdict:
        """``read_stream`` along the path, from the newest sweep on (``Lineage.bases``)."""
        base = max(place for place, commit in enumerate(path) if lineage.owners[commit.generation].swept)
        for place, commit in enumerate(path[base:], base):
            verdict = self._read_stream(column, lineage, commit, whole=place == base, last=commit is path[-1])
            if verdict is not None:
                return verdict
        return None

    def _read_stream(self, column: Column, lineage: Lineage, commit: Commit, *, whole: bool, last: bool) -> Verdict:
        """What the store has of a generation (up to a marker of it), and the log after that."""
        partition, to = column.partitions[self.partition(commit.generation)], self.end(column, commit)
        mine = (each for each in lineage.stored if each[0] == commit.generation and each[1] <= commit.number)
        stored = max(mine, default=NONE)
        after = self.end(column, lineage.commits[stored]) if stored != NONE else End(end=to.begin)
        expected, seq, wrong, strange = stored[1] + 1 if stored != NONE else int(not whole), after.frames, "", False
        beyond = not self.rules.stop_at_parent and not last
        for offset, entry in enumerate(partition.entries, partition.gone):
            if entry.writer != commit.trainer or offset < after.end or (offset >= to.end and not beyond):
                continue
            if self.rules.seq_and_chain and entry.seq != seq:
                continue  # it came before, or is not ours
            seq, strange = seq + 1, strange or entry.values == STRANGE
            wrong = wrong or wrong_in(entry, expected)
            expected = entry.last + 1
        if self.rules.counted_frames and not beyond and (seq != to.frames or strange):
            return REFUSED
        if not wrong and expected != commit.number + 1:
            wrong = (
                "P3 rows are missing" if expected <= commit.number else "P4 rows of an abandoned timeline are applied"
            )
        return Broken(wrong[:2], f"marker {name_of(commit[:2])} restores, and{wrong[2:]}") if wrong else None

    def partition(self, generation: int) -> int:
        return 0 if self.kafka else generation - 1

    def end(self, column: Column, commit: Commit) -> End:
        return column.ends[commit.trainer * self.markers + commit.number - 1]

    def there(self, state: State, lineage: Lineage, path: list[Commit], own: Commit | None = None) -> bool:
        """``Log.check_there`` of ``Lineage.spans``: both ends of each stream, less what was trimmed on purpose."""
        return all(self._rank_there(column, lineage, path, own) for column in state.columns)

    def _rank_there(self, column: Column, lineage: Lineage, path: list[Commit], own: Commit | None) -> bool:
        older = 0
        for commit in [*path, own] if own else path:
            marker, end = lineage.reach.get(commit.generation, NONE), self.end(column, commit)
            if commit is own:
                writer = column.writers[own.trainer]
                end = End(writer.begin, writer.end)
            begin = end.begin
            if marker != NONE and self.rules.trimmed_not_asked_for:
                begin = max(begin, self.end(column, lineage.commits[marker]).end)
            if begin >= end.end:
                continue
            partition = column.partitions[self.partition(commit.generation)]
            if partition.gone > begin or end.end > partition.end:
                return False
            if self.kafka and self.rules.generations_in_order and begin < older:
                return False
            if self.rules.marks_read and not is_mark(partition.at(end.end - 1), commit):
                return False
            older = end.end if self.kafka else 0
        return True
