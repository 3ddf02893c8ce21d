"""The control partition under snapshots, as a machine: whoever reads what is left sees what all records say.

`protocol.py` takes the control partition for one list that loses nothing and that everybody reads from its beginning.
Here records are only numbers, and the machine shows that this stays so while the front of the list is deleted. The
rule: a snapshot is a pure function of the records up to an offset that it names, it counts once it is read back whole,
later records are always read, and the front goes, under the append lock, up to the second-newest snapshot.

Who acts, each at any time and as slowly as it likes:

- *appenders*, of which any may be a zombie: each appends a record;
- *snapshotters* (``shorten_control``), several at once: each folds what is there, appends a snapshot in two parts, and
  deletes what the second-newest whole one covers. One that is killed is one that takes no further step;
- a *reader* that lives long (``Control.refresh``): it goes on where it stood. One that begins anew is tried in every
  state;
- *fate* damages a part of a snapshot.

Readers of a file hold it open, so what one call reads is one state of it; on Kafka a read that a deletion overtakes
must be begun anew. So a read is one step here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model_check.explore import Broken

Fold = tuple[int, ...]
"""What a reader has folded: the numbers of the records."""


@dataclass(frozen=True)
class SnapshotRules:
    """All on: the snapshot rule. One off: a mutation."""

    upto_is_folded: bool = True
    """A snapshot names the offset up to which it says all (``Folded.upto``)."""
    whole: bool = True
    """A reader takes a snapshot only if all its parts are there."""
    read_after_upto: bool = True
    """A reader folds every record after ``upto``, also those before the snapshot itself (``_Ahead``)."""
    second_newest: bool = True
    """Records go only up to the second-newest whole snapshot (``shorten_control``)."""
    read_back: bool = True
    """Nothing goes before the snapshot is read back whole (``_read_back``)."""
    prune_locked: bool = True
    """The front is deleted under the append lock (``prune_control``)."""
    opened_locked: bool = True
    """An appender opens the file by its name with the lock in hand (``append_control``)."""
    base_needs_snapshot: bool = True
    """Where the front is deleted, a reader begins with a snapshot, or refuses (``fold``)."""
    begins_anew: bool = True
    """A reader that stood before the new beginning begins anew (``PrunedError``)."""


ALL_SNAPSHOT_RULES = SnapshotRules()


class Part(NamedTuple):
    """A record of the control partition that carries half of a snapshot."""

    upto: int
    """Offset of the last record that it covers."""
    said: Fold
    number: int
    """0 or 1; 2: damaged."""


class Appender(NamedTuple):
    """Who appends one record."""

    file: int = -1
    """(mutation) The version of the file that it has opened; -1: none."""
    done: bool = False


class Snapshotter(NamedTuple):
    phase: int = 0
    """0: has done nothing, 1: has folded, 2 and 3: has appended so many parts, 4: has looked, 5: has copied."""
    upto: int = 0
    said: Fold = ()
    base: int = 0
    """What it is going to delete up to."""
    copied: int = 0
    """(mutation) Where the file ended when it was copied."""


class Control(NamedTuple):
    base: int
    records: tuple[int | Part, ...]
    truth: Fold
    """All records that were acknowledged, in order: no part of the program knows it."""
    version: int
    """How often the file was replaced."""
    appenders: tuple[Appender, ...]
    snapshotters: tuple[Snapshotter, ...]
    next: int
    """Where the reader goes on."""
    folded: Fold
    """What it has read."""
    faults: int


class Snapshots:
    """The machine.

    Args:
        appends: Records, after a first one that is there.
        snapshots: Snapshotters; each makes one.
        faults: Parts that fate may damage.
        rules: What holds.
    """

    def __init__(
        self, appends: int, snapshots: int, faults: int = 1, rules: SnapshotRules = ALL_SNAPSHOT_RULES
    ) -> None:
        self.appends, self.snapshots, self.faults, self.rules = appends, snapshots, faults, rules

    def start(self) -> Control:
        return Control(
            0, (1,), (1,), 0, (Appender(),) * self.appends, (Snapshotter(),) * self.snapshots, 0, (), self.faults
        )

    def steps(self, state: Control) -> Iterator[tuple[str, Control | Broken]]:
        for which, appender in enumerate(state.appenders):
            if not appender.done and (appender.file >= 0 or which == 0 or state.appenders[which - 1] != Appender()):
                yield from self._append(state, which, appender)
        for which, snapshotter in enumerate(state.snapshotters):
            yield from self._shorten(state, which, snapshotter)
        yield self._read_on(state)
        if state.faults:
            yield from self._damage(state)

    def check(self, state: Control) -> Broken | None:
        """A reader that begins anew folds all that was acknowledged."""
        folded = self._fold(state)
        if folded is None:
            whole = state.faults == self.faults
            return Broken("P10", "all snapshots are whole, and a reader is refused") if whole else self._cost(state)
        if folded == state.truth:
            return None
        return Broken("P10", f"{list(folded)} is read, {list(state.truth)} was written")

    def _cost(self, state: Control) -> Broken | None:
        """One damaged snapshot costs nothing."""
        return Broken("P10", "one damaged snapshot hides the log") if self.faults - state.faults == 1 else None

    # Readers.

    def _fold(self, state: Control) -> Fold | None:
        """``fold``: the newest whole snapshot, and every record after its ``upto``; None: refused."""
        begin = max(self._whole(state), key=lambda part: part[0], default=None)
        plain = [(offset, each) for offset, each in self._from(state, state.base) if isinstance(each, int)]
        if begin is None or begin[0] < state.base:
            if state.base and self.rules.base_needs_snapshot:
                return None
            return tuple(each for _, each in plain)
        upto, said, place = begin
        after = upto if self.rules.read_after_upto else place
        return (*said, *(each for offset, each in plain if offset > after))

    def _whole(self, state: Control) -> list[tuple[int, Fold, int]]:
        """(upto, what it says, its own offset) of each snapshot that a reader takes."""
        parts = [(offset, each) for offset, each in self._from(state, state.base) if isinstance(each, Part)]
        found = []
        for offset, part in parts:
            if part.number == 0 and not self.rules.whole:
                found.append((part.upto, part.said[:1], offset))
            if part.number == 1 and any(other == part._replace(number=0) for _, other in parts):
                found.append((part.upto, part.said, offset))
        return found

    @staticmethod
    def _from(state: Control, begin: int) -> list[tuple[int, int | Part]]:
        return [(offset, each) for offset, each in enumerate(state.records, state.base) if offset >= begin]

    def _read_on(self, state: Control) -> tuple[str, Control | Broken]:
        """``Control.refresh`` of a process that has read before."""
        end = state.base + len(state.records)
        if state.next < state.base and self.rules.begins_anew:
            folded = self._fold(state)
        else:
            more = self._from(state, state.next)
            folded = (*state.folded, *(each for _, each in more if isinstance(each, int)))
        what = "the reader reads on"
        if folded is None:
            return what, state  # it is told so, and tries again
        if folded != state.truth:
            return what, Broken("P10", f"it knows {list(folded)}, {list(state.truth)} was written")
        return what, state._replace(next=end, folded=folded)

    # Writers.

    def _append(self, state: Control, which: int, appender: Appender) -> Iterator[tuple[str, Control | Broken]]:
        """``FileLog.append_control``."""
        if not self.rules.opened_locked and appender.file < 0:
            opened = appender._replace(file=state.version)
            yield f"appender {which + 1} opens the file", _appending(state, which, opened)
            return
        record = len(state.truth) + 1
        there = appender.file in (-1, state.version)
        records = (*state.records, record) if there else state.records
        after = state._replace(records=records, truth=(*state.truth, record))
        yield f"appender {which + 1} appends record {record}", _appending(after, which, Appender(done=True))

    def _shorten(self, state: Control, which: int, mine: Snapshotter) -> Iterator[tuple[str, Control | Broken]]:
        """``shorten_control``, step by step."""
        name = f"snapshotter {which + 1}"
        end = state.base + len(state.records)
        if mine.phase == 0:
            yield from self._begin(state, which)
        elif mine.phase in (1, 2):
            upto = mine.upto if self.rules.upto_is_folded or mine.phase == 2 else end - 1
            part = Part(upto, mine.said, mine.phase - 1)
            after = state._replace(records=(*state.records, part))
            appended = mine._replace(phase=mine.phase + 1, upto=upto)
            yield f"{name} appends part {mine.phase} of its snapshot", _shortening(after, which, appended)
            if mine.phase == 2 and not self.rules.read_back:
                yield f"{name} does not notice that part 2 is lost", _shortening(state, which, mine._replace(phase=3))
        elif mine.phase == 3:
            yield from self._look(state, which, mine)
        elif mine.phase == 4 and not self.rules.prune_locked:
            yield f"{name} copies the file", _shortening(state, which, mine._replace(phase=5, copied=end))
        elif mine.phase in (4, 5):
            over = Snapshotter(6)
            if mine.base <= state.base:
                yield f"{name} has nothing to delete", _shortening(state, which, over)
                return
            kept = state.records[mine.base - state.base : (mine.copied or end) - state.base]
            pruned = state._replace(base=mine.base, records=kept, version=state.version + 1)
            yield f"{name} deletes all before offset {mine.base}", _shortening(pruned, which, over)

    def _begin(self, state: Control, which: int) -> Iterator[tuple[str, Control | Broken]]:
        """``_look``, which snapshots stand whole, and ``fold_again``. One that comes between the two lets less go."""
        standing, said = sorted({upto for upto, _, _ in self._whole(state)}), self._fold(state)
        plain = [offset for offset, each in self._from(state, state.base) if isinstance(each, int)]
        if not said or not plain:
            return
        if not standing or plain[-1] > standing[-1]:
            folded = Snapshotter(1, plain[-1], said, standing[-1] if standing else 0)
            yield f"snapshotter {which + 1} folds {len(said)} records", _shortening(state, which, folded)
        elif len(standing) > 1:
            looked = Snapshotter(4, base=standing[-2])
            yield f"snapshotter {which + 1} finds no new record", _shortening(state, which, looked)

    def _look(self, state: Control, which: int, mine: Snapshotter) -> Iterator[tuple[str, Control | Broken]]:
        """``_read_back``: only then may go what the snapshot before it covers."""
        there = not self.rules.read_back or any(upto == mine.upto for upto, _, _ in self._whole(state))
        base = mine.base if self.rules.second_newest else mine.upto
        after = Snapshotter(4, base=base) if there and base > state.base else Snapshotter(6)
        what = "reads back" if there and base > state.base else "reads back, and nothing may go"
        yield f"snapshotter {which + 1} {what}", _shortening(state, which, after)

    def _damage(self, state: Control) -> Iterator[tuple[str, Control | Broken]]:
        for at, part in enumerate(state.records):
            if isinstance(part, Part) and part.number < 2:
                records = (*state.records[:at], part._replace(number=2), *state.records[at + 1 :])
                after = state._replace(records=records, faults=state.faults - 1)
                yield f"part {part.number + 1} of the snapshot up to {part.upto} is damaged", after


def _appending(state: Control, which: int, appender: Appender) -> Control:
    return state._replace(appenders=(*state.appenders[:which], appender, *state.appenders[which + 1 :]))


def _shortening(state: Control, which: int, mine: Snapshotter) -> Control:
    """Snapshotters are alike: sorted."""
    others = (*state.snapshotters[:which], mine, *state.snapshotters[which + 1 :])
    return state._replace(snapshotters=tuple(sorted(others)))
