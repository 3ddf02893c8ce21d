"""The control partition, its second copy and forged records, as a machine: nothing is invented, and no loss is silent.

`protocol.py` takes the control partition for one list that loses nothing and that honest writers alone append to. Here
a marker is only a number, and the list suffers. Who acts, each at any time and as slowly as it likes:

- *trainers* look whether the log is whole (``check_whole``), claim, commit and read back, and say END at their end;
- the *copy* takes what somebody has read back (``Copies``); it may stay behind for ever;
- a *trim* gives up a marker that is not the newest one (``trim_log``);
- *fate* takes the end of the list away, whatever was acknowledged;
- a *forger* without the commit key appends records with the nonces of others, which are public;
- the *operator* runs ``recover`` where a start is refused.

A trainer that had read beyond the end that was lost is *blind* until the list is put back: it appends, and does not
see what it has appended. A control partition that is gone as a whole has lost its end from the first record on. Not
modelled: NOTE, which decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tests.model_check.explore import Broken

Marker = tuple[int, int]
NONE: Marker = (0, 0)
FENCE, FORGER = -1, -2
"""Owners of generations that are no trainers."""
NEW, CLAIMING, RUNS, SENT, OVER = range(5)


@dataclass(frozen=True)
class RecordRules:
    """All on: what counts, and what is looked at first. One off: a mutation."""

    vouched: bool = True
    """Under a commit key, a record without a signature decides nothing (``Records._accept``)."""
    unsigned_taken: bool = True
    """The number of such a record is not given out again: somebody may write rows under it (``Lineage.disregard``)."""
    copy_asked: bool = True
    """Who claims or trims looks first whether the second copy knows newer records (``Control.check_copy``)."""
    rows_asked: bool = True
    """Who claims looks whether the log has rows of a generation that no record names (``check_whole``)."""
    copied_once_read: bool = True
    """A record is copied once it was read back (``Copies.heard``)."""
    one_history: bool = True
    """``recover`` puts records back only where the log is the beginning of what the copy has (``Known.put_into``)."""
    recover_fences: bool = True
    """It claims a number above all that are named anywhere, by rows too (``put_back``)."""
    end_waits: bool = True
    """Who says END has no COMMIT in flight (``StreamCheckpointer.close``)."""
    end_closes: bool = True
    """No COMMIT counts after END of its generation (``Lineage._commit``: ended)."""
    parents_kept: bool = True
    """A marker on which a generation stands is not given up (``Lineage._count``)."""
    path_asked: bool = True
    """No COMMIT is sent by a generation whose parent was given up before its CLAIM (``check_claimed``)."""


ALL_RECORD_RULES = RecordRules()


class Record(NamedTuple):
    kind: str
    """``claim``, ``commit``, ``end`` or ``give up``."""
    marker: Marker
    """(generation, number); of a CLAIM and an END the number is 0."""
    nonce: int
    signed: bool = True
    parent: Marker = NONE


class Trainer(NamedTuple):
    phase: int = NEW
    generation: int = 0
    parent: Marker = NONE
    marker: int = 0
    """The next one, or the one whose COMMIT is in flight."""
    flying: bool = False
    """(mutation) END was said, and a COMMIT is in flight."""
    blind: bool = False


class State(NamedTuple):
    log: tuple[Record, ...]
    copy: tuple[Record, ...]
    trainers: tuple[Trainer, ...]
    reported: frozenset[Marker]
    """What trainers have called committed."""
    gone: frozenset[Marker]
    """Those of them of which fate has taken every record: nobody can know of them."""
    rows: frozenset[tuple[int, int]]
    """(generation, who has written rows under it)."""
    commits: int
    losses: int
    forgeries: int
    trims: int
    """How many of each are left."""
    shaken: bool = False
    """Whether something was lost or forged."""


@dataclass
class Fold:
    owners: dict[int, Record]
    commits: dict[Marker, Record]
    given_up: set[Marker]
    ended: set[int]
    taken: int
    counted: tuple[Record, ...]
    broken: Broken | None = None

    @property
    def newest_generation(self) -> int:
        return max(self.owners, default=0)

    @property
    def next(self) -> int:
        return max(self.newest_generation, self.taken) + 1

    @property
    def newest(self) -> Marker:
        return next(reversed(self.commits), NONE)

    def path_is_there(self, marker: Marker) -> bool:
        while marker != NONE and marker in self.commits:
            marker = self.owners[marker[0]].parent
        return marker == NONE


class Records:
    """The machine.

    Args:
        trainers: How many may start.
        commits: Of all of them together.
        losses: Of fate.
        forgeries: Of the forger.
        trims: Of all.
        rules: What holds.
    """

    def __init__(
        self,
        trainers: int,
        commits: int,
        losses: int = 1,
        forgeries: int = 1,
        trims: int = 1,
        rules: RecordRules = ALL_RECORD_RULES,
    ) -> None:
        self.trainers, self.commits, self.rules = trainers, commits, rules
        self.losses, self.forgeries, self.trims = losses, forgeries, trims
        self._folds: dict[tuple[Record, ...], Fold] = {}

    def start(self) -> State:
        nothing: frozenset[Marker] = frozenset()
        left = (self.commits, self.losses, self.forgeries, self.trims)
        return State((), (), (Trainer(),) * self.trainers, nothing, nothing, frozenset(), *left)

    def steps(self, state: State) -> Iterator[tuple[str, State | Broken]]:
        fold = self.fold(state.log)
        for which, trainer in enumerate(state.trainers):
            yield from self._trainer(state, fold, which, trainer)
        yield from self._copy(state, fold)
        yield from self._trim(state, fold)
        yield from self._recover(state, fold)
        if state.losses:
            yield from self._lose(state)
        if state.forgeries:
            yield from self._forge(state, fold)

    def check(self, state: State) -> Broken | None:
        """What counts was written by its owner, stands on what is there, and what was reported is known to somebody."""
        fold = self.fold(state.log)
        if fold.broken is not None:
            return fold.broken
        for marker in fold.commits:
            if not fold.path_is_there(marker):
                return Broken("P11", f"marker {_name(marker)} is offered, and what it stands on was given up")
        if not state.shaken:
            if self._is_lost(state, fold):
                return Broken("P2", "nothing was lost, and a start is refused")
            if missing := state.reported - fold.commits.keys() - fold.given_up:
                return Broken("P2", f"marker {_name(min(missing))} was committed, and is not offered")
        return None

    # What readers do.

    def fold(self, log: tuple[Record, ...]) -> Fold:
        found = self._folds.get(log)
        if found is None:
            found = self._folds[log] = self._fold(log)
        return found

    def _fold(self, log: Sequence[Record]) -> Fold:
        """``Lineage.apply``, under a commit key."""
        fold = Fold({}, {}, set(), set(), 0, ())
        for record in log:
            generation, counts = record.marker[0], False
            if not record.signed and self.rules.vouched:
                fold.taken = max(fold.taken, generation if self.rules.unsigned_taken else 0)
                continue
            if record.kind == "claim":
                counts = generation > fold.newest_generation
                if counts:
                    fold.owners[generation] = record
            elif record.kind == "give up":
                parents = {claim.parent for claim in fold.owners.values()} if self.rules.parents_kept else set()
                counts = record.marker in fold.commits and record.marker not in parents
                if counts:
                    del fold.commits[record.marker]
                    fold.given_up.add(record.marker)
            else:
                owner = fold.owners.get(generation)
                owns = owner is not None and owner.nonce == record.nonce and generation == fold.newest_generation
                if record.kind == "end":
                    counts = owns
                    fold.ended |= {generation} if owns else set()
                else:
                    ended = generation in fold.ended
                    counts = owns and record.marker > fold.newest and not (ended and self.rules.end_closes)
                    if counts:
                        fold.commits[record.marker] = record
                    if counts and ended:
                        fold.broken = Broken("P2", f"{_name(record.marker)} is committed after its trainer's last word")
            if counts:
                fold.counted = (*fold.counted, record)
            if counts and not record.signed:
                fold.broken = Broken("P4", f"a {record.kind} that somebody without the key has written counts")
        return fold

    def _is_lost(self, state: State, fold: Fold) -> bool:
        """What a start refuses: records that the copy alone has, rows that no record speaks of."""
        ahead = self.rules.copy_asked and not _begins(fold.counted, state.copy)
        return ahead or (self.rules.rows_asked and max(state.rows, default=(0, 0))[0] >= fold.next)

    # Who writes.

    def _trainer(self, state: State, fold: Fold, which: int, mine: Trainer) -> Iterator[tuple[str, State | Broken]]:
        name = f"trainer {which + 1}"
        if mine.phase == NEW and (which == 0 or state.trainers[which - 1].phase != NEW):
            if not self._is_lost(state, fold):
                yield f"{name} restores {_name(fold.newest)}", self._begin(state, fold, which)
        elif mine.phase == CLAIMING:
            yield self._claim(state, which, mine)
        elif mine.phase == RUNS:
            if state.commits and (not self.rules.path_asked or fold.path_is_there(mine.parent)):
                sent = mine._replace(phase=SENT)
                yield f"{name} sends COMMIT {mine.generation}:{mine.marker}", _with(state, which, sent)
            yield self._end(state, which, mine)
        elif mine.phase == SENT or mine.flying:
            yield self._land(state, which, mine)
            if mine.phase == SENT and not self.rules.end_waits:
                yield self._end(state, which, mine._replace(flying=True))

    def _begin(self, state: State, fold: Fold, which: int) -> State | Broken:
        for marker in sorted(state.reported - state.gone - fold.commits.keys() - fold.given_up):
            return Broken("P2", f"a job begins from {_name(fold.newest)}, and {_name(marker)} was committed")
        parent = fold.newest
        return _with(state, which, Trainer(CLAIMING, fold.next, parent, parent[1] + 1))

    def _claim(self, state: State, which: int, mine: Trainer) -> tuple[str, State | Broken]:
        """``Control.claim``."""
        what, number = f"trainer {which + 1} claims generation {mine.generation}", (mine.generation, 0)
        record = Record("claim", number, which, parent=mine.parent)
        after = state._replace(log=(*state.log, record))
        owner = self.fold(after.log).owners.get(mine.generation)
        if mine.blind or owner != record:
            return f"{what}, and does not see it", _with(after, which, mine._replace(phase=OVER))
        return what, self._writes(_with(after, which, mine._replace(phase=RUNS)), mine.generation, which)

    def _writes(self, state: State, generation: int, who: int) -> State | Broken:
        if any(number == generation and other != who for number, other in state.rows):
            return Broken("P4", f"two write to the streams of generation {generation}")
        return state._replace(rows=state.rows | {(generation, who)})

    def _land(self, state: State, which: int, mine: Trainer) -> tuple[str, State]:
        marker = (mine.generation, mine.marker)
        record = Record("commit", marker, which)
        after = state._replace(log=(*state.log, record), commits=max(0, state.commits - 1))
        seen = not mine.blind and self.fold(after.log).commits.get(marker) == record
        if seen:
            after = after._replace(reported=after.reported | {marker})
        on = (
            mine._replace(phase=RUNS, marker=mine.marker + 1) if seen and not mine.flying else mine._replace(phase=OVER)
        )
        said = "" if seen else ", and does not count it"
        return f"trainer {which + 1}: COMMIT {_name(marker)} lands{said}", _with(
            after, which, on._replace(flying=False)
        )

    def _end(self, state: State, which: int, mine: Trainer) -> tuple[str, State]:
        record = Record("end", (mine.generation, 0), which)
        after = state._replace(log=(*state.log, record))
        return f"trainer {which + 1} says END", _with(after, which, mine._replace(phase=OVER))

    def _copy(self, state: State, fold: Fold) -> Iterator[tuple[str, State]]:
        """By whoever has read on: nobody who is blind, and nobody who has not looked at the copy first."""
        writers = [each for each in state.trainers if each.phase in (RUNS, SENT) and not each.blind]
        if not writers or not _begins(fold.counted, state.copy):
            return
        copied = fold.counted
        if not self.rules.copied_once_read:
            copied += tuple(
                Record("commit", (each.generation, each.marker), which)
                for which, each in enumerate(state.trainers)
                if each.phase == SENT
            )
        if copied != state.copy:
            yield "what counts is copied", state._replace(copy=copied)

    def _trim(self, state: State, fold: Fold) -> Iterator[tuple[str, State]]:
        if not state.trims or (self.rules.copy_asked and not _begins(fold.counted, state.copy)):
            return
        for marker in fold.commits:
            if marker != fold.newest:
                log = (*state.log, Record("give up", marker, 0))
                yield f"a TRIM gives up {_name(marker)}", state._replace(log=log, trims=state.trims - 1)

    def _recover(self, state: State, fold: Fold) -> Iterator[tuple[str, State | Broken]]:
        """``put_back``: what the copy has behind the end of the log, then a CLAIM above every number."""
        rows = max(state.rows, default=(0, 0))[0]
        if _begins(fold.counted, state.copy) and rows < fold.next:
            return
        same = _begins(state.copy, fold.counted) or _begins(fold.counted, state.copy)
        if self.rules.one_history and not same:
            return  # it is refused by name
        log = (*state.log, *(each for each in state.copy if each not in fold.counted))
        after = self.fold(log)
        if self.rules.recover_fences:
            named = max(rows, after.next - 1, *(each.marker[0] for each in state.copy), 0)
            log = (*log, Record("claim", (named + 1, 0), FENCE, parent=after.newest))
        after = self.fold(log)
        what = "recover puts the log back"
        known = {each.marker for each in state.copy if each.kind == "commit"}
        given_up = {each.marker for each in state.copy if each.kind == "give up"}
        if missing := known - given_up - after.commits.keys() - after.given_up:
            yield what, Broken("P13", f"the copy has {_name(min(missing))}, and it is not offered")
            return
        trainers = tuple(each._replace(blind=False) for each in state.trainers)
        done = state._replace(log=log, copy=after.counted, trainers=trainers)
        yield what, Broken("P13", "a start is refused all the same") if self._is_lost(done, after) else done

    # Who does harm.

    def _lose(self, state: State) -> Iterator[tuple[str, State]]:
        for left in range(len(state.log)):
            log = state.log[:left]
            held = {each.marker for each in (*self.fold(log).counted, *state.copy) if each.kind == "commit"}
            trainers = tuple(each._replace(blind=each.phase in (CLAIMING, RUNS, SENT)) for each in state.trainers)
            after = state._replace(log=log, trainers=trainers, losses=state.losses - 1, shaken=True)
            gone = state.gone | (state.reported - held)
            yield f"the log loses its last {len(state.log) - left} records", after._replace(gone=gone)

    def _forge(self, state: State, fold: Fold) -> Iterator[tuple[str, State | Broken]]:
        after = state._replace(forgeries=state.forgeries - 1, shaken=True)
        last = fold.owners.get(fold.newest_generation)
        made = [Record("claim", (fold.next, 0), FORGER, signed=False)]
        if last is not None:
            number = (fold.newest_generation, fold.newest[1] + 1)
            made += [
                Record("commit", number, last.nonce, signed=False),
                Record("end", last.marker, last.nonce, signed=False),
            ]
        made += [Record("give up", marker, 0, signed=False) for marker in fold.commits if marker != fold.newest]
        for record in made:
            forged = after._replace(log=(*after.log, record))
            what = f"somebody without the key appends a {record.kind} of {_name(record.marker)}"
            # Whoever claims without the key may be honest, look whether there are rows, and write. If a trainer is
            # about to claim that very number, that is the stranger of protocol.py: gaps are looked at.
            free = all(generation < fold.next for generation, _ in state.rows)
            claims = (
                record.kind == "claim"
                and free
                and not any(each.phase == CLAIMING and each.generation == fold.next for each in state.trainers)
            )
            yield what, self._writes(forged, record.marker[0], FORGER) if claims else forged


def _begins(whole: Sequence[Record], begin: Sequence[Record]) -> bool:
    return tuple(whole[: len(begin)]) == tuple(begin)


def _name(marker: Marker) -> str:
    return f"{marker[0]}:{marker[1]}" if marker != NONE else "nothing"


def _with(state: State, which: int, trainer: Trainer) -> State:
    return state._replace(trainers=(*state.trainers[:which], trainer, *state.trainers[which + 1 :]))
