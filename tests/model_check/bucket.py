"""The control partition in a bucket, as a machine: objects that are created once, and names that are free again.

`protocol.py` takes the control partition for one list that loses nothing. In a bucket nobody holds a lock on it: a
record is an object whose name is its number, and names of deleted records are free again. The machine shows that all
processes read one list all the same. Read it together with ``log/bucket/control_objects.py`` and docs/format.md. A
record is only a number here; whether a CLAIM or a COMMIT, what is true of its place is true of it: it stays where it
won.

Who acts, each at any time and as slowly as it likes:

- *appenders* (trainers and operators) look where the records end, put the next one, look for the base, and pack a full
  block. The answer to a put may be lost, before or after the put arrives, and so may the answer to the look that
  follows. A put whose answer was lost may arrive at any later time. An appender that has looked once is also a reader
  that lives long (``Control.refresh``): it goes on where it stood;
- a *pruner* writes a base and deletes the records before it, one at a time, and may die in between;
- a *reader* starts over, request by request, with listings that may not show a record yet;
- *fate* damages a pack, or loses one record before the end.

What a process knows is the first so many records of the true list, because a search ends where one knows anything else.
So a process is where it stands. The true list grows when a put lands at its end. A put that lands before the base is
below zero in ``names``: it does not count.

Some steps are one here and many in the program: the requests of an appender that goes on where it stood. It asks for
its own number, the one before and the one after at the same time, and for the base last. If a prune runs in the middle
of these, it may find nothing new although there is; it does when it looks next.

Not modelled: snapshots (`snapshots.py`; what lies before the base is known from one), checksums, two records lost
in a row, and two cases that no rule guards. A record that is lost after an appender that stands at its number has
looked, and before that appender puts, is written over: the second copy knows better (`records.py`). A process
that stands among deleted records, next to a put of another one that died before it deleted it, learns of them only when
the next prune has deleted it. The listing of bases does not lag (docs/store.md: "a listing shows what was put").
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tests.model_check.explore import Broken

NEW, READY, SILENT, TAKEN, PUT, HOLE, OVER = range(7)
"""Where an appender stands."""
IDLE, READS, ENDS = range(3)
"""Where the reader stands."""
DAMAGED = (0,)
"""A pack."""
KEPT = 1000
"""(mutation) Added to a put before the base that its appender knows of, and leaves there."""


@dataclass(frozen=True)
class BucketRules:
    """All on: how control records are kept in a bucket. One off: a mutation."""

    created_once: bool = True
    """A put takes a name only if it is free (``Objects.create``)."""
    seen_before_next: bool = True
    """A number is tried only if the record before it was seen (``append``)."""
    base_after_put: bool = True
    """A put counts only if the base is not beyond it afterwards (``_is_deleted``)."""
    hole_left: bool = True
    """A put before the base is deleted again (``_leave_hole``)."""
    silence_is_unknown: bool = True
    """A put, or the look for the base that follows, without an answer has not failed (``_unknown``)."""
    noted_once_counted: bool = True
    """A process knows a record of its own only once it counts (``_note``)."""
    base_after_read: bool = True
    """Records that were read by name count only if the base is not beyond them afterwards (``_check_not_deleted``)."""
    names_tried: bool = True
    """Where a listing ends, the next name is tried (``_newer``)."""
    rest_asked: bool = True
    """A process that finds nothing new asks for the record before its place (``_has_previous``, ``_check_begin``)."""
    next_asked: bool = True
    """A process that finds no record at a number asks for the one after it (``_newer``)."""
    gap_looked_for: bool = True
    """A reader that starts over looks whether any listing shows a later record (``_check_gap``)."""
    gap_read_again: bool = True
    """A record is reported as lost only if it is asked for again (``_check_gap``, ``_newer``)."""
    pack_whole: bool = True
    """A pack that is not exactly its records is passed over (``_unpacked``)."""
    packed_once_known: bool = True
    """A pack is made of records that its writer has read or put, and not of names (``_pack``)."""
    base_first: bool = True
    """The base is written before the first record is deleted (``prune``)."""
    oldest_first: bool = True
    """Records are deleted in order (``prune``)."""


ALL_BUCKET_RULES = BucketRules()


class Appender(NamedTuple):
    phase: int = NEW
    end: int = 0
    """The number that it tries next, after all records that it knows."""
    record: int = 0
    """The record that it appends."""
    since: int = 0
    """The first number that it has read by itself. A snapshot has said what was before."""
    blind: bool = False
    """True if a record was lost since it looked last."""
    to_pack: int = -1
    """First number of the block that it has filled."""


class Reader(NamedTuple):
    phase: int = IDLE
    acked: int = 0
    """How many records were acknowledged when it began."""
    begin: int = 0
    """The first number that it has read by name without a look for the base since."""
    number: int = 0
    """The next number."""
    foul: bool = False
    """True if it has read by name what does not count."""


class State(NamedTuple):
    names: tuple[int, ...]
    """The record of each number; 0: the name is free; less than 0: one that was put before the base."""
    truth: tuple[int, ...]
    """All records in order: no part of the program knows it."""
    acked: int
    """How many of them at least one process has called appended."""
    base: int
    packs: tuple[tuple[int, ...], ...]
    """By block; empty: there is none."""
    appenders: tuple[Appender, ...]
    reader: Reader
    flying: frozenset[tuple[int, int]]
    """(number, record) of puts that may still arrive."""
    failed: frozenset[int]
    """(mutation) Records that were called not appended."""
    pruning: int
    """The base up to which records are being deleted; 0: no pruner runs."""
    appends: int
    prunes: int
    silences: int
    losses: int
    faults: int
    """How many of each are left."""
    lost: bool = False
    """True if a record was."""


class Bucket:
    """The machine.

    Args:
        appenders: Processes that append.
        appends: Records that all of them append together.
        prunes: How often a pruner begins.
        silences: Answers that get lost.
        losses: Records that fate loses.
        faults: Packs that it damages.
        readers: 1, or 0 to save states.
        block: Records of a block.
        begun: Records that are there.
        stand: Numbers of records after which the first appenders stand: they looked when there were no more.
        rules: What holds.
    """

    def __init__(
        self,
        appenders: int,
        appends: int,
        prunes: int = 1,
        silences: int = 1,
        losses: int = 0,
        faults: int = 0,
        readers: int = 1,
        block: int = 2,
        begun: int = 1,
        stand: tuple[int, ...] = (),
        rules: BucketRules = ALL_BUCKET_RULES,
    ) -> None:
        self.readers, self.block, self.begun, self.rules = readers, block, begun, rules
        fresh = (Appender(),) * (appenders - len(stand))
        self.appenders = (*(Appender(OVER, end) for end in stand), *fresh)
        self.appends, self.left = appends, (appends, prunes, silences, losses, faults)

    def start(self) -> State:
        packs: tuple[tuple[int, ...], ...] = ((),) * (self.begun + self.appends)
        nobody: frozenset[int] = frozenset()
        first = tuple(range(1, self.begun + 1))
        return State(first, first, len(first), 0, packs, self.appenders, Reader(), frozenset(), nobody, 0, *self.left)

    def steps(self, state: State) -> Iterator[tuple[str, State | Broken]]:
        for which, appender in enumerate(state.appenders):
            if which == 0 or appender.phase != NEW or state.appenders[which - 1].phase != NEW:
                yield from self._append(state, which, appender)
        for put in state.flying:
            arrived = _put(state._replace(flying=state.flying - {put}), *put)
            if arrived is not None:
                yield f"the late put of record {put[1]} arrives at number {put[0]}", arrived
        yield from self._prune(state)
        if self.readers:
            yield from self._read(state, state.reader)
        if state.losses:
            yield from self._lose(state)
        if state.faults:
            for block, pack in enumerate(state.packs):
                if pack and pack != DAMAGED:
                    damaged = _packed(state, block, DAMAGED)._replace(faults=state.faults - 1)
                    yield f"pack {block * self.block} is damaged", damaged

    def check(self, state: State) -> Broken | None:
        if wrong := state.failed & set(state.truth):
            return Broken("P2", f"record {min(wrong)} was called failed, and counts")
        return None

    # Appenders.

    def _append(self, state: State, which: int, mine: Appender) -> Iterator[tuple[str, State | Broken]]:
        """``ControlObjects.append``, request by request, and looks of a process that appends nothing at the moment."""
        name, number, record = f"appender {which + 1}", mine.end, mine.record
        if mine.to_pack >= 0:
            yield f"{name} packs block {mine.to_pack}", self._pack(state, which, mine)
        if mine.phase in (NEW, READY, OVER):
            looked = self._look(state, mine)
            if looked is not None:  # otherwise it is told what is wrong
                yield f"{name} looks", looked if isinstance(looked, Broken) else self._looked(state, which, looked)
        if mine.phase == OVER and state.appends:
            begun = mine._replace(phase=READY, record=self.begun + 1 + self.appends - state.appends)
            yield f"{name} is to append record {begun.record}", _with(state, which, begun, appends=state.appends - 1)
        if mine.phase == READY:
            yield from self._sends(state, which, mine)
        elif mine.phase in (SILENT, TAKEN):
            yield from self._asks(state, which, mine)
        elif mine.phase == PUT:
            yield from self._counts(state, which, mine)
        elif mine.phase == HOLE:
            names, garbage = state.names, state.names[number]
            kept = 0 if self.rules.hole_left else -KEPT - abs(garbage) % KEPT
            after = state._replace(names=(*names[:number], kept, *names[number + 1 :]))
            begun = self._begin(after, mine._replace(phase=READY))
            if begun is not None:
                told = begun if isinstance(begun, Broken) else _with(after, which, begun)
                yield f"{name} deletes its record {record} at number {number}, and looks again", told

    def _sends(self, state: State, which: int, mine: Appender) -> Iterator[tuple[str, State | Broken]]:
        what = f"appender {which + 1} puts record {mine.record} at number {mine.end}"
        free = mine.end >= len(state.names) or not state.names[mine.end] or not self.rules.created_once
        arrived = _put(state, mine.end, mine.record, mine.blind, overwrites=not self.rules.created_once)
        if arrived is not None:
            reached = mine._replace(phase=PUT if free else TAKEN)
            yield what if free else f"{what}, which is taken", _on(arrived, which, reached)
        if state.silences:
            silent, left = mine._replace(phase=SILENT), state.silences - 1
            if arrived is not None:
                yield f"{what}, and gets no answer", _on(arrived, which, silent, silences=left)
            flying = state.flying | {(mine.end, mine.record)}
            late = _with(state, which, silent, silences=left, flying=flying)
            yield f"{what}, which does not arrive yet", late

    def _asks(self, state: State, which: int, mine: Appender) -> Iterator[tuple[str, State | Broken]]:
        """``_after_silence``, or the read of a name that is taken."""
        what = f"appender {which + 1} asks for number {mine.end}"
        there = abs(state.names[mine.end]) if mine.end < len(state.names) else 0
        if there == mine.record:
            yield what, _with(state, which, mine._replace(phase=PUT))
        elif there:
            looked = self._look(state, mine._replace(phase=READY))
            if looked is not None:
                yield what, looked if isinstance(looked, Broken) else self._looked(state, which, looked)
        elif not self.rules.seen_before_next:
            arrived = _put(state, mine.end + 1, mine.record)
            if arrived is not None:
                after = _on(arrived, which, mine._replace(phase=PUT, end=mine.end + 1))
                yield f"{what}, finds nothing, and puts it at number {mine.end + 1}", after
        else:
            yield f"{what}, and finds nothing", self._knows_nothing(state, which, mine)

    def _knows_nothing(self, state: State, which: int, mine: Appender) -> State:
        """``CommitUnknownError``: the caller tries again."""
        if self.rules.silence_is_unknown:
            return _with(state, which, mine._replace(phase=READY))
        return _with(state, which, mine._replace(phase=OVER), failed=state.failed | {mine.record})

    def _counts(self, state: State, which: int, mine: Appender) -> Iterator[tuple[str, State | Broken]]:
        """The look for the base after a put that has arrived."""
        what, is_garbage = f"appender {which + 1} looks for the base", state.names[mine.end] < 0
        if state.base > mine.end and self.rules.base_after_put:
            yield what, _with(state, which, mine._replace(phase=HOLE))
        elif state.truth[mine.end : mine.end + 1] != (mine.record,):
            yield (
                what,
                Broken("P2", f"record {mine.record} is called appended at number {mine.end}, and nobody sees it"),
            )
        else:
            full = mine.end % self.block == self.block - 1
            done = mine._replace(phase=OVER, end=mine.end + 1, to_pack=mine.end - self.block + 1 if full else -1)
            yield (
                f"{what}, and record {mine.record} is appended",
                _with(state, which, done, acked=max(state.acked, done.end)),
            )
        if state.silences:
            after = self._knows_nothing(state._replace(silences=state.silences - 1), which, mine)
            wrong = is_garbage and not self.rules.noted_once_counted
            told = Broken("P2", f"it believes in record {mine.record} at number {mine.end}, which nobody sees")
            yield f"{what}, and gets no answer", told if wrong else after

    def _pack(self, state: State, which: int, mine: Appender) -> State | Broken:
        begin, done = mine.to_pack, mine._replace(to_pack=-1)
        known = state.truth[max(begin, mine.since) : begin + self.block]
        before = state.names[begin : max(begin, mine.since)] if not self.rules.packed_once_known else ()
        pack = (*(abs(each) for each in before if each), *known)
        after = _with(state, which, done)
        if len(pack) != self.block or state.packs[begin // self.block]:
            return after
        wrong = Broken("P2", f"pack {begin} says {list(pack)}, and a reader looks for no base after it")
        return _packed(after, begin // self.block, pack) if pack == state.truth[begin : begin + self.block] else wrong

    # Processes that go on where they stood.

    def _looked(self, state: State, which: int, mine: Appender) -> State:
        """What it has found out: also that its own record is there (``Control._is_there``)."""
        if mine.phase == READY and mine.record in state.truth[: mine.end]:
            acked = max(state.acked, state.truth.index(mine.record) + 1)
            return _with(state, which, mine._replace(phase=OVER), acked=acked)
        return _with(state, which, mine)

    def _look(self, state: State, mine: Appender) -> Appender | Broken | None:
        """``ControlObjects.read`` from where it stands. None: a loss is reported."""
        if mine.phase == NEW or not mine.end:  # one that knows no record starts over each time
            return self._begin(state, mine._replace(phase=OVER) if mine.phase == NEW else mine)
        number, names = mine.end, state.names
        while number < len(names) and names[number]:
            number += 1
        found = tuple(abs(each) for each in names[mine.end : number])
        if found and self.rules.base_after_read and state.base > mine.end:
            return self._begin(state, mine)
        if not found and self.rules.rest_asked and not names[mine.end - 1] and state.base != mine.end:
            return self._begin(state, mine) if state.base > mine.end else _told(state)
        if self.rules.next_asked and any(names[number + 1 : number + 2]):
            return self._begin(state, mine) if state.base > number else _told(state)
        if found != state.truth[mine.end : number]:
            return Broken("P2", f"number {mine.end} is read as {found[0]}, and was {state.truth[mine.end]}")
        beside = -KEPT < names[mine.end - 1] < 0
        if number < state.acked and not beside:
            return Broken("P15", f"{state.acked} records were acknowledged, and a process finds {number}")
        return mine._replace(end=number, blind=False)

    def _begin(self, state: State, mine: Appender) -> Appender | Broken | None:
        """It reads from the base on."""
        number = state.base
        while (record := self._at(state, number)) and record == state.truth[number : number + 1]:
            number += 1
        if record and record != (0,):
            return Broken("P2", f"number {number} is read as {record[0]}, and was {state.truth[number]}")
        if self._is_later(state, number):
            return _told(state)
        if number < state.acked:
            return Broken("P15", f"{state.acked} records were acknowledged, and a process finds {number}")
        return mine._replace(end=number, since=state.base, blind=False)

    def _at(self, state: State, number: int) -> tuple[int, ...]:
        """The record of a number, from its pack or by its name."""
        pack = state.packs[number // self.block] if number // self.block < len(state.packs) else ()
        if pack and (pack != DAMAGED or not self.rules.pack_whole):
            return (pack[number % self.block],) if pack != DAMAGED else (-1,)
        return (abs(state.names[number]),) if number < len(state.names) else ()

    def _is_later(self, state: State, number: int) -> bool:
        """Return whether a reader that finds nothing at a number is shown a later one."""
        if self.rules.gap_looked_for:
            packs = any(pack for block, pack in enumerate(state.packs) if block * self.block > number)
            return packs or any(state.names[number + 1 :])
        return self.rules.next_asked and any(state.names[number + 1 : number + 2])

    # The reader.

    def _read(self, state: State, mine: Reader) -> Iterator[tuple[str, State | Broken]]:
        """A process that begins: base, packs, records."""
        number = mine.number
        if mine.phase == IDLE:
            begun = Reader(READS, state.acked, state.base, state.base)
            yield f"the reader finds base {state.base}", state._replace(reader=begun)
        elif mine.phase == READS and number % self.block == 0 and number > mine.begin:
            yield "the reader has read a block, and looks for the base", self._check(state, mine)
        elif mine.phase == READS:
            yield from self._next(state, mine)
        else:
            what = f"the reader looks for records after number {number}"
            if not self._is_later(state, number) and self._name(state, number) and self.rules.names_tried:
                yield f"{what}, finds none, and reads on", state._replace(reader=mine._replace(phase=READS))
            elif not self._is_later(state, number):
                after = self._check(state, mine)
                if isinstance(after, State) and after.reader.phase != IDLE:
                    stale = Broken("P15", f"{mine.acked} records were acknowledged, and it finds {number}")
                    after = stale if number < mine.acked else after._replace(reader=Reader())
                yield f"{what}, finds none, and looks for the base", after
            elif self._name(state, number) and self.rules.gap_read_again:
                yield f"{what}, and reads on", state._replace(reader=mine._replace(phase=READS))
            elif state.base > number:
                yield f"{what}, and finds another base", state._replace(reader=Reader())
            else:
                told = _told(state)
                yield f"{what}, and reports a loss", told if told is not None else state._replace(reader=Reader())

    def _next(self, state: State, mine: Reader) -> Iterator[tuple[str, State | Broken]]:
        number, block = mine.number, mine.number // self.block
        pack = state.packs[block] if block < len(state.packs) else ()
        if pack and (pack != DAMAGED or not self.rules.pack_whole) and number == mine.begin:
            end = block * self.block + self.block
            found = pack[number % self.block :] if pack != DAMAGED else (-1,)
            wrong = Broken("P2", f"pack {block * self.block} says {list(found)}")
            right = state._replace(reader=mine._replace(begin=end, number=end))
            yield f"the reader reads pack {block * self.block}", right if found == state.truth[number:end] else wrong
        record, end = self._name(state, number), mine._replace(phase=ENDS)
        if not record:
            yield f"the reader finds nothing at number {number}", state._replace(reader=end)
            return
        foul = mine.foul or record != state.truth[number]
        yield f"the reader reads number {number}", state._replace(reader=mine._replace(number=number + 1, foul=foul))
        if not self.rules.names_tried or not self.rules.gap_read_again:
            yield f"the listing does not show number {number} yet", state._replace(reader=end)

    def _check(self, state: State, mine: Reader) -> State | Broken:
        """``_check_not_deleted``, before anything that was read by name is used."""
        if self.rules.base_after_read and state.base > mine.begin and mine.number > mine.begin:
            return state._replace(reader=Reader())
        if mine.foul:
            return Broken(
                "P2", f"the reader takes a put before the base for one of records {mine.begin} to {mine.number}"
            )
        return state._replace(reader=mine._replace(begin=mine.number))

    @staticmethod
    def _name(state: State, number: int) -> int:
        return abs(state.names[number]) if number < len(state.names) else 0

    # The pruner, and fate.

    def _prune(self, state: State) -> Iterator[tuple[str, State]]:
        """``ControlObjects.prune``: a snapshot covers all records before a record that is there."""
        if not state.pruning:
            for base in range(state.base + 1, len(state.truth)):
                if state.prunes and state.names[base] > 0:
                    begun = state._replace(pruning=base, prunes=state.prunes - 1)
                    written = begun._replace(base=base) if self.rules.base_first else begun
                    yield f"a pruner writes base {base}" if self.rules.base_first else "a pruner begins", written
            return
        doomed = [number for number in range(state.pruning) if state.names[number] > 0]
        if not doomed:
            blocks = enumerate(state.packs)
            packs = tuple(() if block * self.block + self.block <= state.pruning else pack for block, pack in blocks)
            yield "the pruner has deleted all", state._replace(base=state.pruning, pruning=0, packs=packs)
        for number in doomed[:1] if self.rules.oldest_first else doomed:
            names = (*state.names[:number], 0, *state.names[number + 1 :])
            yield f"the pruner deletes record {number}", state._replace(names=names)

    @staticmethod
    def _lose(state: State) -> Iterator[tuple[str, State]]:
        blind = tuple(each._replace(blind=True) for each in state.appenders)
        for number in range(state.base, len(state.names) - 1):
            if state.names[number] > 0:
                names = (*state.names[:number], 0, *state.names[number + 1 :])
                after = state._replace(names=names, appenders=blind, losses=state.losses - 1, lost=True)
                yield f"record {number} is lost", after


def _put(
    state: State, number: int, record: int, blind: bool = True, *, overwrites: bool = False
) -> State | Broken | None:
    """A put that arrives. None: it fills a gap that its appender could not know of, which is not modelled."""
    names, truth = state.names, state.truth
    if number < len(names) and names[number] and not overwrites:
        return state
    if number > len(truth):
        return Broken("P2", f"record {record} is at number {number}, and number {number - 1} is free")
    if number == len(truth):
        return state._replace(names=(*names, record), truth=(*truth, record))
    if number >= state.base and not names[number]:
        return None if blind else Broken("P2", f"record {record} fills the place of the lost record {number}")
    kept = record if overwrites and number >= state.base else -record
    return state._replace(names=(*names[:number], kept, *names[number + 1 :]))


def _told(state: State) -> Broken | None:
    """A process reports a lost record."""
    return None if state.lost else Broken("P2", "nothing was lost, and a read is refused")


def _packed(state: State, block: int, pack: tuple[int, ...]) -> State:
    return state._replace(packs=(*state.packs[:block], pack, *state.packs[block + 1 :]))


def _on(state: State | Broken, which: int, appender: Appender, **changed: int) -> State | Broken:
    return state if isinstance(state, Broken) else _with(state, which, appender, **changed)


def _with(state: State, which: int, appender: Appender, **changed: object) -> State:
    appenders = (*state.appenders[:which], appender, *state.appenders[which + 1 :])
    return state._replace(appenders=appenders, **changed)  # type: ignore[arg-type]
