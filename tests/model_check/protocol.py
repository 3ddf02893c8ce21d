"""The protocol between trainers, readers, the materializer and trims, as a machine small enough to try all of its runs.

Read it beside docs/format.md (the commit rule, the trim rule): each rule is named with the function that implements it
(`rules.py`). Who acts, each at any time and as slowly as it likes:

- a *trainer* restores the newest marker that is whole, claims the next generation, and makes markers: all ranks cut,
  send their rows and a MARK, vote; then it looks at the log, appends COMMIT, and reads back whether that counts;
- a *trim* sees that a store holds what the log will lack, appends a TRIM, and deletes;
- *fate* loses the acknowledged end of a stream, lets a frame come twice, or has somebody else write one.

A crash is a trainer that takes no further step; a zombie is one that takes its next step late. Both are in here because
every step may wait for ever. A COMMIT that nobody answers for stays in flight and lands at any later time.

What a rank sends for one cut is one entry: the intervals between cuts whose rows are in it, its MARK last. Interval 0
is the whole table. So a marker is exact if a reader gets the intervals up to it, each once, in order, of one writer.

Some steps are one here and many in the program, because nobody else can tell:

- the rows and the MARK of all ranks: others never read beyond the ends that a COMMIT names, and what a crash leaves of
  them is what a cut leaves that is given up after any set of ranks has sent;
- a CLAIM and reading it back, a COMMIT and reading it back: the place of the record decides, not when it is read;
- the look at the log and sending COMMIT: what is lost between them might as well be lost right after;
- folding of all markers and the TRIM that needs it: a fold only adds, and a check that is older than the TRIM
  lacks markers alone that end after it;
- deletions of one trim: each stream is judged by itself.

Control records that do not count are left out of the state: no later rule asks for them. In a file log each generation
has partitions of its own, on Kafka offsets go through all generations; the machine is built for one or the other.

Not modelled: bytes, clocks, tiers, dense files (durable before COMMIT, as MARKs are), gc, another number of ranks after
a restart, changes of tables. The control partition is one list that loses nothing, and that honest writers alone append
to: `snapshots.py` shows that snapshots keep it so, `records.py` what becomes of it without that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product

from tests.model_check.explore import Broken
from tests.model_check.readers import REFUSED, Readers
from tests.model_check.states import (
    CLAIMING,
    COMMITTING,
    EXACT,
    LOST,
    NEW,
    NEWER,
    NONE,
    OVER,
    RUNS,
    SENT,
    STRANGE,
    Claim,
    Column,
    Commit,
    End,
    Entry,
    Lineage,
    Marker,
    Partition,
    State,
    Trainer,
    Trim,
    Writer,
    holding,
    holds_last,
    in_order,
    name_of,
    with_trainer,
    writing,
)


class Protocol(Readers):
    """The machine: who acts, and what each step makes of a state."""

    def start(self) -> State:
        column = Column(
            (Partition(),) * (1 if self.kafka else self.generations),
            (Writer(),) * self.generations,
            (End(),) * (self.generations * self.markers),
        )
        return State((), (Trainer(),) * self.generations, (column,) * self.ranks, self.cuts, self.faults)

    def steps(self, state: State) -> Iterator[tuple[str, State | Broken]]:
        lineage = self.lineage(state)
        for which, trainer in enumerate(state.trainers):
            yield from self._trainer(state, lineage, which, trainer)
        yield from self._trim(state, lineage)
        yield from self._delete(state, lineage)
        if state.faults:
            yield from self._lose(state)

    def check(self, state: State) -> Broken | None:
        """Every committed marker restores exactly; unless fate took acknowledged data, none is refused."""
        lineage = self.lineage(state)
        for marker in lineage.commits:
            verdict = self.read(state, lineage, lineage.path(marker))
            if isinstance(verdict, Broken):
                return verdict
            if verdict == REFUSED and not state.lost:
                gone = any(partition.gone for column in state.columns for partition in column.partitions)
                return Broken("P10" if gone else "P1", f"marker {name_of(marker)} does not restore")
        return None

    # What a trainer does.

    def _trainer(
        self, state: State, lineage: Lineage, which: int, trainer: Trainer
    ) -> Iterator[tuple[str, State | Broken]]:
        name = f"trainer {which + 1}"
        if trainer.phase == NEW and (which == 0 or state.trainers[which - 1].phase != NEW):
            yield from self._restore(state, lineage, which)
        elif trainer.phase == CLAIMING:
            yield self._claim(state, lineage, which, trainer)
        elif trainer.phase == RUNS and state.cuts:
            yield from self._cut(state, lineage, which, trainer)
        elif trainer.phase == SENT:
            yield self._decide(state, lineage, which, trainer)
        elif trainer.phase == COMMITTING:
            what = f"{name}: COMMIT {trainer.generation}:{trainer.marker} lands"
            yield what, self._land(state, lineage, which, trainer, trainer.marker)
            if trainer.marker < self.markers:
                on = trainer._replace(phase=RUNS, marker=trainer.marker + 1, flying=trainer.marker)
                yield (
                    f"{name} waits no longer for COMMIT {trainer.generation}:{trainer.marker}",
                    with_trainer(state, which, on),
                )
        elif trainer.phase == LOST:
            yield from self._go_on(state, lineage, which, trainer)
        if trainer.flying:
            what = f"{name}: COMMIT {trainer.generation}:{trainer.flying} lands, late"
            yield what, self._land(state, lineage, which, trainer, trainer.flying)

    def _restore(self, state: State, lineage: Lineage, which: int) -> Iterator[tuple[str, State | Broken]]:
        """``choose``: the newest marker that is whole; nothing at all is a fresh start."""
        for marker in reversed(lineage.commits):
            verdict = self.read(state, lineage, lineage.path(marker))
            if verdict is None:
                yield f"trainer {which + 1} restores {name_of(marker)}", self._begin(state, lineage, which, marker)
                return
        if not lineage.commits:
            yield f"trainer {which + 1} begins from nothing", self._begin(state, lineage, which, NONE, swept=True)

    def _begin(self, state: State, lineage: Lineage, which: int, parent: Marker, *, swept: bool = False) -> State:
        trainer = Trainer(CLAIMING, lineage.newest_generation + 1, parent, swept)
        return with_trainer(state, which, trainer)

    def _claim(self, state: State, lineage: Lineage, which: int, trainer: Trainer) -> tuple[str, State | Broken]:
        """``Control.claim``."""
        what = f"trainer {which + 1} claims generation {trainer.generation}"
        first = trainer.generation > lineage.newest_generation
        if first:
            claim = Claim(trainer.generation, which, trainer.parent, trainer.swept)
            state = state._replace(control=(*state.control, claim))
        elif self.rules.claim_read_back:
            return f"{what}, too late", self._over(state, which)
        whole = trainer.swept and (trainer.parent == NONE or self.rules.swept_after_loss)
        columns = [writing(column, which, Writer(interval=0 if whole else 1)) for column in state.columns]
        return what, with_trainer(in_order(state, columns), which, trainer._replace(phase=RUNS, marker=1))

    def _cut(
        self, state: State, lineage: Lineage, which: int, trainer: Trainer
    ) -> Iterator[tuple[str, State | Broken]]:
        """All ranks cut; some may have sent their rows and MARK when the cut is given up."""
        what = f"trainer {which + 1} cuts marker {trainer.generation}:{trainer.marker}"
        more, state = trainer._replace(marker=trainer.marker + 1), state._replace(cuts=state.cuts - 1)
        if trainer.marker < self.markers and state.cuts:
            for sent in product((False, True), repeat=self.ranks):
                yield f"{what}, {sum(sent)} ranks send, it is given up", self._send(state, lineage, which, more, sent)
        sends = trainer._replace(phase=SENT)
        everybody, but_one = (True,) * self.ranks, (False, *(True,) * (self.ranks - 1))
        yield f"{what}, all ranks send", self._send(state, lineage, which, sends, everybody)
        if not self.rules.all_votes:
            yield f"{what}, one rank has not sent", self._send(state, lineage, which, sends, but_one)
        if not self.rules.one_cut or not self.rules.copy_on_write:
            yield (
                f"{what}, one rank sends rows of the next step",
                self._send(state, lineage, which, sends, everybody, newer=True),
            )
        if state.faults:
            faulty = state._replace(faults=state.faults - 1)
            for rank in range(self.ranks):
                yield f"{what}, a frame comes twice", self._send(faulty, lineage, which, sends, everybody, twice=rank)
                yield (
                    f"{what}, a stranger writes a frame",
                    self._send(faulty, lineage, which, sends, everybody, stranger=rank),
                )

    def _send(
        self,
        state: State,
        lineage: Lineage,
        which: int,
        trainer: Trainer,
        sent: Sequence[bool],
        *,
        newer: bool = False,
        twice: int = -1,
        stranger: int = -1,
    ) -> State | Broken:
        """Rows up to the cut, and the MARK, of the ranks in ``sent`` (``Publisher``)."""
        owner = lineage.owners[trainer.generation].trainer
        if owner != which and any(sent):
            return Broken("P4", f"two trainers write to the streams of generation {trainer.generation}")
        number = trainer.marker if trainer.phase == SENT else trainer.marker - 1
        lost, columns, place = False, [], self.partition(trainer.generation)
        for rank, column in enumerate(state.columns):
            writer, partition = column.writers[which], column.partitions[place]
            if not sent[rank]:
                if not self.rules.given_up_stays_marked and trainer.phase == RUNS:
                    column = writing(column, which, writer._replace(interval=number + 1))
                columns.append(column)
                continue
            if self.rules.acks_never_go_back and not holds_last(partition, which, writer):
                lost = True
                columns.append(column)
                continue
            entry = Entry(which, writer.seq, writer.interval, number, NEWER if newer and rank == 0 else EXACT)
            between = entry._replace(values=STRANGE) if rank == stranger else entry
            entries = (between, entry) if rank in (twice, stranger) else (entry,)
            lost = lost or (self.rules.gaps_looked_at and rank == stranger and writer.seq > 0)
            partition = Partition(partition.gone, (*partition.entries, *entries))
            begin = writer.begin if writer.seq else partition.end - 1
            column = writing(column, which, Writer(writer.seq + 1, begin, partition.end, number + 1))
            columns.append(holding(column, place, partition))
        return with_trainer(in_order(state, columns), which, trainer._replace(phase=LOST) if lost else trainer)

    def _decide(self, state: State, lineage: Lineage, which: int, trainer: Trainer) -> tuple[str, State | Broken]:
        """All votes are there: ``check_claimed``, then COMMIT is on its way."""
        name, generation = f"trainer {which + 1}", trainer.generation
        path, own = lineage.path(trainer.parent), Commit(generation, trainer.marker, which)
        there = self.there(state, lineage, path, own)
        if self.rules.log_asked and not there:
            what = f"{name} misses data in the log"
            if (
                not state.lost and generation == lineage.newest_generation
            ):  # a zombie's data may be dead: it is fenced next
                return what, Broken("P10", "nothing was lost, and no marker is committed any more")
            return what, with_trainer(state, which, trainer._replace(phase=LOST))
        what = f"{name} sends COMMIT {generation}:{trainer.marker}"
        at = which * self.markers + trainer.marker - 1
        columns = [
            column._replace(ends=(*column.ends[:at], End(writer.begin, writer.end, writer.seq), *column.ends[at + 1 :]))
            for column in state.columns
            for writer in [column.writers[which]]
        ]
        sent = with_trainer(in_order(state, columns), which, trainer._replace(phase=COMMITTING))
        verdict = self.read(sent, lineage, [*path, own])
        if isinstance(verdict, Broken):
            return what, verdict
        if verdict == REFUSED and generation == lineage.newest_generation:  # that of a fenced trainer will not count
            return what, Broken(
                "P1", f"COMMIT {generation}:{trainer.marker} is sent, and the log does not hold the marker"
            )
        return what, sent

    def _land(self, state: State, lineage: Lineage, which: int, trainer: Trainer, number: int) -> State | Broken:
        """COMMIT is in the control partition (``Lineage._commit``); whoever waits reads it back (``_is_there``)."""
        waits = number == trainer.marker and trainer.phase == COMMITTING
        commit, rules = Commit(trainer.generation, number, which), self.rules
        owner = lineage.owners[commit.generation].trainer == which
        fenced, late = commit.generation != lineage.newest_generation, commit[:2] <= lineage.newest
        counts = (owner or not rules.nonce_compared) and not (fenced and rules.fence)
        counts = counts and not (late and rules.late_commit_ignored)
        if counts:
            if fenced or not owner:
                return Broken("P4", f"marker {name_of(commit[:2])} of a trainer that does not own the job is committed")
            if late:
                return Broken(
                    "P15", f"{name_of(commit[:2])} is taken for the newest marker, after {name_of(lineage.newest)}"
                )
            state = state._replace(control=(*state.control, commit))
        elif waits and not rules.commit_read_back:
            return Broken("P2", f"marker {name_of(commit[:2])} is called committed, and is not")
        if not waits:
            return with_trainer(state, which, trainer._replace(flying=0))
        if not counts or number == self.markers:
            return self._over(state, which)
        return with_trainer(state, which, trainer._replace(phase=RUNS, marker=number + 1))

    def _go_on(
        self, state: State, lineage: Lineage, which: int, trainer: Trainer
    ) -> Iterator[tuple[str, State | Broken]]:
        """``_go_on_after_loss``: the same process claims another generation on the newest marker that the log holds."""
        following = next((new for new, other in enumerate(state.trainers) if other.phase == NEW), None)
        if lineage.newest_generation != trainer.generation:
            yield f"trainer {which + 1} is fenced", self._over(state, which)
        elif following is not None:
            held = (mark for mark in reversed(lineage.commits) if self.there(state, lineage, lineage.path(mark)))
            parent = next(held, NONE) if self.rules.held_parent else lineage.newest
            what = f"trainer {which + 1} goes on as {following + 1} from {name_of(parent)}"
            if not self.there(state, lineage, lineage.path(parent)):
                yield what, Broken("P1", "it goes on from a marker that the log does not hold")
                return
            yield what, self._begin(self._over(state, which), lineage, following, parent, swept=True)

    def _over(self, state: State, which: int) -> State:
        """Nothing is left of a trainer but what it wrote, and a COMMIT in flight."""
        trainer = state.trainers[which]
        over = Trainer(OVER, trainer.generation if trainer.flying else 0, flying=trainer.flying)
        return with_trainer(
            in_order(state, [writing(column, which, Writer()) for column in state.columns]), which, over
        )

    # What trims and fate do.

    def _trim(self, state: State, lineage: Lineage) -> Iterator[tuple[str, State | Broken]]:
        """``check_synced`` and ``Control.trim``: the store has every marker, then the TRIM is appended."""
        if sum(isinstance(record, Trim) for record in state.control) >= self.trims:
            return
        stored = self.rules.store_before_trim
        if stored and any(self.read(state, lineage, lineage.path(marker)) for marker in lineage.commits):
            return
        for upto in lineage.commits:
            trim = Trim(self._reach(lineage, upto), stored)
            if trim not in state.control:
                yield f"TRIM up to {name_of(upto)}", state._replace(control=(*state.control, trim))

    @staticmethod
    def _reach(lineage: Lineage, upto: Marker) -> tuple[Marker, ...]:
        """The newest marker of each generation, up to that one."""
        return tuple({marker[0]: marker for marker in sorted(lineage.commits) if marker <= upto}.values())

    def _delete(self, state: State, lineage: Lineage) -> Iterator[tuple[str, State | Broken]]:
        """``trim_range``: what the TRIMs name, and generations that are dead."""
        reach = lineage.reach
        if not self.rules.trim_recorded_first and lineage.commits:
            reach = {marker[0]: marker for marker in self._reach(lineage, lineage.newest)}
        if not reach:
            return
        columns = [self._trimmed(column, lineage, reach) for column in state.columns]
        if tuple(columns) != state.columns:
            yield "the trim deletes", in_order(state, columns)

    def _trimmed(self, column: Column, lineage: Lineage, reach: dict[int, Marker]) -> Column:
        """What is left of a rank's partitions. Kafka deletes from the front: what is kept ends it."""
        newest = {marker[0]: marker for marker in sorted(lineage.commits)}
        front, kept = 0, [column.partitions[0].end]
        for generation in lineage.owners:
            gone, last = reach.get(generation, NONE), newest.get(generation, NONE)
            upto = self.end(column, lineage.commits[gone]).end if gone != NONE else 0
            front = max(front, upto)
            if last > gone:
                kept.append(max(upto, self.end(column, lineage.commits[last]).begin))
            if not self.kafka:
                dead = generation < lineage.newest_generation and last <= gone
                partition = column.partitions[generation - 1]
                column = holding(column, generation - 1, partition.trim(partition.end if dead else upto))
        return holding(column, 0, column.partitions[0].trim(min(front, *kept))) if self.kafka else column

    def _lose(self, state: State) -> Iterator[tuple[str, State | Broken]]:
        """The last entry of a stream is gone, though it was acknowledged."""
        for rank, column in enumerate(state.columns):
            for place, partition in enumerate(column.partitions):
                if not partition.entries:
                    continue
                columns = [*state.columns]
                columns[rank] = holding(column, place, Partition(partition.gone, partition.entries[:-1]))
                after = state._replace(faults=state.faults - 1, lost=True)
                where = "a partition" if self.kafka else f"a stream of generation {place + 1}"
                yield f"the log loses the end of {where}", in_order(after, columns)
